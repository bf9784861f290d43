"""Arguments that cannot be meant: each is an error that says what was given and what is needed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jcoll import layers
from jcoll.layers import zero

FLOATS = jnp.ones((8, 4), jnp.float32)
LAYOUT = zero.layouts(FLOATS, 4)


def on_ranks(fn, *args):
    """fn on each of 4 ranks, which all have the same arguments."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    options = {"in_specs": P(), "out_specs": P("x"), "check_vma": False}
    return jax.jit(jax.shard_map(fn, mesh=mesh, **options))(*args)


def refused(error, match, fn, *args):
    with pytest.raises(error, match=f"(?s)^jcoll[.].*{match}.*\n  "):
        on_ranks(fn, *args)


# Numbers that are limits.

NO_NUMBERS = ["1", None, 1j, True, np.ones(2), np.ones(2).astype("complex64"), [1.0]]
no_numbers = functools.partial(pytest.mark.parametrize, "value", ids=repr)


@no_numbers([*NO_NUMBERS, 0, -1.0, float("nan")])
def test_max_norm(value):
    refused(
        ValueError, "max_norm=.*is no limit", lambda x: layers.clip_by_global_norm(x, value), FLOATS
    )


@pytest.mark.parametrize("value", [np.ones(3), np.bool_(True)])
def test_traced_max_norm(value):
    match = r"max_norm=(float64\[3\]|bool\[\]) is no limit"
    refused(ValueError, match, lambda x, n: layers.clip_by_global_norm(x, n)[0], FLOATS, value)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("value", [np.inf, 1e300])
def test_a_norm_without_limit(value, traced):
    """As torch users write it: the norm alone."""
    clip = layers.clip_by_global_norm
    fn = jax.jit(clip) if traced else lambda x, n: jax.jit(functools.partial(clip, max_norm=n))(x)
    clipped, norm = fn(FLOATS, value)
    np.testing.assert_array_equal(clipped, FLOATS)
    np.testing.assert_allclose(norm, np.sqrt(32), rtol=1e-6)
    assert np.isnan(fn(FLOATS.at[0, 0].set(jnp.inf), value)[0]).all()


@no_numbers([*(x for x in NO_NUMBERS if x is not None), np.inf])
def test_capacity_factor(value):
    def dispatch(x):
        ids = jnp.zeros((8, 1), jnp.int32)
        options = {"num_experts": 4, "mode": "capacity", "capacity_factor": value}
        return layers.dispatch_to_experts(x, ids, "x", **options)[0]

    refused(ValueError, "capacity_factor=.*is not a positive number", dispatch, FLOATS)


def test_a_block_is_never_higher_than_all_there_is():
    def dispatch(x):
        ids = jnp.zeros((8, 1), jnp.int32)
        options = {"num_experts": 4, "mode": "capacity", "capacity_factor": 1e300}
        return layers.dispatch_to_experts(x, ids, "x", **options)[0]

    assert on_ranks(dispatch, FLOATS).shape[0] == 4 * (4 * 8)


@no_numbers([*NO_NUMBERS, 1.5])
def test_label_smoothing(value):
    labels = jnp.zeros(8, jnp.int32)
    loss = functools.partial(layers.vocab_parallel_cross_entropy, label_smoothing=value)
    refused(ValueError, "label_smoothing=.*from 0 to 1", lambda x: loss(x, labels, "x"), FLOATS)


@no_numbers([*(x for x in NO_NUMBERS if x is not None), np.inf])
def test_scale(value):
    q = FLOATS[None]
    attend = functools.partial(layers.ring_attention, scale=value)
    refused(ValueError, "scale=.*finite number", lambda q: attend(q, q, q, "x"), q)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, np.asarray, jnp.float32])
def test_numbers_of_all_kinds(kind):
    half, labels = kind(0.5), jnp.zeros(8, jnp.int32)
    loss = functools.partial(layers.vocab_parallel_cross_entropy, label_smoothing=half)
    got = on_ranks(lambda x: loss(x, labels, "x"), FLOATS)
    np.testing.assert_allclose(got, np.log(16), rtol=1e-6)
    np.testing.assert_allclose(
        layers.clip_by_global_norm(FLOATS, kind(1.0))[0], 32**-0.5, rtol=1e-6
    )


# Mixtures of experts.


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64"])
@pytest.mark.parametrize("num_experts", [128, 256])
@pytest.mark.parametrize("mode", ["dropless", "capacity"])
def test_experts_of_any_integer_type(dtype, num_experts, mode):
    """Of int8, which does not hold 128."""
    experts = np.arange(8)[:, None] * 15

    def there_and_back(x):
        ids = jnp.asarray(experts.astype(dtype))
        options = {"num_experts": num_experts, "mode": mode}
        rows, dispatch = layers.dispatch_to_experts(x, ids, "x", **options)
        return layers.combine_from_experts(rows, jnp.ones((8, 1), x.dtype), dispatch)

    np.testing.assert_array_equal(on_ranks(there_and_back, FLOATS), np.tile(FLOATS, (4, 1)))


def test_a_dispatch_of_another_kind():
    with pytest.raises(TypeError, match=r"(?s)combine_from_experts: dispatch is a NoneType.*\n  "):
        layers.combine_from_experts(FLOATS, FLOATS, None)


