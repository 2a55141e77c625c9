"""Starting a group of processes, and ending it.

`minidist launch --nproc-per-node 4 train.py` is this module's command line, and
`md.launch(fn, workers=4)` its function for notebooks. Both do the same thing:

    start       one process a worker (and a parameter server), each told by
                environment variables who it is and how to reach the others
    watch       pass on what they print, line by line, with their rank before it
    go on       when one is lost, if that was asked for: all meet again, as the
                next generation (PROTOCOL.md, 9.10)
    end         when one fails, end the others, and show the failure that came
                first, in full, as the last thing on the screen

Nothing here knows of tensors or training: any program can be a worker.
"""

import argparse
import contextlib
import errno
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import names as transports
from . import remote
from .cluster import Cluster
from .keys import key_of

# The files of transport tls: this machine's certificate, its key, and who signed all.
TLS = ("MINIDIST_TLS_CERT", "MINIDIST_TLS_KEY", "MINIDIST_TLS_CA")


class LaunchError(ChildProcessError):
    """The group can't be started as it was asked for, or one of its processes failed."""


# ---------------------------------------------------------------------------
# 1. The job, and what each process is told
# ---------------------------------------------------------------------------


@dataclass
class Job:
    """What to run, how often, and how its processes find each other."""

    command: Sequence[str]  # what every worker runs
    workers: int = 1  # on this machine
    transport: str = "tcp"
    servers: int = 0  # parameter servers; they live on the first machine
    server_command: Sequence[str] = ()
    machines: int = 1
    machine: int = 0  # this one's number, 0 .. machines-1
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: any free one
    log_dir: str | None = None
    show: Sequence[int] | None = None  # local ranks to show; None: all
    grace: float = 10.0  # seconds from SIGTERM to SIGKILL
    timeout: float | None = None  # seconds for the whole run
    cluster: Cluster = field(default_factory=Cluster)  # what transport sim assumes
    go_on: bool = False  # can the others do without a worker that is lost?
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    id: str = field(default_factory=lambda: f"job-{secrets.token_hex(6)}")
    restarts: int = 0  # so many lost workers are replaced; then the group goes on with
    least: int = 0  # fewer, but not with fewer than these (0: all)
    generation: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1 or self.servers < 0:
            raise LaunchError(f"{self.workers} workers and {self.servers} servers asked for: "
                              "at least 1 worker and 0 servers make sense")
        if self.transport not in transports():
            raise LaunchError(f"no transport is called {self.transport!r}; there are "
                              f"{', '.join(transports())}")
        for name in TLS if self.transport == "tls" else ():
            if not os.path.isfile(path := os.environ.get(name, "")):
                what = f"there is no file {path!r}" if path else "it is not set"
                raise LaunchError(f"transport 'tls' needs {name}: {what}. Or use "
                                  "`minidist launch --tls CERT KEY CA`")
        if not 0 <= self.machine < self.machines:
            raise LaunchError(f"--node-rank is {self.machine}; with --nnodes {self.machines} it "
                              f"must be 0 to {self.machines - 1}, another on each machine")
        if self.servers and not self.server_command:
            raise LaunchError(f"{self.servers} servers asked for, but no server_command says what "
                              "they run: start them with `minidist launch` or `md.launch`")
        if not 0 <= self.master_port < 1 << 16:
            raise LaunchError(f"--master-port {self.master_port}: ports are 1 to 65535, and 0 is "
                              "any free one")
        if self.transport == "sim" and self.machines > 1:
            raise LaunchError("transport 'sim' simulates all machines in one process: leave out "
                              "--nnodes and raise --nproc-per-node")
        if self.transport == "mpi":
            raise LaunchError("transport 'mpi' starts with MPI's own launcher: MINIDIST_TRANSPORT="
                              f"mpi mpiexec -n {self.workers} {' '.join(self.command)}")
        if self.transport in MESHES and (self.machines > 1 or os.name != "posix"):
            raise LaunchError(f"transport {self.transport!r} joins processes of one POSIX "
                              "machine: use 'tcp'")
        self.least = self.least or self.workers
        if self.restarts < 0 or not 1 <= self.least <= self.workers:
            raise LaunchError(f"{self.least} to {self.workers} workers with {self.restarts} "
                              "restarts asked for: at least 1 worker and 0 restarts make sense")
        if self.elastic and (self.go_on or self.servers):
            raise LaunchError("lost workers are replaced where all meet again, as synchronous ones "
                              "do; with servers or --go-on the others just go on")
        if self.elastic and (self.machines > 1 or os.name != "posix" or self.transport == "sim"):
            raise LaunchError("lost workers are replaced or done without on one POSIX machine "
                              "alone; several resume from a checkpoint, started again by hand")

    @property
    def world(self) -> int:
        return self.workers * self.machines

    @property
    def elastic(self) -> bool:
        return self.restarts > 0 or self.least < self.workers

    def nodes(self) -> list[int]:
        """The nodes that this machine runs: workers are 0 .. world-1, servers follow."""
        first = self.machine * self.workers
        servers = range(self.world, self.world + self.servers) if self.machine == 0 else ()
        return [*range(first, first + self.workers), *servers]

    def environment(self, node: int) -> dict[str, str]:
        """torchrun's variables, and MINIDIST_* for what torchrun has no word for."""
        env = {k: v for k, v in os.environ.items() if k not in OURS}
        env |= {
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MINIDIST_TRANSPORT": self.transport,
            "MINIDIST_SERVERS": str(self.servers),
            "MINIDIST_KEY": self.key,
            "MINIDIST_JOB": self.id,
            "MINIDIST_GENERATION": str(self.generation),
        }
        if node < self.world:
            local = node - self.machine * self.workers
            env |= {"MINIDIST_ROLE": "worker", "RANK": str(node),
                    "LOCAL_RANK": str(local), "GROUP_RANK": str(self.machine)}
        else:
            env |= {"MINIDIST_ROLE": "server", "MINIDIST_NODE": str(node)}
        # Lines should appear when they are printed, not when a buffer is full.
        env.setdefault("PYTHONUNBUFFERED", "1")
        # Two BLAS threads for each core make small products many times slower.
        # One variable set by the user means that the user has decided.
        if not any(name in env for name in BLAS_THREADS):
            threads = max(1, cores() // self.workers) if node < self.world else 1
            env |= dict.fromkeys(BLAS_THREADS, str(threads))
        return env


OURS = frozenset("""RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT
    MINIDIST_TRANSPORT MINIDIST_SERVERS MINIDIST_ROLE MINIDIST_NODE MINIDIST_KEY MINIDIST_JOB
    MINIDIST_GENERATION MINIDIST_STATE MINIDIST_PIPES MINIDIST_LISTEN_FD""".split())

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
                "VECLIB_MAXIMUM_THREADS")


