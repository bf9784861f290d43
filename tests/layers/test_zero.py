"""ZeRO stages 1 to 3 against training on one device: losses, parameters, optimizer state, types."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layers import zero_model as model
from layers.zero_model import assert_close, mesh_of, one_device, train

import jcoll
from jcoll.layers import zero

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
STAGES = [1, 2, 3]
SPLIT = P("data")
DESCENT = types.SimpleNamespace(update=lambda g, state, _: (jax.tree.map(jnp.negative, g), state))
"""An optimizer: gradient descent with a rate of 1."""


def slow(value):
    """A parameter for the long run; together these take more than ten seconds."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("num_ranks", [slow(2), slow(4), 8])
@pytest.mark.parametrize("stage", STAGES)
def test_trains_like_one_device(stage, num_ranks):
    losses, params, state = train(stage, mesh_of(num_ranks), check_vma=num_ranks != 4)
    want_losses, want_params, want_state = one_device()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert want_losses[-1] < want_losses[0] / 2
    assert_close(params, want_params, rtol=1e-5)
    assert int(state[0].count) == int(want_state[0].count) == model.STEPS


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_trains_in_bfloat16(stage):
    """Parameters, gradients and Adam's moments in bfloat16."""
    steps = 10
    losses, params, _ = train(stage, mesh_of(4), params=model.init(jnp.bfloat16), steps=steps)
    np.testing.assert_allclose(losses, one_device(steps=steps, dtype=jnp.bfloat16)[0], rtol=1e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("stage", STAGES)
def test_clips_by_the_norm_of_all_ranks(stage):
    """optax's chain on one device; padding, a scalar and an empty leaf count as they should."""
    steps = 3
    losses, params, _ = train(stage, mesh_of(8), False, max_norm=0.1, steps=steps)
    want_losses, want, _ = one_device(max_norm=0.1, steps=steps)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_close(params, want)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_each_leaf(stage):
    """As the stage has them, put together, beside jax.grad of the whole batch on one device."""
    mesh, params = mesh_of(4), model.init()
    layout = model.layout_of(params, 4)
    param_specs, _ = model.state_specs(layout, stage)

    def fn(params, data):
        _, grads = model.gradients(stage, params, layout, data, True)
        if stage == 1:
            grads = zero.reduce_scatter_gradients(grads, layout, "data")
        return grads

    mapped = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(param_specs, P("data")),
        out_specs=zero.specs(layout, "data"),
    )
    start = model.placed(zero.pad(params, layout) if stage == 3 else params, mesh, param_specs)
    got = jax.jit(mapped)(start, model.placed(model.batch(), mesh, P("data")))
    assert_close(zero.trim(got, layout), jax.grad(model.loss)(params, model.batch()))
    for leaf, part in zip(jax.tree.leaves(got), jax.tree.leaves(layout), strict=True):
        assert np.count_nonzero(leaf) == np.count_nonzero(zero.trim(leaf, part))


def shard_mapped(fn, num_ranks=4, in_specs=SPLIT, out_specs=SPLIT, check_vma=True):
    return jax.shard_map(
        fn, mesh=mesh_of(num_ranks), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


@CHECK_VMA
def test_bfloat16_model_with_a_float32_master_copy(check_vma):
    """gather(dtype=bfloat16): half the bytes; gradients in float32, within bfloat16's error."""
    w = {"w": np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)}
    x = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    layout = zero.layouts(w, 4)

    def fn(shards, x):
        def loss(s):
            whole = zero.gather(s, layout, "data", dtype=jnp.bfloat16, wire_dtype=jnp.bfloat16)
            return jnp.mean(jnp.square(x.astype(jnp.bfloat16) @ whole["w"]).astype(jnp.float32))

        return jax.grad(loss)(shards)

    mapped = shard_mapped(fn, check_vma=check_vma)
    data = model.placed((w, x), mesh_of(4), (P("data"), P("data")))
    text = str(jax.make_jaxpr(mapped)(*data))
    assert "bf16[4,2,5]" in text  # What the gather gives: blocks of bfloat16.
    got = jax.jit(mapped)(*data)
    assert got["w"].dtype == jnp.float32
    assert_close(got, jax.grad(lambda w: jnp.mean(jnp.square(x @ w["w"])))(w), rtol=2e-2)


def test_small_leaves_share_collectives():
    """16 small leaves: one gather and one reduce_scatter; by themselves 16 each."""
    params = {f"p{i}": np.ones((4, i + 1), np.float32) for i in range(16)}
    layout = zero.layouts(params, 4)
    placed = zero.place(params, layout, "data", mesh_of(4))
    for join_bytes, count in ((2**14, 1), (0, 16)):

        def fn(shards, join_bytes=join_bytes):
            def loss(s):
                whole = zero.gather(s, layout, "data", join_bytes=join_bytes)
                return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(whole))

            return jax.grad(loss)(shards)

        mapped = shard_mapped(fn)
        text = str(jax.make_jaxpr(mapped)(placed))
        assert text.count("= jcoll_all_gather[") == count
        assert text.count("= jcoll_reduce_scatter[") == count
        for leaf in jax.tree.leaves(jax.jit(mapped)(placed)):
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, 2, np.float32))


