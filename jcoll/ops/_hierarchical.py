"""Collectives of ranks on several hosts: jcoll inside each host, a network's library across.

K hosts of G ranks each; rank = host * G + index in the host. Ranks of one index on all hosts form a
*rail*. With M bytes per rank, what crosses between hosts:

    all_reduce      reduce_scatter inside, all_reduce on the rail, all_gather inside   2(K-1)/K M/G
    reduce_scatter  reduce_scatter inside, reduce_scatter on the rail                   (K-1)/K M/G
    all_gather      all_gather on the rail, all_gather inside                           (K-1) M
    all_to_all      all_to_all inside, all_to_all on the rail                           (K-1)/K M
    all_to_all_v    in _hierarchical_rows.py

instead of G times as much for the first two where every rank crosses with all of its data (M: the
array; for all_gather one rank's part, which cannot cross less often).

Across, the runtime says by which algorithm (Split.across): on CPU by XLA's collectives, which are
gloo's, on CUDA by NCCL's functions on the stream of the kernels, where "host" is an NVLink domain.
By XLA's, all_reduce is cut into pieces that depend on nothing of each other: XLA has one piece
cross while the next is reduced inside. What is on one stream goes one after the other anyway.

Sums and products of narrow floats are float32 from the first addition to the last, and rounded
once, as the ops promise: M counts 4 bytes for each. What a max or min passes on is one of the
values. Of floats, all are moved on the rail and then reduced ((K-1) M/G for all_reduce), since gloo
and NCCL lose NaN.

These are CollectiveSpec.hierarchical of the ops.

Source: the scheme is that of NCCL's and Horovod's hierarchical all_reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jcoll.algorithms.hierarchical import HIERARCHICAL_OPS
from jcoll.comm.group import Groups
from jcoll.comm.mesh import Call
from jcoll.ops import _primitive
from jcoll.ops._by_xla import by_xla
from jcoll.ops._reductions import accumulation_dtype, reduce_stacked
from jcoll.tuning.candidates import NO_LEVELS, ON_HOSTS

MIN_PIECE_NBYTES = 1 << 20
"""A piece that crosses in less time than it takes to begin one is not worth its own."""
MAX_PIECES = 4


@dataclass(frozen=True)
class Split:
    """The two levels of a call: groups of positions on its axes, as axis_index_groups has them."""

    hosts: tuple[tuple[int, ...], ...]
    rails: tuple[tuple[int, ...], ...]
    across: str = "xla"
    """The algorithm of what crosses."""

    @property
    def num_local(self) -> int:
        return len(self.hosts[0])


def split(host_of: Sequence[int], axis_size: int, groups: Groups) -> Split | str:
    """The levels of a call whose ranks are on several hosts, or why there are none.

    host_of: the host of every position in the mesh.
    """
    rows = [host_of[i : i + axis_size] for i in range(0, len(host_of), axis_size)]
    # Positions only: the same in every row, though the hosts are others.
    levels = {tuple(_levels(row, group) for group in groups.as_lists()) for row in rows}
    found = levels.pop()
    if levels or None in found:
        return f"{ON_HOSTS}, not in equal runs of one host after the other"
    hosts = tuple(host for group in found for host in group or ())
    if len({len(host) for host in hosts}) > 1 or len(hosts[0]) == 1:
        return f"{ON_HOSTS}, one on each or not as many on each"
    rails = tuple(rail for group in found for rail in zip(*(group or ()), strict=True))
    if len({len(rail) for rail in rails}) > 1:
        return f"{ON_HOSTS}, not on as many for every group"
    return Split(hosts, rails)


def obstacle(op: str, host_of: Sequence[int], axis_size: int, groups: Groups) -> str | None:
    """Why a call whose ranks are on several hosts cannot be done in two levels."""
    if op not in HIERARCHICAL_OPS:
        return NO_LEVELS
    levels = split(host_of, axis_size, groups)
    return levels if isinstance(levels, str) else None


def _levels(host_of: Sequence[int], group: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """A group's positions by host, if they are in equal runs."""
    runs: list[list[int]] = []
    for position in group:
        if runs and host_of[runs[-1][0]] == host_of[position]:
            runs[-1].append(position)
        else:
            runs.append([position])
    hosts = {host_of[run[0]] for run in runs}
    if len(hosts) != len(runs) or len({len(run) for run in runs}) > 1:
        return None
    return tuple(tuple(run) for run in runs)


