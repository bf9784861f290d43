"""Moving the leaves of sharded state: all_gather and reduce_scatter by Layout, in buckets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, make_call
from jcoll.layers import buckets, data_parallel
from jcoll.layers.layout import Layout, flat_plan, pad_leaf, trim_leaf
from jcoll.ops import _primitive
from jcoll.ops._primitive import CollectiveSpec
from jcoll.ops.all_gather import SPEC as ALL_GATHER
from jcoll.ops.all_gather import all_gather
from jcoll.ops.all_reduce import SPEC as ALL_REDUCE
from jcoll.ops.all_reduce import all_reduce
from jcoll.ops.reduce_scatter import SPEC as REDUCE_SCATTER
from jcoll.ops.reduce_scatter import reduce_scatter


class Options(TypedDict, total=False):
    """How leaves travel; the meaning and default of each as in `jcoll.sync_gradients`."""

    op: str
    """Of the gradients: "mean" or "sum"."""

    wire_dtype: Any
    """Of the gradients; parameters travel in their own type, or gather's dtype."""

    bucket_bytes: int
    join_bytes: int
    """Of whole leaves, not of shards."""

    algorithm: str
    """One of reduce_scatter's (of all_gather's, where parameters are gathered). A collective that
    goes with it and has no such algorithm, as the one of the backward pass, is "auto"."""

    timeout_s: float | None


@dataclass(frozen=True)
class Transfer:
    """Checked Options, and the call that errors name."""

    call: Call
    op: str
    wire_dtype: Any
    bucket_bytes: int
    join_bytes: int

    def settings(self, spec: CollectiveSpec) -> dict[str, Any]:
        """What an op takes, the algorithm if it has it."""
        return {
            "algorithm": _primitive.call_of(spec, self.call).algorithm,
            "timeout_s": self.call.timeout_s or None,
        }

    def op_of(self, op: Callable, spec: CollectiveSpec) -> Callable:
        """The op with this transfer's axes and settings."""
        return functools.partial(op, axis_name=self.call.axes, **self.settings(spec))

    def reduced(self, reduce: Callable, x: jax.Array) -> jax.Array:
        n = self.call.num_ranks
        return buckets.reduce_on_wire(reduce, x, self.op, n, self.wire_dtype)


def make_transfer(
    where: str,
    axis_name: AxisName,
    *,
    op: str = "mean",
    wire_dtype: Any = None,
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
    join_bytes: int = buckets.DEFAULT_JOIN_BYTES,
    algorithm: str = "auto",
    timeout_s: float | None = None,
    plan_op: str = "reduce_scatter",
) -> Transfer:
    call = make_call(where, axis_name, algorithm=algorithm, timeout_s=timeout_s, plan_op=plan_op)
    data_parallel.check_arguments(call.where, op, wire_dtype, bucket_bytes, join_bytes)
    return Transfer(call, op, wire_dtype, bucket_bytes, join_bytes)


def checked_leaves(
    tree: Any, layout: Any, call: Call, name: str, *, are_shards: bool
) -> tuple[list[Any], list[Layout]]:
    """(leaves, their Layouts); an error if the tree is not what the layout describes."""
    plan = flat_plan(call.where, tree, layout, name)
    entries = tree_leaves_with_path(tree)
    for (path, leaf), leaf_layout in zip(entries, plan, strict=True):
        _check_leaf(f"{name}{keystr(path)}", leaf, leaf_layout, call, are_shards)
    return [leaf for _, leaf in entries], plan


def _check_leaf(name: str, leaf: Any, layout: Layout, call: Call, is_shard: bool) -> None:
    if layout.num_ranks != call.num_ranks:
        problem = f"{name} has a layout for {layout.num_ranks} ranks; there are {call.num_ranks}."
        fix = f"Make it by zero.layouts(params, {call.num_ranks}), or name all axes it is for."
        raise ValueError(errors.text(call.where, problem, fix))
    if data_parallel.is_float0(leaf):
        return
    data_parallel.check_leaf(call.where, name, leaf)
    needed = layout.local_shape(jnp.ndim(leaf), is_shard=is_shard)
    given = jnp.shape(leaf)
    if len(given) == len(needed) and all(
        want in (None, size) for size, want in zip(given, needed, strict=True)
    ):
        return
    kind = "shard" if is_shard else "whole leaf"
    sizes = ", ".join("any" if want is None else str(want) for want in needed)
    problem = (
        f"{name} has shape {given}; a {kind} of shape [{sizes}] is needed (whole: {layout.shape}, "
        f"dimension {layout.dim} split over {layout.num_ranks} ranks)."
    )
    fix = "Make shards by zero.place or zero.shard, whole leaves by zero.gather."
    raise ValueError(errors.text(call.where, problem, fix))


