"""Recursive halving and doubling: the ring's bytes in log2 n rounds.

reduce_scatter. In the first round rank r and rank r xor n/2 halve the array: each sends the half
that the other will own and adds what it gets to its own half. The next round does the same with
that half and the partner r xor n/4, and so on, until one block is left.
all_gather. The same backwards: partners exchange what they have, which doubles in every round.
all_reduce. One after the other, on a block that is cut into chunks.

Rounds log2 n each; every rank sends (n - 1) / n of the array in each phase. Wins for medium sizes,
and for large ones where distant ranks are as near as neighbours.

Other numbers of ranks: with p the largest power of two below n, the first 2 (n - p) ranks form
pairs. The odd one of each (extra) gives all that it has to the even one (its host), which takes
part for both and in the end gives it its result: 2 more rounds. (1 if at most half of the core are
hosts: what one host is given reaches the farthest rank last, which then is no host.) For n blocks,
a pair's two blocks lie side by side, so that every message still is one range.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur,
Rabenseifner and Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jcoll.algorithms.logarithms import floor_log2
from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Array, Builder

Ranges = Callable[[Array, int], tuple[Array, Array]]  # Fold.blocks or Fold.parts.


class Fold:
    """n ranks as a power of two of ranks, the core, and extra ones."""

    def __init__(self, n: int) -> None:
        self.log = floor_log2(n)
        self.size = 1 << self.log  # Of the core.
        self.num_extra = n - self.size
        v = np.arange(self.size)
        self.core = self.first(v)  # The ranks of the core.
        self.host = self.core[: self.num_extra]
        self.extra = self.host + 1

    @property
    def rounds(self) -> int:
        """Of one exchange with all partners."""
        return self.log + (self.num_extra > 0) + (2 * self.num_extra > self.size)

    def first(self, v: Array) -> Array:
        """The first rank, or block, of the core's rank v."""
        return v + np.minimum(v, self.num_extra)

    def blocks(self, v: Array, num: int) -> tuple[Array, Array]:
        """(first, count) of the blocks of v, v + 1, ..., v + num - 1."""
        first = self.first(v)
        return first, self.first(v + num) - first

    def parts(self, v: Array, num: int) -> tuple[Array, Array]:
        """The same of an array that is cut into one chunk for each rank of the core."""
        return v, np.full_like(v, num)


def _halve(p: Builder, fold: Fold, ranges: Ranges) -> None:
    """Each rank of the core ends with the reduction of its range of size 1."""
    v = np.arange(fold.size)
    for i in reversed(range(fold.log)):
        half = 1 << i
        partner = v ^ half
        first, count = ranges(partner & -half, half)
        p.send(fold.core, fold.core[partner], first, count=count, reduce=True)


def _double(p: Builder, fold: Fold, ranges: Ranges) -> None:
    """Each rank of the core begins with its range of size 1 and ends with all."""
    v = np.arange(fold.size)
    for i in range(fold.log):
        half = 1 << i
        first, count = ranges(v & -half, half)
        p.send(fold.core, fold.core[v ^ half], first, count=count)


def _sent_all_gather(n: int) -> float:
    """Rank 0, whose ranges have the most pairs, sends the most; last, to its extra rank."""
    fold = Fold(n)
    blocks = sum(int(fold.first(np.array(1 << i))) for i in range(fold.log))
    return (blocks + (n - 1) * (fold.num_extra > 0)) / n


@algorithm(
    "halving_doubling",
    op="reduce_scatter",
    rounds=lambda n: Fold(n).rounds,
    sent=lambda n: 1.0 if Fold(n).num_extra else (n - 1) / n,
)
def reduce_scatter(p: Builder) -> None:
    fold = Fold(p.num_ranks)
    p.send(fold.extra, fold.host, 0, count=p.num_ranks, reduce=True)
    _halve(p, fold, fold.blocks)
    p.send(fold.host, fold.extra, fold.extra)


@algorithm(
    "halving_doubling", op="all_gather", rounds=lambda n: Fold(n).rounds, sent=_sent_all_gather
)
def all_gather(p: Builder) -> None:
    fold = Fold(p.num_ranks)
    p.send(fold.extra, fold.host, fold.extra)
    _double(p, fold, fold.blocks)
    p.send(fold.host, fold.extra, 0, count=fold.extra)
    more = fold.extra < p.num_ranks - 1
    host, extra = fold.host[more], fold.extra[more]
    p.send(host, extra, extra + 1, count=p.num_ranks - 1 - extra)


@algorithm(
    "halving_doubling",
    op="all_reduce",
    chunks=lambda n: Fold(n).size,
    rounds=lambda n: 2 * Fold(n).log + 2 * (Fold(n).num_extra > 0),
    sent=lambda n: 2 * (Fold(n).size - 1) / Fold(n).size + (Fold(n).num_extra > 0),
)
def all_reduce(p: Builder) -> None:
    fold = Fold(p.num_ranks)
    p.send(fold.extra, fold.host, 0, count=fold.size, reduce=True)
    _halve(p, fold, fold.parts)
    _double(p, fold, fold.parts)
    p.send(fold.host, fold.extra, 0, count=fold.size)
