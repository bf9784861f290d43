"""One shot and two shots: everybody talks to everybody at once.

one_shot. Every rank sends what it has to all that want it, then receives: one round. That of
all_reduce sends n - 1 whole arrays and each rank adds them up by itself, in the order of the ranks,
so that all get the same bits. Elsewhere the bytes are the least there are: (n - 1) / n of the
array, or what the root must send.
two_shot. all_reduce as a one_shot reduce_scatter and a one_shot all_gather: two rounds, and the
ring's bytes.

Wins where every pair of ranks has a fast path of its own (NVLink through a switch, shared memory):
one_shot for small arrays, two_shot for all others. On a network the n - 1 messages that meet at
each rank take turns, or worse.

Source: the custom all-reduces of TensorRT-LLM and vLLM; MSCCL++'s "all pairs".
"""

from __future__ import annotations

import numpy as np

from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Builder


def _one(n: int) -> int:
    return min(n - 1, 1)


def _share(n: int) -> float:
    return (n - 1) / n


@algorithm("one_shot", op="all_reduce", rounds=_one, sent=lambda n: n - 1)
def all_reduce(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    own = p.private(0)
    given = p.scratch(n)  # Chunk given + j: what rank j has sent.
    total = given  # Rank 0's is the first; the others are added to it.
    with p.at_once():
        for k in range(1, n):
            p.send(r, (r + k) % n, own, to=given + r)
    p.copy(0, own, to=total)
    for j in range(1, n):
        p.send(r, r, np.where(r == j, own, given + j), to=total, reduce=True)
    p.copy(r, total, to=0)


@algorithm("one_shot", op="reduce_scatter", rounds=_one, sent=_share)
def reduce_scatter(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    with p.at_once():
        for k in range(1, n):
            p.send(r, (r + k) % n, chunk=(r + k) % n, reduce=True)


@algorithm("one_shot", op="all_gather", rounds=_one, sent=_share)
def all_gather(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    with p.at_once():
        for k in range(1, n):
            p.send(r, (r + k) % n, chunk=r)


@algorithm("one_shot", op="all_to_all", rounds=_one, sent=_share, ragged=True)
def all_to_all(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    with p.at_once():
        for k in range(1, n):
            to = (r + k) % n
            p.send(r, to, chunk=to, to=n + r)


@algorithm("one_shot", op="broadcast", rounds=_one, sent=lambda n: n - 1)
def broadcast(p: Builder) -> None:
    for other in _others(p):
        p.send(p.root, other)


@algorithm("one_shot", op="reduce", rounds=_one, sent=_one)
def reduce(p: Builder) -> None:
    for other in _others(p):
        p.send(other, p.root, reduce=True)


@algorithm("one_shot", op="scatter", rounds=_one, sent=_share)
def scatter(p: Builder) -> None:
    for other in _others(p):
        p.send(p.root, other, chunk=other)


@algorithm("one_shot", op="gather", rounds=_one, sent=lambda n: _one(n) / n)
def gather(p: Builder) -> None:
    for other in _others(p):
        p.send(other, p.root, chunk=other)


def _others(p: Builder) -> list[int]:
    """All ranks but the root, those after it first."""
    return [(p.root + k) % p.num_ranks for k in range(1, p.num_ranks)]


@algorithm(
    "two_shot",
    op="all_reduce",
    chunks=lambda n: n,
    rounds=lambda n: 2 * _one(n),
    sent=lambda n: 2 * _share(n),
)
def two_shot(p: Builder) -> None:
    reduce_scatter(p)
    all_gather(p)
