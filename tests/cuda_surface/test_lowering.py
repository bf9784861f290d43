"""Every op by every algorithm, lowered for CUDA on this machine: the custom calls and the value of
every attribute, as cuda/ffi/call_site.h reads them.

Generated from the registries of ops and of algorithms.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from cuda_programs import ATTRIBUTES, ROW_ATTRIBUTES, custom_calls
from jax.sharding import Mesh
from ops.cases import CASES, Case, case_id, inputs
from ops.meshes import mesh_of, put, spmd

import jcoll
from jcoll.algorithms import kernels, registry
from jcoll.comm.mesh import make_call
from jcoll.ops import _primitive

N = 8
SHAPE = (5, 3)
P = jax.P

# What an op is made of that has neither kernel nor plan.
MADE_OF = {
    "reduce": ["all_reduce"],
    "gather": ["ragged_all_to_all"],
    "scatter": ["ragged_all_to_all"],
    "ppermute": ["ragged_all_to_all"],
    "all_to_all_v": ["all_gather", "ragged_all_to_all"],
    "all_to_all_v_back": ["all_gather", "ragged_all_to_all"],
}


def algorithms(op: str) -> list[str]:
    plans = registry.supporting(op, N)
    if op in registry.RAGGED_OPS:
        plans = [name for name in plans if name in kernels.BY_OP.get(op, ())]
    return ["direct", *plans, *kernels.only_on_cuda(op)]


def program(case: Case, algorithm: str, dtype: str, **more: Any) -> tuple[Any, Any]:
    """(function, its arguments): the case's primitive on all ranks."""

    def per_rank(args: list) -> list:
        call = make_call(case.op, "x", algorithm=algorithm, **more)
        return _primitive.bind(case.spec, *args, call=call, **case.static(N))

    mesh = mesh_of(N)
    fn = spmd(per_rank, mesh, check_vma=False)
    return fn, put(mesh, inputs(case, N, SHAPE, dtype, seed=0))


def served(case: Case, dtype: str, algorithm: str) -> bool:
    """Whether a CUDA kernel reduces so."""
    op = case.static(N).get("op")
    if algorithm == "multimem":
        floats = dtype in ("float32", "bfloat16", "complex64")
        return op in (("sum", "mean") if floats else ("sum", "min", "max")) and dtype != "bool"
    if op in ("and", "or"):
        return dtype == "bool"
    return dtype != "complex64" or op in ("sum", "mean", None)


def expected(case: Case, algorithm: str, dtype: str) -> dict[str, Any]:
    """The attributes of a call of one kernel or plan, by the registries alone."""
    static = case.static(N)
    reduce_op = static.get("op", "")
    is_plan = algorithm in registry.names(case.op)
    is_plan = is_plan and algorithm not in kernels.BY_OP.get(case.op, ())
    wire = "uint8" if dtype == "bool" and reduce_op else dtype
    count = math.prod(SHAPE)
    given = (N, *SHAPE) if case.spec.blocked_in else SHAPE
    return {
        "op": case.op,
        "algorithm": algorithm,
        "plan_op": case.op if is_plan else "",
        "axis": "'x'",
        "signature": f"{dtype}[{','.join(map(str, given))}]",
        "dtype": wire,
        "timeout_s": 2.5,
        "reduce_op": {"and": "min", "or": "max"}.get(reduce_op, reduce_op)
        if not (is_plan and reduce_op == "mean")
        else "sum",  # Divided at the end.
        "count": count,
        "root": static.get("root", -1),
        "groups": list(range(N)),
        "group_size": N,
        "communication_id": 2,
    }


def check_types(call: dict[str, Any]) -> None:
    rows = ROW_ATTRIBUTES if call["op"] == "ragged_all_to_all" else ()
    assert set(call) == {*ATTRIBUTES, *rows}
    for name, kind in ATTRIBUTES.items():
        assert isinstance(call[name], kind), name


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matrix(case: Case) -> None:
    checked = 0
    for algorithm in algorithms(case.op):
        for dtype in ("float32", "bfloat16", "int32", "bool", "complex64"):
            if dtype not in case.dtypes or not served(case, dtype, algorithm):
                continue
            calls = custom_calls(*program(case, algorithm, dtype, timeout_s=2.5))
            for call in calls:
                check_types(call)
            if algorithm == "direct" and case.op in MADE_OF:
                assert [call["op"] for call in calls] == MADE_OF[case.op]
                assert {call["algorithm"] for call in calls} == {"direct"}
            elif case.op != "ragged_all_to_all":
                (call,) = calls
                assert call.pop("call_site").startswith("cuda_surface/test_lowering.py:")
                assert call == expected(case, algorithm, dtype)
            checked += 1
    assert checked


def test_ragged() -> None:
    (case,) = (case for case in CASES if case.op == "ragged_all_to_all")
    (call,) = custom_calls(*program(case, "direct", "bfloat16"))
    rows = {name: call[name] for name in ROW_ATTRIBUTES}
    assert rows == {"row_nbytes": 30, "updates_per_rank": 1, "input_rows": 12, "output_rows": 12}
    assert (call["op"], call["root"], call["timeout_s"]) == ("ragged_all_to_all", -1, 0.0)


