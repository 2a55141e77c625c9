"""`minidist conformance`: the other side of a conversation, for who writes a worker.

    minidist conformance --as coordinator -- node worker.mjs conformance

starts the command once for each stage, with the environment of PROTOCOL.md, 9.2, in a job of two
ranks, and is the other rank: node 0 (`--as coordinator`), or a rank that dials the worker as node 0
(`--as peer`). Stages are first of things that must work, then of things that must be refused. A
stage that fails says which rule was broken, what was expected and what came.

The command is the worker under test running this program (PROTOCOL.md, section 13):

    repeat: broadcast one int64, n, from the other rank; if n = -1: leave, and exit with 0
            x = n float32, x[i] = (i mod 1000) / 7 + rank;  all_reduce x (sum)
            y = n float32, y[i] = i + rank;                 all_gather y
            barrier
    on any error: exit with another code

For the profile *Worker* smaller n ask for what conformance_training.py checks.
"""
from __future__ import annotations

import argparse
import contextlib
import hmac
import os
import select
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any, NamedTuple

import numpy as np

from . import Config, Driver, Stream, join_address, packets, reliability, split_address, tcp, udp
from . import protocol as p

BOTH, COORDINATOR, PEER = ("coordinator", "peer"), ("coordinator",), ("peer",)
DRIVERS: dict[str, type[Driver]] = {"tcp": tcp.TcpDriver, "udp": udp.UdpDriver}
PATIENCE = 6.0          # seconds for an answer
START = 20.0            # seconds for a process to start, and to end
SILENCE, DEATH = 0.5, 2.0       # heartbeat and its timeout, as the worker is told
JOB = "conformance"


class Broken(Exception):
    """A rule that the worker broke."""

    def __init__(self, rule: str, expected: str, found: str):
        self.rule, self.expected, self.found = rule, expected, found
        super().__init__(f"[MDP-{rule}] expected {expected}; got {found}")


class Heard(NamedTuple):
    """A message of the worker."""
    name: str
    fields: tuple
    payload: bytes


def frame(kind: int, fields: bytes = b"", payload: bytes = b"", total: int | None = None, *,
          flags: int = 0, channel: int = 0, generation: int = 0, crc: int | None = None) -> bytes:
    """A frame, right or wrong."""
    total = len(payload) if total is None else total
    crc = zlib.crc32(fields) if crc is None else crc
    return p.pack_header(kind, flags, channel, generation, fields, len(payload), total,
                         crc) + payload


def header(kind: int, fields: int, payload: int, total: int) -> bytes:
    """A header that promises."""
    head = p.HEAD.pack(p.FRAME_MAGIC, kind, 0, fields, 0, payload, 0, total, 0)
    return head + p.CRC.pack(zlib.crc32(head))


# ---- a connection, driven by hand -------------------------------------------------------


