"""The UDP driver on real sockets: loopback, and a relay that spoils what it carries."""
from __future__ import annotations

import errno
import heapq
import os
import random
import select
import socket
import time

import pytest

import minidist_transports as mt
from minidist_transports import reliability, udp
from minidist_transports.udp import UdpDriver
from simnet import Faults, Path

KEY = bytes(range(32))
PATIENCE = 30.0                 # s until a test gives up


class Node:
    """A driver and one stream, with an application that writes and reads all it can."""

    def __init__(self, **settings):
        settings = {"key": KEY, "start_timeout": 20.0} | settings
        self.driver = UdpDriver(mt.Config(workers=2, **settings))
        self.stream, self.error, self.ended = None, None, False
        self.out, self.got = memoryview(b""), bytearray()
        self.view = memoryview(bytearray(1 << 17))

    def listen(self, port=0):
        return self.driver.listen("127.0.0.1", port)

    def dial(self, address):
        self.stream = self.driver.dial(self.driver.resolve(address)[0])
        return self

    def work(self, now):
        self.driver.pump(now)
        self.stream = self.stream or self.driver.accept()
        if self.stream is None:
            return
        try:
            while self.out:
                self.out = self.out[self.stream.send([self.out[:1000], self.out[1000:200_000]]):]
        except BlockingIOError:
            pass
        except OSError as error:
            self.error = error
        try:
            while count := self.stream.recv_into(self.view):
                self.got += self.view[:count]
            self.ended = True
        except BlockingIOError:
            pass
        except OSError as error:
            self.error = error

    def timeout(self, now):
        return self.driver.timeout(now)


class Relay:
    """Stands between a dialler and `address`, with simnet's faults in real time."""

    def __init__(self, address, faults, seed=1):
        self.front, self.back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                                 for _ in range(2))
        for sock in (self.front, self.back):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            sock.bind(("127.0.0.1", 0))
        self.address, self.dialler = mt.split_address(address), None
        self.paths = [Path(faults, random.Random(seed + way)) for way in range(2)]
        self.waiting, self.order = [], 0

    @property
    def name(self):
        return mt.join_address(*self.front.getsockname())

    def work(self, now):
        for way, sock in enumerate((self.front, self.back)):
            while True:
                try:
                    data, source = sock.recvfrom(1 << 16)
                except BlockingIOError:
                    break
                if way == 0:
                    self.dialler = source
                for due, arrived in self.paths[way].arrivals(data, now):
                    self.order += 1
                    heapq.heappush(self.waiting, (due, self.order, way, arrived))
        while self.waiting and self.waiting[0][0] <= now:
            _, _, way, data = heapq.heappop(self.waiting)
            target = self.dialler if way else self.address
            (self.front if way else self.back).sendto(data, target)

    def timeout(self, now):
        return max(0.0, self.waiting[0][0] - now) if self.waiting else None

    def close(self):
        self.front.close()
        self.back.close()


def run(until, *things, patience=PATIENCE):
    """Let them work, in one thread, until it is so."""
    limit = time.monotonic() + patience
    while True:
        now = time.monotonic()
        assert now < limit, "it takes too long"
        for thing in things:
            thing.work(now)
        if until():
            return
        waits = [wait for thing in things if (wait := thing.timeout(now)) is not None]
        sockets = [sock for thing in things for sock in
                   ([thing.driver] if isinstance(thing, Node) else [thing.front, thing.back])]
        select.select(sockets, [], [], min(waits, default=0.05))


@pytest.fixture
def pair():
    """A function that makes a connected pair, perhaps with a relay between; closed at the end."""
    made = []

    def make(faults=None, a=None, **settings):
        server, client = Node(**settings), Node(**settings | (a or {}))
        made.extend((client, server))
        address = server.listen()
        things = [client, server]
        if faults is not None:
            relay = Relay(address, faults)
            things.append(relay)
            address = relay.name
        client.dial(address)
        client.things = things
        return client, server
    yield make
    for node in made:
        for each in list(node.driver.endpoint.connections.values()):
            each.abort(0.0, 0, "the test is over")
        node.driver.close()
        for thing in getattr(node, "things", ())[2:]:
            thing.close()


def exchange(client, server, size):
    """The same number of bytes each way, at the same time."""
    there, back = random.Random(1).randbytes(size), random.Random(2).randbytes(size)
    client.out, server.out = memoryview(there), memoryview(back)
    run(lambda: len(server.got) >= size and len(client.got) >= size
        or client.error or server.error, *client.things)
    assert client.error is None and server.error is None
    assert server.got == there and client.got == back


