"""Sandblaster: a batch method, with everything large kept where it is (Dean et al. 2012).

L-BFGS learns the curvature from the last steps and takes few, good steps on large batches. It needs
a dozen vectors as long as the model. In Sandblaster these live on parameter shards: shard k keeps
the same slice of every one of them. A coordinator runs the algorithm without ever holding a
parameter: it tells the shards, in messages of a few bytes, to add, scale and copy vectors by their
numbers, and asks for scalars (a dot product is the sum of the shards' dot products).

Replicas compute gradients. The batch is cut in many more portions than there are replicas, and a
replica gets another portion whenever it is free: a slow one gets fewer. Near the end, when all are
given out, whoever is free gets one that is still under way elsewhere, and the first result counts
(MapReduce's backup tasks). So a portion may be computed twice; it must not be counted twice.
Portions therefore carry numbers, and a shard adds only what it has not yet added.

    rank 0                      coordinator
    ranks 1 ... shards          a slice of all vectors each
    all others                  replicas
"""
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md

COMMAND, SCALAR, PORTION, DONE, PARAMETERS, GRADIENT = range(6)  # what a message is, by its tag
X, G = 0, 1  # vectors' numbers: the parameters, and the gradient that is being added up
DOT, MOST, SUM, COPY, SCALE, ADD, FREE, HAND_OUT, BEGIN, COLLECT, END = range(11)  # commands


def minimize(model, loss: Callable, x, y, iterations: int = 20, shards: int = 1, portions: int = 16,
             history: int = 100, group=None) -> dict[str, Any]:
    """Up to `iterations` of L-BFGS on the mean of loss(model(x), y) over all samples; loss itself
    is a mean. All ranks call it with the same model and data; afterwards all have the result.
    Returns on rank 0 what happened, on other ranks their part in it."""
    rank, size = md.distributed.get_rank(group=group), md.distributed.get_world_size(group=group)
    if shards < 1 or size < shards + 2:
        raise ValueError(f"{size} ranks: one coordinates, {shards} are shards, and one replica at "
                         "least must be left")
    portions = min(portions, len(x))
    flat = md.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    cuts = [md.share_of(flat.size, k, shards) for k in range(shards)]
    if rank == 0:
        report = Coordinator(range(1, 1 + shards), range(1 + shards, size), portions, group).run(
            iterations, history)
    elif rank <= shards:
        start, stop = cuts[rank - 1]
        flat[start:stop], report = be_shard(flat[start:stop], group)
    else:
        report = be_replica(model, loss, x, y, cuts, portions, group)
    for k, (start, stop) in enumerate(cuts):
        md.distributed.broadcast(flat[start:stop], 1 + k, group=group)
    md.nn.utils.vector_to_parameters(md.tensor(flat), model.parameters())
    return report


def send(numbers, to: int, tag: int, group) -> None:
    md.distributed.send(np.array(numbers, np.float64), to, tag, group=group)


def recv(count: int, source: int | None, tag: int, group) -> tuple[int, list[float]]:
    room = np.empty(count)
    source = md.distributed.recv(room, source, tag, group=group)
    return source, room.tolist()


# ---- shards: they know vectors, and nothing of what they are for --------------------------------


def be_shard(values: np.ndarray, group) -> tuple[np.ndarray, dict[str, int]]:
    """Do what commands say, until the end; the parameters' slice, and what was counted."""
    vectors: dict[int, np.ndarray] = {X: values.copy()}
    counted = dropped = current = 0
    seen: set[float] = set()
    landing = np.empty(2 + values.size, values.dtype)
    while True:
        _, (op, a, b, number) = recv(4, 0, COMMAND, group)
        a, b = int(a), int(b)
        if op == DOT:
            send([vectors[a] @ vectors[b]], 0, SCALAR, group)
        elif op == MOST:
            send([np.abs(vectors[a]).max(initial=0)], 0, SCALAR, group)
        elif op == SUM:
            send([np.abs(vectors[a]).sum()], 0, SCALAR, group)
        elif op == COPY:
            vectors[a] = vectors[b].copy()
        elif op == SCALE:
            vectors[a] *= number
        elif op == ADD:
            vectors[a] += number * vectors[b]
        elif op == FREE:
            del vectors[a]
        elif op == HAND_OUT:
            md.distributed.send(vectors[X], a, PARAMETERS, group=group)
        elif op == BEGIN:
            vectors[G], current, seen = np.zeros_like(values), a, set()
        elif op == COLLECT:  # one more portion: none counts twice, nor in another evaluation
            while True:
                md.distributed.recv(landing, None, GRADIENT, group=group)
                evaluation, portion = landing[:2]
                if evaluation == current and portion not in seen:
                    break
                dropped += 1
            seen.add(portion)
            vectors[G] += landing[2:]
            counted += 1
        else:
            return vectors[X], {"counted": counted, "dropped": dropped}


