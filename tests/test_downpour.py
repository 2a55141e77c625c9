"""Downpour: algorithm 1 of DistBelief, exactly-once pushes, and what happens when workers go."""
import collections
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
import minidist_transports as mt
from memory import cluster, run
from minidist import Packet
from minidist_transports import training

SIZE = 5                                    # parameters of the least-squares problem below


def gradient(w, worker, step):
    """Of some smooth function that differs from worker to worker and step to step."""
    a = np.random.default_rng([worker, step]).standard_normal((3, SIZE))
    return a.T @ (a @ w - 1) / 3


class Machines:
    """Workers and servers joined by a network that delivers at once, in order."""

    def __init__(self, workers, servers=1, rule=None, size=SIZE, warm_start=0, gather=0, bound=None,
                 **options):
        self.servers = {workers + k: md.ParameterServer(workers) for k in range(servers)}
        slices = {node: md.share_of(size, k, servers) for k, node in enumerate(self.servers)}
        start = np.linspace(-1, 1, size)
        self.workers = [md.DownpourWorker(rank, start.copy(), slices, **options)
                        for rank in range(workers)]
        settings = {"gather": gather} if gather else {} if bound is None else {"bound": bound}
        for worker in self.workers:
            self.send(worker.rank, worker.on_start(rule or md.ServerSGD(0.1),
                                                   warm_start=warm_start, **settings))

    def send(self, sender, packets):
        pending = collections.deque((sender, packet) for packet in packets)
        while pending:
            sender, packet = pending.popleft()
            machine = self.servers.get(packet.peer) or self.workers[packet.peer]
            answers = machine.on_message(packet.kind, sender, *packet[2:])
            pending.extend((packet.peer, answer) for answer in answers)

    def values(self):
        return np.concatenate([server.values for server in self.servers.values()])


# ---- the algorithm ---------------------------------------------------------------

def algorithm_1(schedule, n_push, n_fetch, alpha, rate, adagrad):
    """DistBelief's client and server as the paper prints them, one line after the other."""
    w = np.linspace(-1, 1, SIZE)
    squares = np.zeros(SIZE)
    local = [w.copy() for _ in range(3)]
    accrued = [np.zeros(SIZE) for _ in range(3)]
    step = [0, 0, 0]

    def push(i):
        nonlocal w, squares
        if adagrad:
            squares = squares + accrued[i] ** 2
            for j in range(SIZE):
                if squares[j] > 0:
                    w[j] -= rate / squares[j] ** 0.5 * accrued[i][j]
        else:
            w = w - rate * accrued[i]
        accrued[i] = np.zeros(SIZE)

    for i in schedule:
        if step[i] % n_fetch == 0:
            local[i] = w.copy()
        g = gradient(local[i], i, step[i])
        accrued[i] = accrued[i] + g
        local[i] = local[i] - alpha * g
        if step[i] % n_push == 0:
            push(i)
        step[i] += 1
    for i in range(3):                      # the flush, which the paper leaves out
        push(i)
    return w, local


@pytest.mark.parametrize("n_push, n_fetch", [(1, 1), (1, 4), (3, 1), (4, 2), (2, 5)])
@pytest.mark.parametrize("adagrad", [False, True], ids=["sgd", "adagrad"])
@pytest.mark.parametrize("servers", [1, 3])
def test_three_workers_equal_algorithm_1(n_push, n_fetch, adagrad, servers):
    schedule = np.random.default_rng(7).integers(0, 3, 50)
    rule = md.ServerAdagrad(0.3) if adagrad else md.ServerSGD(0.05)
    machines = Machines(3, servers, rule, n_push=n_push, n_fetch=n_fetch)
    for i in schedule:
        worker = machines.workers[i]
        step = worker.clock
        machines.send(i, worker.on_step())
        g = gradient(worker.parameters, i, step)
        packets = worker.on_gradient(g, samples=2)
        worker.parameters -= 0.02 * g
        machines.send(i, packets)
    local_before = [worker.parameters.copy() for worker in machines.workers]
    for worker in machines.workers:
        machines.send(worker.rank, worker.on_finish())
    w, local = algorithm_1(schedule, n_push, n_fetch, 0.02, 0.3 if adagrad else 0.05, adagrad)
    for found, expected in zip(local_before, local):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(machines.values(), w, rtol=0, atol=1e-12)
    for worker in machines.workers:         # all end with the same parameters
        np.testing.assert_array_equal(worker.parameters, machines.values())
    assert all(server.samples == 2 * len(schedule) and server.done
               for server in machines.servers.values())


