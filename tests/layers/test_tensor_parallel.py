"""column_parallel and row_parallel against the dense layers of one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layers.sharded import CHECK_VMA, assert_close, mesh_of, normal, run

import jcoll
from jcoll import layers

BATCH, SEQ, WIDTH, INNER = 2, 16, 16, 32
MODES = {
    "replicated": {},
    "sequence": {"sequence_parallel": True},
    "overlap": {"sequence_parallel": True, "overlap": True},
}
WEIGHT_SPECS = {"a": P(None, "tensor"), "a_b": P("tensor"), "b": P("tensor", None), "b_b": P()}


def weights(dtype):
    shapes = {"a": (WIDTH, INNER), "a_b": (INNER,), "b": (INNER, WIDTH), "b_b": (WIDTH,)}
    return {name: normal(i, *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def activations(dtype, seq=SEQ):
    return normal(9, BATCH, seq, WIDTH, dtype=dtype)


def dense(params, x):
    return (
        jax.nn.gelu(x @ params["a"] + params["a_b"][None, None]) @ params["b"]
        + (params["b_b"][None, None])
    )


def parallel(params, x, **options):
    y = layers.column_parallel(x, params["a"], b=params["a_b"], axis_name="tensor", **options)
    y = jax.nn.gelu(y)
    return layers.row_parallel(y, params["b"], b=params["b_b"], axis_name="tensor", **options)


def loss_and_output(model, params, x):
    y = model(params, x)
    return jnp.sum(jnp.sin(3 * y.astype(jnp.float32))), y


def gradients(model, params, x):
    """(y, gradients with respect to params, and to x) of a loss that is no mere sum."""
    loss = functools.partial(loss_and_output, model)
    (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return y, *grads


def model_of(options, wrap=lambda f: f):
    return wrap(functools.partial(parallel, **options))


def check_against_dense(mesh, check_vma, cases, wrap=lambda f: f):
    """`cases`: (mode, dtype); one program holds all of them, as compiling is what costs."""
    data = "data" if "data" in mesh.shape else None
    inputs = [(weights(dtype), activations(dtype)) for _, dtype in cases]
    x_specs = [P(data, "tensor" if MODES[mode] else None) for mode, _ in cases]

    def rank(inputs):
        outs = []
        for (mode, _), (params, x) in zip(cases, inputs, strict=True):
            y, dparams, dx = gradients(model_of(MODES[mode], wrap), params, x)
            if data and not check_vma:
                dparams = jcoll.all_reduce(dparams, data)
            outs.append((y, dparams, dx))
        return outs

    in_specs = ([(WEIGHT_SPECS, spec) for spec in x_specs],)
    out_specs = [(spec, WEIGHT_SPECS, spec) for spec in x_specs]
    got = run(rank, (inputs,), mesh, in_specs, out_specs, check_vma)
    for out, (params, x) in zip(got, inputs, strict=True):
        assert_close(out, jax.jit(functools.partial(gradients, dense))(params, x))


@CHECK_VMA
@pytest.mark.parametrize("mesh", [(2,), (8,), (2, 4)], ids=str)
def test_values_and_gradients(mesh, check_vma):
    cases = [(mode, "float32") for mode in MODES]
    check_against_dense(mesh_of(*mesh), check_vma, cases)


@CHECK_VMA
def test_bfloat16(check_vma):
    check_against_dense(mesh_of(4), check_vma, [(mode, "bfloat16") for mode in MODES])


@CHECK_VMA
def test_under_remat(check_vma):
    """The backward pass runs the forward collectives again."""
    cases = [("replicated", "float32"), ("sequence", "float32")]
    check_against_dense(mesh_of(4), check_vma, cases, wrap=jax.checkpoint)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_outside_shard_map(mode):
    mesh, params, x = mesh_of(4), weights("float32"), activations("float32")
    spec = P(None, "tensor" if MODES[mode] else None)
    model = jax.shard_map(
        model_of(MODES[mode]), mesh=mesh, in_specs=(WEIGHT_SPECS, spec), out_specs=spec
    )
    assert_close(
        jax.jit(functools.partial(gradients, model))(params, x), gradients(dense, params, x)
    )


@CHECK_VMA
def test_layers_in_scan(check_vma):
    """Two layers with residuals, their weights stacked, as a deep model has them."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), weights("float32"))
    specs = jax.tree.map(lambda s: P(None, *s), WEIGHT_SPECS, is_leaf=lambda s: isinstance(s, P))
    x = activations("float32")

    def deep(model, params, x):
        return jax.lax.scan(lambda x, layer: (x + model(layer, x), None), x, params)[0]

    spec = P(None, "tensor")
    rank = functools.partial(gradients, functools.partial(deep, model_of(MODES["sequence"])))
    got = run(rank, (stacked, x), mesh_of(2), (specs, spec), (spec, specs, spec), check_vma)
    assert_close(got, gradients(functools.partial(deep, dense), stacked, x))


