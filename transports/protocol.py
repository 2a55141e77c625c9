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
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import ProtocolError

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
    48: Error("UNSUPPORTED_DTYPE", "request", False, "a dtype code that is not in the table"),
    49: Error("NOT_READY", "request", True, "the server has no parameters yet: INIT comes first"),
    50: Error("BAD_RANGE", "request", False, "an element range outside this server's slice"),
    51: Error("TOO_STALE", "request", True, "a push on parameters that are too old"),
    52: Error("NOT_FINITE", "request", False, "a gradient with NaN or infinity"),
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


PACK = {"text": pack_text, "shape": pack_shape, "numbers": pack_numbers}
PACK.update({name: struct.Struct(">" + form).pack for name, form in SCALARS.items()})
TAKE = {"text": Cursor.text, "shape": Cursor.shape, "numbers": Cursor.numbers}
TAKE.update({name: (lambda form: lambda cursor: cursor.take(form)[0])(">" + form)
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
COLLECTIVE, TENSOR, MANIFEST, INIT, PUSH, APPLIED, PULL, STATE, REFUSED, OPAQUE = range(32, 42)

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
    (MANIFEST, "MANIFEST", "version:u32 hash:hash"),        # payload: pack_manifest
    (INIT, "INIT", "dtype:u8 start:u64 stop:u64 rule:text settings:numbers"),
    (PUSH, "PUSH", "push_id:u64 version:u64 start:u64 stop:u64 samples:u32 dtype:u8"),
    (APPLIED, "APPLIED", "push_id:u64 version:u64"),
    (PULL, "PULL", "start:u64 stop:u64"),
    (STATE, "STATE", "version:u64 start:u64 stop:u64 dtype:u8"),
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
    shown = [f"{name}={words.get(name, {}).get(value, value)}"
             for name, value in zip(layout.names, fields, strict=False)]
    return f"{layout.name}({', '.join(shown)})"


class Entry(NamedTuple):
    """One tensor of the model, as all ranks must have it."""
    name: str
    dtype: int                  # a code of DTYPES
    shape: tuple[int, ...]
    requires_grad: bool


def pack_manifest(entries: Sequence[Entry]) -> bytes:
    """u32 count; for each: text name, u8 dtype, shape, u8 requires_grad. Its
    SHA-256 is the hash in MANIFEST: equal models, equal bytes."""
    return struct.pack(">I", len(entries)) + b"".join(
        pack_text(e.name) + bytes([e.dtype]) + pack_shape(e.shape) + bytes([bool(e.requires_grad)])
        for e in entries)


def unpack_manifest(data: Any) -> list[Entry]:
    cursor = Cursor(data)
    (count,) = cursor.take(">I")
    if count > len(data):       # an entry has at least 5 bytes: no list before its bytes
        raise broken("BAD_FIELDS", f"a manifest of {count} tensors in {len(data)} bytes")
    entries = []
    for _ in range(count):
        name, (dtype,), shape = cursor.text(), cursor.take(">B"), cursor.shape()
        (grad,) = cursor.take(">B")
        if dtype not in DTYPES or grad > 1:
            raise broken("BAD_FIELDS", f"{name!r} has dtype code {dtype}, requires_grad {grad}")
        entries.append(Entry(name, dtype, shape, bool(grad)))
    cursor.end()
    return entries
