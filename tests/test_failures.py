"""Simulated runs in which things go wrong at any moment, and what must hold after each event:
an acknowledged push counts exactly once, nobody is further ahead than the bound, nobody waits for
ever, and ranks in step have the same bits. MINIDIST_SEEDS says how many runs of each kind."""
import hashlib
import math
import os
import random

import numpy as np
import pytest

import minidist as md
import minidist.distributed as dist
import minidist_transports as mt
from minidist import nn
from minidist_transports import protocol as p
from minidist_transports import training
from minidist_transports.cluster import Cluster
from minidist_transports.sim import World

SEEDS = int(os.environ.get("MINIDIST_SEEDS", 30))
GONE = (mt.PeerLost, mt.Timeout, mt.TransportError, RuntimeError)   # what a loss may become
PATIENCE = {"heartbeat_timeout": 0.3, "timeout": 3.0, "start_timeout": 3.0}     # virtual seconds
UNEVEN = {"compute": {"step": 0.01, "noise": 0.8, "straggle": 0.1, "speeds": [1.0, 0.6, 1.5]},
          "link": {"jitter": 0.005, "bandwidth": 1e6}}


class Units(nn.Module):
    """Parameters that count: rank r's gradient is 1 at place r and 0 elsewhere, so what is
    taken from place r is the number of its steps that were added, exactly."""

    def __init__(self, workers):
        super().__init__()
        self.places = nn.Parameter(md.zeros(workers, dtype=md.float64))

    def counts(self):
        return -self.places.detach().numpy()


class Watched(md.ParameterServer):
    """Remembers which pushes it has said to have counted."""

    def __init__(self, workers):
        super().__init__(workers)
        self.counted = set()

    def _acknowledge(self, peer, push_id, accepted):
        if accepted == 1:
            assert (peer, push_id) not in self.counted, "a push was counted twice"
            self.counted.add((peer, push_id))
        return super()._acknowledge(peer, push_id, accepted)


class Lossy(training.Wire):
    """The parameter servers' packets get lost, come twice, and overtake each other."""

    def send(self, packets):
        node, world, chance = (self.transport.node, self.transport.world,
                               self.transport.own.chance)
        for kind, peer, fields, payload in packets:
            try:
                self.transport._connect(peer)
                self.transport._check(peer)
            except mt.PeerLost as lost:
                self.lost.append(("LOST", lost.peer, (str(lost),), b""))
                continue
            number, values = training.encode(kind, fields)
            layout = p.MESSAGES[number]
            message = mt.Message(number, layout.unpack(layout.pack(values)),
                                 bytes(p.as_bytes(payload)), node)
            for _ in range(chance.choice([0, 1, 1, 1, 1, 1, 1, 2])):
                if not world._cut(node, peer):
                    delay = chance.choice([0.001, 0.01, 0.05, 2 * md.TICK])
                    world.at(world.now + delay, world.nodes[peer].transport.arrived, message, 2,
                             len(payload))


