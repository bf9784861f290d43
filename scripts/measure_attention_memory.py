"""Memory per device of one attention over a split sequence, as XLA plans it, or measured.

    python scripts/measure_attention_memory.py [--tokens 4096] [--local-tokens 512] [--json FILE]
    python scripts/measure_attention_memory.py --measured                             (Linux only)

First the same sequence over 1, 2, 4 and 8 devices, then the same number of tokens per device.
`matrix` is the usual attention with keys and values gathered: local queries by all keys in one
matrix of scores. Nothing runs: the numbers are the temporaries of the compiled program, MiB per
device (memory_analysis); q, k, v, out and their gradients, all of the size `q`, come on top.

--measured: of the first table, each program runs once, in a process of its own, all devices in it.
The number is by how much the peak of the process's resident memory (VmHWM) exceeds what it had
before the run, less the results, divided by the devices: temporaries and jcoll's own buffers, as
far as they are touched, and at the same moment. No `matrix`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
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

WARM_UP_TOKENS = 64  # Of each device: enough to start threads and jcoll, too few to count.
SPEC = P(None, "seq")


def matrix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = jcoll.all_gather((k, v), "seq", axis=1, tiled=True)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    position = jax.lax.axis_index("seq") * q.shape[1] + jnp.arange(q.shape[1])
    scores = jnp.where(position[:, None] >= jnp.arange(k.shape[1]), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def variants(block_size: int) -> dict[str, Callable[..., jax.Array]]:
    options: dict[str, Any] = {"axis_name": "seq", "block_size": block_size}
    blocks = functools.partial(layers.blockwise_attention, block_size=block_size)
    return {
        "matrix": matrix,
        "all_gather": functools.partial(layers.all_gather_attention, **options),
        "ulysses": functools.partial(layers.ulysses_attention, axis_name="seq", attention=blocks),
        "ring": functools.partial(layers.ring_attention, **options),
        "ring zigzag": functools.partial(
            layers.ring_attention, placement="zigzag", **options
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the sequence, first table")
    parser.add_argument("--local-tokens", type=int, default=512, help="per device, second table")
    parser.add_argument("--devices", type=lambda s: [int(n) for n in s.split(",")],
                        default=[1, 2, 4, 8], help="up to 8 [1,2,4,8]")  # fmt: skip
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=128, help="of the tiles")
    parser.add_argument("--measured", action="store_true", help="run, and measure the process")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    args = parser.parse_args()
    rows = measured_table(args) if args.measured else planned_tables(args)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"options": vars(args), "rows": rows}, f, indent=1)


def planned_tables(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for title, tokens_of in (
        (f"{args.tokens} tokens in all", lambda n: args.tokens // n),
        (f"{args.local_tokens} tokens per device", lambda n: args.local_tokens),
    ):
        for backward in (False, True):
            print(f"\n{title}, {'forward and backward' if backward else 'forward'}")
            table = [measure(args, n, tokens_of(n), backward) for n in args.devices]
            show(table)
            rows += [{"table": title, "backward": backward, **row} for row in table]
    return rows


def measure(args: argparse.Namespace, devices: int, tokens: int, backward: bool) -> dict[str, Any]:
    """Bytes per device: of q, and of each variant's temporaries."""
    q = queries(args, devices, tokens)
    row = {"devices": devices, "tokens": tokens, "q": q.size * q.dtype.itemsize // devices}
    for name in variants(args.block_size):
        plan = program(args, name, devices, backward).lower(q, q, q).compile().memory_analysis()
        assert plan is not None, "this backend does not tell its plan"
        row[name] = plan.temp_size_in_bytes
    return row


def measured_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """As `planned_tables`, of running programs. One process each: memory that a process has once
    used it keeps for its next program, whose growth would be too small.
    """
    rows = []
    names = [name for name in variants(args.block_size) if name != "matrix"]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for backward in (False, True):
            title = f"{args.tokens} tokens in all"
            print(f"\n{title}, {'forward and backward' if backward else 'forward'}, measured")
            table = []
            for n in args.devices:
                row = {"devices": n, "tokens": args.tokens // n}
                grown = [pool.submit(growth, args, name, n, backward).result() for name in names]
                table.append({**row, **dict(zip(names, grown, strict=True))})
            show(table)
            rows += [{"table": title, "backward": backward, **row} for row in table]
    return rows


def growth(args: argparse.Namespace, name: str, devices: int, backward: bool) -> float:
    """Bytes per device, results not counted, of the first run of a program in this process."""
    run = program(args, name, devices, backward)
    jax.block_until_ready(run(*[filled(queries(args, devices, WARM_UP_TOKENS))] * 3))
    inputs = [filled(queries(args, devices, args.tokens // devices)) for _ in range(3)]
    compiled = run.lower(*inputs).compile()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew.
    before = resident_nbytes("VmRSS")
    results = jax.tree.leaves(jax.block_until_ready(compiled(*inputs)))
    grown = resident_nbytes("VmHWM") - before - sum(out.nbytes for out in results)
    return grown / devices


def resident_nbytes(name: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def queries(args: argparse.Namespace, devices: int, tokens: int) -> jax.ShapeDtypeStruct:
    """The type of q, k and v: `tokens` of them on each of the devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("seq",))
    shape = (1, devices * tokens, args.heads, args.head_dim)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, SPEC))


def filled(q: jax.ShapeDtypeStruct) -> jax.Array:
    values = np.random.default_rng(0).normal(size=q.shape).astype(q.dtype)
    return jax.block_until_ready(jax.device_put(values, q.sharding))


def program(
    args: argparse.Namespace, name: str, devices: int, backward: bool
) -> jax.stages.Wrapped:
    """(q, k, v) -> out, or (out, gradients)."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("seq",))
    attention = variants(args.block_size)[name]
    fn = with_gradients(attention) if backward else attention
    outs = (SPEC,) * 4 if backward else SPEC
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=outs))


def with_gradients(attention: Callable[..., jax.Array]) -> Callable[..., tuple]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        out, back = jax.vjp(attention, q, k, v)
        return out, *back(out)

    return run


def show(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0])[2:]
    print(f"{'devices':>7} {'tokens':>7}", *(f"{name:>11}" for name in names))
    for row in rows:
        mib = (f"{row[name] / 2**20:11.2f}" for name in names)
        print(f"{row['devices']:>7} {row['tokens']:>7}", *mib)


if __name__ == "__main__":
    main()
