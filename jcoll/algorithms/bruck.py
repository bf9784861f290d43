"""Bruck: as few rounds as can be, ceil(log2 n), at any number of ranks.

all_gather. Each rank collects blocks in the order own, next rank's, ... In round i it sends the
first 2^i of them (or what is still missing) to rank r - 2^i, and appends what comes from rank r +
2^i. In the end the list is rotated into place by local copies.
all_to_all. A block has to go j ranks further, 0 < j < n. In round i all blocks whose j has bit i
set go 2^i ranks on, so after all rounds each has gone j. The blocks of a round are packed into one
message first; they are copied from where the rounds before have left them, and unpacked at the very
end only.

all_gather sends (n - 1) / n of the array, the least there is; all_to_all up to log2(n) / 2 times
the array, as each block is sent once for every bit of its j. Both need scratch and local copies.
Win for small blocks.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications
in multiport message-passing systems", TPDS 1997.
"""

from __future__ import annotations

from jcoll.algorithms.logarithms import ceil_log2
from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Array, Builder


@algorithm("bruck", op="all_gather", rounds=ceil_log2, sent=lambda n: (n - 1) / n)
def all_gather(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    if n == 1:
        return
    blocks = p.scratch(n)  # Chunk blocks + j: the block of rank r + j.
    p.copy(r, r, to=blocks)
    for i in range(ceil_log2(n)):
        have = 1 << i
        p.send(r, (r - have) % n, blocks, to=blocks + have, count=min(have, n - have))
    p.copy(r[:-1], blocks + 1, to=r[:-1] + 1, count=n - 1 - r[:-1])
    p.copy(r[1:], blocks + n - r[1:], to=0, count=r[1:])


def _sent_all_to_all(n: int) -> float:
    return sum(j.bit_count() for j in range(n)) / n


@algorithm("bruck", op="all_to_all", rounds=ceil_log2, sent=_sent_all_to_all)
def all_to_all(p: Builder) -> None:
    r, n = p.ranks, p.num_ranks
    # The work chunk with the block that has j ranks to go, in all.
    at: dict[int, int | Array] = {j: (r + j) % n for j in range(n)}
    for i in range(ceil_log2(n)):
        moving = [j for j in range(n) if j >> i & 1]
        packed, arrived = p.scratch(len(moving)), p.scratch(len(moving))
        for first, place, count in _runs(moving, at):
            p.copy(r, place, to=packed + first, count=count)
        p.send(r, (r + (1 << i)) % n, packed, to=arrived, count=len(moving))
        at.update({j: arrived + k for k, j in enumerate(moving)})
    for j in range(n):
        p.copy(r, at[j], to=n + (r - j) % n)


def _runs(moving: list[int], at: dict[int, int | Array]) -> list[tuple[int, int | Array, int]]:
    """(index in `moving`, its work chunk, count) of what lies side by side in scratch."""
    runs: list[tuple[int, int | Array, int]] = []
    for k, j in enumerate(moving):
        place = at[j]
        if runs and isinstance(place, int):
            first, start, count = runs[-1]
            if isinstance(start, int) and place == start + count:
                runs[-1] = first, start, count + 1
                continue
        runs.append((k, place, 1))
    return runs