@CHECK_VMA
def test_gather_output(check_vma):
    """The result is replicated by its type, or out_specs would not accept it; and so is dy."""
    params, x = weights("float32"), activations("float32")

    def gathered(params, x):
        return layers.column_parallel(
            x, params["a"], b=params["a_b"], axis_name="tensor", gather_output=True
        )

    def whole(params, x):
        return x @ params["a"] + params["a_b"][None, None]

    specs = (WEIGHT_SPECS, P())
    rank = functools.partial(gradients, gathered)
    got = run(rank, (params, x), mesh_of(4), specs, (P(), *specs), check_vma)
    assert_close(got, gradients(whole, params, x))


@CHECK_VMA
def test_sequence_parallel_keeps_no_gathered_activations(check_vma):
    """Of X this rank's part is kept for the backward pass, not what all ranks' parts make."""

    def rank(params, x):
        _, pull = jax.vjp(model_of({"sequence_parallel": True}), params, x)
        kept.extend(leaf.shape for leaf in jax.tree.leaves(pull))
        return x

    kept = []
    specs = (WEIGHT_SPECS, P(None, "tensor"))
    fn = jax.shard_map(
        rank, mesh=mesh_of(4), in_specs=specs, out_specs=specs[1], check_vma=check_vma
    )
    jax.eval_shape(fn, weights("float32"), activations("float32"))
    assert (BATCH, SEQ // 4, WIDTH) in kept
    assert (BATCH, SEQ, WIDTH) not in kept


@CHECK_VMA
@pytest.mark.parametrize("mode", ["replicated", "sequence"])
def test_second_derivatives(mode, check_vma):
    """The gradient of a norm of gradients, as a penalty has it: conjugates of conjugates."""
    axis = "tensor" if MODES[mode] else None
    params, x = weights("float32"), activations("float32")

    def penalty(model, params, x):
        dx = jax.grad(lambda x: loss_and_output(model, params, x)[0])(x)
        return jnp.sum(dx**2)

    def rank(params, x):
        return jax.grad(functools.partial(penalty, model_of(MODES[mode])))(params, x)

    specs = (WEIGHT_SPECS, P(None, axis))
    got = run(rank, (params, x), mesh_of(2), specs, WEIGHT_SPECS, check_vma)
    assert_close(got, jax.grad(functools.partial(penalty, dense))(params, x), 1e-4)


def test_varying_activations_keep_their_own_gradients():
    """pcast makes x each rank's own; its transpose, not the layer, then sums over the ranks."""

    def own(params, x):
        return parallel(params, jax.lax.pcast(x, "tensor", to="varying"))

    params, x = weights("float32"), activations("float32")
    specs = (WEIGHT_SPECS, P())
    rank = functools.partial(gradients, own)
    got = run(rank, (params, x), mesh_of(2), specs, (P(), *specs))
    assert_close(got, gradients(dense, params, x))


def test_two_axes_as_one():
    """The weights split over 2 x 2 ranks, in the order of the tuple of axes."""
    axes = ("tensor", "data")
    x, w = activations("float32"), weights("float32")["a"]

    def rank(x, w):
        return layers.column_parallel(x, w, axis_name=axes, gather_output=True)

    got = run(rank, (x, w), mesh_of(2, 2), (P(), P(None, axes)), P())
    assert_close(got, x @ w)


@CHECK_VMA
def test_collectives_of_a_pair(check_vma):
    """Megatron's count: one all_reduce forward, one backward; or as many gathers and scatters, and
    one gather that saves memory."""
    want = {
        "replicated": {"all_reduce": 2},
        "sequence": {"all_gather": 3, "reduce_scatter": 2},
        "overlap": {"ppermute": 3 + 3 + (3 + 3) + 3},
    }
    for mode, counts in want.items():
        spec = P(None, "tensor" if MODES[mode] else None)
        fn = jax.shard_map(
            functools.partial(gradients, model_of(MODES[mode])),
            mesh=mesh_of(4),
            in_specs=(WEIGHT_SPECS, spec),
            out_specs=(spec, WEIGHT_SPECS, spec),
            check_vma=check_vma,
        )
        text = str(jax.make_jaxpr(fn)(weights("float32"), activations("float32")))
        found = re.findall(r"= jcoll_(\w+)\[", text)
        bias = {"all_reduce": 1} if mode != "replicated" else {}  # The gradient of b_b.
        assert {op: found.count(op) for op in set(found)} == counts | bias, mode


def test_algorithm_reaches_the_forward_and_backward_collectives():
    def rank(params, x):
        return gradients(model_of({"sequence_parallel": True, "algorithm": "ring"}), params, x)

    spec = P(None, "tensor")
    fn = jax.shard_map(
        rank, mesh=mesh_of(4), in_specs=(WEIGHT_SPECS, spec), out_specs=(spec, WEIGHT_SPECS, spec)
    )
    text = str(jcoll.explain(jax.jit(fn), weights("float32"), activations("float32")))
    assert text.count("ring") >= 4, text


# Bad input


def error_of(rank, *args):
    with pytest.raises((ValueError, TypeError)) as error:
        run(rank, args, mesh_of(1, 4), (P(),) * len(args), P(), False)
    return str(error.value)


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


@pytest.mark.parametrize("layer", [layers.column_parallel, layers.row_parallel])
def test_shapes_that_do_not_fit(layer):
    layer = functools.partial(layer, axis_name="tensor")
    text = error_of(layer, ones(8, 16), ones(12, 4))
    assert f"jcoll.{layer.func.__name__} over axis 'tensor'" in text
    assert "(8, 16)" in text and "(12, 4)" in text and "in_specs" in text
    assert "a matrix is needed" in error_of(layer, ones(8, 16), ones(16, 4, 2))
    assert "x of shape ()" in error_of(layer, ones(), ones(16, 4))
    text = error_of(lambda x, w, b: layer(x, w, b=b), ones(8, 16), ones(16, 4), ones(16))
    assert "b has shape (16,)" in text and "must be (4,)" in text


def test_sequences_that_do_not_divide():
    text = error_of(
        lambda x, w: layers.row_parallel(x, w, axis_name="tensor", sequence_parallel=True),
        ones(10, 16),
        ones(16, 4),
    )
    assert "sequence_dim=0 has size 10, which 4 ranks do not divide" in text
    assert "Pad it to 12" in text


def test_options_that_do_not_fit():
    def column(**options):
        return error_of(
            lambda x, w: layers.column_parallel(x, w, axis_name="tensor", **options),
            ones(8, 16),
            ones(16, 4),
        )

    assert "sequence_parallel=True" in column(overlap=True)
    assert "last dimension" in column(sequence_parallel=True, sequence_dim=-1)
    assert "out of range" in column(sequence_parallel=True, sequence_dim=2)
    for flag in ("gather_output", "sequence_parallel", "overlap"):
        assert f"{flag}='yes' is not a bool" in column(**{flag: "yes"})
    assert "algorithm='fast' is unknown" in column(algorithm="fast")


@pytest.mark.parametrize("flag", ["gather_output", "sequence_parallel", "overlap"])
def test_traced_flags(flag):
    def rank(x, w):
        return layers.column_parallel(x, w, axis_name="tensor", **{flag: x[0, 0] > 0})

    assert f"{flag} is a traced value" in error_of(rank, ones(8, 16), ones(16, 4))


def test_axis_that_is_not_bound():
    text = error_of(
        lambda x, w: layers.column_parallel(x, w, axis_name="model"), ones(8, 16), ones(16, 4)
    )
    assert "axis 'model' is not bound here (bound: ['data', 'tensor'])" in text


@CHECK_VMA
def test_empty_sequence(check_vma):
    x, w = ones(2, 0, WIDTH), weights("float32")
    got = run(model_of({}), (w, x), mesh_of(2), (WEIGHT_SPECS, P()), P(), check_vma)
    assert got.shape == (2, 0, WIDTH)
    np.testing.assert_array_equal(got, np.zeros((2, 0, WIDTH), np.float32))
