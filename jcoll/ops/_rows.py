"""What the ragged collectives share: index arrays, row masks, and a dense stand-in."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import errors
from jcoll.comm.mesh import Call
from jcoll.ops import _primitive


def check_index(call: Call, name: str, x: Any, length_of: int) -> Any:
    """An integer vector whose length is a multiple of `length_of`, as int32 or int64."""
    given, x = x, _primitive.as_array(call, x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        problem = f"{name} has dtype {x.dtype}; integers are needed."
        raise TypeError(errors.text(call.where, problem, f"Pass {name}.astype(jnp.int32)."))
    if x.ndim != 1 or x.shape[0] == 0 or x.shape[0] % length_of:
        problem = f"{name} has shape {x.shape}; ({length_of},) is needed, a number for every rank"
        fix = f"Pass one entry per rank of the axis, {length_of} in all."
        raise ValueError(errors.text(call.where, problem + ".", fix))
    wide = x.dtype in (jnp.int64, jnp.uint32, jnp.uint64)
    # Without 64-bit types this is int32: counts beyond it turn negative, which the runtime refuses.
    dtype = jax.dtypes.canonicalize_dtype(np.int64) if wide else np.dtype(np.int32)
    if not any(isinstance(i, jax.Array) for i in jax.tree.leaves(given)):
        _check_fits(call, name, np.asarray(given), dtype)  # jax has cut them without a word.
    return x.astype(dtype)


def _check_fits(call: Call, name: str, given: Any, dtype: Any) -> None:
    limits = np.iinfo(dtype)
    wrong = [int(i) for i in given if not limits.min <= i <= limits.max]
    if wrong:
        problem = f"{name} has {wrong[0]}, which does not fit {dtype}."
        raise ValueError(errors.text(call.where, problem, "Pass numbers of rows."))


def running_total(xp: Any, counts: Any, axis: int) -> Any:
    """Cumulative sums that stop at the largest integer instead of wrapping; no count is below 0."""
    top = np.iinfo(counts.dtype).max
    counts = xp.maximum(counts, 0)
    if xp is np:
        return np.minimum(np.cumsum(counts, axis, dtype=object), top).astype(counts.dtype)
    return jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, top - a), counts, axis=axis)


def common_index_dtype(*arrays: Any) -> tuple[Any, ...]:
    """The arrays in one integer type."""
    dtype = jnp.result_type(*arrays)
    return tuple(x.astype(dtype) for x in arrays)


def row_attributes(x: Any, in_rows: int, out_rows: int, index: Any) -> dict[str, int]:
    """The attributes of the native runtime's row motions (csrc/description.h)."""
    row_nbytes = math.prod(x.shape[1:]) * np.dtype(x.dtype).itemsize
    return {
        "row_nbytes": row_nbytes,
        "in_rows": in_rows,
        "out_rows": out_rows,
        "index_nbytes": np.dtype(index.dtype).itemsize,
        "num_updates": 1,
        "drop_overflow": 0,
    }


def expand(mask: Any, ndim: int) -> Any:
    """A mask of rows, shaped to broadcast against arrays of ndim dimensions."""
    return mask.reshape(*mask.shape, *(1,) * (ndim - mask.ndim))


def covered(offsets: Any, sizes: Any, num_rows: int) -> Any:
    """Which of num_rows rows lie in any of the ranges [offset, offset + size)."""
    rows = jnp.arange(num_rows, dtype=offsets.dtype)[:, None]
    return within(rows, offsets[None], sizes[None]).any(axis=1)


def within(rows: Any, begin: Any, size: Any) -> Any:
    """Whether rows lie in [begin, begin + size), a sum that may be more than an integer holds."""
    return (rows >= begin) & (rows - begin < size)


def run_lax(call: Call, name: str, *arrays: Any) -> list[Any]:
    """jax.lax's collective of that name, as CollectiveSpec.composed calls it."""
    return [getattr(jax.lax, name)(*arrays, **call.lax_args)]


def through_gather(spec: Any, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """Any collective by all_gather and its reference: where XLA has no ragged collective."""
    gathered = [jax.lax.all_gather(x, **call.lax_args) for x in arrays]
    rank = _primitive.rank_in_group(call)
    return [y[rank] for y in spec.stacked(jnp, *gathered, **static)]
