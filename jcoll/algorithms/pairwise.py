"""Pairwise exchange: n - 1 rounds, in each of which every rank has one partner to send to.

In round k rank r sends its block to r xor k and receives from it, if n is a power of two; else it
sends to r + k and receives from r - k. Every round is a permutation: no rank is flooded, and with
xor both directions of one link are busy at once.

Every block goes straight from its owner's input to its place in the receiver's output, as one
message: the sizes of the blocks may differ and be known only at run time (ragged).

Rounds n - 1; every rank sends (n - 1) / n of the array, the least there is. Wins for large blocks.

Source: the long-message all-to-all of MPICH; Thakur, Rabenseifner and Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Builder


@algorithm(
    "pairwise",
    op="all_to_all",
    rounds=lambda n: n - 1,
    sent=lambda n: (n - 1) / n,
    ragged=True,
)
def all_to_all(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    for k in range(1, n):
        to = r ^ k if n & (n - 1) == 0 else (r + k) % n
        p.send(r, to, chunk=to, to=n + r)
