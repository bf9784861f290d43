"""all_to_all_v: rank s sends its first send_counts[0] rows to rank 0, the next send_counts[1] to
rank 1, and so on; every rank gets what it is sent, packed in rank order, then zeros.

The counts are exchanged by the op itself. Derivative: linear in x; the transpose is
all_to_all_v_back, which returns the rows of y to where they were in x (dropped and unsent rows get
zero), and whose transpose is all_to_all_v again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, make_call, refuse_traced, static_int
from jcoll.ops import _hierarchical_rows, _primitive, _rows
from jcoll.ops._hierarchical import among
from jcoll.ops._motion import Motion
from jcoll.ops._primitive import CollectiveSpec


def all_to_all_v(
    x: Any,
    send_counts: Any,
    axis_name: AxisName,
    *,
    output_size: int,
    overflow: str = "error",
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Exchanges a number of rows that differs from pair to pair (MPI_Alltoallv).

    Args:
      x: array [rows, ...], the rows to send, packed by destination rank. Rows beyond
        sum(send_counts) are not sent.
      send_counts: integers [num_ranks], how many rows go to each rank; may be traced.
      axis_name: mesh axis, or tuple of axes.
      output_size: the number of rows of the result, a static int: at least what any rank gets.
      overflow: what happens when a rank is sent more than output_size rows. "error": the
        collective fails on all ranks, naming the ranks. "drop": the rows that do not fit, the last
        ones in rank order, are dropped and counted.
      algorithm, timeout_s: as in `all_reduce`; between hosts "auto" or "xla".

    Returns:
      (y, recv_counts), and with overflow="drop" (y, recv_counts, dropped):
      y: array [output_size, ...], the rows received, in rank order; rows beyond
        sum(recv_counts) are zero.
      recv_counts: integers [num_ranks], how many rows of y came from each rank.
      dropped: integers [num_ranks], how many rows from each rank did not fit.

    Raises: as `all_reduce`. JaxRuntimeError or ValueError as there, naming the pair of ranks:
      counts that are negative or exceed x, or (overflow="error") the output. By "xla", between
      hosts and on CUDA a program cannot fail: y is then NaN, or the lowest (unsigned: highest)
      integer.

    Derivative: linear in x; the transpose returns rows to where they came from, zeros to rows that
    were not sent or were dropped.
    """
    call = make_call("all_to_all_v", axis_name, algorithm=algorithm, timeout_s=timeout_s)
    x = _primitive.as_array(call, x)
    output_size = static_int(call.where, "output_size", output_size)
    _check(call, x, output_size, overflow)
    counts = _rows.check_index(call, "send_counts", send_counts, call.num_ranks)
    if counts.shape[0] != call.num_ranks:
        problem = f"send_counts has {counts.shape[0]} entries for {call.num_ranks} ranks."
        raise ValueError(errors.text(call.where, problem, "Pass one count per rank."))
    _check_num_rows(call, "output_size", output_size, counts.dtype)
    y, received, dropped = _primitive.bind(
        SPEC, x, counts, call=call, output_size=output_size, drop=overflow == "drop"
    )
    return (y, received, dropped) if overflow == "drop" else (y, received)


def _check(call: Call, x: Any, output_size: int, overflow: str) -> None:
    if x.ndim == 0:
        problem = "x is a scalar; an array of rows is needed."
        raise ValueError(errors.text(call.where, problem, "Add a leading dimension."))
    if output_size < 0:
        problem = f"output_size={output_size} is negative."
        raise ValueError(errors.text(call.where, problem, "Pass the most rows a rank may get."))
    refuse_traced(call.where, overflow=overflow)
    if not isinstance(overflow, str) or overflow not in ("error", "drop"):
        problem = f"overflow={overflow!r} is unknown."
        raise ValueError(errors.text(call.where, problem, 'Choose "error" or "drop".'))


def _check_num_rows(call: Call, what: str, num_rows: int, dtype: Any) -> None:
    most = np.iinfo(dtype).max
    if num_rows > most:
        problem = f"{what}={num_rows} is more rows than {dtype} counts; at most {most}."
        fix = "Send less per call, or pass send_counts of int64 (with jax_enable_x64)."
        raise ValueError(errors.text(call.where, problem, fix))


def _layout(xp: Any, counts: Any, output_size: int) -> tuple[Any, Any, Any, Any]:
    """For counts[src, dst] of all ranks: x_row, y_row (where the rows of a pair begin in x and in
    y), kept and dropped (how many fit), each [src, dst]."""
    x_row = _rows.running_total(xp, counts, 1) - counts
    y_end = xp.minimum(_rows.running_total(xp, counts, 0), output_size)
    y_row = xp.concatenate([xp.zeros_like(y_end[:1]), y_end[:-1]])
    kept = y_end - y_row
    return x_row, y_row, kept, counts - kept


def _take(xp: Any, x: Any, rows: Any, hit: Any) -> Any:
    """x[rows] where hit, else zero."""
    if x.shape[0] == 0:
        return xp.zeros((rows.shape[0], *x.shape[1:]), x.dtype)
    picked = x[xp.clip(rows, 0, x.shape[0] - 1)]
    return xp.where(_rows.expand(hit, x.ndim), picked, xp.zeros_like(picked))


