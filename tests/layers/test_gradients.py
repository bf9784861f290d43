"""What happens to gradients around their sum: synced in the backward pass, sent in another type,
accumulated, clipped, searched for NaN. Against one device, or lax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll import layers
from jcoll.layers import zero
from jcoll.ops._invariant import as_invariant

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
LAYERS, WIDTH, ROWS = 3, 12, 16
REPLICATED = P()


def program(fn, args, in_specs, out_specs=REPLICATED, check_vma=True, shape=(8,), names=("data",)):
    """fn under shard_map, and its arguments placed as it wants them."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = Mesh(devices, names)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), tuple(in_specs), is_leaf=lambda s: isinstance(s, P)
    )
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=check_vma
    )
    return mapped, jax.device_put(args, shardings)


def run(fn, *args, **options):
    mapped, placed = program(fn, args, **options)
    return jax.jit(mapped)(*placed)


def jaxpr_text(fn, *args, **options):
    mapped, placed = program(fn, args, **options)
    return str(jax.make_jaxpr(mapped)(*placed))


def parameters(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3, dtype),
        "b": jnp.zeros((LAYERS, WIDTH), dtype),
    }


def rows(dtype=np.float32):
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(dtype)


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None])


def scanned_loss(params, x, mark=lambda p: p, wrap=lambda f: f):
    apply = wrap(lambda x, p: layer(mark(p), x))
    x, _ = jax.lax.scan(lambda x, p: (apply(x, p), None), x, params)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def unrolled_loss(params, x, mark=lambda p: p, wrap=lambda f: f):
    for i in range(LAYERS):
        apply = wrap(lambda x, p: layer(mark(p), x))
        x = apply(x, jax.tree.map(lambda leaf, i=i: leaf[i], params))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def pcast(tree, check_vma, axis="data"):
    return jax.lax.pcast(tree, axis, to="varying") if check_vma else tree


