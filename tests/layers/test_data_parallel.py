"""sync_gradients against lax.pmean / lax.psum, leaf by leaf, and the plan of its buckets."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll.layers.buckets import plan_buckets

NUM_RANKS = 8
REPLICATED = P()
CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
LAX = {"mean": jax.lax.pmean, "sum": jax.lax.psum}


def mesh_of(*shape, axis_types=None):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=axis_types)


def program(
    fn, args, mesh=None, check_vma=True, in_specs=None, out_specs=REPLICATED, axis_names=None
):
    """fn under shard_map, and its arguments placed as it wants them: all split, if not said."""
    mesh = mesh or mesh_of(NUM_RANKS)
    in_specs = in_specs or (P("data"),) * len(args)
    placed = [
        jax.device_put(arg, NamedSharding(mesh, spec))
        for arg, spec in zip(args, in_specs, strict=True)
    ]
    sharded = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
        axis_names=axis_names or frozenset(mesh.axis_names),
    )
    return sharded, placed


def run(fn, *args, **kwargs):
    sharded, placed = program(fn, args, **kwargs)
    return jax.jit(sharded)(*placed)


def jaxpr_text(fn, *args, **kwargs):
    sharded, placed = program(fn, args, **kwargs)
    return str(jax.make_jaxpr(sharded)(*placed))


def gradients(dtype_of=lambda i: jnp.float32, num_ranks=NUM_RANKS):
    """A tree with one row per rank in every leaf, of shapes that a model has, and odd ones."""
    shapes = {"w": (5, 3), "b": (3,), "scalar": (), "empty": (0, 4), "big": (64, 32)}
    rng = np.random.default_rng(0)
    tree = {"layers": [dict(shapes), dict(shapes)], "head": (7,), "none": None}
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda s: isinstance(s, tuple))
    values = [
        jnp.asarray(rng.normal(size=(num_ranks, *shape)) * 8, dtype_of(i))
        for i, shape in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, values)


def floats(count):
    return jnp.arange(count, dtype=jnp.float32)


def local(tree):
    """This rank's leaves: the leading dimension, of local size 1, taken off."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def assert_same(got, want, rtol=1e-6):
    """The same structure, shapes and dtypes; values up to the order of the sum."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g64, w64 = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g64, w64, rtol=rtol, atol=rtol * 8)


@CHECK_VMA
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 300, 25 * 2**20])
def test_equals_lax_leaf_by_leaf(op, bucket_bytes, check_vma):
    def both(tree):
        tree = local(tree)
        ours = jcoll.sync_gradients(tree, "data", op=op, bucket_bytes=bucket_bytes)
        return ours, jax.tree.map(lambda g: LAX[op](g, "data"), tree)

    assert_same(*run(both, gradients(), check_vma=check_vma))


@CHECK_VMA
@pytest.mark.parametrize(
    ("options", "collectives"),
    [({}, 3), ({"join_bytes": 0}, 7), ({"join_bytes": 2**20}, 2), ({"bucket_bytes": 64}, 5)],
    ids=str,
)
def test_number_of_collectives(options, collectives, check_vma):
    """Small leaves of a dtype go together; what is large, by either measure, goes alone."""
    floats = {"a": 8, "b": 8, "c": 4, "large": 5000}
    tree = {name: jnp.ones((8, size), jnp.float32) for name, size in floats.items()}
    tree |= {name: jnp.ones((8, 16), jnp.bfloat16) for name in ("half", "other", "third")}

    def sync(tree):
        return jcoll.sync_gradients(local(tree), "data", **options)

    text = jaxpr_text(sync, tree, check_vma=check_vma)
    assert text.count("= jcoll_all_reduce[") == collectives


@CHECK_VMA
def test_mixed_dtypes_share_a_tree(check_vma):
    kinds = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64]

    def both(tree):
        tree = local(tree)
        # lax sums 16-bit types in their own precision or f32, as the backend likes: ask for f32.
        wide = {"bfloat16": "float32", "float16": "float32"}
        want = jax.tree.map(
            lambda g: jax.lax.pmean(g.astype(wide.get(str(g.dtype), g.dtype)), "data").astype(
                g.dtype
            ),
            tree,
        )
        return jcoll.sync_gradients(tree, "data"), want

    tree = gradients(lambda i: kinds[i % len(kinds)])
    got, want = run(both, tree, check_vma=check_vma)
    assert jax.tree.map(lambda g: g.dtype, got) == jax.tree.map(lambda g: g.dtype, want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        tolerance = 1e-6 if g.dtype.itemsize > 2 else float(jnp.finfo(g.dtype).eps)
        np.testing.assert_allclose(
            np.asarray(g, np.complex128), np.asarray(w, np.complex128), rtol=tolerance, atol=1e-5
        )


@CHECK_VMA
def test_integers_are_summed_exactly(check_vma):
    tree = {"i8": np.arange(8, dtype=np.int8), "u32": np.full((8, 3), 7, np.uint32)}
    got = run(lambda t: jcoll.sync_gradients(local(t), "data", op="sum"), tree, check_vma=check_vma)
    assert got["i8"].dtype == np.int8
    assert int(got["i8"]) == 28
    np.testing.assert_array_equal(got["u32"], np.full(3, 56, np.uint32))


@CHECK_VMA
@pytest.mark.parametrize("tree", [{}, None, [], {"a": None, "b": []}], ids=str)
def test_trees_without_leaves(tree, check_vma):
    seen = []

    def fn(x):
        seen.append(jcoll.sync_gradients(tree, "data"))
        return jax.lax.pmean(x, "data")

    run(fn, jnp.zeros(NUM_RANKS), check_vma=check_vma)
    assert seen == [tree]


@CHECK_VMA
def test_single_leaf_is_not_reshaped(check_vma):
    x = jnp.arange(8 * 6, dtype=jnp.float32).reshape(8, 2, 3)
    got, want = run(
        lambda x: (jcoll.sync_gradients(x, "data"), jax.lax.pmean(x, "data")),
        x,
        check_vma=check_vma,
    )
    assert_same(got, want)
    text = jaxpr_text(lambda x: jcoll.sync_gradients(x, "data"), x, check_vma=check_vma)
    assert "concatenate" not in text
    assert "reshape" not in text


@CHECK_VMA
def test_python_numbers_and_weak_types_follow_lax(check_vma):
    def both(x):
        tree = {"float": 2.5, "array": x[0]}
        tree["weak"] = jnp.asarray(3.0) + jax.lax.axis_index("data").astype("float32") * 0
        return jcoll.sync_gradients(tree, "data"), jax.lax.pmean(tree, "data")

    got, want = run(both, floats(8), check_vma=check_vma)
    assert float(got["float"]) == want["float"] == 2.5
    assert_same([got["weak"], got["array"]], [want["weak"], want["array"]])
    total = run(
        lambda x: jcoll.sync_gradients({"n": 3, "x": x}, "data", op="sum"),
        floats(8),
        check_vma=check_vma,
    )
    assert int(total["n"]) == 24


@CHECK_VMA
def test_gradients_of_integer_inputs_pass_through(check_vma):
    def fn(x):
        grad = jax.grad(lambda t: (t["x"] ** 2).sum() * t["n"].astype("float32"), allow_int=True)
        grads = grad({"x": x, "n": jnp.int32(3)})
        synced = jcoll.sync_gradients(grads, "data")
        assert synced["n"].dtype == jax.dtypes.float0
        return synced["x"]

    got = run(fn, floats(8), check_vma=check_vma)
    np.testing.assert_allclose(got, [21.0])


def test_leaves_keep_their_own_varying_axes():
    """A bucket never mixes leaves that vary over different axes: one spec each must still do."""
    mesh = mesh_of(4, 2)

    def fn(x):
        tree = {"both": x, "data": jax.lax.pmean(x, "model")}
        return jcoll.sync_gradients(tree, "data")

    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    got = run(
        fn,
        x,
        mesh=mesh,
        in_specs=(P("data", "model"),),
        out_specs={"both": P(None, "model"), "data": P()},
    )
    np.testing.assert_allclose(got["both"], x.mean(0, keepdims=True))
    np.testing.assert_allclose(got["data"], [[x.mean()]])


@CHECK_VMA
def test_two_axes_and_sub_axes(check_vma):
    def fn(x):
        tree = {"a": x, "b": x.sum()}
        ours = jcoll.sync_gradients(tree, ("data", "model"))
        return ours, jax.lax.pmean(tree, ("data", "model"))

    x = floats(16).reshape(8, 2)
    mesh = mesh_of(4, 2)
    got, want = run(fn, x, mesh=mesh, in_specs=(P(("data", "model")),), check_vma=check_vma)
    assert_same(got, want)


def test_axis_index_groups_average_within_the_group():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    got = run(
        lambda t: jcoll.sync_gradients({"a": t[0], "b": t}, "data", axis_index_groups=groups),
        floats(8),
        check_vma=False,
        out_specs={"a": P(), "b": P("data")},
    )
    np.testing.assert_allclose(got["b"], [1.5] * 4 + [5.5] * 4)


def linear_loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)


@CHECK_VMA
def test_data_parallel_gradient_is_the_global_gradient(check_vma):
    """The reason of being: 8 ranks, a slice of the batch each, give the whole batch's gradient."""
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32), "b": jnp.ones(2, jnp.float32)}
    x, y = (jnp.asarray(rng.normal(size=(16, n)), jnp.float32) for n in (4, 2))

    def fn(params, x, y):
        if check_vma:
            params = jax.lax.pcast(params, "data", to="varying")
        return jcoll.sync_gradients(jax.grad(linear_loss)(params, x, y), "data")

    got = run(fn, params, x, y, in_specs=(P(), P("data"), P("data")), check_vma=check_vma)
    assert_same(got, jax.grad(linear_loss)(params, x, y), rtol=1e-5)


