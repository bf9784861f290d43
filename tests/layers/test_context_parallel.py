"""Attention over a split sequence against the whole matrix of scores on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jcoll import layers
from jcoll.errors import AxisError
from jcoll.layers import online_softmax
from jcoll.layers.attention import attend, make_keys, make_queries, merge_heads

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
RING, GATHER, ULYSSES = (
    layers.ring_attention,
    layers.all_gather_attention,
    layers.ulysses_attention,
)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
# Running takes no time here, compiling does.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def inputs(heads=4, kv_heads=4, tokens=16, batch=(2,), dtype="float32", keys=None, head_dim=8):
    """q, k, v of numbers that the dtype holds exactly; values of another size than keys."""
    rng = np.random.default_rng(0)
    shapes = [
        (*batch, tokens, heads, head_dim),
        (*batch, keys or tokens, kv_heads, head_dim),
        (*batch, keys or tokens, kv_heads, head_dim - 2),
    ]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def segments_of(batch, tokens):
    """Documents of different lengths, packed."""
    return jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (*batch, tokens))), "int32")


def full_attention(q, k, v, causal=True, segment_ids=None, scale=None):
    """softmax(scale q k^T) v by the definition."""
    scores, v = scores_of(jnp, q, k, v, causal, segment_ids, scale)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(scores), v)


def scores_of(xp, q, k, v, causal, segment_ids, scale):
    """(scores [..., N, T, S], -inf where they do not count; v with a head for each of q's)."""
    k, v = (xp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    scores = xp.einsum("...thd,...shd->...hts", q, k) * (scale or q.shape[-1] ** -0.5)
    if causal:
        past = xp.broadcast_to(xp.tri(q.shape[-3], dtype=bool), scores.shape)
        scores = xp.where(past, scores, -xp.inf)
    if segment_ids is not None:
        same = segment_ids[..., None, :, None] == segment_ids[..., None, None, :]
        scores = xp.where(xp.broadcast_to(same, scores.shape), scores, -xp.inf)
    return scores, v


def full_attention_gradients(q, k, v, causal, segment_ids=None, scale=None):
    """What with_gradients gives for full_attention, in numpy's float64: nothing to compile."""
    q, k, values = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[-2] // k.shape[-2]
    scores, v = scores_of(np, q, k, values, causal, segment_ids, scale)
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("...hts,...she->...the", weights, v)
    dout = loss_weights(np, out.shape)
    dweights = np.einsum("...the,...she->...hts", dout, v)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    dscores *= scale or q.shape[-1] ** -0.5
    dq = np.einsum("...hts,...shd->...thd", dscores, np.repeat(k, groups, -2))
    dk = np.einsum("...hts,...thd->...shd", dscores, q)
    dv = np.einsum("...hts,...the->...she", weights, dout)
    return [out, dq, *(x.reshape(*k.shape[:-1], groups, x.shape[-1]).sum(-2) for x in (dk, dv))]


def loss_weights(xp, shape):
    """A weight of its own for every element of `out`."""
    return xp.cos(xp.arange(np.prod(shape, dtype=int), dtype="float32")).reshape(shape)


def split_attention(attention, mesh, *, check_vma=True, axis="seq", dim=1, **options):
    """attention(q, k, v, segment_ids) of whole sequences in the order of the text."""
    spec = P(*(None,) * dim, axis)
    zigzag = options.get("placement") == "zigzag"
    size = mesh.size

    def of_rank(q, k, v, segment_ids):
        return attention(q, k, v, axis_name=axis, segment_ids=segment_ids, **options)

    def run(q, k, v, segment_ids=None):
        arrays = (q, k, v, segment_ids)
        if zigzag:
            arrays = layers.to_zigzag(arrays, size, sequence_dim=dim)
        out = jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)(
            *arrays
        )
        return layers.from_zigzag(out, size, sequence_dim=dim) if zigzag else out

    return run


def mesh_of(*shape, names=("seq", "other")):
    types = (AxisType.Auto,) * len(shape)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names[: len(shape)], axis_types=types, devices=devices)


