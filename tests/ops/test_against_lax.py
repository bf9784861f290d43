"""The public functions against jax.lax's: values, shapes, dtypes, varying-axes types, gradients.

Each pair is compared under every transform and, where lax has the op, with check_vma on and off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from ops.meshes import put, seen_inside, spmd

import jcoll

GROUPS = [[0, 3], [2, 1]]
RING = [(i, (i + 1) % 4) for i in range(4)]

# name -> (jcoll's, lax's): functions of (x, axis), x of shape [4, 8] on 4 ranks.
PAIRS: dict[str, tuple[Callable, Callable]] = {
    "psum": (jcoll.psum, lax.psum),
    "pmean": (jcoll.pmean, lax.pmean),
    "pmax": (jcoll.pmax, lax.pmax),
    "pmin": (jcoll.pmin, lax.pmin),
    "all_gather": (jcoll.all_gather, lax.all_gather),
    "all_gather_1": (
        lambda x, a: jcoll.all_gather(x, a, axis=1),
        lambda x, a: lax.all_gather(x, a, axis=1),
    ),
    "all_gather_tiled": (
        lambda x, a: jcoll.all_gather(x, a, tiled=True),
        lambda x, a: lax.all_gather(x, a, tiled=True),
    ),
    "all_gather_last_tiled": (
        lambda x, a: jcoll.all_gather(x, a, axis=-1, tiled=True),
        lambda x, a: lax.all_gather(x, a, axis=-1, tiled=True),
    ),
    "psum_scatter": (jcoll.psum_scatter, lax.psum_scatter),
    "psum_scatter_tiled": (
        lambda x, a: jcoll.psum_scatter(x, a, scatter_dimension=1, tiled=True),
        lambda x, a: lax.psum_scatter(x, a, scatter_dimension=1, tiled=True),
    ),
    "all_to_all_00": (
        lambda x, a: jcoll.all_to_all(x, a, 0, 0),
        lambda x, a: lax.all_to_all(x, a, 0, 0),
    ),
    "all_to_all_01": (
        lambda x, a: jcoll.all_to_all(x, a, 0, 1),
        lambda x, a: lax.all_to_all(x, a, 0, 1),
    ),
    **{
        f"all_to_all_{i}{j}_tiled": (
            lambda x, a, i=i, j=j: jcoll.all_to_all(x, a, i, j, tiled=True),
            lambda x, a, i=i, j=j: lax.all_to_all(x, a, i, j, tiled=True),
        )
        for i in (0, 1)
        for j in (0, 1)
    },
    "ppermute": (
        lambda x, a: jcoll.ppermute(x, a, RING),
        lambda x, a: lax.ppermute(x, a, RING),
    ),
}
GROUPED = {
    "psum": (
        lambda x, a: jcoll.psum(x, a, axis_index_groups=GROUPS),
        lambda x, a: lax.psum(x, a, axis_index_groups=GROUPS),
    ),
    "pmax": (
        lambda x, a: jcoll.pmax(x, a, axis_index_groups=GROUPS),
        lambda x, a: lax.pmax(x, a, axis_index_groups=GROUPS),
    ),
    "all_gather": (
        lambda x, a: jcoll.all_gather(x, a, axis_index_groups=GROUPS),
        lambda x, a: lax.all_gather(x, a, axis_index_groups=GROUPS),
    ),
    "psum_scatter": (
        lambda x, a: jcoll.psum_scatter(x, a, axis_index_groups=GROUPS, tiled=True),
        lambda x, a: lax.psum_scatter(x, a, axis_index_groups=GROUPS, tiled=True),
    ),
    "all_to_all": (
        lambda x, a: jcoll.all_to_all(x, a, 1, 0, axis_index_groups=GROUPS, tiled=True),
        lambda x, a: lax.all_to_all(x, a, 1, 0, axis_index_groups=GROUPS, tiled=True),
    ),
}
VMA = pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "vma"])
NO_LAX_GRADIENT = ("pmax", "pmin")  # Ours: tests/ops/test_transforms.py, against the reference.
# Where lax's own transposition raises ("Expected cotangent type"), the same in other words.
GRADIENT_BY_LAX: dict[str, Callable] = {
    "all_to_all_01": lambda x, a: jnp.moveaxis(lax.all_to_all(x, a, 0, 0), 0, 1),
}


def mesh4() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("x",))


def mesh2x2(permuted: bool = False) -> Mesh:
    order = [3, 1, 0, 2] if permuted else [0, 1, 2, 3]
    return Mesh(np.array(jax.devices())[order].reshape(2, 2), ("x", "y"))


def data(mesh: Mesh, seed: int = 0) -> Any:
    x = np.random.default_rng(seed).normal(size=(*mesh.devices.shape, 4, 8))
    return put(mesh, x)


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12, atol=1e-12)


def scanned(f: Callable) -> Callable:
    def g(x: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            y = f(carry * (i + 1).astype(carry.dtype))
            return carry + 0.1 * y.reshape(-1)[0], y

        return lax.scan(body, x, jnp.arange(3))

    return g


def looped(f: Callable) -> Callable:
    def g(x: Any) -> Any:
        def body(state: Any) -> Any:
            i, x = state
            return i + 1, x + 0.1 * f(x).reshape(-1)[0]

        return lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1]

    return g


def conditional(f: Callable) -> Callable:
    def g(x: Any) -> Any:
        total = lax.psum(x.sum(), "x")  # The same branch on all ranks.
        return lax.cond(total > 0, lambda: f(x), lambda: f(2 * x))

    return g


def in_inner_jit_twice(f: Callable) -> Callable:
    inner = jax.jit(f)
    return lambda x: (inner(x), inner(x + 1))


TRANSFORMS: dict[str, Callable] = {
    "plain": lambda f: f,
    "scan": scanned,
    "while": looped,
    "cond": conditional,
    "twice": in_inner_jit_twice,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "vmap_last": lambda f: lambda x: jax.vmap(f, -1, -1)(jnp.stack([x, 2 * x], -1)),
}


@VMA
@pytest.mark.parametrize("name", PAIRS)
def test_transforms(name: str, check_vma: bool) -> None:
    ours, theirs = PAIRS[name]
    mesh = mesh4()
    x = data(mesh)

    def run(f: Callable) -> Any:
        results = {}
        for transform, wrap in TRANSFORMS.items():
            if (name, transform) == ("psum_scatter", "vmap_last"):
                continue  # lax's own batching rule fails here; test_transforms.py covers ours.
            results[transform] = spmd(wrap(lambda v: f(v, "x")), mesh, check_vma=check_vma)(x)
        return results

    assert_same(run(ours), run(theirs))


@VMA
@pytest.mark.parametrize("name", [n for n in PAIRS if n not in NO_LAX_GRADIENT])
def test_gradients(name: str, check_vma: bool) -> None:
    ours, theirs = PAIRS[name]
    mesh = mesh4()
    x = data(mesh)
    losses = {
        "outside": lambda f: jax.grad(
            lambda x: jnp.sin(spmd(lambda v: f(v, "x"), mesh, check_vma=check_vma)(x)).sum()
        )(x),
        "inside": lambda f: spmd(
            jax.grad(lambda v: jnp.sin(f(v, "x")).sum()), mesh, check_vma=check_vma
        )(x),
        "global_loss": lambda f: spmd(
            jax.grad(lambda v: f(jnp.sin(v), "x").sum() * 2.0), mesh, check_vma=check_vma
        )(x),
        "vjp": lambda f: spmd(
            lambda v: jax.vjp(lambda u: f(u, "x"), v)[1](jax.tree.map(jnp.ones_like, f(v, "x")))[0],
            mesh,
            check_vma=check_vma,
        )(x),
        "hessian": lambda f: spmd(
            lambda v: jax.hessian(lambda u: (f(u, "x") ** 2).sum())(v)[0, 0],
            mesh,
            check_vma=check_vma,
        )(x),
        "scan_remat": lambda f: spmd(
            jax.grad(lambda v: scanned(jax.checkpoint(lambda u: f(u, "x")))(v)[0].sum()),
            mesh,
            check_vma=check_vma,
        )(x),
    }
    for label, loss in losses.items():
        want = loss(GRADIENT_BY_LAX.get(name, theirs))
        np.testing.assert_allclose(loss(ours), want, rtol=1e-12, atol=1e-12, err_msg=label)


@pytest.mark.parametrize("name", PAIRS)
def test_eager(name: str) -> None:
    ours, theirs = PAIRS[name]
    mesh = mesh4()
    x = data(mesh)
    got = spmd(lambda v: ours(v, "x"), mesh, jit=False)(x)
    assert_same(got, spmd(lambda v: theirs(v, "x"), mesh)(x))


@pytest.mark.parametrize("name", PAIRS)
def test_types(name: str) -> None:
    types = []

    def record(f: Callable) -> Callable:
        def g(x: Any) -> Any:
            y = f(x, "x")
            types.append((jax.typeof(y).shape, jax.typeof(y).dtype, jax.typeof(y).mat.varying))
            return y

        return g

    for mesh in (mesh4(), mesh2x2()):
        for f in PAIRS[name]:
            if len(mesh.axis_names) == 2 and name in (
                "psum_scatter",
                "all_to_all_00",
                "ppermute",
                "all_to_all_01",
            ):
                continue  # These shapes and pairs are for 4 ranks.
            jax.eval_shape(spmd(record(f), mesh), data(mesh))
    assert types[0::2] == types[1::2]


@VMA
@pytest.mark.parametrize("name", GROUPED)
def test_groups(name: str, check_vma: bool) -> None:
    ours, theirs = GROUPED[name]
    mesh = mesh4()
    x = data(mesh)
    got = spmd(lambda v: ours(v, "x"), mesh, check_vma=check_vma)(x)
    assert_same(got, spmd(lambda v: theirs(v, "x"), mesh, check_vma=False)(x))
    if name == "pmax":
        return
    grad = lambda f, typed: spmd(  # noqa: E731
        jax.grad(lambda v: jnp.sin(f(v, "x")).sum()), mesh, check_vma=typed
    )(x)
    assert_same(grad(ours, check_vma), grad(theirs, False))


@VMA
@pytest.mark.parametrize("axes", ["x", "y", ("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("permuted", [False, True])
def test_axes_of_a_2d_mesh(axes: Any, permuted: bool, check_vma: bool) -> None:
    mesh = mesh2x2(permuted)
    x = data(mesh)
    names = ["psum", "pmax", "all_gather_tiled", "psum_scatter_tiled", "all_to_all_10_tiled"]

    def run(which: int) -> Any:
        fs = [PAIRS[name][which] for name in names]
        return spmd(lambda v: [f(v, axes) for f in fs], mesh, check_vma=check_vma)(x)

    assert_same(run(0), run(1))


def test_3d_mesh_and_axes_of_size_one() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 4), ("a", "b", "c"))
    x = data(mesh)
    for axes in (("a", "c"), "b", ("c", "b"), ("a", "b", "c")):

        def run(which: int, axes: Any = axes) -> Any:
            fs = [PAIRS[name][which] for name in ("psum", "all_gather", "all_to_all_10_tiled")]
            return spmd(lambda v: [f(v, axes) for f in fs], mesh)(x)

        assert_same(run(0), run(1))


def test_pytrees_and_constants() -> None:
    mesh = mesh4()
    x = data(mesh)

    def run(lib: Any) -> Callable:
        def f(v: Any) -> Any:
            size = lib.psum(1, "x")
            assert size == 4 and isinstance(size, int | np.integer)
            tree = {"a": v, "b": (v > 0, v.astype(jnp.int32))}
            return lib.psum(tree, "x"), lib.pmean(tree["b"][1], "x"), v.sum() / size

        return f

    assert_same(spmd(run(jcoll), mesh)(x), spmd(run(lax), mesh)(x))


EMPTY: dict[str, Callable] = {
    "all_to_all": lambda lib, v: lib.all_to_all(v, (), 0, 1),
    "all_to_all_tiled": lambda lib, v: lib.all_to_all(v, (), 1, 0, tiled=True),
    "all_gather": lambda lib, v: lib.all_gather(v, (), axis=1),
    "psum_scatter": lambda lib, v: lib.psum_scatter(v, ()),
    "ppermute": lambda lib, v: lib.ppermute(v, (), []),
    "pmean_of_integers": lambda lib, v: lib.pmean(v.astype(int), ()),
    "psum_of_bools": lambda lib, v: lib.psum(v > 0, ()),
    "psum_of_numbers": lambda lib, v: lib.psum([v, 3, True, 2.5], ()),
    "pmean_of_numbers": lambda lib, v: lib.pmean([v, 3, 2.5], ()),
}


@pytest.mark.parametrize("name", EMPTY)
def test_over_no_axes(name: str) -> None:
    """Over the empty tuple of axes nothing is sent, but layout and dtype are as over one rank."""
    x = np.random.default_rng(0).normal(size=(4, 1, 8))
    x[..., 0] = -0.0
    f = EMPTY[name]
    got, want = (seen_inside(lambda v, lib=lib: f(lib, v), x) for lib in (jcoll, lax))
    assert got == want
    if "numbers" not in name:
        run = lambda lib: spmd(lambda v: f(lib, v), mesh4())(put(mesh4(), x))  # noqa: E731
        got, want = run(jcoll), run(lax)
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()  # The sign of -0 too.


def test_ops_that_lax_lacks_over_no_axes() -> None:
    """The same as over an axis of size one."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("x", "one"))
    x = put(mesh, np.random.default_rng(0).normal(size=(4, 1, 1, 8)))

    def f(v: Any, axis: Any) -> list:
        counts = jnp.ones(1, int)
        return [
            jcoll.gather(v, axis),
            jcoll.gather(v, axis, axis=1, tiled=True),
            jcoll.scatter(v, axis),
            jcoll.broadcast(v, axis),
            jcoll.reduce(v.astype(int), axis, op="mean"),
            jcoll.reduce_scatter(v.astype(int), axis, op="mean", tiled=True),
            jcoll.barrier(v, axis),
            *jcoll.all_to_all_v(v, counts, axis, output_size=2),
        ]

    run = lambda axis: spmd(lambda v: f(v, axis), mesh)(x)  # noqa: E731
    assert_same(run(()), run("one"))
    for bad in (lambda v: jcoll.psum("abc", ()), lambda v: jcoll.all_gather("abc", ())):
        with pytest.raises(TypeError, match=r"jcoll\..*got str"):
            spmd(bad, mesh)(x)


