"""How long an answer takes, and how much a path carries: RTT and congestion control.

The machine in reliability.py tells a `Controller` which packets arrived and
which were lost; the controller answers with a window and a rate. Another one
is a subclass and a line in CONTROLLERS.
"""
from __future__ import annotations

from math import inf
from typing import NamedTuple

from .packets import BASE_SIZE, Run

ACK_DELAY = 0.005               # s an acknowledgement may wait (RFC 9000 says 25 ms; LANs)
GRANULARITY = 0.001             # s (RFC 9002, 6.1.2)
TICK = 1e-6                     # s: no answer takes less; a coarse clock may say so
INITIAL_RTT = 0.333             # s (RFC 9002, 6.2.2)
PTO_CEILING = 0.5               # s: two probes a second harm nobody, and a path that
#                                 returns is found within half a second (ours)
INITIAL_PACKETS = 10            # (RFC 9002, 7.2)
MINIMUM_PACKETS = 2             # (RFC 9002, 7.2)
PACING = 1.25                   # times window / rtt (RFC 9002, 7.7)


class Rtt:
    """The round-trip time, as RFC 9002, section 5, estimates it."""

    def __init__(self) -> None:
        self.latest = self.smoothed = INITIAL_RTT
        self.variation = INITIAL_RTT / 2
        self.minimum = inf                          # inf: no sample yet

    def sample(self, latest: float, delay: float) -> None:
        """`delay` is how long the peer says that it held the acknowledgement."""
        self.latest = latest = max(latest, TICK)
        if self.minimum == inf:
            self.minimum = self.smoothed = latest
            self.variation = latest / 2
            return
        self.minimum = min(self.minimum, latest)
        delay = min(delay, ACK_DELAY)
        adjusted = latest - delay if latest >= self.minimum + delay else latest
        self.variation += (abs(self.smoothed - adjusted) - self.variation) / 4
        self.smoothed += (adjusted - self.smoothed) / 8

    def timeout(self, doublings: int = 0) -> float:
        """The probe timeout (PTO): by then an answer should have come."""
        once = self.smoothed + max(4 * self.variation, GRANULARITY) + ACK_DELAY
        return max(once, min(once * 2 ** doublings, PTO_CEILING))


class Acked(NamedTuple):
    """What a controller learns from one acknowledgement."""
    runs: list[Run]             # newly acknowledged
    in_flight: int              # bytes that still are
    rate: float                 # bytes/s that the path delivered; 0: unknown
    limited: bool               # by the application: the path may be faster
    round: bool                 # a round trip has passed since this was last so


class Controller:
    """Says how many stream bytes may be in flight (`window`) and how fast they
    may leave (`rate`, bytes/s). Subclasses are told what happened."""

    def __init__(self, rtt: Rtt):
        self.rtt = rtt
        self.size = BASE_SIZE                       # bytes in a packet; follows the path's
        self.window: float = INITIAL_PACKETS * self.size
        self.rate = PACING * self.window / rtt.smoothed

    def on_acked(self, now: float, acked: Acked) -> None:
        """Packets arrived."""

    def on_lost(self, now: float, sent: float, persistent: bool) -> None:
        """Packets were lost, the latest of them sent at `sent`."""

    def on_spurious(self, sent: float) -> None:
        """A packet that was sent at `sent` and declared lost had arrived after all."""


