"""jcoll.intercept: lax's results and gradients, on jcoll inside the context and on XLA outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from lax_programs import TARGET, N, integers, mesh_of, place, run_on, sharded

import jcoll

P = jax.P


# Each op, its value and its gradient


@dataclass(frozen=True)
class Op:
    body: Callable
    """From one rank's [N, 6] to an array with a leading dimension."""
    op: str
    """jcoll's name for it."""
    gradient: bool = True


def unreplicated(y: Any) -> Any:
    """y, typed as varying: so that every op's result can be sharded over the axis."""
    return (
        y if "x" in getattr(jax.typeof(y).mat, "varying", "x") else lax.pcast(y, "x", to="varying")
    )


GROUPS = [[0, 3, 5, 6], [7, 1, 2, 4]]
ROTATION = [(i, (i + 3) % N) for i in range(N)]
OPS = {
    "psum": Op(lambda x: lax.psum(x, "x"), "all_reduce"),
    "pmean": Op(lambda x: lax.pmean(x, "x"), "all_reduce"),
    "pmax": Op(lambda x: lax.pmax(x, "x"), "all_reduce", gradient=False),
    "pmin": Op(lambda x: lax.pmin(x, "x"), "all_reduce", gradient=False),
    "pmax_bool": Op(lambda x: lax.pmax(x > 5, "x"), "all_reduce", gradient=False),
    "pmin_bool": Op(lambda x: lax.pmin(x > -5, "x"), "all_reduce", gradient=False),
    "all_gather": Op(lambda x: lax.all_gather(x, "x", axis=1), "all_gather"),
    "all_gather_tiled": Op(lambda x: lax.all_gather(x, "x", axis=1, tiled=True), "all_gather"),
    "all_gather_invariant": Op(lambda x: lax.all_gather(x, "x", to="invarying"), "all_gather"),
    "all_gather_groups": Op(
        lambda x: lax.all_gather(x, "x", axis_index_groups=GROUPS), "all_gather"
    ),
    "psum_scatter": Op(lambda x: lax.psum_scatter(x, "x"), "reduce_scatter"),
    "psum_scatter_tiled": Op(
        lambda x: lax.psum_scatter(x, "x", scatter_dimension=0, tiled=True), "reduce_scatter"
    ),
    "all_to_all": Op(lambda x: lax.all_to_all(x, "x", 0, 0), "all_to_all"),
    # Between different dimensions and not tiled, lax's transposition raises.
    "all_to_all_forth": Op(lambda x: lax.all_to_all(x, "x", 0, 1), "all_to_all", gradient=False),
    "all_to_all_back": Op(lambda x: lax.all_to_all(x.T, "x", 1, 0), "all_to_all", gradient=False),
    "all_to_all_tiled": Op(lambda x: lax.all_to_all(x, "x", 0, 1, tiled=True), "all_to_all"),
    "all_to_all_groups": Op(
        lambda x: lax.all_to_all(x, "x", 0, 0, axis_index_groups=GROUPS, tiled=True), "all_to_all"
    ),
    "ppermute": Op(lambda x: lax.ppermute(x, "x", ROTATION), "ppermute"),
    "ppermute_partial": Op(lambda x: lax.ppermute(x, "x", [(1, 0), (5, 2)]), "ppermute"),
}


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients(name, check_vma):
    case = OPS[name]
    mesh = mesh_of(N)
    x = place(integers((N * N, 6)), mesh, P("x"))

    fn = jax.jit(sharded(lambda x: unreplicated(case.body(x)), check_vma, mesh))
    weighted = sharded(lambda x: weigh(unreplicated(case.body(x))), check_vma, mesh)
    gradient = jax.jit(jax.grad(lambda x: weighted(x).sum()))
    for program in [fn, gradient] if case.gradient else [fn]:
        expected = run_on("xla", program, x)
        with jcoll.intercept():
            found = run_on("jcoll", program, x)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
        assert found.sharding == expected.sharding


def weigh(y: Any) -> Any:
    """Another weight for every element and rank, so that no mistake in a gradient cancels."""
    weights = jnp.arange(y.size).reshape(y.shape) % 7 + lax.axis_index("x").astype(int) - 3
    return weights.astype(y.dtype) * y * y


def jcoll_ops(program: Callable, *args: Any) -> Any:
    with jcoll.intercept():
        return jcoll.explain(program, *args)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("name", OPS)
