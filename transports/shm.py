"""Shared memory between processes of one machine.

The bytes of a stream lie in a ring of memory that both sides have mapped; two
socket pairs, which the launcher made, carry only *counts*: how many bytes were
put there, how much room came back. A count that was received says that what it
counts is there (the kernel's locks order the memory), it wakes who waits, and
its end tells that the peer is gone. The memory has no name, so that nothing of
it outlives the processes.
"""
from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
import struct
import tempfile
from collections.abc import Sequence

from . import Stream
from .pipe import PipeDriver

RING = 1 << 20          # bytes on their way; four frames, so that they stay in the cache
LEAST = RING // 64      # room that the smallest send takes: at most 64 counts wait in a socket
GIVE_BACK = RING // 4   # room is given back when so much has come together
COUNT = struct.Struct("<I")


def unnamed_file() -> int:
    """The descriptor of a file of RING bytes that no folder lists."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minidist")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, RING)
    return fd


class ShmStream(Stream):
    room = select.POLLIN        # room is told by a count that comes back

    def __init__(self, peer: int, read_fd: int, write_fd: int):
        self.name = f"shared memory with node {peer}"
        self.read_fd, self.write_fd = read_fd, write_fd
        self.reader, self.writer = socket.socket(fileno=read_fd), socket.socket(fileno=write_fd)
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        ring = unnamed_file()
        self.put = memoryview(mmap.mmap(ring, RING))    # the ring that we fill
        self.got: memoryview | None = None              # the ring that the peer fills
        self.put_at = self.got_at = 0           # where to go on, in each
        self.free = RING                        # room in the one that we fill
        self.count = self.left = 0              # bytes of the last count; of them unread
        self.owed = 0                           # room to give back to the peer
        with contextlib.suppress(BrokenPipeError):      # whoever is gone will be missed later
            socket.send_fds(self.writer, [b"!"], [ring])
        os.close(ring)

    def send(self, views: Sequence) -> int:
        while self.free < LEAST:
            room = self.writer.recv(COUNT.size)
            if not room:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            self.free += COUNT.unpack(room)[0]
        sent = 0
        for view in views:
            view = memoryview(view)[:self.free - sent]
            at = (self.put_at + sent) % RING
            before_end = min(len(view), RING - at)
            self.put[at:at + before_end] = view[:before_end]
            self.put[:len(view) - before_end] = view[before_end:]
            sent += len(view)
        self.writer.send(COUNT.pack(sent))
        self.put_at = (self.put_at + sent) % RING
        self.free -= max(sent, LEAST)
        return sent

    def recv_into(self, view: memoryview) -> int:
        if self.got is None:                    # first of all comes the ring itself
            _, rings, _, _ = socket.recv_fds(self.reader, 1, 1)
            if not rings:
                return 0
            self.got = memoryview(mmap.mmap(rings[0], RING))
            os.close(rings[0])
        if not self.left:
            try:
                count = self.reader.recv(COUNT.size)
            except ConnectionResetError:        # it closed before it read all we sent
                count = b""
            if not count:
                return 0
            self.count, = COUNT.unpack(count)
            self.left = self.count
        size = min(self.left, len(view), RING - self.got_at)
        view[:size] = self.got[self.got_at:self.got_at + size]
        self.got_at = (self.got_at + size) % RING
        self.left -= size
        if not self.left:
            self.owed += max(self.count, LEAST)
            if self.owed >= GIVE_BACK:
                with contextlib.suppress(BrokenPipeError):      # what it sent is still here
                    self.reader.send(COUNT.pack(self.owed))
                self.owed = 0
        return size

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self.put = self.got = memoryview(b"")   # unmapped


class ShmDriver(PipeDriver):
    stream = ShmStream


driver = ShmDriver
