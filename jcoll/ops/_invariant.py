"""as_invariant: a value that is the same on all ranks, typed as such. The identity, no operation.

Types of `jax.shard_map(..., check_vma=True)` tell the axes that a value may vary over, and a
collective whose ranks all get the same array can still have a varying type: all_gather's has, so
that its transpose is reduce_scatter. Where a caller is to give it back as one value
(`out_specs=P()`), only he knows that it is one.

Derivative: y is any one of the N equal x_r, so dy/dx_r = 1/N each: their tangents are equal too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat


def as_invariant(x: Any, axes: Sequence[Hashable]) -> Any:
    """x, typed as the same on all ranks of `axes`, which the caller vouches for."""
    if not _compat.check_vma():
        return x
    varied = _compat.varying_axes(jax.typeof(x))
    missing = tuple(axis for axis in axes if axis in varied)
    return as_invariant_p.bind(x, axes=missing) if missing else x


def _abstract_eval(aval: Any, *, axes: Any) -> Any:
    varying = _compat.varying_axes(aval) - set(axes)
    return _compat.with_varying(aval, varying, aval.shape, aval.dtype, aval.sharding.spec)


def _jvp(primals: Any, tangents: Any, *, axes: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = as_invariant_p.bind(x, axes=axes)
    if type(t) is _compat.Zero:
        return y, _compat.zero_tangent(y)
    return y, as_invariant_p.bind(t, axes=axes)


def _transpose(ct: Any, x: Any, *, axes: Any) -> Any:
    if type(ct) is _compat.Zero:
        return [_compat.Zero(x.aval)]
    num_ranks = jax.lax.axis_size(axes)
    return [_compat.make_varying(ct / jnp.asarray(num_ranks, ct.dtype), axes)]


def _batch(axis_data: Any, args: Any, dims: Any, *, axes: Any) -> Any:
    del axis_data
    return as_invariant_p.bind(*args, axes=axes), dims[0]


as_invariant_p = _compat.Primitive("jcoll_as_invariant")
as_invariant_p.def_impl(lambda x, *, axes: x)
as_invariant_p.def_abstract_eval(_abstract_eval)
_compat.primitive_jvps[as_invariant_p] = _jvp
_compat.primitive_transposes[as_invariant_p] = _transpose
_compat.axis_batchers[as_invariant_p] = _batch
_compat.register_lowering(as_invariant_p, lambda ctx, x, *, axes: [x])
