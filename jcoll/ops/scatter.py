"""scatter: y_r = x_root[r], rank r gets block r of the root's array.

Derivative: linear, the transpose is gather to the same root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jcoll.comm.mesh import AxisName, Call, canonical_dim, check_root, make_call, static_bool
from jcoll.ops import _primitive
from jcoll.ops._motion import Motion
from jcoll.ops._primitive import CollectiveSpec


def scatter(
    x: Any,
    axis_name: AxisName,
    *,
    root: int = 0,
    axis: int = 0,
    tiled: bool = False,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Splits the root's x over the ranks of a mesh axis; what other ranks pass is not used.

    Args:
      x: array, or pytree of arrays, of any dtype; the same shape on all ranks.
      axis_name: mesh axis, or tuple of axes.
      root: the rank (in each group) whose array is split; a static int.
      axis: the dimension that is split into num_ranks blocks.
      tiled: False: `axis` has size num_ranks and is removed. True: it is divided and stays.
      axis_index_groups: within each group of indices; groups of equal size.
      algorithm, timeout_s: as in `all_reduce`.

    Raises: as `all_reduce`; ValueError if root is not a rank, or (with the size to pad to) if the
      dimension does not divide.

    Derivative: linear; the transpose is gather to the root.
    """
    call = make_call(
        "scatter",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    root = check_root(call.where, root, call.groups)
    tiled = static_bool(call.where, "tiled", tiled)
    return jax.tree.map(lambda leaf: _scatter_leaf(leaf, root, axis, tiled, call), x)


def _scatter_leaf(leaf: Any, root: int, axis: Any, tiled: bool, call: Call) -> Any:
    x = _primitive.as_array(call, leaf)
    axis = canonical_dim(call.where, "axis", axis, x.ndim)
    x = _primitive.take_blocks(x, axis, tiled, call, "axis")
    return _primitive.bind(SPEC, x, call=call, root=root)[0]


def _stacked(xp: Any, xs: Any, *, root: int) -> Any:
    return [xs[root]]


def _shapes(avals: Any, call: Call, *, root: int) -> Any:
    return [(avals[0].shape[1:], avals[0].dtype)]


def _motion(avals: Any, call: Call, *, root: int) -> Motion:
    n = call.num_ranks
    return Motion("blocks", in_blocks=n, source_map=[[root * n + rank] for rank in range(n)])


def _xla(x: Any, *, call: Call, platform: str, root: int) -> Any:
    return [jax.lax.all_to_all(x, split_axis=0, concat_axis=0, **call.lax_args)[root]]


SPEC = CollectiveSpec(
    name="scatter", stacked=_stacked, shapes=_shapes, motion=_motion, xla=_xla, blocked_in=True
)


def _transpose(cts: Any, x: Any, *, call: Call, root: int) -> Any:
    from jcoll.ops.gather import SPEC as GATHER

    return _primitive.bind(GATHER, *cts, call=call, root=root)


scatter_p = _primitive.define(SPEC, jvp=None, transpose=_transpose)
