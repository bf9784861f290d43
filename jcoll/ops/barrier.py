"""barrier: y_r = x_r, available on any rank only after x is available on all ranks.

A program is data flow: what must not start before the barrier has to use its result. Derivative:
the identity (the transpose needs no barrier).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jcoll.comm.mesh import AxisName, Call, make_call
from jcoll.ops import _primitive
from jcoll.ops._motion import Motion
from jcoll.ops._primitive import CollectiveSpec


def barrier(
    x: Any, axis_name: AxisName, *, algorithm: str = "auto", timeout_s: float | None = None
) -> Any:
    """Returns x once every rank of a mesh axis has computed its x.

    Args:
      x: array, or pytree of arrays (each array has a barrier of its own).
      axis_name: mesh axis, or tuple of axes.
      algorithm, timeout_s: as in `all_reduce`. With "xla" the barrier is a psum of one number.

    Returns:
      x, unchanged in value and type; without a copy where XLA can reuse its buffer.

    Raises: as `all_reduce`.

    Derivative: the identity; the transpose has no barrier.
    """
    call = make_call("barrier", axis_name, algorithm=algorithm, timeout_s=timeout_s)
    return jax.tree.map(lambda leaf: _leaf(leaf, call), x)


def _leaf(leaf: Any, call: Call) -> Any:
    x = _primitive.as_array(call, leaf)
    if not call.axes:
        return x
    if _primitive.is_key(x):
        data = SPEC.primitive.bind(jax.random.key_data(x), call=call)[0]
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return SPEC.primitive.bind(x, call=call)[0]  # Not made to vary: its type is x's.


def _stacked(xp: Any, xs: Any) -> Any:
    return [xs]


def _shapes(avals: Any, call: Call) -> Any:
    return [(avals[0].shape, avals[0].dtype)]


def _motion(avals: Any, call: Call) -> Motion:
    source_map = [[rank] for rank in range(call.num_ranks)]
    return Motion("blocks", source_map=source_map, aliases=((0, 0),))


def _xla(x: Any, *, call: Call, platform: str) -> Any:
    # One number of x takes part, so that the sum cannot be computed before x, and XLA does not know
    # that the sum is never negative.
    probe = (x.reshape(-1)[:1] == jnp.zeros((), x.dtype)[None]).sum(dtype=jnp.int32)
    arrived = jax.lax.psum(probe, call.axes)
    return [jnp.where(arrived >= 0, x, jnp.zeros_like(x))]


SPEC = CollectiveSpec(name="barrier", stacked=_stacked, shapes=_shapes, motion=_motion, xla=_xla)


def _transpose(cts: Any, x: Any, *, call: Call) -> Any:
    return list(cts)


barrier_p = _primitive.define(SPEC, jvp=None, transpose=_transpose)
