"""TCP: one connection for each pair of nodes that talk."""
from __future__ import annotations

import contextlib
import socket
from typing import Any

from . import Driver, Stream, check_exposed, join_address, split_address

BUFFER = 4 << 20        # enough for a sender to stay two chunks ahead on any LAN
BACKLOG = 512           # all nodes of a large job dial node 0 in the same moment


class TcpStream(Stream):
    def __init__(self, sock: socket.socket, name: str):
        self.socket, self.name = sock, name
        sock.setblocking(False)
        # A message is one sendmsg: waiting for more to send only costs (Nagle: 40 ms).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        self.read_fd = self.write_fd = sock.fileno()
        # The socket's own methods do exactly what the contract asks.
        self.send, self.recv_into = sock.sendmsg, sock.recv_into    # type: ignore

    send = recv_into = None                                         # type: ignore

    def close(self) -> None:
        self.socket.close()


class TcpDriver(Driver):
    listener: socket.socket | None = None

    def listen(self, host: str, port: int) -> str:
        if self.config.listen_fd is not None and self.config.node == 0:
            self.listener = socket.socket(fileno=self.config.listen_fd)
            host = self.listener.getsockname()[0]
        check_exposed(host, self.config)
        if self.listener is None:
            family, kind, proto, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.listener = socket.socket(family, kind, proto)
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:       # exactly where asked, and nowhere else
                self.listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self.listener.bind(place)
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        return join_address(*self.listener.getsockname()[:2])

    def fileno(self) -> int:
        return -1 if self.listener is None else self.listener.fileno()

    def accept(self) -> Stream | None:
        assert self.listener is not None
        with contextlib.suppress(OSError):      # nobody there, or gone again
            sock, place = self.listener.accept()
            return TcpStream(sock, join_address(*place[:2]))
        return None

    def resolve(self, address: str) -> list:
        host, port = split_address(address)
        return [(family, place) for family, *_, place in
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]

    def dial(self, place: Any) -> Stream:
        family, address = place
        stream = TcpStream(socket.socket(family, socket.SOCK_STREAM), join_address(*address[:2]))
        stream.socket.connect_ex(address)       # how it went, send and recv_into tell
        return stream

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()


driver = TcpDriver
