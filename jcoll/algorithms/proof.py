"""What is asked of a plan before it moves a byte. No jax."""

from __future__ import annotations

from jcoll.algorithms.registry import Algorithm
from jcoll.plan.bits import differing_bits
from jcoll.plan.ir import Plan, PlanError
from jcoll.plan.ragged import check_ragged
from jcoll.plan.verify import verify


def prove(a: Algorithm, plan: Plan) -> None:
    """Raises PlanError, naming rank and chunk, unless a plan of `a` keeps all that is promised."""
    verify(plan)
    if problem := differing_bits(plan):
        raise PlanError(problem)
    check_claims(a, plan)


def check_claims(a: Algorithm, plan: Plan) -> None:
    """The part of the proof that costs nothing: whether a plan is what its algorithm says it is."""
    if a.ragged:
        check_ragged(plan)
