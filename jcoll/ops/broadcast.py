"""broadcast: y_r = x_root on every rank r.

Derivative: linear. The transpose is reduce (sum) to the root; where types track varying axes the
result, and so its cotangent, is one value: the root's cotangent is that value, the others' zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jcoll import _compat
from jcoll.comm.mesh import AxisName, Call, check_root, make_call
from jcoll.ops import _primitive
from jcoll.ops._motion import Motion
from jcoll.ops._primitive import CollectiveSpec


def broadcast(
    x: Any,
    axis_name: AxisName,
    *,
    root: int = 0,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Gives every rank the root's x.

    Args:
      x: array, or pytree of arrays, of any shape and dtype; the same shape on all ranks.
      axis_name: mesh axis, or tuple of axes.
      root: the rank (in each group) whose value is sent; a static int.
      axis_index_groups: within each group of indices; groups of equal size.
      algorithm, timeout_s: as in `all_reduce`.

    Returns:
      Like x. With check_vma its type no longer varies over axis_name (unless in groups).

    Raises: as `all_reduce`; ValueError if root is not a rank.

    Derivative: linear; the cotangents add up at the root, zeros elsewhere.
    """
    call = make_call(
        "broadcast",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    root = check_root(call.where, root, call.groups)
    return jax.tree.map(lambda leaf: _leaf(leaf, root, call), x)


def _leaf(leaf: Any, root: Any, call: Call) -> Any:
    return _primitive.bind(SPEC, _primitive.as_array(call, leaf), call=call, root=root)[0]


def _stacked(xp: Any, xs: Any, *, root: int) -> Any:
    return [xp.broadcast_to(xs[root], xs.shape)]


def _shapes(avals: Any, call: Call, *, root: int) -> Any:
    return [(avals[0].shape, avals[0].dtype)]


def _motion(avals: Any, call: Call, *, root: int) -> Motion:
    return Motion("blocks", source_map=[[root]] * call.num_ranks)


def _xla(x: Any, *, call: Call, platform: str, root: int) -> Any:
    # Bits, not a masked sum: x + 0 would turn -0 into +0.
    xs = jax.lax.all_gather(x, **call.lax_args)
    return [xs[root]]


def _mixed(name: Any, xs: Any, *, call: Call, root: int) -> Any:
    own, rest = _primitive.split_rank(root, name, call)
    return _primitive.bind_rest(SPEC, name, xs[own], call=call, root=rest), [None]


SPEC = CollectiveSpec(
    name="broadcast",
    stacked=_stacked,
    shapes=_shapes,
    motion=_motion,
    xla=_xla,
    replicated=True,
    invariant=True,
    mixed=_mixed,
)


def _transpose(cts: Any, x: Any, *, call: Call, root: int) -> Any:
    from jcoll.ops.reduce import SPEC as REDUCE

    (ct,) = cts
    if _compat.check_vma() and call.groups.members is None:
        return [_primitive.keep_at_root(_compat.make_varying(ct, call.axes), call, root)]
    return _primitive.bind(REDUCE, ct, call=call, op="sum", root=root)


broadcast_p = _primitive.define(SPEC, jvp=None, transpose=_transpose)
