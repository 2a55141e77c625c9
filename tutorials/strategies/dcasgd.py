"""Delay compensation: correct a stale gradient instead of merely applying it (Zheng et al. 2017).

A worker fetched parameters w_then and computed g = g(w_then). By the time its push arrives the
server's parameters are w, since others have pushed meanwhile. What one would like to have is g(w),
and Taylor says how to get there:

    g(w) is about g(w_then) + H (w - w_then)

Nobody can compute the Hessian H of a large model. But where the loss is a negative log-likelihood
and the model is near the truth, H is in the mean the outer product of the gradient with itself
(Fisher). Of that the diagonal is free:

    w <- w - lr (g + lambda g*g*(w - w_then))

So the server has to remember what it sent to whom, one copy a worker, and nothing else changes:
not the workers, not a byte on the wire. `adaptive` is the paper's DC-ASGD-a: lambda is divided by
the root of a running mean of g*g.

    minidist train --workers 4 --strategy dcasgd
"""
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md

dist = md.distributed


class DelayCompensated(dist.ServerSGD):
    """The servers' rule; `lam` is lambda, `decay` belongs to the mean of squares."""

    name = "dcasgd"

    def __init__(self, lr: float, lam: float = 0.04, adaptive: float = 0,
                 decay: float = 0.95) -> None:
        super().__init__(lr)
        self.settings |= {"lam": float(lam), "adaptive": float(adaptive), "decay": float(decay)}
        self.memory = ("mean_square",) if adaptive else ()
        self.mean_square = 0.0
        self.then: dict[int, np.ndarray] = {}  # worker: what it computes with

    def sent(self, values: np.ndarray, peer: int) -> None:
        self.then[peer] = values.copy()

    def apply(self, values: np.ndarray, pushed: np.ndarray, staleness: int = 0,
              peer: int = 0) -> None:
        square, lam, decay = pushed * pushed, self.settings["lam"], self.settings["decay"]
        if self.settings["adaptive"]:
            self.mean_square = decay * self.mean_square + (1 - decay) * square
            lam = lam / np.sqrt(self.mean_square + 1e-7)
        moved = values - self.then.get(peer, values)
        super().apply(values, pushed + lam * square * moved, staleness)


class DCASGD(dist.Downpour):
    """Downpour whose servers compensate for delays."""

    name = "dcasgd"

    def __init__(self, model, optimizer, lam: float = 0.04, adaptive: bool = False,
                 decay: float = 0.95, group=None) -> None:
        if lam < 0 or not 0 <= decay < 1:
            raise ValueError(f"lam={lam}, decay={decay}: lam is from 0, decay from 0 and below 1")
        rule = DelayCompensated(optimizer.param_groups[0]["lr"], lam, adaptive, decay)
        super().__init__(model, optimizer, rule=rule, group=group)


if __name__ == "__main__":
    # One server and eight workers that take turns: each gradient is seven steps old. No processes
    # are needed for that: a rule is told what is sent and pushed, and that is all it knows.
    train_set, _ = md.load_dataset("digits")
    images, labels = train_set.tensors
    images = images.reshape(len(images), -1)

    def loss(w: np.ndarray, rows) -> tuple[float, np.ndarray]:
        """Of softmax regression, with its gradient."""
        weight = md.tensor(w.reshape(10, 64)).requires_grad_()
        value = md.nn.functional.cross_entropy(images[rows] @ weight.T, labels[rows])
        value.backward()
        return value.item(), weight.grad.numpy().ravel()

    def after(steps: int, workers: int, lam: float) -> float:
        """The loss of all images then, in the mean of five runs."""
        ends = []
        for seed in range(5):
            rule, w = DelayCompensated(0.5, lam), np.zeros(640, np.float32)
            random = np.random.default_rng(seed)
            for worker in range(workers):
                rule.sent(w, worker)
            for step in range(steps):
                worker = step % workers
                _, g = loss(rule.then[worker], random.integers(0, len(images), 32))
                rule.apply(w, g, workers - 1, worker)
                rule.sent(w, worker)
            ends.append(loss(w, slice(None))[0])
        return np.mean(ends)

    print(f"no delay:                  loss {after(150, 1, 0):.2f} after 150 steps")
    print(f"seven steps late:          loss {after(150, 8, 0):.2f}")
    print(f"compensated, lambda = 0.3: loss {after(150, 8, 0.3):.2f}")
    print(f"compensated, lambda = 5:   loss {after(150, 8, 5):.2f}, which is too much of it")
    #> no delay:                  loss 0.3... after 150 steps
    #> seven steps late:          loss 0.7...
    #> compensated, lambda = 0.3: loss ...
    #> compensated, lambda = 5:   loss 0.8..., which is too much of it
