"""Strategies against their published rules: an independent NumPy loop each, of 50 steps on 3
workers, to 1e-12 in float64; and what checkpoints, lost ranks and shards promise."""
import io
import math
import threading

import numpy as np
import pytest

import minidist as md
from memory import cluster, on_ranks, outcomes, run
from minidist import Packet
from test_downpour import Machines, gradient, whole

dist = md.distributed
STEPS, RANKS, SIZE = 50, 3, 5


def parameters(rank=0):
    return np.random.default_rng(40 + rank).standard_normal(SIZE)


class Vector(md.nn.Module):
    """A model that is one vector, whose gradient the test decides."""

    def __init__(self, start):
        super().__init__()
        self.w = md.nn.Parameter(md.tensor(start))

    def pull(self, g):
        (self.w * md.tensor(g)).sum().backward()


def trained(strategy, rank, steps=STEPS, first=0, finish=False):
    """The strategy's model after `steps` of the gradients above, at its own parameters."""
    model = strategy.model
    for step in range(first, first + steps):
        strategy.zero_grad()
        model.pull(gradient(model.w.detach().numpy().copy(), rank, step))
        strategy.step()
    if finish:
        strategy.finish()
    return model.w.detach().numpy().copy()


def everywhere(make, size=RANKS, servers=0, **options):
    """Train on ranks that begin differently (rank 0's start counts): what each ends with."""
    with cluster(size, servers) as nodes:
        def node(transport):
            if transport.node >= size:
                return md.serve(transport, md.ParameterServer(size))
            group = dist.ProcessGroup(transport, size)
            return trained(make(Vector(parameters(group.rank)), group), group.rank, **options)
        return run(nodes, node)[:size]


def sgd(model, **options):
    return md.optim.SGD(model.parameters(), **{"lr": 0.05, **options})


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


# ---- local steps -----------------------------------------------------------------

def test_local_sgd_is_its_rule():
    """Stich 2019, algorithm 1: w_i -= lr g_i; every H steps w_i = mean of all w_j."""
    found = everywhere(lambda model, group: dist.LocalSGD(model, sgd(model), 4, group=group))
    w = [parameters() for _ in range(RANKS)]
    for step in range(STEPS):
        w = [x - 0.05 * gradient(x, i, step) for i, x in enumerate(w)]
        if (step + 1) % 4 == 0:
            w = [sum(w) / RANKS] * RANKS
    assert_equal(found, w)
    assert not np.allclose(found[0], found[1])      # two steps since the last meeting


def test_diloco_is_its_rule():
    """Douillard et al. 2023, algorithm 1, with AdamW inside and Nesterov's momentum outside,
    as torch.optim.SGD has it (train_diloco_torch.py of OpenDiLoCo)."""
    def make(model, group):
        inner = md.optim.AdamW(model.parameters(), lr=0.03, betas=(0.9, 0.95), weight_decay=0.1)
        return dist.DiLoCo(model, inner, 7, group=group)
    found = everywhere(make, finish=True)
    shared, velocity = parameters(), None
    w = [shared.copy() for _ in range(RANKS)]
    m, v = np.zeros((2, RANKS, SIZE))
    for step in range(STEPS):
        for i in range(RANKS):
            g = gradient(w[i], i, step)
            w[i] *= 1 - 0.03 * 0.1
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.95 * v[i] + 0.05 * g * g
            mean, square = m[i] / (1 - 0.9 ** (step + 1)), v[i] / (1 - 0.95 ** (step + 1))
            w[i] = w[i] - 0.03 * mean / (np.sqrt(square) + 1e-8)
        if (step + 1) % 7 == 0 or step + 1 == STEPS:        # the last one is finish's
            outer = sum(shared - x for x in w) / RANKS
            velocity = outer if velocity is None else 0.9 * velocity + outer
            shared = shared - 0.7 * (outer + 0.9 * velocity)
            w = [shared.copy() for _ in range(RANKS)]
    assert_equal(found, w)


