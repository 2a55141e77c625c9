"""Runs that lose workers and go on: PROTOCOL.md, 9.10.

First the launcher's side alone, in memory and without a clock, under hundreds of schedules of
crashes, pauses and ends; then the bits of a training run, in memory; then processes.
"""
import heapq
import os
import queue
import random
import re
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

import minidist as md
from memory import cluster, run
from minidist_transports import PeerLost, launch
from test_elastic import (  # noqa: F401  start is a fixture
    PROGRAM,
    ROOT,
    Stopped,
    at_step,
    ended,
    fingerprints,
    same,
    start,
    training,
)
from test_launch import alive, mark, wait_for  # noqa: F401  mark is a fixture
from test_train import worker

# ---- the launcher, with fates instead of processes ------------------------------------------


class Actor(launch.Process):
    """A process that does what its fate says."""

    def __init__(self, world, node, state):     # (nothing is started)
        self.world, self.node, self.state = world, node, state
        self.name, self.prefix, self.server = f"rank {node}", b"", False
        self.code, self.ended_by_us, self.stopped, self.called = None, False, False, False
        self.given_up, self.held, self.held_since, self.tail = "", [], 0.0, []
        self.doomed = False

    def ends(self, code, delay, words=()):
        """Later, unless it has been stopped by then; what is killed ends at once."""
        self.world.later(delay, self, code, words)

    def signal(self, number):
        if number == launch.MEET:               # it may be computing, for longer than we wait
            self.ends(random.Random(self.node).choice([75, 75, 1]), self.world.draw.choice(
                [0, 0.1, 3, 30, 100]))
        else:
            self.ends(-number, 0)

    def kill(self):
        self.stopped = False
        self.ends(-signal.SIGKILL, 0)

    def release(self):
        self.held = []


class World:
    """Stands for a Group's queue of events, and for the clock."""

    def __init__(self, seed):
        self.draw, self.now, self.due, self.count = random.Random(seed), 0.0, [], 0

    def monotonic(self):
        return self.now

    def later(self, delay, actor, code, words):
        self.count += 1
        heapq.heappush(self.due, (self.now + delay, self.count, actor, code, words))

    def get(self, timeout):
        assert self.now < 5000, "it hangs"
        if not self.due or self.due[0][0] > self.now + timeout:
            self.now += max(timeout, 5.0)        # as on a machine that is very busy
            raise queue.Empty
        at, _, actor, code, words = heapq.heappop(self.due)
        self.now = max(self.now, at)
        if actor.code is not None:
            raise queue.Empty
        if actor.stopped and code not in ("continue", -signal.SIGKILL):
            self.later(5, actor, code, words)
            raise queue.Empty
        if code in ("stop", "continue"):
            actor.stopped = code == "stop"
            if actor.stopped:
                actor.ends("continue", 300)
                actor.ends(0, 301)
                self.lose(actor, [10])
            raise queue.Empty
        actor.held = list(words)
        if code != 0 and self.draw.random() < 0.7:      # else they compute, and notice nothing
            self.lose(actor, [0, 0.5, 10])
        return actor, code

    def lose(self, actor, delays):
        """The others notice, sooner or later."""
        for other in self.group.processes:
            if other is not actor:
                other.ends(1, self.draw.choice(delays), [
                    b"Traceback (most recent call last):", b"minidist.PeerLost: rank 1 lost"])


@pytest.mark.parametrize("block", range(2))
def test_schedules_of_crashes_pauses_and_restarts(monkeypatch, block):
    outcomes = set()
    monkeypatch.setattr(launch, "transports", lambda: ["tcp"])     # it looks through packages
    for seed in range(150 * block, 150 * (block + 1)):
        world = World(seed)
        monkeypatch.setattr(launch, "time", types.SimpleNamespace(monotonic=world.monotonic))
        draw = world.draw
        most = draw.randint(1, 5)
        least, restarts = draw.randint(1, most), draw.randint(0, 3)
        group = launch.Group(launch.Job(["x"], most, least=least, restarts=restarts))
        group.events, world.group, generations = world, group, []
        group.console.line = lambda stream, text: None

        def begin(states, world=world, group=group, generations=generations):
            assert all(p.code is not None for p in group.past), "one of the past still runs"
            assert len(states) == group.job.workers and group.job.generation == len(generations)
            generations.append(states)
            group.processes = [Actor(world, i, state) for i, state in enumerate(states)]
            group.running = group.processes[:]
            fates = [(0, 40), (0, 40), (0, 40), (-9, 5), (-9, 40), (1, 20), ("stop", 10)]
            for actor in group.processes:
                actor.ends(*world.draw.choice(fates), [b"Traceback (most recent call last):",
                                                       b"ValueError: of its own"])
        group.begin = begin
        begin([f"state{i}" for i in range(most)])
        report = group.watch()
        assert group.running == []
        sizes = [len(states) for states in generations]
        assert all(least <= size <= most for size in sizes)
        for before, after in zip(generations, generations[1:]):     # nobody changes places
            assert [state for state in before if state in after] == after
        used = restarts - group.job.restarts
        assert 0 <= used <= restarts
        assert len(generations) - 1 <= used + sizes[0] - sizes[-1]
        good = all(p.code == 0 for p in group.processes)
        assert (report.code == 0) == good or group.stubborn, (seed, report)
        if not good and not group.stubborn and not any(p.code == 0 for p in group.processes):
            lost = [p for p in group.processes if not p.consequence]
            assert len(group.processes) - len(lost) + group.job.restarts < least \
                or group.job.restarts == 0, (seed, report)
        outcomes.add((len(generations), good))
    assert len(outcomes) > 4, outcomes


