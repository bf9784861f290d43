"""Whether collectives run beside the products that they are meant to hide behind, on CPU devices.

    python scripts/measure_overlap.py [--devices 2] [--width 512] [--rows 1024] [--json FILE]

buckets: a stack of layers whose gradients are averaged by `sync_in_backward`, by `sync_gradients`
after the backward pass, and by that with all leaves in one bucket. From a trace of one run
(jax.profiler): for each all_reduce, in the order of their launch, the share of the backward pass's
time in products that begins after it.

ring: milliseconds of `all_gather_matmul` and `matmul_reduce_scatter` (`overlap`), of the collective
followed or preceded by one product (`plain`), and of the collective and the product alone. Hidden
is what `overlap` saves of their sum, as a share of the collective; below 0: it costs more.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll import layers

AXIS = "i"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6, help="of the stack [%(default)s]")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1024, help="of each device [%(default)s]")
    parser.add_argument("--calls", type=int, default=15, help="the median counts [%(default)s]")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()[: args.devices]), (AXIS,))
    report = {"buckets": buckets(args, mesh), "ring": ring(args, mesh)}
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"options": vars(args), **report}, f, indent=1)


def buckets(args: argparse.Namespace, mesh: Mesh) -> dict[str, list[float]]:
    ws = jnp.ones((args.layers, args.width, args.width)) / args.width
    x = jnp.ones((args.rows * args.devices, args.width))
    results = {}
    for name in ("sync_in_backward", "sync_gradients", "one bucket"):
        run = jax.shard_map(
            gradients(name), mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False
        )
        compiled = jax.jit(run).lower(list(ws), x).compile()
        inputs = placed((list(ws), x), (P(), P(AXIS)), mesh)
        for _ in range(3):
            jax.block_until_ready(compiled(*inputs))
        results[name] = products_after_launch(compiled, inputs)
        print(f"{name:17} products still to begin:", *(f"{s:4.0%}" for s in results[name]))
    return results


def gradients(name: str) -> Callable[..., Any]:
    def step(ws: list, x: jax.Array) -> Any:
        def loss(ws: list) -> jax.Array:
            y = x
            for w in ws:
                w = layers.sync_in_backward(w, AXIS) if name == "sync_in_backward" else w
                y = jnp.tanh(y @ w)
            return y.sum()

        grads = jax.grad(loss)(ws)
        if name == "sync_in_backward":
            return grads
        join: dict[str, Any] = (
            {"join_bytes": 2**30, "bucket_bytes": 2**30} if name == "one bucket" else {}
        )
        return jcoll.sync_gradients(grads, AXIS, **join)

    return step


def products_after_launch(compiled: Any, inputs: tuple) -> list[float]:
    """For each all_reduce: the share of the backward products' time that begins after it did."""
    text = compiled.as_text()
    ops = dict(re.findall(r"%([\w.-]+) = [^\n]*?op_name=\"([^\"]+)\"", text))
    calls = set(re.findall(r"%([\w.-]+) = [^\n]* custom-call\([^\n]*jcoll_collective", text))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(*inputs))
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as f:
            events = [e for e in json.load(f)["traceEvents"] if e.get("ph") == "X"]
    launches: dict[str, float] = {}
    for e in events:
        if e["name"] in calls:  # All devices' calls have one name; the first counts.
            launches[e["name"]] = min(e["ts"], launches.get(e["name"], e["ts"]))
    products = [e for e in events if re.search("transpose.*dot", ops.get(e["name"], ""))]
    total = sum(e["dur"] for e in products)
    after = [sum(e["dur"] for e in products if e["ts"] > t) for t in sorted(launches.values())]
    return [t / total for t in after]


def ring(args: argparse.Namespace, mesh: Mesh) -> list[dict[str, Any]]:
    rows = []
    for name, forms in ring_forms().items():
        arrays = ring_arrays(args, name)
        runs = {}
        for form, (fn, specs, out) in forms.items():
            body = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
            inputs = placed(arrays, specs, mesh)
            runs[form] = bound(jax.jit(body).lower(*inputs).compile(), inputs)
        times = interleaved(runs, args.calls)
        apart = times["collective"] + times["product"]
        hidden = (apart - times["overlap"]) / times["collective"]
        shown = "  ".join(f"{form} {t * 1e3:6.2f} ms" for form, t in times.items())
        print(f"{name:21} {shown}  hidden {hidden:5.0%}", flush=True)
        rows.append({"what": name, "hidden": hidden, **times})
    return rows


def ring_forms() -> dict[str, dict[str, tuple]]:
    tiled: dict[str, Any] = {"axis_name": AXIS, "tiled": True}
    split, columns, whole = (P(AXIS), P()), (P(None, AXIS), P(AXIS)), (P(), P())

    def plain_gather(x: Any, w: Any) -> Any:
        return jcoll.all_gather(x, **tiled) @ w

    def plain_scatter(x: Any, w: Any) -> Any:
        return jcoll.reduce_scatter(x @ w, **tiled)

    return {
        "all_gather_matmul": {
            "overlap": (lambda x, w: layers.all_gather_matmul(x, w, AXIS), split, P()),
            "plain": (plain_gather, split, P()),
            "collective": (lambda x, w: jcoll.all_gather(x, **tiled), split, P()),
            "product": (lambda x, w: x @ w, whole, P()),
        },
        "matmul_reduce_scatter": {
            "overlap": (lambda x, w: layers.matmul_reduce_scatter(x, w, AXIS), columns, P(AXIS)),
            "plain": (plain_scatter, columns, P(AXIS)),
            "collective": (lambda x, w: jcoll.reduce_scatter(x, **tiled), columns, P(AXIS)),
            "product": (lambda x, w: x @ w, columns, P()),
        },
    }


def ring_arrays(args: argparse.Namespace, name: str) -> tuple[jax.Array, jax.Array]:
    tokens = args.rows * args.devices
    inner = args.width * (args.devices if name == "matmul_reduce_scatter" else 1)
    return jnp.ones((tokens, inner)), jnp.ones((inner, args.width))


def placed(trees: tuple, specs: tuple, mesh: Mesh) -> tuple:
    shardings = (NamedSharding(mesh, spec) for spec in specs)
    return tuple(jax.device_put(tree, s) for tree, s in zip(trees, shardings, strict=True))


def bound(compiled: Any, inputs: tuple) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(compiled(*inputs))


def interleaved(runs: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """Median seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(calls + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


if __name__ == "__main__":
    main()
