"""Connections and the bytes on them: frames out, messages in, a bounded inbox.

Nothing here waits and nothing here decides who may join; see node.py, members.py.
"""
from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from . import Config, Driver, Message, ProtocolError, Stream, Transport, protocol
from .protocol import Incoming, Outgoing, Session, as_bytes, broken

INBOX = 64 << 20        # bytes of messages that nobody has asked for yet, all peers together
UNASKED = 1 << 30       # bytes of one such message; a larger one waits for its recv
CHUNK = 1 << 18         # payload of a frame: what is in flight stays in the cache
MOST_VIEWS = 512        # of one sendmsg (IOV_MAX is 1024 on Linux and macOS)
IN = select.POLLIN


class Connection:
    """A stream, its session, and the frame that is being written."""

    def __init__(self, stream: Stream, session: Session, link: Link | None):
        self.stream, self.session, self.link = stream, session, link
        self.writing: list = []                 # views of one frame, sent from the front
        self.current: Outgoing | None = None    # the message that the frame belongs to
        self.watched: dict[int, int] = {}       # what poll looks for, by descriptor
        # Poll for room before writing (again); a socket that dialled first comes up.
        self.blocked = (stream.read_fd == stream.write_fd >= 0
                        and session.side == protocol.DIALER)
        self.opened = False                     # was joined
        self.twin = False                       # one too many to a peer that we know
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

    @property
    def live(self) -> Connection | None:
        """The connection, if it is open."""
        return self.conn if self.open else None


class Post:
    """A receive that waits: where the message shall go, and the message."""

    def __init__(self, into: Any):
        self.into = into
        self.view = None if into is None else as_bytes(into)
        self.message: Incoming | None = None

    @property
    def done(self) -> bool:
        return self.message is not None and self.message.done


class Links(Transport):
    """The links of a node, and how bytes move on them. The lock is held throughout."""

    def __init__(self, driver: Driver, config: Config):
        self.config, self.node, self.size = config, config.node, config.size
        self.driver, self.stats = driver, driver.stats
        self.links = {peer: Link(peer) for peer in range(self.size) if peer != self.node}
        self.connections: set[Connection] = set()
        self.by_fd: dict[int, Connection] = {}
        self.polls = (select.poll(), select.poll())     # the callers' and the keeper's
        self.held = 0                                   # bytes in all inboxes

    # What members.py decides:

    def _control(self, conn: Connection, message: Incoming) -> None:
        raise NotImplementedError

    def _broken(self, conn: Connection, error: ProtocolError) -> None:
        raise NotImplementedError

    def _drop(self, conn: Connection, reason: str) -> None:
        raise NotImplementedError

    def _give_up(self, error: ProtocolError) -> None:
        raise NotImplementedError

    def _title(self) -> str:
        return self.config.title(self.node)

    # ---- bytes ------------------------------------------------------------------------

    def _read(self, conn: Connection | None) -> bool:
        """Take what has arrived on a connection; False if nothing had."""
        if conn is None or conn.gone or conn.session.paused:
            return False
        session = conn.session
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
        self._parsed(conn, session.received, count, time.monotonic())
        return True

    def _parsed(self, conn: Connection, parse: Callable[..., list[Incoming]], *args: Any) -> None:
        try:
            for message in parse(*args):
                if message.kind in protocol.SESSION_KINDS:
                    self._control(conn, message)
        except ProtocolError as error:
            self._broken(conn, error)
        if conn.session.out or conn.session.left:
            self._write(conn)
        if conn.session.paused:
            self._watch(conn)

    def _write(self, conn: Connection | None, most: int = 1 << 30) -> bool:
        """Send what waits, at most so many frames of data; False if nothing went."""
        if conn is None:
            return False
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
                wanted[stream.write_fd] = wanted.get(stream.write_fd, 0) | stream.room
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

    def _let_go(self, link: Link, queue: deque[Incoming]) -> None:
        message = queue.popleft()
        link.held -= message.total
        self.held -= message.total

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
            message = post.message = queue[0]
            if post.view is not None and not message.done:      # its rest lands where it belongs
                self._let_go(link, queue)
                post.view[:message.got] = message.view[:message.got]
                message.view, message.payload = post.view, post.into
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
            self._let_go(link, queue)
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

    def _withdraw(self, thing: Outgoing | Post) -> None:
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

    def _register(self, fd: int) -> None:
        for poll in self.polls:
            poll.register(fd, IN)
