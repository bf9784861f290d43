"""gather: y_root[s] = x_s for all ranks s; zeros on the other ranks.

Derivative: linear, the transpose is scatter from the same root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jcoll.comm.mesh import AxisName, Call, canonical_dim, check_root, make_call, static_bool
from jcoll.ops import _primitive
from jcoll.ops._motion import ZERO, Motion
from jcoll.ops._primitive import CollectiveSpec


def gather(
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
    """Gathers x from all ranks of a mesh axis onto the root; the others get zeros.

    Args:
      x: array, or pytree of arrays, of any shape and dtype; the same shape on all ranks.
      axis_name: mesh axis, or tuple of axes.
      root: the rank (in each group) that gets the arrays; a static int.
      axis, tiled: as in `all_gather`.
      axis_index_groups: within each group of indices; groups of equal size.
      algorithm, timeout_s: as in `all_reduce`.

    Returns:
      On every rank an array of the gathered shape: all programs are one program.

    Raises: as `all_reduce`; ValueError if root is not a rank.

    Derivative: linear; the transpose is scatter from the root.
    """
    call = make_call(
        "gather",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    root = check_root(call.where, root, call.groups)
    tiled = static_bool(call.where, "tiled", tiled)
    return jax.tree.map(lambda leaf: _gather_leaf(leaf, root, axis, tiled, call), x)


def _gather_leaf(leaf: Any, root: int, axis: Any, tiled: bool, call: Call) -> Any:
    x = _primitive.as_array(call, leaf)
    axis = canonical_dim(call.where, "axis", axis, x.ndim if tiled else x.ndim + 1)
    (y,) = _primitive.bind(SPEC, x, call=call, root=root)
    return _primitive.place_blocks(y, axis, tiled)


def _stacked(xp: Any, xs: Any, *, root: int) -> Any:
    return [_primitive.stack_at_root(xp, xs, xs.shape[0], root)]


def _shapes(avals: Any, call: Call, *, root: int) -> Any:
    return [((call.num_ranks, *avals[0].shape), avals[0].dtype)]


def _motion(avals: Any, call: Call, *, root: int) -> Motion:
    n = call.num_ranks
    source_map = [list(range(n)) if rank == root else [ZERO] * n for rank in range(n)]
    return Motion("blocks", out_blocks=n, source_map=source_map, nbytes_array="out")


def _xla(x: Any, *, call: Call, platform: str, root: int) -> Any:
    y = jax.lax.all_gather(x, **call.lax_args)
    return [_primitive.keep_at_root(y, call, root)]


SPEC = CollectiveSpec(
    name="gather", stacked=_stacked, shapes=_shapes, motion=_motion, xla=_xla, blocked_out=True
)


def _transpose(cts: Any, x: Any, *, call: Call, root: int) -> Any:
    from jcoll.ops.scatter import SPEC as SCATTER

    return _primitive.bind(SCATTER, *cts, call=call, root=root)


gather_p = _primitive.define(SPEC, jvp=None, transpose=_transpose)
