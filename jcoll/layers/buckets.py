"""Buckets: what travels together, and in which type.

A collective costs a fixed time alpha, whatever its size, and a model has many small parameters.
So leaves are laid end to end in buckets: k leaves cost one alpha instead of k, for the price of
copying them in and out. That pays for a leaf of s bytes as long as 2 s / (copy bandwidth) is
below alpha. A large leaf travels alone: it need not be copied, and need not wait for others, so
that its collective overlaps with the rest of the backward pass. On 8 virtual CPU devices of 2
cores, 24 leaves took, joined and alone (median ms): of 1 KiB 3.5 and 3.8, of 8 KiB 3.0 and 3.4,
of 16 KiB 5.3 and 5.2, of 64 KiB 9.3 and 9.2; a whole step of examples/train_gpt.py 354 and 192
(by jax.lax: 278). Hence DEFAULT_JOIN_BYTES. Where XLA runs the collectives, it merges small ones
by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat, errors
from jcoll.comm.mesh import refuse_traced, static_int

DEFAULT_BUCKET_BYTES = 25 * 2**20
DEFAULT_JOIN_BYTES = 16 * 2**10


def plan_buckets(
    leaves: Sequence[tuple[Hashable, int]], bucket_bytes: int, join_bytes: int | None = None
) -> list[list[int]]:
    """Splits leaves, given as (kind, nbytes), into buckets: lists of indices into `leaves`.

    Leaves of one kind can be joined. They are taken in order, next fit: a leaf that does not fit
    into the open bucket of its kind starts a new one, which is at most twice the fewest possible.
    A leaf larger than `join_bytes` (or a bucket) is a bucket of its own and leaves the open one
    open. Buckets come in the order of their first leaf.
    """
    largest = bucket_bytes if join_bytes is None else min(bucket_bytes, join_bytes)
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, nbytes) in enumerate(leaves):
        bucket, used = open_buckets.get(kind, (None, 0))
        if nbytes > largest:
            buckets.append([index])
            continue
        if bucket is None or used + nbytes > bucket_bytes:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[kind] = bucket, used + nbytes
    return buckets


def buckets_of(arrays: Sequence[jax.Array], bucket_bytes: int, join_bytes: int) -> list[list[int]]:
    """plan_buckets of arrays: indices of those that share a collective."""
    leaves = [(_kind(a, i), a.size * a.dtype.itemsize) for i, a in enumerate(arrays)]
    return plan_buckets(leaves, bucket_bytes, join_bytes)


def join(arrays: Sequence[jax.Array], lead: int = 0) -> jax.Array:
    """The arrays end to end, flattened but for their `lead` leading dimensions, which are equal."""
    return jax.lax.concatenate([a.reshape(*a.shape[:lead], -1) for a in arrays], lead)


def split(joined: jax.Array, shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
    """The inverse: arrays of these shapes, each after the leading dimensions of `joined`."""
    lead = joined.shape[:-1]
    sizes = [math.prod(shape) for shape in shapes]
    parts = jax.lax.split(joined, sizes, joined.ndim - 1)
    return [part.reshape(*lead, *shape) for part, shape in zip(parts, shapes, strict=True)]


def reduce_on_wire(
    reduce: Callable[..., jax.Array], x: jax.Array, op: str, num_ranks: Any, wire_dtype: Any
) -> jax.Array:
    """reduce(x, op=op), travelling as `wire_dtype` if x is of a wider float type.

    A mean is divided before the cast: the sum of n float16 can overflow where their mean does not.
    """
    if not _is_narrower(wire_dtype, x.dtype):
        return reduce(x, op=op)
    part = x / jnp.asarray(num_ranks, x.dtype) if op == "mean" else x
    return reduce(part.astype(wire_dtype), op="sum").astype(x.dtype)


def _is_narrower(wire_dtype: Any, dtype: Any) -> bool:
    if wire_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return jnp.dtype(wire_dtype).itemsize < jnp.dtype(dtype).itemsize


def check_wire(where: str, wire_dtype: Any, bucket_bytes: int, join_bytes: int) -> None:
    """Refuses what is no way to send leaves."""
    _check_bytes(where, "bucket_bytes", bucket_bytes, 1, DEFAULT_BUCKET_BYTES)
    _check_bytes(where, "join_bytes", join_bytes, 0, DEFAULT_JOIN_BYTES)
    check_float(where, "wire_dtype", wire_dtype)


def check_float(where: str, name: str, dtype: Any) -> None:
    """TypeError unless `dtype` is a floating-point type, or None."""
    refuse_traced(where, **{name: dtype})
    if dtype is not None and not _is_float(dtype):
        problem = f"{name}={dtype!r} is no floating-point type."
        fix = "Pass jnp.bfloat16, jnp.float16, jnp.float32, or None: leaves travel as they are."
        raise TypeError(errors.text(where, problem, fix))


def _is_float(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def _check_bytes(where: str, name: str, value: int, least: int, default: int) -> None:
    if static_int(where, name, value) < least:
        problem = f"{name}={value} is too small; at least {least} is needed."
        raise ValueError(errors.text(where, problem, f"The default is {default}."))


def _kind(array: jax.Array, index: int) -> Hashable:
    """What leaves must have in common to share a bucket and still get the types `pmean` gives.

    Joining arrays that vary over different mesh axes would make the result vary over all of these;
    joining arrays that are sharded over an axis outside the manual ones would gather them.
    """
    aval = jax.typeof(array)
    sharded = any(part is not None for part in aval.sharding.spec)
    alone = index if sharded or _hidden_sharding() else None
    return str(aval.dtype), aval.weak_type, _compat.varying_axes(aval), alone


def _hidden_sharding() -> bool:
    """Whether arrays may be sharded over automatic axes, which their types do not tell."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)