def _travel(xp: Any, xs: Any, num_rows: int, start: Any, at: Any, count: Any) -> Any:
    """Arrays of num_rows rows, in which those from rank s for rank d, xs[s][start[s, d]] and so on,
    count[s, d] of them, stand from row at[s, d] on; zeros elsewhere."""
    row = xp.arange(num_rows, dtype=count.dtype)
    ys = []
    for dst in range(xs.shape[0]):
        y = xp.zeros((num_rows, *xs.shape[2:]), xs.dtype)
        for src in range(xs.shape[0]):
            offset = row - at[src, dst]
            hit = (offset >= 0) & (offset < count[src, dst])
            part = _take(xp, xs[src], offset + start[src, dst], hit)
            y = xp.where(_rows.expand(hit, y.ndim), part, y)
        ys.append(y)
    return xp.stack(ys)


def _stacked(xp: Any, xs: Any, counts: Any, *, output_size: int, drop: bool) -> Any:
    x_row, y_row, kept, dropped = _layout(xp, counts, output_size)
    ys = _travel(xp, xs, output_size, x_row, y_row, kept)
    return [ys, kept.T.astype(counts.dtype), dropped.T.astype(counts.dtype)]


def _stacked_back(
    xp: Any, cts: Any, counts: Any, *, output_size: int, drop: bool, num_rows: int
) -> Any:
    x_row, y_row, kept, _ = _layout(xp, counts, output_size)
    return [_travel(xp, cts, num_rows, y_row.T, x_row.T, kept.T)]


def _shapes(avals: Any, call: Call, *, output_size: int, drop: bool) -> Any:
    x, counts = avals
    index = (counts.shape, counts.dtype)
    return [((output_size, *x.shape[1:]), x.dtype), index, index]


def _shapes_back(avals: Any, call: Call, *, output_size: int, drop: bool, num_rows: int) -> Any:
    return [((num_rows, *avals[0].shape[1:]), avals[0].dtype)]


def _motion(
    avals: Any, call: Call, *, output_size: int, drop: bool, num_rows: int | None = None
) -> Motion:
    x, counts = avals
    back = num_rows is not None
    rows = _rows.row_attributes(x, x.shape[0], num_rows if back else output_size, counts)
    rows["drop_overflow"] = int(drop)
    return Motion("variable_back" if back else "variable", rows=rows)


def _xla(x: Any, counts: Any, *, call: Call, platform: str, output_size: int, drop: bool) -> Any:
    static: dict[str, Any] = dict(output_size=output_size, drop=drop)
    if platform != "cpu":
        return _composed(partial(_rows.run_lax, call), x, counts, call=call, **static)
    y, kept, dropped = _rows.through_gather(SPEC, x, counts, call=call, **static)
    bad = jax.lax.psum(_bad_counts(counts, x.shape[0]).astype(jnp.int32), call.axes) > 0
    return _poisoned(bad, y, kept, dropped, drop=drop)


def _composed(
    run: Any, x: Any, counts: Any, *, call: Call, output_size: int, drop: bool
) -> list[Any]:
    bad, rank, x_row, y_row, kept, dropped = _layout_of_all(run, counts, call, len(x), output_size)
    y = jnp.zeros((output_size, *x.shape[1:]), x.dtype)
    index = (x_row[rank], kept[rank], y_row[rank], kept[:, rank])
    (y,) = run("ragged_all_to_all", x, y, *(jnp.where(bad, 0, i) for i in index))
    kept, dropped = (a[:, rank].astype(counts.dtype) for a in (kept, dropped))
    return _poisoned(bad, y, kept, dropped, drop=drop)


def _layout_of_all(
    run: Any, counts: Any, call: Call, num_rows: int, output_size: int
) -> tuple[Any, ...]:
    """Whether any counts are bad, this rank in its group, and the layout from the counts of all."""
    (every,) = run("all_gather", counts)
    bad = jax.vmap(lambda c: _bad_counts(c, num_rows))(every).any()
    return bad, _primitive.rank_in_group(call), *_layout(jnp, every, output_size)


def _poisoned(bad: Any, y: Any, kept: Any, dropped: Any, *, drop: bool) -> list[Any]:
    """The results of a program that cannot fail."""
    if not drop:
        bad |= (dropped > 0).any()
        kept = kept + dropped  # What was sent: y, if it has no rows, cannot show that it is bad.
    return [jnp.where(bad, jnp.full_like(y, _poison(y.dtype)), y), kept, dropped]


def _bad_counts(counts: Any, num_rows: int) -> Any:
    most = min(num_rows, np.iinfo(counts.dtype).max)
    return (counts < 0).any() | (_rows.running_total(jnp, counts, 0)[-1] > most)


