"""all_reduce: y = x_0 + x_1 + ... + x_{N-1} on every rank (+ being the reduce op).

Derivative. sum and mean are linear. Where types track varying axes (check_vma), the result is one
value, invariant over the axis, and so is its cotangent: the transpose only makes it varying.
Without such types the result is N values, and the transpose sums their N cotangents: all_reduce
again. This is jax.lax.psum's convention. max and min pass the tangent of the ranks that attain
them, averaged over ties; prod is the product rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, make_call
from jcoll.ops import _hierarchical, _primitive
from jcoll.ops._motion import Motion, reduced
from jcoll.ops._primitive import CollectiveSpec
from jcoll.ops._reductions import (
    accumulation_dtype,
    canonical,
    check_op,
    divide,
    reduce_by_lax,
    reduce_stacked,
)


def all_reduce(
    x: Any,
    axis_name: AxisName,
    *,
    op: str = "sum",
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Reduces x over all ranks of a mesh axis; every rank gets the result, the same bits.

    Args:
      x: array, or pytree of arrays, of any shape; the same on all ranks.
      axis_name: mesh axis, or tuple of axes.
      op: "sum", "mean", "max", "min", "prod"; "and", "or" for bools (logical) and integers
        (bitwise). A NaN on any rank gives NaN, in max and min too (on CPU "xla" loses it). float16,
        bfloat16 and 8-bit floats are accumulated in float32 and rounded once; integers wrap; a mean
        of integers is a float; bools are counted in int32.
      axis_index_groups: reduces within each group of indices of the axis; each index once.
      algorithm: "auto", "direct" (jcoll's own, in one step), "xla" (XLA's collective), or one of
        docs/algorithms.md; CUDA's only are "multimem", the NVLink switch adds, and "nccl".
      timeout_s: seconds to wait for the last rank; None: JCOLL_TIMEOUT.

    Returns:
      Like x in structure and shapes. With check_vma its type no longer varies over axis_name
      (unless axis_index_groups is given).

    Raises:
      AxisError: the axis is not bound. ValueError, TypeError: arguments that do not fit.
      jax.errors.JaxRuntimeError, when the result is used: a rank did not arrive within timeout_s,
        or its process is gone. In a process with one device of several: when the compiled function
        is called, and once jax calls it by its fast path (it has run before), as ValueError.

    Derivative: sum and mean are linear, as `jax.lax.psum` has it; max and min pass the tangents of
    the ranks that attain them, averaged over ties; prod is the product rule; and, or have none.
    """
    call = make_call(
        "all_reduce",
        axis_name,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
        need_uniform=False,
    )
    check_op(call.where, op)
    return jax.tree.map(lambda leaf: _reduce_leaf(leaf, op, call), x)


def _reduce_leaf(leaf: Any, op: str, call: Call) -> Any:
    x, canonical_op, is_mean = canonical(call, op, _primitive.as_array(call, leaf))
    if not isinstance(leaf, _compat.Tracer) and call.groups.uniform:
        with np.errstate(all="ignore"):  # numpy warns of what jax does in silence.
            constant = _mean_of_constant if op == "mean" else _reduce_constant
            return constant(leaf, x, op, call)
    (y,) = _primitive.bind(SPEC, x, call=call, op=canonical_op)
    return divide(y, group_size(call)) if is_mean else y


# A value that is not traced is the same on all ranks, and stays what it is: psum(1, axis) is a
# Python int, pmean(1, axis) a Python float, as with lax.


def _mean_of_constant(leaf: Any, x: Any, op: str, call: Call) -> Any:
    if not hasattr(leaf, "dtype") and not isinstance(leaf, bool):
        return leaf * call.num_ranks / call.num_ranks
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return divide(_times(x, call.num_ranks), call.num_ranks)
    mean = _times(leaf, call.num_ranks) / call.num_ranks
    return mean.astype(x.dtype)


def _reduce_constant(leaf: Any, x: Any, op: str, call: Call) -> Any:
    if op not in ("sum", "prod") or not call.axes:
        return leaf
    if isinstance(leaf, bool) or getattr(leaf, "dtype", None) == jnp.bool_:
        leaf = jnp.asarray(leaf).astype(jnp.int32)
    if not hasattr(leaf, "dtype"):
        return leaf * call.num_ranks if op == "sum" else math.prod([leaf] * call.num_ranks)
    if op == "prod":
        xp = jnp if isinstance(leaf, jax.Array) else np
        return reduce_stacked(xp, xp.broadcast_to(leaf, (call.num_ranks, *leaf.shape)), op)
    return _times(leaf, call.num_ranks).astype(leaf.dtype)


def _times(x: Any, num_ranks: int) -> Any:
    """The sum of num_ranks times x, in the type in which it is added up."""
    wide = x.astype(accumulation_dtype(x.dtype))
    return wide * np.asarray(num_ranks).astype(wide.dtype)


