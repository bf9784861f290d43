"""Programs with lax's collectives, and what they run on; for the tests of intercept and explain."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from runtime_programs import N as N
from runtime_programs import mesh_of as mesh_of
from runtime_programs import place as place

P = jax.P
TARGET = "jcoll_collective"
LAX_HLO = r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("


def integers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Small integers: sums are exact, so that results can be compared bit by bit."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


def sharded(body: Callable, check_vma: bool = True, mesh: Any = None, **more: Any) -> Callable:
    mesh = mesh or mesh_of(N)
    spec = P(mesh.axis_names)
    return jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma, **more
    )


def run_on(which: str, fn: Callable, *args: Any) -> Any:
    """Compiles and runs fn, whose collectives must all be `which`'s: jcoll, xla; neither: none."""
    compiled = fn.lower(*args).compile()
    text = compiled.as_text()
    found = {"jcoll": TARGET in text, "xla": re.search(LAX_HLO, text) is not None}
    assert found == {"jcoll": which == "jcoll", "xla": which == "xla"}, text
    return compiled(*args)


def psum_of(mesh: Any, **more: Any) -> tuple[Callable, Any]:
    """A jitted function with one psum, and its argument."""
    fn = jax.jit(sharded(lambda x: x + lax.psum(x, "x"), mesh=mesh, **more))
    return fn, place(integers((N, 4)), mesh, P(mesh.axis_names))
