"""A small model trained by each ZeRO stage, and on one device: what the tests of zero share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll.layers import zero

optax = pytest.importorskip("optax", reason="comes with jcoll[examples]")

LAYERS, WIDTH, HIDDEN, ROWS = 3, 16, 10, 32
STEPS = 50


def lenient(tx):
    """An optimizer of optax, which mixes types, where the tests' strict promotion refuses that."""

    def update(grads, state, params):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return tx.update(grads, state, params)

    return optax.GradientTransformation(tx.init, update)


TX = lenient(optax.adamw(1e-2))


def mesh_of(num_ranks, name="data"):
    return Mesh(np.array(jax.devices()[:num_ranks]), (name,))


# A model with a stack of layers, a padded leaf (7 rows), a scalar, an empty leaf and no subtree.


def init(dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype)

    return {
        "blocks": {
            "w1": normal(LAYERS, WIDTH, HIDDEN),
            "b1": jnp.zeros((LAYERS, HIDDEN), dtype),
            "w2": normal(LAYERS, HIDDEN, WIDTH),
        },
        "head": {"w": normal(WIDTH, 3), "b": jnp.ones(3, dtype), "empty": jnp.ones((0, 3), dtype)},
        "embed": normal(7, WIDTH),
        "scale": jnp.asarray(0.9, dtype),
        "none": None,
    }


def batch():
    rng = np.random.default_rng(1)
    return {
        "ids": rng.integers(0, 7, ROWS).astype(np.int32),
        "y": rng.normal(size=(ROWS, 3)).astype(np.float32),
    }


def block(p, x):
    return x + jnp.tanh(x @ p["w1"] + p["b1"][None]) @ p["w2"]


def loss(params, data, apply=block):
    """apply(one layer's parameters, x); the layers' part of `params` is scanned over."""
    x = params["embed"][data["ids"]] * params["scale"]
    x, _ = jax.lax.scan(lambda x, p: (apply(p, x), None), x, params["blocks"])
    y = (x @ params["head"]["w"] + params["head"]["b"][None]).astype(jnp.float32)
    return jnp.mean((y - data["y"]) ** 2)


def layout_of(params, n):
    rest = {name: part for name, part in params.items() if name != "blocks"}
    return {
        "blocks": zero.layouts(params["blocks"], n, keep_dims=1),
        **zero.layouts(rest, n),
    }


def state_specs(layout, stage, tx=TX, name="data"):
    """PartitionSpecs of (params, opt_state)."""
    state = jax.eval_shape(tx.init, zero.shapes(layout))
    params = zero.specs(layout, name) if stage == 3 else P()
    return params, zero.specs(zero.layouts_of_state(state, layout), name)


def local_loss(stage, shards, params, layout, data, **options):
    """The loss as a function of what it is differentiated by."""
    if stage == 1:
        return loss(params, data)
    if stage == 2:
        return loss(zero.redirect_gradients(params, shards, layout, "data", **options), data)
    rest = {name: part for name, part in shards.items() if name != "blocks"}
    rest_layout = {name: part for name, part in layout.items() if name != "blocks"}
    whole = zero.gather(rest, rest_layout, "data", **options)
    apply = zero.regathered(block, layout["blocks"], "data", prevent_cse=False, **options)
    return loss({"blocks": shards["blocks"], **whole}, data, apply)


def gradients(stage, params, layout, data, check_vma, **options):
    """(mean loss, gradients as the stage has them), inside shard_map."""
    shards = params if stage == 3 else zero.shard(params, layout, "data")
    if stage == 1 and check_vma:
        params = jax.lax.pcast(params, "data", to="varying")
    if stage == 1:
        value, grads = jax.value_and_grad(loss)(params, data)
    else:
        value, grads = jax.value_and_grad(
            lambda s: local_loss(stage, s, params, layout, data, **options)
        )(shards)
    return jcoll.all_reduce(value, "data", op="mean"), grads


def trainer(stage, mesh, layout, check_vma=True, max_norm=None, tx=TX, **options):
    """A jitted step (params, opt_state, data) -> (params, opt_state, loss), and the specs."""
    param_specs, opt_specs = state_specs(layout, stage, tx)

    def step(params, opt_state, data):
        value, grads = gradients(stage, params, layout, data, check_vma, **options)
        new = zero.update(
            tx, grads, opt_state, params, layout, "data", stage=stage, max_norm=max_norm, **options
        )
        return *new, value

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(param_specs, opt_specs, P("data")),
        out_specs=(param_specs, opt_specs, P()),
        check_vma=check_vma,
    )
    return jax.jit(mapped), param_specs, opt_specs


def placed(tree, mesh, specs):
    shardings = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: NamedSharding(mesh, spec), part),
        specs,
        tree,
        is_leaf=lambda s: isinstance(s, P),
    )
    return jax.device_put(tree, shardings)


def train(stage, mesh, check_vma=True, max_norm=None, steps=STEPS, params=None, **options):
    """(losses, whole parameters, whole optimizer state)."""
    layout = layout_of(params or init(), mesh.size)
    step, param_specs, opt_specs = trainer(stage, mesh, layout, check_vma, max_norm, **options)
    padded = zero.pad(params or init(), layout)
    opt_state = placed(TX.init(padded), mesh, opt_specs)
    params = placed(padded if stage == 3 else params or init(), mesh, param_specs)
    data = placed(batch(), mesh, P("data"))
    losses = []
    for _ in range(steps):
        params, opt_state, value = step(params, opt_state, data)
        losses.append(float(value))
    state_layout = zero.layouts_of_state(opt_state, layout)
    whole = zero.trim(params, layout) if stage == 3 else params
    return losses, whole, zero.trim(opt_state, state_layout)


@functools.cache
def one_device(max_norm=None, steps=STEPS, dtype=jnp.float32):
    tx = (
        TX
        if max_norm is None
        else lenient(optax.chain(optax.clip_by_global_norm(max_norm), optax.adamw(1e-2)))
    )

    @jax.jit
    def step(params, state, data):
        value, grads = jax.value_and_grad(loss)(params, data)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init(dtype)
    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state, batch())
        losses.append(float(value))
    return losses, params, state


def assert_close(got, want, rtol=1e-5):
    """Leaf by leaf, to rtol of the leaf's largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g64, w64 = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g64, w64, rtol=rtol, atol=rtol * np.abs(w64).max(initial=0))
