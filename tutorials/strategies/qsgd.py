"""QSGD: few levels, rounded at random, right on average (Alistarh et al. 2017).

A gradient is noise around a direction anyway. So its numbers may be rounded coarsely, as long as
the rounding favours neither side: a number that lies a third of the way between two levels is
rounded up in one case of three. The mean of many such roundings is the number itself ("unbiased"),
and SGD averages over steps and ranks. Nothing has to be remembered.

    s levels;  v -> |v| * sign(v_i) * l_i / s,   l_i = floor(s |v_i| / |v|) + Bernoulli(the rest)

|v| is the norm of a bucket of 128 neighbours, as in the authors' experiments: the fewer share a
norm, the finer the levels. With s = 7 a number takes 4 bits, and each bucket its norm: an eighth
of float32, roughly.

    minidist train --workers 4 --compress qsgd
"""
import sys
import zlib
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md

BUCKET = 128  # numbers that share a norm


class QSGD(md.distributed.Compressor):
    """`levels` (s, 1 to 127) on either side of 0. Wire: s, the norms of the buckets, the codes
    0..2s of all numbers, as few bits each as will do."""

    name = "qsgd"

    def __init__(self, levels: int = 7) -> None:
        super().__init__()
        if not 1 <= levels <= 127:
            raise ValueError(f"levels={levels}: from 1 to 127, so that a code fits in a byte")
        self.levels = levels

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        s, bits = self.levels, bits_of(self.levels)
        v = np.pad(x, (0, -x.size % BUCKET)).reshape(-1, BUCKET)        # (buckets, 128)
        norms = np.sqrt((v * v).sum(axis=1, keepdims=True))             # (buckets, 1)
        exact = s * np.abs(v) / np.where(norms > 0, norms, 1)           # 0 .. s
        level = np.floor(exact)
        level += self.noise(name, x, v.size).reshape(v.shape) < exact - level
        codes = (s + np.sign(v) * np.minimum(level, s)).ravel()[: x.size].astype(np.uint8)
        packed = np.packbits(np.unpackbits(codes[:, None], axis=1)[:, -bits:])
        return np.concatenate([np.uint8([s]), norms.ravel().view(np.uint8), packed])

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        s, buckets = int(data[0]) if data.size else 0, -(-count // BUCKET)
        start, bits = 1 + buckets * dtype.itemsize, bits_of(s)
        if not 1 <= s <= 127 or data.size != start + -(-count * bits // 8):
            raise ValueError(f"{data.size} bytes are not {count} numbers of {s} levels")
        norms = np.repeat(data[1:start].view(dtype), BUCKET)[:count]
        codes = np.zeros((count, 8), np.uint8)
        codes[:, -bits:] = np.unpackbits(data[start:], count=count * bits).reshape(count, bits)
        return norms / s * (np.packbits(codes, axis=1).ravel().astype(dtype) - s)

    def noise(self, name: str, x: np.ndarray, count: int) -> np.ndarray:
        """Uniform in [0, 1). Seeded by how many tensors of this name there were, and by what is in
        this one: another on each rank, and the same in a run that is resumed."""
        times = self.memory[name] = self.memory.get(name, np.zeros(1, np.int64)) + 1
        return np.random.default_rng([int(times[0]), zlib.crc32(x)]).random(count)


def bits_of(levels: int) -> int:
    return (2 * levels).bit_length()


if __name__ == "__main__":
    v = np.array([0.9, -0.3, 0.1, 0.0], np.float32)
    coarse = QSGD(levels=3)

    def sent() -> np.ndarray:
        return coarse.unpack(coarse.pack({"v": v}), v.size, v.dtype)

    print(v, "becomes", sent().round(2), "then", sent().round(2))
    #> [ 0.9 -0.3  0.1  0. ] becomes [...] then [...]

    # Each time it is wrong. On average it is right:
    print(np.mean([sent() for _ in range(2_000)], axis=0).round(1))
    #> [ 0.9 -0.3  0.1  0. ]

    gradient = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    for levels in (1, 7, 127):
        c = QSGD(levels)
        error = c.unpack(c.pack({"g": gradient}), gradient.size, gradient.dtype) - gradient
        print(f"{levels:3} levels: {c.before / c.after:4.1f} times fewer bytes, "
              f"noise of {np.linalg.norm(error) / np.linalg.norm(gradient):.2f} gradients")
    #>   1 levels: 14.2 times fewer bytes, noise of 2.8... gradients
    #>   7 levels:  7.5 times fewer bytes, noise of 0.6... gradients
    #> 127 levels:  3.9 times fewer bytes, noise of 0.0... gradients
