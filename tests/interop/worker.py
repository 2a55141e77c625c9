"""What worker.mjs does, done with minidist: the other half of tests/test_interop.py."""
import hashlib
import itertools
import sys

import numpy as np

import minidist as md
from minidist import distributed as dist
from minidist import nn, optim
from minidist.utils.data import DataLoader, TensorDataset

TYPES = ["float32", "float64", "int8", "uint8", "int16", "int32", "int64"]


def noise(count, rank):
    return (np.arange(count) * 7919 + rank * 104729 + 13) % 1009 / 7 - 72


def fingerprint(data):
    return hashlib.sha256(data).hexdigest()


def values(name, count, rank):
    x = noise(count, rank)
    # (JavaScript wraps numbers that do not fit, as astype does from int64.)
    return x.astype(name) if name[0] == "f" else np.floor(x).astype("i8").astype(name)


def collectives():
    for name, count in itertools.product(TYPES, (0, 1, 3, 1000, 70000)):
        for op, result in each_collective(name, count):
            print(op, name, count, fingerprint(np.ascontiguousarray(result).data))
        dist.barrier()


def each_collective(name, count):
    rank, size = dist.get_rank(), dist.get_world_size()
    for op in ["sum", "min", "max"] + ["avg", "product"] * (name[0] == "f"):
        x = values(name, count, rank)
        dist.all_reduce(x, dist.ReduceOp(op))
        yield op, x
    x = values(name, count, rank)
    dist.broadcast(x, count % size)
    yield "broadcast", x
    rows = np.empty((size, count), name)
    dist.all_gather(list(rows), values(name, count, rank))
    yield "all_gather", rows
    if count % size == 0:
        x = np.empty(count // size, name)
        dist.reduce_scatter(x, list(values(name, count, rank).reshape(size, -1)))
        yield "reduce_scatter", x


def conformance():
    """The program of `minidist conformance`."""
    rank = dist.get_rank()
    while True:
        n = np.empty(1, "i8")
        dist.broadcast(n, 1 - rank)
        if n == -1:
            return
        if n < 0:
            ASKED.get(n[0], reductions)(n[0])
            continue
        x = (np.arange(n[0]) % 1000 / 7 + rank).astype("f4")
        dist.all_reduce(x)
        y = (np.arange(n[0]) + rank).astype("f4")
        dist.all_gather([y.copy(), y.copy()], y)
        dist.barrier()


def reductions(n):
    name, rank = NAMES[-1 - n], dist.get_rank()
    for op in ["sum", "avg", "min", "max", "product"]:
        if op == "avg" and name[0] != "f":
            continue
        x = (np.arange(6) + 1) * (rank + 3) % 7
        x = (x / 7 if name[0] == "f" else x).astype(name)
        halves, share = list(x.reshape(2, 3).copy()), np.empty(3, name)
        dist.all_reduce(x, dist.ReduceOp(op))
        dist.all_gather([x.copy(), x.copy()], x)
        dist.reduce_scatter(share, halves, dist.ReduceOp(op))
        dist.all_gather([share.copy(), share.copy()], share)


class Weights(nn.Module):
    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, nn.Parameter(md.tensor(value)))


def run(n):
    rank = dist.get_rank()
    first = 1 - rank                            # rank 0's values count
    net = Weights(scale=np.float32([1, -1]) * first, shift=np.array([0.5]) * first)
    train = dist.Synchronous(net, optim.SGD(net.parameters(), lr=0.1))
    gradient = md.tensor(np.float32([[0.5, -0.1], [0.25, 0.3]][rank]))
    for _ in train.batches(DataLoader(TensorDataset(md.zeros(102)), 3)):
        train.zero_grad()
        loss = (net.scale * gradient).sum()
        if rank == 1:
            loss = loss + (net.shift * 0.7).sum()
        loss.backward()
        train.step()
    for x in net.parameters():
        dist.all_gather([x.detach().clone(), x.detach().clone()], x.detach())


def servers(n):
    net = Weights(w=np.float32([1, 2, 4]))
    train = dist.Downpour(net, optim.SGD(net.parameters(), lr=0.25))
    for _ in range(4):
        train.zero_grad()
        (net.w * net.w / 4).sum().backward()
        train.step()
    train.finish()
    dist.all_gather([net.w.detach().clone(), net.w.detach().clone()], net.w.detach())


NAMES = {1: "float32", 2: "float64", 3: "float16", 5: "int8", 6: "uint8", 7: "int16", 8: "int32",
         9: "int64", 10: "bool"}
ASKED = {-20: run, -21: servers}


def mismatch():
    dist.all_reduce(np.zeros(5, "f4"))


def wait():
    dist.barrier()
    print("ready", flush=True)
    while True:
        dist.all_reduce(np.zeros(100_000, "f4"))


def task():
    k, j = np.mgrid[:26, :3]
    x = ((k * (j + 3) * 7 + j) % 11 / 11 - 0.5).astype("f4")
    return TensorDataset(md.tensor(x), md.tensor(np.stack(
        [x[:, 0] * x[:, 1] + x[:, 2], x[:, 0] - x[:, 2]], 1)))


def model():
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    start = 0
    for parameter in network.parameters():
        count = parameter.numel()
        values = (noise(start + count, 0)[start:] / 144).astype("f4")
        parameter.data = md.tensor(values.reshape(parameter.shape))
        start += count
    return network


def train(strategy, epochs="4", lr="0.1"):
    network = model()

    def state():
        data = [parameter.detach().numpy().tobytes() for parameter in network.parameters()]
        return fingerprint(b"".join(data))[:16]
    together = strategy(network, optim.SGD(network.parameters(), lr=float(lr)))
    steps = 0
    for _ in range(int(epochs)):
        for x, y in together.batches(DataLoader(task(), 6)):
            together.zero_grad()
            ((network(x) - y) ** 2).mean().backward()
            together.step()
            print("step", steps, state())
            steps += 1
    together.finish()
    print("end", state())
    loss = float(((network(task().tensors[0]) - task().tensors[1]) ** 2).mean())
    print("loss", loss, file=sys.stderr)


def sync(*arguments):
    train(dist.Synchronous, *arguments)


def downpour(*arguments):
    train(dist.Downpour, *arguments)


if __name__ == "__main__":
    dist.init_process_group()
    program, *arguments = sys.argv[1:]
    globals()[program](*arguments)
    dist.destroy_process_group()
