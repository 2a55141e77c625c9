#!/usr/bin/env python3
"""Measure minidist against its peers: `python bench.py --help`.

How a comparison becomes believable, and what this file does about it:

- *Same work.* Both sides start from the same weights and see the same batches. Before
  the clock starts their results are compared; when they differ, nothing is timed.
- *Same machine at the same time.* A computer is faster one minute and slower the next.
  So the sides take turns in short rounds within one run, and what counts is the ratio
  within each round: its median, and the quartiles as its spread.
- *No help, no harm.* Each side lives in its own process, with the same number of
  threads on the same processors. So neither one's memory settings or waiting threads
  act on the other.
"""

import argparse
import contextlib
import io
import json
import math
import os
import platform
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
MINIDIST = HERE.with_name("minidist.py")


class BenchError(Exception):
    """What the user should know, without a traceback."""


def need(module: str, extra: str, why: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise BenchError(f"{why} needs {module}, which is not installed: "
                         f"pip install '.[{extra}]'") from None


# ---------------------------------------------------------------------------
# Crews: processes that do what they are told, one crew at a time
# ---------------------------------------------------------------------------
#
# A crew is one side of a comparison: a single process, or the ranks of a group. Its
# members dial back to us, say who they are, and then answer questions, a line of JSON
# each. While they wait for a question they sleep.


class Crew:
    def __init__(self, name: str, command: list[str], size: int = 1, threads: int = 1,
                 cpus: set[int] | None = None) -> None:
        self.name = name
        token = secrets.token_hex(16)
        listener = socket.create_server(("127.0.0.1", 0), backlog=size)
        env = os.environ | {
            "BENCH_CONTROL": f"{listener.getsockname()[1]} {token}",
            "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads), "VECLIB_MAXIMUM_THREADS": str(threads),
        }
        self.process = subprocess.Popen(command, env=env, stdout=sys.stderr)
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, cpus)
        self.members: list[Any] = [None] * size
        try:
            with listener:
                self._meet(listener, token)
        except BaseException:
            self.end()
            raise

    def _meet(self, listener: socket.socket, token: str) -> None:
        listener.settimeout(0.5)
        deadline = time.monotonic() + 120
        while None in self.members:
            if self.process.poll() is not None or time.monotonic() > deadline:
                missing = self.members.count(None)
                raise BenchError(f"{self.name}: {missing} of {len(self.members)} processes did "
                                 "not come up; what they said stands above")
            with contextlib.suppress(TimeoutError):
                connection = listener.accept()[0]
                connection.settimeout(600)
                lines = connection.makefile("rw", encoding="utf-8")
                connection.close()                        # `lines` keeps it open
                hello = json.loads(lines.readline() or "{}")
                if hello.get("token") == token:
                    self.members[hello["rank"]] = lines

    def ask(self, question: str, **details: Any) -> list[Any]:
        """Everyone's answer to a question, by rank."""
        for lines in self.members:
            print(json.dumps({"do": question} | details), file=lines, flush=True)
        answers = [json.loads(lines.readline() or '{"error": "it ended"}')
                   for lines in self.members]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise BenchError(f"{self.name}, process {rank}, asked to {question}:\n"
                                 f"{answer['error']}")
        return [answer["result"] for answer in answers]

    def end(self) -> None:
        for lines in self.members:
            if lines is not None:
                lines.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(rank: int, **answers: Callable[..., Any]) -> None:
    """A member's side: answer questions until the other side hangs up."""
    port, token = os.environ["BENCH_CONTROL"].split()
    with socket.create_connection(("127.0.0.1", int(port))) as connection, \
            connection.makefile("rw", encoding="utf-8") as lines:
        print(json.dumps({"token": token, "rank": rank}), file=lines, flush=True)
        for line in lines:
            details = json.loads(line)
            try:
                answer = {"result": answers[details.pop("do")](**details)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=lines, flush=True)


@contextlib.contextmanager
def crews(starters: dict[str, Callable[[], Crew]]) -> Iterator[dict[str, Crew]]:
    with contextlib.ExitStack() as stack:
        started = {}
        for name, start in starters.items():
            started[name] = start()
            stack.callback(started[name].end)
        yield started


def member(*words: Any) -> list[str]:
    """The command that runs a member (see MEMBERS)."""
    return [str(HERE), "member", *map(str, words)]


# ---------------------------------------------------------------------------
# train: whole training steps, minidist against PyTorch
# ---------------------------------------------------------------------------
#
# The workloads are written once, for both sides: `lib` is torch or minidist.


@dataclass
class Workload:
    model: Callable[[Any], Any]
    optimizer: Callable[[Any, Any], Any]
    data: Callable[[Any, int], tuple[np.ndarray, np.ndarray]]   # inputs and targets of n samples
    batch: int
    steps: int                      # in a round, about a tenth of a second
    loss: str = "cross_entropy"


def patterns(*shape: int) -> Callable[[Any, int], tuple[np.ndarray, np.ndarray]]:
    """Ten noisy patterns to tell apart: something to learn, so that the loss goes down."""
    known = np.random.default_rng(2).standard_normal((10, *shape), np.float32)

    def draw(rng: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, 10, n)
        return 0.3 * known[labels] + rng.standard_normal((n, *shape), np.float32), labels

    return draw


def images(rng: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Patterns that are their own target."""
    x = 1 / (1 + np.exp(-patterns(784)(rng, n)[0]))
    return x, x


def text(length: int) -> Callable[[Any, int], tuple[np.ndarray, np.ndarray]]:
    """Characters, each the one before plus 0, 1 or 2; to be predicted from those before."""
    def draw(rng: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
        characters = rng.integers(0, 3, (n, length + 1)).cumsum(1) % 65
        return characters[:, :-1], characters[:, 1:]

    return draw


def mlp(lib: Any) -> Any:
    nn: Any = lib.nn
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
                         nn.Linear(128, 10))


def autoencoder(lib: Any) -> Any:
    nn, widths, layers = lib.nn, (784, 400, 200, 100, 200, 400, 784), []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers)


def lenet(lib: Any) -> Any:
    nn: Any = lib.nn
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Tanh(),       # (B, 20, 12, 12)
        nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Tanh(),      # (B, 50, 4, 4)
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


def cnn(lib: Any) -> Any:
    nn: Any = lib.nn

    def conv(inputs: int, outputs: int) -> list:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *conv(3, 32), *conv(32, 32), nn.MaxPool2d(2),          # (B, 32, 16, 16)
        *conv(32, 64), *conv(64, 64), nn.MaxPool2d(2),         # (B, 64, 8, 8)
        nn.Flatten(), nn.Linear(4096, 10))


def lstm(lib: Any) -> Any:
    nn: Any = lib.nn

    class Characters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(65, 128)
            self.lstm = nn.LSTM(128, 128, batch_first=True)
            self.head = nn.Linear(128, 65)

        def forward(self, x: Any) -> Any:
            return self.head(self.lstm(self.embedding(x))[0])

    return Characters()


def transformer(lib: Any, width: int, heads: int, layers: int, causal: bool) -> Any:
    """A pre-norm transformer over (batch, time, width), as GPT-2 and vision transformers are."""
    nn: Any = lib.nn
    F = nn.functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                     nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            batch, time, _ = x.shape
            q, k, v = (part.view(batch, time, heads, width // heads).transpose(1, 2)
                       for part in self.qkv(self.norm1(x)).split(width, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
            return x + self.mlp(self.norm2(x))

    return nn.Sequential(*(Block() for _ in range(layers)), nn.LayerNorm(width))


def gpt(lib: Any) -> Any:
    nn: Any = lib.nn

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.place = nn.Embedding(65, 128), nn.Embedding(128, 128)
            self.blocks = transformer(lib, 128, 4, 4, causal=True)
            self.head = nn.Linear(128, 65, bias=False)

        def forward(self, x: Any) -> Any:
            place = lib.arange(x.shape[1])
            return self.head(self.blocks(self.token(x) + self.place(place)))

    return GPT()


def vit(lib: Any) -> Any:
    """ViT-tiny's width and heads, four layers deep, on 64 patches of 4 x 4."""
    nn: Any = lib.nn

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 192, 4, stride=4)
            self.place = nn.Parameter(lib.zeros(1, 64, 192))
            self.blocks = transformer(lib, 192, 3, 4, causal=False)
            self.head = nn.Linear(192, 10)

        def forward(self, x: Any) -> Any:
            x = self.patches(x).flatten(2).transpose(1, 2) + self.place
            return self.head(self.blocks(x).mean(1))

    return ViT()