def with_gradients(attention, q, k, v, *rest):
    """[out, dq, dk, dv] of a loss that is the sum of out * loss_weights."""

    @jit
    def run(q, k, v, *rest):
        out, back = jax.vjp(lambda *qkv: attention(*qkv, *rest), q, k, v)
        return [out, *back(loss_weights(jnp, out.shape).astype(out.dtype))]

    return run(q, k, v, *rest)


def assert_close(got, want, dtype):
    """Each array by its largest element."""
    for name, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert g.dtype == dtype
        assert g.shape == w.shape
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.isfinite(g).all()
        error = np.max(np.abs(g - w), initial=0) / np.max(np.abs(w), initial=1e-30)
        assert error <= TOLERANCE[dtype], name


def check(attention, mesh, arrays, *, segment_ids=None, causal=True, dim=1, scale=None, **options):
    rest = [] if segment_ids is None else [segment_ids]
    run = split_attention(attention, mesh, causal=causal, dim=dim, scale=scale, **options)
    got = with_gradients(run, *arrays, *rest)
    want = full_attention_gradients(*arrays, causal, segment_ids, scale)
    assert_close(got, want, str(arrays[0].dtype))


# Outputs and gradients.

ATTENTIONS = {
    "ring": (RING, {"placement": "contiguous", "block_size": 2}),
    "ring-zigzag": (RING, {"placement": "zigzag"}),
    "gather": (GATHER, {"placement": "contiguous"}),
    "gather-zigzag": (GATHER, {"placement": "zigzag", "block_size": 3}),
    "ulysses": (ULYSSES, {"block_size": 5}),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_equals_full_attention(name):
    attention, options = ATTENTIONS[name]
    check(attention, mesh_of(4), inputs(), **options)


@pytest.mark.parametrize("name", ["ring-zigzag", "gather", "ulysses"])
def test_of_bfloat16(name):
    attention, options = ATTENTIONS[name]
    check(attention, mesh_of(2), inputs(dtype="bfloat16", batch=(1,)), **options)


@pytest.mark.parametrize("name", ["ring", "gather-zigzag", "ulysses"])
def test_without_a_mask(name):
    attention, options = ATTENTIONS[name]
    check(attention, mesh_of(2), inputs(kv_heads=2), causal=False, scale=0.3, **options)


@pytest.mark.parametrize("name", ["ring", "gather-zigzag", "ulysses"])
def test_segments_and_grouped_heads(name):
    attention, options = ATTENTIONS[name]
    ids, arrays = segments_of((2,), 32), inputs(tokens=32, heads=8, kv_heads=2)
    check(attention, mesh_of(8), arrays, segment_ids=ids, check_vma=False, **options)


@pytest.mark.parametrize("name", ["ring-zigzag", "ulysses"])
def test_one_rank(name):
    attention, options = ATTENTIONS[name]
    check(attention, mesh_of(1), inputs(tokens=6), **options)


@pytest.mark.parametrize("batch", [(), (0,)], ids=str)
def test_leading_dimensions(batch):
    arrays = inputs(tokens=8, batch=batch)
    check(RING, mesh_of(2), arrays, dim=len(batch), placement="zigzag")


def test_keys_of_another_sequence():
    check(RING, mesh_of(2), inputs(tokens=8, keys=20), causal=False)


@pytest.mark.parametrize("attention", [RING, ULYSSES])
def test_a_sequence_over_two_axes(attention):
    mesh = mesh_of(2, 2, names=("a", "b"))
    check(attention, mesh, inputs(), axis=("a", "b"))


def test_ulysses_around_a_ring():
    """Heads over one axis, what is left of the sequence over the other."""
    inner = functools.partial(RING, axis_name="ring")

    def both(q, k, v, *, axis_name, **options):
        return ULYSSES(q, k, v, axis_name=axis_name[1], attention=inner, **options)

    arrays, ids = inputs(heads=4, kv_heads=1), segments_of((2,), 16)
    mesh = mesh_of(2, 4, names=("ring", "heads"))
    check(both, mesh, arrays, axis=("ring", "heads"), segment_ids=ids)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6, 12])
