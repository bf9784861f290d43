"""Whole programs: donation, export, partial-manual meshes, memory, what XLA makes of the calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.meshes import mesh_of, put, spmd
from runtime_programs import run_ok

import jcoll

N = 4


def test_donation() -> None:
    mesh = mesh_of(N)
    x = np.arange(N * 6.0).reshape(N, 6)
    mapped = jax.shard_map(
        lambda v: jcoll.barrier(jcoll.psum(v, "x") + v, "x"),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    f = jax.jit(mapped, donate_argnums=0)
    for _ in range(3):
        y = put(mesh, x)
        for _ in range(3):
            y = f(y)
        want = x
        for _ in range(3):
            want = want + want.sum(0)
        np.testing.assert_allclose(y, want)


def test_ragged_output_is_reused_in_place() -> None:
    """The output argument's buffer is the result's: nothing of its size is copied or allocated."""
    mesh = mesh_of(N)
    index = [np.zeros((N, N), np.int32) for _ in range(4)]

    def f(x: Any, out: Any, *index: Any) -> Any:
        return jcoll.ragged_all_to_all(x, out, *index, axis_name="x")

    want = np.random.default_rng(0).normal(size=(N, 5))
    output = jnp.copy(put(mesh, want))  # A buffer of JAX's: numpy's own cannot be donated.
    arrays = [put(mesh, np.ones((N, 3))), output, *put(mesh, index)]
    compiled = jax.jit(spmd(f, mesh), donate_argnums=1).lower(*arrays).compile()
    (call,) = [t for t in compiled.as_text().splitlines() if "jcoll_collective" in t]
    assert "output_to_operand_aliasing={{}: (2, {})}" in call  # After the partition id and x.
    before = [shard.data.unsafe_buffer_pointer() for shard in output.addressable_shards]
    result = compiled(*arrays)
    after = [shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards]
    np.testing.assert_array_equal(result, want)
    assert before == after


def test_export_round_trip() -> None:
    mesh = mesh_of(N)
    f = spmd(lambda v: (jcoll.psum(v, "x"), jcoll.all_to_all(v, "x", 0, 0, tiled=True)), mesh)
    x = put(mesh, np.random.default_rng(0).normal(size=(N, 8)))
    checks = [export.DisabledSafetyCheck.custom_call("jcoll_collective")]
    exported = export.export(f, disabled_checks=checks)(x)
    again = export.deserialize(exported.serialize())
    jax.tree.map(np.testing.assert_array_equal, again.call(x), f(x))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "or"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_groups_of_unequal_size_are_lowered_for(platform: str, op: str) -> None:
    """lax's own collectives refuse them on TPU."""
    groups = [[0, 1, 2], [3]]
    f = spmd(lambda v: jcoll.all_reduce(v, "x", op=op, axis_index_groups=groups), mesh_of(N))
    exported = export.export(f, platforms=[platform])(jax.ShapeDtypeStruct((N, 3), jnp.int32))
    by_gather = platform == "tpu" or op == "or"
    assert ("stablehlo.all_gather" in exported.mlir_module()) == by_gather


SAVED = """
import pickle
from jax import export
from jax.experimental import serialize_executable
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
mesh = mesh_of(N)
given = integers(N, 3)
x = place(given, mesh)
def check(fn):
    np.testing.assert_array_equal(fn(x), np.broadcast_to(given.sum(0), (N, 3)))
for algorithm in ("direct", "ring"):
    fn = program(lambda x: jcoll.all_reduce(x, "x", algorithm=algorithm), mesh)
    executable, exported = (f"{folder}/{algorithm}.{kind}" for kind in ("executable", "exported"))
    if write:
        check(fn)
        with open(executable, "wb") as f:
            pickle.dump(serialize_executable.serialize(fn.lower(x).compile()), f)
        checks = [export.DisabledSafetyCheck.custom_call("jcoll_collective")]
        with open(exported, "wb") as f:
            f.write(export.export(fn, disabled_checks=checks)(x).serialize())
    else:
        with open(executable, "rb") as f:
            check(serialize_executable.deserialize_and_load(*pickle.load(f)))
        with open(exported, "rb") as f:
            check(export.deserialize(bytearray(f.read())).call)
        before = sum(hits)
        check(fn)
        assert sum(hits) > before, "compiled again"
print(sorted({row["algorithm"] for row in jcoll.metrics()}))
"""


