"""The norm of all gradients together, and its limit (Pascanu et al. 2013).

norm = sqrt(sum of squares over all leaves and all their elements). Where a gradient is replicated
each rank has all elements, and no communication is needed. Where it is sharded a rank sums the
squares of its part, and one all_reduce of three numbers adds the parts, for all leaves that are
sharded over the same axes.

Squares are added in float32 (float64 for that), whose range is half as wide for numbers that are
squared: 1e20 would overflow, 1e-25 vanish. So there are three sums, as in LAPACK's nrm2: of large
elements scaled down, of small ones scaled up, and of the others as they are. (Blue 1978, "A
Portable Fortran Program to Find the Euclidean Norm of a Vector"; bounds by Anderson 2017,
"Algorithm 978: Safe Scaling in the Level 1 BLAS".)
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jcoll import _compat, errors
from jcoll.comm.mesh import make_call
from jcoll.layers.data_parallel import check_gradient, is_float0
from jcoll.layers.layout import leaf_specs
from jcoll.ops._reductions import accumulation_dtype
from jcoll.ops.all_reduce import all_reduce


def global_norm(
    tree: Any, specs: Any = None, *, algorithm: str = "auto", timeout_s: float | None = None
) -> jax.Array:
    """The Euclidean norm of all leaves, the same on every rank.

    Args:
      tree: a pytree of floating-point arrays: this rank's part of the gradients, already summed
        over the ranks that hold the same part. The `float0` gradients of integers count as none.
      specs: which mesh axes each leaf is sharded over, as `jax.shard_map` takes it: a pytree of
        PartitionSpecs, like `tree` or a prefix of it. None: every rank has all of every leaf.
      algorithm, timeout_s: as in `jcoll.all_reduce`.

    Returns: a float32 scalar; float64 if a leaf is. NaN or Inf only if an element is, or if the
      norm itself is no number of this type.
    """
    return _norm("global_norm", tree, specs, algorithm, timeout_s)


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
    NaN or Inf all of the result is NaN (`check_finite` finds whose they are).

    Args: max_norm a positive number, traced or not; the others, as in `global_norm`.
    """
    where = "clip_by_global_norm"
    if not isinstance(max_norm, _compat.Tracer) and not max_norm > 0:
        problem = f"max_norm={max_norm} is no limit; a positive number is needed."
        raise ValueError(errors.text(where, problem, "1.0 is usual."))
    norm = _norm(where, grads, specs, algorithm, timeout_s)
    limit = jnp.asarray(max_norm, norm.dtype)
    scale = limit / jnp.maximum(norm, limit)  # Exactly 1 up to the limit; never 0 / 0.
    # Not 0, nor what is flushed to it: gradients would be lost without a word.
    scale = jnp.where(scale >= jnp.finfo(scale.dtype).tiny, scale, jnp.nan)
    return jax.tree.map(functools.partial(_scaled, scale=scale), grads), norm


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
    dtype = max(
        map(accumulation_dtype, found), default=np.dtype(np.float32), key=lambda d: d.itemsize
    )
    ranges = _Ranges.of(dtype)
    total = jnp.zeros(3, dtype)
    for axes, leaves in parts.items():
        partial = sum((ranges.sums(leaf) for leaf in leaves), jnp.zeros(3, dtype))
        total = total + (all_reduce(partial, axes, **settings) if axes else partial)
    return ranges.norm(total)


class _Ranges(NamedTuple):
    """Bounds between elements, and what they are scaled by, for squares of the type."""

    dtype: np.dtype
    small: float
    large: float
    scale_up: float
    scale_down: float

    @classmethod
    def of(cls, dtype: np.dtype) -> _Ranges:
        info = jnp.finfo(dtype)
        digits, lowest, highest = info.nmant + 1, int(info.minexp) + 1, int(info.maxexp)
        return cls(
            dtype,
            2.0 ** math.ceil((lowest - 1) / 2),
            2.0 ** math.floor((highest - digits + 1) / 2),
            2.0 ** -math.floor((lowest - digits) / 2),
            2.0 ** -math.ceil((highest + digits - 1) / 2),
        )

    @property
    def scales(self) -> tuple[float, float, float]:
        return self.scale_up, 1.0, self.scale_down

    def sums(self, sizes: jax.Array) -> jax.Array:
        """[3]: the squares of small, middle and large elements; NaN is in the middle."""
        x = sizes.astype(self.dtype)
        small, large = x < self.small, x > self.large
        which = (small, ~(small | large), large)
        # What is not meant is zero before it is squared: nor has it a derivative then.
        parts = [
            jnp.sum(jnp.square(jnp.where(mask, x, jnp.zeros_like(x)) * jnp.asarray(scale, x.dtype)))
            for mask, scale in zip(which, self.scales, strict=True)
        ]
        return jnp.stack(parts)

    def norm(self, sums: jax.Array) -> jax.Array:
        there = sums > 0
        roots = jnp.sqrt(jnp.where(there, sums, 1)) / jnp.asarray(self.scales, sums.dtype)
        roots = jnp.where(there, roots, sums)  # Zero or NaN.
        largest = jax.lax.stop_gradient(roots.max())
        plain = (largest > 0) & (largest < jnp.inf)
        largest = jnp.where(plain, largest, 1)
        squares = jnp.sum(jnp.square(roots / largest))
        return jnp.where(plain, largest * jnp.sqrt(jnp.where(plain, squares, 1)), roots.sum())


def _axes(spec: PartitionSpec) -> tuple:
    """The mesh axes of a spec, sorted, so that equal sets of axes share an all_reduce."""
    names = [n for part in spec for n in (part if isinstance(part, tuple) else (part,))]
    return tuple(sorted((n for n in names if n is not None), key=str))


def _checked(
    where: str, path: tuple, leaf: Any, axes: Sequence, settings: dict[str, Any]
) -> jax.Array:
    name = f"grads{keystr(path)}"
    check_gradient(where, name, leaf)
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
