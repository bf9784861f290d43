"""Whether the ranks' results are equal to the bit: the order in which a plan adds. No jax.

Addition of floats is not associative, so ranks that add the same contributions in different orders
return different bits, and replicas of a model drift apart. It is commutative (but for the payloads
of NaNs), so the bits of a sum are given by its tree of unordered pairs. Trees are numbered as they
are met, equal ones alike. Only all_reduce returns one reduction to several ranks.
"""

from __future__ import annotations

from jcoll.errors import ranges
from jcoll.plan.ir import Buffer, Kind, Plan
from jcoll.plan.order import execution_order, partners

_Memory = list[dict[tuple[int, int], int]]  # Of each rank: (buffer, chunk) -> tree.


def differing_bits(plan: Plan) -> str | None:
    """Which ranks add a chunk in another order, or None. For plans that verify accepts."""
    if plan.op != "all_reduce":
        return None
    memory = _trees(plan)
    for chunk in range(plan.num_chunks(Buffer.OUTPUT)):
        trees = [m[Buffer.OUTPUT, chunk] for m in memory]
        others = [rank for rank, tree in enumerate(trees) if tree != trees[0]]
        if others:
            return (
                f"{plan.name}: output[{chunk}] of ranks {ranges(others)} is added in another "
                "order than on rank 0.\n"
                "  Let one rank add it up and send the sum, or all add alike."
            )
    return None


def _trees(plan: Plan) -> _Memory:
    """The memory at the end."""
    inputs, n = plan.num_chunks(Buffer.INPUT), plan.num_ranks
    memory: _Memory = [{(Buffer.INPUT, c): c * n + r for c in range(inputs)} for r in range(n)]
    numbers: dict[tuple[int, int], int] = {}

    def pair(a: int, b: int) -> int:
        return numbers.setdefault((min(a, b), max(a, b)), inputs * n + len(numbers))

    partner, rows = partners(plan), plan.steps.tolist()
    messages: dict[int, list[int]] = {}
    for row in execution_order(plan, partner):
        rank, kind, _, src_buffer, src, dst_buffer, dst, count = rows[row]
        here = memory[rank]
        arrives = messages.pop(partner[row]) if Kind(kind).receives else []
        ours = [here[src_buffer, src + k] for k in range(count)] if kind != Kind.RECV else []
        if kind == Kind.SEND:
            messages[row] = ours
            continue
        if kind == Kind.REDUCE:
            arrives = [here[dst_buffer, dst + k] for k in range(count)]
        values = (
            [pair(a, b) for a, b in zip(ours, arrives, strict=True)] if ours and arrives else []
        )
        for k, value in enumerate(values or ours or arrives):
            here[dst_buffer, dst + k] = value
    return memory
