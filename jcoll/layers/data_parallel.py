"""Data parallelism: gradients summed over the ranks of an axis, one collective per bucket.

Each of `n` ranks differentiates the loss of its own part of the batch, which gives `g_0 .. g_(n-1)`
for every parameter. All ranks then apply the same gradient, `mean = (g_0 + .. + g_(n-1)) / n`, the
gradient of the mean of the n losses.

Leaves travel in buckets (buckets.py says which, and why). `sync_gradients` takes the gradients when
they are all there; `sync_in_backward` marks the parameters of a layer, whose gradients then leave
as soon as the backward pass is through with the layer, while it goes on with the layer below (Li et
al. 2020, PyTorch Distributed).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import FlattenedIndexKey, SequenceKey, keystr, tree_flatten_with_path

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, make_call, refuse_traced
from jcoll.layers import buckets
from jcoll.layers.buckets import DEFAULT_BUCKET_BYTES, DEFAULT_JOIN_BYTES
from jcoll.ops import _primitive
from jcoll.ops.all_reduce import all_reduce, group_size

_OPS = ("mean", "sum")
_Number = bool | int | float | complex


def sync_gradients(
    grads: Any,
    axis_name: AxisName,
    *,
    op: str = "mean",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    join_bytes: int = DEFAULT_JOIN_BYTES,
    wire_dtype: Any = None,
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
      wire_dtype: the type in which wider floats travel (jnp.bfloat16); results have the leaf's own
        again. Each rank's part is rounded to it once, for a mean after its division by n, and the
        sum, added up in float32, once more; by an algorithm of several steps, at each.
      axis_index_groups: as for `jax.lax.psum`; the mean is then that of the group.
      algorithm: as for `jcoll.all_reduce`, for every bucket.
      timeout_s: how long a bucket may wait for its last rank, in seconds.

    Returns:
      A pytree like `grads`: the same structure, shapes and dtypes (bools are counted in int32).

    The buckets follow the paths of the leaves in the tree, so that processes that built their
    dictionaries in different orders still agree; from the end, as the backward pass goes through a
    list of layers. Neighbours are ready at about the same time, and a bucket can leave as soon as
    its own leaves are ready.
    Leaves sharded over mesh axes that are not manual travel alone: joining them would gather them.

    Derivative: linear, leaf by leaf that of `jcoll.all_reduce`.
    """
    settings: dict[str, Any] = {"algorithm": algorithm, "timeout_s": timeout_s}
    settings["axis_index_groups"] = axis_index_groups
    call = make_call(
        "sync_gradients", axis_name, **settings, need_uniform=False, plan_op="all_reduce"
    )
    check_arguments(call.where, op, wire_dtype, bucket_bytes, join_bytes)
    entries, treedef = tree_flatten_with_path(grads)
    results = [leaf for _, leaf in entries]
    live = [i for i, leaf in enumerate(results) if not is_float0(leaf)]
    live.sort(key=lambda i: _order_key(entries[i][0]), reverse=True)
    arrays = [_checked_array(*entries[i], op, call) for i in live]
    reduce = _reduction(call, op, wire_dtype, axis_name=axis_name, **settings)
    for bucket in buckets.buckets_of(arrays, bucket_bytes, join_bytes):
        reduced = _reduce_bucket([arrays[i] for i in bucket], reduce)
        for i, leaf in zip(bucket, reduced, strict=True):
            results[live[i]] = leaf
    return jax.tree.unflatten(treedef, results)


def _reduction(call: Call, op: str, wire_dtype: Any, **settings: Any) -> Callable:
    by_op = functools.partial(all_reduce, **settings)
    size = group_size(call)
    return lambda x: buckets.reduce_on_wire(by_op, x, op, size, wire_dtype)


def _reduce_bucket(arrays: list[jax.Array], reduce: Callable) -> list[jax.Array]:
    if len(arrays) == 1:
        return [reduce(arrays[0])]
    return buckets.split(reduce(buckets.join(arrays)), [array.shape for array in arrays])


