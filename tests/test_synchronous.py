"""Synchronous: N ranks equal one process on the same batches; faults name rank and tensor."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from memory import on_ranks, outcomes
from minidist import nn

mse = nn.functional.mse_loss
ROOT = Path(__file__).resolve().parent.parent


class Net(nn.Module):
    """With a tied, an unused and a frozen parameter, and one that only some samples use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.unused = nn.Linear(3, 1)
        self.frozen = nn.Linear(3, 3)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False
        self.sometimes = nn.Linear(3, 2)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        h = self.frozen(self.tied(self.first(x).tanh()).tanh())
        y = self.last(h)
        chosen = x.numpy()[:, :1] > 0.8
        if chosen.any():                # a branch that depends on the data of this rank
            y = y + self.sometimes(h) * md.tensor(chosen.astype(np.float64))
        return y


def net(seed=0):
    md.manual_seed(seed)
    return Net().to(np.float64)


def samples(count=11):
    rng = np.random.default_rng(5)
    return md.tensor(rng.standard_normal((count, 3))), md.tensor(rng.standard_normal((count, 2)))


def loader_of(batch_size=4, count=11, **options):
    return md.utils.data.DataLoader(md.utils.data.TensorDataset(*samples(count)),
                                    batch_size=batch_size, **options)


OPTIMIZERS = {
    "sgd": lambda p: md.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: md.optim.Adam(p, lr=0.01, weight_decay=0.1),
}


def weights(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12, err_msg=name)


def one_process(optimizer, batch_size, epochs=3, clip=None):
    model = net()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(epochs):
        for x, y in loader_of(batch_size):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return weights(model)


def synchronous(group, optimizer, batch_size, epochs=3, clip=None):
    model = net(seed=group.rank)        # they start differently; rank 0's start counts
    train = md.Synchronous(model, OPTIMIZERS[optimizer](model.parameters()), group)
    for _ in range(epochs):
        for x, y in train.batches(loader_of(batch_size)):
            train.zero_grad()
            mse(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            train.step()
    train.finish()
    assert model.unused.weight.grad is None and model.frozen.weight.grad is None
    return weights(model)


# ---- the promise -----------------------------------------------------------------

@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch_size", [4, 5])      # last batches of 3 and of 1: some get none
def test_ranks_equal_one_process(size, optimizer, batch_size):
    ranks = on_ranks(size, lambda group: synchronous(group, optimizer, batch_size))
    assert_close(ranks[0], one_process(optimizer, batch_size))
    for found in ranks[1:]:
        for name in found:                          # and among each other to the bit
            assert found[name].tobytes() == ranks[0][name].tobytes()


def test_clipping_sees_the_global_gradient():
    ranks = on_ranks(3, lambda group: synchronous(group, "sgd", 4, clip=0.1))
    assert_close(ranks[2], one_process("sgd", 4, clip=0.1))


def test_the_same_bits_however_the_sum_is_cut(monkeypatch):
    usual = on_ranks(3, lambda group: synchronous(group, "sgd", 5))
    monkeypatch.setattr(md, "SMALL", 0)             # halving instead of doubling
    other = on_ranks(3, lambda group: synchronous(group, "sgd", 5))
    for name in usual[0]:
        assert usual[0][name].tobytes() == other[0][name].tobytes()


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 5), shares=st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_D13_gradients_are_weighted_by_samples(size, shares):
    """A 1-rank and an N-rank step on the same samples are the same step, and so is the loss."""
    x, y = samples(sum(shares))
    data = md.utils.data.TensorDataset(x, y)
    bounds = np.cumsum([0, *shares])
    batches = [list(range(a, b)) for a, b in zip(bounds, bounds[1:])]

    def work(group):
        model = nn.Linear(3, 2).to(np.float64)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        before, losses, gradients = weights(model), [], []
        loader = md.utils.data.DataLoader(data, batch_sampler=batches)
        for x, y in train.batches(loader):
            train.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            losses.append(train.mean(loss))
            gradients.append(model.weight.grad.numpy().copy())
        return before, losses, gradients
    before, losses, gradients = on_ranks(size, work)[-1]
    model = nn.Linear(3, 2).to(np.float64)
    model.load_state_dict({name: md.tensor(value) for name, value in before.items()})
    for batch, loss, gradient in zip(batches, losses, gradients):
        model.weight.grad = None
        expected = mse(model(x[batch]), y[batch])
        expected.backward()
        assert abs(loss - expected.item()) < 1e-12
        np.testing.assert_allclose(gradient, model.weight.grad.numpy(), rtol=0, atol=1e-12)


