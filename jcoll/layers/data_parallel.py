"""Data parallelism: gradients summed over the ranks of an axis, one collective per bucket.

Each of `n` ranks differentiates the loss of its own part of the batch, which gives `g_0 .. g_(n-1)`
for every parameter. All ranks then apply the same gradient, `mean = (g_0 + .. + g_(n-1)) / n`, the
gradient of the mean of the n losses.

A model has many small parameters, and a collective costs a fixed time (alpha) whatever its size.
So leaves are laid end to end in buckets, and a bucket of k leaves costs one alpha instead of k, for
the price of one copy in and one copy out.
"""

import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import FlattenedIndexKey, SequenceKey, keystr, tree_flatten_with_path

from jcoll.ops.all_reduce import all_reduce

DEFAULT_BUCKET_BYTES = 25 * 2**20
_OPS = ("mean", "sum")
_WHERE = "jcoll.sync_gradients"


def sync_gradients(
    grads,
    axis_name,
    *,
    op="mean",
    bucket_bytes=DEFAULT_BUCKET_BYTES,
    axis_index_groups=None,
    algorithm="auto",
    timeout_s=None,
):
    """The gradients of all ranks along `axis_name`, averaged (or summed), on every rank.

    Equal, leaf by leaf, to `jax.lax.pmean(grads, axis_name)` up to the order of the sum, with far
    fewer collectives: leaves of one dtype share a bucket, and each bucket is one `all_reduce`.

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
      op: "mean" or "sum". Integer leaves can only be summed.
      bucket_bytes: the size of a full bucket, in bytes; 25 MiB, as `bucket_cap_mb` of PyTorch's
        DistributedDataParallel, if not given. A leaf larger than that travels alone and uncopied.
      axis_index_groups: as for `jax.lax.psum`; the mean is then that of the group.
      algorithm: as for `jcoll.all_reduce`, for every bucket.
      timeout_s: how long a bucket may wait for its last rank, in seconds.

    Returns:
      A pytree like `grads`: the same structure, shapes and dtypes.

    The buckets follow the paths of the leaves in the tree, so that processes that built their
    dictionaries in different orders still agree. Neighbours in the tree are ready at about the
    same time in the backward pass, and a bucket can leave as soon as its own leaves are ready.
    Leaves sharded over mesh axes that are not manual travel alone: joining them would gather them.
    """
    _check_arguments(op, bucket_bytes)
    entries, treedef = tree_flatten_with_path(grads)
    tracked = _tracked_axes(axis_name)
    reduce = functools.partial(
        all_reduce,
        axis_name=axis_name,
        op=op,
        axis_index_groups=axis_index_groups,
        algorithm=algorithm,
        timeout_s=timeout_s,
    )
    results = [leaf for _, leaf in entries]
    live = [i for i, leaf in enumerate(results) if not _is_float0(leaf)]
    live.sort(key=lambda i: _order_key(entries[i][0]))
    arrays = [_checked_array(*entries[i], op, tracked) for i in live]
    mixed_mesh = _has_auto_axes()
    kinds = [_kind(array, i, mixed_mesh) for i, array in enumerate(arrays)]
    sizes = [array.size * array.dtype.itemsize for array in arrays]
    for bucket in plan_buckets(list(zip(kinds, sizes, strict=True)), bucket_bytes):
        reduced = _reduce_bucket([arrays[i] for i in bucket], reduce)
        for i, leaf in zip(bucket, reduced, strict=True):
            results[live[i]] = leaf
    return jax.tree.unflatten(treedef, results)


