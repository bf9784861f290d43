"""Attention on one device, what its arguments must be, and how they become tiles' arrays.

The maths, and the layout of arrays inside, are in online_softmax.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat, errors
from jcoll.comm.mesh import real_number, refuse_traced, signature, static_bool, static_int
from jcoll.layers import online_softmax
from jcoll.layers.online_softmax import Keys, Queries, Rule

DEFAULT_BLOCK_SIZE = 512


def blockwise_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    segment_ids: Any = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> Any:
    """softmax(scale q k^T) v on one device, in memory that does not grow with T * S.

    No collective: the attention that the ranks of `ulysses_attention` do, and the reference of the
    others. On GPUs a fused kernel (`jax.nn.dot_product_attention(implementation="cudnn")`) is
    faster.

    Args:
      q: [..., T, N, D]: T tokens, N heads; as `jax.nn.dot_product_attention` has them.
      k: [..., S, K, D]; K divides N, and head h of q looks at head h // (N / K) of k and v.
      v: [..., S, K, E]; E may differ from D.
      causal: a token sees itself and those before it; S = T then.
      scale: of the scores; D ** -0.5 if not given.
      segment_ids: integers [..., T]: tokens see their own segment only (packed documents). S = T.
      block_size: queries, and keys, of a tile. float32 scores of a tile, for all heads at once, are
        the largest temporary.

    Returns:
      [..., T, N, E] of q's dtype. Products are added up in float32 (float64 if q is), and so are
      the softmax's sums.

    Raises: ValueError for shapes that do not fit, TypeError for dtypes that differ.

    Derivative: in reverse mode, tile by tile, from `out` and one number per token and head.
    """
    where = "blockwise_attention"
    check_inputs(where, q, k, v, causal, segment_ids)
    rule = make_rule(where, q, causal, scale, block_size)
    q, k, v, segments = vary_alike(q, k, v, segment_ids)
    positions = jnp.arange(q.shape[-3], dtype=jnp.int32) if rule.causal else None
    out = attend(
        rule, make_queries(q, k, positions, segments), make_keys(k, v, positions, segments)
    )
    return merge_heads(out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(rule: Rule, queries: Queries, keys: Keys) -> Any:
    """The attention of `queries` to `keys`: [..., K, G, T, E]."""
    return _attend_forward(rule, queries, keys)[0]


def _attend_forward(rule: Rule, queries: Queries, keys: Keys) -> Any:
    sums = online_softmax.empty_sums(queries, keys)
    sums = online_softmax.fold(rule, sums, queries, keys)
    out, lse = online_softmax.finish(sums, queries)
    return out, (queries, keys, out, lse)


def _attend_backward(rule: Rule, saved: Any, dout: Any) -> Any:
    queries, keys, out, lse = saved
    after = online_softmax.outcome(out, lse, dout)
    gradients = online_softmax.zero_gradients(queries, keys)
    gradients = online_softmax.fold_gradients(rule, gradients, queries, keys, after)
    dq, dk, dv = (x.astype(queries.q.dtype) for x in gradients)
    return Queries(dq, None, None), Keys(dk, dv, None, None)


attend.defvjp(_attend_forward, _attend_backward)


# Between arguments and the layout inside


def make_queries(q: Any, k: Any, positions: Any, segments: Any) -> Queries:
    """q [..., T, N, D], for keys k [..., S, K, D]."""
    kv_heads = k.shape[-2]
    q = q.reshape(*q.shape[:-2], kv_heads, q.shape[-2] // kv_heads, q.shape[-1])
    return Queries(jnp.moveaxis(q, -4, -2), positions, segments)


def make_keys(k: Any, v: Any, positions: Any, segments: Any) -> Keys:
    """k [..., S, K, D], v [..., S, K, E]."""
    return Keys(jnp.moveaxis(k, -3, -2), jnp.moveaxis(v, -3, -2), positions, segments)


def merge_heads(out: Any) -> Any:
    """[..., K, G, T, E] -> [..., T, K * G, E]."""
    out = jnp.moveaxis(out, -2, -4)
    return out.reshape(*out.shape[:-3], out.shape[-3] * out.shape[-2], out.shape[-1])


def vary_alike(q: Any, k: Any, v: Any, segments: Any, axes: Any = ()) -> tuple[Any, ...]:
    """The arrays, typed as varying over `axes` and all that one of them varies over."""
    arrays = [None if x is None else jnp.asarray(x) for x in (q, k, v, segments)]
    varying = set(axes).union(
        *(_compat.varying_axes(jax.typeof(x)) for x in arrays if x is not None)
    )
    names = sorted(varying, key=str)
    return tuple(None if x is None else _compat.make_varying(x, names) for x in arrays)


# Arguments


def make_rule(
    where: str, q: Any, causal: bool, scale: Any, block_size: Any, chunk: int | None = None
) -> Rule:
    """The options, checked; `causal` by check_inputs."""
    block_size = static_int(where, "block_size", block_size)
    if block_size < 1:
        problem = f"block_size={block_size} is too small; at least 1 is needed."
        fix = f"The default is {DEFAULT_BLOCK_SIZE}."
        raise ValueError(errors.text(where, problem, fix))
    refuse_traced(where, scale=scale)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    number = real_number(scale)
    if number is None or not math.isfinite(number):
        problem = f"scale={scale!r} is not a finite number."
        raise ValueError(errors.text(where, problem, "Pass a float, or None for D ** -0.5."))
    return Rule(bool(causal), number, block_size, chunk)


def check_inputs(where: str, q: Any, k: Any, v: Any, causal: bool, segment_ids: Any) -> None:
    """Raises errors of the four-part form unless the arrays make an attention."""
    static_bool(where, "causal", causal)
    _check_types(where, q, k, v)
    _check_shapes(where, q, k, v)
    _check_heads(where, q, k)
    given = f"q has {q.shape[-3]} tokens, k and v have {k.shape[-3]}"
    if causal and q.shape[-3] != k.shape[-3]:
        problem = f"{given}; a causal mask needs as many of each, at the same positions."
        raise ValueError(errors.text(where, problem, "Pass causal=False for cross-attention."))
    if segment_ids is None:
        return
    if not isinstance(segment_ids, jax.Array | np.ndarray):
        problem = f"segment_ids is a {type(segment_ids).__name__}; an array of integers is needed."
        raise TypeError(errors.text(where, problem, "Pass jnp.asarray(segment_ids)."))
    shape, dtype = segment_ids.shape, segment_ids.dtype
    if shape != q.shape[:-2] or q.shape[-3] != k.shape[-3]:
        problem = f"{given}, segment_ids has shape {shape}; one id per token of q is needed."
        fix = f"Pass segment_ids of shape {q.shape[:-2]}, and keys of the same tokens."
        raise ValueError(errors.text(where, problem, fix))
    if not jnp.issubdtype(dtype, jnp.integer):
        problem = f"segment_ids has dtype {dtype}; integers are needed."
        raise TypeError(errors.text(where, problem, "Number the segments."))


def _check_types(where: str, q: Any, k: Any, v: Any) -> None:
    dtypes = [getattr(x, "dtype", None) for x in (q, k, v)]
    if len(set(dtypes)) == 1 and dtypes[0] is not None and jnp.issubdtype(dtypes[0], jnp.floating):
        return
    names = ", ".join(str(d or type(x).__name__) for d, x in zip(dtypes, (q, k, v), strict=True))
    problem = f"q, k and v are {names}; arrays of one floating-point type are needed."
    raise TypeError(errors.text(where, problem, "Convert them, e.g. k.astype(q.dtype)."))


def _check_shapes(where: str, q: Any, k: Any, v: Any) -> None:
    if (
        q.ndim >= 3
        and q.ndim == k.ndim == v.ndim
        and q.shape[:-3] == k.shape[:-3]
        and k.shape[:-1] == v.shape[:-1]
        and q.shape[-1] == k.shape[-1]
    ):
        return
    given = ", ".join(f"{name} {signature(x)}" for name, x in (("q", q), ("k", k), ("v", v)))
    problem = f"got {given}; q [..., T, N, D], k [..., S, K, D] and v [..., S, K, E] are needed."
    fix = "Give them the same leading dimensions; tokens come before heads."
    raise ValueError(errors.text(where, problem, fix))


def _check_heads(where: str, q: Any, k: Any) -> None:
    if q.shape[-1] == 0:
        problem = "the heads of q and k have size 0."
        raise ValueError(errors.text(where, problem, "Pass heads of at least one feature."))
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads and heads % kv_heads == 0:
        return
    problem = f"q has {heads} heads, which the {kv_heads} heads of k and v do not divide."
    fix = "Each head of k and v serves the same number of q's heads: make it a multiple."
    raise ValueError(errors.text(where, problem, fix))
