"""Collectives: the same bits from every algorithm, and mismatches that name both calls."""
import contextvars
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from memory import cluster, on_ranks, outcomes, run
from minidist import distributed as dist
from minidist_transports import ProtocolError, protocol

DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool"]
OPS = {md.ReduceOp.SUM: lambda a, b: a + b, md.ReduceOp.PRODUCT: lambda a, b: a * b,
       md.ReduceOp.MIN: min, md.ReduceOp.MAX: max}


def tree(values, add):
    """The balanced tree over scalars, written down as the recursion that it is."""
    core = 2 ** math.floor(math.log2(len(values)))
    folded = list(values[:core])
    for i in range(core, len(values)):
        folded[i - core] = add(folded[i - core], values[i])

    def total(first, last):
        if last - first == 1:
            return folded[first]
        middle = (first + last) // 2
        return add(total(first, middle), total(middle, last))
    return total(0, core)


def reference(arrays, op):
    with np.errstate(all="ignore"):
        return np.array([tree(column, OPS[op]) for column in zip(*arrays)], arrays[0].dtype)


def numbers(rank, count, dtype):
    rng = np.random.default_rng([rank, count])
    if dtype == "bool":
        return rng.random(count) < 0.3
    if dtype.startswith("f"):       # of very different sizes, so that the order of a sum shows
        return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)
    return rng.integers(0, 100, count).astype(dtype)


# ---- all_reduce: what its sum is -------------------------------------------------

def test_the_order_of_the_sum_is_the_tree():
    # ((rank 0 + rank 2) + rank 1): the 1 survives only in this order.
    values = np.float32([1e8, 1, -1e8])
    assert (values[0] + values[1]) + values[2] == 0

    def work(group):
        x = values[group.rank:group.rank + 1].copy()
        group.all_reduce(x)
        return x[0]
    assert on_ranks(3, work) == [1, 1, 1]


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("limit", [2**30, -1], ids=["doubling", "halving"])
def test_all_reduce_has_the_trees_bits(size, limit, monkeypatch):
    monkeypatch.setattr(md, "SMALL", limit)
    cases = [(count, dtype, md.ReduceOp.SUM) for count in (0, 1, 3, 100) for dtype in DTYPES]
    cases += [(7, dtype, op) for op in OPS for dtype in ("float32", "int32", "bool")]

    def work(group):
        results = []
        for count, dtype, op in cases:
            x = numbers(group.rank, count, dtype)
            group.all_reduce(x, op)
            results.append(x)
        return results
    ranks = on_ranks(size, work)
    for i, (count, dtype, op) in enumerate(cases):
        expected = reference([numbers(r, count, dtype) for r in range(size)], op)
        for rank in range(size):
            assert ranks[rank][i].dtype == dtype
            assert ranks[rank][i].tobytes() == expected.tobytes(), (count, dtype, op, rank)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_large_tensors(size):
    count = 50_001                  # 200 KB of float32: above the limit, so halved
    parts = [numbers(r, count, "float32") for r in range(size)]

    def work(group):
        x = parts[group.rank].copy()
        group.all_reduce(x)
        return x, group.transport.stats["bytes_sent"]
    ranks = on_ranks(size, work)
    expected = reference(parts, md.ReduceOp.SUM)
    assert all(x.tobytes() == expected.tobytes() for x, _ in ranks)
    if size in (2, 4):              # each element is sent about twice, however many ranks
        assert all(sent <= 2 * 4 * count for _, sent in ranks)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 9), count=st.integers(0, 40), seed=st.integers(0, 99))
def test_all_reduce_equals_reduce_scatter_and_all_gather(size, count, seed):
    def work(group):
        parts = [numbers(seed + group.rank * 100 + i, count, "float32") for i in range(size)]
        whole = np.concatenate(parts)
        group.all_reduce(whole)
        mine = np.empty(count, np.float32)
        group.reduce_scatter(mine, parts)
        gathered = [np.empty(count, np.float32) for _ in range(size)]
        group.all_gather(gathered, mine)
        return whole, np.concatenate(gathered)
    for whole, gathered in on_ranks(size, work):
        assert whole.tobytes() == gathered.tobytes()