def plan_buckets(leaves: Sequence[tuple[Hashable, int]], bucket_bytes: int) -> list[list[int]]:
    """Splits leaves, given as (kind, nbytes), into buckets: lists of indices into `leaves`.

    Leaves of one kind can be joined. They are taken in order, next fit: a leaf that does not fit
    into the open bucket of its kind starts a new one, which is at most twice the fewest possible.
    A leaf larger than a bucket is a bucket of its own and leaves the open one open. Buckets come in
    the order of their first leaf.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, nbytes) in enumerate(leaves):
        bucket, used = open_buckets.get(kind, (None, 0))
        if nbytes > bucket_bytes:
            buckets.append([index])
            continue
        if bucket is None or used + nbytes > bucket_bytes:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[kind] = bucket, used + nbytes
    return buckets


def _reduce_bucket(arrays, reduce):
    if len(arrays) == 1:
        return [reduce(arrays[0])]
    flat = reduce(jax.lax.concatenate([array.reshape(-1) for array in arrays], 0))
    parts = jax.lax.split(flat, [array.size for array in arrays])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _kind(array, index, mixed_mesh) -> Hashable:
    """What leaves must have in common to share a bucket and still get the types `pmean` gives.

    Joining arrays that vary over different mesh axes would make the result vary over all of these;
    joining arrays that are sharded over an axis outside the manual ones would gather them.
    """
    aval = jax.typeof(array)
    sharded = any(part is not None for part in aval.sharding.spec)
    alone = index if mixed_mesh or sharded else None
    return str(aval.dtype), aval.weak_type, aval.manual_axis_type.varying, alone


def _order_key(path):
    """Sorts like the tree: numbers as numbers, names as text. Never compares the two."""
    return tuple(
        (0, key.idx, "")
        if isinstance(key, SequenceKey)
        else (0, key.key, "")
        if isinstance(key, FlattenedIndexKey)
        else (1, 0, str(key))
        for key in path
    )


def _tracked_axes(axis_name) -> frozenset[str]:
    """The axes among `axis_name` whose variation JAX tracks: all, or none with check_vma=False.

    An axis index is different on each rank by nature, so its type tells, without asking JAX's
    internals, whether such types are on. An axis that belongs to `vmap` is never tracked.
    """
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    indices = [jax.lax.axis_index(name) for name in names]
    return frozenset().union(*(jax.typeof(i).manual_axis_type.varying for i in indices))


def _has_auto_axes() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def _is_float0(leaf) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _checked_array(path, leaf, op, tracked):
    if isinstance(leaf, (bool, int, float, complex)):
        return jax.lax.pcast(jnp.asarray(leaf), tuple(tracked), to="varying")
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(
            f"{_WHERE}: leaf {_name(path)} is a {type(leaf).__name__}, which cannot be summed over "
            "ranks. Every leaf must be an array or a number; split the others off before the call, "
            "for example with jax.tree.map, or put None in their place."
        )
    array = jnp.asarray(leaf)
    _check_dtype(path, array, op)
    _check_varying(path, array, tracked)
    return array


def _check_dtype(path, array, op):
    if op == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"{_WHERE}: leaf {_name(path)} has dtype {array.dtype}, and the mean of such values "
            "does not fit that dtype. op='mean' needs floating-point or complex leaves; pass "
            "op='sum', or convert the leaf to a float first."
        )


def _check_varying(path, array, tracked):
    aval = jax.typeof(array)
    fixed = sorted(tracked - aval.manual_axis_type.varying)
    if fixed:
        axes = fixed[0] if len(fixed) == 1 else tuple(fixed)
        raise ValueError(
            f"{_WHERE}: leaf {_name(path)}, {aval.str_short()}, is the same on all "
            f"ranks of axis {axes!r}, but only a gradient that differs between ranks is still to be "
            "summed. With check_vma=True, jax.grad has already summed the gradient of a "
            "replicated parameter over that axis (summed, not averaged). Either make the "
            f"parameters varying before jax.grad: params = jax.lax.pcast(params, {axes!r}, "
            "to='varying'); or pass check_vma=False to jax.shard_map; or drop this call, and "
            "divide by jax.lax.axis_size for the mean."
        )


def _check_arguments(op, bucket_bytes):
    if op not in _OPS:
        raise ValueError(
            f"{_WHERE}: op={op!r} is not a way to combine gradients; op must be one of "
            f"{', '.join(map(repr, _OPS))}. For other reductions, call jcoll.all_reduce on each leaf."
        )
    whole = isinstance(bucket_bytes, (int, np.integer)) and not isinstance(bucket_bytes, bool)
    if not whole:
        raise TypeError(
            f"{_WHERE}: bucket_bytes={bucket_bytes!r} is a {type(bucket_bytes).__name__}; it must "
            f"be a Python int, a number of bytes. The usual value is {DEFAULT_BUCKET_BYTES} (25 MiB)."
        )
    if bucket_bytes < 1:
        raise ValueError(
            f"{_WHERE}: bucket_bytes={bucket_bytes} is not positive; it must be at least 1 byte. "
            "Pass bucket_bytes=1 for one collective per leaf."
        )


def _name(path) -> str:
    return f"grads{keystr(path)}"
