"""ZeRO: optimizer state, gradients and parameters split over the data ranks, not repeated.

Data parallelism keeps 16 bytes per parameter on every rank (float32 parameter, gradient, Adam's two
moments). ZeRO (Rajbhandari et al. 2020) has each of n ranks own a 1/n part, a *shard*, of

    stage 1   the optimizer state        4 + 4 + 8 / n     bytes per parameter and rank
    stage 2   the gradients as well      4 + (4 + 8) / n
    stage 3   the parameters as well     16 / n

for the same bytes on the wire in stages 1 and 2 as an all_reduce (it is a reduce_scatter of the
gradients and an all_gather of the parameters), and half as many again in stage 3, which gathers
parameters twice. How a leaf is split is its Layout (layout.py). Below, a whole leaf is [.., S, ..],
its Layout's `shape`, S being the size of the dimension that is split, and a shard [.., ceil(S / n),
..]; both without what other mesh axes split, and, of one layer of a stack, the stack's dimension.

    layout = zero.layouts(params, n)
    shards = zero.place(params, layout, "data", mesh)        # outside jax.shard_map
    opt_state = jax.jit(tx.init)(shards)

    def step(shards, opt_state, batch):                      # inside; stage 3
        grads = jax.grad(lambda s: loss(zero.gather(s, layout, "data"), batch))(shards)
        return zero.update(tx, grads, opt_state, shards, layout, "data", stage=3)

    stage   parameters     loss of                                 update(grads)
    1       whole          params                                  whole, each rank's own
    2       whole          redirect_gradients(params, shards)      shards
    3       shards         gather(shards), or regathered(layer)    shards

All are called inside jax.shard_map, on whole models or layer by layer. A gradient is the *mean*
over the ranks (op="sum" for their sum) and comes out reduce-scattered, in the middle of the
backward pass. With gather(dtype=jnp.bfloat16) the shards are a float32 master copy.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (the stages); Zhao et al. 2023, "PyTorch FSDP" (one layer's parameters at a time);
Micikevicius et al. 2018, "Mixed Precision Training" (the master copy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, make_call, static_int
from jcoll.layers import _shards, buckets, clip, data_parallel
from jcoll.layers._shards import Options, Transfer, make_transfer
from jcoll.layers.layout import layouts as layouts
from jcoll.layers.layout import layouts_of_state as layouts_of_state
from jcoll.layers.layout import pad as pad
from jcoll.layers.layout import place as place
from jcoll.layers.layout import shapes as shapes
from jcoll.layers.layout import shardings as shardings
from jcoll.layers.layout import specs as specs
from jcoll.layers.layout import trim as trim
from jcoll.ops._invariant import as_invariant
from jcoll.ops.all_reduce import SPEC as ALL_REDUCE

STAGES = (1, 2, 3)


def shard(params: Any, layout: Any, axis_name: AxisName) -> Any:
    """This rank's shards of whole parameters: rank r's blocks. No communication.

    Args:
      params: a pytree of whole leaves [.., S, ..] of any dtype.
      layout: the pytree of their Layouts.
      axis_name: the axis, or the tuple of axes, that they are split over.

    Returns: a pytree like `params` of shards [.., ceil(S / n), ..] in the same dtypes; the padding
      is zeros. Leaves that are not split (dim=None) come back whole.

    Derivative: linear; the cotangent goes to this rank's block.

    Source: ZeRO's partitions (Rajbhandari et al. 2020).
    """
    call = make_call("zero.shard", axis_name, plan_op="all_gather")
    leaves, plan = _shards.checked_leaves(params, layout, call, "params", are_shards=False)
    own = [_shards.own_block(x, part, call) for x, part in zip(leaves, plan, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(layout), own)


def gather(
    shards: Any,
    layout: Any,
    axis_name: AxisName,
    *,
    dtype: Any = None,
    **options: Unpack[Options],
) -> Any:
    """Whole parameters from all ranks' shards; their gradients come back as shards.

    Args:
      shards: a pytree of this rank's shards [.., ceil(S / n), ..] of any dtype.
      layout: the pytree of their Layouts.
      axis_name: the axis, or the tuple of axes, that they are split over.
      dtype: a floating-point type, to which floating-point shards are rounded before they travel:
        jnp.bfloat16 for half the bytes of float32, and for a model that computes in it.
      options: see `Options`.

    Returns:
      A pytree like `shards` of whole leaves [.., S, ..] without padding: floating-point ones in
      `dtype`, if given, others in the shard's. Their type varies over the axis.

    Derivative: reduce_scatter of the cotangents, their mean (op="sum": sum), in the shards' dtypes.
    Reverse mode only. What uses the leaves holds them until its backward pass; `regathered` lets go
    of them.

    Source: stage 3 of ZeRO (Rajbhandari et al. 2020).
    """
    transfer = make_transfer("zero.gather", axis_name, plan_op="all_gather", **options)
    buckets.check_float(transfer.call.where, "dtype", dtype)
    leaves, plan = _shards.checked_leaves(shards, layout, transfer.call, "shards", are_shards=True)

    types = [jax.typeof(x) for x in leaves]

    @jax.custom_vjp
    def gathered(xs: list[Any]) -> list[Any]:
        xs = [_cast(x, dtype) for x in xs]
        whole = _shards.gather_leaves(xs, plan, transfer)
        return [checkpoint_name(_vary(x, transfer), _GATHERED) for x in whole]

    def backward(_: None, cts: list[Any]) -> tuple[list[Any]]:
        return (_reduced_like(types, cts, plan, transfer),)

    # `gathered` again, which stays one operation in sight of jax.checkpoint's policies.
    gathered.defvjp(lambda xs: (gathered(xs), None), backward)
    return jax.tree.unflatten(jax.tree.structure(layout), gathered(leaves))


def regathered(
    layer: Callable[..., Any],
    layout: Any,
    axis_name: AxisName,
    *,
    dtype: Any = None,
    policy: Callable[..., bool] | None = None,
    prevent_cse: bool = True,
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """layer(params, *args) as a function of (shards, *args), which never keeps whole parameters.

    They are gathered for the forward pass, dropped, and gathered again for the backward pass:
    stage 3 layer by layer, and one layer's whole parameters at a time.

        block = zero.regathered(apply_block, block_layout, "data", prevent_cse=False)
        x, _ = jax.lax.scan(lambda x, shards: (block(shards, x), None), x, stacked_shards)

    Args:
      layer: the function, of whole parameters first: leaves as `gather` returns them.
      layout, axis_name, dtype, options: as in `gather`; of one layer or of the stack.
      policy: of jax.checkpoint: what is kept for the backward pass. None: all results of
        arithmetic, but not the gathered parameters and what was made of them by casts, slices and
        transposes. `jax.checkpoint_policies.nothing_saveable`: nothing but the layer's arguments,
        for a peak that activations do not set: the layer is computed twice.
      prevent_cse: as in jax.checkpoint; False in the body of a scan, where it saves barriers.

    Returns: a function of (shards, *args): shards [.., ceil(S / n), ..] as for `gather`, args and
      result those of `layer`.

    Derivative: to shards that of `gather`, of their shapes and dtypes; to args that of `layer`.
    Reverse mode only.

    Source: FSDP (Zhao et al. 2023), which frees a layer's parameters after its forward pass;
    rematerialization by Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    def run(shards: Any, *args: Any) -> Any:
        return layer(gather(shards, layout, axis_name, dtype=dtype, **options), *args)

    return jax.checkpoint(run, policy=policy or keep_arithmetic, prevent_cse=prevent_cse)


