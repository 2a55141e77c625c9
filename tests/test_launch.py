"""Groups of processes: how they start, what they print, how they end.

What `kill`, Ctrl-C and an occupied port do, and rows of the list of faults that
distributed trainers meet; these tests carry the row in their name (d24 ...). Each
test gives its processes a mark in their environment and looks for it in /proc
afterwards: nothing may be left running.
"""
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import conftest  # noqa: F401  finds minidist_transports, also in workers that import this
from minidist_transports import launch
from minidist_transports.remote import NotPortable

TESTS = Path(__file__).parent
LAUNCHER = [sys.executable, "-c",
            f"import sys; sys.path.insert(0, {str(TESTS)!r}); import conftest\n"
            "from minidist_transports import launch; sys.exit(launch.main())"]
MARK = "MINIDIST_TEST_MARK"

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")


def alive(mark):
    """Processes, other than zombies, whose environment holds the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                env = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in env.split(b"\0") and state != "Z":
                found.append(int(entry.name))
    return found


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


@pytest.fixture
def mark(monkeypatch):
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    for name in launch.BLAS_THREADS:
        monkeypatch.delenv(name, raising=False)
    yield mark
    monkeypatch.delenv(MARK)
    left = alive(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left running"


@pytest.fixture
def start(mark, tmp_path):
    """start(script, *flags): a launcher that runs the script on its workers."""
    def start(script, *flags, args=(), **popen):
        path = tmp_path / "script.py"
        path.write_text(script)
        popen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        return subprocess.Popen([*LAUNCHER, *flags, str(path), *args], text=True, **popen)
    return start


@pytest.fixture
def run(start):
    def run(script, *flags, args=()):
        with start(script, *flags, args=args) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err
    return run


# ---- start ------------------------------------------------------------------

def test_d36_a_clean_run_prints_what_the_workers_print_and_nothing_else(run):
    code, out, err = run("import os, sys; print('hello', os.environ['RANK'], sys.argv[1:])",
                         "--nproc-per-node", "3", args=["--lr", "1"])
    assert sorted(out.splitlines()) == [f"[{r}] hello {r} ['--lr', '1']" for r in range(3)]
    assert (code, err) == (0, "")


SHOW_ENV = """
import os
import re
names = '''RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MINIDIST_TRANSPORT
MINIDIST_SERVERS MINIDIST_ROLE MINIDIST_GENERATION OMP_NUM_THREADS'''.split()
print({name: os.environ.get(name) for name in names})
assert len(bytes.fromhex(os.environ['MINIDIST_KEY'])) == 32
assert int(os.environ['MASTER_PORT']) > 0
print('JOB', os.environ['MINIDIST_JOB'], os.environ['MINIDIST_KEY'])
"""


def test_the_environment_is_torchruns(run):
    code, out, err = run(SHOW_ENV, "--nproc_per_node=2")
    assert code == 0, err
    cores = len(os.sched_getaffinity(0))
    for rank in "0", "1":
        expected = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MINIDIST_TRANSPORT": "tcp",
            "MINIDIST_SERVERS": "0", "MINIDIST_ROLE": "worker", "MINIDIST_GENERATION": "0",
            "OMP_NUM_THREADS": str(max(1, cores // 2))}
        assert f"[{rank}] {expected}" in out
    jobs = {line.partition("JOB")[2] for line in out.splitlines() if "JOB" in line}
    assert len(jobs) == 1


def test_nothing_of_an_outer_run_gets_in(run, monkeypatch):
    for name in launch.OURS:
        monkeypatch.setenv(name, "stale")
    code, out, err = run("import os; print([k for k, v in os.environ.items() if v == 'stale'])")
    assert out == "[0] []\n", err


def test_each_run_has_its_own_key_and_name(run):
    jobs = {run(SHOW_ENV)[1].partition("JOB")[2] for _ in range(2)}
    assert len(jobs) == 2


def test_blas_threads_that_the_user_set_stay(run, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    script = "import os; print(*map(os.environ.get, ['OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS']))"
    assert run(script)[1] == "[0] 5 None\n"


def test_module_and_no_python(start, mark, tmp_path):
    flags = {"-m": "platform", "--no-python": "uname"}
    for flag, what in flags.items():
        done = subprocess.run([*LAUNCHER, flag, what], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "[0] Linux" in done.stdout, done


def test_two_machines(mark, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_KEY", "ab" * 32)
    script = tmp_path / "s.py"
    script.write_text("import os; print(*map(os.environ.get, "
                      "'RANK LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_PORT MINIDIST_KEY'.split()))")
    port = str(free_port())
    for rank in 0, 1:
        done = subprocess.run(
            [*LAUNCHER, "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=2",
             "--master-port", port, str(script)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [
            f"[{r}] {r} {r % 2} 4 {rank} {port} {'ab' * 32}" for r in (2 * rank, 2 * rank + 1)]


@pytest.mark.parametrize("flags, says", [
    (["--max-restarts", "-1"], "at least 1 worker and 0 restarts"),
    (["--nproc-per-node", "3:2"], "at least 1 worker and 0 restarts"),
    (["--nproc-per-node", ":2"], "a number is needed"),
    (["--nnodes", "2", "--max-restarts", "1"], "on one POSIX machine"),
    (["--nnodes", "1:4"], "does not grow"),
    (["--nnodes", "2"], "MINIDIST_KEY"),
    (["--nnodes", "2", "--node-rank", "2"], "must be 0 to 1"),
    (["--nproc-per-node", "0"], "at least 1 worker"),
    (["--nproc-per-node", "gpu"], "a number is needed"),
    (["--nproc-per-node", "²"], "a number is needed"),
    (["--master-port", "99999"], "ports are 1 to 65535"),
    (["--log-dir", "/dev/null/x"], "--log-dir /dev/null/x"),
    (["--local-ranks-filter", "x"], "numbers joined by commas"),
    (["--servers", "1"], "server_command"),
    (["--transport", "pigeon"], "no transport is called 'pigeon'; there are pipe, shm, tcp, udp"),
    (["--master-addr", "192.0.2.1"], "must be an address"),
])
def test_flags_that_cannot_be_met(run, flags, says):
    code, out, err = run("print('ran')", *flags)
    assert code == 2 and says in err and "Traceback" not in err and out == ""


def test_a_script_that_is_not_there(mark):
    done = subprocess.run([*LAUNCHER, "nowhere.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no script 'nowhere.py'" in done.stderr
    done = subprocess.run([*LAUNCHER, "--no-python", "nowhere"], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 2 and "cannot start rank 0: 'nowhere'" in done.stderr


def free_port(kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_a_port_in_use_is_reported_before_anything_starts(run, transport):
    kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as other:
        other.bind(("127.0.0.1", 0))
        if transport == "tcp":
            other.listen()
        port = other.getsockname()[1]
        code, out, err = run("print('ran')", "--transport", transport, "--master-port", str(port))
    assert code == 2 and f"port {port}" in err and "--master-port" in err and out == ""


@pytest.mark.parametrize("address", ["localhost", "::1", "127.0.0.1"])
def test_d22_names_and_ipv6(run, address):
    code, out, err = run("import os, socket\n"
                         "where = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
                         "socket.create_connection(where, timeout=5).close()\nprint(where[0])",
                         "--master-addr", address)
    assert (code, out) == (0, f"[0] {address}\n"), err


@pytest.mark.parametrize("transport, kind", [("tcp", "SOCK_STREAM"), ("udp", "SOCK_DGRAM")])
def test_node_0_inherits_the_listening_socket(run, transport, kind):
    code, out, err = run(f"""