@CHECK_VMA
def test_differentiates_like_pmean(check_vma):
    """A penalty on the synchronised gradients, as a meta-learner has: through the buckets."""

    def penalty(sync, tree):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(sync(tree)))

    def both(tree):
        tree = local(tree)
        ours = functools.partial(jcoll.sync_gradients, axis_name="data", bucket_bytes=300)
        lax = functools.partial(jax.lax.pmean, axis_name="data")
        grads = [jax.grad(functools.partial(penalty, f))(tree) for f in (ours, lax)]
        return jax.tree.map(lambda g: g[None], grads)

    got, want = run(both, gradients(), out_specs=P("data"), check_vma=check_vma)
    assert_same(got, want, rtol=1e-5)


@CHECK_VMA
def test_under_vmap_inside_shard_map(check_vma):
    def both(x):
        tree = {"a": x, "b": jnp.stack([x, x * 2])[0]}
        sync = jax.vmap(lambda t: jcoll.sync_gradients(t, "data"), in_axes=1)
        return sync(tree), jax.vmap(lambda t: jax.lax.pmean(t, "data"), in_axes=1)(tree)

    assert_same(*run(both, floats(24).reshape(8, 3), check_vma=check_vma))


def test_over_the_axis_of_vmap():
    tree = {"a": floats(8), "b": floats(16).reshape(8, 2)}
    got = jax.vmap(lambda t: jcoll.sync_gradients(t, "i"), axis_name="i")(tree)
    assert_same(got, jax.vmap(lambda t: jax.lax.pmean(t, "i"), axis_name="i")(tree))