def moe(x, experts=None, **options):
    w = jnp.ones((1, 4, 6), x.dtype), jnp.ones((1, 6, 4), x.dtype)
    router_w = jnp.ones((4, 4), jnp.float32)
    experts = w if experts is None else experts(*w)
    return layers.moe_layer(x, router_w, experts, "x", num_experts=4, top_k=1, **options)[0]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mask": np.ones((2, 4), bool)}, ValueError, r"mask is bool\[2, 4\].*bool\[4, 2\]"),
        ({"mask": np.ones(8, bool)}, ValueError, r"mask is bool\[8\] for x of shape \(4, 2, 4\)"),
        ({"mask": np.ones((4, 2))}, ValueError, r"mask is float64\[4, 2\]"),
        ({"normalize": "no"}, TypeError, "normalize='no' is not a bool"),
        ({"experts": lambda a, b: (a, b, b)}, TypeError, "experts is a tuple of 3"),
        ({"experts": lambda a, b: {"in": a, "out": b}}, TypeError, "experts is a dict of 2"),
        ({"experts": lambda a, b: 3}, TypeError, "experts is a int;"),
        ({"experts": lambda a, b: (a, b[:, :3])}, ValueError, r"hidden rows \[.*, 6\].*, 3\]"),
        ({"activation": lambda h: h[:, :2]}, ValueError, r"hidden rows .*, 2\]; .*, 6\] is needed"),
        ({"activation": lambda h: (h, h)}, ValueError, r"hidden rows .* is a tuple; .* is needed"),
        ({"activation": None}, TypeError, "activation=None is not a function"),
    ],
)
@pytest.mark.parametrize("mode", ["dropless", "capacity"])
def test_moe_layer(options, error, match, mode):
    x = FLOATS.reshape(4, 2, 4)
    refused(error, match, functools.partial(moe, mode=mode, **options), x)


# ZeRO and accumulation.


@pytest.mark.parametrize("dtype", ["int32", bool, "foo", 3])
def test_parameters_are_gathered_as_floats(dtype):
    gather = functools.partial(zero.gather, dtype=dtype)
    match = "zero.gather over axis 'x': dtype=.* is no floating-point type"
    refused(TypeError, match, lambda x: gather(x, LAYOUT, "x"), FLOATS[:2])


def test_layouts_in_another_place():
    match = "the layout of shards has a .*; Layouts are needed"
    refused(TypeError, match, lambda x: zero.gather(x, x, "x"), FLOATS[:2])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"keep_dims": -1}, ValueError, "keep_dims=-1 is too small"),
        ({"split": "no"}, TypeError, "split='no' is not a bool"),
        ({"specs": "x"}, TypeError, r"specs has 'x'; a PartitionSpec.*PartitionSpec\('x'\)"),
        ({"specs": {"w": 0}}, TypeError, "specs has 0; a PartitionSpec"),
    ],
    ids=str,
)
def test_layouts(options, error, match):
    with pytest.raises(error, match=f"(?s)zero.layouts: .*{match}"):
        zero.layouts({"w": FLOATS}, 4, **options)


def test_a_name_is_no_spec_of_a_norm():
    refused(TypeError, "specs has 'x'", lambda x: layers.global_norm(x, specs="x"), FLOATS)


@pytest.mark.parametrize("move", [zero.pad, zero.trim])
def test_another_models_parameters(move):
    layout = zero.layouts({"w": np.zeros((6, 5))}, 4)
    name = f"jcoll.zero.{move.__name__}"
    with pytest.raises(ValueError, match=rf"(?s){name}: leaf \['w'\] has shape \(14, 8\).*\n  "):
        move({"w": np.zeros((14, 8))}, layout)
    with pytest.raises(ValueError, match=f"(?s){name}: the tree is a tree .*, its layout.*\n  "):
        move({"v": np.zeros((6, 5))}, layout)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({}, "batch={} has no arrays"),
        ({"x": np.ones((4, 2)), "y": np.ones(8)}, r"batch\['y'\] has 8 rows, batch\['x'\] 4"),
        (np.ones((0, 2)), "batch has 0 rows"),
    ],
)
def test_batches(batch, match):
    with pytest.raises(ValueError, match=f"(?s)accumulate_gradients: {match}.*\n  "):
        layers.accumulate_gradients(lambda p, b: jnp.float32(0), None, batch, 2)


@pytest.mark.parametrize("probe", [np.zeros(3, np.float32), np.float16(0), np.int32(0)])
def test_probes(probe):
    match = r"(?s)watch_finite: the probe of params\['w'\] is .*; a float32 scalar.*\n  Make it by"
    with pytest.raises(ValueError, match=match):
        layers.watch_finite({"w": FLOATS}, {"w": probe})


# Vocabulary and attention.


@pytest.mark.parametrize("dtype", ["int32", "bool", "int8"])
def test_tables_without_nan(dtype):
    embed = functools.partial(layers.vocab_parallel_embedding, jnp.zeros(3, jnp.int32))
    match = f"table has dtype {dtype}.*floats are needed"
    refused(TypeError, match, lambda table: embed(table, "x"), FLOATS.astype(dtype))


def test_rows_of_a_table_keep_all_bits():
    """-0.0 + 0.0 is 0.0."""
    table = FLOATS.at[3].set(-0.0)
    ids = jnp.array([3, 11], jnp.int32)
    got = on_ranks(lambda table: layers.vocab_parallel_embedding(ids, table, "x"), table)
    assert np.signbit(got).all() and not got.any()


@pytest.mark.parametrize(
    ("attention", "error", "match"),
    [
        (None, TypeError, "attention=None is not a function"),
        (lambda q, *_, **__: (q, q), ValueError, "attention has made a tuple of q"),
        (lambda q, k, v, **_: q[:1], ValueError, r"shape \(1, 1, 4\) of q.*\[8, 1, E\] is needed"),
    ],
)
def test_attentions_of_ulysses(attention, error, match):
    ulysses = functools.partial(layers.ulysses_attention, attention=attention)
    q = jnp.ones((2, 4, 4), jnp.float32)
    refused(error, match, lambda q: ulysses(q, q, q, "x"), q)
