"""Data parallelism: gradients summed over the ranks of an axis, one collective per bucket.

Each of `n` ranks differentiates the loss of its own part of the batch, which gives `g_0 .. g_(n-1)`
for every parameter. All ranks then apply the same gradient, `mean = (g_0 + .. + g_(n-1)) / n`, the
gradient of the mean of the n losses.

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

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import FlattenedIndexKey, SequenceKey, keystr, tree_flatten_with_path

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, make_call, refuse_traced, static_int
from jcoll.ops import _primitive
from jcoll.ops.all_reduce import all_reduce

DEFAULT_BUCKET_BYTES = 25 * 2**20
DEFAULT_JOIN_BYTES = 16 * 2**10
_OPS = ("mean", "sum")


def sync_gradients(
    grads: Any,
    axis_name: AxisName,
    *,
    op: str = "mean",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    join_bytes: int = DEFAULT_JOIN_BYTES,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """The gradients of all ranks along `axis_name`, averaged (or summed), on every rank.

    Equal, leaf by leaf, to `jax.lax.pmean(grads, axis_name)` up to the order of the sum, with fewer
    collectives: small leaves of one dtype share a bucket, and a bucket is one `all_reduce`. Leaves
    over `join_bytes` have one each.

        def step(params, batch):                       # inside jax.shard_map, under jax.jit
            local = jax.lax.pcast(params, "data", to="varying")
            grads = jax.grad(loss)(local, batch)       # this rank's gradient
            return jcoll.sync_gradients(grads, "data") # everyone's

    **Why the `pcast`.** Under `jax.shard_map(..., check_vma=True)` (the default) JAX knows that a
    replicated parameter is one value used by all ranks, and `jax.grad` with respect to it returns
    the *sum over the ranks*: a collective of JAX's own, already done. `pcast` makes the parameter
    "varying", one value per rank, so that the gradient stays local and this function sums it. A
    leaf that is not varying is therefore refused. With `check_vma=False` no `pcast` is needed.

    Args:
      grads: a pytree of arrays, shaped like the parameters. `None` subtrees, scalars, empty arrays
        and the `float0` gradients of integer inputs are fine; a Python number counts as a value
        that each rank holds.
      axis_name: the mesh axis, or a tuple of them, that the batch is split over.
      op: "mean" or "sum". Integer leaves, Python's too, can only be summed.
      bucket_bytes: the size of a full bucket, in bytes; 25 MiB, as `bucket_cap_mb` of PyTorch's
        DistributedDataParallel, if not given.
      join_bytes: leaves up to this size are joined; a larger one travels alone and uncopied, as a
        bucket of its own. 0: all travel alone; `bucket_bytes`: whatever fits is joined.
      axis_index_groups: as for `jax.lax.psum`; the mean is then that of the group.
      algorithm: as for `jcoll.all_reduce`, for every bucket.
      timeout_s: how long a bucket may wait for its last rank, in seconds.

    Returns:
      A pytree like `grads`: the same structure, shapes and dtypes (bools are counted in int32).

    The buckets follow the paths of the leaves in the tree, so that processes that built their
    dictionaries in different orders still agree. Neighbours in the tree are ready at about the
    same time in the backward pass, and a bucket can leave as soon as its own leaves are ready.
    Leaves sharded over mesh axes that are not manual travel alone: joining them would gather them.

    Derivative: linear, leaf by leaf that of `jcoll.all_reduce`.
    """
    settings: dict[str, Any] = {
        "axis_index_groups": axis_index_groups,
        "algorithm": algorithm,
        "timeout_s": timeout_s,
    }
    call = make_call(
        "sync_gradients", axis_name, **settings, need_uniform=False, plan_op="all_reduce"
    )
    _check_arguments(call.where, op, bucket_bytes, join_bytes)
    entries, treedef = tree_flatten_with_path(grads)
    reduce = functools.partial(all_reduce, axis_name=axis_name, op=op, **settings)
    results = [leaf for _, leaf in entries]
    live = [i for i, leaf in enumerate(results) if not _is_float0(leaf)]
    live.sort(key=lambda i: _order_key(entries[i][0]))
    arrays = [_checked_array(*entries[i], op, call) for i in live]
    leaves = [(_kind(a, i), a.size * a.dtype.itemsize) for i, a in enumerate(arrays)]
    for bucket in plan_buckets(leaves, bucket_bytes, join_bytes):
        reduced = _reduce_bucket([arrays[i] for i in bucket], reduce)
        for i, leaf in zip(bucket, reduced, strict=True):
            results[live[i]] = leaf
    return jax.tree.unflatten(treedef, results)


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


def _reduce_bucket(arrays: list[jax.Array], reduce: Callable) -> list[jax.Array]:
    if len(arrays) == 1:
        return [reduce(arrays[0])]
    flat = reduce(jax.lax.concatenate([array.reshape(-1) for array in arrays], 0))
    parts = jax.lax.split(flat, [array.size for array in arrays])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


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


def _order_key(path: tuple) -> tuple:
    """Sorts like the tree: numbers as numbers, names as text. Never compares the two."""

    def part(key):
        if isinstance(key, SequenceKey):
            return 0, key.idx, ""
        if isinstance(key, FlattenedIndexKey):
            return 0, key.key, ""
        return 1, 0, str(key)

    return tuple(map(part, path))


def _is_float0(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _checked_array(path: tuple, leaf: Any, op: str, call: Call) -> jax.Array:
    if isinstance(leaf, bool | int | float | complex):
        array = _primitive.as_array(call, leaf, f"leaf {_name(path)}")
        _check_dtype(path, array, op, call)
        return _compat.make_varying(array, call.axes)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        problem = f"leaf {_name(path)} is a {type(leaf).__name__}; arrays and numbers are needed."
        fix = "Put None in its place, or split it off before the call."
        raise TypeError(errors.text(call.where, problem, fix))
    array = _primitive.as_array(call, leaf, f"leaf {_name(path)}")
    _check_dtype(path, array, op, call)
    _check_varying(path, array, call)
    return array


def _check_dtype(path: tuple, array: jax.Array, op: str, call: Call) -> None:
    if op == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact):
        problem = f"leaf {_name(path)} has dtype {array.dtype}, which does not hold a mean."
        fix = "Pass op='sum', or convert the leaf to a floating-point type first."
        raise TypeError(errors.text(call.where, problem, fix))


def _check_varying(path: tuple, array: jax.Array, call: Call) -> None:
    if not _compat.check_vma():
        return
    aval = jax.typeof(array)
    tracked = _compat.varying_axes(jax.typeof(jax.lax.axis_index(call.axes)))
    fixed = tuple(a for a in call.axes if a in tracked - _compat.varying_axes(aval))
    if not fixed:
        return
    axes = repr(fixed[0] if len(fixed) == 1 else fixed)
    problem = (
        f"leaf {_name(path)}, {aval.str_short()}, is the same on all ranks of axis {axes}; a "
        "gradient that is still to be summed differs between them. With check_vma=True, jax.grad "
        "with respect to a replicated parameter has summed it (not averaged) already."
    )
    fix = (
        f"Make the parameters varying before jax.grad, params = jax.lax.pcast(params, {axes}, "
        "to='varying'); or pass check_vma=False to jax.shard_map; or drop this call, dividing by "
        "jax.lax.axis_size for a mean."
    )
    raise ValueError(errors.text(call.where, problem, fix))


def _check_arguments(where: str, op: str, bucket_bytes: int, join_bytes: int) -> None:
    refuse_traced(where, op=op)
    if not isinstance(op, str) or op not in _OPS:
        problem = f"op={op!r} is no way to combine gradients; 'mean' or 'sum' is needed."
        fix = "For other reductions, use jcoll.all_reduce."
        raise ValueError(errors.text(where, problem, fix))
    _check_bytes(where, "bucket_bytes", bucket_bytes, 1, DEFAULT_BUCKET_BYTES)
    _check_bytes(where, "join_bytes", join_bytes, 0, DEFAULT_JOIN_BYTES)


def _check_bytes(where: str, name: str, value: int, least: int, default: int) -> None:
    if static_int(where, name, value) < least:
        problem = f"{name}={value} is too small; at least {least} is needed."
        raise ValueError(errors.text(where, problem, f"The default is {default}."))


def _name(path: tuple) -> str:
    return f"grads{keystr(path)}"