def test_regathered_keeps_no_whole_parameters():
    """Residuals of the layer: what arithmetic gave, not the gathered matrix or its cast."""
    w = np.ones((64, 64), np.float32)
    layout = zero.layouts(w, 4)

    def layer(w, x):
        return jnp.tanh(x @ w.T.astype(jnp.bfloat16))

    def residuals(apply):
        def fn(shards, x):
            _, pull = jax.vjp(apply, shards, x)
            found.extend(leaf.shape for leaf in jax.tree.leaves(pull))
            return x

        found = []
        args = model.placed((w, jnp.ones((8, 64), jnp.bfloat16)), mesh_of(4), (P("data"),) * 2)
        jax.make_jaxpr(shard_mapped(fn))(*args)
        return found

    kept = residuals(lambda s, x: layer(zero.gather(s, layout, "data"), x))
    assert (64, 64) in kept
    assert (64, 64) not in residuals(zero.regathered(layer, layout, "data"))
    nothing = jax.checkpoint_policies.nothing_saveable
    kept = residuals(zero.regathered(layer, layout, "data", policy=nothing))
    assert sorted(kept) == [(2, 64), (16, 64)]  # The layer's arguments.


def test_gradients_of_a_scan_that_keeps_nothing():
    """regathered layers under the policy that keeps only their arguments, against one device."""
    w = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32) / 3
    x = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    layout, stacked = zero.layouts(w[0], 4), zero.layouts(w, 4, keep_dims=1)

    def loss(layer, w, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] ** 2)

    def layer(w, x):
        return jnp.tanh(x @ w)

    keep_nothing = jax.checkpoint_policies.nothing_saveable
    sharded = zero.regathered(layer, layout, "data", policy=keep_nothing, prevent_cse=False)
    specs = (zero.specs(stacked, "data"), P("data"))
    fn = shard_mapped(lambda w, x: jax.grad(loss, 1)(sharded, w, x), 4, specs, specs[0])
    got = jax.jit(fn)(*model.placed((w, x), mesh_of(4), specs))
    assert_close(got, jax.grad(loss, 1)(layer, w, x))


def test_shards_of_tensor_parallel_parameters():
    """data x tensor: each tensor rank's part is split over the data ranks along another dimension;
    a vector that is split already stays as it is. Two data axes together."""
    w = {"w": np.arange(48, dtype=np.float32).reshape(6, 8), "b": np.arange(8, dtype=np.float32)}
    specs = {"w": P(None, "tensor"), "b": P("tensor")}
    mesh = jax.make_mesh((2, 2, 2), ("host", "data", "tensor"))
    axes = ("host", "data")
    layout = zero.layouts(w, 4, specs=specs)
    assert zero.specs(layout, axes) == {"w": P(axes, "tensor"), "b": P("tensor")}
    assert layout["w"].padded_shape == (8, 8)

    def fn(w):
        return zero.gather(zero.shard(w, layout, axes), layout, axes)

    for check_vma in (True, False):
        mapped = jax.shard_map(
            lambda w: jax.tree.map(lambda x: jcoll.all_reduce(x, axes, op="max"), fn(w)),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs,
            check_vma=check_vma,
        )
        got = jax.jit(mapped)(model.placed(w, mesh, specs))
        jax.tree.map(np.testing.assert_array_equal, got, w)


# Layouts


@pytest.mark.parametrize(
    ("shape", "n", "keep", "spec", "dim", "padded"),
    [
        ((8, 6), 4, 0, P(), -2, (8, 6)),
        ((6, 8), 4, 0, P(), -1, (6, 8)),
        ((5, 7), 4, 0, P(), -1, (5, 8)),
        ((3,), 8, 0, P(), -1, (8,)),
        ((), 4, 0, P(), None, ()),
        ((0, 4), 4, 0, P(), None, (0, 4)),
        ((8, 3), 4, 1, P(), -1, (8, 4)),
        ((8,), 4, 1, P(), None, (8,)),
        ((8, 4), 4, 0, P("tensor"), -1, (8, 4)),
        ((8,), 4, 0, P("tensor"), None, (8,)),
        ((8, 6), 1, 0, P(), None, (8, 6)),
    ],
)
def test_layouts(shape, n, keep, spec, dim, padded):
    layout = zero.layouts(np.zeros(shape), n, keep_dims=keep, specs=spec)
    assert (layout.dim, layout.padded_shape) == (dim, padded)
    assert zero.trim(zero.pad(np.zeros(shape), layout), layout).shape == shape


# Bad input


def refused(error, match, fn, *args):
    with pytest.raises(error, match=f"(?s){match}.*\n  "):
        jax.eval_shape(shard_mapped(fn, in_specs=P(), out_specs=P("data")), *args)