import os, socket
fd = os.environ.get('MINIDIST_LISTEN_FD')
assert (fd is not None) == (os.environ['RANK'] == '0')
if fd:
    sock = socket.socket(fileno=int(fd))
    assert sock.type == socket.{kind}
    assert sock.getsockname() == ('127.0.0.1', int(os.environ['MASTER_PORT']))
    if sock.type == socket.SOCK_STREAM:
        socket.create_connection(sock.getsockname(), timeout=5)
        sock.accept()
    print('listens')
""", "--transport", transport, "--nproc-per-node", "2")
    assert (code, out) == (0, "[0] listens\n"), err


def test_pipe_mesh(run):
    """Every pair is joined in both directions, and nobody else holds the ends."""
    code, out, err = run("""
import os
import re
me = os.environ['RANK']
pipes = {p: (int(r), int(w)) for p, r, w in
         (entry.split(':') for entry in os.environ['MINIDIST_PIPES'].split(','))}
assert sorted([*pipes, me]) == ['0', '1', '2', '3']
for peer, (_, w) in pipes.items():
    os.write(w, f'{me}>{peer}'.encode())
    os.close(w)
for peer, (r, _) in pipes.items():
    with open(r) as file:       # to its end: no process has kept the other end
        assert file.read() == f'{peer}>{me}'