def test_parameters_that_are_not_finite_are_named():
    def rank(group):
        model = Vector(parameters())
        strategy = dist.LocalSGD(model, sgd(model), 1, group=group)
        strategy.zero_grad()
        model.w.grad = md.tensor(np.full(SIZE, np.inf if group.rank == 1 else 1.0))
        strategy.step()
    for outcome in outcomes(3, rank):
        assert isinstance(outcome, FloatingPointError) and "ranks [1] are not finite" in str(
            outcome)


# ---- gossip ----------------------------------------------------------------------

MIXING = {
    (3, "ring"): lambda step: np.full((3, 3), 1 / 3),
    (4, "ring"): lambda step: np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1],
                                        [1, 0, 1, 1]]) / 3,
    (3, "exponential"): lambda step: (np.eye(3) + np.roll(np.eye(3), 1 << step % 2, axis=0)) / 2,
    (8, "exponential"): lambda step: (np.eye(8) + np.roll(np.eye(8), 1 << step % 3, axis=0)) / 2,
}


@pytest.mark.parametrize("size, graph", MIXING)
def test_gossip_is_d_psgd(size, graph):
    """Lian et al. 2017, algorithm 1: x_i = sum_j W_ij x_j - lr g(x_i)."""
    found = everywhere(lambda model, group: dist.Gossip(model, sgd(model), graph, group=group),
                       size)
    x = np.stack([parameters()] * size)
    for step in range(STEPS):
        g = np.stack([gradient(x[i], i, step) for i in range(size)])
        w = MIXING[size, graph](step)
        np.testing.assert_allclose([w.sum(0), w.sum(1)], 1)     # doubly stochastic
        x = w @ x - 0.05 * g
    assert_equal(found, x)
    assert not np.allclose(x[0], x[1])


def test_gossip_ends_on_the_mean_of_all():
    apart = everywhere(lambda model, group: dist.Gossip(model, sgd(model), group=group), 4)
    found = everywhere(lambda model, group: dist.Gossip(model, sgd(model), group=group), 4,
                       finish=True)
    assert_equal(found, [sum(apart) / 4] * 4)
    assert len({x.tobytes() for x in found}) == 1


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_asynchronous_gossip_is_ad_psgd(schedule):
    """Lian et al. 2018, algorithm 1: gradient at x_i; average with a neighbour, both at once;
    then the gradient, which is stale by now. Ranks 0 and 2 are active, 1 is passive."""
    order = np.random.default_rng(schedule).integers(0, RANKS, STEPS)
    peers = [md.GossipPeer(i, RANKS, parameters(), [1] if i != 1 else [0, 2])
             for i in range(RANKS)]
    x = [parameters() for _ in range(RANKS)]
    asked, count = [], [0] * RANKS

    def answer(who):                # the passive rank looks into its inbox
        while asked:
            active, question = asked.pop(0)
            reply, = peers[who].on_message(*question._replace(peer=active)[:])
            peers[active].on_message(*reply._replace(peer=who))
            x[active] = x[who] = (x[active] + x[who]) / 2

    for i in (0, 2):
        asked += [(i, packet) for packet in peers[i].on_step()]
    for i in order:
        g, g_expected = (gradient(w, i, count[i]) for w in (peers[i].parameters, x[i]))
        answer(1)
        assert not peers[i].waits_for
        peers[i].parameters -= 0.05 * g
        x[i] = x[i] - 0.05 * g_expected
        count[i] += 1
        asked += [(i, packet) for packet in peers[i].on_step()]
    assert_equal([peer.parameters for peer in peers], x)


def test_no_two_ranks_of_ad_psgd_wait_for_each_other():
    """Whoever waits is active, and waits for a passive one, which never waits."""
    for size in range(2, 12):
        for graph in md.GRAPHS.values():
            for rank in range(size):
                reach = {p for step in range(4) for side in graph(rank, size, step) for p in side}
                assert rank % 2 or any((p - rank) % 2 for p in reach)       # somebody to ask
                assert rank not in reach


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_asynchronous_gossip_ends_equal_everywhere(size, graph):
    found = everywhere(lambda model, group: dist.Gossip(model, sgd(model), graph, True, group),
                       size, finish=True, steps=20)
    assert len({x.tobytes() for x in found}) == 1
    target = everywhere(lambda model, group: dist.Synchronous(model, sgd(model), group), size,
                        steps=20)
    assert np.abs(found[0] - target[0]).max() < 0.5


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_lost_rank_does_not_stop_asynchronous_gossip(victim):
    begun = threading.Barrier(4)

    def rank(group):
        model = Vector(parameters())
        strategy = dist.Gossip(model, sgd(model), "ring", True, group)
        begun.wait(20)              # who dies before all have begun ends the run
        w = trained(strategy, group.rank, 10 if group.rank == victim else 30,
                    finish=group.rank != victim)
        if group.rank == victim:
            group.transport.abort("killed")
        return w, strategy.lost
    found = on_ranks(4, rank)
    rest = [x for i, x in enumerate(found) if i != victim]
    assert len({w.tobytes() for w, _ in rest}) == 1
    assert all(lost == {victim} for _, lost in rest)