def test_the_nan_of_a_rank_without_samples_is_not_a_gradient():
    """The mean loss of nothing is NaN, and so is its derivative by a factor of the loss."""
    def work(group):
        model = nn.Linear(3, 2).to(np.float64)
        factor = model.factor = nn.Parameter(md.tensor(2.0, dtype=np.float64))
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        for x, y in train.batches(loader_of(batch_size=1, count=1)):
            loss = mse(model(x), y) * factor
            assert np.isnan(loss.item()) == (group.rank == 1)
            loss.backward()
            mean = train.mean(loss)
        return factor.grad.item(), mean
    results = on_ranks(2, work)
    assert results[0] == results[1] and np.isfinite(results[0]).all()


def test_counts_that_a_16_bit_gradient_could_not_hold():
    def work(group):
        model = nn.Linear(1, 1, bias=False).to(np.float16)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        data = md.utils.data.TensorDataset(md.tensor(np.zeros((8198, 1), np.float16)))
        for (x,) in train.batches(md.utils.data.DataLoader(data, batch_size=8198)):
            (model(x).sum() * 0 + model.weight.sum()).backward()
            train.step()
        return model.weight.grad.item()
    assert all(abs(gradient - 1) < 2**-9 for gradient in on_ranks(4, work))


# ---- D15, D16: parameters that are missing, frozen, tied -------------------------

def test_D15_a_gradient_that_one_rank_lacks_counts_as_zero():
    def work(group):
        model = nn.Linear(2, 1, bias=True).to(np.float64)
        md.Synchronous(model, md.optim.SGD(model.parameters(), lr=1.0), group)
        loss = model.weight.sum() if group.rank else (model.bias * 3).sum()
        loss.backward()
        return model.weight.grad.numpy().tolist(), model.bias.grad.numpy().tolist()
    assert on_ranks(3, work) == [([[2 / 3, 2 / 3]], [1.0])] * 3


def test_D15_a_rank_whose_loss_needs_no_parameter_takes_part_in_step():
    def work(group):
        model = nn.Linear(2, 1, bias=False).to(np.float64)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=1.0), group)
        before = weights(model)["weight"]
        if group.rank == 0:
            model.weight.sum().backward()
        train.step()
        return before - weights(model)["weight"]
    for moved in on_ranks(2, work):
        np.testing.assert_allclose(moved, [[0.5, 0.5]])


def test_D15_freezing_and_unfreezing_in_the_middle():
    def work(group):
        model = net()
        train = md.Synchronous(model, OPTIMIZERS["sgd"](model.parameters()), group)
        history = []
        for step in range(6):
            model.first.bias.requires_grad = step not in (2, 3)
            model.frozen.bias.requires_grad = step >= 4
            for x, y in train.batches(loader_of(11)):
                train.zero_grad()
                mse(model(x), y).backward()
                train.step()
            history.append(weights(model))
        return history
    for one, two in zip(on_ranks(1, work)[0], on_ranks(2, work)[1]):
        assert_close(two, one)


def test_D16_a_tied_parameter_is_sent_once():
    class Tied(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a, self.b = nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False)
            if tied:
                self.b.weight = self.a.weight

    def sent(tied):
        def work(group):
            model = Tied(tied)
            train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=1.0), group)
            before = group.transport.stats["bytes_sent"]
            (model.a.weight.sum() + 2 * model.b.weight.sum()).backward()
            assert model.a.weight.grad.numpy().max() == (3 if tied else 1)
            train.step()
            return group.transport.stats["bytes_sent"] - before
        return on_ranks(2, work)[0]
    assert sent(True) < 0.6 * sent(False)


# ---- D3: another model on one rank -----------------------------------------------