# ---- the bits, in memory --------------------------------------------------------------------

def generation(size, paths, work):
    """work(group) on every rank; whoever ends leaves its state, as at the end of a process.
    What each returned; None for those that ended by a loss, Stopped for the killed."""
    def one(transport):
        group = md.ProcessGroup(transport, size)
        group.inherited = str(paths[group.rank])
        try:
            return work(group)
        except Stopped:                         # killed: it leaves nothing
            transport.abort("killed")
            return Stopped
        except PeerLost:
            transport.abort("lost another")
        if group.kept is not None:
            paths[group.rank].write_bytes(group.kept)
        return None
    with cluster(size) as nodes:
        return run(nodes, one)


@pytest.mark.parametrize("seed", range(12))
def test_d17_any_losses_then_equal_bits_and_no_step_lost(tmp_path, seed):
    """Up to three generations end by the death of some, at any step; one at least lives on. A
    dead worker's successor finds nothing, or an old state; sometimes it is left out."""
    draw = random.Random(seed)
    paths = [tmp_path / f"state{i}" for i in range(3)]
    reached = 0
    for _ in range(draw.randint(1, 3)):
        size = len(paths)
        dead = draw.sample(range(size), draw.randint(1, size - 1)) if size > 1 else []
        stop_at = min(12, reached + draw.randint(1, 4))

        def work(group, dead=dead, stop_at=stop_at):
            return training(group, None, stop_at if group.rank in dead else None)
        results = generation(size, paths, work)
        if not dead:
            break
        fell = [i for i, x in enumerate(results) if x is Stopped]
        assert fell and set(fell) <= set(dead)  # who lost another before its turn lives on
        dead = fell
        survivors = [i for i in range(size) if i not in dead]
        steps = max([md.load(paths[i])["run"]["steps"] for i in survivors if paths[i].exists()],
                    default=0)
        assert stop_at - 1 <= steps <= stop_at and steps >= reached, "a complete step was lost"
        reached = steps
        if draw.random() < 0.5:
            paths = [paths[i] for i in survivors]
        elif draw.random() < 0.5:
            for i in dead:
                paths[i].unlink(missing_ok=True)
    results = generation(len(paths), paths, lambda group: training(group, None))
    for result in results:
        assert result[4] == 12
        for name, x in results[0][0].items():
            np.testing.assert_array_equal(result[0][name], x, name)


def test_a_generation_without_a_loss_has_the_bits_of_a_run_that_never_stopped(tmp_path):
    """All are called behind different places of the same step: each has its own state."""
    paths = [tmp_path / f"state{i}" for i in range(3)]
    expected = generation(3, paths, lambda group: training(group, None))

    def work(group):
        try:
            return training(group, None, 7)
        except Stopped:
            raise PeerLost(0, "called") from None
    generation(3, paths, work)
    assert {md.load(path)["run"]["steps"] for path in paths} == {6}
    for found, whole in zip(generation(3, paths, lambda group: training(group, None)), expected):
        same(found, whole)


# ---- processes ------------------------------------------------------------------------------

# Without random numbers of each rank's own, so that a successor makes the bits of its predecessor.
PLAIN = PROGRAM.replace("nn.Dropout(0.2), ", "")


WHOLE = []


def undisturbed(plain):
    """What three workers that nobody disturbs end with, after one epoch of 10 steps."""
    if not WHOLE:
        WHOLE.append(fingerprints(ended(plain([1, 0], "--nproc-per-node", "3"))[0]))
    return WHOLE[0]


@pytest.fixture
def plain(start, tmp_path):  # noqa: F811
    (tmp_path / "program.py").write_text(PLAIN)
    return start


def steps_of(out, unheard=0):
    """The last step that rank 0 said it made; none may be left out, but so many whose maker was
    killed before it could say so."""
    steps = [int(n) for n in re.findall(r"\[0\] step (\d+)", out)]
    for a, b in zip(steps, steps[1:]):
        assert a <= b <= a + 1 + unheard, steps
    return steps[-1]


@pytest.mark.parametrize("transport, who", [
    ("tcp", [0, 2]), ("pipe", [1]), ("udp", [0])])
