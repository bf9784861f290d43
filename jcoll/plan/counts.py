"""What a plan costs, counted: rounds, chunks, messages, memory. No jax.

The unit M is the array that the op is about: of all_reduce, broadcast and reduce the chunks of one
block, else those of num_ranks blocks (the larger side).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jcoll.plan.ir import Kind, Plan
from jcoll.plan.order import execution_order, partners

Array = np.ndarray[Any, np.dtype[Any]]


class Counts(NamedTuple):
    """One row of a table of plans. Of ranks that differ, the largest."""

    rounds: int  # Messages that follow one another.
    sent: float  # Chunks sent by a rank, in units of M.
    received: float
    reduced: float  # Chunks reduced by a rank, with or without a message, in units of M.
    copied: float  # Chunks copied within a rank, in units of M.
    scratch: float  # In units of M.
    num_messages: int  # Of all ranks.
    num_peers: int  # Other ranks that a rank sends to.
    num_steps: int  # Of a rank.


def counts(plan: Plan) -> Counts:
    unit = unit_chunks(plan)

    def busiest(*kinds: Kind) -> float:
        return int(chunks_of(plan, *kinds).max()) / unit

    return Counts(
        rounds=rounds(plan),
        sent=sent(plan),
        received=busiest(Kind.RECV, Kind.RECV_REDUCE),
        reduced=busiest(Kind.REDUCE, Kind.RECV_REDUCE),
        copied=busiest(Kind.COPY),
        scratch=plan.num_scratch / unit,
        num_messages=num_messages(plan),
        num_peers=num_peers(plan),
        num_steps=int(np.diff(plan.first_step).max()),
    )


def unit_chunks(plan: Plan) -> int:
    """Chunks in M."""
    blocks = max(plan.spec.in_blocks(plan.num_ranks), plan.spec.out_blocks(plan.num_ranks))
    return blocks * plan.chunks_per_block


def rounds(plan: Plan) -> int:
    """The longest chain of messages each of which is sent after the one before it has come."""
    return int(clocks(plan).max(initial=0))


def clocks(plan: Plan) -> Array:
    """int64[num_steps]: after how many rounds each step is done.

    A rank's clock after a receive is the later one of its own and the sender's at the send + 1.
    Sends in a row cost nothing: these are latencies; bandwidth is counted in chunks.
    """
    partner = partners(plan)
    rank, kind = plan.steps[:, 0].tolist(), plan.steps[:, 1].tolist()
    clock, now = [0] * len(rank), [0] * plan.num_ranks
    for row in execution_order(plan, partner):
        r = rank[row]
        if kind[row] in (Kind.RECV, Kind.RECV_REDUCE):
            now[r] = max(now[r], clock[partner[row]] + 1)
        clock[row] = now[r]
    return np.array(clock, np.int64)


def chunks_of(plan: Plan, *kinds: Kind) -> Array:
    """int64[num_ranks]: chunks that each rank's steps of these kinds name."""
    rank, kind, *_, count = plan.steps.T.astype(np.int64)
    chosen = np.isin(kind, kinds)
    total = np.zeros(plan.num_ranks, np.int64)
    np.add.at(total, rank[chosen], count[chosen])
    return total


def chunks_sent(plan: Plan) -> Array:
    """int64[num_ranks]: chunks that each rank sends."""
    return chunks_of(plan, Kind.SEND)


def sent(plan: Plan) -> float:
    """Chunks that the busiest rank sends, in units of M."""
    return int(chunks_sent(plan).max()) / unit_chunks(plan)


def num_messages(plan: Plan) -> int:
    return int(np.sum(plan.steps[:, 1] == Kind.SEND))


def num_peers(plan: Plan) -> int:
    """To how many other ranks the rank with most of them sends."""
    rank, kind, peer = plan.steps.T[:3].astype(np.int64)
    pairs = np.unique((rank * plan.num_ranks + peer)[kind == Kind.SEND])
    return int(np.bincount(pairs // plan.num_ranks, minlength=1).max())
