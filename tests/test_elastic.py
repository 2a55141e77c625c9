"""Runs that stop and go on: checkpoints, SIGTERM, workers and servers that are lost and replaced.

What "goes on" means is always the same here: the bits of a run that was never disturbed.
"""
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minidist as md
from memory import on_ranks
from minidist import nn
from minidist.utils.data import DataLoader, TensorDataset
from test_launch import alive, mark, wait_for  # noqa: F401  mark is a fixture
from test_train import worker

ROOT = Path(__file__).resolve().parent.parent


class Stopped(BaseException):
    """What an undisturbed program never sees: not even `except Exception` does."""


def net():
    """Dropout draws random numbers, batch norm has buffers, and Adam remembers much."""
    md.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3),
                         nn.Linear(8, 2)).to(np.float64)


def data(count, seed):
    draw = np.random.default_rng(seed)
    return TensorDataset(md.tensor(draw.standard_normal((count, 4))),
                         md.tensor(draw.standard_normal((count, 2))))


def training(group, path, stop_at=None, epochs=3, every=1, plain=False):
    """A program of its own kind, with everything in it that a state must hold. It is killed
    behind step `stop_at`. Returns what must be equal in the end."""
    model = net()
    optimizer = md.optim.Adam(model.parameters(), lr=0.05)
    schedule = md.optim.lr_scheduler.SequentialLR(optimizer, [
        md.optim.lr_scheduler.LinearLR(optimizer, total_iters=5),
        md.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)], milestones=[6])
    loader = DataLoader(data(24, 0), batch_size=6, shuffle=True)
    test = DataLoader(data(7, 1), batch_size=4)
    history = []
    train = md.Synchronous(model, optimizer, group)
    train.checkpoint(path, every=every, history=history)
    noise = None
    for epoch in range(epochs) if plain else train.epochs(epochs):
        noise = md.randn(1).item()      # random numbers outside the loop
        for x, y in train.batches(loader):
            train.zero_grad()
            nn.functional.mse_loss(model(x), y * (1 + 0.01 * noise)).backward()
            train.step()
            schedule.step()
            if train.steps == stop_at:
                raise Stopped
        model.eval()
        with md.no_grad():
            error = sum(train.total(float(((model(x) - y) ** 2).sum()))
                        for x, y in train.batches(test))
        model.train()
        if not plain:
            history.append([epoch, error])
    train.finish()
    return ({name: x.numpy().copy() for name, x in model.state_dict().items()},
            optimizer.state_dict()["param_groups"][0]["lr"], history, md.rand(3).tolist(),
            train.steps)


def same(found, expected):
    for name, x in expected[0].items():
        np.testing.assert_array_equal(found[0][name], x, name)
    assert found[1:] == expected[1:]


def stopped(work):
    """work(), which must raise Stopped."""
    with pytest.raises(Stopped):
        work()


@pytest.mark.parametrize("plain", [False, True])
def test_d18_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path, plain):
    """Killed behind every step, in the middle of an epoch and at its end."""
    expected = training(md.ProcessGroup(), tmp_path / "whole", plain=plain)
    assert expected[4] == 12
    for stop_at in (3, 4, 10) if plain else range(1, 13):
        path = tmp_path / f"part{stop_at}"
        stopped(lambda at=stop_at, to=path: training(md.ProcessGroup(), to, at, plain=plain))
        if stop_at > 1:                 # the step that was under way is done again
            assert md.load(path)["run"]["steps"] == stop_at - 1
        same(training(md.ProcessGroup(), path, plain=plain), expected)


def test_d18_the_same_on_three_ranks_of_which_one_finds_the_file(tmp_path):
    expected = on_ranks(3, lambda group: training(group, tmp_path / f"whole{group.rank}"))
    for stop_at in 2, 7, 12:
        path = tmp_path / f"part{stop_at}"

        def work(group, path=path, stop_at=stop_at):
            stopped(lambda: training(group, path, stop_at))
        on_ranks(3, work)

        def resumed(group, path=path):
            return training(group, path if group.rank == 2 else tmp_path / f"none{group.rank}")
        for found, whole in zip(on_ranks(3, resumed), expected):
            same(found, whole)


def test_a_run_killed_again_and_again(tmp_path):
    expected = training(md.ProcessGroup(), tmp_path / "whole")
    draw = random.Random(1)
    for stop_at in sorted(draw.sample(range(1, 13), 6)):
        stopped(lambda at=stop_at: training(md.ProcessGroup(), tmp_path / "part", at, every=2))
    same(training(md.ProcessGroup(), tmp_path / "part", every=2), expected)