def sync_in_backward(
    params: Any,
    axis_name: AxisName,
    *,
    op: str = "mean",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    join_bytes: int = DEFAULT_JOIN_BYTES,
    wire_dtype: Any = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """`params` themselves; their gradients come back averaged over the ranks of `axis_name`.

    Put around a layer's parameters where the layer uses them, it sends their gradients in the
    middle of the backward pass, when the layer's are there and those below are still to come:

        def loss(params, batch):
            for layer in params["layers"]:
                batch = apply(jcoll.layers.sync_in_backward(layer, "data"), batch)
            ...
        grads = jax.grad(loss)(params, batch)      # everyone's: nothing is left to sync

    The same in the body of `jax.lax.scan` over stacked layers, and under `jax.checkpoint`. Use it
    once per parameter and step: a parameter that is used twice is marked before both uses, and
    microbatches are accumulated first and synced once (`accumulate_gradients`).

    Args: `params` a pytree of arrays; the others as in `sync_gradients`. With check_vma=True
    parameters that are replicated over the axis are made varying here, so no `pcast` is needed, and
    their gradients are replicated. (In the body of a scan that cast makes it keep a copy of all
    layers' parameters; `jax.checkpoint(layer, policy=zero.keep_arithmetic)` does not.)

    Returns: `params`, varying over the axis.

    Derivative: the gradient is sync_gradients of what comes in, which can be differentiated again;
    forward mode (jax.jvp) is not defined, as for every `jax.custom_vjp`.
    """
    settings: dict[str, Any] = {"algorithm": algorithm, "timeout_s": timeout_s}
    call = make_call("sync_in_backward", axis_name, **settings, plan_op="all_reduce")
    check_arguments(call.where, op, wire_dtype, bucket_bytes, join_bytes)
    sync = functools.partial(
        sync_gradients,
        axis_name=axis_name,
        op=op,
        bucket_bytes=bucket_bytes,
        join_bytes=join_bytes,
        wire_dtype=wire_dtype,
        **settings,
    )
    vary_leaf = functools.partial(_compat.make_varying, axes=call.axes)
    vary = functools.partial(jax.tree.map, vary_leaf)
    varied = jax.tree.map(lambda p: _compat.varying_axes(jax.typeof(p)), params)

    def typed(grad: Any, axes: frozenset) -> Any:
        """As its parameter is: a gradient has the same type."""
        return grad if is_float0(grad) else _compat.make_varying(grad, sorted(axes, key=str))

    def backward(_: None, grads: Any) -> Any:
        live = jax.tree.map(lambda g: g if is_float0(g) else vary_leaf(g), grads)
        return (jax.tree.map(typed, sync(live), varied),)

    mark = jax.custom_vjp(vary)
    mark.defvjp(lambda tree: (vary(tree), None), backward)
    return mark(params)


def _order_key(path: tuple) -> tuple:
    """Sorts by path: places in lists as numbers, names and keys of dicts as text."""

    def part(key):
        if isinstance(key, SequenceKey):
            return 0, key.idx, ""
        if isinstance(key, FlattenedIndexKey):
            return 0, key.key, ""
        return 1, 0, str(key)

    return tuple(map(part, path))


def is_float0(leaf: Any) -> bool:
    """Whether this is the gradient of an integer input: nothing, by its type."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def check_leaf(where: str, name: str, leaf: Any) -> None:
    """TypeError unless it is an array of jax or numpy, or a Python number."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | _Number):
        problem = f"leaf {name} is a {type(leaf).__name__}; arrays and numbers are needed."
        fix = "Put None in its place, or split it off before the call."
        raise TypeError(errors.text(where, problem, fix))


def _checked_array(path: tuple, leaf: Any, op: str, call: Call) -> jax.Array:
    check_leaf(call.where, _name(path), leaf)
    array = _primitive.as_array(call, leaf, f"leaf {_name(path)}")
    _check_dtype(path, array, op, call)
    if isinstance(leaf, _Number):
        return _compat.make_varying(array, call.axes)
    check_varying(_name(path), array, call)
    return array


def _check_dtype(path: tuple, array: jax.Array, op: str, call: Call) -> None:
    if op == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact):
        problem = f"leaf {_name(path)} has dtype {array.dtype}, which does not hold a mean."
        fix = "Pass op='sum', or convert the leaf to a floating-point type first."
        raise TypeError(errors.text(call.where, problem, fix))


def check_varying(name: str, array: jax.Array, call: Call) -> None:
    """Refuses a gradient that JAX has summed over the ranks already."""
    if not _compat.check_vma():
        return
    aval = jax.typeof(array)
    tracked = _compat.varying_axes(jax.typeof(jax.lax.axis_index(call.axes)))
    fixed = tuple(a for a in call.axes if a in tracked - _compat.varying_axes(aval))
    if not fixed:
        return
    axes = repr(fixed[0] if len(fixed) == 1 else fixed)
    problem = (
        f"leaf {name}, {aval.str_short()}, is the same on all ranks of axis {axes}; a "
        "gradient that is still to be summed differs between them. With check_vma=True, jax.grad "
        "with respect to a replicated parameter has summed it (not averaged) already."
    )
    fix = (
        f"Make the parameters varying before jax.grad, params = jax.lax.pcast(params, {axes}, "
        "to='varying'); or pass check_vma=False to jax.shard_map; or drop this call, dividing by "
        "jax.lax.axis_size for a mean."
    )
    raise ValueError(errors.text(call.where, problem, fix))


def check_arguments(
    where: str, op: str, wire_dtype: Any, bucket_bytes: int, join_bytes: int
) -> None:
    """Refuses what is no way to sync gradients."""
    refuse_traced(where, op=op)
    if not isinstance(op, str) or op not in _OPS:
        problem = f"op={op!r} is no way to combine gradients; 'mean' or 'sum' is needed."
        fix = "For other reductions, use jcoll.all_reduce."
        raise ValueError(errors.text(where, problem, fix))
    buckets.check_wire(where, wire_dtype, bucket_bytes, join_bytes)


def _name(path: tuple) -> str:
    return f"grads{keystr(path)}"
