"""The datagram machine against a bad network, a virtual clock and forged wire.

Tests named u2..u12 are scenarios of quic-interop-runner's kind; p14..p37 are
faults that other implementations met in public.
"""
from __future__ import annotations

import hmac
import json
import math
import os
import random
import re
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist_transports import congestion, reliability
from minidist_transports import packets as wire
from minidist_transports.congestion import Acked, DeliveryRate, NewReno, Rtt
from minidist_transports.packets import Delivered, Flight, Malformed, Ranges, Ring, Run, Seal
from minidist_transports.reliability import ACK_RANGES, HALF_OPEN, ISLANDS, REPLIES, Endpoint
from simnet import Faults, Network

KEY = bytes(range(32))
VECTORS = json.loads((Path(__file__).parent / "vectors" / "udp.json").read_text())
LINK = {"delay": 0.005, "rate": 12.5e6, "queue": 125e3}        # 100 Mbit/s, 10 ms, 1 BDP


class Side:
    """A machine, its stream, and an application that writes and reads all it can."""

    def __init__(self, net: Network, name: str, connection=None, clock=0.0, **options):
        self.net, self.connection = net, connection
        options.setdefault("key", KEY)
        self.endpoint = Endpoint(random=net.random.randbytes, **options)
        self.host = net.host(name, self.endpoint, clock)
        self.host.on_wake = self.work
        self.out, self.at, self.got = memoryview(b""), 0, bytearray()
        self.buffer = memoryview(bytearray(1 << 16))
        self.reads, self.started = True, None

    def work(self):
        if self.endpoint.accepted:
            self.connection = self.endpoint.accepted.popleft()
        each = self.connection
        if each is None:
            return
        if each.state == "open" and not each.closing:
            self.started = self.net.now if self.started is None else self.started
            self.at += each.write(self.out[self.at:])
        while self.reads and (count := each.read_into(self.buffer)):
            self.got += self.buffer[:count]

    def write(self, data):
        self.out, self.at = memoryview(bytes(self.out[self.at:]) + bytes(data)), 0
        self.host.wake()


class Pair:
    """Two sides, "a" dials "b"."""

    def __init__(self, seed=0, faults=None, timeout=60.0, clock=0.0, a=None, b=None, **options):
        self.net = Network(seed, faults or Faults(**LINK))
        self.a = Side(self.net, "a", **options | (a or {}))
        self.b = Side(self.net, "b", clock=clock, **options | (b or {}))
        self.a.connection = self.a.endpoint.connect("b", 0.0, timeout)
        self.there, self.back = self.net.path("a", "b"), self.net.path("b", "a")
        self.a.host.wake()

    def open(self, limit=60.0):
        assert self.net.run(lambda: self.b.connection is not None, self.net.now + limit)
        self.net.run(limit=self.net.now + 0.1)
        assert self.a.connection.state == self.b.connection.state == "open"
        return self

    def deliver(self, data, source=None, target=None, limit=600.0):
        """Send it and check it; seconds that it took after the handshake."""
        source, target = source or self.a, target or self.b
        before = len(target.got)
        source.write(data)
        done = self.net.run(lambda: len(target.got) - before >= len(data) or self.failed,
                            self.net.now + limit)
        assert not self.failed, self.failed
        assert done, f"{len(target.got) - before} of {len(data)} bytes came"
        assert target.got[before:] == data
        return self.net.now - source.started

    @property
    def failed(self):
        return [each.connection.error for each in (self.a, self.b)
                if each.connection is not None and each.connection.error]

    def forge(self, kind, body, number=None, source=None):
        """A sealed packet from `source`'s connection, made by hand."""
        each = (source or self.a).connection
        number = each.number if number is None else number
        each.number = max(each.number, number + 1)
        return memoryview(each.seals[0].close(wire.head(kind, number, each.peer_id) + body))

    def hand(self, kind, body, number=None):
        """Give b a forged packet of a's."""
        self.b.endpoint.receive(self.forge(kind, body, number), "a", self.b.host.now)


def greeting(connection, kind=wire.INIT):
    """The INIT that a dialling connection sends."""
    body = wire.head(kind, 0, 0) + connection._hello() + connection.cookie
    return connection.seals[0].close(body.ljust(wire.BASE_SIZE - 16, b"\0"))


def noise(size, seed=7):
    return random.Random(seed).randbytes(size)


def feedback(*numbers, credit=1 << 40):
    return wire.FEEDBACK.pack(credit, 0, len(numbers) // 2) + struct.pack(
        f">{len(numbers)}Q", *numbers)


# ---- books: against sets and dicts --------------------------------------------------

spans = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda x: (x[0], x[0] + x[1]))


@given(st.lists(st.tuples(st.booleans(), spans), max_size=30), spans)
def test_ranges_are_a_set_of_integers(steps, window):
    ranges, model = Ranges(), set()
    for add, (start, stop) in steps:
        if start == stop:
            continue
        (ranges.add if add else ranges.remove)(start, stop)
        model = model | set(range(start, stop)) if add else model - set(range(start, stop))
    flat = [value for pair in zip(ranges.starts, ranges.stops, strict=True) for value in pair]
    assert flat == sorted(set(flat)), "sorted, and never touching"
    assert {x for x in range(80) if x in ranges} == model
    missing = {x for low, high in ranges.gaps(*window) for x in range(low, high)}
    assert missing == set(range(*window)) - model


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), max_size=8),
       st.lists(spans, max_size=12))
def test_flight_finds_the_packets_of_any_range(runs, takes):
    flight, model, number, offset = Flight(), {}, 0, 0
    before = Delivered(0, 0.0, 0.0, False)
    for count, last in runs:            # packets of 40 bytes, the last of a run shorter
        number += 2                     # numbers used by other kinds lie between
        length = 40 * (count - 1) + last
        flight.add(Run(wire.STREAM, number, number + count, offset, length, 40, 0.0, before))
        for at in range(count):
            low = offset + 40 * at
            model[number + at] = (low, min(low + 40, offset + length))
        number, offset = number + count, offset + length
    for first, stop in takes:
        found = {}
        for run in flight.take(first, stop):
            for at in range(run.stop - run.first):
                low = run.offset + 40 * at
                found[run.first + at] = (low, min(low + 40, run.offset + run.length))
        assert found == {n: model.pop(n) for n in list(model) if first <= n < stop}
        assert flight.bytes == sum(high - low for low, high in model.values())


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 16)), max_size=30))
def test_ring_keeps_the_last_bytes(pieces):
    ring, model = Ring(64), {}
    for value, (offset, size) in enumerate(pieces):
        ring.put(offset, memoryview(bytes([value]) * size))
        for at in range(offset, offset + size):
            model = {k: v for k, v in model.items() if k % 64 != at % 64} | {at: value}
    for at, value in model.items():
        assert bytes(ring.get(at, at + 1)) == bytes([value])


# ---- feedback ------------------------------------------------------------------------

def test_feedback_says_what_came():
    pair = Pair(3, Faults(delay=0.005, loss=0.2)).open()
    pair.deliver(noise(200_000))
    body = memoryview(pair.b.connection._feedback(pair.net.now))[wire.HEAD.size:-16]
    credit, _, ranges = wire.decode_feedback(body)
    assert credit == pair.b.connection.granted
    assert all(last in pair.b.connection.seen for _, last in ranges)
    assert ranges[0][1] == pair.b.connection.seen.stops[-1] - 1, "the largest is always there"


P16 = [
    (b"", "no header"),
    (wire.FEEDBACK.pack(1, 0, 0), "no range"),
    (wire.FEEDBACK.pack(1, 0, 2) + struct.pack(">2Q", 5, 6), "two ranges promised, one there"),
    (feedback(5, 6) + b"\0", "a byte too many"),
    (feedback(6, 5), "last before first"),
    (feedback(5, 9, 4, 4), "ranges that touch"),
    (feedback(5, 9, 7, 8), "a range within the one before"),
    (feedback(5, 9, 11, 12), "oldest first"),
    (feedback(0, 1 << 47), "beyond the last number"),
    (feedback(0, (1 << 64) - 1), "the largest u64"),
]


