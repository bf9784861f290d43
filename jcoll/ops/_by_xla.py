"""XLA's collectives on CPU, which know no numbers of less than a byte, and lose NaN.

Between processes gloo reads and writes small numbers as if each had a byte of its own, which they
have not: it leaves the rest of a buffer as it was, or writes beyond its end. So they travel as
larger ones. A max or min says besides where there was a NaN; but not where a call asks for "xla",
which is then XLA's and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jcoll.comm.mesh import Call
from jcoll.ops._reductions import accumulation_dtype


def by_xla(spec: Any, *arrays: Any, call: Call, platform: str, **static: Any) -> list[Any]:
    """spec.xla, of any type."""
    if _loses_nan(spec, arrays[0], call, platform, **static):
        return _with_nan(spec, *arrays, call=call, platform=platform, **static)
    call = replace(call, algorithm="xla")
    if platform != "cpu" or not any(_is_packed(x.dtype) for x in arrays):
        return spec.xla(*arrays, call=call, platform=platform, **static)
    dtypes = [dtype for _, dtype in spec.shapes([*map(jax.typeof, arrays)], call, **static)]
    wide = [x.astype(accumulation_dtype(x.dtype)) if _is_packed(x.dtype) else x for x in arrays]
    results = spec.xla(*wide, call=call, platform=platform, **static)
    return [_narrowed(y, dtype, spec) for y, dtype in zip(results, dtypes, strict=True)]


def _loses_nan(
    spec: Any, x: Any, call: Call, platform: str, *, op: str = "", **static: Any
) -> bool:
    if platform != "cpu" or call.algorithm == "xla" or op not in ("max", "min"):
        return False
    # reduce_scatter reduces itself.
    return spec.name in ("all_reduce", "reduce") and jnp.issubdtype(x.dtype, jnp.floating)


def _with_nan(spec: Any, x: Any, *, call: Call, platform: str, **static: Any) -> list[Any]:
    call = replace(call, algorithm="xla")  # Or this came back here.
    (y,) = by_xla(spec, x, call=call, platform=platform, **static)
    is_nan, static = jnp.isnan(x).astype(jnp.int8), static | {"op": "max"}
    (any_nan,) = spec.xla(is_nan, call=call, platform=platform, **static)
    return [jnp.where(any_nan > 0, jnp.asarray(jnp.nan, y.dtype), y)]


def _narrowed(y: Any, dtype: Any, spec: Any) -> Any:
    if spec.index_inputs and jnp.issubdtype(dtype, jnp.integer):
        # Nothing is added up, but the lowest integer may stand for an error.
        y = jnp.clip(y, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return y.astype(dtype)


def _is_packed(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
