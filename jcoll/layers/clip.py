"""The norm of all gradients together, and its limit (Pascanu et al. 2013).

norm = sqrt(sum of squares over all leaves and all their elements). Where a gradient is replicated
each rank has all elements, and no communication is needed. Where it is sharded a rank sums the
squares of its part, and one all_reduce of a scalar adds the parts, for all leaves that are sharded
over the same axes. Squares are added in float32 (float64 for that).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jcoll import _compat, errors
from jcoll.comm.mesh import make_call
from jcoll.layers.layout import leaf_specs
from jcoll.ops.all_reduce import all_reduce

_WHERE = "layers.global_norm"


def global_norm(
    tree: Any, specs: Any = None, *, algorithm: str = "auto", timeout_s: float | None = None
) -> jax.Array:
    """The Euclidean norm of all leaves, the same on every rank.

    Args:
      tree: a pytree of floating-point arrays: this rank's part of the gradients, already summed
        over the ranks that hold the same part.
      specs: which mesh axes each leaf is sharded over, as `jax.shard_map` takes it: a pytree of
        PartitionSpecs, like `tree` or a prefix of it. None: every rank has all of every leaf.
      algorithm, timeout_s: as in `jcoll.all_reduce`.

    Returns: a float32 scalar; float64 if a leaf is.
    """
    parts: dict[tuple, list[jax.Array]] = defaultdict(list)
    entries = tree_leaves_with_path(tree)
    for (path, leaf), spec in zip(entries, leaf_specs(_WHERE, tree, specs), strict=True):
        axes = _axes(spec)
        _check_leaf(path, leaf, axes)
        wide = leaf if leaf.dtype.itemsize > 2 else leaf.astype(jnp.float32)
        parts[axes].append(jnp.sum(jnp.square(jnp.abs(wide))))
    dtype = max((p.dtype for ps in parts.values() for p in ps), default=jnp.dtype(jnp.float32))
    total = jnp.zeros((), dtype)
    for axes, squares in parts.items():
        partial = sum((s.astype(dtype) for s in squares), jnp.zeros((), dtype))
        if axes:
            partial = all_reduce(partial, axes, algorithm=algorithm, timeout_s=timeout_s)
        total = total + partial
    return jnp.sqrt(total)


def clip_by_global_norm(
    grads: Any,
    max_norm: Any,
    specs: Any = None,
    *,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> tuple[Any, jax.Array]:
    """(grads scaled to a global norm of at most `max_norm`, their norm before).

    Unlike `optax.clip_by_global_norm`, which on sharded gradients takes each rank's own norm, and
    so scales the shards of one gradient differently. NaN and Inf are not clipped: with a norm of
    NaN or Inf the result is not finite either (`check_finite` finds them).

    Args: max_norm a positive number, traced or not; the others, as in `global_norm`.
    """
    if not isinstance(max_norm, _compat.Tracer) and not max_norm > 0:
        problem = f"max_norm={max_norm} is no limit; a positive number is needed."
        raise ValueError(errors.text("layers.clip_by_global_norm", problem, "1.0 is usual."))
    norm = global_norm(grads, specs, algorithm=algorithm, timeout_s=timeout_s)
    limit = jnp.asarray(max_norm, norm.dtype)
    scale = limit / jnp.maximum(norm, limit)  # Exactly 1 up to the limit; never 0 / 0.
    return jax.tree.map(lambda g: (g * scale.astype(g.dtype)).astype(g.dtype), grads), norm


def _axes(spec: PartitionSpec) -> tuple:
    """The mesh axes of a spec, sorted, so that equal sets of axes share an all_reduce."""
    names = [n for part in spec for n in (part if isinstance(part, tuple) else (part,))]
    return tuple(sorted((n for n in names if n is not None), key=str))


def _check_leaf(path: tuple, leaf: Any, axes: tuple) -> None:
    name = f"grads{keystr(path)}"
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        problem = f"leaf {name} has dtype {leaf.dtype}; floating-point gradients are needed."
        raise TypeError(errors.text(_WHERE, problem, "Take integer leaves out of the tree."))
    if axes:
        make_call("all_reduce", axes)  # Names that are not bound are an error here, not later.
    if not _compat.check_vma():
        return
    extra = _compat.varying_axes(jax.typeof(leaf)) - set(axes)
    if extra:
        axis = repr(min(extra, key=str))
        problem = f"leaf {name} differs between the ranks of axis {axis}, and specs has not {axis}."
        fix = f"Sum it over {axis} first (jcoll.sync_gradients), or name {axis} in its spec."
        raise ValueError(errors.text(_WHERE, problem, fix))
