"""One contract suite for every transport that offers streams (and udp).

Nodes are threads of this process unless something has to be killed; then they
are processes. Tests of the case list carry its row in their name.
"""
import contextlib
import gc
import importlib.util
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import certificates
import minidist_transports as mt
from minidist_transports import launch
from minidist_transports import protocol as p

KEY = bytes(range(32))
APART = "sim", "mpi"    # no streams; no nodes in one process: test_sim.py, test_launchers.py
PLUGINS = [name for name in mt.BUILTIN if name not in APART
           and importlib.util.find_spec(f"minidist_transports.{name}") is not None
           and (name != "tls" or certificates.AVAILABLE or os.environ.get("CI"))]
every = pytest.mark.parametrize("name", PLUGINS)


# ---- a cluster in this process ---------------------------------------------------

def free_port(name):
    kind = socket.SOCK_DGRAM if name == "udp" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def configs(name, workers, servers=0, **settings):
    size = workers + servers
    settings = {"key": KEY, "start_timeout": 20.0, "timeout": 20.0, **settings}
    if name in launch.MESHES:
        way = launch.MESHES[name]
        pipes = [{} for _ in range(size)]
        for a in range(size):
            for b in range(a):
                (read_a, write_b), (read_b, write_a) = way(), way()
                pipes[a][b], pipes[b][a] = (read_a, write_a), (read_b, write_b)
        each = [{"pipes": ends} for ends in pipes]
    else:
        tls = certificates.certificate() if name == "tls" else None
        each = [{"master": ("127.0.0.1", free_port(name)), "tls": tls}] * size
    return [mt.Config(node=node, workers=workers, servers=servers,
                      role="worker" if node < workers else "server", **each[node], **settings)
            for node in range(size)]