def cores() -> int:
    """The cores this process may use, which in a container are fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def listen(job: Job) -> socket.socket | None:
    """Bind the port at which node 0 will be found, and set job.master_port.

    Done here and handed down, so that a port in use is an error before anything
    has started, and nobody can take the port between the check and its use.
    """
    if job.machine != 0 or job.transport in MESHES:
        return None
    kind = socket.SOCK_DGRAM if job.transport == "udp" else socket.SOCK_STREAM
    tried = []
    try:
        addresses = socket.getaddrinfo(job.master_addr, job.master_port, type=kind)
    except OSError as error:
        raise LaunchError(f"--master-addr {job.master_addr}: {error}") from None
    for family, _, _, _, address in addresses:
        sock = socket.socket(family, kind)
        try:
            if kind == socket.SOCK_STREAM and os.name == "posix":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            if kind == socket.SOCK_STREAM:
                sock.listen(512)
            break
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"port {job.master_port} of {job.master_addr} is in use by another program "
                    "(an earlier run?): give another --master-port, or leave it out and a free "
                    "one is taken") from None
            tried.append(f"{address[0]} ({error.strerror})")
    else:
        raise LaunchError(f"cannot listen at {', '.join(tried)}: --master-addr must be an address "
                          "of the machine with --node-rank 0")
    job.master_port = sock.getsockname()[1]
    if job.transport in ("tcp", "udp", "tls") and os.name == "posix":
        return sock
    sock.close()  # another transport opens its port by itself
    return None


Ends = dict[int, tuple[int, int]]  # for each peer: the descriptor to read, the one to write


def socket_pair() -> tuple[int, int]:
    a, b = socket.socketpair()
    return a.detach(), b.detach()


# Transports whose nodes are joined before they start, and what makes one way of a
# connection: the descriptor of its reader, that of its writer.
MESHES: dict[str, Callable[[], tuple[int, int]]] = {"pipe": os.pipe, "shm": socket_pair}


def mesh_of(way: Callable[[], tuple[int, int]],
            nodes: Sequence[int]) -> Generator[tuple[int, Ends], None, None]:
    """For each node in turn: its (read, write) ends of a way from and to every other.

    A generator, so that few descriptors are open at a time: the ends of a node
    are closed here as soon as the caller, who has started it meanwhile, goes on.
    """
    ends: dict[int, Ends] = {node: {} for node in nodes}
    try:
        for node in nodes:
            for peer in nodes:
                if peer > node:
                    here_reads, peer_writes = way()
                    peer_reads, here_writes = way()
                    ends[node][peer] = here_reads, here_writes
                    ends[peer][node] = peer_reads, peer_writes
            yield node, ends[node]
            for pair in ends.pop(node).values():
                os.close(pair[0])
                os.close(pair[1])
    finally:
        for fds in ends.values():
            for pair in fds.values():
                os.close(pair[0])
                os.close(pair[1])


# ---------------------------------------------------------------------------
# 2. What the processes print
# ---------------------------------------------------------------------------


class Lines:
    """Bytes in, whole lines out; a progress bar's redrawings stay one line.

    A bar goes back with a carriage return and overwrites itself. What a
    terminal would show when at last a newline comes is the text after the last
    one; until then that text is `bar`, which may be drawn over and over.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.bar = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n")
        states = [s for s in self.rest.split(b"\r") if s]
        if b"\r" in self.rest and states:
            self.bar = states[-1]
            tail = b"\r" if self.rest.endswith(b"\r") else b""
            self.rest = b"\r" + self.bar + tail  # earlier states are history
        else:
            self.bar = b""
        if len(self.rest) > MAX_LINE:
            lines.append(self.rest)
            self.rest = b""
        return [line.rsplit(b"\r", 1)[-1] for line in lines]


