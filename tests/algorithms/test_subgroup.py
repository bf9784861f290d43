"""Builders that act in many groups of ranks at once."""

from __future__ import annotations

import numpy as np
import pytest

from jcoll.algorithms import bruck, direct, pairwise, ring
from jcoll.algorithms.registry import all_algorithms, builder_for
from jcoll.plan.builder import Builder
from jcoll.plan.ir import Buffer, Kind, PlanError
from jcoll.plan.subgroup import Subgroups
from jcoll.plan.verify import verify


def view(p: Builder, op: str, members, first, **kwargs) -> Subgroups:
    return Subgroups(p, op, np.array(members), np.array(first), **kwargs)


def test_groups_of_any_ranks_in_any_order():
    p = Builder("all_reduce", 4, chunks_per_block=4)
    pairs, place = [[2, 0], [1, 3]], np.array([[1], [0], [0], [1]])  # A rank's, in its pair.
    halves = [[0, 2]] * 4
    ring.reduce_scatter(view(p, "reduce_scatter", pairs, halves, block_chunks=2))
    across = view(p, "all_reduce", [[2, 1], [3, 0]], 2 * place, block_chunks=2, chunks_per_block=2)
    ring.all_reduce(across)
    ring.all_gather(view(p, "all_gather", pairs, halves, block_chunks=2))
    verify(p.finish())


def test_parts_are_proved_together():
    """Who has sent the last message of a part does not know that it was read."""
    p = Builder("all_reduce", 4, chunks_per_block=2)
    for members in ([[2, 0], [1, 3]], [[0, 1], [3, 2]]):
        ring.all_reduce(
            view(p, "all_reduce", members, [[0]] * 4, block_chunks=2, chunks_per_block=2)
        )
    with pytest.raises(PlanError, match="may not have read yet"):
        verify(p.finish())


SENDS_RANGES_OF_BLOCKS = {
    ("scatter", "binomial"),
    ("gather", "binomial"),
    ("all_gather", "bruck"),
    ("reduce_scatter", "halving_doubling"),
    ("all_gather", "halving_doubling"),
    ("all_to_all", "hierarchical"),
}


@pytest.mark.parametrize("a", all_algorithms(), ids=lambda a: f"{a.op}-{a.name}")
def test_one_group_of_all_is_the_algorithm_itself(a):
    """In reversed order, on blocks of 3 chunks for each of its own."""
    n = 6
    p = Builder(a.op, n, algorithm="outer", root=n - 2, chunks_per_block=3 * a.chunks(n))
    blocks = np.arange(p.num_chunks // p.chunks_per_block)
    if len(blocks) > 1:
        blocks = np.concatenate([part[::-1] for part in np.split(blocks, len(blocks) // n)])
    members = [range(n)[::-1]]
    first = np.tile(blocks * p.chunks_per_block, (n, 1))
    part = view(
        p,
        a.op,
        members,
        first,
        block_chunks=p.chunks_per_block,
        chunks_per_block=a.chunks(n),
        root=1,
    )
    if (a.op, a.name) in SENDS_RANGES_OF_BLOCKS:
        with pytest.raises(PlanError, match="side by side"):
            a.build(part)
        return
    a.build(part)
    part.finish_part()
    verify(p.finish())


def test_two_levels_of_groups():
    """The groups of a group of ranks: 0-3 and 4-7, in each 2 and 2."""
    p = Builder("all_reduce", 8)
    half = view(p, "all_reduce", [[0, 1, 2, 3], [4, 5, 6, 7]], [[0]] * 8, block_chunks=1)
    pairs = view(half, "all_reduce", [[0, 1], [2, 3]], [[0]] * 4, block_chunks=1)
    direct.all_reduce(pairs)
    steps = p.finish().steps
    sends = steps[steps[:, 1] == Kind.SEND]
    assert sorted(zip(sends[:, 0], sends[:, 2], strict=True)) == [
        pair for r in range(0, 8, 2) for pair in ((r, r + 1), (r + 1, r))
    ]


def test_the_block_that_a_rank_keeps():
    p = Builder("all_to_all", 2)
    part = view(p, "all_to_all", [[0, 1]], [[0, 1, 2, 3]] * 2, block_chunks=1)
    pairwise.all_to_all(part)
    assert not part.is_written(part.ranks, 2 + part.ranks).any()
    part.finish_part()
    assert part.is_written(part.ranks, 2 + part.ranks).all()


def test_what_a_part_sends_privately_is_a_copy():
    p = Builder("all_reduce", 2)
    assert p.private(0) == 0
    part = view(p, "all_reduce", [[0, 1]], [[0], [0]], block_chunks=1)
    part.copy(part.ranks, 0, to=part.private(0))
    p.send(p.ranks, 1 - p.ranks, 0, into=0, reduce=True)
    assert p.finish().num_chunks(Buffer.SCRATCH) == 1
    assert p.private(0) > 0


def test_blocks_that_cannot_be_divided():
    with pytest.raises(PlanError, match="ring all_reduce: a block of 3 chunks cannot be divided"):
        view(
            Builder("all_reduce", 2, chunks_per_block=3),
            "all_reduce",
            [[0, 1]],
            [[0], [0]],
            block_chunks=3,
            chunks_per_block=2,
            algorithm="ring",
        )


def test_ranges_that_are_none():
    p = Builder("all_gather", 4, algorithm="outer")
    part = view(p, "all_gather", [[0, 1], [2, 3]], [[0, 2]] * 4, block_chunks=1, algorithm="part")
    with pytest.raises(PlanError, match=r"part all_gather: work chunks 0 to 1 do not .* outer"):
        part.send(0, 1, 0, count=2)
    with pytest.raises(PlanError, match="part all_gather: dst=2 is not a rank of 2"):
        part.send(0, 2, 0)
    with pytest.raises(PlanError, match="not all among the work chunks 0 to 1"):
        part.send(0, 1, 2)


def test_builder_for_makes_what_an_algorithm_wants():
    (a,) = (a for a in all_algorithms("all_gather") if a.build is bruck.all_gather)
    assert builder_for(a, 3).chunks_per_block == 1