def momentum(optim: Any, parameters: Any, **options: Any) -> Any:
    return optim.SGD(parameters, lr=0.01, momentum=0.9, **options)


def adam(optim: Any, parameters: Any, **options: Any) -> Any:
    return optim.Adam(parameters, lr=1e-3, **options)


def adamw(optim: Any, parameters: Any, **options: Any) -> Any:
    return optim.AdamW(parameters, lr=1e-3, **options)


WORKLOADS = {
    "mlp": Workload(mlp, momentum, patterns(784), 64, 100),
    "mlp-adam": Workload(mlp, adam, patterns(784), 64, 100),
    "mlp-512": Workload(mlp, momentum, patterns(784), 512, 16),
    "mlp-512-adam": Workload(mlp, adam, patterns(784), 512, 16),
    "autoencoder": Workload(autoencoder, adam, images, 64, 20, "mse_loss"),
    "lenet": Workload(lenet, momentum, patterns(1, 28, 28), 64, 8),
    "cnn": Workload(cnn, momentum, patterns(3, 32, 32), 64, 2),
    "lstm": Workload(lstm, adam, text(64), 32, 8),
    "gpt": Workload(gpt, adamw, text(128), 16, 2),
    "vit": Workload(vit, adamw, patterns(3, 32, 32), 64, 1),
}

# The sides. PyTorch stands for itself as people write it, "tuned" by what its manual advises
# (a fused optimizer, images with channels last), and "compiled" besides.
SIDES = ("minidist", "torch", "tuned", "compiled")


def prepare(workload: Workload, lib: Any, rank: int = 0) -> tuple[Any, list]:
    """The model, with the same weights on all sides, and sixteen batches."""
    draw = np.random.default_rng(rank)
    data = [[lib.tensor(array) for array in workload.data(draw, workload.batch)]
            for _ in range(16)]
    model = workload.model(lib)
    rng, weights = np.random.default_rng(1), {}
    for key, p in model.named_parameters():
        bound = np.prod(p.shape[1:]) ** -0.5 if len(p.shape) > 1 else 0.0
        weights[key] = lib.tensor(rng.uniform(-bound, bound, tuple(p.shape)).astype(np.float32))
    model.load_state_dict(weights, strict=False)           # a batch norm's statistics stay
    return model, data


def loss_of(workload: Workload, lib: Any, out: Any, y: Any) -> Any:
    function = getattr(lib.nn.functional, workload.loss)
    return function(out.reshape(-1, out.shape[-1]), y.reshape(-1)
                    if workload.loss == "cross_entropy" else y)


