"""Which algorithm a call gets on CUDA, why, and the errors of those that cannot be had."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import project_scripts
import pytest
from cuda_programs import XLA_COLLECTIVE, custom_calls, lowered, two_nvlink_domains
from ops.meshes import mesh_of

import jcoll
from jcoll.algorithms import kernels, registry
from jcoll.comm.group import Groups
from jcoll.comm.mesh import Call
from jcoll.ops import SPECS, _cuda
from jcoll.runtime import cuda, decisions, world
from jcoll.tuning import table
from jcoll.tuning.candidates import Request, candidates
from jcoll.tuning.select import priced, select

ROOT = Path(__file__).resolve().parents[2]
estimate_cuda_costs = project_scripts.load("estimate_cuda_costs")
P = jax.P
N = 8


@pytest.fixture
def available(monkeypatch):
    """jcoll's CUDA runtime is there, and as for the rest this machine is what it is."""
    monkeypatch.setattr(cuda, "obstacle", lambda: None)


def over(body: Any, *, dtype: Any = np.float32, shape: Any = (N, 4), **more: Any) -> Any:
    """(function, its argument) of a body over 8 ranks."""
    fn = jax.shard_map(
        body, mesh=mesh_of(N), in_specs=P("x"), out_specs=P("x"), check_vma=False, **more
    )
    return fn, jax.ShapeDtypeStruct(shape, dtype)


def decided(body: Any, **more: Any) -> list[Any]:
    """What is decided when the body is lowered for CUDA."""
    with decisions.listening() as rows:
        lowered(*over(body, **more))
    return rows


def all_reduce(x: Any, **more: Any) -> Any:
    return jcoll.all_reduce(x, "x", **more)


# By itself


def test_without_the_runtime() -> None:
    (row,) = decided(all_reduce)
    assert (row.algorithm, row.reason) == ("xla", "jcoll was built without CUDA")
    assert custom_calls(*over(all_reduce)) == []


def test_with_the_runtime(available) -> None:
    (row,) = decided(all_reduce)
    assert (row.algorithm, row.reason) == ("direct", "fastest, estimated at 1K")
    by_name = {c.algorithm: c for c in row.candidates}
    assert by_name["two_shot"].source == "estimated at 1K, shipped"
    assert by_name["ring"].us is None, "plans have no model there"
    assert by_name["multimem"].obstacle == "direct takes it where the GPUs can"
    (call,) = custom_calls(*over(all_reduce))
    assert call["algorithm"] == "direct"


@pytest.mark.parametrize("op", SPECS)
def test_every_op_is_served(op) -> None:
    request = Request(op, (N,), 1 << 20, device_kind="cuda", multimem_obstacle="not here")
    choice = select(request)
    assert choice.algorithm == "direct"
    assert choice.reason in ("fastest, estimated", "jcoll's only algorithm for this op") or (
        op in registry.RAGGED_OPS and choice.reason == "the only one that serves"
    )


@pytest.mark.parametrize(
    ("body", "dtype", "reason"),
    [
        (
            partial(all_reduce, op="prod"),
            np.complex64,
            "on CUDA no kernel has a prod of complex64",
        ),
        (partial(all_reduce, op="and"), np.int32, "on CUDA no kernel has the bitwise 'and'"),
        (
            partial(all_reduce, axis_index_groups=[[0, 1, 2], [3, 4, 5, 6, 7]]),
            np.float32,
            "on CUDA groups must be of equal size",
        ),
    ],
)
def test_what_no_kernel_does(available, body, dtype, reason) -> None:
    (row,) = decided(body, dtype=dtype)
    assert (row.algorithm, row.reason) == ("xla", reason)
    with pytest.raises(ValueError, match=f"cannot serve this call: {reason}"):
        lowered(*over(partial(body, algorithm="direct"), dtype=dtype))


def test_more_ranks_than_a_kernel_serves(available) -> None:
    mesh = SimpleNamespace(devices=np.array(jax.devices()[:1]))
    call = Call("all_gather", ("x",), Groups(80), "auto", 0.0, "")
    assert _cuda.placement(mesh, call).obstacle == "80 ranks are more than a kernel's 72"
    text = (ROOT / "cuda/kernels/peer_table.h").read_text()
    assert f"kMaxRanks = {kernels.MAX_RANKS};" in text


def test_kernels_of_the_runtime() -> None:
    """The runtime's table of algorithms is the one by which programs are lowered."""
    text = (ROOT / "cuda/ffi/route.cc").read_text()
    table = re.search(r"kAlgorithms\[\] = {(.*?)};", text, re.DOTALL)
    assert table
    rows = re.findall(r'{"(\w+)", "(\w+)"}', table[1])
    assert rows == [(op, name) for op, names in kernels.BY_OP.items() for name in names]


