"""Programs for the tests of the runtime, and processes to run them in."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll

N = 8
TESTS = Path(__file__).resolve().parent


def mesh_of(*sizes: int) -> Any:
    return jax.make_mesh(sizes, ("x", "y", "z")[: len(sizes)])


def place(x: Any, mesh: Any, spec: Any = None) -> Any:
    """x on the mesh; by default split along dimension 0 over all axes."""
    return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names) if spec is None else spec))


def program(body: Callable, mesh: Any, num_replicated: int = 0) -> Any:
    """body(x, *scalars) on each rank's part of x, jitted."""
    spec = P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(spec, *(P(),) * num_replicated),
            out_specs=spec,
            check_vma=False,
        )
    )


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    """Whole numbers in float32: their sums are exact."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


# Programs that mix jcoll's collectives with lax's: one letter per collective of a loop's body.

SHIFT = [(i, (i + 1) % N) for i in range(N)]
STEPS: dict[str, Callable] = {
    "j": lambda x: jcoll.all_reduce(x, "x"),
    "g": lambda x: jcoll.all_gather(x, "x")[3],
    "a": lambda x: jcoll.all_to_all(x, "x", 0, 0, tiled=True),
    "l": lambda x: jax.lax.psum(x, "x"),
    "p": lambda x: jax.lax.ppermute(x, "x", SHIFT),
}
"""On int32[N] of each rank. Capitals: the same, beside the previous one and not after it."""


REFERENCE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "j": lambda xs: np.broadcast_to(xs.sum(0, dtype=xs.dtype), xs.shape),
    "g": lambda xs: np.broadcast_to(xs[3], xs.shape),
    "a": lambda xs: xs.T,
    "l": lambda xs: np.broadcast_to(xs.sum(0, dtype=xs.dtype), xs.shape),
    "p": lambda xs: np.roll(xs, 1, axis=0),
}


def _fold(letters: str, steps: dict[str, Callable], x: Any, rank: Any, step: Any) -> Any:
    """Wrapping integer arithmetic; every collective's result and every rank counts."""
    y = x
    for letter in letters:
        given = x if letter.isupper() else y
        y = y * 3 + steps[letter.lower()](given + rank) + step
    return y


def mixed_program(letters: str, num_steps: int, mesh: Any) -> Any:
    def body(x: Any) -> Any:
        rank = jax.lax.axis_index("x").astype(x.dtype)
        return jax.lax.fori_loop(
            0, num_steps, lambda i, y: _fold(letters, STEPS, y, rank, i.astype(x.dtype)), x
        )

    return program(body, mesh)


def check_mixed(letters: str, num_steps: int, times: int = 1) -> None:
    """Runs a mixed program and compares with numpy, all bits of all numbers."""
    mesh = mesh_of(N)
    x = np.arange(N * N, dtype=np.int32)
    fn = mixed_program(letters, num_steps, mesh)
    expected, rank = x.reshape(N, N), np.arange(N, dtype=np.int32)[:, None]
    for i in range(num_steps):
        expected = _fold(letters, REFERENCE, expected, rank, np.int32(i))
    for _ in range(times):
        np.testing.assert_array_equal(fn(place(x, mesh)), expected.reshape(-1))


# Processes

_HEAD = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
import jcoll
from runtime_programs import *
"""


def run_script(
    script: str, *, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python process with N CPU devices that runs `script`; subprocess.TimeoutExpired if stuck.

    Checks that nothing ended it but itself.
    """
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    flags = f"--xla_force_host_platform_device_count={N}"
    done = subprocess.run(
        [sys.executable, "-c", _HEAD + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags} | (env or {}),
    )
    assert "terminate called" not in done.stderr, done.stderr
    assert "Fatal Python error" not in done.stderr, done.stderr
    assert done.returncode >= 0, f"signal {-done.returncode}: {done.stderr}"
    return done


def run_ok(script: str, **more: Any) -> str:
    """The output of a script that must succeed."""
    done = run_script(script, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
