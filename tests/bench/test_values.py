"""The numpy side of the benchmark: exact inputs, results, and chains worked out in closed form."""

import functools

import numpy as np
import pytest

from jcoll.bench import catalog, values
from jcoll.bench.cases import Side, expected_state

RANKS = [1, 2, 3, 4, 5, 8]
FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_weights_sum_to_one(num_ranks):
    weights = values.weights(np.dtype(np.float32), num_ranks)
    assert weights.sum() == 1
    assert np.all(weights != 0), "a rank that is left out must change the sum"
    assert np.abs(weights).sum() <= num_ranks + 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_are_exact_in_every_order(dtype, num_ranks):
    dtype = catalog.parse_dtype(dtype)
    xs = values.reduced(dtype, num_ranks, 1000, "sum")
    xs = xs * values.weights(dtype, num_ranks)
    forward, backward = (
        functools.reduce(lambda a, b: (a + b).astype(dtype), order) for order in (xs, xs[::-1])
    )
    exact = xs.astype(np.float64).sum(axis=0)
    np.testing.assert_array_equal(forward.astype(np.float64), exact)
    np.testing.assert_array_equal(backward.astype(np.float64), exact)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_means_are_whole_numbers(num_ranks):
    xs = values.reduced(np.dtype(np.float32), num_ranks, 100, "mean")
    mean = values.reduce_ranks(xs, "mean")
    np.testing.assert_array_equal(mean, np.rint(mean))


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "uint8", "int32", "complex64", "bool", "int4"])
def test_inputs_tell_ranks_and_places_apart(dtype):
    xs = values.moved(catalog.parse_dtype(dtype), 4, 64)
    assert xs.dtype.name == dtype
    for a, b in [(xs[0], xs[1]), (xs[1], xs[3]), (xs[0, :8], xs[0, 8:16])]:
        assert not np.array_equal(a, b)


def test_integer_sums_wrap():
    xs = np.array([[120, 1], [10, 2]], np.int8)
    np.testing.assert_array_equal(values.reduce_ranks(xs, "sum"), np.array([-126, 3], np.int8))


def test_movements_of_two_ranks():
    xs = np.array([[0, 1, 2, 3], [10, 11, 12, 13]])
    assert values.all_to_all(xs).tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert values.all_gather(xs[:, :1]).tolist() == [[0, 10], [0, 10]]
    assert values.ppermute(xs)[0].tolist() == xs[1].tolist()
    assert values.reduce_scatter(xs, "sum").tolist() == [[10, 12], [14, 16]]
    counts = np.array([[1, 3], [3, 1]])
    assert values.ragged(xs, counts).tolist() == [[0, 10, 11, 12], [1, 2, 3, 13]]


@pytest.mark.parametrize("total", [1, 7, 64, 1000])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_ragged_counts_are_symmetric_and_full(num_ranks, total):
    counts = values.ragged_counts(num_ranks, total)
    np.testing.assert_array_equal(counts, counts.T)
    np.testing.assert_array_equal(counts.sum(axis=1), total)
    assert counts.min() >= 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7, 40])
@pytest.mark.parametrize("exchange", [values.ppermute, values.all_to_all])
def test_expected_state_of_long_chains(steps, exchange):
    """The shortcut over repeating states gives what running every step gives."""
    side = Side(call=lambda x: x, x=np.arange(25).reshape(5, 5), reference=exchange)
    plain = side.x
    for _ in range(steps):
        plain = exchange(plain)
    np.testing.assert_array_equal(expected_state(side, "chain", steps), plain)


def test_expected_state_that_never_repeats():
    side = Side(call=lambda x: x, x=np.ones((2, 1), np.int64), reference=lambda xs: xs * 2)
    assert expected_state(side, "loop", 20).tolist() == [[2**20], [2**20]]


BUS_FACTORS = {
    "all_reduce": 1.75,
    "reduce_scatter": 0.875,
    "all_gather": 0.875,
    "all_to_all": 0.875,
    "ragged_all_to_all": 0.875,
    "all_to_all_v": 0.875,
    "gather": 0.875,
    "scatter": 0.875,
    "broadcast": 1,
    "reduce": 1,
    "ppermute": 1,
    "barrier": 0,
}


def test_bus_factors_on_eight_ranks():
    assert {op: catalog.bus_factor(op, 8) for op in catalog.CATALOG} == BUS_FACTORS


def test_every_op_has_a_case():
    from jcoll.bench.cases import CASES

    assert list(CASES) == list(catalog.CATALOG)