def test_a_state_of_an_abandoned_past_is_not_mixed_in(tmp_path):
    """Ranks 0 and 1 lost rank 2 behind step 4, went on alone from step 3 and stopped at 5. Rank 2,
    which comes back with its step 4, and had been the furthest once, takes what they have."""
    def work(group, stop_at):
        stopped(lambda: training(group, tmp_path / f"{group.rank}", stop_at))
    on_ranks(3, lambda group: stopped(lambda: training(group, tmp_path / "all", 5)))
    stray = (tmp_path / "all").read_bytes()
    stopped(lambda: training(md.ProcessGroup(), tmp_path / "3", 4))
    (tmp_path / "0").write_bytes((tmp_path / "3").read_bytes())
    on_ranks(2, lambda group: work(group, 5))
    (tmp_path / "2").write_bytes(stray)
    ages = [md.load(tmp_path / str(rank))["run"] for rank in (0, 2)]
    assert [(run["age"], run["steps"]) for run in ages] == [(1, 4), (0, 4)]
    ends = on_ranks(3, lambda group: training(group, tmp_path / f"{group.rank}"))
    for end in ends:
        for name in "0.weight", "4.weight":
            np.testing.assert_array_equal(end[0][name], ends[0][0][name])
    assert md.load(tmp_path / "0")["run"]["age"] == 2


# ---- processes --------------------------------------------------------------------

PROGRAM = """
import hashlib, os, sys, time
import numpy as np
import minidist as md
from minidist import distributed as dist, nn

dist.init_process_group()
md.manual_seed(0)
draw = np.random.default_rng(1)
x, y = (md.tensor(draw.standard_normal((40, n))) for n in (6, 3))
loader = md.utils.data.DataLoader(md.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 3)).to(np.float64)
optimizer = md.optim.Adam(model.parameters(), lr=0.01)
schedule = md.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
train = dist.Synchronous(model, optimizer)
if len(sys.argv) > 3:
    train.checkpoint(sys.argv[3])
for epoch in train.epochs(int(sys.argv[1])):
    for a, b in train.batches(loader):
        train.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        train.step()
        schedule.step()
        time.sleep(float(sys.argv[2]))
        if dist.get_rank() == 0:
            print("step", train.steps, flush=True)
train.finish()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest(), train.steps, dist.get_world_size())
"""


@pytest.fixture
def start(mark, tmp_path, monkeypatch):  # noqa: F811
    """start(arguments, flags): the program above, launched."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(arguments, *flags, program="program.py"):
        return subprocess.Popen(
            [sys.executable, str(ROOT / "minidist.py"), "launch", *flags, program,
             *map(str, arguments)], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
    return start


def ended(process, code=0, seconds=60):
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, err
    return out, err


def at_step(process, step):
    for line in process.stdout:
        if line.startswith("[0] step") and int(line.split()[2]) >= step:
            return
    raise AssertionError(f"the run ended before step {step}: {process.stderr.read()}")


def fingerprints(out):
    return {tuple(line.split()[2:]) for line in out.splitlines() if "weights" in line}


@pytest.mark.parametrize("to", ["the launcher", "one worker"])
def test_sigterm_ends_all_ranks_after_one_step_and_they_go_on_from_there(start, mark,  # noqa: F811
                                                                         tmp_path, to):
    expected = fingerprints(ended(start([3, 0], "--nproc-per-node", "2"))[0])
    assert len(expected) == 1
    process = start([3, 0.05, "run"], "--nproc-per-node", "2")
    at_step(process, 13)                # in the middle of the second epoch
    if to == "the launcher":
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(worker(mark, 1), signal.SIGTERM)
    out, err = ended(process)
    reached = md.load(tmp_path / "run")["run"]["steps"]
    assert 13 <= reached < 30 and f"ended after step {reached}; run has the state" in err
    assert out.splitlines()[-1] == f"[0] step {reached}"
    out, err = ended(start([3, 0, "run"], "--nproc-per-node", "2"))
    assert f"[0] step {reached + 1}\n" in out and f"step {reached}\n" not in out
    assert fingerprints(out) == expected


def test_sigterm_outside_a_loop_ends_as_ever(start, tmp_path):
    (tmp_path / "waits.py").write_text(PROGRAM.replace(
        "train.finish()", "train.finish(); print('step 99', flush=True); time.sleep(60)"))
    process = start([1, 0, "run"], "--nproc-per-node", "2", program="waits.py")
    at_step(process, 99)
    process.send_signal(signal.SIGTERM)
    assert "ended rank 0, rank 1" in ended(process, 143)[1]