print('joined')
""", "--transport", "pipe", "--nproc-per-node", "4")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{r}] joined" for r in range(4)]


def test_workers_have_no_other_descriptors(run):
    code, out, _ = run("import os; print(len(os.listdir('/proc/self/fd')))",
                       "--transport", "udp", "--nproc-per-node", "3")
    assert code == 0 and sorted(out.splitlines()) == ["[0] 5", "[1] 4", "[2] 4"]


# ---- output -----------------------------------------------------------------

def feed(*chunks):
    lines, out = launch.Lines(), []
    for chunk in chunks:
        out += lines.feed(chunk)
    return out, lines.bar, lines.rest


def test_lines_are_what_a_terminal_would_show():
    assert feed(b"one\ntw", b"o\n", b"three") == ([b"one", b"two"], b"", b"three")
    assert feed(b"\r 10%", b"\r 20%")[1] == b" 20%"
    assert feed(b"\r 10%", b"\r 20%", b"\r100%\n") == ([b"100%"], b"", b"")
    assert feed(b"10%\r", b"20%\r")[1] == b"20%"
    assert feed(b"dos\r", b"\nunix\n") == ([b"dos", b"unix"], b"", b"")
    assert feed(b"\r" + b" 50%\r" * 100)[2] == b"\r 50%\r"  # history is not kept
    assert [len(line) for line in feed(b"x" * launch.MAX_LINE, b"y")[0]] == [launch.MAX_LINE + 1]


def test_d27_lines_of_different_workers_never_mix(run):
    """Long lines, and lines that are written in pieces."""
    code, out, err = run("""
import os, sys
me = os.environ['RANK']
for i in range(300):
    for piece in 'abc':
        sys.stdout.write(piece * 700 + me)
        sys.stdout.flush()
    sys.stdout.write('\\n')
sys.stdout.write('no newline at the end')
""", "--nproc-per-node", "4")
    assert code == 0
    lines = out.splitlines()
    for r in range(4):
        mine = [line for line in lines if line.startswith(f"[{r}] ")]
        whole = "".join(piece * 700 + str(r) for piece in "abc")
        assert mine == [f"[{r}] {whole}"] * 300 + [f"[{r}] no newline at the end"]
    assert len(lines) == 4 * 301


def test_stderr_stays_stderr_and_a_bar_leaves_one_line(run):
    code, out, err = run("""
import sys
for i in range(50):
    sys.stderr.write(f'\\r {i}%')
    sys.stderr.flush()
