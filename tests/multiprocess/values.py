"""Every op by every algorithm, against numpy; one process of tests/multiprocess/test_values.py.

Arguments: names of functions below, each of which checks something. A report "bits" has hashes of
results that must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rank
from jax.sharding import Mesh
from ops.cases import CASES, Case, case_id, dtype_of, inputs
from ops.test_algorithms import exact_inputs
from ops.test_values import check as check_case

import jcoll
from jcoll.algorithms import registry
from jcoll.comm.mesh import make_call
from jcoll.ops import _primitive
from jcoll.plan.ops import OPS

jax.config.update("jax_enable_x64", True)

DENSE = [case for case in CASES if not case.spec.index_inputs]
SHAPES = [(33,), (0,)]
LANES = (70001,)  # Several lanes, the last one short: csrc/shm/remote_run.h.
LARGE = (1_000_003,)


def algorithms(case: Case, n: int) -> list[str]:
    return ["direct", "auto", *(registry.supporting(case.op, n) if case.op in OPS else ())]


def agree(case: Case, mesh: Mesh, names: list[str], args: list, axis="x") -> None:
    """One program with every algorithm on every argument; run twice."""
    n = mesh.shape[axis]
    static = case.static(n)

    def all_of_them(args: list) -> dict[str, list]:
        def apply(name: str) -> list:
            call = make_call(case.op, axis, algorithm=name)
            return [_primitive.bind(case.spec, *arrays, call=call, **static) for arrays in args]

        return {name: apply(name) for name in names}

    with jax.numpy_dtype_promotion("standard"):
        fn, placed = rank.program(all_of_them, mesh), rank.put(mesh, args)
        first, second = fn(placed), fn(placed)
    for i, arrays in enumerate(args):
        expected = case.spec.stacked(np, *arrays, **static)
        for name in names:
            compare(case, n, name, arrays, expected, first[name][i], second[name][i])


def compare(
    case: Case, n: int, name: str, arrays: list, expected: list, outs: list, again: list
) -> None:
    mine = [rank.local(out) for out in outs]
    for m, a in zip(mine, again, strict=True):
        for index, part in rank.local(a).items():
            assert part.tobytes() == m[index].tobytes(), "another run gave other bits"
    where = f"{case_id(case)} by {name}, {arrays[0].dtype}{arrays[0].shape}"
    try:
        outs = [whole(m, e, case.spec) for m, e in zip(mine, expected, strict=True)]
        check_case(case, n, arrays, outs)
    except AssertionError as e:
        raise AssertionError(f"{where}: {e}") from e


def whole(mine: dict, expected: Any, spec: Any) -> np.ndarray:
    """What check_case compares: the parts that are here, and those of others as expected; where all
    ranks get the same, as here: the reference may be rounded otherwise (see `bits` for theirs)."""
    full = np.array(expected)
    if spec.replicated:
        full[:] = next(iter(mine.values()))
    for (r,), part in mine.items():
        assert part.dtype == full.dtype and part.shape == full.shape[1:]
        full[r] = part
    return full


def matrix() -> None:
    """All ops, algorithms and dtypes at small and odd sizes."""
    mesh = rank.mesh_of()
    n = mesh.size
    for case in DENSE:
        dtypes = [d for d in ("float32", "bfloat16", "int32", "int8", "bool") if d in case.dtypes]
        args = [
            exact_inputs(case, n, shape, dtype, seed)
            for seed, (shape, dtype) in enumerate((s, d) for s in SHAPES for d in dtypes)
        ]
        agree(case, mesh, algorithms(case, n), args)


def one_of_each() -> Iterator[Case]:
    seen = set()
    for case in DENSE:
        if case.op not in seen:
            seen.add(case.op)
            yield case


def lanes() -> None:
    """All ops and algorithms with messages of several lanes."""
    mesh = rank.mesh_of()
    n = mesh.size
    for case in one_of_each():
        args = [exact_inputs(case, n, LANES, dtype, n) for dtype in ("float32", "int8")]
        agree(case, mesh, algorithms(case, n), args)


def large() -> None:
    """Several MiB."""
    mesh = rank.mesh_of()
    n = mesh.size
    for case in one_of_each():
        agree(case, mesh, algorithms(case, n), [exact_inputs(case, n, LARGE, "float32", n)])


def permuted() -> None:
    """A mesh whose devices are in another order than the processes."""
    devices = np.random.default_rng(1).permutation(np.array(jax.devices()))
    mesh = Mesh(devices, ("x",))
    n = mesh.size
    for case in one_of_each():
        agree(case, mesh, algorithms(case, n), [exact_inputs(case, n, (33,), "float32", n)])


def bits() -> None:
    """Sums that round: within the error of n roundings, and the same bits everywhere."""
    mesh = rank.mesh_of()
    n = mesh.size
    for name in ["direct", "auto", *registry.supporting("all_reduce", n)]:
        for dtype in ("float32", "bfloat16"):
            for size in (4099, 300_001):
                x = np.random.default_rng(0).normal(size=(n, size)).astype(dtype_of(dtype))
                fn = rank.program(lambda v, a=name: jcoll.all_reduce(v, "x", algorithm=a), mesh)
                parts = list(rank.local(fn(rank.put(mesh, x))).values())
                wide = x.astype(np.float64)
                bound = n * float(jnp.finfo(dtype).eps) * np.abs(wide).sum(0)
                assert (np.abs(parts[0].astype(np.float64) - wide.sum(0)) <= bound).all()
                hashes = sorted({hashlib.sha256(p.tobytes()).hexdigest() for p in parts})
                rank.report("bits", what=f"{name} {dtype} {size}", hashes=hashes)


def rows() -> None:
    """What moves rows, whose counts are known at run time only; short and long ones."""
    mesh = rank.mesh_of()
    n = mesh.size
    for case in CASES:
        if case.spec.index_inputs:
            args = [inputs(case, n, shape, "float32", 3) for shape in ((5,), (0,), (20_001,))]
            agree(case, mesh, ["direct", "auto"], args)


if __name__ == "__main__":
    for argument in rank.ARGS:
        globals()[argument]()
    rank.report("done")
