"""reduce_scatter: rank r gets block r of the reduction, y_r = x_0[r] + ... + x_{N-1}[r].

Derivative: for sum and mean linear, the transpose is all_gather. Other ops: every rank collects the
N versions of its block (all_to_all) and differentiates their reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jcoll.comm.mesh import AxisName, Call, canonical_dim, make_call, static_bool
from jcoll.ops import _hierarchical, _primitive
from jcoll.ops._motion import Motion, reduced
from jcoll.ops._primitive import CollectiveSpec
from jcoll.ops._reductions import accumulation_dtype, canonical, check_op, reduce_stacked


def reduce_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    op: str = "sum",
    scatter_dimension: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Reduces x over all ranks of a mesh axis and leaves each rank one block of the result.

    Args:
      x: array, or pytree of arrays; the same shape on all ranks.
      axis_name: mesh axis, or tuple of axes.
      op: as in `all_reduce`.
      scatter_dimension: the dimension of x that is split into num_ranks blocks.
      axis_index_groups: within each group of indices; groups of equal size.
      tiled: False: the dimension has size num_ranks and is removed. True: it is divided by
        num_ranks and stays.
      algorithm, timeout_s: as in `all_reduce`.

    Returns:
      Like x, with the dimension removed or divided.

    Raises: as `all_reduce`; ValueError, with the size to pad to, if the dimension does not divide.

    Derivative: sum and mean are linear (transpose: all_gather); the other ops as in `all_reduce`.
    """
    call = make_call(
        "reduce_scatter",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    check_op(call.where, op)
    tiled = static_bool(call.where, "tiled", tiled)
    return jax.tree.map(lambda leaf: _scatter_leaf(leaf, op, scatter_dimension, tiled, call), x)


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
) -> Any:
    """`reduce_scatter` with op="sum", by the name and signature of `jax.lax.psum_scatter`."""
    return reduce_scatter(
        x,
        axis_name,
        scatter_dimension=scatter_dimension,
        axis_index_groups=axis_index_groups,
        tiled=tiled,
    )


def _scatter_leaf(leaf: Any, op: str, dim: Any, tiled: bool, call: Call) -> Any:
    x, op, is_mean = canonical(call, op, _primitive.as_array(call, leaf))
    dim = canonical_dim(call.where, "scatter_dimension", dim, x.ndim)
    if not call.axes:  # lax.psum_scatter keeps the dimension then.
        return x / 1 if is_mean else x
    x = _primitive.take_blocks(x, dim, tiled, call, "scatter_dimension")
    (y,) = _primitive.bind(SPEC, x, call=call, op=op)
    return y / call.num_ranks if is_mean else y


def _stacked(xp: Any, xs: Any, *, op: str) -> Any:
    return [reduce_stacked(xp, xs, op)]


def _shapes(avals: Any, call: Call, *, op: str) -> Any:
    return [(avals[0].shape[1:], avals[0].dtype)]


def _motion(avals: Any, call: Call, *, op: str) -> Motion:
    n = call.num_ranks
    source_map = [[reduced(rank)] for rank in range(n)]
    return Motion("blocks", in_blocks=n, source_map=source_map, reduce_op=op)


def _xla(x: Any, *, call: Call, platform: str, op: str) -> Any:
    if op == "sum":
        wide = x.astype(accumulation_dtype(x.dtype))
        return [jax.lax.psum_scatter(wide, **call.lax_args).astype(x.dtype)]
    xs = jax.lax.all_to_all(x, split_axis=0, concat_axis=0, **call.lax_args)
    return [reduce_stacked(jnp, xs, op)]


def _mixed(name: Any, xs: Any, *, call: Call, op: str) -> Any:
    y = _primitive.split_axis(reduce_stacked(jnp, xs, op), name, call)  # [rest, name, ...]
    return _primitive.bind_rest(SPEC, name, y, call=call, op=op), [0]


SPEC = CollectiveSpec(
    name="reduce_scatter",
    stacked=_stacked,
    shapes=_shapes,
    motion=_motion,
    xla=_xla,
    hierarchical=_hierarchical.reduce_scatter,
    blocked_in=True,
    mixed=_mixed,
)


def _nonlinear_tangent(x: Any, t: Any, y: Any, *, call: Call, op: str) -> Any:
    from jcoll.ops.all_to_all import SPEC as ALL_TO_ALL

    (xs,) = _primitive.bind(ALL_TO_ALL, x, call=call)
    (ts,) = _primitive.bind(ALL_TO_ALL, t, call=call)
    return jax.jvp(lambda v: reduce_stacked(jnp, v, op), (xs,), (ts,))[1]


def _transpose(cts: Any, x: Any, *, call: Call, op: str) -> Any:
    from jcoll.ops.all_gather import SPEC as ALL_GATHER

    (ct,) = cts
    if op == "mean":
        ct = ct / jnp.asarray(call.num_ranks, ct.dtype)
    return _primitive.bind(ALL_GATHER, ct, call=call)


reduce_scatter_p = _primitive.define(
    SPEC, jvp=_primitive.reduction_jvp(SPEC, _nonlinear_tangent), transpose=_transpose
)