sys.stderr.write('\\n')
print('out')
""")
    assert (code, out, err) == (0, "[0] out\n", "[0]  49%\n")


def test_on_a_terminal_a_bar_is_redrawn_and_other_lines_stand_above_it(mark, tmp_path):
    script = tmp_path / "bar.py"
    script.write_text("import sys, time\nfor i in range(3):\n"
                      "    sys.stderr.write(f'\\r {i}0%'); sys.stderr.flush(); time.sleep(0.1)\n"
                      "print('line', flush=True)\ntime.sleep(0.1)\nsys.stderr.write('\\r 30%\\n')")
    ours, theirs = os.openpty()
    with subprocess.Popen([*LAUNCHER, str(script)], stdout=theirs, stderr=theirs) as process:
        process.wait(60)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 1 << 16):
            shown += data
    except OSError:
        pass  # Linux' way to say that the terminal has ended
    os.close(ours)
    assert b"\r[0]  00%\x1b[K" in shown and b"\r[0]  20%\x1b[K" in shown
    assert b"\r\x1b[K[0] line\r\n" in shown and shown.endswith(b"[0]  30%\r\n")


def test_log_dir_and_filter(run, tmp_path):
    code, out, err = run("import os, sys; print('out', os.environ['RANK'])\n"
                         "print('err', os.environ['RANK'], file=sys.stderr)",
                         "--nproc-per-node", "3", "--local-ranks-filter", "0,2",
                         "--log-dir", str(tmp_path / "logs"))
    assert sorted(out.splitlines()) == ["[0] out 0", "[2] out 2"]
    assert sorted(err.splitlines()) == ["[0] err 0", "[2] err 2"]
    [job] = (tmp_path / "logs").iterdir()
    for r in range(3):
        assert (job / str(r) / "stdout.log").read_text() == f"out {r}\n"
        assert (job / str(r) / "stderr.log").read_text() == f"err {r}\n"


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@needs_full
def test_output_that_has_no_room_ends_the_run(start):
    with open("/dev/full", "w") as full:
        process = start("print('something')", stdout=full)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGPIPE
    assert err == ("minidist: output cannot be written: [Errno 28] No space left on device\n"
                   "minidist: SIGPIPE: ended rank 0\n")


@needs_full
def test_a_log_that_has_no_room_ends_alone(mark, tmp_path, capfd):
    (tmp_path / "run" / "0").mkdir(parents=True)
    (tmp_path / "run" / "0" / "stdout.log").symlink_to("/dev/full")
    assert launch.run(job("for i in range(9999): print(i)", log_dir=str(tmp_path),
                          id="run")).code == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 9999 and err.count("\n") == 1
    assert err.endswith("stdout.log ends here: No space left on device\n")


def test_a_reader_that_stops_reading_ends_the_run(start):
    """`minidist launch ... | head -1`."""
    process = start("import time\nfor i in range(10**9):\n    print(i); time.sleep(0.01)")
    assert process.stdout.readline() == "[0] 0\n"
    process.stdout.close()
    assert process.wait(20) == 128 + signal.SIGPIPE
    process.stderr.close()


# ---- failure ----------------------------------------------------------------

LOSING = """
import os, sys, time
class PeerLost(RuntimeError): pass
PeerLost.__module__ = 'minidist_transports'
me = os.environ['RANK']
if me == '1':
    time.sleep(0.3)
    raise PeerLost('node 2 lost (connection closed) while node 1 was in all_reduce #57')
if me == '2':
    import atexit
    atexit.register(time.sleep, 0.6)    # slower to end than those who lose it
    raise ValueError('the cause')
time.sleep(60)
"""


def test_d37_the_root_cause_comes_once_and_last(run):
    """Rank 2's own error, in full, although rank 1, its victim, ended first."""
    code, out, err = run(LOSING, "--nproc-per-node", "3")
    lines = err.splitlines()
    assert code == 1
    assert lines[0].startswith("[1] minidist_transports.PeerLost: node 2 lost")
    assert lines[1].startswith("minidist: root cause: rank 2 ended with exit code 1")
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the cause"
    assert err.count("Traceback") == err.count("ValueError: the cause") == 1
    assert out == ""


def test_d37_whoever_leaves_slowly_is_a_line_too(run):
    """Rank 1 has said that it lost rank 2, and is ended by us before it is gone."""
    slow = "import atexit\nif me == '1': atexit.register(time.sleep, 60)\nif me"
    code, out, err = run(LOSING.replace("if me", slow, 1), "--nproc-per-node", "3")
    lines = err.splitlines()
    assert code == 1 and err.count("Traceback") == 1
    assert lines[0].startswith("[1] minidist_transports.PeerLost: node 2 lost")
    assert lines[1].startswith("minidist: root cause: rank 2 ended with exit code 1")
    assert lines[-1] == "ValueError: the cause"


def test_who_ended_in_order_while_others_needed_it_is_mentioned(run):
    code, out, err = run(LOSING.replace("    import atexit", "    sys.exit(0)"),
                         "--nproc-per-node", "3")
    assert code == 1 and "[2] had ended with exit code 0, while others needed it\n" in err