def train_member(side: str, threads: str, name: str) -> None:
    """One side: a model, its optimizer, and the batches in a circle."""
    workload, lib = WORKLOADS[name], import_module("minidist" if side == "minidist" else "torch")
    if side == "minidist":
        lib.tune()
    else:
        lib.set_num_threads(int(threads))
    model, data = prepare(workload, lib)
    plain = side in ("minidist", "torch")
    optimizer = workload.optimizer(lib.optim, model.parameters(), **({} if plain else
                                                                     {"fused": True}))
    if not plain and data[0][0].ndim == 4:
        model.to(memory_format=lib.channels_last)
        data = [[x.to(memory_format=lib.channels_last), y] for x, y in data]
    run = lib.compile(model) if side == "compiled" else model
    taken = 0

    def steps(count: int) -> dict[str, list[float]]:
        nonlocal taken
        seconds, losses = [], []
        for _ in range(count):
            x, y = data[taken % len(data)]
            taken += 1
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_of(workload, lib, run(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "losses": losses}

    def infer(count: int) -> list[float]:
        """Seconds of each of so many evaluations."""
        seconds = []
        model.eval()
        with lib.inference_mode():
            for k in range(count):
                start = time.perf_counter()
                run(data[k % len(data)][0])
                seconds.append(time.perf_counter() - start)
        model.train()
        return seconds

    def save(path: str) -> None:
        with open(path, "wb") as file:
            np.savez(file, **{key: p.detach().numpy() for key, p in model.named_parameters()})

    before = resident()
    serve(0, steps=steps, infer=infer, save=save, memory=lambda: resident("VmHWM") - before)


def resident(what: str = "VmRSS") -> float:
    """Megabytes of memory that this process has (VmRSS) or had at most (VmHWM), on Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) / 1024
    return math.nan


def check_training(name: str, sides: dict[str, Crew]) -> dict[str, list[float]]:
    """Three steps on all sides must give the same losses and the same parameters."""
    losses, parameters = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for side, crew in sides.items():
            losses[side] = crew.ask("steps", count=3)[0]["losses"]
            path = f"{folder}/{side}.npz"
            crew.ask("save", path=path)
            with np.load(path) as file:
                parameters[side] = dict(file)
    for side in sides:
        if not np.allclose(losses[side], losses["torch"], rtol=1e-5):
            raise BenchError(f"{name}: nothing was timed, since the losses of the first steps "
                             f"differ: {side} {losses[side]}, torch {losses['torch']}")
        for key, value in parameters["torch"].items():
            # One part in 1e4 of the largest change would be seen; rounding is far below.
            difference = np.abs(parameters[side][key] - value)
            allowed = 1e-5 * max(1.0, np.abs(value).max())
            # Adam's first steps divide a gradient by itself: where that is rounding alone (the
            # bias of attention's keys has none), its sign is chance. So the mean counts.
            if "adam" in WORKLOADS[name].optimizer.__name__:
                difference, allowed = difference.mean(), 10 * allowed
            if not np.max(difference) <= allowed:
                raise BenchError(f"{name}: nothing was timed, since {side}'s {key} differs by "
                                 f"{np.max(difference):.2g} after three steps")
    return losses


def train(options: argparse.Namespace) -> list[dict]:
    need("torch", "bench", "the comparison with PyTorch")
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    rows = []
    for threads in options.threads:
        for name in options.models:
            rows.append(train_one(name, threads, set(cpus[:threads]), options))
            show_training(rows[-1], header=len(rows) == 1)
    return rows


def train_one(name: str, threads: int, cpus: set[int], options: argparse.Namespace) -> dict:
    def starter(side: str) -> Callable[[], Crew]:
        command = [sys.executable, *member("train", side, threads, name)]
        return lambda: Crew(f"{side} {name}", command, threads=threads, cpus=cpus)

    steps = 3 if options.quick else WORKLOADS[name].steps
    rounds = options.rounds or (2 if options.quick else 21)
    names = ["minidist", "torch", *(side for side in SIDES if side in options.best)]
    with crews({side: starter(side) for side in names}) as sides:
        losses = check_training(name, sides)
        memory = {side: crew.ask("memory")[0] for side, crew in sides.items()}
        times: dict[str, list[float]] = {side: [] for side in names}
        inference: dict[str, list[float]] = {side: [] for side in names}
        for turn in range(-1, rounds):                    # round -1 warms up
            for side in names if turn % 2 else names[::-1]:
                answer = sides[side].ask("steps", count=steps)[0]
                losses[side] += answer["losses"]
                evaluations = sides[side].ask("infer", count=steps)[0]
                if turn >= 0:
                    times[side].append(statistics.median(answer["seconds"]))
                    inference[side].append(statistics.median(evaluations))
    ours, theirs = (np.array(losses[side]) for side in ("minidist", "torch"))
    fastest = min(names[1:], key=lambda side: statistics.median(times[side]))
    return {
        "workload": name, "threads": threads, "batch": WORKLOADS[name].batch,
        **{side: spread(times[side]) for side in names},
        "ratio": ratio(times, "torch"), "best": fastest, "ratio to best": ratio(times, fastest),
        "inference": {side: spread(inference[side]) for side in names},
        "inference ratio": ratio(inference, "torch"), "memory in MB": memory,
        "losses": losses, "largest loss difference": float(np.abs(ours - theirs).max()),
    }


def ratio(times: dict[str, list[float]], side: str) -> dict[str, float]:
    return spread([a / b for a, b in zip(times["minidist"], times[side])])


def show_training(row: dict, header: bool) -> None:
    if header:
        print(f"{'one training step':18}{'threads':>8}{'minidist':>13}{'PyTorch':>13}"
              f"{'ratio':>7}{'quartiles':>14}{'best':>7}{'inference':>11}{'memory':>13}"
              "   losses, and how far apart")
    ours, theirs, found = (row[key] for key in ("minidist", "torch", "ratio"))
    first, last = row["losses"]["minidist"][0], row["losses"]["minidist"][-1]
    memory = "{minidist:.0f} / {torch:.0f} MB".format(**row["memory in MB"])
    print(f"{row['workload']:18}{row['threads']:>8}{1e3 * ours['median']:>10.2f} ms"
          f"{1e3 * theirs['median']:>10.2f} ms{found['median']:>7.2f}"
          f"{found['low']:>7.2f} ..{found['high']:5.2f}{row['ratio to best']['median']:>7.2f}"
          f"{row['inference ratio']['median']:>11.2f}{memory:>13}   {first:.3f} to {last:.3f}, "
          f"{row['largest loss difference']:.0e}", flush=True)


def plot_training(rows: list[dict], axes: Callable[..., Any]) -> None:
    bars, *curves = axes(1 + len({row["workload"] for row in rows}))
    labels = [f"{row['workload']}\n{row['threads']} thread(s)" for row in rows]
    for shift, side in enumerate(("minidist", "torch")):
        bars.bar(np.arange(len(rows)) + 0.4 * shift, width=0.4, label=side,
                 height=[1e3 * row[side]["median"] for row in rows])
    bars.set(title="one training step", ylabel="ms", yscale="log")
    bars.set_xticks(np.arange(len(rows)) + 0.2, labels)
    bars.legend()
    for axis, row in zip(curves, {row["workload"]: row for row in rows}.values()):
        for side, style in zip(("minidist", "torch"), ("-", "--")):
            axis.plot(row["losses"][side], style, label=side)
        axis.set(title=row["workload"], xlabel="step", ylabel="loss", yscale="log")
        axis.legend()


# ---------------------------------------------------------------------------
# ops: single operations, from ten elements to a million
# ---------------------------------------------------------------------------
#
# An operation is applied LINKS times in a row, h = op(h, y), and the gradients of x and y are
# carried back: so the fixed cost of starting a backward pass counts little. On ten elements
# the time is that of the framework, on a million that of the arithmetic and of the memory.
# The floor below which neither can come is measured beside: NumPy's bare sum of two arrays,
# or its bare product of two matrices, into memory that is there already.

LINKS = 10


@dataclass
class Operation:
    call: Callable[[Any, Any, Any], Any]      # of the library, h and y
    streams: int = 0      # arrays read and written, forward and backward; 0: three products


def unary(name: str) -> Callable[[Any, Any, Any], Any]:
    return lambda lib, h, y: getattr(lib.nn.functional, name)(h)


OPERATIONS = {
    # A sum reads two arrays and writes one; backward it adds to the gradient of y.
    "add": Operation(lambda lib, h, y: h + y, 6),
    "mul": Operation(lambda lib, h, y: h * y, 12),
    "div": Operation(lambda lib, h, y: h / y, 12),
    "tanh": Operation(lambda lib, h, y: h.tanh(), 5),
    "sigmoid": Operation(unary("sigmoid"), 5),
    "relu": Operation(unary("relu"), 5),
    "gelu": Operation(unary("gelu"), 5),
    "softmax": Operation(lambda lib, h, y: h.softmax(-1), 5),
    "layer_norm": Operation(lambda lib, h, y: lib.nn.functional.layer_norm(h, h.shape[-1:]), 5),
    "matmul": Operation(lambda lib, h, y: h @ y),
}
ELEMENTS = {"10": 10, "1K": 2**10, "64K": 2**16, "1M": 2**20}


def operands(name: str, elements: str) -> tuple[np.ndarray, np.ndarray]:
    """x and y: rows of at most 1,024 elements, or square matrices of about as many."""
    rng, n = np.random.default_rng(0), ELEMENTS[elements]
    shape = (max(n // 1024, 1), min(n, 1024))
    if name == "matmul":
        shape = (round(n ** 0.5),) * 2
        return (rng.standard_normal(shape, np.float32),
                np.linalg.qr(rng.standard_normal(shape))[0].astype(np.float32))
    return rng.standard_normal(shape, np.float32), rng.uniform(0.8, 1.25, shape).astype(np.float32)


def ops_member(side: str, threads: str, name: str, elements: str) -> None:
    arrays = operands(name, elements)
    if side == "floor":
        out, stage = np.empty_like(arrays[0]), np.matmul if name == "matmul" else np.add

        def run(repeat: int) -> None:
            for _ in range(LINKS * repeat):
                stage(*arrays, out=out)

        share = OPERATIONS[name].streams / 3 or 3
    else:
        lib = import_module(side)
        lib.tune() if side == "minidist" else lib.set_num_threads(int(threads))
        x, y = (lib.tensor(array, requires_grad=True) for array in arrays)
        # Not ones: softmax and layer norm have no gradient in that direction.
        seed = lib.tensor(np.random.default_rng(1).standard_normal(arrays[0].shape, np.float32))
        call, share = OPERATIONS[name].call, 1.0

        def run(repeat: int) -> None:
            for _ in range(repeat):
                x.grad = y.grad = None
                h = x
                for _ in range(LINKS):
                    h = call(lib, h, y)
                h.backward(seed)

    def rounds(repeat: int) -> float:
        """Seconds that one link takes, forward and backward."""
        start = time.perf_counter()
        run(repeat)
        return share * (time.perf_counter() - start) / (repeat * LINKS)

    def gradients(path: str) -> None:
        run(1)
        with open(path, "wb") as file:
            np.savez(file, *(t.grad.numpy() for t in (x, y) if t.grad is not None))

    serve(0, rounds=rounds, gradients=gradients)


def ops(options: argparse.Namespace) -> list[dict]:
    need("torch", "bench", "the comparison with PyTorch")
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    rows = []
    for threads in options.threads:
        for elements in options.elements:
            for name in options.ops:
                row = ops_one(name, elements, threads, set(cpus[:threads]), options)
                rows.append(row)
                show_op(row, header=len(rows) == 1)
            ratios = [r["ratio"]["median"] for r in rows
                      if (r["elements"], r["threads"]) == (elements, threads)]
            print(f"{'geometric mean':16}{elements:>6}{statistics.geometric_mean(ratios):>36.2f}")
    return rows


def ops_one(name: str, elements: str, threads: int, cpus: set[int],
            options: argparse.Namespace) -> dict:
    def starter(side: str) -> Callable[[], Crew]:
        command = [sys.executable, *member("ops", side, threads, name, elements)]
        return lambda: Crew(f"{side} {name}", command, threads=threads, cpus=cpus)

    names = ("minidist", "torch", "floor")
    with crews({side: starter(side) for side in names}) as sides, \
            tempfile.TemporaryDirectory() as folder:
        found = []
        for side in names[:2]:
            sides[side].ask("gradients", path=f"{folder}/{side}.npz")
            with np.load(f"{folder}/{side}.npz") as file:
                found.append(list(file.values()))
        for ours, theirs in zip(*found):
            if not np.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max()):
                raise BenchError(f"{name} of {elements}: nothing was timed, since the gradients "
                                 f"differ by up to {np.abs(ours - theirs).max():.2g}")
        first = max(sides[side].ask("rounds", repeat=2)[0] for side in names[:2])
        repeat = max(1, round((0.002 if options.quick else 0.02) / (first * LINKS)))
        times: dict[str, list[float]] = {side: [] for side in names}
        for turn in range(-1, options.rounds or (3 if options.quick else 15)):
            for side in names if turn % 2 else names[::-1]:
                seconds = sides[side].ask("rounds", repeat=repeat)[0]
                if turn >= 0:                             # round -1 warms up
                    times[side].append(seconds)
    return {"op": name, "elements": elements, "threads": threads,
            **{side: spread(times[side]) for side in names}, "ratio": ratio(times, "torch"),
            "minidist to floor": ratio(times, "floor"),
            "torch to floor": spread([a / b for a, b in zip(times["torch"], times["floor"])])}


def show_op(row: dict, header: bool) -> None:
    if header:
        print("one operation, forward and backward; to the floor: the time over that of the bare "
              "arithmetic\n"
              f"{'':16}{'elements':>6}{'minidist':>12}{'PyTorch':>12}{'ratio':>10}{'quartiles':>14}"
              f"{'to the floor: ours, PyTorch':>30}")
    print(f"{row['op']:16}{row['elements']:>6}{1e6 * row['minidist']['median']:>11,.1f}u"
          f"{1e6 * row['torch']['median']:>11,.1f}u{row['ratio']['median']:>10.2f}"
          f"{row['ratio']['low']:>7.2f} ..{row['ratio']['high']:5.2f}"
          f"{row['minidist to floor']['median']:>20.1f}{row['torch to floor']['median']:>10.1f}",
          flush=True)


def plot_ops(rows: list[dict], axes: Callable[..., Any]) -> None:
    names = list(dict.fromkeys(row["op"] for row in rows))
    for axis, name in zip(axes(len(names)), names):
        chosen = [row for row in rows
                  if row["op"] == name and row["threads"] == rows[0]["threads"]]
        for side, style in (("minidist", "o-"), ("torch", "s--"), ("floor", "k:")):
            axis.plot([ELEMENTS[row["elements"]] for row in chosen],
                      [1e6 * row[side]["median"] for row in chosen], style, label=side)
        axis.set(title=name, xlabel="elements", ylabel="us", xscale="log", yscale="log")
        axis.legend()


# ---------------------------------------------------------------------------
# allreduce: the sum of an array over all ranks, every transport against gloo
# ---------------------------------------------------------------------------

SIZES = {"1KB": 2**10, "64KB": 2**16, "1MB": 2**20, "4MB": 2**22, "64MB": 2**26}
TRANSPORTS = ("pipe", "shm", "tcp", "udp")


def allreduce_member(name: str, rendezvous: str) -> None:
    """One rank of one group; who it is stands in the environment, as with torchrun."""
    if name == "gloo":
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}",
                                rank=int(os.environ["RANK"]),
                                world_size=int(os.environ["WORLD_SIZE"]))
        tensor = torch.tensor
    else:
        import minidist as md
        md.tune()
        dist, tensor = md.distributed, md.tensor
        dist.init_process_group(name)
    rank, size = dist.get_rank(), dist.get_world_size()

    def check(count: int) -> bool:
        """Whole numbers, so that the sum is exact whatever the order."""
        x = tensor((np.arange(count) % 1000 + rank).astype(np.float32))
        dist.all_reduce(x)
        expected = size * (np.arange(count) % 1000) + size * (size - 1) // 2
        return bool((x.numpy() == expected).all())

    def rounds(count: int, repeat: int) -> float:
        x = tensor(np.zeros(count, np.float32))           # stays finite however often it is summed
        dist.all_reduce(x)                                # all are here, and awake
        start = time.perf_counter()
        for _ in range(repeat):
            dist.all_reduce(x)
        return (time.perf_counter() - start) / repeat

    serve(rank, check=check, rounds=rounds)
    dist.destroy_process_group()


def allreduce(options: argparse.Namespace) -> list[dict]:
    need("torch", "bench", "the comparison with gloo")
    names = ["gloo", *options.transports]
    rows = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder, crews({
                name: allreduce_starter(name, ranks, folder) for name in names}) as groups:
            for size in options.sizes:
                rows += allreduce_one(size, ranks, groups, options)
                show_allreduce(rows[-len(names):], header=size == options.sizes[0])
    return rows


def allreduce_starter(name: str, ranks: int, folder: str) -> Callable[[], Crew]:
    transport = "tcp" if name == "gloo" else name         # gloo's ranks are told apart by it, too
    command = [sys.executable, str(MINIDIST), "launch", "--nproc-per-node", str(ranks),
               "--transport", transport, *member("allreduce", name, f"{folder}/gloo")]
    return lambda: Crew(f"{name} with {ranks} ranks", command, size=ranks)


def allreduce_one(size: str, ranks: int, groups: dict[str, Crew],
                  options: argparse.Namespace) -> list[dict]:
    count = SIZES[size] // 4
    repeat = 3 if options.quick else max(1, min(200, 2**23 // SIZES[size]))
    rounds = options.rounds or (2 if options.quick else 11)
    for name, crew in groups.items():
        if not all(crew.ask("check", count=count)):
            raise BenchError(f"{name}, {ranks} ranks, {size}: nothing was timed, since the sum "
                             "is wrong")
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(rounds):
        order = list(groups) if turn % 2 else list(groups)[::-1]
        for name in order:
            times[name].append(max(groups[name].ask("rounds", count=count, repeat=repeat)))
    return [{
        "transport": name, "ranks": ranks, "size": size, "bytes": SIZES[size],
        "time": spread(times[name]),
        "ratio": spread([a / b for a, b in zip(times[name], times["gloo"])]),
    } for name in groups]


def show_allreduce(rows: list[dict], header: bool) -> None:
    if header:
        print(f"all_reduce, {rows[0]['ranks']} ranks; in brackets the ratio to gloo")
        print(" " * 6 + "".join(f"{row['transport']:>20}" for row in rows))
    cells = [f"{1e6 * row['time']['median']:.0f} us ({row['ratio']['median']:.2f})"
             for row in rows]
    print(f"{rows[0]['size']:6}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def plot_allreduce(rows: list[dict], axes: Callable[..., Any]) -> None:
    ranks = sorted({row["ranks"] for row in rows})
    for axis, count in zip(axes(len(ranks)), ranks):
        for name in dict.fromkeys(row["transport"] for row in rows):
            line = [row for row in rows if (row["transport"], row["ranks"]) == (name, count)]
            axis.errorbar([row["bytes"] for row in line],
                          [1e6 * row["time"]["median"] for row in line], marker="o", label=name)
        axis.set(title=f"all_reduce, {count} ranks", xlabel="bytes", ylabel="us",
                 xscale="log", yscale="log")
        axis.legend()


# ---------------------------------------------------------------------------
# network: what a transport takes for a message there and back, and for many bytes
# ---------------------------------------------------------------------------

# UDP comes with a key or without, and with trains of datagrams (GSO, GRO) or one by one.
CARRIERS = {"tcp": "tcp", "pipe": "pipe", "shm": "shm", "udp": "udp", "udp-nokey": "udp",
            "udp-single": "udp", "udp-nokey-single": "udp"}
BATCH = 4 * 2**20           # bytes of one message, where many are to go through


def network_member(link: str) -> None:
    """One of two nodes: node 0 begins, node 1 answers."""
    import minidist as md
    md.tune()
    package = md.transports().__package__                 # beside minidist.py, or installed
    transports, udp = import_module(package), vars(import_module(f"{package}.udp"))
    config = transports.Config.from_env(os.environ)
    config.key = None if "nokey" in link else config.key
    udp["ANCILLARY"] &= "single" not in link
    transport = transports.open(CARRIERS[link], config)
    first, peer, kind = config.node == 0, 1 - config.node, transports.protocol.OPAQUE
    message, arrived = bytearray(range(256)) * 4, bytearray(1024)
    batch, place = np.arange(BATCH // 4), np.empty(BATCH // 4, int)

    def ping(repeat: int) -> float:
        """Seconds of a kilobyte's way there and back."""
        start = time.perf_counter()
        for _ in range(repeat):
            if first:
                transport.send(peer, kind, (0,), [message])
            transport.recv(peer, into=arrived)
            if not first:
                transport.send(peer, kind, (0,), [arrived])
        return (time.perf_counter() - start) / repeat

    def stream(repeat: int) -> float:
        """Seconds until a batch is there, when one follows the other."""
        start = time.perf_counter()
        for _ in range(repeat):
            if first:
                transport.send(peer, kind, (0,), [batch])
            else:
                transport.recv(peer, into=place)
        if first:                                         # the last one's receipt
            transport.recv(peer)
        else:
            transport.send(peer, kind, (0,))
        return (time.perf_counter() - start) / repeat

    def check() -> bool:
        ping(1)
        stream(1)
        return arrived == message and (first or bool((place == batch).all()))

    serve(config.node, check=check, ping=ping, stream=stream)
    transport.close()


def network(options: argparse.Namespace) -> list[dict]:
    links = list(dict.fromkeys(["tcp", *options.links]))
    repeat = {"ping": 20 if options.quick else 1000, "stream": 1 if options.quick else 16}
    times: dict[tuple, list[float]] = {(link, what): [] for link in links for what in repeat}
    command = [sys.executable, str(MINIDIST), "launch", "--nproc-per-node", "2", "--transport"]

    def starter(link: str) -> Callable[[], Crew]:
        return lambda: Crew(link, [*command, CARRIERS[link], *member("network", link)], size=2)

    with crews({link: starter(link) for link in links}) as pairs:
        for link, pair in pairs.items():
            if not all(pair.ask("check")):
                raise BenchError(f"{link}: nothing was timed, since what arrived is not what "
                                 "was sent")
        for turn in range(options.rounds or (2 if options.quick else 11)):
            for link in links if turn % 2 else links[::-1]:
                for what in repeat:
                    answer = max(pairs[link].ask(what, repeat=repeat[what]))
                    times[link, what].append(answer)
    rows = [{
        "link": link, "what": what, "time": spread(times[link, what]),
        "bytes": 1024 if what == "ping" else BATCH,
        "ratio": spread([a / b for a, b in zip(times[link, what], times["tcp", what])]),
    } for link in links for what in repeat]
    show_network(rows)
    return rows


def show_network(rows: list[dict]) -> None:
    print("1 KB there and back, and what goes through one way in messages of 4 MB; in brackets "
          "the times tcp's time")
    for ping, stream in zip(rows[::2], rows[1::2]):
        print(f"{ping['link']:18}{1e6 * ping['time']['median']:8.0f} us "
              f"({ping['ratio']['median']:.2f})"
              f"{stream['bytes'] / stream['time']['median'] / 1e9:8.2f} GB/s "
              f"({stream['ratio']['median']:.2f})")


def plot_network(rows: list[dict], axes: Callable[..., Any]) -> None:
    for axis, what in zip(axes(2), ("ping", "stream")):
        line = [row for row in rows if row["what"] == what]
        axis.barh([row["link"] for row in line], [row["ratio"]["median"] for row in line])
        axis.set(title=what, xlabel="time / tcp's", xscale="log")


# ---------------------------------------------------------------------------
# parallel: training steps of two processes, against PyTorch's on gloo
# ---------------------------------------------------------------------------


class NaiveDataParallel:
    """Data parallelism in its plainest form, to see what buckets buy: each gradient is a message
    of its own, and the first leaves only when all are there.

        naive = NaiveDataParallel(model, group)
        loss_of(naive(x), y).backward()
        naive.average_gradients()
    """

    def __init__(self, model: Any, group: Any) -> None:
        self.model, self.group = model, group
        for parameter in model.parameters():
            group.broadcast(parameter, 0)

    def __call__(self, x: Any) -> Any:
        return self.model(x)

    def average_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.group.all_reduce(parameter.grad)
                parameter.grad /= self.group.get_world_size()


PAIRS = {"torch": "tcp", "tcp": "tcp", "shm": "shm", "naive": "tcp"}     # side: transport


def parallel_member(side: str, name: str, rendezvous: str) -> None:
    """One rank of two that train one model on batches of their own."""
    workload, rank = WORKLOADS[name], int(os.environ["RANK"])
    lib = import_module("torch" if side == "torch" else "minidist")
    if side == "torch":
        lib.set_num_threads(1)
        lib.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank,
                                           world_size=2)
    else:
        lib.tune()
        lib.distributed.init_process_group()
    model, data = prepare(workload, lib, rank)
    if side == "naive":
        run = NaiveDataParallel(model, lib.distributed)
    else:
        run = lib.nn.parallel.DistributedDataParallel(model)
    optimizer, taken = workload.optimizer(lib.optim, model.parameters()), 0

    def steps(count: int) -> dict[str, list[float]]:
        nonlocal taken
        losses, start = [], time.perf_counter()
        for _ in range(count):
            x, y = data[taken % len(data)]
            taken += 1
            optimizer.zero_grad()
            loss = loss_of(workload, lib, run(x), y)
            loss.backward()
            if side == "naive":
                run.average_gradients()
            optimizer.step()
            losses.append(loss.item())
        return {"seconds": [(time.perf_counter() - start) / count], "losses": losses}

    serve(rank, steps=steps)
    lib.distributed.destroy_process_group()


