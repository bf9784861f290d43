"""Makes the plans that compiled programs name, when the native library asks for them."""

from __future__ import annotations

from jcoll.algorithms import registry
from jcoll.algorithms.proof import check_claims, prove
from jcoll.plan.encode import encode_bytes

MAX_PROVED_RANKS = 64
"""Plans of more ranks are taken on trust: the proof takes minutes, and algorithms do not change
their nature there."""


def make(op: str, algorithm: str, num_ranks: int, root: int) -> bytes:
    """Called by the native library, on the thread that instantiates a program."""
    a, plan = registry.get(op, algorithm), registry.plan_for(op, algorithm, num_ranks, root)
    if not a.is_ours:  # These have been proved by jcoll's tests.
        check = prove if num_ranks <= MAX_PROVED_RANKS else check_claims
        check(a, plan)
    return encode_bytes(plan)
