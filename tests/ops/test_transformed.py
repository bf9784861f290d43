"""Every collective under every transform, with several dtypes and shapes, against its reference.

Generated from the registry: case x (scan, cond, vmap, grad through remat) x dtype x shape. One
program holds them all for a case: compiling is what costs. Higher derivatives in float64:
test_transforms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ops.cases import CASES, Case, case_id, inputs
from ops.meshes import mesh_of, put, spmd, vary
from ops.test_values import check

from jcoll.comm.mesh import make_call
from jcoll.ops import _primitive

N = 4
SHAPES = [(8,), (3, 5), (0,)]  # A usual one, an odd one, none.
INDEXED_SHAPES = [(5,), (0,)]  # Their references are slow: num_ranks**2 selections.


def dtypes_of(case: Case) -> list[str]:
    return [d for d in ("float32", "bfloat16", "int32", "int8") if d in case.dtypes][:2]


def transformed(f: Callable, flag: Any, pairs: list) -> dict[str, Any]:
    """f of both inputs under scan and under vmap, and of the first one under cond."""
    stacked = [jnp.stack(pair) for pair in zip(*pairs, strict=True)]
    return {
        "scan": lax.scan(lambda carry, xs: (carry, f(*xs)), 0, stacked)[1],
        "vmap": jax.vmap(f)(*stacked),
        "cond": lax.cond(flag, lambda: f(*pairs[0]), lambda: f(*pairs[1])),
    }


def loss(f: Callable, floats: list, others: list) -> Any:
    """A rank's scalar in which every element of its result counts differently; f through remat."""
    y = jax.checkpoint(f)(*floats, *others)[0].astype(jnp.float32)
    weights = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 7 - 3
    return (y * weights * (1 + lax.axis_index("x")).astype(y.dtype)).sum()


def split(arrays: list) -> tuple[list, list]:
    """(arrays to differentiate, the others)."""
    floats = [a for a in arrays if jnp.issubdtype(a.dtype, jnp.inexact)]
    return floats, arrays[len(floats) :]


def gradients(f: Callable, arrays: list) -> list:
    """Of the sum of all ranks' losses; in a rank's program."""
    return jax.grad(lambda floats, others: loss(f, floats, others))(*split(arrays))


def gradients_by_reference(f: Callable, stacked: list) -> list:
    """The same with the collective's axis vmapped: no collective runs, but the reference."""
    ranks = jax.vmap(lambda floats, others: loss(f, floats, others), axis_name="x")
    return jax.grad(lambda floats, others: ranks(floats, others).sum())(*split(stacked))


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "vma"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_transforms(case: Case, check_vma: bool) -> None:
    work = [
        [inputs(case, N, shape, dtype, seed) for seed in range(2)]
        for shape in (SHAPES if case.index_arrays is None else INDEXED_SHAPES)
        for dtype in (dtypes_of(case) if 0 not in shape else dtypes_of(case)[:1])
    ]

    def f(*arrays: Any) -> list:
        call = make_call(case.op, "x")
        return _primitive.bind(case.spec, *arrays, call=call, **case.static(N))

    def typed(*arrays: Any) -> list:
        return [vary(y, ("x",)) if check_vma else y for y in f(*arrays)]

    def per_rank(flag: Any, work: list) -> list:
        flag = lax.pmax(flag, "x") > 0
        return [(transformed(typed, flag, p), gradients(typed, p[0])) for p in work]

    mesh, flags = mesh_of(N), np.ones(N, np.int32)
    with jax.numpy_dtype_promotion("standard"):
        results = spmd(per_rank, mesh, check_vma=check_vma)(*put(mesh, (flags, work)))
        wanted = jax.jit(lambda work: [gradients_by_reference(f, p[0]) for p in work])(work)
    for pairs, (values, grads), want in zip(work, results, wanted, strict=True):
        check_values(case, pairs, values)
        for a, b in zip(grads, want, strict=True):
            assert a.dtype == b.dtype
            close = 4 * float(jnp.finfo(a.dtype).eps)
            a, b = (np.asarray(v, np.float64) for v in (a, b))
            np.testing.assert_allclose(a, b, rtol=close, atol=close * max(1, abs(b).max(initial=0)))


def check_values(case: Case, pairs: list, values: dict[str, list]) -> None:
    check(case, N, pairs[0], values["cond"])
    for i, arrays in enumerate(pairs):
        for how in ("scan", "vmap"):
            check(case, N, arrays, [y[:, i] for y in values[how]])
