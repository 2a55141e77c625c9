"""What a stranger installs: the wheel and the source archive, in empty environments
on the oldest and the newest Python of this machine, and the single file alone.

Building and installing reach the package index. Without it these tests are skipped,
except under CI, where a skipped promise would go unnoticed.
"""

import glob
import gzip
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "minidist.py").read_text(), re.M)[1]
OURS = {"minidist.py", "minidist_transports", "minidist_tutorials"}

pytestmark = pytest.mark.timeout(600)


def run(*command, cwd, code=0, **env):
    """The output of a command, its errors included; it must end with the exit code.

    What the tests' own environment says of Python must not leak in."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=clean | env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == code, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def online(*command, cwd):
    """Like run, for commands that need the package index."""
    try:
        return run(*command, cwd=cwd)
    except AssertionError as error:
        if "CI" in os.environ or not re.search("connection|resolve|unreachable", str(error)):
            raise
        pytest.skip("the package index is out of reach")


def pythons():
    """The oldest and the newest Python here that minidist promises to run on."""
    places = [f"{folder}/python3.[0-9]*" for folder in os.get_exec_path()]
    places.append(os.path.expanduser("~/.pyenv/versions/3.*/bin/python3.[0-9]*"))
    found = {sys.version_info[:3]: sys.executable}
    ask = "import ensurepip, sys; print(sys.version_info.releaselevel, *sys.version_info[:3])"
    for path in sorted(path for place in places for path in glob.glob(place)):
        if not re.fullmatch(r"python3\.\d+", Path(path).name):
            continue                                      # python3.11-config and the like
        answer = subprocess.run([path, "-c", ask], text=True, capture_output=True)
        level, *version = answer.stdout.split() or ["none"]
        if answer.returncode == 0 and level == "final":
            found.setdefault(tuple(map(int, version)), path)
    found = {version: path for version, path in found.items() if version >= (3, 11)}
    return {".".join(map(str, v)): found[v] for v in sorted({min(found), max(found)})}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(source archive, wheel). The wheel is built from the archive, which so
    proves to be complete; and from a copy, so that nothing is left in the tree."""
    copy, out = tmp_path_factory.mktemp("copy") / "minidist", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__"))
    online(sys.executable, "-m", "build", "--outdir", out, copy, cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


PYTHONS = pythons()


def environment(version, where, *packages):
    """The Python of a new environment with these packages."""
    run(PYTHONS[version], "-m", "venv", where, cwd=where.parent)
    python = where / "bin" / "python"
    online(python, "-m", "pip", "install", *packages, cwd=where)
    return python


@pytest.fixture(scope="module", params=PYTHONS)
def bare(request, tmp_path_factory):
    """NumPy alone: the oldest that minidist promises, where this Python has it."""
    numpy = "numpy==2.0.*" if request.param.startswith("3.11") else "numpy>=2.0"
    return environment(request.param, tmp_path_factory.mktemp("bare") / "env", numpy)


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request, archives, tmp_path_factory):
    wheel = f"minidist[plot] @ {archives[1].as_uri()}"
    return environment(request.param, tmp_path_factory.mktemp("installed") / "env", wheel)


def test_source_archive_is_complete(archives):
    with tarfile.open(archives[0]) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    for name in ["minidist.py", "transports/protocol.py", "tutorials/data/digits.csv.gz",
                 "tests/test_package.py", "bench.py", "README.md", "PROTOCOL.md", "LICENSE"]:
        assert name in names
    ours = {str(path.relative_to(ROOT)) for folder in ("tests", "transports", "tutorials")
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"}
    assert ours <= names


def test_wheel_takes_no_common_name(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        tops = {name.partition("/")[0] for name in wheel.namelist()}
        metadata = wheel.read(f"minidist-{VERSION}.dist-info/METADATA").decode()
    assert tops == OURS | {f"minidist-{VERSION}.dist-info"}
    metadata = Parser().parsestr(metadata)
    needs = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert needs == ["numpy>=2.0"]
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"


def test_single_file_in_an_empty_folder(bare, tmp_path):
    shutil.copy(ROOT / "minidist.py", tmp_path)
    assert VERSION in run(bare, "minidist.py", "--version", cwd=tmp_path)
    assert "train" in run(bare, "minidist.py", "--help", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["minidist.py"]
    for command in (["launch", "--help"], ["keygen", "--help"], ["conformance", "--help"],
                    ["train", "--workers", "2", "--data", "segments"],
                    ["train", "--transport", "udp", "--data", "segments"]):
        said = run(bare, "minidist.py", *command, cwd=tmp_path, code=2)
        assert "copy it to" in said and "Traceback" not in said


def test_transports_beside_the_single_file(bare, tmp_path):
    shutil.copy(ROOT / "minidist.py", tmp_path)
    shutil.copytree(ROOT / "transports", tmp_path / "transports")
    program = ("import minidist as md\n"
               "def total():\n"
               "    md.distributed.init_process_group()\n"
               "    x = md.tensor([1.0 + md.distributed.get_rank()])\n"
               "    md.distributed.all_reduce(x)\n"
               "    return x.tolist()\n"
               "if __name__ == '__main__':\n"
               "    print(md.launch(total, workers=2, transport='pipe'))\n")
    (tmp_path / "program.py").write_text(program)
    assert run(bare, "program.py", cwd=tmp_path) == "[[3.0], [3.0]]\n"


def test_installed(installed, tmp_path):
    site = Path(run(installed, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                    cwd=tmp_path).strip())
    tops = {path.name for path in site.iterdir()}
    assert OURS <= tops
    assert not {"transports", "tutorials", "tests", "bench.py"} & tops

    command = installed.parent / "minidist"
    assert VERSION in run(command, "--version", cwd=tmp_path)
    assert "train" in run(command, "--help", cwd=tmp_path)
    names = "import minidist.nn as nn, minidist_transports, minidist_transports.protocol"
    run(installed, "-c", names, cwd=tmp_path)
    with gzip.open(site / "minidist_tutorials" / "data" / "digits.csv.gz", "rt") as digits:
        rows = [line.split(",") for line in digits]
    assert len(rows) == 1797 and {len(row) for row in rows} == {65}
    assert "CC BY 4.0" in (site / "minidist_tutorials" / "data" / "README.md").read_text()


def test_main_job_of_the_readme(installed, tmp_path):
    """The line that strangers try first, as it stands there, once it is installed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    install, _, job = re.search("^ *(python3 -m venv .*) && (.venv/bin/minidist) train (.*)$",
                                readme, re.M).groups()
    assert install.endswith(".venv/bin/pip install '.[plot]'")
    output = run(installed.parent / "minidist", "train", *shlex.split(job), cwd=tmp_path)
    assert (tmp_path / "digits.safetensors").stat().st_size > 10_000
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    accuracy = max(map(float, re.findall(r"(\d+\.\d+) ?%", output)))
    assert accuracy >= 98.0, output