def test_setting(available, monkeypatch) -> None:
    config = SimpleNamespace(algorithm="ring")
    monkeypatch.setattr("jcoll.comm.mesh.config", config)
    assert decided(all_reduce)[0].algorithm == "ring"
    rows = decided(lambda x: jcoll.all_to_all_v(x, jnp.zeros(N, int), "x", output_size=1)[0])
    assert rows[0].algorithm == "direct", "plans are not for rows there"


# Asked for


def test_an_error_on_gpus_that_lack_the_runtime(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "has_gpus", lambda mesh: True)
    monkeypatch.setattr(cuda, "placement", lambda *_: world.Placement())
    text = (
        r"jcoll.all_reduce over axis 'x': algorithm='ring' cannot serve this call: jcoll was built "
        r"without CUDA\.\n  Available here: auto, xla\."
    )
    with pytest.raises(ValueError, match=text):
        lowered(*over(partial(all_reduce, algorithm="ring")))


def test_multimem() -> None:
    body = partial(all_reduce, algorithm="multimem")
    (call,) = custom_calls(*over(body))
    assert (call["algorithm"], call["plan_op"]) == ("multimem", "")
    with pytest.raises(ValueError, match="the switch has no prod of float32"):
        lowered(*over(partial(body, op="prod")))
    with pytest.raises(ValueError, match="the switch has no sum of int16"):
        lowered(*over(body, dtype=np.int16))
    with pytest.raises(ValueError, match="the switch has no sum of float8_e5m2"):
        lowered(*over(body, dtype=jnp.float8_e5m2))


def test_multimem_elsewhere() -> None:
    body = partial(all_reduce, algorithm="multimem")
    text = (
        r"'multimem' cannot serve this call: only CUDA has it\.\n"
        r"  Available here: auto, direct, .*ring.*, xla\."
    )
    with pytest.raises(ValueError, match=text):
        lowered(*over(body), platforms=("cpu",))
    with pytest.raises(ValueError, match="the platform has no jcoll runtime"):
        lowered(*over(body), platforms=("tpu",))
    with pytest.raises(ValueError, match="algorithm='multimem' does not serve this op"):
        lowered(*over(lambda x: jcoll.all_gather(x, "x", algorithm="multimem")))
    with pytest.raises(ValueError, match=r"Algorithms of all_reduce: auto, .*, multimem, nccl\."):
        lowered(*over(partial(all_reduce, algorithm="no_such")))


def test_plans_of_rows() -> None:
    def body(x: Any, name: str) -> Any:
        return jcoll.all_to_all_v(x, jnp.zeros(N, int), "x", output_size=4, algorithm=name)[0]

    text = r"'pairwise' .*: on CUDA plans move blocks of one size\.\n .*: auto, direct, xla\."
    with pytest.raises(ValueError, match=text):
        lowered(*over(partial(body, name="pairwise")))


# Where the ranks are


def gpus(domains: Any, name: str = "slice_index") -> Any:
    devices = [
        SimpleNamespace(**{name: domain}, id=i, process_index=i, platform="gpu")
        for i, domain in enumerate(domains)
    ]
    return SimpleNamespace(shape={"x": 2, "y": 4}, devices=np.array(devices, object).reshape(2, 4))


@pytest.mark.parametrize("name", ["slice_index", "partition_index"])
def test_nvlink_domains(name) -> None:
    mesh = gpus([7] * 4 + [3] * 4, name)
    assert cuda.placement(mesh, ("y",), 4, []) == world.Placement()
    assert cuda.placement(mesh, ("x",), 2, []).host_of == (0, 1) * 4
    assert cuda.placement(mesh, ("x", "y"), 8, []).host_of == (0,) * 4 + (1,) * 4
    halves = [0, 0, 0, 0, 1, 1, 1, 1]
    assert cuda.placement(mesh, ("x", "y"), 8, halves).host_of is None


def test_gpus_of_unknown_domains_are_apart() -> None:
    """As many domains as processes: jcoll then leaves them to XLA."""
    found = cuda.placement(gpus([0] * 8, "other"), ("y",), 4, [])
    assert found.host_of == tuple(range(8))


