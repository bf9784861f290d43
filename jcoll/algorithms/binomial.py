"""Binomial tree: the number of ranks that are done doubles in every round.

A range of ranks, at first all of them, has one rank that holds what the range needs. It sends the
half of the range that it is not in to that half's first rank; the same is then done in both halves.
After ceil(log2 n) steps every range is one rank. Read backwards, with every message turned around,
the same tree collects: gather and reduce.

broadcast, reduce. The messages are the array. The root sends (receives) ceil(log2 n) times.
scatter, gather. The messages are the blocks of a half, which lie side by side. The root sends
(receives) each block once: (n - 1) / n of the array, the least there is.

The holder stays in the larger half. A chain of messages that wait for one another enters the other,
smaller half each time, so none has more than floor(log2 n).

Wins for small arrays; large broadcasts are faster by a pipelined tree.

Source: the binomial trees of MPICH; Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 2005. Ranges rather than bits of the rank: nothing wraps
around at any root.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jcoll.algorithms.logarithms import ceil_log2, floor_log2
from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Array, Builder


class _Range(NamedTuple):
    first: int
    end: int
    holder: int

    def split(self) -> tuple[_Range, _Range]:
        """(the larger half, with the holder; the other, with its first rank as holder)."""
        first, end, holder = self
        larger = (end - first + 1) // 2
        if holder < first + larger:
            middle = first + larger
            return _Range(first, middle, holder), _Range(middle, end, middle)
        middle = end - larger
        return _Range(middle, end, holder), _Range(first, middle, first)


def _levels(p: Builder) -> list[tuple[Array, Array, Array, Array]]:
    """For every step: holder, new holder, and the new holder's range as (first, count)."""
    ranges, found = [_Range(0, p.num_ranks, p.root)], []
    while ranges:
        pairs = [r.split() for r in ranges if r.end - r.first > 1]
        rows = [(a.holder, b.holder, b.first, b.end - b.first) for a, b in pairs]
        if rows:
            found.append(tuple(np.array(rows).T))
        ranges = [half for pair in pairs for half in pair]
    return found


@algorithm("binomial", op="broadcast", rounds=floor_log2, sent=ceil_log2)
def broadcast(p: Builder) -> None:
    for holder, new, _, _ in _levels(p):
        p.send(holder, new)


@algorithm("binomial", op="reduce", rounds=floor_log2, sent=lambda n: float(n > 1))
def reduce(p: Builder) -> None:
    for holder, new, _, _ in reversed(_levels(p)):
        p.send(new, holder, reduce=True)


@algorithm("binomial", op="scatter", rounds=floor_log2, sent=lambda n: (n - 1) / n)
def scatter(p: Builder) -> None:
    for holder, new, first, count in _levels(p):
        p.send(holder, new, first, count=count)


@algorithm("binomial", op="gather", rounds=floor_log2, sent=lambda n: (n // 2) / n)
def gather(p: Builder) -> None:
    for holder, new, first, count in reversed(_levels(p)):
        p.send(new, holder, first, count=count)
