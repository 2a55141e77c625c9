"""PROTOCOL.md in code, without I/O: bytes and time come in; bytes, messages
and timers go out. No socket, no thread, no clock, nothing of training.

    1  limits           5  greeting and keys
    2  errors           6  frames
    3  values           7  session
    4  messages

Where this file and PROTOCOL.md differ, tests/vectors/ decide.
"""
from __future__ import annotations

import hashlib
import hmac
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import Config, ProtocolError

# ---- 1 limits ------------------------------------------------------------------
# Every number that bounds what a peer can make us hold or wait for.

MAJOR, MINOR = 1, 0             # the version of the protocol
MAX_FRAME = 1 << 20             # payload bytes of one frame: a PING waits behind at most this
MAX_FIELDS = 4096               # bytes of a message's fields
MAX_EARLY = 1024                # bytes of a frame before WELCOME; no payload then
MAX_MESSAGE = 1 << 40           # payload bytes of one message
MAX_TEXT = 1000                 # bytes of one text
MAX_DIMS = 8                    # dimensions of a tensor
MAX_NODES = 4096                # nodes of a job
MAX_CONTROL = 16                # control frames that wait to be sent on a connection
HANDSHAKE_TIMEOUT = 5.0         # seconds from connect to WELCOME, in total
SCRATCH = 1 << 15               # bytes read at once while the next header is awaited
PIECE = 1 << 18                 # bytes read at once into a message's memory
LAZY = 1 << 20                  # bytes of a message from which on its memory comes page by page
PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}


# ---- 2 errors ------------------------------------------------------------------
# A code says what broke; the scope says how much of the job it ends.

class Error(NamedTuple):
    name: str
    scope: str                  # request: an answer. connection: it closes. job: all stop
    retriable: bool             # may the same node try again?
    meaning: str

ERRORS = {
    1: Error("NOT_MINIDIST", "connection", False, "the first bytes are no greeting"),
    2: Error("VERSION", "connection", False, "another major version"),
    3: Error("WRONG_JOB", "connection", False, "a node of another job"),
    4: Error("AUTH_REQUIRED", "connection", False, "one side has a key, the other has none"),
    5: Error("AUTH_FAILED", "connection", False, "the keys differ"),
    6: Error("HANDSHAKE_TIMEOUT", "connection", True, "not joined within the deadline"),
    7: Error("DUPLICATE", "connection", True, "this node is connected, or being dialled, already"),
    8: Error("WRONG_NODE", "connection", False, "a node number or role that the job does not have"),
    9: Error("GENERATION", "connection", True, "a node of another generation"),
    16: Error("BAD_FRAME", "connection", False, "header magic, checksum or flags are wrong"),
    17: Error("TOO_LARGE", "connection", False, "a length is above its limit"),
    18: Error("UNKNOWN_KIND", "connection", False, "a message kind below 128 that is not known"),
    19: Error("BAD_FIELDS", "connection", False, "fields do not have their kind's layout"),
    20: Error("UNEXPECTED", "connection", False, "a message that this state does not allow"),
    21: Error("CHECKSUM", "connection", True, "a payload's checksum is wrong"),
    32: Error("ABORTED", "job", False, "a node gave up, for the reason in the text"),
    33: Error("MISMATCH", "job", False, "nodes call different operations, or with other sizes"),
    34: Error("SILENT", "connection", True, "nothing was heard for heartbeat_timeout"),
    35: Error("LOST", "connection", True, "a connection ended without GOODBYE"),
    48: Error("NOT_READY", "request", True, "the server has no parameters yet: INIT comes first"),
    49: Error("BAD_RANGE", "request", False, "not this server's slice, dtype or length"),
}
CODES = {error.name: code for code, error in ERRORS.items()}


def broken(name: str, text: str) -> ProtocolError:
    """The exception for an error of the table, by name."""
    return ProtocolError(CODES[name], f"{text} [{name}]")


# ---- 3 values -------------------------------------------------------------------
# Numbers in headers and fields are unsigned and big-endian; tensor elements are
# little-endian. A text is a u16 length and UTF-8. Only texts and lists vary in size.

SCALARS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f64": "d", "hash": "32s"}


def pack_text(text: str) -> bytes:
    data = text.encode()
    if len(data) > MAX_TEXT:                # cut between characters, not inside one
        data = data[:MAX_TEXT].decode(errors="ignore").encode()
    return struct.pack(">H", len(data)) + data