# ---- parameter servers -----------------------------------------------------------

def test_staleness_aware_steps_are_divided():
    """Zhang et al. 2016: the step of a push is lr / staleness, lr if it is fresh."""
    machines = Machines(2, rule=md.ServerSGD(0.1, staleness_aware=True), n_fetch=100)
    w, versions = machines.values(), [0, 0]
    order = np.random.default_rng(3).integers(0, 2, STEPS)
    fetched = [w.copy(), w.copy()]
    for step, i in enumerate(order):
        worker = machines.workers[i]
        g = gradient(worker.parameters, i, step)
        expected = gradient(fetched[i], i, step)
        machines.send(i, worker.on_gradient(g, 1))
        w = w - 0.1 / max(step - versions[i], 1) * expected
        if step % 3 == 0:
            machines.send(i, worker._pull(step))
            fetched[i], versions[i] = w.copy(), step + 1
    assert_equal([machines.values()], [w])
    assert max(machines.servers[2].staleness) > 3


def test_bounded_staleness_is_its_rule_and_its_bound_holds():
    """Ho et al. 2013 on a schedule: a worker that would be more than s steps ahead of the slowest
    waits; whoever goes on sees all updates that are there."""
    s, chance = 2, np.random.default_rng(5)
    machines = Machines(3, rule=md.ServerSGD(0.05), bound=s)
    w, fetched, clock = machines.values(), [parameters_of(m) for m in machines.workers], [0] * 3
    waited = 0
    for i in chance.choice(3, 200, p=[0.6, 0.3, 0.1]):
        worker = machines.workers[i]
        assert worker.waits_for("PULL") == (clock[i] - min(clock) > s)
        if worker.waits_for("PULL"):
            waited += 1
            continue
        np.testing.assert_allclose(worker.parameters, fetched[i], rtol=0, atol=1e-12)
        g = gradient(fetched[i], i, clock[i]) / 3
        machines.send(i, worker.on_gradient(gradient(worker.parameters, i, clock[i]) / 3, 1))
        w = w - 0.05 * g
        before = [x - min(clock) > s for x in clock]
        clock[i] += 1
        machines.send(i, worker.on_step())
        for j in range(3):          # whose wait is over fetches now
            if clock[j] - min(clock) <= s and (j == i or before[j]):
                fetched[j] = w.copy()
        assert max(clock) - min(clock) <= s + 1
    assert waited > 20 and sum(clock) > STEPS
    assert_equal([machines.values()], [w])


def parameters_of(worker):
    return worker.parameters.copy()


@pytest.mark.parametrize("servers", [1, 2])
def test_a_bound_of_0_has_the_bits_of_synchronous(servers):
    found = everywhere(lambda model, group: dist.StaleSynchronous(
        model, sgd(model), 0, group=group), servers=servers, finish=True)
    expected = everywhere(lambda model, group: dist.Synchronous(model, sgd(model), group))
    assert [x.tobytes() for x in found] == [x.tobytes() for x in expected]