def test_adagrad_leaves_alone_what_never_had_a_gradient():
    values = np.ones(3)
    rule = md.ServerAdagrad(0.5)
    with np.errstate(all="raise"):
        rule.apply(values, np.array([0.0, 2.0, -1e-3]))
        rule.apply(values, np.array([0.0, 0.0, 0.0]))
    np.testing.assert_allclose(values, [1, 0.5, 1.5])


def test_the_flush_sends_what_is_accrued():
    machines = Machines(1, rule=md.ServerSGD(1.0), n_push=4)
    start = machines.values()
    worker = machines.workers[0]
    for _ in range(7):                      # pushes after steps 0 and 4; two gradients are left
        machines.send(0, worker.on_gradient(np.ones(SIZE), 1))
    np.testing.assert_allclose(machines.values(), start - 5)
    machines.send(0, worker.on_finish())
    np.testing.assert_allclose(machines.values(), start - 7)


# ---- D38: staleness is measured --------------------------------------------------

def test_D38_staleness_of_each_push():
    machines = Machines(2, n_fetch=100)
    slow, quick = machines.workers
    for _ in range(3):
        machines.send(1, quick.on_gradient(np.ones(SIZE), 1))
    machines.send(0, slow.on_gradient(np.ones(SIZE), 1))
    assert slow.staleness == {3: 1}
    assert quick.staleness == {0: 1, 1: 1, 2: 1}        # it did not fetch in between
    assert machines.servers[2].staleness == {0: 1, 1: 1, 2: 1, 3: 1}


# ---- D39: the server before it is initialised, or initialised twice --------------

def test_D39_who_asks_early_waits_for_rank_0():
    server = md.ParameterServer(2)
    assert server.on_message(*Packet("PULL", 1, (0, 0, 2))) == []
    refusal, = server.on_message(*Packet("PUSH", 1, (1, 0, 0, 2, 1, "float64"), np.ones(2)))
    assert refusal.kind == "REFUSED" and refusal.fields[0] == "NOT_READY"
    refusal, = server.on_message(*init(1, [5.0, 5.0]))
    assert refusal.fields == ("UNEXPECTED", "INIT of rank 1: only rank 0 sends the initial "
                                            "parameters")
    answer, = server.on_message(*init(0, [1.0, 2.0]))
    assert answer[:3] == ("STATE", 1, (0, 0, 0, 2, "float64"))
    np.testing.assert_array_equal(answer.payload, [1, 2])
    assert server.on_message(*init(0, [9.0, 9.0])) == []     # sent twice: the first counts
    np.testing.assert_array_equal(server.values, [1, 2])


def test_nobody_waits_for_a_rank_0_that_is_lost_before_it_began():
    server = md.ParameterServer(2)
    server.on_message("PULL", 1, (0, 0, SIZE))
    assert not server.done
    server.on_lost(0)
    assert server.done                      # it leaves, and rank 1 hears of that


def test_after_rank_0_nobody_waits_for_who_never_asked():
    server = md.ParameterServer(3)
    server.on_message(*init(0, np.zeros(SIZE)))
    server.on_message("PULL", 1, (md.FINISHED, 0, SIZE))
    assert not server.done
    server.on_lost(0)
    assert server.gone == {0, 1, 2} and server.done


def init(rank, values, rule="sgd", **settings):
    settings = {"lr": 1.0, **settings}
    return Packet("INIT", rank, ("float64", 0, len(values), rule, settings), np.array(values))


@pytest.mark.parametrize("bad", [
    init(0, [1.0], rule="magic"), init(0, [1.0], momentum=0.9),
    init(0, [1.0])._replace(payload=b"1234567"), init(0, [1.0])._replace(payload=np.ones(2)),
    init(0, [1.0])._replace(fields=("bfloat16", 0, 1, "sgd", {"lr": 1.0})),
    Packet("TENSOR", 0, (0, "float32", ()))],
    ids=["rule", "setting", "bytes", "elements", "dtype", "kind"])