def test_lost_workers_are_replaced_and_bits_stay(plain, mark, transport, who):  # noqa: F811
    flags = "--nproc-per-node", "3", "--max-restarts", "2", "--transport", transport
    expected = undisturbed(plain)
    process = plain([1, 0.05], *flags)
    at_step(process, 4)
    pids = [worker(mark, rank) for rank in who]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    out, err = ended(process)
    assert fingerprints(out) == expected and steps_of(out, 0 in who) == 10
    for rank in who:
        assert f"rank {rank} was killed by signal 9 (SIGKILL)" in err
    assert f"Generation 1 begins, workers: 3, restarts left: {2 - len(who)}" in err
    assert "Traceback" not in err


def test_without_restarts_fewer_go_on_until_too_few_are_left(plain, mark):  # noqa: F811
    process = plain([2, 0.05], "--nproc-per-node", "2:4")
    at_step(process, 3)
    pids = [worker(mark, rank) for rank in (0, 3)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    at_step(process, 8)
    os.kill(worker(mark, 1), signal.SIGKILL)
    _, err = ended(process, 137)
    assert "Generation 1 begins, workers: 2, restarts left: 0" in err
    assert "root cause: rank 1 was killed by signal 9" in err


DIES_EARLY = """
import os, signal
def dies(where):
    if os.environ["MINIDIST_GENERATION"] == "1" and os.environ["RANK"] == "1" and where == {!r}:
        os.kill(os.getpid(), signal.SIGKILL)
dies("before joining")
import minidist
def exchange(run, as_ever=minidist.Synchronous._exchange):
    as_ever(run)
    dies("after the exchange")
minidist.Synchronous._exchange = exchange
"""


@pytest.mark.parametrize("where", ["before joining", "after the exchange"])
def test_a_loss_while_a_generation_begins(plain, mark, tmp_path, where):  # noqa: F811
    expected = undisturbed(plain)
    (tmp_path / "program.py").write_text(DIES_EARLY.format(where) + PLAIN)
    process = plain([1, 0.05], "--nproc-per-node", "3", "--max-restarts", "2")
    at_step(process, 4)
    os.kill(worker(mark, 0), signal.SIGKILL)
    out, err = ended(process)
    assert "Generation 2 begins, workers: 3, restarts left: 0" in err
    assert fingerprints(out) == expected and steps_of(out, 1) == 10


def test_a_loss_behind_a_step_that_is_not_complete(plain, tmp_path):
    """Rank 1 dies behind the optimizer's step and before the schedule's; all others have made the
    optimizer's too. What they go on from is neither half a step nor one too many."""
    expected = undisturbed(plain)
    (tmp_path / "program.py").write_text(PLAIN.replace("train.step()", """train.step()
        if (train.steps, os.environ["RANK"], os.environ["MINIDIST_GENERATION"]) == (5, "1", "0"):
            os.kill(os.getpid(), 9)
        train.mean(1.0)"""))
    out, err = ended(plain([1, 0], "--nproc-per-node", "3", "--max-restarts", "1"))
    assert fingerprints(out) == expected and steps_of(out) == 10


def test_a_stopped_worker_is_given_up_and_does_not_come_back(plain, mark, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MINIDIST_HEARTBEAT_TIMEOUT", "1.5")
    process = plain([1, 0.05], "--nproc-per-node", "2:3")
    at_step(process, 3)
    stopped = worker(mark, 1)
    os.kill(stopped, signal.SIGSTOP)
    out, err = ended(process)
    assert "rank 1 was stopped (SIGSTOP) and given up. Generation 1 begins, workers: 2" in err
    assert steps_of(out) == 10 and len(fingerprints(out)) == 1
    assert wait_for(lambda: stopped not in alive(mark))


def test_a_fault_of_the_program_ends_it_when_restarts_are_used_up(plain, tmp_path):
    (tmp_path / "program.py").write_text(PLAIN.replace(
        "train.step()", "train.step(); assert train.steps < 3, 'too far'"))
    _, err = ended(plain([1, 0], "--nproc-per-node", "2", "--max-restarts", "1"), 1)
    assert "Generation 1 begins" in err and "AssertionError: too far" in err.splitlines()[-1]


def test_sigterm_ends_a_later_generation_as_ever(plain, mark):  # noqa: F811
    process = plain([3, 0.05, "run"], "--nproc-per-node", "2", "--max-restarts", "1")
    at_step(process, 3)
    os.kill(worker(mark, 1), signal.SIGKILL)
    at_step(process, 6)
    process.send_signal(signal.SIGTERM)
    _, err = ended(process)
    assert "run has the state to go on from" in err


def test_train_goes_on_with_fewer(mark, tmp_path):  # noqa: F811
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "minidist.py"), "train", "--data", "segments", "--model",
         "mlp", "--epochs", "4", "--workers", "2:3", "--save", "run"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pid = worker(mark, 0)
    wait_for((tmp_path / "run").exists, 60)     # the first epoch is complete
    os.kill(pid, signal.SIGKILL)
    out, err = ended(process)
    assert "Generation 1 begins, workers: 2, restarts left: 0" in err
    assert "test accuracy" in out and "rank 1:" in out and "rank 2:" not in out
