"""A cluster in one process, on a clock of its own.

Every node is a thread, and exactly one of them runs at a time: it holds the baton. When it
has to wait, for a message or for the end of a computation, it takes the next event off a
queue, sets the clock to that event's time and lets it happen, until some node can go on: to
that one the baton passes. Nothing depends on how fast this machine is, and all chance
comes from the cluster's seed; so one seed is one run, event for event, and an event costs
the same however many nodes there are.

What is simulated, and what is real. Everything above a Transport is the code that runs
everywhere: collectives, strategies, servers, the user's script. Messages are whole, and as
long as their frames; they leave one after the other through the port of their machine, travel,
and arrive one after the other through the port of the other machine (a port serves those
who came first, it does not share itself out). What the protocol below a Transport makes
sure of (order, once, who is lost and who hears of it) is given here, and its machines are tested
by themselves, on worse networks: see tests/simnet.py. Heartbeats send nothing here,
but silence is noticed when they would notice it.
"""
from __future__ import annotations

import contextlib
import heapq
import math
import random
import struct
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from typing import Any

from . import (
    STATS,
    Config,
    Message,
    PeerLost,
    ProtocolError,
    Timeout,
    Transport,
    TransportError,
    protocol,
)
from .cluster import Cluster, Fault, Link
from .links import CHUNK
from .protocol import CODES, ERRORS, as_bytes, broken

HELLO = 500             # bytes of connecting: greetings, proofs, JOIN and WELCOME, both ways
TRIPS = 4               # journeys of a connection's first bytes: dial, greeting, proofs


class Killed(BaseException):
    """The end of a simulated process: nothing catches it by mistake."""


# ---- the clock and the baton -----------------------------------------------------------

class Machine:
    """What the processes of one host share: its port to the network."""

    def __init__(self, link: Link):
        self.link, self.free = link, [0.0, 0.0]     # when the ways out and in are free again

    def pass_through(self, size: int, now: float, inwards: bool) -> tuple[float, float]:
        """When so many bytes begin and end to use the port, behind those that came first."""
        way = int(inwards and self.link.duplex)
        begin = max(now, self.free[way])
        self.free[way] = begin + size / self.link.bandwidth
        return begin, self.free[way]


class Node:
    """A simulated process: the thread that runs it, and what it waits for."""

    def __init__(self, number: int, machine: Machine, seed: int):
        self.number, self.machine = number, machine
        self.chance = random.Random(f"{seed} node {number}")
        self.baton = threading.Lock()        # held while it has to wait
        self.baton.acquire()
        self.transport: SimTransport | None = None
        self.waiting = self.listening = False   # has no baton; a message would wake it
        self.deadline = math.inf
        self.timers: list[float] = []           # its timers in the queue, the next one last
        self.dead = False
        self.paused_until = 0.0
        self.started = self.ended = 0.0         # when
        self.worked = 0.0                       # seconds of processor
        self.error: BaseException | None = None     # what ended it