def test_D39_what_a_server_cannot_begin_with_is_refused(bad):
    server = md.ParameterServer(1)
    refusal, = server.on_message(*bad)
    assert refusal[:2] == ("REFUSED", 0) and refusal.fields[0] == "UNEXPECTED"
    assert server.on_message(*init(0, [1.0])) == [] and server.values is not None


@pytest.mark.parametrize("fields, payload", [
    ((1, 0, 0, 2, 1, "float64"), np.ones(2)),           # another range
    ((1, 0, 0, 3, 1, "float32"), np.ones(3)),           # another dtype
    ((1, 0, 0, 3, 1, "float64"), np.ones(1)),           # fewer bytes: would broadcast
], ids=["range", "dtype", "bytes"])
def test_a_push_that_does_not_fit_is_refused(fields, payload):
    server = md.ParameterServer(1)
    server.on_message(*init(0, [1.0, 2.0, 3.0]))
    refusal, = server.on_message(*Packet("PUSH", 0, fields, payload))
    assert refusal.fields[0] == "BAD_RANGE" and "this server has float64 0..3" in refusal.fields[1]
    np.testing.assert_array_equal(server.values, [1, 2, 3])
    with pytest.raises(RuntimeError, match="rank 0: server node 1 refused: PUSH of rank 0"):
        md.DownpourWorker(0, np.ones(3), {1: (0, 3)}).on_message(*refusal._replace(peer=1))


def test_a_pull_of_another_slice_is_refused():
    server = md.ParameterServer(1)
    server.on_message(*init(0, [1.0, 2.0, 3.0]))
    refusal, = server.on_message("PULL", 0, (0, 0, 2))
    assert refusal.kind == "REFUSED" and refusal.fields == (
        "BAD_RANGE", "PULL of rank 0: it asks for 0..2, this server has float64 0..3")
    assert [answer.kind for answer in server.on_message("PULL", 0, (0, 0, 3))] == ["STATE"]


def test_D8_a_push_that_is_not_finite_is_refused_and_counted():
    machines = Machines(1)
    worker, before = machines.workers[0], machines.values()
    machines.send(0, worker.on_gradient(np.array([1, np.nan, 1, 1, 1]), 4))
    np.testing.assert_array_equal(machines.values(), before)
    assert worker.rejected == machines.servers[1].rejected == 1
    machines.send(0, worker.on_gradient(np.ones(SIZE), 4))      # training goes on
    np.testing.assert_allclose(machines.values(), before - 0.1)
    assert machines.servers[1].samples == 4


# ---- warm start, and losing workers ----------------------------------------------

def test_warm_start_lets_rank_0_train_alone_first():
    machines = Machines(3, warm_start=2)
    first, second, _ = machines.workers
    assert second.waits_for("PULL") and not first.waits_for("PULL")
    for _ in range(2):
        assert second.waits_for("PULL")
        machines.send(0, first.on_gradient(np.ones(SIZE), 1))
    assert not second.waits_for("PULL")
    assert set(second.versions.values()) == {2}
    np.testing.assert_array_equal(second.parameters, machines.values())


def test_a_warm_start_ends_when_rank_0_ends():
    machines = Machines(2, warm_start=10)
    machines.send(0, machines.workers[0].on_finish())
    assert not machines.workers[1].waits_for("PULL")


def test_a_worker_needs_only_servers_that_owe_it_an_answer():
    machines = Machines(1, servers=2)
    worker = machines.workers[0]
    push = worker.on_gradient(np.ones(SIZE), 1)
    machines.send(0, push[:1])              # to node 1, which answers; node 2 has not heard yet
    worker.on_lost(1)
    with pytest.raises(RuntimeError, match="rank 0, step 1: server node 2 is gone and has not "
                                           "answered PUSH: killed"):
        worker.on_lost(2, ("killed",))


