"""Two levels: within hosts and across them, by two other algorithms.

The n ranks are hosts of L ranks with consecutive numbers; local rank l of all hosts, n / L ranks,
are a rail. "inside": in all hosts at once. "across": in all rails at once.

all_reduce. reduce_scatter inside; all_reduce across of the part (1 / L) that each rank then has;
all_gather inside.
reduce_scatter. The same inside, then across.
all_gather. Across, then inside.
all_to_all. Inside, each rank is given all that its rail has to bring to other hosts; then across.

What crosses hosts is 1 / L of what a flat algorithm sends there from each rank (all_to_all: the
same bytes in 1 / L as many messages), and the number of rounds grows with L + n / L rather than n.
Wins where the ranks of a host have a faster network of their own.

Blocks are numbered by rank, host first, and messages are ranges: the blocks that go to one local
rank lie apart. But for all_reduce they are copied into another order and back.

Source: the hierarchical all-reduce of Horovod and NCCL's rails; Thakur, Rabenseifner and Gropp,
IJHPCA 2005, section on SMP clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jcoll import errors
from jcoll.algorithms.registry import Algorithm, BuildFn, get, register
from jcoll.plan.builder import Array, Builder
from jcoll.plan.ir import whole_number
from jcoll.plan.subgroup import Subgroups

HIERARCHICAL_OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "all_to_all_v",
    "all_to_all_v_back",  # Its transpose.
)
"""What is done by two levels between hosts: jcoll/ops/_hierarchical.py, _hierarchical_rows.py. The
ragged ones have no plan of it."""

# The parts of each op in order: what is done, whether across, whether of 1 / L of the data.
_PARTS = {
    "all_reduce": (
        ("reduce_scatter", False, False),
        ("all_reduce", True, True),
        ("all_gather", False, False),
    ),
    "reduce_scatter": (("reduce_scatter", False, False), ("reduce_scatter", True, True)),
    "all_gather": (("all_gather", True, True), ("all_gather", False, False)),
    "all_to_all": (("all_to_all", False, False), ("all_to_all", True, False)),
}


def hierarchical(
    op: str,
    *,
    inner: str | None = None,
    outer: str | None = None,
    num_local: int | None = None,
    name: str = "hierarchical",
) -> Algorithm:
    """Two algorithms as one, inside and across hosts of num_local ranks; registry.register adds it.

    inner, outer: their names (default "ring"; for all_to_all "pairwise"); registered before.
    num_local: default, for all numbers of ranks, the divisor nearest to the square root.

    `rounds` and `sent` are exact if inner and outer keep all ranks equally busy, else bounds.
    """
    if op not in _PARTS:
        fix = f"One of {', '.join(_PARTS)}."
        raise ValueError(errors.text(f"hierarchical({op!r})", "no composition is known.", fix))
    _check(op, inner, outer, num_local)
    default = "pairwise" if op == "all_to_all" else "ring"
    h = _Hierarchy(op, inner or default, outer or default, num_local)
    return Algorithm(name, op, h.build_fn(), h.chunks, h.rounds, h.sent, h.unsupported)


def _check(op: str, inner: str | None, outer: str | None, num_local: int | None) -> None:
    where = f"hierarchical({op!r})"
    if num_local is not None and (whole_number(num_local) or 0) < 1:
        problem = f"num_local={num_local!r}; a whole number from 1 on is needed."
        raise ValueError(errors.text(where, problem, "Pass the number of ranks of a host."))
    for part, across, _ in _PARTS[op]:
        if name := outer if across else inner:
            get(part, name, where=where)


@dataclass(frozen=True)
class _Part:
    algorithm: Algorithm
    num_ranks: int
    across: bool
    share: float


@dataclass(frozen=True)
class _Hierarchy:
    op: str
    inner: str
    outer: str
    num_local: int | None

    def local(self, n: int) -> int:
        return self.num_local or nearest_to_sqrt(n) or 1

    def parts(self, n: int) -> list[_Part]:
        local = self.local(n)
        return [
            _Part(
                get(op, self.outer if across else self.inner),
                n // local if across else local,
                across,
                1 / local if shared else 1,
            )
            for op, across, shared in _PARTS[self.op]
        ]

    def unsupported(self, n: int) -> str | None:
        if self.num_local is None and nearest_to_sqrt(n) is None:
            return "they do not divide into hosts of equal size, larger than 1"
        if n % self.local(n):
            return f"they do not divide into hosts of {self.local(n)}"
        reasons = (part.algorithm.supports(part.num_ranks) for part in self.parts(n))
        return next(filter(None, reasons), None)

    def fine(self, n: int) -> int:
        """Into how many chunks a part's block must be cut, so that all parts can be done."""
        return math.lcm(*(part.algorithm.num_chunks(part.num_ranks) for part in self.parts(n)))

    def chunks(self, n: int) -> int:
        if self.unsupported(n):
            return 1
        return self.fine(n) * (self.local(n) if self.op == "all_reduce" else 1)

    def rounds(self, n: int) -> float:
        return self._sum(n, lambda part: part.algorithm.rounds)

    def sent(self, n: int) -> float:
        return self._sum(n, lambda part: part.algorithm.sent, by_share=True)

    def _sum(
        self,
        n: int,
        formula: Callable[[_Part], Callable[[int], float] | None],
        by_share: bool = False,
    ) -> float:
        total = 0.0
        for part in self.parts(n):
            count = formula(part) or (lambda _: math.nan)
            total += count(part.num_ranks) * (part.share if by_share else 1)
        return total

    def build_fn(self) -> BuildFn:
        lay_out = {
            "all_reduce": _all_reduce,
            "reduce_scatter": _reduce_scatter,
            "all_gather": _all_gather,
            "all_to_all": _all_to_all,
        }[self.op]

        def build(p: Builder) -> None:
            lay_out(_Levels(p, self.parts(p.num_ranks), self.local(p.num_ranks)))

        build.__qualname__ = f"{self}"
        return build


