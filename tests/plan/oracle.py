"""Plans run on numbers under chosen timings: a second opinion, which shares no code with verify.

A message is the *place* it was sent from; its receiver reads there what is there when it receives,
as an executor that does not copy would.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator

from jcoll.plan.ir import Buffer, Kind, Plan, Step

Pick = Callable[[list[int]], list[int]]  # Puts the ranks into the order in which they are tried.
UNLIMITED = 1 << 30


class Wrong(Exception):
    """The plan cannot be run, hangs, or returns something else than its op promises."""


class Run:
    """One run. `room`: messages that a connection can hold."""

    def __init__(self, plan: Plan, room: int, numbers: random.Random) -> None:
        self.plan, self.room = plan, room
        ranks = range(plan.num_ranks)
        self.memory = [
            {b: [numbers.getrandbits(60) for _ in range(plan.num_chunks(b))] for b in Buffer}
            for _ in ranks
        ]
        self.steps = [list(plan.steps_of(r)) for r in ranks]
        self.next = [0] * plan.num_ranks
        self.channels: dict[tuple[int, int], deque[tuple[int, int, int]]] = {
            pair: deque() for pair in itertools.product(ranks, ranks)
        }
        self.wanted = promised(plan, [m[Buffer.INPUT] for m in self.memory])

    def result(self, pick: Pick) -> None:
        """Runs to the end, always the first of pick's order that can go on; or raises Wrong."""
        ranks = list(range(self.plan.num_ranks))
        while any(self.advance(r) for r in pick(ranks)):
            pass
        if any(self.next[r] < len(self.steps[r]) for r in ranks) or any(self.channels.values()):
            raise Wrong("hangs, or a message is left")
        for r, wanted in enumerate(self.wanted):
            if wanted is not None and self.memory[r][Buffer.OUTPUT] != wanted:
                raise Wrong(f"result of rank {r}")

    def advance(self, r: int) -> bool:
        """Does the next step of rank r, if it can be done now."""
        if self.next[r] == len(self.steps[r]):
            return False
        s = self.steps[r][self.next[r]]
        if s.kind == Kind.SEND:
            channel = self.channels[r, s.peer]
            if len(channel) >= self.room:
                return False
            self.read(r, s.src_buffer, s.src_chunk, s.count)
            channel.append((s.src_buffer, s.src_chunk, s.count))
        elif s.kind in (Kind.RECV, Kind.RECV_REDUCE):
            channel = self.channels[s.peer, r]
            if not channel:
                return False
            self.write(r, s, self.read(s.peer, *channel.popleft()))
        else:
            self.write(r, s, self.read(r, s.src_buffer, s.src_chunk, s.count))
        self.next[r] += 1
        return True

    def read(self, r: int, buffer: int, chunk: int, count: int) -> list[int]:
        values = self.memory[r][Buffer(buffer)][chunk : chunk + count]
        if chunk < 0 or len(values) != count:
            raise Wrong("reads outside its buffers")
        return values

    def write(self, r: int, s: Step, values: list[int]) -> None:
        if s.kind == Kind.REDUCE:
            values = add(values, self.read(r, s.dst_buffer, s.dst_chunk, s.count))
        elif s.kind == Kind.RECV_REDUCE:
            values = add(values, self.read(r, s.src_buffer, s.src_chunk, s.count))
        if s.dst_buffer == Buffer.INPUT or len(values) != s.count:
            raise Wrong("writes to its input, or takes another number of chunks")
        self.read(r, s.dst_buffer, s.dst_chunk, s.count)
        self.memory[r][Buffer(s.dst_buffer)][s.dst_chunk : s.dst_chunk + s.count] = values


def add(a: list[int], b: list[int]) -> list[int]:
    if len(a) != len(b):
        raise Wrong("adds another number of chunks")
    return [x + y for x, y in zip(a, b, strict=True)]


