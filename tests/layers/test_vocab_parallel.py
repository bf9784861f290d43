"""The vocabulary-parallel embedding and cross entropy against those of one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layers.sharded import CHECK_VMA, assert_close, mesh_of, normal, run

from jcoll import layers

BATCH, SEQ, WIDTH = 2, 16, 16
TABLE = P("tensor", None)
LOGITS = P(None, None, "tensor")


def integers(seed, *shape, below):
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)


def weighted(y):
    """A loss whose gradient differs from element to element."""
    y = y.astype(jnp.float32)
    return jnp.sum(y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)))


def grads_of(fn, loss=weighted):
    """x -> (fn(x), the gradient of the loss of it)."""

    def value_and_grad(x):
        (_, y), dx = jax.value_and_grad(lambda x: (loss(fn(x)), fn(x)), has_aux=True)(x)
        return y, dx

    return value_and_grad


# The embedding


@CHECK_VMA
@pytest.mark.parametrize("mesh", [(2,), (8,), (2, 4)], ids=str)
def test_embedding(mesh, check_vma):
    """Exactly the rows; their gradients, with words that occur often, once, and never."""
    table, ids = normal(0, 32, WIDTH), integers(1, BATCH, SEQ, below=20)
    embed = functools.partial(layers.vocab_parallel_embedding, axis_name="tensor")

    def rank(ids, table):
        return grads_of(functools.partial(embed, ids))(table)

    got, dtable = run(
        rank, (ids, table), mesh_of(*mesh), (P(), TABLE), (P(), TABLE), check_vma=check_vma
    )
    want, dwant = grads_of(lambda table: table[ids])(table)
    np.testing.assert_array_equal(got, want)
    assert_close(dtable, dwant)


@CHECK_VMA
def test_embedding_of_a_part_of_the_sequence(check_vma):
    table, ids = normal(0, 32, WIDTH, dtype="bfloat16"), integers(1, BATCH, SEQ, below=32)

    def rank(ids, table):
        return grads_of(
            lambda table: layers.vocab_parallel_embedding(
                ids, table, axis_name="tensor", sequence_parallel=True
            ),
            lambda y: jnp.sum(y.astype(jnp.float32) ** 2),
        )(table)

    out_specs = (P(None, "tensor"), TABLE)
    got = run(rank, (ids, table), mesh_of(4), (P(), TABLE), out_specs, check_vma=check_vma)
    want = grads_of(lambda table: table[ids], lambda y: jnp.sum(y.astype(jnp.float32) ** 2))(table)
    np.testing.assert_array_equal(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int16", "uint32", "int64"])
def test_ids_out_of_range_are_nan(dtype):
    """Words of the padding, too, and negative ids: they do not count from the end."""
    ids = np.array([0, 18, 19, 20, 127, 3]).astype(dtype)
    if np.iinfo(dtype).min < 0:
        ids[-1] = -1
    if dtype == "int64":
        ids[1] = 2**32  # 0 in 32 bits.
    table = normal(0, 20, WIDTH)

    def rank(ids, table):
        return layers.vocab_parallel_embedding(ids, table, axis_name="tensor", vocab_size=19)

    got = run(rank, (jnp.asarray(ids), table), mesh_of(4), (P(), TABLE), P())
    valid = (ids >= 0) & (ids < 19)
    np.testing.assert_array_equal(np.isnan(got).all(axis=1), ~valid)
    np.testing.assert_array_equal(got[valid], table[ids[valid]])


def test_scalar_and_empty_ids():
    table = normal(0, 8, WIDTH)
    embed = functools.partial(layers.vocab_parallel_embedding, axis_name="tensor")
    got = run(embed, (jnp.int32(5), table), mesh_of(2), (P(), TABLE), P())
    np.testing.assert_array_equal(got, table[5])
    got = run(embed, (jnp.zeros((0, 3), jnp.int32), table), mesh_of(2), (P(), TABLE), P())
    assert got.shape == (0, 3, WIDTH)


# The loss


def cross_entropy(labels, logits, smoothing=0.0):
    """By definition, over unpadded logits."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    target = (1 - smoothing) * jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
    return -jnp.sum((target + smoothing / logits.shape[-1]) * log_p, axis=-1)