def parallel(options: argparse.Namespace) -> list[dict]:
    need("torch", "bench", "the comparison with PyTorch's DistributedDataParallel")
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder, crews({
                side: parallel_starter(side, name, f"{folder}/gloo") for side in PAIRS}) as sides:
            rows += parallel_one(name, sides, options)
        show_parallel(rows[-len(PAIRS):], header=len(rows) == len(PAIRS))
    return rows


def parallel_starter(side: str, name: str, rendezvous: str) -> Callable[[], Crew]:
    command = [sys.executable, str(MINIDIST), "launch", "--nproc-per-node", "2", "--transport",
               PAIRS[side], *member("parallel", side, name, rendezvous)]
    return lambda: Crew(f"{side} {name}", command, size=2)


def parallel_one(name: str, sides: dict[str, Crew], options: argparse.Namespace) -> list[dict]:
    losses = {side: [rank["losses"] for rank in crew.ask("steps", count=3)]
              for side, crew in sides.items()}
    for side in sides:
        if not np.allclose(losses[side], losses["torch"], rtol=1e-5):
            raise BenchError(f"{name}: nothing was timed, since the ranks' losses differ: {side} "
                             f"{losses[side]}, torch {losses['torch']}")
    steps = 3 if options.quick else WORKLOADS[name].steps
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(options.rounds or (2 if options.quick else 11)):
        for side in sides if turn % 2 else list(sides)[::-1]:
            answers = sides[side].ask("steps", count=steps)
            times[side].append(max(rank["seconds"][0] for rank in answers))
    return [{"model": name, "side": side, "time": spread(times[side]),
             "ratio": spread([a / b for a, b in zip(times[side], times["torch"])])}
            for side in sides]