def test_backup_workers_take_the_first_gradients():
    """Chen et al. 2016: of N + b workers the first N gradients of a step make it; a gradient of
    an earlier step is dropped, and its worker goes on with new parameters."""
    machines = Machines(3, rule=md.ServerSGD(0.05), gather=2)
    server, chance = machines.servers[3], np.random.default_rng(6)
    w = machines.values()
    fetched, version, round_, steps = [w.copy()] * 3, [0] * 3, {}, 0
    late = 0
    while steps < STEPS:
        i = int(chance.choice(3, p=[0.5, 0.4, 0.1]))
        worker = machines.workers[i]
        if i in round_:
            assert worker.waits_for("PUSH") and worker.waits_for("PULL")
            continue
        assert not worker.waits_for("PUSH", "PULL")
        g = gradient(worker.parameters, i, steps)
        expected = gradient(fetched[i], i, steps)
        machines.send(i, worker.on_gradient(g, 4) + worker.on_step())
        if version[i] < steps:
            late += 1
            fetched[i], version[i] = w.copy(), steps
            continue
        round_[i] = expected
        if len(round_) == 2:
            w = w - 0.05 * sum(round_.values()) / 2
            steps += 1
            for j in round_:
                fetched[j], version[j] = w.copy(), steps
            round_ = {}
        np.testing.assert_allclose(machines.values(), w, rtol=0, atol=1e-12)
    assert server.version == STEPS and server.late == late > 3
    assert sum(worker.late for worker in machines.workers) == late


def test_losing_a_worker_completes_the_round():
    machines = Machines(3, gather=3)
    for i in (0, 1):
        worker = machines.workers[i]
        machines.send(i, worker.on_gradient(np.ones(5), 1) + worker.on_step())
    assert machines.workers[0].waits_for("PULL")
    machines.send(3, machines.servers[3].on_lost(2))
    assert not machines.workers[0].waits_for("PUSH", "PULL")
    assert machines.servers[3].version == 1


def test_a_bound_does_not_wait_for_the_lost_or_the_finished():
    machines = Machines(3, bound=1)
    for _ in range(2):
        machines.send(0, machines.workers[0].on_gradient(np.ones(5), 1)
                      + machines.workers[0].on_step())
    assert machines.workers[0].waits_for("PULL")
    machines.send(3, machines.servers[3].on_lost(2))
    assert machines.workers[0].waits_for("PULL")
    machines.send(1, machines.workers[1].on_finish())
    assert not machines.workers[0].waits_for("PULL")


def test_a_push_that_comes_twice_counts_once_in_its_round():
    machines = Machines(2, gather=2, rule=md.ServerSGD(1.0))
    start = machines.values()
    push, = machines.workers[0].on_gradient(np.ones(5), 1)
    for _ in range(3):
        machines.send(0, [push])
    assert machines.servers[2].version == 0
    machines.send(1, machines.workers[1].on_gradient(np.full(5, 3.0), 1))
    machines.send(0, [push])
    np.testing.assert_allclose(machines.values(), start - 2)


@pytest.mark.parametrize("name", ["../evil", "evil:Rule", "x.y", "os"])
def test_a_server_loads_rules_by_their_plain_names_only(name):
    for rule in (name, f"sgd+{name}"):
        answer, = md.ParameterServer(1).on_message(*Packet(
            "INIT", 0, ("float64", 0, 1, rule, {"lr": 1.0}), np.ones(1)))
        assert answer.kind == "REFUSED"


def test_schedules_scale_what_is_pushed():
    model = Vector(parameters())
    strategy = dist.Downpour(model, sgd(model))
    schedule = md.optim.lr_scheduler.StepLR(strategy.optimizer, 10, 0.5)
    w = parameters()
    for step in range(30):
        strategy.zero_grad()
        model.pull(gradient(model.w.detach().numpy().copy(), 0, step))
        strategy.step()
        w = w - 0.05 * 0.5 ** (step // 10) * gradient(w, 0, step)
        schedule.step()
    assert_equal([whole(model)], [w])


@pytest.mark.parametrize("options, says", [
    (dict(bound=-1), "count from 0"), (dict(bound=1, backup=1), "backup needs bound=0"),
    (dict(bound=0, backup=1), "at least one must count")])
def test_what_bounded_staleness_cannot_do(options, says):
    model = Vector(parameters())
    with pytest.raises(ValueError, match=says):
        dist.StaleSynchronous(model, sgd(model), **options)


# ---- shards and accumulation -----------------------------------------------------

def classifier():
    md.manual_seed(0)
    return md.nn.Sequential(md.nn.Linear(6, 16), md.nn.ReLU(), md.nn.Dropout(0.3),
                            md.nn.Linear(16, 3))


def fit(group, epochs=2, batch_size=20, **options):
    model = classifier()
    rng = np.random.default_rng(0)
    data = md.utils.data.TensorDataset(md.tensor(rng.standard_normal((50, 6)).astype(np.float32)),
                                       md.tensor(rng.integers(0, 3, 50)))
    loader = md.utils.data.DataLoader(data, batch_size, shuffle=True)
    train = dist.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), group,
                             **options)
    for _ in range(epochs):
        for x, y in train.batches(loader):
            loss = md.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            train.step()
            train.zero_grad()
    return whole(model).tobytes(), train


