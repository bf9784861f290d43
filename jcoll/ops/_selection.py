"""A call as `jcoll.tuning` sees it: what the choice of its algorithm depends on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jcoll.comm.mesh import Call
from jcoll.plan.ops import OPS
from jcoll.runtime import world
from jcoll.tuning.candidates import HOSTS, NOWHERE, PROCESS, PROCESSES, Request, size_of


def describe(
    call: Call,
    aval: Any,
    reduce_op: str | None,
    *,
    where: world.Placement | None = None,
    use_own: bool = False,
    obstacle: str | None = None,
) -> Request:
    """aval: of the operand. reduce_op: None if the op does not reduce, or it is not known how.
    obstacle: why jcoll's runtime cannot serve; else `where` holds."""
    return Request(
        op=call.op,
        sizes=call.groups.sizes,
        nbytes=size_of(call.op, _nbytes(aval), call.num_ranks),
        placement=NOWHERE if where is None else placement_of(where),
        obstacle=obstacle,
        is_narrow=_adds(call.op, reduce_op) and _is_narrow(aval.dtype),
        is_mean=reduce_op == "mean",
        use_own=use_own,
    )


def placement_of(where: world.Placement) -> str:
    """Request.placement."""
    if where.host_of is not None:
        return HOSTS
    return PROCESS if where.process_of is None else PROCESSES


def _nbytes(aval: Any) -> int:
    """0 where a dimension is symbolic: these calls are XLA's."""
    if not all(isinstance(d, int) for d in aval.shape):
        return 0
    return int(np.prod(aval.shape, dtype=np.int64)) * np.dtype(aval.dtype).itemsize


def _adds(op: str, reduce_op: str | None) -> bool:
    """Whether values are rounded on the way; where the reduction is not told, it may be."""
    if reduce_op is None:
        return op in OPS and OPS[op].reduces
    return reduce_op in ("sum", "mean", "prod")


def _is_narrow(dtype: Any) -> bool:
    """Whether the ops promise to add in a wider type. (8-bit floats travel as float32.)"""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16
