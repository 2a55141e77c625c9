"""What is fuzzed: every decoder and every state machine that bytes of others reach.

A target takes bytes, does with them what a node would, and returns if all went by the book: an
error that PROTOCOL.md documents is by the book, any other exception is a fault, and so is a promise
about state or memory that does not hold. test_fuzz.py tries them in every run of the tests;
run.py lets atheris search for hours.
"""
import itertools
import json
import struct
import zlib
from pathlib import Path

import minidist as md
import vectors
from minidist_transports import (
    Config,
    Driver,
    Message,
    ProtocolError,
    Stream,
    links,
    members,
    packets,
    protocol,
    reliability,
    split_address,
    training,
)

TESTS = Path(__file__).resolve().parent.parent
KEY, JOB = bytes(range(32)), "job-0"
TARGETS = {}


def target(function):
    TARGETS[function.__name__] = function
    return function


def seeds(name):
    """Inputs to begin with: the vectors, in the form that a target takes them."""
    def load(file):
        return json.loads((TESTS / "vectors" / f"{file}.json").read_text())
    frames = [bytes.fromhex(case["frame"]) for case in load("messages")["messages"]]
    if name in ("frames", "node"):
        return [bytes([n % 256]) + frame[:28] + frame[32:] for n, frame in enumerate(frames)]
    if name == "fields":
        return [frame[2:3] + frame[32:32 + frame[5]] for frame in frames]
    if name == "greeting":
        return [bytes.fromhex(load("greeting")[side]) for side in ("dialer", "acceptor")]
    if name == "stream":
        return [bytes([0]) + bytes.fromhex(c["bytes"]) for c in load("negative")["cases"]]
    if name in ("packets_of_the_peer", "datagrams"):
        whole = [bytes.fromhex(case["datagram"]) for case in load("udp_negative")["cases"]]
        if name == "datagrams":
            return whole
        return [each[:1] + each[7:8] + each[16:-16] for each in whole]
    if name == "feedback":
        return [bytes.fromhex(case["body"]) for case in load("udp")["feedback"]]
    if name == "server":
        return [frame[2:3] + frame[32:] for frame in frames if frame[2] in (34, 35, 37)]
    return [b"", b"127.0.0.1:80", b"[::1]:80", bytes(20)]


def corpus(name):
    """The seeds, and what a search found worth keeping."""
    path = Path(__file__).with_name("corpus") / f"{name}.txt"
    lines = path.read_text().split() if path.exists() else []
    return seeds(name) + [bytes.fromhex(line) for line in lines]


# ---- decoders ---------------------------------------------------------------------------------

@target
def greeting(data):
    for side in (protocol.DIALER, protocol.ACCEPTOR):
        if len(data) != 64:
            return
        try:
            protocol.check_greeting(data, Config(workers=2, key=KEY, job=JOB), side)
        except ProtocolError as error:
            assert error.code in protocol.ERRORS


@target
def fields(data):
    layout = protocol.MESSAGES.get(data[0]) if data else None
    if layout is None:
        return
    try:
        values = layout.unpack(memoryview(data)[1:])
    except ProtocolError as error:
        assert protocol.ERRORS[error.code].name in ("BAD_FIELDS", "TOO_LARGE")
    else:
        packed = layout.pack(values)
        assert packed == data[1:] or "numbers" in layout.types or "f64" in layout.types


@target
def roster(data):
    if len(data) < 4:
        return
    try:
        found = protocol.unpack_roster(struct.unpack(">I", data[:4])[0], memoryview(data)[4:])
    except ProtocolError as error:
        assert protocol.ERRORS[error.code].name in ("BAD_FIELDS", "TOO_LARGE")
    else:
        assert protocol.pack_roster(found) == data[4:]


@target
def address(data):
    try:
        host, port = split_address(data.decode(errors="replace"))
    except ValueError:
        return
    assert 0 <= port <= 65535 and isinstance(host, str)


