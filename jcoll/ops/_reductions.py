"""The reduce ops: names, dtypes they exist for, and their reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import errors
from jcoll.comm.mesh import Call, refuse_traced

REDUCE_OPS = ("sum", "mean", "max", "min", "prod", "and", "or")


def check_op(where: str, op: Any) -> str:
    """`op` if it is a reduce op; ValueError that lists them otherwise."""
    refuse_traced(where, op=op)
    if isinstance(op, str) and op in REDUCE_OPS:
        return op
    problem = f"op={op!r} is not a reduce op."
    raise ValueError(errors.text(where, problem, f"Choose one of {', '.join(REDUCE_OPS)}."))


def check_dtype(where: str, op: str, dtype: Any) -> None:
    """TypeError if `op` does not exist for arrays of `dtype`."""
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
        problem = f"op={op!r} is not defined for {dtype}."
        raise TypeError(errors.text(where, problem, "Reduce numbers or bools."))
    if op in ("and", "or") and not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
        problem = f"op={op!r} needs integers (bitwise) or bools (logical); got {dtype}."
        raise TypeError(errors.text(where, problem, "Compare first, e.g. x > 0."))
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        problem = f"op={op!r} needs an ordered type; got {dtype}."
        raise TypeError(errors.text(where, problem, "Reduce the real part or the modulus."))


def canonical(call: Call, op: str, x: Any) -> tuple[Any, str, bool]:
    """(array, op, is_mean) with which to reduce the array x, after lax's
    promotions.

    Sums and products of bools count in int32, as lax.psum has it (over no axes nothing is counted);
    their max is `or`, their min `and`. is_mean: a mean of integers is a float, the sum, which is to
    be divided by the number of ranks afterwards.
    """
    check_dtype(call.where, op, x.dtype)
    if x.dtype == jnp.bool_:
        if op in ("max", "min"):
            op = "or" if op == "max" else "and"
        elif op == "mean" or (op in ("sum", "prod") and call.axes):
            x = x.astype(jnp.int32)
    if op == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
        # The sums of the smallest integers would not fit, and jax does not divide all of them.
        return x.astype(jnp.int32) if jnp.iinfo(x.dtype).bits < 8 else x, "sum", True
    return x, op, False


def accumulation_dtype(dtype: Any) -> Any:
    """float32 for floats of 16 bits and less, bytes for smaller integers, else the type itself."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 16:
        return np.dtype(np.float32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)
    return dtype


def reduce_stacked(xp: Any, xs: Any, op: str) -> Any:
    """The reduction over the leading dimension; in numpy (xp=np) the reference of all ops."""
    dtype, num_ranks = xs.dtype, xs.shape[0]
    if num_ranks == 1:
        return xs[0]  # 0 + x would lose the sign of -0.
    xs = xs.astype(accumulation_dtype(dtype))
    if op in ("sum", "mean"):
        y = xs.sum(axis=0, dtype=xs.dtype)
        y = y / xp.asarray(num_ranks, y.dtype) if op == "mean" else y
    elif op == "prod":
        y = xs.prod(axis=0, dtype=xs.dtype)
    elif op in ("max", "min"):
        y = _extreme(xp, xs, op)
    else:
        y = getattr(xp, f"bitwise_{op}").reduce(xs, axis=0)
    return y.astype(dtype)


def _extreme(xp: Any, xs: Any, op: str) -> Any:
    y = getattr(xs, op)(axis=0)
    if xp is np or not jnp.issubdtype(xs.dtype, jnp.floating):
        return y
    # XLA's own reduction on CPU loses NaN where it is vectorised.
    return jnp.where(jnp.isnan(xs).any(axis=0), jnp.asarray(jnp.nan, y.dtype), y)


def divide(total: Any, num_ranks: Any) -> Any:
    """A mean from a sum; num_ranks is an int, or traced where groups differ in size."""
    if isinstance(num_ranks, int):
        return total / num_ranks
    total = total / 1  # Integers become floats.
    return total / num_ranks.astype(total.dtype)


def reduce_by_lax(x: Any, op: str, named: dict[str, Any], num_ranks: Any) -> Any:
    """The reduction with jax.lax's own collectives, over the axes `named` (Call.lax_args).

    num_ranks: this rank's, for the mean: lax.pmean divides by the size of the first group.
    """
    if op in ("sum", "mean"):
        wide = x.astype(accumulation_dtype(x.dtype))
        total = jax.lax.psum(wide, **named)
        return (divide(total, num_ranks) if op == "mean" else total).astype(x.dtype)
    if op in ("max", "min"):
        return (jax.lax.pmax if op == "max" else jax.lax.pmin)(x, **named)
    return reduce_stacked(jnp, jax.lax.all_gather(x, **named), op)
