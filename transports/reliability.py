"""The datagram machine: one reliable, ordered byte stream over datagrams.

A network may lose, delay, repeat, reorder and damage datagrams, and strangers
may send some too. Here a stream of bytes is made of that, as QUIC makes one:

    every packet has a number of its own, never used twice
    the receiver says which numbers came        -> round-trip time, losses
    lost *bytes* go out again in new packets    -> the stream is whole
    a controller says how much, how fast        -> the network survives
    the receiver grants credit in bytes         -> its memory is bounded

There are no sockets, threads or clocks in this file: datagrams and the time
come in; datagrams, bytes and the time of the next wish come out. So the tests
run years of bad network in seconds, and every run can be repeated exactly.

An `Endpoint` is one UDP socket's worth of `Connection`s:

    endpoint.receive(datagram, address, now)        for what arrived
    for train in endpoint.trains(now): ...          send these
    endpoint.deadline()                             come back then at the latest

PROTOCOL.md, section 10, is the specification; [MDP-10.x-n] names its rules.
"""
from __future__ import annotations

import hmac
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NamedTuple

from . import packets as wire
from .congestion import ACK_DELAY, CONTROLLERS, GRANULARITY, Acked, Rtt
from .packets import Delivered, Flight, Malformed, Ranges, Ring, Run, Seal

# ---- constants, each with its source ------------------------------------------

LADDER = (1452,)                # sizes to try beyond: Ethernet less IPv6, UDP, a tunnel (RFC 8899)
SIZE_TRIES = 3                  # probes of one size before giving up (RFC 8899, 5.1.2)
SIZE_AGAIN = 600.0              # s until larger sizes are tried again (RFC 8899, 5.1.1)
SIZE_REST = 60.0                # s, when the path carried them and then did not (section 10.9)
SWALLOWED = 10                  # larger ones lost in a row while smaller ones pass (ours)
WINDOW = 4 << 20                # bytes granted: 1 Gbit/s over 32 ms (quinn grants 1.25 MB)
UPDATE = 1 / 4                  # grant again when so much of it was read (quic-go)
ISLANDS = 1000                  # gaps in the stream that are kept track of (quic-go)
ACK_RANGES = 64                 # number ranges remembered and reported (quic-go)
ACK_EVERY = 2                   # packets per acknowledgement (RFC 9000, 13.2.2)
PRUNE_RANGES = 8                # beyond, ask whether the peer knows the older ones by now
PACKET_THRESHOLD = 3            # (RFC 9002, 6.1.1)
TIME_THRESHOLD = 9 / 8          # (RFC 9002, 6.1.2)
PERSISTENT = 3                  # probe timeouts without any acknowledgement (RFC 9002, 7.6.1)
BURST_PACKETS = 10              # may leave back to back (RFC 9002, 7.7)
BURST_TIME = 0.002              # s: or so much, as timers are no finer (ours)
TRAIN = 64_000                  # bytes handed over at once: what UDP_SEGMENT takes (Linux)
IDLE = 30.0                     # s of silence that end a connection (RFC 9000, 10.1; quinn)
KEEP_ALIVE = IDLE / 3           # s of silence, ours and theirs, until we ask (RFC 9000, 10.1.2)
RETRY_FIRST, RETRY_LAST = 0.25, 1.0     # s between INITs, doubling (ours)
COOKIE_LIFE = 10.0              # s (section 10.3; SCTP gives 60)
HALF_OPEN = 64                  # accepted connections whose first packet has not come (ours)
REPLIES = 64                    # handshake replies that wait for the socket; newest win (ours)
CLOSE_LIMIT = 3.0               # s to deliver what was written, and say so (ours)
CLOSE_TIMES = 3                 # probe timeouts that a closed connection lingers (RFC 9000, 10.2)
STATS = ("datagrams_sent", "datagrams_received", "datagrams_lost", "retransmissions",
         "spurious",            # declared lost, and came after all
         "duplicates",          # packets that came again, or were replayed
         "dropped")             # datagrams of strangers, of earlier lives, damaged ones
SPARE = 256                     # numbers kept for saying that they are used up (ours)
FIRST_SKIP = 256                # packets until a number is left out on purpose (quic-go)

# ---- a connection ---------------------------------------------------------------------------

OPENING, ACCEPTED, OPEN, CLOSING, DRAINING, CLOSED = (
    "opening", "accepted", "open", "closing", "draining", "closed")