@CHECK_VMA
def test_in_scan(check_vma):
    def fn(x):
        def body(carry, _):
            local = jax.lax.pcast(carry, "data", to="varying") if check_vma else carry
            grads = {"a": local * x.sum(), "b": x}
            synced = jcoll.sync_gradients(grads, "data")
            return carry + synced["a"] * 0.1, synced["b"]

        return jax.lax.scan(body, jnp.float32(1), length=5)

    carry, _ = run(fn, floats(8), check_vma=check_vma)
    np.testing.assert_allclose(carry, 1.35**5, rtol=1e-5)


def test_sharded_leaves_outside_the_manual_axes_are_not_joined():
    """data manual, model automatic: joining leaves would gather them over model."""
    auto = jax.sharding.AxisType.Auto
    mesh = mesh_of(4, 2, axis_types=(auto, auto))

    def fn(x):
        return jcoll.sync_gradients({"a": x, "b": x * 2}, "data")

    x = jax.device_put(floats(16).reshape(8, 2), NamedSharding(mesh, P("data", "model")))
    sharded, _ = program(fn, [x], mesh=mesh, axis_names={"data"})
    assert "concatenate" not in str(jax.make_jaxpr(sharded)(x))
    got = jax.jit(sharded)(x)
    np.testing.assert_allclose(got["a"], np.arange(16.0).reshape(4, 2, 2).mean(0))


