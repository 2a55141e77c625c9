"""Transports: how minidist's messages travel between nodes.

Three layers, each of which knows nothing of the one above it:

    driver     pipe.py, tcp.py ...    moves bytes: a Stream to each peer
    protocol   protocol.py            greeting, keys, frames, heartbeats; no I/O
    node       node.py                runs sessions over streams: a Transport

sim.py is a Transport of its own: threads of one process on a virtual clock.

This file holds what the layers agree on: the message contract (`Transport`),
the driver contract (`Driver`, `Stream`), `Config`, the errors and the registry.

A *node* is one process of the job. Workers are nodes 0..workers-1 (the node is
the rank), parameter servers follow. Node 0 coordinates: all others dial it.
"""
from __future__ import annotations

import importlib
import ipaddress
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

STATS = ("bytes_sent", "bytes_received", "messages_sent", "messages_received",
         "retransmissions")
LONGEST_WAIT = 24 * 3600.0      # timeouts are clamped to a day: no overflow, no "for ever"


# ---- errors -----------------------------------------------------------------

class TransportError(RuntimeError):
    """Whatever went wrong between nodes."""


class PeerLost(TransportError):
    """A node died, fell silent, left or gave up while somebody needed it."""

    def __init__(self, peer: int, reason: str, doing: str = "", text: str = ""):
        self.peer, self.reason, self.doing = peer, reason, doing
        super().__init__(text or f"node {peer} lost ({reason})" + f" in {doing}" * bool(doing))


class Timeout(TransportError, TimeoutError):
    """A wait reached its deadline although the peers are alive."""


class ProtocolError(TransportError):
    """The other side, or this one, broke a rule. `code` is protocol.ERRORS' number."""

    def __init__(self, code: int, text: str):
        self.code = code
        super().__init__(text)


# ---- messages and the contract of every transport ---------------------------

class Message(NamedTuple):
    """What travels between nodes."""
    kind: int                   # protocol.COLLECTIVE, protocol.PUSH, ...
    fields: tuple               # in the order of protocol's message table
    payload: Any                # b"" when none; the caller's `into` when it gave one
    peer: int                   # where it came from


