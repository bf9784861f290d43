"""The order of additions: hand-made plans, and against sums of floats."""

from __future__ import annotations

import random

import pytest
from plan.handmade import Part, copy, plan, recv, recv_reduce, reduce, send
from plan.oracle import UNLIMITED, Run

from jcoll.algorithms.registry import all_algorithms, plan_for
from jcoll.plan.bits import differing_bits
from jcoll.plan.ir import Buffer, Plan
from jcoll.plan.verify import verify


def everyone_adds(order: str) -> Plan:
    """Three ranks send their input to each other; rank r adds in the order of word r."""
    ranks: list[list[Part]] = []
    for r, adds in enumerate(order.split()):
        others = [q for q in range(3) if q != r]
        parts = [send("i0", q) for q in others] + [copy(f"s{r}", "i0")]
        parts += [recv(f"s{q}", q) for q in others]
        first, *rest = (f"s{q}" for q in adds)
        ranks.append([*parts, copy("o0", first), *(reduce("o0", s) for s in rest)])
    return plan("all_reduce", *ranks, scratch=3)


@pytest.mark.parametrize(
    ("order", "ranks"),
    [("012 012 012", None), ("012 102 012", None), ("012 120 012", "1"), ("012 021 210", "1-2")],
)
def test_orders(order, ranks):
    p = everyone_adds(order)
    verify(p)
    found = differing_bits(p)
    assert found is None if ranks is None else f"output[0] of ranks {ranks} is added" in found


def test_two_ranks_may_add_crosswise():
    p = plan(
        "all_reduce",
        [send("i0", 1, 2), recv_reduce("o0", "i0", 1, 2)],
        [send("i0", 0, 2), recv_reduce("o0", "i0", 0, 2)],
        chunks=2,
    )
    assert differing_bits(p) is None


def float_outputs(p: Plan, seed: int) -> list[list[float]]:
    numbers = random.Random(seed)
    run = Run(p, UNLIMITED, numbers)
    for memory in run.memory:
        memory[Buffer.INPUT] = [numbers.gauss(0, 1) for _ in memory[Buffer.INPUT]]
    while any([run.advance(r) for r in range(p.num_ranks)]):
        pass
    return [[float(x) for x in memory[Buffer.OUTPUT]] for memory in run.memory]


@pytest.mark.parametrize("a", all_algorithms("all_reduce"), ids=lambda a: a.name)
def test_the_catalogue_returns_the_same_bits_everywhere(a):
    for n in (n for n in range(1, 18) if a.supports(n) is None):
        p = plan_for(a.op, a.name, n)
        assert differing_bits(p) is None
        outputs = float_outputs(p, n)
        assert all(o == outputs[0] for o in outputs)
