"""Memory per device of a training step, by ZeRO stage and number of devices, as XLA plans it.

    python scripts/measure_zero_memory.py [--layers 12] [--width 512] [--rows 4] [--json FILE]

A step of AdamW on a stack of residual blocks (two matrices of width x 4 width, a gain, a bias), the
batch of `rows` per device. Stage 0: all state on every device, jcoll.sync_gradients. Nothing runs:
the numbers are the compiled program's arguments, results and temporaries per device
(memory_analysis); the state is donated, so that what is updated in place counts once.

    peak = arguments + results - donated + temporaries
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll.layers import zero

DEVICES = (1, 2, 4, 8)
STAGES = (0, 1, 2, 3)
TX = optax.adamw(1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4, help="of the batch, per device")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    args = parser.parse_args()
    rows = [measure(args, stage, n) for stage in STAGES for n in DEVICES]
    show(rows)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"options": vars(args), "rows": rows}, f, indent=1)


def measure(args: argparse.Namespace, stage: int, num_devices: int) -> dict[str, Any]:
    """What one step takes on each of the devices, in bytes."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    layout = zero.layouts(parameter_shapes(args), num_devices, keep_dims=1, split=stage > 0)
    state = jax.eval_shape(TX.init, zero.shapes(layout))
    param_specs = zero.specs(layout, "data") if stage == 3 else P()
    state_specs = zero.specs(zero.layouts_of_state(state, layout), "data")
    in_specs = (param_specs, state_specs, P("data"))
    step = jax.shard_map(
        functools.partial(train, stage=stage, layout=layout),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=in_specs[:2],
    )
    params = zero.shapes(layout) if stage == 3 else parameter_shapes(args)
    batch = jax.ShapeDtypeStruct((args.rows * num_devices, args.width), jnp.float32)
    arguments = with_sharding((params, state, batch), in_specs, mesh)
    plan = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()
    assert plan is not None, "this platform does not tell what a program takes"
    sizes = {
        "arguments": plan.argument_size_in_bytes,
        "results": plan.output_size_in_bytes,
        "donated": plan.alias_size_in_bytes,
        "temporaries": plan.temp_size_in_bytes,
    }
    peak = sizes["arguments"] + sizes["results"] - sizes["donated"] + sizes["temporaries"]
    return {"stage": stage, "devices": num_devices, **sizes, "peak": peak}


def parameter_shapes(args: argparse.Namespace) -> dict[str, jax.ShapeDtypeStruct]:
    """The stack: a leading dimension of layers in every leaf."""
    width, hidden = args.width, 4 * args.width
    shapes = {"up": (width, hidden), "bias": (hidden,), "down": (hidden, width), "gain": (width,)}
    return {
        name: jax.ShapeDtypeStruct((args.layers, *shape), jnp.float32)
        for name, shape in shapes.items()
    }


def with_sharding(tree: Any, specs: Any, mesh: Mesh) -> Any:
    def placed(spec: P, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(placed, specs, tree, is_leaf=lambda s: isinstance(s, P))


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    y = jnp.tanh((x * p["gain"]) @ p["up"] + p["bias"]) @ p["down"]
    return x + y


def loss(params: Any, x: jax.Array, apply: Any) -> jax.Array:
    x = jax.lax.scan(lambda x, p: (apply(p, x), None), x, params)[0]
    return jnp.mean(x * x)


def train(params: Any, state: Any, x: jax.Array, *, stage: int, layout: Any) -> Any:
    """One rank's step in each stage, as the user writes it."""
    if stage == 0:
        grads = jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), x, block)
        updates, state = TX.update(jcoll.sync_gradients(grads, "data"), state, params)
        return optax.apply_updates(params, updates), state
    if stage == 1:
        grads = jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), x, block)
    elif stage == 2:

        def redirected(pair: Any, x: jax.Array) -> jax.Array:
            whole, shards = pair
            return block(zero.redirect_gradients(whole, shards, layout, "data"), x)

        shards = zero.shard(params, layout, "data")
        local = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda s: loss((local, s), x, redirected))(shards)
    else:
        regathered = zero.regathered(block, layout, "data", prevent_cse=False)
        grads = jax.grad(loss)(params, x, regathered)
    return zero.update(TX, grads, state, params, layout, "data", stage=stage)


def show(rows: list[dict[str, Any]]) -> None:
    """A table in MiB; the last column beside the step that keeps everything on every device."""
    columns = ("arguments", "results", "donated", "temporaries", "peak")
    whole = {row["devices"]: row["peak"] for row in rows if row["stage"] == 0}
    print(f"{'stage':>5} {'devices':>7}", *(f"{c:>11}" for c in columns), f"{'of stage 0':>11}")
    for row in rows:
        mib = (f"{row[c] / 2**20:11.1f}" for c in columns)
        share = row["peak"] / whole[row["devices"]]
        print(f"{row['stage']:>5} {row['devices']:>7}", *mib, f"{share:11.3f}")


if __name__ == "__main__":
    main()
