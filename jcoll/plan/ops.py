"""What every op promises, in blocks. No jax.

The data of an op are blocks of equal size. A rank's *work blocks* are the values that an algorithm
names: block w of rank r begins as one of the rank's input blocks or as nothing, and ends as one of
its output blocks or is only passing through. An algorithm divides each block into chunks.

    op              work blocks   begins as              ends as               its final value
    all_reduce      1             input 0                output 0              the reduction of 0
    reduce_scatter  n             input w                output 0 if w == r    the reduction of w
    all_gather      n             input 0 if w == r      output w              rank w's block 0
    all_to_all      n + n         input w (first n)      output w - n (last)   rank w - n's block r
    broadcast       1             input 0 at the root    output 0              the root's block 0
    reduce          1             input 0                output 0 at the root  the reduction of 0
    gather          n             input 0 if w == r      output w at the root  rank w's block 0
    scatter         n             input w at the root    output 0 if w == r    the root's block w

The functions of OpSpec take and return integer arrays (ranks and work blocks, broadcast).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
# (rank, work block, num_ranks, root) -> block, or NONE
BlockMap = Callable[[Array, Array, int, int], Array]

NONE = -1  # No such block.
ALL = -1  # As a source: the reduction over all ranks.


@dataclass(frozen=True)
class OpSpec:
    """One op, by the table above. `per_rank` names the sides that have a block for every rank."""

    name: str
    in_per_rank: bool
    out_per_rank: bool
    input_block: BlockMap
    output_block: BlockMap
    source_rank: BlockMap  # Whose input the final value is, or ALL.
    source_block: BlockMap  # Which of its input blocks.
    reduces: bool = False
    rooted: bool = False
    two_sided: bool = False  # Input and output blocks are different work blocks (all_to_all).

    def in_blocks(self, num_ranks: int) -> int:
        return num_ranks if self.in_per_rank else 1

    def out_blocks(self, num_ranks: int) -> int:
        return num_ranks if self.out_per_rank else 1

    def work_blocks(self, num_ranks: int) -> int:
        if self.two_sided:
            return 2 * num_ranks
        return num_ranks if self.in_per_rank or self.out_per_rank else 1


def _always(r: Array, w: Array, n: int, root: int) -> Array:
    return np.zeros(np.broadcast(r, w).shape, np.int64)


def _same(r: Array, w: Array, n: int, root: int) -> Array:
    return np.broadcast_to(w, np.broadcast(r, w).shape)


def _own(r: Array, w: Array, n: int, root: int) -> Array:
    return np.where(r == w, 0, NONE)


def _at_root(inner: BlockMap) -> BlockMap:
    def at_root(r: Array, w: Array, n: int, root: int) -> Array:
        return np.where(r == root, inner(r, w, n, root), NONE)

    return at_root


def _all(r: Array, w: Array, n: int, root: int) -> Array:
    return np.full(np.broadcast(r, w).shape, ALL)


def _root(r: Array, w: Array, n: int, root: int) -> Array:
    return np.full(np.broadcast(r, w).shape, root)


def _first_half(r: Array, w: Array, n: int, root: int) -> Array:
    return np.where(w < n, w, NONE) + 0 * r


def _second_half(r: Array, w: Array, n: int, root: int) -> Array:
    return np.where(w >= n, w - n, NONE) + 0 * r


def _rank(r: Array, w: Array, n: int, root: int) -> Array:
    return r + 0 * w


OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        OpSpec("all_reduce", False, False, _always, _always, _all, _always, reduces=True),
        OpSpec("reduce_scatter", True, False, _same, _own, _all, _same, reduces=True),
        OpSpec("all_gather", False, True, _own, _same, _same, _always),
        OpSpec(
            "all_to_all", True, True, _first_half, _second_half, _second_half, _rank, two_sided=True
        ),
        OpSpec("broadcast", False, False, _at_root(_always), _always, _root, _always, rooted=True),
        OpSpec(
            "reduce",
            False,
            False,
            _always,
            _at_root(_always),
            _all,
            _always,
            reduces=True,
            rooted=True,
        ),
        OpSpec("gather", False, True, _own, _at_root(_same), _same, _always, rooted=True),
        OpSpec("scatter", True, False, _at_root(_same), _own, _root, _same, rooted=True),
    )
}