class World:
    """All nodes, and the events to come."""

    def __init__(self, cluster: Cluster, workers: int, servers: int = 0):
        cluster.check(workers, servers)
        self.cluster, self.workers, self.size = cluster, workers, workers + servers
        self.now = 0.0
        self.events: list[tuple[float, int, Callable, tuple]] = []
        self.ordered = self.count = 0           # events ever queued, and those that happened
        self.ready: deque[Node] = deque()       # can go on
        self.left = self.size                   # nodes that have not ended
        self.failure: BaseException | None = None
        self.finished = threading.Event()
        self.on_event: Callable[[], None] | None = None     # called after each one
        self.fingerprint = 0                    # of all messages so far: equal runs, equal numbers
        self.arrivals: dict[tuple[int, int], float] = {}    # the last one from node to node
        self.held: dict[tuple[int, int], list[tuple]] = {}  # stopped by a partition
        self.cuts: list[set[int]] = []
        self.staleness: Counter[int] = Counter()
        place = {node: i for i, host in enumerate(cluster.hosts) for node in host}
        machines: dict[int, Machine] = {}
        self.nodes = []
        for number in range(self.size):
            host = place.get(number, self.size + number)
            serves = any(n >= workers for n in (cluster.hosts[host] if number in place
                                                else (number,)))
            machine = machines.setdefault(host, Machine(cluster.server if serves else
                                                        cluster.link))
            self.nodes.append(Node(number, machine, cluster.seed))

    def run(self, bodies: Sequence[Callable[[], None]], timeout: float | None = None) -> None:
        """Run a function for each node, each in a context of its own, to the end of all."""
        late = {n: fault.at for fault in self.cluster.fault if fault.kind == "late"
                for n in fault.nodes}
        for node, body in zip(self.nodes, bodies, strict=True):
            thread = threading.Thread(target=Context().run, args=(self._live, node, body),
                                      name=f"node {node.number}", daemon=True)
            node.started = node.deadline = late.get(node.number, 0.0)
            node.waiting = True
            self._arm(node)
            thread.start()
        for fault in self.cluster.fault:
            if fault.kind != "late":
                self.at(fault.at, getattr(self, f"_{fault.kind}"), fault)
        self._advance(None)
        try:
            if not self.finished.wait(timeout):
                raise TimeoutError(f"{self.left} simulated nodes still ran after {timeout:g} s")
        except BaseException as error:          # Ctrl-C, too: nobody gets another turn
            self.failure = self.failure or error
            self.finished.wait(5.0)
        if self.failure is not None:
            raise self.failure

    def _live(self, node: Node, body: Callable[[], None]) -> None:
        current.set(node)
        world.set(self)
        node.baton.acquire()
        try:
            if not node.dead:
                body()
        except Killed:
            pass
        except BaseException as error:
            node.error = error
        if node.transport is not None:          # it says so, as at the end of any process
            with contextlib.suppress(Killed):
                node.transport.__exit__(None, node.error, None)
        if not node.dead:
            node.dead, node.ended = True, self.now
        self.left -= 1
        if self.left:
            self._advance(None)
        else:
            self.finished.set()

    def at(self, time: float, call: Callable, *args: Any) -> None:
        self.ordered += 1
        heapq.heappush(self.events, (time, self.ordered, call, args))

    def wait(self, node: Node, until: float, listening: bool) -> None:
        """Let time pass for a node: until then, or until something happens to it."""
        node.deadline, node.waiting, node.listening = until, True, listening
        self._arm(node)
        self._advance(node)
        if node.dead:
            raise Killed

    def wake(self, node: Node) -> None:
        """A message came, or a loss: who listens looks at it."""
        if node.waiting and node.listening:
            self._ready(node)

    def _ready(self, node: Node) -> None:
        if self.now < node.paused_until and not node.dead:
            return                              # _resume sees to it
        if node.waiting:
            node.waiting = False
            self.ready.append(node)

    def _arm(self, node: Node) -> None:
        # A timer that is in the queue stays there; one more is needed if it would be too late.
        if node.deadline < math.inf and (not node.timers or node.deadline < node.timers[-1]):
            node.timers.append(node.deadline)
            self.at(node.deadline, self._timer, node)

    def _timer(self, node: Node) -> None:
        node.timers.pop()
        if node.waiting and node.deadline <= self.now:
            self._ready(node)
        elif node.waiting:
            self._arm(node)

    def _advance(self, me: Node | None) -> None:
        """Whoever has nothing to do lets events happen, until a node can go on."""
        while not self.ready:
            try:
                if self.failure is not None:
                    raise self.failure
                self.now, _, call, args = heapq.heappop(self.events)
                self.count += 1
                call(*args)
                if self.on_event is not None:
                    self.on_event()
            except BaseException as error:      # of an event, or from outside: all must end
                self.failure = error
                for node in self.nodes:
                    node.dead = True
                    self._ready(node)
        chosen = self.ready.popleft()
        if chosen is not me:
            chosen.baton.release()
            if me is not None:
                me.baton.acquire()

    # ---- messages on their way ---------------------------------------------------------

    def send(self, source: int, target: int, size: int, deliver: Callable, *args: Any) -> float:
        """So many bytes from node to node; then deliver(*args) happens. Returns when the last
        of them has left the sender's buffer."""
        if self._cut(source, target):
            self.held.setdefault((source, target), []).append((size, deliver, args))
            return self.now
        a, b = self.nodes[source].machine, self.nodes[target].machine
        chance = self.nodes[source].chance
        if a is b:
            link = self.cluster.local
            gone = self.now + size / link.bandwidth
            self._arrive(Machine(link), (source, target), gone + link.latency, 0, deliver, args)
            return gone - link.buffer / link.bandwidth
        latency = self.latency(source, target)
        jitter = max(a.link.jitter, b.link.jitter)
        begin, end = a.pass_through(size, self.now, inwards=False)
        first = begin + latency + (jitter * chance.random() if jitter else 0.0)
        # What left later does not overtake on the way.
        first = max(first, self.arrivals.get((source, target), 0.0))
        self.arrivals[source, target] = first
        last = first + size / a.link.bandwidth
        self.at(first, self._arrive, b, (source, target), last, size, deliver, args)
        return end - a.link.buffer / a.link.bandwidth

    def latency(self, source: int, target: int) -> float:
        """Seconds that a bit is under way."""
        a, b = self.nodes[source].machine, self.nodes[target].machine
        return self.cluster.local.latency if a is b else (a.link.latency + b.link.latency) / 2

    def _arrive(self, machine: Machine, pair: tuple[int, int], last: float, size: int,
                deliver: Callable, args: tuple) -> None:
        """The first byte is at the port: when will the last one be through?"""
        end = machine.pass_through(size, self.now, inwards=True)[1]
        self.at(max(last, end), self._deliver, pair, size, deliver, args)

    def _deliver(self, pair: tuple[int, int], size: int, deliver: Callable, args: tuple) -> None:
        node = self.nodes[pair[1]]
        if self.now < node.paused_until and not node.dead:      # looks at it when it goes on
            self.at(node.paused_until, self._deliver, pair, size, deliver, args)
            return
        self.fingerprint = zlib.crc32(struct.pack("<d3Q", self.now, *pair, size),
                                      self.fingerprint)
        deliver(*args)

    def _cut(self, a: int, b: int) -> bool:
        return any((a in side) != (b in side) for side in self.cuts)

    # ---- what goes wrong ---------------------------------------------------------------

    def _end(self, number: int) -> Node:
        node = self.nodes[number]
        if not node.dead:
            node.dead, node.ended = True, self.now
            self._ready(node)
        return node

    def _crash(self, fault: Fault) -> None:
        """kill -9: the system closes its connections, so its peers hear at once."""
        for number in fault.nodes:
            node = self.nodes[number]
            if not node.dead:
                self._end(number)
                for peer in self._peers(node):
                    self.send(number, peer.node, 0, peer.lose, number, CODES["LOST"],
                              "connection closed")

    def _power(self, fault: Fault) -> None:
        """Its machine is gone, and nobody is left to say so."""
        for number in fault.nodes:
            node = self.nodes[number]
            if not node.dead:
                self._end(number)
                for peer in self._peers(node):
                    self.at(self.now + peer.config.heartbeat_timeout, peer.miss, number)

    def _pause(self, fault: Fault) -> None:
        """Stopped: its messages arrive, it answers nothing, not even heartbeats."""
        for number in fault.nodes:
            node = self.nodes[number]
            until = self.now + fault.seconds
            if node.waiting and not node.listening:     # what it computes takes so much longer
                node.deadline += until - max(self.now, node.paused_until)
            node.paused_until = max(node.paused_until, until)
            self.at(until, self._resume, node)
            for peer in self._peers(node):
                silent = self.now + peer.config.heartbeat_timeout
                if silent < until:
                    self.at(silent, self._silence, peer, node)

    def _silence(self, peer: SimTransport, node: Node) -> None:
        if not node.dead and self.now >= peer.own.paused_until:
            peer.miss(node.number)

    def _resume(self, node: Node) -> None:
        if node.waiting and self.now >= node.paused_until:
            if node.listening or node.deadline <= self.now:
                self._ready(node)
            else:
                self._arm(node)

    def _partition(self, fault: Fault) -> None:
        side = set(fault.nodes)
        self.cuts.append(side)
        self.at(self.now + fault.seconds, self._heal, side)
        for number in side:
            for peer in self._peers(self.nodes[number]):
                self.part(number, peer.node)

    def part(self, a: int, b: int) -> None:
        """Two that a partition keeps apart for too long miss each other."""
        if self._cut(a, b):
            for node, peer in (a, b), (b, a):
                transport = self.nodes[node].transport
                if transport is not None:
                    self.at(self.now + transport.config.heartbeat_timeout, self._apart, node, peer)

    def _apart(self, node: int, peer: int) -> None:
        transport = self.nodes[node].transport
        if transport is not None and self._cut(node, peer):
            transport.miss(peer)

    def _heal(self, side: set[int]) -> None:
        self.cuts.remove(side)
        held, self.held = self.held, {}
        for (source, target), messages in held.items():
            for size, deliver, args in messages:
                self.send(source, target, size, deliver, *args)

    def _peers(self, node: Node) -> list[SimTransport]:
        """The other end of each connection that the node has."""
        if node.transport is None:
            return []
        found = [self.nodes[peer].transport for peer in sorted(node.transport.connected)]
        return [peer for peer in found if peer is not None and not peer.over]