MAX_LINE = 1 << 20


class Console:
    """Where the lines of all processes meet: one is written whole or not yet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bar_on: Any = None  # the terminal that shows an unfinished bar
        self.broken = ""  # why nobody reads any more, as under `| head`

    def line(self, stream: Any, text: bytes) -> None:
        with self.lock:
            if self.bar_on is not None:
                self._write(self.bar_on, b"\r\x1b[K")
                self.bar_on = None
            self._write(stream, text + b"\n")

    def bar(self, stream: Any, text: bytes) -> None:
        if stream.isatty():  # in a file or a notebook its last state is enough
            with self.lock:
                self._write(stream, b"\r" + text + b"\x1b[K")
                self.bar_on = stream

    def _write(self, stream: Any, data: bytes) -> None:
        try:
            if hasattr(stream, "buffer"):
                stream.flush()
                stream.buffer.write(data)
            else:  # a notebook's
                stream.write(data.decode("utf-8", "replace"))
            stream.flush()
        except (OSError, ValueError) as error:  # no reader, a full disk; ValueError: closed
            self.broken = str(error)


# ---------------------------------------------------------------------------
# 3. One process
# ---------------------------------------------------------------------------

# What stands on stderr at the beginning of the end. An unfinished progress bar may stand before
# it on the same line.
LAST_WORDS = re.compile(rb"(Traceback \(most recent call last\):$|  \+ Exception Group Traceback"
                        rb"|Fatal Python error:).*")
HOLD = 5.0  # seconds that last words are held back, waiting for the end


class Process:
    """A worker or server: started, listened to, and at last understood."""

    def __init__(self, job: Job, node: int, env: dict[str, str], fds: Sequence[int],
                 console: Console, events: "queue.SimpleQueue[Any]"):
        server = node >= job.world
        self.node = node
        self.server = server
        self.name = f"server {node - job.world}" if server else f"rank {node}"
        self.prefix = f"[{self.name if server else node}] ".encode()
        self.shown = job.show is None or server or env["LOCAL_RANK"] in map(str, job.show)
        self.code: int | None = None  # as subprocess has it: -9 is killed by signal 9
        self.ended_by_us = False
        self.state = env.get("MINIDIST_STATE", "")  # the file it leaves to its successor
        self.called = False  # to the next generation
        self.given_up = ""  # why it must not come to it any more
        self.stopped = False  # by SIGSTOP, and not continued
        self.tail: deque[bytes] = deque(maxlen=20)  # of stderr
        self.held: list[bytes] = []  # last words, not yet shown
        self.held_since = 0.0
        self.console = console
        self.events = events
        self.logs: list[Any] = [None, None]
        if job.log_dir is not None:
            folder = Path(job.log_dir, job.id, self.name.replace(" ", "") if server else str(node))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.logs = [open(folder / f"{name}.log", "wb", 0) for name in ("stdout", "stderr")]
            except OSError as error:
                raise LaunchError(f"--log-dir {job.log_dir}: {error}") from None
        command = list(job.server_command if server else job.command)
        try:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, pass_fds=tuple(fds),
                # A session of its own: the terminal's Ctrl-C goes to the launcher
                # alone, which ends the group in order, helpers' helpers included.
                start_new_session=True)
        except OSError as error:
            raise LaunchError(f"cannot start {self.name}: {command[0]!r}: {error.strerror}") \
                from None
        self.pumps = [threading.Thread(target=self._pump, args=(i,), daemon=True) for i in (0, 1)]
        for thread in (*self.pumps, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    def _pump(self, which: int) -> None:
        """Pass on one stream of the process until its end, on a thread of its own."""
        source: Any = (self.process.stdout, self.process.stderr)[which]
        log = self.logs[which]
        take = (self._out, self._err)[which]
        lines = Lines()
        with source, log or contextlib.nullcontext():
            while data := source.read1(1 << 16):
                if log is not None:
                    try:
                        log.write(data)
                    except OSError as error:  # a full disk ends the log, not the work
                        self._err(f"minidist: {log.name} ends here: {error.strerror}".encode())
                        log = None
                for line in lines.feed(data):
                    take(line)
                if lines.bar and self.shown:
                    self.console.bar((sys.stdout, sys.stderr)[which], self.prefix + lines.bar)
            if lines.rest.strip():  # a line without its end
                take(lines.rest.rstrip(b"\r").rsplit(b"\r", 1)[-1])

    def _out(self, line: bytes) -> None:
        if self.shown:
            self.console.line(sys.stdout, self.prefix + line)

    def _err(self, line: bytes) -> None:
        if not self.held and (last := LAST_WORDS.search(line)):
            self.held_since = time.monotonic()
            self.held.append(last[0])
            line = line[:last.start()]
            if not line:
                return
        elif self.held:
            self.held.append(line)
            return
        self.tail.append(line)
        if self.shown:
            self.console.line(sys.stderr, self.prefix + line)

    def release(self) -> None:
        """Show what was held back: they were not the last words after all."""
        held, self.held = self.held, []
        self.tail.extend(held)
        for line in held if self.shown else ():
            self.console.line(sys.stderr, self.prefix + line)

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # The ended process stays a zombie (WNOWAIT) until `close`, so that its
            # number is not given to a stranger, whom `signal` would then hit.
            pid = self.process.pid
            try:
                while True:
                    turn = os.WCONTINUED if self.stopped else os.WSTOPPED
                    end: Any = os.waitid(os.P_PID, pid, os.WEXITED | turn | os.WNOWAIT)
                    if end.si_code not in (os.CLD_STOPPED, os.CLD_CONTINUED):
                        break
                    os.waitid(os.P_PID, pid, turn | os.WNOHANG)  # heard
                    self.stopped = not self.stopped
            except ChildProcessError:
                return  # `close` was faster
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        else:
            code = self.process.wait()
        for thread in self.pumps:  # its last words first; a helper may keep them open
            thread.join(timeout=0.5)
        self.events.put((self, code))

    def signal(self, number: int) -> None:
        """To the process and whatever it has started in its group."""
        with contextlib.suppress(OSError):  # it may be gone
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)
                os.killpg(self.process.pid, signal.SIGCONT)  # a stopped one can't hear
            else:
                self.process.terminate()

    def kill(self) -> None:
        self.signal(getattr(signal, "SIGKILL", signal.SIGTERM))

    # What is known about the end ------------------------------------------

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0) and not self.ended_by_us

    def origin(self) -> str:
        """The line of the first exception of the last words: `ValueError: ...`."""
        for line in self.held:
            text = line.decode("utf-8", "replace")
            if re.match(r"[A-Za-z_][\w.]*(:|$)", text):
                return text
        return ""

    @property
    def consequence(self) -> bool:
        """Did it only fail because it lost another, or was called?"""
        return (re.match(r"([\w.]+\.)?PeerLost\b", self.origin()) is not None
                or self.called and (self.code or 0) >= 0 or self.code == -MEET)

    def ending(self) -> str:
        assert self.code is not None
        if self.given_up:
            return self.given_up
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = "an unnamed signal"
        return f"was killed by signal {-self.code} ({name}){MEANING.get(-self.code, '')}"

    def last_words(self) -> list[str]:
        return [line.decode("utf-8", "replace") for line in self.held or self.tail]


MEET = getattr(signal, "SIGUSR1", signal.SIGTERM)  # calls workers to the next generation

MEANING = {
    9: ": if nobody did that by hand, the machine was out of memory (see dmesg)",
    11: ": a crash in compiled code; PYTHONFAULTHANDLER=1 shows where",
}


# ---------------------------------------------------------------------------
# 4. The group
# ---------------------------------------------------------------------------

SETTLE = 1.0  # after a failure: seconds in which the others may fail by themselves
SETTLE_LATE = 4.0  # the same while only consequences of a failure have been seen
PATIENCE = 60.0  # seconds for a worker to come to the next generation: it may be computing

# Run beside the group. Its standard input ends when the launcher ends, however
# that comes about; then it ends the groups whose numbers it has read. So nothing
# survives `kill -9` of the launcher, whatever the workers are doing.
GUARD = """
import os, signal, sys, time
groups = [int(line) for line in sys.stdin]
def tell(number):
    alive = []
    for group in groups:
        try:
            os.killpg(group, number)
            alive.append(group)
        except OSError:
            pass
    return alive
