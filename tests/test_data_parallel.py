"""DistributedDataParallel: PyTorch's numbers, Synchronous's bits, and gradients that travel
while others are computed."""
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import minidist as md
from memory import on_ranks, outcomes
from minidist import nn

ROOT = Path(__file__).resolve().parent.parent

# One text for both libraries: what each step leaves in .grad and in the buffers of a model with
# tied, frozen and unused parameters, one that only rank 1 uses, and batch norm.
PROGRAM = """
import contextlib
import numpy as np

def run(lib, wrap, rank):
    nn = lib.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.tied, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied.weight = self.first.weight
            for p in self.frozen.parameters():
                p.requires_grad = False
            self.norm = nn.BatchNorm1d(4)
            self.unused, self.second_rank = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last = nn.Linear(4, 2)

        def forward(self, x, extra):
            h = self.norm(self.frozen(self.tied(self.first(x).tanh())))
            return self.last(self.second_rank(h) if extra else h)

    def numbers(shape, start):
        return lib.tensor(np.sin(start + np.arange(np.prod(shape))).reshape(shape))

    model = Net().double()
    with lib.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(numbers(tuple(p.shape), 7.0 * i + rank))       # rank 0's will hold
    ddp, found = wrap(model), {}
    optimizer = lib.optim.SGD(ddp.parameters(), lr=0.1)
    for step, (mode, zero) in enumerate([("sync", True), ("no_sync", True), ("sync", False),
                                         ("sync", False), ("eval", False), ("sync", True)]):
        if zero:
            optimizer.zero_grad()
        x = numbers((5, 4), 100.0 * step + 10 * rank)
        ddp.train(mode != "eval")
        with (ddp.no_sync() if mode == "no_sync" else
              lib.no_grad() if mode == "eval" else contextlib.nullcontext()):
            y = ddp(x, rank == 1 and step != 3)
            found[f"{step} out"] = y.detach().numpy().copy()
            if mode != "eval":
                (y ** 2).mean().backward()
        if mode == "sync":
            optimizer.step()
        for name, p in model.named_parameters():
            found[f"{step} {name}"] = p.detach().numpy().copy()
            found[f"{step} {name}.grad"] = np.nan if p.grad is None else p.grad.numpy().copy()
        for name, buffer in model.named_buffers():
            found[f"{step} {name}"] = buffer.numpy().copy()
    return found
"""

TORCH = PROGRAM + """
import sys, torch
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                                     world_size=2)
found = run(torch, lambda model: torch.nn.parallel.DistributedDataParallel(
    model, find_unused_parameters=True), rank)
np.savez(f"{folder}/{rank}.npz", **found)
"""


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    ranks = [subprocess.Popen([sys.executable, "-c", TORCH, str(rank), folder],
                              stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for rank in ranks:
        error = rank.communicate()[1]
        assert rank.returncode == 0, error
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]


@pytest.mark.timeout(300)                           # two processes import PyTorch first
@pytest.mark.parametrize("megabytes", [25, 1e-6])   # one bucket; one for each parameter
def test_the_numbers_are_pytorchs(pytorch, megabytes, monkeypatch):
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "FIRST", megabytes * 2**20)
    names = {}
    exec(PROGRAM, names)

    def work(group):
        def wrap(model):
            return nn.parallel.DistributedDataParallel(model, process_group=group,
                                                       bucket_cap_mb=megabytes)
        return names["run"](md, wrap, group.rank)
    for found, expected in zip(on_ranks(2, work), pytorch):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def deep(seed=0):
    md.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)])


def backward(model, rank):
    x = np.random.default_rng(rank).standard_normal((3, 8), "f4")
    model(md.tensor(x)).sum().backward()


