"""1-bit SGD: one bit a number, and no error is ever lost (Seide et al. 2014).

A number says only whether it is negative. All negative ones become their mean, all others become
theirs. That is far too coarse, and biased, and would not train; but what a step got wrong is
remembered and added to the next step's gradient ("error feedback"):

    p = g + r;    send onebit(p);    r = p - onebit(p)

So the sum of all that was sent follows the sum of all gradients, with a lag of one step. Whatever
is left out is late, not lost. This is the idea that every biased compressor needs.

    minidist train --workers 4 --compress onebit
"""
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md


class OneBit(md.distributed.Compressor):
    """`feedback=False` forgets its errors. Wire: the mean of the negative numbers, the mean of the
    others, and who is negative, a bit each."""

    name = "onebit"

    def __init__(self, feedback: bool = True) -> None:
        super().__init__()
        self.feedback = feedback

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        p = x + self.memory.get(name, 0)
        negative = p < 0
        means = np.array([p[side].mean() if side.any() else 0 for side in (negative, ~negative)],
                         x.dtype)
        data = np.concatenate([means.view(np.uint8), np.packbits(negative)])
        if self.feedback:
            self.memory[name] = p - self.decode(data, p.size, p.dtype)
        return data

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        start = 2 * dtype.itemsize
        if data.size != start + -(-count // 8):
            raise ValueError(f"{data.size} bytes are not {count} bits and 2 means")
        below, above = data[:start].view(dtype)
        return np.where(np.unpackbits(data[start:], count=count), below, above)


if __name__ == "__main__":
    # Two ranks whose losses are least at different places; together, half way: at (1, 2, 3).
    places = np.array([[11.0, 2, 4], [-9.0, 2, 2]])
    for feedback in (False, True):
        ranks, w = [OneBit(feedback), OneBit(feedback)], np.zeros(3)
        for _ in range(1500):
            w -= 0.005 * sum(c.unpack(c.pack({"w": w - place}), 3, w.dtype)
                             for c, place in zip(ranks, places))
        print(f"feedback={feedback}: ends at {w.round(1) + 0.0}")
    #> feedback=False: ends at [0.5 2.  3.6]
    #> feedback=True: ends at [1. 2. 3.]

    c, g = OneBit(), np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    sent = sum(c.unpack(c.pack({"g": g}), g.size, g.dtype) for _ in range(100)) / 100
    print(f"{c.before / c.after:.0f} times fewer bytes; the mean of 100 of them misses by "
          f"{np.linalg.norm(sent - g) / np.linalg.norm(g):.2f} gradients")
    #> 32 times fewer bytes; the mean of 100 of them misses by 0.0... gradients
