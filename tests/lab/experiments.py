"""What is tried in the lab, and what came of it: run.py prints it, test_lab.py judges it."""
import bisect
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from network import ADDRESSES, HERE, Lab

LINK = {"delay": 0.005, "rate": 12.5e6, "queue": 125e3}        # 100 Mbit/s, 10 ms, 1 BDP
PLACE, OWN = f"{ADDRESSES[0]}:5001", f"{ADDRESSES[1]}:5002"
WARM = 2.0                              # s that count for nothing: finding the rate
LIMIT = 60.0                            # s until what must happen has happened
BUFFERS = 5 << 20                       # bytes: more than what waits on the way to a receiver
REORDER = {"reorder": 0.1, "reorder_by": 0.005}


class Receiver:
    """A process on host 0 that says what has come; `lines` is what it has said so far."""

    def __init__(self, lab, transport):
        self.process = lab.start(0, sys.executable, HERE / "peer.py", "receive", transport, PLACE,
                                 stdout=subprocess.PIPE, text=True)
        self.lines = []
        self.until(lambda line: True)           # it listens

    def until(self, wanted):
        """The first line from now on that is wanted."""
        end = time.monotonic() + LIMIT
        for text in self.process.stdout:
            line = json.loads(text)
            self.lines.append(line)
            if wanted(line):
                return line
            assert line["at"] < end, f"not within {LIMIT} s; the last: {line}"
        raise AssertionError(f"the receiver ended with {self.process.wait()}")

    def flows(self, stream):
        """Wait for the first bytes of that stream."""
        return self.until(lambda line: line["stream"] == stream and line["bytes"] > 0)

    def total(self, at, stream=0):
        """Bytes that had come at that time."""
        self.until(lambda line: line["at"] >= at and line["stream"] == stream)
        return max((line["bytes"] for line in self.lines
                    if line["stream"] == stream and line["at"] <= at), default=0)

    def rate(self, start, stop, stream=0):
        """Mbit/s between two times."""
        self.until(lambda line: line["at"] >= stop and line["stream"] == stream)
        lines = [line for line in self.lines if line["stream"] == stream]
        first, last = (lines[bisect.bisect_left(lines, at, key=lambda line: line["at"])]
                       for at in (start, stop))
        return (last["bytes"] - first["bytes"]) * 8e-6 / (last["at"] - first["at"])


def sender(lab, transport, control="", own=""):
    return lab.start(1, sys.executable, HERE / "peer.py", "send", transport, PLACE, own, control)


def goodput(transport, control="", seconds=8.0, **faults):
    """Mbit/s on LINK with faults."""
    return share([(transport, control)], seconds, **faults)[0]


def share(flows, seconds, late=0.0, **faults):
    """Mbit/s of each flow, all on one LINK, each begun so many seconds after the one before."""
    with Lab(**LINK | faults) as lab:
        receivers = {kind: Receiver(lab, kind) for kind in {kind for kind, _ in flows}}
        counts, places = Counter(), []
        for kind, control in flows:
            if places:
                time.sleep(late)
            sender(lab, kind, control)
            receivers[kind].flows(counts[kind])
            places.append((receivers[kind], counts[kind]))
            counts[kind] += 1
        start = time.monotonic() + WARM
        time.sleep(WARM + seconds)
        return [place.rate(start, start + seconds, stream) for place, stream in places]


def partition(length):
    """Nothing passes for so many seconds; seconds from then until bytes arrive again."""
    with Lab(**LINK) as lab:
        receiver = Receiver(lab, "udp")
        sender(lab, "udp")
        receiver.flows(0)
        time.sleep(WARM)
        lab.faults(loss=1.0)
        time.sleep(length)
        lab.faults(**LINK)
        healed = time.monotonic()
        last = receiver.total(healed)
        line = receiver.until(lambda line: line["bytes"] > last or "end" in line)
        assert "end" not in line, "the stream lives on"
        return line["at"] - healed


def pause(who, length):
    """The sender (1) or the receiver (0) stops for so long; Mbit/s before, seconds from then
    until more has come than buffers held, Mbit/s after."""
    with Lab(**LINK) as lab:
        receiver = Receiver(lab, "udp")
        process = (receiver.process, sender(lab, "udp"))[who]
        start = receiver.flows(0)["at"]
        time.sleep(WARM)
        process.send_signal(signal.SIGSTOP)
        stop = time.monotonic()
        time.sleep(length)
        process.send_signal(signal.SIGCONT)
        again = time.monotonic()
        before, last = receiver.rate(start, stop), receiver.lines[-1]["bytes"]
        line = receiver.until(lambda line: line["bytes"] > last + BUFFERS or "end" in line)
        assert "end" not in line, "the stream lives on"
        return before, line["at"] - again, receiver.rate(line["at"], line["at"] + WARM)


def restart(times):
    """The sender is killed and started again on its address; each time, seconds until its new
    stream is there, and how its old one ended."""
    found = []
    with Lab(loss=0.02, **LINK) as lab:
        receiver, victim = Receiver(lab, "udp"), sender(lab, "udp", own=OWN)
        receiver.flows(0)
        for number in range(1, times + 1):
            victim.kill()
            victim.wait()
            begun, seen = time.monotonic(), len(receiver.lines)
            victim = sender(lab, "udp", own=OWN)
            come = receiver.flows(number)["at"] - begun
            ends = [line["end"] for line in receiver.lines[seen:]
                    if line["stream"] == number - 1 and "end" in line]
            assert len(ends) == 1, "the old one has ended when the new one carries bytes"
            found.append((come, *ends))
    return found


def kill():
    """The sender is killed for good: seconds until the receiver says so, and its words."""
    with Lab(**LINK) as lab:
        receiver, victim = Receiver(lab, "udp"), sender(lab, "udp")
        receiver.flows(0)
        victim.kill()
        died = time.monotonic()
        line = receiver.until(lambda line: "end" in line)
        return line["at"] - died, line["end"]


def train(transport, epochs, model="lenet", **faults):
    """`minidist train` with a worker on each host: digest of the model's bits, seconds, and what
    passed the wire."""
    root = HERE.parent.parent
    with tempfile.TemporaryDirectory() as folder, Lab(**LINK | faults) as lab:
        start = time.monotonic()
        workers = [lab.start(
            rank, sys.executable, root / "minidist.py", "train", "--transport", transport,
            "--data", "digits", "--model", model, "--epochs", epochs,
            "--save", Path(folder) / "model.safetensors",
            env=os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": "5001", "MINIDIST_KEY": bytes(range(32)).hex(),
                "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL) for rank in range(2)]
        codes = [worker.wait() for worker in workers]
        took = time.monotonic() - start
        assert codes == [0, 0], f"the workers end with {codes}"
        bits = hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()
        return bits, took, lab.faults()
