"""The plan: the finished program of one collective for all ranks. No jax.

Every rank has three buffers, INPUT (read only), OUTPUT and SCRATCH, and a list of steps, done in
order. Chunks are numbered from the start of a buffer; block b of the op holds the chunks
b * chunks_per_block and up. A step names `count` consecutive chunks:

    SEND         offers src to `peer`. Never waits for the data to be taken, except that the
                 previous message to the same peer must have been (one message in flight per
                 connection is all that an executor need provide)
    RECV         takes the next message from `peer` into dst
    RECV_REDUCE  takes the next message from `peer`: dst = src (reduce) message; src may equal dst
    COPY         dst = src, both of this rank
    REDUCE       dst = dst (reduce) src, both of this rank

The k-th SEND from a to b meets the k-th receiving step of b from a, and their counts are equal. An
executor may let the receiver read straight from the sender's buffer: the sender must not write to
an offered chunk before the receiver is known to have read it (verify.py proves that). Because every
receive names its peer, a plan's result and whether it ends do not depend on timing (Kahn 1974).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jcoll.plan.ops import OPS, OpSpec

Array = np.ndarray[Any, np.dtype[Any]]


def whole_number(value: object) -> int | None:
    """`value` as an int; None if it is none, as bools are."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


class PlanError(ValueError):
    """A plan, or an algorithm that builds one, is wrong. The text names rank, step and chunk."""


class Buffer(IntEnum):
    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Kind(IntEnum):
    SEND = 0
    RECV = 1
    RECV_REDUCE = 2
    COPY = 3
    REDUCE = 4

    @property
    def receives(self) -> bool:
        return self in (Kind.RECV, Kind.RECV_REDUCE)


NO_PEER = -1


class Step(NamedTuple):
    """One row of Plan.steps. The fields that a kind does not use are 0 (peer: NO_PEER)."""

    rank: int
    kind: int
    peer: int
    src_buffer: int
    src_chunk: int
    dst_buffer: int
    dst_chunk: int
    count: int

    def __str__(self) -> str:
        def ref(buffer: int, chunk: int) -> str:
            last = f"..{chunk + self.count - 1}" if self.count > 1 else ""
            return f"{Buffer(buffer).name.lower()}[{chunk}{last}]"

        src, dst = ref(self.src_buffer, self.src_chunk), ref(self.dst_buffer, self.dst_chunk)
        match Kind(self.kind):
            case Kind.SEND:
                return f"send {src} to {self.peer}"
            case Kind.RECV:
                return f"recv {dst} from {self.peer}"
            case Kind.RECV_REDUCE:
                return f"recv_reduce {dst} = {src} + message from {self.peer}"
            case Kind.COPY:
                return f"copy {dst} = {src}"
            case Kind.REDUCE:
                return f"reduce {dst} = {dst} + {src}"


@dataclass(frozen=True, eq=False)
class Plan:
    """`steps`: int32[num_steps, len(Step._fields)], sorted by rank, each rank's in its order."""

    op: str
    algorithm: str
    num_ranks: int
    root: int
    chunks_per_block: int
    num_scratch: int  # Chunks of SCRATCH per rank.
    steps: Array

    @property
    def spec(self) -> OpSpec:
        return OPS[self.op]

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.op} of {self.num_ranks} ranks"

    def num_chunks(self, buffer: Buffer) -> int:
        """Chunks in a buffer of every rank."""
        match buffer:
            case Buffer.INPUT:
                return self.spec.in_blocks(self.num_ranks) * self.chunks_per_block
            case Buffer.OUTPUT:
                return self.spec.out_blocks(self.num_ranks) * self.chunks_per_block
            case Buffer.SCRATCH:
                return self.num_scratch

    @cached_property
    def first_step(self) -> Array:
        """int64[num_ranks + 1]: rank r's steps are rows first_step[r] to first_step[r + 1]."""
        return np.searchsorted(self.steps[:, 0], np.arange(self.num_ranks + 1))

    def steps_of(self, rank: int) -> Iterator[Step]:
        for row in self.steps[self.first_step[rank] : self.first_step[rank + 1]].tolist():
            yield Step(*row)
