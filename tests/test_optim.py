"""Section 5 against PyTorch: update rules with all their options, schedules, clipping."""
import itertools
import math

import numpy as np
import pytest

import minidist as md
import minidist.nn as nn
from oracle import close, driven, make, normal, torch

RULES = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
            {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"lr": 0.1, "weight_decay": 0.1},
            {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "nesterov": True},
            {"lr": 0.01, "maximize": True, "weight_decay": 0.1}, {}],
    "Adam": [{}, {"lr": 0.1}, {"lr": 0.1, "betas": (0.5, 0.8), "eps": 1e-3},
             {"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "amsgrad": True},
             {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1, "maximize": True}],
    "AdamW": [{}, {"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.3}, {"lr": 0.1, "amsgrad": True},
              {"lr": 0.1, "betas": (0.5, 0.8), "maximize": True}],
    "Adagrad": [{}, {"lr": 0.1}, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
                {"lr": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3},
                {"lr": 0.1, "maximize": True}],
}
ROWS = [(name, options) for name, rows in RULES.items() for options in rows]


def problem(m, dtype="float64"):
    """A parameter of each kind: a matrix, a vector, a number, and one without a gradient."""
    return [m.nn.Parameter(make(m, a.astype(dtype), False))
            for a in (normal(3, 4), normal(4), normal(), normal(2))]


def loss_of(m, params, step):
    w, b, s, _ = params
    x = make(m, normal(8, 3, seed=step).astype("float64"), False).to(w.dtype)
    return (m.tanh(x @ w + b) * s - x.sum()).square().mean()


def train(m, optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(m, params, step)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name, options", ROWS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(ROWS)])
def test_rule(name, options):
    """The same weights after 60 steps, and after 20 more from a loaded state."""
    results = []
    for m in (md, torch):
        params = problem(m)
        optimizer = getattr(m.optim, name)(params, **options)
        train(m, optimizer, params, 60)
        again = getattr(m.optim, name)(params, lr=99.0)
        again.load_state_dict(optimizer.state_dict())
        train(m, again, params, 20, start=60)
        results.append(params)
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), 1e-6, 1e-9)


@pytest.mark.parametrize("name", RULES)
def test_float32_stays_float32(name):
    params = problem(md, "float32")
    optimizer = getattr(md.optim, name)(params, lr=np.float64(0.1))
    train(md, optimizer, params, 3)
    for p in params:
        assert p.dtype == md.float32 and p.is_leaf and p.requires_grad
    for state in optimizer.state.values():
        assert all(v.dtype == np.float32 for v in state.values() if isinstance(v, md.Tensor))


def test_every_optimizer_and_schedule_is_tested():
    public = {n for n, v in vars(md.optim).items() if isinstance(v, type)}
    assert public - {"Optimizer", "Rule"} - driven() <= set(RULES)
    schedules = {n for n, v in vars(md.optim.lr_scheduler).items() if isinstance(v, type)}
    assert schedules - {"LRScheduler"} - driven() <= {name for name, _ in SCHEDULES}


@pytest.mark.parametrize("name", RULES)
def test_parameter_groups(name):
    results = []
    for m in (md, torch):
        w, b, s, unused = params = problem(m)
        optimizer = getattr(m.optim, name)([{"params": [w], "lr": 0.05},
                                            {"params": [b, unused], "weight_decay": 0.2}], lr=0.1)
        optimizer.add_param_group({"params": s, "lr": 0.01})
        assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.1, 0.01]
        train(m, optimizer, params, 10)
        optimizer.param_groups[1]["lr"] = 0.5
        train(m, optimizer, params, 10, start=10)
        results.append(params)
    for ours, theirs in zip(*results):
        close(ours, theirs)