def show_parallel(rows: list[dict], header: bool) -> None:
    if header:
        print("A step of two workers, ms; in brackets the ratio to PyTorch's")
        print(" " * 14 + "".join(f"{row['side']:>18}" for row in rows))
    cells = [f"{1e3 * row['time']['median']:.2f} ({row['ratio']['median']:.2f})" for row in rows]
    print(f"{rows[0]['model']:14}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def plot_parallel(rows: list[dict], axes: Callable[..., Any]) -> None:
    for axis, side in zip(axes(len(PAIRS)), PAIRS):
        line = [row for row in rows if row["side"] == side]
        axis.bar([row["model"] for row in line], [1e3 * row["time"]["median"] for row in line])
        axis.set(title=side, ylabel="ms")


# ---------------------------------------------------------------------------
# Strategies on simulated clusters
# ---------------------------------------------------------------------------
#
# Every strategy trains the same network on the same samples, in clusters that differ in one
# thing each. Time is virtual, so other work on this machine changes nothing, and a seed gives
# the same figures everywhere. What the papers lead us to expect stands here, written down before
# the first run; the report says of each expectation whether it came true.

CLUSTERS: dict[str, dict[str, Any]] = {
    "even": {},
    "stragglers": {"compute": {"noise": 0.5, "straggle": 0.05, "speeds": [1, 1, 1, 0.5]}},
    "slow links": {"link": {"bandwidth": 1.25e6, "latency": 0.005}},
}
MANY = "even, many"                           # with more and more workers

# Label: the strategy, its options, parameter servers, and whether each push is a step of its own
# (then n workers make n of them, and each gets an n-th of the learning rate).
STRATEGIES: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "sync": ("sync", {}, 0, False),
    "sync bf16": ("sync", {"compress": "bf16"}, 0, False),
    "downpour": ("downpour", {}, 1, True),
    "dcasgd": ("dcasgd", {}, 1, True),
    "ssp": ("ssp", {"bound": 3}, 1, False),
    "backup": ("ssp", {"bound": 0, "backup": 1}, 1, False),
    "easgd": ("easgd", {}, 1, False),
    "local": ("local", {"sync_every": 8}, 0, False),
    "diloco": ("diloco", {"sync_every": 16}, 0, False),
    "gossip": ("gossip", {}, 0, False),
    "ad-psgd": ("gossip", {"asynchronous": True}, 0, False),
}


