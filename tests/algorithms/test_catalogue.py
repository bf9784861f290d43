"""Every algorithm, op, number of ranks and root of the catalogue: proved, run and counted."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from plan import oracle

from jcoll import algorithms
from jcoll.algorithms import registry
from jcoll.algorithms.hierarchical import hierarchical, nearest_to_sqrt
from jcoll.algorithms.proof import prove
from jcoll.algorithms.registry import Algorithm, algorithm, all_algorithms, plan_for
from jcoll.plan.builder import Builder
from jcoll.plan.counts import counts
from jcoll.plan.ir import Buffer, Kind, Plan, PlanError
from jcoll.plan.ops import OPS
from jcoll.plan.verify import verify

NUM_RANKS = (*range(1, 18), 32, 64)
EVERY = pytest.mark.parametrize("a", all_algorithms(), ids=lambda a: f"{a.op}-{a.name}")


def roots(a: Algorithm, n: int) -> list[int]:
    if not OPS[a.op].rooted:
        return [0]
    return list(range(n)) if n <= 17 else [0, 1, n // 2, n - 1]


def plans(a: Algorithm, num_ranks=NUM_RANKS) -> list[Plan]:
    supported = [n for n in num_ranks if a.supports(n) is None]
    return [plan_for(a.op, a.name, n, root) for n in supported for root in roots(a, n)]


def built(a: Algorithm, n: int) -> Plan:
    builder = registry.builder_for(a, n)
    a.build(builder)
    return builder.finish()


@EVERY
def test_is_right_and_costs_what_it_says(a):
    """All that is asked of a plan, at any timing; and the formulas. At once: it is building the
    plans that takes long."""
    for plan in plans(a):
        prove(a, plan)
        found, n = counts(plan), plan.num_ranks
        assert a.rounds is None or found.rounds == a.rounds(n), (n, plan.root)
        assert a.sent is None or found.sent == pytest.approx(a.sent(n)), (n, plan.root)


@EVERY
def test_runs_on_numbers(a):
    """A second opinion on small groups; no plan hangs with one message in flight per connection."""
    for plan in plans(a, (*range(1, 10), 12)):
        if plan.root in (0, plan.num_ranks - 1):
            assert oracle.first_problem(plan, seed=plan.num_ranks) is None, plan.name


def test_ragged_algorithms():
    assert {(a.op, a.name) for a in all_algorithms() if a.ragged} == {
        ("all_to_all", "pairwise"),
        ("all_to_all", "one_shot"),
    }


def test_every_op_has_algorithms_for_any_number_of_ranks():
    for op, n in itertools.product(OPS, NUM_RANKS):
        assert len(registry.supporting(op, n)) >= 2


COMBINATIONS = [
    ("all_reduce", "ring", "butterfly", 12, 4),
    ("all_reduce", "one_shot", "one_shot", 12, 3),
    ("all_reduce", "halving_doubling", "tree", 15, 5),
    ("all_reduce", "pat", "hierarchical", 24, 4),
    ("all_reduce", "hierarchical", "halving_doubling", 24, 6),
    ("all_reduce", "ring", "ring", 6, 6),
    ("all_reduce", "ring", "ring", 6, 1),
    ("reduce_scatter", "pat", "halving_doubling", 15, 3),
    ("reduce_scatter", "one_shot", "ring", 12, 6),
    ("all_gather", "bruck", "ring", 12, 4),
    ("all_gather", "halving_doubling", "pat", 15, 3),
    ("all_gather", "hierarchical", "one_shot", 24, 4),
    ("all_to_all", "bruck", "one_shot", 12, 3),
    ("all_to_all", "hierarchical", "bruck", 24, 4),
]


@pytest.mark.parametrize(("op", "inner", "outer", "n", "num_local"), COMBINATIONS)
def test_hierarchies(op, inner, outer, n, num_local):
    a = hierarchical(op, inner=inner, outer=outer, num_local=num_local, name="composed")
    assert a.supports(n) is None
    plan = built(a, n)
    verify(plan)
    found = counts(plan)
    assert found.rounds <= a.rounds(n)
    assert found.sent <= a.sent(n) + 1e-9


def test_few_bytes_cross_hosts():
    """A rank sends (K - 1) / K / L of the reduce_scatter's and of the all_gather's array there."""
    local, hosts = 4, 3
    for op, phases in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        plan = built(hierarchical(op, num_local=local), local * hosts)
        sends = plan.steps[plan.steps[:, 1] == Kind.SEND]
        across = sends[sends[:, 0] // local != sends[:, 2] // local]
        in_all = plan.num_chunks(Buffer.INPUT if op != "all_gather" else Buffer.OUTPUT)
        per_rank = across[:, -1].sum() / plan.num_ranks / in_all
        assert per_rank == pytest.approx(phases * (hosts - 1) / hosts / local)


def test_hierarchical_errors():
    a = hierarchical("all_reduce", num_local=4)
    assert a.supports(6) == "they do not divide into hosts of 4"
    a = hierarchical("all_reduce", outer="hierarchical", num_local=4)
    assert a.supports(12) == "they do not divide into hosts of equal size, larger than 1"
    with pytest.raises(ValueError, match="'rnig' is unknown"):
        hierarchical("all_reduce", inner="rnig", num_local=2).supports(4)
    with pytest.raises(ValueError, match=r"hierarchical\('broadcast'\): no composition"):
        hierarchical("broadcast")


def test_nearest_divisor():
    found = {n: nearest_to_sqrt(n) for n in (1, 2, 7, 4, 8, 12, 64, 96)}
    assert found == {1: None, 2: None, 7: None, 4: 2, 8: 2, 12: 3, 64: 8, 96: 8}


def test_unknown_algorithm():
    with pytest.raises(ValueError, match="'rnig' is unknown") as error:
        registry.get("all_reduce", "rnig")
    assert "\n  Algorithms of all_reduce: auto, direct, xla, halving_doubling, " in str(error.value)


def test_algorithm_of_another_op():
    with pytest.raises(ValueError, match="all_reduce: algorithm='pairwise' does not serve this op"):
        registry.get("all_reduce", "pairwise")


def test_unsupported_number_of_ranks():
    with pytest.raises(ValueError, match="'hierarchical' cannot serve 7 ranks: they do") as error:
        plan_for("all_gather", "hierarchical", 7)
    assert "Available for 7 ranks: auto, direct, xla, bruck, halving_doubling" in str(error.value)


def test_a_name_that_is_taken():
    with pytest.raises(
        ValueError, match=r"the name is taken by jcoll\.algorithms\.ring\.all_reduce"
    ):
        algorithm("ring", op="all_reduce")(lambda p: None)
    with pytest.raises(ValueError, match="is taken"):
        registry.register(hierarchical("all_reduce", num_local=2))


def test_a_function_defined_again_takes_the_place_of_the_old_one():
    for peer in (1, 2):

        @algorithm("mine", op="broadcast")
        def mine(p: Builder, peer: int = peer) -> None:
            p.send(p.root, peer)

    assert plan_for("broadcast", "mine", 3).steps[0, 2] == 2


@pytest.mark.parametrize("name", ["auto", "direct", "xla", "two words", ""])
def test_names_that_cannot_be(name):
    with pytest.raises(ValueError, match="cannot be used"):
        algorithm(name, op="all_reduce")


def test_an_op_without_plans():
    with pytest.raises(ValueError, match=r"there is no such op\.\n  One of all_reduce"):
        algorithms.algorithm("mine", op="barrier")


def test_at_once_refuses_what_would_hang():
    p = Builder("all_reduce", 2)
    with p.at_once():
        p.send(0, 1)
        with pytest.raises(PlanError, match="a second message to rank 1"):
            p.send(0, 1)
        with pytest.raises(PlanError, match="a local step of rank 0"):
            p.copy(0, 0, to=p.scratch())


def test_at_once_is_one_round():
    def rounds(context) -> int:
        p = Builder("all_to_all", 4)
        with context(p):
            for k in range(1, 4):
                to = (p.ranks + k) % 4
                p.send(p.ranks, to, to, to=4 + p.ranks)
        return counts(p.finish()).rounds

    assert rounds(contextlib.nullcontext) == 3
    assert rounds(Builder.at_once) == 1


@pytest.mark.parametrize("chunks", [1, 2, 3, 16])
@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "reduce"])
def test_trees_of_other_numbers_of_chunks(op, chunks):
    """More chunks overlap: two more per tree cost two rounds, not two trips."""
    for n in (2, 6, 13):
        p = Builder(op, n, chunks_per_block=chunks)
        registry.get(op, "tree").build(p)
        plan = p.finish()
        verify(plan)
        depth, ways = (n - 1).bit_length(), 2 if op == "all_reduce" else 1
        assert n == 2 or counts(plan).rounds <= ways * depth + 2 * -(-chunks // 2)