def test_refuses_what_the_layout_is_not_of():
    w = {"w": jnp.zeros((8, 6))}
    layout, other = zero.layouts(w, 4), zero.layouts(w, 8)
    refused(
        ValueError,
        r"zero.gather over axis 'data': shards\['w'\] has shape \(8, 6\); a shard of .*\[2, 6\]",
        lambda w: zero.gather(w, layout, "data"),
        w,
    )
    refused(
        ValueError,
        r"zero.shard over axis 'data': params\['w'\] has a layout for 8 ranks; there are 4",
        lambda w: zero.shard(w, other, "data"),
        w,
    )
    refused(
        ValueError,
        r"zero.shard over axis 'data': params is a tree .*, its layout",
        lambda w: zero.shard([w], layout, "data"),
        w,
    )
    refused(
        ValueError,
        r"reduce_scatter_gradients.*grads\['w'\].*is the same on all ranks of axis 'data'",
        lambda w: zero.reduce_scatter_gradients(w, layout, "data"),
        w,
    )
    refused(
        TypeError,
        "wire_dtype='int8' is no floating-point type",
        lambda w: zero.reduce_scatter_gradients(w, layout, "data", wire_dtype="int8"),
        w,
    )


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ((2, 6), True),
        ((6,), False),  # One layer's of a stack has the split dimension, too.
        ((2, 5), False),
        ((2, 3), False),
        ((2, 6, 1), False),
        ((1, 2, 6), False),
    ],
)
def test_all_dimensions_of_a_shard_are_checked(given, fits):
    layout = zero.layouts(jnp.zeros((8, 6)), 4)
    gather = functools.partial(zero.gather, layout=layout, axis_name="data")
    if fits:
        jax.eval_shape(shard_mapped(gather, in_specs=P(), out_specs=P("data")), jnp.zeros(given))
    else:
        refused(ValueError, r"shards has shape .* of shape \[2, 6\] is", gather, jnp.zeros(given))


def test_leaves_that_are_whole_are_checked():
    layout = zero.layouts(jnp.zeros(()), 4)
    gather = functools.partial(zero.gather, layout=layout, axis_name="data")
    refused(ValueError, r"shards has shape \(3,\); .* of shape \[\] is", gather, jnp.zeros(3))


def test_layout_of_another_mesh():
    layout = zero.layouts({"w": np.zeros((8, 6))}, 8)
    for axis, match in (("data", r"leaf \['w'\] has .* 8 ranks; .* has 4"), ("x", "no axis 'x'")):
        with pytest.raises(ValueError, match=f"(?s)zero.shardings: .*{match}.*\n  "):
            zero.place({"w": np.zeros((8, 6))}, layout, axis, mesh_of(4))


@pytest.mark.parametrize("algorithm", ["bruck", "ring", "xla"])
def test_algorithms_that_only_some_collectives_have(algorithm):
    """all_gather has bruck, reduce_scatter and all_reduce have not: they are "auto" then."""
    layout = zero.layouts({"w": jnp.zeros((8, 6)), "b": jnp.zeros(())}, 4)

    def fn(shards):
        def loss(s):
            return sum(map(jnp.sum, jax.tree.leaves(zero.gather(s, layout, "data", **options))))

        grads = jax.grad(loss)(shards)
        return zero.update(DESCENT, grads, (), shards, layout, "data", stage=3, max_norm=1.0)[0]

    options = {"algorithm": algorithm}
    specs = zero.specs(layout, "data")
    shards = zero.place({"w": jnp.ones((8, 6)), "b": jnp.ones(())}, layout, "data", mesh_of(4))
    got = jax.jit(shard_mapped(fn, in_specs=(specs,), out_specs=specs))(shards)
    np.testing.assert_allclose(got["w"], 1 - 1 / 7, rtol=1e-6)
    np.testing.assert_allclose(got["b"], 1 - 1 / 7, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 4])
def test_refuses_other_stages(stage):
    w = jnp.zeros(8)
    refused(
        ValueError,
        f"zero.update over axis 'data': stage={stage} is none of ZeRO's; 1, 2 or 3",
        lambda w: zero.update(model.TX, w, None, w, zero.layouts(w, 4), "data", stage=stage),
        w,
    )


@pytest.mark.parametrize(
    ("params", "options", "match"),
    [
        (np.zeros(8), {"num_ranks": 0}, "num_ranks=0 is too small"),
        ({"b": np.zeros(8)}, {"specs": P(None, "x")}, r"params\['b'\] has 1 dimensions, its spec"),
        (
            {"b": np.float32(0)},
            {"keep_dims": 1},
            "0 dimensions, fewer than keep_dims=1",
        ),
        ({"b": np.zeros(8)}, {"specs": {"c": P()}}, "specs is no prefix"),
    ],
)
def test_layouts_refuse(params, options, match):
    with pytest.raises(ValueError, match=f"(?s)layers.zero.layouts: .*{match}"):
        zero.layouts(params, **{"num_ranks": 4, **options})
