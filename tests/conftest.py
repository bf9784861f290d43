"""Test setup: 8 virtual CPU devices, 64-bit types, strict promotion so that sloppiness fails."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before jax is imported anywhere. Compiling takes most of the tests' time, and the code of what
# surrounds the collectives need not be good. Of a flag given twice the last holds.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JCOLL_TUNING_FILE"] = "none"  # Not: what this machine's user has measured.

import jax
import pytest

from jcoll.algorithms import registry

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def catalogue() -> Iterator[None]:
    """What a test adds to the catalogue of algorithms, no other test sees."""
    before = dict(registry._ALGORITHMS)
    yield
    if before != registry._ALGORITHMS:
        registry._ALGORITHMS.clear()
        registry._ALGORITHMS.update(before)
        for forget in registry.on_register:
            forget()
