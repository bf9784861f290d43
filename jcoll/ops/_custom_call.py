"""What the custom calls of both runtimes have in common: types on the wire, sizes, attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jcoll.ops._reductions import accumulation_dtype


def to_wire(x: Any, reduce_op: str | None, reduces: Sequence[Any] = ()) -> Any:
    """The array in a type that a runtime takes.

    Integers of less than a byte travel as int8: XLA keeps them so anyway. Reductions of 8-bit
    floats, but for those that the runtime `reduces` itself, happen in float32, rounded once at the
    end: their own range and precision are too small to add in. Everything else travels as it is:
    XLA's collectives would widen 16-bit types.
    """
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return x.astype(accumulation_dtype(dtype))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8:
        if reduce_op is not None:
            return x if dtype in reduces else x.astype(accumulation_dtype(dtype))
        if jnp.finfo(dtype).bits < 8:
            return x.astype(jnp.float8_e4m3fn)  # Has every value of the smaller types.
    return x


def attribute(value: Any) -> Any:
    """As the FFI takes it."""
    if isinstance(value, tuple):
        return np.asarray(value, np.int64)
    if isinstance(value, str):
        return value
    return np.float64(value) if isinstance(value, float) else np.int64(value)


def nbytes(shape: Sequence[int], dtype: Any) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