def test_shards_give_the_same_bits_on_1_2_4_and_8_workers():
    """50 samples in batches of 20: the last one, of 10, leaves shards of 1 and 2 samples."""
    results = {size: {w for w, _ in on_ranks(size, lambda group: fit(group, shards=8))}
               for size in (1, 2, 4, 8)}
    assert len(set().union(*results.values())) == 1
    assert on_ranks(2, lambda group: fit(group, shards=4))[0][0] not in results[2]


def test_shards_of_a_batch_that_is_too_small_for_them():
    results = {size: {w for w, _ in on_ranks(size, lambda group: fit(group, batch_size=7,
                                                                     shards=4))}
               for size in (1, 2, 4)}
    assert len(set().union(*results.values())) == 1


@pytest.mark.parametrize("size, shards", [(3, 8), (2, 6), (4, 2)])
def test_shards_that_do_not_divide(size, shards):
    for outcome in outcomes(size, lambda group: fit(group, shards=shards)):
        assert isinstance(outcome, ValueError) and f"shards={shards}" in str(outcome)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("accumulate", [2, 5])
def test_accumulation_is_the_whole_batch(size, accumulate):
    """Without dropout, whose masks depend on the shape."""
    def rank(group, **options):
        model = Vector(parameters())
        train = dist.Synchronous(model, sgd(model), group, **options)
        data = md.utils.data.TensorDataset(md.tensor(np.random.default_rng(0).standard_normal(
            (22, SIZE))))
        steps = 0
        for _ in range(2):
            for x, in train.batches(md.utils.data.DataLoader(data, 8)):
                train.zero_grad()
                ((x @ model.w - 1) ** 2).mean().backward()
                train.step()
                steps += 1
        return whole(model), steps, train.steps
    whole_batch, _, steps = rank(None)
    for w, turns, count in on_ranks(size, lambda group: rank(group, accumulate=accumulate)):
        np.testing.assert_allclose(w, whole_batch, rtol=0, atol=1e-12)
        assert (turns, count) == (steps * accumulate, steps)


def test_two_passes_in_a_turn_are_refused():
    model = Vector(parameters())
    train = dist.Synchronous(model, sgd(model), accumulate=2)
    data = md.utils.data.TensorDataset(md.ones(4, SIZE, dtype=md.float64))
    with pytest.raises(RuntimeError, match="once a turn"):
        for x, in train.batches(md.utils.data.DataLoader(data, 4)):
            for _ in range(2):
                (x @ model.w).mean().backward()
            train.step()


# ---- gradient noise scale --------------------------------------------------------

class Gaussian:
    """Samples whose gradients are normal: their mean is `signal`, their covariance the diagonal
    of `spread` squared. So the noise scale is known."""

    signal = np.linspace(0.5, -1.0, SIZE)
    spread = np.linspace(1.0, 2.0, SIZE)
    noise_scale = (spread ** 2).sum() / (signal ** 2).sum()

    def loader(self, count, batch_size):
        x = np.random.default_rng(7).standard_normal((count, SIZE)) * self.spread + self.signal
        return md.utils.data.DataLoader(md.utils.data.TensorDataset(md.tensor(x)), batch_size)

    def measured(self, group, loader, **options):
        model, noise = Vector(np.zeros(SIZE)), dist.NoiseScale(decay=1)
        train = dist.Synchronous(model, sgd(model, lr=0.0), group, noise_scale=noise, **options)
        for x, in train.batches(loader):
            train.zero_grad()
            (x @ model.w).mean().backward()
            train.step()
        return noise


