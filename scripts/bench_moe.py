"""Times a mixture of experts over 8 virtual CPU devices: jcoll's dropless layer beside the padded
one that jax.lax offers, on a router whose experts are as popular as Zipf's law has it.

    python scripts/bench_moe.py [--tokens 1024] [--experts 16,32,64] [--json FILE]

Both compute the same router and the same two-layer experts. The padded one, written out below,
sends blocks of capacity_factor times their mean height by lax.all_to_all and drops what does not
fit; the dropless one sends the rows that exist. `exchange` has the experts left out: the rows come
back as they went. MiB: what one rank sends in one
exchange, in the mean: the rows that jcoll's counters saw move, and the blocks by their shape.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll.bench import measure
from jcoll.layers import moe_layer

AXIS = "expert"
SPECS = (P(AXIS), P(), P(AXIS), P(AXIS))  # x, router_w, w_in, w_out


def main() -> None:
    args = parse()
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    rows = []
    for num_experts in args.experts:
        arrays = make_arrays(args, num_experts, mesh)
        for what in ("exchange", "layer"):
            for direction in ("forward", "both ways"):
                rows.append(measure_one(args, num_experts, what, direction, arrays, mesh))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank [%(default)s]")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=lambda s: [int(i) for i in s.split(",")], default=[64])
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent [%(default)s]")
    parser.add_argument("--capacity-factor", type=float, default=2.0)
    parser.add_argument("--room", type=float, help="output_size in mean loads [any routing]")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each row [%(default)s]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    return parser.parse_args()


def make_arrays(args: argparse.Namespace, num_experts: int, mesh: jax.sharding.Mesh) -> list:
    """x, router_w, w_in, w_out. The first feature of x is 1: its weight is an expert's popularity,
    to which the others add noise of the standard deviation that a Gumbel variable has."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(args.tokens * mesh.size, args.width))
    x[:, 0] = 1
    router_w = rng.normal(size=(args.width, num_experts)) * 1.28 / math.sqrt(args.width)
    popularity = -args.zipf * np.log(np.arange(1, num_experts + 1))
    router_w[0] = rng.permutation(popularity)
    w_in = rng.normal(size=(num_experts, args.width, args.hidden)) / math.sqrt(args.width)
    w_out = rng.normal(size=(num_experts, args.hidden, args.width)) / math.sqrt(args.hidden)
    return [
        jax.device_put(a.astype(np.float32), NamedSharding(mesh, spec))
        for a, spec in zip((x, router_w, w_in, w_out), SPECS, strict=True)
    ]


def ours(args: argparse.Namespace, num_experts: int, what: str, *arrays: jax.Array) -> Any:
    x, router_w, w_in, w_out = arrays
    size = None if args.room is None else math.ceil(args.room * args.tokens * args.top_k)
    y, aux = moe_layer(
        x,
        router_w,
        (w_in, w_out) if what == "layer" else lambda rows, sizes: rows,
        axis_name=AXIS,
        num_experts=num_experts,
        top_k=args.top_k,
        output_size=size,
    )
    return y, aux.dropped, aux.load_balancing_loss