def pack_shape(shape: Sequence[int]) -> bytes:
    if len(shape) > MAX_DIMS:
        raise broken("TOO_LARGE", f"{len(shape)} dimensions; the most is {MAX_DIMS}")
    return struct.pack(f">B{len(shape)}I", len(shape), *shape)


def pack_numbers(numbers: dict[str, float]) -> bytes:
    """Named numbers: u8 count, then a text and an f64 each."""
    return bytes([len(numbers)]) + b"".join(
        pack_text(name) + struct.pack(">d", value) for name, value in numbers.items())


class Cursor:
    """Takes values off the front of bytes; every short read is BAD_FIELDS."""

    def __init__(self, data: Any):
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple:
        start, self.at = self.at, self.at + struct.calcsize(form)
        if self.at > len(self.data):
            raise broken("BAD_FIELDS", f"{len(self.data)} bytes end inside a value")
        return struct.unpack_from(form, self.data, start)

    def text(self) -> str:
        (size,) = self.take(">H")
        if size > MAX_TEXT:
            raise broken("TOO_LARGE", f"a text of {size} bytes; the most is {MAX_TEXT}")
        (data,) = self.take(f">{size}s")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise broken("BAD_FIELDS", "a text is not UTF-8") from None

    def shape(self) -> tuple[int, ...]:
        (count,) = self.take(">B")
        if count > MAX_DIMS:
            raise broken("TOO_LARGE", f"{count} dimensions; the most is {MAX_DIMS}")
        return self.take(f">{count}I")

    def numbers(self) -> dict[str, float]:
        (count,) = self.take(">B")
        return {self.text(): self.take(">d")[0] for _ in range(count)}

    def end(self) -> None:
        if self.at != len(self.data):
            raise broken("BAD_FIELDS", f"{len(self.data) - self.at} bytes after the last value")


PACK: dict[str, Callable] = {"text": pack_text, "shape": pack_shape, "numbers": pack_numbers}
PACK.update({name: struct.Struct(">" + form).pack for name, form in SCALARS.items()})
TAKE: dict[str, Callable] = {"text": Cursor.text, "shape": Cursor.shape, "numbers": Cursor.numbers}
TAKE.update({name: lambda cursor, form=">" + form: cursor.take(form)[0]
             for name, form in SCALARS.items()})


class Layout:
    """The fields of a message, written as `name:type name:type ...`."""

    def __init__(self, name: str, text: str):
        self.name = name
        self.names = tuple(part.split(":")[0] for part in text.split())
        self.types = tuple(part.split(":")[1] for part in text.split())
        # Most messages hold scalars only: one struct packs them all at once.
        fixed = all(kind in SCALARS for kind in self.types)
        self.struct = (struct.Struct(">" + "".join(SCALARS[kind] for kind in self.types))
                       if fixed else None)

    def pack(self, values: Sequence) -> bytes:
        try:
            if self.struct is not None:
                return self.struct.pack(*values)
            return b"".join(PACK[kind](value)
                            for kind, value in zip(self.types, values, strict=True))
        except (struct.error, ValueError, TypeError, AttributeError) as error:
            raise broken("BAD_FIELDS", f"{self.name} has the fields ({', '.join(self.names)}); "
                                       f"got {tuple(values)!r}: {error}") from None

    def unpack(self, data: Any) -> tuple:
        if self.struct is not None:
            if len(data) != self.struct.size:
                raise broken("BAD_FIELDS", f"{self.name} has {self.struct.size} bytes of fields; "
                                           f"got {len(data)}")
            return self.struct.unpack(data)
        cursor = Cursor(data)
        values = tuple(TAKE[kind](cursor) for kind in self.types)
        cursor.end()
        return values


# ---- 4 messages -----------------------------------------------------------------
# kind: name and fields. Kinds below 32 belong to the session and are never seen
# above it; 128 and up may be skipped by who does not know them.

PROOF, JOIN, WELCOME, ROSTER, PING, PONG, DEPARTED, GOODBYE, ERROR = range(1, 10)
COLLECTIVE, TENSOR, INIT, PUSH, APPLIED, PULL, STATE, REFUSED, OPAQUE = range(32, 41)

