"""Double binary tree: few rounds, and yet twice the array at most.

In one binary tree inner ranks send and receive three times as much as leaves, whose links idle. So
there are two trees, each for half of the array: the root on top of both, and below it every rank
inner in at most one. Both trees have the ranks in order, from left to right, with the odd places as
leaves; the second one counts the places from the other end (an even number of places) or from one
further (an odd number), which turns odd places into even ones.

reduce. Sums go up. broadcast. The array comes down. all_reduce. Up, then down. Each half is cut
into chunks, which follow one another: in round i ranks at depth d of a tree of depth D send up
chunk i - (D - d) and down chunk i - (D + d), so that both directions of all links are busy at once.

Depth ceil(log2 n). Every rank sends the array at most once up (half in each tree) and once down
(two children in the tree where it is inner). Wins for medium sizes and many ranks.

Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 2009; the form of the trees is that of NCCL. Here the root is a rank above
both trees, so that any rank can be it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jcoll.algorithms.logarithms import ceil_log2
from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Array, Builder

CHUNKS = 8  # 4 for each tree.


class _Edges(NamedTuple):
    """All edges of a tree that lead to left children, or all that lead to right ones."""

    child: Array
    parent: Array
    depth: Array  # Of the child; the root's is 0.


@dataclass(frozen=True)
class _Tree:
    sides: tuple[_Edges, _Edges]
    depth: int
    first_chunk: int
    num_chunks: int


class _Messages(NamedTuple):
    src: Array
    dst: Array
    chunk: Array
    reduce: bool


def _parent(place: int, last: int) -> int:
    """In the tree of places 1 to `last`, below 0: a place is as high as its lowest bit."""
    bit = place & -place
    up = place ^ bit | bit << 1
    return up if up <= last else place ^ bit


def _edges(rank_at: Array) -> tuple[_Edges, _Edges]:
    last = len(rank_at) - 1
    sides: tuple[list[tuple[int, int, int]], ...] = ([], [])
    depth = {0: 0}
    for place in sorted(range(1, last + 1), key=lambda p: p & -p, reverse=True):
        parent = _parent(place, last)
        depth[place] = depth[parent] + 1
        row = rank_at[place], rank_at[parent], depth[place]
        sides[place > parent > 0].append(row)
    left, right = (_Edges(*np.array(side, int).reshape(-1, 3).T) for side in sides)
    return left, right


def _trees(p: Builder) -> list[_Tree]:
    n = p.num_ranks
    place = np.arange(1, n)
    mirrored = n - place if n % 2 else (place - 2) % (n - 1) + 1
    trees, first = [], 0
    for index, order in enumerate((place, mirrored)):
        rank_at = (p.root + np.concatenate([[0], order])) % n
        chunks = (p.chunks_per_block + 1 - index) // 2
        trees.append(_Tree(_edges(rank_at), ceil_log2(n), first, chunks))
        first += chunks
    return trees


def _run(p: Builder, up: bool, down: bool) -> None:
    if p.num_ranks == 1:
        return
    trees = _trees(p)
    depth = trees[0].depth
    for i in range(depth * (up + down) + trees[0].num_chunks - 1):
        messages = []
        for tree in trees:
            messages += _moves(tree, i - depth, -1) if up else []
            messages += _moves(tree, i - depth * up + 1, 1) if down else []
        _send(p, messages)


def _moves(tree: _Tree, chunk: int, direction: int) -> list[_Messages]:
    """What goes up (-1) or down (1) in a round; `chunk`: the one that is due at depth 0."""
    found = []
    for edges in tree.sides:
        due = chunk - direction * edges.depth
        some = (due >= 0) & (due < tree.num_chunks)
        src, dst = (edges.child[some], edges.parent[some])[::-direction]
        found.append(_Messages(src, dst, tree.first_chunk + due[some], direction < 0))
    return found


def _send(p: Builder, messages: list[_Messages]) -> None:
    """In one round, but for the second tree's messages between the same ranks as the first's."""
    sent, late = np.zeros(0, int), []
    with p.at_once():
        for m in messages:
            pairs = m.src * p.num_ranks + m.dst
            again = np.isin(pairs, sent)
            sent = np.concatenate([sent, pairs])
            p.send(m.src[~again], m.dst[~again], m.chunk[~again], reduce=m.reduce)
            late.append(_Messages(m.src[again], m.dst[again], m.chunk[again], m.reduce))
    with p.at_once():
        for m in late:
            p.send(m.src, m.dst, m.chunk, reduce=m.reduce)


def _rounds(n: int) -> int:
    """One way: the last chunk follows CHUNKS / 2 - 1 rounds after the first."""
    return ceil_log2(n) + CHUNKS // 2 - 1 if n > 2 else n - 1


def _rounds_both_ways(n: int) -> int:
    """Up and down; with few ranks the two trees share connections, and take turns."""
    return max(2 * ceil_log2(n) + CHUNKS // 2 - 1, CHUNKS) if n > 1 else 0


@algorithm(
    "tree",
    op="all_reduce",
    chunks=CHUNKS,
    rounds=_rounds_both_ways,
    sent=lambda n: min(n / 2, 2) if n > 1 else 0,
)
def all_reduce(p: Builder) -> None:
    _run(p, up=True, down=True)


@algorithm("tree", op="broadcast", chunks=CHUNKS, rounds=_rounds, sent=lambda n: min(n - 1, 1))
def broadcast(p: Builder) -> None:
    _run(p, up=False, down=True)


@algorithm("tree", op="reduce", chunks=CHUNKS, rounds=_rounds, sent=lambda n: min(n - 1, 1))
def reduce(p: Builder) -> None:
    _run(p, up=True, down=False)
