"""all_to_all_v of ranks on several hosts: jcoll inside each host, an all_to_all across.

K hosts of G ranks each, as in _hierarchical.py; all counts are known to all ranks. Forth:

    1. every rank packs its rows by the index of their destination in its host, then by its host
    2. all_to_all_v inside the host: rank i of it now has all that goes to the ranks of index i
    3. all_to_all on the rail, of K parts of C rows each, padded: XLA has none of variable sizes on
       CPU, NCCL needs sizes on the host, and shapes are static
    4. every rank packs what it has by source

C = min(output_size, G x rows of x): no rank can get more from a host. (K-1) C rows cross per rank;
by "xla", which gathers all inputs everywhere, (K-1) G x rows: for output_size about the rows of x,
as it is with balanced experts, G times as many. Back, for the derivative, is the same in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jcoll.comm.mesh import Call
from jcoll.ops import _rows
from jcoll.ops._hierarchical import Split, across, inside


@dataclass(frozen=True)
class Exchange:
    """Who sends what: kept [src, dst], the rows that travel, and x_row, where they begin in x."""

    rank: Any
    x_row: Any
    kept: Any
    num_rows: int  # Of x.
    output_size: int  # Of y.

    def most_rows(self, levels: Split) -> int:
        """Of any array on the way."""
        num_hosts = len(levels.rails[0])
        return max(num_hosts * _capacity(self, levels), _held_rows(self, levels))


def forth(x: Any, e: Exchange, *, call: Call, levels: Split) -> Any:
    """y, from x."""
    if min(x.size, e.output_size) == 0:
        return jnp.zeros((e.output_size, *x.shape[1:]), x.dtype)
    sent, passed, received = _views(e, levels)
    begin = _by_index(e.x_row[e.rank], levels)
    packed = _moved(x, begin, _starts(sent), sent, e.num_rows)
    held = _exchanged(packed, sent, _held_rows(e, levels), call, levels)
    parts = jax.vmap(_part, (None, 1, 1, None))(held, _starts(passed), passed, _capacity(e, levels))
    arrived = _across(parts, call, levels)
    return _moved(arrived, _part_begins(e, levels), _starts(received), received, e.output_size)


def back(ct: Any, e: Exchange, *, call: Call, levels: Split) -> Any:
    """The cotangent of x, from that of y."""
    if min(ct.size, e.num_rows) == 0:
        return jnp.zeros((e.num_rows, *ct.shape[1:]), ct.dtype)
    sent, passed, received = _views(e, levels)
    begin = _starts(received)
    parts = jax.vmap(_part, (None, 0, 0, None))(
        ct, begin[:, None], received[:, None], _capacity(e, levels)
    )
    arrived = _across(parts, call, levels)
    begin = _part_begins(e, levels)[None] + jax.vmap(_starts, 1, 1)(passed)
    held = _moved(arrived, begin, _starts(passed), passed, _held_rows(e, levels))
    packed = _exchanged(held, passed, e.num_rows, call, levels)
    begin = _starts(sent).T  # By host, then by index, as rows stand in x.
    return _moved(packed, begin, e.x_row[e.rank], e.kept[e.rank], e.num_rows)


def _views(e: Exchange, levels: Split) -> tuple[Any, Any, Any]:
    """Counts of rows as this rank sees them: sent [index of dst, host of dst] by it; passed [index
    of src, host of dst] through it, from ranks of its host to ranks of its index; received [host of
    src] by it."""
    num_hosts, num_local = len(levels.rails[0]), levels.num_local
    host, index = e.rank // num_local, e.rank % num_local
    by_level = e.kept.reshape(num_hosts, num_local, num_hosts, num_local)
    received = e.kept[:, e.rank].reshape(num_hosts, num_local).sum(1, dtype=e.kept.dtype)
    return _by_index(e.kept[e.rank], levels), by_level[host][:, :, index], received


def _by_index(of_rank: Any, levels: Split) -> Any:
    """[index, host] of what is by rank."""
    return of_rank.reshape(len(levels.rails[0]), levels.num_local).T


def _starts(lengths: Any) -> Any:
    """Where ranges begin that lie one after the other, in row-major order."""
    flat = lengths.reshape(-1)
    return (jnp.cumsum(flat, dtype=flat.dtype) - flat).reshape(lengths.shape)


def _capacity(e: Exchange, levels: Split) -> int:
    return min(e.output_size, levels.num_local * e.num_rows)


def _held_rows(e: Exchange, levels: Split) -> int:
    """The most that can pass through a rank."""
    return min(len(levels.rails[0]) * e.output_size, levels.num_local * e.num_rows)


def _part_begins(e: Exchange, levels: Split) -> Any:
    return jnp.arange(len(levels.rails[0]), dtype=e.kept.dtype) * _capacity(e, levels)


def _exchanged(rows: Any, counts: Any, output_size: int, call: Call, levels: Split) -> Any:
    """Inside the host; counts [index of dst, ...] in the order of the rows."""
    per_rank = counts.sum(1, dtype=counts.dtype)
    static = dict(output_size=output_size, drop=False)
    return inside("all_to_all_v", rows, per_rank, call=call, levels=levels, **static)


def _across(parts: Any, call: Call, levels: Split) -> Any:
    """parts [host of dst, rows, ...], to [host of src and rows, ...]."""
    arrived = across("all_to_all", parts, call=call, levels=levels)
    return arrived.reshape(-1, *parts.shape[2:])


def _part(x: Any, begin: Any, length: Any, num_rows: int) -> Any:
    return _moved(x, begin, _starts(length), length, num_rows)


def _moved(x: Any, begin: Any, at: Any, length: Any, num_rows: int) -> Any:
    """num_rows rows: from row at[i] on the length[i] rows of x from begin[i] on, zeros elsewhere.
    The arrays are of one shape; the ranges at[i] ascend and do not overlap."""
    begin, at, length = (a.reshape(-1) for a in (begin, at, length))
    row = jnp.arange(num_rows, dtype=at.dtype)
    # Of the ranges that begin at one row only the last can have rows.
    i = jnp.clip(jnp.searchsorted(at, row, side="right") - 1, 0)
    offset = row - at[i]
    picked = x[jnp.clip(begin[i] + offset, 0, x.shape[0] - 1)]
    hit = (offset >= 0) & (offset < length[i])
    return jnp.where(_rows.expand(hit, x.ndim), picked, jnp.zeros_like(picked))
