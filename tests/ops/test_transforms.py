"""Derivatives and batching of every collective.

The oracle is the same function under jax.vmap with the collective's axis as the vmapped axis: then
all ranks are in one array, no collective runs, and jax.numpy differentiates the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.cases import CASES, Case, case_id, inputs
from ops.meshes import mesh_of, put, spmd

from jcoll.comm.mesh import make_call
from jcoll.ops import _primitive

N = 4
DIFFERENTIABLE = [c for c in CASES if "float32" in c.dtypes]
VMA = pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "vma"])


def apply(case: Case) -> Callable:
    """The collective of one rank, without its integer results."""

    def f(*arrays: Any) -> Any:
        call = make_call(case.op, "x")
        outs = _primitive.bind(case.spec, *arrays, call=call, **case.static(N))
        return [y for y in outs if jnp.issubdtype(y.dtype, jnp.inexact)]

    return f


def arrays_of(case: Case, shape: tuple[int, ...] = (3,), seed: int = 0) -> list[np.ndarray]:
    arrays = inputs(case, N, shape, "float32", seed)
    return [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays]


def on_mesh(case: Case, check_vma: bool) -> Callable:
    return spmd(apply(case), mesh_of(N), check_vma=check_vma)


def under_vmap(case: Case) -> Callable:
    f = jax.vmap(apply(case), axis_name="x")

    def everywhere(*arrays: Any) -> Any:
        return f(*arrays)

    return everywhere


def split(arrays: list) -> tuple[list, list]:
    """(differentiable arrays, the rest)."""
    floats = [a for a in arrays if a.dtype == np.float64]
    return floats, arrays[len(floats) :]


def weighted(f: Callable, weights: list) -> Callable:
    """A scalar of all ranks' results, in which every element counts differently."""
    return lambda *args: sum(
        jnp.vdot(w, jnp.tanh(y)) for w, y in zip(weights, f(*args), strict=True)
    )


def weights_for(f: Callable, arrays: list) -> list:
    shapes = jax.eval_shape(f, *arrays)
    rng = np.random.default_rng(1)
    return [rng.normal(size=s.shape) for s in shapes]


@VMA
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=case_id)
def test_derivatives(case: Case, check_vma: bool) -> None:
    arrays = arrays_of(case)
    floats, rest = split(arrays)
    ours = lambda *fs: on_mesh(case, check_vma)(*fs, *rest)  # noqa: E731
    oracle = lambda *fs: under_vmap(case)(*fs, *rest)  # noqa: E731
    weights = weights_for(oracle, floats)
    argnums = tuple(range(len(floats)))
    tangents = [np.random.default_rng(2).normal(size=a.shape) for a in floats]

    def everything(f: Callable) -> Callable:
        loss = weighted(f, weights)

        def run(*fs: Any) -> Any:
            return (
                f(*fs),
                jax.value_and_grad(loss, argnums)(*fs),
                jax.jvp(f, fs, tuple(tangents)),
                jax.jvp(jax.grad(loss), fs, tuple(tangents)),  # Forward over reverse.
            )

        return jax.jit(run)

    got = everything(ours)(*put(mesh_of(N), floats))
    want = everything(oracle)(*floats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, want)


@VMA
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_batching_over_an_unrelated_axis(case: Case, check_vma: bool) -> None:
    dtype = "float32" if "float32" in case.dtypes else "int32"
    batches = [inputs(case, N, (3,), dtype, seed) for seed in range(2)]
    stacked = [np.stack(parts, axis=1) for parts in zip(*batches, strict=True)]
    static = case.static(N)

    def one(*arrays: Any) -> Any:
        return _primitive.bind(case.spec, *arrays, call=make_call(case.op, "x"), **static)

    mesh = mesh_of(N)
    inside = spmd(jax.vmap(one), mesh, check_vma=check_vma)
    got = inside(*put(mesh, stacked))
    outside = jax.vmap(spmd(one, mesh, check_vma=check_vma), in_axes=1, out_axes=1)
    over = outside(*put(mesh, stacked))
    want = [case.spec.stacked(np, *arrays, **static) for arrays in batches]
    want = [np.stack(parts, axis=1) for parts in zip(*want, strict=True)]
    for results in (got, over):
        for a, b in zip(results, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_own_axis_under_vmap(case: Case) -> None:
    dtype = "float32" if "float32" in case.dtypes else "int32"
    arrays = inputs(case, N, (3,), dtype, 0)
    static = case.static(N)

    def one(*xs: Any) -> Any:
        return _primitive.bind(case.spec, *xs, call=make_call(case.op, "x"), **static)

    got = jax.jit(jax.vmap(one, axis_name="x"))(*arrays)
    want = case.spec.stacked(np, *arrays, **static)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6)