def _poison(dtype: Any) -> Any:
    """NaN, or where there is none the value that is least often data."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.iinfo(dtype).max  # The lowest, zero, is what unfilled rows have.
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else True


def _xla_back(ct: Any, counts: Any, *, call: Call, platform: str, **static: Any) -> Any:
    if platform == "cpu":
        return _rows.through_gather(BACK, ct, counts, call=call, **static)
    return _composed_back(partial(_rows.run_lax, call), ct, counts, call=call, **static)


def _composed_back(
    run: Any, ct: Any, counts: Any, *, call: Call, output_size: int, drop: bool, num_rows: int
) -> list[Any]:
    bad, rank, x_row, y_row, kept, _ = _layout_of_all(run, counts, call, num_rows, output_size)
    x = jnp.zeros((num_rows, *ct.shape[1:]), ct.dtype)
    index = (y_row[:, rank], kept[:, rank], x_row[:, rank], kept[rank])
    return run("ragged_all_to_all", ct, x, *(jnp.where(bad, 0, i) for i in index))


def _hierarchical(
    x: Any, counts: Any, *, call: Call, levels: Any, output_size: int, drop: bool
) -> list[Any]:
    bad, e, *told = _exchange(counts, call, levels, x.shape[0], output_size)
    y = _hierarchical_rows.forth(x, e, call=call, levels=levels)
    kept, dropped = (a[:, e.rank].astype(counts.dtype) for a in told)
    return _poisoned(bad, y, kept, dropped, drop=drop)


def _hierarchical_back(
    ct: Any, counts: Any, *, call: Call, levels: Any, output_size: int, drop: bool, num_rows: int
) -> list[Any]:
    _, e, *_ = _exchange(counts, call, levels, num_rows, output_size)
    return [_hierarchical_rows.back(ct, e, call=call, levels=levels)]


def _exchange(
    counts: Any, call: Call, levels: Any, num_rows: int, output_size: int
) -> tuple[Any, ...]:
    """Whether any counts are bad; what travels, nothing if they are; how many rows, by the counts,
    are kept and dropped."""
    every = among("all_gather", counts, call=call, levels=levels)
    bad = jax.vmap(lambda c: _bad_counts(c, num_rows))(every).any()
    x_row, _, kept, dropped = _layout(jnp, every, output_size)
    travels = jnp.where(bad, 0, kept)
    rank = _primitive.rank_in_group(call)
    e = _hierarchical_rows.Exchange(rank, x_row, travels, num_rows, output_size)
    _check_num_rows(call, "output_size * hosts", e.most_rows(levels), counts.dtype)
    return bad, e, kept, dropped


SPEC = CollectiveSpec(
    name="all_to_all_v",
    stacked=_stacked,
    shapes=_shapes,
    motion=_motion,
    xla=_xla,
    composed=_composed,
    hierarchical=_hierarchical,
    index_inputs=True,
)
BACK = CollectiveSpec(
    name="all_to_all_v_back",
    stacked=_stacked_back,
    shapes=_shapes_back,
    motion=_motion,
    xla=_xla_back,
    composed=_composed_back,
    hierarchical=_hierarchical_back,
    index_inputs=True,
)


def _jvp(primals: Any, tangents: Any, *, call: Call, **static: Any) -> Any:
    x, counts = primals
    outs = _primitive.bind(SPEC, x, counts, call=call, **static)
    zeros = [_compat.zero_tangent(y) for y in outs]
    if type(tangents[0]) is _compat.Zero:
        return outs, zeros
    t, *_ = _primitive.bind(SPEC, tangents[0], counts, call=call, **static)
    return outs, [t, *zeros[1:]]


def _transpose(cts: Any, x: Any, counts: Any, *, call: Call, **static: Any) -> Any:
    num_rows = x.aval.shape[0]
    return [*_primitive.bind(BACK, cts[0], counts, call=call, num_rows=num_rows, **static), None]


def _jvp_back(primals: Any, tangents: Any, *, call: Call, **static: Any) -> Any:
    ct, counts = primals
    outs = _primitive.bind(BACK, ct, counts, call=call, **static)
    if type(tangents[0]) is _compat.Zero:
        return outs, [_compat.zero_tangent(outs[0])]
    return outs, _primitive.bind(BACK, tangents[0], counts, call=call, **static)


def _transpose_back(
    cts: Any, ct: Any, counts: Any, *, call: Call, num_rows: int, **static: Any
) -> Any:
    y, *_ = _primitive.bind(SPEC, cts[0], counts, call=call, **static)
    return [y, None]


def _batch(spec: Any, size: int, args: Any, dims: Any, *, call: Call, **static: Any) -> Any:
    """Equal counts for all batch elements: one more dimension of the rows. Else one by one."""
    x, counts = args
    if dims[1] is not None:
        return _primitive.batch_sequentially(spec, size, args, dims, call=call, **static)
    x = jnp.moveaxis(x, dims[0], 1)
    outs = _primitive.bind(spec, x, counts, call=call, **static)
    return outs, [1] + [None] * (len(outs) - 1)


all_to_all_v_p = _primitive.define(SPEC, jvp=_jvp, transpose=_transpose, batch=_batch)
all_to_all_v_back_p = _primitive.define(
    BACK, jvp=_jvp_back, transpose=_transpose_back, batch=_batch
)
