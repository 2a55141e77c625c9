"""`minidist conformance` passes our workers, and finds out those that break a rule."""
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minidist_transports import conformance
from test_interop import NODE

HERE = Path(__file__).parent / "interop"
NODE_WORKER = [NODE, str(HERE / "worker.mjs"), "conformance"]
PYTHON_WORKER = [sys.executable, str(HERE / "worker.py"), "conformance"]


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))


# (All stages for all would take minutes; the others are one command away.)
@pytest.mark.parametrize("worker, role, transport, only, lacks", [
    (NODE_WORKER, "coordinator", "tcp", "", ("float16", "bool")),
    (NODE_WORKER, "peer", "udp", "10.", ()), (NODE_WORKER, "peer", "tcp", "9.4", ()),
    (PYTHON_WORKER, "peer", "udp", "10.", ()), (PYTHON_WORKER, "peer", "udp", "9.4", ()),
    (PYTHON_WORKER, "coordinator", "tcp", "9.3", ()),
], ids=["node", "node-as-0-udp", "node-as-0", "python-as-0-udp", "python-servers", "python"])
def test_workers_that_keep_the_rules(worker, role, transport, only, lacks, capsys):
    conformance.run(worker, transport, role, only)
    out = capsys.readouterr().out
    failed = [line.split()[-1] for line in out.splitlines() if line.startswith("FAILED")]
    assert tuple(failed) == lacks, out
    assert conformance.selected(transport, role, only)


FAULTS = [
    ("same_nonce", "coordinator", "tcp", "has new nonces", "6-2"),
    ("any_proof", "peer", "tcp", "refuses its own proof, reflected", "6-1"),
    ("skips_all_kinds", "coordinator", "tcp", "refuses kind 99", "4.1-3"),
    ("skips_no_kind", "peer", "tcp", "skips unknown kinds from 128 on", "9.3-1"),
    ("another_job", "coordinator", "tcp", "joins, and leaves", "5-1"),
    ("no_pong", "coordinator", "tcp", "answers PING, and PINGs inside a message", "9.5-1"),
    ("no_ping", "coordinator", "tcp", "sends PING when nothing is heard", "9.5-1"),
    ("no_goodbye", "peer", "tcp", "joins, and leaves", "9.7-1"),
    ("frames_of_any_size", "coordinator", "tcp",
     "sends frames no larger than the other side takes", "4.1-1"),
    ("sums_in_another_way", "coordinator", "tcp", "sums, gathers and waits", "9.3-2"),
    ("checksums_of_fields_alone", "coordinator", "tcp",
     "speaks with checksums, if it has offered them", "5-4"),
    ("steps_from_one", "coordinator", "tcp", "trains in step", "9.8-3"),
    ("pushes_of_no_process", "peer", "tcp", "works with a parameter server", "9.4-1"),
    ("any_welcome", "coordinator", "tcp", "refuses WELCOME of another node", "9.1-1"),
    ("any_cookie", "peer", "udp",
     "drops strangers' datagrams, and answers with less than a third", "10.3-3"),
]


@pytest.fixture(scope="module")
def verdicts():
    """What the partner says of each faulty worker; most of the time is waiting."""
    def judge(case):
        fault, role, transport, name, _ = case
        (stage,) = (each for each in conformance.STAGES if each.what == name)
        command = ["env", f"PYTHONPATH={HERE.parent.parent}", sys.executable,
                   str(HERE / "broken.py"), fault]
        return conformance.verdict(stage, command, transport, role)
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(FAULTS, pool.map(judge, FAULTS)))


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case[0])
def test_workers_that_break_a_rule(case, verdicts):
    first, rule, expected, got, *_ = verdicts[case]
    assert first == f"FAILED  {case[3]}" and rule.split() == ["rule", f"MDP-{case[4]}"], (rule, got)
    assert "expected  " in expected and "got       " in got


def test_command_line(capsys):
    run = [sys.executable, str(HERE.parent.parent / "minidist.py"), "conformance"]
    listed = subprocess.run([*run, "--list", "--as", "peer"], capture_output=True, text=True)
    assert "refuses its own proof, reflected (6-1)" in listed.stdout and listed.returncode == 0
    done = subprocess.run([*run, "--only", "joins, and", "--", *NODE_WORKER],
                          capture_output=True, text=True)
    assert done.returncode == 0 and "1 of 1 stages passed" in done.stdout, done
    for arguments, text in ((["--", "/no/such/worker"], "/no/such/worker"),
                            ([], "which command")):
        done = subprocess.run([*run, *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and text in done.stderr
