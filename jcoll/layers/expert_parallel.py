"""Expert parallelism: a mixture of experts whose experts are spread over the ranks of an axis.

    p_t = softmax(x_t router_w)        y_t = sum over the k experts e of t:   w_te expert_e(x_t)

Each rank has its own tokens and E / n of the experts. Tokens travel to their experts and back
(expert_dispatch); the router (router) says where to and keeps the load even.

Source: Shazeer et al. 2017, Outrageously Large Neural Networks; Lepikhin et al. 2020, GShard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jcoll import errors
from jcoll.comm.mesh import AxisName, Call, make_call
from jcoll.layers import expert_dispatch
from jcoll.layers.expert_dispatch import combine_from_experts, dispatch_to_experts
from jcoll.layers.grouped_mlp import grouped_mlp, network
from jcoll.layers.router import top_k_router


class MoeAux(NamedTuple):
    """What a mixture of experts returns beside its result."""

    load_balancing_loss: jax.Array
    """float32, a scalar: see `top_k_router`. Add it to the loss, times about 1e-2."""

    z_loss: jax.Array
    """float32, a scalar; times about 1e-3, if at all."""

    dropped: jax.Array
    """int32, a scalar: this rank's (token, expert) pairs that found no room. Differs by rank."""

    rows_per_expert: jax.Array
    """int32 [num_experts]: the pairs that the router made, on all ranks of `balance_axes`."""


