"""Test setup: 8 virtual CPU devices, 64-bit types, strict promotion so that sloppiness fails."""

from __future__ import annotations

import os

# Before jax is imported anywhere.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JCOLL_TUNING_FILE"] = "none"  # Not: what this machine's user has measured.

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