def test_order_of_insertion_does_not_matter():
    """Two processes that filled an OrderedDict in different orders send the same buckets."""
    leaves = {f"p{i}": jnp.full((8, i + 1), i, np.float32) for i in range(8)}
    forward = collections.OrderedDict(sorted(leaves.items()))
    backward = collections.OrderedDict(sorted(leaves.items(), reverse=True))
    sync = functools.partial(jcoll.sync_gradients, axis_name="data", bucket_bytes=64)
    shapes = []
    for tree in (forward, backward):
        text = jaxpr_text(lambda tree: sync(local(tree)), tree)
        shapes.append(re.findall(r"f32\[\d+\].*concatenate", text))
        assert_same(run(lambda tree: sync(local(tree)), tree), local(tree))
    assert len(shapes[0]) > 1
    assert shapes[0] == shapes[1]


def test_numbers_in_paths_sort_as_numbers():
    tree = [jnp.full((8, i + 1), i, np.float32) for i in range(12)]
    got = run(lambda t: jcoll.sync_gradients(local(t), "data", bucket_bytes=32), tree)
    for i, leaf in enumerate(got):
        np.testing.assert_array_equal(leaf, np.full(i + 1, float(i)))


# The plan, without JAX.


@pytest.mark.parametrize(
    ("leaves", "bucket_bytes", "want"),
    [
        ([], 10, []),
        ([("f", 4)], 10, [[0]]),
        ([("f", 4), ("f", 6), ("f", 1)], 10, [[0, 1], [2]]),
        ([("f", 4), ("h", 4), ("f", 4), ("h", 4)], 10, [[0, 2], [1, 3]]),
        ([("f", 4), ("f", 11), ("f", 4)], 10, [[0, 2], [1]]),
        ([("f", 10), ("f", 10)], 10, [[0], [1]]),
        ([("f", 0), ("f", 10), ("f", 0)], 10, [[0, 1, 2]]),
        ([("f", 4), ("f", 4)], 1, [[0], [1]]),
    ],
)
def test_plan_buckets(leaves, bucket_bytes, want):
    assert plan_buckets(leaves, bucket_bytes) == want
    assert plan_buckets(leaves, bucket_bytes, join_bytes=100) == want


@pytest.mark.parametrize(
    ("join_bytes", "want"),
    [(0, [[0], [1], [2], [3, 4]]), (4, [[0, 2, 3, 4], [1]]), (5, [[0, 1], [2, 3, 4]])],
)
def test_plan_buckets_joins_small_leaves_only(join_bytes, want):
    leaves = [("f", 4), ("f", 5), ("f", 4), ("f", 0), ("f", 0)]
    assert plan_buckets(leaves, 10, join_bytes) == want