class Transport(ABC):
    """Between any two nodes messages arrive whole, in order and once, or the
    peer is reported lost, once. Nothing waits without a deadline.

    Order is kept within (peer, channel): 0 collectives, 1 point to point,
    2 parameter servers. `timeout` is in seconds; None means config.timeout.
    Methods may be called from several threads.
    """
    node: int                   # this node
    size: int                   # workers + servers
    incarnation: int = 0        # u32, random for each process: a restarted node is another
    doing: str = ""             # "all_reduce #57 (fc1.weight)": errors and stall reports say it
    stats: dict[str, int]       # STATS
    all_reduce: Callable[[Any, str], None] | None = None    # (array, "sum"): one of its own,
    #                                 which collectives then use, if it has any (see mpi.py)
    on_lost: Callable[[int, str], None] | None = None
    # Without on_lost the loss of any peer ends every wait with PeerLost: one
    # rank less means no sum. With it (parameter servers, asynchronous workers)
    # the loss is told once, by on_lost(peer, reason) and by recv_any raising
    # PeerLost, and work with the other peers goes on. on_lost may run in the
    # keeper's thread and must not call the transport.

    @abstractmethod
    def send(self, peer: int, kind: int, fields: Sequence = (), buffers: Sequence = (), *,
             channel: int = 0, timeout: float | None = None) -> None:
        """Send one message whose payload is the buffers joined. Returns when it
        was handed over (the buffers may then be reused). Incoming messages are
        taken into a bounded inbox meanwhile, so mutual sends never deadlock."""

    @abstractmethod
    def recv(self, peer: int, *, channel: int = 0, into: Any = None,
             timeout: float | None = None) -> Message:
        """The next message of this peer and channel. With `into` (a writable,
        contiguous array or view) the payload lands there; a payload of another
        length is a ProtocolError on both sides."""

    @abstractmethod
    def exchange(self, to: int, kind: int, fields: Sequence, buffer: Any, source: int,
                 into: Any, *, channel: int = 0, timeout: float | None = None,
                 landed: Callable[[int, int], None] | None = None) -> Message:
        """Send to `to` and receive from `source` at once. landed(start, stop) is
        called as the bytes start..stop of `into` arrive, in order and without
        gaps; all but the last stop are multiples of 64, so whole elements can be
        added while the rest is in flight."""

    @abstractmethod
    def recv_any(self, *, channel: int = 0, timeout: float | None = None) -> Message:
        """The next message of whichever peer comes first. A peer that leaves in
        order is told once, as a message of kind protocol.GOODBYE."""

    def clock(self) -> float:
        """Seconds since some moment in the past: what a worker measures its work by."""
        return time.monotonic()

    def work(self, samples: int) -> float:
        """The caller is about to compute a step of so many samples. Real time passes while it
        does; simulated time passes here: returns how many seconds did."""
        return 0.0

    @abstractmethod
    def abort(self, reason: str, code: int | None = None) -> None:
        """Tell every node why this one gives up, then close. `code` is
        protocol.ERRORS' number, if it is another than ABORTED."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to all and leave: silent, idempotent, in bounded time."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close() if error is None else self.abort(f"{type(error).__name__}: {error}")


# ---- the contract of a driver ------------------------------------------------

class Stream(ABC):
    """One reliable, ordered, two-way byte stream to one peer; never blocks.

    It behaves as Python's non-blocking sockets do: BlockingIOError means "not
    now", any other OSError means the stream is broken and of no further use.
    """
    read_fd: int = -1           # poll this for input; -1 if Driver.pump tells instead (udp)
    write_fd: int = -1          # poll this for room; the same as read_fd for a socket
    room: int = 4               # the event on write_fd that tells of room (select.POLLOUT)
    name: str = ""              # who is at the other end, for people: "127.0.0.1:4711"

    @abstractmethod
    def send(self, views: Sequence) -> int:
        """Take some bytes from the front of the views; how many. Raises
        BlockingIOError when there is no room or the connection is not up yet."""

    @abstractmethod
    def recv_into(self, view: memoryview) -> int:
        """Put bytes that have arrived into the view; how many, 0 at the end of
        the stream. Raises BlockingIOError when none are there."""

    @abstractmethod
    def close(self) -> None:
        """Let go. Bytes taken by send() are still delivered if the peer lives
        (a driver that must linger for it does so in Driver.close)."""


class Driver:
    """Makes Streams. A driver is thin: it moves bytes and keeps no protocol.

    node.py makes one per process, Driver(config), and calls it under one lock,
    from whichever thread is moving bytes; only resolve() runs outside it.
    """
    def __init__(self, config: Config):
        self.config = config
        self.stats = dict.fromkeys(STATS, 0)    # the transport's; a driver counts retransmissions
        self.connected: dict[int, Stream] = {}
        # Streams that exist from the start (pipes), by peer. A driver that
        # has any is never asked to listen or to dial.

    def listen(self, host: str, port: int) -> str:
        """Be reachable there (port 0: any free one); returns the address that
        others dial, as text. Node 0 uses config.listen_fd instead when set."""
        raise NotImplementedError

    def fileno(self) -> int:
        """A descriptor that turns readable when accept() or pump() should be
        called: a listening socket, or the one socket of all udp streams. -1: none."""
        return -1

    def accept(self) -> Stream | None:
        """The next stream that a peer opened, None when there is none now."""
        return None

    def resolve(self, address: str) -> list:
        """The places that an address names, in the order to try them. May block."""
        return [address]

    def dial(self, place: Any) -> Stream:
        """Begin to open a stream to one of resolve()'s places, without waiting.
        Until it is up, send and recv_into raise BlockingIOError; if it fails,
        they raise OSError."""
        raise NotImplementedError

    def pump(self, now: float) -> Iterable[Stream]:
        """Do what is due at `now`: read datagrams, run timers, send what may go.
        Returns the streams with news: new bytes, an end, or room again after a
        BlockingIOError in send. (Streams with descriptors of their own need none.)
        The same news is told once; the node then reads until BlockingIOError."""
        return ()

    def timeout(self, now: float) -> float | None:
        """Seconds until pump() must be called even if nothing arrives; 0.0 when
        there is news that pump has not told yet (recv_into may have read
        datagrams of other streams); None when there is nothing to wait for."""
        return None

    def close(self) -> None:
        """Close everything; linger briefly for bytes that are still to deliver."""


# ---- configuration -----------------------------------------------------------

# The variables by which launchers tell a process its rank, how many there are, and its
# rank among those of its machine. The first row that is there counts.
LAUNCHERS = {
    "minidist launch, torchrun, PyTorchJob": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpiexec of Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec of MPICH and Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def as_torchrun(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with torchrun's variables, whoever launched this process."""
    env = dict(env)
    for names in LAUNCHERS.values():
        if all(env.get(name) for name in names[:2]):
            env |= {ours: env[name] for ours, name in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"),
                                                          names) if name in env}
            break
    if "MASTER_ADDR" not in env and "SLURM_STEP_NODELIST" in env:
        # The first of "node[03-05,9]" or "alpha,beta".
        match = re.match(r"([^,\[]*)(?:\[(\d+))?", env["SLURM_STEP_NODELIST"])
        env["MASTER_ADDR"] = "".join(part or "" for part in match.groups()) if match else ""
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("MASTER_PORT", "").isdecimal():
        env["MASTER_PORT"] = str(int(env["MASTER_PORT"]) + 1)   # torchrun itself holds that port
    return env


