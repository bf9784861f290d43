"""Attention tile by tile: softmax(scale q k^T) v without the matrix of scores.

For a query with scores s_j, `out = sum_j exp(s_j - m) v_j / sum_j exp(s_j - m)` whatever m is. Over
tiles of keys, with m the maximum so far, the sums go on in float32 (Milakov and Gimelshein 2018;
Rabe and Staats 2021; FlashAttention, Dao et al. 2022):

    m'    = max(m, max_j s_j)
    total = total exp(m - m') + sum_j exp(s_j - m')
    acc   = acc   exp(m - m') + sum_j exp(s_j - m') v_j          out = acc / total

Only `out` and `lse = m + log(total)` are kept for the backward pass, which computes each tile's
weights p_j = exp(s_j - lse) again. With `delta = sum(dout * out)`:

    ds_j = scale p_j (dout . v_j - delta)     dq = sum_j ds_j k_j     dk_j = ds_j q
                                                                      dv_j = p_j dout

A tile is `block_size` queries by as many keys, so memory beyond inputs and outputs does not grow
with the sequence. Tiles that the causal mask hides are skipped. Sums do not ask where keys come
from: context_parallel.py adds those of other ranks, as they arrive.

N query heads are K groups of G = N / K, one per head of the keys. Below, q is [..., K, G, T, D],
k [..., K, S, D] and v [..., K, S, E].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jcoll.ops._reductions import accumulation_dtype


@dataclass(frozen=True)
class Rule:
    """What is static: how scores are made, and how the work is cut into tiles.

    No tile crosses a multiple of `chunk` tokens, where positions may jump. None: they do not.
    """

    causal: bool
    scale: float
    block_size: int
    chunk: int | None = None


# `AXES`: the dimension of tokens, field by field.


class Queries(NamedTuple):
    """positions [T], None: no causal mask; segments [..., T], None: all are of one segment."""

    q: Any
    positions: Any
    segments: Any

    AXES = (-2, -1, -1)


class Keys(NamedTuple):
    """positions [S], segments [..., S]; as those of Queries."""

    k: Any
    v: Any
    positions: Any
    segments: Any

    AXES = (-2, -2, -1, -1)


class Sums(NamedTuple):
    """The running softmax: acc [..., K, G, T, E], total and top (m above) [..., K, G, T]."""

    acc: Any
    total: Any
    top: Any

    AXES = (-2, -1, -1)


class Outcome(NamedTuple):
    """What became of the queries: dout [..., K, G, T, E], lse and delta [..., K, G, T]."""

    dout: Any
    lse: Any
    delta: Any

    AXES = (-2, -1, -1)


class Gradients(NamedTuple):
    """Running sums, like q, k and v."""

    dq: Any
    dk: Any
    dv: Any


# Forward


def empty_sums(queries: Queries, keys: Keys) -> Sums:
    """The sums over no keys. `top` is finite, as exp(-inf + inf) would be NaN."""
    q, dtype = queries.q, accumulation_dtype(queries.q.dtype)
    shape = q.shape[:-1]
    return Sums(
        jnp.zeros_like(q, dtype, shape=(*shape, keys.v.shape[-1])),
        jnp.zeros_like(q, dtype, shape=shape),
        jnp.full_like(q, jnp.finfo(dtype).min, dtype, shape=shape),
    )


def fold(rule: Rule, sums: Sums, queries: Queries, keys: Keys) -> Sums:
    """`sums`, with `keys` added."""

    def fold_queries(sums: Sums, start: Any, size: int) -> Sums:
        tile = _rows(queries, start, size)

        def fold_keys(part: Sums, start: Any, size: int) -> Sums:
            return _fold_tile(rule, part, tile, _rows(keys, start, size))

        part = _over_tiles(rule, fold_keys, _rows(sums, start, size), keys.k.shape[-2])
        updated = zip(sums, part, Sums.AXES, strict=True)
        return Sums(*(_put(x, new, start, axis) for x, new, axis in updated))

    return _over_tiles(rule, fold_queries, sums, queries.q.shape[-2])


def finish(sums: Sums, queries: Queries) -> tuple[Any, Any]:
    """(out, of q's dtype; lse). A token that sees nothing: zeros, and 0 for its lse."""
    sees = sums.total > 0
    total = jnp.where(sees, sums.total, 1)
    lse = jnp.where(sees, sums.top + jnp.log(total), 0)
    return (sums.acc / total[..., None]).astype(queries.q.dtype), lse


def _fold_tile(rule: Rule, sums: Sums, queries: Queries, keys: Keys) -> Sums:
    def visible() -> Sums:
        scores, mask = _scores(rule, queries, keys)
        top = jnp.maximum(sums.top, jnp.max(scores, axis=-1))
        weights = _masked(jnp.exp(scores - top[..., None]), mask)
        decay = jnp.exp(sums.top - top)
        values = _einsum("...kgts,...kse->...kgte", weights.astype(keys.v.dtype), keys.v)
        return Sums(
            sums.acc * decay[..., None] + values,
            sums.total * decay + jnp.sum(weights, axis=-1),
            top,
        )

    return _unless_hidden(queries, keys, visible, lambda: sums)


# Backward


def zero_gradients(queries: Queries, keys: Keys) -> Gradients:
    dtype = accumulation_dtype(queries.q.dtype)
    return Gradients(*(jnp.zeros_like(x, dtype) for x in (queries.q, keys.k, keys.v)))


def outcome(out: Any, lse: Any, dout: Any) -> Outcome:
    dtype = accumulation_dtype(out.dtype)
    return Outcome(dout, lse, jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1))


