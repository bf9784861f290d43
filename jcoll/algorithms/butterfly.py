"""Butterfly (recursive doubling): whole arrays, in as few rounds as there can be.

In round i rank r and rank r xor 2^i exchange all that they have and both add it up: after log2 n
rounds everybody has the sum. Both partners reduce the same two values (executors order operands by
rank), so all ranks end with the same bits.

A partner may still be reading what it was sent when the result of the round is known, and nothing
tells that it is done before the end: every round writes to a chunk of its own (scratch).

Other numbers of ranks: with p the largest power of two below n, each of n - p extra ranks gives its
array to a neighbour before, and is given the result after: 2 more rounds (halving_doubling.py).

Rounds log2 n; every rank sends log2 n times the array. Wins for the smallest arrays.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 2005.
"""

from __future__ import annotations

import numpy as np

from jcoll.algorithms.halving_doubling import Fold
from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Builder


@algorithm(
    "butterfly",
    op="all_reduce",
    rounds=lambda n: Fold(n).rounds,
    sent=lambda n: Fold(n).log + (Fold(n).num_extra > 0),
)
def all_reduce(p: Builder) -> None:
    fold = Fold(p.num_ranks)
    core, v = fold.core, np.arange(fold.size)
    now = np.full(fold.size, p.private(0))  # Where each rank of the core has its sum so far.
    if fold.num_extra:
        folded = p.scratch()
        p.send(fold.extra, fold.host, 0, into=folded, reduce=True)
        now[: fold.num_extra] = folded
    for i in range(fold.log):
        partner = v ^ (1 << i)
        result = p.scratch() if i < fold.log - 1 else 0
        p.send(core, core[partner], now, to=now[partner], into=result, reduce=True)
        now[:] = result
    p.send(fold.host, fold.extra)
