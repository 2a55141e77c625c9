"""Pipeline parallelism: layers one after the other, on ranks one after the other.

A model that is too deep for one machine is cut in stages. Rank 0 hands the result of its stage to
rank 1, and so on; gradients come back the same way. With one batch at a time all but one rank would
idle. So the batch is cut in micro-batches, which follow each other through the stages.

In which order? Either first all forward, then all backward (GPipe, Huang et al. 2019): then a stage
remembers what its forward passes left for all micro-batches. Or backward as soon as possible, one
forward, one backward (1F1B, Narayanan et al. 2019): the first stage then remembers as many as there
are stages, the last but one; and nobody idles longer. Both add the same gradients up: what a step
computes is what the uncut model would (batch norm aside, which sees micro-batches).

What crosses a boundary goes in one message, however many tensors it is (as DistBelief's partitions
do, Dean et al. 2012).
"""
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md

SHAPES = 2**31  # the tag of the message that says what will cross a boundary


def schedule(name: str, stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """What a stage does with `count` micro-batches: [("F", 0), ("F", 1), ("B", 0), ...]."""
    if name not in ("gpipe", "1f1b"):
        raise ValueError(f"schedule {name!r}: known are gpipe and 1f1b")
    ahead = count if name == "gpipe" else min(stages - 1 - stage, count)
    steps = [("F", i) for i in range(ahead)]
    for i in range(count):
        steps += [("F", ahead + i)] * (ahead + i < count) + [("B", i)]
    return steps


class Pipeline:
    """One stage of a model, and the messages to its neighbours. `stages` are all of them, one a
    rank, built by the same code everywhere; only `stage`, this rank's, is kept. A stage is called
    with what the one before returned: a tensor, or several. The first dimension of each is the
    batch's. `loss(output, target)` is a mean over samples; the last rank computes it."""

    def __init__(self, stages: Sequence, loss: Callable, microbatches: int = 4,
                 order: str = "1f1b", group=None) -> None:
        dist = md.distributed
        self.group, self.rank = group, dist.get_rank(group=group)
        self.size = dist.get_world_size(group=group)
        if len(stages) != self.size:
            raise ValueError(f"{len(stages)} stages for {self.size} ranks: give one each")
        self.stage, self.loss = stages[self.rank], loss
        self.microbatches, self.order = microbatches, order
        self.shapes: dict[int, list] = {}  # neighbour: of the tensors that cross, without the batch
        self.most = 0  # micro-batches remembered at a time
        schedule(order, 0, 1, 1)  # is there one of that name?

    def backward(self, x, y) -> float:
        """Forward and backward of a batch, which all ranks must give: the gradients of the stage's
        parameters are added to, and the loss is returned, on all ranks."""
        first, last = self.rank == 0, self.rank == self.size - 1
        count, total = min(self.microbatches, len(x)), np.zeros(1)
        remembered: dict[int, tuple] = {}
        for what, i in schedule(self.order, self.rank, self.size, count):
            start, stop = md.share_of(len(x), i, count)
            if what == "F":
                inputs = (x[start:stop],)
                if not first:
                    inputs = self.recv(self.rank - 1, 2 * i, stop - start)
                    inputs = tuple(t.requires_grad_() for t in inputs)
                outputs = self.stage(*inputs)
                if last:
                    outputs = self.loss(outputs, y[start:stop]) * ((stop - start) / len(x))
                    total += outputs.item()
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                if not last:
                    self.send(outputs, self.rank + 1, 2 * i)
                remembered[i] = inputs, outputs
                self.most = max(self.most, len(remembered))
            else:
                inputs, outputs = remembered.pop(i)
                slopes = [1.0] if last else self.recv(self.rank + 1, 2 * i + 1, stop - start)
                sum((out * slope).sum() for out, slope in zip(outputs, slopes)).backward()
                if not first:
                    self.send([t.grad if t.grad is not None else md.zeros_like(t) for t in inputs],
                              self.rank - 1, 2 * i + 1)
        md.distributed.broadcast(total, self.size - 1, group=self.group)
        return float(total[0])

    def send(self, tensors: Sequence, to: int, tag: int) -> None:
        arrays = [t.detach().numpy() for t in tensors]
        if to not in self.shapes:
            self.shapes[to] = [a.shape[1:] for a in arrays]
            if to > self.rank:  # its gradients will have the shapes of what it was sent
                words = [len(arrays), arrays[0].itemsize]
                for shape in self.shapes[to]:
                    words += [len(shape), *shape]
                md.distributed.send(np.array([len(words)]), to, SHAPES, group=self.group)
                md.distributed.send(np.array(words), to, SHAPES, group=self.group)
                self.dtype = arrays[0].dtype
        md.distributed.send(np.concatenate([a.ravel() for a in arrays]), to, tag, group=self.group)

    def recv(self, source: int, tag: int, rows: int) -> tuple:
        if source not in self.shapes:
            words = np.empty(1, np.int64)
            md.distributed.recv(words, source, SHAPES, group=self.group)
            words = np.empty(words[0], np.int64)
            md.distributed.recv(words, source, SHAPES, group=self.group)
            count, size, *words = words.tolist()
            self.dtype, self.shapes[source] = np.dtype(f"f{size}"), []
            for _ in range(count):
                self.shapes[source].append(tuple(words[1 : 1 + words[0]]))
                words = words[1 + words[0] :]
        shapes = [(rows, *shape) for shape in self.shapes[source]]
        stops = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
        vector = np.empty(stops[-1], self.dtype)
        md.distributed.recv(vector, source, tag, group=self.group)
        return tuple(md.tensor(part.reshape(shape))
                     for part, shape in zip(np.split(vector, stops[:-1]), shapes))


def picture(name: str, stages: int, count: int) -> list[str]:
    """Who does what when, if each pass takes one unit of time: a line a stage, a micro-batch's
    number in each slot, forward as a digit, backward as a letter."""
    plans = [schedule(name, stage, stages, count) for stage in range(stages)]
    when: dict[tuple, int] = {}
    rows = [""] * stages
    while any(plans):
        now = len(rows[0])
        for stage, plan in enumerate(plans):
            step = plan[0] if plan else None
            needs = step and (("F", step[1], stage - 1) if step[0] == "F" else
                              ("B", step[1], stage + 1))
            if step and (when.get(needs, now) < now or not 0 <= needs[2] < stages):
                when[(*plan.pop(0), stage)] = now
                rows[stage] += str(step[1]) if step[0] == "F" else "abcdefghij"[step[1]]
            else:
                rows[stage] += "."
    return rows


def learn(order: str):
    """Three layers of 64 and one of 10 on digits, as three stages."""
    md.distributed.init_process_group()
    md.manual_seed(0)
    nn = md.nn
    stages = [nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh()),
              nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()),
              nn.Linear(64, 10)]
    stages = [stage.double() for stage in stages]
    if md.distributed.get_world_size() == 1:
        stages = [nn.Sequential(*stages)]
    pipe = Pipeline(stages, nn.functional.cross_entropy, 8, order)
    optimizer = md.optim.SGD(pipe.stage.parameters(), lr=0.2)
    images, labels = md.load_dataset("digits")[0].tensors
    losses = []
    for start in range(0, 640, 64):
        optimizer.zero_grad()
        batch = slice(start, start + 64)
        losses.append(pipe.backward(images[batch].double(), labels[batch]))
        optimizer.step()
    md.distributed.destroy_process_group()
    return losses, pipe.most


if __name__ == "__main__":
    for name in ("gpipe", "1f1b"):
        print(name, *picture(name, 3, 5), sep="\n")
    #> gpipe
    #> 01234....abcde
    #> .01234..abcde.
    #> ..01234abcde..
    #> 1f1b
    #> 012..a3b4c.d.e
    #> .01.a2b3c4d.e.
    #> ..0a1b2c3d4e..

    alone, _ = learn("gpipe")
    for name in ("gpipe", "1f1b"):
        ranks = md.launch(learn, (name,), workers=3, transport="pipe")
        same = all(np.allclose(losses, alone, rtol=0, atol=1e-12) for losses, _ in ranks)
        print(f"{name}: the uncut model's losses: {same}; micro-batches remembered:",
              *[most for _, most in ranks])
    #> gpipe: the uncut model's losses: True; micro-batches remembered: 8 8 8
    #> 1f1b: the uncut model's losses: True; micro-batches remembered: 3 2 1
