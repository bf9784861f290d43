"""A GPT over bytes, in plain JAX: parameters are a dict, the model is a function of it.

Pre-norm transformer: x += attention(norm(x)); x += mlp(norm(x)), the mlp being one of several, its
experts, if there are any. Below, B = sequences, T = tokens, C = width, H = heads, E = experts. What
a device of a mesh does otherwise than one that has all is in the operators (operators.py).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from gpt.operators import NOT_ROUTED, ONE_DEVICE, Operators, Routed

VOCABULARY = 256
BALANCE = 1e-2  # What the load balancing loss counts in the loss.

# How the mesh splits parameters, of a layer or others; what is not named, every device has whole.
SPECS = {
    "embedding": P("tensor", None),
    "qkv": P(None, "tensor"),
    "attention_out": P("tensor", None),
    "mlp_in": P(None, "tensor"),
    "mlp_bias": P("tensor"),
    "mlp_out": P("tensor", None),
    "expert_in": P("expert"),
    "expert_out": P("expert"),
    "head": P(None, "tensor"),
}


class Shape(NamedTuple):
    """The sizes of a model. Experts are smaller: top_k of them are as large as one mlp."""

    seq: int
    layers: int
    width: int
    heads: int
    experts: int = 0
    top_k: int = 0


def init(key: jax.Array, shape: Shape) -> dict:
    """Random parameters, float32. As in GPT-2, what adds to x is smaller by 1 / sqrt(2 layers), so
    that x keeps its size; a small head makes all bytes equally likely at first: loss log(256).

    Layers are alike, and their parameters stacked: the first dimension of each is that of layers.
    The columns of qkv count heads, then q, k, v, then the H-th part of the width: split over
    tensor ranks they are whole heads.
    """
    width = shape.width
    keys = iter(jax.random.split(key, 8))
    out_scale = (2 * shape.layers) ** -0.5

    def normal(scale, *sizes):
        return scale * jax.random.normal(next(keys), sizes)

    def stack(scale, *sizes):
        return normal(scale, shape.layers, *sizes)

    def mlp():
        return {
            "mlp_in": stack(width**-0.5, width, 4 * width),
            "mlp_bias": jnp.zeros((shape.layers, 4 * width)),
            "mlp_out": stack(out_scale * (4 * width) ** -0.5, 4 * width, width),
        }

    def experts():
        inner = 4 * width // shape.top_k
        return {
            "router": stack(width**-0.5, width, shape.experts),
            "expert_in": stack(width**-0.5, shape.experts, width, inner),
            "expert_out": stack(out_scale * inner**-0.5, shape.experts, inner, width),
        }

    return {
        "embedding": normal(1.0, VOCABULARY, width),
        "position": normal(0.1, shape.seq, width),
        "layers": {
            "attention_norm": jnp.ones((shape.layers, width)),
            "qkv": stack(width**-0.5, width, 3 * width),
            "attention_out": stack(out_scale * width**-0.5, width, width),
            "mlp_norm": jnp.ones((shape.layers, width)),
            **(experts() if shape.experts else mlp()),
        },
        "final_norm": jnp.ones(width),
        "head": normal(0.02, width, VOCABULARY),
    }


def losses(params, tokens, shape: Shape, operators: Operators = ONE_DEVICE, wrap=lambda f: f):
    """(mean cross entropy in nats per byte, Routed: losses summed over the layers, shares' mean).

    tokens: (inputs, targets), each [B, T]. `wrap` is as in `logits_of`.
    """
    inputs, targets = (part.astype(jnp.int32) for part in tokens)
    logits, routed = logits_of(params, inputs, shape, operators, wrap)
    routed = Routed(jnp.sum(routed.balance), jnp.mean(routed.dropped))
    return jnp.mean(operators.cross_entropy(logits, targets)), routed


def logits_of(params, tokens, shape: Shape, operators: Operators = ONE_DEVICE, wrap=lambda f: f):
    """[B, T] bytes -> ([B, T, 256] logits of the byte after each, Routed of [layers] each).

    wrap(block) is called for each layer instead of block(layer, x) -> (x, Routed), in a scan.
    """
    block = wrap(functools.partial(apply_block, shape=shape, operators=operators))
    x = operators.embed(tokens, params["embedding"])
    x = x + params["position"][operators.positions(tokens.shape[-1])]
    x, routed = jax.lax.scan(lambda x, layer: block(layer, x), x, params["layers"])
    return operators.columns(norm(x, params["final_norm"]), params["head"]), routed


def apply_block(layer: dict, x: jax.Array, shape: Shape, operators: Operators) -> tuple:
    """One layer: (x, Routed)."""
    x = x + attention(layer, norm(x, layer["attention_norm"]), shape.heads, operators)
    normed = norm(x, layer["mlp_norm"])
    if not shape.experts:
        return x + mlp(layer, normed, operators), NOT_ROUTED
    weights = (layer[name] for name in ("router", "expert_in", "expert_out"))
    y, routed = operators.experts(normed, *weights, shape.top_k)
    return x + y, routed


def attention(layer: dict, x: jax.Array, heads: int, operators=ONE_DEVICE) -> jax.Array:
    """[..., T, C] -> [..., T, C]."""
    qkv = operators.columns(x, layer["qkv"])
    qkv = qkv.reshape(*qkv.shape[:-1], -1, 3, x.shape[-1] // heads)
    mixed = operators.attend(*(qkv[..., i, :] for i in range(3)))
    return operators.rows(mixed.reshape(*mixed.shape[:-2], -1), layer["attention_out"])


def mlp(layer: dict, x: jax.Array, operators: Operators) -> jax.Array:
    """Two layers with a GELU between, four times as wide inside."""
    inner = operators.columns(x, layer["mlp_in"], b=layer["mlp_bias"])
    return operators.rows(jax.nn.gelu(inner), layer["mlp_out"])


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMS norm over the width; the mean square is taken in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.einsum("...c,...c->...", wide, wide)[..., None] / x.shape[-1]
    return x * jax.lax.rsqrt(mean_square + 1e-6).astype(x.dtype) * gain


def sample(params: dict, shape: Shape, prompt: bytes, count: int, seed: int) -> bytes:
    """`prompt` continued by `count` bytes, drawn at temperature 0.7, on one device."""
    params = jax.tree.map(jnp.asarray, params)
    window = jnp.zeros(shape.seq, jnp.uint8)
    prompt = prompt[-shape.seq :]
    window = window.at[: len(prompt)].set(jnp.frombuffer(prompt, jnp.uint8))

    def step(carry, key):
        window, used = carry
        logits = logits_of(params, window[None].astype(jnp.int32), shape)[0][0, used - 1]
        byte = jax.random.categorical(key, logits.astype(jnp.float32) / 0.7).astype(jnp.uint8)
        full = used == shape.seq
        window = jnp.where(full, jnp.roll(window, -1), window)
        used = jnp.where(full, used, used + 1)
        return (window.at[used - 1].set(byte), used), byte

    keys = jax.random.split(jax.random.key(seed), count)
    _, drawn = jax.jit(lambda: jax.lax.scan(step, (window, jnp.int32(len(prompt))), keys))()
    return prompt + bytes(drawn.tolist())
