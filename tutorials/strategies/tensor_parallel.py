"""Tensor parallelism: one layer on several ranks (Dean et al. 2012; Shoeybi et al. 2019).

A layer that is too large for one machine is cut. y = x W^T can be cut in two ways:

- by columns of the result: every rank has some outputs' weights, needs all of x, and yields its
  part of y. Nothing is sent forward. Backward, x is to be blamed by all ranks: their gradients are
  summed.
- by rows of the input: every rank has some inputs' weights, needs its part of x, and yields a
  summand of all of y. Forward, these are summed. Backward nothing is sent.

The two fit: a column layer's part of y is just what a row layer needs of x, and what stands between
them (ReLU, but not dropout) works on each number alone. So a pair of layers, however wide in the
middle, costs one all-reduce forward and one backward (Megatron-LM's f and g).

All ranks compute the same batch. Parameters are nobody's copy: no strategy is needed, each rank's
optimizer changes what it has.
"""
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md


class ToAll(md.autograd.Function):
    """Forward nothing happens; backward the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        md.distributed.all_reduce(g, group=ctx.group)
        return g, None


class FromAll(md.autograd.Function):
    """Forward the summands of all ranks are summed; backward each gets the whole gradient."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        md.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class ColumnLinear(md.nn.Module):
    """This rank's outputs of `whole`, a Linear that is the same on all ranks."""

    def __init__(self, whole, group=None) -> None:
        super().__init__()
        mine = slice(*share(whole.weight.shape[0], group))
        self.group = group
        self.weight = md.nn.Parameter(whole.weight.detach()[mine].clone())      # (out / ranks, in)
        self.bias = None if whole.bias is None else \
            md.nn.Parameter(whole.bias.detach()[mine].clone())

    def forward(self, x):                                                       # (B, in)
        return md.nn.functional.linear(ToAll.apply(x, self.group), self.weight, self.bias)


class RowLinear(md.nn.Module):
    """`whole`, of which this rank has the weights of some inputs: those that a ColumnLinear of as
    many outputs yields here. All ranks have the bias, and add it once, behind the sum."""

    def __init__(self, whole, group=None) -> None:
        super().__init__()
        mine = slice(*share(whole.weight.shape[1], group))
        self.group = group
        self.weight = md.nn.Parameter(whole.weight.detach()[:, mine].clone())   # (out, in / ranks)
        self.bias = None if whole.bias is None else md.nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):                                                       # (B, in / ranks)
        y = FromAll.apply(md.nn.functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def share(count: int, group=None) -> tuple[int, int]:
    """Which of `count` are this rank's."""
    rank, size = (f(group=group) for f in (md.distributed.get_rank, md.distributed.get_world_size))
    if count < size:
        raise ValueError(f"{count} features cannot be cut in parts for {size} ranks")
    return md.share_of(count, rank, size)


def learn():
    """A network of 64-512-10 on digits, its two layers cut for as many ranks as there are."""
    md.distributed.init_process_group()
    md.manual_seed(0)
    nn = md.nn
    wide, narrow = nn.Linear(64, 512).double(), nn.Linear(512, 10).double()
    model = nn.Sequential(nn.Flatten(), ColumnLinear(wide), nn.ReLU(), RowLinear(narrow))
    optimizer = md.optim.SGD(model.parameters(), lr=0.1)
    images, labels = md.load_dataset("digits")[0].tensors
    losses = []
    for start in range(0, 1280, 64):
        loss = nn.functional.cross_entropy(model(images[start : start + 64].double()),
                                           labels[start : start + 64])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = sum(p.numel() for p in model.parameters())
    md.distributed.destroy_process_group()
    return parameters, losses


if __name__ == "__main__":
    whole, alone = learn()
    for rank, (parameters, losses) in enumerate(md.launch(learn, workers=2, transport="pipe")):
        print(f"rank {rank} has {parameters:,} of {whole:,} parameters; losses {losses[0]:.4f} to "
              f"{losses[-1]:.4f}")
        print("as in the whole model:", np.abs(np.subtract(losses, alone)).max() < 1e-12)
    #> rank 0 has 19,210 of 38,410 parameters; losses 2.3... to 1.9...
    #> as in the whole model: True
    #> rank 1 has 19,210 of 38,410 parameters; losses 2.3... to 1.9...
    #> as in the whole model: True