def test_state_survives_a_file(tmp_path):
    for name, options in (("Adam", {"amsgrad": True}), ("SGD", {"momentum": 0.9})):
        params = problem(md)
        optimizer = getattr(md.optim, name)([{"params": params[:1], "lr": 0.1},
                                             {"params": params[1:]}], **options)
        train(md, optimizer, params, 5)
        md.save({"optimizer": optimizer.state_dict(), "params": params}, tmp_path / "state")
        loss = train(md, optimizer, params, 5, start=5)
        state = md.load(tmp_path / "state")
        copies = [nn.Parameter(p) for p in state["params"]]
        other = getattr(md.optim, name)([{"params": copies[:1]}, {"params": copies[1:]}], lr=7.0)
        other.load_state_dict(state["optimizer"])
        assert train(md, other, copies, 5, start=5) == loss
        for p, q in zip(params, copies):
            assert md.equal(p, q)


def test_state_is_a_copy_when_loaded():
    params = problem(md)
    optimizer = md.optim.SGD(params, lr=0.1, momentum=0.9)
    train(md, optimizer, params, 2)
    other = md.optim.SGD(params, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    before = other.state[params[0]]["momentum_buffer"].clone()
    train(md, optimizer, params, 2)
    assert md.equal(other.state[params[0]]["momentum_buffer"], before)
    with pytest.raises(ValueError, match=r"\[4\].*\[1\]|\[1\].*\[4\]"):
        md.optim.SGD(params[:1]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", [*RULES, "RMSprop", "Adadelta"])
def test_large_and_strided_parameters(name):
    """Parameters of several pieces, parameters and gradients whose elements lie in another order,
    and a state that comes from PyTorch."""
    a, g = normal(600, 900), normal(600, 900, seed=1)
    theirs = [torch.nn.Parameter(torch.tensor(x)) for x in (a, a, a[:, :30].copy())]
    ours = [nn.Parameter(md.tensor(x)) for x in (a, a, a[:, :30].copy())]
    ours[1].data = md.from_numpy(np.asfortranarray(a))
    options = {"weight_decay": 0.1, **{"SGD": {"momentum": 0.9, "dampening": 0.5},
                                       "RMSprop": {"momentum": 0.9}}.get(name, {})}
    for m, params in ((md, ours), (torch, theirs)):
        optimizer = getattr(m.optim, name)(params, **options)
        for p in params:
            p.grad = make(m, g[:, : p.shape[1]], False)
        if m is md:
            params[0].grad = md.from_numpy(np.asfortranarray(g))
        optimizer.step()
        optimizer.step()
    state = {"param_groups": optimizer.state_dict()["param_groups"], "state": {
        i: {k: md.from_numpy(v.numpy()) for k, v in s.items()}
        for i, s in optimizer.state_dict()["state"].items()}}
    other = getattr(md.optim, name)(ours, **options)
    other.load_state_dict(state)
    optimizer.step()
    other.step()
    for p, q in zip(ours, theirs):
        np.testing.assert_allclose(p.detach().numpy(), q.detach().numpy(), 2e-5, 2e-6)
    ours[1].grad = md.ones(5)
    with pytest.raises(ValueError, match=r"differ in shape: \(600, 900\), \(5,\)"):
        other.step()


def sign_optimizer(m):
    class Lion(m.optim.Optimizer):  # as written for PyTorch
        def __init__(self, params, lr=1e-2, beta=0.9):
            super().__init__(params, dict(lr=lr, beta=beta))

        @m.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["mean"] = m.zeros_like(p)
                    state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                    p.add_(m.sign(state["mean"]), alpha=-group["lr"])

    return Lion


def test_optimizers_of_ones_own():
    results = []
    for m in (md, torch):
        params = problem(m)
        optimizer = sign_optimizer(m)(params, lr=0.03)
        train(m, optimizer, params, 5)
        again = sign_optimizer(m)(params, lr=7.0)
        again.load_state_dict(optimizer.state_dict())
        train(m, again, params, 5)
        results.append(params)
    for ours, theirs in zip(*results):
        close(ours, theirs)

    class Lion(md.optim.Rule):
        @staticmethod
        def rule(p, g, step, mean, lr=0.01, beta=0.9):
            mean *= beta
            mean += g * (1 - beta)
            p -= np.sign(mean) * lr

    params = problem(md)
    optimizer = Lion(params, 0.03)
    for _ in range(2):
        train(md, optimizer, params, 5)
    for ours, theirs in zip(params, results[1]):
        close(ours, theirs)


@pytest.mark.parametrize("max_iter", [1, 4])
def test_lbfgs_where_the_loss_is_a_line(max_iter):
    """The cubic through two points of a line has no minimum: PyTorch goes to the bound."""
    found = []
    for m in (md, torch):
        w = m.nn.Parameter(m.zeros(1))
        optimizer = m.optim.LBFGS([w], max_iter=max_iter, line_search_fn="strong_wolfe")

        def closure(optimizer=optimizer, w=w):
            optimizer.zero_grad()
            loss = (w * -0.5).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        found.append(w)
    close(*found)


def test_lbfgs_goes_on_from_a_file(tmp_path):
    w = nn.Parameter(md.tensor(normal(4).astype("float64")))
    target = md.tensor(normal(4, seed=1).astype("float64"))

    def step(optimizer, w):
        def closure():
            optimizer.zero_grad()
            loss = ((w - target) ** 4).sum() + (w * w.roll(1, 0)).sum().square()
            loss.backward()
            return loss
        return optimizer.step(closure).item()

    optimizer = md.optim.LBFGS([w], max_iter=3)
    step(optimizer, w)
    md.save({"w": w, "optimizer": optimizer.state_dict()}, tmp_path / "x")
    state = md.load(tmp_path / "x")
    copy = nn.Parameter(state["w"])
    other = md.optim.LBFGS([copy], max_iter=3)
    other.load_state_dict(state["optimizer"])
    for _ in range(3):
        assert step(optimizer, w) == step(other, copy)


def test_closure_and_named_parameters():
    net = nn.Linear(2, 1)
    optimizer = md.optim.SGD(net.named_parameters(), lr=0.1)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = net(md.ones(1, 2)).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    before = net.bias.item()
    assert optimizer.step(closure).item() == calls[0] and abs(net.bias.item() - before + 0.1) < 1e-6
    assert "lr=0.1" in repr(optimizer)


def test_a_step_after_forward_is_noticed():
    w = nn.Parameter(md.ones(2))
    optimizer = md.optim.SGD([w], lr=0.1)
    loss = (w * w).sum()
    w.grad = md.ones(2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="mul saved its input.*SGD.step"):
        loss.backward()


def test_how_torch_computes_is_without_meaning():
    w = nn.Parameter(md.ones(2))
    for option in ("foreach", "fused", "capturable", "differentiable"):
        assert option not in md.optim.AdamW([w], **{option: False}).defaults
    assert md.optim.Adam([w], foreach=True, fused=True).defaults["lr"] == 1e-3


def test_refusals():
    w = nn.Parameter(md.ones(2))
    for make_it, words in (
        (lambda: md.optim.SGD([]), "no parameters"), (lambda: md.optim.SGD([w], lr=-1), "lr"),
        (lambda: md.optim.Adam([w], betas=(1.0, 0.9)), "betas"),
        (lambda: md.optim.Adam([w], eps=-1), "eps"),
        (lambda: md.optim.SGD([w], nesterov=True), "Nesterov"),
        (lambda: md.optim.SGD([w], weight_decay=-1), "weight_decay"),
        (lambda: md.optim.SGD([{"params": [w], "lr": math.nan}]), "lr must lie in"),
        (lambda: md.optim.SGD([w * 2]), "leaf"), (lambda: md.optim.SGD([1.0]), "leaf"),
        (lambda: md.optim.SGD([{"params": [w]}, {"params": [w]}]), "more than one group"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            make_it()


# -- schedules -------------------------------------------------------------------------------------

SCHEDULES = [("StepLR", {"step_size": 7, "gamma": 0.5}), ("StepLR", {"step_size": 30}),
             ("ConstantLR", {"total_iters": 9}), ("PolynomialLR", {"total_iters": 50, "power": 2}),
             ("CosineAnnealingLR", {"T_max": 50}), ("CosineAnnealingLR", {"T_max": 20,
                                                                          "eta_min": 0.01})]


@pytest.mark.parametrize("i", range(len(SCHEDULES)))
def test_schedule(i):
    name, options = SCHEDULES[i]
    rates = []
    for m in (md, torch):
        w = m.nn.Parameter(m.ones(2))
        optimizer = m.optim.SGD([{"params": [w]}, {"params": m.nn.Parameter(m.ones(1)), "lr": 1.0}],
                                lr=0.1)
        schedule = getattr(m.optim.lr_scheduler, name)(optimizer, **options)
        rates.append([])
        for step in range(200):
            rates[-1].append([g["lr"] for g in optimizer.param_groups])
            assert schedule.get_last_lr() == rates[-1][-1]
            optimizer.step()
            schedule.step()
            if m is md and step == 77:  # stopped and taken up again
                state = schedule.state_dict()
                schedule = getattr(m.optim.lr_scheduler, name)(optimizer, **options)
                schedule.load_state_dict(state)
    np.testing.assert_allclose(*rates, rtol=1e-9, atol=1e-12)


def test_schedules_that_act_together():
    """Two at once multiply, a change by hand stays, and both survive a restart."""
    paths = []
    for m in (md, torch):
        def start(m=m):
            optimizer = m.optim.SGD([m.nn.Parameter(m.ones(2))], lr=0.5)
            s = m.optim.lr_scheduler
            return optimizer, [s.ExponentialLR(optimizer, 0.9), s.LinearLR(optimizer, 0.1),
                               s.MultiStepLR(optimizer, [4, 30])]

        optimizer, schedules = start()
        paths.append([])
        for step in range(40):
            if step == 20:
                optimizer.param_groups[0]["lr"] *= 3
            if step == 25:
                states = optimizer.state_dict(), [s.state_dict() for s in schedules]
                optimizer, schedules = start()
                optimizer.load_state_dict(states[0])
                for schedule, state in zip(schedules, states[1]):
                    schedule.load_state_dict(state)
            optimizer.step()
            for schedule in schedules:
                schedule.step()
            paths[-1].append(optimizer.param_groups[0]["lr"])
    np.testing.assert_allclose(*paths, rtol=1e-9)


# -- gradients as a whole --------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type, max_norm", list(
    itertools.product((1.0, 2.0, 3.0, math.inf), (0.1, 1.0, 1e3))))
def test_clip_grad_norm(norm_type, max_norm):
    results = []
    for m in (md, torch):
        params = problem(m)
        loss_of(m, params, 0).backward()
        total = m.nn.utils.clip_grad_norm_(params, max_norm, norm_type=norm_type)
        results.append([total.item(), *(p.grad for p in params[:3])])
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)


def test_clip_grad_value_and_vectors():
    results = []
    for m in (md, torch):
        params = problem(m)
        loss_of(m, params, 0).backward()
        m.nn.utils.clip_grad_value_(params, 0.05)
        vector = m.nn.utils.parameters_to_vector(params)
        m.nn.utils.vector_to_parameters(vector.detach() * 2, params)
        results.append([*(p.grad for p in params[:3]), vector, *params])
    for ours, theirs in zip(*results):
        close(ours, theirs)
    assert md.nn.utils.clip_grad_norm_(nn.Parameter(md.ones(1)), 1.0).item() == 0


@pytest.mark.parametrize("dtype, size", [("float32", 1e25), ("float32", 1e-25), ("float32", 0.0),
                                         ("float16", 1e4), ("float64", 1e100)])
def test_clip_grad_norm_at_the_ends(dtype, size):
    p = nn.Parameter(md.ones(300, dtype=getattr(md, dtype)))
    p.grad = md.full((300,), size, dtype=p.dtype)
    total = nn.utils.clip_grad_norm_(p, 1.0).item()
    expected = float(np.sqrt(300)) * float(np.array(size, dtype))
    assert math.isclose(total, expected, rel_tol=1e-5)
