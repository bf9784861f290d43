"""A Builder for many equal groups of ranks at once: an algorithm as a part of another one. No jax.

    view = Subgroups(p, "reduce_scatter", members, first, block_chunks=4)
    ring.reduce_scatter(view)
    view.finish_part()

`members[g, i]` is the rank of p that is rank i of group g; the groups have no rank in common. The
algorithm sees one group: every send() of it is done in all groups in one batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from jcoll.plan.builder import Array, Builder, Ints
from jcoll.plan.ir import PlanError
from jcoll.plan.ops import OPS


class Subgroups(Builder):
    """Sends to `parent` what an algorithm sends within each of the groups.

    first: int[parent's ranks, work blocks of `op` in a group]: the parent's work chunk with which a
        work block begins; it has `block_chunks` of them. The values that `op` begins with must be
        there, and those that it ends with will be.
    chunks_per_block: as the algorithm wants it; must divide block_chunks.
    """

    def __init__(
        self,
        parent: Builder,
        op: str,
        members: Array,
        first: Array,
        *,
        block_chunks: int,
        chunks_per_block: int = 1,
        algorithm: str = "",
        root: int = 0,
    ) -> None:
        self.parent, self.members = parent, members
        self.spec = OPS[op]
        self.op, self.algorithm = op, algorithm
        self.num_ranks, self.root = members.shape[1], root
        self.ranks = np.arange(self.num_ranks)
        self.chunks_per_block = chunks_per_block
        self.num_chunks = self.spec.work_blocks(self.num_ranks) * chunks_per_block
        self._scale, rest = divmod(block_chunks, chunks_per_block)
        if rest:
            raise PlanError(
                f"{algorithm} {op}: a block of {block_chunks} chunks cannot be divided into "
                f"{chunks_per_block} parts."
            )
        parts = np.arange(chunks_per_block) * self._scale
        shape = parent.num_ranks, self.num_chunks
        # [parent's rank, work chunk here]: the first of its _scale work chunks there.
        self._first: Array = (first[:, :, None] + parts).reshape(shape)

    def scratch(self, count: int = 1) -> int:
        self._check_count(count)
        new = self.parent.scratch(count * self._scale) + np.arange(count) * self._scale
        here = self._first.shape[1]
        rows = np.broadcast_to(new, (self.parent.num_ranks, count))
        self._first = np.concatenate([self._first, rows], axis=1)
        return here

    def send(
        self,
        src: Ints,
        dst: Ints,
        chunk: Ints = 0,
        *,
        to: Ints | None = None,
        into: Ints | None = None,
        count: Ints = 1,
        reduce: bool = False,
    ) -> None:
        src_, dst_, chunk_, to_, into_, count_ = self._arrays(src, dst, chunk, to, into, count)
        if not src_.size:
            return
        there = self.members[:, src_], self.members[:, dst_]
        self.parent.send(
            there[0].ravel(),
            there[1].ravel(),
            self._there(there[0], chunk_, count_),
            to=self._there(there[1], to_, count_),
            into=self._there(there[1], into_, count_),
            count=np.broadcast_to(count_ * self._scale, there[0].shape).ravel(),
            reduce=reduce,
        )

    def at_once(self) -> AbstractContextManager[None]:
        return self.parent.at_once()

    def finish_part(self) -> None:
        """What Builder.finish does for an op by itself: all_to_all's block that a rank keeps."""
        if self.spec.two_sided:
            self._copy_own_block()

    def is_written(self, rank: Array, chunk: Ints) -> Array:
        there = self.members[:, rank]
        return np.all(self.parent.is_written(there, self._first[there, chunk]), axis=0)

    def _is_input(self, chunk: int) -> bool:
        return False

    def _num_work_chunks(self) -> int:
        return self._first.shape[1]

    def _there(self, rank: Array, chunk: Array, count: Array) -> Array:
        """The parent's work chunks for ranges of work chunks; `rank`: [groups, ranges]."""
        first, last = self._first[rank, chunk], self._first[rank, chunk + count - 1]
        apart = last - first != (count - 1) * self._scale
        if apart.any():
            _, i = np.argwhere(apart)[0]
            raise PlanError(
                f"{self.algorithm} {self.op}: work chunks {chunk[i]} to "
                f"{chunk[i] + count[i] - 1} do not lie side by side in {self.parent.algorithm} "
                f"{self.parent.op}, of which this is a part."
            )
        return first.ravel()
