"""The tiles that run on CPU against the ragged_dot that runs elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcoll.layers.grouped_mlp import grouped_mlp, ragged, ragged_vjp, tiled, tiled_vjp


def assert_close(got, want, rel):
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.abs(g - w).max() <= rel * np.abs(w).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "sizes", [[700, 0, 130, 1], [0, 0, 0, 0], [0, 900, 0, 0], [3, 2, 0, 4]], ids=str
)
def test_tiles_and_ragged_dot_agree(sizes, dtype):
    rng = np.random.default_rng(0)
    shapes = (900, 8), (4, 8, 10), (4, 5, 6), (900, 6)
    x, w_in, w_out, dy = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)

    def swiglu(h):
        return jax.nn.silu(h[:, :5]) * h[:, 5:]

    sizes = jnp.asarray(sizes, jnp.int32)
    used = (np.arange(900) < sizes.sum())[:, None]
    rel = 1e-5 if dtype == jnp.float32 else 2e-2
    got, want = (
        jax.jit(functools.partial(f, swiglu))(x, w_in, w_out, sizes) for f in (tiled, ragged)
    )
    assert not np.asarray(got, np.float32)[~used[:, 0]].any()
    assert_close([got], [np.where(used, np.asarray(want, np.float64), 0)], rel)
    args = (x, w_in, w_out, sizes, dy)
    got, want = (jax.jit(functools.partial(f, swiglu))(*args) for f in (tiled_vjp, ragged_vjp))
    assert [g.dtype for g in got] == [dtype] * 3
    assert_close(got, want, rel)


@pytest.mark.parametrize("batched", [(0, None, None, None), (None, 0, 0, None), (0, 0, 0, 0)])
def test_vmap(batched):
    """Also where only some of the arrays are batched, of which ragged_dot knows nothing."""
    rng = np.random.default_rng(2)
    shapes = (8, 4), (2, 4, 6), (2, 6, 5)
    arrays = [jnp.asarray(rng.normal(size=(3, *shape)), jnp.float32) for shape in shapes]
    arrays.append(jnp.array([[3, 4], [0, 8], [1, 0]], jnp.int32))

    def out_and_slopes(*arrays):
        def loss(*weights):
            return jnp.sin(grouped_mlp(*weights, arrays[3])).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(*arrays[:3])

    args = [x if dim == 0 else x[0] for x, dim in zip(arrays, batched, strict=True)]
    got = jax.jit(jax.vmap(out_and_slopes, batched))(*args)
    for i in range(3):
        one = [x[i] if dim == 0 else x for x, dim in zip(args, batched, strict=True)]
        want = jax.jit(out_and_slopes)(*one)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g[i], w, rtol=1e-5, atol=1e-6)