def fold_gradients(
    rule: Rule, gradients: Gradients, queries: Queries, keys: Keys, after: Outcome
) -> Gradients:
    """`gradients`, with the part added that came about between these queries and keys."""

    def fold_queries(sums: Gradients, start: Any, size: int) -> Gradients:
        tile, tile_after = _rows(queries, start, size), _rows(after, start, size)

        def fold_keys(part: Gradients, start: Any, size: int) -> Gradients:
            old = Gradients(part.dq, *(_take(x, start, size, -2) for x in part[1:]))
            new = _fold_gradient_tile(rule, old, tile, _rows(keys, start, size), tile_after)
            dk, dv = (_put(x, y, start, -2) for x, y in zip(part[1:], new[1:], strict=True))
            return Gradients(new.dq, dk, dv)

        part = sums._replace(dq=_take(sums.dq, start, size, -2))
        part = _over_tiles(rule, fold_keys, part, keys.k.shape[-2])
        return part._replace(dq=_put(sums.dq, part.dq, start, -2))

    return _over_tiles(rule, fold_queries, gradients, queries.q.shape[-2])


def _fold_gradient_tile(
    rule: Rule, sums: Gradients, queries: Queries, keys: Keys, after: Outcome
) -> Gradients:
    def visible() -> Gradients:
        scores, mask = _scores(rule, queries, keys)
        weights = _masked(jnp.exp(scores - after.lse[..., None]), mask)
        dweights = _einsum("...kgte,...kse->...kgts", after.dout, keys.v)
        dscores = rule.scale * weights * (dweights - after.delta[..., None])
        dscores, weights = dscores.astype(queries.q.dtype), weights.astype(queries.q.dtype)
        return Gradients(
            sums.dq + _einsum("...kgts,...ksd->...kgtd", dscores, keys.k),
            sums.dk + _einsum("...kgts,...kgtd->...ksd", dscores, queries.q),
            sums.dv + _einsum("...kgts,...kgte->...kse", weights, after.dout),
        )

    return _unless_hidden(queries, keys, visible, lambda: sums)


# One tile


def _scores(rule: Rule, queries: Queries, keys: Keys) -> tuple[Any, Any]:
    """(scale q k^T [..., K, G, T, S]; where they count, of that shape, or None: everywhere)."""
    scores = _einsum("...kgtd,...ksd->...kgts", queries.q, keys.k) * rule.scale
    masks = []
    if queries.positions is not None:
        masks.append(queries.positions[:, None] >= keys.positions[None, :])
    if queries.segments is not None:
        of_keys = keys.segments[..., None, None, None, :]
        masks.append(queries.segments[..., None, None, :, None] == of_keys)
    if not masks:
        return scores, None
    mask = functools.reduce(jnp.logical_and, (jnp.broadcast_to(m, scores.shape) for m in masks))
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min), mask


def _masked(weights: Any, mask: Any) -> Any:
    return weights if mask is None else jnp.where(mask, weights, 0)


def _unless_hidden(queries: Queries, keys: Keys, visible: Callable, hidden: Callable) -> Any:
    """visible(), or hidden() if all keys of the tile come after all of its queries."""
    if queries.positions is None:
        return visible()
    return jax.lax.cond(jnp.max(queries.positions) >= jnp.min(keys.positions), visible, hidden)


def _einsum(subscripts: str, a: Any, b: Any) -> Any:
    return jnp.einsum(subscripts, a, b, preferred_element_type=accumulation_dtype(a.dtype))


# Rows of a sequence

_Rows = TypeVar("_Rows", Queries, Keys, Sums, Outcome)


def _over_tiles(rule: Rule, step: Callable, carry: Any, length: int) -> Any:
    """carry = step(carry, start, size) for tiles from 0 to `length`."""
    if not length:
        return carry
    chunk = rule.chunk or length
    size = -(-chunk // -(-chunk // rule.block_size))  # As even as it goes: a rest is more code.
    count, rest = divmod(chunk, size)

    def of_chunk(i: Any, carry: Any) -> Any:
        first = i * chunk
        carry = _loop(count, lambda j, carry: step(carry, first + j * size, size), carry)
        return step(carry, first + count * size, rest) if rest else carry

    return _loop(length // chunk, of_chunk, carry)


def _loop(count: int, step: Callable, carry: Any) -> Any:
    return step(0, carry) if count == 1 else jax.lax.fori_loop(0, count, step, carry)


def _rows(x: _Rows, start: Any, size: int) -> _Rows:
    return type(x)(*(_take(leaf, start, size, axis) for leaf, axis in zip(x, x.AXES, strict=True)))


def _take(x: Any, start: Any, size: int, axis: int) -> Any:
    if x is None or x.shape[axis] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: Any, part: Any, start: Any, axis: int) -> Any:
    if x.shape == part.shape:
        return part
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)
