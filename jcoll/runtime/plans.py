"""Makes the plans that compiled programs name, when the native library asks for them."""

from __future__ import annotations

from jcoll.algorithms import registry
from jcoll.plan.encode import encode_bytes
from jcoll.plan.verify import verify

MAX_PROVED_RANKS = 64
"""Plans of more ranks are taken on trust: the proof takes minutes, and algorithms do not change
their nature there."""


def make(op: str, algorithm: str, num_ranks: int, root: int) -> bytes:
    """Called by the native library, on the thread that instantiates a program."""
    plan = registry.plan_for(op, algorithm, num_ranks, root)
    # jcoll's own have been proved by its tests.
    if not registry.get(op, algorithm).is_ours and num_ranks <= MAX_PROVED_RANKS:
        verify(plan)
    return encode_bytes(plan)