class Run:
    """One job in one cluster where `faults` happen."""

    def __init__(self, seed, make, workers, servers, steps, faults, wire=training.Wire):
        self.make, self.workers, self.steps, self.wire = make, workers, steps, wire
        self.world = World(Cluster.of({**UNEVEN, "seed": seed, "fault": faults}), workers, servers)
        self.world.on_event = self.check
        self.strategies, self.servers, self.results = {}, {}, {}
        self.bits = {}                          # of the parameters, by steps done

    def go(self):
        self.world.run([lambda n=n: self.node(n) for n in range(self.world.size)], timeout=60.0)
        for node in self.world.nodes:
            assert node.error is None or isinstance(node.error, GONE), repr(node.error)
        return self

    def node(self, number):
        role = "worker" if number < self.workers else "server"
        transport = mt.open("sim", mt.Config(number, self.workers, self.world.size - self.workers,
                                             role, **PATIENCE))
        if role == "worker":
            self.results[number] = self.work(md.ProcessGroup(transport, self.workers))
            return
        server = self.servers[number] = Watched(self.workers)
        md.drive(server, self.wire(transport), lambda: server.done and (
            self.wire is training.Wire or server.values is None or all(
                node.dead for node in self.world.nodes[:self.workers])),    # its answer was lost
            "serving")
        transport.close()

    def work(self, group):
        model = Units(group.size)
        train = self.make(model, md.optim.SGD(model.parameters(), lr=1.0), group)
        if hasattr(train, "_wire"):
            train._wire = self.wire(group.transport)
        self.strategies[group.rank] = train
        for _ in range(self.steps):
            group.transport.work(1)
            train.zero_grad()
            model.places[group.rank].backward()
            train.step()
            if train.lockstep:
                bits = hashlib.sha256(model.places.detach().numpy()).digest()
                assert self.bits.setdefault(train.steps, bits) == bits, "ranks differ"
        train.finish()
        return model.counts()

    def check(self):
        """After each event."""
        assert self.world.now < 4000 * md.TICK, "somebody waits for ever"
        for node in self.world.nodes:
            assert not node.waiting or node.deadline < math.inf, f"{node.number} waits for ever"
        for number, server in self.servers.items():
            if server.values is None:
                continue
            assert server.version == len(server.counted)
            for i, value in enumerate(server.values, server.slice[0]):
                assert -value == sum(peer == i for peer, _ in server.counted)
            for rank, train in self.strategies.items():
                worker, question = train._worker, train._worker._unanswered.get((number, "PUSH"))
                told = worker.push_id - (question is not None)
                first = (train.group.transport.incarnation << 32) + 1
                assert all((rank, i) in server.counted for i in range(first, told + 1)), (
                    "an acknowledged push does not count")
        self.check_bound()

    def check_bound(self):
        trains = self.strategies.values()
        if not all(isinstance(train, dist.StaleSynchronous) for train in trains):
            return
        gone = set().union(*[server.gone for server in self.servers.values()])
        clocks = {rank: train._worker.clock for rank, train in self.strategies.items()
                  if rank not in gone and not self.world.nodes[rank].dead}
        for train in trains if clocks else ():  # one more while it has not asked to go on
            assert max(clocks.values()) <= min(clocks.values()) + train.bound + 1


def stale(model, optimizer, group):
    train = dist.StaleSynchronous(model, optimizer, bound=1 + group.size % 2, group=group)
    train.samples = train.batch                 # each step counts whole, as in Downpour
    return train


def sync(model, optimizer, group):
    return dist.Synchronous(model, optimizer, group=group)


def downpour(model, optimizer, group):
    return dist.Downpour(model, optimizer, group=group)


KINDS = {"sync": (sync, 0, training.Wire), "downpour": (downpour, 2, training.Wire),
         "stale": (stale, 1, training.Wire), "downpour, lossy": (downpour, 2, Lossy),
         "stale, lossy": (stale, 1, Lossy)}


def some_run(kind, seed, kinds_of_fault, seconds):
    """A run drawn from the seed, of up to three faults."""
    chance, (make, servers, wire) = random.Random(f"{kind} {seed}"), KINDS[kind]
    workers = chance.randint(2, 4)
    nodes, faults = range(workers + servers), []
    for _ in range(chance.randint(1, 3)):
        fault = chance.choice(kinds_of_fault)
        faults.append({"kind": fault, "at": chance.uniform(0.0, 0.2), "nodes": chance.sample(
            nodes, 1 if fault in ("crash", "power") else chance.randint(1, len(nodes) - 1))})
        if fault in ("pause", "partition"):
            faults[-1]["seconds"] = chance.choice(seconds)
    run = Run(seed, make, workers, servers, chance.randint(2, 6), faults, wire)
    try:
        return run.go()
    except BaseException as error:
        error.add_note(f"kind {kind!r}, seed {seed}: {faults}")
        raise


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_ends_in_words(kind):
    finished = 0
    for seed in range(SEEDS):
        run = some_run(kind, seed, ["crash", "power", "pause", "partition", "late"],
                       [0.05, 0.29, 1.0])
        finished += len(run.results)
    assert finished                             # some get through


@pytest.mark.parametrize("kind", KINDS)
def test_what_passes_changes_nothing(kind):
    """Pauses and partitions shorter than heartbeats notice, and nodes that come late."""
    for seed in range(SEEDS):
        run = some_run(kind, seed, ["pause", "partition", "late"], [0.05, 0.09])
        for node in run.world.nodes:
            assert node.error is None, f"seed {seed}: {node.error}"
        each = 1 / run.workers if kind == "sync" else 1.0
        assert len(run.results) == run.workers
        for counts in run.results.values():
            np.testing.assert_allclose(counts, run.steps * each, rtol=1e-12)