# ---- replicas: they know the data, and compute what they are told -------------------------------


def be_replica(model, loss: Callable, x, y, cuts: list[tuple[int, int]], portions: int,
               group) -> dict[str, int]:
    current, computed = -1.0, 0
    while True:
        _, (evaluation, portion) = recv(2, 0, PORTION, group)
        if evaluation < 0:
            return {"computed": computed}
        dtype = next(iter(model.parameters())).dtype
        if evaluation != current:  # the parameters, once for all its portions
            current, parts = evaluation, [np.empty(stop - start, dtype) for start, stop in cuts]
            for k, part in enumerate(parts):
                md.distributed.recv(part, 1 + k, PARAMETERS, group=group)
            md.nn.utils.vector_to_parameters(md.tensor(np.concatenate(parts)), model.parameters())
        start, stop = md.share_of(len(x), int(portion), portions)
        for p in model.parameters():
            p.grad = None
        value = loss(model(x[start:stop]), y[start:stop]) * ((stop - start) / len(x))
        value.backward()
        gradient = np.concatenate([
            (np.zeros(p.numel(), dtype) if p.grad is None else p.grad.numpy().ravel())
            for p in model.parameters()])
        computed += 1
        for k, (start, stop) in enumerate(cuts):
            part = np.concatenate([np.array([evaluation, portion], dtype), gradient[start:stop]])
            md.distributed.send(part, 1 + k, GRADIENT, group=group)
        send([evaluation, portion, value.item()], 0, DONE, group)


# ---- the coordinator: it knows the algorithm, and no parameter -----------------------------------