@target
def feedback(data):
    try:
        credit, delay, ranges = packets.decode_feedback(memoryview(data))
    except packets.Malformed:
        return
    assert packets.encode_feedback(credit, 0.0, ranges)[:8] == data[:8] and delay >= 0
    assert all(first <= last for first, last in ranges)
    assert all(b[1] < a[0] - 1 for a, b in itertools.pairwise(ranges))


@target
def close(data):
    try:
        code, text = packets.decode_close(memoryview(data))
    except packets.Malformed:
        return
    assert 0 <= code < 1 << 16 and len(text) <= packets.REASON


# ---- a session ----------------------------------------------------------------------------------

class Source:
    """Numbers and bytes off the front of the input."""

    def __init__(self, data):
        self.data = memoryview(data)

    def take(self, count):
        taken, self.data = bytes(self.data[:count]), self.data[count:]
        return taken.ljust(count, b"\0")

    def byte(self):
        return self.take(1)[0]


def session(state):
    one = protocol.Session(Config(workers=3, key=KEY if state % 2 else None, job=JOB,
                                  checksums=state // 2 % 2 == 1), False, 0.0,
                           random=lambda n: vectors.ACCEPT_NONCE)
    one.place = lambda message: message.total <= 1 << 20 and message.hold()
    return one


def into(one, data, size=1 << 16):
    """Bytes into a session, as a socket would give them."""
    data = memoryview(data)
    while len(data):
        space = one.space()
        count = min(len(space), len(data), size)
        space[:count] = data[:count]
        yield from one.received(count, 0.0)
        data = data[count:]
        if one.paused:                          # (a node stops reading then)
            return


def feed(one, data, size=1 << 16):
    try:
        for message in into(one, data, size):
            assert message.done and message.got == message.total <= 1 << 20
            if message.kind == protocol.JOIN:
                one.accept()
    except ProtocolError as error:
        assert error.code in protocol.ERRORS and one.state == protocol.CLOSED
    assert len(one.out) <= protocol.MAX_CONTROL + 4


@target
def stream(data):
    """Any bytes, in pieces of any size."""
    source = Source(data)
    one, size = session(source.byte()), 1 + source.byte()
    feed(one, bytes(source.data), size)


def mended(source, generation=0):
    """Frames whose checksums are right, whatever else they say."""
    frames = []
    while len(source.data) > 28 and len(frames) < 20:
        head = bytearray(source.take(28))
        head[:2] = b"MD"
        size, length = struct.unpack_from(">H2xI", head, 4)
        rest = source.take(min(size + length, len(source.data)))
        struct.pack_into(">I", head, 24, zlib.crc32(rest[:size]))
        frames.append(bytes(head) + struct.pack(">I", zlib.crc32(head)) + rest)
    return frames


@target
def frames(data):
    """Frames in any state: each is as it should be but for what it says."""
    source = Source(data)
    state = source.byte()
    one = session(state)
    if state & 4:                               # joined
        one = session(0)
        feed(one, vectors.greeting(b"D", vectors.DIAL_NONCE, mechanism=0))
        feed(one, vectors.join(1, 0, 7, "x:1"))
        assert one.state == protocol.OPEN
    elif state & 8:                             # greeted
        feed(one, vectors.greeting(b"D", vectors.DIAL_NONCE, mechanism=state % 2))
    for frame in mended(source):
        feed(one, frame)
        if one.paused:
            return
        one.tick(0.1)


# ---- a node, and who is in the job -----------------------------------------------------------

class Wire(Stream):
    name = "the peer"

    def __init__(self):
        self.data = memoryview(b"")

    def send(self, views):
        return sum(map(len, views))

    def recv_into(self, view):
        if not len(self.data):
            raise BlockingIOError
        count = min(len(view), len(self.data))
        view[:count], self.data = self.data[:count], self.data[count:]
        return count

    def close(self):
        pass


class Bare(members.Members):
    """A node without threads and sockets."""
    send = recv = exchange = recv_any = abort = close = None


Bare.__abstractmethods__ = frozenset()


@target
def node(data):
    """A node of three and what a peer that has joined, or a stranger, may tell it."""
    source = Source(data)
    choice = source.byte()
    one = Bare(Driver(Config()), Config(node=choice % 3, workers=2, servers=1, job=JOB,
                                        role="server" if choice % 3 == 2 else "worker"))
    if choice & 8:
        one.on_lost = lambda peer, reason: None
    wire = Wire()
    one._greet(wire, 0.0)
    (conn,) = one.connections
    peer = (choice % 3 + 1 + choice // 3 % 2) % 3
    wire.data = memoryview(vectors.greeting(b"D", vectors.DIAL_NONCE, mechanism=0)
                           + vectors.join(peer, int(peer == 2), 7, "127.0.0.1:9"))
    frames_ = mended(source)
    while one._read(conn):
        pass
    assert conn.opened
    for frame in frames_:
        wire.data = memoryview(frame)
        while one._read(conn):
            pass
        assert one.held <= links.INBOX + links.UNASKED


# ---- a parameter server ------------------------------------------------------------------------

@target
def server(data):
    """What workers send it, in any order: it answers, or it refuses."""
    source, one = Source(data), md.ParameterServer(2)
    while len(source.data) > 2:
        kind, length = source.byte(), source.byte()
        layout = protocol.MESSAGES.get(kind)
        if layout is None or kind < 32:
            continue
        rest = source.take(length)
        size = layout.struct.size if layout.struct else min(len(rest), 35)
        try:
            values = layout.unpack(rest[:size])
        except ProtocolError:
            continue
        message = Message(kind, values, rest[size:], length % 2)
        word, peer, fields_, payload = training.decode(message)
        for answer in one.on_message(word, peer, fields_, payload):
            assert answer.kind in ("APPLIED", "STATE", "REFUSED")


# ---- datagrams ----------------------------------------------------------------------------------

def listener():
    """An endpoint open to a dialler, with the ids and nonces of the vectors."""
    given = iter([bytes(32), vectors.OWN_INCARNATION, vectors.LISTENER, vectors.LISTENER_NONCE])
    counter = itertools.count(1)
    one = reliability.Endpoint(KEY, window=1 << 16, random=lambda size: next(given, None) or (
        next(counter).to_bytes(size, "little")))
    (retry,) = arrive(one, vectors.udp_init())
    arrive(one, vectors.udp_init(cookie=retry[16:40]))
    arrive(one, vectors.datagram(0xD6, 0, b""))
    (connection,) = one.connections.values()
    assert connection.state == reliability.OPEN
    return one, connection


def arrive(one, data, now=1.0):
    one.receive(memoryview(data), ("10.0.0.1", 1), now)
    return [each for train in one.trains(now) for each in train.datagrams]


@target
def datagrams(data):
    """Bytes of strangers: nothing happens."""
    one, connection = listener()
    if len(data) >= 32 and connection.seals[1].opens(memoryview(data)):
        return                                  # made with the key: the next target's business
    answers = arrive(one, data)
    assert connection.state == reliability.OPEN and len(one.connections) <= 2
    assert sum(map(len, answers)) * 3 <= len(data)


@target
def packets_of_the_peer(data):
    """Packets with right tags: kind, number and body are anything."""
    one, connection = listener()
    source, now = Source(data), 1.0
    while len(source.data) > 2:
        kind, number, length = source.byte(), source.byte(), source.byte()
        arrive(one, vectors.datagram(0xD0 + kind % 10, number, source.take(length)), now)
        now += number / 256
    seen, received = connection.seen, connection.received
    assert len(seen.starts) <= reliability.ACK_RANGES
    assert len(received.starts) <= reliability.ISLANDS + 1
    assert connection.read <= received.stops[0] <= connection.granted
    buffer = memoryview(bytearray(100))
    while connection.state == reliability.OPEN and connection.readable:
        assert connection.read_into(buffer)
