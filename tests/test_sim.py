"""The simulated cluster: its times against formulas, its messages against the contract, its
runs against themselves and against real transports, and strategies under thousands of faults."""
import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import minidist as md
import minidist.distributed as dist
import minidist_transports as mt
from memory import on_ranks
from minidist import nn
from minidist.utils.data import DataLoader, TensorDataset
from minidist_transports import protocol as p
from minidist_transports.cluster import Cluster
from minidist_transports.sim import Killed, World

MINIDIST = Path(md.__file__)
FRAME = p.HEADER.size + p.MESSAGES[p.OPAQUE].struct.size        # a message without payload
IDEAL = {"latency": 0.0, "bandwidth": 1e30, "message": 0.0}     # costs nothing at all


def simulated(work, workers, servers=0, settings=(), **config):
    """work(transport) on every node: the results, and the world they lived in."""
    world = World(Cluster.of(dict(settings)), workers, servers)
    results = [None] * world.size

    def body(node):
        def live():
            results[node] = work(mt.open("sim", mt.Config(
                node=node, workers=workers, servers=servers, **config,
                role="worker" if node < workers else "server")))
        return live
    world.run([body(node) for node in range(world.size)], timeout=100.0)
    for node in world.nodes:
        if node.error is not None:
            raise node.error
    return results, world


def opaque(tag=0):
    return p.OPAQUE, (tag,)


# ---- the contract of a transport ----------------------------------------------------------

