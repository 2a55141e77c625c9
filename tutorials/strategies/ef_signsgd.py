"""EF-signSGD: the sign, a length, and the error for next time (Karimireddy et al. 2019).

    p = g + e;    send mean|p| * sign(p);    e = p - what was sent

Steps along the sign alone need not lead anywhere: below, signs go round in circles beside the
minimum. The length mean|p| lets steps shrink, and the error e, carried over, repairs the
direction. With that the paper proves the rate of SGD, for any compressor.

The paper's e holds steps (learning rate times gradient); here compressors sit before the optimizer
and e holds gradients. For a constant rate that is the same.

    minidist train --workers 4 --compress ef_signsgd
"""
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md


class EFSignSGD(md.distributed.Compressor):
    """`feedback=False` forgets its errors. Wire: mean|p|, and who is negative, a bit each."""

    name = "ef_signsgd"

    def __init__(self, feedback: bool = True) -> None:
        super().__init__()
        self.feedback = feedback

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        p = x + self.memory.get(name, 0)
        length = np.abs(p).mean(keepdims=True)
        data = np.concatenate([length.view(np.uint8), np.packbits(p < 0)])
        if self.feedback:
            self.memory[name] = p - self.decode(data, p.size, p.dtype)
        return data

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        if data.size != dtype.itemsize + -(-count // 8):
            raise ValueError(f"{data.size} bytes are not {count} bits and a length")
        length = data[: dtype.itemsize].view(dtype)
        return length * (1 - 2 * np.unpackbits(data[dtype.itemsize :], count=count).astype(dtype))


if __name__ == "__main__":
    # The paper's second counterexample: f(w) = 0.5 |w1 + w2| + |w1 - w2|, least at 0. Wherever one
    # stands, the sign of the gradient points along (1, -1), so signs never change w1 + w2.
    def gradient(w: np.ndarray) -> np.ndarray:
        return 0.5 * np.sign(w.sum()) * np.array([1, 1]) + np.sign(w[0] - w[1]) * np.array([1, -1])

    for feedback in (False, True):
        c, w = EFSignSGD(feedback), np.array([1.7, 0.3])
        for step in range(2000):
            w -= 0.1 / (step + 1) ** 0.5 * c.unpack(c.pack({"w": gradient(w)}), 2, w.dtype)
        print(f"feedback={feedback}: w1 + w2 went from 2 to {w.sum():.2f}")
    #> feedback=False: w1 + w2 went from 2 to 2.00
    #> feedback=True: w1 + w2 went from 2 to ...0.0...

    c, g = EFSignSGD(), np.ones(100_000, np.float32)
    c.pack({"g": g})
    print(f"{c.before / c.after:.0f} times fewer bytes")
    #> 32 times fewer bytes