class Line:
    """Bytes out, bytes in, each wait with a deadline; the worker's frames are judged."""

    def __init__(self, driver: Driver, stream: Stream):
        self.driver, self.stream = driver, stream
        self.space = memoryview(bytearray(1 << 16))
        self.have = bytearray()
        self.end = ""                   # how the stream ended
        self.deaf = False               # do not answer PINGs
        self.partial: dict[int, tuple] = {}     # by channel: messages with MORE to come
        self.sequence = self.rank = 0
        self.limit = self.room = p.MAX_FRAME    # payload of a frame: the worker's, ours
        self.hello = (b"", b"")         # both greetings, dialer's first
        self.checksums = False          # of payloads too: both greetings have the bit

    # -- bytes

    def turn(self, deadline: float, out: bool = False) -> None:
        """Wait for something to happen."""
        now = time.monotonic()
        self.driver.pump(now)
        due = self.driver.timeout(now)
        wait = max(0.0, min(deadline - now, inf if due is None else due, 0.1))
        fd = self.driver.fileno() if self.stream.read_fd < 0 else self.stream.read_fd
        select.select([fd], [fd] if out else [], [], wait)

    def send(self, data: bytes, piece: int = 1 << 30, patience: float = PATIENCE) -> None:
        view, deadline = memoryview(data), time.monotonic() + patience
        while view and not self.end:
            try:
                view = view[self.stream.send([view[:piece]]):]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Broken("3-4", "that the worker takes what is sent", "nothing moved for "
                                 f"{patience:g} s") from None
                self.turn(deadline, out=self.stream.write_fd >= 0)
            except OSError as error:
                self.end = str(error)

    def more(self, deadline: float) -> bool:
        """Read what has come; False at the end of the stream, or of patience."""
        while not self.end:
            try:
                count = self.stream.recv_into(self.space)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                self.turn(deadline)
            except OSError as error:
                self.end = str(error)
            else:
                self.have += self.space[:count]
                self.end = "" if count else "the end of the stream"
                return bool(count)
        return False

    def take(self, count: int, rule: str, expected: str, deadline: float) -> bytes:
        while len(self.have) < count:
            if not self.more(deadline):
                got = f"{bytes(self.have[:40])!r}, then " if self.have else ""
                raise Broken(rule, expected, got + (self.end or "nothing more in time"))
        data = bytes(self.have[:count])
        del self.have[:count]
        return data

    # -- frames

    def judged(self, rule: str, expected: str, deadline: float) -> Heard:
        """The worker's next message, whose every frame must be right."""
        while True:
            head = self.take(p.HEADER.size, rule, expected, deadline)
            (magic, kind, flags, size, channel, length, generation, total, crc, own
             ) = p.HEADER.unpack(head)
            if own != zlib.crc32(head[:28]) or magic != p.FRAME_MAGIC:
                raise Broken("4.1-1", "a header with magic and checksum", head.hex())
            if size > p.MAX_FIELDS or length > self.limit or total > p.MAX_MESSAGE:
                raise Broken("4.1-1", f"lengths within the limits (payload {self.limit})",
                             f"fields of {size}, payload of {length} of {total}")
            fields = self.take(size, "4.1-1", f"{size} bytes of fields", deadline)
            if generation or flags & ~p.MORE:
                raise Broken("2-2", "generation 0, no reserved flag", head.hex())
            payload = self.take(length, "4.2-2", f"{length} bytes of payload", deadline)
            if crc != zlib.crc32(payload if self.checksums else b"", zlib.crc32(fields)):
                raise Broken("5-4", "the checksum of the fields, "
                             f"{'and the payload' if self.checksums else 'alone'}, as greeted",
                             f"{crc:#x}")
            if kind in p.SESSION_KINDS and (channel or flags or length != total):
                raise Broken("4.3-1", "one frame on channel 0", head.hex())
            # Frames of the session may come between those of a message.
            first = None if kind in p.SESSION_KINDS else self.partial.get(channel)
            if first is None:
                first = (kind, total, fields, bytearray())
            elif (kind, total) != first[:2] or size:
                raise Broken("4.2-2", "the same kind and total, and no fields", head.hex())
            data = first[3]
            data += payload
            more = bool(flags & p.MORE)
            if more != (len(data) < total) or len(data) > total or more and not length:
                raise Broken("4.2-1", "MORE exactly if payload is still to come",
                             f"{len(data)} of {total} bytes, flags {flags}")
            if more:
                self.partial[channel] = first
                continue
            if kind not in p.SESSION_KINDS:
                self.partial.pop(channel, None)
            layout = p.MESSAGES.get(kind)
            if layout is None:
                raise Broken(rule, expected, f"a message of kind {kind}")
            try:
                return Heard(layout.name, layout.unpack(first[2]), bytes(data))
            except p.ProtocolError as error:
                raise Broken("7-1", f"the fields of {layout.name}", str(error)) from None

    def hear(self, names: str, rule: str, within: float = PATIENCE) -> Heard:
        """The next message, of this kind or these; PINGs on the way are answered."""
        deadline, expected = time.monotonic() + within, names.replace(" ", " or ")
        while True:
            heard = self.judged(rule, expected, deadline)
            if heard.name in names.split():
                return heard
            if heard.name == "PING" and not self.deaf:
                self.say(p.PONG, (heard.fields[0], ""))
            elif heard.name not in ("PING", "PONG"):
                raise Broken(rule, expected, p.describe(getattr(p, heard.name), heard.fields))

    def frames(self, kind: int, values: Sequence = (), payload: bytes = b"", channel: int = 0
               ) -> list[bytes]:
        """A message, in frames that the worker takes."""
        fields, total, made = p.MESSAGES[kind].pack(values), len(payload), list[bytes]()
        while payload or not made:
            piece, payload = payload[:self.room], payload[self.room:]
            made.append(frame(kind, fields, piece, total, flags=p.MORE * bool(payload),
                              channel=channel,
                              crc=zlib.crc32(fields + piece) if self.checksums else None))
            fields = b""
        return made

    def say(self, kind: int, values: Sequence = (), payload: bytes = b"", channel: int = 0) -> None:
        between = frame(p.PING, bytes(6))       # between two frames of a message
        self.send(between.join(self.frames(kind, values, payload, channel)))

    def refuses(self, rule: str, *names: str, within: float = PATIENCE) -> None:
        """ERROR with one of these codes, then the end; what was under way may come before."""
        expected, deadline = f"ERROR {' or '.join(names)}", time.monotonic() + within
        while True:
            heard = self.judged(rule, expected, deadline)
            if heard.name == "ERROR":
                break
            if time.monotonic() > deadline:
                raise Broken(rule, expected, f"{heard.name} and no end of it")
        code = p.ERRORS.get(heard.fields[0])
        if code is None or code.name not in names:
            raise Broken(rule, expected, p.describe(p.ERROR, heard.fields))
        self.ends("8-2", within)

    def ends(self, rule: str, within: float = PATIENCE) -> None:
        deadline = time.monotonic() + within
        while self.more(deadline):
            pass
        if not self.end:
            raise Broken(rule, "the end of the stream", f"a connection open after {within:g} s")
        self.stream.close()

    # -- collectives of two ranks (section 9.3)

    def collective(self, op: str, reduce: str, dtype: str, root: int, x: np.ndarray) -> Callable:
        """exchange(send, take): elements there and back, as [start, stop); None: none."""
        self.sequence += 1
        head = (p.OP_CODES[op], p.REDUCTION_CODES[reduce], p.DTYPE_CODES[dtype], root,
                self.sequence, x.size)

        def exchange(send: tuple | None, take: tuple | None) -> np.ndarray:
            if send is not None:
                self.say(p.COLLECTIVE, (*head, *send), x[slice(*send)].tobytes())
            if take is None:
                return x[:0]
            heard = self.hear("COLLECTIVE", "9.3-1")
            if heard.fields != (*head, *take):
                raise Broken("9.3-1", p.describe(p.COLLECTIVE, (*head, *take)),
                             p.describe(p.COLLECTIVE, heard.fields))
            if len(heard.payload) != (take[1] - take[0]) * x.itemsize:
                raise Broken("9.3-1", f"the elements {take}", f"{len(heard.payload)} bytes")
            return np.frombuffer(heard.payload, x.dtype)
        return exchange

    def announce(self, count: int) -> None:
        self.collective("broadcast", "none", "int64", self.rank, np.array([count]))((0, 1), None)

    def round(self, n: int) -> None:
        """One turn of the program."""
        self.announce(n)
        x, other_x = (np.asarray(np.arange(n) % 1000 / 7 + rank, np.float32)
                      for rank in (self.rank, 1 - self.rank))
        wanted, whole = x + other_x, (0, n)
        exchange = self.collective("all_reduce", "sum", "float32", 0, x)
        if x.nbytes <= 65536:
            theirs = x + exchange(whole, whole)
        else:
            halves = (0, n // 2), (n // 2, n)
            mine, other = halves[self.rank], halves[1 - self.rank]
            x[slice(*mine)] += exchange(other, mine)
            theirs = x.copy()
            theirs[slice(*other)] = exchange(mine, other)
        if theirs.tobytes() != wanted.tobytes():
            at = int(np.flatnonzero(theirs != wanted)[0])
            raise Broken("9.3-2", f"element {at} of the sum to be {wanted[at]!r}",
                         f"{theirs[at]!r}")
        rows = np.asarray(np.arange(2 * n) % max(n, 1) + np.repeat((0, 1), n), np.float32)
        mine, other = [(r * n, r * n + n) for r in (self.rank, 1 - self.rank)]
        arrived = self.collective("all_gather", "none", "float32", 0, rows)(mine, other)
        if arrived.tobytes() != rows[slice(*other)].tobytes():
            raise Broken("9.3-1", "y[i] = i + rank in all_gather", f"{arrived[:4]} ...")
        nothing = np.empty(0, np.uint8)
        self.collective("barrier", "sum", "uint8", 0, nothing)((0, 0), (0, 0))

    def leave(self) -> None:
        self.announce(-1)
        self.hear("GOODBYE", "9.7-1")
        self.say(p.GOODBYE)
        self.ends("9.7-1")


# ---- a trial: one process, one stage ---------------------------------------------------------


class Trial:
    """A worker process and what may be said to it."""

    def __init__(self, command: Sequence[str], transport: str, role: str, servers: int = 0):
        self.transport, self.rank = transport, 0 if role == "coordinator" else 1
        self.servers = servers                  # 1: node 2, which we are too
        self.incarnation = 0                    # the worker's
        self.config = Config(node=self.rank, workers=2, servers=servers, key=os.urandom(32),
                             job=JOB)
        self.driver = DRIVERS[transport](self.config)
        self.errors, self.streams = "", list[Stream]()
        kind = socket.SOCK_DGRAM if transport == "udp" else socket.SOCK_STREAM
        if self.rank == 0:
            address = self.driver.listen("127.0.0.1", 0)
        else:
            with socket.socket(socket.AF_INET, kind) as probe:
                probe.bind(("127.0.0.1", 0))
                address = join_address(*probe.getsockname())
        self.address = address
        assert self.config.key is not None
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, env={
            **os.environ, "RANK": str(1 - self.rank), "WORLD_SIZE": "2",
            "MINIDIST_SERVERS": str(servers),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(split_address(address)[1]),
            "MINIDIST_TRANSPORT": transport, "MINIDIST_KEY": self.config.key.hex(),
            "MINIDIST_JOB": JOB, "MINIDIST_GENERATION": "0", "MINIDIST_ROLE": "worker",
            "MINIDIST_HEARTBEAT": str(SILENCE), "MINIDIST_HEARTBEAT_TIMEOUT": str(DEATH),
            "MINIDIST_START_TIMEOUT": "12", "MINIDIST_TIMEOUT": "20", "MINIDIST_CHECKSUMS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def close(self) -> None:
        if self.process.stderr is None or self.process.stderr.closed:
            return
        self.process.kill()
        self.errors = self.process.communicate()[1]
        for stream in self.streams:
            stream.close()
        if isinstance(self.driver, udp.UdpDriver):      # no time for goodbyes
            self.driver.endpoint.connections.clear()
        self.driver.close()

    def exits(self, well: bool, rule: str = "13-1") -> None:
        """The process ends by itself, and says how it went."""
        expected = f"exit code {'0' if well else 'other than 0'}"
        deadline = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < deadline:
            self.driver.pump(time.monotonic())
            time.sleep(0.01)
        code = self.process.poll()
        if code is None:
            raise Broken(rule, expected, f"a process that still runs after {START:g} s")
        if (code == 0) != well:
            raise Broken(rule, expected, f"exit code {code}")

    def line(self) -> Line:
        """A connection to the worker: it dials us, or we it."""
        deadline = time.monotonic() + START
        place: Any = (socket.AF_INET, split_address(self.address))
        stream = None
        while stream is None:
            if time.monotonic() > deadline or self.process.poll() is not None:
                how = "nothing in time" if self.process.poll() is None else "the end of the process"
                raise Broken("9.2-2", f"a connection on {self.transport} at {self.address}", how)
            if self.rank == 0:
                self.driver.pump(time.monotonic())
                stream = self.driver.accept()
            elif self.transport == "udp":
                stream = self.driver.dial(place)
            else:
                with contextlib.suppress(OSError):
                    stream = tcp.TcpStream(socket.create_connection(place[1], 1.0), self.address)
            if stream is None:
                time.sleep(0.01)
        self.streams.append(stream)
        line = Line(self.driver, stream)
        line.rank = self.rank
        return line

    # -- the handshake, step by step

    def greeting(self, **changes: Any) -> bytes:
        side = p.ACCEPTOR if self.rank == 0 else p.DIALER
        it = p.Greeting(*p.GREETING.unpack(p.greet(self.config, side, os.urandom(32))))
        return p.GREETING.pack(*it._replace(**changes))

    def greet(self, line: Line, ours: bytes, piece: int = 1 << 30) -> None:
        """Greetings both ways; the worker's is judged."""
        if self.rank == 1:
            line.send(ours, piece)
        wanted = p.ACCEPTOR if self.rank == 1 else p.DIALER
        data = line.take(64, "5-1", "a greeting of 64 bytes", time.monotonic() + PATIENCE)
        it = p.Greeting(*p.GREETING.unpack(data))
        for name, value in (("magic", p.MAGIC), ("major", p.MAJOR), ("side", wanted),
                            ("mechanism", p.PSK_HMAC), ("job", p.job_hash(JOB)), ("generation", 0)):
            if getattr(it, name) != value:
                raise Broken("5-1", f"{name} {value!r} in the greeting", repr(getattr(it, name)))
        if it.max_frame < p.MAX_FIELDS:
            raise Broken("5-1", "max_frame of at least 4096", str(it.max_frame))
        if it.capabilities & ~(p.CHECKSUMS | 0xFF << 56):
            raise Broken("2-2", "no capability bits but 0 and 56 to 63", hex(it.capabilities))
        if self.rank == 0:
            line.send(ours, piece)
        own = p.Greeting(*p.GREETING.unpack(ours))
        line.limit = min(own.max_frame, it.max_frame, p.MAX_FRAME)
        line.room = min(line.limit, 50_000)
        line.checksums = bool(own.capabilities & it.capabilities & p.CHECKSUMS)
        line.hello = (data, ours) if self.rank == 0 else (ours, data)

    def proof(self, line: Line, side: bytes, key: bytes | None = None) -> bytes:
        key = self.config.key if key is None else key
        assert key is not None
        return p.prove(key, *line.hello, side)

    def prove(self, line: Line, piece: int = 1 << 30) -> None:
        """Proofs both ways, the acceptor's first."""
        ours, theirs = (p.ACCEPTOR, p.DIALER) if self.rank == 0 else (p.DIALER, p.ACCEPTOR)
        mine = frame(p.PROOF, self.proof(line, ours))
        if self.rank == 0:
            line.send(mine, piece)
        if not hmac.compare_digest(line.hear("PROOF", "6-1").fields[0], self.proof(line, theirs)):
            raise Broken("6-1", "the proof of the key", "another one")
        if self.rank == 1:
            line.send(mine, piece)

    def join(self, piece: int = 1 << 30, roster: bool = True, **changes: Any) -> Line:
        """The whole handshake; without a roster, the worker waits for one."""
        line = self.line()
        self.greet(line, self.greeting(**changes), piece)
        self.prove(line, piece)
        if self.rank == 0:
            node, role, incarnation, address = line.hear("JOIN", "9.2-1").fields
            if (node, role) != (1, 0):
                raise Broken("9.2-1", "JOIN of node 1, role 0", f"node {node}, role {role}")
            try:
                split_address(address)
            except ValueError as error:
                raise Broken("9.2-1", "JOIN with host:port", str(error)) from None
            line.send(frame(p.WELCOME, p.MESSAGES[p.WELCOME].pack((0, 7))), piece)
            self.incarnation = incarnation
            members = [p.Member(0, 0, 7, self.address), p.Member(1, 0, incarnation, address),
                       p.Member(2, 1, 7, self.address)][:2 + self.servers]
            if roster:
                line.send(line.frames(p.ROSTER, (len(members),), p.pack_roster(members))[0], piece)
            return line
        lines = [line]
        if self.servers:
            lines.append(self.line())
            self.greet(lines[1], self.greeting())
            self.prove(lines[1])
        for node, each in enumerate(lines, 1):
            each.send(self.joining(node, node - 1), piece)
            zero, self.incarnation = each.hear("WELCOME", "9.1-1").fields
            if zero != 0:
                raise Broken("9.1-1", "WELCOME of node 0", f"node {zero}")
        wanted = [(0, 0, self.incarnation), (1, 0, 7), (2, 1, 7)][:2 + self.servers]
        for each in lines:
            heard = each.hear("ROSTER", "9.2-2")
            try:
                members = p.unpack_roster(heard.fields[0], heard.payload)
            except p.ProtocolError as error:
                raise Broken("9.2-2", "ROSTER with all nodes", str(error)) from None
            if [(m.node, m.role, m.incarnation) for m in members] != wanted:
                raise Broken("9.2-2", f"ROSTER of (node, role, incarnation) {wanted}", str(members))
        self.server_line = lines[-1]
        return line

    def server(self) -> Line:
        """The worker's connection to node 2; it dials us again for it."""
        if self.rank == 1:
            return self.server_line
        line = self.line()
        self.greet(line, self.greeting())
        self.prove(line)
        line.hear("JOIN", "9.2-1")
        line.say(p.WELCOME, (2, 7))
        return line

    def joining(self, node: int = 1, role: int = 0) -> bytes:
        return frame(p.JOIN, p.MESSAGES[p.JOIN].pack((node, role, 7, "127.0.0.1:9")))


# ---- stages -----------------------------------------------------------------------------------


class Stage(NamedTuple):
    what: str
    rules: str
    roles: tuple[str, ...]
    transports: tuple[str, ...]
    servers: int
    run: Callable[[Trial], None]


STAGES: list[Stage] = []


def stage(what: str, rules: str, roles: tuple[str, ...] = BOTH,
          transports: tuple[str, ...] = ("tcp", "udp"), servers: int = 0) -> Callable:
    def add(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        STAGES.append(Stage(what, rules, roles, transports, servers, run))
        return run
    return add


def finish(trial: Trial, line: Line) -> None:
    line.leave()
    trial.exits(True)


@stage("joins, and leaves", "5-1 6-1 9.1-1 9.2-1 9.7-1")
def _(trial: Trial) -> None:
    finish(trial, trial.join())


@stage("sums, gathers and waits", "9.3-1 9.3-2 4.2-1 4.2-2")
def _(trial: Trial) -> None:
    line = trial.join()
    for n in (1, 0, 5, 16384, 16385, 300_001):
        line.round(n)
    finish(trial, line)


@stage("takes bytes in any division", "3-1", transports=("tcp",))
def _(trial: Trial) -> None:
    line = trial.join(piece=1)
    send = line.send
    line.send = lambda data, piece=0: send(data, 1)             # type: ignore
    line.round(3)
    finish(trial, line)


@stage("ignores a higher minor version and unknown capabilities", "2-2 5-3")
def _(trial: Trial) -> None:
    line = trial.join(minor=9, capabilities=0xFFFF_FFFF_FFFF_FFFE)
    line.round(4)
    finish(trial, line)


@stage("sends frames no larger than the other side takes", "4.1-1")
def _(trial: Trial) -> None:
    line = trial.join(max_frame=4096)
    line.round(5000)
    finish(trial, line)


@stage("answers PING, and PINGs inside a message", "9.5-1 4.2-3")
def _(trial: Trial) -> None:
    line = trial.join()
    line.say(p.PING, (1234, "testing"))
    if (heard := line.hear("PONG", "9.5-1", 3.0)).fields[0] != 1234:
        raise Broken("9.5-1", "PONG with token 1234", str(heard.fields))
    fields = p.MESSAGES[p.COLLECTIVE].pack((2, 0, 9, line.rank, 1, 1, 0, 1))
    data = np.array([-1]).tobytes()
    line.send(frame(p.COLLECTIVE, fields, data[:3], 8, flags=p.MORE))
    line.say(p.PING, (77, ""))
    line.send(frame(p.COLLECTIVE, b"", data[3:], 8))
    line.hear("PONG", "4.2-3", 3.0)
    line.hear("GOODBYE", "9.7-1")
    line.say(p.GOODBYE)
    trial.exits(True)


@stage("sends PING when nothing is heard", "9.5-1")
def _(trial: Trial) -> None:
    line = trial.join()
    heard = line.hear("PING", "9.5-1", 4 * SILENCE + 2)
    line.say(p.PONG, (heard.fields[0], ""))
    finish(trial, line)


@stage("skips unknown kinds from 128 on", "4.1-3")
def _(trial: Trial) -> None:
    line = trial.join()
    line.send(frame(200, b"fields", b"payload"))
    line.round(2)
    finish(trial, line)


@stage("has new nonces", "6-2", COORDINATOR)
def _(trial: Trial) -> None:
    nonces = []
    for _ in range(2):                          # it dials again after a connection is lost
        line = trial.line()
        trial.greet(line, trial.greeting())
        nonces.append(line.hello[0][28:60])
        line.stream.close()
    if nonces[0] == nonces[1]:
        raise Broken("6-2", "a nonce for each connection", f"{nonces[0].hex()} twice")


@stage("carries everything over a network that loses datagrams", "10.6-2 10.6-3", BOTH, ("udp",))
def _(trial: Trial) -> None:
    endpoint, count = trial.driver.endpoint, [0]                # type: ignore[attr-defined]
    trains, receive = endpoint.trains, endpoint.receive

    def lost() -> bool:
        count[0] += 1
        return count[0] % 9 == 0

    def lossy_trains(now: float) -> Any:
        for address, datagrams in trains(now):
            kept = [each for each in datagrams if not lost()]
            if kept:
                yield reliability.Train(address, kept)

    def lossy_receive(data: memoryview, address: Any, now: float, segment: int = 0) -> None:
        if not lost():
            receive(data, address, now, segment)
    endpoint.trains, endpoint.receive = lossy_trains, lossy_receive
    line = trial.join()
    for n in (1, 5000, 60_000):
        line.round(n)
    finish(trial, line)


@stage("speaks with checksums, if it has offered them", "5-3 5-4")
def _(trial: Trial) -> None:
    line = trial.join(capabilities=p.CHECKSUMS)
    line.round(40_000)
    if not line.checksums:
        finish(trial, line)
        return
    data = line.frames(p.OPAQUE, (9,), b"payload", channel=9)[0]
    line.send(data[:-1] + b"!")
    line.refuses("5-4", "CHECKSUM")
    trial.exits(False)


# -- what must be refused

@stage("leaves a server of another kind", "5-2", COORDINATOR)
def _(trial: Trial) -> None:
    line = trial.line()
    line.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    line.ends("5-2")
    trial.exits(False)


@stage("says nothing to a stranger, and takes the next one", "5-2", PEER)
def _(trial: Trial) -> None:
    line = trial.line()
    line.send(b"GET / HTTP/1.1\r\n\r\n")
    line.ends("5-2")
    if line.have:
        raise Broken("5-2", "no answer to a stranger", bytes(line.have[:20]).hex())
    finish(trial, trial.join())


@stage("gives up when a rank does not come", "9.2-4", PEER)
def _(trial: Trial) -> None:
    with contextlib.suppress(Broken):           # it may, or may not, see us in between
        trial.line().stream.close()
    trial.exits(False, "9.2-4")


@stage("is not stopped by the silent and the slow", "2-3", PEER)
def _(trial: Trial) -> None:
    lines = [trial.line() for _ in range(30)]
    for line in lines[::2]:
        line.send(p.MAGIC[:2])
    finish(trial, trial.join())


@stage("gives a silent stranger 5 seconds", "9.1-1", PEER)
def _(trial: Trial) -> None:
    line, start = trial.line(), time.monotonic()
    for byte in trial.greeting()[:6]:
        line.send(bytes([byte]))
        time.sleep(0.2)
    line.ends("9.1-1", 8.0)
    if time.monotonic() - start < 3.0:
        raise Broken("9.1-1", "5 s to join", "an end sooner")
    finish(trial, trial.join())


@stage("gives a silent coordinator 5 seconds", "9.1-1", COORDINATOR)
def _(trial: Trial) -> None:
    trial.line().ends("9.1-1", 8.0)


for _what, _change, _code in (
        ("another major version", {"major": 2}, "VERSION"),
        ("its own side", {}, "NOT_MINIDIST"),
        ("no key", {"mechanism": 0}, "AUTH_REQUIRED"),
        ("another job", {"job": bytes(8)}, "WRONG_JOB"),
        ("another generation", {"generation": 1}, "GENERATION"),
        ("a frame limit of 4095", {"max_frame": 4095}, "TOO_LARGE")):
    @stage(f"refuses a greeting with {_what}", "5-1 5-2")
    def _(trial: Trial, change: dict = _change, code: str = _code) -> None:
        line = trial.line()
        if not change:
            change = {"side": p.DIALER if trial.rank == 0 else p.ACCEPTOR}
        if trial.rank == 1:
            line.send(trial.greeting(**change))
            line.take(64, "5-2", "a greeting, so that we see what differs",
                      time.monotonic() + PATIENCE)
            line.refuses("5-1", code)
            return
        line.take(64, "5-1", "a greeting", time.monotonic() + PATIENCE)
        line.send(trial.greeting(**change))
        line.ends("5-1")


@stage("refuses a proof with another key", "6-1")
def _(trial: Trial) -> None:
    line = trial.line()
    trial.greet(line, trial.greeting())
    side = p.ACCEPTOR if trial.rank == 0 else p.DIALER
    line.send(frame(p.PROOF, trial.proof(line, side, bytes(32))))
    if trial.rank == 1:
        line.hear("PROOF", "6-1")
    line.refuses("6-1", "AUTH_FAILED")
    if trial.rank == 0:
        trial.exits(False)


@stage("refuses its own proof, reflected", "6-1", PEER)
def _(trial: Trial) -> None:
    line = trial.line()
    trial.greet(line, trial.greeting())
    line.send(frame(p.PROOF, line.hear("PROOF", "6-1").fields[0]))
    line.refuses("6-1", "AUTH_FAILED")


@stage("refuses a replayed conversation", "6-1 6-2")
def _(trial: Trial) -> None:
    ours = trial.greeting()
    side = p.ACCEPTOR if trial.rank == 0 else p.DIALER
    recorded = b""
    for last in (False, True):
        line = trial.line()
        trial.greet(line, ours)
        recorded = recorded or frame(p.PROOF, trial.proof(line, side))
        if not last:
            line.stream.close()
            continue
        line.send(recorded)
        if trial.rank == 1:
            line.hear("PROOF", "6-1")
        line.refuses("6-1", "AUTH_FAILED")


@stage("refuses a capability that was changed under way", "5-3 6-1")
def _(trial: Trial) -> None:
    line = trial.line()
    ours = trial.greeting(capabilities=1)
    trial.greet(line, ours)
    changed = bytearray(ours)
    changed[19] = 0                             # we signed this one, it saw the other
    dialer, acceptor = (bytes(changed) if each == ours else each for each in line.hello)
    line.hello = dialer, acceptor
    side = p.ACCEPTOR if trial.rank == 0 else p.DIALER
    line.send(frame(p.PROOF, trial.proof(line, side)))
    if trial.rank == 1:
        line.hear("PROOF", "6-1")
    line.refuses("6-1", "AUTH_FAILED")


for _what, _codes, _data in (
        ("JOIN", ("UNEXPECTED",), frame(p.JOIN, p.MESSAGES[p.JOIN].pack((1, 0, 7, "")))),
        ("a tensor", ("TOO_LARGE", "UNEXPECTED"), header(p.COLLECTIVE, 33, 8, 8)),
        ("1025 bytes of fields", ("TOO_LARGE",), header(p.PROOF, 1025, 0, 0))):
    @stage(f"takes no {_what.removeprefix('a ')} before it has seen the proof", "6-3 4.1-2")
    def _(trial: Trial, data: bytes = _data, codes: tuple = _codes) -> None:
        line = trial.line()
        trial.greet(line, trial.greeting())
        if trial.rank == 1:
            line.hear("PROOF", "6-1")
        line.send(data)
        line.refuses("6-3", *codes)


@stage("refuses WELCOME of another node", "9.1-1", COORDINATOR)
def _(trial: Trial) -> None:
    line = trial.line()
    trial.greet(line, trial.greeting())
    trial.prove(line)
    line.hear("JOIN", "9.2-1")
    line.say(p.WELCOME, (1, 7))
    line.refuses("9.1-1", "WRONG_NODE")


for _what, _nodes, _code in (("with a node that the job does not have", (0, 1, 2), "WRONG_NODE"),
                             ("without a node", (1,), "BAD_FIELDS")):
    @stage(f"refuses a roster {_what}", "9.2-2", COORDINATOR)
    def _(trial: Trial, nodes: tuple = _nodes, code: str = _code) -> None:
        line = trial.join(roster=False)
        line.say(p.ROSTER, (len(nodes),), p.pack_roster([p.Member(n, 0, 7, "") for n in nodes]))
        line.refuses("9.2-2", code)
        trial.exits(False)


@stage("refuses a second roster", "9.2-2", COORDINATOR)
def _(trial: Trial) -> None:
    line = trial.join()
    line.say(p.ROSTER, (2,), p.pack_roster([p.Member(n, 0, 7, "127.0.0.1:9") for n in (0, 1)]))
    line.refuses("9.2-2", "UNEXPECTED")
    trial.exits(False)


for _what, _node, _role in (("a node that the job does not have", 5, 0),
                            ("a worker as a server", 1, 1), ("its own number", 0, 0)):
    @stage(f"refuses {_what}", "9.2-1", PEER)
    def _(trial: Trial, node: int = _node, role: int = _role) -> None:
        line = trial.line()
        trial.greet(line, trial.greeting())
        trial.prove(line)
        line.send(trial.joining(node, role))
        line.refuses("9.2-1", "WRONG_NODE")
        finish(trial, trial.join())


@stage("refuses a rank that is there, and leaves the first alone", "9.2-1", PEER)
def _(trial: Trial) -> None:
    first, second = trial.join(), trial.line()
    trial.greet(second, trial.greeting())
    trial.prove(second)
    second.send(trial.joining())
    second.refuses("9.2-1", "DUPLICATE")
    first.round(3)
    finish(trial, first)


def text(size: int) -> bytes:
    return size.to_bytes(2, "big") + b"x" * size


_CALL = p.MESSAGES[p.COLLECTIVE].pack((2, 0, 9, 0, 1, 1, 0, 1))
_GOOD = frame(p.OPAQUE, bytes(8), b"12345678", channel=7)
_PART = frame(p.OPAQUE, bytes(8), b"1234", 8, flags=p.MORE, channel=7)
for _what, _rule, _code, _data in (
        ("a header with a wrong checksum", "4.1-1", "BAD_FRAME", _GOOD[:31] + b"\0" + _GOOD[32:]),
        ("a header with another magic", "4.1-1", "BAD_FRAME", b"ME" + _GOOD[2:]),
        ("fields of 4097 bytes", "4.1-1", "TOO_LARGE", header(p.OPAQUE, 4097, 0, 0)),
        ("a frame of 2^20 + 1 bytes", "4.1-1", "TOO_LARGE",
         header(p.OPAQUE, 8, (1 << 20) + 1, (1 << 20) + 1)),
        ("a frame of 2^32 - 1 bytes", "4.1-2", "TOO_LARGE",
         header(p.OPAQUE, 8, (1 << 32) - 1, (1 << 32) - 1)),
        ("a message of 2^40 + 1 bytes", "4.1-1", "TOO_LARGE",
         header(p.OPAQUE, 8, 8, (1 << 40) + 1)),
        ("fields with a wrong checksum", "4.1-1", "BAD_FRAME",
         frame(p.OPAQUE, bytes(8), crc=1)),
        ("a reserved flag", "2-2", "BAD_FRAME", frame(p.OPAQUE, bytes(8), flags=2)),
        ("a frame larger than its message", "4.2-2", "BAD_FRAME",
         frame(p.OPAQUE, bytes(8), b"12345678", 7, channel=7)),
        ("MORE without a byte", "4.2-1", "BAD_FRAME",
         frame(p.OPAQUE, bytes(8), b"", 9, flags=p.MORE, channel=7)),
        ("another generation", "4.1-1", "GENERATION", frame(p.OPAQUE, bytes(8), generation=1)),
        ("kind 99", "4.1-3", "UNKNOWN_KIND", frame(99)),
        ("COLLECTIVE with a byte too few", "7-1", "BAD_FIELDS", frame(p.COLLECTIVE, _CALL[:-1])),
        ("a text that is not UTF-8", "7-1", "BAD_FIELDS",
         frame(p.PING, bytes(4) + b"\0\2\xff\xfe")),
        ("a text of 1001 bytes", "4.1-1", "TOO_LARGE", frame(p.PING, bytes(4) + text(1001))),
        ("nine dimensions", "4.1-1", "TOO_LARGE",
         frame(p.TENSOR, bytes(4) + b"\1\x09" + bytes(36))),
        ("PROOF when open", "9.1-1", "UNEXPECTED", frame(p.PROOF, bytes(32))),
        ("PING on channel 1", "4.3-1", "BAD_FRAME", frame(p.PING, bytes(6), channel=1)),
        ("another kind inside a message", "4.2-2", "UNEXPECTED",
         _PART + frame(p.STATE, bytes(33), channel=7)),
        ("fields in a later frame", "4.2-2", "UNEXPECTED",
         _PART + frame(p.OPAQUE, bytes(8), b"5678", 8, channel=7)),
        ("another call", "9.3-1", "MISMATCH",
         frame(p.COLLECTIVE, p.MESSAGES[p.COLLECTIVE].pack((5, 1, 6, 0, 1, 0, 0, 0)))),
        ("a broadcast of another length", "9.3-1", "MISMATCH",
         frame(p.COLLECTIVE, _CALL, b"1234"))):
    @stage(f"refuses {_what}", _rule)
    def _(trial: Trial, rule: str = _rule, code: str = _code, data: bytes = _data) -> None:
        line = trial.join()
        if _CALL in data and trial.rank:        # the root of the broadcast is our rank
            data = frame(p.COLLECTIVE, _CALL[:4] + b"\1" + _CALL[5:], data[32 + len(_CALL):])
        line.send(data)
        line.refuses(rule, code)
        trial.exits(False)


@stage("holds 64 MiB that it has not asked for, and no more", "2-3 9.5-2", transports=("tcp",))
def _(trial: Trial) -> None:
    line = trial.join()
    data = b"".join(line.frames(p.OPAQUE, (9,), bytes(1 << 20), channel=9))
    for count in range(160):                    # (socket buffers hold some more)
        try:
            line.send(data, patience=DEATH + 1)
        except Broken:                          # it has stopped reading; we are not dead for that
            if count < 64:
                raise
            break
        if line.end:
            raise Broken("9.5-2", "patience, as it was not reading", line.end)
    else:
        raise Broken("2-3", "an end of reading after 64 MiB", "160 MiB taken")


@stage("notices silence", "9.5-3")
def _(trial: Trial) -> None:
    line = trial.join()
    line.deaf, start = True, time.monotonic()
    line.refuses("9.5-3", "SILENT", within=DEATH + 5)
    if time.monotonic() - start < DEATH / 2:
        raise Broken("9.5-3", f"patience for {DEATH:g} s", "an end sooner")
    trial.exits(False)


@stage("notices the end of the stream", "3-2 9.6-3")
def _(trial: Trial) -> None:
    trial.join().stream.close()
    trial.exits(False, "9.6-3")


@stage("ends when the other gives up", "9.6-3")
def _(trial: Trial) -> None:
    line = trial.join()
    line.say(p.ERROR, (p.CODES["ABORTED"], "testing"))
    line.ends("9.6-3")
    trial.exits(False, "9.6-3")


@stage("answers GOODBYE, and does not wait for who has left", "8-1 9.6-3")
def _(trial: Trial) -> None:
    line = trial.join()
    line.say(p.GOODBYE)
    line.hear("GOODBYE", "9.7-1")
    line.ends("9.7-1")
    trial.exits(False, "9.6-3")


# -- datagrams that must be refused (section 10)

def closed(trial: Trial, kind: int, body: bytes, rule: str, code: int) -> None:
    line = trial.join()
    connection = line.stream.connection                         # type: ignore[attr-defined]
    number, connection.number = connection.number + 5, connection.number + 6
    data = connection.seals[0].close(packets.head(kind, number, connection.peer_id) + body)
    trial.driver.socket.sendto(data, connection.address)        # type: ignore[attr-defined]
    line.ends(rule)
    if connection.code != code:
        raise Broken(rule, f"CLOSE with code {code}", f"{line.end}, code {connection.code}")


for _what, _rule, _kind, _body, _number in (
        ("a packet of an unknown kind", "10.1-2", 0xD801, b"", packets.MALFORMED),
        ("STREAM without bytes", "10.1-4", packets.STREAM, bytes(8), packets.MALFORMED),
        ("STREAM beyond the credit", "10.8-3", packets.STREAM,
         (1 << 50).to_bytes(8, "big") + b"x", packets.FLOW),
        ("feedback without ranges", "10.1-3", packets.ACK, bytes(16), packets.MALFORMED),
        ("a range that runs backwards", "10.1-3", packets.ACK,
         packets.encode_feedback(0, 0, [(1, 0)]), packets.MALFORMED),
        ("an acknowledgement of what was never sent", "10.4-4", packets.ACK,
         packets.encode_feedback(0, 0, [(0, 1 << 40)]), packets.MALFORMED)):
    @stage(f"closes on {_what}", _rule, BOTH, ("udp",))
    def _(trial: Trial, kind: int = _kind, body: bytes = _body, rule: str = _rule,
          code: int = _number) -> None:
        closed(trial, kind, body, rule, code)


@stage("drops strangers' datagrams, and answers with less than a third",
       "10.1-1 10.3-1 10.3-2 10.3-3 10.3-6", PEER, ("udp",))
def _(trial: Trial) -> None:
    place, key = split_address(trial.address), trial.config.key
    assert key is not None
    seal = packets.Seal(key, "minidist udp handshake")
    hello = packets.HELLO.pack(5, b"incarnat", bytes(32), 1 << 20)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, socket.socket(
            socket.AF_INET, socket.SOCK_DGRAM) as two:
        def ask(sock: socket.socket, data: bytes, wait: float = 0.3) -> bytes:
            sock.settimeout(wait)
            sock.sendto(data, place)
            try:
                return sock.recv(2000)
            except OSError:                     # nothing, or nobody listens yet
                return b""

        def init(cookie: bytes = bytes(24), size: int = 1200, seal: packets.Seal = seal,
                 kind: int = packets.INIT) -> bytes:
            body = packets.head(kind, 0, 0) + hello + cookie
            return seal.close(body.ljust(size - seal.size, b"\0"))
        deadline, retry = time.monotonic() + START, b""
        while not retry and time.monotonic() < deadline:
            retry = ask(one, init())
        if retry[:2] != b"\xd1\1" or len(retry) != 56 or not seal.opens(memoryview(retry)):
            raise Broken("10.3-3", "RETRY of 56 bytes", retry.hex() or "nothing")
        cookie = retry[16:40]
        for what, rule, data in (
                ("an INIT of 1199 bytes", "10.3-1", init(cookie, 1199)),
                ("another key", "10.1-1", init(cookie, seal=packets.Seal(bytes(32), "x"))),
                ("a packet for no connection", "10.10-5",
                 seal.close(packets.head(packets.PING, 1, 99))),
                ("random bytes", "10.1-1", os.urandom(100))):
            if answer := ask(one, data):
                raise Broken(rule, f"no answer to {what}", answer.hex())
        if (answer := ask(two, init(cookie)))[:1] not in (b"\xd1", b""):
            raise Broken("10.3-3", "RETRY: the cookie is another address's", answer.hex())
        answer = ask(one, init(kind=packets.INIT + 1))
        if answer[:1] != b"\xd7" or answer[16:18] != b"\0\4":
            raise Broken("10.3-6", "CLOSE with code VERSION", answer.hex() or "nothing")
        if (answer := ask(one, init(cookie)))[:1] != b"\xd2":
            raise Broken("10.3-2", "ACCEPT", answer.hex() or "nothing")
    finish(trial, trial.join())


from . import conformance_training as _training         # noqa: E402, F401, I001 - more stages

# ---- command line --------------------------------------------------------------------------------


def verdict(each: Stage, command: Sequence[str], transport: str, role: str) -> list[str]:
    """Run a stage; what there is to say of it, in one line if it passed."""
    trial = Trial(command, transport, role, each.servers)
    try:
        each.run(trial)
    except Broken as error:
        trial.close()
        return [f"FAILED  {each.what}", f"        rule      MDP-{error.rule}",
                f"        expected  {error.expected}", f"        got       {error.found}",
                *(f"        worker    {line}" for line in trial.errors.splitlines()[-3:])]
    finally:
        trial.close()
    return [f"ok      {each.what} ({each.rules})"]


def selected(transport: str, role: str, only: str) -> list[Stage]:
    return [each for each in STAGES if role in each.roles and transport in each.transports
            and only in f"{each.what} {each.rules}"]


def run(command: Sequence[str], transport: str, role: str, only: str = "", jobs: int = 4) -> int:
    """All stages whose name or rules contain `only`; how many failed."""
    stages, failed = selected(transport, role, only), 0
    with ThreadPoolExecutor(jobs) as pool:
        for lines in pool.map(lambda each: verdict(each, command, transport, role), stages):
            failed += len(lines) > 1
            print("\n".join(lines), flush=True)
    print(f"{len(stages) - failed} of {len(stages)} stages passed: a worker over {transport}, "
          f"minidist as {role}")
    return failed


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "minidist conformance", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--as", dest="role", choices=BOTH, default="coordinator",
        help="what we are: node 0, or a rank that dials the worker as node 0 (%(default)s)")
    add("--transport", choices=DRIVERS, default="tcp", help="(%(default)s)")
    add("--only", default="", metavar="TEXT", help="stages whose name or rules contain it")
    add("--jobs", type=int, default=4, metavar="N", help="stages at once (%(default)s)")
    add("--list", action="store_true", help="show the stages and their rules")
    add("command", nargs="*", metavar="COMMAND", help="starts the worker; write -- before it")
    flags = parser.parse_args(argv)
    if flags.list:
        for each in selected(flags.transport, flags.role, flags.only):
            print(f"{each.what} ({each.rules})")
        return 0
    if not flags.command:
        parser.error("which command starts the worker?")
    try:
        return int(run(flags.command, flags.transport, flags.role, flags.only, flags.jobs) > 0)
    except OSError as error:
        print(f"minidist conformance: error: {error}", file=sys.stderr)
        return 2
