"""all_gather: y[s] = x_s on every rank, for all ranks s.

Derivative: linear; the transpose is reduce_scatter (sum): x_s is in N outputs, at block s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jcoll.comm.mesh import AxisName, Call, canonical_dim, make_call, static_bool
from jcoll.ops import _hierarchical, _primitive
from jcoll.ops._motion import Motion
from jcoll.ops._primitive import CollectiveSpec


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    axis: int = 0,
    tiled: bool = False,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Gathers x from all ranks of a mesh axis onto every rank.

    Args:
      x: array, or pytree of arrays, of any shape and dtype; the same shape on all ranks.
      axis_name: mesh axis, or tuple of axes.
      axis_index_groups: gathers within each group of indices; groups of equal size.
      axis: the dimension of the result along which the ranks' arrays stand.
      tiled: False: `axis` is a new dimension of size num_ranks. True: they are concatenated
        along the existing dimension `axis`.
      algorithm, timeout_s: as in `all_reduce`.

    Returns:
      Like x, with the dimension added or enlarged. Its type varies over axis_name, as that of
      `jax.lax.all_gather`, whose `to=` (another type) does not exist here.

    Raises: as `all_reduce`.

    Derivative: linear; the transpose is reduce_scatter (sum).
    """
    call = make_call(
        "all_gather",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    tiled = static_bool(call.where, "tiled", tiled)
    return jax.tree.map(lambda leaf: _gather_leaf(leaf, axis, tiled, call), x)


def _gather_leaf(leaf: Any, axis: Any, tiled: bool, call: Call) -> Any:
    x = _primitive.as_array(call, leaf)
    axis = canonical_dim(call.where, "axis", axis, x.ndim if tiled else x.ndim + 1)
    if not call.axes:  # lax.all_gather adds no dimension then.
        return x
    (y,) = _primitive.bind(SPEC, x, call=call)
    return _primitive.place_blocks(y, axis, tiled)


def _stacked(xp: Any, xs: Any) -> Any:
    return [xp.broadcast_to(xs, (xs.shape[0], *xs.shape))]


def _shapes(avals: Any, call: Call) -> Any:
    return [((call.num_ranks, *avals[0].shape), avals[0].dtype)]


def _motion(avals: Any, call: Call) -> Motion:
    n = call.num_ranks
    return Motion("blocks", out_blocks=n, source_map=[list(range(n))] * n, nbytes_array="out")


def _xla(x: Any, *, call: Call, platform: str) -> Any:
    return [jax.lax.all_gather(x, **call.lax_args)]


def _mixed(name: Any, xs: Any, *, call: Call) -> Any:
    (y,) = _primitive.bind_rest(SPEC, name, xs, call=call)  # [rest, name, ...]
    return [_primitive.merge_axis(y, name, call)], [None]


SPEC = CollectiveSpec(
    name="all_gather",
    stacked=_stacked,
    shapes=_shapes,
    motion=_motion,
    xla=_xla,
    hierarchical=_hierarchical.all_gather,
    blocked_out=True,
    replicated=True,
    mixed=_mixed,
)


def _transpose(cts: Any, x: Any, *, call: Call) -> Any:
    from jcoll.ops.reduce_scatter import SPEC as REDUCE_SCATTER

    return _primitive.bind(REDUCE_SCATTER, *cts, call=call, op="sum")


all_gather_p = _primitive.define(SPEC, jvp=None, transpose=_transpose)