MESSAGES = {kind: Layout(name, fields) for kind, name, fields in [
    (PROOF, "PROOF", "proof:hash"),
    (JOIN, "JOIN", "node:u32 role:u8 incarnation:u32 address:text"),
    (WELCOME, "WELCOME", "node:u32 incarnation:u32"),
    (ROSTER, "ROSTER", "nodes:u32"),                        # payload: the nodes, pack_roster
    (PING, "PING", "token:u32 doing:text"),
    (PONG, "PONG", "token:u32 doing:text"),
    (DEPARTED, "DEPARTED", "node:u32 code:u16 reason:text"),    # code 0: it said goodbye
    (GOODBYE, "GOODBYE", ""),
    (ERROR, "ERROR", "code:u16 text:text"),
    (COLLECTIVE, "COLLECTIVE", "op:u8 reduce:u8 dtype:u8 root:u16 sequence:u32 "
                               "count:u64 start:u64 stop:u64"),
    (TENSOR, "TENSOR", "tag:u32 dtype:u8 shape:shape"),
    (INIT, "INIT", "dtype:u8 start:u64 stop:u64 rule:text settings:numbers"),
    (PUSH, "PUSH", "push_id:u64 version:u64 start:u64 stop:u64 samples:u32 dtype:u8"),
    (APPLIED, "APPLIED", "push_id:u64 version:u64 accepted:u8"),
    (PULL, "PULL", "clock:u64 start:u64 stop:u64"),
    (STATE, "STATE", "clock:u64 version:u64 start:u64 stop:u64 dtype:u8"),
    (REFUSED, "REFUSED", "code:u16 text:text"),             # in place of APPLIED or STATE
    (OPAQUE, "OPAQUE", "tag:u64"),                          # payload: the plugin's own affair
]}
SESSION_KINDS = range(1, 32)
SKIPPABLE = 128

OPS = {1: "all_reduce", 2: "broadcast", 3: "all_gather", 4: "reduce_scatter", 5: "barrier",
       6: "reduce", 7: "gather", 8: "scatter"}
REDUCTIONS = {0: "none", 1: "sum", 2: "avg", 3: "min", 4: "max", 5: "product"}
DTYPES = {                      # code: (name, bytes, little-endian NumPy type or None)
    1: ("float32", 4, "<f4"), 2: ("float64", 8, "<f8"), 3: ("float16", 2, "<f2"),
    4: ("bfloat16", 2, None), 5: ("int8", 1, "|i1"), 6: ("uint8", 1, "|u1"),
    7: ("int16", 2, "<i2"), 8: ("int32", 4, "<i4"), 9: ("int64", 8, "<i8"), 10: ("bool", 1, "|b1"),
}
OP_CODES = {name: code for code, name in OPS.items()}
REDUCTION_CODES = {name: code for code, name in REDUCTIONS.items()}
DTYPE_CODES = {name: code for code, (name, _, _) in DTYPES.items()}


def describe(kind: int, fields: Sequence) -> str:
    """A message for people: "COLLECTIVE(op=all_reduce, sequence=57, ...)"."""
    layout = MESSAGES.get(kind)
    if layout is None:
        return f"message of kind {kind}"
    words = {"op": OPS, "reduce": REDUCTIONS,
             "dtype": {code: name for code, (name, _, _) in DTYPES.items()}}
    shown = [f"{name}={words[name].get(value, value) if name in words else value}"
             for name, value in zip(layout.names, fields, strict=False)]
    return f"{layout.name}({', '.join(shown)})"


class Member(NamedTuple):
    """A node as ROSTER tells it to all."""
    node: int
    role: int                   # 0 worker, 1 server
    incarnation: int            # random for each process: a restarted node is another one
    address: str                # where it can be dialled; "" if it cannot


def pack_roster(members: Sequence[Member]) -> bytes:
    return b"".join(struct.pack(">IBI", *member[:3]) + pack_text(member.address)
                    for member in members)


def unpack_roster(count: int, data: Any) -> list[Member]:
    cursor = Cursor(data)
    members = []
    for _ in range(min(count, MAX_NODES)):
        node, role, incarnation = cursor.take(">IBI")
        members.append(Member(node, role, incarnation, cursor.text()))
    cursor.end()
    return members


# ---- 5 greeting and keys -----------------------------------------------------------
# The first 64 bytes in each direction. Magic, versions and their places never change.

