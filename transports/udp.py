"""UDP: all connections of a process share one socket; reliability.py does the rest.

Linux takes and gives whole trains of datagrams at once (UDP_SEGMENT, UDP_GRO);
elsewhere, and when it refuses, they go one by one.
"""
from __future__ import annotations

import contextlib
import errno
import select
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from . import Config, Driver, Stream, check_exposed, join_address, split_address
from .reliability import CLOSE_LIMIT, OPENING, Connection, Endpoint, Train

BUFFER = 4 << 20        # unpaced datagrams overrun the default one even on loopback
LARGEST = 1 << 16       # bytes that one receive can give
BATCH = 256             # receives in a row; then it is the timers' turn
SPACE = 64              # for the one number that comes beside a train
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
ANCILLARY = hasattr(socket.socket, "recvmsg_into")      # not on Windows: then no trains
MTU_DISCOVER = {        # never fragment; the machine finds out what the path carries
    socket.AF_INET: (socket.IPPROTO_IP, 10, 3), socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 3)}


class UdpStream(Stream):
    def __init__(self, driver: UdpDriver, connection: Connection):
        self.driver, self.connection = driver, connection
        self.name = join_address(*connection.address[:2])

    def send(self, views: Sequence) -> int:
        connection, taken = self.connection, 0
        full = connection.state == OPENING
        for view in views:
            if full:
                break
            if len(view):
                count = connection.write(view)
                taken += count
                full = count < len(view)
        self.driver.turn(time.monotonic())
        if full and not taken:
            raise BlockingIOError
        return taken

    def recv_into(self, view: memoryview) -> int:
        connection = self.connection
        if not connection.readable:
            self.driver.turn(time.monotonic())
        count = connection.read_into(view)
        if connection.grant_due:                # the peer may be waiting to hear it
            self.driver.flush(time.monotonic())
        if not count:
            if connection.error is not None:
                raise ConnectionResetError(connection.error)
            if not connection.ended:
                raise BlockingIOError
        return count

    def close(self) -> None:
        self.driver.streams.pop(self.connection, None)
        self.connection.close(time.monotonic())
        self.driver.flush(time.monotonic())


class UdpDriver(Driver):
    def __init__(self, config: Config):
        super().__init__(config)
        self.endpoint = Endpoint(config.key, listening=False, stats=self.stats)
        self.streams: dict[Connection, UdpStream] = {}
        self.socket: socket.socket | None = None
        self.buffer = memoryview(bytearray(LARGEST))
        self.stuck: Train | None = None         # what the socket had no room for
        self.segments = ANCILLARY and sys.platform == "linux"   # send trains, until refused

    def _open(self, sock: socket.socket) -> socket.socket:
        self.socket = sock
        sock.setblocking(False)
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, name, BUFFER)
        if sys.platform == "linux":             # these are its numbers
            for option in (MTU_DISCOVER[sock.family], (SOL_UDP, UDP_GRO, int(ANCILLARY))):
                with contextlib.suppress(OSError):      # an old kernel: it works without
                    sock.setsockopt(*option)
        return sock

    def listen(self, host: str, port: int) -> str:
        if self.config.listen_fd is not None and self.config.node == 0:
            sock = socket.socket(fileno=self.config.listen_fd)
            host = sock.getsockname()[0]
            check_exposed(host, self.config)
        else:
            check_exposed(host, self.config)
            family, kind, proto, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)[0]
            sock = socket.socket(family, kind, proto)
            if family == socket.AF_INET6:       # exactly where asked, and nowhere else
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(place)
        self._open(sock)
        self.endpoint.listening = True
        return join_address(*sock.getsockname()[:2])

    def fileno(self) -> int:
        return -1 if self.socket is None else self.socket.fileno()

    def accept(self) -> Stream | None:
        if not self.endpoint.accepted:
            return None
        return self._stream(self.endpoint.accepted.popleft())

    def _stream(self, connection: Connection) -> Stream:
        stream = self.streams[connection] = UdpStream(self, connection)
        self.endpoint.news[connection] = None   # it may hold bytes by now
        return stream

    def resolve(self, address: str) -> list:
        host, port = split_address(address)
        return [(family, place) for family, *_, place in
                socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)]

    def dial(self, place: Any) -> Stream:
        family, address = place
        if self.socket is None:
            self._open(socket.socket(family, socket.SOCK_DGRAM))
        now = time.monotonic()
        stream = self._stream(self.endpoint.connect(address, now, self.config.start_timeout))
        self.flush(now)
        return stream

    def pump(self, now: float) -> Iterable[Stream]:
        self.turn(now)
        news, self.endpoint.news = self.endpoint.news, {}
        return [self.streams[each] for each in news if each in self.streams]

    def timeout(self, now: float) -> float | None:
        if self.endpoint.news or self.endpoint.accepted:
            return 0.0
        due = self.endpoint.deadline()
        if self.stuck is not None:              # the kernel empties its buffer in no time
            due = now + 0.001
        return None if due == inf else max(0.0, due - now)

    def turn(self, now: float) -> None:
        """Take what arrived, and send what may go."""
        if self.socket is None:
            return
        segment = 0
        try:
            for _ in range(BATCH):
                if ANCILLARY:
                    size, extra, _, address = self.socket.recvmsg_into((self.buffer,), SPACE)
                    segment = int.from_bytes(extra[0][2][:2], sys.byteorder) if extra else 0
                else:
                    size, address = self.socket.recvfrom_into(self.buffer)
                now = time.monotonic()          # read late it would make round trips too short
                self.endpoint.receive(self.buffer[:size], address, now, segment)
        except (BlockingIOError, ConnectionError):      # all read; or an ICMP message: no matter
            pass
        self.flush(now)

    def flush(self, now: float) -> None:
        if self.stuck is not None:
            train, self.stuck = self.stuck, None
            if not self._send(train, now):
                return
        for train in self.endpoint.trains(now):
            if not self._send(train, now):
                return

    def _send(self, train: Train, now: float) -> bool:
        """False when the socket is full: the rest of the train waits."""
        assert self.socket is not None
        address, datagrams = train
        sent = 0
        try:
            if self.segments and len(datagrams) > 1:
                size = len(datagrams[0]).to_bytes(2, sys.byteorder)
                self.socket.sendmsg(datagrams, ((SOL_UDP, UDP_SEGMENT, size),), 0, address)
                return True
            for data in datagrams:
                self.socket.sendto(data, address)
                sent += 1
        except BlockingIOError:
            self.stuck = Train(address, datagrams[sent:])
            return False
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                self.endpoint.too_big(address, len(datagrams[sent]), now)
            elif self.segments and error.errno in (errno.EIO, errno.EINVAL, errno.ENOPROTOOPT):
                self.segments = False           # this kernel or card does not
                return self._send(train, now)
            # Whatever else: the datagram is lost, and that is nothing new.
        return True

    def close(self) -> None:
        if self.socket is None:
            return
        limit = time.monotonic() + CLOSE_LIMIT
        for connection in list(self.endpoint.connections.values()):
            connection.close(time.monotonic())
        while (now := time.monotonic()) < limit:
            self.turn(now)
            if not self.endpoint.connections:
                break
            wait = self.timeout(now)
            self.endpoint.news.clear()
            self.endpoint.accepted.clear()
            select.select([self.socket], [], [], min(limit - now, inf if wait is None else wait))
        self.socket.close()
        self.socket = None


driver = UdpDriver