@pytest.mark.parametrize("body", [body for body, _ in P16], ids=[name for _, name in P16])
def test_p16_malformed_ranges(body):
    with pytest.raises(Malformed):
        wire.decode_feedback(memoryview(body))


def test_p16_a_huge_range_costs_nothing():
    pair = Pair(first_number=1 << 40).open()
    pair.b.endpoint.receive(memoryview(b""), "a", 0.0)      # nothing, and that is no error
    each = pair.b.connection
    each.first_number = 0               # let the range begin at the beginning
    pair.hand(wire.ACK, feedback(0, each.number - 1))
    assert each.state == "open"
    assert not each.flight.runs


def test_p16_more_ranges_than_we_keep_are_fine():
    pair = Pair().open()
    each = pair.b.connection
    each.number = each.skip_at = 10_000         # as if so many had been sent
    numbers = [n for first in range(5000, 4000, -2) for n in (first, first)]
    pair.hand(wire.ACK, feedback(*numbers))
    assert each.state == "open"


def test_only_the_newest_ranges_are_kept():
    pair = Pair().open()
    for number in range(100, 1000, 2):
        pair.hand(wire.PING, b"", number)
    each = pair.b.connection
    assert len(each.seen.starts) <= ACK_RANGES
    duplicates = pair.b.endpoint.stats["duplicates"]
    pair.hand(wire.PING, b"", 101)                   # older than all that is remembered
    assert pair.b.endpoint.stats["duplicates"] == duplicates + 1, "it counts as seen"


@pytest.mark.parametrize("ahead", [0, 1, 1 << 30])
def test_p15_acknowledging_a_packet_never_sent(ahead):
    pair = Pair().open()
    each = pair.b.connection
    pair.hand(wire.ACK, feedback(each.number + ahead, each.number + ahead))
    assert each.state == "closing" and each.code == wire.MALFORMED
    assert "not all were sent" in each.error or "never sent" in each.error


@pytest.mark.parametrize("which", [0, -1], ids=["the first", "the last"])
def test_p15_acknowledging_a_number_left_out(which):
    pair = Pair().open()
    pair.deliver(noise(2 << 20), pair.b, pair.a)            # long enough to leave some out
    each = pair.b.connection
    assert len(each.skipped) > 1
    number = each.skipped[which]
    pair.hand(wire.ACK, feedback(number + 1, number + 1, number - 1, number - 1))
    assert each.state == "open"
    pair.hand(wire.ACK, feedback(number - 1, number + 1))
    assert each.state == "closing" and each.code == wire.MALFORMED


# ---- time ----------------------------------------------------------------------------

def test_rtt_series():
    """RFC 9002, section 5.3, written down again from the text."""
    rtt, srtt, rttvar, least = Rtt(), None, None, None
    for row in VECTORS["rtt"]["series"]:
        sample, delay = row["sample_ms"] / 1e3, row["ack_delay_ms"] / 1e3
        rtt.sample(sample, delay)
        if srtt is None:
            srtt, rttvar, least = sample, sample / 2, sample
        else:
            least = min(least, sample)
            capped = min(delay, 0.005)
            adjusted = sample - capped if sample >= least + capped else sample
            rttvar = 3 / 4 * rttvar + 1 / 4 * abs(srtt - adjusted)
            srtt = 7 / 8 * srtt + 1 / 8 * adjusted
        assert (rtt.smoothed, rtt.variation, rtt.minimum) == pytest.approx((srtt, rttvar, least))
        found = [1e3 * x for x in (rtt.smoothed, rtt.variation, rtt.timeout())]
        assert found == pytest.approx(
            [row["smoothed_ms"], row["variation_ms"], row["pto_ms"]], abs=1e-6)


def test_pto_doubles_up_to_its_ceiling():
    assert [round(Rtt().timeout(n), 3) for n in range(3)] == [1.004, 1.004, 1.004]
    rtt = Rtt()
    for _ in range(50):
        rtt.sample(0.010, 0.0)
    once = rtt.timeout()
    assert once == pytest.approx(0.010 + 0.001 + 0.005, rel=1e-3)
    assert [rtt.timeout(n) / once for n in range(5)] == pytest.approx([1, 2, 4, 8, 16])
    assert rtt.timeout(30) == 0.5


def test_pto_probes_at_doubling_distances():
    pair = Pair().open()
    pair.deliver(noise(100_000))
    pair.net.run(limit=pair.net.now + 1)
    each, start = pair.a.connection, pair.net.now
    pair.there.faults = Faults(loss=1.0)
    times, sent = [], pair.there.count
    pair.a.write(b"x")
    while len(times) < 5:
        pair.net.run(lambda: pair.there.count > sent, start + 30)       # noqa: B023
        sent = pair.there.count
        times.append(pair.net.now - start)
    pto = each.rtt.timeout()
    waits = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert waits == pytest.approx([pto * 2 ** n for n in range(4)])


def test_loss_trace():
    """The 20 events of the vector: what is lost, when, by which threshold."""
    trace = VECTORS["loss"]
    pair = Pair(faults=Faults(delay=0.005)).open()
    each = pair.a.connection
    each.flight, each.largest_acked, each.loss_time = Flight(), -1, float("inf")
    each.rtt = Rtt()
    each.rtt.sample(trace["rtt_ms"] / 1e3, 0.0)
    each.rtt.sample = lambda *_: None                       # hold it still
    each.number = base = 1000
    before = Delivered(0, 0.0, 0.0, False)
    each.sent = each.written = 100 * 20
    for event in trace["events"]:
        now = event["at_ms"] / 1e3
        lost = pair.a.endpoint.stats["datagrams_lost"]
        if "send" in event:
            number = base + event["send"]
            each.flight.add(Run(wire.STREAM, number, number + 1, 100 * event["send"], 100, 100, now,
                                before))
            each.number = number + 1
        elif "ack" in event:
            first, last = event["ack"]
            each._on_feedback(now, 0, 0.0, [(base + first, base + last)])
        else:
            assert each.loss_time == pytest.approx(now)
            each._detect_losses(each.loss_time, [])         # at that very time, or it would spin
        assert pair.a.endpoint.stats["datagrams_lost"] - lost == event["lost"], event
        due = None if each.loss_time == float("inf") else round(1e3 * each.loss_time, 6)
        assert due == event["timer_ms"], event


def test_p25_no_clock_and_no_common_time():
    for module in (reliability, wire, congestion):
        text = Path(module.__file__).read_text()
        assert "import time" not in text and "datetime" not in text
    for clock in (1.0, 3.6e6, 1e9):            # hosts never agree, and may have run for years
        pair = Pair(1, Faults(loss=0.05, **LINK), clock=clock).open()
        pair.deliver(noise(300_000))
        pair.deliver(noise(300_000), pair.b, pair.a)


@pytest.mark.parametrize("timeout", [0.0, 1e18])
def test_p25_extreme_timeouts(timeout):
    net = Network()
    side = Side(net, "a")
    side.connection = side.endpoint.connect("nobody", 0.0, timeout)
    side.host.wake()
    net.run(limit=20.0)
    assert side.connection.state == ("closed" if timeout == 0 else "opening")


def test_p17_an_idle_connection_is_nearly_silent():
    pair = Pair().open()
    pair.deliver(noise(10_000))
    before = pair.there.count + pair.back.count
    assert not pair.net.run(limit=pair.net.now + 600)       # (Host asserts that nothing spins)
    quiet = pair.there.count + pair.back.count - before
    assert 0 < quiet < 600 / reliability.KEEP_ALIVE * 4
    assert pair.a.connection.state == pair.b.connection.state == "open"
    pair.deliver(noise(10_000), pair.b, pair.a)


def test_p17_acknowledgements_are_not_acknowledged():
    pair = Pair().open()
    pair.net.run(limit=pair.net.now + 1)
    sent = pair.there.count, pair.back.count
    pair.a.write(b"x")
    pair.net.run(limit=pair.net.now + 5)
    assert (pair.there.count, pair.back.count) == (sent[0] + 1, sent[1] + 1)


# ---- numbers, windows, pieces ------------------------------------------------------------