def test_messages_arrive_whole_in_order_once():
    sizes = [0, 1, 1000, 300_000, p.MAX_FRAME + 5, 0, 7]

    def work(node):
        others = [peer for peer in range(3) if peer != node.node]
        rng = np.random.default_rng(node.node)
        for i, size in enumerate(sizes):
            data = rng.integers(0, 256, size, "u1")
            for peer in others:
                node.send(peer, *opaque(i), [data[:size // 3], data[size // 3:]])
            data[:] = 0                         # what was sent is not ours to change any more
        for peer in others:
            rng = np.random.default_rng(peer)
            for i, size in enumerate(sizes):
                message = node.recv(peer)
                assert message[:2] == opaque(i) and message.peer == peer
                assert bytes(message.payload) == rng.integers(0, 256, size, "u1").tobytes()
        return node.stats
    link = {"jitter": 0.1, "latency": 0.001}    # jitter far longer than the messages
    for stats in simulated(work, 3, settings={"link": link})[0]:
        assert stats["messages_sent"] == stats["messages_received"] == 2 * len(sizes)
        assert stats["bytes_sent"] == stats["bytes_received"] > 2 * sum(sizes)


def test_channels_exchange_and_landing():
    def work(node):
        peer, got = 1 - node.node, np.zeros(100, np.float32)
        for channel in (2, 0, 1):
            node.send(peer, *opaque(channel), channel=channel)
        tags = [node.recv(peer, channel=channel).fields[0] for channel in (0, 1, 2)]
        landed = []
        mine = np.full(100, node.node + 1, np.float32)
        node.exchange(peer, *opaque(), mine, peer, got, landed=lambda *part: landed.append(part))
        assert (got == peer + 1).all() and landed[-1][1] == 400
        return tags
    assert simulated(work, 2)[0] == [[0, 1, 2]] * 2


def test_recv_any_serves_everybody_and_tells_goodbyes():
    def work(node):
        if node.node:
            for _ in range(5):
                node.send(0, *opaque(node.node), channel=2)
            return None
        node.recv(1, channel=2), node.recv(2, channel=2)
        node._compute(1.0)                      # all is here now
        peers = [node.recv_any(channel=2).peer for _ in range(8)]
        ends = [node.recv_any(channel=2) for _ in range(2)]
        return peers, [(end.kind, end.peer) for end in ends]
    peers, ends = simulated(work, 3)[0][0]
    assert peers in ([1, 2] * 4, [2, 1] * 4)
    assert sorted(ends) == [(p.GOODBYE, 1), (p.GOODBYE, 2)]


def test_a_timeout_is_virtual_and_says_who_waits_for_whom():
    def work(node):
        if node.node == 0:
            node.doing = "all_reduce #3"
            with pytest.raises(mt.Timeout, match=r"rank 0 has waited 5000 s for rank 1 in all_red"):
                node.recv(1, timeout=5000.0)
            return node.clock()
        return node.recv(0, timeout=6000.0) if node.node == 2 else node._compute(7000.0)
    with pytest.raises(mt.PeerLost, match="rank 0 lost .it said goodbye. while rank 2 waited"):
        simulated(work, 3)


def test_the_wrong_length_is_an_error_on_both_sides():
    def work(node):
        with pytest.raises(mt.ProtocolError, match="rank 0 sent 8 bytes.*rank 1 expects 12") as e:
            if node.node == 0:
                node.send(1, *opaque(), [bytes(8)])
                node.recv(1)
            else:
                node.recv(0, into=np.zeros(3, np.float32))
        return e.value.code
    assert simulated(work, 2)[0] == [p.CODES["MISMATCH"]] * 2


def test_who_fails_tells_all_and_who_has_left_is_known():
    def work(node):
        if node.node == 1:
            raise ZeroDivisionError("oops")
        with pytest.raises(mt.PeerLost, match="rank 1 lost .gave up: ZeroDivisionError: oops") as e:
            node.recv(3 - node.node if node.node else 2)    # not from rank 1
        return e.value.peer
    with pytest.raises(ZeroDivisionError):
        simulated(work, 4)

    def leave(node):
        if node.node == 1:
            return node.close()
        with pytest.raises(mt.PeerLost, match="rank 1 lost .it said goodbye"):
            node.recv(1)
        node.close()
        with pytest.raises(mt.TransportError, match="closed"):
            node.send(1, *opaque())
    simulated(leave, 2)


def test_outside_a_simulation_it_says_how_to_start_one():
    with pytest.raises(RuntimeError, match="--transport sim"):
        mt.open("sim", mt.Config())


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_collectives(size):
    def work(transport):
        group = md.ProcessGroup(transport, size)
        x = np.arange(7.0) + group.rank
        group.all_reduce(x)
        large = np.full(100_000, group.rank, np.float32)
        group.all_reduce(large, dist.ReduceOp.MAX)
        rows = np.zeros((size, 3))
        group.all_gather(list(rows), np.full(3, float(group.rank)))
        part = np.zeros(2)
        group.reduce_scatter(part, list(np.arange(size * 2.0).reshape(size, 2)))
        y = np.array([group.rank])
        group.broadcast(y, size - 1)
        group.barrier()
        return x, large[[0, -1]], rows[:, 0], part, y
    for rank, (x, large, rows, part, y) in enumerate(simulated(work, size)[0]):
        np.testing.assert_array_equal(x, size * np.arange(7) + size * (size - 1) / 2)
        assert (large == size - 1).all() and y == size - 1
        np.testing.assert_array_equal(rows, np.arange(size))
        np.testing.assert_array_equal(part, size * np.array([2 * rank, 2 * rank + 1]))


# ---- time ------------------------------------------------------------------------------------
# The oracle is the LogP family of models (Culler et al. 1993, Alexandrov et al. 1995): a message
# costs o at either end, travels L, and a port passes G bytes a second.

LINK = {"latency": 0.01, "bandwidth": 1e6, "message": 0.001, "buffer": 1e12}


def test_a_round_trip_takes_what_the_model_says():
    size = 50_000

    def work(node):
        node.exchange(1 - node.node, *opaque(), b"", 1 - node.node, bytearray())    # connects
        node._compute(10.0 - node.clock())
        if node.node:
            node.send(0, *opaque(), [node.recv(0).payload])
            return None
        node.send(1, *opaque(), [bytes(size)])
        node.recv(1)
        return node.clock() - 10.0
    expected = 2 * (0.001 + 0.01 + (size + FRAME) / 1e6 + 0.001)
    assert simulated(work, 2, settings={"link": LINK})[0][0] == pytest.approx(expected, rel=1e-12)


def test_incast_the_servers_port_passes_one_after_the_other():
    workers, size = 50, 100_000

    def work(node):
        if node.node < workers:
            node._compute(10.0 - node.clock())
            node.send(workers, *opaque(), [bytes(size)])
            return None
        for _ in range(workers):
            while node.recv_any().kind == p.GOODBYE:
                pass
        return node.clock() - 10.0
    settings = {"link": LINK, "server": {"message": 0.0}}
    took = simulated(work, workers, 1, settings)[0][workers]
    # Rank 0 is connected already; behind its message all others pass through one port.
    assert took == pytest.approx(0.001 + 0.01 + workers * (size + FRAME) / 1e6, rel=1e-9)


def test_both_ways_may_share_the_bandwidth():
    def work(node):
        node.exchange(1 - node.node, *opaque(), b"", 1 - node.node, bytearray())    # connects
        node._compute(10.0 - node.clock())
        place = bytearray(100_000)
        node.exchange(1 - node.node, *opaque(), bytes(100_000), 1 - node.node, place)
        return node.clock() - 10.0
    took = [simulated(work, 2, settings={"link": {**LINK, "duplex": duplex}})[0][0]
            for duplex in (True, False)]
    assert took[1] - took[0] == pytest.approx(0.1, abs=0.011)       # of latency before it shares


def test_send_returns_when_the_rest_fits_the_buffer():
    def work(node):
        if node.node:
            return node.recv(0) and None
        node.send(1, *opaque(), [bytes(1_000_000)])
        return node.clock()
    ends = [simulated(work, 2, settings={"link": {**LINK, "buffer": buffer}})[0][0]
            for buffer in (0, 250_000)]
    assert ends[0] - ends[1] == pytest.approx(0.25)


def test_hosts_share_a_port_and_are_near():
    def work(node):
        if node.node < 2:
            node._compute(10.0 - node.clock())
            node.send(2, *opaque(), [bytes(100_000)])
            return None
        for peer in range(2):
            node.recv(peer)
        return node.clock() - 10.0
    free = {"local": IDEAL, "link": {**LINK, "message": 0.0}}
    apart = simulated(work, 3, settings=free)[0][2]
    near = simulated(work, 3, settings={**free, "hosts": [[1, 2]]})[0][2]
    together = simulated(work, 3, settings={**free, "hosts": [[0, 1, 2]]})[0][2]
    assert apart > near == pytest.approx(0.01 + 0.1, abs=0.001) and together < 1e-12


def test_computing_takes_what_was_asked_for():
    def work(node):
        return [node.work(10) for _ in range(4000)]
    compute = {"step": 0.01, "sample": 0.001, "speeds": [1.0, 0.5]}
    even, slow = simulated(work, 2, settings={"compute": compute})[0]
    assert set(even) == {0.02} and set(slow) == {0.04}
    noisy = np.array(simulated(work, 2, settings={"compute": {**compute, "noise": 0.5}})[0][0])
    logs = np.log(noisy / 0.02)                 # normal, of mean -s*s/2 and deviation s
    assert abs(logs.mean() + 0.125) < 0.03 and abs(logs.std() - 0.5) < 0.03
    rare, _ = simulated(work, 2, settings={"compute": {**compute, "straggle": 0.1}})[0]
    assert 0.08 < np.mean(np.array(rare) == 0.2) < 0.12


# ---- the same code, the same bits ------------------------------------------------------------

def data_and_model(seed=0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 6)).astype(np.float32)
    y = (x[:, :3].sum(axis=1) > 0).astype(np.int64)
    md.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    return TensorDataset(md.tensor(x), md.tensor(y)), model


def training(kind=dist.Synchronous, epochs=3, batch=24, lr=0.1, seen=None, **options):
    def work(group):
        data, model = data_and_model(group.rank)
        optimizer = md.optim.SGD(model.parameters(), lr=lr)
        train = kind(model, optimizer, group=group, **options)
        for _ in range(epochs):
            for x, y in train.batches(DataLoader(data, batch, shuffle=True,
                                                 generator=md.Generator().manual_seed(5))):
                train.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                train.step()
                if seen is not None:
                    seen(group.rank, train.steps, weights(model))
        train.finish()
        return weights(model)
    return work


def weights(model):
    return np.concatenate([x.detach().numpy().reshape(-1) for x in model.parameters()])


def serving(work, workers, serve=md.ParameterServer):
    """Workers do that, servers serve."""
    def node(transport):
        if transport.node < workers:
            return work(md.ProcessGroup(transport, workers))
        return md.serve(transport, serve(workers))
    return node


@pytest.mark.parametrize("size", [2, 5])
def test_synchronous_training_has_the_bits_of_any_transport(size):
    real = on_ranks(size, training())
    for one, other in zip(simulated(serving(training(), size), size)[0], real, strict=True):
        np.testing.assert_array_equal(one, other)


SCRIPT = """
import os, sys
import numpy as np
import minidist as md, minidist.distributed as dist
sys.path.append(os.path.dirname(__file__))
from minidist.utils.data import DataLoader, TensorDataset
dist.init_process_group()
data = TensorDataset(md.randn(64, 4), md.randint(2, (64,)))
model = md.nn.Linear(4, 2)
make = dist.Downpour if sys.argv[1] == "downpour" else dist.Synchronous
train = make(model, md.optim.SGD(model.parameters(), lr=0.01))
for _ in range(5):
    for x, y in train.batches(DataLoader(data, 32)):
        train.zero_grad()
        md.nn.functional.cross_entropy(model(x), y).backward()
        train.step()
train.finish()
print(os.environ["LOCAL_RANK"], __name__, float(model.weight.sum()).hex())
"""


def minidist(*words, cwd=None, **env):
    return subprocess.run([sys.executable, MINIDIST, *map(str, words)], capture_output=True,
                          text=True, timeout=100, cwd=cwd, env=os.environ | env)


@pytest.mark.parametrize("strategy, servers", [("sync", 0), ("downpour", 1)])
def test_one_seed_is_one_run_event_for_event(tmp_path, strategy, servers):
    (tmp_path / "script.py").write_text(SCRIPT)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("[compute]\nnoise = 0.5\n[link]\njitter = 0.001\n")

    def run(seed, hashes):
        done = minidist("launch", "--transport", "sim", "--nproc-per-node", 4, "--servers",
                        servers, "--cluster", cluster, "--assume", f"seed={seed}",
                        tmp_path / "script.py", strategy, PYTHONHASHSEED=hashes)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^\[(\d)\] (\d) __main__ (.*)$", done.stdout, re.M)
        assert sorted(int(a) for a, _, _ in found) == [0, 1, 2, 3]
        assert all(a == b for a, b, _ in found)
        assert len({end for _, _, end in found}) == 1
        told = re.sub(r" in \d+\.\d s;", "", done.stdout)       # the one real time
        return told
    first = run(3, "1")
    assert re.search(r"run [0-9a-f]{8}\nvirtual time 0\.\d+ s,", first)
    assert ("staleness of 40 pushes" in first) == (strategy == "downpour")
    assert run(3, "2") == first != run(4, "1")


def test_launch_calls_a_function_on_simulated_workers(capsys):
    before = os.environ, sys.stdout, md.get_num_threads()

    def work(scale, box):
        box.append(1)
        dist.init_process_group()
        x = md.ones(3) * scale * int(os.environ["RANK"])
        dist.all_reduce(x)
        print("rank", dist.get_rank(), end=" ")
        print("of", os.getenv("WORLD_SIZE"))
        assert not sys.stdout.isatty() and len(os.environ) > 5
        return x.tolist(), len(box), md.rand(1).item()
    box = []
    results = md.launch(work, args=(2.0, box), workers=3, transport="sim",
                        cluster={"link": {"latency": 1.0}})
    assert [x for x, _, _ in results] == [[6.0] * 3] * 3
    assert box == [] and {n for _, n, _ in results} == {1}      # each has arguments of its own
    assert len({r for _, _, r in results}) == 3                 # and random numbers
    said = capsys.readouterr().out
    assert "[2] rank 2 of 3\n" in said and re.search(r"virtual time \d+\.\d{3} s", said)
    assert (os.environ, sys.stdout, md.get_num_threads()) == before
    assert "RANK" not in os.environ and not dist.is_initialized()


def test_a_failing_rank_is_the_root_cause(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent("""
        import sys
        import minidist.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 2:
            raise ValueError("oops")
        dist.barrier()
        """))
    done = minidist("launch", "--transport", "sim", "--nproc-per-node", "4",
                    tmp_path / "script.py")
    assert done.returncode == 1
    assert done.stderr.endswith('ValueError("oops")\nValueError: oops\n')
    assert "root cause: rank 2 at 0.00" in done.stderr and "sim.py" not in done.stderr
    assert len(re.findall(r"^\[rank [013]\] PeerLost", done.stderr, re.M)) == 3
    done = minidist("launch", "--transport", "sim", "--no-python", "/bin/true")
    assert done.returncode == 2 and "Python scripts" in done.stderr


def test_train_on_many_simulated_workers():
    done = minidist("train", "--transport", "sim", "--workers", 64, "--model", "mlp", "--data",
                    "digits", "--epochs", 2, "--batch-size", 720, "--strategy", "downpour")
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout and "staleness of 256 pushes" in done.stdout
    assert "idle share of a worker: least" in done.stdout
    done = minidist("train", "--assume", "seed=1", "--workers", 2)
    assert done.returncode == 2 and "--transport sim" in done.stderr


@pytest.mark.parametrize("text, words", [
    ("link.latncy = 1", "no link.latncy; is latency meant"),
    ("link = 3", "link is 3; it must be a table"),
    ("link.latency = -1", "link.latency is -1; it must be a number, at least 0"),
    ("link.bandwidth = 0", "must be a number, above 0"),
    ("link.duplex = 1", "link.duplex is 1; it must be true or false"),
    ("compute.speeds = []", "compute.speeds is empty"),
    ("seed = 1.5", "seed is 1.5; it must be a whole number"),
    ("fault = [{kind = 'crash', at = 1}]", "fault lacks nodes"),
    ("fault = [{kind = 'flood', at = 1, nodes = [0]}]", "one of crash, power, pause"),
    ("fault = [{kind = 'crash', at = 1, nodes = [4]}]", "node 4: 3 workers and 1 servers"),
    ("hosts = [[0, 1], [1]]", "a node has one machine"),
    ("a b", "no TOML"),
])
def test_what_is_wrong_with_a_cluster_is_named(tmp_path, text, words):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        World(Cluster.read(str(path)), 3, 1)


def test_the_documented_file_is_read_and_settings_win():
    from minidist_transports import cluster as module
    text = re.search(r"left out:\n\n(.*?)\n\nNodes", module.__doc__, re.S).group(1)
    text = textwrap.dedent(text)
    found = Cluster.of(module.parsed(text, "the example"))
    assert found.hosts == ((0, 2), (1,)) and found.fault[0].nodes == (3,)
    shown = {f.name for f in dataclasses.fields(module.Compute)} | {
        f.name for f in dataclasses.fields(module.Link)}
    assert all(re.search(rf"^{name} = ", text, re.M) for name in shown)
    assert Cluster.read(None, ["link.latency=2", "link.jitter=1"]).server.latency == 2.0


@pytest.mark.parametrize("workers", [8, 64])
def test_an_event_costs_the_same_however_many_there_are(workers):
    """Events and queue length for each message, counted: no time decides."""
    longest = 0

    def work(node):
        nonlocal longest
        if node.node == workers:
            for _ in range(workers * 20):
                while (message := node.recv_any(channel=2)).kind == p.GOODBYE:
                    pass
                node.send(message.peer, *opaque(), channel=2)
            return
        for _ in range(20):
            node.work(1)
            node.send(workers, *opaque(), channel=2)
            node.recv(workers, channel=2)
            longest = max(longest, len(node.world.events))
    _, world = simulated(work, workers, 1, {"compute": {"noise": 1.0}})
    messages = workers * 40
    assert world.count < 8 * messages and longest < 8 * workers


def test_a_thread_that_is_killed_ends_quietly():
    def work(node):
        try:
            node._compute(10.0)
        finally:
            with pytest.raises(Killed):         # a cleanup that would speak cannot
                node.send(0, *opaque())
    crash = {"kind": "crash", "at": 1.0, "nodes": [1]}
    _, world = simulated(lambda node: work(node) if node.node else None, 2,
                         settings={"fault": [crash]})
    assert world.nodes[1].ended == 1.0 and world.nodes[1].error is None


def test_calibrate_measures_a_cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    done = minidist("calibrate", "--transport", "pipe", "--batch-size", 64, "--out", path, "--",
                    "--model", "mlp", "--data", "digits", "--epochs", 1)
    assert done.returncode == 0, done.stderr
    found = Cluster.read(str(path))
    assert found.compute.step + found.compute.sample > 0
    assert found.link.message > 0 and found.link.bandwidth > 1e5
    done = minidist("train", "--model", "mlp", "--data", "digits", "--epochs", 1, "--workers", 2,
                    "--transport", "sim", "--cluster", path)
    assert done.returncode == 0 and "virtual time" in done.stdout, done.stderr
    done = minidist("calibrate", "--transport", "sim")
    assert done.returncode == 2 and "cannot be measured" in done.stderr
    done = minidist("calibrate", "--", "--model", "none")
    assert done.returncode == 2 and "'none'" in done.stderr