def inside(name: str, *arrays: Any, call: Call, levels: Split, **static: Any) -> Any:
    """The first result of a collective among the ranks of each host."""
    groups = Groups(call.groups.axis_size, levels.hosts)
    inner = replace(call, op=name, groups=groups, algorithm="auto")
    return _primitive.bind(_primitive.SPECS[name], *arrays, call=inner, **static)[0]


def across(name: str, x: Any, *, call: Call, levels: Split, **static: Any) -> Any:
    """The result of a collective on the rails."""
    groups = Groups(call.groups.axis_size, levels.rails)
    return among(name, x, call=replace(call, groups=groups), levels=levels, **static)


def among(name: str, x: Any, *, call: Call, levels: Split, **static: Any) -> Any:
    """The result of a collective of all the call's ranks at once, by what crosses hosts."""
    spec = _primitive.SPECS[name]
    outer = replace(call, op=name, algorithm=levels.across)
    if levels.across == "xla":  # Nothing to be chosen, or told by explain.
        return by_xla(spec, x, call=outer, platform="cpu", **static)[0]
    return _primitive.bind(spec, x, call=outer, **static)[0]


def all_reduce(x: Any, *, call: Call, levels: Split, op: str) -> list[Any]:
    flat = x.reshape(-1)
    pieces = max(1, min(MAX_PIECES, flat.size * flat.dtype.itemsize // MIN_PIECE_NBYTES))
    pieces = pieces if levels.across == "xla" else 1
    quantum = pieces * levels.num_local
    padded = jnp.pad(flat, (0, -flat.size % quantum)).reshape(pieces, levels.num_local, -1)
    done = [_reduce_piece(piece, call, levels, op) for piece in padded]
    return [jnp.concatenate(done)[: flat.size].reshape(x.shape)]


def _reduce_piece(piece: Any, call: Call, levels: Split, op: str) -> Any:
    step = _step(op)
    part = inside("reduce_scatter", _widened(piece, op), call=call, levels=levels, op=step)
    part = _reduced("all_reduce", part, step, call, levels)
    part = _finished(part, op, call, piece.dtype)
    return inside("all_gather", part, call=call, levels=levels).reshape(-1)


def reduce_scatter(x: Any, *, call: Call, levels: Split, op: str) -> list[Any]:
    num_local, num_hosts, step = levels.num_local, len(levels.rails[0]), _step(op)
    by_index = jnp.swapaxes(x.reshape(num_hosts, num_local, *x.shape[1:]), 0, 1)
    wide = _widened(by_index, op)
    part = inside("reduce_scatter", wide, call=call, levels=levels, op=step)  # [hosts, ...]
    total = _reduced("reduce_scatter", part, step, call, levels)
    return [_finished(total, op, call, x.dtype)]


def _reduced(name: str, x: Any, op: str, call: Call, levels: Split) -> Any:
    """all_reduce or reduce_scatter on the rails."""
    if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
        moves = "all_gather" if name == "all_reduce" else "all_to_all"
        return reduce_stacked(jnp, across(moves, x, call=call, levels=levels), op)
    return across(name, x, call=call, levels=levels, op=op)


def _step(op: str) -> str:
    """What the levels do: a mean is divided at the end."""
    return "sum" if op == "mean" else op


def _widened(x: Any, op: str) -> Any:
    """x in the type in which partial results are passed on from level to level."""
    return x.astype(accumulation_dtype(x.dtype)) if op in ("sum", "mean", "prod") else x


def _finished(total: Any, op: str, call: Call, dtype: Any) -> Any:
    if op == "mean":
        total = total / jnp.asarray(call.num_ranks, total.dtype)
    return total.astype(dtype)


def all_gather(x: Any, *, call: Call, levels: Split) -> list[Any]:
    by_host = across("all_gather", x, call=call, levels=levels)  # [hosts, ...]
    both = inside("all_gather", by_host, call=call, levels=levels)  # [local, hosts, ...]
    return [jnp.swapaxes(both, 0, 1).reshape(call.num_ranks, *x.shape)]


def all_to_all(x: Any, *, call: Call, levels: Split) -> list[Any]:
    num_local, num_hosts = levels.num_local, len(levels.rails[0])
    by_index = jnp.swapaxes(x.reshape(num_hosts, num_local, *x.shape[1:]), 0, 1)
    swapped = inside("all_to_all", by_index, call=call, levels=levels)  # [local src, host dst, ...]
    by_host = jnp.swapaxes(swapped, 0, 1)
    arrived = across("all_to_all", by_host, call=call, levels=levels)
    return [arrived.reshape(x.shape)]  # [host src, local src, ...]
