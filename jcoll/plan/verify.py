"""The proof that a plan does what its op promises, whatever the timing. No jax.

verify(plan) runs the plan once on symbols and decides, for all timings:

    a  form         fields in range, nothing writes INPUT                           form.py
    b  messages     every SEND is received, counts agree, no deadlock               order.py
    c  values       no chunk is read unwritten, mixed with another, or added twice  here
    d  result       every rank's OUTPUT ends as ops.py promises
    e  overwriting  no rank writes to a chunk that a receiver may still read

One run decides because a plan is a Kahn network: every receive names its peer, so the values do not
depend on timing, *if* a message is what its sender's buffer held at the SEND. An executor may read
that buffer as late as the receive. So e: a write to an offered chunk must happen after the receive
that takes the offer, where "after" follows from the order within a rank and from messages (Lamport
1978), and is known from vector clocks. That the executor delays a SEND until the message before it
was taken is not counted on: executors with room for more messages do not.

A symbol is one int: the input chunk's number, then a bit for each rank that contributed:
    value = chunk << num_ranks | contributions;  0: never written
so that two values of the same chunk without a common rank add up to `a | b`. Ints rather than numpy
rows: on one chunk, which is what most steps move, 0.1 us against 7 us; on 32 they are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jcoll.errors import ranges
from jcoll.plan.form import check_form, where
from jcoll.plan.ir import Buffer, Kind, Plan, PlanError
from jcoll.plan.ops import ALL, NONE, BlockMap
from jcoll.plan.order import execution_order, partners, step_at, step_number

Array = np.ndarray[Any, np.dtype[Any]]

_UNWRITTEN = 0


def verify(plan: Plan) -> None:
    """Raises PlanError, naming rank, step and chunk, unless the plan is right at any timing."""
    check_form(plan)
    partner = partners(plan)
    execution = _Execution(plan, partner)
    execution.run(execution_order(plan, partner))
    execution.check_result()


class _Execution:
    """One run on symbols. A rank's buffers are one list: INPUT, OUTPUT, SCRATCH."""

    def __init__(self, plan: Plan, partner: list[int]) -> None:
        self.plan, self.partner = plan, partner
        n = plan.num_ranks
        sizes = [plan.num_chunks(b) for b in Buffer]
        self.start = [0, sizes[0], sizes[0] + sizes[1]]
        self.memory = _initial(plan, sum(sizes))
        # Per rank: chunk -> {peer: row of the receive that may read the chunk until it is done}.
        # Receives of one peer are done in order, so its last one stands for all.
        self.offers: list[dict[int, dict[int, int]]] = [{} for _ in range(n)]
        # clocks[r, q]: what rank r knows of rank q: its rows below this are done.
        self.clocks = np.zeros((n, n), np.int64)
        self.in_flight: dict[int, tuple[list[int], Array]] = {}  # Row of the SEND -> its message.

    def run(self, order: list[int]) -> None:
        rows, start = self.plan.steps.tolist(), self.start
        for row in order:
            rank, kind, peer, src_buffer, src, dst_buffer, dst, count = rows[row]
            src += start[src_buffer]
            dst += start[dst_buffer]
            if kind == Kind.SEND:
                self._send(row, rank, peer, src, count)
                continue
            if kind == Kind.COPY:
                values = self._read(row, rank, src, count)
            elif kind == Kind.REDUCE:
                ours = self._read(row, rank, dst, count)
                values = self._reduce(row, ours, self._read(row, rank, src, count))
            else:
                values = self._receive(row, rank)
                if kind == Kind.RECV_REDUCE:
                    values = self._reduce(row, self._read(row, rank, src, count), values)
            if self.offers[rank]:
                self._check_not_read(row, rank, dst, count)
            self.memory[rank][dst : dst + count] = values

    def _send(self, row: int, rank: int, peer: int, src: int, count: int) -> None:
        clock = self.clocks[rank]
        clock[rank] = row
        self.in_flight[row] = self._read(row, rank, src, count), clock.copy()
        if src >= self.start[Buffer.OUTPUT]:  # INPUT is never written.
            offers, receive = self.offers[rank], self.partner[row]
            for chunk in range(src, src + count):
                offers.setdefault(chunk, {})[peer] = receive

    def _receive(self, row: int, rank: int) -> list[int]:
        values, clock = self.in_flight.pop(self.partner[row])
        np.maximum(self.clocks[rank], clock, out=self.clocks[rank])
        return values

    def _read(self, row: int, rank: int, src: int, count: int) -> list[int]:
        values = self.memory[rank][src : src + count]
        if _UNWRITTEN in values:
            chunk = self._name(src + values.index(_UNWRITTEN))
            raise self._error(row, f"reads {chunk}, to which nothing has been written.")
        return values

    def _reduce(self, row: int, ours: list[int], theirs: list[int]) -> list[int]:
        n = self.plan.num_ranks
        for a, b in zip(ours, theirs, strict=True):
            common = a & b & ((1 << n) - 1)
            if (a ^ b) >> n or common:
                raise self._error(row, self._mixed(row, ours.index(a), a, b, common))
        return [a | b for a, b in zip(ours, theirs, strict=True)]

    def _mixed(self, row: int, offset: int, a: int, b: int, common: int) -> str:
        step = step_at(self.plan, row)
        chunk = self._name(self.start[step.dst_buffer] + step.dst_chunk + offset)
        a_text, b_text = self._describe(a), self._describe(b)
        if (a ^ b) >> self.plan.num_ranks:
            return f"reduces different chunks into {chunk}: {a_text} and {b_text}."
        return (
            f"adds to {chunk} the contribution of rank {ranges(_bits(common))} twice: "
            f"{a_text} and {b_text}."
        )

    def _check_not_read(self, row: int, rank: int, dst: int, count: int) -> None:
        for chunk in range(dst, dst + count):
            for peer, receive in self.offers[rank].pop(chunk, {}).items():
                if self.clocks[rank, peer] <= receive:
                    raise self._error(row, self._overwritten(chunk, peer, receive))

    def _overwritten(self, chunk: int, peer: int, receive: int) -> str:
        plan, send = self.plan, self.partner[receive]
        return (
            f"overwrites {self._name(chunk)}, which step {step_number(plan, send)} "
            f"({step_at(plan, send)}) offered and rank {peer} may not have read yet, at its step "
            f"{step_number(plan, receive)} ({step_at(plan, receive)}).\n"
            f"  Write elsewhere, or after a message that rank {peer} sends, directly or through "
            "others, after that step."
        )

    def check_result(self) -> None:
        start = self.start[Buffer.OUTPUT]
        for rank, promised in enumerate(_promised(self.plan)):
            memory = self.memory[rank]
            for chunk, value in promised:
                if memory[start + chunk] != value:
                    raise self._wrong(rank, chunk, value, memory[start + chunk])

    def _wrong(self, rank: int, chunk: int, wanted: int, found: int) -> PlanError:
        ends = self._describe(found) if found != _UNWRITTEN else "nothing: it is never written"
        text = f"{self.plan.name}: rank {rank}, at the end: output[{chunk}] holds {ends}"
        missing = _bits(wanted & ~found & ((1 << self.plan.num_ranks) - 1))
        if found != _UNWRITTEN and self.plan.spec.reduces and missing:
            text += f"; missing: {ranges(missing)}"
        return PlanError(f"{text}.\n  {self.plan.op} promises {self._describe(wanted)} there.")

    def _error(self, row: int, problem: str) -> PlanError:
        return PlanError(f"{where(self.plan, row)}: {problem}")

    def _name(self, chunk: int) -> str:
        buffer = max(b for b in Buffer if self.start[b] <= chunk)
        return f"{buffer.name.lower()}[{chunk - self.start[buffer]}]"

    def _describe(self, value: int) -> str:
        n = self.plan.num_ranks
        ranks = _bits(value & ((1 << n) - 1))
        return f"input[{value >> n}] of rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def _initial(plan: Plan, num_chunks: int) -> list[list[int]]:
    """Each rank's memory: its own contribution where the op gives it input, else nothing."""
    memory = [[_UNWRITTEN] * num_chunks for _ in range(plan.num_ranks)]
    given = _by_work_block(plan, plan.spec.input_block)
    for rank, work in np.argwhere(given != NONE).tolist():
        for chunk in _chunks_of(plan, int(given[rank, work])):
            memory[rank][chunk] = chunk << plan.num_ranks | 1 << rank
    return memory


