"""tutorials/strategies: each says what it prints; each is found by its name and resumes exactly;
compressors against their published formulas, strategies and split models against independent
loops of theirs."""
import functools
import re
import threading
import zlib

import numpy as np
import pytest

import minidist as md
from memory import cluster, on_ranks, outcomes, run
from test_downpour import Machines, gradient
from test_strategies import RANKS, SIZE, STEPS, Vector, assert_equal, parameters, sgd, trained
from test_tutorials import ROOT, assert_printed
from test_tutorials import run as run_script

dist = md.distributed
FOLDER = ROOT / "tutorials" / "strategies"
LESSONS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
COMPRESSORS = ["qsgd", "terngrad", "onebit", "ef_signsgd", "signsgd", "topk", "dgc", "powersgd"]
GATHERED = COMPRESSORS[:-1]                 # all but one sum what ranks have decoded


def compressor(name, *args, **options):
    return md.plugin(name, dist.Compressor)(*args, **options)


def sent(c, x, name="w"):
    """The tensor as it arrives."""
    return c.unpack(c.pack({name: x}), x.size, x.dtype)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_lesson_prints_what_it_says(lesson, tmp_path):
    source = lesson.read_text(encoding="utf-8")
    lines = [line[3:] for line in re.findall(r"^ *(#> .*)$", source, re.M)]
    assert len(lines) >= 3
    assert_printed(run_script(str(lesson), cwd=tmp_path), lines)
    assert max(map(len, source.splitlines())) <= 100


def test_lessons_use_the_public_api_alone():
    for lesson in LESSONS:
        source = lesson.read_text(encoding="utf-8")
        assert not re.search(r"\b(md|dist|nn|train|model|group)(\.\w+)*\._[a-z]", source), lesson
        assert "minidist_transports" not in source, lesson


def test_the_table_has_every_lesson():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    for lesson in LESSONS:
        assert f"[{lesson.name}]({lesson.name})" in table


# ---- compressors -----------------------------------------------------------------