@pytest.mark.parametrize(
    ("op", "kind", "rows"),
    [
        ("gather", {"root": 2}, (1, N)),
        ("scatter", {"root": 2}, (N, 1)),
        ("ppermute", {"perm": ((0, 1),)}, (1, 1)),
    ],
)
def test_blocks_as_rows(op: str, kind: dict, rows: tuple[int, int]) -> None:
    call = custom_calls(*program(Case(op, lambda n: kind), "direct", "float32"))[0]
    assert (call["input_rows"], call["output_rows"]) == rows
    assert call["row_nbytes"] == 4 * math.prod(SHAPE)
    assert call["updates_per_rank"] == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats(dtype: str) -> None:
    case = Case("all_reduce", lambda n: {"op": "sum"})
    for algorithm, wire in [("direct", dtype), ("two_shot", dtype), ("ring", "float32")]:
        (call,) = custom_calls(*program(case, algorithm, dtype))
        assert (call["dtype"], call["signature"]) == (wire, f"{dtype}[5,3]")
    (call,) = custom_calls(*program(Case("all_gather"), "direct", dtype))
    assert call["dtype"] == dtype


def test_what_travels_wider() -> None:
    (call,) = custom_calls(*program(Case("all_gather"), "direct", "int4"))
    assert (call["dtype"], call["signature"]) == ("int8", "int4[5,3]")


# Who takes part


def groups_of(mesh: Mesh, axes: Any, groups: Any = None) -> tuple[list[list[int]], int]:
    """`groups`, as lists, and communication ids are checked on the way."""

    def body(x: Any) -> Any:
        return jcoll.all_gather(x, axes, axis_index_groups=groups, algorithm="direct")

    spec = P(*mesh.axis_names)
    fn = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    (call,) = custom_calls(fn, np.zeros((*mesh.devices.shape, 2), np.float32))
    size = call["group_size"]
    flat = call["groups"]
    assert sorted(flat) == list(range(mesh.devices.size))
    return [flat[i : i + size] for i in range(0, len(flat), size)], size


def mesh(*sizes: int, order: Any = None) -> Mesh:
    devices = np.array(jax.devices())[list(range(N)) if order is None else order]
    return Mesh(devices.reshape(sizes), ("x", "y", "z")[: len(sizes)])


def test_groups_of_an_axis() -> None:
    assert groups_of(mesh(2, 4), "x") == ([[0, 4], [1, 5], [2, 6], [3, 7]], 2)
    assert groups_of(mesh(2, 4), "y") == ([[0, 1, 2, 3], [4, 5, 6, 7]], 4)


def test_groups_of_several_axes_are_in_the_order_of_the_axes() -> None:
    assert groups_of(mesh(2, 4), ("x", "y"))[0] == [list(range(8))]
    assert groups_of(mesh(2, 4), ("y", "x"))[0] == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert groups_of(mesh(2, 2, 2), ("z", "x"))[0] == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_axis_index_groups() -> None:
    halves = [[3, 1], [0, 2]]
    found = groups_of(mesh(2, 4), "y", halves)
    assert found == ([[3, 1], [0, 2], [7, 5], [4, 6]], 2)


def test_ids_are_places_in_the_mesh() -> None:
    """Not the devices' own ids: XLA numbers the device assignment."""
    shuffled = mesh(2, 4, order=[5, 2, 7, 0, 1, 6, 3, 4])
    assert groups_of(shuffled, "x") == groups_of(mesh(2, 4), "x")


# Whole programs


def test_gradients_loops_and_vmap() -> None:
    def exchange(_: Any, v: Any) -> Any:
        return jcoll.all_gather(v, "x", algorithm="direct").mean(0)

    def body(x: Any) -> Any:
        def loss(v: Any) -> Any:
            return (jcoll.all_gather(v, "x", algorithm="ring") ** 2).sum()

        g = jax.lax.fori_loop(0, 3, exchange, jax.grad(loss)(x))
        return jax.vmap(lambda v: jcoll.all_reduce(v, "x", algorithm="two_shot"))(g)

    fn = jax.shard_map(body, mesh=mesh(8), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    calls = custom_calls(fn, np.zeros((8, 4), np.float32))
    assert sorted((call["op"], call["algorithm"], call["plan_op"]) for call in calls) == [
        ("all_gather", "direct", ""),
        ("all_gather", "ring", "all_gather"),
        ("all_reduce", "two_shot", ""),
        ("reduce_scatter", "ring", "reduce_scatter"),
    ]


def test_an_algorithm_of_ones_own() -> None:
    @registry.algorithm("to_all_for_cuda", op="all_gather")
    def to_all(p: Any) -> None:
        r, n = p.ranks, p.num_ranks
        for k in range(1, n):
            p.send(r, (r + k) % n, chunk=r)

    (call,) = custom_calls(*program(Case("all_gather"), "to_all_for_cuda", "float32"))
    assert (call["algorithm"], call["plan_op"]) == ("to_all_for_cuda", "all_gather")


def test_export_for_cuda_and_cpu_at_once() -> None:
    fn, args = program(Case("all_reduce", lambda n: {"op": "sum"}), "direct", "float32")
    (call,) = custom_calls(fn, args, platforms=("cpu", "cuda"))
    assert call["op"] == "all_reduce"
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in ("jcoll_cuda_collective", "jcoll_collective")
    ]
    exported = jax.export.export(fn, platforms=["cuda"], disabled_checks=checks)(args)
    assert "jcoll_cuda_collective" in exported.mlir_module()
    assert "jcoll_collective" not in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