def check_loss(mesh, check_vma, vocab=29, padded=32, smoothing=0.1, dtype="float32", scale=3.0):
    """The loss and its gradient; what the padding holds, huge or NaN, does not matter."""
    logits = scale * normal(0, BATCH, SEQ, vocab, dtype="float32").astype(dtype)
    labels = integers(1, BATCH, SEQ, below=vocab)
    junk = jnp.where(jnp.arange(padded - vocab) % 2 == 0, 1e30, -jnp.inf).astype(dtype)
    junk = jnp.broadcast_to(junk, (BATCH, SEQ, padded - vocab))

    def rank(labels, logits):
        return grads_of(
            lambda logits: layers.vocab_parallel_cross_entropy(
                logits, labels, axis_name="tensor", vocab_size=vocab, label_smoothing=smoothing
            )
        )(logits)

    args = labels, jnp.concatenate([logits, junk], -1)
    loss, dlogits = run(rank, args, mesh, (P(), LOGITS), (P(), LOGITS), check_vma)
    want = grads_of(functools.partial(cross_entropy, labels, smoothing=smoothing))(logits)
    assert_close((loss, dlogits[..., :vocab]), want)
    np.testing.assert_array_equal(np.asarray(dlogits[..., vocab:], np.float32), 0)


@CHECK_VMA
@pytest.mark.parametrize("mesh", [(2,), (8,), (2, 4)], ids=str)
def test_loss(mesh, check_vma):
    check_loss(mesh_of(*mesh), check_vma)


@CHECK_VMA
def test_loss_of_bfloat16(check_vma):
    check_loss(mesh_of(4), check_vma, dtype="bfloat16")


def test_loss_without_smoothing_or_padding():
    check_loss(mesh_of(4), True, vocab=32, smoothing=0.0)


def test_loss_where_a_rank_has_padding_alone():
    check_loss(mesh_of(8), True, vocab=11, padded=24)


def test_loss_of_large_logits():
    """exp of any of these is infinite."""
    check_loss(mesh_of(2), True, smoothing=0.0, scale=3000.0)


@CHECK_VMA
def test_labels_out_of_range_are_nan(check_vma):
    """The loss of that token and its gradient; the other tokens' stay."""
    logits, labels = normal(0, 4, 16), jnp.array([0, 15, 16, -1], jnp.int32)

    def rank(logits, labels):
        loss = functools.partial(layers.vocab_parallel_cross_entropy, axis_name="tensor")
        return grads_of(lambda logits: loss(logits, labels))(logits)

    specs = (P(None, "tensor"), P())
    loss, dlogits = run(rank, (logits, labels), mesh_of(4), specs, (P(), specs[0]), check_vma)
    np.testing.assert_array_equal(np.isnan(loss), [False, False, True, True])
    np.testing.assert_array_equal(np.isnan(dlogits).all(axis=1), [False, False, True, True])
    assert np.isfinite(np.asarray(dlogits)[:2]).all()


@CHECK_VMA
def test_head_and_loss_of_a_model(check_vma):
    """Embedding, column-parallel head, loss: gradients of table and head, batch split over data."""
    table, head = normal(0, 32, WIDTH), normal(1, WIDTH, 32)
    ids = integers(2, 4, SEQ, below=32)

    def loss(embed, entropy, params, ids):
        x = jnp.tanh(embed(ids, params["table"]))
        return jnp.sum(entropy(x, params["head"], (ids + 1) % 32)) / ids.size

    def rank(params, ids):
        def entropy(x, head, labels):
            logits = layers.column_parallel(x, head, axis_name="tensor")
            return layers.vocab_parallel_cross_entropy(logits, labels, axis_name="tensor")

        embed = functools.partial(layers.vocab_parallel_embedding, axis_name="tensor")
        grads = jax.grad(functools.partial(loss, embed, entropy))(params, ids)
        return grads if check_vma else jax.lax.psum(grads, "data")

    specs = {"table": TABLE, "head": P(None, "tensor")}
    params = {"table": table, "head": head}
    got = run(rank, (params, ids), mesh_of(2, 4), (specs, P("data")), specs, check_vma)

    def whole_entropy(x, head, labels):
        return cross_entropy(labels, x @ head)

    whole = functools.partial(loss, lambda ids, table: table[ids], whole_entropy)
    want = jax.tree.map(lambda g: 2 * g, jax.grad(whole)(params, ids))  # ids.size is half here.
    assert_close(got, want)