current: ContextVar[Node] = ContextVar("simulated_node")        # of this thread
world: ContextVar[World] = ContextVar("simulated_world")


# ---- a node's transport ------------------------------------------------------------------

class SimTransport(Transport):
    """Messages between the nodes of a World."""

    def __init__(self, config: Config):
        try:
            self.world, self.own = world.get(), current.get()
        except LookupError:
            raise RuntimeError("transport 'sim' joins threads of one process that `minidist train "
                               "--transport sim`, `minidist launch --transport sim` or md.launch("
                               "fn, transport='sim') start; elsewhere use tcp") from None
        if config.node != self.own.number or config.size != self.world.size:
            raise ValueError(f"this is simulated node {self.own.number} of {self.world.size}, but "
                             f"the job is told to be node {config.node} of {config.size}")
        self.config, self.node, self.size = config, config.node, config.size
        self.incarnation = self.own.chance.getrandbits(32)
        self.stats = dict.fromkeys(STATS, 0)
        self.inbox: dict[int, dict[int, deque[Message]]] = {}       # by channel and peer
        self.connected: set[int] = set()
        self.lost: dict[int, tuple[int, str]] = {}      # (error code, reason); code 0: it left
        self.untold: deque[int] = deque()               # losses for recv_any to tell
        self.failure: Callable[[], Exception] | None = None     # ends every wait from now on
        self.over = self.ready = False
        self.last_words = (CODES["LOST"], "connection refused")
        self.pushes: dict[int, tuple] = {}              # by peer: the last PUSH, for the report
        self.own.transport = self
        self._join()

    # ---- the contract ------------------------------------------------------------------

    def clock(self) -> float:
        return self.world.now

    def work(self, samples: int) -> float:
        compute = self.world.cluster.compute
        seconds = compute.seconds(self.node, samples, self.own.chance)
        self._compute(seconds)
        return seconds

    def send(self, peer: int, kind: int, fields: Sequence = (), buffers: Sequence = (), *,
             channel: int = 0, timeout: float | None = None) -> None:
        free = self._send(peer, kind, fields, buffers, channel)
        while self.world.now < free:            # its buffer is full
            self._check(peer)
            self.world.wait(self.own, free, listening=True)

    def recv(self, peer: int, *, channel: int = 0, into: Any = None,
             timeout: float | None = None) -> Message:
        self._known(peer)
        self._wait(lambda: peer in self.inbox.get(channel, ()), timeout, peer)
        return self._take(peer, channel, into)

    def exchange(self, to: int, kind: int, fields: Sequence, buffer: Any, source: int,
                 into: Any, *, channel: int = 0, timeout: float | None = None,
                 landed: Callable[[int, int], None] | None = None) -> Message:
        free = self._send(to, kind, fields, [buffer], channel)
        message = self.recv(source, channel=channel, into=into, timeout=timeout)
        if landed is not None:
            landed(0, memoryview(into).nbytes)
        while self.world.now < free:
            self._check(to)
            self.world.wait(self.own, free, listening=True)
        return message

    def recv_any(self, *, channel: int = 0, timeout: float | None = None) -> Message:
        self._wait(lambda: self.inbox.get(channel) or self.untold, timeout, None)
        if self.inbox.get(channel):             # whoever was served goes to the end
            return self._take(next(iter(self.inbox[channel])), channel, None)
        peer = self.untold.popleft()
        if self.lost[peer][0]:
            raise self._peer_lost(peer, awaited=True)
        return Message(protocol.GOODBYE, (), b"", peer)

    def abort(self, reason: str, code: int | None = None) -> None:
        self._leave(code or CODES["ABORTED"], reason)

    def close(self) -> None:
        if self.failure is not None and not self.over:      # that is no goodbye
            self._leave(CODES["ABORTED"], str(self.failure()))
        self._leave(0, "it said goodbye")

    # ---- sending and taking --------------------------------------------------------------

    def _compute(self, seconds: float) -> None:
        """The processor is busy: no message is looked at meanwhile."""
        if self.own.dead:
            raise Killed
        self.own.worked += seconds
        if seconds:
            self.world.wait(self.own, self.world.now + seconds, listening=False)

    def _send(self, peer: int, kind: int, fields: Sequence, buffers: Sequence,
              channel: int) -> float:
        self._known(peer)
        self._check(peer)
        layout = protocol.MESSAGES[kind]
        packed = layout.pack(fields)
        payload = b"".join(map(as_bytes, buffers))
        frames = max(1, -(-len(payload) // CHUNK))
        size = frames * protocol.HEADER.size + len(packed) + len(payload)
        link = self._link(peer)
        self._compute(link.work(size))
        self._connect(peer)
        self.stats["bytes_sent"] += size
        self.stats["messages_sent"] += 1
        message = Message(kind, layout.unpack(packed), payload, self.node)
        return self.world.send(self.node, peer, size, self._to(peer).arrived, message, channel,
                               size)

    def _link(self, peer: int) -> Link:
        """Whose costs a message to or from that peer has."""
        machine = self.own.machine
        local = machine is self.world.nodes[peer].machine
        return self.world.cluster.local if local else machine.link

    def _connect(self, peer: int) -> None:
        """Links open on first use."""
        if peer in self.connected:
            return
        other = self._to(peer)
        self.connected.add(peer)
        other.connected.add(self.node)
        latency = self.world.latency(self.node, peer)
        self.world.part(self.node, peer)
        self.world.wait(self.own, self.world.now + TRIPS * latency, listening=False)
        # It had gone already, or went meanwhile, or has given us up.
        if other.over or other.own.dead or self.node in other.lost:
            self.lose(peer, *other.last_words)
            self._check(peer)

    def _to(self, peer: int) -> SimTransport:
        transport = self.world.nodes[peer].transport
        assert transport is not None, "who has joined knows that all have"
        return transport

    def arrived(self, message: Message, channel: int, size: int) -> None:
        """An event: a message of another node is here."""
        if self.over or message.peer in self.lost:
            return
        self.stats["bytes_received"] += size
        self.inbox.setdefault(channel, {}).setdefault(message.peer, deque()).append(message)
        self.world.wake(self.own)

    def _take(self, peer: int, channel: int, into: Any) -> Message:
        queue = self.inbox[channel].pop(peer)
        message = queue.popleft()
        if queue:
            self.inbox[channel][peer] = queue
        self.stats["messages_received"] += 1
        self._compute(self._link(peer).work(len(message.payload)))
        self._note(message)
        if into is None:
            return message
        view = as_bytes(into)
        if len(view) != len(message.payload):
            error = broken("MISMATCH", (
                f"{self.config.title(peer)} sent {len(message.payload)} bytes, "
                f"{protocol.describe(*message[:2])}, but {self._title()} expects {len(view)} bytes "
                f"in {self.doing or 'recv'}"))
            self._leave(error.code, str(error))
            raise error
        if len(view):
            view[:] = message.payload
        return message._replace(payload=into)

    def _note(self, message: Message) -> None:
        """How old were the parameters of a gradient when the server had added it?"""
        if message.kind == protocol.PUSH:
            self.pushes[message.peer] = message.fields
        elif message.kind == protocol.APPLIED:
            push_id, version, accepted = message.fields
            pushed = self._to(message.peer).pushes.get(self.node)
            if accepted and pushed and pushed[0] == push_id:
                self.world.staleness[version - 1 - pushed[1]] += 1

    # ---- waiting -------------------------------------------------------------------------

    def _wait(self, done: Callable[[], Any], timeout: float | None, peer: int | None) -> None:
        if self.own.dead:
            raise Killed
        begun = self.world.now
        seconds = self.config.timeout if timeout is None else timeout
        while not done():
            self._check(peer)
            if self.world.now >= begun + seconds:
                name = "any node" if peer is None else self.config.title(peer)
                raise Timeout(f"{self._title()} has waited {seconds:g} s for {name} in "
                              f"{self.doing or 'recv'}; that is the limit")
            self.world.wait(self.own, begun + seconds, listening=True)

    def _join(self) -> None:
        """All say to node 0 that they are there, and it tells all when it has heard of all."""
        self.missing = set(range(self.size)) - {0} if self.node == 0 else {0}
        deadline = self.world.now + self.config.start_timeout
        self._greet()
        while not self.ready:
            if self.failure is not None:
                raise self.failure()
            if self.world.now >= deadline:
                names = ", ".join(self.config.title(n) for n in sorted(self.missing))
                raise Timeout(f"{self._title()} has waited {self.config.start_timeout:g} s for "
                              f"{names if self.node == 0 else 'the other nodes'} to join")
            self.world.wait(self.own, deadline, listening=True)

    def _greet(self) -> None:
        first = self.world.nodes[0].transport
        if self.node:
            if first is not None:               # else it hears of us when it is there
                self._dial(first)
            return
        for node in self.world.nodes[1:]:
            if node.transport is not None:
                node.transport._dial(self)
        self._complete()

    def _dial(self, first: SimTransport) -> None:
        delay = (TRIPS - 1) * self.world.latency(self.node, 0)
        self.world.at(self.world.now + delay, self.world.send, self.node, 0, HELLO,
                      first.heard_of, self)

    def heard_of(self, other: SimTransport) -> None:
        """An event: node 0 has been joined."""
        if not (self.over or self.own.dead or other.over or other.own.dead):
            self.connected.add(other.node)
            other.connected.add(0)
            self.missing.discard(other.node)
            self._complete()

    def _complete(self) -> None:
        if not self.missing and not self.ready:
            self.welcomed()
            for peer in range(1, self.size):
                self.world.send(0, peer, HELLO + 40 * self.size, self._to(peer).welcomed)

    def welcomed(self) -> None:
        """An event: all have joined."""
        self.ready = True
        self.world.wake(self.own)

    # ---- ends ----------------------------------------------------------------------------

    def miss(self, peer: int) -> None:
        """An event: nothing was heard of it for heartbeat_timeout."""
        self.lose(peer, CODES["SILENT"],
                  f"nothing was heard of it for {self.config.heartbeat_timeout:g} s")

    def lose(self, peer: int, code: int, reason: str) -> None:
        """An event: a peer is gone, for all of us or with a goodbye; as in members.py."""
        if self.over or self.own.dead or peer in self.lost:
            return
        self.lost[peer] = (code, reason)
        self.untold.append(peer)
        if code and peer in self.connected:     # whom we have given up sees the connection close
            self.world.send(self.node, peer, 0, self._to(peer).lose, self.node, CODES["LOST"],
                            "connection closed")
        if code and (0 in (self.node, peer) or self.on_lost is None):
            for other in sorted(self.connected - self.lost.keys()):
                self.world.send(self.node, other, 100, self._to(other).hear, self.node, peer,
                                code, reason)
        if code in ERRORS and ERRORS[code].scope == "job" and code != CODES["ABORTED"]:
            self.failure = self.failure or (lambda: ProtocolError(code, reason))
        elif code and self.on_lost is None:
            self.failure = self.failure or (lambda: self._peer_lost(peer, awaited=False))
        elif code and self.on_lost is not None:
            self.on_lost(peer, reason)
        self.world.wake(self.own)

    def hear(self, teller: int, peer: int, code: int, reason: str) -> None:
        """An event: another says that a peer is gone. Node 0 is believed; about node 0,
        and where one loss ends all, anybody is."""
        if peer == self.node:
            self.lose(teller, code, reason)
        elif 0 in (teller, peer) or self.on_lost is None:
            self.lose(peer, code, reason)

    def _leave(self, code: int, reason: str) -> None:
        """The last words, behind all that was sent before."""
        if self.over or self.own.dead:
            return
        text = f"gave up: {reason}" if code == CODES["ABORTED"] else reason
        self.over, self.last_words = True, (code, text)
        for peer in sorted((self.connected | {0}) - {self.node} - self.lost.keys()):
            other = self.world.nodes[peer].transport
            if other is not None:
                self.world.send(self.node, peer, 100, other.lose, self.node, code, text)

    def _known(self, peer: int) -> None:
        if peer == self.node or not 0 <= peer < self.size:
            raise ValueError(f"no node {peer} to talk to: this is node {self.node} of {self.size}")

    def _check(self, peer: int | None) -> None:
        """Raise if there is no sense in waiting (for this peer)."""
        if self.own.dead:
            raise Killed
        if self.over:
            raise TransportError(f"the transport of {self._title()} is closed")
        if peer in self.lost and (self.failure is None or self.on_lost is not None):
            raise self._peer_lost(peer, awaited=True)
        if self.failure is not None:
            raise self.failure()

    def _peer_lost(self, peer: int, awaited: bool) -> PeerLost:
        reason = self.lost[peer][1]
        text = (f"{self.config.title(peer)} lost ({reason}) while {self._title()} "
                + ("waited for it" if awaited else "was")
                + (f" in {self.doing}" if self.doing else "" if awaited else " at work"))
        return PeerLost(peer, reason, self.doing, text)

    def _title(self) -> str:
        return self.config.title(self.node)


driver = SimTransport