HOSTS, RAILS, EVERYBODY = ([*range(8)], 4), ([0, 4, 1, 5, 2, 6, 3, 7], 2), ([*range(8)], 8)
TWO_LEVELS: dict[str, tuple[Any, list[tuple[str, str, Any]]]] = {
    "all_reduce": (
        all_reduce,
        [
            ("reduce_scatter", "direct", HOSTS),
            ("all_reduce", "nccl", RAILS),
            ("all_gather", "direct", HOSTS),
        ],
    ),
    "reduce_scatter": (
        lambda x: jcoll.reduce_scatter(x, "x"),
        [("reduce_scatter", "direct", HOSTS), ("reduce_scatter", "nccl", RAILS)],
    ),
    "max": (
        partial(all_reduce, op="max"),
        [
            ("reduce_scatter", "direct", HOSTS),
            ("all_gather", "nccl", RAILS),  # NCCL's max loses NaN.
            ("all_gather", "direct", HOSTS),
        ],
    ),
    "all_gather": (
        lambda x: jcoll.all_gather(x, "x"),
        [("all_gather", "nccl", RAILS), ("all_gather", "direct", HOSTS)],
    ),
    "all_to_all": (
        lambda x: jcoll.all_to_all(x, "x", 0, 0),
        [("all_to_all", "direct", HOSTS), ("all_to_all", "nccl", RAILS)],
    ),
    "all_to_all_v": (
        lambda x: jcoll.all_to_all_v(x, jnp.ones(N, int), "x", output_size=N)[0],
        [
            ("all_gather", "nccl", EVERYBODY),
            ("all_gather", "direct", HOSTS),
            ("ragged_all_to_all", "direct", HOSTS),
            ("all_to_all", "nccl", RAILS),
        ],
    ),
}


@pytest.fixture
def two_domains(available, monkeypatch):
    two_nvlink_domains(monkeypatch, N)


@pytest.mark.parametrize("op", TWO_LEVELS)
def test_two_levels(two_domains, op) -> None:
    """Kernels inside an NVLink domain, NCCL's functions across, and nothing of XLA's."""
    body, expected = TWO_LEVELS[op]
    shape = (N, 4) if op in ("all_reduce", "max", "all_gather") else (N * N, 2 << 18)
    row, *parts = decided(body, shape=shape)
    assert (row.algorithm, row.reason) == ("hierarchical", "its ranks are on several hosts")
    assert {part.algorithm for part in parts} == {"direct", "nccl"}
    fn, x = over(partial(body), shape=shape)
    calls = custom_calls(fn, x)
    found = [(c["op"], c["algorithm"], (c["groups"], c["group_size"])) for c in calls]
    assert found == expected
    assert not XLA_COLLECTIVE.search(lowered(fn, x).as_text())


def test_one_piece_between_domains(two_domains) -> None:
    """Pieces are for XLA, which overlaps them: these are on one stream."""
    assert len(custom_calls(*over(all_reduce, shape=(N, 4 << 20)))) == 3


def test_narrow_floats_cross_in_float32(two_domains) -> None:
    calls = custom_calls(*over(all_reduce, dtype=jnp.bfloat16))
    assert [call["dtype"] for call in calls] == ["float32", "float32", "bfloat16"]


def test_deadlines_between_domains(two_domains) -> None:
    calls = custom_calls(*over(partial(all_reduce, timeout_s=7.5)))
    assert {call["timeout_s"] for call in calls} == {7.5}


def test_what_has_no_two_levels(two_domains) -> None:
    with pytest.raises(ValueError, match="'ring' cannot serve this call: its ranks are on several"):
        lowered(*over(partial(all_reduce, algorithm="ring")))
    (row,) = decided(lambda x: jcoll.gather(x, "x"))
    assert row.reason.endswith("and this op has no hierarchical algorithm")


def test_nccl_where_it_is_asked_for(two_domains) -> None:
    """NCCL reaches all ranks; nobody gets it unasked."""
    (call,) = custom_calls(*over(partial(all_reduce, algorithm="nccl")))
    assert (call["algorithm"], call["plan_op"], call["group_size"]) == ("nccl", "", N)
    (row, *_) = decided(all_reduce)
    (candidate,) = (c for c in row.candidates if c.algorithm == "nccl")
    assert candidate.obstacle and candidate.obstacle.startswith("only where it is asked for")
    with pytest.raises(ValueError, match="algorithm='nccl' does not serve this op"):
        decided(lambda x: jcoll.gather(x, "x", algorithm="nccl"))
    with pytest.raises(ValueError, match="'nccl' cannot serve this call: only CUDA has it"):
        lowered(*over(partial(all_reduce, algorithm="nccl")), platforms=("cpu",))


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        ("int16", "int32"),
        ("uint16", "uint32"),
        ("float8_e5m2", "float32"),
        ("bfloat16", "bfloat16"),
        ("bool", "uint8"),
    ],
)
def test_what_nccl_adds_in(dtype, wire) -> None:
    body = partial(all_reduce, algorithm="nccl", op="max" if dtype == "bool" else "sum")
    (call,) = custom_calls(*over(body, dtype=jnp.dtype(dtype)))
    assert call["dtype"] == wire
    gathered = partial(jcoll.all_gather, axis_name="x", algorithm="nccl")
    (call,) = custom_calls(*over(gathered, dtype=jnp.dtype(dtype)))
    assert call["dtype"] == dtype