def test_those_who_lose_the_failed_one_have_time_to_say_so(run):
    code, out, err = run(LOSING.replace("atexit.register(time.sleep, 0.6)", "pass"),
                         "--nproc-per-node", "3")
    assert code == 1 and "[1] minidist_transports.PeerLost: node 2 lost" in err
    assert err.endswith("ValueError: the cause\n")


def test_a_traceback_behind_an_unfinished_bar(run):
    code, out, err = run("import sys; sys.stderr.write('\\r 10%'); 1 / 0")
    lines = err.splitlines()
    assert lines[:2] == ["[0]  10%", "minidist: root cause: rank 0 ended with exit code 1. "
                         "Its last lines:"]
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero" and err.count("Traceback") == 1


def test_the_same_error_on_all_is_shown_once(run):
    code, out, err = run("def f(): raise KeyError('x')\nf()", "--nproc-per-node", "3")
    assert code == 1 and err.count("Traceback") == 1
    assert len([line for line in err.splitlines() if line.endswith("] KeyError: 'x'")]) == 2
    assert err.endswith("KeyError: 'x'\n")


def test_exit_code_and_last_lines_without_a_traceback(run):
    code, out, err = run("import sys; print('no disk', file=sys.stderr); sys.exit(7)")
    assert code == 7
    assert err.endswith("rank 0 ended with exit code 7. Its last lines:\nno disk\n")


def test_a_signal_is_named(run):
    code, out, err = run("import os; os.kill(os.getpid(), 9)")
    assert code == 137 and "rank 0 was killed by signal 9 (SIGKILL)" in err
    assert "out of memory" in err
    assert run("import os; os.kill(os.getpid(), 10)")[0] == 138


def test_a_traceback_that_is_not_the_end_is_shown(run, monkeypatch):
    """Of a worker that reports an exception and goes on; held back a moment at most."""
    code, out, err = run("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError:\n"
                         "    traceback.print_exc()\nprint('goes on')")
    assert code == 0 and out == "[0] goes on\n"
    assert err.splitlines()[0] == "[0] Traceback (most recent call last):"
    assert err.splitlines()[-1] == "[0] ZeroDivisionError: division by zero"


def test_a_worker_that_ends_well_does_not_end_the_others(run):
    code, out, err = run("import os, time\nif os.environ['RANK'] == '0': time.sleep(1.5)\n"
                         "print('done')", "--nproc-per-node", "2")
    assert (code, out, err) == (0, "[1] done\n[0] done\n", "")


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print(os.getpid())
time.sleep(60)
"""


def test_d24_a_worker_that_ignores_sigterm_is_killed_with_its_helpers(run):
    code, out, err = run(
        STUBBORN.replace("print(os.getpid())", "if os.environ['RANK'] == '1': sys.exit(3)"),
        "--nproc-per-node", "2", "--shutdown-timeout", "0.5")
    assert code == 3
    assert "rank 0 had to be killed, 0.5 s after SIGTERM" in err


def test_a_stopped_worker_is_ended_too(start, mark):
    process = start("import os, signal, time\nprint('ready')\nif os.environ['RANK'] == '0':\n"
                    "    os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
                    "--nproc-per-node", "2")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=8)  # well before the ten seconds of grace
    assert process.returncode == 143


# ---- signals to the launcher ------------------------------------------------

STOPS = """
import os, signal, time
if os.environ["RANK"] == "1":
    if os.fork() == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    print("continued")
    os.kill(os.getpid(), signal.SIGSTOP)
