"""Elastic averaging: every worker has a replica of its own, tied to a centre by a spring.

Downpour's workers all push the same parameters about. Here each goes its own way, for tau steps at
a time, and explores; then replica and centre pull at each other (Zhang, Choromanska and LeCun
2015, algorithm 1):

    d = alpha (x - centre);    x = x - d;    centre = centre + d

The same d on both sides: what the replica gives up, the centre gains. alpha = beta / p, so that p
workers together move the centre as much as one would with beta; beta is 0.9. Nobody waits for
anybody. In the end the centre is the result: it averages over replicas, and over time.

With `inner_momentum` it is the paper's EAMSGD (algorithm 2): the gradient is that of the place to
which the velocity is about to carry the replica (Nesterov), and the spring has no part in it:

    v = momentum v - lr * gradient(x + momentum v);    x = x + v

The authors' code, https://github.com/sixin-zh/mpiT, asks for d, steps, then applies d; so does
this. Between steps the model holds x + momentum v, where the next gradient is taken.

    minidist train --workers 4 --strategy easgd
"""
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md

dist = md.distributed


class EASGD(dist.Downpour):
    """The centre is kept by parameter servers, whose rule is w <- w - pushed: a worker pushes -d.
    `optimizer` makes a replica's own steps, and has no momentum of its own if this one has."""

    name, drifts, elastic, adds_up = "easgd", True, True, False

    def __init__(self, model, optimizer, tau: int = 4, beta: float = 0.9,
                 inner_momentum: float = 0.0, group=None) -> None:
        if tau < 1 or not 0 < beta <= 1 or not 0 <= inner_momentum < 1:
            raise ValueError(f"tau={tau}, beta={beta}, inner_momentum={inner_momentum}: tau "
                             "counts steps, from 1; beta is above 0, up to 1; inner_momentum is "
                             "from 0 and below 1")
        super().__init__(model, optimizer, rule=dist.ServerSGD(1.0), group=group)
        self.tau, self.momentum = tau, inner_momentum
        self.alpha = beta / self.group.size
        self.velocity = np.zeros_like(self.weights.data)

    def step(self) -> None:
        x, pull = self.weights.data, 0.0
        ahead = self.momentum * self.velocity
        if self.steps % self.tau == 0:
            self.fetch()
            pull = self.alpha * (x - ahead - self.fetched)
            self.push(-pull)
        before = x.copy()
        if self.samples:
            self.optimizer.step()
        self.velocity = ahead + (x - before)
        x += self.momentum * self.velocity - pull
        self.weights.changed("the spring to the centre")
        self.steps += 1

    def finish(self) -> None:
        """End, together with all others, on the centre."""
        super().finish()
        self.weights.data[:] = self.fetched
        self.weights.changed("the end, at the centre")

    def own_state(self) -> dict:
        return super().own_state() | {"velocity": self.velocity}

    def load_own_state(self, own: dict) -> None:
        super().load_own_state(own)
        self.velocity[:] = np.asarray(own["velocity"])


def learn(tau: int):
    """Digits, by a layer of 32, on one of several workers."""
    md.distributed.init_process_group()
    md.manual_seed(0)
    nn = md.nn
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    elastic = md.plugin("easgd", md.distributed.Strategy)
    train = elastic(model, md.optim.SGD(model.parameters(), lr=0.5), tau)
    data, (images, labels) = md.load_dataset("digits")[0], md.load_dataset("digits")[1].tensors
    loader = md.utils.data.DataLoader(data, batch_size=64, shuffle=True)

    def right():
        return float((model(images).argmax(1) == labels).float().mean())

    for _ in range(8):
        for x, y in train.batches(loader):
            train.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            train.step()
    replica, alone = train.weights.data.copy(), right()
    train.finish()
    apart = np.linalg.norm(replica - train.weights.data) / np.linalg.norm(replica)
    sent = train.group.transport.stats["bytes_sent"] / (4 * replica.size * train.steps)
    md.distributed.destroy_process_group()
    return alone, apart, right(), sent


if __name__ == "__main__":
    workers = md.launch(learn, (8,), workers=3, servers=1, transport="pipe")
    for rank, (alone, apart, _, sent) in enumerate(workers):
        print(f"replica {rank}: {alone:.0%} right, {apart:.0%} away from the centre; "
              f"{sent:.2f} gradients sent a step")
    print(f"the centre: {workers[0][2]:.0%} right")
    #> replica 0: ...% right, ...% away from the centre; 0.1... gradients sent a step
    #> replica 1: ...% right, ...% away from the centre; 0.1... gradients sent a step
    #> replica 2: ...% right, ...% away from the centre; 0.1... gradients sent a step
    #> the centre: 9...% right
