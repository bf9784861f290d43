"""How long a plan would take on a topology: the alpha-beta model, for many sizes at once. No jax.

Batches are simulated as the Builder makes them and are never kept, so 4,096 ranks are no problem.

The model. Every rank has a clock, its place in its program; every port (topology.py) is busy until
some time, separately for sending and receiving. A message of s bytes

    starts    when its sender's clock allows and its two ports are free
    occupies  both ports for gap + beta * s; messages of one batch that share a port take, each, as
              long as all of them together
    arrives   alpha later

The sender goes on at once; in a round of several batches (Builder.at_once) all sends of a rank come
before its receives. The receiver's clock becomes the arrival if that is later, and gamma * s more
if it reduces. A copy or reduction within a rank takes gamma * s. The time is the latest clock.

Its limits:
  - Ports serve messages in the order of the plan's batches, not of arrival: a message that could go
    earlier does not overtake.
  - Receivers have room for everything; no waiting for the previous message to have been taken.
  - A message occupies the ports of its two ends and nothing between: no switch, spine or bus is
    ever short, no adaptive routing, no other traffic. (A port shared by all is a bus.)
  - A chunk travels as a whole. Pipelining is what the plan itself does with more, smaller chunks;
    an executor that cut messages further would be faster than this. (Segments would need events in
    the order of time, for every size by itself: in plan order a node with two children would serve
    the second only after the last segment of the first, which is not what pipelining does.)
  - No noise, no cost of starting the collective, no cache: beta and gamma are constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jcoll.plan.builder import Batch, Builder
from jcoll.plan.topology import Topology

Array = np.ndarray[Any, np.dtype[Any]]


class Algorithm(Protocol):
    """What is needed of jcoll.algorithms.registry.Algorithm."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    def write(self, p: Builder, /) -> None: ...
    def num_chunks(self, num_ranks: int, /) -> int: ...


def simulate(
    algorithm: Algorithm, num_ranks: int, nbytes: Array, topology: Topology, root: int = 0
) -> Array:
    """Seconds for every size in `nbytes`.

    nbytes: of the array (all_reduce, broadcast, reduce) or of all num_ranks blocks (the others: the
    larger of a rank's input and output), as in the benchmark and in Algorithm.sent.
    """
    sizes = np.asarray(nbytes, np.int64)
    if (sizes < 0).any():
        raise ValueError(f"simulate: nbytes={nbytes!r}.\n  Pass sizes in bytes, 0 or more.")
    state: list[Simulation] = []
    chunks = algorithm.num_chunks(num_ranks)
    builder = Builder(
        algorithm.op,
        num_ranks,
        algorithm=algorithm.name,
        root=root,
        chunks_per_block=chunks,
        on_batch=lambda batch: state[0].step(batch),
    )
    has_blocks = builder.spec.in_per_rank or builder.spec.out_per_rank
    block = _ceil_div(sizes, num_ranks if has_blocks else 1)
    chunk_bytes, which = np.unique(_ceil_div(block, chunks), return_inverse=True)
    state.append(Simulation(num_ranks, chunk_bytes, topology))
    algorithm.write(builder)
    builder.finish()
    return state[0].times()[which]