@pytest.mark.parametrize("limit", [2**30, -1], ids=["doubling", "halving"])
def test_operands_stand_in_rank_order(limit, monkeypatch):
    """The maximum of 0 and -0, and the bits of a sum of two NaNs, depend on which stands left."""
    monkeypatch.setattr(md, "SMALL", limit)
    odd = np.array([0.0, -0.0, np.nan, -np.nan])
    parts = [np.tile(np.roll(odd, rank), 8) for rank in range(3)]

    def work(group):
        results = []
        for op in (md.ReduceOp.MAX, md.ReduceOp.MIN, md.ReduceOp.SUM):
            x = parts[group.rank].copy()
            group.all_reduce(x, op)
            results.append(x.tobytes())
        return results
    first, *others = on_ranks(3, work)
    assert others == [first, first]


def test_average_divides_once():
    parts = [numbers(r, 9, "float32") for r in range(3)]

    def work(group):
        x = parts[group.rank].copy()
        group.all_reduce(x, md.ReduceOp.AVG)
        y = np.empty(3, np.float32)
        group.reduce_scatter(y, list(parts[group.rank].reshape(3, 3)), md.ReduceOp.AVG)
        return x, y
    expected = reference(parts, md.ReduceOp.SUM) / np.float32(3)
    for rank, (x, y) in enumerate(on_ranks(3, work)):
        assert x.tobytes() == expected.tobytes()
        assert y.tobytes() == expected.reshape(3, 3)[rank].tobytes()


def test_average_of_integers_is_refused():
    with pytest.raises(TypeError, match="int64 would be rounded"):
        md.ProcessGroup().all_reduce(np.array([1]), md.ReduceOp.AVG)


def test_dtypes_that_cannot_travel_are_refused():
    for error in outcomes(2, lambda group: group.all_reduce(np.zeros(2, complex))):
        assert isinstance(error, TypeError) and "complex128" in str(error)


# ---- the other collectives -------------------------------------------------------

@pytest.mark.parametrize("size", range(1, 10))
def test_broadcast_from_every_root(size):
    def work(group):
        results = []
        for root in range(size):
            x = np.full(3, group.rank, np.int32)
            group.broadcast(x, src=root)
            results.append(int(x[0]))
        return results
    assert on_ranks(size, work) == [list(range(size))] * size


def test_barrier_waits_for_all():
    arrived = []

    def work(group):
        arrived.append(group.rank)
        group.barrier()
        return len(arrived)
    assert on_ranks(5, work) == [5] * 5


@pytest.mark.parametrize("size", [2, 3])
def test_D9_tensors_without_elements(size):
    """Empty in, empty out; and as many messages as for any small tensor."""
    def work(group):
        messages = []
        for shape in [(0,), (0, 5), (1,), (8,)]:
            before = group.transport.stats["messages_sent"]
            x = np.ones(shape, np.float32)
            for op in md.ReduceOp:
                group.all_reduce(x, op)
            group.broadcast(x)
            gathered = [np.zeros(shape, np.float32) for _ in range(size)]
            group.all_gather(gathered, x)
            group.reduce_scatter(x, gathered)
            assert x.shape == gathered[0].shape == shape
            messages.append(group.transport.stats["messages_sent"] - before)
        return messages
    for messages in on_ranks(size, work):
        assert len(set(messages)) == 1 and messages[0] > 0


def test_tensors_of_every_layout():
    def work(group):
        transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
        group.all_reduce(transposed)
        big_endian = np.arange(3, dtype=">f8")
        group.all_reduce(big_endian)
        zero_d = md.tensor(1.5)
        group.all_reduce(zero_d)
        every_other = md.arange(6)
        group.broadcast(every_other[::2], src=1)
        return transposed.tolist(), big_endian.tolist(), zero_d.item()
    for result in on_ranks(2, work):
        assert result == ([[0, 6], [2, 8], [4, 10]], [0, 2, 4], 3.0)


def test_backward_notices_a_collective_that_changed_a_saved_tensor():
    x = md.tensor([1.0, 2.0])
    w = md.tensor([3.0, 4.0], requires_grad=True)
    loss = (w * x).sum()
    md.ProcessGroup().all_reduce(x)
    with pytest.raises(RuntimeError, match="all_reduce"):
        loss.backward()