@pytest.mark.parametrize("start", [2**16 - 3, 2**31 - 3, 2**32 - 3, 2**40])
def test_p14_numbers_pass_every_width(start):
    pair = Pair(2, Faults(loss=0.1, **LINK), first_number=start).open()
    pair.deliver(noise(400_000))


def test_p14_the_last_number_ends_the_connection():
    pair = Pair(first_number=wire.LAST_NUMBER - 500).open()
    pair.a.write(noise(4 << 20))
    pair.net.run(limit=60)
    assert "used up" in pair.failed[0] and "used up" in pair.failed[1]


@pytest.mark.parametrize("seed", range(3))
def test_p20_much_data_through_a_small_window(seed):
    pair = Pair(seed, Faults(loss=0.05, **LINK), window=1 << 16).open()
    pair.deliver(noise(2 << 20))


def test_p20_every_first_grant_is_lost():
    pair = Pair(window=1 << 16).open()
    send, lost = pair.net.send, set()

    def dropping(source, target, data):
        word, _ = wire.HEAD.unpack_from(data)
        credit = data[wire.HEAD.size:wire.HEAD.size + 8]
        if word >> 48 in (wire.ACK, wire.GRANT) and source == "b" and credit not in lost:
            lost.add(credit)
            return
        send(source, target, data)
    pair.net.send = dropping
    pair.deliver(noise(1 << 20))
    assert len(lost) > 20


def test_p20_a_lost_grant_is_sent_again():
    """Even when what follows it is acknowledged, so that no probe is due."""
    pair = Pair(window=1 << 16).open()
    pair.b.reads = False
    pair.a.write(noise(100_000))
    pair.net.run(limit=pair.net.now + 1)
    pair.back.faults = Faults(drop=frozenset([pair.back.count]), **LINK)
    pair.b.reads = True
    pair.b.host.wake()
    pair.b.write(noise(5000))
    assert pair.net.run(lambda: len(pair.b.got) == 100_000, pair.net.now + 5)


def test_p20_a_reader_that_sleeps():
    pair = Pair(3, Faults(loss=0.3, delay=0.005), window=1 << 16).open()
    pair.b.reads = False
    data = noise(200_000)
    pair.a.write(data)
    pair.net.run(limit=pair.net.now + 25)
    assert pair.b.connection.readable == 1 << 16, "as much as was granted, and no more"
    pair.b.reads = True
    pair.b.host.wake()
    assert pair.net.run(lambda: pair.b.got == data, pair.net.now + 25)


def test_credit_cannot_be_exceeded():
    pair = Pair(window=1 << 16).open()
    pair.hand(wire.STREAM, wire.OFFSET.pack((1 << 16) - 3) + b"abc")
    assert pair.b.connection.state == "open"
    pair.hand(wire.STREAM, wire.OFFSET.pack((1 << 16) - 3) + b"abcd")
    assert pair.b.connection.code == wire.FLOW


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_p36_reassembly_is_a_map_of_bytes(data):
    """Pieces in any order, overlapping, repeated, read in between."""
    pair = Pair(window=512, faults=Faults()).open()
    each, source, model, read = pair.b.connection, noise(2000), set(), 0
    pair.b.reads = False
    for _ in range(data.draw(st.integers(1, 30))):
        start = read + data.draw(st.integers(-100, 500))
        size = data.draw(st.integers(1, 120))
        start, stop = max(0, start), min(max(0, start) + size, each.granted)
        if start < stop:
            pair.hand(wire.STREAM, wire.OFFSET.pack(start) + source[start:stop])
            model |= set(range(start, stop))
        view = memoryview(bytearray(data.draw(st.integers(0, 200))))
        count = each.read_into(view)
        expected = 0
        while expected < len(view) and read + expected in model:
            expected += 1
        assert count == expected and view[:count] == source[read:read + count]
        read += count
        assert each.state == "open"


def test_p36_the_same_bytes_twice_must_be_the_same():
    for second, state in ((b"bcd", "open"), (b"bXd", "closing")):
        pair = Pair().open()
        pair.b.reads = False
        pair.hand(wire.STREAM, wire.OFFSET.pack(10) + b"abc")
        pair.hand(wire.STREAM, wire.OFFSET.pack(11) + second)
        assert pair.b.connection.state == state


def test_p36_only_so_many_gaps():
    pair = Pair().open()
    each = pair.b.connection
    for at in range(2 * ISLANDS):
        pair.hand(wire.STREAM, wire.OFFSET.pack(2 + 2 * at) + b"x")
    assert len(each.received.starts) <= ISLANDS + 1 and each.state == "open"
    assert pair.a.connection.number - 1 not in each.seen, "what was not kept is not acknowledged"


def test_p33_nothing_is_legal_where_it_says_something():
    pair = Pair().open()
    pair.b.endpoint.receive(memoryview(b""), "a", pair.net.now)     # an empty datagram
    assert pair.a.connection.write(memoryview(b"")) == 0
    pair.hand(wire.PING, b"")
    assert pair.b.connection.state == "open"
    pair.hand(wire.STREAM, wire.OFFSET.pack(0))         # but not a piece of nothing
    assert pair.b.connection.code == wire.MALFORMED


def test_p23_sizes_follow_the_path():
    pair = Pair(faults=Faults(mtu=1472, **LINK)).open()
    pair.deliver(noise(500_000))
    assert pair.a.connection.size == 1452
    small, told = Pair(faults=Faults(mtu=1300, delay=0.005)), []
    small.net.run(lambda: small.a.connection.state == "open", 1.0)
    small.a.connection.controller.on_lost = lambda *what: told.append(what)
    small.deliver(noise(500_000))
    assert small.a.connection.size == wire.BASE_SIZE
    assert small.a.endpoint.stats["datagrams_lost"] == reliability.SIZE_TRIES
    assert not told, "a lost probe of the size is no congestion"


def test_p23_a_path_that_shrinks():
    pair = Pair().open()
    pair.deliver(noise(200_000))
    assert pair.a.connection.size == 1452
    for path in (pair.there, pair.back):
        path.faults = Faults(mtu=1200, **LINK)
    pto, start = pair.a.connection.rtt.timeout(), pair.net.now
    pair.deliver(noise(200_000))
    assert pair.a.connection.size == wire.BASE_SIZE
    assert pair.net.now - start < 1 + 8 * pto


def test_p23_a_size_that_the_socket_refuses():
    pair = Pair().open()
    pair.deliver(noise(200_000))
    pair.a.endpoint.too_big("b", 1452, pair.net.now)
    assert pair.a.connection.size == wire.BASE_SIZE
    pair.deliver(noise(200_000))


# ---- strangers, restarts, garbage ---------------------------------------------------------