class NewReno(Controller):
    """RFC 9002, section 7: the reference. Each loss halves the window, so random
    loss p holds it to about 1.2 / sqrt(p) packets, whatever the path could carry."""

    def __init__(self, rtt: Rtt):
        super().__init__(rtt)
        self.threshold = inf                        # slow start below it
        self.recovery = -inf                        # packets sent earlier change nothing
        self.undo = (self.window, inf, -inf)

    def on_acked(self, now: float, acked: Acked) -> None:
        arrived = sum(run.length for run in acked.runs if run.time > self.recovery)
        if not acked.limited:                       # an idle window proves nothing
            slow = self.window < self.threshold
            self.window += arrived if slow else self.size * arrived / self.window
        self.rate = PACING * self.window / self.rtt.smoothed

    def on_lost(self, now: float, sent: float, persistent: bool) -> None:
        if sent > self.recovery:
            self.undo = (self.window, self.threshold, self.recovery)
            self.recovery = now
            self.threshold = self.window / 2
            self.window = max(self.threshold, MINIMUM_PACKETS * self.size)
        if persistent:
            self.window, self.recovery = MINIMUM_PACKETS * self.size, -inf
        self.rate = PACING * self.window / self.rtt.smoothed

    def on_spurious(self, sent: float) -> None:
        window, threshold, recovery = self.undo
        if recovery < sent <= self.recovery and window > self.window:
            self.window, self.threshold, self.recovery = self.undo


class DeliveryRate(Controller):
    """Sends as fast as packets were seen to arrive (the idea of BBR, by Cardwell
    and others, 2016). Loss alone says nothing: a noisy link loses packets too.

    bandwidth = the best rate of the last ten round trips, floor = the least
    round-trip time; their product is what the path holds without a queue. Now
    and then it sends a quarter faster (is there more?), then slower (let the
    queue go), and every ten seconds it nearly stops to see the floor again.
    """
    STARTUP, CYCLE = 2.885, (1.25, 0.75, 1, 1, 1, 1, 1, 1)      # 2.885 = 2 / ln 2
    ROUNDS, GROWTH, FLAT = 10, 1.25, 3          # startup ends after 3 rounds below +25 %
    FLOOR_LIFE, FLOOR_PROBE = 10.0, 0.2         # s
    QUANTUM = 0.001                             # s of sending that timers may bunch up

    def __init__(self, rtt: Rtt):
        super().__init__(rtt)
        self.best = [0.0] * self.ROUNDS
        self.rounds = 0
        self.state = "startup"
        self.full, self.flat = 0.0, 0
        self.floor, self.floor_time = inf, 0.0
        self.phase, self.until = 0, 0.0         # place in the cycle; when its part ends

    def on_acked(self, now: float, acked: Acked) -> None:
        bandwidth = max(self.best)
        useful = acked.rate > bandwidth or acked.rate > 0 and not acked.limited
        if useful:
            self.rounds += acked.round
            slot = self.rounds % self.ROUNDS
            self.best[slot] = max(acked.rate, 0 if acked.round else self.best[slot])
            bandwidth = max(self.best)
        stale = now > self.floor_time + self.FLOOR_LIFE
        if self.rtt.latest <= self.floor or stale:
            self.floor, self.floor_time = self.rtt.latest, now
        held = bandwidth * self.floor
        if self.state == "startup":
            bandwidth = max(bandwidth, INITIAL_PACKETS * self.size / self.rtt.smoothed)
            if useful and acked.round:
                self.flat = self.flat + 1 if bandwidth < self.GROWTH * self.full else 0
                self.full = self.full if self.flat else bandwidth
            if self.flat == self.FLAT:
                self.state = "drain"
        elif stale and not acked.limited:        # (an idle path shows it by itself)
            self.state, self.until = "floor", now + self.FLOOR_PROBE
        elif self.state == "drain" and acked.in_flight <= held:
            self.state, self.phase, self.until = "cruise", 2, now + self.floor
        elif self.state != "drain" and now >= self.until:
            self.state, self.phase = "cruise", (self.phase + 1) % len(self.CYCLE)
            self.until = now + self.floor
        gain = {"startup": self.STARTUP, "drain": 1 / self.STARTUP, "floor": 1.0}.get(
            self.state, self.CYCLE[self.phase])
        self.rate = gain * bandwidth
        room = held / 2 if self.state == "floor" else \
            max(gain, 2) * held + 3 * min(64e3, bandwidth * self.QUANTUM)
        self.window = max(room, 4 * self.size)
        if self.state == "startup":
            self.window = max(self.window, INITIAL_PACKETS * self.size)


CONTROLLERS: dict[str, type[Controller]] = {"rate": DeliveryRate, "newreno": NewReno}
