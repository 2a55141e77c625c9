"""The comparisons run, agree before they time, and say what is missing. No figure is judged."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bench

ROOT = Path(__file__).resolve().parent.parent


def run(*words, cwd):
    return subprocess.run([sys.executable, str(ROOT / "bench.py"), *map(str, words)], cwd=cwd,
                          text=True, capture_output=True)


def rows_of(command, *words, cwd):
    done = run(command, "--quick", "--json", "rows.json", "--plot", "rows.png", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert (cwd / "rows.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((cwd / "rows.json").read_text())
    assert report["quick"] and {"processor", "numpy", "torch"} <= set(report["machine"])
    return report["rows"], done.stdout


def test_train(tmp_path):
    rows, table = rows_of("train", cwd=tmp_path)
    assert [row["workload"] for row in rows] == ["mlp", "lenet"]
    for row in rows:
        assert row["workload"] in table
        ours, theirs = row["losses"]["minidist"], row["losses"]["torch"]
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        assert len(ours) == 3 + 3 * 3                     # to compare; three rounds of three steps
        for key in ("minidist", "torch", "ratio"):
            assert 0 < row[key]["low"] <= row[key]["median"] <= row[key]["high"]


def test_ops(tmp_path):
    rows, table = rows_of("ops", cwd=tmp_path)
    assert [(row["op"], row["elements"]) for row in rows] == [
        (name, elements) for elements in ("10", "1K") for name in ("mul", "tanh")]
    assert table.count("geometric mean") == 2
    for row in rows:
        assert row["minidist to floor"]["median"] > 0 < row["torch to floor"]["median"]


def test_wrong_gradients_are_not_timed(monkeypatch):
    class Side:
        def __init__(self, gradient):
            self.gradient = gradient

        def ask(self, question, path, **_):
            assert question == "gradients"
            with open(path, "wb") as file:
                np.savez(file, self.gradient)

        def end(self):
            pass

    sides = iter([Side(np.ones(3)), Side(np.full(3, 1.01)), Side(None)])
    monkeypatch.setattr(bench, "Crew", lambda *_, **__: next(sides))
    with pytest.raises(bench.BenchError, match="mul of 10: nothing was timed"):
        bench.ops_one("mul", "10", 1, set(), bench.parse(["ops", "--quick"]))


def test_allreduce(tmp_path):
    rows, table = rows_of("allreduce", cwd=tmp_path)
    names = ["gloo", "pipe", "shm", "tcp", "udp"]
    assert [(row["size"], row["transport"]) for row in rows] == [
        (size, name) for size in ("1KB", "64KB") for name in names]
    assert {row["ratio"]["median"] for row in rows if row["transport"] == "gloo"} == {1.0}
    assert all(name in table for name in names)


def test_network(tmp_path):
    rows, table = rows_of("network", "--links", "shm", "udp-nokey-single", cwd=tmp_path)
    names = ["tcp", "shm", "udp-nokey-single"]            # tcp is what the others are held against
    assert [(row["link"], row["what"]) for row in rows] == [
        (name, what) for name in names for what in ("ping", "stream")]
    assert {row["ratio"]["median"] for row in rows if row["link"] == "tcp"} == {1.0}
    assert all(name in table for name in names)


def test_parallel(tmp_path):
    rows, table = rows_of("parallel", cwd=tmp_path)
    assert [(row["model"], row["side"]) for row in rows] == [
        ("mlp", side) for side in ("torch", "tcp", "shm", "naive")]
    assert {row["ratio"]["median"] for row in rows if row["side"] == "torch"} == {1.0}
    assert "naive" in table


class Scripted:
    """A crew that trains by a script: its losses, then its parameters."""

    def __init__(self, losses, weight):
        self.losses, self.weight = losses, weight

    def ask(self, question, path=None, **_):
        if question == "steps":
            return [{"losses": self.losses}]
        with open(path, "wb") as file:
            np.savez(file, weight=np.array([1.0, self.weight], np.float32))
        return [None]


@pytest.mark.parametrize("losses, weight, complaint", [
    ([2.0, 1.5, 1.0], 2.0, None),
    ([2.0, 1.5, 1.0 + 1e-4], 2.0, "losses of the first steps differ"),
    ([2.0, 1.5, float("nan")], 2.0, "losses of the first steps differ"),
    ([2.0, 1.5, 1.0], 2.0 + 1e-3, "weight differs by"),
    ([2.0, 1.5, 1.0], float("nan"), "weight differs by"),
])
def test_nothing_is_timed_when_values_differ(losses, weight, complaint):
    sides = {"minidist": Scripted(losses, weight), "torch": Scripted([2.0, 1.5, 1.0], 2.0)}
    if complaint is None:
        bench.check_training("mlp", sides)
    else:
        with pytest.raises(bench.BenchError, match=complaint):
            bench.check_training("mlp", sides)


def test_a_wrong_sum_is_not_timed():
    class Wrong:
        def ask(self, question, **_):
            assert question == "check"
            return [True, False]

    with pytest.raises(bench.BenchError, match="gloo, 2 ranks, 1KB.*the sum is wrong"):
        bench.allreduce_one("1KB", 2, {"gloo": Wrong()}, bench.parse(["allreduce", "--quick"]))


def test_a_missing_extra_comes_with_its_command(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError")
    program = f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT)]}\n" \
              "import bench; sys.exit(bench.main(['train', '--quick']))"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert done.returncode == 1
    assert "needs torch" in done.stderr and "pip install '.[bench]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_does_not_come_up(capfd):
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(bench.BenchError, match="1 of 1 processes did not come up"):
        bench.Crew("torch mlp", command)
    assert "no such model" in capfd.readouterr().err


def test_a_process_that_fails_says_so(tmp_path):
    (tmp_path / "crew.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import bench\n"
        "bench.serve(0, divide=lambda a, b: a / b)\n")
    with bench.crews({"x": lambda: bench.Crew("x", [sys.executable, str(tmp_path / "crew.py")])
                      }) as crews:
        assert crews["x"].ask("divide", a=1, b=4) == [0.25]
        with pytest.raises(bench.BenchError, match="x, process 0, asked to divide:(.|\n)*Zero"):
            crews["x"].ask("divide", a=1, b=0)
        assert crews["x"].ask("divide", a=1, b=2) == [0.5]
    assert crews["x"].process.returncode == 0


@pytest.mark.parametrize("words, complaint", [
    (["train", "--models", "gpt9"], "invalid choice: 'gpt9'"),
    (["train", "--rounds", "0"], "must be at least 1"),
    ([], "COMMAND"),
])
def test_bad_options(words, complaint, capsys):
    with pytest.raises(SystemExit):
        bench.parse(words)
    assert complaint in capsys.readouterr().err


def test_help_teaches(capsys):
    for words in (["--help"], *([name, "--help"] for name in bench.COMMANDS)):
        with pytest.raises(SystemExit) as end:
            bench.parse(words)
        assert end.value.code == 0
    text = capsys.readouterr().out
    assert "take turns" in text and "ratio" in text and "%%" not in text


def test_strategies(tmp_path):
    rows, table = rows_of("strategies", "--strategies", "sync", "ssp", cwd=tmp_path)
    runs = [row for row in rows if "curve" in row]
    assert len(runs) == 2 * (len(bench.CLUSTERS) + 2)
    for row in runs:
        assert len(row["curve"]) == 2 and row["seconds"] >= row["curve"][-1][0] > 0
    sync, ssp = runs[:2]
    assert sync["staleness"] == 0 < ssp["staleness"] and sync["megabytes"] > ssp["megabytes"] > 0
    found = {row["expected"]: row["true"] for row in rows if "expected" in row}
    assert found["stragglers: bounded staleness is faster than sync"] is True
    assert all(f"{'true ' if true else 'FALSE'}  {text}" in table for text, true in found.items())