class _Levels:
    """A Builder seen as hosts: `part(i, ...)` does part i of the op in all hosts or all rails."""

    def __init__(self, p: Builder, parts: list[_Part], num_local: int) -> None:
        self.p, self.parts = p, parts
        self.num_local, self.num_hosts = num_local, p.num_ranks // num_local
        self.host, self.local = np.divmod(p.ranks, num_local)
        self.chunks = p.chunks_per_block
        self.hosts = p.ranks.reshape(self.num_hosts, num_local)

    def part(self, index: int, first: Array, block_chunks: int) -> None:
        """first: [block] or [rank, block], where the part's work blocks are."""
        part = self.parts[index]
        a = part.algorithm
        view = Subgroups(
            self.p,
            a.op,
            self.hosts.T if part.across else self.hosts,
            np.broadcast_to(first, (self.p.num_ranks, first.shape[-1])),
            block_chunks=block_chunks,
            chunks_per_block=a.num_chunks(part.num_ranks),
            algorithm=a.name,
        )
        a.write(view)
        view.finish_part()

    def of_hosts(self, start: int, block_chunks: int) -> Array:
        return start + np.arange(self.num_hosts) * block_chunks

    def of_locals(self, start: int, block_chunks: int) -> Array:
        return start + np.arange(self.num_local) * block_chunks

    def own(self) -> Array:
        """The rank's own block, among blocks in the order (local, host)."""
        return self.local * self.num_hosts + self.host

    def own_rail(self, start: int) -> Array:
        """The blocks of the own local rank, among blocks in the order (local, host)."""
        by_host = self.of_hosts(start, self.chunks)
        return by_host + self.local[:, None] * self.num_hosts * self.chunks

    def transpose(self, from_: int, to: int, rows: int, skip: Array | None = None) -> None:
        """Copies blocks in an order (i, j), i < rows, to the order (j, i); not block skip[r]."""
        columns = self.p.num_ranks // rows
        for block in range(self.p.num_ranks):
            i, j = divmod(block, columns)
            source, target = from_ + block * self.chunks, to + (j * rows + i) * self.chunks
            ranks = self.p.ranks if skip is None else self.p.ranks[skip != block]
            self.p.copy(ranks, source, target, count=self.chunks)


def _all_reduce(v: _Levels) -> None:
    size = v.chunks // v.num_local
    of_locals = v.of_locals(0, size)
    v.part(0, of_locals, size)
    v.part(1, v.local[:, None] * size, size)
    v.part(2, of_locals, size)


def _reduce_scatter(v: _Levels) -> None:
    p, c = v.p, v.chunks
    staged = p.scratch(p.num_ranks * c)
    v.transpose(0, staged, rows=v.num_hosts)
    v.part(0, v.of_locals(staged, v.num_hosts * c), v.num_hosts * c)
    v.part(1, v.own_rail(staged), c)
    p.copy(p.ranks, staged + v.own() * c, p.ranks * c, count=c)


def _all_gather(v: _Levels) -> None:
    p, c = v.p, v.chunks
    staged = p.scratch(p.num_ranks * c)
    p.copy(p.ranks, p.ranks * c, staged + v.own() * c, count=c)
    v.part(0, v.own_rail(staged), c)
    v.part(1, v.of_locals(staged, v.num_hosts * c), v.num_hosts * c)
    v.transpose(staged, 0, rows=v.num_local, skip=v.own())


def _all_to_all(v: _Levels) -> None:
    p, c, n = v.p, v.chunks, v.p.num_ranks
    given, taken, sorted_ = p.scratch(n * c), p.scratch(n * c), p.scratch(n * c)
    for_local, for_host = v.num_hosts * c, v.num_local * c
    v.transpose(0, given, rows=v.num_hosts)
    firsts = v.of_locals(given, for_local), v.of_locals(taken, for_local)
    v.part(0, np.concatenate(firsts), for_local)
    v.transpose(taken, sorted_, rows=v.num_local)
    firsts = v.of_hosts(sorted_, for_host), v.of_hosts(n * c, for_host)
    v.part(1, np.concatenate(firsts), for_host)


def nearest_to_sqrt(n: int) -> int | None:
    """The divisor of n, other than 1 and n, that is nearest to its square root.

    That is the largest one up to the root: n / d is as far above it or farther, as d is below.
    """
    return next((d for d in range(math.isqrt(n), 1, -1) if n % d == 0), None)


for _op in _PARTS:
    register(hierarchical(_op))