class Connection:
    """One peer: what was sent, what came, and a byte stream each way.

    opening    the dialling side, until ACCEPT comes
    accepted   the other side, until the first packet under the new keys comes
    open       both streams flow (after close(): until the peer has all we wrote)
    closing    CLOSE was sent, the peer's is awaited
    draining   the peer's CLOSE came; ours answers each repetition
    closed     nothing more is sent
    """

    def __init__(self, endpoint: Endpoint, address: Any, now: float):
        self.endpoint, self.address = endpoint, address
        self.id = endpoint.new_id()                 # the peer writes it on its packets
        self.nonce = endpoint.random(32)
        self.state = OPENING
        self.error: str | None = None               # why it ended, None: in order
        self.peer_id, self.peer_incarnation, self.peer_nonce = 0, b"", b""
        self.stats = endpoint.stats
        self.due = 0.0                              # when trains() should be called
        # handshake
        self.cookie, self.accept = bytes(wire.COOKIE.size), b""
        self.interval, self.again, self.limit = RETRY_FIRST, now, inf
        self.seals = (endpoint.seal, endpoint.seal)             # what we send, what comes
        # what was sent
        self.number = self.first_number = endpoint.first_number
        self.skip_at, self.skip_gap = self.number + FIRST_SKIP, FIRST_SKIP
        self.skipped: list[int] = []                # left out so far: a few, as gaps double
        self.flight, self.lost = Flight(), Flight()
        self.largest_acked = -1
        self.rtt = Rtt()
        self.packet_threshold, self.reordering = PACKET_THRESHOLD, 0.0
        self.loss_time, self.asked_time, self.acked_sent = inf, now, -inf
        self.doublings, self.probes = 0, 0
        self.pace = -inf                            # when the next packet may leave
        self.delivered, self.delivered_time, self.delivered_sent = 0, now, now
        self.round_end, self.limited_until = 0, -1
        # the stream out: [0, acked) is gone, up to `sent` it was sent, to `written` it is kept
        self.acked, self.resend = Ranges((0, 0)), Ranges()
        self.sent = self.written = self.credit = 0
        self.blocked = False                        # a write found no room
        # what came
        self.seen = Ranges((self.first_number, self.first_number))
        self.seen_floor, self.seen_time = self.first_number, now
        self.unacked, self.ack_at, self.asked_prune = 0, inf, -inf
        self.heard = now
        # the stream in: up to `read` it was read, to received.stops[0] it may be
        self.received, self.read = Ranges((0, 0)), 0
        self.granted = endpoint.window
        self.grant_due = self.ping_due = self.close_due = False
        # sizes
        self.size, self.rung, self.tries, self.size_at = wire.BASE_SIZE, 0, 0, now
        self.large_acked, self.swallowed = -1, 0    # packets larger than the base size
        # the end
        self.closing = self.ended = False           # we want it; the peer has ended
        self.code, self.reason = wire.NO_ERROR, ""

    # -- the stream, for the layer above

    @property
    def readable(self) -> int:
        return self.received.stops[0] - self.read

    @property
    def writable(self) -> int:
        return self.endpoint.window - (self.written - self.acked.stops[0])

    def write(self, data: memoryview) -> int:
        """Take what there is room for, and say how many bytes that was."""
        if self.state != OPEN or self.closing:
            raise BrokenPipeError(self.error or f"the connection is {self.state}")
        count = min(len(data), self.writable)
        self.out.put(self.written, data[:count])
        self.written += count
        self.blocked = count < len(data)
        self.due = 0.0
        return count

    def read_into(self, view: memoryview) -> int:
        """Move bytes that arrived in order into the view; how many."""
        count = min(len(view), self.readable)
        if not count:
            return 0
        view[:count] = self.into.get(self.read, self.read + count)
        self.read += count
        window = self.endpoint.window
        if self.read + window >= self.granted + UPDATE * window and not self.ended:
            self.granted, self.grant_due, self.due = self.read + window, True, 0.0
        return count

    def close(self, now: float) -> None:
        """End in order: deliver what was written, then say so, within CLOSE_LIMIT."""
        if self.state in (OPENING, ACCEPTED):
            self.state = CLOSED
        elif self.state == OPEN and not self.closing:
            self.closing, self.limit = True, now + CLOSE_LIMIT
        self.due = 0.0

    def abort(self, now: float, code: int, reason: str) -> None:
        """End at once, and tell the peer why."""
        self._end(now, CLOSING if self.state in (ACCEPTED, OPEN) else CLOSED, code, reason)

    def _end(self, now: float, state: str, code: int, reason: str) -> None:
        self.state, self.code, self.reason = state, code, reason
        if code != wire.NO_ERROR and self.error is None:
            self.error = reason
        self.ended = self.close_due = True
        self.limit = now + CLOSE_TIMES * self.rtt.timeout()
        self.again = now + self.rtt.timeout()
        self.due = 0.0
        self.endpoint.news[self] = None

    # -- what arrives

    def receive(self, data: memoryview, word: int, now: float) -> None:
        """One datagram that carries our id, from the peer's address."""
        kind = word >> 48
        if self.state == OPENING:
            self._handshake(data, kind, now)
            return
        seal = self.seals[1]
        number, end = word & wire.NUMBER, len(data) - seal.size
        if self.state == CLOSED or kind < wire.STREAM or kind & 0xFF != wire.INIT & 0xFF \
                or end < wire.HEAD.size or not seal.opens(data):
            self.stats["dropped"] += 1
            return
        seen = self.seen
        if number in seen:                          # the network, or a replay
            self.stats["duplicates"] += 1
            return
        self.heard = now
        self.stats["datagrams_received"] += 1
        if self.state == ACCEPTED:                  # the peer has the keys: it is the one
            self._open()
        elif self.state != OPEN and kind != wire.CLOSE:
            return
        try:
            if kind == wire.STREAM:
                if not self._on_stream(data[wire.HEAD.size:end]):
                    return                          # no room to remember it: as if lost
            elif kind in (wire.ACK, wire.GRANT):
                self._on_feedback(now, *wire.decode_feedback(data[wire.HEAD.size:end]))
            elif kind == wire.CLOSE:
                self._on_close(now, *wire.decode_close(data[wire.HEAD.size:end]))
            elif kind != wire.PING:
                raise Malformed(f"packet of unknown kind {kind >> 8:#x}")
        except Malformed as error:
            self.abort(now, error.code, str(error))
            return
        # Remember the number; acknowledge at once what breaks the order.
        newest = seen.stops[-1]
        if number == newest:
            seen.stops[-1] = number + 1
        else:
            seen.add(number, number + 1)
            if len(seen.starts) > ACK_RANGES:       # forget the oldest gap
                self.seen_floor = seen.starts[1]
                seen.add(0, self.seen_floor)
        if number >= newest:
            self.seen_time = now
        if kind != wire.ACK and kind != wire.CLOSE:
            self.unacked += 1
            if self.unacked >= ACK_EVERY or number != newest or kind == wire.PING:
                self.ack_at = self.due = 0.0
            elif self.ack_at == inf:
                self.ack_at = now + ACK_DELAY
                self.due = min(self.due, self.ack_at)

    def _on_stream(self, body: memoryview) -> bool:
        """Keep the bytes; False if they must be sent again."""
        if len(body) <= wire.OFFSET.size:
            raise Malformed("STREAM without bytes")
        offset, = wire.OFFSET.unpack_from(body)
        data, stop = body[wire.OFFSET.size:], offset + len(body) - wire.OFFSET.size
        if stop > self.granted:
            raise Malformed(f"bytes up to {stop} sent, {self.granted} granted", wire.FLOW)
        received = self.received
        if offset == received.stops[-1]:            # in order, or the next one after a gap
            self.into.put(offset, data)
            received.stops[-1] = stop
        else:
            start = max(offset, self.read)          # what was read is gone
            gaps = received.gaps(start, stop)
            if len(received.starts) > ISLANDS and gaps and offset not in received:
                return False
            for low, high in gaps:
                self.into.put(low, data[low - offset:high - offset])
            if start < stop and self.into.get(start, stop) != data[start - offset:]:
                raise Malformed(f"bytes {start}..{stop} sent twice, and differently")
            received.add(offset, stop)
        if offset <= received.stops[0]:
            self.endpoint.news[self] = None
        return True

    def _on_feedback(self, now: float, credit: int, delay: float,
                     ranges: list[tuple[int, int]]) -> None:
        largest = ranges[0][1]
        if largest >= self.number:
            raise Malformed(f"packet {largest} acknowledged, which was never sent")
        self.credit = max(self.credit, credit)      # absolute and monotonic: order is no matter
        self.due = 0.0
        newly: list[Run] = []
        for first, last in ranges:
            if first < self.first_number or (
                    bisect_left(self.skipped, first) < bisect_right(self.skipped, last)):
                raise Malformed(f"packets {first}..{last} acknowledged, not all were sent")
            newly += reversed(self.flight.take(first, last + 1))
            for run in self.lost.take(first, last + 1) if self.lost.runs else ():
                self._on_spurious(run, largest)
        if not newly:
            return
        newest = newly[0]
        self.largest_acked = max(self.largest_acked, newest.stop - 1)
        if newest.stop - 1 == largest:
            self.rtt.sample(now - newest.time, delay)
        for run in newly:
            self._on_delivered(run)
        # How fast did the path deliver since the newest of them left?
        before = newest.before
        took = max(newest.time - before.sent, now - before.time)
        rate = (self.delivered - before.total) / took if took >= self.rtt.minimum else 0.0
        turn = before.total >= self.round_end
        if turn:
            self.round_end = self.delivered
        self.delivered_time, self.delivered_sent = now, newest.time
        self.doublings = 0
        self._detect_losses(now, newly)
        self.acked_sent = max(self.acked_sent, newest.time)
        self.controller.on_acked(now, Acked(newly, self.flight.bytes, rate, before.limited, turn))

    def _on_delivered(self, run: Run) -> None:
        if run.kind == wire.STREAM:
            if run.size + self.overhead > wire.BASE_SIZE:
                self.large_acked, self.swallowed = max(self.large_acked, run.stop - 1), 0
            self.delivered += run.length
            self.acked.add(run.offset, run.offset + run.length)
            self.resend.remove(run.offset, run.offset + run.length)
            if self.blocked or self.closing:
                self.blocked = False
                self.endpoint.news[self] = None
        elif run.kind == wire.GRANT:                     # the peer knows the ranges below
            self.seen_floor = max(self.seen_floor, run.offset)
            self.seen.add(0, self.seen_floor)
        elif run.size > self.size:                  # a probe of the path's size: climb on
            self._set_size(run.size, self.rung + 1, -inf)

    def _on_spurious(self, run: Run, largest: int) -> None:
        """It was late, not lost: be slower to say so, and take the reaction back."""
        self.stats["spurious"] += run.stop - run.first
        half = int(self.controller.window / self.size) // 2
        self.packet_threshold = max(self.packet_threshold, min(largest - run.first + 1, half))
        self.reordering = min(self.reordering + self.rtt.minimum / 4, self.rtt.smoothed)
        self.controller.on_spurious(run.time)
        self._on_delivered(run)

    def _detect_losses(self, now: float, newly: list[Run]) -> None:
        """Packets far enough behind one that arrived, in number or in time, are lost."""
        wait = max(TIME_THRESHOLD * max(self.rtt.smoothed, self.rtt.latest) + self.reordering,
                   GRANULARITY)
        bound = self.largest_acked - self.packet_threshold + 1
        self.loss_time = inf
        for run in self.flight.runs:
            if run.first >= self.largest_acked:
                break
            if run.time + wait <= now:              # the same sum as the timer's, or it spins
                bound = max(bound, min(run.stop, self.largest_acked))
            elif run.stop > bound:
                self.loss_time = run.time + wait
                break
        lost = self.flight.take(0, bound)
        if not lost:
            return
        for run in lost:
            self.stats["datagrams_lost"] += run.stop - run.first
            self.lost.add(run)
            for low, high in self.acked.gaps(run.offset, run.offset + run.length):
                self.resend.add(low, high)
            self.grant_due |= run.kind == wire.GRANT
            if run.kind == wire.PING and run.size > self.size:
                self.size_at = now                  # try again, at most SIZE_TRIES times
            if run.kind == wire.STREAM and run.first > self.large_acked and \
                    run.size + self.overhead > wire.BASE_SIZE:
                self.swallowed += run.length // run.size
        if self.swallowed >= SWALLOWED and self.size > wire.BASE_SIZE:
            self._set_size(wire.BASE_SIZE, 0, now + SIZE_REST)
        old = now - 2 * self.rtt.timeout() - self.rtt.smoothed
        while self.lost.runs and self.lost.runs[0].time < old:
            self.lost.take(0, self.lost.runs[0].stop)
        stream = [run.time for run in lost if run.kind == wire.STREAM]
        if stream:                                  # probes are no sign of congestion
            between = [time for time in stream if self.acked_sent < time < min(
                (run.time for run in newly), default=inf)]
            persistent = self.acked_sent > -inf and bool(between) and \
                between[-1] - between[0] > PERSISTENT * self.rtt.timeout()
            self.controller.on_lost(now, stream[-1], sum(run.length for run in lost), persistent)

    def _on_close(self, now: float, code: int, reason: str) -> None:
        """Answered with our own, which stops the peer from repeating it."""
        if self.state == OPEN:
            self._end(now, DRAINING, code, reason)
            self.error = f"closed by the peer: {reason}" if code != wire.NO_ERROR else None
        elif self.state == CLOSING:
            self.state = CLOSED                     # both sides know
        else:
            self.close_due, self.due = True, 0.0

    # -- the handshake, dialling side

    def _hello(self) -> bytes:
        return wire.HELLO.pack(self.id, self.endpoint.incarnation, self.nonce, self.granted)

    def _handshake(self, data: memoryview, kind: int, now: float) -> None:
        body = data[wire.HEAD.size:]
        if kind == wire.RETRY and len(body) == wire.COOKIE.size + self.seals[1].size \
                and body[:wire.COOKIE.size] != self.cookie and self.seals[1].opens(data):
            self.cookie = bytes(body[:wire.COOKIE.size])
            self.interval, self.again, self.due = RETRY_FIRST, now, 0.0
        elif kind == wire.ACCEPT and len(body) == wire.HELLO.size + self.seals[1].size:
            hello = wire.HELLO.unpack_from(body)
            ours, theirs = self.endpoint.data_seals(self.nonce, hello[2])
            if theirs.opens(data):                  # made by the key, for this very nonce
                self._up(hello, (ours, theirs), now)
                if self.interval == 2 * RETRY_FIRST:        # asked once: this is the answer to it
                    self.rtt.sample(now - (self.again - RETRY_FIRST), 0.0)
                self._open()
                self.ping_due = True                # so that they see that we have the keys
                return
            self.stats["dropped"] += 1
        elif kind == wire.CLOSE and self.seals[1].opens(data):
            try:
                self._end(now, CLOSED, *wire.decode_close(body[:-self.seals[1].size]))
            except Malformed:
                self.stats["dropped"] += 1
        else:
            self.stats["dropped"] += 1

    def _up(self, hello: tuple, seals: tuple[Seal, Seal], now: float) -> None:
        self.peer_id, self.peer_incarnation, self.peer_nonce, self.credit = hello
        self.seals, self.overhead = seals, wire.HEADER.size + seals[0].size
        self.heard = self.asked_time = now
        self.due = 0.0

    def _open(self) -> None:
        self.state, self.limit = OPEN, inf
        self.controller = self.endpoint.controller(self.rtt)
        self.out, self.into = Ring(self.endpoint.window), Ring(self.endpoint.window)

    # -- what leaves

    def trains(self, now: float) -> Iterator[list[bytes]]:
        """Lists of datagrams to send now: in each all have one size, but for a
        shorter last one. When they are through, `due` is the time to ask again."""
        if self.state == OPENING:
            yield from self._dial(now)
        elif self.state in (CLOSING, DRAINING):
            yield from self._say_close(now)
        elif self.state == OPEN:
            self._run_timers(now)
            yield from self._send(now) if self.state == OPEN else self._say_close(now)
        elif now >= self.limit:                     # accepted, and never confirmed
            self.state = CLOSED
        else:
            self.due = self.limit

    def _dial(self, now: float) -> Iterator[list[bytes]]:
        if now >= self.limit:
            self._end(now, CLOSED, wire.TIMED_OUT,
                      "no answer: nobody listens there, or it has another key")
            return
        if now >= self.again:
            self.again, self.interval = now + self.interval, min(2 * self.interval, RETRY_LAST)
            seal = self.seals[0]
            body = wire.head(wire.INIT, 0, 0) + self._hello() + self.cookie
            yield [seal.close(body.ljust(wire.BASE_SIZE - seal.size, b"\0"))]
        self.due = min(self.again, self.limit)

    def _say_close(self, now: float) -> Iterator[list[bytes]]:
        if now >= self.limit:
            self.state, self.due = CLOSED, inf
            return
        if self.state == CLOSING and now >= self.again:
            self.close_due, self.again = True, now + self.rtt.timeout()
        if self.close_due:
            self.close_due = False
            yield [self._packet(wire.CLOSE, wire.encode_close(self.code, self.reason))]
        self.due = min(self.limit, self.again if self.state == CLOSING else inf)

    def _packet(self, kind: int, body: bytes) -> bytes:
        self.number += 1
        return self.seals[0].close(wire.head(kind, self.number - 1, self.peer_id) + body)

    def _remember(self, kind: int, now: float, first: int, offset: int = 0, length: int = 0,
                  size: int = 0) -> None:
        """The packets since `first` ask for an acknowledgement."""
        before = Delivered(self.delivered, self.delivered_time, self.delivered_sent,
                           self.delivered <= self.limited_until)
        self.flight.add(Run(kind, first, self.number, offset, length, size, now, before))
        self.asked_time = now

    def _run_timers(self, now: float) -> None:
        if now >= self.heard + IDLE:
            self._end(now, CLOSED, wire.TIMED_OUT, f"nothing heard for {IDLE:g} s")
        elif self.closing and (now >= self.limit or self.acked.stops[0] == self.written):
            whole = self.acked.stops[0] == self.written
            self._end(now, CLOSING, *(wire.NO_ERROR, "closed") if whole else
                      (wire.TIMED_OUT, "closed before all was delivered"))
        elif self.number + SPARE >= wire.LAST_NUMBER:
            self.abort(now, wire.GONE, "packet numbers are used up")
        elif now >= self.loss_time:
            self._detect_losses(now, [])
        elif self.flight.runs and now >= self.asked_time + self.rtt.timeout(self.doublings):
            self._probe(now)
        if now >= max(self.heard, self.asked_time) + KEEP_ALIVE:
            self.ping_due = True

    def _probe(self, now: float) -> None:
        """No answer in time. That is no loss yet: ask again with the oldest bytes."""
        self.doublings += 1
        self.probes = 2
        if self.doublings == 2 and self.size > wire.BASE_SIZE:   # are large ones swallowed now?
            self._set_size(wire.BASE_SIZE, 0, now + SIZE_REST)
        oldest = self.flight.runs[0]
        stop = min(oldest.offset + oldest.length, oldest.offset + 2 * self.size)
        gaps = self.acked.gaps(oldest.offset, stop) if oldest.kind == wire.STREAM else []
        for low, high in gaps:
            self.resend.add(low, high)
        self.grant_due |= oldest.kind == wire.GRANT
        self.ping_due |= not gaps and oldest.kind != wire.GRANT

    def _set_size(self, size: int, rung: int, again: float) -> None:
        """Datagrams have this size from now on; try the next rung of the ladder `again`."""
        self.size = self.controller.size = size
        self.rung, self.tries, self.size_at, self.swallowed = rung, 0, again, 0
        self.due = 0.0

    def _send(self, now: float) -> Iterator[list[bytes]]:
        if self.grant_due or now >= self.ack_at:
            yield [self._feedback(now)]
        if self.rung < len(self.endpoint.ladder) and now >= self.size_at:
            yield from self._try_size(now)
        if self.ping_due:
            self.ping_due = False
            packet = self._packet(wire.PING, b"")
            self._remember(wire.PING, now, self.number - 1)
            yield [packet]
        while True:
            payload = (wire.BASE_SIZE if self.probes else self.size) - self.overhead
            pending = bool(self.resend.starts) or self.sent < min(self.written, self.credit)
            room = int(self.controller.window - self.flight.bytes) // payload
            waits = pending and room > 0            # for nothing but its turn
            # `pace` is when the next packet may leave. Behind its time it may catch
            # up in one burst, of this length.
            rate = self.controller.rate
            burst = max(BURST_PACKETS * payload / rate, BURST_TIME)
            self.pace = max(self.pace, now - burst)
            turns = int((now - self.pace) * rate / payload) + 1 if self.pace <= now else 0
            room = max(min(room, turns), self.probes)
            if room <= 0 or not pending:
                break
            train = self._train(now, min(room, TRAIN // self.size), payload)
            self.probes = max(0, self.probes - len(train))
            self.pace += len(train) * payload / rate
            yield train
        self.probes = 0
        if not pending:
            self.limited_until = self.delivered + self.flight.bytes
        timer = self.loss_time
        if timer == inf and self.flight.runs:
            timer = self.asked_time + self.rtt.timeout(self.doublings)
        self.due = min(timer, self.ack_at, self.heard + IDLE,
                       max(self.heard, self.asked_time) + KEEP_ALIVE, self.limit,
                       self.size_at if self.rung < len(self.endpoint.ladder) else inf,
                       self.pace if waits else inf)

    def _train(self, now: float, count: int, payload: int) -> list[bytes]:
        """Up to `count` packets of stream: first what was lost, then what is new."""
        if self.number >= self.skip_at:             # who acknowledges this one is guessing
            self.skipped.append(self.number)
            self.number += 1
            self.skip_gap *= 2
            self.skip_at = self.number + self.skip_gap + self.endpoint.random(1)[0]
        if not self.flight.bytes:                   # the first after a pause: time starts here
            self.delivered_time = self.delivered_sent = now
        tag, get, pack = self.seals[0].tag, self.out.get, wire.HEADER.pack
        word, peer = wire.STREAM << 48, self.peer_id
        train: list[bytes] = []
        size = payload
        while len(train) < count and size == payload:       # a short one ends the train
            again = bool(self.resend.starts)
            if again:
                start, stop = self.resend.starts[0], self.resend.stops[0]
            else:
                start, stop = self.sent, min(self.written, self.credit)
            stop = min(stop, start + (count - len(train)) * payload)
            if start == stop:
                break
            first = number = self.number
            for offset in range(start, stop, payload):
                size = min(payload, stop - offset)
                packet = pack(word | number, peer, offset) + get(offset, offset + size)
                train.append(packet + tag(packet))
                number += 1
            self.number = number
            self._remember(wire.STREAM, now, first, start, stop - start, payload)
            if again:
                self.resend.remove(start, stop)
                self.stats["retransmissions"] += number - first
            else:
                self.sent = stop
        return train

    def _feedback(self, now: float) -> bytes:
        """What came and how much more may. As a GRANT it asks to be acknowledged:
        when there is news of credit, or when the list of ranges grows long."""
        starts, stops = self.seen.starts, self.seen.stops
        prune = len(starts) > PRUNE_RANGES and now >= self.asked_prune + self.rtt.smoothed
        kind = wire.GRANT if self.grant_due or prune else wire.ACK
        ranges = [(max(first, self.seen_floor), stop - 1)
                  for first, stop in zip(reversed(starts), reversed(stops), strict=True)
                  if stop > self.seen_floor]
        body = wire.encode_feedback(self.granted, now - self.seen_time, ranges)
        packet = self._packet(kind, body)
        if kind == wire.GRANT:
            self.grant_due, self.asked_prune = False, now
            self._remember(wire.GRANT, now, self.number - 1, stops[-1] - 1)
        self.unacked, self.ack_at = 0, inf
        return packet

    def _try_size(self, now: float) -> Iterator[list[bytes]]:
        """Does the path carry larger datagrams? A padded PING finds out."""
        self.tries += 1
        if self.tries > SIZE_TRIES:
            self.tries, self.size_at = 0, now + SIZE_AGAIN
            return
        size, self.size_at = self.endpoint.ladder[self.rung], inf
        packet = self._packet(wire.PING, bytes(size - wire.HEAD.size - self.seals[0].size))
        self._remember(wire.PING, now, self.number - 1, size=size)
        yield [packet]


# ---- an endpoint ---------------------------------------------------------------------------------

class Train(NamedTuple):
    """Datagrams for one address: all of one size, the last one perhaps shorter."""
    address: Any
    datagrams: list[bytes]


class Endpoint:
    """All connections of one socket, found by the id on each packet."""

    def __init__(self, key: bytes | None, *, listening: bool = True, controller: str = "rate",
                 window: int = WINDOW, ladder: tuple[int, ...] = LADDER, first_number: int = 0,
                 random: Callable[[int], bytes] = os.urandom,
                 stats: dict[str, int] | None = None):
        self.key, self.listening, self.random = key, listening, random
        self.controller, self.window = CONTROLLERS[controller], window
        self.ladder, self.first_number = ladder, first_number
        self.seal = Seal(key, "minidist udp handshake")
        self.secret = random(32)                    # makes cookies; lives as long as the socket
        self.incarnation = random(8)                # another one after a restart
        self.connections: dict[int, Connection] = {}
        self.half: dict[bytes, Connection] = {}     # accepted ones by the dialler's nonce
        self.accepted: deque[Connection] = deque()  # for the layer above to take
        self.news: dict[Connection, None] = {}      # those with bytes, room, an end to tell
        self.replies: deque[Train] = deque(maxlen=REPLIES)
        self.stats = {} if stats is None else stats
        self.stats.update(dict.fromkeys(STATS, 0))

    def new_id(self) -> int:
        return int.from_bytes(self.random(8), "big") or 1

    def connect(self, address: Any, now: float, timeout: float) -> Connection:
        """Dial; the connection says when it is open, or why it is not."""
        connection = Connection(self, address, now)
        connection.limit = now + timeout
        self.connections[connection.id] = connection
        return connection

    def data_seals(self, dialler: bytes, listener: bytes) -> tuple[Seal, Seal]:
        """Keys of one connection, dialler to listener and back: other nonces, other
        keys, so nothing recorded earlier opens; other directions, so nothing reflects."""
        return (Seal(self.key, "minidist udp c2s", dialler, listener),
                Seal(self.key, "minidist udp s2c", dialler, listener))

    def receive(self, data: memoryview, address: Any, now: float, segment: int = 0) -> None:
        """Datagrams that arrived: one, or several of `segment` bytes in a row."""
        step = segment or len(data) or 1
        for at in range(0, len(data), step):
            datagram = data[at:at + step]
            if len(datagram) < wire.HEAD.size + self.seal.size:
                self.stats["dropped"] += 1
                continue
            word, receiver = wire.HEAD.unpack_from(datagram)
            connection = self.connections.get(receiver)
            if connection is not None and connection.address == address:
                before = connection.state
                connection.receive(datagram, word, now)
                if connection.state != before:
                    self._changed(connection, before, now)
            elif word >> 56 == wire.INIT >> 8 and self.listening:
                self._on_init(datagram, word, address, now)
            else:                                   # of an earlier life, or a stranger's
                self.stats["dropped"] += 1

    def trains(self, now: float) -> Iterator[Train]:
        """What to send now. Each train counts as sent when it is handed out."""
        while self.replies:
            yield self.replies.popleft()
        for connection in list(self.connections.values()):
            if now >= connection.due:
                for datagrams in connection.trains(now):
                    self.stats["datagrams_sent"] += len(datagrams)
                    yield Train(connection.address, datagrams)
                if connection.state == CLOSED:
                    self._forget(connection)

    def deadline(self) -> float:
        """When trains() must be called even if nothing arrives; inf: no need."""
        if self.replies:
            return 0.0
        return min((each.due for each in self.connections.values()), default=inf)

    def too_big(self, address: Any, size: int, now: float) -> None:
        """The socket refused a datagram of this size (EMSGSIZE)."""
        for each in self.connections.values():
            if each.address == address and each.size >= size > wire.BASE_SIZE:
                each._set_size(wire.BASE_SIZE, 0, now + SIZE_REST)

    # -- the handshake, listening side: nothing is kept before the cookie comes back

    def _cookie(self, now_us: int, address: Any, hello: bytes) -> bytes:
        text = wire.OFFSET.pack(now_us) + repr(address).encode() + hello
        return wire.COOKIE.pack(now_us, hmac.digest(self.secret, text, "sha256")[:16])

    def _on_init(self, data: memoryview, word: int, address: Any, now: float) -> None:
        """INIT without a good cookie: answer with one, keep nothing. With one, the
        sender is where it says; make a connection, which still has to prove the key."""
        if len(data) != wire.BASE_SIZE or not self.seal.opens(data):
            self.stats["dropped"] += 1
            return
        hello = wire.HELLO.unpack_from(data, wire.HEAD.size)
        their_id, incarnation, nonce, _ = hello
        raw = bytes(data[wire.HEAD.size:wire.HEAD.size + wire.HELLO.size])
        cookie = bytes(data[wire.HEAD.size + wire.HELLO.size:][:wire.COOKIE.size])
        made_us, _ = wire.COOKIE.unpack(cookie)
        age = now - made_us / 1e6
        if word >> 48 != wire.INIT:
            reply = self.seal.close(wire.head(wire.CLOSE, 0, their_id) + wire.encode_close(
                wire.VERSION, f"version {word >> 48 & 0xFF} is not known, version 1 is"))
        elif incarnation == self.incarnation or not their_id:
            self.stats["dropped"] += 1              # our own, reflected
            return
        elif not (-1e-5 <= age <= COOKIE_LIFE and hmac.compare_digest(
                cookie, self._cookie(made_us, address, raw))):
            reply = self.seal.close(wire.head(wire.RETRY, 0, their_id)
                                    + self._cookie(int(now * 1e6), address, raw))
        elif nonce in self.half:
            reply = self.half[nonce].accept         # ours was lost
        elif len(self.half) >= HALF_OPEN or any(
                nonce == each.peer_nonce for each in self.connections.values()):
            self.stats["dropped"] += 1              # it will ask again; or it came twice
            return
        else:
            connection = self.half[nonce] = Connection(self, address, now)
            ours, theirs = self.data_seals(nonce, connection.nonce)
            connection._up(hello, (theirs, ours), now)
            if age < RETRY_FIRST:                   # the cookie's round trip; INIT went once
                connection.rtt.sample(age, 0.0)
            connection.state, connection.limit = ACCEPTED, now + COOKIE_LIFE
            connection.accept = reply = theirs.close(wire.head(wire.ACCEPT, 0, their_id)
                                                     + connection._hello())
            self.connections[connection.id] = connection
        self.replies.append(Train(address, [reply]))

    def _changed(self, connection: Connection, before: str, now: float) -> None:
        if connection.state == OPEN:
            if before == ACCEPTED:
                self._leave_half(connection)
                self.accepted.append(connection)
            for other in list(self.connections.values()):
                if other.address == connection.address and other.peer_incarnation not in (
                        b"", connection.peer_incarnation):
                    other._end(now, CLOSED, wire.RESTARTED, "the peer has restarted")
        self.news[connection] = None

    def _leave_half(self, connection: Connection) -> None:
        self.half = {nonce: each for nonce, each in self.half.items() if each is not connection}

    def _forget(self, connection: Connection) -> None:
        self.connections.pop(connection.id, None)
        self._leave_half(connection)
