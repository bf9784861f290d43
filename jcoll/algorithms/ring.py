"""Ring: every rank talks to its two neighbours only.

reduce_scatter. Chunk c starts its way at rank c + 1 and travels once around, r -> r + 1, gathering
each rank's contribution; after n - 1 rounds it arrives, complete, at rank c. In round k (1 to
n - 1) rank r sends chunk r - k, the one it has just received and added to.
all_gather. The finished chunks travel around once more: in round k rank r sends chunk r - k + 1.
all_reduce. One after the other, on a block that is cut into n chunks.

Rounds n - 1 each; every rank sends (n - 1) / n of the array in each phase, which no algorithm can
undercut. Wins for large arrays; loses for small ones, where n - 1 latencies add up.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009; NCCL's ring.
"""

from __future__ import annotations

from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Builder


@algorithm("ring", op="reduce_scatter", rounds=lambda n: n - 1, sent=lambda n: (n - 1) / n)
def reduce_scatter(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    for k in range(1, n):
        p.send(r, (r + 1) % n, chunk=(r - k) % n, reduce=True)


@algorithm("ring", op="all_gather", rounds=lambda n: n - 1, sent=lambda n: (n - 1) / n)
def all_gather(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    for k in range(1, n):
        p.send(r, (r + 1) % n, chunk=(r - k + 1) % n)


@algorithm(
    "ring",
    op="all_reduce",
    chunks=lambda n: n,
    rounds=lambda n: 2 * (n - 1),
    sent=lambda n: 2 * (n - 1) / n,
)
def all_reduce(p: Builder) -> None:
    reduce_scatter(p)
    all_gather(p)