@pytest.mark.parametrize("perm", [[(-1, 0)], [(0, -4), (1, 2)], [(3, -1)]], ids=str)
def test_ppermute_counts_negative_ranks_from_the_end(perm: list) -> None:
    x = data(mesh4())
    got, want = (
        spmd(lambda v, f=f: f(v, "x", perm), mesh4())(x) for f in (jcoll.ppermute, lax.ppermute)
    )
    np.testing.assert_array_equal(got, want)


def test_vmap_with_axis_name() -> None:
    x = np.random.default_rng(0).normal(size=(4, 4, 8))
    for name, (ours, theirs) in PAIRS.items():
        got = jax.vmap(lambda v, f=ours: f(v, "x"), axis_name="x")(x)
        want = jax.vmap(lambda v, f=theirs: f(v, "x"), axis_name="x")(x)
        np.testing.assert_allclose(got, want, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("order", [("x", "v"), ("v", "x")], ids=str)
@pytest.mark.parametrize(
    "name", ["psum", "pmax", "all_gather", "psum_scatter", "all_to_all_00", "broadcast", "reduce"]
)
def test_vmapped_axis_together_with_a_mesh_axis(name: str, order: Any) -> None:
    """Over ("v", "x") with v vmapped: the same as over a mesh that has both."""
    more = {
        "broadcast": lambda x, a: jcoll.broadcast(x, a, root=2),
        "reduce": lambda x, a: jcoll.reduce(x, a, root=2),
    }
    f = PAIRS[name][0] if name in PAIRS else more[name]
    x = np.random.default_rng(0).normal(size=(2, 2, 4, 8))  # [x, v, ...]
    both = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "v"))
    want = spmd(lambda u: f(u, order), both)(put(both, x))
    one = Mesh(np.array(jax.devices()[:2]), ("x",))
    mapped = jax.vmap(lambda u: f(u, order), axis_name="v")
    np.testing.assert_allclose(spmd(mapped, one)(put(one, x)), want, rtol=1e-12)


@pytest.mark.parametrize("algorithm", ["direct", "xla"])
def test_mean_over_groups_of_unequal_size(algorithm: str) -> None:
    mesh = mesh4()
    x = data(mesh)

    mean = partial(
        jcoll.all_reduce,
        axis_name="x",
        op="mean",
        axis_index_groups=[[0, 1, 2], [3]],
        algorithm=algorithm,
    )

    def wanted(x: Any) -> Any:
        return np.concatenate([np.broadcast_to(x[:3].mean(0), (3, *x.shape[1:])), x[3:]])

    integers = np.rint(10 * np.asarray(x)).astype(np.int32)
    got, got_integers = spmd(lambda v, i: (mean(v), mean(i)), mesh)(x, put(mesh, integers))
    np.testing.assert_allclose(got, wanted(np.asarray(x)), rtol=1e-12)
    assert jnp.issubdtype(got_integers.dtype, jnp.floating)
    np.testing.assert_allclose(got_integers, wanted(integers), rtol=1e-6)
