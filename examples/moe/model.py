"""The GPT of gpt/model.py with a mixture of experts instead of each MLP.

x += attention(norm(x)); x += moe(norm(x)). B = sequences of this rank, T = sequence, C = width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from gpt.model import VOCABULARY, attention, norm
from jax.sharding import PartitionSpec as P

from jcoll import layers

EXPERT_LEAVES = ("w_in", "w_out")
BALANCE = 1e-2  # What the load balancing loss counts in the loss.


class Shape(NamedTuple):
    """The sizes of a model."""

    seq: int
    layers: int
    width: int
    heads: int
    hidden: int
    experts: int


def init(key: jax.Array, shape: Shape) -> dict:
    """Random parameters, float32, scaled as in gpt/model.py; an expert is a smaller MLP."""
    width, hidden, experts = shape.width, shape.hidden, shape.experts
    keys = iter(jax.random.split(key, 3 + 5 * shape.layers))
    out_scale = (2 * shape.layers) ** -0.5

    def normal(scale, *sizes):
        return scale * jax.random.normal(next(keys), sizes)

    def layer():
        return {
            "attention_norm": jnp.ones(width),
            "qkv": normal(width**-0.5, width, 3 * width),
            "attention_out": normal(out_scale * width**-0.5, width, width),
            "moe_norm": jnp.ones(width),
            "router": normal(width**-0.5, width, experts),
            "w_in": normal(width**-0.5, experts, width, hidden),
            "w_out": normal(out_scale * hidden**-0.5, experts, hidden, width),
        }

    return {
        "embedding": normal(1.0, VOCABULARY, width),
        "position": normal(0.1, shape.seq, width),
        "layers": [layer() for _ in range(shape.layers)],
        "final_norm": jnp.ones(width),
        "head": normal(0.02, width, VOCABULARY),
    }


def specs(params: dict) -> dict:
    """Experts over the axis of that name; the rest everywhere."""

    def spec(path, _):
        return P("expert") if path[-1].key in EXPERT_LEAVES else P()

    return jax.tree_util.tree_map_with_path(spec, params)


def losses(params: dict, tokens: jax.Array, heads: int, moe) -> tuple:
    """(mean cross entropy, sum of the layers' load balancing losses, rows dropped).

    tokens: [B, T + 1] bytes. moe(x, router, (w_in, w_out)) -> (y, aux).
    """
    inputs, targets = (t.astype(jnp.int32) for t in (tokens[:, :-1], tokens[:, 1:]))
    x = params["embedding"][inputs] + params["position"][: inputs.shape[1]]
    balance, dropped = jnp.float32(0), jnp.int32(0)
    for layer in params["layers"]:
        attend = jax.vmap(functools.partial(attention, layer, heads=heads))
        x = x + attend(norm(x, layer["attention_norm"]))
        experts = tuple(layer[name] for name in EXPERT_LEAVES)
        y, aux = moe(norm(x, layer["moe_norm"]), layer["router"], experts)
        x, balance = x + y, balance + aux.load_balancing_loss
        dropped = dropped + aux.dropped
    logits = norm(x, params["final_norm"]) @ params["head"]
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)
    return -jnp.mean(picked), balance, dropped


def make_moe(args):
    """The layer that the flags describe."""
    return functools.partial(
        layers.moe_layer,
        axis_name="expert",
        num_experts=args.experts,
        top_k=args.top_k,
        mode=args.mode,
        capacity_factor=args.capacity_factor if args.mode == "capacity" else None,
        balance_axes=("data", "expert"),
    )
