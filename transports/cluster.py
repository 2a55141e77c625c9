"""A cluster on paper: how fast its nodes compute, what its links carry, what goes wrong when.

The simulator reads it from a small TOML file, every line of which may be left out:

    seed = 0                    # the same seed gives the same run, event for event
    hosts = [[0, 2], [1]]       # nodes that share a machine and its port; else each has its own

    [compute]                   # of the workers
    step = 0.002                # seconds that a step takes, whatever its size,
    sample = 0.0001             # and for each sample more
    noise = 0.3                 # sigma of a log-normal factor of mean 1, drawn for each step
    straggle = 0.01             # share of the steps that take `slowdown` times as long
    slowdown = 10.0
    speeds = [1.0, 1.0, 0.5]    # of the workers in turn, over and over

    [link]                      # between a machine and the network, each way
    latency = 0.0001            # seconds from node to node (half of it at either end)
    jitter = 0.0                # up to so many more, evenly drawn for each message
    bandwidth = 1.25e8          # bytes/s
    duplex = true               # false: what comes and what goes share the bandwidth
    buffer = 262144             # bytes that send() hands over before it has to wait
    message = 2e-5              # seconds of processor that a message costs at either end,
    byte = 0.0                  # and each of its bytes

    [server]                    # the same seven, where the servers' link differs: incast is here
    [local]                     # the same seven, between nodes of one machine

    [[fault]]
    at = 1.5                    # seconds
    kind = "crash"              # the process is killed; "power": its machine falls silent;
    nodes = [3]                 # "pause": stopped and continued; "partition": these nodes and
    seconds = 2.0               # the others do not reach each other; "late": they start then

Nodes are numbered as everywhere: workers from 0, then servers.
"""
from __future__ import annotations

import dataclasses
import difflib
import math
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FAULTS = ("crash", "power", "pause", "partition", "late")


@dataclass(frozen=True)
class Compute:
    """How long a worker computes."""
    step: float = 0.002
    sample: float = 0.0001
    noise: float = 0.0
    straggle: float = 0.0
    slowdown: float = 10.0
    speeds: tuple[float, ...] = (1.0,)

    def seconds(self, worker: int, samples: int, chance: random.Random) -> float:
        """One step of so many samples."""
        mean = (self.step + self.sample * samples) / self.speeds[worker % len(self.speeds)]
        if self.noise:                          # exp(N(-s*s/2, s)) has mean 1
            mean *= chance.lognormvariate(-self.noise ** 2 / 2, self.noise)
        if self.straggle and chance.random() < self.straggle:
            mean *= self.slowdown
        return mean


@dataclass(frozen=True)
class Link:
    """What joins a machine to the others, or its processes to each other."""
    latency: float = 1e-4
    jitter: float = 0.0
    bandwidth: float = 1.25e8
    duplex: bool = True
    buffer: float = 262144.0
    message: float = 2e-5
    byte: float = 0.0

    def work(self, size: int) -> float:
        """Seconds of processor for a message of so many bytes, at either end."""
        return self.message + self.byte * size


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, to which nodes, when."""
    kind: str
    at: float
    nodes: tuple[int, ...]
    seconds: float = math.inf


@dataclass(frozen=True)
class Cluster:
    """All that the simulator assumes."""
    seed: int = 0
    hosts: tuple[tuple[int, ...], ...] = ()
    compute: Compute = field(default_factory=Compute)
    link: Link = field(default_factory=Link)
    server: Link = field(default_factory=Link)
    local: Link = field(default_factory=lambda: Link(latency=1e-5, bandwidth=2e9))
    fault: tuple[Fault, ...] = ()

    @classmethod
    def read(cls, path: str | None = None, settings: Sequence[str] = ()) -> Cluster:
        """From a file and settings such as "link.latency=0.01", which win."""
        table: dict[str, Any] = {}
        if path:
            with open(path, "rb") as file:
                table = parsed(file.read().decode(), path)
        for text in settings:
            merge(table, parsed(text, f"the setting {text!r}"))
        return cls.of(table, path or "the settings")

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str = "the cluster") -> Cluster:
        """From tables as TOML has them."""
        link, server = table.get("link", {}), table.get("server", {})
        if isinstance(link, Mapping) and isinstance(server, Mapping):
            table = {**table, "server": {**link, **server}}
        return made(cls, table, where, "")

    def check(self, workers: int, servers: int) -> None:
        """Raise ValueError if the cluster speaks of nodes that the job does not have."""
        size = workers + servers
        named = [node for fault in self.fault for node in fault.nodes]
        placed = [node for host in self.hosts for node in host]
        for node in named + placed:
            if node >= size:
                raise ValueError(f"the cluster speaks of node {node}: {workers} workers and "
                                 f"{servers} servers are nodes 0 to {size - 1}")
        if len(set(placed)) < len(placed):
            raise ValueError(f"hosts = {[list(h) for h in self.hosts]}: a node has one machine")


def parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is no TOML: {error}") from None


def merge(table: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Put the other's entries over those of the table."""
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(table.get(name), dict):
            merge(table[name], value)
        else:
            table[name] = value


# ---- checking --------------------------------------------------------------------
# A field's type says what may stand there; all numbers are finite and not negative.

POSITIVE = ("bandwidth", "speeds")              # nothing would ever arrive, or end


def made(kind: Any, table: Any, where: str, path: str) -> Any:
    """The dataclass that a table describes; an error names the entry and its cure."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: {path or 'it'} is {table!r}; it must be a table")
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    values = {}
    for name, value in table.items():
        here = f"{path}.{name}".lstrip(".")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"{where}: there is no {here}" + (
                f"; is {near[0]} meant?" if near else f"; there are {', '.join(known)}"))
        values[name] = CHECKS[known[name].type](value, where, here)
    missing = [name for name, entry in known.items() if name not in values
               and entry.default is entry.default_factory is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{where}: {path} lacks {missing[0]}")
    return kind(**values)


def number(value: Any, where: str, path: str) -> float:
    least = "above 0" if path.rpartition(".")[2] in POSITIVE else "at least 0"
    if (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf
            or value == 0 and least == "above 0"):
        raise ValueError(f"{where}: {path} is {value!r}; it must be a number, {least}")
    return float(value)


def whole(value: Any, where: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}: {path} is {value!r}; it must be a whole number from 0")
    return value


def true_or_false(value: Any, where: str, path: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {path} is {value!r}; it must be true or false")
    return value


def kind_of_fault(value: Any, where: str, path: str) -> str:
    if value not in FAULTS:
        raise ValueError(f"{where}: {path} is {value!r}; it must be one of {', '.join(FAULTS)}")
    return value


def each(check: Any) -> Any:
    def several(value: Any, where: str, path: str) -> tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: {path} is {value!r}; it must be a list")
        if not value and path.endswith("speeds"):
            raise ValueError(f"{where}: {path} is empty; without it all workers are equal")
        return tuple(check(item, where, path) for item in value)
    return several


def table_of(kind: Any) -> Any:
    return lambda value, where, path: made(kind, value, where, path)


CHECKS: dict[Any, Any] = {
    "float": number, "int": whole, "bool": true_or_false, "str": kind_of_fault,
    "tuple[float, ...]": each(number), "tuple[int, ...]": each(whole),
    "tuple[tuple[int, ...], ...]": each(each(whole)), "tuple[Fault, ...]": each(table_of(Fault)),
    "Compute": table_of(Compute), "Link": table_of(Link),
}
