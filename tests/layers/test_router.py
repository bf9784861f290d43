"""The router of a mixture of experts, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcoll import layers


def test_router_by_hand():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], jnp.float32)) + 7
    routing = layers.top_k_router(logits, top_k=2)
    np.testing.assert_array_equal(routing.experts, [[0, 1], [2, 0]])
    np.testing.assert_allclose(routing.weights, [[5 / 8, 3 / 8], [3 / 4, 1 / 4]], rtol=1e-6)
    np.testing.assert_array_equal(routing.rows_per_expert, [2, 1, 1])
    balance = 3 * (0.5 * 0.35 + 0.25 * 0.25 + 0.25 * 0.4)
    np.testing.assert_allclose(routing.load_balancing_loss, balance, rtol=1e-6)
    np.testing.assert_allclose(routing.z_loss, 49, rtol=1e-5)


def test_ties_go_to_the_lower_index():
    routing = layers.top_k_router(jnp.zeros((3, 5), jnp.bfloat16), top_k=3)
    np.testing.assert_array_equal(routing.experts, [[0, 1, 2]] * 3)
    np.testing.assert_allclose(routing.weights, np.full((3, 3), 1 / 3), rtol=1e-6)


@pytest.mark.parametrize(
    ("k", "normalize", "total"), [(1, None, 0.7), (1, True, 1), (2, False, 0.9)]
)
def test_normalisation(k, normalize, total):
    logits = jnp.log(jnp.asarray([[0.7, 0.2, 0.1]], jnp.float32))
    weights = layers.top_k_router(logits, top_k=k, normalize=normalize).weights
    np.testing.assert_allclose(weights.sum(), total, rtol=1e-6)


def test_router_of_one_expert_learns_from_the_loss():
    grad = jax.grad(lambda z: layers.top_k_router(z, top_k=1).weights.sum())(
        jnp.asarray([[1.0, 2.0]], jnp.float32)
    )
    assert np.abs(grad).min() > 0.1


def test_small_probabilities_keep_their_order():
    """p is [0, 0, 1] in float32; the second choice is still the second largest logit."""
    logits = jnp.asarray([[0.0, 1.0, 120.0]], jnp.float32)
    routing = layers.top_k_router(logits, top_k=2)
    np.testing.assert_array_equal(routing.experts, [[2, 1]])
    np.testing.assert_array_equal(routing.weights, [[1, 0]])
