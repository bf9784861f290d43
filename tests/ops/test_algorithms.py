"""Every algorithm that serves an op, on every rank count, dtype and kind of size: the reference's
result, and the same bits on every rank and in every run.

Generated from the registries of ops and of algorithms. One program holds a case's algorithms,
dtypes and shapes: compiling is what costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.cases import CASES, Case, case_id, dtype_of, inputs
from ops.meshes import mesh_of, put, spmd
from ops.test_values import compare

import jcoll
from jcoll.algorithms import bruck, registry
from jcoll.comm.mesh import make_call
from jcoll.ops import _primitive

SERVED = [case for case in CASES if registry.names(case.op)]


def exact_inputs(case: Case, n: int, shape: tuple[int, ...], dtype: str, seed: int) -> list:
    """Values whose sums and products are exact in every type: the order of a sum then tells
    nothing, and a missing or doubled contribution everything."""
    arrays = inputs(case, n, shape, dtype, seed)
    if np.dtype(dtype_of(dtype)).kind in "fc" or dtype == "bfloat16":
        values = np.random.default_rng(seed).choice([-1.0, 1.0, 2.0], arrays[0].shape)
        arrays[0] = values.astype(dtype_of(dtype))
    return arrays


def run(case: Case, n: int, names: list[str], args: list) -> dict[str, list]:
    static = case.static(n)

    def per_rank(args: list) -> dict[str, list]:
        def apply(name: str) -> list:
            call = make_call(case.op, "x", algorithm=name)
            return [_primitive.bind(case.spec, *arrays, call=call, **static) for arrays in args]

        return {name: apply(name) for name in names}

    mesh = mesh_of(n)
    fn, placed = spmd(per_rank, mesh), put(mesh, args)
    first, second = jax.tree.map(np.asarray, (fn(placed), fn(placed)))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.tobytes() == b.tobytes(), "another run gave other bits"
    return first


# One rank: what is checked is that every name is taken, and the same result comes; a plan is
# followed only where there are counts (_lowering.run). Last: --one-in always takes the first.
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 1])
@pytest.mark.parametrize("case", SERVED, ids=case_id)
def test_matrix(case: Case, n: int) -> None:
    """Every dtype on 3 and 8 ranks; the rest of the matrix is below."""
    if n in (4, 6, 7) and (case.static(n).get("op", "sum") != "sum" or case.index_arrays):
        return  # Another reduction moves as a sum does, and rows as on other rank counts.
    usual = [d for d in ("float32", "bfloat16", "int32") if d in case.dtypes]
    check_matrix(case, n, case.dtypes if n in (3, 8) else usual)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 7])
@pytest.mark.parametrize("case", SERVED, ids=case_id)
def test_whole_matrix(case: Case, n: int) -> None:
    check_matrix(case, n, case.dtypes)


def check_matrix(case: Case, n: int, dtypes: Sequence[str]) -> None:
    shapes = {3: [(33,), ()], 8: [(33,), (0,)]}.get(n, [(33,)])
    args = [
        exact_inputs(case, n, shape, dtype, seed)
        for seed, (shape, dtype) in enumerate((s, d) for s in shapes for d in dtypes)
    ]
    if n in (5, 8) and "float32" in case.dtypes:
        args.append(exact_inputs(case, n, case.large, "float32", n))
    names = registry.supporting(case.op, n)
    assert names
    with jax.numpy_dtype_promotion("standard"):
        results = run(case, n, names, args)
    expected = [case.spec.stacked(np, *arrays, **case.static(n)) for arrays in args]
    for outs in results.values():
        for want, out in zip(expected, outs, strict=True):
            compare(case, n, want, out)


@pytest.mark.parametrize("name", registry.supporting("all_reduce", 6))
def test_rounded_sums_have_the_same_bits_on_all_ranks(name: str) -> None:
    mesh = mesh_of(6)
    for dtype in ("float32", "bfloat16"):
        x = np.random.default_rng(0).normal(size=(6, 4099)).astype(dtype_of(dtype))
        y = np.asarray(spmd(lambda v: jcoll.all_reduce(v, "x", algorithm=name), mesh)(put(mesh, x)))
        exact = x.astype(np.float64).sum(0)
        # At most one rounding per contribution, of a partial sum.
        bound = 6 * float(jnp.finfo(dtype).eps) * np.abs(x.astype(np.float64)).sum(0)
        assert (np.abs(y[0].astype(np.float64) - exact) <= bound).all()
        assert all(y[r].tobytes() == y[0].tobytes() for r in range(6))


def test_groups_and_sub_axes() -> None:
    mesh = mesh_of(8)
    x = np.arange(8 * 5, dtype=np.float32).reshape(8, 5)
    groups = [[0, 3, 5], [1, 2], [4, 6, 7]]

    def fn(v):
        return jcoll.all_reduce(v, "x", axis_index_groups=groups, algorithm="ring")

    y = np.asarray(spmd(fn, mesh)(put(mesh, x)))
    for group in groups:
        for rank in group:
            np.testing.assert_array_equal(y[rank], x[group].sum(0))


def test_rows_do_not_follow_a_plan_that_relays() -> None:
    """In one process too, where rows need no plan: between processes they would be wrong."""
    registry.algorithm("mine", op="all_to_all", ragged=True)(bruck.all_to_all)
    mesh, counts = mesh_of(4), np.ones((4, 4), np.int32)

    def fn(x, counts):
        return jcoll.all_to_all_v(x, counts, "x", output_size=4, algorithm="mine")[0]

    with pytest.raises(Exception, match=r"(?s)mine all_to_all of 4 ranks: rank 0, .*ragged=True"):
        spmd(fn, mesh)(*put(mesh, [np.ones((4, 4), np.float32), counts]))


def test_a_plan_that_cannot_be_had_is_told_with_the_call() -> None:
    @registry.algorithm("half_written", op="broadcast")
    def half_written(p):
        p.send(p.root, (p.root + 1) % p.num_ranks)

    mesh = mesh_of(4)
    where = r"jcoll\.broadcast over axis 'x' \(float32\[1\], half_written\) called at \S+\.py:\d+: "
    with pytest.raises(Exception, match=f"(?s){where}.*half_written broadcast of 4 ranks: rank 2"):
        spmd(lambda x: jcoll.broadcast(x, "x", algorithm="half_written"), mesh)(
            put(mesh, np.ones((4, 1), np.float32))
        )