tell(signal.SIGTERM)
tell(signal.SIGCONT)
end = time.monotonic() + float(sys.argv[1])
while tell(0) and time.monotonic() < end:
    time.sleep(0.05)
tell(signal.SIGKILL)
"""


@dataclass
class Report:
    """How a run ended: the exit code, what to say about it, the signal that ended it."""

    code: int
    text: str = ""
    interrupted: int = 0
    cause: str = ""  # of a failure, in a line


def run(job: Job) -> Report:
    """Start the group, pass on its output, wait for its end; leave nothing running."""
    if job.transport == "sim":
        from . import simulate
        return simulate.run(job)
    group = Group(job)
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(group.signals_as_events())
        stack.callback(group.close)
        if job.elastic:
            group.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minidist-"))
        group.start()
        return group.watch()


class Group:
    def __init__(self, job: Job):
        self.asked, self.job = job, replace(job)  # at first, and of the present generation
        self.console = Console()
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.processes: list[Process] = []  # of this generation
        self.past: list[Process] = []
        self.folder = ""  # where workers leave their states
        self.running: list[Process] = []
        self.failures: list[Process] = []  # in the order in which they were seen
        self.stubborn: list[Process] = []  # killed, because SIGTERM did not help
        self.abandoned: list[Process] = []  # stopped, and nobody continued them
        self.alone_at = time.monotonic()  # not only stopped ones were left then
        self.guard: subprocess.Popen[bytes] | None = None
        self.notes: list[str] = []  # what there is to say at the end
        self.interrupted = 0
        self.timed_out = False
        self.failed_at = self.kill_at = self.workers_done_at = self.meeting = float("inf")

    @contextlib.contextmanager
    def signals_as_events(self) -> Iterator[None]:
        """While the group runs, a signal is one more event in its queue."""
        names = [n for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
        before = {n: signal.getsignal(getattr(signal, n)) for n in names}
        before = {n: h for n, h in before.items() if h is not signal.SIG_IGN}  # nohup
        for name in before:
            signal.signal(getattr(signal, name), lambda number, _: self.events.put(number))
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)

    def start(self) -> None:
        if os.name == "posix":
            self.guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", GUARD, str(self.job.grace)],
                stdin=subprocess.PIPE, start_new_session=True)
        self.begin([f"{self.folder}/state{i}" for i in range(self.job.workers)])

    def begin(self, states: Sequence[str]) -> None:
        """Start the processes of a generation; each worker knows the state to go on from."""
        job, nodes = self.job, self.job.nodes()
        listener = listen(job)
        way = MESHES.get(job.transport)
        mesh = mesh_of(way, nodes) if way is not None else ((n, {}) for n in nodes)
        with listener or contextlib.nullcontext(), contextlib.closing(mesh):
            for node, pipes in mesh:
                env = job.environment(node)
                if self.folder and node < job.world:
                    env["MINIDIST_STATE"] = states[node]
                fds = [fd for pair in pipes.values() for fd in pair]
                if pipes:
                    env["MINIDIST_PIPES"] = ",".join(
                        f"{peer}:{r}:{w}" for peer, (r, w) in pipes.items())
                if listener is not None and node == 0:
                    env["MINIDIST_LISTEN_FD"] = str(listener.fileno())
                    fds.append(listener.fileno())
                process = Process(job, node, env, fds, self.console, self.events)
                self.processes.append(process)
                self.running.append(process)
                if self.guard is not None:
                    self.guard.stdin.write(b"%d\n" % process.process.pid)  # type: ignore
                    self.guard.stdin.flush()  # type: ignore

    def watch(self) -> Report:
        deadline = time.monotonic() + (self.job.timeout or float("inf"))
        while self.running or self.meet_again():
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=0.25)
                if isinstance(event, tuple):
                    self.ended(*event)
                elif self.interrupted:
                    self.kill()  # Ctrl-C again: now
                else:
                    self.interrupted = event
                    self.stop()
            now = time.monotonic()
            for process in self.running:
                if process.held and now - process.held_since > HOLD:
                    process.release()
            if now > self.kill_at:
                self.kill()
            elif self.kill_at < float("inf"):
                continue  # being stopped already
            elif self.console.broken:
                self.stop()
            elif now > deadline:
                self.timed_out = True
                self.notes.append(f"minidist: {names(self.running)} still ran after "
                                  f"{self.job.timeout:g} s, the timeout, and was ended")
                self.stop()
            elif self.failures and self.can_meet():
                self.call()
            elif self.failed:
                known = not all(p.consequence for p in self.failures)
                if now > self.failed_at + (SETTLE if known else SETTLE_LATE):
                    self.stop()
            elif now > self.workers_done_at + self.job.grace:
                self.notes.append(f"minidist: {names(self.running)} still ran {self.job.grace:g} s "
                                  "after the last worker had ended, and was ended")
                self.stop()
            elif len(self.running) == len(self.processes) or not all(
                    p.stopped for p in self.running):
                self.alone_at = now
            elif now > self.alone_at + self.job.grace:  # the others have left, as if all were well
                self.abandoned = self.running[:]
                self.notes.append(f"minidist: {names(self.running)} was stopped (SIGSTOP) and "
                                  f"not continued for {self.job.grace:g} s after all others had "
                                  "ended, and was ended")
                self.stop()
        return self.report()

    def ended(self, process: Process, code: int) -> None:
        self.running.remove(process)
        process.code = code
        # Whoever has said its last words failed by itself, though we ended its leaving.
        process.ended_by_us = self.kill_at < float("inf") and code < 0 \
            and process not in self.abandoned and not process.held
        if process.failed:
            self.failures.append(process)
            if self.failed:
                self.failed_at = min(self.failed_at, time.monotonic())
            else:
                process.release()
                self.console.line(sys.stderr, (f"minidist: {process.name} {process.ending()}. The "
                                               "others go on without it").encode())
        else:
            process.release()
        if all(p.server for p in self.running):
            if self.kill_at < float("inf"):
                self.stop()  # servers, which the workers may have needed until now
            self.workers_done_at = min(self.workers_done_at, time.monotonic())

    @property
    def failed(self) -> bool:
        """Must the group end? Where workers can do without each other, only when a server or the
        last of them has failed."""
        there = any(p.code in (None, 0) for p in self.processes if not p.server)
        return bool(self.failures) and not (
            self.job.go_on and there and not any(p.server for p in self.failures))

    # The next generation ---------------------------------------------------

    def can_meet(self) -> bool:
        """May the group go on? Not without those who have ended in order."""
        lost = sum(not p.consequence for p in self.failures) + sum(p.stopped for p in self.running)
        return (self.job.elastic and self.kill_at == float("inf") and not self.interrupted
                and all(p.code != 0 for p in self.processes)
                and len(self.processes) - lost + self.job.restarts >= self.job.least
                and (self.job.restarts > 0 or lost > 0))

    def call(self) -> None:
        """Have all who run leave their states. Who is stopped will not come, nor will who is not
        here in time: they are lost, and must not come back."""
        if self.meeting == float("inf"):
            self.meeting = time.monotonic() + PATIENCE
        for process in self.running:
            if process.stopped or time.monotonic() > self.meeting:
                process.given_up = ("was stopped (SIGSTOP) and given up" if process.stopped else
                                    f"did not leave its step in {PATIENCE:g} s and was killed")
                process.kill()
            elif not process.called:
                process.called = True
                process.signal(MEET)

    def meet_again(self) -> bool:
        """All have ended: those who may go on do, as the next generation."""
        if not self.failures or not self.can_meet():
            return False
        states, job = [], self.job
        lost = [p for p in self.processes if not p.consequence]
        replaced = lost[:job.restarts]
        states = [p.state for p in self.processes if p.consequence or p in replaced]
        # Workers that lost each other, though none is lost, may not do so for ever.
        restarts = job.restarts - max(len(replaced), not lost)
        for process in lost:
            process.release()
        why = "; ".join(f"{p.name} {p.ending()}" for p in lost) or "workers lost each other"
        self.console.line(sys.stderr, (
            f"minidist: {why}. Generation {job.generation + 1} begins, workers: {len(states)}, "
            f"restarts left: {restarts}").encode())
        self.job = replace(self.asked, workers=len(states), restarts=restarts,
                           generation=job.generation + 1, least=job.least)
        self.past += self.processes
        self.processes, self.failures = [], []
        self.failed_at = self.meeting = self.workers_done_at = float("inf")
        self.begin(states)
        return True

    def stop(self) -> None:
        """Ask all to end, servers after the workers, and be ready to insist."""
        self.kill_at = time.monotonic() + self.job.grace
        for process in [p for p in self.running if not p.server] or self.running:
            process.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.kill_at = time.monotonic() + self.job.grace
        for process in self.running:
            if process not in self.stubborn:
                self.stubborn.append(process)
            process.kill()

    def report(self) -> Report:
        lines = self.notes
        if self.console.broken:
            lines.append(f"minidist: output cannot be written: {self.console.broken}")
            self.interrupted = self.interrupted or 13  # SIGPIPE, what ends `yes | head`
        if self.interrupted:
            name = signal.Signals(self.interrupted).name
            workers = [p for p in self.processes if not p.server]
            if self.interrupted == signal.SIGTERM and all(
                    p.code == 0 for p in workers if self.failed or p not in self.failures):
                lines.append(f"minidist: SIGTERM: {names(workers)} ended in order")
                return Report(0, "\n".join(lines))
            lines.append(f"minidist: {name}: ended {names(self.processes)}")
            return Report(128 + self.interrupted, "\n".join(lines), self.interrupted)
        if self.stubborn:
            lines.append(f"minidist: {names(self.stubborn)} had to be killed, {self.job.grace:g} s "
                         "after SIGTERM")
        if not self.failed:
            if self.failures:
                lines.append(f"minidist: ended in order, without {names(self.failures)}")
            return Report(124 if self.timed_out else 0, "\n".join(lines))
        cause = next((p for p in self.failures if not p.consequence), self.failures[0])
        lines += [f"{p.prefix.decode()}{p.origin() or p.ending()}"
                  for p in self.failures if p is not cause]
        if cause.consequence:  # of what else than a failure?
            lines += [f"{p.prefix.decode()}had ended with exit code 0, while others needed it"
                      for p in self.processes if p.code == 0 and not p.server]
        words = cause.last_words()
        lines.append(f"minidist: root cause: {cause.name} {cause.ending()}"
                     + (". Its last lines:" if words else ""))
        assert cause.code is not None
        code = cause.code if cause.code > 0 else 128 - cause.code
        why = cause.origin() or cause.ending()
        return Report(code, "\n".join(lines + words), cause=f"{cause.name}: {why}")

    def close(self) -> None:
        """The end of all that is left; a helper of a worker that ended, too."""
        for process in self.past + self.processes:
            process.kill()
            process.process.wait()
            for thread in process.pumps:
                thread.join(timeout=1)
        if self.guard is not None:
            self.guard.kill()
            self.guard.wait()
            self.guard.stdin.close()  # type: ignore[union-attr]


def names(processes: Sequence[Process]) -> str:
    return ", ".join(p.name for p in processes)


# ---------------------------------------------------------------------------
# 5. A function instead of a script
# ---------------------------------------------------------------------------


def launch(fn: Callable[..., Any], args: Sequence[Any] = (), workers: int = 2,
           transport: str = "tcp", servers: int = 0, timeout: float | None = None,
           server_command: Sequence[str] = (), cluster: Any = None) -> list[Any]:
    """Call fn(*args) on every worker of a new group; return what each returned, by rank.

        def train(lr):
            dist.init_process_group()
            ...
            return loss.item()

        losses = md.launch(train, args=(0.1,), workers=4)

    The workers are new processes. A function that they can import, they import.
    Any other (of a notebook cell, of the script that is running) travels as its
    source text, with the functions, classes, modules and plain values that it
    names. Values that travel, both ways: None, numbers, strings, bytes, lists,
    tuples, sets, dicts, NumPy arrays and Tensors (their values, no graph).
    Models, optimizers and open files are best made inside the function.

    With transport "sim" they are threads of this process and `cluster` says what is
    simulated, as a file's path or as tables (see cluster.py); fn is then called as it is.

    `timeout` is in seconds, for all of it. What a worker prints appears here with
    its rank before it. If one fails, LaunchError says which one and why.
    """
    if transport == "sim":
        from . import simulate
        assumed = Cluster.of(cluster) if isinstance(cluster, dict) else Cluster.read(cluster)
        return simulate.call(Job((), workers, transport, servers, server_command or ("serve",),
                                 timeout=timeout, cluster=assumed), fn, args)
    with tempfile.TemporaryDirectory(prefix="minidist-") as folder:  # mode 0700
        path = Path(folder)
        remote.send(path, fn, args)
        job = Job([sys.executable, remote.__file__, folder], workers, transport, servers,
                  server_command, timeout=timeout)
        report = run(job)
        if report.interrupted:  # the handlers are back: what it would have done
            signal.raise_signal(report.interrupted)
        if report.code:
            raise LaunchError("\n".join(filter(None, (report.cause, report.text))))
        silent = [r for r in range(workers) if not (path / f"result{r}" / "value.json").exists()]
        if silent:
            raise LaunchError(f"rank {silent[0]} ended, with exit code 0, before {fn.__name__} "
                              "returned: it, or what it calls, ends the process")
        return [remote.load(path / f"result{rank}") for rank in range(workers)]


# ---------------------------------------------------------------------------
# 6. The command line
# ---------------------------------------------------------------------------

EXAMPLES = """\
examples:
  minidist launch --nproc-per-node 4 train.py --epochs 3
      four workers on this machine, joined by TCP
  minidist launch --nproc-per-node 2 --transport udp --servers 1 train.py
      over UDP, with a parameter server
  minidist launch --nproc-per-node 2:4 --max-restarts 3 train.py
      three workers that die are replaced, and then two more done without
  minidist launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 \\
      --nproc-per-node 4 train.py
      the first of two machines; on the other --node-rank 1. Both need the same
      MINIDIST_KEY in the environment, or in a file that MINIDIST_KEY_FILE names:
      minidist keygen FILE makes it

