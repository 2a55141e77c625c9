"""Hours of killed senders over a bad wire: nothing acknowledged is lost or doubled, nothing grows.

    python tests/lab/soak.py SECONDS [SEED]

Each of three senders writes numbered records over udp to one receiver, which acknowledges them.
Every few seconds one is killed, at any instant, and started again on the same address, or stopped
for a while; the wire changes its faults, or is cut. A sender asks first how many of its records are
there, and goes on. The receiver takes record n + 1 after record n and no other; it must never have
fewer than a sender saw acknowledged before it died.
"""
import json
import mmap
import os
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from network import ADDRESSES, Lab
from peer import open_driver

SENDERS, AHEAD = 3, 200                # records on their way, of each
COUNT = struct.Struct(">Q")
RECORD = struct.Struct(">QI")                       # number, bytes that follow
FAULTS = ({}, {"loss": 0.05}, {"loss": 0.2}, {"reorder": 0.1, "reorder_by": 0.01},
          {"duplicate": 0.2}, {"corrupt": 0.02}, {"loss": 1.0}, {"delay": 0.02, "jitter": 0.01})


def payload(sender, number):
    return random.Random(sender << 40 | number).randbytes(number * 7919 % 3000)


def port(sender):
    return 5010 + sender


class Buffered:
    """A stream with what of it was not taken yet, both ways."""

    def __init__(self, stream):
        self.stream, self.out, self.got = stream, bytearray(), bytearray()
        self.view = memoryview(bytearray(1 << 16))

    def work(self):
        try:
            while self.out:
                del self.out[:self.stream.send([bytes(self.out)])]
        except BlockingIOError:
            pass
        try:
            while size := self.stream.recv_into(self.view):
                self.got += self.view[:size]
        except BlockingIOError:
            pass

    def take(self, form):
        if len(self.got) < form.size:
            return None
        found = form.unpack_from(self.got)
        del self.got[:form.size]
        return found


def receive():
    driver = open_driver("udp")
    driver.listen(ADDRESSES[0], 5001)
    counts, links, due = [0] * SENDERS, {}, 0.0
    while True:
        now = time.monotonic()
        driver.pump(now)
        while stream := driver.accept():
            links[Buffered(stream)] = None
        for link, sender in list(links.items()):
            try:
                link.work()
            except OSError:                         # killed, or cut off for too long
                del links[link]
                link.stream.close()
                continue
            if sender is None:
                if hello := link.take(COUNT):
                    links[link] = sender = hello[0]
                    link.out += COUNT.pack(counts[sender])
                continue
            while len(link.got) >= RECORD.size:
                number, size = RECORD.unpack_from(link.got)
                if len(link.got) < RECORD.size + size:
                    break
                assert number == counts[sender] + 1, f"record {number} after {counts[sender]}"
                assert link.got[RECORD.size:RECORD.size + size] == payload(sender, number)
                del link.got[:RECORD.size + size]
                counts[sender] = number
                link.out += COUNT.pack(number)
        if now >= due:
            due = now + 1.0
            status = Path("/proc/self/status").read_text().split()
            print(json.dumps({
                "counts": counts, "streams": len(links),
                "rss": int(status[status.index("VmRSS:") + 1]) / 1024,
                "threads": int(status[status.index("Threads:") + 1]),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "connections": len(driver.endpoint.connections)}), flush=True)
        pause(driver, due - now)


def send(sender, path):
    """Its count of acknowledged records is in the file: what a kill leaves."""
    with open(path, "r+b") as file:
        kept = mmap.mmap(file.fileno(), COUNT.size)
    sender, acked, sent = int(sender), None, 0
    driver = open_driver("udp")
    driver.listen(ADDRESSES[1], port(sender))
    link = Buffered(driver.dial(driver.resolve(f"{ADDRESSES[0]}:5001")[0]))
    link.out += COUNT.pack(sender)
    while True:
        driver.pump(time.monotonic())
        link.work()
        while count := link.take(COUNT):
            if acked is None:                       # the answer to hello
                before, = COUNT.unpack(kept[:])
                assert count[0] >= before, f"{before} acknowledged, {count[0]} are there"
                sent = count[0]
            acked, = count
            kept[:] = COUNT.pack(acked)
        while acked is not None and sent < acked + AHEAD:
            sent += 1
            data = payload(sender, sent)
            link.out += RECORD.pack(sent, len(data)) + data
        pause(driver, 0.05)


def pause(driver, limit):
    wait = driver.timeout(time.monotonic())
    select.select([driver], [], [], max(0.0, limit if wait is None else min(wait, limit)))


def soak(seconds, seed=1, every=2.0):
    """The receiver's last words a second; raises when anything was lost or doubled. It goes on
    until two were killed and each got through, however slow the machine."""
    rng, lines = random.Random(seed), []
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, Lab(seed, delay=0.002, rate=12.5e6) as lab:
        files = [Path(folder) / str(sender) for sender in range(SENDERS)]
        for file in files:
            file.write_bytes(bytes(COUNT.size))

        def start(sender):
            return lab.start(1, sys.executable, __file__, "send", sender, files[sender])
        receiver = lab.start(0, sys.executable, __file__, "receive", stdout=subprocess.PIPE,
                             text=True)
        lines.append(json.loads(receiver.stdout.readline()))
        senders, stopped = [start(sender) for sender in range(SENDERS)], set()
        kills, next_kill = 0, time.monotonic() + every
        while time.monotonic() < end or kills < 2 or not all(lines[-1]["counts"]):
            line = receiver.stdout.readline()
            assert line, f"the receiver ended with {receiver.wait()}: see its words above"
            lines.append(json.loads(line))
            if time.monotonic() < next_kill:
                continue
            next_kill = time.monotonic() + every * rng.uniform(0.5, 1.5)
            lab.faults(**{"delay": 0.002, "rate": 12.5e6} | rng.choice(FAULTS))
            for sender in stopped:
                senders[sender].send_signal(signal.SIGCONT)
            stopped.clear()
            victim = rng.randrange(SENDERS)
            assert senders[victim].poll() in (None, 1), "a sender may lose its peer, no more"
            if rng.random() < 0.2:
                senders[victim].send_signal(signal.SIGSTOP)
                stopped.add(victim)
            else:
                senders[victim].kill()
                senders[victim].wait()
                senders[victim] = start(victim)
                kills += 1
        for sender, file in enumerate(files):
            assert COUNT.unpack(file.read_bytes())[0] <= lines[-1]["counts"][sender] + AHEAD
    return kills, lines


def main(seconds, seed=1):
    kills, lines = soak(float(seconds), int(seed))
    print(f"{seconds} s, {kills} kills, records {lines[-1]['counts']}")
    for name in ("rss", "threads", "descriptors", "connections"):
        values = [line[name] for line in lines]
        parts = [max(values[len(values) * at // 4:len(values) * (at + 1) // 4]) for at in range(4)]
        print(f"{name}: most in each quarter {parts}")


if __name__ == "__main__":
    {"receive": receive, "send": send}.get(sys.argv[1], main)(
        *sys.argv[1 if sys.argv[1].isdigit() else 2:])
