"""signSGD with majority vote: ranks vote on the direction of each number (Bernstein et al. 2018).

    every rank sends sign(g);    all step along sign(sum of the signs)

Nobody sends a length, so the learning rate alone says how long a step is (take a small one, and
let it fall), and a rank whose gradient is wildly wrong has one vote like all others. A vote of an
even number of ranks may be a tie: then that parameter stays.

A sign has no room for "zero": zero counts as positive, as in the paper's code. Only a tensor of
nothing but zeros (a rank without samples) abstains.

    minidist train --workers 3 --compress signsgd --lr 0.001
"""
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md


class SignSGD(md.distributed.Compressor):
    """Wire: who is negative, a bit each; nothing at all from who abstains."""

    name = "signsgd"

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.packbits(x < 0) if x.any() else np.empty(0, np.uint8)

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        if not data.size:
            return np.zeros(count, dtype)
        if data.size != -(-count // 8):
            raise ValueError(f"{data.size} bytes are not {count} bits")
        return 1 - 2 * np.unpackbits(data, count=count).astype(dtype)

    def sum(self, group, flat) -> None:
        super().sum(group, flat)  # of the signs
        np.sign(flat.data, out=flat.data)


if __name__ == "__main__":
    ranks = [np.array([0.2, -3.0, 0.1]), np.array([0.1, -1.0, 0.3]), np.array([-900.0, 1.0, 0.2])]
    c = SignSGD()
    votes = [c.unpack(c.pack({"g": g}), 3, g.dtype) for g in ranks]
    for g, vote in zip(ranks, votes):
        print(g, "votes", vote)
    #> [ 0.2 -3.   0.1] votes [ 1. -1.  1.]
    #> [ 0.1 -1.   0.3] votes [ 1. -1.  1.]
    #> [-9.e+02  1.e+00  2.e-01] votes [-1.  1.  1.]
    print("the mean would be", np.mean(ranks, axis=0).round(1))
    #> the mean would be [-2.999e+02 -1.000e+00  2.000e-01]
    print("the majority says", np.sign(sum(votes)))
    #> the majority says [ 1. -1.  1.]
