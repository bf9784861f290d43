"""Reductions of values that are not traced: the same on all ranks, and reduced without sending."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ops.meshes import mesh_of, put, seen_inside, spmd

import jcoll

MESH = mesh_of(4)
X = put(MESH, np.random.default_rng(0).normal(size=(4, 4, 8)))

NUMBERS = [3, -2, 2.5, True, 1 + 2j]
ARRAYS = [np.arange(3, dtype=np.int8), np.int8(100), np.float32(0.1)]


@pytest.mark.parametrize(("name", "constants"), [("psum", NUMBERS + ARRAYS), ("pmean", NUMBERS)])
def test_reductions_of_constants(name: str, constants: list) -> None:
    """What is not traced stays untraced, of the type that lax gives."""
    for c in constants:
        got, want = (
            seen_inside(lambda v, f=f, c=c: f(c, "x"), X)
            for f in (getattr(jcoll, name), getattr(lax, name))
        )
        assert str(got) == str(want), c


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "float32"])
@pytest.mark.parametrize("op", ["sum", "prod", "mean"])
def test_constants_are_reduced_as_traced_values(op: str, dtype: str) -> None:
    c = np.asarray([1.3, 0.7, 3.0, -2.0]).astype(jnp.dtype(dtype))

    def f(v: Any) -> Any:
        traced = c + jnp.zeros_like(v, shape=(), dtype=c.dtype) * v[0, 0].astype(c.dtype)
        return [jcoll.all_reduce(x, "x", op=op) for x in (c, jnp.asarray(c), traced)]

    numpy, jax_numpy, want = (np.asarray(y[0]) for y in spmd(f, MESH)(X))
    assert numpy.dtype == jax_numpy.dtype == want.dtype
    np.testing.assert_array_equal(numpy, jax_numpy)
    eps = 1e-6 if want.dtype == np.float32 else 0  # The order of the additions.
    np.testing.assert_allclose(numpy.astype(float), want.astype(float), rtol=eps)


LARGE = [
    np.int8(100),
    np.full(3, 100, np.int8),
    np.uint8(200),
    np.int32(10**9),
    np.float32(3e38),
    np.ones(2, bool),
]


@pytest.mark.parametrize("c", LARGE, ids=repr)
@pytest.mark.filterwarnings("error:.*:RuntimeWarning:jcoll")
def test_mean_of_constants_whose_sum_does_not_fit(c: Any) -> None:
    """Integers wrap, and floats overflow, before the division: as lax has it for traced values."""
    want = spmd(lambda v: lax.pmean(v, "x"), MESH)(put(MESH, np.stack([c] * 4)))
    for given in (c, jnp.asarray(c)):
        got = spmd(lambda _, given=given: jcoll.pmean(given, "x"), MESH, check_vma=False)(X)
        assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("c", [2**31 - 1, 2**62, -(2**62), 1e308])
def test_mean_of_large_numbers(c: Any) -> None:
    got, want = (seen_inside(lambda v, f=f: f(c, "x"), X) for f in (jcoll.pmean, lax.pmean))
    assert got == want


@pytest.mark.filterwarnings("error:.*:RuntimeWarning")
def test_sum_and_mean_of_a_large_float16_constant() -> None:
    def f(v: Any) -> Any:
        return [jcoll.all_reduce(np.float16(3e4), "x", op=op) for op in ("sum", "mean", "prod")]

    found = spmd(f, MESH, check_vma=False)(X)
    assert [float(y[0]) for y in found] == [np.inf, float(np.float16(3e4)), np.inf]


def test_product_of_large_numbers() -> None:
    for c, want in [(1e300, float("inf")), (10**9, 10**36)]:
        got = seen_inside(lambda v, c=c: jcoll.all_reduce(c, "x", op="prod"), X)
        assert got[0] == (type(c).__name__, want)
