"""The norm of all gradients together, and its limit (Pascanu et al. 2013).

norm = m sqrt(sum of (x / m)^2 over all leaves and all their elements), m the largest |x|: squares
of float32 would overflow from 1e19 on, and vanish below 1e-23. Where a gradient is replicated each
rank has all elements, and no communication is needed. Where it is sharded a rank has the squares of
its part, and two all_reduces of a scalar, the maximum and the sum, serve all leaves that are
sharded over the same axes. Squares are added in float32 (float64 for that).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jcoll import _compat, errors
from jcoll.comm.mesh import make_call, real_number
from jcoll.layers.data_parallel import check_leaf, is_float0
from jcoll.layers.layout import leaf_specs
from jcoll.ops._reductions import accumulation_dtype
from jcoll.ops.all_reduce import all_reduce


def global_norm(
    grads: Any, *, specs: Any = None, algorithm: str = "auto", timeout_s: float | None = None
) -> jax.Array:
    """The Euclidean norm of all leaves, the same on every rank.

    Args:
      grads: a pytree of floating-point arrays: this rank's part of the gradients, already summed
        over the ranks that hold the same part. The `float0` gradients of integers count as none.
      specs: which mesh axes each leaf is sharded over, as `jax.shard_map` takes it: a pytree of
        PartitionSpecs, like `grads` or a prefix of it. None: every rank has all of every leaf.
      algorithm, timeout_s: as in `jcoll.all_reduce`.

    Returns: a float32 scalar; float64 if a leaf is. NaN or Inf only if an element is, or if the
      norm itself is no number of this type.
    """
    return _norm("global_norm", grads, specs, algorithm, timeout_s)


def clip_by_global_norm(
    grads: Any,
    max_norm: Any,
    *,
    specs: Any = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> tuple[Any, jax.Array]:
    """(grads scaled to a global norm of at most `max_norm`, their norm before).

    Unlike `optax.clip_by_global_norm`, which on sharded gradients takes each rank's own norm, and
    so scales the shards of one gradient differently. NaN and Inf are not clipped: with a norm of
    NaN or Inf all of the result is NaN (`check_finite` finds whose they are).

    Args:
      grads, specs, algorithm, timeout_s: as in `global_norm`; leaves of any shape.
      max_norm: a positive number or a real scalar array, traced or not; Inf for no limit.

    Returns: (grads, norm): a pytree like `grads`, of the same shapes and dtypes, each times
      min(1, max_norm / norm), rounded once; the norm as `global_norm` gives it, float32 [] or
      float64 [].

    Source: Pascanu, Mikolov and Bengio 2013, "On the difficulty of training recurrent neural
    networks"; over shards as Megatron-LM's get_grad_norm_fp32 adds them.
    """
    where = "clip_by_global_norm"
    limit = _checked_limit(where, max_norm)
    norm = _norm(where, grads, specs, algorithm, timeout_s)
    largest = jnp.finfo(norm.dtype).max  # No norm exceeds it, and Inf / Inf would be NaN.
    limit = min(limit, float(largest)) if isinstance(limit, float) else limit
    limit = jnp.minimum(jnp.asarray(limit, norm.dtype), largest)
    scale = limit / jnp.maximum(norm, limit)  # Exactly 1 up to the limit; never 0 / 0.
    # Not 0, nor what is flushed to it: gradients would be lost without a word.
    scale = jnp.where(scale >= jnp.finfo(scale.dtype).tiny, scale, jnp.nan)
    return jax.tree.map(functools.partial(_scaled, scale=scale), grads), norm


def _checked_limit(where: str, max_norm: Any) -> Any:
    """A float, or a traced one."""
    if isinstance(max_norm, _compat.Tracer):
        if not max_norm.shape and max_norm.dtype.kind not in "bc":
            return max_norm
        given = f"{max_norm.dtype}{list(max_norm.shape)}"
    else:
        number, given = real_number(max_norm), repr(max_norm)
        if number is not None and number > 0:
            return number
    problem = f"max_norm={given} is no limit; a positive number is needed."
    raise ValueError(errors.text(where, problem, "1.0 is usual."))


def _scaled(grad: Any, scale: jax.Array) -> Any:
    """In float32 at least, as a scale of 16 bits is rounded by up to 2^-9, or to 0."""
    if is_float0(grad):
        return grad
    grad = jnp.asarray(grad)
    wide = accumulation_dtype(grad.dtype)
    return (grad.astype(wide) * scale.astype(jnp.finfo(wide).dtype)).astype(grad.dtype)


def _norm(where: str, tree: Any, specs: Any, algorithm: str, timeout_s: float | None) -> jax.Array:
    settings = {"algorithm": algorithm, "timeout_s": timeout_s}
    parts: dict[tuple, list[jax.Array]] = defaultdict(list)
    entries = tree_leaves_with_path(tree)
    for (path, leaf), spec in zip(entries, leaf_specs(where, tree, specs), strict=True):
        if not is_float0(leaf):
            axes = _axes(spec)
            parts[axes].append(jnp.abs(_checked(where, path, leaf, axes, settings)))
    found = [leaf.dtype for leaves in parts.values() for leaf in leaves]
    dtype = max(map(accumulation_dtype, found), default=np.dtype(np.float32), key=_itemsize)

    def together(parts: list[Any], axes: tuple, op: str) -> jax.Array:
        own = functools.reduce(jnp.maximum if op == "max" else jnp.add, parts)
        return all_reduce(own, axes, op=op, **settings) if axes else own

    largest = jnp.zeros((), dtype)
    for axes, leaves in parts.items():
        sizes = [jax.lax.stop_gradient(x).max(initial=0).astype(dtype) for x in leaves]
        largest = jnp.maximum(largest, together(sizes, axes, "max"))
    unit = jnp.where((largest > 0) & (largest < jnp.inf), largest, jnp.ones((), dtype))
    total = jnp.zeros((), dtype)
    for axes, leaves in parts.items():
        squares = [jnp.sum(jnp.square(x.astype(dtype) / unit)) for x in leaves]
        total = total + together(squares, axes, "sum")
    return unit * jnp.sqrt(total)


def _itemsize(dtype: np.dtype) -> int:
    return dtype.itemsize


def _axes(spec: PartitionSpec) -> tuple:
    """The mesh axes of a spec, sorted, so that equal sets of axes share an all_reduce."""
    names = [n for part in spec for n in (part if isinstance(part, tuple) else (part,))]
    return tuple(sorted((n for n in names if n is not None), key=str))


def _checked(
    where: str, path: tuple, leaf: Any, axes: Sequence, settings: dict[str, Any]
) -> jax.Array:
    name = f"grads{keystr(path)}"
    check_leaf(where, name, leaf)
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        problem = f"leaf {name} has dtype {array.dtype}; floating-point gradients are needed."
        raise TypeError(errors.text(where, problem, "Take integer leaves out of the tree."))
    if axes:  # Names that are not bound are an error here, not later.
        make_call(where, axes, plan_op="all_reduce", **settings)
    if not _compat.check_vma():
        return array
    extra = _compat.varying_axes(jax.typeof(array)) - set(axes)
    if extra:
        axis = repr(min(extra, key=str))
        problem = f"leaf {name} differs between the ranks of axis {axis}, and specs has not {axis}."
        fix = f"Sum it over {axis} first (jcoll.sync_gradients), or name {axis} in its spec."
        raise ValueError(errors.text(where, problem, fix))
    return array
