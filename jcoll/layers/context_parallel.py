"""Context parallelism: attention over a sequence of which each rank holds a part.

    function               moves, per layer and rank                       limits
    ring_attention         k and v, N - 1 times to the next rank           -
    ulysses_attention      q, k, v and out, once each, between all ranks   N divides the heads of q
    all_gather_attention   k and v of all ranks, at once                   all of k and v in memory

All three give what `blockwise_attention` gives on one device, up to the order of the sums. T below
is the number of tokens of a rank, so that the sequence has N T.

Sources: ring attention: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers
for Near-Infinite Context"; Ulysses: Jacobs et al. 2023, "DeepSpeed Ulysses"; all-gather: Llama Team
2024, "The Llama 3 Herd of Models", section 3.3.2. The placements are in sequence_placement.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import errors
from jcoll.comm.mesh import AxisName, Call, make_call
from jcoll.layers import online_softmax
from jcoll.layers.attention import (
    DEFAULT_BLOCK_SIZE,
    attend,
    blockwise_attention,
    check_inputs,
    make_keys,
    make_queries,
    make_rule,
    merge_heads,
    vary_alike,
)
from jcoll.layers.online_softmax import Keys, Queries, Rule, Sums
from jcoll.layers.sequence_placement import check_placement, positions_of
from jcoll.ops import _primitive
from jcoll.ops.all_gather import all_gather
from jcoll.ops.all_to_all import all_to_all
from jcoll.ops.permute import ppermute


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    axis_name: AxisName,
    *,
    causal: bool = True,
    placement: str = "contiguous",
    scale: float | None = None,
    segment_ids: Any = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Attention of this rank's queries to the keys of all ranks, which come by in a ring.

    In step s = 0 .. N - 1 rank r adds the keys of rank r - s to its running softmax while it sends
    them on to rank r + 1. Nobody ever holds more than two ranks' keys. The backward pass goes
    around once more: the gradients of k and v travel with the sums of those that they have passed,
    a step behind, and arrive at home after N steps. Tiles that the causal mask hides are skipped.

    Args:
      q, k, v: this rank's tokens, [..., T, N, D], [..., T, K, D], [..., T, K, E], as for
        `blockwise_attention`. With causal=False k and v may have a length of their own.
      axis_name: the mesh axis, or a tuple of them, that the sequence is split over.
      causal: a token sees itself and those before it in the text.
      placement: where the text is: "contiguous", or "zigzag" (see `to_zigzag`), which gives all
        ranks the same work under a causal mask. Without one, the order makes no difference.
      scale, segment_ids (this rank's), block_size: as for `blockwise_attention`.
      algorithm, timeout_s: as for `jcoll.ppermute`, for every step.

    Returns:
      [..., T, N, E] of q's dtype; varies over axis_name.

    Memory beyond q, k, v, out, is that of k and v twice and a tile; in the backward pass, also of
    float32 gradients of q, k, v. It depends on T, and not on N T.

    Raises: as `blockwise_attention`; ValueError, with the size to pad to, if zigzag does not divide
      the sequence. Sizes that the mesh does not divide are found by `jax.shard_map`.

    Derivative: in reverse mode, from `out` and one number per token and head. A gradient of a
    replicated q, k or v is this rank's part, and where types tell (check_vma=True) JAX sums it.
    """
    call = _call("ring_attention", axis_name, algorithm, timeout_s, "ppermute")
    rule = _rule(call, q, k, v, segment_ids, causal, placement, scale, block_size)
    q, k, v, segments = vary_alike(q, k, v, segment_ids, call.axes)
    ring = _Ring(call, rule, placement)
    return merge_heads(
        _ring_attend(ring, make_queries(q, k, None, segments), make_keys(k, v, None, segments))
    )


