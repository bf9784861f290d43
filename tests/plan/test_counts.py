"""Rounds and chunks: against what is known by hand, the catalogue's formulas, and definitions."""

from __future__ import annotations

import numpy as np
import pytest
from plan.handmade import copy, plan, recv, recv_reduce, send

from jcoll.algorithms.registry import all_algorithms, plan_for
from jcoll.plan import counts as c
from jcoll.plan.ir import Kind, PlanError
from jcoll.plan.ops import OPS


def test_rounds_of_a_chain():
    p = plan(
        "broadcast",
        [send("i0", 1), copy("o0", "i0")],
        [recv("o0", 0), send("o0", 2)],
        [recv("o0", 1)],
    )
    assert c.rounds(p) == 2
    assert c.clocks(p).tolist() == [0, 0, 1, 1, 2]
    assert c.chunks_sent(p).tolist() == [1, 1, 0]
    assert c.sent(p) == 1 and c.num_messages(p) == 2 and c.num_peers(p) == 1


def test_sends_in_a_row_and_waiting_cost_nothing():
    p = plan(
        "gather",
        [copy("o0", "i0"), recv("o1", 1), recv("o2", 2)],
        [send("i0", 0)],
        [send("i0", 0)],
    )
    assert c.rounds(p) == 1
    q = plan(
        "broadcast",
        [send("i0", 1), send("i0", 2), copy("o0", "i0")],
        [recv("o0", 0)],
        [recv("o0", 0)],
    )
    assert c.rounds(q) == 1 and c.num_peers(q) == 2


def test_a_late_receive_does_not_wait_again():
    """Rank 1 sends in round 0; rank 0, already in round 2, takes it at no cost."""
    p = plan(
        "all_gather",
        [send("i0", 2), recv("o2", 2), recv("o1", 1), copy("o0", "i0")],
        [send("i0", 0)],
        [recv("o0", 0), send("o0", 0)],
    )
    assert c.clocks(p).tolist() == [0, 2, 2, 2, 0, 1, 1]


def test_counts_are_of_the_busiest_rank():
    p = plan(
        "all_gather",
        [send("i0", 1, 2), copy("o0", "i0", 2), recv("o2", 1), recv("o3", 1)],
        [send("i0", 0), recv("o0", 0, 2), send("i1", 0), copy("s0", "i0"), copy("o2", "i0", 2)],
        chunks=2,
        scratch=1,
    )
    assert c.counts(p) == c.Counts(
        rounds=2,  # Rank 1's second message follows the one that it took.
        sent=0.5,
        received=0.5,
        reduced=0.0,
        copied=0.75,
        scratch=0.25,
        num_messages=3,
        num_peers=1,
        num_steps=5,
    )


def test_reductions_count_with_and_without_message():
    p = plan("reduce", [recv_reduce("o0", "i0", 1)], [send("i0", 0)])
    assert c.counts(p).reduced == 1 and c.chunks_of(p, Kind.RECV_REDUCE).tolist() == [1, 0]


@pytest.mark.parametrize("op", OPS)
def test_the_unit(op):
    blocks = 1 if op in ("all_reduce", "broadcast", "reduce") else 4
    assert c.unit_chunks(plan(op, [], [], [], [], chunks=3)) == 3 * blocks


def test_an_empty_plan():
    assert c.counts(plan("all_reduce", [])) == c.Counts(0, 0, 0, 0, 0, 0, 0, 0, 0)


def test_what_deadlocks_has_no_rounds():
    with pytest.raises(PlanError, match="deadlock"):
        c.rounds(plan("gather", [recv("o1", 1), send("i0", 1)], [recv("o0", 0), send("i0", 0)]))


@pytest.mark.parametrize("a", all_algorithms(), ids=lambda a: f"{a.op}-{a.name}")
def test_the_catalogue(a):
    for n in (n for n in range(1, 17) if a.supports(n) is None):
        p = plan_for(a.op, a.name, n)
        received = c.chunks_of(p, Kind.RECV, Kind.RECV_REDUCE)
        assert c.chunks_sent(p).sum() == received.sum()
        assert np.all(np.diff(c.clocks(p))[np.diff(p.steps[:, 0]) == 0] >= 0)
