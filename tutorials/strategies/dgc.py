"""Deep Gradient Compression: top-k that keeps momentum right (Lin et al. 2018).

Top-k sends one entry in a hundred; this sends one in a thousand, by four additions:

- Momentum correction. What waits in a residual must wait as velocity, or a number that is sent
  late arrives without the momentum it would have had:  u = m u + g;  a = a + u;  send large a.
- Momentum factor masking. Where a was sent, u is forgotten too: stale velocity would go on pulling.
- Local clipping. A rank clips its gradient before it is added up: later it would be too late.
- Warm-up. The first steps, in which everything changes, send more: 25 %, 6 %, 1.6 %, 0.4 %, 0.1 %.

Looking for the k largest of millions is slow. So the threshold is the k-th largest of a sample of
1 %, and is moved by 30 % up or down, ten times at most, until 0.7 k to 1.3 k entries pass.

The momentum is the compressor's; the optimizer must have none.

    minidist train --workers 4 --compress dgc
"""
import sys
import zlib
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # run as a script: minidist may be in the folder above, not installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import minidist as md

STAGES = (0.25, 0.0625, 0.015625, 0.004, 0.001)  # of the warm-up: the part that is sent


class DGC(md.plugin("topk", md.distributed.Compressor)):
    """`warmup` steps a stage. `clip`: the norm that the gradient of one rank may have (the paper's
    is that of the whole, divided by the square root of the number of ranks); 0: any. Entries travel
    as those of top-k. Remembered are, for each tensor, u and a, and how many there were."""

    name = "dgc"

    def __init__(self, momentum: float = 0.9, clip: float = 0.0, warmup: int = 100) -> None:
        super().__init__()
        self.momentum, self.clip, self.warmup = momentum, clip, warmup

    def pack(self, named: dict[str, np.ndarray]) -> np.ndarray:
        norm = np.sqrt(sum(np.vdot(x, x) for x in named.values()))
        if 0 < self.clip < norm:
            named = {name: x * x.dtype.type(self.clip / norm) for name, x in named.items()}
        return super().pack(named)

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        count = f"steps of {name}"
        steps = self.memory.get(count, np.zeros(1, np.int64))
        self.memory[count] = steps + 1
        stage = int(steps[0]) // self.warmup if self.warmup else len(STAGES)
        u, a = self.memory.get(name, np.zeros((2, x.size), x.dtype))
        u = self.momentum * u + x
        a = a + u
        size = np.abs(a)
        sent = size >= self.threshold(size, STAGES[min(stage, len(STAGES) - 1)], name, steps)
        sent &= size > 0
        self.memory[name] = np.where(sent, 0, [u, a]).astype(x.dtype)
        chosen = np.flatnonzero(sent)
        return np.concatenate([chosen.astype("<u4").view(np.uint8), a[chosen].view(np.uint8)])

    def threshold(self, size: np.ndarray, ratio: float, name: str, steps: np.ndarray) -> float:
        """About ratio * n of the n magnitudes are as large as this. Tensors of less than a thousand
        are their own sample."""
        sample = size
        if size.size >= 1000:
            random = np.random.default_rng([int(steps[0]), zlib.crc32(name.encode())])
            sample = size[random.integers(0, size.size, max(size.size // 100, 100))]
        k = max(int(sample.size * ratio), 1)
        threshold = np.partition(sample, -k)[-k]
        for _ in range(10):
            passing = np.count_nonzero(size >= threshold)
            if passing > max(1.3 * ratio * size.size, 1):
                threshold *= 1.3
            elif passing < 0.7 * ratio * size.size:
                threshold *= 0.7
            else:
                break
        return threshold


if __name__ == "__main__":
    c, random = DGC(warmup=2), np.random.default_rng(0)
    for step in range(12):
        before, after = c.before, c.after
        c.pack({"g": random.standard_normal(100_000).astype(np.float32)})
        if step % 2 == 1:
            print(f"step {step + 1:2}: {(c.before - before) / (c.after - after):3.0f} times fewer "
                  "bytes")
    #> step  2:   2 times fewer bytes
    #> step  4:   7 times fewer bytes
    #> step  6:  31 times fewer bytes
    #> step  8: 1... times fewer bytes
    #> step 10: ... times fewer bytes
    #> step 12: ... times fewer bytes
