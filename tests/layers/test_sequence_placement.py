"""Where the tokens of a sequence are, contiguous and in zigzag."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jcoll import layers


@pytest.mark.parametrize("axis_size", [1, 2, 4])
def test_zigzag_and_positions(axis_size):
    text = np.arange(16).reshape(1, 16, 1)
    placed = layers.to_zigzag(text, axis_size)
    assert isinstance(placed, np.ndarray)
    np.testing.assert_array_equal(layers.from_zigzag(placed, axis_size), text)
    parts = placed.reshape(axis_size, -1)
    for rank, part in enumerate(parts):
        positions = layers.positions_of(rank, axis_size, len(part), placement="zigzag")
        np.testing.assert_array_equal(part, positions)
        parts_of_text = set(part // (8 // axis_size))
        assert parts_of_text == {rank, 2 * axis_size - 1 - rank}


def test_positions_of_a_traced_rank():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("seq",))

    def of_rank():
        return layers.positions_of(jax.lax.axis_index("seq"), 8, 3)

    got = jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=(), out_specs=P("seq")))()
    np.testing.assert_array_equal(got, np.arange(24))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: layers.to_zigzag(np.zeros((1, 12)), 4),
            ValueError,
            "sequence_dim=1 has size 12, which twice the 4 ranks do not divide.\n  Pad it to 16",
        ),
        (lambda: layers.from_zigzag(np.zeros((1, 12)), 0), ValueError, "num_ranks=0 is no number"),
        (lambda: layers.to_zigzag([1, 2], 2), TypeError, "x has a int; arrays"),
        (lambda: layers.positions_of(8, 8, 4), ValueError, "rank=8 of 8 ranks; 0 to 7"),
        (lambda: layers.positions_of(-1, 8, 4), ValueError, "rank=-1 of 8 ranks"),
        (lambda: layers.positions_of(1.5, 8, 4), TypeError, "one integer is needed"),
        (lambda: layers.positions_of(jnp.arange(1), 8, 4), TypeError, "rank is int64[1]; one"),
        (lambda: layers.positions_of(0, 0, 4), ValueError, "num_ranks=0 is no number of ranks"),
        (lambda: layers.positions_of(0, 8, -4), ValueError, "local_length=-4 is no number of"),
    ],
)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=re.escape(match)):
        call()
