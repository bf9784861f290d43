"""Every collective x reduce op x dtype x shape x rank count x algorithm, against its reference.

Generated from the registry. One program holds all dtypes and shapes of a case: compiling is what
costs.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ops.cases import CASES, LARGE_DTYPES, NARROW, SHAPES, Case, case_id, inputs, tolerance
from ops.meshes import mesh_of, put, spmd

import jcoll
from jcoll.comm.mesh import make_call
from jcoll.ops import SPECS, _primitive


def test_complete() -> None:
    assert {case.op for case in CASES} == set(SPECS)


def run(case: Case, n: int, algorithm: str, args: list, *, check_vma: bool = False) -> list:
    """Applies the case's primitive to a list of input lists, in one program."""
    static = case.static(n)

    def per_rank(args: list) -> list:
        call = make_call(case.op, "x", algorithm=algorithm)
        return [_primitive.bind(case.spec, *arrays, call=call, **static) for arrays in args]

    mesh = mesh_of(n)
    return spmd(per_rank, mesh, check_vma=check_vma)(put(mesh, args))


def check(case: Case, n: int, arrays: list, outs: list) -> None:
    compare(case, n, case.spec.stacked(np, *arrays, **case.static(n)), outs)


def compare(case: Case, n: int, expected: list, outs: list) -> None:
    for got, want in zip(outs, expected, strict=True):
        got, want = np.asarray(got), np.asarray(want)
        assert got.dtype == want.dtype and got.shape == want.shape
        if got.dtype.name in NARROW:  # numpy compares few of these.
            got, want = got.astype(np.float32), want.astype(np.float32)
        close = tolerance(outs[0].dtype, case.static(n).get("op"))
        if close["rtol"]:
            wide = np.complex128 if np.iscomplexobj(got) else np.float64
            np.testing.assert_allclose(got.astype(wide), want.astype(wide), **close)
        else:
            np.testing.assert_array_equal(got, want)
        if case.spec.replicated:
            for rank in range(1, n):
                assert got[rank].tobytes() == got[0].tobytes(), f"rank {rank} differs in bits"


@pytest.mark.parametrize(
    ("algorithm", "n"), [("direct", 1), ("direct", 3), ("direct", 8), ("xla", 4)]
)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matrix(case: Case, algorithm: str, n: int) -> None:
    shapes = SHAPES if algorithm == "direct" else [(), (0,), (5, 33)]
    dtypes = case.dtypes
    if case.index_arrays is not None:  # Their references are slow: num_ranks**2 selections.
        shapes = [(), (0,), (7,)] if algorithm == "direct" else [(7,)]
    if n == 1:  # The reference itself runs.
        dtypes = tuple(d for d in dtypes if d in ("float32", "bfloat16", "int32"))
    if algorithm == "xla":  # XLA:CPU's own gaps are not ours to test.
        dtypes = tuple(d for d in dtypes if d in ("float32", "bfloat16", "int32"))
        if case.static(n).get("op") in ("and", "or"):
            dtypes = ("int32",)
        if case.op in ("all_gather", "gather", "broadcast"):
            shapes = [s for s in shapes if 0 not in s]
    args = [
        inputs(case, n, shape, dtype, seed)
        for seed, (shape, dtype) in enumerate((s, d) for s in shapes for d in dtypes)
    ]
    if (algorithm, n) == ("direct", 8):
        large = [d for d in LARGE_DTYPES if d in dtypes]
        args += [inputs(case, n, case.large, dtype, seed) for seed, dtype in enumerate(large)]
    with jax.numpy_dtype_promotion("standard"):
        outs = run(case, n, algorithm, args)
    for arrays, out in zip(args, outs, strict=True):
        check(case, n, arrays, out)


@pytest.mark.parametrize("n", [2, 4, 5, 6, 7])
def test_other_rank_counts(n: int) -> None:
    for case in CASES:
        dtypes = [d for d in ("float32", "bfloat16", "int32") if d in case.dtypes]
        args = [inputs(case, n, (33,), dtype, n) for dtype in dtypes]
        for arrays, out in zip(args, run(case, n, "direct", args, check_vma=True), strict=True):
            check(case, n, arrays, out)


def test_half_precision_sum_is_one_rounding_of_the_exact_sum() -> None:
    x = np.random.default_rng(0).normal(size=(8, 4096)).astype(np.float32)
    for dtype in ("bfloat16", "float16"):
        parts = x.astype(jax.numpy.dtype(dtype))
        mesh = mesh_of(8)
        f = spmd(lambda v: jcoll.all_reduce(v, "x"), mesh)
        first, second = np.asarray(f(put(mesh, parts))), np.asarray(f(put(mesh, parts)))
        assert first.tobytes() == second.tobytes()
        assert all(first[r].tobytes() == first[0].tobytes() for r in range(8))
        exact = parts.astype(np.float64).sum(0)
        rounded = exact.astype(parts.dtype)
        ulp = np.abs(np.spacing(np.abs(rounded)).astype(np.float64))
        assert (np.abs(first[0].astype(np.float64) - rounded.astype(np.float64)) <= ulp).all()


def test_large_arrays_take_the_parallel_path() -> None:
    mesh = mesh_of(8)
    x = np.random.default_rng(0).integers(0, 100, (8, 8, 1 << 17)).astype(np.float32)
    y = spmd(lambda v: jcoll.all_reduce(v, "x"), mesh)(put(mesh, x))
    np.testing.assert_array_equal(np.asarray(y), np.broadcast_to(x.sum(0), x.shape))
    y = spmd(lambda v: jcoll.all_to_all(v, "x", 0, 0), mesh)(put(mesh, x))
    np.testing.assert_array_equal(np.asarray(y), x.swapaxes(0, 1))
    y = spmd(lambda v: jcoll.all_gather(v, "x"), mesh)(put(mesh, x[:, 0]))
    np.testing.assert_array_equal(np.asarray(y), np.broadcast_to(x[:, 0], (8, *x[:, 0].shape)))
