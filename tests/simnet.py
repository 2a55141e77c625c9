"""A network in memory with a virtual clock: bad in every way, and repeatable.

    net = Network(seed=1, faults=Faults(delay=0.005, loss=0.05))
    a, b = net.host("a", machine_a), net.host("b", machine_b)
    net.run(until=lambda: done, limit=60.0)

A machine is anything without sockets, threads and clocks that has

    receive(data, address, now)     a datagram arrived
    trains(now)                     yields (address, datagrams) to send now
    deadline()                      when to call trains() at the latest; inf: never

such as reliability.Endpoint. For byte streams there is `net.pipe`: bytes in
order, cut anywhere. The same seed gives the same run, event by event.
"""
from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

OVERHEAD = 28                       # bytes that IPv4 and UDP add on the wire


@dataclass
class Faults:
    """What one direction of a link does to datagrams; times in seconds."""
    delay: float = 0.0              # propagation
    jitter: float = 0.0             # up to so much more, for each datagram its own
    loss: float = 0.0               # probabilities
    duplicate: float = 0.0
    corrupt: float = 0.0            # one bit flips
    reorder: float = 0.0            # held back by up to reorder_by
    reorder_by: float = 0.0
    rate: float = inf               # bytes/s
    queue: float = inf              # bytes that may wait for the rate; more are dropped
    mtu: float = inf                # larger ones vanish
    blackholes: tuple[tuple[float, float], ...] = ()        # from, to
    drop: frozenset[int] = frozenset()                      # by index in this direction


@dataclass
class Path:
    """One direction of a link, with its state."""
    faults: Faults
    random: random.Random
    overhead: int = OVERHEAD        # bytes on the wire besides those handed in
    count: int = 0
    busy: float = 0.0               # when the rate will have sent what waits
    stats: Counter = field(default_factory=Counter)
    trace: list[bytes] | None = None        # every datagram handed in, when wanted

    def arrivals(self, data: bytes, now: float) -> list[tuple[float, bytes]]:
        """When it arrives, as what: nothing, once or twice."""
        faults, index = self.faults, self.count
        self.count += 1
        self.stats["sent"] += 1
        self.stats["bytes"] += len(data)
        if self.trace is not None:
            self.trace.append(data)
        chance = self.random.random
        wire = len(data) + self.overhead
        if (index in faults.drop or len(data) > faults.mtu or chance() < faults.loss
                or any(start <= now < stop for start, stop in faults.blackholes)):
            self.stats["lost"] += 1
            return []
        if max(0.0, self.busy - now) * faults.rate > faults.queue:
            self.stats["overflowed"] += 1
            return []
        if faults.rate < inf:
            self.busy = max(self.busy, now) + wire / faults.rate
        found = []
        for _ in range(2 if chance() < faults.duplicate else 1):
            due = max(self.busy, now) + faults.delay + faults.jitter * chance()
            if chance() < faults.reorder:
                due += faults.reorder_by * chance()
            if chance() < faults.corrupt:
                bit = self.random.randrange(8 * len(data))
                damaged = bytearray(data)
                damaged[bit // 8] ^= 1 << bit % 8
                data = bytes(damaged)
            found.append((due, data))
        return found


class Network:
    """The clock, the events that wait for it, hosts and the paths between them."""

    def __init__(self, seed: int = 0, faults: Faults | None = None):
        self.now = 0.0
        self.faults = faults or Faults()            # of paths that nobody set
        self.random = random.Random(seed)
        self.events: list[tuple[float, int, Callable, tuple]] = []
        self.order = 0
        self.hosts: dict[Any, Host] = {}
        self.paths: dict[tuple[Any, Any], Path] = {}
        self.coalesce = 0.0         # s until a host looks at what came, as network cards do it

    def at(self, time: float, call: Callable, *args: Any) -> None:
        self.order += 1
        heapq.heappush(self.events, (max(time, self.now), self.order, call, args))

    def run(self, until: Callable[[], bool] = lambda: False, limit: float = inf) -> bool:
        """Let time pass until it is so, nothing is left to happen, or the limit."""
        while not until():
            if not self.events or self.events[0][0] > limit:
                self.now = max(self.now, limit) if limit < inf else self.now
                return until()
            self.now, _, call, args = heapq.heappop(self.events)
            call(*args)
        return True

    # datagrams

    def host(self, address: Any, machine: Any, clock: float = 0.0) -> Host:
        """Put a machine at an address; who was there before is dead. Its own
        clock is ahead of the network's by `clock`: hosts never agree on the time."""
        if address in self.hosts:
            self.hosts[address].alive = False
        self.hosts[address] = Host(self, address, machine, clock)
        return self.hosts[address]

    def path(self, source: Any, target: Any) -> Path:
        if (source, target) not in self.paths:
            self.paths[source, target] = Path(self.faults, random.Random(self.random.random()))
        return self.paths[source, target]

    def send(self, source: Any, target: Any, data: bytes) -> None:
        for due, arrived in self.path(source, target).arrivals(data, self.now):
            self.at(due, self._deliver, source, target, arrived)

    def _deliver(self, source: Any, target: Any, data: bytes) -> None:
        if target in self.hosts:
            self.hosts[target].receive(data, source)

    # byte streams

    def pipe(self, deliver: Callable[[bytes, float], None], delay: float = 0.0,
             longest: int = 1 << 16) -> Callable[[bytes], None]:
        """A function that sends bytes: in order, after `delay`, in pieces of any length."""
        def write(data: bytes) -> None:
            at = 0
            while at < len(data):
                size = self.random.randint(1, longest)
                self.at(self.now + delay, lambda piece: deliver(piece, self.now),
                        data[at:at + size])
                at += size
        return write


class Host:
    """A machine at an address: gets its datagrams, is woken by its deadline."""
    BUSY = 1000         # wake-ups at one instant that no network could explain: it spins

    def __init__(self, network: Network, address: Any, machine: Any, clock: float = 0.0):
        self.network, self.address, self.machine, self.clock = network, address, machine, clock
        self.alive, self.timer, self.woken = True, inf, (0.0, 0)
        self.looks = False                          # soon, at what came
        self.on_wake: Callable[[], None] | None = None      # the layer above, if any

    def receive(self, data: bytes, source: Any) -> None:
        if self.alive:
            self.machine.receive(memoryview(data), source, self.now)
            if not self.network.coalesce:
                self.wake()
            elif not self.looks:
                self.looks = True
                self.network.at(self.network.now + self.network.coalesce, self.wake)

    @property
    def now(self) -> float:
        return self.network.now + self.clock

    def wake(self) -> None:
        """Let the layer above and the machine do what they can now."""
        self.looks = False
        if not self.alive:
            return
        now = self.now
        if self.on_wake:
            self.on_wake()
        for address, datagrams in self.machine.trains(now):
            for data in datagrams:
                self.network.send(self.address, address, data)
        due = self.machine.deadline()
        if due < inf and (due < self.timer or self.timer <= now):
            self.timer = due
            self.network.at(due - self.clock, self._timer, due)

    def _timer(self, due: float) -> None:
        now = self.now
        if not self.alive or due != self.timer:
            return
        time, times = self.woken
        self.woken = (now, times + 1 if time == now else 0)
        assert times < self.BUSY, f"{self.address} spins at {now}"
        self.timer = inf
        self.wake()