def assert_close(got, want, rtol=1e-5):
    """Leaf by leaf, to rtol of the leaf's largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g64, w64 = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g64, w64, rtol=rtol, atol=rtol * np.abs(w64).max(initial=0))


# In the backward pass


@CHECK_VMA
@pytest.mark.parametrize("loss", [scanned_loss, unrolled_loss])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_synced_in_backward(loss, wrap, check_vma):
    """No pcast, no sync afterwards; the gradient of the whole batch, typed as replicated."""
    mark = functools.partial(layers.sync_in_backward, axis_name="data")
    got = run(
        lambda params, x: jax.grad(loss)(params, x, mark, wrap),
        parameters(),
        rows(),
        in_specs=(P(), P("data")),
        check_vma=check_vma,
    )
    assert_close(got, jax.grad(loss)(parameters(), rows()))


def test_collectives_stand_between_the_layers_of_the_backward_pass():
    """The first all_reduce comes before the matrix products of the layers below."""
    mark = functools.partial(layers.sync_in_backward, axis_name="data")
    text = jaxpr_text(
        lambda params, x: jax.grad(unrolled_loss)(params, x, mark),
        parameters(),
        rows(),
        in_specs=(P(), P("data")),
    )
    assert text.count("= jcoll_all_reduce[") == LAYERS
    first = text.index("= jcoll_all_reduce[")
    # Before it: the forward pass and the last layer's two products, of weight and input.
    assert text[:first].count("= dot_general[") <= LAYERS + 2


@pytest.mark.parametrize("pre", [True, False], ids=["varying", "replicated"])
def test_synced_gradient_has_its_parameters_type(pre):
    seen = []

    def fn(w, x):
        w = pcast(w, pre)
        grad = jax.grad(lambda w: jnp.sum(layers.sync_in_backward(w, "data") * x))(w)
        seen.append(jax.typeof(grad).mat.varying)
        return jcoll.all_reduce(grad, "data", op="max")

    got = run(fn, np.float32(2), np.arange(8, dtype=np.float32), in_specs=(P(), P("data")))
    assert seen[0] == ({"data"} if pre else set())
    assert float(got) == 3.5


def test_sync_in_backward_refuses():
    for options, error, match in (
        ({"op": "max"}, ValueError, "sync_in_backward over axis 'data'.*op='max'"),
        ({"wire_dtype": "int8"}, TypeError, "wire_dtype='int8' is no floating-point type"),
        ({"wire_dtype": object()}, TypeError, "no floating-point type"),
        ({"algorithm": "nope"}, ValueError, "nope"),
    ):
        mark = functools.partial(layers.sync_in_backward, axis_name="data", **options)
        with pytest.raises(error, match=f"(?s){match}"):
            run(mark, np.float32(1), in_specs=(P(),), out_specs=P("data"))


# In another type on the wire


@CHECK_VMA
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_wire_dtype_rounds_twice(op, check_vma):
    """Each part and the sum are rounded to bfloat16, 2^-9 each; what is narrower stays."""
    x = np.random.default_rng(2).normal(size=(8, 100)).astype(np.float32)

    def fn(x):
        tree = {"a": x[0], "half": x[0].astype(jnp.float16)}
        if op == "sum":
            tree["n"] = x[0].astype(jnp.int32)
        return jcoll.sync_gradients(tree, "data", op=op, wire_dtype=jnp.bfloat16)

    text = jaxpr_text(fn, x, in_specs=(P("data"),), check_vma=check_vma)
    assert "bf16[100]" in text
    got = run(fn, x, in_specs=(P("data"),), check_vma=check_vma)
    part = (x / 8 if op == "mean" else x).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(
        got["a"], part.sum(0, dtype=np.float32).astype(jnp.bfloat16).astype(np.float32)
    )
    assert got["a"].dtype == np.float32
    assert got["half"].dtype == np.float16
    error = np.abs(got["a"] - getattr(x, op)(0))
    assert error.max() <= (np.abs(part).sum(0).max() + np.abs(got["a"]).max()) * 2.0**-9


def test_mean_on_a_narrow_wire_does_not_overflow():
    x = np.full((8, 3), 60000, np.float32)
    sync = functools.partial(jcoll.sync_gradients, axis_name="data", wire_dtype=jnp.float16)
    got = run(lambda x: sync(x[0]), x, in_specs=(P("data"),))
    np.testing.assert_array_equal(got, np.full(3, 60000, np.float32))


# Accumulated


@CHECK_VMA
@pytest.mark.parametrize("count", [1, 2])
def test_accumulated_is_the_whole_batch(count, check_vma):
    def fn(params, x):
        value_and_grad = jax.value_and_grad(scanned_loss)
        means = layers.accumulate_gradients(value_and_grad, pcast(params, check_vma), x, count)
        return jcoll.sync_gradients(means, "data")

    specs = (P(), P("data"))
    got = run(fn, parameters(), rows(), in_specs=specs, check_vma=check_vma)
    assert_close(got, jax.value_and_grad(scanned_loss)(parameters(), rows()))


def test_accumulated_in_float32():
    """512 times 1 + 2^-7: in bfloat16 the sum would stop growing at 256."""
    batch = jnp.ones((512, 1), jnp.bfloat16)

    def value(scale, x):
        return {"g": jnp.mean(x) * scale, "wide": jnp.float64(1)}

    got = layers.accumulate_gradients(value, jnp.bfloat16(1 + 2**-7), batch, 512)
    assert got["g"].dtype == jnp.float32
    assert got["wide"].dtype == jnp.float64
    assert float(got["g"]) == 1 + 2**-7


@pytest.mark.parametrize(
    ("batch", "count", "error", "match"),
    [
        (
            {"x": np.ones((10, 2))},
            4,
            ValueError,
            r"batch\['x'\] has 10 rows.*4 micro.*Pad it to 12",
        ),
        ({"x": np.float32(1)}, 2, ValueError, r"batch\['x'\] is a scalar"),
        ({"x": np.ones(4)}, 0, ValueError, "num_microbatches=0 is too small"),
        ({"x": np.ones(4)}, 2.0, TypeError, "num_microbatches=2.0 is not an integer"),
    ],
)
def test_accumulation_refuses(batch, count, error, match):
    with pytest.raises(error, match=f"(?s)accumulate_gradients.*{match}"):
        layers.accumulate_gradients(lambda p, b: b["x"].sum(), None, batch, count)


def test_accumulation_refuses_counts():
    with pytest.raises(TypeError, match=r"(?s)result\['n'\] has dtype int.*mean"):
        layers.accumulate_gradients(lambda p, b: {"n": jnp.int32(1)}, None, np.ones(4), 2)


# Clipped


def leaves(scale):
    rng = np.random.default_rng(3)
    return {"w": rng.normal(size=(8, 6)).astype(np.float32) * scale, "b": np.ones(5, np.float32)}


@CHECK_VMA
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipped_by_the_norm_of_all_shards(max_norm, check_vma):
    """w over both axes, b whole: the norm is that of the whole tree."""
    tree = leaves(2.0)
    specs = {"w": P("data", "model"), "b": P()}
    clipped, norm = run(
        lambda g: layers.clip_by_global_norm(g, max_norm, specs=specs),
        tree,
        in_specs=(specs,),
        out_specs=(specs, P()),
        check_vma=check_vma,
        shape=(4, 2),
        names=("data", "model"),
    )
    want = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in tree.values()))
    np.testing.assert_allclose(norm, want, rtol=1e-6)
    scale = min(1.0, max_norm / want)
    assert_close(clipped, jax.tree.map(lambda g: (g * scale).astype(g.dtype), tree))


@CHECK_VMA
def test_norm_of_replicated_gradients_needs_no_communication(check_vma):
    fn = functools.partial(layers.clip_by_global_norm, max_norm=1.0)
    text = jaxpr_text(fn, leaves(1.0), in_specs=(P(),), check_vma=check_vma)
    assert "all_reduce" not in text
    _, norm = run(fn, leaves(1.0), in_specs=(P(),), check_vma=check_vma)
    want = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in leaves(1.0).values()))
    np.testing.assert_allclose(norm, want, rtol=1e-6)


def test_leaves_of_the_same_axes_share_two_scalars():
    specs = {"w": P("data", "model"), "b": P()}
    tree = {"one": leaves(1.0), "two": leaves(2.0)}
    text = jaxpr_text(
        lambda g: layers.global_norm(g, specs={"one": specs, "two": specs}),
        tree,
        in_specs=({"one": specs, "two": specs},),
        shape=(4, 2),
        names=("data", "model"),
    )
    assert text.count("= jcoll_all_reduce[") == 2


def test_norms_of_nothing_and_of_zeros():
    assert float(layers.global_norm({})) == 0
    clip = jax.jit(functools.partial(layers.clip_by_global_norm, max_norm=1.0))
    clipped, norm = clip({"a": jnp.zeros(3), "none": None})
    assert (float(norm), float(clipped["a"].sum())) == (0, 0)
    assert norm.dtype == jnp.float64
    half = clip(jnp.full(3, 2, jnp.bfloat16))
    assert [x.dtype for x in half] == [jnp.bfloat16, jnp.float32]


def test_norms_whose_squares_are_no_float32():
    """Over the whole range, and across the bounds within one tree; with its derivative."""

    @jax.jit
    def fn(tree):
        norm, slopes = jax.value_and_grad(layers.global_norm)(tree)
        return norm, slopes["a"], layers.clip_by_global_norm(tree, 1.0)[0]["a"]

    for largest in (1e-30, 1e-19, 1e-10, 1.0, 1e10, 2e18, 1e25, 3e37):
        a = (largest * 10.0 ** np.linspace(0, -12, 64)).astype(np.float32)
        a[a < np.finfo(np.float32).tiny] = 0
        norm, slopes, clipped = fn({"a": a, "b": np.float32(largest / 3)})
        want = np.linalg.norm([*a.astype(np.float64), largest / 3])
        np.testing.assert_allclose(norm, want, rtol=1e-6)
        np.testing.assert_allclose(slopes, a / want, atol=1e-6)
        np.testing.assert_allclose(clipped, a * min(1.0, 1 / want), rtol=2e-6, atol=1e-37)


def test_clipping_never_makes_zeros():
    """16-bit gradients are scaled in float32; NaN and Inf, and a norm that is Inf, give NaN."""
    clip = jax.jit(layers.clip_by_global_norm)
    half = np.full(2**20, 3e4, np.float16)  # A norm of 3.1e7: its inverse is no float16.
    clipped, _ = clip(half, 1.0)
    np.testing.assert_allclose(np.float32(clipped[0]), 2.0**-10, rtol=1e-3)
    rounded, _ = clip(np.float16([3, 4]), 4.99)
    np.testing.assert_array_equal(rounded, np.float16([3 * 0.998, 4 * 0.998]))
    for bad in (np.inf, -np.inf, np.nan, 3.4e38):
        grads = {"a": np.float32([bad, bad]), "b": np.float32([1.0])}
        clipped, norm = clip(grads, 1.0)
        assert not np.isfinite(norm)
        assert all(np.isnan(leaf).all() for leaf in clipped.values())


def test_leaves_that_are_no_arrays():
    """Python numbers count, and float0, the gradient of an integer, is nothing: as in sync."""
    nothing = np.zeros(3, jax.dtypes.float0)
    grads = {"n": nothing, "x": 3.0, "y": np.float32(4)}
    clipped, norm = layers.clip_by_global_norm(grads, 1.0)
    assert clipped["n"] is nothing
    np.testing.assert_allclose([norm, clipped["x"], clipped["y"]], [5, 0.6, 0.8], rtol=1e-6)
    in_specs = (P(),)
    check = lambda x: layers.check_finite({**grads, "z": x}, "data")  # noqa: E731
    report = run(check, np.float32(np.nan), in_specs=in_specs)
    np.testing.assert_array_equal(report.counts, [[0, 0, 0, 1]] * report.counts.shape[0])
    for fn in (layers.global_norm, lambda tree: layers.check_finite(tree, "data")):
        with pytest.raises(TypeError, match=r"leaf grads\['a'\] is a str; arrays and numbers"):
            run(lambda x, fn=fn: fn({"a": "text", "b": x}), np.float32(1), in_specs=in_specs)


def test_accumulates_beside_integers():
    """allow_int gives float0 for an integer parameter."""
    params = {"n": jnp.arange(3), "w": jnp.float32(2)}
    grad = jax.value_and_grad(lambda p, x: p["w"] * x.mean(), allow_int=True)
    batch = jnp.arange(8, dtype=jnp.float32)
    loss, grads = layers.accumulate_gradients(grad, params, batch, 4)
    assert (float(loss), float(grads["w"])) == (7.0, 3.5)
    assert (grads["n"].dtype, grads["n"].shape) == (jax.dtypes.float0, (3,))


@pytest.mark.parametrize(
    ("tree", "options", "error", "match"),
    [
        ({"n": np.arange(8)}, {"specs": P("data")}, TypeError, r"grads\['n'\] has dtype int64"),
        (
            {"a": np.ones(8)},
            {},
            ValueError,
            r"grads\['a'\] differs between the ranks of axis 'data'",
        ),
        ({"a": np.ones(8)}, {"specs": {"b": P()}}, ValueError, "specs is no prefix"),
        ({"a": np.ones(8)}, {"specs": P("nope")}, NameError, "axis 'nope' is not bound"),
        ({"a": np.ones(8)}, {"max_norm": 0}, ValueError, "max_norm=0 is no limit"),
        ({"a": np.ones(8)}, {"max_norm": float("nan")}, ValueError, "max_norm=nan is no limit"),
    ],
)
def test_clipping_refuses(tree, options, error, match):
    clip = functools.partial(layers.clip_by_global_norm, **{"max_norm": 1.0, **options})
    with pytest.raises(error, match=f"(?s){match}"):
        run(clip, tree, in_specs=(P("data"),), out_specs=P("data"))


# Searched


@CHECK_VMA
def test_reports_leaf_and_rank(check_vma):
    x = np.ones((8, 4), np.float32)
    x[5, :2], x[6, 0] = np.nan, np.inf

    def fn(x):
        grads = {"good": x * 0 + 1, "layers": [x, None], "n": jnp.arange(3)}
        grads["good"] = jnp.nan_to_num(grads["good"])
        report = layers.check_finite(grads, "data")
        kept = jnp.where(report.all_finite, 1.0, 0.0)  # The same on all ranks, and typed so.
        return report, kept

    report, kept = run(fn, x, in_specs=(P("data"),), check_vma=check_vma)
    assert float(kept) == 0
    assert report.paths == ("grads['good']", "grads['layers'][0]", "grads['n']")
    np.testing.assert_array_equal(report.counts[:, 1], [0, 0, 0, 0, 0, 2, 1, 0])
    with pytest.raises(FloatingPointError) as error:
        report.raise_if_not_finite()
    text = str(error.value)
    assert text.startswith("jcoll.check_finite over axis 'data': NaN or Inf, before the reduction,")
    assert "in 1 of 3 leaves: grads['layers'][0] (3 on ranks 5, 6)." in text


def test_finite_gradients_and_none():
    x = np.ones(8, np.float32)
    for tree in (lambda x: {"a": x}, lambda x: {}):
        report = run(lambda x, t=tree: layers.check_finite(t(x), "data"), x, in_specs=(P("data"),))
        assert bool(report.all_finite)
        report.raise_if_not_finite()


@CHECK_VMA
@pytest.mark.parametrize("how", ["in_backward", "zero"])
def test_watched_before_the_backward_pass_reduces(how, check_vma):
    """Gradients are as without; counts are of each rank's own gradients, by leaf, over a scan."""
    layout = zero.layouts(jax.tree.map(lambda p: p[0], parameters()), 8)
    mark = {
        "in_backward": lambda p: layers.sync_in_backward(p, "data"),
        "zero": lambda p: zero.redirect_gradients(p, zero.shard(p, layout, "data"), layout, "data"),
    }[how]

    def fn(params, x):
        def loss(params, probes):
            return scanned_loss(params, x, lambda p: layers.watch_finite(mark(p), probes))

        if how == "zero" and check_vma:
            params = jax.lax.pcast(params, "data", to="varying")
        probes = layers.finite_probes(layout, "data")
        grads, counts = jax.grad(loss, (0, 1))(params, probes)
        return layers.report_finite(counts, "data"), grads if how == "in_backward" else None

    x = rows()
    report, grads = run(fn, parameters(), x, in_specs=(P(), P("data")), check_vma=check_vma)
    report.raise_if_not_finite()
    if grads is not None:
        assert_close(grads, jax.grad(scanned_loss)(parameters(), x))
    x[ROWS // 8 * 5] = np.nan
    report, _ = run(fn, parameters(), x, in_specs=(P(), P("data")), check_vma=check_vma)
    counts = dict(zip(report.paths, report.counts.T, strict=True))
    np.testing.assert_array_equal(counts["grads['w']"], [0] * 5 + [LAYERS * WIDTH**2] + [0] * 2)
    with pytest.raises(FloatingPointError, match=r"report_finite.*\['w'\] \(\d+ on rank 5\)"):
        report.raise_if_not_finite()


def test_watching_refuses():
    def fn(x):
        return layers.watch_finite({"x": x}, layers.finite_probes({"x": x}, ()))

    with pytest.raises(ValueError, match=r"(?s)params\['x'\] differs.*axis 'data', and its probe"):
        run(fn, np.ones(8), in_specs=(P("data"),), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"(?s)watch_finite: probes is a tree"):
        layers.watch_finite({"x": 1.0}, [0.0])


# The type that says that all ranks have one value


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_as_invariant_has_the_gradient_of_any_one_rank(wrap):
    """sum(gathered^2): each rank's part of the gradient is 2 x of its own block."""

    def fn(x):
        def loss(x):
            whole = as_invariant(jcoll.all_gather(x, "data", tiled=True), ("data",))
            assert not jax.typeof(whole).mat.varying
            return jnp.sum(whole**2)

        return wrap(jax.grad(loss))(x.T if wrap is jax.vmap else x).T

    shape = (8, 3) if wrap is jax.vmap else (8,)
    x = np.random.default_rng(4).normal(size=shape).astype(np.float32)
    got = run(fn, x, in_specs=(P("data"),), out_specs=P("data"))
    np.testing.assert_allclose(got, 2 * x, rtol=1e-6)
