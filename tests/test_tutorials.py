"""Tutorials and the README say what they print, and this is what they print.

In a tutorial the lines that begin with `#>` must come out, in order, as they stand;
`...` in them stands for what differs from run to run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))


def run(*command, cwd):
    # An installed minidist must not stand in for the one here.
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, text=True,
                          capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def promised(source):
    return [line[3:] for line in source.splitlines() if re.match("#> ", line)]


def assert_printed(output, lines):
    """The lines are the output, save for what `...` covers."""
    printed = output.splitlines()
    for number, line in enumerate(lines):
        pattern = ".*".join(map(re.escape, line.rstrip().split("...")))
        found = printed[number].rstrip() if number < len(printed) else "nothing"
        assert re.fullmatch(pattern, found), f"promised: {line}\nprinted:  {found}"
    assert len(printed) == len(lines), f"printed beyond the promise: {printed[len(lines):]}"


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_prints_what_it_says(tutorial, tmp_path):
    source = tutorial.read_text(encoding="utf-8")
    lines = promised(source)
    assert len(lines) > 5
    assert_printed(run(str(tutorial), cwd=tmp_path), lines)
    assert max(map(len, source.splitlines())) <= 100


def test_tutorials_use_the_public_api_alone():
    for tutorial in TUTORIALS:
        source = tutorial.read_text(encoding="utf-8")
        assert not re.search(r"\b(md|dist|nn|train|model)(\.\w+)*\._[a-z]", source), tutorial
        assert "minidist_transports" not in source, tutorial
