"""What a user's plan is asked before it is followed, beside what verify proves."""

from __future__ import annotations

import pytest
from plan.handmade import plan, recv_reduce, send

from jcoll.algorithms import bruck
from jcoll.algorithms.proof import prove
from jcoll.algorithms.registry import algorithm, get
from jcoll.plan.ir import PlanError
from jcoll.plan.verify import verify
from jcoll.runtime import plans


def test_a_relay_is_not_ragged() -> None:
    algorithm("mine", op="all_to_all")(bruck.all_to_all)
    assert not get("all_to_all", "mine").is_ours and get("all_to_all", "bruck").is_ours
    plans.make("all_to_all", "mine", 4, 0)
    algorithm("mine", op="all_to_all", ragged=True)(bruck.all_to_all)
    message = r"(?s)mine all_to_all of 4 ranks: rank 0, step 0 \(copy scratch.*ragged=True means"
    with pytest.raises(PlanError, match=message):
        plans.make("all_to_all", "mine", 4, 0)
    with pytest.raises(PlanError, match=r"(?s)of 65 ranks.*ragged=True"):  # Proved or not.
        plans.make("all_to_all", "mine", 65, 0)


def test_ranks_that_add_in_other_orders() -> None:
    """Each sends its input to the next two; what comes first is added first."""
    p = plan(
        "all_reduce",
        *(
            [
                send("i0", (r + 1) % 3),
                send("i0", (r + 2) % 3),
                recv_reduce("s0", "i0", (r + 2) % 3),
                recv_reduce("o0", "s0", (r + 1) % 3),
            ]
            for r in range(3)
        ),
        scratch=1,
    )
    verify(p)
    with pytest.raises(PlanError, match=r"output\[0\] of ranks 1-2 is added in another order"):
        prove(get("all_reduce", "ring"), p)