def vector(n=300, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def test_qsgd_is_its_formula():
    """Alistarh et al. 2017, section 3: |v| sgn(v_i) xi_i, where xi_i is l/s or (l+1)/s."""
    for dtype in (np.float32, np.float64):
        v = vector(dtype=dtype)
        for s in (1, 4, 7, 127):
            found = sent(compressor("qsgd", s), v).astype(float)
            for start in range(0, 300, 128):
                part, got = v[start : start + 128], found[start : start + 128]
                norm = np.sqrt(sum(float(x) ** 2 for x in part))
                level = np.abs(got) * s / norm
                np.testing.assert_allclose(level, level.round(), atol=1e-4)
                low = np.floor(np.abs(part.astype(float)) * s / norm)
                assert set((level.round() - low).astype(int)) <= {0, 1}
                assert (got * part >= 0).all()


def test_terngrad_is_its_formula():
    """Wen et al. 2017, equations 1 to 3 and 13: s sign(v) b, where v is clipped at 2.5 sigma."""
    v = vector(2000)
    bound = 2.5 * np.sqrt(((v - v.mean()) ** 2).mean())
    found = sent(compressor("terngrad"), v)
    scale = np.abs(np.clip(v, -bound, bound)).max()
    assert set(np.abs(found)) == {0.0, scale}
    assert (np.sign(found) * np.sign(v) >= 0).all()


@pytest.mark.parametrize("name", ["qsgd", "terngrad"])
def test_what_is_unbiased_is(name):
    """The mean of many encodings lies within 5 standard errors of the number, for each of 200."""
    v = np.clip(vector(200), -2, 2)         # nothing for TernGrad to clip
    c, times = compressor(name), 2000
    many = np.array([sent(c, v) for _ in range(times)])
    error = np.abs(many.mean(axis=0) - v)
    assert (error <= 5 * many.std(axis=0) / times ** 0.5 + 1e-9).all()
    assert many.std(axis=0).max() > 0.1     # it is random


@pytest.mark.parametrize("name", ["qsgd", "terngrad"])
def test_ranks_draw_different_numbers(name):
    a, b = vector(seed=1), vector(seed=1)
    assert (sent(compressor(name), a) == sent(compressor(name), b)).all()  # one seed, one run
    b[0] += 1e-12
    assert (sent(compressor(name), a) != sent(compressor(name), b)).any()


def onebit(p):
    low, high = p[p < 0], p[p >= 0]
    return np.where(p < 0, sum(low) / max(len(low), 1), sum(high) / max(len(high), 1))


def signs(p):
    return sum(abs(p)) / len(p) * np.where(p < 0, -1, 1)


def largest(p):
    out = np.zeros_like(p)
    for i in sorted(range(len(p)), key=lambda i: -abs(p[i]))[:round(0.1 * len(p))]:
        out[i] = p[i]
    return out


FEEDBACK = {"onebit": ({}, onebit), "ef_signsgd": ({}, signs), "topk": ({"ratio": 0.1}, largest)}


@pytest.mark.parametrize("name", FEEDBACK)
def test_error_feedback_is_its_formula(name):
    """p = g + r; what arrives is C(p); r = p - C(p)."""
    options, formula = FEEDBACK[name]
    c, plain = compressor(name, **options), compressor(name, feedback=False, **options)
    residual = np.zeros(60)
    for step in range(50):
        g = vector(60, step)
        g[:5] *= step > 0                   # zero is not negative
        expected = formula(g + residual)
        residual = g + residual - expected
        np.testing.assert_allclose(sent(c, g), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(sent(plain, g), formula(g), rtol=0, atol=1e-12)
    np.testing.assert_allclose(c.memory["w"], residual, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FEEDBACK)
def test_error_feedback_converges_where_the_plain_form_does_not(name):
    """Two ranks disagree about parameter 0 by 10, and agree about the others by a little."""
    places = np.array([[11.0, 2, 4], [-9.0, 2, 2]])
    ends = {}
    for feedback in (False, True):
        options = {"ratio": 0.34} if name == "topk" else {}
        ranks = [compressor(name, feedback=feedback, **options) for _ in places]
        w = np.array([0.3, 0.2, -0.1])
        for step in range(2000):
            w -= 0.01 / (1 + step / 500) * sum(sent(c, w - p) for c, p in zip(ranks, places))
        ends[feedback] = np.abs(w - [1, 2, 3]).max()
    assert ends[True] < 0.05 and ends[False] > 0.2


def test_signsgd_is_the_majority():
    """Bernstein et al. 2018, algorithm 1: sign(sum_i sign(g_i))."""
    def rank(group):
        named = {"w": md.tensor(vector(9, group.rank)), "b": md.tensor(
            np.zeros(2) if group.rank == 1 else vector(2, 7 + group.rank))}
        flat = md.FlatVector(named).adopt()
        compressor("signsgd").sum(group, flat)
        return flat.data
    w = np.sign(sum(np.sign(vector(9, i)) for i in range(3)))
    b = np.sign(np.sign(vector(2, 7)) + np.sign(vector(2, 9)))     # rank 1 abstains
    for found in on_ranks(3, rank):
        np.testing.assert_array_equal(found, [*w, *b])


def dgc_steps(gradients, ratio, momentum=0.9):
    """Lin et al. 2018, algorithms 1 and 2, for tensors that are their own sample; the loop of ten
    as in dgc.py of GRACE."""
    u, v = np.zeros((2, len(gradients[0])))
    for g in gradients:
        u = momentum * u + g
        v = v + u
        n = len(v)
        threshold = sorted(abs(v))[-max(int(n * ratio), 1)]
        for _ in range(10):
            count = sum(abs(v) >= threshold)
            if count > max(1.3 * n * ratio, 1):
                threshold *= 1.3
            elif count < 0.7 * n * ratio:
                threshold *= 0.7
        mask = abs(v) >= threshold
        yield np.where(mask, v, 0)
        u, v = np.where(mask, 0, u), np.where(mask, 0, v)


@pytest.mark.parametrize("steps, ratio, options", [
    (50, 0.001, {"warmup": 0}), (50, 0.25, {"warmup": 100}), (50, 0.25, {"warmup": 50})])
def test_dgc_is_its_algorithm(steps, ratio, options):
    gradients = [vector(200, i) for i in range(steps)]
    c = compressor("dgc", **options)
    for g, expected in zip(gradients, dgc_steps(gradients, ratio)):
        np.testing.assert_allclose(sent(c, g), expected, rtol=0, atol=1e-12)


def test_dgc_warms_up_samples_and_clips():
    c = compressor("dgc", warmup=1)
    for ratio in (0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001):
        count = np.count_nonzero(sent(c, vector(50_000, dtype=np.float32)))
        assert 0.6 * ratio < count / 50_000 < 1.4 * ratio
    clipped = compressor("dgc", clip=1.0, warmup=10)
    g = {"a": vector(8), "b": vector(8, 1)}
    clipped.pack(g)
    norm = np.sqrt(sum((x * x).sum() for x in g.values()))
    for name, x in g.items():               # what was not sent is still there
        u = clipped.memory[name][0]
        np.testing.assert_allclose(u[u != 0], (x / norm)[u != 0], rtol=0, atol=1e-12)
    assert not sent(compressor("dgc"), np.zeros(5)).any()


def test_powersgd_is_its_algorithm():
    """Vogels et al. 2019, algorithms 1 and 2, over 50 steps on 3 ranks: the matrices' parts of a
    mean, here summed; feedback on each rank, of what its own part misses."""
    shape, r = (12, 9), 2

    def low_rank(step, rank):
        left, right = vector(24, rank).reshape(12, 2), vector(18, 9).reshape(2, 9)
        return left @ right + 0.1 * vector(108, 100 * step + rank).reshape(shape)

    def rank(group):
        c = compressor("powersgd", r)
        flat = md.FlatVector({"w": md.zeros(*shape, dtype=md.float64),
                              "b": md.zeros(3, dtype=md.float64)})
        found = []
        for step in range(STEPS):
            flat.views[0][...] = low_rank(step, group.rank)
            flat.views[1][...] = group.rank
            c.sum(group, flat)
            found.append(flat.data.copy())
        return found, c.memory["w"], c.before, c.after
    results = on_ranks(RANKS, rank)

    q = np.random.default_rng(zlib.crc32(b"w")).standard_normal((9, r))
    e = [np.zeros(shape) for _ in range(RANKS)]
    for step in range(STEPS):
        delta = [low_rank(step, i) + e[i] for i in range(RANKS)]
        p = sum(d @ q for d in delta)
        for j in range(r):                  # Gram-Schmidt
            for k in range(j):
                p[:, j] -= (p[:, k] @ p[:, j]) * p[:, k]
            p[:, j] /= np.sqrt(p[:, j] @ p[:, j])
        parts = [d.T @ p for d in delta]
        e = [d - p @ part.T for d, part in zip(delta, parts)]
        q = sum(parts)
        for found, *_ in results:
            np.testing.assert_allclose(found[step][:108], (p @ q.T).ravel(), rtol=0, atol=1e-12)
            np.testing.assert_array_equal(found[step][108:], 3)
    for i, (_, residual, before, after) in enumerate(results):
        np.testing.assert_allclose(residual, e[i], rtol=1e-12, atol=1e-11)
        assert (before, after) == (STEPS * 8 * 111, STEPS * 8 * (2 * (12 + 9) + 3))
    assert len({np.array(found).tobytes() for found, *_ in results}) == 1


BITS = {"qsgd": 4 + 64 / 128, "terngrad": 2, "onebit": 1, "ef_signsgd": 1, "signsgd": 1,
        "topk": 0.01 * 96}


@pytest.mark.parametrize("name", BITS)
def test_bytes_are_counted_before_and_after(name):
    c = compressor(name)
    data = c.pack({"w": vector(12_800)})
    assert (c.before, c.after) == (8 * 12_800, data.size - 16)
    assert 8 * c.after / 12_800 == pytest.approx(BITS[name], abs=0.02)


@pytest.mark.parametrize("name", GATHERED)
def test_bytes_that_cannot_be_right_are_refused(name):
    data = compressor(name).pack({"w": vector(50)})
    c = compressor(name)
    for wrong in (data[:-1], np.append(data, np.uint8(0)), data[:20]):
        with pytest.raises(ValueError):
            c.unpack(wrong, 50, np.float64)
    rng, bad = np.random.default_rng(0), 0
    for _ in range(200):
        noise = data.copy()
        noise[rng.integers(16, len(noise), 3)] = rng.integers(0, 256, 3)
        try:
            assert c.unpack(noise, 50, np.float64).shape == (50,)
        except ValueError:
            bad += 1
    assert bad > 50 or name not in ("topk", "dgc")      # indices beyond the end


def fit(group, name, steps=12, state=None, stop=0):
    """Learn a small layer with the compressor, perhaps going on from a state."""
    md.manual_seed(0)
    model = md.nn.Sequential(md.nn.Linear(20, 16), md.nn.Tanh(), md.nn.Linear(16, 4)).double()
    train = dist.Synchronous(model, sgd(model), group, compress=name)
    if state:
        model.load_state_dict(state["model"])
        train.load_state_dict(state["train"])
    for step in range(train.steps, steps):
        x = md.tensor(np.random.default_rng([step, group.rank]).standard_normal((8, 20)))
        train.zero_grad()
        md.nn.functional.cross_entropy(model(x), (x[:, :4]).argmax(1)).backward()
        train.step()
        if train.steps == stop:
            return {"model": model.state_dict(), "train": train.state_dict()}
    return md.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


@pytest.mark.parametrize("name", COMPRESSORS)
def test_residuals_travel_in_the_checkpoint(name, tmp_path):
    def resumed(group):
        state = fit(group, name, stop=5)
        if group.rank == 0:
            md.save(state, tmp_path / "state")
        group.barrier()
        return fit(group, name, state=md.load(tmp_path / "state"))
    never, again = on_ranks(3, lambda group: fit(group, name)), on_ranks(3, resumed)
    assert len({w.tobytes() for w in never + again}) == 1       # equal replicas, equal runs
    assert not np.allclose(never[0], on_ranks(3, lambda group: fit(group, None))[0])


@pytest.mark.parametrize("name", GATHERED)
def test_servers_decode_what_workers_encode(name):
    """Through a server that knows the compressor by its name alone."""
    def node(transport):
        if transport.node == 1:
            return md.serve(transport, md.ParameterServer(1))
        model = Vector(parameters())
        train = dist.Downpour(model, sgd(model), group=dist.ProcessGroup(transport, 1),
                              compress=name)
        return trained(train, 0, 20, finish=True)
    with cluster(1, 1) as nodes:
        found = run(nodes, node)[0]
    c, w = compressor(name), parameters()
    for step in range(20):
        w = w - 0.05 * sent(c, gradient(w, 0, step))
    assert_equal([found], [w])


def test_powersgd_and_servers_do_not_go_together():
    model = Vector(parameters())
    train = dist.Downpour(model, sgd(model), compress="powersgd")
    with pytest.raises(TypeError, match="not with parameter servers"):
        trained(train, 0, 1)


# ---- strategies ------------------------------------------------------------------

class Schedule:
    """Ranks, threads of one cluster, that make their steps in a given order."""

    def __init__(self, order):
        self.order, self.at, self.changed = [int(i) for i in order], 0, threading.Condition()

    def turns(self, rank):
        for _ in range(self.order.count(rank)):
            with self.changed:
                assert self.changed.wait_for(lambda: self.order[self.at] == rank, 20)
            yield
            with self.changed:
                self.at += 1
                self.changed.notify_all()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_easgd_is_its_rule(momentum, servers):
    """Zhang, Choromanska and LeCun 2015, algorithms 1 and 2, in the order of the authors' code,
    optim-eamsgd.lua of sixin-zh/mpiT: the difference is taken before the local step, and applied
    to the replica after it."""
    tau, alpha, lr = 3, 0.9 / RANKS, 0.05
    order = np.random.default_rng(1).integers(0, RANKS, STEPS)
    schedule = Schedule(order)

    def node(transport):
        if transport.node >= RANKS:
            return md.serve(transport, md.ParameterServer(RANKS))
        group = dist.ProcessGroup(transport, RANKS)
        model = Vector(parameters(group.rank))
        train = md.plugin("easgd", dist.Strategy)(model, sgd(model, lr=lr), tau,
                                                  inner_momentum=momentum, group=group)
        train.zero_grad()
        group.barrier()
        for step, _ in enumerate(schedule.turns(group.rank)):
            train.zero_grad()
            model.pull(gradient(model.w.detach().numpy().copy(), group.rank, step))
            train.step()
            train._until_answered("PUSH")       # a fixed schedule: the centre has moved now
        replica = train.weights.data - momentum * train.velocity
        train.finish()
        return replica, train.weights.data.copy()
    with cluster(RANKS, servers) as nodes:
        found = run(nodes, node)[:RANKS]

    centre = parameters()
    x, v, count = [centre.copy() for _ in range(RANKS)], np.zeros((RANKS, SIZE)), [0] * RANKS
    for i in order:
        elastic = 0
        if count[i] % tau == 0:
            elastic = alpha * (x[i] - centre)
            centre = centre + elastic
        v[i] = momentum * v[i]
        x[i] = x[i] + v[i]                      # look ahead
        g = gradient(x[i], i, count[i])
        x[i] = x[i] - lr * g
        v[i] = v[i] - lr * g
        x[i] = x[i] - elastic
        count[i] += 1
    assert_equal([replica for replica, _ in found], x)
    assert_equal([end for _, end in found], [centre] * RANKS)
    assert len({end.tobytes() for _, end in found}) == 1


@pytest.mark.parametrize("adaptive", [False, True])
def test_dcasgd_is_its_rule(adaptive):
    """Zheng et al. 2017, algorithm 2 and equations 10 and 14: w_bak is what the worker got."""
    rule = md.plugin("dcasgd", dist.ServerSGD)(0.05, 0.3, adaptive, 0.8)
    machines = Machines(RANKS, rule=rule, n_fetch=2)
    w = machines.values()
    backup, mean_square = [w.copy() for _ in range(RANKS)], np.zeros(SIZE)
    stale = 0
    for step, i in enumerate(np.random.default_rng(2).integers(0, RANKS, STEPS)):
        worker = machines.workers[i]
        np.testing.assert_allclose(worker.parameters, backup[i], rtol=0, atol=1e-12)
        g = gradient(backup[i], i, step)
        machines.send(i, worker.on_gradient(gradient(worker.parameters, i, step), 1))
        lam = 0.3
        if adaptive:
            mean_square = 0.8 * mean_square + 0.2 * g * g
            lam = lam / np.sqrt(mean_square + 1e-7)
        stale += (w != backup[i]).any()
        w = w - 0.05 * (g + lam * g * g * (w - backup[i]))
        machines.send(i, worker.on_step())
        if worker.clock % 2 == 0:
            backup[i] = w.copy()
    assert_equal([machines.values()], [w])
    assert stale > STEPS / 2


def test_a_checkpoint_is_not_what_a_worker_computes_with():
    rule = md.plugin("dcasgd", dist.ServerSGD)(0.05)
    machines = Machines(1, rule=rule, n_fetch=100)
    worker, server = machines.workers[0], machines.servers[1]
    before = worker.parameters.copy()
    machines.send(0, worker.on_gradient(np.ones(SIZE), 1) + worker.on_snapshot())
    assert (worker.snapshot[1][0] != before).all()
    np.testing.assert_array_equal(server.rule.then[0], before)


def make(name, model, **options):
    return md.plugin(name, dist.Strategy)(model, sgd(model), **options)


@pytest.mark.parametrize("name, options", [
    ("easgd", {"tau": 3}), ("easgd", {"tau": 4, "inner_momentum": 0.9}), ("dcasgd", {}),
    ("dcasgd", {"adaptive": True})])
def test_asynchronous_lessons_resume(name, options, tmp_path):
    """One worker and its server: to the bit."""
    never, first = (make(name, Vector(parameters()), **options) for _ in range(2))
    trained(never, 0, 10), trained(first, 0, 10)
    md.save({"model": first.model.state_dict(), "strategy": first.state_dict()}, tmp_path / "s")
    state = md.load(tmp_path / "s")
    second = make(name, Vector(np.zeros(SIZE)), **options)
    second.model.load_state_dict(state["model"])
    second.load_state_dict(state["strategy"])
    assert trained(second, 0, 9, 10).tobytes() == trained(never, 0, 9, 10).tobytes()
    assert trained(second, 0, 0, finish=True).tobytes() == \
        trained(never, 0, 0, finish=True).tobytes()


@pytest.mark.parametrize("name, options", [
    ("easgd", {"tau": 0}), ("easgd", {"beta": 2.0}), ("easgd", {"inner_momentum": 1.0}),
    ("dcasgd", {"lam": -1.0}), ("dcasgd", {"decay": 1.0})])
def test_what_these_cannot_do(name, options):
    with pytest.raises(ValueError, match=str(next(iter(options)))):
        make(name, Vector(parameters()), **options)


def test_the_command_line_knows_what_each_takes(tmp_path):
    """A replica's own steps may be anybody's; a rule that compensates is its own."""
    command = [str(ROOT / "minidist.py"), "train", "--data", "segments", "--model", "mlp",
               "--epochs", "1", "--strategy"]
    assert "test accuracy" in run_script(*command, "easgd", "--tau", "5", "--optimizer", "adam",
                                         cwd=tmp_path)
    with pytest.raises(AssertionError, match="they know --optimizer sgd, without momentum"):
        run_script(*command, "dcasgd", "--optimizer", "adagrad", cwd=tmp_path)


# ---- models that are cut ---------------------------------------------------------

def lesson(name):
    """The module: it is found as the plugins are."""
    return md.companion("tutorials", f"strategies.{name}")


def layers(*sizes):
    md.manual_seed(3)
    return [md.nn.Linear(a, b).double() for a, b in zip(sizes, sizes[1:])]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensor_parallel_is_the_whole_model(size):
    """Outputs, gradients of the input and parameters after 20 steps; 7 and 10 columns on 3 ranks
    are cut unevenly."""
    x, y = md.tensor(vector(40).reshape(8, 5)), md.tensor(np.arange(8) % 4)
    cut = lesson("tensor_parallel")

    def learn(model):
        optimizer, first = md.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), x.clone()
        first.requires_grad_()
        for _ in range(20):
            optimizer.zero_grad()
            loss = md.nn.functional.cross_entropy(model(first), y)
            loss.backward()
            optimizer.step()
        return loss.item(), first.grad.numpy(), [p.detach().numpy() for p in model.parameters()]

    def split(group):
        a, b, c, d = layers(5, 7, 6, 10, 4)
        c.bias = None
        return learn(md.nn.Sequential(
            cut.ColumnLinear(a, group), md.nn.Tanh(), cut.RowLinear(b, group), md.nn.Tanh(),
            cut.ColumnLinear(c, group), md.nn.ReLU(), cut.RowLinear(d, group)))
    a, b, c, d = layers(5, 7, 6, 10, 4)
    c.bias = None
    loss, slope, whole = learn(md.nn.Sequential(a, md.nn.Tanh(), b, md.nn.Tanh(), c,
                                                md.nn.ReLU(), d))
    for rank, (found, found_slope, parts) in enumerate(on_ranks(size, split)):
        np.testing.assert_allclose(found, loss, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found_slope, slope, rtol=0, atol=1e-12)
        inner, outer = slice(*md.share_of(7, rank, size)), slice(*md.share_of(10, rank, size))
        expected = [whole[0][inner], whole[1][inner], whole[2][:, inner], whole[3],
                    whole[4][outer], whole[5][:, outer], whole[6]]
        for part, of in zip(parts, expected, strict=True):
            np.testing.assert_allclose(part, of, rtol=0, atol=1e-12)


def test_tensor_parallel_sends_one_sum_forward_and_one_backward():
    """A pair of layers on 2 ranks: two all-reduces of (8, 5) and (8, 4) numbers."""
    def rank(group):
        a, b = layers(5, 600, 4)
        cut = lesson("tensor_parallel")
        model = md.nn.Sequential(cut.ColumnLinear(a, group), cut.RowLinear(b, group))
        x = md.ones(8, 5, dtype=md.float64).requires_grad_()
        before = group.transport.stats["bytes_sent"]
        model(x).sum().backward()
        return group.transport.stats["bytes_sent"] - before
    assert on_ranks(2, rank) == [8 * 8 * (5 + 4)] * 2
    with pytest.raises(ValueError, match="cannot be cut"):
        raise next(x for x in outcomes(3, lambda group: lesson("tensor_parallel").ColumnLinear(
            layers(5, 2)[0], group)) if isinstance(x, Exception))


class Fork(md.nn.Module):
    """A stage that hands on two tensors of different shapes, one of them unchanged."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return md.tanh(self.layer(x)), (x * x).reshape(len(x), -1, 1)


class Join(md.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, skipped):
        return self.layer(x) + skipped.mean(dim=1)


def stages():
    a, b, c, d = layers(5, 7, 6, 10, 4)
    return [md.nn.Sequential(a, md.nn.Tanh(), Fork(b)), Join(c), md.nn.Sequential(md.nn.ReLU(), d)]


def batches():
    for step in range(6):
        rows = 8 if step < 5 else 3                 # fewer than micro-batches
        yield md.tensor(vector(5 * rows, step).reshape(rows, 5)), md.tensor(np.arange(rows) % 4)


@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_pipeline_is_the_whole_model(order, count):
    def rank(group):
        pipe = lesson("pipeline").Pipeline(stages(), md.nn.functional.cross_entropy, count, order,
                                           group)
        optimizer, losses = md.optim.SGD(pipe.stage.parameters(), lr=0.3, momentum=0.9), []
        for x, y in batches():
            optimizer.zero_grad()
            losses.append(pipe.backward(x, y))
            optimizer.step()
        return losses, [p.detach().numpy() for p in pipe.stage.parameters()], pipe.most
    whole, losses = stages(), []
    optimizer = md.optim.SGD([p for stage in whole for p in stage.parameters()], lr=0.3,
                             momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        loss = md.nn.functional.cross_entropy(whole[2](whole[1](*whole[0](x))), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for i, (found, parts, most) in enumerate(on_ranks(3, rank)):
        np.testing.assert_allclose(found, losses, rtol=0, atol=1e-12)
        for part, of in zip(parts, whole[i].parameters(), strict=True):
            np.testing.assert_allclose(part, of.detach().numpy(), rtol=0, atol=1e-12)
        assert most == (count if order == "gpipe" else min(count, 3 - i))


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_pipeline_sends_one_message_a_boundary(order):
    """And direction, for each micro-batch, however many tensors cross."""
    def rank(group):
        pipe = lesson("pipeline").Pipeline(stages(), md.nn.functional.cross_entropy, 4, order,
                                           group)
        sent = []
        for x, y in list(batches())[:2]:
            group.barrier()
            before = group.transport.stats["messages_sent"]
            pipe.backward(x, y)
            sent.append(group.transport.stats["messages_sent"] - before)
        return sent
    first, middle, last = on_ranks(3, rank)
    shapes = 2                                      # once: what will cross
    assert first[0] - first[1] == middle[0] - middle[1] == shapes and last[0] == last[1]
    # Besides, the loss comes from the last rank.
    totals = [first[1] - 4, middle[1] - 8, last[1] - 4]
    assert sum(totals) == 2


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_schedules_do_everything_once_and_never_wait_in_a_circle(order, stages, count):
    module = lesson("pipeline")
    for stage in range(stages):
        plan = module.schedule(order, stage, stages, count)
        assert sorted(plan) == sorted([(what, i) for what in "FB" for i in range(count)])
        assert all(plan.index(("F", i)) < plan.index(("B", i)) for i in range(count))
    rows = module.picture(order, stages, count)     # ends, and takes as long as the bubble says
    assert {len(row.rstrip(".")) for row in rows[:1]} == {2 * (count + stages - 1)}


def test_what_a_pipeline_cannot_do():
    loss = md.nn.functional.cross_entropy
    with pytest.raises(ValueError, match="3 stages for 1 ranks"):
        lesson("pipeline").Pipeline(stages(), loss, group=md.ProcessGroup())
    with pytest.raises(ValueError, match="gpipe and 1f1b"):
        lesson("pipeline").Pipeline(stages()[:1], loss, order="zigzag", group=md.ProcessGroup())


# ---- Sandblaster -----------------------------------------------------------------

def regression():
    """A problem with some curvature, in double precision."""
    a, b = layers(5, 6, 3)
    return md.nn.Sequential(a, md.nn.Tanh(), b), md.tensor(vector(300).reshape(60, 5)), \
        md.tensor(np.arange(60) % 3)


@pytest.mark.parametrize("shards, replicas, portions", [(1, 1, 1), (2, 3, 16), (3, 2, 7)])
def test_sandblaster_is_the_trajectory_of_lbfgs(shards, replicas, portions):
    iterations = 12
    model, x, y = regression()
    loss = md.nn.functional.cross_entropy
    optimizer = md.optim.LBFGS(model.parameters(), max_iter=iterations, max_eval=1000,
                               history_size=5, line_search_fn="strong_wolfe")
    probes = []

    def closure():
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        probes.append(value.item())
        return value
    optimizer.step(closure)

    def rank(group):
        here, x, y = regression()
        report = lesson("sandblaster").minimize(here, loss, x, y, iterations, shards, portions, 5,
                                                group)
        return here, report
    results = on_ranks(1 + shards + replicas, rank)
    report = results[0][1]
    assert report["evaluations"] == len(probes) > iterations
    assert report["losses"][0] == pytest.approx(probes[0], abs=1e-12)
    assert len(report["losses"]) == iterations + 1
    assert report["losses"][-1] == pytest.approx(loss(model(x), y).item(), abs=1e-12)
    for found, _ in results:
        for a, b in zip(found.parameters(), model.parameters(), strict=True):
            np.testing.assert_allclose(a.detach().numpy(), b.detach().numpy(), rtol=0, atol=1e-10)
    for _, shard in results[1 : 1 + shards]:
        assert shard["counted"] == portions * report["evaluations"]


def test_a_late_portion_is_given_out_twice_and_counted_once():
    """One of two replicas stops in its first portion until the other has done all of them."""
    done, begun = threading.Event(), threading.Event()
    module, portions = lesson("sandblaster"), 6

    def rank(group):
        model, x, y = regression()
        calls = []

        def loss(output, target):
            calls.append(len(target))
            if group.rank == 2 and len(calls) == 1:
                begun.set()
                assert done.wait(20)
            if group.rank == 3:
                assert begun.wait(20)
                if len(calls) == portions + 1:      # of the next evaluation
                    done.set()
            return md.nn.functional.cross_entropy(output, target)
        return model, module.minimize(model, loss, x, y, 3, 1, portions, group=group)
    (late, coordinator), (_, shard), (_, slow), (_, quick) = on_ranks(4, rank)
    assert coordinator["twice"] >= 1 and shard["dropped"] >= 1
    assert shard["counted"] == portions * coordinator["evaluations"]
    assert slow["computed"] + quick["computed"] == shard["counted"] + coordinator["twice"]
    model, report = on_ranks(3, lambda group: (lambda m, x, y: (m, module.minimize(
        m, md.nn.functional.cross_entropy, x, y, 3, 1, portions, group=group)))(*regression()))[0]
    np.testing.assert_allclose(coordinator["losses"], report["losses"], rtol=0, atol=1e-12)
    for a, b in zip(late.parameters(), model.parameters()):
        np.testing.assert_allclose(a.detach().numpy(), b.detach().numpy(), rtol=0, atol=1e-9)


def test_a_shard_adds_a_portion_once():
    """It comes twice; another is of an earlier evaluation."""
    module = lesson("sandblaster")

    def rank(group):
        if group.rank == 1:
            return module.be_shard(np.zeros(3), group)[1]
        if group.rank == 2:
            for evaluation, portion, value in [(2, 0, 1), (2, 0, 1), (1, 1, 10), (2, 1, 2)]:
                module.send([evaluation, portion, value, value, value], 1, module.GRADIENT, group)
            return None
        for command in [(module.BEGIN, 2), (module.COLLECT, 0), (module.COLLECT, 0),
                        (module.SUM, module.G), (module.END, 0)]:
            module.send([*command, 0, 0], 1, module.COMMAND, group)
        return module.recv(1, 1, module.SCALAR, group)[1]
    total, report, _ = on_ranks(3, rank)
    assert total == [9.0] and report == {"counted": 2, "dropped": 2}


def test_the_coordinator_moves_no_vectors():
    """What it sends does not depend on the size of the model."""
    def rank(group, width):
        a, b = layers(5, width, 3)
        model = md.nn.Sequential(a, md.nn.Tanh(), b)
        _, x, y = regression()
        report = lesson("sandblaster").minimize(model, md.nn.functional.cross_entropy, x, y, 0, 1,
                                                4, group=group)
        return group.transport.stats["bytes_sent"], report
    small, large = (on_ranks(3, functools.partial(rank, width=width)) for width in (4, 400))
    assert small[0][0] == large[0][0] < 1000 and large[1][0] > 8 * 400 * 8


def test_sandblaster_needs_all_roles():
    model, x, y = regression()
    with pytest.raises(ValueError, match="one replica at least"):
        lesson("sandblaster").minimize(model, None, x, y, group=md.ProcessGroup())
