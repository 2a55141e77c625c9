"""Running a job inside a simulated cluster: every worker and server is a thread of this process.

`minidist launch --transport sim --nproc-per-node 64 script.py`, `minidist train --transport
sim` and md.launch(fn, transport="sim") end here. A rank finds what it would find in a process
of its own: os.environ with its rank, sys.argv, a fresh `__main__`, its own random numbers, its
lines with its rank before them. What it shares with the others is what modules keep, the
current folder, and the data sets of load_dataset, which are read once for all.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import mean, median
from types import ModuleType
from typing import Any

from . import PeerLost
from .launch import Console, Job, LaunchError, Lines, Report
from .sim import Node, World, current

HERE = os.path.dirname(__file__)
SHOWN = 16              # workers that the report names one by one; of more it gives a summary


def run(job: Job) -> Report:
    """Run the job's command on every simulated worker; as launch.run does with real ones."""
    before = sys.argv[:], sys.path[:]
    try:
        return simulate(job, [program_of(job.command)] * job.workers)[0]
    finally:
        sys.argv[:], sys.path[:] = before


def call(job: Job, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """fn(*args) on every simulated worker; what each returned, by rank."""
    results: list[Any] = [None] * job.workers

    def caller(rank: int) -> Callable[[], None]:
        def work() -> None:
            results[rank] = fn(*deepcopy(args))
        return work
    report, world = simulate(job, [caller(rank) for rank in range(job.workers)])
    if report.code:
        raise LaunchError(report.text)
    return results


def simulate(job: Job, programs: Sequence[Callable[[], None]]) -> tuple[Report, World]:
    """Run a function for every worker, and servers beside them."""
    minidist = importlib.import_module("minidist")
    try:
        world = World(job.cluster, job.workers, job.servers)
    except ValueError as error:
        raise LaunchError(str(error)) from None

    def alive(number: int) -> Callable[[], None]:
        def work() -> None:
            node = world.nodes[number]
            minidist.manual_seed(node.chance.getrandbits(63))
            try:
                programs[number]() if number < job.workers else minidist.serve()
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
        return work
    begun = time.monotonic()
    with surroundings(job, world), one_thread(minidist), one_data_set(minidist):
        try:
            world.run([alive(number) for number in range(world.size)], job.timeout)
        except TimeoutError as error:
            return Report(124, f"minidist: {error}"), world
        except KeyboardInterrupt:
            return Report(130, "minidist: SIGINT: ended the simulation", 2), world
    print(summary(job, world, time.monotonic() - begun), flush=True)
    return outcome(job, world), world


def program_of(command: Sequence[str]) -> Callable[[], None]:
    """What `python script.py arguments` does, as a function to call once for each rank."""
    python, *words = command
    if python != sys.executable or not words:
        raise LaunchError(f"transport sim runs Python scripts inside this process, not {python!r}")
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        return lambda: void(runpy.run_module(words[1], run_name="__main__"))
    sys.argv[:] = words
    minidist = importlib.import_module("minidist")
    if os.path.samefile(words[0], str(minidist.__file__)):
        return lambda: void(minidist.main(words[1:]))
    code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    sys.path.insert(0, str(Path(words[0]).resolve().parent))

    def script() -> None:
        module = ModuleType("__main__")
        module.__file__ = words[0]
        exec(code, vars(module))
    return script


def void(result: Any) -> None:
    if isinstance(result, int) and result:
        raise SystemExit(result)


# ---- what a rank finds around it -----------------------------------------------------------

class Environment(MutableMapping):
    """os.environ while a cluster is simulated: each node sees its own, others the old one."""

    def __init__(self, before: MutableMapping, own: Sequence[dict[str, str]]):
        self.before, self.own = before, own

    def _mine(self) -> MutableMapping:
        node = current.get(None)
        return self.before if node is None else self.own[node.number]

    def __getitem__(self, name: str) -> str:
        return self._mine()[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._mine()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._mine()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())

    def copy(self) -> dict[str, str]:
        return dict(self._mine())


class Output(io.TextIOBase):
    """sys.stdout or sys.stderr while a cluster is simulated: whole lines, with who wrote them."""

    def __init__(self, before: Any, job: Job, console: Console, size: int):
        self.before, self.job, self.console = before, job, console
        self.lines = [Lines() for _ in range(size)]

    def write(self, text: str) -> int:
        node = current.get(None)
        if node is None:
            return self.before.write(text)
        lines = self.lines[node.number]
        for line in lines.feed(text.encode("utf-8", "replace")):
            self._show(node.number, line)
        if lines.bar and self._shown(node.number):
            self.console.bar(self.before, self._prefix(node.number) + lines.bar)
        return len(text)

    def flush(self) -> None:
        if current.get(None) is None:
            self.before.flush()

    def isatty(self) -> bool:
        return current.get(None) is None and self.before.isatty()

    def finish(self) -> None:
        for number, lines in enumerate(self.lines):
            if lines.rest.strip():
                self._show(number, lines.rest.rstrip(b"\r").rsplit(b"\r", 1)[-1])

    def _show(self, number: int, line: bytes) -> None:
        if self._shown(number):
            self.console.line(self.before, self._prefix(number) + line)

    def _shown(self, number: int) -> bool:
        return self.job.show is None or number >= self.job.workers or number in self.job.show

    def _prefix(self, number: int) -> bytes:
        return f"[{title(self.job, number) if number >= self.job.workers else number}] ".encode()


@contextlib.contextmanager
def surroundings(job: Job, world: World) -> Iterator[None]:
    """os.environ, sys.stdout and sys.stderr differ from rank to rank in here."""
    console, before = Console(), (os.environ, sys.stdout, sys.stderr)
    outputs = [Output(stream, job, console, world.size) for stream in before[1:]]
    environments = [job.environment(number) for number in range(world.size)]
    os.environ = Environment(os.environ, environments)  # type: ignore[assignment]  # noqa: B003
    sys.stdout, sys.stderr = outputs
    try:
        yield
    finally:
        os.environ, sys.stdout, sys.stderr = before  # noqa: B003
        for output in outputs:
            output.finish()


@contextlib.contextmanager
def one_thread(minidist: Any) -> Iterator[None]:
    """Matrix products on one thread: the same bits everywhere, and the ranks' small ones
    gain nothing from more."""
    threads = minidist.get_num_threads()
    try:
        minidist.set_num_threads(1)
    except RuntimeError:                        # a BLAS that cannot be told
        yield
        return
    try:
        yield
    finally:
        minidist.set_num_threads(threads)


@contextlib.contextmanager
def one_data_set(minidist: Any) -> Iterator[None]:
    """load_dataset reads a data set once: a copy for each of many ranks would fill the memory."""
    before = minidist.load_dataset
    minidist.load_dataset = functools.cache(before)
    try:
        yield
    finally:
        minidist.load_dataset = before


# ---- what is told at the end ----------------------------------------------------------------

def title(job: Job, number: int) -> str:
    return f"rank {number}" if number < job.workers else f"server {number - job.workers}"


def summary(job: Job, world: World, seconds: float) -> str:
    workers, servers = world.nodes[:job.workers], world.nodes[job.workers:]
    lines = [f"simulated: {job.workers} workers, {job.servers} servers, seed "
             f"{world.cluster.seed}; run {world.fingerprint:08x}",
             f"virtual time {world.now:,.3f} s, in {seconds:,.1f} s; {world.count:,} events"]
    if len(workers) <= SHOWN:
        lines += [f"rank {node.number}: idle {idle(node):.0%}, {bytes_of(node)}"
                  for node in workers]
    else:
        by_idle = sorted(workers, key=idle)
        lines.append("idle share of a worker: " + ", ".join(
            f"{word} {idle(node):.0%} (rank {node.number})" for word, node in
            (("least", by_idle[0]), ("median", by_idle[len(workers) // 2]),
             ("most", by_idle[-1]))))
        sent = [stats(node, "bytes_sent") for node in workers]
        lines.append(f"bytes that a worker sent: median {median(sent) / 1e6:,.2f} MB, most "
                     f"{max(sent) / 1e6:,.2f} MB; all together {sum(sent) / 1e6:,.2f} MB")
    lines += [f"server {i}: idle {idle(node):.0%}, {bytes_of(node)}"
              for i, node in enumerate(servers)]
    if world.staleness:
        counts = sorted(world.staleness.elements())
        lines.append(f"staleness of {len(counts):,} pushes: median {counts[len(counts) // 2]}, "
                     f"mean {mean(counts):.1f}, 99 of 100 up to "
                     f"{counts[99 * (len(counts) - 1) // 100]}, most {counts[-1]}")
    return "\n".join(lines)


def idle(node: Node) -> float:
    """The share of its time that a node did not compute."""
    life = node.ended - node.started
    return 1.0 - min(1.0, node.worked / life) if life > 0 else 0.0


def stats(node: Node, name: str) -> int:
    return 0 if node.transport is None else node.transport.stats[name]


def bytes_of(node: Node) -> str:
    return (f"{stats(node, 'bytes_sent') / 1e6:,.2f} MB sent, "
            f"{stats(node, 'bytes_received') / 1e6:,.2f} MB received")


def outcome(job: Job, world: World) -> Report:
    """The exit code, and the failure that came first as the last thing told."""
    failed = [(node, node.error) for node in world.nodes if node.error is not None]
    planned = [f"minidist: {fault.kind} of {', '.join(title(job, n) for n in fault.nodes)} at "
               f"{fault.at:g} s, as planned" for fault in world.cluster.fault]
    if not failed:
        return Report(0, "\n".join(planned))
    failed.sort(key=lambda pair: (isinstance(pair[1], PeerLost), pair[0].ended))
    (cause, error), *others = failed
    lines = planned + [f"[{title(job, node.number)}] {type(error).__name__}: {error}"
                       for node, error in others[:SHOWN]]
    if len(others) > SHOWN:
        lines.append(f"... and {len(others) - SHOWN} nodes more")
    lines.append(f"minidist: root cause: {title(job, cause.number)} at {cause.ended:.6f} s. "
                 "Its last lines:")
    code = error.code if isinstance(error, SystemExit) else 1
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == HERE:
        trace = trace.tb_next                   # our own part of it is no news
    words = traceback.format_exception(type(error), error, trace)
    return Report(code if isinstance(code, int) else 1,
                  "\n".join([*lines, "".join(words).rstrip()]))