@pytest.mark.parametrize("other, found", [
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), r"#2: rank 0 has 1.weight \(2, 2\) "
     r"float32, rank 1 has 1.weight \(3, 2\) float32"),
    (lambda: nn.Sequential(nn.Linear(2, 2)),
     "#2: rank 0 has 1.weight .*, rank 1 has nothing more"),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)),
     r"#4: rank 0 has nothing more, rank 1 has 2.weight"),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(np.float64),
     r"#0: rank 0 has 0.weight \(2, 2\) float32, rank 1 has 0.weight \(2, 2\) float64"),
    (lambda: nn.ModuleDict({"x": nn.Linear(2, 2), "1": nn.Linear(2, 2)}),
     r"#0: rank 0 has 0.weight .*, rank 1 has x.weight"),
], ids=["shape", "fewer", "more", "dtype", "name"])
def test_D3_the_first_difference_is_named_on_every_rank(other, found):
    def work(group):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if group.rank != 1 else other()
        md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
    for error in outcomes(3, work):
        with pytest.raises(RuntimeError, match=found):
            raise error


@pytest.mark.parametrize("change, found", [
    (lambda o: o.param_groups[0].update(lr=0.01), "lr=0.1.*lr=0.01"),
    (lambda o: (o.param_groups[0]["params"][0].sum().backward(), o.step(), o.zero_grad()),
     r"nothing more.*parameter 0: momentum_buffer=float32"),
], ids=["option", "state"])
def test_D18_a_checkpoint_that_one_rank_alone_has_loaded(change, found):
    def work(group):
        md.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = md.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if group.rank == 1:
            change(optimizer)
        md.Synchronous(model, optimizer, group)
        before = model.weight.tolist()
        with pytest.raises(RuntimeError, match=f"the optimizer differs between ranks.*{found}"):
            model(md.ones(2, 2)).sum().backward()
        assert model.weight.tolist() == before
    on_ranks(2, work)


def test_D3_frozen_on_one_rank_only():
    def work(group):
        model = nn.Linear(2, 2)
        model.bias.requires_grad = group.rank == 0
        md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
    for error in outcomes(2, work):
        assert r"rank 0 has bias (2,) float32, rank 1 has bias (2,) float32 frozen" in str(error)


# ---- D8: a gradient that is not finite -------------------------------------------

@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_D8_all_ranks_raise_and_name_the_culprit(bad):
    def work(group):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(np.float64)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        x, y = samples()
        mse(model(x), y).backward()
        train.step()
        before = weights(model)
        scale = bad if group.rank == 2 else 1.0
        train.zero_grad()
        with pytest.raises(FloatingPointError,
                           match="step 1: non-finite gradient from rank 2 in 1.bias"):
            (model[1].bias.abs() * scale).sum().backward()
        assert_close(weights(model), before)
        train.zero_grad()                           # and training may go on
        mse(model(x), y).backward()
        train.step()
        return weights(model)
    ranks = on_ranks(3, work)
    assert_close(ranks[1], ranks[0])


# ---- D11: buffers ----------------------------------------------------------------