def _promised(plan: Plan) -> list[list[tuple[int, int]]]:
    """For each rank (output chunk, value) of all that the op returns there."""
    n, spec = plan.num_ranks, plan.spec
    output = _by_work_block(plan, spec.output_block)
    ranks = _by_work_block(plan, spec.source_rank)
    blocks = _by_work_block(plan, spec.source_block)
    promised: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for rank, work in np.argwhere(output != NONE).tolist():
        source = int(ranks[rank, work])
        contributions = (1 << n) - 1 if source == ALL else 1 << source
        chunks = _chunks_of(plan, int(output[rank, work]))
        sources = _chunks_of(plan, int(blocks[rank, work]))
        promised[rank] += [
            (c, s << n | contributions) for c, s in zip(chunks, sources, strict=True)
        ]
    return promised


def _by_work_block(plan: Plan, block_map: BlockMap) -> Array:
    """int[num_ranks, work blocks]: the map at every place."""
    ranks, works = np.arange(plan.num_ranks), np.arange(plan.spec.work_blocks(plan.num_ranks))
    return block_map(ranks[:, None], works[None, :], plan.num_ranks, plan.root)


def _chunks_of(plan: Plan, block: int) -> range:
    return range(block * plan.chunks_per_block, (block + 1) * plan.chunks_per_block)


def _bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]
