"""all_to_all: y_r[s] = x_s[r], the transposition of blocks between ranks.

Derivative: linear, and its own transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jcoll.comm.mesh import AxisName, Call, canonical_dim, make_call, static_bool
from jcoll.ops import _hierarchical, _primitive
from jcoll.ops._motion import Motion
from jcoll.ops._primitive import CollectiveSpec


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Sends block d of x to rank d, and puts the received blocks together in rank order.

    Args:
      x: array, or pytree of arrays, of any dtype; the same shape on all ranks.
      axis_name: mesh axis, or tuple of axes.
      split_axis: the dimension of x that is split into num_ranks blocks.
      concat_axis: the dimension of the result along which the received blocks stand.
      axis_index_groups: within each group of indices; groups of equal size.
      tiled: False: split_axis has size num_ranks and is removed, concat_axis is a new
        dimension. True: the one is divided, the other multiplied by num_ranks.
      algorithm, timeout_s: as in `all_reduce`.

    Raises: as `all_reduce`; ValueError, with the size to pad to, if split_axis does not divide.

    Derivative: linear; the transpose is the all_to_all back.
    """
    call = make_call(
        "all_to_all",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    tiled = static_bool(call.where, "tiled", tiled)
    return jax.tree.map(lambda leaf: _leaf(leaf, split_axis, concat_axis, tiled, call), x)


def _leaf(leaf: Any, split: Any, concat: Any, tiled: bool, call: Call) -> Any:
    x = _primitive.as_array(call, leaf)
    split = canonical_dim(call.where, "split_axis", split, x.ndim)
    concat = canonical_dim(call.where, "concat_axis", concat, x.ndim)
    x = _primitive.take_blocks(x, split, tiled, call, "split_axis")
    (y,) = _primitive.bind(SPEC, x, call=call)
    return _primitive.place_blocks(y, concat, tiled)


def _stacked(xp: Any, xs: Any) -> Any:
    return [xp.swapaxes(xs, 0, 1)]


def _shapes(avals: Any, call: Call) -> Any:
    return [(avals[0].shape, avals[0].dtype)]


def _motion(avals: Any, call: Call) -> Motion:
    n = call.num_ranks
    source_map = [[src * n + rank for src in range(n)] for rank in range(n)]
    return Motion("blocks", in_blocks=n, out_blocks=n, source_map=source_map)


def _xla(x: Any, *, call: Call, platform: str) -> Any:
    return [jax.lax.all_to_all(x, split_axis=0, concat_axis=0, **call.lax_args)]


def _mixed(name: Any, xs: Any, *, call: Call) -> Any:
    # In: [sender's index on `name`, receiver, ...].
    xs = jnp.swapaxes(xs, 0, 1)
    xs = _primitive.split_axis(xs, name, call)  # [rest, name, sender's name, ...]
    (y,) = _primitive.bind_rest(SPEC, name, xs, call=call)  # [sender's rest, name, sender's name]
    y = jnp.moveaxis(y, 1, 0)
    return [jax.vmap(lambda blocks: _primitive.merge_axis(blocks, name, call))(y)], [0]


SPEC = CollectiveSpec(
    name="all_to_all",
    stacked=_stacked,
    shapes=_shapes,
    motion=_motion,
    xla=_xla,
    hierarchical=_hierarchical.all_to_all,
    blocked_in=True,
    blocked_out=True,
    mixed=_mixed,
)


def _transpose(cts: Any, x: Any, *, call: Call) -> Any:
    return _primitive.bind(SPEC, *cts, call=call)


all_to_all_p = _primitive.define(SPEC, jvp=None, transpose=_transpose)