class Running(nn.Module):
    """A running sum and a counter, like batch norm's but easy to predict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", md.zeros(2, dtype=np.float64))
        self.register_buffer("steps", md.zeros((), dtype=np.int64))
        self.w = nn.Parameter(md.ones(2, dtype=np.float64))

    def forward(self, x):
        # A new tensor each time: looked up by name. It is NaN where there is no sample.
        self.seen = self.seen + x.mean(0) * len(x)
        self.steps += 1
        return x * self.w


def test_D11_buffers_are_equal_after_an_epoch():
    x = md.arange(10).to(np.float64).reshape(5, 2)
    data = md.utils.data.TensorDataset(x)

    def work(group):
        model = Running()
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        for (x,) in train.batches(md.utils.data.DataLoader(data, batch_size=3)):
            train.zero_grad()
            model(x).sum().backward()
            train.step()
        return model.seen.tolist(), model.steps.item()
    # Batches of 3 and 2 samples: rank 0 sees samples 0, 1 and 3; rank 1 sees 2 and 4.
    first, second = x.numpy()[[0, 1, 3]].sum(0), x.numpy()[[2, 4]].sum(0)
    for seen, steps in on_ranks(2, work):
        np.testing.assert_allclose(seen, first * 3 / 5 + second * 2 / 5, rtol=1e-15)
        assert steps == 2


def test_D11_batch_norm_evaluates_equally_on_all_ranks():
    def work(group):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        x, y = samples(12)
        data = md.utils.data.TensorDataset(x.float(), y.float())
        for x, y in train.batches(md.utils.data.DataLoader(data, batch_size=6)):
            train.zero_grad()
            mse(model(x), y).backward()
            train.step()
        model.eval()
        return model(md.ones(1, 3)).detach().numpy().tobytes()
    assert len(set(on_ranks(2, work))) == 1


# ---- D2, D29, D30: data ----------------------------------------------------------

def test_D2_all_ranks_take_as_many_steps():
    def work(group):
        model = nn.Linear(3, 2).to(np.float64)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        rows = []
        for x, y in train.batches(loader_of(batch_size=4, count=10)):
            mse(model(x), y).backward()
            train.step()
            rows.append(len(x))
        return rows
    assert on_ranks(3, work) == [[2, 2, 1], [1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("odd", [{"count": 9}, {"batch_size": 3}])
def test_D2_a_loader_of_another_length_is_found_before_the_first_step(odd):
    def work(group):
        model = nn.Linear(3, 2)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        next(train.batches(loader_of(**(odd if group.rank == 2 else {}))))
    for error in outcomes(3, work):
        assert "the loader differs between ranks, first at #0: rank 0 has 11 samples" in str(error)
        assert "rank 2 has " in str(error)


def test_D2_an_extra_step_on_one_rank_is_an_error_not_a_wrong_sum():
    def work(group):
        model = nn.Linear(2, 1, bias=False)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        model.weight.sum().backward()
        if group.rank == 0:
            model.weight.sum().backward()           # once more, where rank 1 goes on to step 1
        train.step()
        model.weight.sum().backward()
    for error in outcomes(2, work):
        assert isinstance(error, RuntimeError) and "not at the same step" in str(error)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 5), count=st.integers(1, 12), batch_size=st.integers(1, 6),
       shuffle=st.booleans())
def test_D29_shares_of_every_epoch_are_the_data_set(size, count, batch_size, shuffle):
    data = md.utils.data.TensorDataset(md.arange(count))

    def work(group):
        model = nn.Linear(1, 1)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        md.manual_seed(3)
        loader = md.utils.data.DataLoader(data, batch_size, shuffle)
        return [[int(i) for (x,) in train.batches(loader) for i in x.numpy()] for _ in range(2)]
    ranks = on_ranks(size, work)
    for epoch in range(2):
        drawn = [i for rank in ranks for i in rank[epoch]]
        assert sorted(drawn) == list(range(count))


def test_D29_a_rank_that_is_one_epoch_off_is_found():
    def work(group):
        model = nn.Linear(3, 2)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        md.manual_seed(1)
        loader = loader_of(shuffle=True)
        for _ in range(group.rank):
            list(loader)                            # rank 1 has been through it once
        next(train.batches(loader))
    for error in outcomes(2, work):
        assert "a first batch of [" in str(error) and "seed and epoch" in str(error)


@pytest.mark.parametrize("count, size", [(10, 4), (1, 4), (7, 2)])
def test_D30_an_evaluation_counts_every_sample_once(count, size):
    x, _ = samples(count)
    data = md.utils.data.TensorDataset(x)

    def work(group):
        model = nn.Linear(1, 1)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        positive = seen = 0
        for (x,) in train.batches(md.utils.data.DataLoader(data, batch_size=4)):
            positive += int((x.numpy()[:, 0] > 0).sum())
            seen += len(x)
        return train.total(positive, seen)
    assert on_ranks(size, work) == [[int((x.numpy()[:, 0] > 0).sum()), count]] * size


def test_totals_of_integers_are_exact():
    def work(group):
        train = md.Synchronous(nn.Linear(1, 1), md.optim.SGD([md.zeros(1)], lr=0.1), group)
        return train.total(2**60 + group.rank)
    assert on_ranks(3, work) == [3 * 2**60 + 3] * 3


# ---- accumulation ----------------------------------------------------------------

@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [12, 10])         # the last of three batches of 4 may be short
def test_accumulation_without_sync(size, count):
    def work(group):
        model = net()
        train = md.Synchronous(model, OPTIMIZERS["adam"](model.parameters()), group)
        for _ in range(2):
            train.zero_grad()
            messages = group.transport.stats["messages_sent"]
            for i, (x, y) in enumerate(train.batches(loader_of(4, count))):
                if i < 2:
                    with train.no_sync():
                        (mse(model(x), y) / 3).backward()
                else:
                    messages = group.transport.stats["messages_sent"] - messages
                    (mse(model(x), y) / 3).backward()
                    train.step()
        return weights(model)
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        for x, y in loader_of(4, count):
            (mse(model(x), y) / 3).backward()
        optimizer.step()
    for found in on_ranks(size, work):
        assert_close(found, weights(model))


def test_no_sync_sends_nothing():
    def work(group):
        model = nn.Linear(2, 1)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        before = group.transport.stats["messages_sent"]
        with train.no_sync():
            model(md.ones(1, 2)).sum().backward()
        assert group.transport.stats["messages_sent"] == before
        model(md.ones(1, 2)).sum().backward()
        assert group.transport.stats["messages_sent"] > before
        return model.bias.grad.item()
    assert on_ranks(2, work) == [2.0, 2.0]


def test_two_backward_passes_of_one_step_add_up():
    def work(group):
        model = nn.Linear(1, 1, bias=False)
        train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1), group)
        train.zero_grad()
        (model.weight * (1.0 + group.rank)).sum().backward()    # mean 1.5
        (model.weight * (3.0 + group.rank)).sum().backward()    # mean 3.5
        return model.weight.grad.item()
    assert on_ranks(2, work) == [5.0, 5.0]


def test_distributed_data_parallel_is_pytorchs_face_of_it():
    x, y = samples(12)

    def work(group):
        model = nn.parallel.DistributedDataParallel(net(seed=group.rank), process_group=group)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        mine = slice(4 * group.rank, 4 * group.rank + 4)
        for _ in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                (mse(model(x[mine]), y[mine]) / 2).backward()
            (mse(model(x[mine]), y[mine]) / 2).backward()
            optimizer.step()
        return weights(model.module), list(model.state_dict())
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    for found, names in on_ranks(3, work):
        assert_close(found, weights(model))
        assert names == [f"module.{name}" for name in model.state_dict()]


def test_alone_no_group_is_needed():
    model = nn.Linear(2, 1)
    train = md.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1))
    for x, y in train.batches(md.utils.data.DataLoader(
            md.utils.data.TensorDataset(md.ones(3, 2), md.zeros(3, 1)), batch_size=2)):
        train.zero_grad()
        mse(model(x), y).backward()
        train.step()
    train.finish()
    assert train.steps == 2 and train.total(5) == 5


# ---- over real transports ---------------------------------------------------------

PROGRAM = """
import hashlib, sys
import numpy as np
import minidist as md
from minidist import distributed as dist, nn

