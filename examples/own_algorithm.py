"""An algorithm of one's own: written, proved, counted, drawn and used.

    python examples/own_algorithm.py                  # ends with a picture in own_algorithm.svg
    python -m jcoll plan simulate --module examples/own_algorithm.py all_reduce -n 8

The star: all ranks send to rank 0, which adds up and sends the sum back. Two rounds, as for
two_shot, but all bytes go through one rank: see where `simulate` puts it.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll.algorithms import algorithm
from jcoll.algorithms.registry import plan_for
from jcoll.plan.counts import counts
from jcoll.plan.render import as_svg, as_text
from jcoll.plan.verify import verify


@algorithm("my_star", op="all_reduce")
def my_star(p):
    for r in range(1, p.num_ranks):
        p.send(r, 0, reduce=True)
    for r in range(1, p.num_ranks):
        p.send(0, r)


def parse():
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("own_algorithm.svg"), help="[%(default)s]"
    )
    return parser.parse_args()


def main():
    args = parse()
    plan = plan_for("all_reduce", "my_star", num_ranks=4)
    verify(plan)  # Raises PlanError, naming rank, step and chunk, if it can go wrong.
    print(as_text(plan))
    print(f"{counts(plan)}\n")
    args.output.write_text(as_svg(plan))
    print(f"wrote {args.output}")

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    x = jnp.arange(3 * mesh.size, dtype=jnp.float32).reshape(mesh.size, 3)
    x = jax.device_put(x, NamedSharding(mesh, P("x")))  # row r to rank r

    def total(x):
        return jcoll.all_reduce(x, "x", algorithm="my_star")

    y = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P()))(x)
    print(f"The sum of the rows of {mesh.size} ranks: {y}")
    print(jcoll.explain(jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P()), x))


if __name__ == "__main__":
    main()
