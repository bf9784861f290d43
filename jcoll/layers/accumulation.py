"""Gradient accumulation: a rank's batch in several passes, for the memory of one.

The mean over k microbatches of equal size is the mean over the batch, of what is a mean over rows:
activations exist for one microbatch at a time, and the ranks sync once, not k times. (A product of
means is not: a router's load-balancing loss becomes that of the microbatches, taken one by one.)
Sums in 16 bits would lose what is below 2^-9 of the sum so far (bfloat16), so they are kept in
float32.

Sources: Huang et al. 2019, "GPipe" (microbatches whose gradients are summed before one update);
Goyal et al. 2017, "Accurate, Large Minibatch SGD" (what is a mean over rows, and what is not);
Megatron-LM (Shoeybi et al. 2019), whose sums are in float32 as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from jcoll import _compat, errors
from jcoll.comm.mesh import static_int
from jcoll.layers.data_parallel import is_float0

_WHERE = "accumulate_gradients"


def accumulate_gradients(
    value_and_grad: Callable[[Any, Any], Any], params: Any, batch: Any, num_microbatches: int
) -> Any:
    """The mean of value_and_grad(params, microbatch) over the microbatches of this rank's batch.

        local = jax.lax.pcast(params, "data", to="varying")
        loss, grads = accumulate_gradients(jax.value_and_grad(loss_fn), local, batch, 4)
        grads = jcoll.sync_gradients(grads, "data", wire_dtype=jnp.bfloat16)    # once

    Args:
      value_and_grad: a function of (params, microbatch) to any pytree of floating-point arrays that
        are means over the microbatch: a loss, gradients, metrics; the `float0` gradients of
        integers pass. Not one that syncs by itself (`sync_in_backward`): it would send k times.
      params: passed on.
      batch: a pytree of arrays [B, ...] of any dtypes, whose first dimension is the batch's; a
        microbatch has them as [B / k, ...], in order.
      num_microbatches: k; it divides the batch.

    Returns:
      The pytree that value_and_grad returns, of the same shapes; 16-bit leaves and narrower ones in
      float32, wider ones in their own dtype.

    Derivative: that of a jax.lax.scan over value_and_grad, which keeps what each step keeps.
    """
    count = static_int(_WHERE, "num_microbatches", num_microbatches)
    if count < 1:
        problem = f"num_microbatches={count} is too small; at least 1 is needed."
        raise ValueError(errors.text(_WHERE, problem, "Pass 1 for the whole batch at once."))
    _check_batch(batch, count)
    parts = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
    one = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], parts))
    _check_results(one)

    def step(total: list, part: Any) -> tuple[list, None]:
        values = [v for v in jax.tree.leaves(value_and_grad(params, part)) if not is_float0(v)]
        return [t + jnp.asarray(v, t.dtype) for t, v in zip(total, values, strict=True)], None

    leaves, treedef = jax.tree.flatten(one)
    total, _ = jax.lax.scan(step, [_zeros(x) for x in leaves if not is_float0(x)], parts)
    means = iter([t / jnp.asarray(count, t.dtype) for t in total])
    results = [np.zeros(x.shape, x.dtype) if is_float0(x) else next(means) for x in leaves]
    return jax.tree.unflatten(treedef, results)


def _zeros(like: Any) -> jax.Array:
    dtype = like.dtype if like.dtype.itemsize > 2 else jnp.float32
    zeros = jnp.zeros(like.shape, dtype)
    return _compat.make_varying(zeros, sorted(_compat.varying_axes(like), key=str))


def _check_batch(batch: Any, count: int) -> None:
    entries = tree_leaves_with_path(batch)
    if not entries:
        problem = f"batch={batch!r} has no arrays; one at least is needed, to be split."
        raise ValueError(errors.text(_WHERE, problem, "Pass a pytree of arrays."))
    for path, leaf in entries:
        name = f"batch{keystr(path)}"
        if not jnp.ndim(leaf):
            problem = f"{name} is a scalar; a first dimension, the batch's, is needed."
            raise ValueError(errors.text(_WHERE, problem, "Close over what is not split."))
        size = jnp.shape(leaf)[0]
        if size % count:
            problem = f"{name} has {size} rows, which {count} microbatches do not divide."
            fix = f"Pad it to {-(-size // count) * count}, or pass another num_microbatches."
            raise ValueError(errors.text(_WHERE, problem, fix))
        first = jnp.shape(entries[0][1])[0]
        if size != first or not size:
            problem = f"{name} has {size} rows, batch{keystr(entries[0][0])} {first}; as many of "
            problem += "all, and at least one a microbatch, are needed."
            fix = "Give all arrays the batch's dimension first; close over what is not split."
            raise ValueError(errors.text(_WHERE, problem, fix))


def _check_results(one: Any) -> None:
    for path, leaf in tree_leaves_with_path(one):
        if not is_float0(leaf) and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            problem = f"result{keystr(path)} has dtype {leaf.dtype}, which does not hold a mean."
            raise TypeError(errors.text(_WHERE, problem, "Return floating-point arrays."))