@dataclass
class Config:
    """All that a transport needs to know about the job and its place in it."""
    node: int = 0
    workers: int = 1
    servers: int = 0
    role: str = "worker"                    # or "server"
    master: tuple[str, int] = ("127.0.0.1", 29500)
    key: bytes | None = None                # 32 bytes that all nodes of the job share
    job: str = "minidist"                   # nodes of another job are refused
    generation: int = 0                     # the membership view; every frame carries it
    pipes: dict[int, tuple[int, int]] | None = None     # peer: (read fd, write fd); also shm's
    tls: tuple[str, str, str] | None = None     # files: certificate, its key, who signed all
    listen_fd: int | None = None            # node 0: a bound socket that the launcher made
    start_timeout: float = 60.0             # until all nodes have joined
    timeout: float = 300.0                  # one wait in a collective
    heartbeat: float = 1.0                  # ping a peer after so much silence
    heartbeat_timeout: float = 10.0         # after so much silence it is lost
    insecure: bool = False                  # listen beyond loopback without a key
    checksums: bool = False                 # CRC-32 of payloads, where both sides want it

    def __post_init__(self) -> None:
        size = self.workers + self.servers
        if not 0 <= self.node < size:
            raise ValueError(f"node is {self.node}, but the job has nodes 0 to {size - 1}; "
                             f"check RANK and WORLD_SIZE")
        if self.key is not None and len(self.key) != 32:
            raise ValueError(f"the key has {len(self.key)} bytes; it must be 32 random bytes "
                             f"(64 hex digits in MINIDIST_KEY)")
        for name in ("start_timeout", "timeout", "heartbeat", "heartbeat_timeout"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} is {value!r}; it must be a number of seconds")
            setattr(self, name, min(float(value), LONGEST_WAIT))

    @property
    def size(self) -> int:
        return self.workers + self.servers

    def title(self, node: int) -> str:
        """What people call a node: "rank 1", or "server 0" for node workers+0."""
        return f"rank {node}" if node < self.workers else f"server {node - self.workers}"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Config:
        """Read the variables that our launcher and others set (see LAUNCHERS)."""
        env = as_torchrun(env)

        def get(name: str, kind: Callable, default: Any) -> Any:
            text = env.get(name, "")
            if not text:
                return default
            try:
                return kind(text)
            except ValueError as error:
                raise ValueError(f"{name} is {text!r}, which cannot be read: {error}") from None

        def pipes(text: str) -> dict[int, tuple[int, int]]:
            triples = [tuple(map(int, part.split(":"))) for part in text.split(",")]
            return {peer: (read, write) for peer, read, write in triples}

        from . import keys
        files = [env.get(f"MINIDIST_TLS_{name}", "") for name in ("CERT", "KEY", "CA")]
        tls = (files[0], files[1], files[2]) if all(files) else None
        workers = get("WORLD_SIZE", int, 1)
        role = env.get("MINIDIST_ROLE", "") or "worker"
        if role not in ("worker", "server"):
            raise ValueError(f"MINIDIST_ROLE is {role!r}; it must be worker or server")
        node = get("RANK", int, 0) if role == "worker" else get("MINIDIST_NODE", int, workers)
        return cls(
            node=node, workers=workers, servers=get("MINIDIST_SERVERS", int, 0), role=role,
            master=(env.get("MASTER_ADDR") or "127.0.0.1", get("MASTER_PORT", int, 29500)),
            key=keys.key_of(env), tls=tls,
            job=env.get("MINIDIST_JOB") or "minidist",
            generation=get("MINIDIST_GENERATION", int, 0),
            pipes=get("MINIDIST_PIPES", pipes, None),
            listen_fd=get("MINIDIST_LISTEN_FD", int, None),
            checksums=bool(get("MINIDIST_CHECKSUMS", int, 0)),
            start_timeout=get("MINIDIST_START_TIMEOUT", float, cls.start_timeout),
            timeout=get("MINIDIST_TIMEOUT", float, cls.timeout),
            heartbeat=get("MINIDIST_HEARTBEAT", float, cls.heartbeat),
            heartbeat_timeout=get("MINIDIST_HEARTBEAT_TIMEOUT", float, cls.heartbeat_timeout))