def padded(args: argparse.Namespace, num_experts: int, what: str, *arrays: jax.Array) -> Any:
    """The layer as it is written with jax.lax: blocks of equal height."""
    x, router_w, w_in, w_out = arrays
    n, (num_tokens, width), k = jax.device_count(), x.shape, args.top_k
    capacity = block_height(args, num_experts)
    probs = jax.nn.softmax(x @ router_w)
    weights, experts = jax.lax.top_k(probs, k)
    weights = weights / weights.sum(1, keepdims=True)
    flat = experts.T.reshape(-1)
    order = jnp.argsort(flat)
    ids = jnp.arange(num_experts)
    counts = (flat[:, None] == ids).sum(0)
    place = jnp.argsort(order) - (jnp.cumsum(counts) - counts)[flat]
    slot = jnp.where(place < capacity, flat * capacity + place, num_experts * capacity)
    blocks = jnp.zeros((num_experts * capacity, width)).at[slot].set(jnp.tile(x, (k, 1)))
    blocks = blocks.reshape(n, num_experts // n, capacity, width)
    blocks = jax.lax.all_to_all(blocks, AXIS, 0, 0).swapaxes(0, 1)
    if what == "layer":  # blocks: [experts here, n, capacity, width]
        rows = blocks.reshape(num_experts // n, n * capacity, width)
        hidden = jax.nn.gelu(jnp.einsum("erw,ewh->erh", rows, w_in))
        blocks = jnp.einsum("erh,ehw->erw", hidden, w_out).reshape(blocks.shape)
    blocks = jax.lax.all_to_all(blocks.swapaxes(0, 1), AXIS, 0, 0).reshape(-1, width)
    picked = blocks.at[slot].get(mode="fill", fill_value=0).reshape(k, num_tokens, width)
    y = jnp.einsum("tj,jtw->tw", weights, picked)
    chosen, prob = jax.lax.pmean((counts / (k * num_tokens), probs.mean(0)), AXIS)
    return y, jnp.maximum(counts - capacity, 0).sum(), num_experts * jnp.vdot(chosen, prob)


def block_height(args: argparse.Namespace, num_experts: int) -> int:
    return math.ceil(args.capacity_factor * args.tokens * args.top_k / num_experts)


def program(
    layer: Callable[..., Any], direction: str, arrays: list, mesh: jax.sharding.Mesh
) -> Callable[[], Any]:
    """(y, dropped) of the layer, or with its gradients instead of y, compiled."""

    def loss(*local: jax.Array) -> Any:
        y, dropped, balance = layer(*local)
        return jnp.square(y).sum() + balance, dropped

    def step(*local: jax.Array) -> Any:
        if direction == "forward":
            y, dropped, _ = layer(*local)
            return y, jax.lax.psum(dropped, AXIS)
        grads, dropped = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*local)
        return grads, jax.lax.psum(dropped, AXIS)

    out = P(AXIS) if direction == "forward" else SPECS
    body = jax.shard_map(step, mesh=mesh, in_specs=SPECS, out_specs=(out, P()))
    compiled = jax.jit(body).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


def sent_nbytes(call: Callable[[], Any]) -> int:
    """The rows that one exchange really moved, of one rank in the mean."""
    jcoll.reset_metrics()
    call()
    exchanges = (row for row in jcoll.metrics() if row["op"] == "ragged_all_to_all")
    return min(row["row_bytes"] for row in exchanges) // jax.device_count()


def measure_one(
    args: argparse.Namespace,
    num_experts: int,
    what: str,
    direction: str,
    arrays: list,
    mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
    left = program(partial(ours, args, num_experts, what), direction, arrays, mesh)
    right = program(partial(padded, args, num_experts, what), direction, arrays, mesh)
    dropped = [int(call()[1]) for call in (left, right)]
    nbytes = sent_nbytes(left), num_experts * block_height(args, num_experts) * args.width * 4
    timing = measure.compare(
        left, right, warmup=1, calls=None, repeats=args.repeats, seconds=args.seconds
    )
    sides = zip((timing.ours_s, timing.theirs_s), nbytes, dropped, strict=True)
    text = "  ".join(f"{t * 1e3:7.1f} ms {b / 2**20:4.1f} MiB {d:6} dropped" for t, b, d in sides)
    print(
        f"{num_experts:3} experts {what:8} {direction:9} {text}"
        f"  ratio {timing.ratio:5.2f} ({timing.ratio_low:.2f}-{timing.ratio_high:.2f})",
        flush=True,
    )
    return {
        "experts": num_experts,
        "what": what,
        "direction": direction,
        "dropless_ms": timing.ours_s * 1e3,
        "padded_ms": timing.theirs_s * 1e3,
        "ratio": timing.ratio,
        "nbytes": nbytes,
        "rows_dropped": dropped,
    }


if __name__ == "__main__":
    main()