def test_ulysses_sends_heads_of_keys_as_often_as_needed(kv_heads):
    arrays = inputs(heads=12, kv_heads=kv_heads, tokens=8)
    text = str(jax.make_jaxpr(split_attention(ULYSSES, mesh_of(4)))(*arrays))
    blocks = set(re.findall(r"f32\[4,2,2,(\d+),8\]\S* = jcoll_all_to_all", text))
    assert blocks == {"3", str(np.lcm(kv_heads, 4) // 4)}


@pytest.mark.parametrize("kv_heads", [1, 6])
def test_ulysses_with_heads_of_keys_on_several_ranks(kv_heads):
    check(ULYSSES, mesh_of(4), inputs(heads=12, kv_heads=kv_heads, tokens=8))


@CHECK_VMA
@pytest.mark.parametrize("attention", [RING, ULYSSES])
def test_batch_and_sequence_on_one_mesh(attention, check_vma):
    """q is made of a replicated parameter: its gradient is summed over both axes."""
    mesh, spec = mesh_of(4, 2), P("other", "seq")
    q, k, v = inputs()

    def loss(scale, q, k, v):
        def of_rank(scale, q, k, v):
            return attention(q * scale, k, v, axis_name="seq")

        specs = (P(), spec, spec, spec)
        run = jax.shard_map(of_rank, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=check_vma)
        return jnp.sum(jnp.sin(run(scale, q, k, v)))

    def reference(scale, q, k, v):
        return jnp.sum(jnp.sin(full_attention(q * scale, k, v)))

    scale = jnp.full((8,), 0.7, jnp.float32)[None, None, None]
    got, want = (jit(jax.grad(f))(scale, q, k, v) for f in (loss, reference))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_replicated_keys():
    """Types vary over different axes: q over the sequence's, k and v over none."""
    mesh = mesh_of(2)
    q, k, v = inputs(tokens=8)

    def loss(k, v, q):
        def of_rank(k, v, q):
            return jax.lax.psum(jnp.sum(jnp.sin(RING(q, k, v, axis_name="seq"))), "seq")

        specs = (P(), P(), P(None, "seq"))
        return jax.shard_map(of_rank, mesh=mesh, in_specs=specs, out_specs=P())(k, v, q)

    def reference(k, v, q):
        return jnp.sum(jnp.sin(full_attention(q, *(jnp.tile(x, (1, 2, 1, 1)) for x in (k, v)))))

    k, v = k[:, :4], v[:, :4]
    got, want = (jit(jax.grad(f, (0, 1)))(k, v, q) for f in (loss, reference))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


# Under transformations.


@pytest.mark.parametrize("attention", [RING, ULYSSES])
def test_layers_by_scan_with_remat(attention):
    """In float64, as errors grow from layer to layer."""
    mesh, spec = mesh_of(2), P(None, "seq")
    x = inputs(dtype="float64")[0]
    weights = jnp.linspace(0.5, 1.5, 3)

    def model(one_layer, x, weights):
        step = jax.checkpoint(lambda x, w: (x + one_layer(x * w, x, x), None))
        return jax.lax.scan(step, x, weights)[0]

    def split(x, weights):
        one_layer = functools.partial(attention, axis_name="seq")
        run = functools.partial(model, one_layer)
        return jax.shard_map(run, mesh=mesh, in_specs=(spec, P()), out_specs=spec)(x, weights)

    def loss(run):
        return jit(jax.grad(lambda x, weights: jnp.sum(jnp.sin(run(x, weights))), (0, 1)))

    got = loss(split)(x, weights)
    want = loss(functools.partial(model, full_attention))(x, weights)
    for g, w in zip(got, want, strict=True):
        assert np.max(np.abs(g - w)) <= 1e-10 * np.max(np.abs(w))


def test_vmap_over_the_axis_itself():
    """The ranks as a dimension of one array: no mesh at all."""
    q, k, v = inputs(tokens=8)
    parts = [jnp.stack(jnp.split(x, 2, axis=1)) for x in (q, k, v)]
    run = jax.vmap(functools.partial(RING, axis_name="seq"), axis_name="seq")
    got = jnp.concatenate(list(jit(run)(*parts)), axis=1)
    np.testing.assert_allclose(got, jit(full_attention)(q, k, v), rtol=1e-5, atol=1e-5)


def test_algorithm_and_deadline_reach_every_collective():
    arrays = inputs()
    for attention, count in ((RING, 4), (GATHER, 2), (ULYSSES, 4)):
        run = split_attention(attention, mesh_of(4), algorithm="direct", timeout_s=7)
        text = str(jax.make_jaxpr(run)(*arrays))
        assert text.count("algorithm='direct'") == text.count("timeout_s=7.0") == count


# Tiles.


def test_a_token_that_sees_nothing_gets_zeros():
    """No keys, no sum: not 0 / 0, and no gradient."""
    q, k, v = inputs(tokens=4)
    positions = jnp.arange(4)
    rule = online_softmax.Rule(causal=True, scale=1.0, block_size=4)

    def attention(q, k, v):
        queries = make_queries(q, k, positions - 2, None)
        return merge_heads(attend(rule, queries, make_keys(k, v, positions, None)))

    out, *gradients = with_gradients(attention, q, k, v)
    assert not np.any(out[:, :2])
    assert np.all(np.any(out[:, 2:], axis=-1))
    assert all(np.isfinite(g).all() for g in gradients)
    assert not np.any(gradients[0][:, :2])


@pytest.mark.parametrize("block_size", [1, 5, 8, 100])
def test_any_block_size(block_size):
    q, k, v = inputs(tokens=8)
    got = with_gradients(
        functools.partial(layers.blockwise_attention, block_size=block_size), q, k, v
    )
    assert_close(got, full_attention_gradients(q, k, v, causal=True), "float32")


def test_scores_that_overflow_exp():
    q, k, v = inputs(tokens=8)
    got = jit(functools.partial(layers.blockwise_attention, block_size=2))(q * 100, k * 100, v)
    want = jit(full_attention)(q * 100, k * 100, v)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("placement", "work"), [("contiguous", [3, 7, 11, 15]), ("zigzag", [9, 9, 9, 9])]
)
def test_hidden_tiles_are_skipped(placement, work, monkeypatch):
    """Each rank computes the tiles that it must, and in zigzag all as many."""
    seen = []
    scores = online_softmax._scores

    def recorded(rule, queries, keys):
        where = (jax.lax.axis_index("seq"), queries.positions[0], keys.positions[0])
        jax.debug.callback(lambda *where: seen.append(tuple(map(int, where))), *where)
        return scores(rule, queries, keys)

    monkeypatch.setattr(online_softmax, "_scores", recorded)
    run = split_attention(RING, mesh_of(4), placement=placement, block_size=2, check_vma=False)
    jax.block_until_ready(jit(run)(*inputs()))
    jax.effects_barrier()
    tiles = [(q, k) for q in range(0, 16, 2) for k in range(0, q + 1, 2)]
    assert sorted((q, k) for _, q, k in seen) == tiles
    assert np.bincount([rank for rank, _, _ in seen]).tolist() == work


# Bad input.


def call(attention=RING, arrays=None, num_ranks=4, segment_ids=None, **options):
    arrays = arrays or inputs()
    jax.eval_shape(split_attention(attention, mesh_of(num_ranks), **options), *arrays, segment_ids)


WHERE = "(?s)jcoll.ring_attention over axis 'seq'.*"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"placement": "striped"}, r"placement='striped'.*'contiguous' or 'zigzag'"),
        ({"block_size": 0}, r"block_size=0 is too small.*at least 1"),
        ({"scale": np.ones(2)}, r"scale=array.* is not a finite number"),
        ({"scale": float("nan")}, r"scale=nan is not a finite number.*D \*\* -0.5"),
        ({"algorithm": "bruck"}, r"algorithm='bruck' does not serve.*ppermute"),
    ],
    ids=str,
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=WHERE + match):
        call(**options)


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ([(4, 3, 8), (4, 2, 8), (4, 2, 8)], r"q has 3 heads, which the 2 heads of k and v"),
        ([(4, 2, 8), (4, 0, 8), (4, 0, 8)], r"q has 2 heads, which the 0 heads of k and v"),
        ([(8, 2, 8), (4, 2, 8), (4, 2, 8)], r"q has 2 tokens, k and v have 1.*causal=False"),
        ([(4, 2), (4, 2), (4, 2)], r"q float32\[1,2\].*q \[..., T, N, D\]"),
        ([(4, 2, 8), (4, 2, 6), (4, 2, 8)], r"q float32\[1,2,8\], k float32\[1,2,6\]"),
        ([(4, 2, 8), (4, 2, 8), (4, 1, 8)], r"v float32\[1,1,8\]"),
        ([(4, 2, 8)] * 3 + [(4, 1)], r"segment_ids has shape \(1, 1\).*of shape \(1,\)"),
    ],
    ids=str,
)
def test_bad_shapes(shapes, match):
    arrays = [jnp.zeros(shape, "float32") for shape in shapes[:3]]
    ids = [jnp.zeros(shape, "int32") for shape in shapes[3:]]
    with pytest.raises(ValueError, match=WHERE + match):
        call(RING, arrays, segment_ids=ids[0] if ids else None, dim=0)