def test_the_noise_scale_of_a_gaussian_problem():
    noise = Gaussian().measured(None, Gaussian().loader(60_000, 24), accumulate=3)
    assert noise.value == pytest.approx(Gaussian.noise_scale, rel=0.02)
    assert noise.signal / 2500 == pytest.approx((Gaussian.signal ** 2).sum(), rel=0.02)


@pytest.mark.parametrize("size, options", [(3, {}), (2, {"accumulate": 2}), (4, {"shards": 4})])
def test_the_noise_scale_is_its_estimators(size, options):
    """McCandlish et al. 2018, appendix A.1, with parts that differ by one sample."""
    loader = Gaussian().loader(70, 10)
    parts = size * options.get("accumulate", 1)
    signal = noise = 0.0
    for x, in loader:
        x = x.numpy()
        cuts = [x[slice(*md.share_of(10, i, parts))] for i in range(parts)]
        small = np.mean([np.square(cut.mean(0)).sum() for cut in cuts])
        big = np.square(x.mean(0)).sum()
        b_small, b_big = 1 / np.mean([1 / len(cut) for cut in cuts]), 10
        signal += (b_big * big - b_small * small) / (b_big - b_small)
        noise += (small - big) / (1 / b_small - 1 / b_big)
    for found in on_ranks(size, lambda group: Gaussian().measured(group, loader, **options)):
        np.testing.assert_allclose([found.signal, found.noise], [signal, noise], rtol=1e-9)


def test_a_noise_scale_needs_parts():
    with pytest.raises(ValueError, match="several ranks, or accumulate=2"):
        Gaussian().measured(None, Gaussian().loader(10, 5))


def test_batches_follow_the_noise_scale():
    noise = dist.NoiseScale()
    batches = dist.AdaptiveBatch(range(1000), noise, smallest=4, largest=50)
    sizes = []
    for batch, scale in zip(batches, (100, 100, 1e6, 0.01, math.nan, 400, *[400] * 99)):
        sizes.append(len(batch))
        noise.noise, noise.signal = scale, 1.0      # what the next batch will see
    assert sizes[:7] == [4, 10, 10, 50, 4, 4, 20] and sum(sizes) == 1000


def test_adaptive_batches_resume_where_they_were(tmp_path):
    def rank(group, stop=99):
        md.manual_seed(0)
        noise, model = dist.NoiseScale(), Vector(np.ones(SIZE))
        train = dist.Synchronous(model, sgd(model), group, noise_scale=noise, accumulate=2)
        data = Gaussian().loader(150, 1).dataset
        batches = dist.AdaptiveBatch(md.utils.data.RandomSampler(data), noise, r=5, smallest=4)
        train.checkpoint(tmp_path / f"state{stop}", every=1, batches=batches)
        seen = []
        for _ in train.epochs(2):
            for x, in train.batches(md.utils.data.DataLoader(data, batch_sampler=batches)):
                train.zero_grad()
                ((x @ model.w) ** 2).mean().backward()
                train.step()
                if train.last_turn:
                    seen.append(train.batch)
                if len(seen) > stop:
                    return seen
        return seen, whole(model).tobytes()
    never, bits = rank(None)
    assert len(set(never)) > 5
    assert rank(None, 9) == never[:10]          # ends before the tenth step is complete
    (tmp_path / "state99").unlink()
    (tmp_path / "state9").rename(tmp_path / "state99")
    assert rank(None) == (never[9:], bits)


@pytest.mark.parametrize("noise", [0, 0.05])
def test_the_critical_batch_is_fitted(noise):
    """Points of (S / S_min - 1)(E / E_min - 1) = 1, and with noise what SciPy makes of them."""
    batches = 2.0 ** np.arange(3, 13)
    steps = 300 * (1 + 250 / batches) * np.exp(
        noise * np.random.default_rng(0).standard_normal(10))
    critical, least, examples = dist.critical_batch(batches, steps)
    if not noise:
        np.testing.assert_allclose([critical, least, examples], [250, 300, 75_000], rtol=1e-6)
    np.testing.assert_allclose([critical, least], [250, 300], rtol=0.2)
    # No pair nearby fits better.
    def misfit(b, s):
        return np.square(np.log(steps) - np.log(s * (1 + b / batches))).sum()
    for b, s in [(1.001, 1), (0.999, 1), (1, 1.001), (1, 0.999), (1.001, 0.9995)]:
        assert misfit(critical * b, least * s) > misfit(critical, least)