def own_block(x: jax.Array, layout: Layout, call: Call) -> jax.Array:
    """This rank's shard of a whole leaf. No communication."""
    if layout.dim is None:
        return x
    x = _compat.make_varying(pad_leaf(x, layout), call.axes)
    start = jax.lax.axis_index(call.axes) * layout.block_size
    return jax.lax.dynamic_slice_in_dim(x, start, layout.block_size, x.ndim + layout.dim)


def gather_leaves(
    shards: Sequence[jax.Array], plan: Sequence[Layout], transfer: Transfer
) -> list[jax.Array]:
    """Whole leaves, on every rank."""
    results = list(shards)
    split = [i for i, layout in enumerate(plan) if layout.dim is not None]
    n = transfer.call.num_ranks
    gather = transfer.op_of(all_gather, ALL_GATHER)
    sizes = max(1, transfer.bucket_bytes // n), transfer.join_bytes // n
    for bucket in buckets.buckets_of([shards[i] for i in split], *sizes):
        indices = [split[i] for i in bucket]
        whole = _gather_bucket([shards[i] for i in indices], [plan[i] for i in indices], gather)
        for i, leaf in zip(indices, whole, strict=True):
            results[i] = trim_leaf(leaf, plan[i])
    return results


def _gather_bucket(
    shards: list[jax.Array], plan: list[Layout], gather: Callable
) -> list[jax.Array]:
    dims = [_dim(x, layout) for x, layout in zip(shards, plan, strict=True)]
    if len(shards) == 1:
        return [gather(shards[0], axis=dims[0], tiled=True)]
    blocks = buckets.split(gather(buckets.join(shards)), [x.shape for x in shards])
    return [_primitive.place_blocks(b, dim, True) for b, dim in zip(blocks, dims, strict=True)]


def reduce_scatter_leaves(
    grads: Sequence[Any], plan: Sequence[Layout], transfer: Transfer
) -> list[Any]:
    """This rank's shards of the reduced gradients; what no rank splits is reduced whole."""
    results = list(grads)
    live = [i for i, grad in enumerate(grads) if not data_parallel.is_float0(grad)]
    for scattered in (False, True):
        indices = [i for i in live if (plan[i].dim is not None) == scattered]
        arrays = [_compat.make_varying(grads[i], transfer.call.axes) for i in indices]
        arrays = [pad_leaf(a, plan[i]) for a, i in zip(arrays, indices, strict=True)]
        reduce = _scatter_bucket if scattered else _reduce_bucket
        for bucket in buckets.buckets_of(arrays, transfer.bucket_bytes, transfer.join_bytes):
            parts = [(arrays[i], plan[indices[i]]) for i in bucket]
            for i, leaf in zip(bucket, reduce(parts, transfer), strict=True):
                results[indices[i]] = leaf
    return results


def _reduce_bucket(parts: list[tuple[jax.Array, Layout]], transfer: Transfer) -> list[jax.Array]:
    reduce = transfer.op_of(all_reduce, ALL_REDUCE)
    arrays = [array for array, _ in parts]
    if len(arrays) == 1:
        return [transfer.reduced(reduce, arrays[0])]
    joined = transfer.reduced(reduce, buckets.join(arrays))
    return buckets.split(joined, [array.shape for array in arrays])


def _scatter_bucket(parts: list[tuple[jax.Array, Layout]], transfer: Transfer) -> list[jax.Array]:
    scatter = transfer.op_of(reduce_scatter, REDUCE_SCATTER)
    if len(parts) == 1:
        ((array, layout),) = parts
        tiled = functools.partial(scatter, scatter_dimension=_dim(array, layout), tiled=True)
        return [transfer.reduced(tiled, array)]
    blocks = [
        _primitive.take_blocks(array, _dim(array, layout), True, transfer.call, "dimension")
        for array, layout in parts
    ]
    joined = transfer.reduced(scatter, buckets.join(blocks, lead=1))
    return buckets.split(joined, [block.shape[1:] for block in blocks])


def _dim(array: jax.Array, layout: Layout) -> int:
    assert layout.dim is not None
    return array.ndim + layout.dim
