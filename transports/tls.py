"""TLS 1.3 over TCP. Both sides show a certificate that the job's own authority has signed.

Within it the protocol is the same, greeting and proofs included. The other side judges a dialer's
certificate when the dialer's handshake is over already, so only WELCOME says that it was accepted.
"""
from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any

from . import Config, Stream, keys
from .tcp import TcpDriver, TcpStream

PIECE = 1 << 16         # bytes encrypted at once: four records
EARLY = 1 << 12         # bytes that wait for the handshake; a greeting has 64


class TlsStream(TcpStream):
    def __init__(self, sock: socket.socket, name: str, context: ssl.SSLContext, host: str | None):
        super().__init__(sock, name)
        self.send, self.recv_into = self._send, self._recv_into     # type: ignore
        self.arrived, self.made = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.arrived, self.made, host is None, host)
        self.sealed = memoryview(b"")           # on its way out
        self.early = b""                        # said before the handshake was over
        self.space = memoryview(bytearray(PIECE))
        self.up = self.more = False             # is there more to read without the socket?
        if host is not None:
            self._shake()

    def _shake(self) -> None:
        try:
            self.tls.do_handshake()
            self.up = True
            if self.early:
                self.tls.write(self.early)
        except ssl.SSLWantReadError:
            pass
        finally:                                # an alert too shall reach the other side
            with contextlib.suppress(OSError):
                self.flush()

    def flush(self) -> None:
        """Send what is encrypted; BlockingIOError if the socket has no room for it."""
        while self.sealed or self.made.pending:
            self.sealed = self.sealed or memoryview(self.made.read())
            self.sealed = self.sealed[self.socket.send(self.sealed):]

    def _send(self, views: Sequence) -> int:
        self.flush()
        data, most = bytearray(), PIECE if self.up else EARLY - len(self.early)
        for view in views:
            data += view[:most - len(data)]
        if not self.up:
            if not most:
                raise BlockingIOError
            self.early += data
            return len(data)
        count = self.tls.write(data) if data else 0
        with contextlib.suppress(BlockingIOError):
            self.flush()                        # else the driver does
        return count

    def _recv_into(self, view: memoryview) -> int:
        while True:
            self.more = False
            if self.up:
                try:
                    taken: Any = self.tls.read(len(view), view)     # into the view: a number
                    self.more = True
                    return taken
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return 0
            count = self.socket.recv_into(self.space)
            if not count:
                return 0
            self.arrived.write(self.space[:count])
            if not self.up:
                self._shake()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self.up:
                self.tls.unwrap()               # says that this is the end, waits for nothing
        with contextlib.suppress(OSError):
            self.flush()
        super().close()


class TlsDriver(TcpDriver):
    def __init__(self, config: Config):
        super().__init__(config)
        if config.tls is None:
            raise ValueError("transport tls needs this node's certificate, its private key and "
                             "the certificate of who signed those of all nodes: set "
                             "MINIDIST_TLS_CERT, MINIDIST_TLS_KEY and MINIDIST_TLS_CA, or "
                             "`minidist launch --tls CERT KEY CA`")
        certificate, key, authority = config.tls
        keys.private(key)
        self.contexts = []                      # to accept, and to dial
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
            self.contexts.append(context)
        self.streams: set[TlsStream] = set()
        self.news: list[TlsStream] = []

    def _stream(self, stream: Stream | None, context: int, host: str | None) -> Stream | None:
        if not isinstance(stream, TcpStream):
            return None
        made = TlsStream(stream.socket, stream.name, self.contexts[context], host)
        self.streams.add(made)
        return made

    def accept(self) -> Stream | None:
        return self._stream(super().accept(), 0, None)

    def resolve(self, address: str) -> list:
        host = address.rpartition(":")[0].strip("[]")
        return [(*place, host) for place in super().resolve(address)]

    def dial(self, place: Any) -> Stream:
        *place, host = place
        stream = self._stream(super().dial(place), 1, host)
        assert stream is not None
        return stream

    def pump(self, now: float) -> Iterable[Stream]:
        self.streams = {each for each in self.streams if each.socket.fileno() >= 0}
        for each in self.streams:
            with contextlib.suppress(OSError):  # the next send, or read, tells
                each.flush()
        news = [each for each in self.streams if each.more]
        for each in news:
            each.more = False                   # told
        return news

    def timeout(self, now: float) -> float | None:
        if any(each.more for each in self.streams):
            return 0.0
        return 0.001 if any(each.sealed for each in self.streams) else None


driver = TlsDriver