def redirect_gradients(
    params: Any, shards: Any, layout: Any, axis_name: AxisName, **options: Unpack[Options]
) -> Any:
    """`params`, whole; their gradients become those of `shards`, reduce-scattered: stage 2.

        def loss_of(shards):
            return loss(zero.redirect_gradients(params, shards, layout, "data"), batch)
        grads = jax.grad(loss_of)(zero.shard(params, layout, "data"))

    Layer by layer, no rank ever has the gradients of more than one layer whole.

    Args:
      params: a pytree of whole parameters [.., S, ..] of the dtype to compute in, the same on all
        ranks. In a scan over layers, with check_vma=True, make them varying before it
        (jax.lax.pcast): a cast in its body would make it keep a copy of all layers' for the
        backward pass.
      shards: this rank's shards of them (`shard`), [.., ceil(S / n), ..]. Only their types matter:
        a float32 shard gets a float32 gradient, whatever `params` are.
      layout, axis_name, options: as in `gather`.

    Returns: `params`, of the same shapes and dtypes, varying over the axis.

    Derivative: to `shards` reduce_scatter of the cotangents as in `gather`; to `params` none.
    Reverse mode only.

    Source: stage 2 of ZeRO (Rajbhandari et al. 2020).
    """
    transfer = make_transfer("zero.redirect_gradients", axis_name, **options)
    check = _shards.checked_leaves
    wholes, plan = check(params, layout, transfer.call, "params", are_shards=False)
    leaves, _ = check(shards, layout, transfer.call, "shards", are_shards=True)

    types = [jax.typeof(x) for x in leaves]

    def vary(wholes: list[Any], leaves: list[Any]) -> list[Any]:
        del leaves
        return [_vary(x, transfer) for x in wholes]

    redirected = jax.custom_vjp(vary)

    def backward(_: None, cts: list[Any]) -> tuple[None, list[Any]]:
        return None, _reduced_like(types, cts, plan, transfer)

    redirected.defvjp(lambda wholes, leaves: (vary(wholes, leaves), None), backward)
    return jax.tree.unflatten(jax.tree.structure(layout), redirected(wholes, leaves))


