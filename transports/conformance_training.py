"""Stages of `minidist conformance` about training: every reduction of every dtype (PROTOCOL.md,
9.3), a run with the numbers of the vectors (9.8), a worker of parameter servers (9.4).

They are asked for by a number below -1 where the program of section 13 expects n."""
from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import protocol as p
from .conformance import BOTH, Broken, Heard, Line, Trial, finish, stage

RUN, SERVERS = -20, -21         # what is asked for; of a dtype: -1 - its code
COMBINE = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum,
           "product": np.multiply}


def equal(rule: str, what: str, found: np.ndarray, wanted: Any) -> None:
    wanted = np.asarray(wanted, found.dtype)
    if found.tobytes() != wanted.tobytes():
        raise Broken(rule, f"{what} {wanted.tolist()} ({wanted.tobytes().hex()})",
                     f"{found.tolist()} ({found.tobytes().hex()})")


# ---- pieces of a conversation of two ranks ---------------------------------------------------


def swapped(line: Line, op: str, reduce: str, x: np.ndarray) -> np.ndarray:
    """What the worker has in an all_reduce or an all_gather of rows, in which we have x."""
    if op == "all_reduce":
        whole = (0, x.size)
        return line.collective(op, reduce, x.dtype.name, 0, x)(whole, whole)
    rows = np.tile(x, 2)
    mine, theirs = [(r * x.size, (r + 1) * x.size) for r in (line.rank, 1 - line.rank)]
    send, take = (mine, theirs) if op == "all_gather" else (
        [(r * x.size // 2, (r + 1) * x.size // 2) for r in (1 - line.rank, line.rank)])
    return line.collective(op, reduce, x.dtype.name, 0, rows if op == "all_gather" else x)(
        send, take)


def given(line: Line, x: np.ndarray) -> np.ndarray:
    """A tensor, broadcast from rank 0."""
    whole = (0, x.size)
    exchange = line.collective("broadcast", "none", x.dtype.name, 0, x)
    return exchange(None, whole) if line.rank else exchange(whole, None)[:0]


def agree(line: Line, text: str) -> None:
    """Compare texts; the worker must have this one."""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    extremes = np.concatenate([digest, 255 - digest])
    found = swapped(line, "all_reduce", "max", extremes)
    if found.tobytes() != extremes.tobytes():
        raise Broken("9.8-1", f"the SHA-256 of {text!r} and its complement", found.tobytes().hex())


# ---- reductions --------------------------------------------------------------------------------


def sample(dtype: str, rank: int, count: int) -> np.ndarray:
    numbers = (np.arange(count) + 1) * (rank + 3) % 7
    return (numbers / 7 if dtype.startswith("float") else numbers).astype(dtype)


def reduced(reduce: str, parts: list[np.ndarray]) -> np.ndarray:
    x = COMBINE[reduce](*parts)
    return x / x.dtype.type(2) if reduce == "avg" else x


for _dtype in p.DTYPE_CODES:
    if _dtype == "bfloat16":                    # NumPy has none to check with
        continue

    @stage(f"reduces and scatters {_dtype}", "9.3-1 9.3-2 9.3-3")
    def _(trial: Trial, dtype: str = _dtype) -> None:
        line = trial.join()
        line.announce(-1 - p.DTYPE_CODES[dtype])
        for reduce in COMBINE:
            if reduce == "avg" and not dtype.startswith("float"):
                continue
            parts = [sample(dtype, rank, 6) for rank in (0, 1)]
            result, mine = reduced(reduce, parts), parts[line.rank]
            half = result.reshape(2, -1)
            equal("9.3-1", "the tensor of rank 0 or 1,", swapped(line, "all_reduce", reduce, mine),
                  parts[1 - line.rank])
            equal("9.3-2", f"{reduce} in all_reduce", swapped(line, "all_gather", "none", result),
                  result)
            swapped(line, "reduce_scatter", reduce, mine)
            equal("9.3-2", f"{reduce} in reduce_scatter",
                  swapped(line, "all_gather", "none", half[line.rank]), half[1 - line.rank])
        finish(trial, line)


# ---- a synchronous run -------------------------------------------------------------------------

# (samples, gradient of scale, gradient of shift) of rank 0 and 1, and the parameters at the start
GRADIENTS: tuple = ((2, [0.5, -0.1], None), (1, [0.25, 0.3], [0.7]))
START: tuple = ([1.0, -1.0], [0.5])
MANIFEST = "scale (2,) float32\nshift (1,) float64"
OPTIMIZER = ("SGD with lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, "
             "maximize=False, params=[0, 1]")
STEPS = 34


def vectors(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank sends: float64 first, and behind it the numbers about the step."""
    samples, scale, shift = GRADIENTS[rank]
    first = np.zeros(7)
    if shift is not None:
        first[0] = np.float64(shift[0]) * samples
    first[[1, 2, 5, 6]] = samples, step % 32, shift is not None, True
    return first, np.array(scale, np.float32) * np.float32(samples)


def begin(line: Line) -> tuple[np.ndarray, np.ndarray]:
    line.announce(RUN)
    agree(line, MANIFEST)
    start = np.array(START[0], np.float32), np.array(START[1])
    for x in start:
        found = given(line, x)
        if line.rank:
            equal("9.8-2", "the values of rank 0,", found, x)
    agree(line, f"{3 * STEPS} samples in {STEPS} batches\na first batch of [0, 1, 2]")
    agree(line, OPTIMIZER)
    return start


@stage("trains in step", "9.8-1 9.8-2 9.8-3 9.8-5")
def _(trial: Trial) -> None:
    line = trial.join()
    scale, shift = begin(line)
    for step in range(STEPS):
        sums = []
        for mine, theirs in zip(vectors(line.rank, step), vectors(1 - line.rank, step),
                                strict=True):
            equal("9.8-3", f"in step {step} the vector", swapped(line, "all_reduce", "sum", mine),
                  theirs)
            sums.append(mine + theirs)
        shift = shift - 0.1 * (sums[0][:1] / 3)
        scale = scale - np.float32(0.1) * (sums[1] / np.float32(3))
    for name, x in (("scale", scale), ("shift", shift)):
        equal("9.8-5", f"{name} at the end", swapped(line, "all_gather", "none", x), x)
    finish(trial, line)


@stage("ends when a gradient is not finite", "9.8-4")
def _(trial: Trial) -> None:
    line = trial.join()
    begin(line)
    first, second = vectors(line.rank, 0)
    first[3 + line.rank] = 2                    # of `scale`
    for x in (first, second):
        swapped(line, "all_reduce", "sum", x)
    trial.exits(False, "9.8-4")


# ---- parameter servers -------------------------------------------------------------------------

WEIGHTS, RATE, PUSHES = np.array([1, 2, 4], np.float32), np.float32(0.25), 4


def messages(line: Line, other: Line) -> Iterator[Heard]:
    """What the worker says to the server; the other rank shows meanwhile that it lives."""
    while True:
        other.say(p.PING, (0, ""))
        yield line.hear("INIT PULL PUSH", "9.4-2")


@stage("works with a parameter server", "9.4-1 9.4-2", BOTH, servers=1)
def _(trial: Trial) -> None:
    line = trial.join()
    line.announce(SERVERS)
    agree(line, "w (3,) float32")
    given(line, WEIGHTS)
    server = trial.server()
    w: np.ndarray = WEIGHTS.copy()
    version, pushes, whole = 0, 0, (0, 3)
    for heard in messages(server, line):
        if heard.name == "INIT":
            dtype, start, stop, rule, settings = heard.fields
            equal("9.4-1", "the parameters in INIT", np.frombuffer(heard.payload, "<f4"), w)
            if (dtype, start, stop, rule, settings.get("lr")) != (1, *whole, "sgd", 0.25):
                raise Broken("9.4-1", "INIT of float32 0..3, rule sgd, lr 0.25", str(heard.fields))
        elif heard.name == "PULL":
            clock = heard.fields[0]
            if heard.fields[1:] != whole:
                raise Broken("9.4-2", "PULL of 0..3", str(heard.fields))
            server.say(p.STATE, (clock, version, *whole, 1), w.tobytes(), channel=2)
            if clock == 2 ** 64 - 1:
                break
        else:
            push_id, *rest = heard.fields
            if push_id != (trial.incarnation << 32) + pushes + 1:
                raise Broken("9.4-1", f"push {pushes + 1} of incarnation {trial.incarnation:#x}",
                             f"{push_id:#x}")
            if rest != [version, *whole, 1, 1]:
                raise Broken("9.4-2", f"version {version}, 0..3, 1 sample, float32", str(rest))
            gradient = np.frombuffer(heard.payload, "<f4")
            equal("9.4-2", "the gradient w / 2 =", gradient, w / 2)
            w, version, pushes = w - RATE * gradient, version + 1, pushes + 1
            server.say(p.APPLIED, (push_id, version, 1), channel=2)
    if pushes != PUSHES:
        raise Broken("9.4-2", f"{PUSHES} pushes", str(pushes))
    equal("9.4-2", "in the end", swapped(line, "all_gather", "none", w), w)
    line.announce(-1)
    for each in (line, server):
        each.hear("GOODBYE", "9.7-1")
        each.say(p.GOODBYE)
    trial.exits(True)


@stage("gives up when a server that owes it an answer is lost", "9.6-3", BOTH, servers=1)
def _(trial: Trial) -> None:
    line = trial.join()
    line.announce(SERVERS)
    agree(line, "w (3,) float32")
    given(line, WEIGHTS)
    server = trial.server()
    next(messages(server, line))
    server.stream.close()
    trial.exits(False, "9.6-3")