dist.init_process_group()
md.manual_seed(dist.get_rank())
rng = np.random.default_rng(1)
x, y = (md.tensor(rng.standard_normal((23, n)).astype(np.float32)) for n in (30, 5))
md.manual_seed(1)
data = md.utils.data.TensorDataset(x, y)
loader = md.utils.data.DataLoader(data, batch_size=10, shuffle=True)
# Of 26,000 parameters: above the size from which all_reduce halves.
model = nn.Sequential(nn.Linear(30, 700), nn.Tanh(), nn.Linear(700, 5))
optimizer = md.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
train = getattr(dist, sys.argv[1])(model, optimizer)
for _ in range(3):
    for a, b in train.batches(loader):
        train.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        train.step()
train.finish()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
"""


def launched(tmp_path, strategy, transport, *flags):
    """The fingerprint of the weights that each of three workers ends with."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(ROOT / "minidist.py"), "launch", "--nproc-per-node", "3",
               "--transport", transport, *flags, str(script), strategy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return [line.split()[-1] for line in done.stdout.splitlines() if "weights" in line]


def test_the_same_bits_over_every_transport(tmp_path):
    runs = [launched(tmp_path, "Synchronous", name) for name in ("pipe", "shm", "tcp", "udp")]
    assert [len(run) for run in runs] == [3, 3, 3, 3]
    assert len({digest for run in runs for digest in run}) == 1


@pytest.mark.parametrize("transport", ["pipe", "tcp", "udp"])
def test_downpour_with_server_processes(tmp_path, transport):
    digests = launched(tmp_path, "Downpour", transport, "--servers", "2")
    assert len(digests) == 3 and len(set(digests)) == 1
