"""Test setup: 8 virtual CPU devices, 64-bit types, strict promotion so that sloppiness fails."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from importlib.metadata import version

# Before jax is imported anywhere. Compiling takes most of the tests' time, and the code of what
# surrounds the collectives need not be good. Of a flag given twice the last holds.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        # The emitters before MLIR's, which take less than half the time (22 ms a program, not 59).
        # Later releases have no others, and do not know the flag.
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run each test with its first parameters, and with one in N of the others",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if unnameable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"an address, which no other worker has, is in {unnameable[0]}")
    one_in = config.getoption("--one-in")
    seen: set[str] = set()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        # By a hash of the name: every Nth could always be the same of N dtypes.
        keep = test not in seen or zlib.crc32(item.nodeid.encode()) % one_in == 0
        seen.add(test)
        (kept if keep else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


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