def test_saved_programs_run_in_another_process(tmp_path: Any) -> None:
    """From the compilation cache, as serialized executables, and exported; plans go by name."""
    for write in (True, False):
        head = f"folder, write = {str(tmp_path)!r}, {write}\n"
        assert run_ok(head + SAVED) == "['direct', 'ring']\n"


def test_ahead_of_time_compilation() -> None:
    mesh = mesh_of(N)
    f = spmd(lambda v: jcoll.psum(v, "x"), mesh)
    x = put(mesh, np.ones((N, 3)))
    compiled = f.lower(x).compile()
    np.testing.assert_array_equal(compiled(x), np.full((N, 3), 4.0))
    text = compiled.as_text()
    assert text.count('custom_call_target="jcoll_collective"') == 1
    assert "all-reduce" not in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "bool"])
def test_narrow_types_are_not_widened(dtype: str) -> None:
    """The custom call gets the type itself; XLA's own collectives would get a wider one."""
    mesh = mesh_of(N)
    x = put(mesh, np.ones((N, 64)).astype(jnp.dtype(dtype)))
    short = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "f8e4m3fn", "int8": "s8"}
    hlo = short.get(dtype, "pred")
    moves = {
        "gather": lambda v: jcoll.all_gather(v, "x"),
        "all": lambda v: jcoll.ppermute(v, "x", [(0, 1)]),
    }
    if dtype in ("bfloat16", "float16"):
        moves["sum"] = lambda v: jcoll.psum(v, "x")
    for f in moves.values():
        text = spmd(f, mesh).lower(x).compile().as_text()
        (line,) = [t for t in text.splitlines() if "jcoll_collective" in t]
        assert f"{hlo}[" in line.split("custom-call")[0]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_partial_manual(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(kind, kind))
    x = jax.device_put(np.arange(32.0).reshape(4, 8), NamedSharding(mesh, P("x", "y")))

    def f(v: Any) -> Any:
        return jcoll.psum(v, "x"), jcoll.all_gather(v, "x", tiled=True)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(f, in_specs=P("x"), out_specs=(P(), P("x")), axis_names={"x"})
        total, gathered = jax.jit(mapped)(x)
        text = jax.jit(mapped).lower(x).compile().as_text()
    blocks = np.arange(32.0).reshape(2, 2, 8)
    np.testing.assert_array_equal(total, blocks.sum(0))
    np.testing.assert_array_equal(gathered, np.concatenate([np.arange(32.0).reshape(4, 8)] * 2))
    # The operand is not gathered over y: what is gathered, is gathered over x.
    assert "jcoll_collective" not in text


MEMORY = """
def peak():
    (line,) = [t for t in open("/proc/self/status") if t.startswith("VmHWM")]
    return int(line.split()[1]) << 10

mesh = mesh_of(N)
spec = NamedSharding(mesh, P("x"))
shape = (N * (4 << 20),)  # 16 MiB a rank.
ones = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=spec).lower().compile()
sum_up = program(lambda v: jcoll.all_reduce(v, "x"), mesh)
sum_up = sum_up.lower(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec)).compile()
before = peak()
x = jax.block_until_ready(ones())
y = jax.block_until_ready(sum_up(x))
print("extra", peak() - before - x.nbytes - y.nbytes)
"""


def test_memory_of_a_large_all_reduce() -> None:
    """The first call needs its input and output, and no copy of an array or of a part of one.

    In a process of its own: the peak is the process's, and only the first call can raise it.
    """
    found = run_ok(MEMORY)
    assert int(found.split("extra")[1]) < 8 << 20


def test_ragged_batches_of_more_rows_than_int32_counts() -> None:
    """Elements one after another have offsets beyond int32: they are exchanged one by one then."""

    def f(*arrays: Any) -> Any:
        return jax.vmap(lambda *a: jcoll.ragged_all_to_all(*a, axis_name="x"))(*arrays)

    for num_rows, calls in ((1 << 30, 2), ((1 << 30) - 1, 1)):
        rows = jax.ShapeDtypeStruct((N, 2, num_rows), np.int8)
        index = [jax.ShapeDtypeStruct((N, 2, N), np.int32)] * 4
        text = str(jax.make_jaxpr(spmd(f, mesh_of(N)))(rows, rows, *index))
        assert text.count("= jcoll_ragged_all_to_all[") == calls