def promised(plan: Plan, inputs: list[list[int]]) -> list[list[int] | None]:
    """What each rank returns, by the definition of the op; None: nothing."""
    n, c, root = plan.num_ranks, plan.chunks_per_block, plan.root
    everything = [x for values in inputs for x in values]
    total = [sum(column) for column in zip(*inputs, strict=True)]

    def block(values: list[int], r: int) -> list[int]:
        return values[r * c : (r + 1) * c]

    def at_root(values: list[int]) -> list[list[int] | None]:
        return [values if r == root else None for r in range(n)]

    return {
        "all_reduce": lambda: [total] * n,
        "reduce_scatter": lambda: [block(total, r) for r in range(n)],
        "all_gather": lambda: [everything] * n,
        "all_to_all": lambda: [[x for v in inputs for x in block(v, r)] for r in range(n)],
        "broadcast": lambda: [inputs[root]] * n,
        "reduce": lambda: at_root(total),
        "gather": lambda: at_root(everything),
        "scatter": lambda: [block(inputs[root], r) for r in range(n)],
    }[plan.op]()


def timings(num_ranks: int, numbers: random.Random) -> Iterator[tuple[int, Pick]]:
    """(room, order). Starving every rank in turn, with unlimited room, shows all overwriting:

    if a write need not wait for a receive of rank r, it is done by the time that r, which goes on
    only when nobody else can, comes to that receive.
    """
    yield 1, lambda ranks: ranks
    for starved in range(num_ranks):
        yield UNLIMITED, lambda ranks, last=starved: sorted(ranks, key=lambda r: r == last)
    for room in (1, 2, UNLIMITED):
        yield room, lambda ranks: numbers.sample(ranks, len(ranks))


def first_problem(plan: Plan, seed: int) -> str | None:
    """Why the plan is wrong under some timing, or None."""
    numbers = random.Random(seed)
    for room, pick in timings(plan.num_ranks, numbers):
        try:
            Run(plan, room, numbers).result(pick)
        except Wrong as wrong:
            return str(wrong)
    return None


def may_overwrite_or_hang(plan: Plan) -> tuple[bool, bool]:
    """By visiting every state of every timing. For plans of a few ranks and steps."""
    steps = [list(plan.steps_of(r)) for r in range(plan.num_ranks)]
    danger = list(_dangers(steps))
    overwrite = any(
        state[b] == receive and state[a] > write
        for state in _states(steps, UNLIMITED)
        for b, receive, a, write in danger
    )
    ends = [state for state in _states(steps, 1) if not _moves(steps, state, 1)]
    hang = any(state[r] < len(steps[r]) for state in ends for r in range(plan.num_ranks))
    return overwrite, hang


def _dangers(steps: list[list[Step]]) -> Iterator[tuple[int, int, int, int]]:
    """(b, receive, a, write): wrong if step `write` of a is done and step `receive` of b is not."""
    for a, b in itertools.permutations(range(len(steps)), 2):
        sends = [i for i, s in enumerate(steps[a]) if s.kind == Kind.SEND and s.peer == b]
        takes = [i for i, s in enumerate(steps[b]) if Kind(s.kind).receives and s.peer == a]
        for i, receive in zip(sends, takes, strict=True):
            sent = steps[a][i]
            offered = {(sent.src_buffer, sent.src_chunk + k) for k in range(sent.count)}
            for write, s in enumerate(steps[a][i + 1 :], i + 1):
                written = {(s.dst_buffer, s.dst_chunk + k) for k in range(s.count)}
                if s.kind != Kind.SEND and offered & written:
                    yield b, receive, a, write
                    break


def _states(steps: list[list[Step]], room: int) -> set[tuple[int, ...]]:
    """A state is how many steps each rank has done; the channels follow from it."""
    todo = [(0,) * len(steps)]
    seen = set(todo)
    while todo:
        state = todo.pop()
        for r in _moves(steps, state, room):
            after = (*state[:r], state[r] + 1, *state[r + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


def _moves(steps: list[list[Step]], state: tuple[int, ...], room: int) -> list[int]:
    return [r for r in range(len(steps)) if _can_move(steps, state, room, r)]


def _can_move(steps: list[list[Step]], state: tuple[int, ...], room: int, r: int) -> bool:
    if state[r] == len(steps[r]):
        return False
    s = steps[r][state[r]]
    if s.kind in (Kind.COPY, Kind.REDUCE):
        return True
    done = [steps[q][: state[q]] for q in (r, s.peer)]
    if s.kind == Kind.SEND:
        return _number(done[0], s.peer, sends=True) - _number(done[1], r, sends=False) < room
    return _number(done[1], r, sends=True) > _number(done[0], s.peer, sends=False)


def _number(done: list[Step], peer: int, *, sends: bool) -> int:
    return sum(s.peer == peer and (s.kind == Kind.SEND) == sends for s in done)