@pytest.mark.parametrize("key", [KEY, None], ids=["keyed", "insecure"])
def test_p37_random_and_damaged_datagrams(key):
    """Whatever arrives, nothing but our own error, and that stays inside. Nothing is kept of it.

    A million with MINIDIST_DATAGRAMS=1000000: some minutes.
    """
    rng = random.Random(5)
    pair = Pair(key=key).open()
    pair.there.trace = []
    pair.deliver(noise(50_000))
    good = list(pair.there.trace)
    connection, endpoint = pair.b.connection, pair.b.endpoint
    for _ in range(int(os.environ.get("MINIDIST_DATAGRAMS", "4000"))):
        data = bytearray(rng.choice(good)) if rng.random() < 0.8 else \
            bytearray(rng.randbytes(rng.randrange(60)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[:rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data
        endpoint.receive(memoryview(bytes(data)), "a", pair.net.now)
        assert len(endpoint.connections) == 1 and len(endpoint.replies) <= 1
        for _ in endpoint.trains(pair.net.now):     # what it answers goes nowhere
            pass
    assert connection.state == "open"
    assert len(connection.received.starts) == 1 and not endpoint.half
    assert len(connection.seen.starts) <= reliability.ACK_RANGES
    pair.deliver(noise(50_000, 8))


def test_p37_authenticated_garbage_closes_and_nothing_else():
    rng = random.Random(6)
    kinds = (*range(wire.INIT, wire.CLOSE + 1, 0x100), 0xD901, 0xD302)
    for _ in range(400):
        pair = Pair(rng.random(), Faults()).open()
        for _ in range(20):
            body = rng.randbytes(rng.choice((0, 1, 2, 7, 8, 9, 16, 32, 40)))
            if rng.random() < 0.5:
                body = bytes(6) + body[6:]      # small numbers get further
            pair.hand(rng.choice(kinds), body)
        assert pair.b.connection.state in ("open", "closing", "draining", "closed")
        pair.net.run(limit=pair.net.now + 5)


def test_without_the_key_nothing_is_answered():
    pair = Pair(timeout=5.0, a={"key": bytes(32)})
    pair.net.run(limit=10)
    assert pair.there.count > 5 and pair.back.count == 0
    assert "no answer" in pair.a.connection.error and not pair.b.endpoint.connections


def test_replayed_and_reflected_packets_change_nothing():
    pair = Pair().open()
    pair.there.trace, pair.back.trace = [], []
    pair.deliver(noise(100_000))
    states = pair.a.connection.number, pair.b.connection.number
    for data in pair.there.trace:
        pair.b.endpoint.receive(memoryview(data), "a", pair.net.now)        # replayed
        word, _ = wire.HEAD.unpack_from(data)
        turned = wire.HEAD.pack(word, pair.a.connection.id) + data[wire.HEAD.size:]
        pair.a.endpoint.receive(memoryview(turned), "b", pair.net.now)      # reflected
        pair.b.endpoint.receive(memoryview(data), "c", pair.net.now)        # from elsewhere
    assert (pair.a.connection.number, pair.b.connection.number) == states
    assert len(pair.b.got) == 100_000
    assert pair.b.endpoint.stats["dropped"] >= len(pair.there.trace)
    assert pair.a.endpoint.stats["dropped"] >= len(pair.there.trace)


def test_our_own_greeting_reflected_is_not_answered():
    net = Network()
    side = Side(net, "a")
    side.connection = side.endpoint.connect("b", 0.0, 10.0)
    side.endpoint.receive(memoryview(greeting(side.connection)), "b", 0.0)
    assert not side.endpoint.replies and len(side.endpoint.connections) == 1


def test_another_version_is_refused_by_name():
    net = Network()
    side, dialler = Side(net, "b"), Side(net, "a")
    each = dialler.endpoint.connect("b", 0.0, 5.0)
    side.endpoint.receive(memoryview(greeting(each, wire.INIT + 1)), "a", 0.0)
    reply, = side.endpoint.replies
    dialler.endpoint.receive(memoryview(reply.datagrams[0]), "b", 0.0)
    assert "version 2 is not known" in each.error and each.state == "closed"


def test_p22_nothing_that_a_peer_feeds_grows():
    pair = Pair().open()
    a, b = pair.a.connection, pair.b.connection
    for at in range(5000):
        pair.hand(wire.PING, b"", 1000 + 2 * at)                 # acknowledgements pile up?
        pair.hand(wire.STREAM, wire.OFFSET.pack(1 + 3 * at) + b"x", 20_000 + 2 * at)
    assert len(b.seen.starts) <= ACK_RANGES and len(b.received.starts) <= ISLANDS + 1
    assert len(b.flight.runs) < 10 and len(pair.b.endpoint.news) == 1
    for at in range(1000):                                  # strangers with the key, no cookie
        net = Network(at)
        side = Side(net, "x")
        init = greeting(side.endpoint.connect("b", 0.0, 5.0))
        pair.b.endpoint.receive(memoryview(init), ("x", at), pair.net.now)
    assert len(pair.b.endpoint.replies) == REPLIES
    assert len(pair.b.endpoint.connections) == 1
    assert a.state == b.state == "open"


def test_p22_every_limit_is_used():
    texts = [Path(module.__file__).read_text() for module in (reliability, wire, congestion)]
    for text in texts:
        for line in text.splitlines():
            name = line.split(" =")[0].split(",")[0]
            if name.isidentifier() and name.isupper() and " = " in line:
                uses = sum(other.replace(",", " ").replace("(", " ").count(name)
                           for other in texts)
                assert uses > 1, f"{name} is defined and never used"


def test_half_open_connections_are_few_and_short():
    """INITs with good cookies whose senders then say nothing more."""
    net = Network()
    server = Side(net, "b")
    for at in range(HALF_OPEN + 10):
        side = Side(net, ("x", at))
        each = side.endpoint.connect("b", 0.0, 5.0)
        for _ in range(2):                                  # INIT, then INIT with the cookie
            server.endpoint.receive(memoryview(greeting(each)), ("x", at), 0.0)
            if server.endpoint.replies:
                reply = server.endpoint.replies.pop()
                if wire.HEAD.unpack_from(reply.datagrams[0])[0] >> 48 == wire.RETRY:
                    side.endpoint.receive(memoryview(reply.datagrams[0]), "b", 0.0)
        assert each.state == "opening"
    assert len(server.endpoint.connections) == HALF_OPEN
    assert not hasattr(next(iter(server.endpoint.connections.values())), "out"), "no buffers yet"
    for _ in server.endpoint.trains(reliability.COOKIE_LIFE + 1):
        pass
    assert not server.endpoint.connections and not server.endpoint.half


def test_an_init_that_comes_twice_makes_one_connection():
    pair = Pair()
    pair.there.trace = []
    pair.open()
    init = [data for data in pair.there.trace if kind_of(data) == wire.INIT][-1]
    server = pair.b.endpoint
    server.receive(memoryview(init), "a", pair.net.now)
    assert len(server.connections) == 1 and not server.half and not server.replies


def test_a_cookie_is_for_one_address_and_ten_seconds():
    net = Network()
    side, server = Side(net, "a"), Side(net, "b")
    each = side.endpoint.connect("b", 0.0, 60.0)
    server.endpoint.receive(memoryview(greeting(each)), "a", 0.0)
    side.endpoint.receive(memoryview(server.endpoint.replies.pop().datagrams[0]), "b", 0.0)
    init = greeting(each)
    for address, now in (("elsewhere", 0.1), ("a", 10.1)):
        server.endpoint.receive(memoryview(init), address, now)
        word, _ = wire.HEAD.unpack_from(server.endpoint.replies.pop().datagrams[0])
        assert word >> 48 == wire.RETRY and not server.endpoint.connections
    server.endpoint.receive(memoryview(init), "a", 9.9)
    assert len(server.endpoint.connections) == 1 and each.state == "opening"


# ---- scenarios ------------------------------------------------------------------------------

# MINIDIST_SEEDS=20 and more for changes of the protocol
seeds = pytest.mark.parametrize("seed", range(int(os.environ.get("MINIDIST_SEEDS", "10"))))
controllers = pytest.mark.parametrize("controller", ["rate", "newreno"])
GOODPUT = {0.0: 85, 0.01: 80, 0.05: 70, 0.10: 60}          # Mbit/s of 100
COALESCE = 0.0005                   # s: a host looks at what came so often (cards do this too)


def bulk(seed, faults, **options):
    """A pair that is made to move megabytes quickly: no HMAC, few wake-ups."""
    pair = Pair(seed, faults, key=None, ladder=(), **options)
    pair.net.coalesce = COALESCE
    return pair


@seeds
def test_u1_a_clean_path_carries_every_byte_once(seed):
    rng = random.Random(seed)
    delay, rate = 10 ** rng.uniform(-4, -1.3), 10 ** rng.uniform(6, 8)
    size, start = 1 << 20, 20 * (2 * delay + COALESCE)       # round trips to find the rate
    pair = bulk(seed, Faults(delay=delay, rate=rate))
    took = pair.deliver(noise(size))
    pair.net.run(limit=pair.net.now + 1)
    stats = pair.a.endpoint.stats
    assert stats["datagrams_lost"] == stats["retransmissions"] == 0
    assert took < 1.1 * size / rate + start


@seeds
@pytest.mark.parametrize("loss", GOODPUT)
def test_u2_loss_with_the_delivery_rate_controller(loss, seed):
    whole = 5 << 19
    pair = bulk(seed, Faults(loss=loss, **LINK))
    pair.a.write(noise(whole))
    marks = []
    for part in (0.4, 0.9):             # between the start and what the end waits for
        assert pair.net.run(lambda: len(pair.b.got) >= part * whole, 10.0)      # noqa: B023
        marks.append((pair.net.now, dict(pair.a.endpoint.stats)))
    (start, before), (stop, after) = marks
    assert 0.5 * whole * 8e-6 / (stop - start) >= GOODPUT[loss]
    assert after["spurious"] == before["spurious"] == 0
    again = after["retransmissions"] - before["retransmissions"]
    assert again <= (loss + 0.08) * 0.5 * whole / 1160
    assert pair.net.run(lambda: pair.b.got == pair.a.out, 10.0)


@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_u2_loss_with_newreno(loss):
    """Slow, as the formula says: 1.22 packets / (rtt * sqrt(loss)), within a factor of two."""
    size, took = 300_000, 0.0
    for seed in range(20):
        pair = bulk(seed, Faults(loss=loss, **LINK), controller="newreno")
        pair.deliver(noise(300_000))            # out of slow start
        start = pair.net.now
        pair.deliver(noise(size))
        took += pair.net.now - start
    formula = 1.22 * 1160 / (0.0107 * loss ** 0.5)
    assert formula / 2 < 20 * size / took < 2 * formula


@pytest.mark.parametrize("fault", ["loss", "corrupt"])
def test_u3_a_third_of_all_datagrams_lost_or_damaged(fault):
    for seed in range(25):
        pair = Pair(seed, Faults(delay=0.005, **{fault: 0.3}))
        pair.open()
        assert pair.net.now < 20
        pair.deliver(noise(5_000))


@seeds
@controllers
def test_u4_a_blackhole_of_two_seconds(controller, seed):
    faults = Faults(blackholes=((1.0, 3.0),), delay=0.01, rate=5e5, queue=12.5e3)
    pair = bulk(seed, faults, controller=controller)
    pair.a.write(noise(2 << 20))
    pair.net.run(limit=1.5)
    before = len(pair.b.got)
    pair.net.run(limit=2.9)
    assert len(pair.b.got) == before
    assert pair.net.run(lambda: len(pair.b.got) > before, 4.0), "resumes within a second"
    start = len(pair.b.got)
    pair.net.run(limit=pair.net.now + 1)
    assert len(pair.b.got) - start > 0.25e6, "and soon as fast as before"


def test_u4_a_blackhole_without_end():
    pair = Pair().open()
    for path in (pair.there, pair.back):
        path.faults = Faults(loss=1.0)
    pair.a.write(b"hello?")
    pair.net.run(limit=pair.net.now + reliability.IDLE + 1)
    assert pair.failed == ["nothing heard for 30 s"] * 2
    assert not pair.a.endpoint.connections and not pair.b.endpoint.connections
    with pytest.raises(BrokenPipeError, match="nothing heard"):
        pair.a.connection.write(memoryview(b"x"))


@seeds
@pytest.mark.parametrize("direction", ["there", "back"])
def test_u5_each_single_datagram_lost(direction, seed):
    """Each of the first twenty, each way: all comes, at worst as late as an INIT sent again."""
    size, link = 20_000, {"delay": 10 ** random.Random(seed).uniform(-4, -2), "rate": 12.5e6}

    def run(drop):
        pair = Pair(seed, Faults(**link), key=None)
        getattr(pair, direction).faults = Faults(drop=frozenset(drop), **link)
        pair.a.write(noise(size))
        pair.b.write(noise(size))
        assert pair.net.run(lambda: len(pair.a.got) == len(pair.b.got) == size, 10.0), drop
        return pair.net.now
    whole = run([])
    for index in range(20):
        assert run([index]) - whole < reliability.RETRY_FIRST + 4 * link["delay"], index


@seeds
@controllers
def test_u6_p18_reordering_is_not_loss(controller, seed):
    size, sent = 1 << 20, {}
    for reorder in (0.0, 0.1):
        pair = bulk(seed, Faults(reorder=reorder, reorder_by=0.005, **LINK), controller=controller)
        sent[reorder] = pair.deliver(noise(size))
    assert sent[0.1] < sent[0.0] / 0.6
    assert pair.a.endpoint.stats["spurious"] < 0.02 * pair.there.count


@seeds
def test_u7_every_datagram_may_come_again(seed):
    pair = Pair(seed, Faults(duplicate=0.2, **LINK))
    pair.there.trace, size = [], 100_000
    pair.deliver(noise(size))
    pair.deliver(noise(size), pair.b, pair.a)
    pair.net.run(limit=pair.net.now + 1)
    before = pair.b.endpoint.stats["duplicates"]
    assert before > 10
    packets = [data for data in pair.there.trace if kind_of(data) >= wire.STREAM]
    for data in packets:                            # and all of them again
        pair.b.endpoint.receive(memoryview(data), "a", pair.net.now)
    assert pair.b.endpoint.stats["duplicates"] == before + len(packets)
    assert len(pair.b.got) == len(pair.a.got) == size


@seeds
def test_u8_a_path_for_small_datagrams_from_now_on(seed):
    rng = random.Random(seed)
    link = {"delay": rng.uniform(0.001, 0.02), "rate": 12.5e6}
    pair = Pair(seed, Faults(mtu=rng.choice((1200, 1300, 1500)), **link), key=None)
    pair.deliver(noise(200_000))
    assert pair.a.connection.size == (1452 if pair.there.faults.mtu == 1500 else wire.BASE_SIZE)
    pair.a.write(noise(200_000))
    for path in (pair.there, pair.back):
        path.faults = Faults(mtu=wire.BASE_SIZE, **link)
    pto, last, stall = pair.a.connection.rtt.timeout(), pair.net.now, 0.0
    while len(pair.b.got) < 400_000:
        before = len(pair.b.got)
        assert pair.net.run(lambda: len(pair.b.got) > before, pair.net.now + 5)      # noqa: B023
        stall, last = max(stall, pair.net.now - last), pair.net.now
    assert stall < 4 * pto, "a probe timeout, small probes, their answer"
    assert pair.a.connection.size == wire.BASE_SIZE


@seeds
def test_u9_a_dialler_whose_address_changes_dials_again(seed):
    """A connection does not move (10.10-6): each time a new one, and the old address is nobody."""
    pair = Pair(seed, Faults(loss=0.05, **LINK)).open()
    for number in range(3):
        old = pair.b.connection
        pair.net.hosts["a", number] = pair.a.host               # what it sends comes from there
        pair.a.host.address = "a", number
        pair.a.write(b"lost")
        dropped = pair.b.endpoint.stats["dropped"]
        pair.net.run(limit=pair.net.now + 1)
        assert pair.b.endpoint.stats["dropped"] > dropped and not pair.b.got
        pair.a.connection.close(pair.net.now)
        pair.a.connection = pair.a.endpoint.connect("b", pair.net.now, 5.0)
        pair.a.out, pair.a.at = memoryview(b""), 0
        pair.a.host.wake()
        assert pair.net.run(lambda: pair.b.connection is not old, pair.net.now + 2)     # noqa: B023
        pair.deliver(noise(10_000))
        pair.b.got.clear()


@seeds
def test_u10_a_flood_of_recorded_greetings(seed):
    """From a thousand addresses; nothing is kept, little is answered, the good one joins."""
    pair = Pair(seed)
    init = memoryview(greeting(pair.a.connection))
    sent = asked = 0
    for at in range(5000):
        asked += len(init)
        pair.b.endpoint.receive(init, ("spoofed", at % 1000), 0.0)
        sent += sum(len(data) for _, train in pair.b.endpoint.trains(0.0) for data in train)
    assert not pair.b.endpoint.connections and not pair.b.endpoint.half
    assert 0 < sent <= asked / 3
    pair.open()
    pair.deliver(noise(10_000))


def crowd(seed, kinds, faults, late=0.0):
    """Pairs that share one path each way, the n-th from n * late on; none is written to yet."""
    net = Network(seed, faults)
    net.coalesce = COALESCE
    pairs, shared = [], (net.path("path", "there"), net.path("path", "back"))
    for number, kind in enumerate(kinds):
        names = [("a", number), ("b", number)]
        pair = object.__new__(Pair)
        pair.net = net
        pair.a, pair.b = (Side(net, name, key=None, ladder=(), controller=kind) for name in names)
        pair.a.connection = pair.a.endpoint.connect(names[1], 0.0, 60.0)
        pair.there, pair.back = shared
        net.paths[tuple(names)], net.paths[tuple(names[::-1])] = shared
        net.at(number * late, pair.a.host.wake)
        pairs.append(pair)
    return net, pairs


@seeds
def test_u11_eight_push_at_once(seed):
    """Through one bottleneck: nobody starves, and little is lost."""
    size = 3 << 18
    net, pairs = crowd(seed, ["rate"] * 8, Faults(**LINK))
    for pair in pairs:
        pair.a.write(noise(size))
    net.run(limit=0.25)
    start, ends = dict(pairs[0].there.stats), {}
    while len(ends) < 8:
        done = [pair for pair in pairs if len(pair.b.got) == size and pair not in ends]
        ends |= dict.fromkeys(done, net.now)
        assert net.run(lambda: any(len(pair.b.got) == size and pair not in ends    # noqa: B023
                                   for pair in pairs) or len(ends) == 8, 60.0)     # noqa: B023
    assert max(ends.values()) <= 2 * min(ends.values())
    stop = pairs[0].there.stats
    assert start["overflowed"] < 0.2 * start["sent"], "all eight look for the rate at once"
    assert stop["overflowed"] - start["overflowed"] < 0.01 * (stop["sent"] - start["sent"])


@seeds
def test_u12_p27_a_restart_on_the_same_address(seed):
    pair = Pair(seed, Faults(loss=0.05, **LINK)).open()
    pair.there.trace = []
    pair.deliver(noise(50_000))
    old, recorded = pair.b.connection, list(pair.there.trace)
    again = Side(pair.net, "a")                     # killed, and started again at once
    again.connection = again.endpoint.connect("b", pair.net.now, 10.0)
    start = pair.net.now
    again.host.wake()
    assert pair.net.run(lambda: pair.b.connection is not old, start + 2.0)
    assert old.state == "closed" and old.error == "the peer has restarted"
    dropped = pair.b.endpoint.stats["dropped"]
    for data in recorded:                           # late packets of the earlier life
        pair.b.endpoint.receive(memoryview(data), "a", pair.net.now)
    assert pair.b.endpoint.stats["dropped"] == dropped + len(recorded)
    pair.b.got.clear()
    again.write(noise(50_000))
    assert pair.net.run(lambda: pair.b.got == noise(50_000), pair.net.now + 10)


def test_both_may_dial_at_once():
    net = Network(1, Faults(**LINK))
    a, b = Side(net, "a"), Side(net, "b")
    ours, theirs = a.endpoint.connect("b", 0.0, 5.0), b.endpoint.connect("a", 0.0, 5.0)
    a.host.wake()
    b.host.wake()
    net.run(limit=1.0)
    assert ours.state == theirs.state == "open" and a.connection is not ours
    assert len(a.endpoint.connections) == len(b.endpoint.connections) == 2


# ---- the end ----------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(5))
def test_close_delivers_what_was_written(seed):
    pair = Pair(seed, Faults(loss=0.2, **LINK)).open()
    data = noise(300_000)
    pair.a.write(data)
    pair.a.connection.close(pair.net.now)
    pair.a.host.wake()
    assert pair.net.run(lambda: pair.b.connection.ended, pair.net.now + 3)
    pair.b.work()
    assert pair.b.got == data and pair.b.connection.error is None
    pair.net.run(limit=pair.net.now + 5)
    assert not pair.a.endpoint.connections and not pair.b.endpoint.connections


def test_close_to_nobody_takes_a_bounded_time():
    pair = Pair().open()
    pair.there.faults = Faults(loss=1.0)
    pair.a.write(noise(1000))
    pair.a.connection.close(pair.net.now)
    pair.a.host.wake()
    pair.net.run(lambda: not pair.a.endpoint.connections, pair.net.now + 10)
    assert pair.a.connection.state == "closed" and pair.a.connection.code == wire.TIMED_OUT
    assert pair.net.now < reliability.CLOSE_LIMIT + 1


def test_abort_tells_the_peer_why():
    pair = Pair().open()
    pair.a.connection.abort(pair.net.now, wire.GONE, "the disk is full")
    pair.a.host.wake()
    pair.net.run(limit=pair.net.now + 5)
    assert pair.b.connection.error == "closed by the peer: the disk is full"
    assert not pair.a.endpoint.connections and not pair.b.endpoint.connections


def test_close_is_said_again_until_it_is_heard():
    """By the one that closes, every PTO for 3 PTO; the other only answers."""
    pair = Pair(faults=Faults(delay=0.005)).open()
    pair.back.faults = Faults(loss=1.0)             # no answer comes
    pair.there.trace, pair.back.trace = [], []
    pto, start = pair.a.connection.rtt.timeout(), pair.net.now
    pair.a.connection.write(memoryview(noise(5000)))         # too late to go
    pair.a.connection.abort(start, wire.GONE, "enough")
    pair.a.host.wake()
    pair.net.run(lambda: not pair.a.endpoint.connections, start + 5)
    assert pair.net.now - start == pytest.approx(3 * pto)
    pair.net.run(limit=pair.net.now + 5)
    said, heard = pair.there.trace, pair.back.trace
    assert {kind_of(data) for data in said + heard} == {wire.CLOSE}
    assert 3 <= len(said) == len(heard) <= 4
    assert all(data[16:18] == wire.CODE.pack(wire.GONE) for data in heard)
    assert not pair.b.endpoint.connections


# ---- what single rules ask for ------------------------------------------------------------------

def kind_of(data):
    return wire.HEAD.unpack_from(data)[0] >> 48


def test_greetings_of_another_length_are_dropped():
    """Else an answer could be longer than a third of what asked for it."""
    net = Network()
    side = Side(net, "b")
    each = Side(net, "a").endpoint.connect("b", 0.0, 5.0)
    init = greeting(each)
    for size in (1199, 1201):
        body = init[:-16].ljust(size - 16, b"\0")[:size - 16]
        side.endpoint.receive(memoryview(each.seals[0].close(body)), "a", 0.0)
        assert not side.endpoint.replies
    side.endpoint.receive(memoryview(init), "a", 0.0)
    assert len(side.endpoint.replies) == 1


def test_a_dialler_asks_at_doubling_intervals():
    net, times = Network(), []
    side = Side(net, "a")
    net.send = lambda *_: times.append(net.now)
    each = side.connection = side.endpoint.connect("b", 0.0, 10.0)
    side.host.wake()
    net.run(limit=3.0)
    assert times == pytest.approx([0, 0.25, 0.75, 1.75, 2.75])
    retry = wire.head(wire.RETRY, 0, each.id) + bytes(range(24))
    for _ in range(2):                              # the second brings the same cookie
        side.host.receive(each.seals[0].close(retry), "b")
    net.run(limit=4.0)
    assert times[5:] == pytest.approx([3.0, 3.25, 3.75])


def test_the_listener_waits_for_a_packet_under_the_new_keys():
    pair = Pair(faults=Faults(delay=0.005), ladder=())
    pair.there.trace = []
    assert pair.net.run(lambda: pair.a.connection.state == "open", 5.0)
    pair.net.run(limit=pair.net.now + 0.004)        # ACCEPT came, and what follows is under way
    kinds = [kind_of(data) for data in pair.there.trace]
    assert kinds[:2] == [wire.INIT, wire.PING]
    assert pair.b.connection is None and len(pair.b.endpoint.half) == 1
    pair.net.run(limit=pair.net.now + 0.004)
    assert pair.b.connection.state == "open" and not pair.b.endpoint.half


def test_ids_and_nonces_are_new():
    endpoint = Endpoint(KEY)
    several = [endpoint.connect("b", 0.0, 5.0) for _ in range(20)]
    assert len({each.id for each in several}) == len({each.nonce for each in several}) == 20
    assert 0 < min(each.id for each in several) and max(each.id for each in several) >= 1 << 56


def test_tags_and_cookies_are_compared_in_constant_time(monkeypatch):
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest",
                        lambda a, b: compared.append(bytes(b)[:16]) or compare(a, b))
    pair = Pair()
    pair.there.trace = []
    pair.open()
    for data in pair.there.trace:
        assert bytes(data[-16:]) in compared
    cookie = pair.a.connection.cookie
    assert cookie[:16] in compared


def test_every_packet_has_a_number_of_its_own():
    pair = Pair(4, Faults(loss=0.2, **LINK))
    pair.there.trace, pair.back.trace = [], []
    pair.open()
    pair.deliver(noise(300_000))
    assert pair.a.endpoint.stats["retransmissions"] > 10
    for path in (pair.there, pair.back):
        numbers = [wire.HEAD.unpack_from(data)[0] & wire.NUMBER for data in path.trace
                   if kind_of(data) >= wire.STREAM]
        assert numbers == sorted(set(numbers))


def test_when_feedback_is_due():
    def due(*packets):
        pair = Pair(faults=Faults(delay=0.005)).open()
        each = pair.b.connection
        for kind, body, skip in packets:
            pair.hand(kind, body or feedback(each.number - 1, each.number - 1),
                      pair.a.connection.number + skip)
        assert each.state == "open"
        return each.ack_at - pair.net.now if each.ack_at else 0.0
    one = (wire.STREAM, wire.OFFSET.pack(0) + b"a", 0)
    two = (wire.STREAM, wire.OFFSET.pack(1) + b"b", 0)
    assert due(one) == pytest.approx(0.005)
    assert due(one, two) == due((wire.PING, b"\0", 0)) == 0
    assert due((one[0], one[1], 1)) == 0            # its number is not the next
    assert due((wire.ACK, b"", 0)) == float("inf")


def test_what_a_grant_told_is_not_told_again():
    pair = Pair(2, Faults(loss=0.1, **LINK), window=1 << 16).open()
    pair.deliver(noise(500_000))
    each = pair.b.connection
    assert each.seen_floor > 100
    body = memoryview(each._feedback(pair.net.now))[wire.HEAD.size:-16]
    assert wire.decode_feedback(body)[2][-1][0] >= each.seen_floor
    assert each.seen_floor - 50 in each.seen, "it counts as seen"


def test_what_was_lost_goes_before_what_is_new():
    pair = Pair().open()
    each = pair.a.connection
    each.write(memoryview(noise(50_000)))
    each.sent = 10_000
    each.resend.add(2000, 2100)
    first = next(iter(each._train(pair.net.now, 5, 1000)))
    assert wire.OFFSET.unpack_from(first, wire.HEAD.size) == (2000,)
    assert len(first) == wire.HEADER.size + 100 + 16, "these bytes and no more"


def test_a_probe_timeout_declares_nothing_lost():
    pair = Pair().open()
    pair.deliver(noise(100_000))
    pair.there.faults = Faults(loss=1.0)
    lost = pair.a.endpoint.stats["datagrams_lost"]
    pair.a.write(noise(10_000))
    pair.net.run(limit=pair.net.now + 3)
    assert pair.a.connection.doublings > 3
    assert pair.a.endpoint.stats["datagrams_lost"] == lost


def test_credit_never_falls():
    pair = Pair().open()
    each = pair.b.connection
    number = each.number - 1
    for credit in (1 << 30, 5, 1 << 29):            # they may come in any order
        pair.hand(wire.ACK, feedback(number, number, credit=credit))
        assert each.credit == 1 << 30


# ---- controllers --------------------------------------------------------------------------------

def run_of(size, sent=1.0):
    return Run(wire.STREAM, 0, 1, 0, size, size, sent, Delivered(0, 0.0, 0.0, False))


def test_newreno_is_rfc_9002():
    reno = NewReno(Rtt())
    assert reno.window == 12_000
    reno.on_acked(1.1, Acked([run_of(1200)], 0, 0.0, False, False))
    assert reno.window == 13_200, "slow start: as much as was acknowledged"
    reno.on_acked(1.1, Acked([run_of(1200)], 0, 0.0, True, False))
    assert reno.window == 13_200, "an idle window proves nothing"
    reno.on_lost(2.0, 1.5, 1200, False)
    assert reno.window == 6_600
    reno.on_lost(2.1, 1.9, 1200, False)
    assert reno.window == 6_600, "once a round trip"
    reno.on_acked(2.2, Acked([run_of(1200, 1.9)], 0, 0.0, False, False))
    assert reno.window == 6_600, "packets from before the loss do not count"
    reno.on_acked(3.0, Acked([run_of(1200, 2.5)], 0, 0.0, False, False))
    assert reno.window == pytest.approx(6_600 + 1200 * 1200 / 6_600), "one packet a round trip"
    window = reno.window
    reno.on_lost(4.0, 3.5, 1200, False)
    reno.on_spurious(3.5)
    assert reno.window == window, "it was late, not lost"
    reno.on_lost(5.0, 4.5, 1200, True)
    assert reno.window == 2_400, "persistent congestion"


def acked(rate=1e6, limited=False, length=10_000):
    return Acked([run_of(length)], 1000, rate, limited, True)


def cruising():
    """A controller after its start on a path of 1 MB/s and 10 ms, and the next time."""
    rtt = Rtt()
    rtt.sample(0.010, 0.0)
    rate = DeliveryRate(rtt)
    for turn in range(5):
        rate.on_acked(0.010 * turn, acked())
    assert not rate.starting and rate.bandwidth == 1e6 and rate.floor == 0.010
    return rate, 0.05


def test_delivery_rate_believes_a_loss_when_there_is_a_queue():
    rate, now = cruising()
    window = rate.window
    rate.on_lost(now, now - 0.01, 1200, False)
    assert rate.window == window, "no answer was late: noise"
    rate.fair *= 2
    for turn in range(2):
        rate.rtt.latest = rate.rtt.smoothed = 0.020
        rate.on_acked(now + 0.02 * turn, acked())
    window = rate.window
    rate.on_lost(now + 0.03, now + 0.02, 1200, False)
    assert rate.window == pytest.approx(max(0.7 * window, 10_000))
    rate.on_lost(now + 0.03, now + 0.02, 1200, False)
    assert rate.window == pytest.approx(max(0.7 * window, 10_000)), "once a round trip"
    rate.on_spurious(now + 0.02)
    assert rate.fair == window, "it was late, not lost"
    rate.on_lost(now + 0.05, now + 0.04, 1200, True)
    assert rate.starting and rate.bandwidth == 0, "persistent congestion"


def test_delivery_rate_takes_much_loss_for_congestion_at_any_delay():
    rate, now = cruising()
    rate.fair, cuts = 50_000, 0
    for turn in range(20):
        window = rate.fair
        rate.on_lost(now + 0.01 * turn, now + 0.01 * turn - 0.001, 3000, False)
        cuts += rate.fair < window
        rate.on_acked(now + 0.01 * turn, acked(length=7000))
    assert cuts > 3 and rate.fair < 20_000


def test_delivery_rate_learns_nothing_from_an_application_that_sends_little():
    rate, now = cruising()
    window = rate.window
    for turn in range(40):
        rate.on_acked(now + 0.01 * turn, acked(2e5, limited=True))
    assert rate.bandwidth == 1e6 and rate.window == window
    for turn in range(40, 50):
        rate.on_acked(now + 0.01 * turn, acked(2e5))
    assert rate.bandwidth == 2e5
    assert window < rate.fair < 1.5 * window, "time that proved nothing counts for nothing"


class Cubic(congestion.Controller):
    """What Linux sends on the same path: RFC 9438, slow start with the delay's veto (RFC 9406)."""

    def __init__(self, rtt):
        super().__init__(rtt)
        self.threshold, self.recovery = math.inf, -math.inf
        self.top = self.reno = self.epoch = 0.0

    def on_acked(self, now, acked):
        arrived = sum(run.length for run in acked.runs if run.time > self.recovery)
        least = self.rtt.minimum
        if acked.limited:
            return
        if self.window < self.threshold:
            self.window += arrived
            if self.rtt.latest > least + min(max(least / 8, 0.004), 0.016):
                self.threshold = self.window
        else:
            bend = (0.3 * self.top / self.size / 0.4) ** (1 / 3)
            since = now - self.epoch + self.rtt.smoothed
            cubic = self.top + 0.4 * self.size * (since - bend) ** 3
            self.reno += 9 / 17 * self.size * arrived / self.window
            self.window += max(min(cubic, 1.5 * self.window) - self.window, 0) \
                * arrived / self.window
            self.window = max(self.window, self.reno)
        self.rate = 1.25 * self.window / self.rtt.smoothed

    def on_lost(self, now, sent, length, persistent):
        if sent > self.recovery:
            self.recovery = self.epoch = now
            self.top = self.window * (1.0 if self.window >= self.top else 0.85)
            self.window = self.threshold = self.reno = max(0.7 * self.window, 2 * self.size)


def rates(seed, kinds, faults, seconds, late=0.0, warm=4.0):
    """Mbit/s of flows that share one path."""
    net, pairs = crowd(seed, kinds, faults, late)
    for pair in pairs:
        pair.a.out = memoryview(bytes(int(faults.rate * (warm + seconds))))
    net.run(limit=warm)
    before = [len(pair.b.got) for pair in pairs]
    net.run(limit=warm + seconds)
    return [(len(pair.b.got) - count) * 8e-6 / seconds
            for pair, count in zip(pairs, before, strict=True)]


@pytest.mark.parametrize("queue", [0.25, 1, 4])
@pytest.mark.parametrize("other", ["cubic", "rate"])
def test_two_flows_share_a_path(queue, other, monkeypatch):
    """Queue in products of rate and round trip; between a quarter and three quarters each."""
    monkeypatch.setitem(congestion.CONTROLLERS, "cubic", Cubic)
    link = Faults(delay=0.005, rate=2.5e6, queue=25e3 * queue)
    found = rates(0, ["rate", other], link, 5.0, late=1.0)
    assert sum(found) > 0.85 * 20
    assert 1 / 3 < found[0] / found[1] < 3, found


# ---- vectors ------------------------------------------------------------

def test_vector_keys_and_sealed_datagrams():
    """Computed again with nothing but hmac and struct."""
    for case in VECTORS["sealed"]:
        key, data = bytes.fromhex(case["key"]), bytes.fromhex(case["datagram"])
        own = hmac.new(key, case["label"].encode() + bytes.fromhex(case["nonces"]),
                       "sha256").digest()
        assert own.hex() == case["derived"]
        assert hmac.new(own, data[:-16], "sha256").digest()[:16] == data[-16:]
        seal = Seal(key, case["label"], bytes.fromhex(case["nonces"]))
        assert seal.opens(memoryview(data)) and seal.close(data[:-16]) == data
        kind, number, receiver = data[0], int.from_bytes(data[2:8], "big"), data[8:16].hex()
        assert [kind, data[1], number, receiver] == [
            case["kind"], 1, case["number"], case["connection_id"]]
    case = VECTORS["insecure"]
    data = bytes.fromhex(case["datagram"])
    assert zlib.crc32(data[:-4]).to_bytes(4, "big") == data[-4:]
    assert Seal(None).close(data[:-4]) == data


def test_vector_feedback():
    for case in VECTORS["feedback"]:
        credit, delay, ranges = wire.decode_feedback(memoryview(bytes.fromhex(case["body"])))
        assert [credit, round(delay * 1e6), [list(pair) for pair in ranges]] == [
            case["credit"], case["delay_us"], case["ranges"]]
    for case in VECTORS["feedback_malformed"]:
        with pytest.raises(Malformed):
            wire.decode_feedback(memoryview(bytes.fromhex(case["body"])))


def test_vector_cookie():
    case = VECTORS["cookie"]
    secret, hello = bytes.fromhex(case["secret"]), bytes.fromhex(case["hello"])
    address = ("127.0.0.1", 4711)
    text = struct.pack(">Q", case["time_us"]) + case["address"].encode() + hello
    mac = hmac.new(secret, text, "sha256").digest()[:16]
    assert (struct.pack(">Q", case["time_us"]) + mac).hex() == case["cookie"]
    endpoint = Endpoint(KEY, random=lambda size: secret[:size])
    assert endpoint._cookie(case["time_us"], address, hello).hex() == case["cookie"]
    assert len(hello) == wire.HELLO.size


# ---- the document -----------------------------------------------------------------------

RULES = {
    "10.1-1": "test_p37_random_and_damaged_datagrams",
    "10.1-2": "test_p37_authenticated_garbage_closes_and_nothing_else",
    "10.1-3": "test_p16_malformed_ranges",
    "10.1-4": "test_p33_nothing_is_legal_where_it_says_something",
    "10.1-5": "test_ids_and_nonces_are_new",
    "10.2-1": "test_tags_and_cookies_are_compared_in_constant_time",
    "10.2-2": "test_vector_keys_and_sealed_datagrams",
    "10.2-3": "test_replayed_and_reflected_packets_change_nothing",
    "10.3-1": "test_greetings_of_another_length_are_dropped",
    "10.3-2": "test_u10_a_flood_of_recorded_greetings",
    "10.3-3": "test_a_cookie_is_for_one_address_and_ten_seconds",
    "10.3-4": "test_a_dialler_asks_at_doubling_intervals",
    "10.3-5": "test_half_open_connections_are_few_and_short",
    "10.3-6": "test_another_version_is_refused_by_name",
    "10.3-7": "test_our_own_greeting_reflected_is_not_answered",
    "10.3-8": "test_the_listener_waits_for_a_packet_under_the_new_keys",
    "10.3-9": "test_u12_p27_a_restart_on_the_same_address",
    "10.4-1": "test_every_packet_has_a_number_of_its_own",
    "10.4-2": "test_p14_the_last_number_ends_the_connection",
    "10.4-3": "test_p15_acknowledging_a_number_left_out",
    "10.4-4": "test_p15_acknowledging_a_packet_never_sent",
    "10.5-1": "test_when_feedback_is_due",
    "10.5-2": "test_p20_a_lost_grant_is_sent_again",
    "10.5-3": "test_feedback_says_what_came",
    "10.5-4": "test_what_a_grant_told_is_not_told_again",
    "10.5-5": "test_p36_only_so_many_gaps",
    "10.6-1": "test_loss_trace",
    "10.6-2": "test_what_was_lost_goes_before_what_is_new",
    "10.6-3": "test_p20_a_lost_grant_is_sent_again",
    "10.6-4": "test_a_probe_timeout_declares_nothing_lost",
    "10.6-5": "test_loss_trace",
    "10.7-1": "test_newreno_is_rfc_9002",
    "10.7-2": "test_p23_sizes_follow_the_path",
    "10.8-1": "test_credit_never_falls",
    "10.8-2": "test_p20_a_reader_that_sleeps",
    "10.8-3": "test_credit_cannot_be_exceeded",
    "10.8-4": "test_p22_nothing_that_a_peer_feeds_grows",
    "10.8-5": "test_p36_the_same_bytes_twice_must_be_the_same",
    "10.8-6": "test_p20_every_first_grant_is_lost",
    "10.9-1": "test_p23_sizes_follow_the_path",
    "10.9-2": "test_p23_sizes_follow_the_path",
    "10.9-3": "test_p23_a_path_that_shrinks",
    "10.10-1": "test_close_delivers_what_was_written",
    "10.10-2": "test_close_is_said_again_until_it_is_heard",
    "10.10-3": "test_close_is_said_again_until_it_is_heard",
    "10.10-4": "test_u4_a_blackhole_without_end",
    "10.10-5": "test_u12_p27_a_restart_on_the_same_address",
    "10.10-6": "test_replayed_and_reflected_packets_change_nothing",
}


def test_every_rule_of_section_10_has_a_test():
    document = (Path(__file__).parent.parent / "PROTOCOL.md").read_text()
    ids = re.findall(r"^- \[MDP-(10[\d.]*-\d+)\]", document, re.M)
    assert sorted(ids) == sorted(RULES)
    for rule, test in RULES.items():
        assert callable(globals().get(test)), f"MDP-{rule} names {test}"