def test_random_keys_travel() -> None:
    mesh = mesh_of(N)
    keys = jax.random.split(jax.random.key(0), N * N).reshape(N, N)
    counts = np.ones((N, N), np.int32)

    def f(k: Any, counts: Any) -> Any:
        outs = (
            jcoll.all_gather(k, "x"),
            jcoll.all_to_all(k, "x", 0, 0),
            jcoll.ppermute(k, "x", [(0, 1)]),
            jcoll.broadcast(k, "x", root=2),
            jcoll.barrier(k, "x"),
            jcoll.all_to_all_v(k, counts, "x", output_size=N)[0],
        )
        return [jax.random.key_data(y) for y in outs]

    got = spmd(f, mesh)(jax.device_put(keys, NamedSharding(mesh, P("x"))), put(mesh, counts))
    data = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(got[0][1], data)
    np.testing.assert_array_equal(got[1], data.swapaxes(0, 1))
    np.testing.assert_array_equal(got[2][1], data[0])
    np.testing.assert_array_equal(got[3][0], data[2])
    np.testing.assert_array_equal(got[4], data)
    np.testing.assert_array_equal(got[5], data.swapaxes(0, 1))


def test_mean_of_the_smallest_integers_is_a_float() -> None:
    mesh = mesh_of(N)
    x = put(mesh, np.ones((N, 3), np.int8))
    for dtype in ("int2", "int4", "uint4"):
        f = spmd(lambda v, dtype=dtype: jcoll.pmean(v.astype(dtype), "x"), mesh)
        np.testing.assert_array_equal(np.asarray(f(x)), np.ones((N, 3)))


@pytest.mark.parametrize("op", ["max", "min"])
def test_reference_keeps_nan_where_xla_reduces_in_vectors(op: str) -> None:
    x = np.arange(4 * 20_001, dtype=np.float32).reshape(4, -1)
    x[1, ::3] = np.nan
    got = jax.jit(jax.vmap(lambda v: jcoll.all_reduce(v, "i", op=op), axis_name="i"))(x)
    np.testing.assert_array_equal(got[0], getattr(x, op)(0))


@pytest.mark.parametrize("dtype", ["int2", "uint4"])
def test_integers_of_less_than_a_byte_by_xla(dtype: str) -> None:
    mesh = mesh_of(N)
    x = np.arange(N * N * 5, dtype=np.int32).reshape(N, -1) % 3 % 2
    counts = put(mesh, np.full((N, N), 2, np.int32))

    def f(v: Any, counts: Any) -> list:
        v, by_xla = v.astype(dtype), {"algorithm": "xla"}
        outs = (
            jcoll.all_reduce(v, "x", op="max", **by_xla),
            jcoll.all_gather(v, "x", **by_xla),
            jcoll.ppermute(v, "x", [(0, 1)], **by_xla),
            jcoll.all_to_all_v(v, counts, "x", output_size=2 * N, **by_xla)[0],
            jcoll.all_to_all_v(v, counts, "x", output_size=0, **by_xla)[1],
            jcoll.all_to_all_v(v, counts, "x", output_size=2, **by_xla)[0],
        )
        return [y.astype(jnp.int32) for y in outs]

    got = [np.asarray(y) for y in spmd(f, mesh)(put(mesh, x), counts)]
    np.testing.assert_array_equal(got[0][0], x.max(0))
    np.testing.assert_array_equal(got[1][0], x)
    np.testing.assert_array_equal(got[2][1], x[0])
    np.testing.assert_array_equal(got[3][1], x[:, 2:4].ravel())
    limits = jnp.iinfo(dtype)  # What stands for an error.
    assert (got[5] == (limits.min if dtype.startswith("i") else limits.max)).all()


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_where_only_xla_serves(op: str) -> None:
    """On some axes of a mesh, of which others are XLA's to divide: `auto` is then "xla"."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    x = np.arange(2.0 * 50, dtype=np.float32).reshape(2, -1)
    x[0, ::3] = x[1, ::5] = np.nan

    def f(v: Any) -> Any:
        return jcoll.all_reduce(v, "x", op=op), jcoll.reduce(v, "x", op=op)

    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    placed = jax.device_put(x, NamedSharding(mesh, P("x")))
    assert {row.algorithm for row in jcoll.explain(mapped, placed)} == {"xla"}
    everywhere, at_root = jax.jit(mapped)(placed)
    np.testing.assert_array_equal(everywhere, np.tile(getattr(x, op)(0), (2, 1)))
    np.testing.assert_array_equal(at_root[0], getattr(x, op)(0))