# jax.lax's collectives


def lax_bodies() -> dict[str, Any]:
    index = np.arange(N, dtype=np.int32)

    def ragged(x: Any) -> Any:
        one = jnp.ones_like(index)
        return jax.lax.ragged_all_to_all(x, x, index * 0, one, index * 0, one, axis_name="x")

    return {
        "all_reduce": lambda x: jax.lax.psum(x, "x"),
        "all_gather": lambda x: jax.lax.all_gather(x, "x"),
        "reduce_scatter": lambda x: jax.lax.psum_scatter(x.reshape(N, -1), "x"),
        "all_to_all": lambda x: jax.lax.all_to_all(x.reshape(N, -1), "x", 0, 0),
        "ragged_all_to_all": ragged,
        "broadcast": lambda x: jax.lax.pbroadcast(x, "x", 3),
        "ppermute": lambda x: jax.lax.ppermute(x, "x", [(0, 1)]),
    }


@pytest.mark.parametrize("op", lax_bodies())
def test_intercept(available, op) -> None:
    fn, x = over(lax_bodies()[op], shape=(N, 8))
    assert custom_calls(fn, x) == []
    with jcoll.intercept(), decisions.listening() as rows:
        (call,) = custom_calls(fn, x)
    (row,) = rows
    assert (row.op, row.algorithm) == (op, "direct")
    assert re.match(r"jax\.lax\.\w+, intercepted: ", row.reason)
    assert call["op"] == ("ragged_all_to_all" if op == "ppermute" else op)
    assert call["call_site"].startswith("cuda_surface/test_choice.py:")


def test_intercept_what_no_kernel_does(available) -> None:
    fives = [[0, 1, 2], [3, 4, 5, 6, 7]]
    fn, x = over(lambda x: jax.lax.psum(x, "x", axis_index_groups=fives))
    with jcoll.intercept():
        assert custom_calls(fn, x) == []
        assert "stablehlo.all_reduce" in lowered(fn, x).as_text()


def test_intercept_without_the_runtime() -> None:
    fn, x = over(lax_bodies()["broadcast"])
    with jcoll.intercept(), decisions.listening() as rows:
        text = lowered(fn, x).as_text()
    assert "stablehlo.collective_broadcast" in text
    assert rows[0].reason.endswith("not intercepted: jcoll was built without CUDA")


# Costs


def test_the_table_is_what_its_script_writes() -> None:
    assert estimate_cuda_costs.PATH.read_text() == estimate_cuda_costs.text()
    shipped = table.shipped("cuda")
    assert shipped is not None and shipped.source == "estimated"
    assert {row.op for row in shipped.rows} == set(SPECS)


def test_a_broadcast_is_spread_by_all_ranks() -> None:
    """In two shots, as its kernel's header has it: the root's link moves no more at more ranks."""
    us = {
        row.num_ranks: row.us["direct"]
        for row in estimate_cuda_costs.rows()
        if row.op == "broadcast" and row.nbytes == 1 << 28
    }
    assert us[64] < 2.1 * us[2]


def test_a_table_that_is_measured_or_not() -> None:
    text = estimate_cuda_costs.text()
    assert table.parse(text.replace('"source": "estimated"', '"since": 1')).source == "measured"
    with pytest.raises(table.TableError, match="source is 'guessed'"):
        table.parse(text.replace('"source": "estimated"', '"source": "guessed"'))


def test_candidates() -> None:
    request = Request("all_reduce", (N,), 1 << 20, device_kind="cuda")
    us = {c.algorithm: c.us for c in priced(request)}
    assert us["multimem"] < us["direct"] < us["one_shot"]
    on_cpu = candidates(Request("all_reduce", (N,), 1 << 20))
    assert "multimem" not in {c.algorithm for c in on_cpu}
    narrow = Request("all_reduce", (N,), 1024, is_narrow=True, is_mean=True, device_kind="cuda")
    able = {c.algorithm for c in candidates(narrow) if c.obstacle is None}
    assert able == {"direct", "one_shot", "two_shot", "multimem", "xla"}, "they divide in float32"
