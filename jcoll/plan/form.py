"""What a plan must look like before one asks what it does: fields in range, no more. No jax.

`check_form` is the first part of verify.py, and all that encode.py demands of what it decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jcoll.plan.ir import NO_PEER, Buffer, Kind, Plan, PlanError, Step
from jcoll.plan.ops import OPS

Array = np.ndarray[Any, np.dtype[Any]]


def check_form(plan: Plan) -> None:
    """Raises PlanError for the first step that is not one, or for a header that cannot be."""
    _check_header(plan)
    for bad, problem in _violations(plan, _Columns(plan.steps)):
        if bad.any():
            row = int(np.argmax(bad))
            raise PlanError(f"{where(plan, row)}: {problem.format(*plan.steps[row].tolist())}")


def where(plan: Plan, row: int) -> str:
    """The first part of an error text: which plan, rank and step."""
    step = Step(*plan.steps[row].tolist())
    try:
        text = str(step)
    except ValueError:  # No such kind or buffer: what check_form is about to say.
        text = ", ".join(f"{name}={value}" for name, value in step._asdict().items())
    before = plan.steps[:row, 0] == step.rank
    return f"{plan.name}: rank {step.rank}, step {int(before.sum())} ({text})"


def _check_header(plan: Plan) -> None:
    name = f"{plan.algorithm} {plan.op} of {plan.num_ranks} ranks"
    if plan.op not in OPS:
        raise PlanError(f"{name}: there is no such op.\n  One of {', '.join(OPS)}.")
    least = {"num_ranks": 1, "root": 0, "chunks_per_block": 1, "num_scratch": 0}
    for field, low in least.items():
        if (value := getattr(plan, field)) < low:
            raise PlanError(f"{name}: {field}={value}; it must be at least {low}.")
    if plan.root >= plan.num_ranks:
        raise PlanError(f"{name}: root={plan.root} is not a rank; it must be below the number.")
    shape, dtype = plan.steps.shape, plan.steps.dtype
    if shape[1:] != (len(Step._fields),) or dtype != np.int32:
        raise PlanError(
            f"{name}: steps is {dtype}{list(shape)}; it must be int32[steps, {len(Step._fields)}]."
        )


class _Columns:
    """The fields of all steps, wide enough that chunk + count cannot overflow."""

    def __init__(self, steps: Array) -> None:
        self.rank, self.kind, self.peer = steps.T[:3].astype(np.int64)
        self.src_buffer, self.src_chunk, self.dst_buffer, self.dst_chunk, self.count = steps.T[
            3:
        ].astype(np.int64)

    def is_kind(self, *kinds: Kind) -> Array:
        return np.isin(self.kind, kinds)


def _violations(plan: Plan, s: _Columns) -> Iterator[tuple[Array, str]]:
    """(bool[num_steps], what is wrong where it is True). Each rule may rely on those before it."""
    n = plan.num_ranks
    yield (s.rank < 0) | (s.rank >= n), f"{{0}} is not a rank of {n}."
    yield (
        np.diff(s.rank, prepend=0) < 0,
        "the step before it is of a later rank.\n  Sort the steps by rank.",
    )
    yield ~s.is_kind(*Kind), "there is no kind {1}."
    yield s.count < 1, "count={7}; it must be at least 1."
    messages = s.is_kind(Kind.SEND, Kind.RECV, Kind.RECV_REDUCE)
    yield messages & ((s.peer < 0) | (s.peer >= n)), f"its peer {{2}} is not a rank of {n}."
    yield messages & (s.peer == s.rank), "its peer is the rank itself.\n  Use COPY or REDUCE."
    yield ~messages & (s.peer != NO_PEER), f"a step without peer must have peer={NO_PEER}."
    reads, writes = ~s.is_kind(Kind.RECV), ~s.is_kind(Kind.SEND)
    yield from _range_violations(plan, reads, s.src_buffer, s.src_chunk, s.count, "src")
    yield from _range_violations(plan, writes, s.dst_buffer, s.dst_chunk, s.count, "dst")
    yield (
        writes & (s.dst_buffer == Buffer.INPUT),
        "it writes to INPUT, which is read only.\n  Write to OUTPUT or SCRATCH.",
    )
    yield (
        _overlaps(s),
        "src and dst overlap, so the result would depend on the order of the elements.\n"
        "  Only RECV_REDUCE may write to what it reads, and only to exactly that.",
    )
    needless = s.is_kind(Kind.REDUCE, Kind.RECV_REDUCE) & (not plan.spec.reduces)
    yield needless, f"{plan.op} does not reduce.\n  Use COPY or RECV."


def _range_violations(
    plan: Plan, used: Array, buffer: Array, chunk: Array, count: Array, side: str
) -> Iterator[tuple[Array, str]]:
    yield (
        ~used & ((buffer != 0) | (chunk != 0)),
        f"{side} is not used by this kind; its fields must be 0.",
    )
    yield ~np.isin(buffer, list(Buffer)), f"its {side}_buffer is not one of 0 to {len(Buffer) - 1}."
    sizes = np.array([plan.num_chunks(b) for b in Buffer])
    for b in Buffer:
        yield (
            used & (buffer == b) & ((chunk < 0) | (chunk + count > sizes[b])),
            f"{side} is not inside {b.name.lower()}, which has {sizes[b]} chunks.",
        )


def _overlaps(s: _Columns) -> Array:
    both = s.is_kind(Kind.RECV_REDUCE, Kind.COPY, Kind.REDUCE) & (s.src_buffer == s.dst_buffer)
    distance = np.abs(s.src_chunk - s.dst_chunk)
    in_place = s.is_kind(Kind.RECV_REDUCE) & (distance == 0)
    return both & (distance < s.count) & ~in_place
