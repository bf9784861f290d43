"""Machines for the simulation: which ranks are near each other, and what their links cost. No jax.

A topology is a list of link classes from the nearest outwards. The ranks are numbered host by host,
so the first `ranks` of a link class' group are one host (or one rack, ...); two ranks talk over the
first link class whose group holds both. The last class holds all ranks. The number of hosts follows
from the number of ranks. PRESETS are below; topology_file.py reads one's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

ALL = "all"

_MOST = 1 << 40
"""Of ranks and of seconds: more is a mistake, and what is made of it would overflow."""


class TopologyError(ValueError):
    """A topology that makes no sense. The text says where, which field, and what is needed."""

    def __init__(self, where: str, problem: str, *, field: str = "", link: int | None = None):
        name = field if link is None else f"links[{link}].{field}"
        super().__init__(": ".join(filter(None, (where, name, problem))))
        self.problem, self.field, self.link = problem, field, link


@dataclass(frozen=True)
class Link:
    """One class of links. alpha, gap: seconds; beta: seconds per byte on a port.

    ranks: how many consecutive ranks are joined by these links; "all" in the last class only.
    ranks_per_port: how many consecutive ranks share a port, which sends and receives at once;
        "all": one port for the whole group (a memory bus).
    """

    name: str
    alpha: float
    beta: float
    ranks: int | str = ALL
    ranks_per_port: int | str = 1
    gap: float = 0.0

    def same_group(self, a: Array, b: Array) -> Array:
        """Whether these links join rank a with rank b."""
        if isinstance(self.ranks, str):
            return np.ones(np.broadcast(a, b).shape, bool)
        return a // self.ranks == b // self.ranks

    def port(self, rank: Array) -> Array:
        """The number of the port that a rank uses."""
        width = self.ranks if self.ranks_per_port == ALL else self.ranks_per_port
        return rank * 0 if isinstance(width, str) else rank // width


@dataclass(frozen=True)
class Topology:
    """gamma: seconds per byte that a rank reduces (or copies) by itself."""

    name: str
    links: tuple[Link, ...]
    gamma: float = 0.0

    def __post_init__(self) -> None:
        for link, field, problem in _problems(self):
            if problem:
                raise TopologyError(f"topology {self.name!r}", problem, field=field, link=link)

    def level(self, a: Array, b: Array) -> Array:
        """The index of the link class over which ranks a and b talk."""
        level = np.zeros(np.broadcast(a, b).shape, np.int64)
        for link in self.links[:-1]:
            level += ~link.same_group(a, b)
        return level

    def num_ports(self, num_ranks: int) -> list[int]:
        last = np.array([num_ranks - 1])
        return [int(link.port(last)[0]) + 1 for link in self.links]

    def domain(self, num_ranks: int) -> Link | None:
        """The nearest links that join several of the ranks, but not all; None: there are none."""
        sizes = ((link, cast("int", link.ranks)) for link in self.links[:-1])
        return next((link for link, ranks in sizes if 1 < ranks < num_ranks), None)

    def describe(self) -> str:
        """One line: the name, and every link class with its costs."""
        return f"{self.name}: " + "; ".join(map(_describe_link, self.links))


def flat(alpha: float, beta: float, *, gamma: float = 0.0, gap: float = 0.0) -> Topology:
    """All ranks equally far from each other, each with its own port."""
    return Topology("flat", (Link("link", alpha, beta, gap=gap),), gamma)


def _describe_link(link: Link) -> str:
    speed = f"{1e-9 / link.beta:.3g} GB/s" if link.beta else "no time per byte"
    port = {1: "a port for every rank", ALL: "one port for all"}.get(
        link.ranks_per_port, f"a port for {link.ranks_per_port} ranks"
    )
    group = "" if link.ranks == ALL else f" within {link.ranks} ranks"
    return f"{link.name}{group} {link.alpha * 1e6:g} us, {speed}, {port}"


_Problem = tuple[int | None, str, str]  # (index of the link or None, field, what is wrong or "")


def _problems(topology: Topology) -> Iterator[_Problem]:
    yield None, "links", "" if topology.links else "at least one link class is needed."
    yield None, "gamma", _not_seconds(topology.gamma)
    inner = 1
    for index, link in enumerate(topology.links):
        for field in ("alpha", "beta", "gap"):
            yield index, field, _not_seconds(getattr(link, field))
        yield index, "ranks", _wrong_ranks(link.ranks, inner, link is topology.links[-1])
        yield index, "ranks_per_port", _wrong_port(link)
        inner = link.ranks


def _not_seconds(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value <= _MOST:
        return ""
    return f"a number of seconds, 0 or more (at most {_MOST}), is needed, not {_shown(value)}."


def _shown(value: Any) -> str:
    """Python refuses to spell integers of thousands of digits."""
    is_long = isinstance(value, int) and value.bit_length() > 80
    return f"a number of {value.bit_length()} bits" if is_long else repr(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST


def _wrong_ranks(ranks: Any, inner: Any, is_last: bool) -> str:
    if is_last:
        ok, needed = ranks == ALL, f'"{ALL}" (or nothing) is needed in the last link class'
    elif not _is_count(ranks):
        ok, needed = False, "a whole number is needed in all link classes but the last"
    else:
        ok = ranks % inner == 0
        needed = f"a multiple of the {inner} ranks of the link class before is needed"
    return "" if ok else f"{needed}, not {_shown(ranks)}."


def _wrong_port(link: Link) -> str:
    given = link.ranks_per_port
    if given == ALL:
        return ""
    if not isinstance(given, int) or not _is_count(given):
        return f'a whole number of ranks, or "{ALL}", is needed, not {_shown(given)}.'
    if isinstance(link.ranks, int) and link.ranks % given:
        return f"a divisor of ranks = {link.ranks} is needed, not {given}."
    return ""


# -- Presets ---------------------------------------------------------------------------------------

# GPUs. Latencies: what NCCL's own tuner adds for every step of a ring with its LL128 protocol (the
# table hwLat in NCCL's src/graph/tuning.cc: NVLink 1.9, PCIe 2.5, network 4.0 us). Bandwidths are
# those of the data sheets, which a real transfer reaches by 80 to 95 %:
#   NVLink 4: 900 GB/s a GPU both ways together (NVIDIA H100 data sheet), so 450 each way
#   PCIe 4.0 x16: 16 GT/s * 16 * 128/130 = 31.5 GB/s each way (PCI-SIG)
#   NDR InfiniBand or Ethernet, 400 Gb/s: 50 GB/s each way; 100 Gb/s: 12.5
# gamma: a reduced byte is read twice and written once; H100 SXM memory 3.35 TB/s, A100 PCIe 1.94.
# gap, 0.3 us: an assumption, so that sending to thousands of ranks is not free.
_GAP = 3e-7

NVSWITCH = Topology(
    "nvswitch",
    (
        Link("nvlink", alpha=1.9e-6, beta=1 / 450e9, ranks=8, gap=_GAP),
        Link("rail", alpha=4.0e-6, beta=1 / 50e9, gap=_GAP),
    ),
    gamma=3 / 3.35e12,
)

PCIE = Topology(
    "pcie",
    (
        Link("pcie", alpha=2.5e-6, beta=1 / 31.5e9, ranks=8, gap=_GAP),
        Link("nic", alpha=4.0e-6, beta=1 / 12.5e9, ranks_per_port=8, gap=_GAP),
    ),
    gamma=3 / 1.94e12,
)

# One rank a host, 25 Gb/s. Latency and gap: assumptions, the order of half a TCP round trip within
# a data centre and of a system call with its copy. gamma: as measured for CPU_HOST.
ETHERNET = Topology(
    "ethernet", (Link("ethernet", alpha=2e-5, beta=1 / 3.125e9, gap=2e-6),), gamma=9e-11
)

# One host, shared memory. Bandwidths: numpy's copy (12.2 GB/s) and add (11.1 GB/s of result) of
# 64 MiB by one core of a virtual Xeon; all ranks share
# them, as they do where cores are few or memory is the limit. alpha: an assumption, the order of
# waking a thread that spins.
CPU_HOST = Topology(
    "cpu_host",
    (Link("memory", alpha=1e-6, beta=1 / 12.2e9, ranks_per_port=ALL, gap=1e-7),),
    gamma=9e-11,
)

PRESETS = {t.name: t for t in (NVSWITCH, PCIE, ETHERNET, CPU_HOST)}
