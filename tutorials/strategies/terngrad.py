"""TernGrad: each number becomes -s, 0 or s (Wen et al. 2017).

    v    = the gradient, clipped at 2.5 standard deviations
    s    = max |v|
    v_i -> s * sign(v_i) with probability |v_i| / s, else 0

On average that is v_i again, so SGD still goes the right way, only less steadily: two bits a
number. The step's noise grows with s, and s is the largest of all numbers; therefore the clipping,
which the few largest pay for. It is all that this is biased by.

    minidist train --workers 4 --compress terngrad
"""
import sys
import zlib
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md


class TernGrad(md.distributed.Compressor):
    """`clip` in standard deviations of the tensor. Wire: s; who is not 0, a bit each; who is
    negative, a bit each."""

    name = "terngrad"

    def __init__(self, clip: float = 2.5) -> None:
        super().__init__()
        self.clip = clip

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        bound = self.clip * x.std()
        v = np.clip(x, -bound, bound)
        s = np.abs(v).max(keepdims=True)
        kept = self.noise(name, x) * s < np.abs(v)
        return np.concatenate([s.view(np.uint8), np.packbits(kept), np.packbits(v < 0)])

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        width = -(-count // 8)
        if data.size != dtype.itemsize + 2 * width:
            raise ValueError(f"{data.size} bytes are not {count} numbers of 2 bits and a scale")
        s, bits = data[: dtype.itemsize].view(dtype), data[dtype.itemsize :].reshape(2, width)
        kept, negative = np.unpackbits(bits, axis=1, count=count).astype(dtype)
        return s * kept * (1 - 2 * negative)

    def noise(self, name: str, x: np.ndarray) -> np.ndarray:
        """Uniform in [0, 1). Seeded by how many tensors of this name there were, and by what is in
        this one: another on each rank, and the same in a run that is resumed."""
        times = self.memory[name] = self.memory.get(name, np.zeros(1, np.int64)) + 1
        return np.random.default_rng([int(times[0]), zlib.crc32(x)]).random(x.size)


if __name__ == "__main__":
    v = np.array([1.0, -0.5, 0.25, 0.0], np.float32)
    ternary = TernGrad()

    def sent() -> np.ndarray:
        return ternary.unpack(ternary.pack({"v": v}), v.size, v.dtype)

    print(sorted(set(np.abs([sent() for _ in range(100)]).ravel().tolist())))
    #> [0.0, 1.0]
    print(np.mean([sent() for _ in range(2_000)], axis=0).round(1))
    #> [ 1.  -0.5  0...  0. ]

    # What clipping is for: one large number among small ones makes s large, and s is the noise.
    gradient = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    gradient[0] = 100
    for clip in (1000, 2.5):
        c = TernGrad(clip)
        error = c.unpack(c.pack({"g": gradient}), gradient.size, gradient.dtype) - gradient
        print(f"clipped at {clip} sigma: {c.before / c.after:.0f} times fewer bytes, "
              f"noise of {np.linalg.norm(error) / np.linalg.norm(gradient):.1f} gradients")
    #> clipped at 1000 sigma: 16 times fewer bytes, noise of 8... gradients
    #> clipped at 2.5 sigma: 16 times fewer bytes, noise of 1... gradients
