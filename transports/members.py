"""Who is in the job: connections that come and go, greetings, departures.

Node 0 coordinates. Every other node keeps a connection to it, and opens others on
first use. All of this reacts; what waits is in node.py.
"""
from __future__ import annotations

import logging
import math
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable

from . import Config, Driver, PeerLost, ProtocolError, Stream, TransportError, protocol
from .links import Connection, Link, Links
from .protocol import CODES, ERRORS, Incoming, Session, broken

log = logging.getLogger("minidist")

STRANGERS = 128         # connections that have not joined yet; the oldest goes first


class Members(Links):
    """Who is there, who is not any more, and who hears of it."""

    def __init__(self, driver: Driver, config: Config):
        super().__init__(driver, config)
        self.incarnation = int.from_bytes(os.urandom(4), "big")
        self.address = ""                               # where others dial this node
        self.strangers: deque[Connection] = deque()     # accepted, not joined
        self.failure: Callable[[], Exception] | None = None     # ends every wait from now on
        self.ready = False                              # all nodes have joined
        self.parting = self.closed = False
        self.uses = 0                                   # calls so far: is anybody at work?

    # ---- connections --------------------------------------------------------------------

    def _connect(self, stream: Stream, session: Session, link: Link | None) -> None:
        conn = Connection(stream, session, link)
        session.doing = lambda: self.doing
        self.connections.add(conn)
        for fd in (stream.read_fd, stream.write_fd):
            if fd >= 0:
                self.by_fd[fd] = conn
        if link is None:
            self.strangers.append(conn)
        else:
            link.conn = conn
            session.place = lambda message: self._place(link, message)
        self._write(conn)

    def _greet(self, stream: Stream, now: float) -> None:
        """Somebody connected. Nothing it says is believed before it has joined,
        and it can neither make us wait nor hold more than a few kilobytes."""
        if len(self.strangers) >= STRANGERS:
            log.warning("%s dropped %s: too many connections that do not join", self._title(),
                        self.strangers[0].stream.name)
            self._drop(self.strangers[0], "")
        session = Session(self.config, False, now, incarnation=self.incarnation)
        self._connect(stream, session, None)

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
        self._connect(stream, session, link)

    def _missed(self, link: Link, place: str, reason: str, final: bool = False) -> None:
        """A dial failed."""
        link.conn, link.failures[place] = None, reason
        if self.parting:
            return
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
            self._note_roster(protocol.unpack_roster(fields[0], message.payload))

    def _note_roster(self, members: list[protocol.Member]) -> None:
        """Node 0 says that all are there, and where."""
        if self.ready:
            raise broken("UNEXPECTED", "a second roster")
        nodes = [member.node for member in members]
        if max(nodes, default=0) >= self.size:
            raise broken("WRONG_NODE", f"a roster with node {max(nodes)} in a job of {self.size} "
                                       "nodes")
        if sorted(nodes) != list(range(self.size)):
            raise broken("BAD_FIELDS", f"a roster of the nodes {nodes} in a job of {self.size}")
        for member in members:
            link = self.links.get(member.node)
            if link is not None:
                link.address, link.incarnation = member.address, member.incarnation
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
        conn.twin = incarnation == link.incarnation     # the peer itself: our dials crossed
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
        for other in self.links.values():       # what it missed
            if other.lost and other.lost[0]:
                conn.session.tell(protocol.DEPARTED, (other.peer, *other.lost))
        if self.node == 0 and not self.ready and all(link.open for link in self.links.values()):
            self.ready = True
            members = [protocol.Member(0, 0, self.incarnation, self.address)]
            members += [protocol.Member(peer, int(peer >= self.config.workers), other.incarnation,
                                        other.address) for peer, other in self.links.items()]
            for other in self.links.values():
                if other.live is not None:
                    other.live.session.tell(protocol.ROSTER, (self.size,),
                                            protocol.pack_roster(members))
                self._write(other.live)
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
            if not conn.twin:
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
            self.strangers.remove(conn)         # hung up, as one of two crossing dials is
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
                if other.live is not None and other is not link:
                    other.live.session.tell(protocol.DEPARTED, (link.peer, code, reason))
                    self._write(other.live)
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