GREETING = struct.Struct(">4sBBcBIQ8s32sI")
MAGIC = b"MDP\x01"
DIALER, ACCEPTOR = b"D", b"A"
NO_KEY, PSK_HMAC = 0, 1         # mechanisms
CHECKSUMS = 1                   # capability bit: frames carry a CRC-32 of their payload


class Greeting(NamedTuple):
    magic: bytes
    major: int
    minor: int
    side: bytes
    mechanism: int
    max_frame: int              # payload bytes that this side accepts in a frame
    capabilities: int           # bits; both sides use what both have
    job: bytes                  # first 8 bytes of SHA-256 of the job's name
    nonce: bytes                # 32 random bytes, new for each connection
    generation: int


def greet(config: Config, side: bytes, nonce: bytes) -> bytes:
    return GREETING.pack(
        MAGIC, MAJOR, MINOR, side, NO_KEY if config.key is None else PSK_HMAC, MAX_FRAME,
        CHECKSUMS * config.checksums, job_hash(config.job), nonce, config.generation)


def job_hash(job: str) -> bytes:
    return hashlib.sha256(job.encode()).digest()[:8]


def check_greeting(data: Any, config: Config, side: bytes) -> Greeting:
    """The other side's greeting, checked in this order; `side` is what it must be."""
    it = Greeting(*GREETING.unpack(data))
    mechanism = NO_KEY if config.key is None else PSK_HMAC
    if it.magic != MAGIC:
        raise broken("NOT_MINIDIST", f"not a minidist node: it begins with {bytes(data[:16])!r}")
    if it.major != MAJOR:
        raise broken("VERSION", f"it speaks MDP/{it.major}.{it.minor}, this node MDP/{MAJOR}."
                                f"{MINOR}; install the same minidist on all nodes")
    if it.side != side:
        raise broken("NOT_MINIDIST", f"it greets as side {it.side!r} and not {side!r}")
    if it.mechanism != mechanism:
        has = ("it has no key, this node has one", "it has a key, this node has none")
        raise broken("AUTH_REQUIRED", f"{has[mechanism == NO_KEY]}; set the same MINIDIST_KEY "
                                      f"on all nodes")
    if it.job != job_hash(config.job):
        raise broken("WRONG_JOB", f"it belongs to another job than {config.job!r}; is the port "
                                  f"used by two runs? Compare MINIDIST_JOB and MASTER_PORT")
    if it.generation != config.generation:
        raise broken("GENERATION", f"it is in generation {it.generation}, "
                                   f"this node in {config.generation}")
    if it.max_frame < MAX_FIELDS:
        raise broken("TOO_LARGE", f"it accepts frames of {it.max_frame} bytes; "
                                  f"the least is {MAX_FIELDS}")
    return it


def derive(key: bytes, salt: bytes, label: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869), one block: a key for one purpose, of this connection."""
    extracted = hmac.digest(salt, key, "sha256")
    return hmac.digest(extracted, label + b"\x01", "sha256")


def prove(key: bytes, dialer: bytes, acceptor: bytes, side: bytes) -> bytes:
    """What only a holder of the key can say about these two greetings. The side
    is in the label, so a proof sent back to its maker is worth nothing."""
    transcript = hashlib.sha256(dialer + acceptor).digest()
    label = b"minidist1 dialer proof" if side == DIALER else b"minidist1 acceptor proof"
    return hmac.digest(derive(key, transcript, label), transcript, "sha256")


# ---- 6 frames ------------------------------------------------------------------------
#  0 u16 magic "MD"   2 u8 kind   3 u8 flags   4 u16 fields   6 u16 channel
#  8 u32 payload of this frame   12 u32 generation   16 u64 payload of the message
# 24 u32 CRC-32 of the fields (and the payload, with CHECKSUMS)
# 28 u32 CRC-32 of bytes 0..27: a damaged length is never believed
# Then the fields, then the payload.

HEAD = struct.Struct(">HBBHHIIQI")
HEADER = struct.Struct(">HBBHHIIQII")
CRC = struct.Struct(">I")
FRAME_MAGIC = 0x4D44
MORE = 1                        # flag: the message goes on in a later frame


def pack_header(kind: int, flags: int, channel: int, generation: int, fields: bytes,
                payload: int, total: int, checksum: int) -> bytes:
    """A frame's header and fields."""
    head = HEAD.pack(FRAME_MAGIC, kind, flags, len(fields), channel, payload, generation,
                     total, checksum)
    return head + CRC.pack(zlib.crc32(head)) + fields