def test_the_end_waits_for_workers_but_not_for_lost_ones():
    machines = Machines(3)
    server = machines.servers[3]
    for rank in (0, 1):
        machines.send(rank, machines.workers[rank].on_gradient(np.ones(SIZE), 1))
        machines.send(rank, machines.workers[rank].on_finish())
    assert machines.workers[0].waits_for("PULL") and not server.done
    machines.send(3, server.on_lost(2))
    for rank in (0, 1):
        assert not machines.workers[rank].waits_for("PULL")
        np.testing.assert_array_equal(machines.workers[rank].parameters, server.values)
    assert server.done and server.version == 2


# ---- exactly once ----------------------------------------------------------------

@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), servers=st.integers(1, 2), n_push=st.integers(1, 3))
def test_an_acknowledged_push_counts_exactly_once(seed, servers, n_push):
    """Over a network that loses, doubles and reorders; integer gradients make any order exact."""
    chance = random.Random(seed)
    machines = Machines(2, servers, md.ServerSGD(1.0), size=3, n_push=n_push, n_fetch=2)
    start = machines.values()
    pushed, flying, now = np.zeros(3), [], 0.0
    left = {0: 6, 1: 6}                     # steps to do; None: finishing
    for _ in range(100_000):                # questions are asked again after 2, 4, 8, .. ticks
        now += 1
        for worker in machines.workers:
            packets = worker.on_tick(now)
            if not worker.waits_for("PUSH", "PULL") and left[worker.rank] is not None:
                if left[worker.rank] == 0:
                    left[worker.rank] = None
                    packets += worker.on_finish()
                else:
                    left[worker.rank] -= 1
                    g = np.array([float(chance.randrange(100)) for _ in range(3)])
                    pushed += g
                    packets += worker.on_gradient(g, 1) + worker.on_step()
            flying += [(worker.rank, packet) for packet in packets]
        for _ in range(chance.randrange(4)):
            if flying:
                sender, packet = flying.pop(chance.randrange(len(flying)))
                fate = chance.random()
                if fate < 0.2:
                    continue                # lost
                if fate < 0.4:
                    flying.append((sender, packet))     # and once more, some time later
                machine = machines.servers.get(packet.peer) or machines.workers[packet.peer]
                answers = machine.on_message(packet.kind, sender, *packet[2:])
                flying += [(packet.peer, answer) for answer in answers]
        if left == {0: None, 1: None} and not any(
                worker.waits_for("PUSH", "PULL") for worker in machines.workers):
            break
    else:
        pytest.fail("somebody waits for ever")
    np.testing.assert_array_equal(machines.values(), start - pushed)
    for worker in machines.workers:
        np.testing.assert_array_equal(worker.parameters, machines.values())


def test_a_restarted_worker_is_not_taken_for_its_echo():
    server = md.ParameterServer(1)
    server.on_message(*init(0, [0.0]))
    for incarnation in (7, 3):              # drawn at random: a later one may be smaller
        worker = md.DownpourWorker(0, np.zeros(1), {1: (0, 1)}, incarnation=incarnation)
        push, = worker.on_gradient(np.ones(1), 1)
        for _ in range(2):
            answer, = server.on_message(*push._replace(peer=0))
            assert answer.kind == "APPLIED"
    np.testing.assert_array_equal(server.values, [-2])


def test_only_one_push_is_under_way():
    worker = md.DownpourWorker(1, np.zeros(2), {2: (0, 2)})
    worker.on_gradient(np.ones(2), 1)
    with pytest.raises(RuntimeError, match="one push at a time"):
        worker.on_gradient(np.ones(2), 1)


# ---- over a transport ------------------------------------------------------------

def problem(rank=0):
    model = md.nn.Linear(3, 2).to(np.float64)
    rng = np.random.default_rng(rank)       # ranks start differently; rank 0's start counts
    model.weight.data = md.tensor(rng.standard_normal((2, 3)))
    model.bias.data = md.tensor(rng.standard_normal(2))
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((22, 3)), rng.standard_normal((22, 2))
    data = md.utils.data.TensorDataset(md.tensor(x), md.tensor(y))
    return model, md.utils.data.DataLoader(data, batch_size=8)


