"""Routing of tokens to experts: the top k of a softmax, and the losses that keep the load even.

For token t with logits z_t over E experts, p_t = softmax(z_t). Its experts are the k with the
largest z (ties: the lower index), its weights their p, divided by their sum if normalised. (Of p
many may be 0 in float32 where z still tells which is larger.)

Losses, over all tokens that are routed, T of them (ranks included, if an axis is given):

    load balancing   E * sum_e f_e P_e,   f_e = (tokens that chose e) / (k T),  P_e = mean_t p_te
    z                mean_t (log sum_e exp z_te)^2

The first is 1 if both are uniform and E / k at worst, where always the same k experts are chosen
with all of p on them. f does not depend on the logits smoothly, so the gradient comes through P.
The second keeps logits small.

Sources: Shazeer et al. 2017 (top k of experts, importance and load losses); Lepikhin et al. 2020,
GShard, and Fedus et al. 2021, Switch Transformer (f P); Zoph et al. 2022, ST-MoE (z loss); Jiang
et al. 2024, Mixtral (weights normalised over the k); Qiu et al. 2025, Demons in the Detail (f and
P over all ranks' tokens, which leaves experts free to specialise within a batch).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jcoll import errors
from jcoll.comm.mesh import AxisName, static_bool, static_int
from jcoll.ops.all_reduce import all_reduce

_WHERE = "top_k_router"


class Routing(NamedTuple):
    """Where each token goes; T tokens, k choices each, E experts."""

    weights: jax.Array
    """float32 [T, k], by falling weight; zero for a token that is masked."""

    experts: jax.Array
    """int32 [T, k]; E, which is no expert, for a token that is masked."""

    load_balancing_loss: jax.Array
    """float32, a scalar; to be added to the loss with a factor of about 1e-2."""

    z_loss: jax.Array
    """float32, a scalar; usual factor 1e-3."""

    rows_per_expert: jax.Array
    """int32 [E], how many tokens chose each expert, on all ranks that the losses cover."""


def top_k_router(
    logits: Any,
    axis_name: AxisName | None = None,
    *,
    top_k: int,
    mask: Any = None,
    normalize: bool | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Routing:
    """The top_k experts of each token, their weights, and the losses of the module's docstring.

    Args:
      logits: [T, E] of a floating-point type; computed with in float32.
      axis_name: mesh axis, or tuple of axes, over whose tokens the losses are taken, by one
        all_reduce of 2 E + 2 numbers: then they equal those of one device that has all tokens.
        None: over this rank's tokens, as GShard's groups; nothing is sent.
      top_k: how many experts each token gets, k above, 1 to E; static.
      mask: bool [T], False for tokens that are padding: they go nowhere and count nowhere.
      normalize: whether a token's weights sum to 1. If not given: for k > 1. For k = 1 they would
        all be 1, and the router would not learn from the model's loss.
      algorithm, timeout_s: as for `jcoll.all_reduce`.

    Returns:
      A Routing. With an axis, its losses and rows_per_expert are equal on all ranks.

    Derivative: of weights and losses with respect to logits. The losses' gradient with an axis: let
    each rank add them to its own loss; the mean over ranks of all gradients is then that of the
    mean loss.

    Raises: ValueError for top_k out of range, TypeError for integer logits.
    """
    logits = jnp.asarray(logits)
    k = _check(logits, top_k, mask)
    normalize = k > 1 if normalize is None else static_bool(_WHERE, "normalize", normalize)
    num_tokens, num_experts = logits.shape
    logits = logits.astype(jnp.float32)
    probs = jax.nn.softmax(logits)
    experts = jax.lax.top_k(logits, k)[1].astype(jnp.int32)
    weights = jnp.take_along_axis(probs, experts, 1)
    if normalize:
        weights = weights / weights.sum(1, keepdims=True)  # At least 1 / E: the largest is there.
    z = jax.nn.logsumexp(logits, axis=1) ** 2
    routed = jnp.ones(num_tokens, bool) if mask is None else jnp.asarray(mask)
    if mask is not None:
        weights = jnp.where(routed[:, None], weights, 0.0)
        experts = jnp.where(routed[:, None], experts, jnp.int32(num_experts))
        probs, z = jnp.where(routed[:, None], probs, 0.0), jnp.where(routed, z, 0.0)
    totals = (count(experts, num_experts).astype(jnp.float32), probs.sum(0), z.sum(), routed.sum())
    if axis_name is not None:
        totals = _sum_over_ranks(totals, axis_name, algorithm=algorithm, timeout_s=timeout_s)
    chosen, prob_sums, z_sum, num_routed = totals
    tokens = jnp.maximum(num_routed.astype(jnp.float32), 1.0)
    balance = num_experts * jnp.vdot(chosen / (k * tokens), prob_sums / tokens)
    return Routing(weights, experts, balance, z_sum / tokens, chosen.astype(jnp.int32))


def count(experts: jax.Array, num_experts: int) -> jax.Array:
    """int32 [num_experts]: how often each occurs; what is no expert is not counted."""
    # By comparison, not by scatter-add, which CPUs and TPUs do one element at a time.
    ids = jnp.arange(num_experts, dtype=experts.dtype)
    return (experts.reshape(-1, 1) == ids[None]).sum(0, dtype=jnp.int32)


def _sum_over_ranks(totals: tuple, axis_name: AxisName, **settings: Any) -> list:
    flat = jnp.concatenate([part.astype(jnp.float32).reshape(-1) for part in totals])
    flat = all_reduce(flat, axis_name, **settings)
    parts = jax.lax.split(flat, [part.size for part in totals])
    return [part.reshape(total.shape) for part, total in zip(parts, totals, strict=True)]


def _check(logits: jax.Array, top_k: Any, mask: Any) -> int:
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        problem = f"logits are {logits.dtype}{list(logits.shape)}; floats [tokens, experts] needed."
        fix = "Reshape leading dimensions into one; compute the logits in float32."
        raise TypeError(errors.text(_WHERE, problem, fix))
    num_tokens, num_experts = logits.shape
    k = static_int(_WHERE, "top_k", top_k)
    if not 1 <= k <= num_experts:
        problem = f"top_k={k} experts a token of {num_experts} that there are; 1 to that is needed."
        raise ValueError(errors.text(_WHERE, problem, "Lower top_k, or add experts."))
    if mask is not None and (jnp.shape(mask) != (num_tokens,) or jnp.asarray(mask).dtype != bool):
        given = f"{jnp.asarray(mask).dtype}{list(jnp.shape(mask))}"
        problem = f"mask is {given}; bool[{num_tokens}], one per token, is needed."
        raise ValueError(errors.text(_WHERE, problem, "Pass True for tokens, False for padding."))
    return k
