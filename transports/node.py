"""A node of the job: sessions run over streams. Every driver of byte streams
becomes a Transport here.

Who does the work. The calling thread moves its own bytes: it holds the lock,
writes and reads without blocking, and waits in poll (lock released) only when
nothing else is left to do. If several threads wait, one of them leads (polls
for all) and the others follow. While nobody is in a call, one keeper thread
polls: it answers pings, empties sockets into the inbox and notices who is gone.
"""
from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import (
    Config,
    Driver,
    Message,
    ProtocolError,
    Timeout,
    TransportError,
    join_address,
    protocol,
)
from .links import CHUNK, Link
from .members import Members, host_towards
from .protocol import CODES, Outgoing, Session

log = logging.getLogger("minidist")

AHEAD = 2 * CHUNK       # an exchange sends so much before the same amount has come back
NAP = 0.02              # seconds between the keeper's looks while callers are at work
REPORT = 10.0           # seconds of waiting after which we say for whom
PARTING = 5.0           # seconds that close() gives the goodbyes


class StreamTransport(Members):
    def __init__(self, driver: type[Driver], config: Config):
        super().__init__(driver(config), config)
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)   # followers wait for the leader here
        self.leading, self.followers = False, 0
        self.seen = 0                                   # self.uses, as the keeper last saw it
        self.cadence = min(0.25, config.heartbeat / 4, config.heartbeat_timeout / 8) or 0.01
        self.due = 0.0                                  # when timers are looked at next
        self.wake_read, self.wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)
        try:
            with self.lock:
                self._join()
        except BaseException as error:
            with self.lock:                     # those who joined shall know why it failed
                self._give_up(ProtocolError(CODES["ABORTED"], str(error)))
            self._shut()
            raise
        self.stop = threading.Event()
        self.keeper = threading.Thread(target=_keep, args=(weakref.ref(self), self.stop),
                                       name="minidist-keeper", daemon=True)
        self.keeper.start()
        atexit.register(_leave_at_exit, weakref.ref(self))
        _here.add(self)

    # ---- the contract ---------------------------------------------------------

    def send(self, peer: int, kind: int, fields: Sequence = (), buffers: Sequence = (), *,
             channel: int = 0, timeout: float | None = None) -> None:
        out = Outgoing(kind, fields, buffers, channel)
        with self.lock:
            link = self._link(peer)
            link.out.append(out)
            self._write(link.live)              # most messages are gone after this line
            if not out.sent:
                self._wait(lambda: out.sent, timeout, link, (out,))
            self.stats["messages_sent"] += 1

    def recv(self, peer: int, *, channel: int = 0, into: Any = None,
             timeout: float | None = None) -> Message:
        with self.lock:
            link = self._link(peer)
            post = self._post(link, channel, into)
            if not post.done:
                self._wait(lambda: post.done, timeout, link, (post,))
            return self._take(link, channel, post)

    def exchange(self, to: int, kind: int, fields: Sequence, buffer: Any, source: int,
                 into: Any, *, channel: int = 0, timeout: float | None = None,
                 landed: Callable[[int, int], None] | None = None) -> Message:
        out = Outgoing(kind, fields, [buffer], channel)
        with self.lock:
            there, here = self._link(to), self._link(source)
            post = self._post(here, channel, into)
            there.out.append(out)
            seen = 0

            def tell() -> None:
                """Tell the caller what has come, whoever read it."""
                nonlocal seen
                if landed is None or post.message is None:
                    return
                stop = post.message.got & (-1 if post.message.done else -64)
                if stop > seen:
                    if post.view is not None and post.message.view is not post.view:
                        # It came before we asked, into memory of ours.
                        post.view[seen:stop] = post.message.view[seen:stop]
                    landed(seen, stop)
                    seen = stop

            def step() -> bool:
                """Send a frame when not too far ahead, read, send when idle."""
                got = post.message.got if post.message else 0
                moved = not out.sent and out.at - got < AHEAD and self._write(there.live, 1)
                if not post.done:
                    moved = self._read(here.live) or moved
                tell()
                return moved or not out.sent and self._write(there.live, 1)
            self._wait(lambda: out.sent and post.done, timeout, here, (out, post), step)
            tell()
            self.stats["messages_sent"] += 1
            return self._take(here, channel, post)

    def recv_any(self, *, channel: int = 0, timeout: float | None = None) -> Message:
        found: list[Message] = []

        def look() -> bool:
            for link in list(self.links.values()):
                queue = link.inbox.get(channel)
                if queue and queue[0].done:
                    # Whoever was served goes to the end: nobody starves.
                    self.links[link.peer] = self.links.pop(link.peer)
                    found.append(self._take(link, channel, self._post(link, channel, None)))
                    return True
            for link in self.links.values():
                if link.lost and not link.told:
                    link.told = True
                    if link.lost[0]:
                        raise self._peer_lost(link, link)
                    found.append(Message(protocol.GOODBYE, (), b"", link.peer))
                    return True
            return False
        with self.lock:
            self.uses += 1
            self._wait(look, timeout, None, ())
        return found[0]

    def abort(self, reason: str, code: int | None = None) -> None:
        with self.lock:
            if not self.closed:
                self._give_up(ProtocolError(code or CODES["ABORTED"], reason))
                self._part(lambda: not self.connections, 1.0)
        self._end()

    def close(self) -> None:
        with self.lock:
            if not self.closed:
                if self.failure is not None:    # that is no goodbye
                    self._give_up(ProtocolError(CODES["ABORTED"], str(self.failure())))
                for conn in list(self.connections):
                    conn.session.leave()
                    self._write(conn)
                self._part(lambda: not any(conn.opened for conn in self.connections), PARTING)
        self._end()

    # ---- waiting -----------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], timeout: float | None, link: Link | None,
              work: tuple, step: Callable[[], bool] | None = None) -> None:
        """Move bytes until done(); raise if that cannot be or takes too long.
        `work` (Outgoing, Post) is withdrawn when the wait ends early."""
        started = time.monotonic()
        deadline = started + (self.config.timeout if timeout is None else timeout)
        report = started + REPORT
        try:
            while not done():
                # First what is at hand, without asking poll for it.
                if step() if step else link and self._read(link.live):
                    continue
                if done():
                    return
                self._check(link)
                now = time.monotonic()
                if now >= deadline:
                    raise Timeout(f"{self._waiting(link, now - started)}; the limit is "
                                  f"{deadline - started:g} s")
                if now >= report:
                    log.warning("%s", self._waiting(link, now - started))
                    report = now + REPORT
                self._turn(min(deadline, report))
        except TransportError:
            for thing in work:
                self._withdraw(thing)
            raise
        except BaseException as error:
            # Who knows how far the bytes were: after this no stream can be trusted.
            text = (f"{type(error).__name__} interrupted {self._title()} in "
                    f"{self.doing or 'a transfer'}; its connections cannot be used any more")
            self.failure = self.failure or (lambda: TransportError(text))
            raise

    def _turn(self, until: float) -> None:
        """Wait (lock released) for something to happen, and see to it."""
        if self.leading:
            self._wake()                        # the leader shall also watch what we wait for
            self.followers += 1
            self.changed.wait(max(0.0, min(until, self.due + NAP) - time.monotonic()))
            self.followers -= 1
            return
        self.leading = True
        wait = self._patience(until)
        self.lock.release()
        try:
            ready = self.polls[0].poll(wait)
        finally:
            self.lock.acquire()
            self.leading = False
        self._handle(ready)
        if self.followers:
            self.changed.notify_all()

    def _patience(self, until: float) -> int:
        """Milliseconds that poll may wait."""
        now = time.monotonic()
        wait = min(until, self.due) - now
        due = self.driver.timeout(now)
        if due is not None:
            wait = min(wait, due)
        if any(conn.unread and not conn.session.paused for conn in self.connections):
            wait = 0.0
        return math.ceil(max(0.0, wait) * 1000)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):      # full or closed: it wakes anyway
            self.wake_write.send(b"!")

    def _handle(self, ready: list) -> None:
        """See to descriptors that poll named, to news from the driver, to timers."""
        now = time.monotonic()
        called = False
        for fd, event in ready:
            conn = self.by_fd.get(fd)
            if conn is not None:
                room = event & conn.stream.room if fd == conn.stream.write_fd else 0
                if room:
                    conn.blocked = False
                    self._write(conn)
                if event & ~room:               # input, or an end
                    self._read(conn)
            elif fd == self.wake_read.fileno():
                with contextlib.suppress(BlockingIOError):      # the other poll saw it too
                    self.wake_read.recv(4096)
            else:
                called = True
        if called or self.driver.timeout(now) is not None:
            news = set(map(id, self.driver.pump(now)))
            while (stream := self.driver.accept()) is not None:
                self._greet(stream, now)
            for conn in list(self.connections):
                if id(conn.stream) in news:
                    conn.unread, conn.blocked = True, False
                    self._write(conn)
        for conn in list(self.connections):
            if conn.unread:
                self._read(conn)
        if now >= self.due:
            self.due = now + self.cadence
            self._timers(now)

    def _timers(self, now: float) -> None:
        for conn in list(self.connections):
            session = conn.session
            if now >= conn.drain_until:
                self._drop(conn, "")
                continue
            if now >= session.timer:
                while self._read(conn):         # what has arrived counts, however late we look
                    pass
            try:
                session.tick(now)
            except ProtocolError as error:
                self._broken(conn, error)
            if session.out:
                self._write(conn)
        for link in self.links.values():
            if link.lost or link.open or now < min(link.redial, link.give_up):
                continue
            if now >= link.give_up:
                tried = "; ".join(f"{place}: {why}" for place, why in link.failures.items())
                self._lose(link, CODES["LOST"], f"cannot be reached at {link.address}: {tried}")
            else:
                self._dial(link, now)

    def _keep(self) -> float:
        """One round of the keeper. Returns how long it may nap."""
        uses, now = self.uses, time.monotonic()
        if (self.leading or uses != self.seen) and now < self.due:
            self.seen = uses                    # callers are at work and see to everything
            return NAP
        ready = self.polls[1].poll(0 if self.leading or uses != self.seen else
                                   self._patience(now + 1.0))
        with self.lock:
            if not self.leading and not self.closed:
                self._handle(ready)
        return 0.0 if uses == self.uses else NAP

    def _waiting(self, link: Link | None, seconds: float) -> str:
        """Who waits for whom, for how long, in what."""
        title = self.config.title
        if not self.ready:
            # Only node 0 knows who is missing; the others wait for its roster.
            missing = [title(other.peer) for other in self.links.values()
                       if not other.open and 0 in (self.node, other.peer)]
            text = (f"{self._title()} has waited {seconds:.0f} of {self.config.start_timeout:g} s "
                    f"for {', '.join(missing) or 'the other nodes'} to join")
            for other in self.links.values():
                text += "".join(f"; {place}: {why}" for place, why in other.failures.items())
            return text
        text = f"{self._title()} has waited {seconds:.0f} s for "
        if link is None:
            return text + f"any node in {self.doing or 'recv_any'}"
        text += title(link.peer)
        if link.live is not None:
            session = link.live.session
            text += (f" (alive, heard {time.monotonic() - session.heard:.1f} s ago"
                     + (f", it is in {session.peer_doing})" if session.peer_doing else ")"))
        return text + f" in {self.doing or 'a transfer'}"

    def _part(self, done: Callable[[], bool], seconds: float) -> None:
        """Let last words arrive."""
        self.parting = True
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            self._turn(until)

    def _end(self) -> None:
        with self.lock:
            first, self.closed = not self.closed, True
            self.changed.notify_all()
        if first:
            self.stop.set()
            self._wake()
            if threading.current_thread() is not self.keeper:
                self.keeper.join(5.0)
            self._shut()

    def _shut(self) -> None:
        self.closed = self.parting = True
        with self.lock:
            for conn in list(self.connections):
                self._drop(conn, "")
            self.driver.close()
            self.wake_read.close()
            self.wake_write.close()

    def _join(self) -> None:
        """Rendezvous: all dial node 0, which answers with who is where."""
        config, now = self.config, time.monotonic()
        self._register(self.wake_read.fileno())
        links = [self.links[peer] for peer in self.driver.connected]
        for peer, stream in self.driver.connected.items():
            session = Session(config, self.node > peer, now, incarnation=self.incarnation,
                              patience=config.start_timeout)
            self._connect(stream, session, self.links[peer])
        if self.size == 1:
            self.ready = True
        elif not self.driver.connected:
            host, port = config.master
            self.address = self.driver.listen(*((host, port) if self.node == 0 else
                                                (host_towards(host, port), 0)))
            self._register(self.driver.fileno())
            if self.node != 0:
                self.links[0].address = join_address(host, port)
                self._dial(self.links[0], now)
                self._wait(lambda: self.links[0].open, config.start_timeout, self.links[0], ())
        # Streams that exist from the start all open now, others on first use. Node 0 gives
        # up first: only it knows who is missing, and it tells those who are there.
        self._wait(lambda: self.ready and all(link.open or link.lost for link in links),
                   config.start_timeout + (self.node != 0), self.links.get(0), ())


_here: weakref.WeakSet[StreamTransport] = weakref.WeakSet()    # the transports of this process


def _forked() -> None:
    """A forked process inherits connections that are not its own: it must not speak
    on them, not even say goodbye when it ends, nor wait for a lock of a lost thread."""
    for transport in _here:
        transport.lock = threading.Lock()
        transport.changed = threading.Condition(transport.lock)
        transport.closed = True


if hasattr(os, "register_at_fork"):             # not on Windows
    os.register_at_fork(after_in_child=_forked)


def _keep(ref: weakref.ref, stop: threading.Event) -> None:
    """The keeper thread; it holds its transport only while it looks."""
    nap = NAP
    while not stop.wait(nap):
        transport = ref()
        if transport is None:
            return
        nap = transport._keep()
        del transport


def _leave_at_exit(ref: weakref.ref) -> None:
    """A program that ends says goodbye; one that failed says why."""
    transport = ref()
    if transport is not None:
        error = getattr(sys, "last_value", None)
        transport.close() if error is None else transport.abort(f"{type(error).__name__}: {error}")