def all_gather_attention(
    q: Any,
    k: Any,
    v: Any,
    axis_name: AxisName,
    *,
    causal: bool = True,
    placement: str = "contiguous",
    scale: float | None = None,
    segment_ids: Any = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Attention of this rank's queries to the keys of all ranks, which are gathered first.

    Two collectives instead of 2 (N - 1): for sequences whose keys and values fit (few heads of
    them, or short), where latency counts more than memory.

    Args: as for `ring_attention`; algorithm and timeout_s as for `jcoll.all_gather`.

    Returns:
      [..., T, N, E] of q's dtype; varies over axis_name.

    Memory is that of k and v times N, in the forward pass and until the backward pass;
    `jax.checkpoint` around the layer gathers once more instead of keeping them.

    Raises: as `ring_attention`.

    Derivative: in reverse mode; the gradients of k and v are reduce_scattered.
    """
    call = _call("all_gather_attention", axis_name, algorithm, timeout_s, "all_gather")
    rule = _rule(call, q, k, v, segment_ids, causal, placement, scale, block_size)
    q, k, v, segments = vary_alike(q, k, v, segment_ids, call.axes)
    queries = make_queries(q, k, None, segments)
    gather = functools.partial(
        all_gather, axis_name=call.axes, tiled=True, algorithm=algorithm, timeout_s=timeout_s
    )
    k, v = gather((k, v), axis=k.ndim - 3)
    if segments is not None:
        segments = gather(segments, axis=segments.ndim - 1)
    keys = make_keys(k, v, None, segments)
    if rule.causal:
        of_rank = functools.partial(_positions, call, placement, q.shape[-3])
        queries = queries._replace(positions=of_rank(_rank(call)))
        of_all = [of_rank(rank) for rank in range(call.num_ranks)]
        keys = keys._replace(positions=jnp.concatenate(of_all))
    return merge_heads(attend(rule, queries, keys))


def ulysses_attention(
    q: Any,
    k: Any,
    v: Any,
    axis_name: AxisName,
    *,
    attention: Callable[..., Any] = blockwise_attention,
    causal: bool = True,
    scale: float | None = None,
    segment_ids: Any = None,
    block_size: int | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Attention with all tokens of N_heads / N heads on each rank, instead of some tokens of all.

    An all_to_all brings q, k and v from [..., T, N_heads, D] to [..., N T, N_heads / N, D], and
    another one the result back. Between them `attention` is that of one device, and may be any.

    Args:
      q, k, v: this rank's tokens, as for `ring_attention`, T of each; contiguous. The axis divides
        the heads of q. Heads of k and v that it does not divide are sent to several ranks: each as
        often as needed, and no more.
      axis_name: the mesh axis, or a tuple of them, that the sequence is split over.
      attention: attention(q, k, v, causal=, scale=, segment_ids=) -> [..., N T, heads, E]. Another
        `ring_attention`, say, over the axis that the rest of the sequence is split over: the axes
        of the sequence are then (ring, ulysses), in this order.
      causal, scale, segment_ids (this rank's): as for `blockwise_attention`.
      block_size: handed to `attention` if it is given.
      algorithm, timeout_s: as for `jcoll.all_to_all`.

    Returns:
      [..., T, N_heads, E] of q's dtype; varies over axis_name.

    Raises: as `blockwise_attention`; ValueError if the axis does not divide the heads of q.

    Derivative: that of `attention`; each all_to_all is transposed into one.
    """
    call = _call("ulysses_attention", axis_name, algorithm, timeout_s, "all_to_all")
    check_inputs(call.where, q, k, v, causal, segment_ids)
    _check_ulysses_heads(call, q)
    if not callable(attention):
        problem = f"attention={attention!r} is not a function."
        raise TypeError(errors.text(call.where, problem, "Pass e.g. blockwise_attention."))
    q, k, v, segments = vary_alike(q, k, v, segment_ids, call.axes)
    k, v = (_repeat_heads(x, call.num_ranks) for x in (k, v))
    move = functools.partial(
        all_to_all, axis_name=call.axes, tiled=True, algorithm=algorithm, timeout_s=timeout_s
    )
    tokens, heads = q.ndim - 3, q.ndim - 2
    q, k, v = move((q, k, v), split_axis=heads, concat_axis=tokens)
    if segments is not None:
        segments = all_gather(
            segments, call.axes, axis=segments.ndim - 1, tiled=True, timeout_s=timeout_s
        )
    options = {} if block_size is None else {"block_size": block_size}
    out = attention(q, k, v, causal=causal, scale=scale, segment_ids=segments, **options)
    _check_attended(call, out, q)
    return move(out, split_axis=tokens, concat_axis=heads)


# The ring


@dataclass(frozen=True)
class _Ring:
    """What is static in a ring's attention."""

    call: Call
    rule: Rule
    placement: str

    def send_on(self, tree: Any) -> Any:
        """To the next rank; the result is that of the rank before."""
        n = self.call.num_ranks
        return ppermute(
            tree,
            self.call.axes,
            [(rank, (rank + 1) % n) for rank in range(n)],
            algorithm=self.call.algorithm,
            timeout_s=self.call.timeout_s or None,
        )

    def located(self, tokens: Any, rank: Any) -> Any:
        """Queries or Keys of a rank, with their positions if the mask needs them."""
        if not self.rule.causal:
            return tokens
        positions = _positions(self.call, self.placement, tokens[0].shape[-2], rank)
        return tokens._replace(positions=positions)

    def tour(self, visit: Callable[[Any, Keys], Any], carry: Any, keys: Keys) -> Any:
        """carry = visit(carry, keys) for the keys of this rank, and then of each before it.

        The next keys are on their way during a visit, which does not depend on them. The first and
        the last visit are apart from the loop's: one may start from another carry, and after the
        other no keys are sent.
        """
        n, rank = self.call.num_ranks, _rank(self.call)

        def stop(step: Any, state: tuple[Any, Keys]) -> tuple[Any, Keys]:
            carry, keys = state
            arriving = self.send_on(keys)
            return visit(carry, self.located(keys, (rank - step) % n)), arriving

        if n == 1:
            return visit(carry, self.located(keys, rank))
        carry, keys = jax.lax.fori_loop(1, n - 1, stop, stop(0, (carry, keys)))
        return visit(carry, self.located(keys, (rank + 1) % n))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attend(ring: _Ring, queries: Queries, keys: Keys) -> Any:
    return _ring_forward(ring, queries, keys)[0]


def _ring_forward(ring: _Ring, queries: Queries, keys: Keys) -> Any:
    here = ring.located(queries, _rank(ring.call))

    def visit(sums: Sums, keys: Keys) -> Sums:
        return online_softmax.fold(ring.rule, sums, here, keys)

    sums = ring.tour(visit, online_softmax.empty_sums(queries, keys), keys)
    out, lse = online_softmax.finish(sums, queries)
    return out, (queries, keys, out, lse)


def _ring_backward(ring: _Ring, saved: Any, dout: Any) -> Any:
    queries, keys, out, lse = saved
    here = ring.located(queries, _rank(ring.call))
    after = online_softmax.outcome(out, lse, dout)
    zeros = online_softmax.zero_gradients(queries, keys)

    def visit(carry: Any, keys: Keys) -> Any:
        # Not added up in place: the sums of those before arrive during the visit.
        dq, of_keys = carry
        arriving = ring.send_on(of_keys)
        start = zeros._replace(dq=dq)
        dq, *own = online_softmax.fold_gradients(ring.rule, start, here, keys, after)
        return dq, jax.tree.map(jnp.add, arriving, tuple(own)) if of_keys else tuple(own)

    dq, of_keys = ring.tour(visit, (zeros.dq, ()), keys)
    dk, dv = ring.send_on(of_keys) if ring.call.num_ranks > 1 else of_keys
    dq, dk, dv = (x.astype(queries.q.dtype) for x in (dq, dk, dv))
    return Queries(dq, None, None), Keys(dk, dv, None, None)


_ring_attend.defvjp(_ring_forward, _ring_backward)


# Arguments


def _call(op: str, axis_name: Any, algorithm: str, timeout_s: float | None, moved_by: str) -> Call:
    return make_call(op, axis_name, algorithm=algorithm, timeout_s=timeout_s, plan_op=moved_by)


def _rule(
    call: Call,
    q: Any,
    k: Any,
    v: Any,
    segment_ids: Any,
    causal: Any,
    placement: Any,
    scale: Any,
    block_size: Any,
) -> Rule:
    """The checked arguments of an attention whose tokens are placed."""
    check_inputs(call.where, q, k, v, causal, segment_ids)
    length = q.shape[-3]
    check_placement(call.where, placement, call.num_ranks, length)
    chunk = length // 2 if placement == "zigzag" else None
    return make_rule(call.where, q, causal, scale, block_size, chunk if causal else None)


def _rank(call: Call) -> Any:
    return _primitive.rank_in_group(call) if call.axes else 0


def _positions(call: Call, placement: str, length: int, rank: Any) -> Any:
    return positions_of(rank, call.num_ranks, length, placement=placement)


def _repeat_heads(x: Any, num_ranks: int) -> Any:
    """k or v, with each head as often as it takes for num_ranks to divide the heads.

    K heads, N_heads = K G: N divides K G, so that N / gcd(K, N) divides G. After repetition, each
    rank's heads of q still belong to its own heads of k, in order.
    """
    heads = x.shape[-2]
    return jnp.repeat(x, num_ranks // math.gcd(heads, num_ranks), axis=-2)


def _check_ulysses_heads(call: Call, q: Any) -> None:
    heads, n = q.shape[-2], call.num_ranks
    if heads and heads % n == 0:
        return
    problem = f"q has {heads} heads, which {n} ranks do not divide; each takes as many heads."
    fix = f"Pad the heads to {max(1, -(-heads // n)) * n}, split the sequence over an axis that "
    fix += "divides them, or use ring_attention, which splits no heads."
    raise ValueError(errors.text(call.where, problem, fix))


def _check_attended(call: Call, out: Any, q: Any) -> None:
    """ValueError unless it is what an attention makes of q."""
    shape, needed = getattr(out, "shape", None), q.shape[:-1]
    if shape is not None and shape[:-1] == needed and len(shape) == q.ndim:
        return
    made = f"a {type(out).__name__}" if shape is None else f"an array of shape {shape}"
    problem = f"attention has made {made} of q of shape {q.shape}; "
    problem += f"[{', '.join(map(str, needed))}, E] is needed."
    fix = "It gets all tokens, and some of the heads, and returns a row for each of them."
    raise ValueError(errors.text(call.where, problem, fix))
