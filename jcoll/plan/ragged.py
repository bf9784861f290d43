"""Whether the blocks of a plan may have sizes of their own, known only at run time. No jax.

An executor then knows a message by who sends it to whom: block b of rank a is what a sends to b.
That fits plans in which every block goes straight from where it is to where it belongs, as one
message. A relay, or a block in parts or in scratch, would move other rows than the plan says.
"""

from __future__ import annotations

import numpy as np

from jcoll.plan.form import where
from jcoll.plan.ir import Buffer, Kind, Plan, PlanError


def check_ragged(plan: Plan) -> None:
    """Raises PlanError for the first step that moves something else. For an all_to_all."""
    if plan.chunks_per_block != 1:
        problem = f"blocks of {plan.chunks_per_block} chunks cannot be ragged."
        raise PlanError(f"{plan.name}: {problem}\n  Use chunks=1, or leave out ragged=True.")
    rank, kind, peer, src_buffer, src, dst_buffer, dst, count = plan.steps.T
    other = np.where(kind == Kind.COPY, rank, peer)
    reads = (src_buffer == Buffer.INPUT) & (src == other) | (kind == Kind.RECV)
    writes = (dst_buffer == Buffer.OUTPUT) & (dst == other) | (kind == Kind.SEND)
    bad = ~reads | ~writes | (count != 1)
    if bad.any():
        row = int(np.argmax(bad))
        raise PlanError(
            f"{where(plan, row)}: this is no whole block on its way from where it is to where it "
            "belongs.\n  ragged=True means that every rank sends input[p] to rank p and receives "
            "output[p] from it, each as one message, and nothing else: leave it out."
        )
