"""Datagrams on the wire, and the books that the datagram machine keeps of them.

What a packet looks like and who can make one (`Seal`); sets of numbers and of
bytes (`Ranges`), the bytes themselves (`Ring`), packets in flight (`Flight`).
PROTOCOL.md, section 10, specifies the layouts.
"""
from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

BASE_SIZE = 1200                # bytes: every path carries them (RFC 9000, 14)
LAST_NUMBER = 1 << 47           # a connection ends before (44 years at 100,000 a second)
REASON = 200                    # bytes of text in a CLOSE (ours)

# ---- what datagrams look like ---------------------------------------------------
# The first two bytes: kind and version (1).
INIT, RETRY, ACCEPT, STREAM, ACK, GRANT, PING, CLOSE = range(0xD001, 0xD801, 0x100)
HEAD = struct.Struct(">QQ")             # kind, version, number (u48); connection id
OFFSET = struct.Struct(">Q")
HEADER = struct.Struct(">QQQ")          # both, of a STREAM
FEEDBACK = struct.Struct(">QII")        # credit, delay in us, ranges that follow
HELLO = struct.Struct(">Q8s32sQ")       # connection id, incarnation, nonce, credit
COOKIE = struct.Struct(">Q16s")         # us of the maker's clock, MAC
CODE = struct.Struct(">H")
NUMBER = (1 << 48) - 1
NO_ERROR, MALFORMED, FLOW, REFUSED, VERSION, RESTARTED, TIMED_OUT, GONE = range(8)


class Malformed(Exception):
    """A datagram that breaks the rules; the only error that parsing raises."""

    def __init__(self, text: str, code: int = MALFORMED):
        self.code = code
        super().__init__(text)


class Seal:
    """The last bytes of every datagram: who has the key made it, and nobody
    changed it. HMAC-SHA256 cut to 16 bytes; without a key a CRC-32, which
    stops accidents only."""

    def __init__(self, key: bytes | None, label: str = "", *nonces: bytes):
        self.size = 4 if key is None else 16
        if key is not None:
            own = hmac.digest(key, b"".join((label.encode(), *nonces)), "sha256")
            # HMAC written out: its two first blocks never change, so hash them once.
            pad = own.ljust(64, b"\0")
            self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in pad))
            self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in pad))
            self.tag: Callable[[Any], bytes] = self._hmac
        else:
            self.tag = lambda data: zlib.crc32(data).to_bytes(4, "big")

    def _hmac(self, data: Any) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(data)
        outer.update(inner.digest())
        return outer.digest()[:16]

    def close(self, data: bytes) -> bytes:
        return data + self.tag(data)

    def opens(self, datagram: memoryview) -> bool:
        end = len(datagram) - self.size
        return hmac.compare_digest(self.tag(datagram[:end]), datagram[end:])


def head(kind: int, number: int, connection_id: int) -> bytes:
    return HEAD.pack(kind << 48 | number, connection_id)


def encode_close(code: int, reason: str) -> bytes:
    return CODE.pack(code) + reason.encode()[:REASON]


def decode_close(body: memoryview) -> tuple[int, str]:
    if not CODE.size <= len(body) <= CODE.size + REASON:
        raise Malformed(f"CLOSE has {len(body)} bytes; it must have 2 to {2 + REASON}")
    return CODE.unpack_from(body)[0], bytes(body[2:]).decode(errors="replace")


def encode_feedback(credit: int, delay: float, ranges: list[tuple[int, int]]) -> bytes:
    """How much may come, how long the newest packet has waited, and what came."""
    numbers = [number for pair in ranges for number in pair]
    return FEEDBACK.pack(credit, min(int(delay * 1e6), (1 << 32) - 1), len(ranges)) + struct.pack(
        f">{len(numbers)}Q", *numbers)


def decode_feedback(body: memoryview) -> tuple[int, float, list[tuple[int, int]]]:
    """Credit, delay in seconds, and the ranges (first, last), newest first."""
    if len(body) < FEEDBACK.size:
        raise Malformed(f"feedback has {len(body)} bytes; it must have at least {FEEDBACK.size}")
    credit, delay, count = FEEDBACK.unpack_from(body)
    if count == 0 or len(body) != FEEDBACK.size + 16 * count:
        raise Malformed(f"feedback of {count} ranges has {len(body)} bytes; "
                        f"it must have at least one, and {FEEDBACK.size} + 16 for each")
    numbers = struct.unpack_from(f">{2 * count}Q", body, FEEDBACK.size)
    ranges = list(zip(numbers[::2], numbers[1::2], strict=True))
    above = LAST_NUMBER + 1
    for first, last in ranges:          # absolute numbers: nothing can underflow
        if not first <= last < above - 1:
            raise Malformed(f"range {first}..{last} is not below {above - 1} and in order")
        above = first
    return credit, delay / 1e6, ranges