def pack_frame(kind: int, values: Sequence = (), payload: bytes = b"", *, channel: int = 0,
               generation: int = 0, checksums: bool = False) -> bytes:
    """A whole message of one frame, for what is small."""
    fields = MESSAGES[kind].pack(values)
    checksum = zlib.crc32(payload if checksums else b"", zlib.crc32(fields))
    return pack_header(kind, 0, channel, generation, fields, len(payload), len(payload),
                       checksum) + payload


class Outgoing:
    """A message on its way out: cut into frames that copy no payload."""
    __slots__ = ("kind", "channel", "fields", "views", "total", "at", "first", "sent")

    def __init__(self, kind: int, fields: Sequence, buffers: Sequence, channel: int):
        self.kind, self.channel = kind, channel
        self.fields = MESSAGES[kind].pack(fields)
        self.views = [as_bytes(buffer) for buffer in buffers]
        self.total = sum(map(len, self.views))
        if self.total > MAX_MESSAGE or len(self.fields) > MAX_FIELDS:
            raise broken("TOO_LARGE", f"{self.total} bytes of payload and {len(self.fields)} of "
                                      f"fields; the most is {MAX_MESSAGE} and {MAX_FIELDS}")
        self.at, self.first = 0, True
        self.sent = False                       # the last byte was handed over

    @property
    def done(self) -> bool:
        return self.at == self.total and not self.first

    def frame(self, limit: int, generation: int, checksums: bool) -> list:
        """The next frame of at most `limit` payload bytes, as views to send."""
        taken, room = [], limit
        while self.views and room:
            view = self.views[0]
            if len(view) <= room:
                taken.append(self.views.pop(0))
            else:
                taken.append(view[:room])
                self.views[0] = view[room:]
            room -= len(taken[-1])
        size = limit - room
        self.at += size
        fields, self.fields, self.first = self.fields, b"", False
        checksum = zlib.crc32(fields)
        if checksums:
            for view in taken:
                checksum = zlib.crc32(view, checksum)
        flags = MORE if self.at < self.total else 0
        return [pack_header(self.kind, flags, self.channel, generation, fields, size,
                            self.total, checksum), *taken]


class Incoming:
    """A message on its way in."""
    __slots__ = ("kind", "channel", "fields", "total", "got", "view", "payload", "done", "post")

    def __init__(self, kind: int, channel: int, fields: tuple, total: int):
        self.kind, self.channel, self.fields, self.total = kind, channel, fields, total
        self.got, self.done = 0, False
        self.view: memoryview               # where the payload goes, and
        self.payload: Any = b""             # what it is a view of
        self.post: Any = None               # the receive that waits for it, if any

    def hold(self) -> bool:
        """Take memory of our own. What is large comes as pages that cost nothing until
        bytes arrive: a header that only promises does not make us take a gigabyte."""
        try:
            self.payload = (bytearray(self.total) if self.total < LAZY else
                            mmap.mmap(-1, self.total, **PRIVATE))
        except (MemoryError, OSError):
            raise broken("TOO_LARGE", f"no memory for a message of {self.total} bytes") from None
        self.view = memoryview(self.payload)
        return True


def as_bytes(buffer: Any) -> memoryview:
    """A flat view of a contiguous buffer's bytes (a cast refuses empty shapes)."""
    view = memoryview(buffer)
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.c_contiguous:
        raise ValueError("the array is not contiguous; pass np.ascontiguousarray(it)")
    if view.format[0] in "<>!=":                # elements travel little-endian, as they lie here
        raise ValueError(f"the array has byte order {view.format!r}; pass it in native order")
    return view.cast("B") if view.nbytes else memoryview(b"")


# ---- 7 session -----------------------------------------------------------------------

GREET, PROVE, JOINING, DECIDE, OPEN, CLOSED = (
    "greeting", "proving", "joining", "deciding", "open", "closed")
# What may arrive in a state; None: everything else that is not in the table.
EXPECTED = {
    PROVE: (PROOF, ERROR),
    (JOINING, ACCEPTOR): (JOIN, ERROR),
    (JOINING, DIALER): (WELCOME, ERROR),
    DECIDE: (ERROR,),
}


