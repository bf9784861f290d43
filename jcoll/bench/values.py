"""Inputs whose results are exact in their dtype, and the numpy results: #wrong needs no tolerance.

Arrays here hold all ranks: `xs[rank]` is what rank `rank` puts in, `ys[rank]` what it must get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jcoll.bench import catalog

Ranks = np.ndarray  # [num_ranks, ...]


def exact_limit(dtype: np.dtype) -> int:
    """All whole numbers up to this one (in absolute value) are exact in `dtype`."""
    kind = catalog.kind(dtype)
    if kind == "bool":
        return 1
    if kind in ("signed", "unsigned"):
        return int(ml_dtypes.iinfo(dtype).max)
    return 2 ** (ml_dtypes.finfo(dtype).nmant + 1)


def moved(dtype: np.dtype, num_ranks: int, count: int) -> Ranks:
    """Values for an op that moves data: as many distinct ones as the dtype can tell apart."""
    return _pattern(dtype, num_ranks, count, min(exact_limit(dtype), 1 << 20))


def reduced(dtype: np.dtype, num_ranks: int, count: int, redop: str) -> Ranks:
    """Values for a reduction.

    A sum over n ranks, each input multiplied by a weight of `weights` (absolute values: n + 1 at
    most in total), stays within n * (n + 1) * bound, so every partial sum is exact in any order.
    A mean takes multiples of n, a product only factors of 1, -1 and (unsigned) 2.
    """
    if redop == "prod":
        return _factors(dtype, num_ranks, count)
    limit = exact_limit(dtype)
    if redop == "mean":
        bound = min(max(limit // num_ranks**2, 1), 1000)
        return _pattern(dtype, num_ranks, count, bound) * np.array(num_ranks).astype(dtype)
    if redop == "sum":
        limit = min(max(limit // (num_ranks * (num_ranks + 1)), 1), 1000)
    return _pattern(dtype, num_ranks, count, min(limit, 1 << 20))


def _pattern(dtype: np.dtype, num_ranks: int, count: int, bound: int) -> Ranks:
    """Whole numbers in -bound..bound (0..bound unsigned) that differ along ranks and elements."""
    kind = catalog.kind(dtype)
    low = -bound if kind in ("signed", "float", "complex") else 0
    place = np.arange(count, dtype=np.int64)
    out = np.empty((num_ranks, count), dtype)
    for rank in range(num_ranks):
        mixed = (place + 7919 * rank) * 2654435761 >> 11  # Knuth's hash: no short period in any bit
        values = mixed % (bound - low + 1) + low
        out[rank] = (values + 1j * values[::-1] if kind == "complex" else values).astype(dtype)
    return out


def _factors(dtype: np.dtype, num_ranks: int, count: int) -> Ranks:
    index = np.arange(count)
    rows = []
    for rank in range(num_ranks):
        if catalog.kind(dtype) == "unsigned":
            rows.append(np.where(index % num_ranks == rank, 2, 1))
        else:
            rows.append(np.where((index // (rank + 1) + rank) % 2, -1, 1))
    return np.stack(rows).astype(dtype)


def weights(dtype: np.dtype, num_ranks: int) -> Ranks:
    """One whole number a rank, their sum 1: [2, -1, 1, -1, ...] or, n odd, [1, -1, 1, ...].

    If all ranks hold y, the sum over ranks of weight * y is y again. So a chain of sums that weighs
    each result stays finite and exact however long it is, and a rank that is missed shows.
    """
    signs = np.where(np.arange(num_ranks) % 2, -1, 1)
    signs[0] = 1 if num_ranks % 2 else 2
    return signs.astype(dtype).reshape(num_ranks, 1)


def reduce_ranks(xs: Ranks, redop: str) -> np.ndarray:
    """The reduction of xs over ranks, rounded once to its dtype."""
    if redop in ("sum", "mean"):
        total = xs.astype(_accumulator(xs.dtype)).sum(axis=0)
        return (total / len(xs) if redop == "mean" else total).astype(xs.dtype)
    fold: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
        "max": np.maximum,
        "min": np.minimum,
        "prod": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
    }
    return functools.reduce(fold[redop], xs)


def _accumulator(dtype: np.dtype) -> np.dtype:
    kind = catalog.kind(dtype)
    if kind in ("signed", "unsigned"):  # wraps modulo 2**64, and so modulo 2**bits after the cast
        return np.dtype(np.int64 if kind == "signed" else np.uint64)
    return np.dtype(np.complex128 if kind == "complex" else np.float64)


def all_reduce(xs: Ranks, redop: str) -> Ranks:
    return np.broadcast_to(reduce_ranks(xs, redop), xs.shape)


def reduce_scatter(xs: Ranks, redop: str) -> Ranks:
    return reduce_ranks(xs, redop).reshape(len(xs), -1)


def all_gather(xs: Ranks) -> Ranks:
    return np.broadcast_to(xs.reshape(-1), (len(xs), xs.size))


def all_to_all(xs: Ranks) -> Ranks:
    num_ranks, count = xs.shape
    return xs.reshape(num_ranks, num_ranks, -1).swapaxes(0, 1).reshape(num_ranks, count)


def ppermute(xs: Ranks) -> Ranks:
    """Every rank sends to the next one, the last to the first."""
    return np.roll(xs, 1, axis=0)


def broadcast(xs: Ranks, root: int) -> Ranks:
    return np.broadcast_to(xs[root], xs.shape)


def ragged(xs: Ranks, counts: np.ndarray) -> Ranks:
    """Rank i sends counts[i, j] elements to rank j, in order of j; they arrive in order of i."""
    cuts = np.cumsum(counts, axis=1)[:, :-1]
    blocks = [np.split(row, cut) for row, cut in zip(xs, cuts, strict=True)]
    return np.stack([np.concatenate([row[rank] for row in blocks]) for rank in range(len(xs))])


def ragged_counts(num_ranks: int, total: int) -> np.ndarray:
    """counts[i, j] for a rank's `total` elements, uneven: shares of 1 : 2 : ... : n.

    The share is that of (i + j) mod n, so counts are symmetric and every rank sends and receives
    `total` elements: the exchange keeps its shape and can feed itself.
    """
    share = np.arange(1, num_ranks + 1) * total * 2 // (num_ranks * (num_ranks + 1))
    share[-1] += total - share.sum()
    rank = np.arange(num_ranks)
    return share[(rank[:, None] + rank[None, :]) % num_ranks].astype(np.int32)
