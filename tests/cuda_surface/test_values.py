"""What the programs for CUDA compute, with the meaning of their custom calls in the place of
kernels: that ops which are made of others are made of them rightly, and every call says all that
its kernel needs to know.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from cuda_programs import stand_in, two_nvlink_domains
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.cases import CASES, Case, case_id, inputs
from ops.meshes import mesh_of
from ops.test_values import check, run

import jcoll
from jcoll.algorithms.hierarchical import HIERARCHICAL_OPS


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    stand_in(monkeypatch)


def dtypes(case: Case) -> list[str]:
    """Some that are treated differently, of those that CUDA's kernels do."""
    op = case.static(2).get("op")
    if op in ("and", "or"):
        return ["bool"]
    moved = ["complex64", "bool"] if op is None else []
    some = [
        "float32",
        "float8_e4m3fn",
        *(["int8", "int4", *moved] if not case.index_arrays else []),
    ]
    return [d for d in some if d in case.dtypes]


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_direct(case: Case, n: int) -> None:
    shapes = [(3, 2), ()] if n == 4 and case.index_arrays is None else [(3, 2)]
    args = [
        inputs(case, n, shape, dtype, seed)
        for seed, (shape, dtype) in enumerate((s, d) for s in shapes for d in dtypes(case))
    ]
    assert args
    with jax.numpy_dtype_promotion("standard"):
        outs = run(case, n, "direct", args)
    for arrays, out in zip(args, outs, strict=True):
        check(case, n, arrays, out)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "multimem", "two_shot"])
def test_means(algorithm: str) -> None:
    """Plans divide at the end, kernels by themselves."""
    case = Case("all_reduce", lambda n: {"op": "mean"})
    args = [inputs(case, 4, (5,), "float32", 1)]
    check(case, 4, args[0], run(case, 4, algorithm, args)[0])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op in HIERARCHICAL_OPS], ids=case_id
)
def test_two_levels(case: Case, monkeypatch) -> None:
    two_nvlink_domains(monkeypatch, 4)
    dtypes_ = [d for d in [*dtypes(case), "bfloat16", "int16"] if d in case.dtypes]
    if case.static(4).get("op") in ("and", "or"):
        dtypes_ = ["bool"]
    args = [inputs(case, 4, (3, 2), dtype, seed) for seed, dtype in enumerate(dtypes_)]
    with jax.numpy_dtype_promotion("standard"):
        outs = run(case, 4, "hierarchical", args)
    for arrays, out in zip(args, outs, strict=True):
        check(case, 4, arrays, out)


@pytest.mark.parametrize("order", [None, [5, 2, 7, 0, 1, 6, 3, 4]])
@pytest.mark.parametrize("axes", ["x", "y", ("x", "y"), ("y", "x")])
def test_groups(axes, order) -> None:
    devices = np.array(jax.devices())[list(range(8)) if order is None else order]
    mesh = Mesh(devices.reshape(2, 4), ("x", "y"))
    x = jax.device_put(
        np.arange(16, dtype=np.int32).reshape(8, 2), NamedSharding(mesh, P(("x", "y")))
    )

    def both(x):
        ours = jcoll.all_gather(x, axes, algorithm="direct")
        groups = [[0, 2], [1, 3]] if axes == "y" else None
        other = jcoll.all_gather(x * 3, axes, axis_index_groups=groups, algorithm="direct")
        theirs = jax.lax.all_gather(x, axes)
        again = jax.lax.all_gather(x * 3, axes, axis_index_groups=groups)
        return (ours - theirs).sum()[None], (other - again).sum()[None]

    fn = jax.shard_map(both, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")))
    if axes == "y":
        fn = jax.shard_map(
            both, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")), check_vma=False
        )
    for difference in jax.jit(fn)(x):
        np.testing.assert_array_equal(difference, 0)


def test_bad_counts_poison() -> None:
    """all_to_all_v is several programs' worth of calls, none of which can fail: nothing travels."""
    mesh = mesh_of(4)
    counts = np.array([[1, 1, 1, 1]] * 3 + [[1, -1, 1, 1]], np.int32).reshape(-1)
    x = np.ones((16, 2), np.float32)

    def body(x, counts):
        y, _ = jcoll.all_to_all_v(x, counts, "x", output_size=4, algorithm="direct")
        return y

    fn = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    assert np.isnan(jax.jit(fn)(x, counts)).all()


def test_gradient() -> None:
    mesh = mesh_of(4)
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    counts = np.tile(np.array([2, 0, 1, 1], np.int32), 4)

    def loss(algorithm):
        def body(x, counts):
            y, _ = jcoll.all_to_all_v(x, counts, "x", output_size=12, algorithm=algorithm)
            rank = jax.lax.axis_index("x").astype(y.dtype)
            z = jcoll.ppermute(y * (rank + 1), "x", [(0, 1), (1, 0)], algorithm=algorithm)
            z = jcoll.gather(z, "x", root=1, algorithm=algorithm)
            return (z**2 + z).sum()[None]

        fn = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        return lambda x: fn(x, counts).sum()

    ours, theirs = (jax.jit(jax.grad(loss(name)))(x) for name in ("direct", "xla"))
    assert np.abs(theirs).max() > 0
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