class Session:
    """One end of one connection.

    In:  space() says where the next bytes belong, received() that they are
         there, tick() what time it is.
    Out: `out` holds whole control frames to send; received() returns complete
         messages; `timer` is when tick() is due. Broken rules raise
         ProtocolError, after an ERROR for the peer was put into `out`.

    Dialer and acceptor go through: greeting, proving (with a key), joining,
    (acceptor: deciding,) open, closed.
    """

    def __init__(self, config: Config, dialer: bool, now: float, *, incarnation: int = 0,
                 address: str = "", patience: float = HANDSHAKE_TIMEOUT,
                 random: Callable[[int], bytes] = os.urandom):
        self.config, self.state = config, GREET
        self.side, self.other = (DIALER, ACCEPTOR) if dialer else (ACCEPTOR, DIALER)
        self.incarnation, self.address = incarnation, address
        self.out: deque[bytes] = deque()
        self.place: Callable[[Incoming], bool] = Incoming.hold
        self.doing: Callable[[], str] = str
        self.deadline = now + patience          # of the handshake, in total
        self.heard = self.pinged = self.ticked = now
        self.peer_doing, self.pings = "", 0
        self.said_goodbye = self.left = self.paused = self.checksums = False
        self.max_frame = MAX_FRAME
        self._greeting = greet(config, self.side, random(32))
        self._scratch = memoryview(bytearray(SCRATCH + HEADER.size + MAX_FIELDS))
        self._start = self._end = 0             # the bytes in scratch that are not parsed
        self._message: Incoming | None = None   # whose payload is being read, and how
        self._rest = self._sum = 0              # much of this frame is still to come
        self._flags = self._checksum = 0
        self._partial: dict[int, Incoming] = {}     # by channel: messages with MORE to come
        if dialer:
            self.out.append(self._greeting)

    # -- bytes in

    def space(self) -> memoryview:
        """Where to put the next bytes: into the message itself when it can be."""
        message = self._message
        if self.state == CLOSED:
            return self._scratch
        if message is not None:
            return message.view[message.got:message.got + min(self._rest, PIECE)]
        if self._start:                         # move a cut header to the front
            size = self._end - self._start
            self._scratch[:size] = self._scratch[self._start:self._end]
            self._start, self._end = 0, size
        return self._scratch[self._end:self._end + SCRATCH]

    def received(self, count: int, now: float) -> list[Incoming]:
        """`count` bytes are in space(); returns the messages that they complete."""
        self.heard = now
        if self.state == CLOSED:                # the connection drains: let the bytes go
            return []
        if self._message is None:
            self._end += count
            return self.parse()
        events: list[Incoming] = []
        try:
            self._took(count, events)
        except ProtocolError as error:
            self.fail(error)
            raise
        return events

    def parse(self) -> list[Incoming]:
        """Take apart what is in scratch; also called to go on after a pause."""
        events: list[Incoming] = []
        self.paused = False
        try:
            if self.state == GREET and not self._hear_greeting():
                return events
            while self.state != CLOSED:
                if self._message is not None:
                    count = min(self._end - self._start, self._rest)
                    if not count:
                        break
                    message, start = self._message, self._start
                    message.view[message.got:message.got + count] = \
                        self._scratch[start:start + count]
                    self._start += count
                    self._took(count, events)
                elif not self._begin_frame(events):
                    break
        except ProtocolError as error:
            self.fail(error)
            raise
        if self._start == self._end:
            self._start = self._end = 0
        return events

    def _hear_greeting(self) -> bool:
        have = self._scratch[self._start:min(self._end, self._start + GREETING.size)]
        if bytes(have[:4]) != MAGIC[:len(have)]:        # strangers leave at the first wrong byte
            raise broken("NOT_MINIDIST", f"not a minidist node: it begins with {bytes(have)!r}")
        if len(have) < GREETING.size:
            return False
        self._start += GREETING.size
        if self.side == ACCEPTOR:               # answer even what is wrong: it tells versions
            self.out.append(self._greeting)
        theirs = check_greeting(have, self.config, self.other)
        self._dialer, self._acceptor = ((self._greeting, bytes(have)) if self.side == DIALER
                                        else (bytes(have), self._greeting))
        self.max_frame = min(MAX_FRAME, theirs.max_frame)
        self.checksums = self.config.checksums and bool(theirs.capabilities & CHECKSUMS)
        if self.config.key is not None:
            self.state = PROVE
            if self.side == ACCEPTOR:           # it proves first
                self._say(PROOF, (self._proof(ACCEPTOR),))
        else:
            self._begin_joining()
        return True

    def _proof(self, side: bytes) -> bytes:
        assert self.config.key is not None
        return prove(self.config.key, self._dialer, self._acceptor, side)

    def _begin_joining(self) -> None:
        self.state = JOINING
        if self.side == DIALER:
            role = int(self.config.role == "server")
            self._say(JOIN, (self.config.node, role, self.incarnation, self.address))

    def _begin_frame(self, events: list) -> bool:
        """Parse a header and its fields, if all of them are there."""
        have = self._end - self._start
        if have < HEADER.size:
            return False
        (magic, kind, flags, size, channel, length, generation, total, body, crc
         ) = HEADER.unpack_from(self._scratch, self._start)
        start = self._start + HEADER.size
        if crc != zlib.crc32(self._scratch[self._start:start - 4]) or magic != FRAME_MAGIC:
            raise broken("BAD_FRAME", "a header's checksum or magic is wrong: the stream is "
                                      "damaged, or the other side is not minidist")
        early = self.state != OPEN
        if size > (MAX_EARLY if early else MAX_FIELDS) or total > MAX_MESSAGE or length > (
                0 if early else self.max_frame):
            raise broken("TOO_LARGE", f"a frame of kind {kind} with {size} bytes of fields and "
                                      f"{length} of payload ({total} in all)")
        if have < HEADER.size + size:
            return False
        fields = self._scratch[start:start + size]
        checksum = zlib.crc32(fields)
        if checksum != body and not (self.checksums and length):    # (else with the payload)
            raise broken("BAD_FRAME", f"the checksum of a {describe(kind, ())}'s fields is wrong")
        if flags & ~MORE or length > total:
            raise broken("BAD_FRAME", f"flags {flags:#x}, {length} of {total} payload bytes")
        if generation != self.config.generation:
            raise broken("GENERATION", f"a frame of generation {generation} in "
                                       f"{self.config.generation}")
        message = self._partial.get(channel) if kind not in SESSION_KINDS else None
        if message is None:
            message = self._begin_message(kind, channel, flags, fields, length, total)
            if message is None:
                return False                    # paused: this header is read again later
            if flags & MORE:
                self._partial[channel] = message
        elif kind != message.kind or size or total != message.total:
            raise broken("UNEXPECTED", f"{describe(kind, ())} inside a "
                                       f"{describe(message.kind, message.fields)} on its channel")
        stop = message.got + length
        if stop > total or bool(flags & MORE) != (stop < total) or (flags & MORE and not length):
            raise broken("BAD_FRAME", f"{message.got} + {length} of {total} payload bytes, "
                                      f"flags {flags:#x}")
        self._start = start + size
        self._message, self._rest, self._flags = message, length, flags
        self._sum, self._checksum = checksum, body
        if not length:
            self._took(0, events)
        return True

    def _begin_message(self, kind: int, channel: int, flags: int, fields: memoryview,
                       length: int, total: int) -> Incoming | None:
        expected = EXPECTED.get(self.state) or EXPECTED.get((self.state, self.side))
        if (kind not in expected if expected else kind in (PROOF, JOIN, WELCOME)) or self.left:
            raise broken("UNEXPECTED", f"{describe(kind, ())} while {self.state}"
                                       f"{' after GOODBYE' * self.left}")
        layout = MESSAGES.get(kind)
        if layout is None and kind < SKIPPABLE:
            raise broken("UNKNOWN_KIND", f"a message of kind {kind}")
        message = Incoming(kind, channel, layout.unpack(fields) if layout else (), total)
        if kind in SESSION_KINDS or layout is None:
            if channel or flags or length != total or (length and layout and kind != ROSTER):
                raise broken("BAD_FRAME", f"{describe(kind, ())} on channel {channel} with flags "
                                          f"{flags:#x} and {length} bytes of payload")
            message.hold()
        elif not self.place(message):
            self.paused = True
            return None
        return message

    def _took(self, count: int, events: list) -> None:
        """`count` payload bytes are in their place; is the frame complete?"""
        message = self._message
        assert message is not None
        if self.checksums:
            self._sum = zlib.crc32(message.view[message.got:message.got + count], self._sum)
        message.got += count
        self._rest -= count
        if self._rest:
            return
        self._message = None
        if self.checksums and self._sum != self._checksum:
            raise broken("CHECKSUM", f"the payload of {describe(message.kind, message.fields)} "
                                     f"is damaged")
        if not self._flags & MORE:
            if message is self._partial.get(message.channel):
                del self._partial[message.channel]
            message.done = True
            self._complete(message, events)

    def _complete(self, message: Incoming, events: list) -> None:
        kind = message.kind
        if kind not in SESSION_KINDS:
            if kind in MESSAGES:                # who does not know a kind skips it
                events.append(message)
        elif kind == PROOF:
            if not hmac.compare_digest(message.fields[0], self._proof(self.other)):
                raise broken("AUTH_FAILED", "the keys differ; set the same MINIDIST_KEY on all "
                                            "nodes")
            if self.side == DIALER:
                self._say(PROOF, (self._proof(DIALER),))
            self._begin_joining()
        elif kind == PING:
            self.peer_doing = message.fields[1]
            if len(self.out) < MAX_CONTROL:     # a flood is answered as fast as answers leave
                self._say(PONG, (message.fields[0], self.doing()))
        elif kind == PONG:
            self.peer_doing = message.fields[1]
        else:
            if kind == JOIN:
                self.state = DECIDE
            elif kind == WELCOME:
                self.state = OPEN
            elif kind == GOODBYE:
                self.left = True
                self.leave()
            elif kind == ERROR:
                self.state = CLOSED
            events.append(message)

    # -- control out

    @property
    def open(self) -> bool:
        """May messages be sent?"""
        return self.state == OPEN and not self.said_goodbye

    def _say(self, kind: int, values: Sequence = (), payload: bytes = b"") -> None:
        if self.said_goodbye:                   # nothing follows a GOODBYE
            return
        self.out.append(pack_frame(kind, values, payload, generation=self.config.generation,
                                   checksums=self.checksums))

    def accept(self) -> None:
        """The acceptor's answer to JOIN: the peer is in."""
        self.state = OPEN
        self._say(WELCOME, (self.config.node, self.incarnation))

    def fail(self, error: ProtocolError) -> None:
        """Tell the peer why, once, and be closed. Strangers are told nothing."""
        if self.state not in (GREET, CLOSED) or (self.state == GREET and self.out
                                                 and self.side == ACCEPTOR):
            self._say(ERROR, (error.code, str(error)))
        self.state = CLOSED

    def leave(self) -> None:
        if self.open:
            self._say(GOODBYE)
            self.said_goodbye = True

    def tell(self, kind: int, values: Sequence, payload: bytes = b"") -> None:
        """ROSTER and DEPARTED, which node 0 sends."""
        if self.open:
            self._say(kind, values, payload)

    # -- time

    @property
    def timer(self) -> float:
        """When tick() is due."""
        if self.state != OPEN:
            return self.deadline
        return min(max(self.heard, self.pinged) + self.config.heartbeat,
                   self.heard + self.config.heartbeat_timeout)

    def tick(self, now: float) -> None:
        """Ping who is silent; give up who stays silent. The caller has read all
        that had arrived before `now`."""
        patience = self.config.heartbeat_timeout
        if self.state == CLOSED:
            return
        if self.state != OPEN:
            if now >= self.deadline:
                error = broken("HANDSHAKE_TIMEOUT", f"still {self.state} at the deadline")
                self.fail(error)
                raise error
            return
        # Did this process itself stand still (stopped, or swapped out)? Then the
        # silence was ours, and the peer gets time to be heard.
        if self.paused or now - self.ticked > patience / 2:
            self.heard = max(self.heard, now - patience / 2)
        self.ticked = now
        if now >= self.heard + patience:
            error = broken("SILENT", f"nothing heard for {now - self.heard:.1f} s")
            self.fail(error)
            raise error
        if now >= max(self.heard, self.pinged) + self.config.heartbeat:
            self.pinged, self.pings = now, self.pings + 1
            self._say(PING, (self.pings & 0xFFFFFFFF, self.doing()))