class Figures:
    """The rows of a report, by cluster, strategy and workers."""

    def __init__(self, rows: list[dict]):
        self.rows = {(row["cluster"], row["strategy"], row["workers"]): row for row in rows}
        self.most = max(row["workers"] for row in rows)

    def __call__(self, key: str, cluster: str, strategy: str, workers: int = 8) -> float:
        return self.rows[cluster, strategy, workers][key]

    def less(self, key: str, cluster: str, one: str, other: str, times: float = 1.0) -> bool:
        return self(key, cluster, one) < times * self(key, cluster, other)


# Who says so, what we expect of it here, and how to see whether it came true.
EXPECTED: list[tuple[str, str, Callable[[Figures], bool]]] = [
    ("Chen et al. 2016", "even: the last accuracy of sync is not below that of downpour",
     lambda f: f("accuracy", "even", "sync") >= f("accuracy", "even", "downpour")),
    ("Dean et al. 2012", "stragglers: downpour is through its samples before sync",
     lambda f: f.less("seconds", "stragglers", "downpour", "sync")),
    ("Chen et al. 2016", "stragglers: one backup worker makes sync faster",
     lambda f: f.less("seconds", "stragglers", "backup", "sync")),
    ("Ho et al. 2013", "stragglers: bounded staleness is faster than sync",
     lambda f: f.less("seconds", "stragglers", "ssp", "sync")),
    ("Ho et al. 2013", "stragglers: its mean staleness is below that of downpour",
     lambda f: f.less("staleness", "stragglers", "ssp", "downpour")),
    ("Lian et al. 2018", "stragglers: asynchronous gossip is faster than gossip in step",
     lambda f: f.less("seconds", "stragglers", "ad-psgd", "gossip")),
    ("Stich 2019", "slow links: meeting every 8 steps sends under a quarter of the bytes of sync",
     lambda f: f.less("megabytes", "slow links", "local", "sync", 0.25)),
    ("Stich 2019", "slow links: and needs under half its time",
     lambda f: f.less("seconds", "slow links", "local", "sync", 0.5)),
    ("Douillard et al. 2023", "slow links: DiLoCo comes within 2 points of the accuracy of sync",
     lambda f: f("accuracy", "slow links", "diloco") > f("accuracy", "slow links", "sync") - 0.02),
    ("Lian et al. 2017", "slow links: gossip on a ring is faster than downpour's one server",
     lambda f: f.less("seconds", "slow links", "gossip", "downpour")),
    ("Micikevicius et al. 2018", "slow links: half the bits lose at most a point of accuracy",
     lambda f: abs(f("accuracy", "slow links", "sync bf16")
                   - f("accuracy", "slow links", "sync")) <= 0.01),
    ("Mitliagkas et al. 2016", "many: staleness is about the number of other workers",
     lambda f: 0.8 < f("staleness", MANY, "downpour", f.most) / (f.most - 1) < 1.2),
    ("Chen et al. 2016", "many: and the more there are, the worse downpour learns",
     lambda f: f("accuracy", MANY, "downpour", f.most) < f("accuracy", MANY, "downpour", 4)),
    ("Thakur et al. 2005", "many: the time of sync grows like log n, the one server's like n",
     lambda f: f("seconds", MANY, "sync", f.most) < f("seconds", MANY, "downpour", f.most)),
]


