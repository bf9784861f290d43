"""Memory per device of a training step, by ZeRO stage and number of devices, planned or measured.

    python scripts/measure_zero_memory.py [--layers 12] [--width 512] [--rows 4] [--json FILE]
    python scripts/measure_zero_memory.py --measured                                (Linux only)

A step of AdamW on a stack of residual blocks (two matrices of width x 4 width, a gain, a bias), the
batch of `rows` per device. Stage 0: all state on every device, jcoll.sync_gradients. Nothing runs:
the numbers are the compiled program's arguments, results and temporaries per device
(memory_analysis); the state is donated, so that what is updated in place counts once.

    peak = arguments + results - donated + temporaries

--measured: each step runs twice, in a process of its own, all devices in it. Its peak is by how
much the peak of the process's resident memory (VmHWM) exceeds what it had when the step was
compiled and nothing was placed, divided by the devices: state, gradients, temporaries and jcoll's
own buffers, as far as they are touched.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import functools
import json
import multiprocessing
import os
from pathlib import Path
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
    parser.add_argument("--measured", action="store_true", help="run, and measure the process")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    args = parser.parse_args()
    rows = measured(args) if args.measured else planned(args)
    show(rows)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"options": vars(args), "rows": rows}, f, indent=1)


def planned(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [plan(args, stage, n) for stage in STAGES for n in DEVICES]


def plan(args: argparse.Namespace, stage: int, num_devices: int) -> dict[str, Any]:
    """What one step takes on each of the devices, in bytes."""
    step, arguments = program(args, stage, num_devices)
    plan = step.lower(*arguments).compile().memory_analysis()
    assert plan is not None, "this platform does not tell what a program takes"
    sizes = {
        "arguments": plan.argument_size_in_bytes,
        "results": plan.output_size_in_bytes,
        "donated": plan.alias_size_in_bytes,
        "temporaries": plan.temp_size_in_bytes,
    }
    peak = sizes["arguments"] + sizes["results"] - sizes["donated"] + sizes["temporaries"]
    return {"stage": stage, "devices": num_devices, **sizes, "peak": peak}


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The peaks of running steps, one process each: memory that a process has once used it keeps
    for its next program, whose growth would be too small."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        return [
            {"stage": stage, "devices": n, "peak": pool.submit(growth, args, stage, n).result()}
            for stage in STAGES
            for n in DEVICES
        ]


def growth(args: argparse.Namespace, stage: int, num_devices: int) -> float:
    """Bytes per device by which this process grows in the first two steps."""
    tiny = argparse.Namespace(layers=2, width=8 * num_devices, rows=1)
    run_steps(*program(tiny, stage, num_devices))  # Starts threads, and jcoll.
    step, arguments = program(args, stage, num_devices)
    compiled = step.lower(*arguments).compile()
    ctypes.CDLL(None).malloc_trim(0)  # Or what the compiler gave back would hide as much of ours.
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew.
    before = resident_nbytes("VmRSS")
    run_steps(compiled, arguments)
    return (resident_nbytes("VmHWM") - before) / num_devices


def run_steps(step: Any, arguments: tuple) -> None:
    """Two of them: the second finds what the first has left, as all later ones do."""
    params, state, batch = jax.block_until_ready(jax.tree.map(ones, arguments))
    for _ in range(2):
        params, state = jax.block_until_ready(step(params, state, batch))


def ones(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.ones(x.shape, x.dtype, device=x.sharding)


def resident_nbytes(name: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def program(
    args: argparse.Namespace, stage: int, num_devices: int
) -> tuple[jax.stages.Wrapped, tuple]:
    """(params, state, batch) -> (params, state), and the types of its arguments."""
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
    return jax.jit(step, donate_argnums=(0, 1)), arguments


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
    columns = tuple(rows[0])[2:]
    whole = {row["devices"]: row["peak"] for row in rows if row["stage"] == 0}
    print(f"{'stage':>5} {'devices':>7}", *(f"{c:>11}" for c in columns), f"{'of stage 0':>11}")
    for row in rows:
        mib = (f"{row[c] / 2**20:11.1f}" for c in columns)
        share = row["peak"] / whole[row["devices"]]
        print(f"{row['stage']:>5} {row['devices']:>7}", *mib, f"{share:11.3f}")


if __name__ == "__main__":
    main()
