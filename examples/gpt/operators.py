"""What the model is made of, by kind of parallelism: each replaces operators of one device.

    kind       splits                               operators
    tensor     weights: columns, then rows          embed, columns, rows, cross_entropy
               with --sequence-parallel, tokens     and positions
    context    tokens of a sequence                 attend, positions
    expert     experts; each rank its own tokens    experts

The data axis needs none: it only has other sequences. What becomes of gradients is in ranks.py.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import layers

TOKEN_AXES = ("data", "expert", "context")
"""The mesh axes along which devices have other tokens."""


class Routed(NamedTuple):
    """What a layer's router did, beside the result: float32 scalars."""

    balance: Any  # The load balancing loss, of all tokens of the batch.
    dropped: Any  # The share of this device's (token, expert) pairs that found no room.


NOT_ROUTED = Routed(np.float32(0), np.float32(0))


class Operators(NamedTuple):
    """B = sequences, T = tokens, C = width, H = heads, D = C / H: those of this device."""

    positions: Callable  # T -> int [T], where in the text the tokens are
    embed: Callable  # ids [B, T], table [256, C] -> [B, T, C]
    columns: Callable  # x [B, T, C], w [C, M], b [M] or None -> [B, T, M]
    attend: Callable  # q, k, v [B, T, H, D] -> [B, T, H, D], causal
    rows: Callable  # x [B, T, M], w [M, C] -> [B, T, C]
    experts: Callable  # x [B, T, C], router, expert_in, expert_out, k -> ([B, T, C], Routed)
    cross_entropy: Callable  # logits [B, T, 256], targets [B, T] -> float32 [B, T]


def attend(q, k, v):
    """Each position looks at itself and the ones before it."""
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
    past = jnp.tri(q.shape[-3], dtype=bool)
    weights = jax.nn.softmax(jnp.where(past, scores.astype(jnp.float32), -jnp.inf))
    return jnp.einsum("...hqk,...khd->...qhd", weights.astype(v.dtype), v)


def columns(x, w, b=None):
    """A dense layer."""
    return x @ w if b is None else x @ w + b


def experts(x, router, expert_in, expert_out, top_k):
    """Every token through every expert; all but its top k count nothing."""
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens.astype(jnp.float32) @ router.astype(jnp.float32)
    routing = layers.top_k_router(logits, top_k=top_k)
    chosen = jax.nn.one_hot(routing.experts, router.shape[1]) * routing.weights[..., None]
    inner = jax.nn.gelu(jnp.einsum("tc,ech->teh", tokens, expert_in))
    y = jnp.einsum("teh,ehc,te->tc", inner, expert_out, chosen.sum(1).astype(x.dtype))
    return y.reshape(x.shape), Routed(routing.load_balancing_loss, jnp.float32(0))


def cross_entropy(logits, targets):
    """In nats, of each token."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


ONE_DEVICE = Operators(
    positions=jnp.arange,
    embed=lambda ids, table: table[ids],
    columns=columns,
    attend=attend,
    rows=columns,
    experts=experts,
    cross_entropy=cross_entropy,
)


def on_mesh(args) -> Operators:
    """The operators that the flags ask for, inside jax.shard_map over the axes of args.mesh."""
    operators = ONE_DEVICE
    if "context" in args.mesh:
        operators = context_parallel(operators, args)
    if "expert" in args.mesh:
        operators = expert_parallel(operators, args)
    if "tensor" in args.mesh:
        operators = tensor_parallel(operators, args)
    return operators


def loss_axes(args) -> tuple[str, ...]:
    """The axes over which the tokens of the batch, and of the loss, are split."""
    return tuple(axis for axis in TOKEN_AXES if axis in args.mesh)


def token_axes(args) -> tuple[str, ...]:
    """The same between the tensor-parallel parts, where --sequence-parallel splits them further."""
    return (*loss_axes(args), "tensor") if args.sequence_parallel else loss_axes(args)


def context_parallel(operators: Operators, args) -> Operators:
    """A part of each sequence on each rank; for the ring an early and a late one."""
    attentions = {
        "ring": functools.partial(layers.ring_attention, placement=placement(args)),
        "ulysses": layers.ulysses_attention,
        "gathered": layers.all_gather_attention,
    }

    def positions(length):
        rank = jax.lax.axis_index("context")
        return layers.positions_of(rank, args.mesh["context"], length, placement=placement(args))

    attend = functools.partial(attentions[args.attention], axis_name="context", causal=True)
    return operators._replace(positions=positions, attend=attend)


def placement(args) -> str:
    """Which tokens of a sequence are where along the context axis."""
    return "zigzag" if args.attention == "ring" else "contiguous"


def expert_parallel(operators: Operators, args) -> Operators:
    """Tokens travel to their experts and back; the balance is that of all tokens of the batch.

    Tensor ranks have all of each expert. With --sequence-parallel each of them routes its own part
    of the tokens; without, all do the same.
    """
    capacity = args.expert_mode == "capacity"
    room = {"capacity_factor": args.capacity_factor} if capacity else {}

    def experts(x, router, expert_in, expert_out, top_k):
        y, aux = layers.moe_layer(
            x,
            router,
            (expert_in, expert_out),
            axis_name="expert",
            num_experts=args.experts,
            top_k=top_k,
            mode=args.expert_mode,
            **room,
            balance_axes=token_axes(args),
        )
        pairs = top_k * x.size // x.shape[-1]
        return y, Routed(aux.load_balancing_loss, aux.dropped / jnp.float32(pairs))

    return operators._replace(experts=experts)


def tensor_parallel(operators: Operators, args) -> Operators:
    """A part of the heads, of the inner width and of the vocabulary on each rank."""
    sequence = {"axis_name": "tensor", "sequence_parallel": args.sequence_parallel}
    dense = {**sequence, "overlap": args.overlap and args.sequence_parallel}

    def positions(length):
        of_all = operators.positions(length)
        if not args.sequence_parallel:
            return of_all
        part = length // args.mesh["tensor"]
        return jax.lax.dynamic_slice(of_all, [part * jax.lax.axis_index("tensor")], [part])

    return operators._replace(
        positions=positions,
        embed=functools.partial(layers.vocab_parallel_embedding, **sequence),
        columns=functools.partial(layers.column_parallel, **dense),
        rows=functools.partial(layers.row_parallel, **dense),
        cross_entropy=functools.partial(layers.vocab_parallel_cross_entropy, axis_name="tensor"),
    )
