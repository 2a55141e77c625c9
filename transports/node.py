"""A node of the job: sessions run over streams. Every transport that offers
byte streams becomes a Transport here.

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
import random
import select
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from . import (
    Config,
    Driver,
    Message,
    PeerLost,
    ProtocolError,
    Stream,
    Timeout,
    Transport,
    TransportError,
    join_address,
    protocol,
)
from .protocol import CODES, ERRORS, Incoming, Outgoing, Session, as_bytes, broken

log = logging.getLogger("minidist")

INBOX = 64 << 20        # bytes of messages that nobody has asked for yet, all peers together
UNASKED = 1 << 30       # bytes of one such message; a larger one waits for its recv
STRANGERS = 128         # connections that have not joined yet; the oldest goes first
CHUNK = 1 << 18         # payload of a frame in an exchange: it stays in the cache,
AHEAD = 2 * CHUNK       # and so much is sent before the same amount has come back
NAP = 0.02              # seconds between the keeper's looks while callers are at work
REPORT = 10.0           # seconds of waiting after which we say for whom
MOST_VIEWS = 512        # of one sendmsg (IOV_MAX is 1024 on Linux and macOS)
PARTING = 5.0           # seconds that close() gives the goodbyes
IN, OUT = select.POLLIN, select.POLLOUT


class Connection:
    """A stream, its session, and the frame that is being written."""

    def __init__(self, stream: Stream, session: Session, link: Link | None):
        self.stream, self.session, self.link = stream, session, link
        self.writing: list = []                 # views of one frame, sent from the front
        self.current: Outgoing | None = None    # the message that the frame belongs to
        self.watched: dict[int, int] = {}       # what poll looks for, by descriptor
        # Poll for room before writing (again); a new connection first comes up.
        self.blocked = stream.write_fd >= 0 and session.side == protocol.DIALER
        self.opened = False                     # was joined
        self.broken = self.gone = False         # cannot be written any more; was let go
        self.trouble = ""                       # why it cannot be written
        self.unread = False                     # pump told of bytes that we have not read
        self.drain_until = math.inf             # a failed connection is read on so long, so
        #                                         that our ERROR arrives (close would reset it)


class Link:
    """What this node knows of one peer, connected or not."""

    def __init__(self, peer: int):
        self.peer = peer
        self.conn: Connection | None = None     # open, or our dial in progress
        self.out: deque[Outgoing] = deque()
        self.inbox: dict[int, deque[Incoming]] = {}
        self.posts: dict[int, Post] = {}        # by channel: the receive that waits
        self.held = 0                           # bytes in inbox
        self.lost: tuple[int, str] | None = None    # (error code, reason); code 0: it left
        self.told = False                       # recv_any has reported the loss
        self.address, self.incarnation = "", 0
        self.places: list = []                  # still to try in this round of dialling
        self.failures: dict[str, str] = {}      # what each place answered
        self.redial, self.rounds = math.inf, 0  # when to start the next round
        self.give_up = math.inf

    @property
    def open(self) -> bool:
        return self.conn is not None and self.conn.session.open


class Post:
    """A receive that waits: where the message shall go, and the message."""

    def __init__(self, into: Any):
        self.into = into
        self.view = None if into is None else as_bytes(into)
        self.message: Incoming | None = None

    @property
    def done(self) -> bool:
        return self.message is not None and self.message.done


class StreamTransport(Transport):
    def __init__(self, driver: type[Driver], config: Config):
        self.config, self.node, self.size = config, config.node, config.size
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)   # followers wait for the leader here
        self.leading, self.followers = False, 0
        self.uses = self.seen = 0                       # calls so far, and as the keeper saw it
        self.polls = (select.poll(), select.poll())     # the callers' and the keeper's
        self.by_fd: dict[int, Connection] = {}
        self.connections: set[Connection] = set()
        self.strangers: deque[Connection] = deque()     # accepted, not joined
        self.links = {peer: Link(peer) for peer in range(self.size) if peer != self.node}
        self.held = 0
        self.failure: Callable[[], Exception] | None = None     # ends every wait from now on
        self.ready = self.parting = self.closed = False
        self.incarnation = int.from_bytes(os.urandom(4), "big")
        self.cadence = min(0.25, config.heartbeat / 4, config.heartbeat_timeout / 8) or 0.01
        self.due = 0.0                                  # when timers are looked at next
        self.wake_read, self.wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)
        self.address = ""
        self.driver = driver(config)
        self.stats = self.driver.stats
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

    # ---- the contract ---------------------------------------------------------

    def send(self, peer: int, kind: int, fields: Sequence = (), buffers: Sequence = (), *,
             channel: int = 0, timeout: float | None = None) -> None:
        out = Outgoing(kind, fields, buffers, channel)
        with self.lock:
            link = self._link(peer)
            link.out.append(out)
            if link.open:
                self._write(link.conn)          # most messages are gone after this line
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
                    if post.message.view is not post.view:      # it came before we asked
                        post.view[seen:stop] = post.message.view[seen:stop]
                    landed(seen, stop)
                    seen = stop

            def step() -> bool:
                """Send a frame when not too far ahead, read, send when idle."""
                got = post.message.got if post.message else 0
                moved = (not out.sent and out.at - got < AHEAD and there.open
                         and self._write(there.conn, 1))
                if not post.done and here.open:
                    moved = self._read(here.conn) or moved
                tell()
                if not moved and not out.sent and there.open:
                    moved = self._write(there.conn, 1)
                return moved
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

    def abort(self, reason: str) -> None:
        with self.lock:
            if not self.closed:
                self._give_up(ProtocolError(CODES["ABORTED"], reason))
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
                if step() if step else link and link.open and self._read(link.conn):
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
                self._withdraw(link, thing)
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
                if event & OUT:
                    conn.blocked = False
                    self._write(conn)
                if event & ~OUT:                # input, or an end
                    self._read(conn)
            elif fd == self.wake_read.fileno():
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

    # ---- bytes ------------------------------------------------------------------------

    def _read(self, conn: Connection) -> bool:
        """Take what has arrived on a connection; False if nothing had."""
        session = conn.session
        if session.paused or conn.gone:
            return False
        try:
            count = conn.stream.recv_into(session.space())
        except BlockingIOError:
            conn.unread = False
            return False
        except OSError as error:
            self._drop(conn, error.strerror or str(error))
            return True
        if not count:
            self._drop(conn, conn.trouble or "connection closed")
            return True
        self.stats["bytes_received"] += count
        self._parsed(conn, lambda: session.received(count, time.monotonic()))
        return True

    def _parsed(self, conn: Connection, parse: Callable[[], list[Incoming]]) -> None:
        try:
            for message in parse():
                if message.kind in protocol.SESSION_KINDS:
                    self._control(conn, message)
        except ProtocolError as error:
            self._broken(conn, error)
        if conn.session.out or conn.session.left:
            self._write(conn)
        if conn.session.paused:
            self._watch(conn)

    def _write(self, conn: Connection, most: int = 1 << 30) -> bool:
        """Send what waits, at most so many frames of data; False if nothing went."""
        session, link, moved = conn.session, conn.link, False
        while not conn.blocked and not conn.broken:
            if not conn.writing:                # a frame is out: which one is next?
                if session.out:
                    conn.writing, conn.current = [session.out.popleft()], None
                elif most and link is not None and link.out and link.open:
                    conn.current = out = link.out[0]
                    conn.writing = out.frame(min(session.max_frame, CHUNK),
                                             self.config.generation, session.checksums)
                    most -= 1
                else:
                    break
            try:
                count = conn.stream.send(conn.writing[:MOST_VIEWS])
            except BlockingIOError:
                conn.blocked = True
                break
            except OSError as error:
                # What the peer said last (why it gave up) may still be unread.
                conn.broken, conn.trouble = True, error.strerror or str(error)
                while self._read(conn):
                    pass
                self._drop(conn, conn.trouble)
                return True
            moved = True
            self.stats["bytes_sent"] += count
            while conn.writing and count >= len(conn.writing[0]):
                count -= len(conn.writing[0])
                del conn.writing[0]
            if count:
                conn.writing[0] = memoryview(conn.writing[0])[count:]
            if not conn.writing and conn.current is not None and conn.current.done:
                conn.current.sent = True
                link.out.popleft()              # type: ignore[union-attr]
                conn.current = None
        if session.left and not conn.writing and not session.out:
            self._drop(conn, "")                # both said goodbye
        else:
            self._watch(conn)
        return moved

    def _watch(self, conn: Connection) -> None:
        """Tell poll what this connection waits for."""
        stream, wanted = conn.stream, {}
        if stream.read_fd >= 0 and not conn.gone:
            if not conn.session.paused:
                wanted[stream.read_fd] = IN
            if conn.blocked and not conn.broken:
                wanted[stream.write_fd] = wanted.get(stream.write_fd, 0) | OUT
        if wanted != conn.watched:
            for poll in self.polls:
                for fd in conn.watched.keys() - wanted.keys():
                    poll.unregister(fd)
                for fd, mask in wanted.items():
                    poll.register(fd, mask)
            conn.watched = wanted

    # ---- messages ---------------------------------------------------------------------

    def _place(self, link: Link, message: Incoming) -> bool:
        """Where shall this message's payload go? False: not now, stop reading."""
        post, queue = link.posts.get(message.channel), link.inbox.get(message.channel)
        if post is not None and post.message is None and not queue:
            self._fits(link, post, message)
            post.message = message
            if post.view is None:
                message.hold()
            else:
                message.view, message.payload = post.view, post.into
            return True
        if link.held and self.held + message.total > INBOX or message.total > UNASKED:
            return False
        message.hold()
        self._keep_message(link, message)
        return True

    def _keep_message(self, link: Link, message: Incoming) -> None:
        link.inbox.setdefault(message.channel, deque()).append(message)
        link.held += message.total
        self.held += message.total

    def _fits(self, link: Link, post: Post, message: Incoming) -> None:
        if post.view is not None and len(post.view) != message.total:
            raise broken("MISMATCH", (
                f"{self.config.title(link.peer)} sent {message.total} bytes, "
                f"{protocol.describe(message.kind, message.fields)}, but {self._title()} expects "
                f"{len(post.view)} bytes in {self.doing or 'recv'}"))

    def _post(self, link: Link, channel: int, into: Any) -> Post:
        """Ask for the next message of a peer and channel."""
        if channel in link.posts:
            raise RuntimeError(f"two threads receive from {self.config.title(link.peer)} on "
                               f"channel {channel}")
        post, queue = Post(into), link.inbox.get(channel)
        if queue:                               # it is here, or on its way into our memory
            try:
                self._fits(link, post, queue[0])
            except ProtocolError as error:
                self._give_up(error)
                raise
            post.message = queue[0]
        link.posts[channel] = post
        self._resume(link)
        return post

    def _take(self, link: Link, channel: int, post: Post) -> Message:
        """The message that a post waited for."""
        message = post.message
        assert message is not None
        del link.posts[channel]
        queue = link.inbox.get(channel)
        if queue and queue[0] is message:
            queue.popleft()
            link.held -= message.total
            self.held -= message.total
            if post.view is not None:
                if message.total:               # (an empty view is read-only)
                    post.view[:] = message.view
                message.payload = post.into
            self._resume(link)
        self.stats["messages_received"] += 1
        return Message(message.kind, message.fields, message.payload, link.peer)

    def _resume(self, link: Link) -> None:
        """There is room, or a receiver, for a message that had to wait."""
        if link.conn is not None and link.conn.session.paused:
            self._parsed(link.conn, link.conn.session.parse)
            if link.conn is not None:
                self._watch(link.conn)

    def _withdraw(self, link: Link | None, thing: Outgoing | Post) -> None:
        """A wait ended early: its memory belongs to the caller again."""
        for link in self.links.values():
            if isinstance(thing, Outgoing) and thing in link.out:
                if thing.first:
                    link.out.remove(thing)
                elif link.conn is not None:     # half of it is out: the stream is spoilt
                    self._drop(link.conn, "a message to it was given up half-way")
            for channel, post in list(link.posts.items()):
                if post is thing:
                    del link.posts[channel]
                    message = post.message
                    if message is not None and message not in link.inbox.get(channel, ()):
                        into = message.view     # goes on arriving, in memory of our own
                        message.hold()
                        message.view[:message.got] = into[:message.got]
                        self._keep_message(link, message)

    # ---- connections --------------------------------------------------------------------

    def _connect(self, stream: Stream, session: Session, link: Link | None) -> Connection:
        conn = Connection(stream, session, link)
        session.doing = lambda: self.doing
        self.connections.add(conn)
        for fd in (stream.read_fd, stream.write_fd):
            if fd >= 0:
                self.by_fd[fd] = conn
        if link is not None:
            session.place = lambda message: self._place(link, message)
        self._write(conn)
        return conn

    def _greet(self, stream: Stream, now: float) -> None:
        """Somebody connected. Nothing it says is believed before it has joined,
        and it can neither make us wait nor hold more than a few kilobytes."""
        if len(self.strangers) >= STRANGERS:
            self._drop(self.strangers[0], "too many connections that do not join")
        session = Session(self.config, False, now, incarnation=self.incarnation)
        self.strangers.append(self._connect(stream, session, None))

    def _dial(self, link: Link, now: float) -> None:
        """Try the next place of a peer's address; after the last, start again later."""
        link.redial = math.inf
        if link.give_up == math.inf:
            link.give_up = now + self.config.start_timeout + 1.0    # who waits gives up first
        try:
            if not link.places:
                link.places = self.driver.resolve(link.address)
            stream = self.driver.dial(link.places.pop(0))
        except OSError as error:
            self._missed(link, link.address, str(error))
            return
        session = Session(self.config, True, now, incarnation=self.incarnation,
                          address=self.address)
        link.conn = self._connect(stream, session, link)

    def _missed(self, link: Link, place: str, reason: str, final: bool = False) -> None:
        """A dial failed."""
        link.conn, link.failures[place] = None, reason
        now = time.monotonic()
        if link.places:
            self._dial(link, now)
        elif final:
            text = f"{self.config.title(link.peer)} at {place} refused to connect: {reason}"
            code = next((c for c, e in ERRORS.items() if f"[{e.name}]" in reason), CODES["LOST"])
            self.failure = self.failure or (lambda: ProtocolError(code, text))
            self._lose(link, code, reason)
        else:                                   # not all at once, not in step with the others
            link.redial = now + min(0.05 * 2 ** link.rounds, 2.0) * random.uniform(0.5, 1.0)
            link.rounds += 1

    def _link(self, peer: int) -> Link:
        """The link to a peer; it begins to open on first use."""
        self.uses += 1
        link = self.links.get(peer)
        if link is None:
            raise ValueError(f"no node {peer} to talk to: this is node {self.node} of {self.size}")
        self._check(None)
        if link.conn is None and not link.lost and link.give_up == math.inf:
            self._dial(link, time.monotonic())
        return link

    def _control(self, conn: Connection, message: Incoming) -> None:
        """What sessions leave to the node: who is who, and who is gone."""
        kind, fields, link = message.kind, message.fields, conn.link
        if kind == protocol.JOIN:
            self._decide(conn, *fields)
        elif kind == protocol.ERROR:
            code, text = fields
            if conn.opened and link is not None:
                self._lose(link, code, text if code != CODES["ABORTED"] else f"gave up: {text}")
                self._drop(conn, "")
            else:
                self._unwelcome(conn, code, text)
        elif link is None:
            raise broken("UNEXPECTED", f"{protocol.describe(kind, fields)} from a stranger")
        elif kind == protocol.WELCOME:
            if fields[0] != link.peer:
                raise broken("WRONG_NODE", f"it is node {fields[0]} and not node {link.peer}")
            self._opened(conn, link, fields[1])
        elif kind == protocol.GOODBYE:
            self._lose(link, 0, "it said goodbye")
        elif kind == protocol.DEPARTED:
            gone = self.links.get(fields[0])
            if gone is None or (fields[1] == 0 and gone.open):
                return                          # its own goodbye comes behind its last message
            # Node 0 decides who is in the job; about node 0, and where one loss ends
            # all, anybody is believed: so the first death is named, not the second.
            if 0 in (link.peer, gone.peer) or self.on_lost is None:
                self._lose(gone, *fields[1:])
        elif link.peer != 0:
            raise broken("UNEXPECTED", f"{protocol.describe(kind, fields)} from node {link.peer}")
        elif kind == protocol.ROSTER:
            for member in protocol.unpack_roster(fields[0], message.payload):
                if member.node != self.node:
                    self.links[member.node].address = member.address
            self.ready = True

    def _decide(self, conn: Connection, node: int, role: int, incarnation: int,
                address: str) -> None:
        """Somebody proved to know the key and says who it is: may it join?"""
        link = self.links.get(node)
        if link is None or role != int(node >= self.config.workers) or (
                conn.link is not None and conn.link is not link):
            raise broken("WRONG_NODE", (
                f"no node {node} with role {role} is expected in a job of {self.config.workers} "
                f"workers and {self.config.servers} servers; check RANK and WORLD_SIZE"))
        if link.lost or link.open:
            raise broken("DUPLICATE", f"{self.config.title(node)} is " + (
                f"lost ({link.lost[1]})" if link.lost else
                "connected already; is RANK set twice?"))
        if link.conn is not None and link.conn is not conn:     # both dialled: the smaller wins
            if self.node < node:
                raise broken("DUPLICATE", f"{self._title()} is dialling already")
            ours, link.conn = link.conn, None
            ours.link = None
            self._drop(ours, "")
        if conn in self.strangers:
            self.strangers.remove(conn)
        conn.link = link
        conn.session.place = lambda message: self._place(link, message)
        link.address = address
        conn.session.accept()
        self._opened(conn, link, incarnation)

    def _opened(self, conn: Connection, link: Link, incarnation: int) -> None:
        link.conn, link.incarnation, conn.opened = conn, incarnation, True
        link.redial = link.give_up = math.inf
        if self.node == 0 and not self.ready and all(link.open for link in self.links.values()):
            self.ready = True
            members = [protocol.Member(0, 0, self.incarnation, self.address)]
            members += [protocol.Member(peer, int(peer >= self.config.workers), other.incarnation,
                                        other.address) for peer, other in self.links.items()]
            for other in self.links.values():
                assert other.conn is not None
                other.conn.session.tell(protocol.ROSTER, (self.size,),
                                        protocol.pack_roster(members))
                self._write(other.conn)
        self._write(conn)

    # ---- ends -----------------------------------------------------------------------------

    def _broken(self, conn: Connection, error: ProtocolError) -> None:
        """A rule was broken on a connection: its peer is told, and it ends."""
        conn.session.fail(error)
        self._write(conn)
        if conn.opened and conn.link is not None:
            conn.drain_until = time.monotonic() + 1.0
            if ERRORS[error.code].scope == "job":
                self._give_up(error)
            self._lose(conn.link, error.code, str(error))
        else:
            self._unwelcome(conn, error.code, str(error))

    def _unwelcome(self, conn: Connection, code: int, text: str) -> None:
        """A connection that failed before it was one."""
        link, known = conn.link, ERRORS.get(code)
        if link is None or link.conn is not conn or self.driver.connected:
            log.warning("%s dropped %s: %s", self._title(), conn.stream.name, text)
            self._drop(conn, "")
            return
        # The winner of two crossing dials rejects ours; its own is on the way.
        crossing = code == CODES["DUPLICATE"] and link.peer != 0
        link.conn = conn.link = None
        self._drop(conn, "")
        if not crossing:
            self._missed(link, conn.stream.name, text, not (known and known.retriable)
                         or code == CODES["DUPLICATE"])

    def _drop(self, conn: Connection, reason: str) -> None:
        """Let go of a connection."""
        if conn.gone:
            return
        conn.gone = conn.broken = True
        self.connections.discard(conn)
        self._watch(conn)
        for fd in (conn.stream.read_fd, conn.stream.write_fd):
            self.by_fd.pop(fd, None)
        if conn in self.strangers:
            self.strangers.remove(conn)
            if reason:
                log.warning("%s dropped %s: %s before it joined", self._title(),
                            conn.stream.name, reason)
        conn.session.state = protocol.CLOSED
        conn.stream.close()
        link = conn.link
        if link is not None and link.conn is conn:
            link.conn = None
            if conn.opened or self.driver.connected:
                self._lose(link, CODES["LOST"], reason)
            else:
                self._missed(link, conn.stream.name, reason)

    def _lose(self, link: Link, code: int, reason: str) -> None:
        """A peer is gone: with code 0 it said goodbye, else all who need it fail."""
        if link.lost is not None:
            return
        link.lost = (code, reason)
        if 0 in (self.node, link.peer) or (code and self.on_lost is None):
            for other in self.links.values():
                if other.open and other is not link:
                    assert other.conn is not None
                    other.conn.session.tell(protocol.DEPARTED, (link.peer, code, reason))
                    self._write(other.conn)
        if not code or self.parting:
            return
        if code in ERRORS and ERRORS[code].scope == "job" and code != CODES["ABORTED"]:
            self.failure = self.failure or (lambda: ProtocolError(code, reason))
        elif self.on_lost is None:
            self.failure = self.failure or (lambda: self._peer_lost(link, None))
        else:
            self.on_lost(link.peer, reason)

    def _give_up(self, error: ProtocolError) -> None:
        """Something that ends the job: tell everybody."""
        self.failure = self.failure or (lambda: ProtocolError(error.code, str(error)))
        for conn in list(self.connections):
            if conn.opened:
                conn.session.fail(error)
                conn.drain_until = time.monotonic() + 1.0
                self._write(conn)

    def _check(self, link: Link | None) -> None:
        """Raise if there is no sense in waiting (for this peer)."""
        if self.closed:
            raise TransportError(f"the transport of {self._title()} is closed")
        if link is not None and link.lost and (self.failure is None or self.on_lost is not None):
            raise self._peer_lost(link, link)
        if self.failure is not None:
            raise self.failure()

    def _peer_lost(self, lost: Link, awaited: Link | None) -> PeerLost:
        assert lost.lost is not None
        text = (f"{self.config.title(lost.peer)} lost ({lost.lost[1]}) while {self._title()} "
                + ("waited for it" if lost is awaited else "was")
                + (f" in {self.doing}" if self.doing else "" if lost is awaited else " at work"))
        return PeerLost(lost.peer, lost.lost[1], self.doing, text)

    def _title(self) -> str:
        return self.config.title(self.node)

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
        if link.open:
            session = link.conn.session         # type: ignore[union-attr]
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
            self.links[peer].conn = self._connect(stream, session, self.links[peer])
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
        # Streams that exist from the start all open now, others on first use.
        self._wait(lambda: self.ready and all(link.open or link.lost for link in links),
                   config.start_timeout, self.links.get(0), ())

    def _register(self, fd: int) -> None:
        for poll in self.polls:
            poll.register(fd, IN)


def host_towards(host: str, port: int) -> str:
    """The address of this machine by which that host would reach it (connecting
    a datagram socket sends nothing, it only asks the routing table)."""
    error: OSError = OSError(f"{host} has no address")
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                return probe.getsockname()[0]
        except OSError as failed:
            error = failed
    raise error


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