# ---- addresses ----------------------------------------------------------------

def join_address(host: str, port: int) -> str:
    """("::1", 80) -> "[::1]:80"; the brackets keep the colons apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """"[::1]:80" -> ("::1", 80)."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host) != (host[:1] == "["):
        raise ValueError(f"{text!r} is not an address; write host:port or [v6 host]:port")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach the host."""
    try:
        address: Any = ipaddress.ip_address(host.partition("%")[0])
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposed(host: str, config: Config) -> None:
    """Refuse to listen where strangers could join (whoever joins can poison the
    model, or read it)."""
    if config.key is None and not config.insecure and not is_loopback(host):
        raise PermissionError(
            f"will not listen on {host} without a key: anybody who reaches it could join the "
            f"job. Set MINIDIST_KEY to the same 64 hex digits on all nodes, or use 127.0.0.1")


# ---- registry ------------------------------------------------------------------

BUILTIN = ("pipe", "shm", "tcp", "udp", "tls", "mpi", "sim")


def names() -> list[str]:
    """Every transport that open() knows, plugins included."""
    from importlib.metadata import entry_points
    found = {entry.name for entry in entry_points(group="minidist.transports")}
    return [*BUILTIN, *sorted(found - set(BUILTIN))]


def open(name: str, config: Config) -> Transport:       # noqa: A001 - as in webbrowser.open
    """Join the job over the transport of that name; returns when all nodes did.

    A built-in one is a module here. Others come from installed packages, by an
    entry point of group `minidist.transports`. Either provides a Driver class
    (most do) or a callable that takes a Config and returns a Transport.
    """
    if sys.byteorder != "little":
        raise NotImplementedError("tensors travel little-endian, as they lie in memory; this "
                                  "machine is big-endian")
    if name in BUILTIN:
        made: Any = importlib.import_module(f".{name}", __name__).driver
    else:
        from importlib.metadata import entry_points
        found = list(entry_points(group="minidist.transports", name=name))
        if not found:
            raise ValueError(f"no transport is called {name!r}; there are {', '.join(names())}")
        made = found[0].load()
    if isinstance(made, type) and issubclass(made, Driver):
        from .node import StreamTransport
        return StreamTransport(made, config)
    return made(config)