def train_downpour(group, epochs=3, die_at=None, **options):
    model, loader = problem(group.rank if group else 0)
    train = md.Downpour(model, md.optim.SGD(model.parameters(), lr=0.02), group=group, **options)
    for epoch in range(epochs):
        for x, y in train.batches(loader):
            train.zero_grad()
            md.nn.functional.mse_loss(model(x), y).backward()
            train.step()
            if die_at == (epoch, train.steps):
                group.transport.abort("killed")
                return None
    train.finish()
    return train


def whole(model):
    return np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])


def test_alone_it_is_the_optimizer():
    found = train_downpour(None)
    model, loader = problem()
    optimizer = md.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            md.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    np.testing.assert_allclose(whole(found.model), whole(model), rtol=0, atol=1e-12)
    assert found.staleness == {0: 9}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("options", [
    {}, {"n_push": 3, "n_fetch": 2}, {"rule": md.ServerAdagrad(0.1), "warm_start": 4}],
    ids=["plain", "seldom", "adagrad, warm start"])
def test_all_workers_end_on_the_same_parameters(servers, options):
    with cluster(3, servers) as nodes:
        machines = [md.ParameterServer(3) for _ in range(servers)]

        def node(transport):
            if transport.node >= 3:
                return md.serve(transport, machines[transport.node - 3])
            return train_downpour(md.ProcessGroup(transport, 3), **options)
        trained = run(nodes, node)[:3]
    expected = np.concatenate([machine.values for machine in machines])
    for train in trained:
        assert whole(train.model).tobytes() == expected.tobytes()
    assert all(machine.samples == 3 * 22 for machine in machines)
    assert sum(sum(train.staleness.values()) for train in trained) == sum(
        machine.version for machine in machines)


def test_losing_a_worker_does_not_stop_the_others():
    with cluster(3, 1) as nodes:
        server = md.ParameterServer(3)

        def node(transport):
            if transport.node == 3:
                return md.serve(transport, server)
            die_at = (1, 4) if transport.node == 2 else None
            return train_downpour(md.ProcessGroup(transport, 3), die_at=die_at)
        first, second, lost, _ = run(nodes, node)
    assert lost is None and server.lost == {2}
    assert whole(first.model).tobytes() == whole(second.model).tobytes() == server.values.tobytes()
    assert server.version == 9 + 9 + 4


def test_a_loss_from_before_the_wire_was_there_is_an_error():
    class Failed:                           # as a transport that had needed all its nodes
        size, doing = 3, ""

        def recv_any(self, **options):
            raise mt.PeerLost(1, "connection closed")
    wire = training.Wire(Failed())
    assert wire.recv(1.0, "PULL")[:2] == ("LOST", 1)
    with pytest.raises(mt.PeerLost, match="connection closed"):     # else we would ask for ever
        wire.recv(1.0, "PULL")


def test_losing_a_server_is_an_error_that_names_it():
    with cluster(2, 1) as nodes:
        def node(transport):
            if transport.node == 2:
                server, wire = md.ParameterServer(2), training.Wire(transport)
                while server.version < 3:       # then it dies
                    wire.send(server.on_message(*wire.recv(None, "serving")))
                return transport.abort("out of memory")
            with pytest.raises(RuntimeError, match="node 2 (is gone .*out of memory|lost)"):
                train_downpour(md.ProcessGroup(transport, 2))
        run(nodes, node)


def test_without_servers_it_says_how_to_launch():
    def rank(transport):
        with pytest.raises(RuntimeError, match="launch with --servers 1 or more"):
            train_downpour(md.ProcessGroup(transport, 2))
    with cluster(2) as nodes:
        run(nodes, rank)


def test_what_downpour_cannot_do_it_says():
    model = md.nn.Linear(2, 2)
    optimizer = md.optim.SGD([{"params": [model.weight], "lr": 0.1},
                              {"params": [model.bias], "lr": 0.2}], lr=0.1)
    with pytest.raises(ValueError, match=r"learning rates \[0.1, 0.2\]: say which rule"):
        md.Downpour(model, optimizer)
    model.bias.data = model.bias.detach().double()
    with pytest.raises(TypeError, match=r"one dtype, found \['float32', 'float64'\]"):
        md.Downpour(model, optimizer, rule=md.ServerSGD(0.1))