def _ceil_div(a: Array, b: int) -> Array:
    return -(-a // b)


@dataclass(frozen=True)
class _Ports:
    """The port of each message of a pattern."""

    of: Array
    shared: tuple[Array, Array, Array] | None  # If messages share: messages by port, where each
    # port's begin among them, and which port that is.

    @classmethod
    def used_by(cls, of: Array, num_ports: int) -> _Ports:
        if np.bincount(of, minlength=num_ports).max() <= 1:
            return cls(of, None)
        order = np.argsort(of, kind="stable")
        ports, begin = np.unique(of[order], return_index=True)
        return cls(of, (order, begin, ports))

    def sums(self, values: Array) -> Array:
        """For each message, the sum over all messages of its port."""
        return values if self.shared is None else np.bincount(self.of, values)[self.of]

    def occupy(self, free: Array, until: Array) -> None:
        """`free` of each port becomes the latest of its messages' times."""
        if self.shared is None:
            free[self.of] = until
        else:
            order, begin, ports = self.shared
            free[ports] = np.maximum.reduceat(until[order], begin, axis=0)


@dataclass(frozen=True)
class _Pattern:
    """Who sends how much to whom: what a batch costs but for when.

    The costs are [messages, sizes], or broadcast to that.
    """

    src: Array
    dst: Array
    count: Array
    out: _Ports
    into: _Ports
    occupancy: Array
    latency: Array
    work: Array

    def matches(self, src: Array, dst: Array, count: Array) -> bool:
        return all(map(np.array_equal, (self.src, self.dst, self.count), (src, dst, count)))


class Simulation:
    """The state: `step` every batch in turn, then ask for `times`. Arrays are [who, sizes]."""

    def __init__(self, num_ranks: int, chunk_bytes: Array, topology: Topology) -> None:
        ports = topology.num_ports(num_ranks)
        self._topology = topology
        self._chunk_bytes = np.atleast_1d(np.asarray(chunk_bytes, np.float64))
        self._first_port = np.concatenate([[0], np.cumsum(ports)])
        self._alpha = np.array([link.alpha for link in topology.links])
        self._beta = np.array([link.beta for link in topology.links])
        self._gap = np.array([link.gap for link in topology.links])
        self._clock = np.zeros((num_ranks, len(self._chunk_bytes)))
        self._round_clock = self._clock.copy()  # When the round began: its sends come first.
        self._sends_until = np.zeros((sum(ports), len(self._chunk_bytes)))
        self._receives_until = np.zeros_like(self._sends_until)
        self._last: _Pattern | None = None

    def times(self) -> Array:
        return self._clock.max(axis=0)

    def step(self, batch: Batch) -> None:
        if not batch.together:
            np.copyto(self._round_clock, self._clock)
        local = batch.src == batch.dst
        if not local.any():
            self._messages(batch.src, batch.dst, batch.count, batch.reduce)
            return
        self._clock[batch.dst[local]] += self._work(batch.count[local])
        if not local.all():
            away = ~local
            self._messages(batch.src[away], batch.dst[away], batch.count[away], batch.reduce)

    def _messages(self, src: Array, dst: Array, count: Array, reduce: bool) -> None:
        p = self._pattern(src, dst, count)
        until = self._round_clock[p.src]
        np.maximum(until, self._sends_until[p.out.of], out=until)
        np.maximum(until, self._receives_until[p.into.of], out=until)
        until += p.occupancy
        p.out.occupy(self._sends_until, until)
        p.into.occupy(self._receives_until, until)
        until += p.latency
        np.maximum(until, self._clock[p.dst], out=until)
        if reduce:
            until += p.work
        self._clock[p.dst] = until

    def _pattern(self, src: Array, dst: Array, count: Array) -> _Pattern:
        """That of the last batch if it is the same, as in a ring; it costs as much as a batch."""
        if self._last is None or not self._last.matches(src, dst, count):
            self._last = self._new_pattern(src, dst, count)
        return self._last

    def _new_pattern(self, src: Array, dst: Array, count: Array) -> _Pattern:
        level = self._topology.level(src, dst)
        out, into = self._ports(src, level), self._ports(dst, level)
        latency = _if_equal(self._alpha[level])[:, None]
        occupancy = self._occupancy(level, count, out, into)
        return _Pattern(src, dst, count, out, into, occupancy, latency, self._work(count))

    def _occupancy(self, level: Array, count: Array, out: _Ports, into: _Ports) -> Array:
        if not (out.shared or into.shared) and len(_if_equal(count)) == 1:
            per_level = self._gap[:, None] + (self._beta * count[0])[:, None] * self._chunk_bytes
            return per_level[_if_equal(level)]
        gap, per_chunk = self._gap[level], self._beta[level] * count
        loads = (
            ports.sums(gap)[:, None] + ports.sums(per_chunk)[:, None] * self._chunk_bytes
            for ports in (out, into)
        )
        return np.maximum(*loads)

    def _work(self, count: Array) -> Array:
        """Seconds to reduce or copy so many chunks."""
        return (self._topology.gamma * _if_equal(count))[:, None] * self._chunk_bytes

    def _ports(self, rank: Array, level: Array) -> _Ports:
        port = np.empty_like(rank)
        for index, link in enumerate(self._topology.links):
            here = level == index
            port[here] = self._first_port[index] + link.port(rank[here])
        return _Ports.used_by(port, int(self._first_port[-1]))


def _if_equal(values: Array) -> Array:
    """Only the first, to be broadcast, of values that are all equal."""
    return values[:1] if (values == values[0]).all() else values
