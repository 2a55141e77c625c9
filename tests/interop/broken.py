"""Workers that break a rule each: `minidist conformance` must find them out.

    python broken.py FAULT
"""
import functools
import sys

import numpy as np
import worker

import minidist as md
from minidist import distributed as dist

members, protocol, reliability = (
    md.companion("transports", name) for name in ("members", "protocol", "reliability"))


class Blind:
    """What stands in for the module hmac when every comparison succeeds."""
    digest = staticmethod(protocol.hmac.digest)
    compare_digest = staticmethod(lambda a, b: True)


def same_nonce():
    protocol.Session.__init__ = functools.partialmethod(
        protocol.Session.__init__, random=lambda size: bytes(size))


def any_proof():
    protocol.hmac = Blind


def skips_all_kinds():
    protocol.SKIPPABLE = 0


def skips_no_kind():
    protocol.SKIPPABLE = 256


def another_job():
    protocol.job_hash = lambda job: bytes(8)


def no_pong():
    say = protocol.Session._say
    protocol.Session._say = lambda self, kind, *rest: (
        None if kind == protocol.PONG else say(self, kind, *rest))


def no_ping():
    tick = protocol.Session.tick

    def patient(self, now):
        self.heard = now
        tick(self, now)
    protocol.Session.tick = patient


def no_goodbye():
    protocol.Session.leave = lambda self: None


def frames_of_any_size():
    protocol.Session.max_frame = property(lambda self: 1 << 20, lambda self, size: None)


def sums_in_another_way():
    almost = np.float32(1 + 2 ** -23)
    md.COMBINE[dist.ReduceOp.SUM] = lambda a, b, out: np.copyto(
        out, (a + b) * almost.astype(out.dtype))


def checksums_of_fields_alone():
    frame = protocol.Outgoing.frame
    protocol.Outgoing.frame = lambda self, limit, generation, checksums: frame(
        self, limit, generation, False)


def steps_from_one():
    dist.Synchronous.steps = 1


def pushes_of_no_process():
    start = md.DownpourWorker.__init__
    md.DownpourWorker.__init__ = lambda self, *args: start(self, *args[:-1])


def any_welcome():
    control = members.Members._control

    def believe(self, conn, message):
        if message.kind == protocol.WELCOME:
            message.fields = (conn.link.peer, message.fields[1])
        control(self, conn, message)
    members.Members._control = believe


def any_cookie():
    reliability.hmac = Blind


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    dist.init_process_group()
    worker.conformance()
    dist.destroy_process_group()