def strategies(options: argparse.Namespace) -> list[dict]:
    many = [4, 8] if options.quick else [4, 16, 64, 256]
    jobs = [(cluster, table, 8, 128, 30) for cluster, table in CLUSTERS.items()]
    jobs += [(MANY, {}, workers, 512, 10) for workers in many]
    rows = []
    print(f"{len(EXPECTED)} expectations, written down before these runs:")
    for source, text, _ in EXPECTED:
        print(f"  {text} ({source})")
    for cluster, table, workers, batch, epochs in jobs:
        print(f"\n{cluster}, {workers} workers\n{'':10}  accuracy  virtual s  to 90 %  MB sent"
              "  staleness")
        for name in options.strategies:
            if workers > 64 and "compress" in STRATEGIES[name][1]:
                continue                                # its ring takes n * n messages a step
            rows.append({"cluster": cluster, "strategy": name, "workers": workers,
                         **train_simulated(name, table, workers, batch,
                                           2 if options.quick else epochs)})
            show_strategy(rows[-1])
    print()
    return rows + judged(rows)


def judged(rows: list[dict]) -> list[dict]:
    """Of each expectation for which there are figures: did it come true?"""
    found, figures = [], Figures(rows)
    for source, text, check in EXPECTED:
        with contextlib.suppress(KeyError):             # a strategy that was not asked for
            found.append({"expected": text, "source": source, "true": bool(check(figures))})
            print(f"{'true ' if found[-1]['true'] else 'FALSE'}  {text} ({source})")
    return found


def train_simulated(name: str, cluster: dict, workers: int, batch: int, epochs: int) -> dict:
    md = import_module("minidist")
    strategy, given, servers, asynchronous = STRATEGIES[name]
    make = md.plugin(strategy, md.distributed.Strategy)
    rate = 0.2 * batch / 128 / (workers if asynchronous else 1)

    def work() -> dict:
        dist, nn = md.distributed, md.nn
        dist.init_process_group()
        md.manual_seed(0)
        data, test = md.load_dataset("digits")
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        train = make(model, md.optim.SGD(model.parameters(), lr=rate), **given)
        loader = md.utils.data.DataLoader(data, batch, shuffle=True)
        clock, curve, begin = train.group.transport.clock, [], train.group.transport.clock()
        for epoch in range(epochs):
            for x, y in train.batches(loader):
                train.zero_grad()
                if len(x):
                    nn.functional.cross_entropy(model(x), y).backward()
                train.step()
            if epoch == epochs - 1:
                train.finish()
            if dist.get_rank() == 0:                    # by its own parameters
                with md.no_grad():
                    images, labels = test.tensors
                    right = (model(images).argmax(1) == labels).float().mean().item()
                curve.append([clock() - begin, right])
        return {"curve": curve, "seconds": clock() - begin,
                "bytes": train.group.transport.stats["bytes_sent"],
                "staleness": dict(getattr(train, "staleness", {}))}
    with contextlib.redirect_stdout(io.StringIO()):
        ranks = md.launch(work, workers=workers, transport="sim", servers=servers,
                          cluster={"seed": 1, **cluster})
    curve = ranks[0]["curve"]
    pushes = [(age, count) for rank in ranks for age, count in rank["staleness"].items()]
    return {"accuracy": curve[-1][1], "curve": curve, "seconds": max(r["seconds"] for r in ranks),
            "to_90": next((at for at, right in curve if right >= 0.9), None),
            "megabytes": statistics.mean(rank["bytes"] for rank in ranks) / 1e6,
            "staleness": sum(age * count for age, count in pushes)
            / max(1, sum(count for _, count in pushes))}


def show_strategy(row: dict) -> None:
    reached = "never" if row["to_90"] is None else f"{row['to_90']:.2f}"
    print(f"{row['strategy']:10}  {row['accuracy']:8.1%}  {row['seconds']:9.2f}  {reached:>7}"
          f"  {row['megabytes']:7.2f}  {row['staleness']:9.1f}", flush=True)


def plot_strategies(rows: list[dict], axes: Callable[..., Any]) -> None:
    runs = [row for row in rows if "curve" in row]
    places = list(dict.fromkeys((row["cluster"], row["workers"]) for row in runs))
    for axis, (cluster, workers) in zip(axes(len(places)), places):
        for row in runs:
            if (row["cluster"], row["workers"]) == (cluster, workers):
                axis.plot(*zip(*row["curve"]), label=row["strategy"])
        axis.set(title=f"{cluster}, {workers} workers", xlabel="virtual seconds",
                 ylabel="test accuracy", xscale="log")
        axis.legend()


# ---------------------------------------------------------------------------
# The simulator's predictions
# ---------------------------------------------------------------------------

# A network of its own, whose one interface carries so many megabits a second.
SHAPED = ("ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate {rate}mbit burst 16kb "
          'latency 500ms && exec "$@"')


def predict(options: argparse.Namespace) -> list[dict]:
    rows = []
    print("two workers, seconds of training      measured  simulated  ratio")
    for rate in options.rates:
        shaped = ["unshare", "--map-root-user", "--net", "sh", "-c", SHAPED.format(rate=rate), "sh"]
        for transport in options.transports:
            with tempfile.TemporaryDirectory() as folder:
                file = f"{folder}/cluster.toml"
                output(*shaped, sys.executable, str(MINIDIST), "calibrate", "--transport",
                       transport, "--batch-size", "32", "--out", file)
                for strategy in options.strategies:
                    job = [sys.executable, str(MINIDIST), "train", "--model", "mlp", "--data",
                           "digits", "--batch-size", "64", "--workers", "2", "--epochs",
                           "1" if options.quick else "3", "--strategy", strategy, "--transport"]
                    real = seconds_of(output(*shaped, *job, transport))
                    foretold = seconds_of(output(*job, "sim", "--cluster", file))
                    rows.append({"mbit": rate, "transport": transport, "strategy": strategy,
                                 "measured": real, "simulated": foretold,
                                 "ratio": foretold / real})
                    print(f"{rate:4} Mbit/s  {transport:6}  {strategy:16}{real:9.1f}"
                          f"{foretold:11.1f}{foretold / real:7.2f}", flush=True)
    return rows


