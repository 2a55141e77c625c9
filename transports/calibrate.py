"""Measuring a cluster file for the simulator: `minidist calibrate --transport tcp`.

Two processes of this machine measure what two workers of a job would meet: how long a step
takes while both compute, and what messages take between them, in both directions at once, as
training sends them. So whatever limits the path, such as a shaped interface, is in the
figures; but so is other work on this machine.
"""
from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import names
from .launch import BLAS_THREADS, LaunchError, cores, launch

PROGRAM = Path(__file__).resolve().parent.parent / "minidist.py"


def compute(options: Sequence[str], batch: int) -> dict[str, float]:
    """Seconds of a training step and of each of its samples: two processes train at once, each for
    itself, with small batches and with larger ones."""
    threads = dict.fromkeys(BLAS_THREADS, str(max(1, cores() // 2)))
    times = []
    for size in batch, 4 * batch:
        command = [sys.executable, str(PROGRAM), "train", *options, "--batch-size", str(size)]
        pair = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True, env=threads | os.environ) for _ in range(2)]
        rates = []
        for process in pair:
            out, err = process.communicate()
            found = re.search(r"([\d,]+) samples/s", out)
            if process.returncode or found is None:
                raise LaunchError(f"{' '.join(command)}: {err.strip() or out.strip()}")
            rates.append(float(found[1].replace(",", "")))
        times.append(size / statistics.mean(rates))
    sample = max(0.0, (times[1] - times[0]) / (3 * batch))
    return {"step": max(0.0, times[0] - sample * batch), "sample": sample}


def probe(sizes: list) -> list:
    """One of two nodes: for each size the median seconds of an exchange, and those that the
    processor was busy with it."""
    import time

    import numpy as np

    import minidist
    carry = minidist.transports()
    transport, config = carry.join()
    peer, kind, found = 1 - config.node, carry.protocol.OPAQUE, []

    def exchange(mine, place):
        transport.exchange(peer, kind, (0,), mine, peer, place)

    def there_and_back(mine, place):
        if config.node:
            transport.recv(peer, into=place)
            transport.send(peer, kind, (0,), [mine])
        else:
            transport.send(peer, kind, (0,), [mine])
            transport.recv(peer, into=place)
    for size, count, at_once in [(1, 20, True), *sizes]:    # the first ones open the link
        mine, place, times = np.zeros(size, "u1"), np.zeros(size, "u1"), []
        busy = time.process_time()
        for _ in range(count):
            start = time.perf_counter()
            (exchange if at_once else there_and_back)(mine, place)
            times.append(time.perf_counter() - start)
        found.append([float(np.median(times)), (time.process_time() - busy) / count])
    transport.close()
    return found[1:]


def link(transport: str) -> dict[str, float]:
    """The `[link]` between two processes. In the simulator an exchange of n bytes takes
    2 * message + latency + n / bandwidth. If sending both ways at once takes about as long as one
    way after the other, they share the bandwidth."""
    sizes = [(1, 300, True), (1 << 14, 50, True), (1 << 19, 12, True), (1 << 14, 50, False),
             (1 << 19, 12, False)]
    (small, busy), *times = launch(probe, (sizes,), 2, transport)[0]
    busy, count = min(busy, small), sizes[2][0] - sizes[1][0]
    both, turns = [max(1e-9, times[i + 1][0] - times[i][0]) for i in (0, 2)]
    duplex = both < 0.75 * turns
    return {"latency": small - busy, "message": busy / 2, "duplex": duplex,
            "bandwidth": (1 if duplex else 2) * count / both}


def text(tables: dict[str, dict[str, float]], about: str) -> str:
    lines = [f"# {about}"]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *[
            f"{name} = {str(value).lower() if isinstance(value, bool) else f'{value:.6g}'}"
            for name, value in values.items()]]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "minidist calibrate", description="Measure this machine's training steps and a transport, "
        "and write what `--transport sim --cluster FILE` needs to foretell a run. Options after "
        "-- are those of `minidist train` for the steps, such as -- --model lenet --data mnist.")
    add = parser.add_argument
    add("--transport", default="tcp", metavar="NAME", help="pipe, tcp, udp, ... (tcp)")
    add("--batch-size", type=int, default=16, metavar="N",
        help="a worker's samples in a step (%(default)s)")
    add("--out", metavar="FILE", help="write it here; else it is printed")
    add("options", nargs="*", default=[], metavar="-- OPTION", help="of minidist train")
    flags = parser.parse_args(argv)
    try:
        if flags.transport not in names() or flags.transport == "sim":
            raise LaunchError(f"transport {flags.transport!r} cannot be measured")
        if flags.batch_size < 1:
            raise LaunchError(f"--batch-size {flags.batch_size}: at least 1")
        options = flags.options or ["--model", "mlp", "--data", "digits", "--epochs", "10"]
        tables = {"compute": compute(options, flags.batch_size)}
        tables["link"] = link(flags.transport)
        found = text(tables, f"measured by minidist calibrate --transport {flags.transport}")
        if flags.out:
            Path(flags.out).write_text(found)
        else:
            print(found, end="")
    except (LaunchError, OSError) as error:
        print(f"minidist calibrate: error: {error}", file=sys.stderr)
        return 2
    return 0