def together(*works, patience=60.0):
    """Run each on a thread; their results. A hang is a failure."""
    results, threads = [None] * len(works), []

    def run(i, work):
        try:
            results[i] = work()
        except BaseException as error:      # noqa: BLE001 - handed to the test
            results[i] = error
    for i, work in enumerate(works):
        threads.append(threading.Thread(target=run, args=(i, work), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(patience)
        assert not thread.is_alive(), "a node hangs"
    return results


def values(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@contextlib.contextmanager
def cluster(name, workers=2, servers=0, **settings):
    nodes = values(together(*[lambda c=c: mt.open(name, c)
                              for c in configs(name, workers, servers, **settings)]))
    try:
        yield nodes
    finally:
        together(*[node.close for node in nodes])


def each(nodes, work):
    return together(*[lambda n=n: work(n) for n in nodes])


def opaque(tag=0):
    return p.OPAQUE, (tag,)


# ---- whole, in order, once ----------------------------------------------------------

@every
def test_messages_arrive_whole_in_order_once(name):
    sizes = [0, 1, 31, 32, 33, 1000, p.SCRATCH - 40, p.SCRATCH + 1, 300_000, p.MAX_FRAME + 5, 0, 7]

    def work(node):
        others = [peer for peer in range(3) if peer != node.node]
        rng = np.random.default_rng(node.node)
        for i, size in enumerate(sizes):
            data = rng.integers(0, 256, size, "u1")
            for peer in others:
                node.send(peer, *opaque(i), [data[:size // 3], data[size // 3:]])
        for peer in others:
            rng = np.random.default_rng(peer)
            for i, size in enumerate(sizes):
                message = node.recv(peer)
                assert message[:2] == opaque(i) and message.peer == peer
                assert bytes(message.payload) == rng.integers(0, 256, size, "u1").tobytes()
        return node.stats
    with cluster(name, 3) as nodes:
        for stats in values(each(nodes, work)):
            assert stats["messages_sent"] == stats["messages_received"] == 2 * len(sizes)
            assert stats["bytes_sent"] > 2 * sum(sizes)


@every
def test_thousands_of_small_messages_wait_until_somebody_asks(name):
    with cluster(name) as (a, b):
        def talk():
            for i in range(3000):
                a.send(1, *opaque(i), [b"x" * (i % 3)])

        def listen():
            time.sleep(0.2)
            for i in range(3000):
                message = b.recv(0)
                assert message.fields == (i,) and len(message.payload) == i % 3
        values(together(talk, listen))


@every
def test_channels_do_not_disturb_each_other(name):
    with cluster(name) as (a, b):
        for channel in (2, 0, 1):
            a.send(1, *opaque(channel), [b"x" * channel], channel=channel)
        assert [b.recv(0, channel=channel).fields[0] for channel in (0, 1, 2)] == [0, 1, 2]
        b.send(0, *opaque(9))
        assert a.recv(1).fields == (9,)


@every
def test_P10_mutual_sends_never_deadlock(name):
    size = 4 << 20 if name == "udp" else 24 << 20
    data = np.zeros(size, "u1")
    data[::4096] = 1

    def ring(node):
        node.send((node.node + 1) % 3, *opaque(), [data])
        assert np.array_equal(np.frombuffer(node.recv((node.node - 1) % 3).payload, "u1"), data)
    with cluster(name, 3) as nodes:
        values(each(nodes, ring))


@every
def test_all_nodes_dial_each_other_at_once_and_nobody_hears_of_it(name, caplog):
    def work(node):
        others = [peer for peer in range(5) if peer != node.node]
        for peer in others:
            node.send(peer, *opaque(node.node))
        return sorted(node.recv_any().peer for _ in others) == others
    with cluster(name, 5) as nodes:
        barrier = threading.Barrier(5)
        assert all(values(each(nodes, lambda n: (barrier.wait(), work(n))[1])))
        values(each(nodes, lambda n: n.close()))
    assert not caplog.records


@every
def test_received_into_the_callers_array(name):
    with cluster(name) as (a, b):
        for shape, dtype in [((3, 5), "f4"), ((), "f8"), ((0, 3), "f4"), ((1000, 1000), "f4")]:
            sent, into = np.full(shape, 2.5, dtype), np.zeros(shape, dtype)
            results = together(lambda x=sent: a.send(1, *opaque(), [x]),
                               lambda y=into: b.recv(0, into=y, timeout=10))
            message = values(results)[1]
            assert message.payload is into and np.array_equal(into, sent)
        # ... also when it was in the inbox first
        a.send(1, *opaque(1), [np.ones(10)])
        a.send(1, *opaque(2), [b""])
        time.sleep(0.1)
        into = np.zeros(10)
        assert b.recv(0, into=into).fields == (1,) and into.sum() == 10
        assert b.recv(0).fields == (2,)


@every
def test_P33_D9_zero_elements_travel(name):
    with cluster(name) as (a, b):
        empty = np.zeros((0, 3), "f4")
        into = np.ones((0, 5), "f4")
        work = [lambda: a.exchange(1, *opaque(), empty, 1, into, landed=lambda *_: 1 / 0),
                lambda: b.exchange(0, *opaque(), empty, 0, into)]
        for message in values(together(*work)):
            assert message.kind == p.OPAQUE


@every
@pytest.mark.parametrize("workers", [2, 3])
def test_exchange_lands_in_order_and_in_whole_elements(name, workers):
    n = 1_000_003 if name != "udp" else 200_003

    def work(node):
        to, source = (node.node + 1) % workers, (node.node - 1) % workers
        mine = np.full(n, node.node + 1, "f4")
        into, total, stops = np.zeros(n, "f4"), np.zeros(n, "f4"), [0]

        def landed(start, stop):
            assert start == stops[-1] < stop and (stop % 64 == 0 or stop == 4 * n)
            stops.append(stop)
            total[start // 4:stop // 4] += into[start // 4:stop // 4]
        for _ in range(3):
            stops[:] = [0]
            message = node.exchange(to, *opaque(7), mine, source, into, landed=landed)
            assert message.fields == (7,) and message.payload is into and stops[-1] == 4 * n
        return (total == 3 * (source + 1)).all()
    with cluster(name, workers) as nodes:
        assert all(values(each(nodes, work)))


@every
def test_exchange_tells_of_what_came_before_it_was_asked_for(name):
    n = 100_000
    with cluster(name) as (a, b):
        for half in (False, True):              # all of it is in the inbox, or on its way
            into, seen = np.zeros(n, "u1"), np.zeros(n, "u1")
            sender = threading.Thread(
                target=lambda: b.send(0, *opaque(), [np.ones(n, "u1")]))
            sender.start()
            if not half:
                sender.join()
                time.sleep(0.1)

            def landed(start, stop, into=into, seen=seen):
                seen[start:stop] += into[start:stop]
            a.exchange(1, *opaque(), b"", 1, into, landed=landed)
            sender.join()
            assert seen.all() and into.all()


@every
def test_exchange_with_a_peer_that_sends_only_after_it_has_received(name):
    n = 3 << 20
    with cluster(name) as (a, b):
        def late():
            got = b.recv(0, into=np.empty(n, "u1"))
            b.send(0, *opaque(), [np.zeros(n, "u1")])
            return got
        values(together(lambda: a.exchange(1, *opaque(), np.ones(n, "u1"), 1, np.empty(n, "u1")),
                        late))


@every
def test_threads_share_a_transport(name):
    def work(node):
        def talk(channel):
            for i in range(60):
                node.send(1 - node.node, *opaque(i), [b"x" * (i * 1000)], channel=channel)
                assert node.recv(1 - node.node, channel=channel).fields == (i,)
        values(together(*[lambda c=c: talk(c) for c in range(4)]))
    with cluster(name) as nodes:
        values(each(nodes, work))


@every
def test_recv_any_serves_everybody_and_tells_goodbyes(name):
    with cluster(name, 2, servers=1) as (a, b, server):
        for i in range(20):
            a.send(2, *opaque(i), channel=2)
            b.send(2, *opaque(i), channel=2)
        got = [server.recv_any(channel=2) for _ in range(40)]
        for peer in (0, 1):
            assert [m.fields[0] for m in got if m.peer == peer] == list(range(20))
        b.send(2, *opaque(99), channel=2)
        b.close()
        a.send(2, *opaque(98), channel=2)
        rest = [server.recv_any(channel=2) for _ in range(3)]
        assert [m.fields for m in rest if m.peer == 1] == [(99,), ()]
        assert [m.kind for m in rest if m.peer == 1][1] == p.GOODBYE


# ---- limits and deadlines -----------------------------------------------------------

@every
def test_timeout_is_honoured_and_says_who_waits_for_whom(name):
    with cluster(name) as (a, b):
        a.doing, started = "all_reduce #57 (fc1.weight)", time.monotonic()
        with pytest.raises(mt.Timeout, match=r"rank 0 has waited .* for rank 1 .*alive.*#57"):
            a.recv(1, timeout=0.3)
        assert time.monotonic() - started < 5
        into = np.zeros(5)
        b.send(0, *opaque(), [np.ones(5)])      # and the connection is as good as before
        assert a.recv(1, into=into).payload.sum() == 5
        with pytest.raises(TimeoutError):
            a.recv_any(timeout=0.05)


@every
def test_P21_P22_unread_messages_are_bounded(name, monkeypatch):
    from minidist_transports import links
    monkeypatch.setattr(links, "INBOX", 1 << 20)
    with cluster(name) as (a, b):
        sent = 0
        with pytest.raises(mt.Timeout):         # nobody receives: the sender is held back
            while sent < 400:
                a.send(1, *opaque(sent), [bytes(100_000)], timeout=1.0)
                sent += 1
        assert b.held <= 1 << 20 and 5 < sent < 400
        for i in range(sent):                   # and nothing of what was handed over is lost
            assert b.recv(0).fields == (i,)


@every
def test_a_send_given_up_half_way_ends_the_connection(name, monkeypatch):
    """What follows it could not be told from its rest (P1)."""
    from minidist_transports import links
    monkeypatch.setattr(links, "INBOX", 1 << 20)
    with cluster(name) as (a, b):
        a.send(1, *opaque(), [bytes(1 << 20)])
        with pytest.raises(mt.Timeout):
            a.send(1, *opaque(1), [bytes(40 << 20)], timeout=1.0)
        with pytest.raises(mt.PeerLost, match="half-way"):
            a.send(1, *opaque(2))
        assert b.recv(0).fields == (0,)         # what was whole arrives
        with pytest.raises(mt.PeerLost, match="rank 0 lost"):
            b.recv(0)


@every
def test_a_timed_out_recv_leaves_the_array_alone(name):
    into = np.zeros(1 << 20, "u1")
    with cluster(name) as (a, b):
        sender = threading.Thread(target=lambda: a.send(1, *opaque(), [np.ones(1 << 20, "u1")]))
        with pytest.raises(mt.Timeout):
            b.recv(0, into=into, timeout=0.0)
        into[:] = 0
        sender.start()
        sender.join()
        time.sleep(0.1)
        assert not into.any() and b.recv(0, into=into).payload.all()


@every
def test_the_rest_of_a_message_that_began_early_lands_in_the_callers_array(name):
    size, begun = 2 << 20, 300_000
    data = np.random.default_rng(0).integers(0, 256, size, "u1")
    with cluster(name) as (a, b):
        a.send(1, *opaque())
        assert b.recv(0).fields == (0,)         # they are connected
        stream, gate, left = a.links[1].conn.stream, threading.Event(), [begun]
        send = stream.send

        def stops_half_way(views):
            if not gate.is_set():
                if left[0] <= 0:
                    raise BlockingIOError
                views = [memoryview(views[0])[:left[0]]]
                left[0] -= len(views[0])
            return send(views)
        stream.send = stops_half_way
        sender = threading.Thread(target=lambda: a.send(1, *opaque(1), [data]))
        sender.start()

        def on_its_way():
            queue = b.links[0].inbox.get(0)
            return queue[0].got if queue else 0
        deadline = time.monotonic() + 20
        while not on_its_way() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 0 < on_its_way() < size
        early, into = np.zeros(size, "u1"), np.zeros(size, "u1")
        with pytest.raises(mt.Timeout):         # it is not there in time, and goes on arriving
            b.recv(0, into=early, timeout=0.1)
        early[:] = 0
        assert b.held == size
        receiver = threading.Thread(target=lambda: b.recv(0, into=into))
        receiver.start()
        while b.held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert b.held == 0                      # no memory of its own any more
        gate.set()
        sender.join(20)
        receiver.join(20)
        assert np.array_equal(into, data) and not early.any()


@every
def test_D4_wrong_length_is_an_error_on_both_sides(name):
    fields = (p.OP_CODES["all_reduce"], 1, 1, 0, 57)
    with cluster(name, 3) as nodes:
        def work(node):
            node.doing = f"all_reduce #57 of rank {node.node}"
            n = 4 + (node.node == 1)
            if node.node == 2:
                return node.recv(0)
            return node.exchange(1 - node.node, p.COLLECTIVE, (*fields, n, 0, n), np.ones(n, "f4"),
                                 1 - node.node, np.ones(n, "f4"))
        errors = each(nodes, work)
        for error in errors:
            assert isinstance(error, mt.ProtocolError), error
            assert error.code == p.CODES["MISMATCH"]
            text = str(error)
            assert "op=all_reduce" in text and "sequence=57" in text and " bytes" in text


def test_P5_lengths_above_the_limit_are_refused_before_a_byte_is_sent(monkeypatch):
    monkeypatch.setattr(p, "MAX_MESSAGE", 1000)
    with cluster("tcp") as (a, b):
        with pytest.raises(mt.ProtocolError, match="1001 bytes.*most is 1000"):
            a.send(1, *opaque(), [bytes(1001)])
        a.send(1, *opaque(), [bytes(1000)])
        assert len(b.recv(0).payload) == 1000


def test_P5_D19_more_than_2_gib_is_cut_into_frames():
    """Counted, not sent: a broadcast buffer has one page behind 5 GiB."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, "u1"), (5 << 30,), (0,))
    out = p.Outgoing(*opaque(), [], 0)
    out.views, out.total = [huge], huge.nbytes
    first = out.frame(p.MAX_FRAME, 0, False)
    kind, flags, size, _, length, _, total, *_ = p.HEADER.unpack(first[0][:32])[1:]
    assert (kind, flags, size, length, total) == (p.OPAQUE, p.MORE, 8, p.MAX_FRAME, 5 << 30)
    out.views, out.at = [huge[:77]], huge.nbytes - 77
    assert p.HEADER.unpack(out.frame(p.MAX_FRAME, 0, False)[0][:32])[2] == 0 and out.done


# ---- ends -----------------------------------------------------------------------------

@every
def test_D36_a_clean_end_is_silent_and_leaves_nothing(name, caplog):
    gc.collect()
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.DEBUG), cluster(name, 3) as nodes:
        values(each(nodes, lambda n: n.send((n.node + 1) % 3, *opaque())))
        nodes[0].close()                        # the coordinator first, with an unread message
        nodes[0].close()
        nodes[1].send(2, *opaque(5))            # the others go on
        assert nodes[2].recv(1).fields in ((0,), (5,))
    assert not caplog.records
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) <= fds


@every
def test_using_a_closed_or_left_transport_is_a_clear_error(name):
    with cluster(name) as (a, b):
        a.close()
        with pytest.raises(mt.TransportError, match="rank 0 is closed"):
            a.send(1, *opaque())
        with pytest.raises(mt.PeerLost, match="rank 0 lost .it said goodbye. while rank 1 waited"):
            b.recv(0)
        with pytest.raises(ValueError, match="no node 7"):
            b.send(7, *opaque())


@every
def test_abort_tells_everybody_why(name):
    with cluster(name, 4) as nodes:
        def work(node):
            if node.node == 2:
                node.send(1, *opaque())
                return node.abort("ValueError: no such file")
            node.doing = "barrier #3"
            return node.recv((node.node + 1) % 4, channel=1)
        errors = each(nodes, work)
        for peer in (0, 1, 3):
            assert isinstance(errors[peer], mt.PeerLost) and errors[peer].peer == 2
            assert "rank 2 lost (gave up: ValueError: no such file" in str(errors[peer])
            assert "barrier #3" in str(errors[peer])


@every
def test_D4_abort_with_a_code_is_that_error_everywhere(name):
    with cluster(name, 3) as nodes:
        def work(node):
            if node.node == 1:
                return node.abort("rank 1 called barrier", p.CODES["MISMATCH"])
            return node.recv(2 - node.node)
        errors = each(nodes, work)
        for peer in (0, 2):
            assert isinstance(errors[peer], mt.ProtocolError)
            assert errors[peer].code == p.CODES["MISMATCH"]
            assert "rank 1 called barrier" in str(errors[peer])


@every
def test_on_lost_lets_the_others_go_on(name):
    with cluster(name, 3) as (a, b, c):
        lost = []
        for node in (a, b):
            node.on_lost = lambda peer, reason: lost.append((peer, reason))
        c.send(0, *opaque(1))
        c.abort("enough")
        assert a.recv_any().fields == (1,)      # what it said before counts
        with pytest.raises(mt.PeerLost, match="rank 2 lost"):
            a.recv_any()
        a.send(1, *opaque(2))
        assert b.recv(0).fields == (2,)
        with pytest.raises(mt.PeerLost):
            b.recv(2)
        deadline = time.monotonic() + 5
        while len(lost) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [peer for peer, _ in lost] == [2, 2]


# ---- nodes that are processes -----------------------------------------------------------

PROLOGUE = textwrap.dedent("""
    import os, signal, sys, time
    sys.path.insert(0, {tests!r})
    import conftest
    import numpy as np, minidist_transports as mt
    from minidist_transports import protocol as p
    t = mt.open({name!r}, mt.Config.from_env(os.environ))
    rank = t.node
    print("joined", flush=True)
    sys.stdin.readline()                        # until all have
""")


@contextlib.contextmanager
def processes(name, workers, code, **env):
    """Each rank runs the code after joining, as a process of its own."""
    children = []
    try:
        for config in configs(name, workers):
            pipes = config.pipes or {}
            spec = ",".join(f"{peer}:{r}:{w}" for peer, (r, w) in pipes.items())
            tls = dict(zip(("CERT", "KEY", "CA"), config.tls or ()))
            children.append(subprocess.Popen(
                [sys.executable, "-c", PROLOGUE.format(name=name, tests=os.path.dirname(__file__))
                 + textwrap.dedent(code)],
                env={**os.environ, "RANK": str(config.node), "WORLD_SIZE": str(workers),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(config.master[1]),
                     "MINIDIST_KEY": KEY.hex(), "MINIDIST_PIPES": spec,
                     **{f"MINIDIST_TLS_{part}": path for part, path in tls.items()}, **env},
                pass_fds=[fd for ends in pipes.values() for fd in ends],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            for fd in (fd for ends in pipes.values() for fd in ends):
                os.close(fd)
        for child in children:
            assert child.stdout.readline() == "joined\n", child.communicate()
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def ends(child, seconds=20):
    """Its return code, stdout and stderr."""
    out, err = child.communicate(timeout=seconds)
    return child.returncode, out, err


WAIT = """
    t.doing = "all_reduce #57 (fc1.weight), step 12"
    try:
        t.recv((rank + 1) % t.size, timeout=60)
    except mt.TransportError as error:
        print(type(error).__name__, error, flush=True)
"""


@every
def test_D1_kill_9_is_seen_by_all_at_once(name):
    patience = {"MINIDIST_HEARTBEAT": "0.3", "MINIDIST_HEARTBEAT_TIMEOUT": "2"}
    with processes(name, 3, WAIT, **(patience if name == "udp" else {})) as children:
        time.sleep(0.3)
        started = time.monotonic()
        children[1].kill()
        for rank in (0, 2):
            code, out, err = ends(children[rank])
            assert code == 0 and out.startswith("PeerLost rank 1 lost"), (out, err)
            assert "all_reduce #57 (fc1.weight), step 12" in out and not err
        assert time.monotonic() - started < 9   # no heartbeat_timeout (10 s) was needed


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no such folder on this system")
def test_shared_memory_has_no_name_that_could_stay_behind():
    with processes("shm", 2, """
        t.exchange(1 - rank, mt.protocol.OPAQUE, (0,), bytes(9 << 20), 1 - rank, bytearray(9 << 20))
        print("exchanged", flush=True)
        time.sleep(60)
    """) as children:
        for child in children:
            assert child.stdout.readline() == "exchanged\n"
            maps = Path("/proc", str(child.pid), "maps").read_text()
            assert maps.count("/memfd:minidist (deleted)") == 2
    assert not [name for name in os.listdir("/dev/shm") if "minidist" in name]


@every
def test_D1_the_death_of_the_coordinator_is_seen(name):
    patience = {"MINIDIST_HEARTBEAT": "0.3", "MINIDIST_HEARTBEAT_TIMEOUT": "2"}
    with processes(name, 3, WAIT, **(patience if name == "udp" else {})) as children:
        children[0].kill()
        for rank in (1, 2):
            assert "PeerLost rank 0 lost" in ends(children[rank])[1]


@every
def test_D1_P8_a_stopped_node_is_lost_after_heartbeat_timeout(name):
    with processes(name, 3, WAIT, MINIDIST_HEARTBEAT="0.2",
                   MINIDIST_HEARTBEAT_TIMEOUT="1.5") as children:
        children[2].send_signal(signal.SIGSTOP)
        for rank in (0, 1):
            code, out, err = ends(children[rank])
            assert out.startswith("PeerLost rank 2 lost"), (out, err)
        children[2].send_signal(signal.SIGCONT)
        assert "lost" in ends(children[2])[1]


@every
def test_P26_D35_a_node_that_computes_or_pauses_is_not_dead(name):
    busy = """
        if rank == 1:
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                sum(range(1000))            # holds the interpreter, makes no call to us
            t.send(0, p.OPAQUE, (1,))
        else:
            print(t.recv(1).fields, flush=True)
        if rank == 0:
            t.recv(1, channel=1, timeout=60)
        else:
            t.send(0, p.OPAQUE, (2,), channel=1)
        t.close()
    """
    with processes(name, 2, busy, MINIDIST_HEARTBEAT="0.2",
                   MINIDIST_HEARTBEAT_TIMEOUT="1.2") as children:
        children[0].send_signal(signal.SIGSTOP)         # shorter than the timeout: no harm
        time.sleep(0.5)
        children[0].send_signal(signal.SIGCONT)
        for child in children:
            code, out, err = ends(child)
            assert code == 0 and not err, err
            assert "(1,)" in out or child is children[1]


@every
def test_P13_signals_during_a_transfer_do_no_harm(name):
    code = """
        hits = []
        signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        n = {size}
        x, y = np.arange(n, dtype="u4"), np.empty(n, "u4")
        for i in range(3):
            t.exchange(1 - rank, p.OPAQUE, (i,), x, 1 - rank, y)
            assert (x == y).all()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert hits
        t.close()
    """.replace("{size}", "300_000" if name == "udp" else "8 << 20")
    with processes(name, 2, code) as children:
        for child in children:
            assert ends(child, 60)[::2] == (0, "")


@every
def test_P13_an_exception_from_a_handler_ends_the_job_clearly(name):
    code = """
        def stop(*_): raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, stop)
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            t.recv(1 - rank)
        except KeyboardInterrupt:
            try:
                t.recv(1)
            except mt.TransportError as error:
                print(error)
            t.abort("KeyboardInterrupt")
        except mt.PeerLost as error:
            print(error)
    """
    with processes(name, 2, code) as children:
        assert "KeyboardInterrupt interrupted rank 0" in ends(children[0])[1]
        assert "rank 0 lost (gave up: KeyboardInterrupt" in ends(children[1])[1]


@every
def test_a_program_that_fails_says_why_and_one_that_ends_says_goodbye(name):
    code = """
        if rank == 1:
            raise ValueError("no such layer")
        if rank == 2:
            sys.exit(0)
        t.recv(2 if os.environ.get("FOR") == "2" else 1)
    """
    with processes(name, 3, code) as children:
        assert "ValueError: no such layer" in ends(children[0])[2]
        assert ends(children[2])[::2] == (0, "")


@every
def test_a_forked_process_leaves_the_connections_alone(name):
    code = """
        for _ in range(5):
            t.send(1 - rank, p.OPAQUE, (1,))
            t.recv(1 - rank)
            if os.fork() == 0:
                try:
                    t.send(1 - rank, p.OPAQUE, (2,))
                except mt.TransportError as error:
                    assert "is closed" in str(error)
                    sys.exit(3)         # at exit nothing is said either
            assert os.wait()[1] == 3 << 8
        print("well")
    """
    with processes(name, 2, code) as children:
        for child in children:
            assert ends(child) == (0, "well\n", "")


# ---- strangers, keys, rendezvous ----------------------------------------------------------

def knock(port, data=b""):
    s = socket.create_connection(("127.0.0.1", port), 5)
    s.settimeout(10)
    if data:
        s.sendall(data)
    return s


def is_closed(sock):
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


STRANGE = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", bytes(100),
           np.random.default_rng(0).bytes(100), p.MAGIC + b"\x09" * 60,
           p.MAGIC + np.random.default_rng(1).bytes(200)]


def test_D7_P3_strangers_are_dropped_and_nobody_notices(caplog):
    with cluster("tcp", 2) as (a, b):
        port = a.config.master[1]
        for data in STRANGE:
            with knock(port, data) as s:
                assert is_closed(s)
        knock(port).close()
        into = np.zeros(4)
        values(together(lambda: b.send(0, *opaque(), [np.ones(4)]), lambda: a.recv(1, into=into)))
    dropped = [r for r in caplog.records if "dropped" in r.message]
    assert len(dropped) == len(caplog.records) == len(STRANGE)


def test_P7_silent_connections_keep_nobody_waiting(monkeypatch, caplog):
    monkeypatch.setattr(p, "HANDSHAKE_TIMEOUT", 1.0)
    monkeypatch.setattr(p.Session.__init__, "__kwdefaults__",
                        {**p.Session.__init__.__kwdefaults__, "patience": 1.0})
    first, second = configs("tcp", 2)
    silent = []

    def join():
        while len(silent) < 100:
            with contextlib.suppress(ConnectionError):
                silent.append(knock(first.master[1]))
        silent[0].sendall(b"M")                 # a byte now and then buys no time
        started = time.monotonic()
        node = mt.open("tcp", second)
        return node, time.monotonic() - started
    a, (b, seconds) = values(together(lambda: mt.open("tcp", first), join))
    try:
        assert seconds < 1.0
        assert all(is_closed(s) for s in silent)
    finally:
        for s in silent:
            s.close()
        together(a.close, b.close)


@pytest.mark.parametrize("banner", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH\r\n"])
def test_P2_the_wrong_service_on_the_port_is_recognised(banner):
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve():
            client, _ = server.accept()
            with client:
                client.sendall(banner)
                is_closed(client)
        config = mt.Config(node=1, workers=2, master=server.getsockname(), key=KEY)
        started = time.monotonic()
        error = together(serve, lambda: mt.open("tcp", config))[1]
    assert isinstance(error, mt.ProtocolError) and "not a minidist node" in str(error)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("change, word", [
    ({"key": bytes(32)}, "AUTH_FAILED"), ({"key": None}, "AUTH_REQUIRED"),
    ({"job": "other"}, "WRONG_JOB"), ({"generation": 3}, "GENERATION"),
    ({"node": 0, "workers": 2}, "WRONG_NODE")])
@pytest.mark.parametrize("name", [n for n in PLUGINS if n not in launch.MESHES])
def test_wrong_key_job_generation_are_errors_on_both_sides(name, change, word, caplog):
    first, second = configs(name, 2, start_timeout=2.0)
    for key, value in change.items():
        setattr(second, key, value)
    if word == "WRONG_NODE":
        second.role, second.node = "server", 1
    waiting, refused = together(lambda: mt.open(name, first), lambda: mt.open(name, second))
    assert isinstance(waiting, mt.Timeout) and "rank 1 to join" in str(waiting)
    if name == "udp" and "key" in change:       # datagrams without our key get no answer at all
        assert isinstance(refused, mt.Timeout) and "another key" in str(refused)
        return
    assert isinstance(refused, mt.TransportError) and word in str(refused), refused
    assert any(word in record.message for record in caplog.records)


def test_another_version_is_an_error_on_both_sides(monkeypatch, caplog):
    first, second = configs("tcp", 2, start_timeout=1.0)
    pack = p.greet
    monkeypatch.setattr(p, "greet", lambda config, side, nonce: (
        data := bytearray(pack(config, side, nonce)),
        config.node == 1 and data.__setitem__(4, 2), bytes(data))[2])
    results = together(lambda: mt.open("tcp", first), lambda: mt.open("tcp", second))
    assert "VERSION" in str(results[1]) and "install the same minidist" in str(results[1])
    assert any("it speaks MDP/2.0" in record.message for record in caplog.records)


def test_D6_the_missing_are_named(caplog, monkeypatch):
    from minidist_transports import node as engine
    monkeypatch.setattr(engine, "REPORT", 0.3)
    first, second = configs("tcp", 4, start_timeout=4.0)[:2]

    def late():
        time.sleep(0.5)                         # rank 1's patience must not end before rank 0's
        return mt.open("tcp", first)
    zero, one = together(late, lambda: mt.open("tcp", second))
    assert isinstance(zero, mt.Timeout) and isinstance(one, mt.PeerLost)
    for error in (zero, one):
        assert re.search(r"rank 0 has waited \d of 4 s for rank 2, rank 3 to join", str(error))
    assert any("rank 2, rank 3 to join" in record.message for record in caplog.records)


def test_D6_node_0_may_come_last():
    first, *others = configs("tcp", 3)

    def late():
        time.sleep(0.7)
        return mt.open("tcp", first)
    nodes = values(together(late, *[lambda c=c: mt.open("tcp", c) for c in others]))
    together(*[node.close for node in nodes])


def test_P27_the_same_rank_twice_is_refused(caplog):
    with cluster("tcp", 2) as (a, b):
        second = mt.Config(**{**vars(b.config), "start_timeout": 2.0})
        (error,) = together(lambda: mt.open("tcp", second))
        assert isinstance(error, mt.ProtocolError) and "is RANK set twice?" in str(error)
        b.send(0, *opaque(4))
        assert a.recv(1).fields == (4,)


def test_D22_P29_addresses(monkeypatch):
    assert mt.split_address("[::1]:80") == ("::1", 80)
    assert mt.split_address("node-3:29500") == ("node-3", 29500)
    assert mt.split_address(mt.join_address("fe80::1%eth0", 5)) == ("fe80::1%eth0", 5)
    for wrong in ("::1:80", "host", "host:", "host:99999", ":x"):
        with pytest.raises(ValueError, match="not an address"):
            mt.split_address(wrong)
    real = socket.getaddrinfo

    def both(host, port, *args, **kwargs):      # the name leads to ::1 first, nobody is there
        if host != "the-master":
            return real(host, port, *args, **kwargs)
        return real("::1", port, *args, **kwargs) + real("127.0.0.1", port, *args, **kwargs)
    monkeypatch.setattr(socket, "getaddrinfo", both)
    first, second = configs("tcp", 2)
    second.master = ("the-master", first.master[1])
    nodes = values(together(lambda: mt.open("tcp", first), lambda: mt.open("tcp", second)))
    together(*[node.close for node in nodes])
    second.start_timeout = 0.5
    with pytest.raises(mt.Timeout) as error:
        mt.open("tcp", second)
    assert "[::1]:" in str(error.value) and "127.0.0.1:" in str(error.value)


def test_D22_ipv6_only():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as s:
            port = s.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    both = configs("tcp", 2)
    for config in both:
        config.master = ("::1", port)
    nodes = values(together(*[lambda c=c: mt.open("tcp", c) for c in both]))
    nodes[1].send(0, *opaque())
    nodes[0].recv(1)
    together(*[node.close for node in nodes])


@pytest.mark.parametrize("name", [n for n in PLUGINS if n not in launch.MESHES])
def test_listening_beyond_loopback_needs_a_key(name):
    config = configs(name, 2, key=None, start_timeout=0.1)[0]
    config.master = "0.0.0.0", free_port(name)
    with pytest.raises(PermissionError, match="without a key"):
        mt.open(name, config)
    config.key = KEY
    with pytest.raises(mt.Timeout):
        mt.open(name, config)


def test_D33_header_and_payload_leave_together_without_delay():
    with cluster("tcp") as (a, b):
        def pong():
            for _ in range(200):
                b.send(0, *opaque(), [b.recv(0).payload])

        def ping():
            started = time.monotonic()
            for _ in range(200):
                a.send(1, *opaque(), [b"x" * 40])
                a.recv(1)
            return time.monotonic() - started
        link = a.links[1].conn.stream.socket
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert values(together(ping, pong))[0] < 200 * 0.04     # 40 ms: Nagle met delayed ACK


@every
def test_a_job_of_one_node(name):
    with cluster(name, 1) as (a,), pytest.raises(ValueError, match="no node 1"):
        a.send(1, *opaque())


# ---- a stream that takes and gives what it likes -------------------------------------------

def test_P1_partial_writes_and_reads_of_any_size(monkeypatch):
    from minidist_transports import tcp
    rng = np.random.default_rng(7)
    lock = threading.Lock()

    class Moody(tcp.TcpStream):
        def __init__(self, *args):
            super().__init__(*args)
            send, recv = self.send, self.recv_into

            def size():
                with lock:
                    return int(rng.choice([1, 7, 31, 4096, 100_000]))

            def some(views):
                if rng.random() < 0.2:
                    raise BlockingIOError
                left, taken = size(), []
                for view in views:
                    taken.append(memoryview(view)[:left])
                    left -= len(taken[-1])
                    if not left:
                        break
                return send(taken)
            self.send = some
            self.recv_into = lambda view: recv(view[:size()])
    monkeypatch.setattr(tcp, "TcpStream", Moody)

    def work(node):
        other = 1 - node.node
        rng = np.random.default_rng(3)
        for i in range(30):
            data = rng.integers(0, 256, int(rng.integers(0, 40_000)), "u1")
            into = np.empty_like(data)
            node.exchange(other, *opaque(i), data, other, into)
            assert np.array_equal(data, into)
    with cluster("tcp") as nodes:
        values(each(nodes, work))
