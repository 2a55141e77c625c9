"""An in-memory Transport: nodes are threads of one process, messages are queues.

    with cluster(3) as nodes:                # a list of Memory transports
        run(nodes, lambda t: ...)            # one thread a node; returns the results

It keeps the contract and nothing else, so tests of what stands above the
transports need no sockets and show no timing but their own.
"""
from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque

from minidist_transports import Message, PeerLost, ProtocolError, Timeout, Transport, protocol


class Hub:
    """What the nodes of one cluster share."""

    def __init__(self, workers: int, servers: int):
        self.workers, self.size = workers, workers + servers
        self.changed = threading.Condition()
        self.queues: dict = defaultdict(deque)      # (to, from, channel): messages
        self.gone: dict[int, str] = {}              # peer: reason; "" for a goodbye
        self.codes: dict[int, int] = {}             # peer: the code that it gave up with


class Memory(Transport):
    def __init__(self, hub: Hub, node: int, timeout: float = 20.0):
        self.hub, self.node, self.size, self.timeout = hub, node, hub.size, timeout
        self.told: set[int] = set()
        self.stats = dict.fromkeys(("bytes_sent", "bytes_received", "messages_sent",
                                    "messages_received", "retransmissions"), 0)

    def send(self, peer, kind, fields=(), buffers=(), *, channel=0, timeout=None):
        payload = b"".join(memoryview(b).cast("B") if memoryview(b).nbytes else b""
                           for b in buffers)
        layout = protocol.MESSAGES[kind]
        fields = layout.unpack(layout.pack(fields))         # what does not fit the wire fails here
        with self.hub.changed:
            if peer in self.hub.gone:
                self._lost(peer)
            self.hub.queues[peer, self.node, channel].append(
                Message(kind, fields, payload, self.node))
            self.hub.changed.notify_all()
        self.stats["bytes_sent"] += len(payload)
        self.stats["messages_sent"] += 1

    def recv(self, peer, *, channel=0, into=None, timeout=None):
        message = self._next([peer], channel, timeout)
        if into is not None:
            view = memoryview(into)
            if view.nbytes != len(message.payload):
                text = (f"node {peer} sent {protocol.describe(*message[:2])} with "
                        f"{len(message.payload)} bytes, node {self.node} waits for "
                        f"{view.nbytes} in {self.doing or 'recv'}")
                with self.hub.changed:
                    self.hub.gone[self.node] = text
                    self.hub.changed.notify_all()
                raise ProtocolError(protocol.CODES["MISMATCH"], text)
            if view.nbytes:
                view.cast("B")[:] = message.payload
            message = message._replace(payload=into)
        return message

    def recv_any(self, *, channel=0, timeout=None):
        return self._next(range(self.size), channel, timeout, anybody=True)

    def exchange(self, to, kind, fields, buffer, source, into, *, channel=0, timeout=None,
                 landed=None):
        self.send(to, kind, fields, [buffer], channel=channel, timeout=timeout)
        message = self.recv(source, channel=channel, into=into, timeout=timeout)
        size = memoryview(into).nbytes
        if landed is not None:                  # in odd pieces, as a network would
            for start in range(0, size, 192):
                landed(start, min(start + 192, size))
        return message

    def abort(self, reason, code=None):
        self.hub.codes[self.node] = code
        self._leave(reason or "gave up")

    def close(self):
        self._leave("")

    def _leave(self, reason):
        with self.hub.changed:
            self.hub.gone.setdefault(self.node, reason)
            self.hub.changed.notify_all()

    def _lost(self, peer):
        reason = self.hub.gone[peer] or "it said goodbye"
        self.told.add(peer)
        if self.on_lost is not None and self.hub.gone[peer]:
            self.on_lost(peer, reason)
        if self.hub.codes.get(peer):
            raise ProtocolError(self.hub.codes[peer], reason)
        raise PeerLost(peer, reason, self.doing)

    def _next(self, peers, channel, timeout, anybody=False):
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self.hub.changed:
            while True:
                for peer in peers:
                    queue = self.hub.queues[self.node, peer, channel]
                    if queue:
                        message = queue.popleft()
                        self.stats["bytes_received"] += len(message.payload)
                        self.stats["messages_received"] += 1
                        return message
                for peer, reason in list(self.hub.gone.items()):
                    if peer in self.told or peer == self.node:
                        continue
                    if anybody and not reason:
                        self.told.add(peer)
                        return Message(protocol.GOODBYE, (), b"", peer)
                    fatal = reason and (self.on_lost is None or anybody)
                    if fatal or (peer in peers and not anybody):
                        self._lost(peer)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Timeout(f"node {self.node} waited for {list(peers)} in "
                                  f"{self.doing or 'recv'}")
                self.hub.changed.wait(left)


@contextlib.contextmanager
def cluster(workers: int, servers: int = 0, timeout: float = 20.0):
    hub = Hub(workers, servers)
    nodes = [Memory(hub, node, timeout) for node in range(hub.size)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.close()


def run(nodes, work, timeout: float = 30.0):
    """work(node) on a thread each; the results in order, or the first error."""
    results, errors = [None] * len(nodes), []

    def one(i):
        try:
            results[i] = work(nodes[i])
        except BaseException as error:      # noqa: BLE001 - raised again below
            errors.append(error)
            nodes[i].abort(f"{type(error).__name__}: {error}")
    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a node hangs"
    if errors:
        raise errors[0]
    return results


def on_ranks(size, work):
    """work(group) on every rank of an in-memory cluster."""
    import minidist as md
    with cluster(size) as nodes:
        return run(nodes, lambda transport: work(md.ProcessGroup(transport, size)))


def outcomes(size, work):
    """As on_ranks, but what each rank returned or raised."""
    def one(group):
        try:
            return work(group)
        except Exception as error:
            return error
    return on_ranks(size, one)