def reduce_scatter_gradients(
    grads: Any, layout: Any, axis_name: AxisName, **options: Unpack[Options]
) -> Any:
    """This rank's shards of the mean (op="sum": sum) of all ranks' whole gradients.

    Args:
      grads: a pytree of floating-point whole leaves [.., S, ..], each rank's own, as for
        `jcoll.sync_gradients`, which says when `jcoll` refuses one that JAX has summed already.
      layout: the pytree of their Layouts.
      axis_name: the axis, or the tuple of axes, whose ranks' gradients are reduced.
      options: see `Options`.

    Returns: a pytree like `grads` of shards [.., ceil(S / n), ..] in the same dtypes, padding being
      zeros. Leaves that are not split (dim=None) are reduced whole.

    Derivative: linear; that of `jcoll.reduce_scatter`.

    Source: stages 1 and 2 of ZeRO (Rajbhandari et al. 2020).
    """
    transfer = make_transfer("zero.reduce_scatter_gradients", axis_name, **options)
    leaves, plan = _shards.checked_leaves(grads, layout, transfer.call, "grads", are_shards=False)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if not data_parallel.is_float0(leaf):
            name = f"grads{jax.tree_util.keystr(path)}"
            data_parallel.check_varying(name, leaf, transfer.call)
    reduced = _shards.reduce_scatter_leaves(leaves, plan, transfer)
    return jax.tree.unflatten(jax.tree.structure(layout), reduced)