print("done")
"""


def test_a_worker_that_stays_stopped_after_the_others_have_left_is_ended(run):
    """Nobody loses it, so nobody fails; but it is not done either."""
    code, out, err = run(STOPS, "--nproc-per-node", "2", "--shutdown-timeout", "1")
    assert (code, sorted(out.splitlines())) == (143, ["[0] done", "[1] continued"])
    assert err.startswith("minidist: rank 1 was stopped (SIGSTOP) and not continued for 1 s")
    assert err.endswith("minidist: root cause: rank 1 was killed by signal 15 (SIGTERM)\n")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143),
                                          (signal.SIGHUP, 129)])
def test_d24_one_signal_ends_all(start, mark, number, code):
    process = start("import time; print('ready'); time.sleep(60)", "--nproc-per-node", "2")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert err == f"minidist: {number.name}: ended rank 0, rank 1\n"


def test_workers_may_use_the_grace(start):
    process = start("import signal, sys, time\ndef end(*_):\n    time.sleep(0.5); print('saved')\n"
                    "    sys.exit(0)\nsignal.signal(signal.SIGTERM, end)\nprint('ready')\n"
                    "time.sleep(60)")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "[0] saved\n")


def test_d24_a_second_ctrl_c_kills(start, mark):
    process = start(STUBBORN, "--nproc-per-node", "2", "--shutdown-timeout", "60")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None and len(alive(mark)) >= 4
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130


def test_the_terminals_ctrl_c_reaches_the_launcher_alone(start, mark):
    process = start("import os; print(os.getpgrp() == os.getpid() == os.getsid(0))")
    assert process.communicate(timeout=20)[0] == "[0] True\n"


def test_d24_kill_9_of_the_launcher_ends_the_workers(start, mark):
    """Stubborn, stopped and with helpers: the guard needs no cooperation."""
    process = start(STUBBORN, "--nproc-per-node", "2", "--shutdown-timeout", "0.5")
    workers = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    os.kill(workers[0], signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: not alive(mark))


def test_nohup_stays_in_force(mark, tmp_path):
    script = tmp_path / "s.py"
    script.write_text("import time; print('ready'); time.sleep(1); print('done')")
    process = subprocess.Popen(["nohup", *LAUNCHER, str(script)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=20)[0] == "[0] done\n"
    assert process.returncode == 0


# ---- servers ----------------------------------------------------------------

def job(script, **fields):
    return launch.Job([sys.executable, "-c", script], **fields)


SERVER = "import os; print(os.environ['MINIDIST_ROLE'], os.environ['MINIDIST_NODE'])"


def test_servers_are_nodes_behind_the_workers(mark, capfd):
    report = launch.run(job("import os; print(os.environ['MINIDIST_SERVERS'])", workers=2,
                            servers=2, server_command=[sys.executable, "-c", SERVER]))
    assert report.code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[0] 2", "[1] 2", "[server 0] server 2", "[server 1] server 3"]


def test_a_server_that_does_not_end_is_ended(mark, capfd):
    report = launch.run(job("", workers=1, servers=1, grace=0.5, server_command=[
        sys.executable, "-c", "import time; time.sleep(60)"]))
    assert report.code == 0 and "server 0 still ran 0.5 s after the last worker" in report.text


def test_a_server_that_fails_is_the_root_cause(mark, capfd):
    report = launch.run(job("import time; time.sleep(60)", workers=1, servers=1, server_command=[
        sys.executable, "-c", "raise OSError('disk full')"]))
    assert report.code == 1 and "root cause: server 0 " in report.text
    assert report.text.endswith("OSError: disk full")


# ---- functions --------------------------------------------------------------

OFFSET = 10
TABLE = {"a": np.arange(3), ("b", 1): [1.5, None, True, b"x", {2}, 1j]}


def double(x):
    return 2 * x


class Scale:
    factor = 3

    def __call__(self, x):
        return self.factor * x


def everything(x, *, key="RANK"):
    rank = int(os.environ[key])
    return {"rank": rank, "value": Scale()(double(x)) + OFFSET, "table": TABLE}


def check_everything(results):
    assert [r["rank"] for r in results] == [0, 1]
    for result in results:
        np.testing.assert_array_equal(result["value"], 6 * np.arange(4.0) + 10)
        table = result["table"]
        assert table["a"].dtype == np.arange(3).dtype and table["a"].tolist() == [0, 1, 2]
        assert table["b", 1] == [1.5, None, True, b"x", {2}, 1j]


def test_an_importable_function(mark):
    check_everything(launch.launch(everything, args=(np.arange(4.0),)))


NOTEBOOK = """
import linecache, sys
sys.path.insert(0, {tests!r})
import conftest
from minidist_transports import launch

