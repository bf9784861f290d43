"""Memory per device of one attention over a split sequence, as XLA plans it.

    python scripts/measure_attention_memory.py [--tokens 4096] [--local-tokens 512] [--json FILE]

First the same sequence over 1, 2, 4 and 8 devices, then the same number of tokens per device.
`matrix` is the usual attention with keys and values gathered: local queries by all keys in one
matrix of scores. Nothing runs: the numbers are the temporaries of the compiled program, MiB per
device (memory_analysis); q, k, v, out and their gradients, all of the size `q`, come on top.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
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

DEVICES = (1, 2, 4, 8)
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
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=128, help="of the tiles")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    args = parser.parse_args()
    rows = []
    for title, tokens_of in (
        (f"{args.tokens} tokens in all", lambda n: args.tokens // n),
        (f"{args.local_tokens} tokens per device", lambda n: args.local_tokens),
    ):
        for backward in (False, True):
            print(f"\n{title}, {'forward and backward' if backward else 'forward'}")
            table = [measure(args, n, tokens_of(n), backward) for n in DEVICES]
            show(table)
            rows += [{"table": title, "backward": backward, **row} for row in table]
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"options": vars(args), "rows": rows}, f, indent=1)


def measure(args: argparse.Namespace, devices: int, tokens: int, backward: bool) -> dict[str, Any]:
    """Bytes per device: of q, and of each variant's temporaries."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("seq",))
    shape = (1, devices * tokens, args.heads, args.head_dim)
    q = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, SPEC))
    row = {"devices": devices, "tokens": tokens, "q": q.size * q.dtype.itemsize // devices}
    for name, attention in variants(args.block_size).items():
        fn = with_gradients(attention) if backward else attention
        outs = (SPEC,) * 4 if backward else SPEC
        run = jax.shard_map(fn, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=outs)
        plan = jax.jit(run).lower(q, q, q).compile().memory_analysis()
        assert plan is not None, "this backend does not tell its plan"
        row[name] = plan.temp_size_in_bytes
    return row


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