def test_a_fit_needs_two_batch_sizes():
    with pytest.raises(ValueError, match="two different batch sizes"):
        dist.critical_batch([8, 8], [100, 100])


# ---- checkpoints -----------------------------------------------------------------

def adam(model):
    return md.optim.Adam(model.parameters(), lr=0.05)


RESUMABLE = {
    "sync": (dist.Synchronous, sgd, {}),
    "sync, fp16": (dist.Synchronous, adam, {"compress": "fp16"}),
    "local": (dist.LocalSGD, adam, {"sync_every": 4}),
    "diloco": (dist.DiLoCo, adam, {"sync_every": 4}),
    "gossip": (dist.Gossip, lambda model: sgd(model, momentum=0.9), {"graph": "exponential"}),
}


@pytest.mark.parametrize("name", RESUMABLE)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name, tmp_path):
    kind, optimizer, options = RESUMABLE[name]

    def rank(group, stop=False):
        model = Vector(parameters(group.rank))
        train = kind(model, optimizer(model), **options, group=group)
        trained(train, group.rank, 10)
        if stop:                                    # in the middle between two meetings
            state = {"model": model.state_dict(), "optimizer": train.optimizer.state_dict(),
                     "strategy": train.state_dict()}
            if group.rank == 0:
                md.save(state, tmp_path / "state")
            group.barrier()
            state = md.load(tmp_path / "state")
            model = Vector(np.zeros(SIZE))
            train = kind(model, optimizer(model), **options, group=group)
            model.load_state_dict(state["model"])
            train.optimizer.load_state_dict(state["optimizer"])
            train.load_state_dict(state["strategy"])
        return trained(train, group.rank, 13, 10, finish=True).tobytes()
    assert on_ranks(3, lambda group: rank(group, True)) == on_ranks(3, rank)


def test_asynchronous_gossip_goes_on_from_what_it_loads(tmp_path):
    """Nobody averages with what a rank had before."""
    saved = parameters(7)

    def rank(group, steps=0):
        model = Vector(saved if steps == 0 else parameters())
        train = dist.Gossip(model, sgd(model, lr=0.0), "ring", True, group)
        train.checkpoint(tmp_path / "state", every=1)
        data = md.utils.data.TensorDataset(md.ones(4 + 4 * steps, SIZE, dtype=md.float64))
        for x, in train.batches(md.utils.data.DataLoader(data, 4)):
            (x @ model.w).mean().backward()
            train.step()
        train.finish()
        return whole(model)
    on_ranks(3, rank)
    assert_equal(on_ranks(3, lambda group: rank(group, 5)), [saved] * 3)


@pytest.mark.parametrize("name", [*RESUMABLE, "sync, shards", "downpour"])
@pytest.mark.parametrize("stop", [3, 6])
def test_train_checkpoint_keeps_every_strategy(name, stop, tmp_path):
    """Ended in the first epoch and in the second; kept two steps before, or one."""
    kind, optimizer, options = (RESUMABLE | {
        "sync, shards": (dist.Synchronous, adam, {"shards": 8}),
        "downpour": (dist.Downpour, sgd, {"n_push": 2, "n_fetch": 3})})[name]
    size = {"sync, shards": 2, "downpour": 1}.get(name, 3)
    data = md.utils.data.TensorDataset(md.tensor(np.random.default_rng(0).standard_normal(
        (30, SIZE))))

    def rank(group, path, stop=None):
        md.manual_seed(0)
        group = group if size > 1 else None         # then a server is in this process
        model = Vector(parameters(group.rank if group else 0))
        train = kind(model, optimizer(model), **options, group=group)
        train.checkpoint(tmp_path / path, every=5 if stop == 6 else 1)
        loader = md.utils.data.DataLoader(data, 8, shuffle=True)
        for _ in train.epochs(2):
            for x, in train.batches(loader):
                train.zero_grad()
                ((x @ model.w - md.rand(1, dtype=md.float64)) ** 2).mean().backward()
                train.step()
                if train.steps == stop:
                    return None
        train.finish()
        return whole(model).tobytes()
    never = on_ranks(size, lambda group: rank(group, "never"))
    on_ranks(size, lambda group: rank(group, "resumed", stop))
    assert md.load(tmp_path / "resumed")["run"]["steps"] == stop - 1
    assert on_ranks(size, lambda group: rank(group, "resumed")) == never


