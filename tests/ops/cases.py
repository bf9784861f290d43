"""For every registered collective: parameters, inputs and dtypes to test it with.

The matrix tests iterate jcoll.ops.SPECS; a collective without an entry here fails test_complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jcoll.ops import SPECS
from jcoll.ops._reductions import REDUCE_OPS

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
COMPLEX = ["complex64", "complex128"]
NARROW = ["float8_e4m3fn", "float8_e5m2", "int4", "uint4"]
ALL = [*FLOATS, *INTS, *COMPLEX, "bool", *NARROW]

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 33)]
# Takes the parallel path, in chunks of several lanes, the last ones short (csrc/plan_run.cc); numpy
# is slow with it, so not for every dtype.
LARGE = (70001,)
LARGE_ROW = (7001,)  # Of 12, which together are as large.
LARGE_DTYPES = ("float32", "bfloat16", "int8")


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Random values; small integers where a sum must stay exact or in range."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in ("float32", "float64", "float16", "bfloat16"):
        return rng.normal(size=shape).astype(dtype_of(dtype))
    if dtype.startswith("complex"):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if dtype.startswith("float8"):
        return rng.integers(-4, 5, shape).astype(np.float32).astype(dtype_of(dtype))
    low, high = (0, 3) if dtype.startswith("u") else (-3, 4)
    return rng.integers(low, high, shape).astype(np.int64).astype(dtype_of(dtype))


def dtypes_for(op: str | None) -> list[str]:
    """The dtypes that a reduce op exists for; all, for movement."""
    if op is None:
        return ALL
    if op in ("and", "or"):
        return [*INTS, "bool", "int4"]
    if op in ("max", "min"):
        return [*FLOATS, *INTS, *NARROW]
    if op == "mean":
        return [*FLOATS, *COMPLEX, "float8_e4m3fn"]
    return [*FLOATS, *INTS, *COMPLEX, *NARROW]


@dataclass(frozen=True)
class Case:
    """One way of calling one collective's primitive."""

    op: str
    static: Callable[[int], dict[str, Any]] = field(default=lambda n: {})
    dtypes: tuple[str, ...] = tuple(ALL)
    index_arrays: Callable[[int, int], list[np.ndarray]] | None = None

    @property
    def spec(self) -> Any:
        return SPECS[self.op]

    @property
    def large(self) -> tuple[int, ...]:
        return LARGE if self.index_arrays is None else LARGE_ROW

    def shape(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        """One rank's canonical input: with a leading dimension of blocks, or of rows."""
        if self.spec.blocked_in:
            return (n, *shape)
        return (12, *shape) if self.index_arrays is not None else shape


def _counts(n: int, seed: int) -> list[np.ndarray]:
    """send_counts[src, dst] that fit 12 rows, with zero pairs."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((n, n), np.int32)
    for src in range(n):
        for _ in range(rng.integers(0, 12)):
            counts[src, rng.integers(0, n)] += 1
    counts[0] = 0  # A rank that sends nothing.
    return [counts]


def _ragged(n: int, seed: int) -> list[np.ndarray]:
    """input_offsets, send_sizes, output_offsets, recv_sizes of all ranks, for 12 rows."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.integers(0, 3, (n, n)), 12 // max(n, 6)).astype(np.int32)
    inputs = (np.cumsum(sizes, 1) - sizes).astype(np.int32)
    outputs = (np.cumsum(sizes, 0) - sizes).astype(np.int32)
    return [inputs, sizes, outputs, np.ascontiguousarray(sizes.T)]


def _ring(n: int) -> dict[str, Any]:
    return {"perm": tuple((i, (i + 1) % n) for i in range(n))}


def _partial_perm(n: int) -> dict[str, Any]:
    return {"perm": ((n - 1, 0),)}


def _reducing(name: str, **more: Any) -> list[Case]:
    return [
        Case(name, lambda n, op=op: {"op": op, **more}, tuple(dtypes_for(op))) for op in REDUCE_OPS
    ]


CASES: list[Case] = [
    *_reducing("all_reduce"),
    *_reducing("reduce_scatter"),
    *(
        Case("reduce", lambda n, op=op: {"op": op, "root": n - 1}, tuple(dtypes_for(op)))
        for op in ("sum", "max")
    ),
    Case("all_gather"),
    Case("all_to_all"),
    Case("broadcast", lambda n: {"root": n // 2}),
    Case("gather", lambda n: {"root": n - 1}),
    Case("scatter", lambda n: {"root": 0}),
    Case("ppermute", _ring),
    Case("ppermute", _partial_perm),
    Case("barrier"),
    Case("ragged_all_to_all", index_arrays=_ragged),
    Case("all_to_all_v", lambda n: {"output_size": 12 * n, "drop": False}, index_arrays=_counts),
    Case("all_to_all_v", lambda n: {"output_size": 5, "drop": True}, index_arrays=_counts),
    Case(
        "all_to_all_v_back",
        lambda n: {"output_size": 12, "drop": True, "num_rows": 12},
        index_arrays=_counts,
    ),
]


def case_id(case: Case) -> str:
    return "-".join([case.op, *(str(v) for k, v in case.static(2).items() if k in ("op", "drop"))])


def inputs(case: Case, n: int, shape: tuple[int, ...], dtype: str, seed: int) -> list[np.ndarray]:
    """Stacked inputs [n, ...] of all ranks."""
    x = values((n, *case.shape(shape, n)), dtype, seed)
    if case.op == "ragged_all_to_all":
        return [x, values(x.shape, dtype, seed + 1), *case.index_arrays(n, seed)]
    return [x, *(case.index_arrays(n, seed) if case.index_arrays else [])]


def tolerance(dtype: Any, op: str | None) -> dict[str, float]:
    """How far from the reference a result may be: the order of additions, and one rounding."""
    if op not in ("sum", "mean", "prod") or not jnp.issubdtype(dtype, jnp.inexact):
        return {"rtol": 0.0, "atol": 0.0}
    eps = float(jnp.finfo(dtype).eps)
    return {"rtol": 4 * eps, "atol": 16 * eps}