@pytest.mark.parametrize("seed", range(20))
def test_plan_buckets_invariants(seed):
    rng = np.random.default_rng(seed)
    leaves = [(str(rng.integers(3)), int(rng.integers(0, 30))) for _ in range(50)]
    limit = int(rng.integers(1, 40))
    buckets = plan_buckets(leaves, limit)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(50))
    for kind in "012":
        sizes = [sum(leaves[i][1] for i in b) for b in buckets if leaves[b[0]][0] == kind]
        total = sum(nbytes for k, nbytes in leaves if k == kind)
        large = sum(1 for k, nbytes in leaves if k == kind and nbytes > limit)
        assert len(sizes) - large <= max(1, 2 * -(-total // limit))
    for bucket in buckets:
        assert len({leaves[i][0] for i in bucket}) == 1
        assert bucket == sorted(bucket)
        assert len(bucket) == 1 or sum(leaves[i][1] for i in bucket) <= limit


# Bad input.


def call(tree, **kwargs):
    return run(lambda x: jcoll.sync_gradients(tree(x), "data", **kwargs), floats(8))


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"op": "max"}, ValueError, "op='max'.*'mean' or 'sum'.*jcoll.all_reduce"),
        ({"op": np.array(["mean", "sum"])}, ValueError, "op=array.*'mean' or 'sum'"),
        (
            {"bucket_bytes": 0},
            ValueError,
            "bucket_bytes=0 is too small.*at least 1.*is 26214",
        ),
        ({"bucket_bytes": -5}, ValueError, "bucket_bytes=-5"),
        ({"bucket_bytes": 1e6}, TypeError, "bucket_bytes=1000000.0 is not an integer"),
        ({"join_bytes": -1}, ValueError, "join_bytes=-1 is too small.*at least 0"),
        ({"join_bytes": None}, TypeError, "join_bytes=None is not an integer"),
    ],
)
def test_bad_arguments(kwargs, error, match):
    with pytest.raises(error, match=f"(?s)sync_gradients over axis 'data'.*{match}"):
        call(lambda x: x, **kwargs)


def test_traced_op():
    with pytest.raises(TypeError, match=r"(?s)sync_gradients.*op is a traced value.*static"):
        run(lambda x: jcoll.sync_gradients(x, "data", op=x[0]), floats(8))


def test_mean_of_integers_names_the_leaf():
    with pytest.raises(TypeError, match=r"(?s)grads\['a'\]\[0\] has dtype int32.*op='sum'"):
        call(lambda x: {"a": [x.astype(jnp.int32)]})


@pytest.mark.parametrize("number", [3, True])
def test_mean_of_a_python_integer_names_the_leaf(number):
    with pytest.raises(TypeError, match=r"(?s)grads\['n'\] has dtype .*op='sum'"):
        call(lambda x: {"x": x, "n": number})


def test_leaf_that_is_no_array():
    with pytest.raises(TypeError, match=r"(?s)grads\['name'\] is a str.*None"):
        call(lambda x: {"x": x, "name": "adam"})


@pytest.mark.parametrize(
    ("leaf", "error", "match"),
    [
        (np.longdouble(3), TypeError, "got longdouble of float128"),
        (np.array(["s"]), TypeError, "got ndarray of <U1"),
        (10**30, ValueError, "got an integer that does not fit int"),
    ],
    ids=str,
)
def test_leaf_that_jax_does_not_take(leaf, error, match):
    with pytest.raises(error, match=rf"(?s)sync_gradients.*grads\['n'\].*{match}.*\n  Pass"):
        call(lambda x: {"x": x, "n": leaf})


def test_unknown_axis():
    with pytest.raises(NameError, match=r"sync_gradients.*'nope'.*'data'"):
        run(lambda x: jcoll.sync_gradients(x, "nope"), floats(8))


def test_gradient_that_jax_has_summed_already_is_refused():
    def fn(w, x):
        grads = jax.grad(lambda w: jnp.mean(w["w"] * x))({"w": w})
        return jcoll.sync_gradients(grads, "data")

    with pytest.raises(ValueError, match=r"(?s)grads\['w'\].*float32.*'data'.*pcast.*check_vma"):
        run(fn, jnp.float32(2), floats(8), in_specs=(P(), P("data")))