@pytest.mark.parametrize("options", [
    {}, {"n_push": 3, "n_fetch": 4}, {"rule": lambda: md.ServerAdagrad(0.1)},
    {"rule": lambda: md.ServerAdagrad(0.1), "n_push": 4, "n_fetch": 3, "compress": "bf16"}],
    ids=["plain", "seldom", "adagrad", "adagrad, seldom, bf16"])
@pytest.mark.parametrize("finished", [False, True])
def test_downpour_alone_resumes_exactly(options, finished, tmp_path):
    def make(start):
        model = Vector(start)
        made = {k: v() if k == "rule" else v for k, v in options.items()}
        return dist.Downpour(model, sgd(model), **made)
    never, first = make(parameters()), make(parameters())
    trained(never, 0, 10, finish=finished), trained(first, 0, 10, finish=finished)
    md.save({"model": first.model.state_dict(), "strategy": first.state_dict()}, tmp_path / "s")
    state = md.load(tmp_path / "s")
    second = make(np.zeros(SIZE))
    second.model.load_state_dict(state["model"])
    second.load_state_dict(state["strategy"])
    if not finished:
        assert trained(second, 0, 9, 10).tobytes() == trained(never, 0, 9, 10).tobytes()
    else:
        third = make(np.zeros(SIZE))        # twice the same from one checkpoint
        third.model.load_state_dict(state["model"])
        third.load_state_dict(state["strategy"])
        assert trained(second, 0, 9, 10).tobytes() == trained(third, 0, 9, 10).tobytes()
        np.testing.assert_array_equal(second._wire.server.values,
                                      third._wire.server.values)


@pytest.mark.parametrize("kind", ["downpour", "ssp"])
def test_servers_get_back_what_they_remembered(kind):
    state = {}

    def rank(transport):
        if transport.node >= 2:
            return md.serve(transport, servers[transport.node - 2])
        group = dist.ProcessGroup(transport, 2)
        model = Vector(parameters())
        rule = md.ServerAdagrad(0.1)
        train = (dist.Downpour if kind == "downpour" else dist.StaleSynchronous)(
            model, sgd(model), rule=rule, group=group)
        if state:
            model.load_state_dict(state["model"])
            train.load_state_dict(state["strategy"])
            train.zero_grad()       # now the servers are told
            group.barrier()
            start = [(server.values.copy(), server.rule.squares.copy()) for server in servers]
            group.barrier()
            trained(train, group.rank, 5, 10, finish=True)
            return start
        trained(train, group.rank, 10)
        group.barrier()
        if group.rank == 0:
            saved.update(model=model.state_dict(), strategy=train.state_dict())
        group.barrier()
        train.finish()
    for _ in range(2):
        saved, servers = {}, [md.ParameterServer(2) for _ in range(2)]
        with cluster(2, 2) as nodes:
            results = run(nodes, rank)
        if not state:
            state = saved
    for i, (values, squares) in enumerate(results[0]):
        part = slice(*md.share_of(SIZE, i, 2))
        own = md.load(io.BytesIO(state["strategy"]["ranks"][0].tobytes()))
        np.testing.assert_array_equal(values, own["servers"][0][part])
        np.testing.assert_array_equal(squares, own["servers"][1][part])
        assert squares.min() > 0


def test_loading_into_servers_that_have_trained_is_refused():
    model = Vector(parameters())
    train = dist.Downpour(model, sgd(model))
    trained(train, 0, 1)
    with pytest.raises(RuntimeError, match="before the first step"):
        train.load_state_dict(train.state_dict())