def test_eager(name, check_vma):
    case = OPS[name]
    mesh = mesh_of(N)
    x = place(integers((N * N, 6)), mesh, P("x"))
    fn = sharded(lambda x: unreplicated(case.body(x)), check_vma, mesh)
    expected = fn(x)
    jcoll.reset_metrics()
    with jcoll.intercept():
        np.testing.assert_array_equal(fn(x), expected)
    groups = 2 if "groups" in name else 1
    assert [(row["op"], row["calls"]) for row in jcoll.metrics()] == [(case.op, groups)]
    np.testing.assert_array_equal(fn(x), expected)
    assert sum(row["calls"] for row in jcoll.metrics()) == groups


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint32", "complex64"])
def test_dtypes(dtype):
    mesh = mesh_of(N)
    x = place(integers((N, 33)).astype(getattr(jnp, dtype)), mesh, P("x"))
    fn = jax.jit(
        sharded(lambda x: lax.psum(x, "x") + lax.all_gather(x, "x").sum(0, x.dtype), False)
    )
    expected = fn(x)
    with jcoll.intercept():
        found = run_on("jcoll", fn, x)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_psum_in_groups_of_any_size():
    x = place(integers((N, 5)), mesh_of(N), P("x"))
    groups = [[3, 0], [1, 2, 4], [5, 7, 6]]
    fn = jax.jit(sharded(lambda x: lax.psum(x, "x", axis_index_groups=groups), check_vma=False))
    rows = jcoll_ops(fn, x)
    assert [row.algorithm for row in rows] == ["direct"]
    with jcoll.intercept():
        found = np.asarray(fn(x))
    for group in groups:
        np.testing.assert_array_equal(
            found[group], np.asarray(x)[group].sum(0, keepdims=True).repeat(len(group), 0)
        )


# Axes


AXES_BODIES = {
    "psum": lambda x, axes: lax.psum(x, axes),
    "all_gather": lambda x, axes: lax.all_gather(x, axes),
    "psum_scatter": lambda x, axes: lax.psum_scatter(x, axes, tiled=True),
    "all_to_all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
    "ppermute": lambda x, axes: lax.ppermute(x, axes, [(0, 1), (1, 0)]),
}


AXES = ["y", ("x", "z"), ("x", "y", "z"), ("z", "x")]
AXES_CASES = [
    (name, axes)
    for name in AXES_BODIES
    for axes in AXES
    if (name, axes) != ("ppermute", ("z", "x"))  # See the next test.
]


@pytest.mark.parametrize(("name", "axes"), AXES_CASES, ids=str)
def test_axes_of_a_mesh(name, axes):
    mesh = mesh_of(2, 2, 2)
    x = place(integers((8 * N, 3)), mesh, P(("x", "y", "z")))
    fn = jax.jit(sharded(partial(AXES_BODIES[name], axes=axes), check_vma=False, mesh=mesh))
    expected = run_on("xla", fn, x)
    with jcoll.intercept():
        np.testing.assert_array_equal(run_on("jcoll", fn, x), expected)


def test_ppermute_in_another_order():
    """lax counts ranks in the mesh's order then or (later) refuses: that is its rule's to do."""
    mesh = mesh_of(2, 2, 2)
    x = place(integers((8 * N, 3)), mesh, P(("x", "y", "z")))
    fn = jax.jit(sharded(partial(AXES_BODIES["ppermute"], axes=("z", "x")), False, mesh))
    outcomes = []
    for enabled in (False, True):
        with jcoll.intercept(enabled=enabled):
            try:
                outcomes.append(np.asarray(run_on("xla", fn, x)).tolist())
            except RuntimeError as e:
                outcomes.append(str(e))
    assert outcomes[0] == outcomes[1]


def test_devices_in_another_order():
    devices = np.asarray(jax.devices())[[5, 2, 7, 0, 1, 6, 3, 4]]
    mesh = jax.sharding.Mesh(devices, ("x",), axis_types=(AxisType.Explicit,))
    x = place(integers((N, 3)), mesh, P("x"))
    fn = jax.jit(sharded(lambda x: lax.ppermute(x, "x", ROTATION), mesh=mesh))
    expected = fn(x)
    with jcoll.intercept():
        np.testing.assert_array_equal(run_on("jcoll", fn, x), expected)


def test_axis_of_one_rank():
    mesh = mesh_of(1, 8)
    x = place(integers((N, 8)), mesh, P(("x", "y")))

    def body(x):
        y = lax.all_gather(lax.psum(x, "x"), "x", tiled=True)
        return lax.ppermute(lax.psum_scatter(y, "x", tiled=True), "x", [(0, 0)])

    fn = jax.jit(sharded(body, check_vma=False, mesh=mesh))
    with jcoll.intercept():
        np.testing.assert_array_equal(run_on("neither", fn, x), x)


# What lax does not have on CPU


def ragged_arguments() -> tuple[np.ndarray, ...]:
    """One row from every rank to its successor and two to itself."""
    sends = np.zeros((N, N), np.int32)
    for rank in range(N):
        sends[rank, rank], sends[rank, (rank + 1) % N] = 2, 1
    inputs = (np.cumsum(sends, 1) - sends).astype(np.int32)
    outputs = (np.cumsum(sends, 0) - sends).astype(np.int32)
    return integers((N, 4, 3)), inputs, sends, outputs, sends.T.copy()


