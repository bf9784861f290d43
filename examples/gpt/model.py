"""A GPT over bytes, in plain JAX: parameters are a dict, the model is a function of it.

Pre-norm transformer: x += attention(norm(x)); x += mlp(norm(x)). Below, T = sequence, C = width,
H = heads, D = C / H; there is no batch dimension (see `loss`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

VOCABULARY = 256


class Shape(NamedTuple):
    """The sizes of a model."""

    seq: int
    layers: int
    width: int
    heads: int


def init(key: jax.Array, shape: Shape) -> dict:
    """Random parameters, float32. As in GPT-2, what adds to x is smaller by 1 / sqrt(2 layers), so
    that x keeps its size; a small head makes all bytes equally likely at first: loss log(256).
    """
    width = shape.width
    keys = iter(jax.random.split(key, 3 + 4 * shape.layers))
    out_scale = (2 * shape.layers) ** -0.5

    def normal(rows, columns, scale):
        return scale * jax.random.normal(next(keys), (rows, columns))

    def layer():
        return {
            "attention_norm": jnp.ones(width),
            "qkv": normal(width, 3 * width, width**-0.5),
            "attention_out": normal(width, width, out_scale * width**-0.5),
            "mlp_norm": jnp.ones(width),
            "mlp_in": normal(width, 4 * width, width**-0.5),
            "mlp_bias": jnp.zeros(4 * width),
            "mlp_out": normal(4 * width, width, out_scale * (4 * width) ** -0.5),
        }

    return {
        "embedding": normal(VOCABULARY, width, 1.0),
        "position": normal(shape.seq, width, 0.1),
        "layers": [layer() for _ in range(shape.layers)],
        "final_norm": jnp.ones(width),
        "head": normal(width, VOCABULARY, 0.02),
    }


def loss(params: dict, tokens: jax.Array, heads: int) -> jax.Array:
    """Mean cross entropy, in nats per byte, of predicting tokens[:, 1:] from what precedes."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = jax.vmap(functools.partial(logits_of, params, heads=heads))(inputs)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(log_probs, targets[..., None].astype(jnp.int32), axis=-1)
    return -jnp.mean(picked)


def logits_of(params: dict, tokens: jax.Array, heads: int) -> jax.Array:
    """[T] bytes -> [T, 256] logits of the byte after each."""
    x = params["embedding"][tokens.astype(jnp.int32)] + params["position"][: tokens.shape[0]]
    for layer in params["layers"]:
        x = x + attention(layer, norm(x, layer["attention_norm"]), heads)
        x = x + mlp(layer, norm(x, layer["mlp_norm"]))
    return norm(x, params["final_norm"]) @ params["head"]


def attention(layer: dict, x: jax.Array, heads: int) -> jax.Array:
    """Each position looks at itself and the ones before it. [T, C] -> [T, C]."""
    length, width = x.shape
    q, k, v = jnp.moveaxis((x @ layer["qkv"]).reshape(length, 3, heads, -1), 1, 0)
    scores = jnp.einsum("qhd,khd->hqk", q, k) * (width // heads) ** -0.5
    past = jnp.tri(length, dtype=bool)
    weights = jax.nn.softmax(jnp.where(past, scores.astype(jnp.float32), -jnp.inf))
    mixed = jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v)
    return mixed.reshape(length, width) @ layer["attention_out"]


def mlp(layer: dict, x: jax.Array) -> jax.Array:
    """Two layers with a GELU between, four times as wide inside."""
    return jax.nn.gelu(x @ layer["mlp_in"] + layer["mlp_bias"]) @ layer["mlp_out"]


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMS norm over the width; the mean square is taken in float32."""
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6).astype(x.dtype) * gain


def sample(params: dict, shape: Shape, prompt: bytes, count: int, seed: int) -> bytes:
    """`prompt` continued by `count` bytes, drawn at temperature 0.7, on one device."""
    params = jax.tree.map(jnp.asarray, jax.device_get(params))
    window = jnp.zeros(shape.seq, jnp.uint8)
    prompt = prompt[-shape.seq :]
    window = window.at[: len(prompt)].set(jnp.frombuffer(prompt, jnp.uint8))

    def step(carry, key):
        window, used = carry
        logits = logits_of(params, window, shape.heads)[used - 1]
        byte = jax.random.categorical(key, logits.astype(jnp.float32) / 0.7).astype(jnp.uint8)
        full = used == shape.seq
        window = jnp.where(full, jnp.roll(window, -1), window)
        used = jnp.where(full, used, used + 1)
        return (window.at[used - 1].set(byte), used), byte

    keys = jax.random.split(jax.random.key(seed), count)
    _, drawn = jax.jit(lambda: jax.lax.scan(step, (window, jnp.int32(len(prompt))), keys))()
    return prompt + bytes(drawn.tolist())