class Coordinator:
    def __init__(self, shards, replicas, portions: int, group) -> None:
        self.shards, self.portions, self.group = list(shards), portions, group
        self.busy: dict[int, int | None] = dict.fromkeys(replicas)  # replica: its portion
        self.evaluations = self.twice = 0
        self.free = G + 1  # the next vector's number

    def tell(self, op: int, a: int = 0, b: int = 0, number: float = 0.0) -> None:
        for shard in self.shards:
            send([op, a, b, number], shard, COMMAND, self.group)

    def ask(self, op: int, a: int, b: int = 0) -> list[float]:
        self.tell(op, a, b)
        return [recv(1, shard, SCALAR, self.group)[1][0] for shard in self.shards]

    def dot(self, a: int, b: int) -> float:
        return sum(self.ask(DOT, a, b))

    def most(self, a: int) -> float:
        return max(self.ask(MOST, a))

    def copy(self, b: int) -> int:
        self.tell(COPY, self.free, b)
        self.free += 1
        return self.free - 1

    def evaluate(self) -> float:
        """The loss at X; its gradient is then in G."""
        waiting, copies, losses = list(range(self.portions)), {}, {}
        told = set()
        self.evaluations += 1
        self.tell(BEGIN, self.evaluations)
        while len(losses) < self.portions:
            for replica in [r for r, portion in self.busy.items() if portion is None]:
                late = [p for p in copies if p not in losses and copies[p] < 2]
                if not waiting and not late:
                    break
                portion = waiting.pop(0) if waiting else late[0]
                copies[portion] = copies.get(portion, 0) + 1
                self.twice += copies[portion] == 2
                if replica not in told:
                    told.add(replica)
                    self.tell(HAND_OUT, replica)
                send([self.evaluations, portion], replica, PORTION, self.group)
                self.busy[replica] = portion
            self.hear(losses)
        return sum(losses[portion] for portion in sorted(losses))

    def hear(self, losses: dict[int, float]) -> None:
        """Somebody is done, perhaps with what nobody waits for any more."""
        replica, (evaluation, portion, loss) = recv(3, None, DONE, self.group)
        self.busy[replica] = None
        if evaluation == self.evaluations and portion not in losses:
            losses[int(portion)] = loss
            self.tell(COLLECT)  # what that replica has sent before it said so

    def run(self, iterations: int, history: int) -> dict[str, Any]:
        """Nocedal and Wright, algorithm 7.5, as in minidist's LBFGS(line_search_fn="strong_wolfe"),
        in commands."""
        losses = [np.float64(self.evaluate())]
        g, pairs, scale, last = self.copy(G), [], 1.0, None
        for _ in range(iterations):
            if self.most(g) <= 1e-7:
                break
            if last is None:
                t = min(1.0, 1.0 / sum(self.ask(SUM, g)))
            else:  # what the last step s taught about the curvature
                before, s, length = last
                y, t = self.copy(g), 1.0
                self.tell(ADD, y, before, -1.0)
                self.tell(SCALE, s, 0, length)
                self.tell(FREE, before)
                if (ys := self.dot(y, s)) > 1e-10:
                    pairs, scale = [*pairs, (y, s, 1 / ys)], ys / self.dot(y, y)
                    for gone in pairs[:-history]:
                        self.tell(FREE, gone[0]), self.tell(FREE, gone[1])
                    pairs = pairs[-history:]
                else:
                    self.tell(FREE, y), self.tell(FREE, s)
            d = self.direction(g, pairs, scale)
            begin = md.Probe(0.0, losses[-1], g, np.float64(self.dot(g, d)))
            if begin.slope > -1e-9:
                break
            start, seen = self.copy(X), []

            def at(t: float, start=start, d=d, seen=seen) -> Any:
                self.tell(COPY, X, start)
                self.tell(ADD, X, d, t)
                loss = np.float64(self.evaluate())
                seen.append(md.Probe(t, loss, self.copy(G), np.float64(self.dot(G, d))))
                return seen[-1]

            best = md.strong_wolfe(at, t, begin, self.most(d), 25)
            self.tell(COPY, X, start)
            self.tell(ADD, X, d, best.t)
            self.tell(FREE, start)
            for probe in seen:
                if probe is not best:
                    self.tell(FREE, probe.g)
            last, g = (g, d, best.t), best.g
            losses.append(best.loss)
            if best is begin or abs(losses[-1] - losses[-2]) < 1e-9 or \
                    best.t * self.most(d) <= 1e-9:
                break
        self.evaluations += 1  # whatever still comes is of an earlier one
        while any(portion is not None for portion in self.busy.values()):
            self.hear({})
        self.tell(END)
        for replica in self.busy:
            send([-1, 0], replica, PORTION, self.group)
        return {"losses": [float(loss) for loss in losses], "evaluations": self.evaluations - 1,
                "twice": self.twice}

    def direction(self, g: int, pairs: list[tuple], scale: float) -> int:
        """The inverse Hessian's approximation by the pairs (y, s, 1 / y.s), times -g."""
        d, alphas = self.copy(g), []
        self.tell(SCALE, d, 0, -1.0)
        for y, s, rho in reversed(pairs):
            alphas.append(rho * self.dot(s, d))
            self.tell(ADD, d, y, -alphas[-1])
        self.tell(SCALE, d, 0, scale)
        for (y, s, rho), alpha in zip(pairs, reversed(alphas)):
            self.tell(ADD, d, s, alpha - rho * self.dot(y, d))
        return d


def learn():
    """A small network on 640 digits, on six ranks, of which the last is slow."""
    import time

    md.distributed.init_process_group()
    md.manual_seed(0)
    nn, rank = md.nn, md.distributed.get_rank()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    images, labels = md.load_dataset("digits")[0].tensors

    def loss(output, target):
        time.sleep(0.2 if rank == 5 else 0)
        return nn.functional.cross_entropy(output, target)

    report = minimize(model, loss, images[:640].double(), labels[:640], 10, shards=2, portions=20)
    md.distributed.destroy_process_group()
    return report


if __name__ == "__main__":
    ranks = md.launch(learn, workers=6, transport="pipe")
    losses, evaluations = ranks[0]["losses"], ranks[0]["evaluations"]
    print(f"loss {losses[0]:.2f}, then", *[f"{loss:.3f}" for loss in losses[1::3]])
    #> loss 2.3..., then ...
    for rank in (1, 2):
        print(f"shard {rank} counted each portion once:",
              ranks[rank]["counted"] == 20 * evaluations)
    #> shard 1 counted each portion once: True
    #> shard 2 counted each portion once: True
    print(f"{20 * evaluations} portions, of which {ranks[0]['twice']} were given out twice; "
          "computed by the replicas:",
          *[report["computed"] for report in ranks[3:]])
    #> ... portions, of which ... were given out twice; computed by the replicas: ...