def test_lists_must_fit():
    x = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r"all_gather needs a list of 1 tensors of \(2,\) float32"):
        md.ProcessGroup().all_gather([np.zeros(3, np.float32)], x)


# ---- D4: different calls on different ranks --------------------------------------

@pytest.mark.parametrize("first, second, names", [
    (lambda g: g.all_reduce(np.zeros(4, np.float32)),
     lambda g: g.all_reduce(np.zeros(5, np.float32)), ("4 float32", "5")),
    (lambda g: g.all_reduce(np.zeros(4, np.float32)),
     lambda g: g.all_reduce(np.zeros(4, np.int32)), ("float32", "int32")),
    (lambda g: g.all_reduce(np.zeros(4, np.float32), md.ReduceOp.MAX),
     lambda g: g.all_reduce(np.zeros(4, np.float32)), ("max", "sum")),
    (lambda g: g.broadcast(np.zeros(4, np.float32)),
     lambda g: g.barrier(), ("broadcast", "barrier")),
    (lambda g: [g.barrier(), g.all_reduce(np.zeros(1))],
     lambda g: g.all_reduce(np.zeros(1)), ("barrier", "all_reduce")),
    (lambda g: [g.broadcast(np.zeros(4)), g.broadcast(np.zeros(4)), g.barrier()],
     lambda g: [g.broadcast(np.zeros(4)), g.barrier()], ("broadcast", "barrier")),
    (lambda g: g.broadcast(np.zeros(4), src=0),
     lambda g: g.broadcast(np.zeros(4), src=1), ("broadcast", "barrier")),
], ids=["size", "dtype", "reduction", "operation", "skipped", "skipped later", "root"])
def test_D4_different_calls(first, second, names):
    def work(group):
        (second if group.rank else first)(group)
        group.barrier()             # a sender learns of it at its next wait
    errors = outcomes(2, work)
    for error in errors:            # both sides raise, and either text names two calls
        assert isinstance(error, RuntimeError), error
        assert len(re.findall("all_reduce|broadcast|barrier", str(error))) >= 2
    for name in names:
        assert name in f"{errors[0]} {errors[1]}"


def test_D4_a_third_rank_hears_that_two_differ_and_where():
    def work(group):
        if group.rank == 2:
            group.recv(np.zeros(1), src=0)
        group.broadcast(np.zeros(4, np.float32 if group.rank else np.int32), src=1)
        group.barrier()
    line = work.__code__.co_firstlineno + 3
    for error in outcomes(3, work):
        assert isinstance(error, ProtocolError) and error.code == protocol.CODES["MISMATCH"]
        assert "int32" in str(error) and "float32" in str(error)
        assert f"is at {__file__}:{line}" in str(error)


# ---- point to point --------------------------------------------------------------

def test_send_and_recv_match_tags():
    def work(group):
        if group.rank == 0:
            group.send(md.tensor([1.0]), dst=1, tag=1)
            group.send(md.tensor([2.0]), dst=1, tag=2)
            return None
        x, y = md.zeros(1), md.zeros(1)
        assert group.recv(y, src=0, tag=2) == 0
        assert group.recv(x, tag=1) == 0        # from whom it may be
        return x.item(), y.item()
    assert on_ranks(2, work)[1] == (1.0, 2.0)


def test_recv_from_anyone():
    def work(group):
        if group.rank:
            return group.send(md.tensor([float(group.rank)]), dst=0)
        x, seen = md.zeros(1), set()
        for _ in range(3):
            source = group.recv(x)
            assert x.item() == source
            seen.add(source)
        return seen
    assert on_ranks(4, work)[0] == {1, 2, 3}


def test_recv_of_another_shape_names_both():
    def work(group):
        if group.rank == 0:
            return group.send(md.zeros(2, 3), dst=1)
        with pytest.raises(ValueError, match=r"rank 1: recv from rank 0, tag 0: it sent float32 of "
                                             r"shape \(2, 3\), the tensor to fill is float64 of"):
            group.recv(md.zeros(6, dtype=np.float64), src=0)
    on_ranks(2, work)


def test_ranks_that_do_not_exist():
    group = md.ProcessGroup()
    with pytest.raises(ValueError, match="there is no rank 3, the group has ranks 0 to 0"):
        group.broadcast(np.zeros(1), src=3)
    with pytest.raises(ValueError, match="send to itself"):
        group.send(np.zeros(1), dst=0)


