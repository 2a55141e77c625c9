"""Top-k: send the largest, keep the rest for later (Aji and Heafield 2017; Stich et al. 2018).

Most numbers of a gradient are small. Of each tensor only the largest hundredth travels, as pairs
(index, value); the others are added to what comes next ("residual"), until they are large enough:

    p = g + r;    send the k entries with the largest |p|;    r = p, with 0 where it was sent

Without the residual small numbers would never be heard, and the demonstration below shows what
that means: two ranks shout each other down about one parameter, and the other is never learned.

    minidist train --workers 4 --compress topk
"""
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md


class TopK(md.distributed.Compressor):
    """`ratio` of a tensor's entries travel, one at least. `feedback=False` forgets the rest. Wire:
    the indices (u32, ascending), then the values."""

    name = "topk"

    def __init__(self, ratio: float = 0.01, feedback: bool = True) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio}: the part of a tensor that is sent, above 0, up to 1")
        self.ratio, self.feedback = ratio, feedback

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        p = x + self.memory.get(name, 0)
        k = max(round(self.ratio * p.size), 1)
        chosen = np.sort(np.argpartition(np.abs(p), -k)[-k:])
        data = pairs(chosen, p[chosen])
        if self.feedback:
            p[chosen] = 0
            self.memory[name] = p
        return data

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        k, rest = divmod(data.size, 4 + dtype.itemsize)
        chosen = data[: 4 * k].view("<u4")
        if rest or (chosen >= count).any():
            raise ValueError(f"{data.size} bytes are not entries of {count} numbers")
        x = np.zeros(count, dtype)
        x[chosen] = data[4 * k :].view(dtype)
        return x


def pairs(chosen: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.concatenate([chosen.astype("<u4").view(np.uint8), values.view(np.uint8)])


if __name__ == "__main__":
    # Two ranks, two parameters, one entry each. About the first they disagree loudly, with nothing
    # to gain; about the second they agree quietly. The sum of their losses is least at (0, 3).
    def gradients(w: np.ndarray) -> list[np.ndarray]:
        return [np.array([w[0] + 10, w[1] - 3]), np.array([w[0] - 10, w[1] - 3])]

    for feedback in (False, True):
        ranks, w = [TopK(0.5, feedback), TopK(0.5, feedback)], np.zeros(2)
        for _ in range(2000):
            w -= 0.01 * sum(c.unpack(c.pack({"w": g}), 2, w.dtype)
                            for c, g in zip(ranks, gradients(w)))
        print(f"feedback={feedback}: second parameter {w[1]:.1f}, should be 3")
    #> feedback=False: second parameter 0.0, should be 3
    #> feedback=True: second parameter 3.0, should be 3

    c, g = TopK(), np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    c.pack({"g": g})
    print(f"{c.before / c.after:.0f} times fewer bytes")
    #> 50 times fewer bytes
