"""Parallel aggregated trees (PAT): log2 n rounds at any number of ranks, and the ring's bytes.

all_gather. Every rank's block goes down a binomial tree to all others, far hops first: from the
rank itself to d ranks further, with d the largest power of two below n, then from both to d/2
further, and so on; never to a place that it has been to. The trees of all ranks have the same hops
in the same rounds, so what a rank forwards in a round is aggregated into one message: in the round
of distance d all blocks that have come j ranks far, for the multiples j of 2d with j + d < n.
reduce_scatter. The same backwards, with every message turned around and added up.
all_reduce. One after the other, on a block that is cut into n chunks.

Rounds ceil(log2 n) each, (n - 1) / n of the array in each phase: nothing does better in either, at
any n. Counts are those of bruck. The difference is where the bytes go: bruck's first message is one
block to a neighbour and its last one half of the array to a rank n/2 away; here the far messages
are the small ones, and half of the array goes to the neighbour, who is likely on the same host.
Wins over halving_doubling if n is not a power of two, and over the ring for all but large arrays.

A message must be one range, and the multiples of 2d are not side by side. So blocks are kept in
scratch in an order in which all these sets are ranges: in each round at most one block stays
behind, the one that has come furthest; it is last, and the new blocks are put before all others. If
none stays behind they are put after all others, again with the furthest last. A copy of each block
into and out of that order is the price.

NCCL's PAT also bounds that buffer, by sending pieces and waiting for credits. A plan has no
credits: scratch is as large as the array. An executor that runs the plan on one piece of the data
after another has the bound.

Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025.
The order of the blocks is ours.
"""

from __future__ import annotations

from typing import NamedTuple

from jcoll.algorithms.logarithms import ceil_log2
from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Builder


class _Hop(NamedTuple):
    """All ranks send `count` slots from `first` on to slot `to` of the rank `distance` further."""

    distance: int
    first: int
    to: int
    count: int


def _order(n: int) -> tuple[list[int], list[_Hop]]:
    """(slot of the block that has come j ranks far, for all j; the hops of all_gather)."""
    order, rounds = [0], []
    for i in reversed(range(ceil_log2(n))):
        distance = 1 << i
        moving = [j for j in order if j + distance < n]
        arrived = [j + distance for j in moving]
        rounds.append((distance, moving))
        order = order + arrived if len(moving) == len(order) else arrived + order
    slot = [order.index(j) for j in range(n)]
    return slot, [_Hop(d, slot[js[0]], slot[js[0] + d], len(js)) for d, js in rounds]


def _spread(p: Builder, slots: int, hops: list[_Hop]) -> None:
    for hop in hops:
        there = (p.ranks + hop.distance) % p.num_ranks
        p.send(p.ranks, there, slots + hop.first, to=slots + hop.to, count=hop.count)


def _collect(p: Builder, slots: int, hops: list[_Hop]) -> None:
    for hop in reversed(hops):
        there = (p.ranks - hop.distance) % p.num_ranks
        first, to = slots + hop.to, slots + hop.first
        p.send(p.ranks, there, first, to=to, count=hop.count, reduce=True)


def _sort_in(p: Builder, slot: list[int]) -> int:
    """Copies every rank's blocks into scratch, in the order of `slot`; returns the first slot."""
    slots = p.scratch(p.num_ranks)
    for j in range(p.num_ranks):
        p.copy(p.ranks, (p.ranks - j) % p.num_ranks, to=slots + slot[j])
    return slots


@algorithm("pat", op="all_gather", rounds=ceil_log2, sent=lambda n: (n - 1) / n)
def all_gather(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    slot, hops = _order(n)
    slots = p.scratch(n)
    p.copy(r, r, to=slots + slot[0])
    _spread(p, slots, hops)
    for j in range(1, n):
        p.copy(r, slots + slot[j], to=(r - j) % n)


@algorithm("pat", op="reduce_scatter", rounds=ceil_log2, sent=lambda n: (n - 1) / n)
def reduce_scatter(p: Builder) -> None:
    slot, hops = _order(p.num_ranks)
    slots = _sort_in(p, slot)
    _collect(p, slots, hops)
    p.copy(p.ranks, slots + slot[0], to=p.ranks)


@algorithm(
    "pat",
    op="all_reduce",
    chunks=lambda n: n,
    rounds=lambda n: 2 * ceil_log2(n),
    sent=lambda n: 2 * (n - 1) / n,
)
def all_reduce(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    slot, hops = _order(n)
    slots = _sort_in(p, slot)
    _collect(p, slots, hops)
    _spread(p, slots, hops)  # Into slots that were read: the sum has come through their readers.
    for j in range(n):
        p.copy(r, slots + slot[j], to=(r - j) % n)