def gradients(model):
    return {name.removeprefix("module."): p.grad.numpy().copy()
            for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_buckets_do_not_change_a_bit(size, monkeypatch):
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "FIRST", 200)

    def work(group):
        found = []
        for megabytes in (25, 600 / 2**20, 0):
            ddp = nn.parallel.DistributedDataParallel(deep(group.rank), process_group=group,
                                                      bucket_cap_mb=megabytes)
            backward(ddp, group.rank)
            found.append(gradients(ddp))
        model = deep()
        md.Synchronous(model, None, group)
        backward(model, group.rank)
        return [*found, gradients(model)]
    for rank in on_ranks(size, work):
        for found in rank[:-1]:
            for name, value in rank[-1].items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_bucket_is_summed_while_backward_goes_on(monkeypatch):
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "FIRST", 0)

    def work(group):
        ddp = nn.parallel.DistributedDataParallel(deep(), process_group=group)
        summed, order, all_reduce = threading.Event(), [], group.all_reduce

        def watched(x, *args, **options):
            all_reduce(x, *args, **options)
            order.append(options["what"])
            summed.set()

        def wait_for_the_sum(gradient):             # in the middle of backward
            assert summed.wait(20), "the first bucket has not been summed"
            order.append("middle")
        group.all_reduce = watched
        x = md.ones(1, 8)
        h = ddp.module[0](x)
        h.register_hook(wait_for_the_sum)
        ddp.module[0] = nn.Identity()
        ddp(h).sum().backward()
        return order
    for order in on_ranks(2, work):
        assert order == ["bucket 0 of the gradients", "middle", "bucket 1 of the gradients"]


def test_a_rank_that_is_lost_in_a_thread_is_an_error_of_backward(monkeypatch):
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "FIRST", 0)

    def work(group):
        ddp = nn.parallel.DistributedDataParallel(deep(), process_group=group)
        if group.rank:
            group.transport.abort("enough")
        else:
            backward(ddp, 0)
    lost, _ = outcomes(2, work)
    assert "rank 1" in str(lost) or "node 1" in str(lost)
    assert type(lost).__name__ == "PeerLost"


def test_what_is_frozen_or_freed_later_is_seen():
    def work(group):
        ddp = nn.parallel.DistributedDataParallel(deep(), process_group=group)
        first = ddp.module[0][0]
        found = []
        for wanted in (False, True):
            first.requires_grad_(wanted)
            for p in ddp.parameters():
                p.grad = None
            backward(ddp, group.rank)
            found.append(None if first.weight.grad is None else first.weight.grad.numpy().copy())
        return found
    (nothing, a), (_, b) = on_ranks(2, work)
    assert nothing is None and a.any()
    np.testing.assert_array_equal(a, b)


def test_the_naive_way_gives_the_same_sums():
    from bench import NaiveDataParallel

    def work(group):
        naive = NaiveDataParallel(deep(group.rank), group)
        backward(naive, group.rank)
        naive.average_gradients()
        ddp = nn.parallel.DistributedDataParallel(deep(group.rank), process_group=group)
        backward(ddp, group.rank)
        return gradients(naive.model), gradients(ddp)
    for found, expected in on_ranks(3, work):
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


SCRIPT = """
import hashlib, sys
import numpy as np
import minidist as md
from minidist import nn
md.distributed.init_process_group()
rank = md.distributed.get_rank()
md.manual_seed(rank)
ddp = nn.parallel.DistributedDataParallel(
    nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)]), bucket_cap_mb=0.5)
optimizer = md.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
    x = np.random.default_rng(10 * step + rank).random((4, 300), "f4")
    ddp(md.tensor(x)).mean().backward()
    optimizer.step()
assert len(ddp._buckets) == 4
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())).hexdigest())
md.distributed.destroy_process_group()
"""


def test_over_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    digests = set()
    for transport in ("shm", "tcp"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "minidist.py"), "launch", "--nproc-per-node", "2",
             "--transport", transport, str(script)],
            capture_output=True, text=True, timeout=90, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        digests |= {line.split()[-1] for line in done.stdout.splitlines()}
    assert len(digests) == 1
