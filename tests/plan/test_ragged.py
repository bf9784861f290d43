"""Plans whose blocks may differ in size: only those that send them whole, and straight."""

from __future__ import annotations

import pytest
from plan.handmade import copy, plan, recv, send

from jcoll.algorithms.registry import all_algorithms, plan_for
from jcoll.plan.ir import PlanError
from jcoll.plan.ragged import check_ragged
from jcoll.plan.verify import verify

OWN = [copy("o0", "i0")], [copy("o1", "i1")]
STRAIGHT = [send("i1", 1), recv("o1", 1)], [send("i0", 0), recv("o0", 0)]


def test_straight():
    p = plan("all_to_all", *(own + parts for own, parts in zip(OWN, STRAIGHT, strict=True)))
    verify(p)
    check_ragged(p)


@pytest.mark.parametrize(
    ("rank0", "where"),
    [
        ([copy("s0", "i1"), send("s0", 1), recv("o1", 1)], r"step 1 \(copy scratch\[0\]"),
        ([send("i1", 1), recv("s0", 1), copy("o1", "s0")], r"step 2 \(recv scratch\[0\]"),
    ],
)
def test_what_only_passes_through(rank0, where):
    p = plan("all_to_all", OWN[0] + rank0, OWN[1] + STRAIGHT[1], scratch=1)
    verify(p)
    with pytest.raises(PlanError, match=f"rank 0, {where}"):
        check_ragged(p)


def test_blocks_in_parts():
    p = plan("all_to_all", [copy("o0", "i0", 2)], chunks=2)
    verify(p)
    with pytest.raises(PlanError, match=r"blocks of 2 chunks cannot be ragged\.\n  Use chunks=1"):
        check_ragged(p)


@pytest.mark.parametrize("a", all_algorithms("all_to_all"), ids=lambda a: a.name)
def test_the_catalogue_says_which(a):
    for n in (1, 2, 3, 5, 8, 12, 17):
        if a.supports(n) is not None or (n < 3 and not a.ragged):
            continue
        if a.ragged:
            check_ragged(plan_for(a.op, a.name, n))
        else:
            with pytest.raises(PlanError, match=f"{a.name} all_to_all of {n} ranks: rank "):
                check_ragged(plan_for(a.op, a.name, n))
