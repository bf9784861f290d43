"""The smallest useful program: 8 ranks add up their arrays.

    python examples/all_reduce.py

Ranks are devices. Without GPUs, XLA makes 8 of the CPU, which is all it takes to try things out.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll

argparse.ArgumentParser(  # --help, and no other flags.
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()


def sum_over_ranks(x):
    """Runs once on each rank, which sees its own slice of x only."""
    return jcoll.all_reduce(x, "ranks")


mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
rows = jnp.arange(3 * mesh.size, dtype=jnp.float32).reshape(mesh.size, 3)
x = jax.device_put(rows, NamedSharding(mesh, P("ranks")))  # row r to rank r

y = jax.jit(jax.shard_map(sum_over_ranks, mesh=mesh, in_specs=P("ranks"), out_specs=P()))(x)

print(f"{mesh.size} ranks, on {jax.devices()[0].platform}")
print(f"each has one row of\n{rows}")
print(f"and each gets the sum of all rows, {y}")
for row in jcoll.metrics():
    print(
        f"{row['calls']} {row['op']} of {row['nbytes']} bytes by {row['num_ranks']} ranks, "
        f"called at {row['call_site']}, took {1e6 * row['exec_s']:.0f} us"
    )