# ---- the functions of torch.distributed ------------------------------------------

def test_functions_act_on_the_default_group():
    def work(transport):
        def rank():
            dist.init_process_group(transport)
            assert dist.is_initialized() and dist.get_world_size() == 2
            x = md.ones(2) * (dist.get_rank() + 1)
            dist.all_reduce(x)
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            parts = [md.zeros(2), md.zeros(2)]
            dist.all_gather(parts, x)
            dist.broadcast(x, src=1)
            dist.barrier()
            dist.destroy_process_group()
            assert not dist.is_initialized()
            return [p.tolist() for p in parts]
        return contextvars.copy_context().run(rank)
    with cluster(2) as nodes:
        assert run(nodes, work) == [[[3, 3], [3, 3]]] * 2


def test_a_call_without_a_group_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"all_reduce: .* call .*init_process_group\(\) first"):
        dist.all_reduce(md.zeros(1))


def test_alone_the_same_calls_work(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def alone():
        dist.init_process_group()
        with pytest.raises(RuntimeError, match="twice"):
            dist.init_process_group()
        x, y = md.tensor([2.0]), md.zeros(1)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        dist.broadcast(x, src=0)
        dist.barrier()
        dist.all_gather([y], x)
        dist.reduce_scatter(x, [y])
        return dist.get_rank(), dist.get_world_size(), x.item(), y.item()
    assert contextvars.copy_context().run(alone) == (0, 1, 2.0, 2.0)


# ---- schedules -------------------------------------------------------------------

@given(size=st.integers(1, 70), count=st.integers(0, 100))
def test_shares_are_disjoint_and_complete(size, count):
    shares = [md.share_of(count, rank, size) for rank in range(size)]
    assert [i for start, stop in shares for i in range(start, stop)] == list(range(count))
    lengths = [stop - start for start, stop in shares]
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None)
@given(size=st.integers(1, 70), count=st.integers(0, 100), small=st.booleans(), data=st.data())
def test_every_message_of_a_schedule_is_expected(size, count, small, data):
    """What one rank sends to another, the other takes, in the same order and of the same size."""
    root = data.draw(st.integers(0, size - 1))
    for schedule in (lambda r: md.all_reduce_schedule(r, size, count, 0, small),
                     lambda r: md.broadcast_schedule(r, size, count, root, small),
                     lambda r: md.all_gather_schedule(r, size, count, 0, small)):
        sent, taken = {}, {}
        for rank in range(size):
            for to, send, source, take, _ in schedule(rank):
                if to is not None:
                    sent.setdefault((rank, to), []).append(send)
                if source is not None:
                    taken.setdefault((source, rank), []).append(take)
        assert sent == taken


def test_the_schedule_is_the_documented_one():
    """Who keeps which half is part of the protocol: other programs must do the same."""
    Exchange = md.Exchange
    assert list(md.all_reduce_schedule(1, 5, 7, root=0, small=False)) == [
        Exchange(0, (0, 3), 0, (3, 7), combine=True),       # distance 1: rank 0 keeps the lower
        Exchange(3, (5, 7), 3, (3, 5), combine=True),       # distance 2
        Exchange(3, (3, 5), 3, (5, 7)),                     # and the same way back
        Exchange(0, (3, 7), 0, (0, 3)),
    ]
    assert list(md.all_reduce_schedule(0, 5, 7, root=0, small=True)) == [
        Exchange(None, (0, 0), 4, (0, 7), combine=True),    # the surplus rank hands in
        Exchange(1, (0, 7), 1, (0, 7), combine=True),
        Exchange(2, (0, 7), 2, (0, 7), combine=True),
        Exchange(4, (0, 7), None, (0, 0)),
    ]
    assert list(md.broadcast_schedule(3, 6, 7, root=1, small=True)) == [
        Exchange(None, (0, 0), 1, (0, 7)),
        Exchange(4, (0, 7), None, (0, 0)),
    ]


def test_a_machine_of_256_ranks_needs_few_messages():
    steps = list(md.all_reduce_schedule(5, 256, 10_000, root=0, small=False))
    assert len(steps) == 2 * 8
    assert sum(send[1] - send[0] for _, send, *_ in steps) <= 2 * 10_000
