"""How an algorithm writes a plan. No jax.

    def reduce_scatter(p: Builder) -> None:
        r, n = p.ranks, p.num_ranks
        for k in range(1, n):
            p.send(r, (r + 1) % n, chunk=(r - k) % n, reduce=True)

An algorithm thinks in *work chunks*: the chunks of the op's work blocks (ops.py), which begin as
the rank's input where the op says so, then `scratch` chunks of its own. It sends a work chunk of
one rank to the same (or, with `to`, another) work chunk of another rank, for many pairs of ranks at
once: all arguments may be arrays. The builder knows where each work chunk lives: in INPUT until it
is first written, then in OUTPUT if the op returns it, else in SCRATCH. So algorithms read as if in
place, yet no input is copied that need not be; what is still to be brought to OUTPUT at the end,
`finish` copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcoll.plan.ir import NO_PEER, Buffer, Kind, Plan, PlanError, Step, whole_number
from jcoll.plan.ops import NONE, OPS, BlockMap

Array = np.ndarray[Any, np.dtype[Any]]
Ints = int | Array

_NOWHERE = 255  # A work chunk without a value.
_RANKS_AT_ONCE = 1024


@dataclass(frozen=True)
class Batch:
    """Transfers that may all happen at once: element i of every array is one.

    No rank sends twice or receives twice. A transfer with src == dst is a local step. The result is
    dst's `dst_*`; with `reduce`, it is the reduction of dst's `acc_*` and what arrives.
    together: in one round with the batch before it: no rank waits for what that one brings before
    it sends this one's.
    """

    src: Array
    dst: Array
    src_buffer: Array
    src_chunk: Array
    acc_buffer: Array
    acc_chunk: Array
    dst_buffer: Array
    dst_chunk: Array
    count: Array
    reduce: bool
    together: bool = False


class Builder:
    """Collects the batches of one plan.

    `on_batch` receives every batch as soon as it exists, so that a plan too large to keep (a ring
    of 4,096 ranks has 67 million steps) can be simulated; None keeps them for `finish`.
    """

    def __init__(
        self,
        op: str,
        num_ranks: int,
        *,
        algorithm: str = "",
        root: int = 0,
        chunks_per_block: int = 1,
        on_batch: Callable[[Batch], None] | None = None,
    ) -> None:
        if op not in OPS:
            raise PlanError(f"{algorithm} {op}: there is no such op.\n  One of {', '.join(OPS)}.")
        if not 0 <= root < num_ranks:
            raise PlanError(
                f"{algorithm} {op}: root={root} is not a rank of {num_ranks}.\n"
                f"  Pass one from 0 to {num_ranks - 1}."
            )
        self.spec = OPS[op]
        self.op, self.algorithm = op, algorithm
        self.num_ranks, self.root = num_ranks, root
        self.ranks: Array = np.arange(num_ranks)
        self.chunks_per_block = chunks_per_block
        self.num_chunks = self.spec.work_blocks(num_ranks) * chunks_per_block
        self._batches: list[Batch] = []
        self._emit = on_batch or self._batches.append
        self._round: Array | None = None  # Within at_once, bool[src, dst]: what has been sent.
        self._round_begun = False
        self._where = np.full((num_ranks, self.num_chunks), _NOWHERE, np.uint8)
        for some, is_input in self._has_block(self.spec.input_block):
            self._where[some][is_input] = Buffer.INPUT

    def scratch(self, count: int = 1) -> int:
        """The first of `count` new work chunks, without a value, on every rank."""
        first = self._where.shape[1]
        self._check_count(count)
        new = np.full((self.num_ranks, count), _NOWHERE, np.uint8)
        self._where = np.concatenate([self._where, new], axis=1)
        return first

    def chunk_of(self, block: Ints, part: Ints = 0) -> Ints:
        """The work chunk that is chunk number `part` of work block `block`."""
        return block * self.chunks_per_block + part

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
        """Rank src sends `count` work chunks from `chunk` on to work chunk `to` of rank dst.

        src, dst: ranks, each at most once, or none; src == dst copies or reduces within the rank.
        to: the work chunk that receives (default: `chunk`).
        reduce: what arrives is reduced with what is there; `into` then names another work chunk for
            the result (default: `to`).
        Sends of one call read what was there before the call.
        """
        src_, dst_, chunk_, to_, into_, count_ = self._arrays(src, dst, chunk, to, into, count)
        if not src_.size:
            return
        if self.num_ranks == 1 and not np.any(chunk_ != into_):
            return
        self._make_contiguous(src_, chunk_, count_)
        if reduce:
            self._make_contiguous(dst_, to_, count_)
            to_ = self._place_operands(src_ == dst_, dst_, to_, into_, count_)
        self._append(src_, dst_, chunk_, to_, into_, count_, reduce)

    def _arrays(
        self, src: Ints, dst: Ints, chunk: Ints, to: Ints | None, into: Ints | None, count: Ints
    ) -> tuple[Array, ...]:
        """The arguments of send, all given, of one length, and checked."""
        to = chunk if to is None else to
        into = to if into is None else into
        named = {"src": src, "dst": dst, "chunk": chunk, "to": to, "into": into, "count": count}
        each = [self._integers(name, value) for name, value in named.items()]
        try:
            arrays = np.broadcast_arrays(*each)
        except ValueError:
            sizes = ", ".join(f"{len(a)} of {name}" for name, a in zip(named, each, strict=True))
            raise PlanError(
                f"{self.algorithm} {self.op}: {sizes} in one send().\n"
                "  All arguments must be of one length, or of length 1."
            ) from None
        src_, dst_, chunk_, to_, into_, count_ = (a.astype(np.int64) for a in arrays)
        if src_.size:
            self._check(src_, dst_, (chunk_, to_, into_), count_)
        return src_, dst_, chunk_, to_, into_, count_

    def _integers(self, name: str, value: Ints) -> Array:
        array = np.atleast_1d(value)
        if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
            raise PlanError(
                f"{self.algorithm} {self.op}: {name}={value!r} of send(); a whole number, or a "
                "one-dimensional array of them, is needed.\n"
                "  Divide by //; of a mask take np.flatnonzero."
            )
        return array

    def _check_count(self, count: int) -> None:
        number = whole_number(count)
        if number is None or number < 0:
            raise PlanError(
                f"{self.algorithm} {self.op}: scratch({count!r}); a whole number from 0 on is "
                "needed.\n  Divide by //."
            )

    def copy(self, rank: Ints, chunk: Ints, to: Ints, *, count: Ints = 1) -> None:
        """Copies work chunks within a rank."""
        self.send(rank, rank, chunk, to=to, count=count)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """One round of several send() calls: every rank sends all of its messages, then receives.

        Without it, what a rank sends in a later call waits for what it receives in an earlier one.
        Within it all calls must send what was there before, to other ranks, and once to each: a
        second message to a peer waits until the first is taken, which the peer, sending too, has
        not come to.
        """
        if self._round is not None:
            raise PlanError(
                f"{self.algorithm} {self.op}: at_once() within at_once().\n"
                "  One round is one at_once(): leave out the inner one, or end the outer first."
            )
        self._round = np.zeros((self.num_ranks, self.num_ranks), bool)
        self._round_begun = False
        try:
            yield
        finally:
            self._round = None

    def _joins_round(self, src: Array, dst: Array) -> bool:
        """Whether the next batch belongs to the round of the last one."""
        if self._round is None:
            return False
        twice = self._round[src, dst] | (src == dst)
        if twice.any():
            i = int(np.argmax(twice))
            problem = "a local step" if src[i] == dst[i] else f"a second message to rank {dst[i]}"
            raise PlanError(
                f"{self.algorithm} {self.op}: {problem} of rank {src[i]} within one at_once().\n"
                "  Put it before or after."
            )
        self._round[src, dst] = True
        joins, self._round_begun = self._round_begun, True
        return joins

    def private(self, chunk: int) -> int:
        """A work chunk with the same value, to be sent by a rank that will write to `chunk` later.

        It is `chunk` where that is the rank's input, which nothing overwrites, else a copy: a part
        of another algorithm (subgroup.py) begins with values that lie where its results will.
        """
        if self._is_input(chunk):
            return chunk
        copy = self.scratch()
        self.copy(self.ranks, chunk, copy)
        return copy

    def _is_input(self, chunk: int) -> bool:
        return bool((self._where[:, chunk] == Buffer.INPUT).all())

    def finish(self) -> Plan:
        """Copies to OUTPUT what is not there yet, and returns the plan."""
        late = self._where[:, : self.num_chunks].copy()
        late[late == Buffer.OUTPUT] = _NOWHERE
        for some, is_output in self._has_block(self.spec.output_block):
            late[some][~is_output] = _NOWHERE
        if self.spec.two_sided:
            self._copy_own_block()
        self._bring_all_home(late)
        steps, num_scratch = _pack_scratch(_steps(self._batches))
        return Plan(
            op=self.op,
            algorithm=self.algorithm,
            num_ranks=self.num_ranks,
            root=self.root,
            chunks_per_block=self.chunks_per_block,
            num_scratch=num_scratch,
            steps=steps,
        )

    def _has_block(self, block_map: BlockMap) -> Iterator[tuple[slice, Array]]:
        """(ranks, bool[ranks, work chunks]: whether the map has a block for them).

        Some ranks at a time: all numbers of blocks of 65,536 ranks are 32 GiB.
        """
        blocks = np.arange(self.num_chunks)[None, :] // self.chunks_per_block
        for first in range(0, self.num_ranks, _RANKS_AT_ONCE):
            some = slice(first, first + _RANKS_AT_ONCE)
            ranks = self.ranks[some, None]
            yield some, block_map(ranks, blocks, self.num_ranks, self.root) != NONE

    def is_written(self, rank: Array, chunk: Ints) -> Array:
        """Whether work chunks have a value."""
        return self._where[rank, chunk] != _NOWHERE

    def _num_work_chunks(self) -> int:
        return self._where.shape[1]

    def _copy_own_block(self) -> None:
        """all_to_all: the block that a rank keeps need not be written about by every algorithm."""
        for part in range(self.chunks_per_block):
            to = self.chunk_of(self.num_ranks + self.ranks, part)
            left = ~self.is_written(self.ranks, to)
            if left.any():
                r = self.ranks[left]
                self.copy(r, self.chunk_of(r, part), self.chunk_of(self.num_ranks + r, part))

    def _check(self, src: Array, dst: Array, chunks: tuple[Array, ...], count: Array) -> None:
        for name, ranks in (("src", src), ("dst", dst)):
            if ranks.size and (ranks.min() < 0 or ranks.max() >= self.num_ranks):
                bad = int(ranks[(ranks < 0) | (ranks >= self.num_ranks)][0])
                raise PlanError(
                    f"{self.algorithm} {self.op}: {name}={bad} is not a rank of {self.num_ranks}."
                )
            if np.bincount(ranks, minlength=1).max() > 1:
                twice = int(np.argmax(np.bincount(ranks)))
                raise PlanError(
                    f"{self.algorithm} {self.op}: rank {twice} is twice in {name} of one send().\n"
                    "  Use one send() for each."
                )
        limit = self._num_work_chunks()
        for chunk in chunks:
            if np.any((count < 1) | (chunk < 0) | (chunk + count > limit)):
                i = int(np.flatnonzero((count < 1) | (chunk < 0) | (chunk + count > limit))[0])
                raise PlanError(
                    f"{self.algorithm} {self.op}: {count[i]} chunks from {chunk[i]} on, sent by "
                    f"rank {src[i]} to {dst[i]}, are not all among the work chunks 0 to "
                    f"{limit - 1}."
                )

    def _place_operands(
        self, local: Array, rank: Array, to: Array, into: Array, count: Array
    ) -> Array:
        """A local REDUCE has two operands, not three: brings the first to where the result goes."""
        if not local.any():
            return to
        where = self._where[rank, to]
        move = local & ((to != into) | (where == Buffer.INPUT))
        if not move.any():
            return to
        r, n = rank[move], count[move]
        self._append(r, r, to[move], into[move], into[move], n, reduce=False)
        return np.where(move, into, to)

    def _span(self, rank: Array, chunk: Array, count: Array) -> Array:
        """bool[i, k]: whether _where of chunk + k belongs to range i; and the ranges' _where."""
        k = np.arange(int(count.max()))
        inside = k[None, :] < count[:, None]
        return self._where[rank[:, None], np.where(inside, chunk[:, None] + k, chunk[:, None])]

    def _make_contiguous(self, rank: Array, chunk: Array, count: Array) -> None:
        """A range that lies partly in INPUT cannot be named by one step: brings that part home."""
        if count.max() == 1:
            return
        where = self._span(rank, chunk, count)
        mixed = (where != where[:, :1]).any(axis=1)
        for i in np.flatnonzero(mixed):
            chunks = np.arange(chunk[i], chunk[i] + count[i])
            for c in chunks[self._where[rank[i], chunks] == Buffer.INPUT]:
                self._bring_home(rank[i : i + 1], np.array([c]), np.array([1]))
            if np.ptp(self._where[rank[i], chunks]) > 0:
                raise PlanError(
                    f"{self.algorithm} {self.op}: work chunks {chunks[0]} to {chunks[-1]} of rank "
                    f"{rank[i]} do not lie side by side (some are in its output, some are not).\n"
                    "  Send them in parts."
                )

    def _bring_all_home(self, where: Array) -> None:
        """All work chunks for which `where` has a place; blocks as a whole where they lie so.

        The first copy of every rank is in the first batch, and so on.
        """
        size = self.chunks_per_block
        blocks = where.reshape(self.num_ranks, -1, size)
        whole = (blocks == blocks[:, :, :1]).all(axis=2, keepdims=True)
        begins = np.where(whole, np.arange(size) == 0, True).reshape(where.shape)
        rank, chunk = np.nonzero(begins & (where != _NOWHERE))
        count = np.where(whole[rank, chunk // size, 0], size, 1)
        turn = np.arange(len(rank)) - np.searchsorted(rank, rank)
        for t in range(int(turn.max(initial=-1)) + 1):
            now = turn == t
            self._bring_home(rank[now], chunk[now], count[now])

    def _bring_home(self, rank: Array, chunk: Array, count: Array) -> None:
        self._append(rank, rank, chunk, chunk, chunk, count, reduce=False)

    def _append(
        self,
        src: Array,
        dst: Array,
        chunk: Array,
        to: Array,
        into: Array,
        count: Array,
        reduce: bool,
    ) -> None:
        src_buffer, src_chunk = self._location(src, chunk)
        acc_buffer, acc_chunk = self._location(dst, to) if reduce else (src * 0, src * 0)
        dst_buffer, dst_chunk = self._home(dst, into, count)
        self._emit(
            Batch(
                src,
                dst,
                src_buffer,
                src_chunk,
                acc_buffer,
                acc_chunk,
                dst_buffer,
                dst_chunk,
                count,
                reduce,
                self._joins_round(src, dst),
            )
        )
        for k in range(int(count.max())):
            some = k < count
            self._where[dst[some], into[some] + k] = dst_buffer[some]

    def _location(self, rank: Array, chunk: Array) -> tuple[Array, Array]:
        """(buffer, chunk in it) where work chunks are now."""
        where = self._where[rank, chunk]
        if where.size and where.max() == _NOWHERE:
            i = int(np.argmax(where))
            raise PlanError(
                f"{self.algorithm} {self.op}: work chunk {chunk[i]} of rank {rank[i]} is read, but "
                "nothing has been written to it."
            )
        index = chunk.copy()
        maps = ((Buffer.INPUT, self.spec.input_block), (Buffer.OUTPUT, self.spec.output_block))
        for buffer, block_map in maps:
            some = np.flatnonzero(where == buffer)
            if some.size:
                index[some] = self._place(block_map, rank[some], chunk[some])
        return where.astype(np.int64), index

    def _home(self, rank: Array, chunk: Array, count: Array) -> tuple[Array, Array]:
        """(buffer, chunk in it) where work chunks are written: OUTPUT if all are returned."""
        first = self._place(self.spec.output_block, rank, chunk)
        is_output = first != NONE
        if count.max() > 1:
            last = self._place(self.spec.output_block, rank, chunk + count - 1)
            is_output &= last == first + count - 1
        buffer = np.where(is_output, int(Buffer.OUTPUT), int(Buffer.SCRATCH))
        return buffer, np.where(is_output, first, chunk)

    def _place(self, block_map: Any, rank: Array, chunk: Array) -> Array:
        """The chunk of a buffer for a work chunk, by a map of blocks; NONE where there is none."""
        block = chunk // self.chunks_per_block  # Much faster than np.divmod.
        part = chunk - block * self.chunks_per_block
        outside = chunk >= self.num_chunks
        block[outside] = 0
        mapped = block_map(rank, block, self.num_ranks, self.root)
        place = mapped * self.chunks_per_block + part
        place[outside | (mapped == NONE)] = NONE
        return place


def _steps(batches: list[Batch]) -> Array:
    """The steps of all ranks. Within a round sends come before receives."""
    rows, orders = [], []
    i = 0
    for b in batches:
        i += not b.together
        local, zero = b.src == b.dst, np.zeros_like(b.src)
        away = ~local
        no_peer = np.full_like(b.src, NO_PEER)

        def row(mask: Array, *columns: Array | int) -> Array:
            return np.stack([np.broadcast_to(c, mask.shape)[mask] for c in columns], axis=1)

        send = row(
            away, b.src, int(Kind.SEND), b.dst, b.src_buffer, b.src_chunk, zero, zero, b.count
        )
        kind = int(Kind.RECV_REDUCE if b.reduce else Kind.RECV)
        recv = row(
            away, b.dst, kind, b.src, b.acc_buffer, b.acc_chunk, b.dst_buffer, b.dst_chunk, b.count
        )
        kind = int(Kind.REDUCE if b.reduce else Kind.COPY)
        here = row(
            local,
            b.dst,
            kind,
            no_peer,
            b.src_buffer,
            b.src_chunk,
            b.dst_buffer,
            b.dst_chunk,
            b.count,
        )
        for part, order in ((send, 2 * i), (here, 2 * i + 1), (recv, 2 * i + 1)):
            rows.append(part)
            orders.append(np.full(len(part), order))
    if not rows:
        return np.zeros((0, 8), np.int32)
    table, order = np.concatenate(rows), np.concatenate(orders)
    return table[np.lexsort((order, table[:, 0]))].astype(np.int32)


def _pack_scratch(steps: Array) -> tuple[Array, int]:
    """Renumbers SCRATCH without holes. (steps, chunks left). What was side by side stays so."""
    names = {name: i for i, name in enumerate(Step._fields)}
    columns = [(names["src_buffer"], names["src_chunk"]), (names["dst_buffer"], names["dst_chunk"])]
    written = steps[steps[:, names["dst_buffer"]] == Buffer.SCRATCH]
    if len(written) == 0:
        return steps, 0
    first, count = written[:, names["dst_chunk"]], written[:, names["count"]]
    used = np.zeros(int((first + count).max()), bool)
    for k in range(int(count.max())):
        used[first[count > k] + k] = True
    new_index = np.cumsum(used) - 1
    for buffer, chunk in columns:
        in_scratch = steps[:, buffer] == Buffer.SCRATCH
        steps[in_scratch, chunk] = new_index[steps[in_scratch, chunk]]
    return steps, int(used.sum())
