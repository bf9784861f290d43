"""Checks an installed jcoll as a user meets it: `python check_install.py`, outside the checkout.

An all_reduce on 8 virtual CPU devices must give the right numbers through the native algorithm, and
the command must answer.
"""

import os
import subprocess
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import jcoll

P = jax.sharding.PartitionSpec


def check_place() -> None:
    """The package in use is the installed one."""
    assert jcoll.__file__ is not None
    assert Path(jcoll.__file__).is_relative_to(sys.prefix), jcoll.__file__


def check_numbers() -> None:
    """Sum and mean over 8 ranks, against numpy."""
    mesh = jax.make_mesh((8,), ("data",))
    x = np.arange(8 * 1000, dtype=np.float32).reshape(8, 1000)
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))
    for op, expected in (("sum", x.sum(0)), ("mean", x.mean(0))):

        def reduced(shard, op=op):
            return jcoll.all_reduce(shard, "data", op=op, algorithm="direct")

        in_jit = jax.jit(jax.shard_map(reduced, mesh=mesh, in_specs=P("data"), out_specs=P()))
        np.testing.assert_array_equal(in_jit(placed)[0], expected)
    assert sum(row["calls"] for row in jcoll.metrics()) == 2


def check_command() -> None:
    """The console script is on the environment's path, the table of costs in the package."""
    command = Path(sys.executable).with_name("jcoll")
    for argv, expected in (
        (["--help"], "bench"),
        (["explain", "all_reduce", "--size", "1M", "--mesh", "data=8"], "measured"),
    ):
        said = subprocess.run([command, *argv], capture_output=True, text=True, check=True).stdout
        assert expected in said, said


if __name__ == "__main__":
    check_place()
    check_numbers()
    check_command()
    print(
        f"jcoll {jcoll.__version__} works on jax {jax.__version__}, Python {sys.version.split()[0]}"
    )
