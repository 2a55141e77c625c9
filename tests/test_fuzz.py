"""Every decoder and state machine, with bytes that nobody should send. See fuzz/targets.py."""
import gc
import random
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).parent / "fuzz")]
import targets  # noqa: E402

every = pytest.mark.parametrize("name", targets.TARGETS)


@every
def test_the_corpus(name):
    for data in targets.corpus(name):
        targets.TARGETS[name](data)


@every
def test_any_bytes(name):
    @settings(max_examples=100, deadline=None, database=None)
    @given(st.binary(max_size=400))
    def run(data):
        targets.TARGETS[name](data)
    run()


def mutated(rng, pool):
    """Some inputs, spliced, cut, and changed here and there."""
    data = bytearray().join(rng.choice(pool) for _ in range(rng.randrange(1, 4)))
    for _ in range(rng.randrange(6)):
        at, how = rng.randrange(len(data) + 1), rng.randrange(4)
        if how == 0:
            data[at:at] = rng.randbytes(rng.randrange(9))
        elif how == 1:
            del data[at:at + rng.randrange(9)]
        elif how == 2:
            data[at:at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\0\0\0\1"))
        elif data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
    return bytes(data)


@every
def test_changed_inputs_in_bounded_memory(name):
    rng, pool, run = random.Random(1), targets.corpus(name), targets.TARGETS[name]
    run(pool[0])
    # (A UDP connection has two windows of 4 MiB, a message may have 1 MiB before it is lazy.)
    most = {"node": 8 << 20, "packets_of_the_peer": 16 << 20, "datagrams": 16 << 20}
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(300):
            run(mutated(rng, pool))
            gc.collect(0)
            held, peak = tracemalloc.get_traced_memory()
            assert held < 4 << 20 and peak < most.get(name, 4 << 20), (held, peak)
    finally:
        tracemalloc.stop()