def ragged_expected() -> np.ndarray:
    rows, inputs, sends, outputs, _ = ragged_arguments()
    y = np.zeros_like(rows)
    for src in range(N):
        for dst in range(N):
            n = sends[src, dst]
            y[dst, outputs[src, dst] :][:n] = rows[src, inputs[src, dst] :][:n]
    return y


def ragged(rows: Any, *index: Any) -> Any:
    vectors = [x[0] for x in index]
    return lax.ragged_all_to_all(rows[0], jnp.zeros_like(rows[0]), *vectors, axis_name="x")[None]


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_ragged_all_to_all(check_vma):
    mesh = mesh_of(N)
    arguments = [place(x, mesh, P("x")) for x in ragged_arguments()]
    fn = jax.jit(sharded(ragged, check_vma, mesh))
    with jcoll.intercept():
        found = fn(*arguments)
        gradient = jax.jit(jax.grad(lambda *a: (fn(*a) ** 2).sum()))(*arguments)
    np.testing.assert_array_equal(found, ragged_expected())
    sent = np.arange(4)[None, :, None] < ragged_arguments()[2].sum(1)[:, None, None]
    np.testing.assert_array_equal(gradient, np.where(sent, 2 * np.asarray(arguments[0]), 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)unimplemented|ragged"):
        fn(*arguments)


def test_ragged_all_to_all_where_the_runtime_cannot():
    mesh = mesh_of(4, 2)
    rows = ragged_arguments()[0][:4]
    sends = np.ones((4, 4), np.int32)
    offsets = np.tile(np.arange(4, dtype=np.int32), (4, 1))
    arguments = [place(x, mesh, P("x")) for x in (rows, offsets, sends, offsets.T.copy(), sends)]
    fn = jax.jit(
        jax.shard_map(
            ragged, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
        )
    )
    (row,) = jcoll_ops(fn, *arguments)
    assert row.algorithm == "xla"
    with jcoll.intercept():
        np.testing.assert_array_equal(fn(*arguments), rows.swapaxes(0, 1))


def test_pbroadcast():
    mesh = mesh_of(N)
    x = place(integers((N, 3)), mesh, P("x"))
    fn = jax.jit(sharded(lambda x: lax.pbroadcast(x, "x", 5), mesh=mesh))
    with jcoll.intercept():
        np.testing.assert_array_equal(run_on("jcoll", fn, x), np.asarray(x)[5:6].repeat(N, 0))
    with pytest.raises(NotImplementedError, match="pbroadcast"):
        fn(x)


# Fallbacks


def fallback(fn: Callable, *args: Any) -> str:
    """Runs a program with one collective that jcoll does not serve; the reason."""
    expected = fn(*args)
    with jcoll.intercept():
        np.testing.assert_array_equal(fn(*args), expected)
        (row,) = jcoll.explain(fn, *args)
    assert row.algorithm == "xla"
    return row.reason


def test_mesh_that_is_partly_manual():
    mesh = mesh_of(4, 2)
    fn = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(x, "x"), mesh=mesh, axis_names={"x"}, in_specs=P("x"), out_specs=P()
        )
    )
    x = place(integers((8, 4)), mesh, P("x"))
    assert "['y'] are not manual" in fallback(fn, x)


def test_positional_axis():
    fn = jax.jit(sharded(lambda x: lax.psum(x, ("x", 0))[None], check_vma=False))
    assert "not all named" in fallback(fn, place(integers((N, 4)), mesh_of(N), P("x")))


def test_vmapped_axis():
    def body(x):
        return jax.vmap(lambda v: v + lax.psum(v, ("x", "b")), axis_name="b")(x)

    fn = jax.jit(sharded(body, check_vma=False))
    assert "not all named" in fallback(fn, place(integers((N * 3, 4)), mesh_of(N), P("x")))


def test_type_without_a_zero():
    fn = jax.jit(sharded(lambda x: lax.ppermute(x, "x", [(0, 1)]).astype(jnp.float32)))
    x = place(np.ones((N, 2)).astype(jnp.float8_e8m0fnu), mesh_of(N), P("x"))
    assert "has no zero" in fallback(fn, x)


def test_random_keys():
    mesh = mesh_of(N)
    keys = place(jax.random.split(jax.random.key(1), N), mesh, P("x"))
    rotate = sharded(lambda k: lax.ppermute(k, "x", ROTATION))
    assert "key<fry>" in fallback(jax.jit(lambda k: jax.random.key_data(rotate(k))), keys)