# ---- sets of numbers and of bytes -------------------------------------------------

class Ranges:
    """A set of integers as sorted ranges [start, stop) that never touch.

    It holds packet numbers that came, bytes that came, bytes that the peer
    has, bytes to send again: millions of integers in a handful of ranges.
    """
    __slots__ = ("starts", "stops")

    def __init__(self, *ranges: tuple[int, int]):
        self.starts = [start for start, _ in ranges]
        self.stops = [stop for _, stop in ranges]

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self.starts, value)
        return at > 0 and value < self.stops[at - 1]

    def add(self, start: int, stop: int) -> None:
        starts, stops = self.starts, self.stops
        low = bisect_left(stops, start)             # the first range that we touch
        high = bisect_right(starts, stop)           # the first one beyond us
        if low < high:
            start, stop = min(start, starts[low]), max(stop, stops[high - 1])
        starts[low:high], stops[low:high] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        starts, stops = self.starts, self.stops
        low = bisect_right(stops, start)            # the first range that loses something
        high = bisect_left(starts, stop)
        if low < high:
            left, right = starts[low], stops[high - 1]
            starts[low:high] = [left] * (left < start) + [stop] * (right > stop)
            stops[low:high] = [start] * (left < start) + [right] * (right > stop)

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not in the set."""
        found = []
        for at in range(bisect_right(self.stops, start), bisect_left(self.starts, stop)):
            if start < self.starts[at]:
                found.append((start, self.starts[at]))
            start = self.stops[at]
        return [*found, (start, stop)] if start < stop else found


class Ring:
    """The bytes of a stream by their offset, `size` of them at a time."""

    def __init__(self, size: int):
        self.size = size
        self.data = memoryview(bytearray(size))

    def put(self, offset: int, data: memoryview) -> None:
        at = offset % self.size
        if at + len(data) <= self.size:
            self.data[at:at + len(data)] = data
        else:                                       # around the end, in two pieces
            self.data[at:] = data[:self.size - at]
            self.data[:at + len(data) - self.size] = data[self.size - at:]

    def get(self, start: int, stop: int) -> Any:
        at, end = start % self.size, start % self.size + stop - start
        if end <= self.size:
            return self.data[at:end]
        return b"".join((self.data[at:], self.data[:end - self.size]))


# ---- packets in flight ---------------------------------------------------------------

class Delivered(NamedTuple):
    """What had been delivered when a packet left: its acknowledgement then says
    how fast the path delivered (draft-cheng-iccrg-delivery-rate-estimation)."""
    total: int                  # bytes acknowledged so far
    time: float                 # when the last of them were
    sent: float                 # when the packet left that they belonged to
    limited: bool               # the application had nothing more to send


@dataclass(slots=True)
class Run:
    """Packets sent in one go, with consecutive numbers and consecutive bytes.
    Most are acknowledged together too, so the work is by run, not by packet."""
    kind: int
    first: int                  # packet numbers [first, stop)
    stop: int
    offset: int                 # the bytes that they carry (GRANT: the largest number seen)
    length: int
    size: int                   # bytes in each packet but the last (PING: size probed)
    time: float
    before: Delivered

    def part(self, first: int, stop: int) -> Run:
        low = self.offset + (first - self.first) * self.size
        high = min(self.offset + (stop - self.first) * self.size, self.offset + self.length)
        if self.kind != STREAM:
            low, high = self.offset, self.offset
        return Run(self.kind, first, stop, low, high - low, self.size, self.time, self.before)


class Flight:
    """Runs sorted by packet number, so by time too; `bytes` of the stream in all."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.bytes = 0

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.bytes += run.length

    def take(self, first: int, stop: int) -> list[Run]:
        """Remove and return what has numbers in [first, stop)."""
        low = bisect_right(self.runs, first, key=attrgetter("stop"))
        high = bisect_left(self.runs, stop, key=attrgetter("first"))
        if low >= high:
            return []
        taken, rest = self.runs[low:high], []
        head, tail = taken[0], taken[-1]
        if head.first < first:
            rest.append(head.part(head.first, first))
            taken[0] = head.part(first, head.stop)
        if tail.stop > stop:
            rest.append(tail.part(stop, tail.stop))
            taken[-1] = taken[-1].part(taken[-1].first, stop)
        self.runs[low:high] = rest
        self.bytes -= sum(run.length for run in taken)
        return taken