def cell(number, text):     # what IPython does with a cell
    name = f'<ipython-input-{{number}}>'
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, 'exec'), globals())

source = open({here!r}).read()
part = lambda start, end: source[source.index(start):source.index(end)]
cell(1, 'import os\\nimport numpy as np\\nimport conftest as helper')
cell(1.5, part('OFFSET =', 'def double'))
cell(2, part('def double', 'def everything'))
cell(3, part('def everything', 'def check_everything'))
cell(4, part('def check_everything', 'def test_an_importable'))
cell(5, 'check_everything(launch.launch(everything, args=(np.arange(4.0),)))')
cell(6, '''
def even(n):
    return True if n == 0 else odd(n - 1)

def odd(n):
    return False if n == 0 else even(n - 1)
''')
cell(7, "assert launch.launch(even, args=(4,), workers=1) == [True]")
cell(8, "model = object()\\ndef f(): return model")
cell(9, "try: launch.launch(f)\\nexcept TypeError as e: print(e)")
cell(10, '''
def outer():
    seen = [1, 2]
    def inner(x):
        return seen + [y * helper.ROOT.is_dir() for y in range(x)]
    return inner
''')
cell(11, "print(launch.launch(outer(), args=(3,), workers=1))")
cell(12, "def g():\\n    raise ValueError('inside')")
cell(13, "try: launch.launch(g)\\nexcept launch.LaunchError as e: print(e)")
"""


def test_functions_of_a_notebook(mark, tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.format(tests=str(TESTS), here=__file__))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == ("f names 'model', which can't travel to the workers: a object is none of "
                        "None, numbers, strings, bytes, lists, tuples, sets, dicts, arrays and "
                        "Tensors. Make it inside the function")
    assert lines[1] == "[[1, 2, 0, 1, 2]]"
    assert re.fullmatch(r"rank [01]: ValueError: inside", lines[2])
    assert "minidist: root cause: rank" in done.stdout
    assert "raise ValueError('inside')" in done.stdout and lines[-1] == "ValueError: inside"


def wrong_result():
    return object()


def sleeps():
    time.sleep(60)


def prints():
    print("hello")


def leaves():
    sys.exit(0)


def test_what_cannot_travel_is_named(mark):
    with pytest.raises(NotPortable, match="made with `def`"):
        launch.launch(lambda: 1)
    with pytest.raises(NotPortable, match="an argument of prints"):
        launch.launch(prints, args=(object(),))
    with pytest.raises(launch.LaunchError, match="rank 0 ended, with exit code 0, before leaves"):
        launch.launch(leaves, workers=1)
    with pytest.raises(launch.LaunchError, match="what wrong_result returned can't travel"):
        launch.launch(wrong_result, workers=1)


def fails_alone():
    if os.environ["RANK"] == "1":
        raise ValueError("of its own")


def test_d37_an_error_begins_with_its_cause(mark):
    with pytest.raises(launch.LaunchError) as caught:
        launch.launch(fails_alone)
    assert str(caught.value).startswith("rank 1: ValueError: of its own\n")


def test_output_of_a_function_appears_here(mark, capsys):
    assert launch.launch(prints) == [None, None]
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello", "[1] hello"]


def multiplies():
    a = np.ones((600, 600))
    return float((a @ a).sum())


def test_d26_a_launcher_whose_blas_has_threads(mark):
    """Workers are new programs. A forked one would hang in the locks of those threads."""
    multiplies()
    assert launch.launch(multiplies, timeout=60) == [600.0 ** 3] * 2


def test_a_function_has_a_timeout(mark):
    with pytest.raises(launch.LaunchError, match="rank 0, rank 1 still ran after 1 s"):
        launch.launch(sleeps, timeout=1)


def test_ctrl_c_in_a_notebook(mark, tmp_path):
    script = tmp_path / "s.py"
    script.write_text(f"import sys, time; sys.path.insert(0, {str(TESTS)!r}); import conftest\n"
                      "from minidist_transports import launch\n"
                      "def f():\n    print('ready')\n    time.sleep(60)\n"
                      "try: launch.launch(f, workers=1)\n"
                      "except KeyboardInterrupt: print('interrupted')")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "[0] ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "interrupted\n"