@CHECK_VMA
def test_second_derivatives_of_the_loss(check_vma):
    logits, labels = normal(0, 4, 16), integers(1, 4, below=16)

    def penalty(entropy, logits):
        return jnp.sum(jax.grad(lambda x: weighted(entropy(x)))(logits) ** 2)

    def rank(logits, labels):
        def entropy(x):
            return layers.vocab_parallel_cross_entropy(x, labels, axis_name="tensor")

        return jax.grad(functools.partial(penalty, entropy))(logits)

    specs = (P(None, "tensor"), P())
    got = run(rank, (logits, labels), mesh_of(4), specs, specs[0], check_vma)
    want = jax.grad(functools.partial(penalty, functools.partial(cross_entropy, labels)))(logits)
    assert_close(got, want, 1e-4)


def test_no_collective_is_as_large_as_the_logits():
    """Two all_reduces, of one and of two numbers a token; none in the backward pass."""

    def rank(logits, labels):
        loss = functools.partial(layers.vocab_parallel_cross_entropy, axis_name="tensor")
        return grads_of(lambda logits: loss(logits, labels))(logits)

    spec = P(None, "tensor")
    fn = jax.shard_map(
        rank, mesh=mesh_of(4), in_specs=(spec, P()), out_specs=(P(), spec), check_vma=False
    )
    text = str(jax.make_jaxpr(fn)(normal(0, 8, 64), integers(1, 8, below=64)))
    shapes = re.findall(r":f32\[([\d,]+)\] = jcoll_(\w+)\[", text)
    forward = [("8", "all_reduce"), ("2,8", "all_reduce")]
    assert shapes == forward * 2  # grads_of runs it for the value, and for the gradient.


# Bad input


def error_of(fn, *args, **options):
    with pytest.raises((ValueError, TypeError)) as error:
        run(
            functools.partial(fn, axis_name="tensor", **options),
            args,
            mesh_of(4),
            (P(),) * len(args),
            P(),
            False,
        )
    return str(error.value)


def test_errors_of_the_embedding():
    error = functools.partial(error_of, layers.vocab_parallel_embedding)
    ids, table = jnp.zeros(4, jnp.int32), normal(0, 8, WIDTH)
    text = error(ids, table, vocab_size=33)
    assert "jcoll.vocab_parallel_embedding over axis 'tensor'" in text
    assert "8 rows on each of 4 ranks, 32 in all; vocab_size=33" in text
    assert "Pad the vocabulary to 36" in text
    assert "integers are needed" in error(ids.astype(jnp.float32), table)
    assert "table has shape (16,)" in error(ids, table[0])
    text = error(jnp.zeros(6, jnp.int32), table, sequence_parallel=True)
    assert "which 4 ranks do not divide" in text


def test_errors_of_the_loss():
    error = functools.partial(error_of, layers.vocab_parallel_cross_entropy)
    logits, labels = normal(0, 6, 8), jnp.zeros(6, jnp.int32)
    assert "vocab_size=0 must be from 1" in error(logits, labels, vocab_size=0)
    assert "from 0 to 1" in error(logits, labels, label_smoothing=1.5)
    assert "from 0 to 1" in error(logits, labels, label_smoothing=float("nan"))
    assert "not a number" in error(logits, labels, label_smoothing="some")
    text = error(logits, labels[:5])
    assert "(6, 8)" in text and "(5,)" in text
    assert "floats are needed" in error(labels[:, None], labels)
    assert "0 columns on each of 4 ranks" in error(logits[:, :0], labels)