def output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BenchError(f"{error.filename} is not there: a network of our own needs Linux with "
                         "unshare, ip and tc") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def seconds_of(text: str) -> float:
    found = re.search(r"([\d.,]+) s of training", text)
    if found is None:
        raise BenchError(f"no time in: {text}")
    return float(found[1].replace(",", ""))


def plot_predictions(rows: list[dict], axes: Callable[..., Any]) -> None:
    axis, = axes(1)
    for row in rows:
        axis.plot(row["measured"], row["simulated"], "o",
                  label=f"{row['transport']}, {row['strategy']}, {row['mbit']} Mbit/s")
    most = max(row["measured"] for row in rows)
    axis.plot([0, most], [0, most], color="gray")
    axis.set(xlabel="seconds measured", ylabel="seconds simulated")
    axis.legend()


# ---------------------------------------------------------------------------
# Figures and command line
# ---------------------------------------------------------------------------


def spread(values: list[float]) -> dict[str, float]:
    """The median, and the quartiles around it."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high),
            "rounds": len(values)}


def machine() -> dict[str, Any]:
    """Numbers without the machine they came from mean nothing."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(": ")[1] for line in lines if line.startswith("model name")),
                     model)
    return {"processor": model, "cores": os.cpu_count(), "system": platform.platform(),
            "python": platform.python_version(), "numpy": np.__version__,
            "torch": metadata.version("torch"), "date": time.strftime("%Y-%m-%d")}


def plot(path: str, draw: Callable[..., None], rows: list[dict]) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    def axes(count: int) -> list[Any]:
        return list(pyplot.subplots(1, count, figsize=(5 * count, 4), squeeze=False,
                                    layout="constrained")[1][0])

    draw(rows, axes)
    pyplot.savefig(path, dpi=120)


@dataclass
class Command:
    """A comparison. A new one is a row in COMMANDS and, if it has processes, in MEMBERS."""

    measure: Callable[[argparse.Namespace], list[dict]]
    draw: Callable[..., None]
    help: str
    choices: dict[str, tuple[Any, list]]      # option: (what may be asked for, what --quick asks)


COMMANDS = {
    "train": Command(train, plot_training,
        "Whole training steps (forward, backward, optimizer) of minidist and of PyTorch eager, "
        "in turns. A ratio of 0.80 says that minidist needs 80 % of PyTorch's time; `best` is the "
        "ratio to the fastest of PyTorch's sides, with --best tuned (fused optimizer, images with "
        "channels last) and compiled. Further columns: the ratio of evaluations without a graph, "
        "the memory that the first steps took, how the loss went down, and how far the two "
        "curves ever were apart.",
        {"models": (list(WORKLOADS), ["mlp", "lenet"]), "threads": ([1, 2], [1]),
         "best": (["tuned", "compiled"], ["tuned"])}),
    "ops": Command(ops, plot_ops,
        "Single operations forward and backward, by minidist and PyTorch eager, in turns, from ten "
        "elements to a million. On the smallest the time is the framework's own, on the largest "
        "the arithmetic's; `to the floor` says how far from bare arithmetic either is.",
        {"ops": (list(OPERATIONS), ["mul", "tanh"]), "threads": ([1, 2], [1]),
         "elements": (list(ELEMENTS), ["10", "1K"])}),
    "allreduce": Command(allreduce, plot_allreduce,
        "The sum of an array over all ranks, by each transport of minidist and by gloo, which "
        "torch.distributed uses on CPUs, in turns. All ranks are on this machine.",
        {"transports": (list(TRANSPORTS), list(TRANSPORTS)), "ranks": ([2, 4], [2]),
         "sizes": (list(SIZES), ["1KB", "64KB"])}),
    "network": Command(network, plot_network,
        "Messages between two processes of this machine, by each transport, in turns: a kilobyte "
        "there and back, and many bytes one way. UDP goes with a key (every datagram is "
        "authenticated) or without, and in trains of datagrams, where Linux takes them, or one by "
        "one. The ratios are to tcp.",
        {"links": (list(CARRIERS), list(CARRIERS))}),
    "parallel": Command(parallel, plot_parallel,
        "Training steps of two processes by PyTorch's DistributedDataParallel on gloo and by "
        "minidist's over TCP and shared memory, in turns, one thread each. `naive` sends each "
        "gradient by itself, over TCP: so one sees what buckets buy.",
        {"models": (list(WORKLOADS), ["mlp"])}),
    "strategies": Command(strategies, plot_strategies,
        "Accuracy against virtual time and bytes for every strategy, on simulated clusters: even, "
        "with stragglers, with slow links, and with 4 to 256 workers. What the papers lead us to "
        "expect is printed first, and at the end whether it came true.",
        {"strategies": (list(STRATEGIES), ["sync", "downpour", "ssp"])}),
    "predict": Command(predict, plot_predictions,
        "Whether the simulator foretells real runs. `minidist calibrate` measures this machine "
        "and a link of limited rate; then two workers train over it, and in the simulator. Needs "
        "Linux with unshare, ip and tc; no rights of root.",
        {"transports": (["tcp", "udp"], ["tcp"]), "strategies": (["sync", "downpour"], ["sync"]),
         "rates": ([8, 20], [20])}),
}

MEMBERS: dict[str, Callable[..., None]] = {
    "train": train_member, "ops": ops_member, "allreduce": allreduce_member,
    "network": network_member, "parallel": parallel_member}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__.split("\n", 2)[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python bench.py train --threads 1 --models mlp\n"
               "  python bench.py allreduce --ranks 2 --json allreduce.json --plot allreduce.png\n"
               "\nLeave the machine alone meanwhile: other work changes even the ratios.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help.split(". ")[0],
                                  description=command.help)
        for option, (values, _) in command.choices.items():
            sub.add_argument(f"--{option}", nargs="+", choices=values, type=type(values[0]),
                             metavar=option.removesuffix("s").upper(),
                             help=f"of {', '.join(map(str, values))}; default: all")
        sub.add_argument("--rounds", type=int, metavar="N",
                         help="how often each side has its turn (more rounds, less doubt)")
        sub.add_argument("--quick", action="store_true",
                         help="seconds instead of minutes: shows that all works, measures nothing")
        sub.add_argument("--json", metavar="FILE", help="write all figures to FILE")
        sub.add_argument("--plot", metavar="FILE", help="draw a picture (.png, .svg, .pdf)")
    options = parser.parse_args(argv)
    for option, (values, quick) in COMMANDS[options.command].choices.items():
        if getattr(options, option) is None:
            setattr(options, option, quick if options.quick else values)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["member"]:
        MEMBERS[words[1]](*words[2:])
        return 0
    options = parse(words)
    command = COMMANDS[options.command]
    try:
        if options.plot:
            need("matplotlib", "plot", "--plot")
        rows = command.measure(options)
        if options.json:
            report = {"command": options.command, "quick": options.quick,
                      "machine": machine(), "rows": rows}
            Path(options.json).write_text(json.dumps(report, indent=1))
        if options.plot:
            plot(options.plot, command.draw, rows)
    except BenchError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
