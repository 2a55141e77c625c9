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

    def on_lost(self, now: float, sent: float, length: int, persistent: bool) -> None:
        """So many bytes were lost, the latest of them sent at `sent`; persistent: nothing
        passed for a long time (RFC 9002, 7.6)."""

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

    def on_lost(self, now: float, sent: float, length: int, persistent: bool) -> None:
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
    """CUBIC (RFC 9438) that looks at the path before it believes a loss.

    bandwidth = the best delivery rate of the last ten round trips, floor = the
    least round-trip time of ten seconds. When a packet is lost while every answer
    comes later than the floor, a full queue dropped it: this flow makes room by
    30 %, as CUBIC does, but stays at what fills the path, bandwidth * floor. When
    one is lost without a queue, that is noise, and to make room would help nobody.
    (More than a fifth lost is no noise, whatever the delay.)

    The start is BBR's (Cardwell and others, 2016): faster and faster, whatever
    gets lost, until packets no longer arrive faster. So is the look at the floor:
    who saw no empty queue for ten seconds nearly stops for a moment.
    """
    STARTUP, GROWTH, FLAT = 2.885, 1.25, 3      # 2 / ln 2; ends after 3 rounds below +25 %
    ROUNDS = 10                                 # that a sample of the bandwidth is good for
    KEEP, STEEP = 0.7, 0.4                      # beta and C of RFC 9438
    FRIENDLY = 3 * (1 - KEEP) / (1 + KEEP)      # packets a round trip: Reno's growth (its 4.3)
    QUEUE, JITTER = 1 / 16, 0.0005              # of the floor, s: answers that late have queued
    NOISE = 1 / 5                               # of the bytes
    FLOOR_LIFE, FLOOR_PROBE = 10.0, 0.2         # s
    QUANTUM = 0.001                             # s of sending that timers may bunch up

    def __init__(self, rtt: Rtt):
        super().__init__(rtt)
        self.floor, self.floor_time, self.probing = inf, 0.0, -inf
        self.least = [inf, inf]                 # round-trip times: of this round, the last one
        self.noise, self.arrived, self.lost = 0.0, 0, 0     # share lost; bytes of this round
        self.told = self.epoch = 0.0            # time of the last news; when `top` was left
        self.fair = self.top = self.window      # the window, unless it looks at the floor
        self.recovery = -inf
        self.undo = (self.fair, self.top, self.epoch, self.recovery)
        self._start()

    def _start(self) -> None:
        self.starting, self.rounds = True, 0
        self.best = [0.0] * self.ROUNDS
        self.full, self.flat = 0.0, 0           # bandwidth; rounds that it has not grown for

    @property
    def bandwidth(self) -> float:
        return max(self.best)

    @property
    def quantum(self) -> float:
        return min(64e3, self.bandwidth * self.QUANTUM)

    @property
    def queued(self) -> bool:
        """Not one answer of a whole round trip came as quickly as the path allows."""
        return min(self.least) > (1 + self.QUEUE) * self.floor + self.JITTER

    def on_acked(self, now: float, acked: Acked) -> None:
        arrived = sum(run.length for run in acked.runs)
        self._measure(now, acked, arrived)
        if self.starting:
            self.fair = max(2 * self.bandwidth * self.floor + 3 * self.quantum,
                            INITIAL_PACKETS * self.size)
            if self.flat >= self.FLAT or self.flat and self.queued:
                self._cruise(now)
        elif acked.limited:                     # an idle window proves nothing, nor does its time
            self.epoch += now - self.told
        else:
            bend = ((1 - self.KEEP) * self.top / self.size / self.STEEP) ** (1 / 3)
            since = now - self.epoch + self.rtt.smoothed
            cubic = self.top + self.size * self.STEEP * (since - bend) ** 3
            growth = max(self.FRIENDLY * self.size, min(cubic - self.fair, self.fair / 2))
            self.fair += growth * arrived / self.fair
        self.told = now
        self._set(now)

    def _measure(self, now: float, acked: Acked, arrived: int) -> None:
        if acked.rate > 0 and (acked.rate > self.bandwidth or not acked.limited):
            self.rounds += acked.round
            slot = self.rounds % self.ROUNDS
            self.best[slot] = max(acked.rate, 0 if acked.round else self.best[slot])
            if acked.round:
                self.flat = self.flat + 1 if self.bandwidth < self.GROWTH * self.full else 0
                self.full = self.full if self.flat else self.bandwidth
        stale = now > self.floor_time + self.FLOOR_LIFE
        if self.rtt.latest <= self.floor or stale:
            self.floor, self.floor_time = self.rtt.latest, now
            if stale and not acked.limited:     # (an idle path shows it by itself)
                self.probing = now + self.FLOOR_PROBE
        self.least[0] = min(self.least[0], self.rtt.latest)
        self.arrived += arrived
        if acked.round:
            self.least = [inf, self.least[0]]
            share = self.lost / max(1, self.lost + self.arrived)
            self.noise += (share - self.noise) / 8
            self.arrived = self.lost = 0

    def _cruise(self, now: float) -> None:
        self.starting = False
        self.fair = self.top = self.bandwidth * self.floor + self.quantum
        self.epoch = self.recovery = now

    def _set(self, now: float) -> None:
        looks = now < self.probing
        self.window = max(self.bandwidth * self.floor / 2 if looks else self.fair, 4 * self.size)
        if self.starting:
            self.rate = self.STARTUP * max(
                self.bandwidth, INITIAL_PACKETS * self.size / self.rtt.smoothed)
        else:
            self.rate = PACING * self.window / self.rtt.smoothed

    def on_lost(self, now: float, sent: float, length: int, persistent: bool) -> None:
        self.lost += length
        if persistent:                          # nothing passes: it is another path afterwards
            self._start()
        elif sent > self.recovery and (self.queued or self.noise > self.NOISE):
            if self.starting:
                self._cruise(now)
            else:
                self.undo = (self.fair, self.top, self.epoch, self.recovery)
                self.top, self.epoch, self.recovery = self.fair, now, now
                self.fair = min(self.fair, max(self.KEEP * self.fair,
                                               self.bandwidth * self.floor))
        self._set(now)

    def on_spurious(self, sent: float) -> None:
        fair, _, _, recovery = self.undo
        if recovery < sent <= self.recovery and fair > self.fair:
            self.fair, self.top, self.epoch, self.recovery = self.undo


CONTROLLERS: dict[str, type[Controller]] = {"rate": DeliveryRate, "newreno": NewReno}
