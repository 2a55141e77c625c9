"""What a training process needs of transports: joining the job, and training
messages in words instead of numbers.

Nothing here knows what the messages do; that is section 7 of minidist.py.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from . import Config, Message, PeerLost, Transport, protocol
from . import open as open_transport


def join(backend: str | None = None, init_method: str = "env://", timeout: Any = None,
         world_size: int = -1, rank: int = -1) -> tuple[Transport, Config]:
    """Join the job that the environment and the arguments (which win) describe."""
    env = dict(os.environ)
    if init_method.startswith("tcp://"):
        env["MASTER_ADDR"], _, env["MASTER_PORT"] = init_method[6:].rpartition(":")
    elif init_method != "env://":
        raise ValueError(f"init_method is {init_method!r}; it must be env:// or tcp://host:port")
    if rank >= 0:
        env["RANK"] = str(rank)
    if world_size >= 0:
        env["WORLD_SIZE"] = str(world_size)
    if timeout is not None:         # seconds, or a timedelta as in PyTorch
        env["MINIDIST_TIMEOUT"] = str(getattr(timeout, "total_seconds", lambda: timeout)())
    if backend in (None, "gloo", "nccl"):       # PyTorch's names mean: whatever was launched
        backend = env.get("MINIDIST_TRANSPORT") or "tcp"
    config = Config.from_env(env)
    return open_transport(backend, config), config


# ---- words and numbers ---------------------------------------------------------

@functools.cache
def tables() -> tuple[dict, dict]:
    """For each field whose numbers have names: {word: number} and {number: word}."""
    numbers = {"op": protocol.OP_CODES, "reduce": protocol.REDUCTION_CODES,
               "dtype": protocol.DTYPE_CODES, "code": protocol.CODES}
    return numbers, {field: {n: word for word, n in table.items()}
                     for field, table in numbers.items()}


def encode(kind: str, fields: Sequence) -> tuple[int, tuple]:
    """("PULL", fields in words) -> (38, fields in numbers)."""
    number, table = getattr(protocol, kind), tables()[0]
    try:
        return number, tuple([table[name][value] if name in table else value for name, value
                              in zip(protocol.MESSAGES[number].names, fields, strict=True)])
    except KeyError as error:
        raise TypeError(f"{kind}: {error.args[0]} cannot travel; the protocol knows "
                        f"{', '.join(protocol.DTYPE_CODES)}: convert the tensor first") from None


def decode(message: Message) -> tuple[str, int, tuple, Any]:
    """(kind, peer, fields, payload) in words."""
    layout, table = protocol.MESSAGES[message.kind], tables()[1]
    fields = tuple([table[name].get(value, value) if name in table else value
                    for name, value in zip(layout.names, message.fields, strict=True)])
    return layout.name, message.peer, fields, message.payload


class Wire:
    """Packets (kind, peer, fields, payload) of parameter servers over a transport.

    The loss of a node does not end the others' work: it arrives as a packet."""

    def __init__(self, transport: Transport):
        self.transport, self.size = transport, transport.size
        self.lost: list[tuple] = []             # found out while sending, not told yet
        self.told: set[int] = set()             # found out while waiting
        transport.on_lost = lambda peer, reason: None

    def send(self, packets: Sequence[tuple]) -> None:
        for kind, peer, fields, payload in packets:
            try:
                self.transport.send(peer, *encode(kind, fields), (payload,), channel=2)
            except PeerLost as lost:
                self.lost.append(("LOST", lost.peer, (str(lost),), b""))

    def recv(self, timeout: float | None, doing: str) -> tuple[str, int, tuple, Any]:
        """The next packet; kind GOODBYE or LOST when a node left or was lost."""
        if self.lost:
            return self.lost.pop(0)
        self.transport.doing = doing
        try:
            return decode(self.transport.recv_any(channel=2, timeout=timeout))
        except PeerLost as lost:
            if lost.peer in self.told:          # it went when we still needed all: see node.py
                raise
            self.told.add(lost.peer)
            return "LOST", lost.peer, (str(lost),), b""
        finally:
            self.transport.doing = ""