The flags, the variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, and the meaning of both are torchrun's, so a script starts under either.
"""


def main(argv: Sequence[str] | None = None, server_command: Sequence[str] = (),
         prog: str = "minidist launch") -> int:
    """`minidist launch`; returns the exit code: that of the failure that came first."""
    parser = argparse.ArgumentParser(
        prog=prog, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a script as a group of workers, and end them together.")

    def add(flag: str, **rest: Any) -> None:
        spelled = dict.fromkeys([flag, "--" + flag[2:].replace("-", "_")])  # torchrun takes both
        parser.add_argument(*spelled, **rest)

    add("--nproc-per-node", default="1", metavar="N",
        help="workers on this machine; auto or cpu: one a core; MIN:MAX: begin with MAX, and go on "
        "with fewer when some are lost (default 1)")
    add("--transport", default="tcp", metavar="NAME",
        help="pipe, shm, tcp, udp, tls or a plugin's name; sim simulates them (default tcp)")
    add("--tls", nargs=3, metavar=("CERT", "KEY", "CA"), help="use transport tls with these files: "
        "this machine's certificate, its private key, the certificate of who signed all")
    add("--servers", type=int, default=0, metavar="K", help="parameter servers (default 0)")
    add("--cluster", metavar="FILE", help="what transport sim assumes; cluster.py describes it")
    add("--assume", action="append", default=[], metavar="NAME=VALUE",
        help="one of its settings, such as link.latency=0.01 or seed=1; may be repeated")
    add("--nnodes", default="1", metavar="M", help="machines (default 1)")
    add("--node-rank", type=int, default=0, help="this machine's number, from 0 (default 0)")
    add("--master-addr", default="127.0.0.1", help="address of machine 0 (default 127.0.0.1)")
    add("--master-port", type=int, default=0,
        help="port on machine 0 (default 29500, on a single machine any free one)")
    add("--standalone", action="store_true", help="one machine and a free port, as by default")
    add("--max-restarts", type=int, default=0, metavar="N", help="so many lost workers are "
        "replaced: the run goes on from the last step that any of the others completed (default 0)")
    add("--log-dir", metavar="DIR", help="keep each worker's output in DIR/JOB/RANK/*.log")
    add("--local-ranks-filter", metavar="0,1", help="show the output of these local ranks only")
    add("--shutdown-timeout", type=float, default=10, metavar="S",
        help="seconds between SIGTERM and SIGKILL (default 10)")
    add("--go-on", action="store_true", help="when a worker is lost, the others go on, as under "
        "asynchronous strategies; the exit code is 0 if they end in order")
    parser.add_argument("-m", "--module", action="store_true", help="run a module: python -m")
    add("--no-python", action="store_true", help="run a program that is no Python script")
    parser.add_argument("script", help="the script, module or program that every worker runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    flags = parser.parse_args(argv)
    try:
        return run_and_tell(job_of(flags, server_command))
    except LaunchError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2


def run_and_tell(job: Job) -> int:
    report = run(job)
    if report.text:
        print(report.text, file=sys.stderr, flush=True)
    return report.code


def cluster_of(transport: str, path: str | None, settings: Sequence[str]) -> Cluster:
    """The cluster that the flags describe."""
    if transport != "sim" and (path or settings):
        raise LaunchError("--cluster and --assume describe what --transport sim simulates")
    try:
        return Cluster.read(path, settings)
    except (OSError, ValueError) as error:
        raise LaunchError(str(error)) from None


def least_and_most(text: str) -> tuple[int, int]:
    """Of "4" or "2:4"."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def job_of(flags: argparse.Namespace, server_command: Sequence[str]) -> Job:
    low, _, high = flags.nnodes.partition(":")
    if high not in ("", low) or not low.isdecimal() or int(low) < 1:
        raise LaunchError(f"--nnodes {flags.nnodes}: a number of machines is needed, from 1; a "
                          "group does not grow or shrink while it runs")
    machines = 1 if flags.standalone else int(low)
    count = flags.nproc_per_node
    if count in ("auto", "cpu"):
        count = str(cores())
    try:
        least, count = least_and_most(count)
    except ValueError:
        raise LaunchError(f"--nproc-per-node {count}: a number is needed, or MIN:MAX, or auto, or "
                          "cpu") from None
    show = None
    if flags.local_ranks_filter:
        try:
            show = [int(rank) for rank in flags.local_ranks_filter.split(",")]
        except ValueError:
            raise LaunchError(f"--local-ranks-filter {flags.local_ranks_filter}: numbers joined "
                              "by commas are needed, like 0,2") from None
    command = [flags.script, *flags.args]
    if not flags.no_python:
        command = [sys.executable, *(["-m"] if flags.module else []), *command]
        if not flags.module and not os.path.isfile(flags.script):
            raise LaunchError(f"there is no script {flags.script!r} in {os.getcwd()}")
    if flags.tls:
        flags.transport = "tls"
        os.environ |= zip(TLS, map(os.path.abspath, flags.tls))
    job = Job(command, count, flags.transport, flags.servers, server_command, machines,
              0 if flags.standalone else flags.node_rank, flags.master_addr, flags.master_port,
              flags.log_dir, show, flags.shutdown_timeout,
              cluster=cluster_of(flags.transport, flags.cluster, flags.assume), go_on=flags.go_on,
              restarts=flags.max_restarts, least=least)
    if machines > 1:
        # Every machine has a launcher of its own, and all must say the same.
        try:
            key = key_of(os.environ)
        except (OSError, ValueError) as error:
            raise LaunchError(str(error)) from None
        if key is None:
            raise LaunchError(
                f"{machines} machines need one secret key, in MINIDIST_KEY on each, or in a file "
                "that MINIDIST_KEY_FILE names. Make it once: minidist keygen FILE")
        job.key = key.hex()
        job.master_port = job.master_port or 29500
        job.id = os.environ.get("MINIDIST_JOB") or f"{job.master_addr}:{job.master_port}"
    return job