def group_size(call: Call) -> Any:
    """The number of ranks in this rank's group."""
    if call.groups.uniform:
        return call.num_ranks
    group_of, _ = call.groups.tables()
    sizes = jnp.asarray([call.groups.sizes[g] for g in group_of])
    return sizes[jax.lax.axis_index(call.axes)]


def _stacked(xp: Any, xs: Any, *, op: str) -> Any:
    y = reduce_stacked(xp, xs, op)
    return [xp.broadcast_to(y, xs.shape)]


def _shapes(avals: Any, call: Call, *, op: str) -> Any:
    return [(avals[0].shape, avals[0].dtype)]


def _motion(avals: Any, call: Call, *, op: str) -> Motion:
    return Motion("blocks", source_map=[[reduced(0)]] * call.num_ranks, reduce_op=op)


def _xla(x: Any, *, call: Call, platform: str, op: str) -> Any:
    if call.groups.uniform:
        return [reduce_by_lax(x, op, call.lax_args, call.num_ranks)]
    by_gather = partial(_through_gather, op=op, call=call)
    if op in ("prod", "and", "or"):
        return [by_gather(x)]
    by_lax = partial(reduce_by_lax, op=op, named=call.lax_args, num_ranks=group_size(call))
    return [jax.lax.platform_dependent(x, tpu=by_gather, default=by_lax)]


def _through_gather(x: Any, *, op: str, call: Call) -> Any:
    """Over groups of unequal size, which lax's collectives but psum, pmax, pmin (and on TPU these
    too) do not know: all ranks' arrays, reduced group by group."""
    xs = jax.lax.all_gather(x, call.axes)
    groups = [reduce_stacked(jnp, xs[np.asarray(g)], op) for g in call.groups.as_lists()]
    group_of, _ = call.groups.tables()
    return jnp.stack(groups)[jnp.asarray(group_of)[jax.lax.axis_index(call.axes)]]


def _mixed(name: Any, xs: Any, *, call: Call, op: str) -> Any:
    y = reduce_stacked(jnp, xs, op)
    return _primitive.bind_rest(SPEC, name, y, call=call, op=op), [None]


SPEC = CollectiveSpec(
    name="all_reduce",
    stacked=_stacked,
    shapes=_shapes,
    motion=_motion,
    xla=_xla,
    hierarchical=_hierarchical.all_reduce,
    replicated=True,
    invariant=True,
    mixed=_mixed,
)


def _nonlinear_tangent(x: Any, t: Any, y: Any, *, call: Call, op: str) -> Any:
    def total(v: Any) -> Any:
        return _primitive.bind(SPEC, v, call=call, op="sum")[0]

    if op in ("max", "min"):
        attains = (x == y).astype(t.dtype)
        return total(t * attains) / total(attains)
    return total(t * _product_of_others(x, call))


def _product_of_others(x: Any, call: Call) -> Any:
    """The product over the other ranks; right where x is zero, unlike y / x."""
    from jcoll.ops.all_gather import SPEC as GATHER

    if not call.groups.uniform:
        problem = "op='prod' has no derivative over groups of unequal size."
        raise NotImplementedError(errors.text(call.where, problem, "Use groups of equal size."))
    (xs,) = _primitive.bind(GATHER, x, call=call)
    rank = _primitive.rank_in_group(call)
    is_own = (jnp.arange(call.num_ranks, dtype=rank.dtype) == rank).reshape(-1, *(1,) * x.ndim)
    return jnp.where(is_own, jnp.ones_like(xs), xs).prod(axis=0)


def _transpose(cts: Any, x: Any, *, call: Call, op: str) -> Any:
    (ct,) = cts
    if _compat.check_vma() and call.groups.members is None:
        ct = _compat.make_varying(ct, call.axes)
        return [ct / jnp.asarray(call.num_ranks, ct.dtype) if op == "mean" else ct]
    return _primitive.bind(SPEC, ct, call=call, op=op)


all_reduce_p = _primitive.define(
    SPEC, jvp=_primitive.reduction_jvp(SPEC, _nonlinear_tangent), transpose=_transpose
)


# jax.lax's spellings


def psum(x: Any, axis_name: AxisName, *, axis_index_groups: Any = None) -> Any:
    """`all_reduce` with op="sum", by the name and signature of `jax.lax.psum`."""
    return all_reduce(x, axis_name, op="sum", axis_index_groups=axis_index_groups)


def pmean(x: Any, axis_name: AxisName, *, axis_index_groups: Any = None) -> Any:
    """`all_reduce` with op="mean", by the name and signature of `jax.lax.pmean`."""
    return all_reduce(x, axis_name, op="mean", axis_index_groups=axis_index_groups)


def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: Any = None) -> Any:
    """`all_reduce` with op="max", by the name and signature of `jax.lax.pmax`."""
    return all_reduce(x, axis_name, op="max", axis_index_groups=axis_index_groups)


def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: Any = None) -> Any:
    """`all_reduce` with op="min", by the name and signature of `jax.lax.pmin`."""
    return all_reduce(x, axis_name, op="min", axis_index_groups=axis_index_groups)
