"""A plan as a flat array of little-endian int32: what the native executors read. No jax.

    words                     what
    0 - 9                     the header: _HEADER's fields in their order
    name_words                the algorithm's name in UTF-8, filled up with zero bytes
    num_ranks + 1             first_step: rank r's steps are first_step[r] to first_step[r + 1]
    num_steps * 8             the steps, a row each, Step's fields in their order

`rank` in the rows repeats what first_step says, so that a row is a power of two of bytes and can be
understood by itself. Numbers of ops, kinds and buffers are part of the format: a change of one of
them, or of the layout, is a new VERSION.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jcoll.plan.form import check_form
from jcoll.plan.ir import Plan, PlanError, Step

Array = np.ndarray[Any, np.dtype[Any]]

MAGIC = int.from_bytes(b"JCPL", "little")
VERSION = 1
OP_IDS = {
    "all_reduce": 0,
    "reduce_scatter": 1,
    "all_gather": 2,
    "all_to_all": 3,
    "broadcast": 4,
    "reduce": 5,
    "gather": 6,
    "scatter": 7,
}

_INT32 = np.dtype("<i4")
_OP_NAMES = {number: op for op, number in OP_IDS.items()}


class _Header(NamedTuple):
    magic: int
    version: int
    num_words: int  # Of all, header included.
    op: int
    num_ranks: int
    root: int
    chunks_per_block: int
    num_scratch: int
    num_steps: int
    name_words: int

    def words(self) -> int:
        """The length that follows from the other fields."""
        rows = self.num_steps * len(Step._fields)
        return len(self) + self.name_words + self.num_ranks + 1 + rows


def encode(plan: Plan) -> Array:
    """int32[num_words]. Raises PlanError for a plan that decode would not accept."""
    check_form(plan)
    name = plan.algorithm.encode()
    name += bytes(-len(name) % _INT32.itemsize)
    header = _Header(
        magic=MAGIC,
        version=VERSION,
        num_words=0,
        op=OP_IDS[plan.op],
        num_ranks=plan.num_ranks,
        root=plan.root,
        chunks_per_block=plan.chunks_per_block,
        num_scratch=plan.num_scratch,
        num_steps=len(plan.steps),
        name_words=len(name) // _INT32.itemsize,
    )
    header = header._replace(num_words=header.words())
    parts = (header, np.frombuffer(name, _INT32), plan.first_step, plan.steps.ravel())
    return np.concatenate([np.asarray(part, _INT32) for part in parts])


def encode_bytes(plan: Plan) -> bytes:
    return encode(plan).tobytes()


def decode(data: Array | bytes) -> Plan:
    """The plan that encode was given. Raises PlanError for what encode cannot have made.

    Whether the plan does what its op promises is verify's question.
    """
    words = _as_words(data)
    header = _check_header(words)
    ends = np.cumsum([len(header), header.name_words, header.num_ranks + 1])
    _, name, first_step, steps = np.split(words, ends)
    plan = Plan(
        op=_OP_NAMES[header.op],
        algorithm=_name(name),
        num_ranks=header.num_ranks,
        root=header.root,
        chunks_per_block=header.chunks_per_block,
        num_scratch=header.num_scratch,
        steps=steps.reshape(-1, len(Step._fields)).astype(np.int32),
    )
    check_form(plan)
    if not np.array_equal(first_step, plan.first_step):
        raise PlanError(f"{plan.name}: first_step in the encoded plan contradicts its steps.")
    return plan


def _as_words(data: Array | bytes) -> Array:
    if isinstance(data, np.ndarray):
        if data.ndim != 1 or data.dtype != _INT32:
            raise PlanError(
                f"encoded plan: {data.dtype}{list(data.shape)}; it must be int32[words]."
            )
        return data
    if len(data) % _INT32.itemsize:
        raise PlanError(f"encoded plan: {len(data)} bytes, which are not words of 4.")
    return np.frombuffer(data, _INT32)


def _check_header(words: Array) -> _Header:
    size = len(_Header._fields)
    if len(words) < size or words[0] != MAGIC:
        raise PlanError(f"encoded plan: {len(words)} words that do not begin like a plan.")
    header = _Header(*words[:size].tolist())
    if header.version != VERSION:
        raise PlanError(
            f"encoded plan: version {header.version}; this jcoll reads version {VERSION}.\n"
            "  Encode it again with this jcoll."
        )
    if header.op not in _OP_NAMES:
        raise PlanError(f"encoded plan: there is no op {header.op}.")
    negative = [f for f, value in header._asdict().items() if value < 0]
    if negative or header.num_words != len(words) or header.words() != len(words):
        problem = f"negative {negative[0]}" if negative else f"its header says {header.words()}"
        raise PlanError(
            f"encoded plan: {len(words)} words; {problem}.\n  It is cut off or damaged."
        )
    return header


def _name(words: Array) -> str:
    try:
        return words.tobytes().rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise PlanError("encoded plan: the algorithm's name is not UTF-8.") from error
