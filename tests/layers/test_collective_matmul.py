"""all_gather_matmul and matmul_reduce_scatter against the collective and the product."""

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

BATCH, SEQ, K, M = 2, 16, 12, 8
DIRECTIONS = pytest.mark.parametrize("bidirectional", [True, False], ids=["both", "one"])


def plain_gather(x, w):
    return jcoll.all_gather(x, "tensor", axis=1, tiled=True) @ w


def plain_scatter(x, w):
    y = x.astype(jnp.float32) @ w.astype(jnp.float32)
    return jcoll.reduce_scatter(y, "tensor", scatter_dimension=1, tiled=True).astype(x.dtype)


def ring(fn, **options):
    return functools.partial(fn, axis_name="tensor", **options)


def with_gradients(fn, x, w):
    """(y, dx, dw) of a loss that differs from rank to rank."""

    def loss(x, w):
        y = fn(x, w)
        scale = 1 + jax.lax.axis_index("tensor").astype(jnp.float32)
        return scale * jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), (dx, dw) = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
    return y[None], dx[None], dw[None]


def inputs(n, op, dtype="float32", seq=SEQ):
    """Each rank's x and w, stacked."""
    x = normal(1, BATCH, n, seq // n if op == "gather" else seq, K).swapaxes(0, 1)
    return x.astype(dtype), normal(2, K, n, M).swapaxes(0, 1).astype(dtype)


FORMS = {
    "gather": (layers.all_gather_matmul, plain_gather),
    "scatter": (layers.matmul_reduce_scatter, plain_scatter),
}


def check(n, op, dtype, check_vma, bidirectional, wrap=lambda f: f):
    overlapped, plain = FORMS[op]
    forms = [wrap(ring(overlapped, bidirectional=bidirectional)), plain]

    def rank(x, w):
        return [with_gradients(form, x[0], w[0]) for form in forms]

    x, w = inputs(n, op, dtype)
    got, want = run(rank, (x, w), mesh_of(n), (P("tensor"),) * 2, P("tensor"), check_vma)
    assert_close(got, want)


@DIRECTIONS
@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_values_and_gradients(n, op, bidirectional):
    check(n, op, "float32", n % 4 == 0, bidirectional)


@CHECK_VMA
@pytest.mark.parametrize("op", FORMS)
def test_bfloat16_under_remat(op, check_vma):
    check(4, op, "bfloat16", check_vma, True, wrap=jax.checkpoint)


@pytest.mark.parametrize("op", FORMS)
def test_integers_are_exact(op):
    """On an odd number of ranks, whose two directions are of equal length."""
    overlapped, plain = FORMS[op]
    shape = (3, BATCH, 4, K) if op == "gather" else (3, BATCH, 12, K)
    x = jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)
    w = jnp.arange(3 * K * M, dtype=jnp.int32).reshape(3, K, M)

    def plain_of_integers(x, w):
        if op == "gather":
            return plain(x, w)
        return jcoll.reduce_scatter(x @ w, "tensor", scatter_dimension=1, tiled=True)

    def rank(x, w):
        return ring(overlapped)(x[0], w[0])[None], plain_of_integers(x[0], w[0])[None]

    got, want = run(rank, (x, w), mesh_of(3), (P("tensor"),) * 2, P("tensor"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", FORMS)
def test_data_parallel_weight(op):
    """w is the same for all of data, x is not: dw is summed over data, and typed so."""
    x = normal(1, 2, SEQ, 4 * K)
    w = normal(2, 4 * K, M)
    overlapped, plain = FORMS[op]
    spec_x = P("data", "tensor") if op == "gather" else P("data", None, "tensor")
    spec_w = P() if op == "gather" else P("tensor")

    def rank(x, w):
        def loss(form, w):
            return jnp.sum(jnp.sin(form(x, w)))

        return [jax.grad(functools.partial(loss, form))(w) for form in (ring(overlapped), plain)]

    got, want = run(rank, (x, w), mesh_of(2, 4), (spec_x, spec_w), spec_w)
    assert_close(got, want)


@pytest.mark.parametrize(
    ("n", "bidirectional", "steps"), [(8, False, 7), (8, True, 4), (5, True, 2)]
)
@pytest.mark.parametrize("op", FORMS)
def test_length_of_the_ring(op, n, bidirectional, steps):
    """Blocks pass n - 1 links in all; bidirectionally the longer chain has n // 2."""
    x, w = inputs(n, op, seq=2 * n)
    fn = jax.shard_map(
        lambda x, w: ring(FORMS[op][0], bidirectional=bidirectional)(x[0], w[0])[None],
        mesh=mesh_of(n),
        in_specs=(P("tensor"),) * 2,
        out_specs=P("tensor"),
    )
    text = str(jax.make_jaxpr(fn)(x, w))
    perms = re.findall(r"perm=\(\((\d+), (\d+)\)", text)
    assert len(perms) == n - 1
    assert perms.count(("0", "1")) in (steps, n - 1 - steps)
    assert "jcoll_all_gather" not in text and "jcoll_reduce_scatter" not in text


def test_sequence_in_front():
    """Megatron's layout, [sequence, batch, width]."""
    x, w = normal(0, SEQ, BATCH, K), normal(1, K, M)
    fn = ring(layers.all_gather_matmul, sequence_dim=0)
    got = run(fn, (x, w), mesh_of(4), (P("tensor"), P()), P(), check_vma=False)
    assert_close(got, x @ w)


def error_of(fn, x, w, **options):
    with pytest.raises((ValueError, TypeError)) as error:
        run(ring(fn, **options), (x, w), mesh_of(4), (P(), P()), P(), False)
    return str(error.value)


def test_errors():
    x, w = normal(0, 10, K), normal(1, K, M)
    text = error_of(layers.matmul_reduce_scatter, x, w)
    assert "jcoll.matmul_reduce_scatter over axis 'tensor': sequence_dim=0 has size 10" in text
    assert "Pad it to 12" in text
    for fn in (layers.matmul_reduce_scatter, layers.all_gather_matmul):
        assert "(10, 12)" in error_of(fn, x, w.T)
        assert "last dimension" in error_of(fn, x, w, sequence_dim=-1)
        assert "not a bool" in error_of(fn, x, w, bidirectional="both")
        assert "out of range" in error_of(fn, x[0], w)
