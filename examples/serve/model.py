"""A GPT that decodes with a key-value cache, tensor parallel, in plain JAX and jcoll.layers.

Everything here runs on one rank of N, inside jax.shard_map, on its part of the weights: of the
heads, of the inner width, of the vocabulary. Below, B = batch, T = new tokens, S = size of the
cache, C = width, H = heads / N, D = width / heads. What a rank passes on to others are two sums
a layer, one for the embedding, and its best guess at the next token.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from gpt.model import norm
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll import layers

AXIS = "tensor"


class Shape(NamedTuple):
    """The sizes of a model."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int

    @property
    def head_size(self) -> int:
        """D."""
        return self.width // self.heads


def init(key: jax.Array, shape: Shape, num_ranks: int, dtype: str) -> dict:
    """Random weights, all of them; the vocabulary padded to a multiple of the ranks.

    The columns of qkv count heads, then q, k, v, then D: split over the ranks they are whole heads.
    """
    width, words = shape.width, -(-shape.vocabulary // num_ranks) * num_ranks
    keys = iter(jax.random.split(key, 3 + 4 * shape.layers))

    def normal(rows, columns, scale):
        return (scale * jax.random.normal(next(keys), (rows, columns))).astype(dtype)

    def layer():
        return {
            "attention_norm": jnp.ones(width, dtype),
            "qkv": normal(width, 3 * width, width**-0.5),
            "attention_out": normal(width, width, width**-0.5),
            "mlp_norm": jnp.ones(width, dtype),
            "mlp_in": normal(width, 4 * width, width**-0.5),
            "mlp_bias": jnp.zeros(4 * width, dtype),
            "mlp_out": normal(4 * width, width, (4 * width) ** -0.5),
        }

    return {
        "embedding": normal(words, width, 1.0),
        "position": normal(shape.context, width, 0.1),
        "layers": [layer() for _ in range(shape.layers)],
        "final_norm": jnp.ones(width, dtype),
        "head": normal(width, words, width**-0.5),
    }


def weight_specs(shape: Shape) -> dict:
    """How the weights are split: by columns where a layer begins, by rows where it ends."""
    columns, rows, whole = P(None, AXIS), P(AXIS, None), P()
    layer = {
        "attention_norm": whole,
        "qkv": columns,
        "attention_out": rows,
        "mlp_norm": whole,
        "mlp_in": columns,
        "mlp_bias": P(AXIS),
        "mlp_out": rows,
    }
    return {
        "embedding": rows,
        "position": whole,
        "layers": [layer] * shape.layers,
        "final_norm": whole,
        "head": columns,
    }


def empty_cache(shape: Shape, batch: int, dtype: str) -> list:
    """(keys [B, heads, D, S], values [B, heads, S, D]) of each layer: as the products read them, so
    that no step copies a cache to transpose it.
    """
    keys = batch, shape.heads, shape.head_size, shape.context
    values = batch, shape.heads, shape.context, shape.head_size
    return [(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(shape.layers)]


CACHE_SPEC = P(None, AXIS)


def step(
    params: dict,
    cache: list,
    tokens: jax.Array,
    position: jax.Array,
    *,
    shape: Shape,
    options: dict,
) -> tuple[list, jax.Array, jax.Array]:
    """(cache, next tokens [B, 1], their position) after tokens [B, T], the first at `position`.

    `options` go to all collectives: the axis, and the algorithm.
    """
    x = layers.vocab_parallel_embedding(tokens, params["embedding"], **options)
    count = tokens.shape[1]
    x = x + jax.lax.dynamic_slice_in_dim(params["position"], position, count)[None]
    new_cache = []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        normed = norm(x, layer["attention_norm"])
        mixed, new = attention(layer, normed, keys, values, position, shape, options)
        x = x + mixed
        x = x + mlp(layer, norm(x, layer["mlp_norm"]), options)
        new_cache.append(new)
    last = norm(x[:, -1], params["final_norm"])
    logits = layers.column_parallel(last, params["head"], **options)
    return new_cache, likeliest(logits, shape.vocabulary, options)[:, None], position + count


def attention(
    layer: dict,
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    shape: Shape,
    options: dict,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """(what the T new tokens take from those before and themselves, the cache with them)."""
    batch, count, _ = x.shape
    qkv = layers.column_parallel(x, layer["qkv"], **options)
    qkv = jnp.moveaxis(qkv.reshape(batch, count, -1, 3, shape.head_size), 1, 3)
    q, k, v = (qkv[:, :, i] for i in range(3))  # [B, H, T, D]
    keys = jax.lax.dynamic_update_slice_in_dim(keys, k.swapaxes(2, 3), position, 3)
    values = jax.lax.dynamic_update_slice_in_dim(values, v, position, 2)
    # Else XLA updates a copy for the product, and another one for the result.
    keys, values = jax.lax.optimization_barrier((keys, values))
    scores = jnp.einsum("bhqd,bhdk->bhqk", q, keys) * shape.head_size**-0.5
    past = jnp.arange(shape.context)[None] <= position + jnp.arange(count)[:, None]
    weights = jax.nn.softmax(jnp.where(past, scores.astype(jnp.float32), -jnp.inf))
    mixed = jnp.einsum("bhqk,bhkd->bqhd", weights.astype(values.dtype), values)
    out = layers.row_parallel(mixed.reshape(batch, count, -1), layer["attention_out"], **options)
    return out, (keys, values)


def mlp(layer: dict, x: jax.Array, options: dict) -> jax.Array:
    """Two layers with a GELU between, four times as wide inside."""
    inner = layers.column_parallel(x, layer["mlp_in"], b=layer["mlp_bias"], **options)
    return layers.row_parallel(jax.nn.gelu(inner), layer["mlp_out"], **options)


def likeliest(logits: jax.Array, vocabulary: int, options: dict) -> jax.Array:
    """[B, V / N] -> [B], the word of the largest logit, the first of several.

    Two numbers of each rank are gathered, its largest logit and that one's word, not the logits.
    Words travel as the floats that they fit in exactly, so that one collective carries both.
    """
    first = jax.lax.axis_index(AXIS) * logits.shape[-1]
    words = first + jnp.arange(logits.shape[-1])
    logits = jnp.where(words < vocabulary, logits.astype(jnp.float32), -jnp.inf)
    best = jnp.argmax(logits, axis=-1)
    word = (first + best).astype(jnp.float32)
    largest = jnp.max(logits, axis=-1)
    gather = functools.partial(jcoll.all_gather, **options)
    largest, word = jnp.moveaxis(gather(jnp.stack([largest, word])), 1, 0)
    winner = jnp.argmax(largest, axis=0)
    return jnp.take_along_axis(word, winner[None], axis=0)[0].astype(jnp.int32)