def test_what_lax_refuses():
    fn = jax.jit(sharded(lambda x: lax.psum_scatter(x > 5, "x", tiled=True)))
    x = place(integers((N * N, 4)), mesh_of(N), P("x"))
    for enabled in (False, True):
        with jcoll.intercept(enabled=enabled), pytest.raises(TypeError, match="dtype bool"):
            fn(x)


# Programs


def test_algorithm_xla_is_not_intercepted():
    fn = jax.jit(sharded(lambda x: x + jcoll.all_reduce(x, "x", algorithm="xla")))
    x = place(integers((N, 4)), mesh_of(N), P("x"))
    with jcoll.intercept():
        run_on("xla", fn, x)
        assert [row.algorithm for row in jcoll.explain(fn, x)] == ["xla"]


def test_control_flow_and_remat():
    @jax.checkpoint
    def step(carry, x):
        carry = carry + lax.psum(x * x, "x")
        return lax.cond(carry.sum() > 0, lambda c: c, lambda c: -c, carry), x

    def body(x):
        y, _ = lax.scan(step, jnp.zeros_like(x[0]), x)
        y = lax.fori_loop(0, 3, lambda _, v: lax.ppermute(v, "x", ROTATION), y)
        return jax.vmap(lambda v: lax.all_gather(v, "x").sum(0))(y)[None]

    fn = sharded(body, check_vma=False)
    gradient = jax.jit(jax.grad(lambda x: fn(x).sum()))
    x = place(integers((N * 4, 3)), mesh_of(N), P("x"))
    expected = run_on("xla", gradient, x)
    with jcoll.intercept():
        np.testing.assert_array_equal(run_on("jcoll", gradient, x), expected)


def test_nested_shard_maps():
    """Axis by axis: only inside both are all axes of the mesh manual."""
    mesh = mesh_of(4, 2)

    def outer(x):
        y = jax.shard_map(
            lambda v: lax.psum(v, "y"), in_specs=P(None, "y"), out_specs=P(), check_vma=False
        )(x)
        return y + lax.psum(x.sum(1, keepdims=True), "x")

    fn = jax.jit(
        jax.shard_map(
            outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
        )
    )
    x = place(integers((8, 2)), mesh, P("x", "y"))
    assert [row.algorithm for row in jcoll_ops(fn, x)] == ["direct", "xla"]
    expected = fn(x)
    with jcoll.intercept():
        np.testing.assert_array_equal(fn(x), expected)


def test_pmap():
    fn = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    x = integers((N, 4))
    expected = fn(x)
    jcoll.reset_metrics()
    with jcoll.intercept():
        np.testing.assert_array_equal(fn(x), expected)
    np.testing.assert_array_equal(fn(x), expected)
    assert [row["calls"] for row in jcoll.metrics()] == [1]


def test_export():
    check = jax.export.DisabledSafetyCheck.custom_call(TARGET)
    fn = jax.jit(sharded(lambda x: lax.all_gather(lax.psum(x, "x"), "x")))
    x = place(integers((N, 4)), mesh_of(N), P("x"))
    expected = fn(x)
    for platforms, on_jcoll in [(["cpu"], True), (["cpu", "cuda"], False)]:
        with jcoll.intercept():
            exported = jax.export.export(fn, platforms=platforms, disabled_checks=[check])(x)
        assert (TARGET in exported.mlir_module()) == on_jcoll
        found = jax.export.deserialize(exported.serialize()).call(x)
        np.testing.assert_array_equal(found, expected)


def train(steps: int, mesh: Any) -> tuple[list[float], Any]:
    """A two-layer net, data parallel over x and tensor parallel over y."""
    rng = np.random.default_rng(0)
    specs = {"up": P(None, "y"), "down": P("y", None)}
    params = {k: place(rng.normal(size=(16, 16)) / 4, mesh, s) for k, s in specs.items()}
    batch = place(rng.normal(size=(32, 16)), mesh, P("x"))

    def loss_of(params, x):
        hidden = jax.nn.gelu(x @ params["up"])
        out = lax.psum_scatter(hidden @ params["down"], "y", scatter_dimension=1, tiled=True)
        out = lax.all_gather(out, "y", axis=1, tiled=True)
        return lax.pmean(((jax.nn.softplus(out) - x) ** 2).mean(), ("x", "y"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("x")), out_specs=(specs, P()))
    def step(params, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    losses = []
    for _ in range(steps):
        params, loss = step(params, batch)
        losses.append(float(loss))
    return losses, params


def test_training():
    mesh = mesh_of(4, 2)
    expected, expected_params = train(5, mesh)
    jcoll.reset_metrics()
    with jcoll.intercept():
        losses, params = train(5, mesh)
    assert {"all_reduce", "all_gather", "reduce_scatter"} <= {r["op"] for r in jcoll.metrics()}
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    assert losses[-1] < losses[0]
    for name, value in params.items():
        np.testing.assert_allclose(value, expected_params[name], rtol=1e-10, atol=1e-13)
