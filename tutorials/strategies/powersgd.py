"""PowerSGD: a matrix as the product of two thin ones (Vogels et al. 2019).

The gradient M of a layer, n x m, is close to a matrix of low rank r. Multiply once by a guess Q of
its right side and orthogonalise, multiply back, and there is one step of power iteration:

    P = M Q                  (n x r)    sum P over all ranks, orthogonalise its columns
    Q = M^T P                (m x r)    sum Q over all ranks
    M is about P Q^T

Both products are linear in M. So ranks can sum P and Q themselves, with an ordinary all-reduce,
where sign bits and lists of indices have to be gathered from everyone: the messages do not grow
with the number of ranks. Q is kept for the next step: gradients change slowly, and each step makes
the guess better. What P Q^T misses is kept, too, and added next time (error feedback).

Biases and other small tensors travel as they are.

    minidist train --workers 4 --compress powersgd
"""
import sys
import zlib
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md


class PowerSGD(md.distributed.Compressor):
    """`rank` is r. Tensors of more than two dimensions are matrices of their first dimension and
    all others; they are compressed where two thin matrices are smaller than one."""

    name = "powersgd"

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank={rank}: of the matrices that are sent, from 1")
        self.rank = rank

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        raise TypeError("powersgd compresses sums over all ranks: it goes with the strategies sync "
                        "and local, not with parameter servers")

    def sum(self, group, flat) -> None:
        matrices, whole = {}, []
        for name, view in zip(flat.names, flat.views):
            rows, columns = len(view) if view.ndim else 1, view.size // max(len(view), 1) \
                if view.ndim else 1
            self.before += view.nbytes
            if self.rank * (rows + columns) < view.size:
                matrices[name] = view.reshape(rows, columns)
            else:
                whole.append(view)
        for name, m in matrices.items():
            m += self.memory.get(name, 0)
            if f"{name} Q" not in self.memory:  # the same guess on all ranks
                guess = np.random.default_rng(zlib.crc32(name.encode()))
                self.memory[f"{name} Q"] = guess.standard_normal(
                    (m.shape[1], self.rank)).astype(m.dtype)
        p = [m @ self.memory[f"{name} Q"] for name, m in matrices.items()]
        self.all_reduce(group, p + whole)
        p = [np.linalg.qr(x)[0] for x in p]  # orthogonal columns
        q = [m.T @ x for m, x in zip(matrices.values(), p)]
        for (name, m), x, y in zip(matrices.items(), p, q):
            self.memory[name] = m - x @ y.T  # what this rank's part misses
        self.all_reduce(group, q)
        for (name, m), x, y in zip(matrices.items(), p, q):
            self.memory[f"{name} Q"] = y
            m[:] = x @ y.T

    def all_reduce(self, group, arrays: list[np.ndarray]) -> None:
        """Sum them over all ranks, in one message."""
        if arrays:
            vector = np.concatenate([x.ravel() for x in arrays])
            group.all_reduce(vector)
            self.after += vector.nbytes
            for x, part in zip(arrays, np.split(vector, np.cumsum([x.size for x in arrays])[:-1])):
                x[...] = part.reshape(x.shape)


if __name__ == "__main__":
    from types import SimpleNamespace

    # A gradient that is nearly of rank 2, and a group of one rank.
    random = np.random.default_rng(0)
    gradient = random.standard_normal((300, 2)) @ random.standard_normal((2, 200)) \
        + 0.1 * random.standard_normal((300, 200))
    c = PowerSGD(rank=2)
    for step in range(3):
        flat = SimpleNamespace(names=["w"], views=[gradient.copy()])
        c.memory.pop("w", None)  # without feedback, to see the guess alone
        c.sum(md.ProcessGroup(), flat)
        error = np.linalg.norm(flat.views[0] - gradient) / np.linalg.norm(gradient)
        print(f"step {step + 1}: misses {error:.0%} of the gradient")
    #> step 1: misses 1...% of the gradient
    #> step 2: misses 7% of the gradient
    #> step 3: misses 7% of the gradient
    print(f"{c.before / c.after:.0f} times fewer bytes")
    #> 60 times fewer bytes
