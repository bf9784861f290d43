"""reduce: y_root = x_0 + ... + x_{N-1}; zeros on the other ranks.

Derivative: for sum and mean linear, the transpose is broadcast. Other ops: that of all_reduce,
on the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat
from jcoll.comm.mesh import AxisName, Call, check_root, make_call
from jcoll.ops import _primitive
from jcoll.ops._motion import ZERO, Motion, reduced
from jcoll.ops._primitive import CollectiveSpec
from jcoll.ops._reductions import canonical, check_op, reduce_by_lax, reduce_stacked
from jcoll.ops.all_reduce import SPEC as ALL_REDUCE


def reduce(
    x: Any,
    axis_name: AxisName,
    *,
    op: str = "sum",
    root: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Reduces x over all ranks of a mesh axis; the root gets the result, the others zeros.

    Args:
      x: array, or pytree of arrays, of any shape; the same on all ranks.
      axis_name: mesh axis, or tuple of axes.
      op: as in `all_reduce`.
      root: the rank (in each group) that gets the result; a static int.
      axis_index_groups: within each group of indices; groups of equal size.
      algorithm, timeout_s: as in `all_reduce`.

    Raises: as `all_reduce`; ValueError if root is not a rank.

    Derivative: sum and mean are linear (transpose: broadcast); the other ops as in `all_reduce`.
    """
    call = make_call(
        "reduce",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    root = check_root(call.where, root, call.groups)
    check_op(call.where, op)
    return jax.tree.map(lambda leaf: _reduce_leaf(leaf, op, root, call), x)


def _reduce_leaf(leaf: Any, op: str, root: int, call: Call) -> Any:
    x, op, is_mean = canonical(call, op, _primitive.as_array(call, leaf))
    (y,) = _primitive.bind(SPEC, x, call=call, op=op, root=root)
    return y / call.num_ranks if is_mean else y


def _stacked(xp: Any, xs: Any, *, op: str, root: int) -> Any:
    return [_primitive.stack_at_root(xp, reduce_stacked(xp, xs, op), xs.shape[0], root)]


def _shapes(avals: Any, call: Call, *, op: str, root: int) -> Any:
    return [(avals[0].shape, avals[0].dtype)]


def _motion(avals: Any, call: Call, *, op: str, root: int) -> Motion:
    source_map = [[reduced(0) if rank == root else ZERO] for rank in range(call.num_ranks)]
    return Motion("blocks", source_map=source_map, reduce_op=op)


def _xla(x: Any, *, call: Call, platform: str, op: str, root: int) -> Any:
    y = reduce_by_lax(x, op, call.lax_args, call.num_ranks)
    return [_primitive.keep_at_root(y, call, root)]


def _composed(run: Any, x: Any, *, call: Call, op: str, root: int) -> Any:
    (y,) = run("all_reduce", x, op=op)
    return [_primitive.keep_at_root(y, call, root)]


def _mixed(name: Any, xs: Any, *, call: Call, op: str, root: int) -> Any:
    own, rest = _primitive.split_rank(root, name, call)
    y = reduce_stacked(jnp, xs, op)
    (y,) = _primitive.bind_rest(SPEC, name, y, call=call, op=op, root=rest)
    return [_primitive.stack_at_root(jnp, y, xs.shape[0], own)], [0]


SPEC = CollectiveSpec(
    name="reduce",
    stacked=_stacked,
    shapes=_shapes,
    motion=_motion,
    xla=_xla,
    composed=_composed,
    mixed=_mixed,
)


def _nonlinear_tangent(x: Any, t: Any, y: Any, *, call: Call, op: str, root: int) -> Any:
    def everywhere(v: Any) -> Any:
        return _primitive.bind(ALL_REDUCE, v, call=call, op=op)[0]

    return _primitive.keep_at_root(jax.jvp(everywhere, (x,), (t,))[1], call, root)


def _transpose(cts: Any, x: Any, *, call: Call, op: str, root: int) -> Any:
    from jcoll.ops.broadcast import SPEC as BROADCAST

    (ct,) = cts
    if op == "mean":
        ct = ct / jnp.asarray(call.num_ranks, ct.dtype)
    (ct,) = _primitive.bind(BROADCAST, ct, call=call, root=root)
    return [_compat.make_varying(ct, call.axes)]


reduce_p = _primitive.define(
    SPEC, jvp=_primitive.reduction_jvp(SPEC, _nonlinear_tangent), transpose=_transpose
)