def test_types_must_agree():
    q, k, v = inputs()
    match = r"(?s)q, k and v are float32, bfloat16, float32.*astype"
    with pytest.raises(TypeError, match=match):
        call(arrays=[q, k.astype("bfloat16"), v])
    with pytest.raises(TypeError, match=r"(?s)are int32, int32, int32.*floating-point"):
        call(arrays=[x.astype("int32") for x in (q, k, v)])
    with pytest.raises(TypeError, match=r"(?s)segment_ids has dtype float32; integers"):
        call(segment_ids=jnp.zeros((2, 16), "float32"))
    with pytest.raises(TypeError, match=r"(?s)segment_ids is a list; .*jnp.asarray"):
        layers.blockwise_attention(q, k, v, segment_ids=[[0] * 16] * 2)


def test_a_scale_may_be_an_array():
    jax.eval_shape(functools.partial(layers.blockwise_attention, scale=jnp.float32(0.3)), *inputs())


def test_a_traced_option():
    mesh = mesh_of(2)

    def of_rank(q, k, v):
        return RING(q, k, v, axis_name="seq", causal=jnp.sum(q) > 0)

    run = jax.shard_map(of_rank, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    with pytest.raises(TypeError, match=WHERE + "causal is a traced value"):
        jax.eval_shape(run, *inputs())


def test_zigzag_of_a_sequence_that_does_not_divide():
    match = r"(?s)a rank has 3 tokens.*even.*sequence of 12 tokens to 16"
    mesh, spec = mesh_of(4), P(None, "seq")
    run = functools.partial(RING, axis_name="seq", placement="zigzag")
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(
            jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec), *inputs(tokens=12)
        )


@pytest.mark.parametrize(("heads", "fix"), [(2, "Pad the heads to 4"), (6, "Pad the heads to 8")])
def test_ulysses_needs_heads_for_all_ranks(heads, fix):
    match = rf"(?s)q has {heads} heads, which 4 ranks do not divide.*{fix}.*ring_attention"
    with pytest.raises(ValueError, match=match):
        call(ULYSSES, inputs(heads=heads, kv_heads=1))


@pytest.mark.parametrize("attention", [RING, ULYSSES])
def test_heads_without_features_are_refused(attention):
    with pytest.raises(ValueError, match=r"(?s)heads of q and k have size 0.*at least one"):
        call(attention, [x[..., :0] for x in inputs()])


def test_outside_of_shard_map():
    with pytest.raises(AxisError, match=r"(?s)ring_attention: axis 'seq'.*shard_map"):
        RING(*inputs(), axis_name="seq")