def update(
    tx: Any,
    grads: Any,
    opt_state: Any,
    params: Any,
    layout: Any,
    axis_name: AxisName,
    *,
    stage: int,
    max_norm: Any = None,
    **options: Unpack[Options],
) -> tuple[Any, Any]:
    """One step of an optimizer whose state is sharded: (new params, new opt_state).

    Args:
      tx: an optimizer with optax's `update(grads, state, params) -> (updates, state)`, one that
        works element by element (SGD, Adam, ...). It sees shards: clip by `max_norm`, and not by
        optax.clip_by_global_norm, which would take each rank's norm for that of all.
      grads: floating-point; stage 1: whole [.., S, ..], this rank's own, still to be reduced; 2 and
        3: reduced shards [.., ceil(S / n), ..].
      opt_state: this rank's part of tx.init of the sharded parameters (`layouts_of_state`).
      params: stage 1 and 2: whole, the same on all ranks; 3: shards.
      layout: the Layouts of the split, in all stages.
      stage: 1, 2 or 3.
      max_norm: the global norm, a positive scalar, to which the reduced gradients are clipped;
        None: they are not.
      options: as in `gather`. Parameters travel in their own type.

    Returns:
      (params, opt_state): params like those given, in shapes and dtypes, after the update; whole
      ones gathered from their owners, the same bits and the same type on all ranks. opt_state as
      tx.update returns it.

    Derivative: none is meant to be taken.

    Source: ZeRO (Rajbhandari et al. 2020); in stage 1 also Xu et al. 2020, "Automatic Cross-Replica
    Sharding of Weight Update in Data-Parallel Training".
    """
    transfer = make_transfer("zero.update", axis_name, **options)
    where = transfer.call.where
    if static_int(where, "stage", stage) not in STAGES:
        problem = f"stage={stage} is none of ZeRO's; 1, 2 or 3 is needed."
        fix = "Without sharded state: jcoll.sync_gradients, then tx.update."
        raise ValueError(errors.text(where, problem, fix))
    if stage == 1:
        grads = reduce_scatter_gradients(grads, layout, axis_name, **options)
    _shards.checked_leaves(grads, layout, transfer.call, "grads", are_shards=True)
    _shards.checked_leaves(params, layout, transfer.call, "params", are_shards=stage == 3)
    if max_norm is not None:
        settings = transfer.settings(ALL_REDUCE)
        grad_specs = specs(layout, transfer.call.axes)
        grads, _ = clip.clip_by_global_norm(grads, max_norm, specs=grad_specs, **settings)
    own = params if stage == 3 else shard(params, layout, axis_name)
    updates, opt_state = tx.update(grads, opt_state, own)
    own = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), own, updates)
    return (own if stage == 3 else _whole(own, layout, transfer)), opt_state


def _whole(own: Any, layout: Any, transfer: Transfer) -> Any:
    """Every rank's part together, typed as what it is: the same on all ranks."""
    leaves, treedef = jax.tree.flatten(own)
    whole = _shards.gather_leaves(leaves, jax.tree.leaves(layout), transfer)
    return jax.tree.unflatten(treedef, [as_invariant(x, transfer.call.axes) for x in whole])


def _reduced_like(
    types: list[Any], cts: list[Any], plan: list[Any], transfer: Transfer
) -> list[Any]:
    """Reduced cotangents, of the types of the shards that they are for."""

    def like(aval: Any, grad: Any) -> Any:
        if data_parallel.is_float0(grad):
            return grad
        axes = sorted(_compat.varying_axes(aval), key=str)
        return _compat.make_varying(grad.astype(aval.dtype), axes)

    return list(map(like, types, _shards.reduce_scatter_leaves(cts, plan, transfer)))


def _vary(x: Any, transfer: Transfer) -> Any:
    return _compat.make_varying(x, transfer.call.axes)


def _cast(x: Any, dtype: Any) -> Any:
    return x if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


_GATHERED = "jcoll.zero.gathered"
_MOTION = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "pvary",
        "reshape",
        "slice",
        "split",
        "squeeze",
        "transpose",
    }
)
"""Primitives that only move or convert: what follows from gathered parameters by these is as large
as they are, and as cheap to make again."""


def keep_arithmetic(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of jax.checkpoint: keeps results of arithmetic, but neither gathered parameters nor
    what was only cast, moved or retyped."""
    return primitive.name not in _MOTION and _GATHERED not in _compat.checkpoint_names(params)
