"""Workers in Node.js, which follow PROTOCOL.md, in one job with workers in Python."""
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import certificates

HERE = Path(__file__).parent
KEY = bytes(range(32)).hex()
NODE = shutil.which("node") or "/usr/bin/node"
if not os.path.exists(NODE):
    if os.environ.get("CI"):
        raise RuntimeError("node is missing: apt-get install nodejs (18 or newer)")
    pytest.skip("node is missing", allow_module_level=True)

PYTHON, SERVER = "python", "server"
COMMANDS = {PYTHON: [sys.executable, str(HERE / "interop" / "worker.py")],
            "node": [NODE, str(HERE / "interop" / "worker.mjs")],
            SERVER: [sys.executable, str(HERE.parent / "minidist.py"), "serve"]}


def free_port(transport):
    kind = socket.SOCK_DGRAM if transport == "udp" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    """Processes that form one job: names of COMMANDS, in the order of their nodes."""

    def __init__(self, transport, *kinds, program=(), port=None, **settings):
        workers = [kind for kind in kinds if kind != SERVER]
        env = {**os.environ, "PYTHONPATH": str(HERE.parent), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(port or free_port(transport)), "WORLD_SIZE": str(len(workers)),
               "MINIDIST_SERVERS": str(len(kinds) - len(workers)), "MINIDIST_TRANSPORT": transport,
               "MINIDIST_KEY": KEY, "MINIDIST_JOB": "interop", "MINIDIST_TIMEOUT": "60",
               **{f"MINIDIST_{name.upper()}": str(value) for name, value in settings.items()}}
        self.processes = []
        for node, kind in enumerate(kinds):
            own = ({"MINIDIST_ROLE": "server", "MINIDIST_NODE": str(node)} if kind == SERVER
                   else {"RANK": str(node)})
            self.processes.append(subprocess.Popen(
                [*COMMANDS[kind], *map(str, program if kind != SERVER else ())],
                env={**env, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def results(self, patience=60):
        """(exit code, what it printed, what it complained of) of each."""
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=patience)
            found.append((process.returncode, out, err))
        return found


def outputs(*arguments, **settings):
    with Job(*arguments, **settings) as job:
        results = job.results()
    assert [code for code, _, _ in results] == [0] * len(results), results
    return results


both = pytest.mark.parametrize("transport", ["tcp", "udp"])


def test_the_other_worker_agrees_with_the_vectors():
    done = subprocess.run([NODE, str(HERE / "interop" / "vectors.mjs")], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 500


@pytest.mark.parametrize("transport, kinds", [
    ("tcp", ("node", "python")), ("udp", ("python", "node", "node")),
    ("tcp", ("node", "python", "node", "python", "node"))])
def test_collectives_have_the_same_bits(transport, kinds):
    results = outputs(transport, *kinds, program=["collectives"])
    lines = [[line for line in out.splitlines() if not line.startswith("reduce_scatter")]
             for _, out, _ in results]
    assert len(lines[0]) > 150 and all(each == lines[0] for each in lines)


@both
@pytest.mark.parametrize("kinds", [("python", "node"), ("node", "python", "node")], ids="-".join)
def test_synchronous_training_has_the_same_bits_after_every_step(transport, kinds):
    results = outputs(transport, *kinds, program=["sync"])
    assert len({out for _, out, _ in results}) == 1
    assert len(set(results[0][1].splitlines())) == 4 * 5 + 1
    assert last_loss(results) < 0.1


@both
@pytest.mark.parametrize("kinds", [("python", "node", SERVER), ("node", "python", SERVER, SERVER)],
                         ids="-".join)
def test_downpour_ends_with_the_same_parameters(transport, kinds):
    results = outputs(transport, *kinds, program=["downpour", 4, 0.05])
    ends = {out.splitlines()[-1] for _, out, _ in results[:2]}
    assert len(ends) == 1 and "end" in ends.pop()
    assert last_loss(results) < 0.15


@pytest.mark.skipif(not certificates.AVAILABLE and not os.environ.get("CI"),
                    reason="openssl is missing")
@pytest.mark.parametrize("kinds", [("python", "node"), ("node", "python")], ids="-".join)
def test_with_tls(kinds):
    files = dict(zip(("tls_cert", "tls_key", "tls_ca"), certificates.certificate()))
    results = outputs("tls", *kinds, program=["sync", 1], **files)
    assert results[0][1] == results[1][1] and "end" in results[0][1]
    files["tls_cert"], files["tls_key"], _ = certificates.certificate("x", signer="another")
    with Job("tls", *kinds, program=["sync", 1], start_timeout=3, **files) as job:
        assert all(code for code, _, _ in job.results())    # (own certificate, another's authority)


@pytest.mark.parametrize("zero", ["python", "node"])
def test_a_missing_rank_is_named(zero):
    with Job("tcp", zero, "node", "python", program=["sync"], start_timeout=2) as job:
        job.processes[2].kill()
        for code, _, err in job.results()[:2]:
            assert code and re.search("(nodes|rank) 2", err), err


def test_a_killed_worker_does_not_stop_downpour():
    with Job("tcp", "python", "node", SERVER, program=["downpour", 40, 0.02]) as job:
        assert job.processes[1].stdout.readline().startswith("step 0")
        job.processes[1].kill()
        (code, out, err), _, (served, _, _) = job.results()
        assert code == served == 0 and "end" in out and float(err.split()[-1]) < 0.15, err


def last_loss(results):
    (text,) = [err for _, _, err in results if err.startswith("loss")]
    return float(text.split()[1])


@pytest.mark.parametrize("kinds", [("python", "node"), ("node", "python")], ids="-".join)
def test_a_mismatch_is_an_error_on_both(kinds):
    with Job("tcp", *kinds, program=["mismatch"]) as job:
        for code, _, err in job.results():
            assert code and ("MISMATCH" in err or "every rank must make the same calls" in err), err


@pytest.mark.parametrize("transport, victim", [("tcp", 0), ("tcp", 1), ("udp", 1)])
def test_a_killed_worker_is_named_by_the_other(transport, victim):
    with Job(transport, "python", "node", program=["wait"], heartbeat_timeout=2) as job:
        for process in job.processes:
            assert process.stdout.readline() == "ready\n"
        job.processes[victim].kill()
        code, _, err = job.results()[1 - victim]
        assert code and re.search(f"(node|rank) {victim} (lost|is gone)", err), err
