"""Real processes over a wire that spoils what it carries: short forms of lab/run.py and soak.py.

What they do must be right here; how fast it is, the programs say. It needs Linux and root (or a
container that may make network namespaces); elsewhere these tests are skipped.
"""
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / "lab")]
import experiments  # noqa: E402
import network  # noqa: E402
import soak  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def lab():
    if reason := network.missing():
        pytest.skip(reason)
    experiments.WARM, warm = 1.0, experiments.WARM
    yield
    experiments.WARM = warm


def test_the_wire_does_what_is_asked():
    """Sixteen bytes to a port where nobody listens: an ICMP message comes back for each."""
    shout = ("import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
             "for _ in range(3000): s.sendto(bytes(16), ('10.77.0.1', 9)); time.sleep(1e-4)")
    with network.Lab(loss=0.1, duplicate=0.2) as lab:
        assert lab.start(1, sys.executable, "-c", shout).wait() == 0
        time.sleep(0.5)
        back, there = lab.faults(loss=1.0)              # (host 1 is the second device)
        assert there["sent"] == 3000 and there["bytes"] == 3000 * (20 + 8 + 16)
        assert 200 < there["lost"] < 400
        assert lab.start(1, sys.executable, "-c", shout).wait() == 0
        assert lab.faults()[1]["lost"] == there["lost"] + 3000


def test_nothing_of_a_lab_remains():
    with network.Lab() as lab:
        sleeper = lab.start(0, "sleep", "100")
        assert subprocess.run(["ip", "link"], capture_output=True, text=True).stdout.count(
            "lab") == 0, "it is in namespaces of its own"
    assert sleeper.returncode == -9 and lab.wire.returncode == 0


def test_noise_holds_udp_less_than_the_kernels_tcp():
    udp, cubic = experiments.share([("udp", ""), ("tcp", "cubic")], 3.0, loss=0.05)
    assert udp > cubic


def test_after_a_partition_the_stream_goes_on():
    assert experiments.partition(1.0) > 0


@pytest.mark.parametrize("who", [0, 1], ids=["receiver", "sender"])
def test_a_process_that_was_stopped_goes_on(who):
    experiments.pause(who, 1.0)


def test_a_killed_sender_is_replaced_on_its_address():
    for _, words in experiments.restart(2):
        assert words == "the peer has restarted"


def test_training_over_loss_and_reordering_gives_the_same_bits():
    plain, _, _ = experiments.train("tcp", 1, "mlp")
    bits, _, (_, back) = experiments.train("udp", 1, "mlp", loss=0.05, **experiments.REORDER)
    assert bits == plain and back["lost"] > 10


def test_killed_senders_lose_and_double_nothing():
    _, lines = soak.soak(5.0, every=1.0)
    assert len({line["threads"] for line in lines}) == 1    # no growth; the test's own count too
    assert max(line["descriptors"] for line in lines) == lines[0]["descriptors"]
