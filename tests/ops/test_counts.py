"""Numbers of rows at the limits of their integer types."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from ops.meshes import mesh_of, put, spmd

import jcoll

N = 4


@pytest.mark.parametrize("dtype", ["uint32", "int32", "uint8"])
@pytest.mark.filterwarnings("error")
def test_counts_without_64_bit_types(dtype: str) -> None:
    counts, x = np.ones((N, N), dtype), np.ones((N, N, 2), np.float32)
    with jax.enable_x64(False):
        f = spmd(lambda x, counts: jcoll.all_to_all_v(x, counts, "x", output_size=N), mesh_of(N))
        y, received = f(*put(mesh_of(N), (x, counts)))
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(received, counts)


@pytest.mark.parametrize("name", ["send_counts", "recv_sizes"])
def test_counts_that_are_cut_without_64_bit_types(name: str) -> None:
    """jax makes int32 of them: 2**32 would be no rows."""
    wide, zeros = np.full(N, 2**32), np.zeros(N, np.int32)
    calls = {
        "send_counts": lambda x: jcoll.all_to_all_v(x, wide, "x", output_size=4)[0],
        "recv_sizes": lambda x: jcoll.ragged_all_to_all(x, x, *[zeros] * 3, wide, axis_name="x"),
    }
    f, x = spmd(calls[name], mesh_of(N)), np.zeros((N, N, 2), np.float32)
    with jax.enable_x64(False), pytest.raises(ValueError, match=rf"{name} has 4294967296.*int32"):
        jax.eval_shape(f, x)


def test_counts_in_a_list_of_traced_values() -> None:
    def f(x: Any) -> Any:
        counts = [1 + 0 * jax.lax.axis_index("x")] * N
        return jcoll.all_to_all_v(x, counts, "x", output_size=N)[0]

    x = np.arange(N * N).reshape(N, N)
    np.testing.assert_array_equal(spmd(f, mesh_of(N))(put(mesh_of(N), x)), x.T)


@pytest.mark.parametrize(
    "counts", [[2**30] * 4, [2**31 - 1, 2**31 - 1, 2, 0], [2**31 - 1, 1, 0, 0]], ids=str
)
def test_counts_whose_sum_wraps(counts: list[int]) -> None:
    """By xla, in 32 bits: still more than x has, so NaN, and not the rows of some other sum."""
    x, every = np.ones((N, 8, 2), np.float32), np.tile(np.asarray(counts, np.int32), (N, 1))

    def exchange(x: Any, counts: Any) -> Any:
        return jcoll.all_to_all_v(x, counts, "x", output_size=16, algorithm="xla")

    y, received = spmd(exchange, mesh_of(N))(*put(mesh_of(N), (x, every)))
    assert np.isnan(y).all()
    np.testing.assert_array_equal(received, every.T)


@pytest.mark.parametrize("overflow", ["error", "drop"])
def test_metrics_count_the_rows_that_were_sent(overflow: str) -> None:
    counts = np.array([[r + (d == 0) for d in range(N)] for r in range(N)], np.int32)
    room = 64 if overflow == "error" else 7
    x = np.ones((N, 16, 2), np.float32)

    def exchange(x: Any, counts: Any) -> Any:
        return jcoll.all_to_all_v(x, counts, "x", output_size=room, overflow=overflow)[:2]

    jcoll.reset_metrics()
    _, received = jax.block_until_ready(spmd(exchange, mesh_of(N))(*put(mesh_of(N), (x, counts))))
    (row,) = jcoll.metrics()
    assert row["row_bytes"] == np.asarray(received).sum() * 2 * 4
    assert (row["row_bytes"] < counts.sum() * 2 * 4) == (overflow == "drop")