@pytest.mark.parametrize("segments", [True, False], ids=["trains", "one by one"])
@pytest.mark.parametrize("key", [KEY, None], ids=["keyed", "insecure"])
def test_megabytes_both_ways_at_once(pair, segments, key):
    client, server = pair(key=key)
    client.driver.segments = server.driver.segments = segments
    exchange(client, server, 6 << 20)
    assert client.driver.stats["datagrams_received"] > 1000


def test_without_ancillary_data(pair, monkeypatch):
    """As on Windows."""
    monkeypatch.setattr(udp, "ANCILLARY", False)
    client, server = pair()
    exchange(client, server, 1 << 20)
    assert not client.driver.segments


def test_through_a_relay_that_loses_repeats_delays_and_damages(pair):
    client, server = pair(Faults(delay=0.002, jitter=0.001, loss=0.05, duplicate=0.05,
                                 reorder=0.05, reorder_by=0.005, corrupt=0.01, rate=20e6))
    exchange(client, server, 1 << 20)
    for node in (client, server):
        assert node.driver.stats["retransmissions"] > 10
        assert node.driver.stats["duplicates"] > 10


class Flaky:
    """A socket that is often full, and refuses some things altogether."""

    def __init__(self, sock, refuse=None):
        self.sock, self.rng, self.refuse = sock, random.Random(3), refuse

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def sendto(self, *args):
        if self.rng.random() < 0.3:
            raise BlockingIOError
        return self.sock.sendto(*args)

    def sendmsg(self, *args):
        if self.refuse is not None:
            raise OSError(self.refuse, os.strerror(self.refuse))
        if self.rng.random() < 0.3:
            raise BlockingIOError
        return self.sock.sendmsg(*args)


@pytest.mark.parametrize("refuse", [None, errno.EIO, errno.EINVAL])
def test_a_socket_that_is_full_or_knows_no_trains(pair, refuse):
    client, server = pair()
    client.driver.socket = Flaky(client.driver.socket, refuse)
    exchange(client, server, 500_000)
    assert client.driver.segments == (refuse is None)
    assert client.driver.stats["datagrams_lost"] == 0, "what did not fit is sent later"


def test_a_datagram_too_large_for_the_interface(pair):
    client, server = pair()
    client.driver.endpoint.ladder = (70_000,)               # no UDP datagram is so large
    run(lambda: client.stream.connection.state == "open", *client.things)
    client.stream.connection.size = 1452
    client.driver.endpoint.too_big(client.stream.connection.address, 1452, time.monotonic())
    exchange(client, server, 100_000)
    assert client.stream.connection.size == 1200


def test_close_delivers_and_both_see_the_end(pair):
    client, server = pair()
    client.out = memoryview(data := random.Random(4).randbytes(3 << 20))
    run(lambda: not client.out, *client.things)
    client.stream.close()
    run(lambda: server.ended, *client.things)
    assert server.got == data and server.error is None
    server.stream.close()
    start = time.monotonic()
    server.driver.close()
    client.driver.close()
    assert time.monotonic() - start < reliability.CLOSE_LIMIT


def test_nobody_there():
    node = Node(start_timeout=0.3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))                         # somebody, but silent
        node.dial(mt.join_address(*sock.getsockname()))
        with pytest.raises(BlockingIOError):
            node.stream.send([memoryview(b"x")])
        run(lambda: node.error, node, patience=5)
    assert "no answer" in str(node.error)
    node.driver.close()


def test_another_key_is_not_answered(pair):
    client, server = pair(a={"key": bytes(32), "start_timeout": 0.3})
    run(lambda: client.error, *client.things, patience=5)
    assert server.stream is None and server.driver.stats["dropped"] > 0


def test_strangers_do_not_disturb(pair):
    client, server = pair()
    rng = random.Random(5)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(300):
            stranger.sendto(rng.randbytes(rng.randrange(1, 1400)),
                            server.driver.socket.getsockname())
        exchange(client, server, 200_000)
    assert server.driver.stats["dropped"] == 300


def test_a_restart_on_the_same_port(pair):
    client, server = pair()
    exchange(client, server, 10_000)
    old, place = server.stream, client.driver.socket.getsockname()
    client.driver.socket.close()                            # killed: nothing is said
    again = Node()
    address = mt.join_address(*server.driver.socket.getsockname())
    again.listen(place[1])
    again.dial(address)
    run(lambda: server.error, again, server)
    assert "restarted" in str(server.error) and old.connection.state == "closed"
    server.stream, server.error, server.got = None, None, bytearray()
    again.things = [again, server]
    exchange(again, server, 10_000)
    again.driver.close()
    client.driver.socket = None


def test_listening_beyond_loopback_needs_a_key():
    with pytest.raises(PermissionError, match="key"):
        Node(key=None).driver.listen("0.0.0.0", 0)