def moe_layer(
    x: Any,
    router_w: Any,
    experts: Callable[[jax.Array, jax.Array], jax.Array] | tuple[Any, Any],
    axis_name: AxisName,
    *,
    num_experts: int,
    top_k: int,
    mode: str = "dropless",
    output_size: int | None = None,
    capacity_factor: float | None = None,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    mask: Any = None,
    normalize: bool | None = None,
    balance_axes: AxisName | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> tuple[jax.Array, MoeAux]:
    """A mixture of experts, inside jax.shard_map with tokens and experts split over an axis.

        y, aux = moe_layer(x, router_w, (w_in, w_out), "expert", num_experts=64, top_k=2)
        loss = cross_entropy(y) + 1e-2 * aux.load_balancing_loss

    Args:
      x: [..., width], this rank's tokens.
      router_w: [width, num_experts], the same on all ranks. The router computes in full float32.
      experts: (w_in, w_out), this rank's experts, [num_experts / n, width, hidden] and [.., hidden,
        width], each a two-layer network activation(rows @ w_in[e]) @ w_out[e], in x's dtype
        (`grouped_mlp`). Or a function (rows [R, width], group_sizes int32 [num_experts / n]) ->
        rows [R, any], that applies its first expert to the first group_sizes[0] rows, and so on,
        e.g. by `jax.lax.ragged_dot`; the rest are zero, and what it returns there is ignored.
      axis_name: mesh axis, or tuple of axes, that the experts are spread over, in rank order.
      num_experts: over all ranks; a multiple of their number.
      top_k: experts per token.
      mode, output_size, capacity_factor: as in `dispatch_to_experts`: "dropless", with room for
        any routing or for output_size rows on each rank; or "capacity", by capacity_factor.
      activation: of the two-layer networks, row by row; see `grouped_mlp` (and there for SwiGLU).
      mask: bool, x's shape without the width; False for padding, which gets y = 0.
      normalize: as in `top_k_router`: whether a token's weights sum to 1. Default: for top_k > 1.
      balance_axes: the axes over whose tokens the losses are taken; axis_name if not given. Name
        all axes that split the batch and the losses are those of one device that has it all.
      algorithm, timeout_s: of the exchange of the rows; the timeout is that of all collectives.

    Returns:
      (y, aux): y like x (its last dimension is what the experts return); aux, a MoeAux.

    Derivative: reverse mode, in x, router_w and the experts' weights. An expert's gradient gathers
    the tokens of all ranks of axis_name: along this axis it is complete, for a loss that is the
    *sum* of the ranks' losses. So let each rank's loss be its share of the whole: the sum over its
    tokens / the tokens of all ranks, and the losses of aux / the number of ranks. Then the experts'
    gradients still need a sum over the other axes that split the batch, those of router_w (and of
    all that is replicated) over all of them: `sync_gradients(.., op="sum")`; or none where
    check_vma has JAX do it for replicated parameters.

    Raises: ValueError, before anything runs: top_k > num_experts, num_experts that the ranks do not
    divide, weights that are not this rank's shard.
    """
    call = make_call("moe_layer", axis_name)
    x, router_w = jnp.asarray(x), jnp.asarray(router_w)
    expert_dispatch.check_mode(call.where, mode, output_size, capacity_factor)
    expert_dispatch.check_experts(call, num_experts)
    _check(call, x, router_w, experts, num_experts)
    tokens = x.reshape(-1, x.shape[-1])
    routing = top_k_router(
        _logits(tokens, router_w),
        call.axes if balance_axes is None else balance_axes,
        top_k=top_k,
        mask=None if mask is None else _flat_mask(call, mask, x),
        normalize=normalize,
        timeout_s=timeout_s,
    )
    room = {"mode": mode, "output_size": output_size, "capacity_factor": capacity_factor}
    wire = {"axis_name": call.axes, "algorithm": algorithm, "timeout_s": timeout_s}
    rows, dispatch = dispatch_to_experts(
        tokens, routing.experts, num_experts=num_experts, **room, **wire
    )
    rows = _apply(experts, rows, dispatch.group_sizes, mode, activation)
    y = combine_from_experts(rows, routing.weights, dispatch)
    aux = MoeAux(*routing[2:4], dispatch.dropped, routing.rows_per_expert)
    return y.reshape(*x.shape[:-1], *y.shape[1:]), aux


def _flat_mask(call: Call, mask: Any, x: jax.Array) -> jax.Array:
    mask = jnp.asarray(mask)
    if mask.shape == x.shape[:-1] and mask.dtype == bool:
        return mask.reshape(-1)
    problem = f"mask is {mask.dtype}{list(mask.shape)} for x of shape {x.shape}; "
    problem += f"bool{list(x.shape[:-1])}, one per token, is needed."
    raise ValueError(errors.text(call.where, problem, "Pass True for tokens, False for padding."))


def _logits(tokens: jax.Array, router_w: jax.Array) -> jax.Array:
    # A product of bfloat16 or TF32 would send tokens to other experts than float32 does.
    arrays = tokens.astype(jnp.float32), router_w.astype(jnp.float32)
    return jnp.matmul(*arrays, precision=jax.lax.Precision.HIGHEST)


def _apply(experts: Any, rows: Any, sizes: Any, mode: str, activation: Any) -> Any:
    """What this rank's experts make of the rows that have come."""
    if callable(experts):
        return experts(rows, sizes)
    w_in, w_out = (jnp.asarray(w).astype(rows.dtype) for w in experts)
    if mode == "dropless":
        return grouped_mlp(rows, w_in, w_out, sizes, activation=activation)
    rows = rows.reshape(w_in.shape[0], -1, rows.shape[-1])  # All groups have as many rows.
    rows = jax.vmap(partial(network, activation))(rows, w_in, w_out)
    return rows.reshape(-1, rows.shape[-1])


def _check(call: Call, x: jax.Array, router_w: jax.Array, experts: Any, num_experts: int) -> None:
    if x.ndim == 0 or router_w.shape != (x.shape[-1], num_experts):
        problem = (
            f"router_w has shape {router_w.shape} for x of shape {x.shape} and {num_experts} "
            f"experts; [width of x, num_experts] is needed."
        )
        raise ValueError(errors.text(call.where, problem, "Every rank needs all of router_w."))
    if x.shape[-1] == 0:
        problem = f"x has shape {x.shape}: its tokens have no features."
        raise ValueError(errors.text(call.where, problem, "Pass a width of at least 1."))
    if callable(experts):
        return
    if not isinstance(experts, tuple | list) or len(experts) != 2:
        count = f" of {len(experts)}" if hasattr(experts, "__len__") else ""
        problem = f"experts is a {type(experts).__name__}{count}; (w_in, w_out), or a function of "
        problem += "rows and group_sizes, is needed."
        raise TypeError(errors.text(call.where, problem, "Pass the weights in a tuple of two."))
    w_in, w_out = map(jnp.shape, experts)
    local = num_experts // call.num_ranks
    if len(w_in) != 3 or w_in[:2] != (local, x.shape[-1]) or len(w_out) != 3 or w_out[0] != local:
        problem = (
            f"w_in and w_out have shapes {w_in} and {w_out}; [{local}, {x.shape[-1]}, hidden] and "
            f"[{local}, hidden, width] are needed, the {num_experts} experts over "
            f"{call.num_ranks} ranks."
        )
        fix = f"Split their first dimension over axis {call.axis_text} in shard_map's in_specs."
        raise ValueError(errors.text(call.where, problem, fix))
