"""ppermute: y_dst = x_src for every (src, dst) of a permutation; zeros where no src is named.

Derivative: linear, the transpose is the inverse permutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import errors
from jcoll.comm.mesh import AxisName, Call, make_call, static_int
from jcoll.ops import _primitive
from jcoll.ops._motion import ZERO, Motion
from jcoll.ops._primitive import CollectiveSpec


def ppermute(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Sends x along (source, destination) pairs of ranks.

    Args:
      x: array, or pytree of arrays, of any shape and dtype; the same shape on all ranks.
      axis_name: mesh axis, or tuple of axes; ranks count in the order of the tuple, as
        `jax.lax.axis_index` counts (lax.ppermute: in the order of the mesh).
      perm: pairs of ranks, negative ones counted from the end; a rank is at most once a source and
        at most once a destination. A rank that is no destination gets zeros (of float8_e8m0fnu,
        which has none, the bits 0, 2**-127; lax.ppermute: NaN).
      algorithm, timeout_s: as in `all_reduce`.

    Raises: as `all_reduce`; ValueError for ranks out of range or named twice.

    Derivative: linear; the transpose is the inverse permutation.
    """
    call = make_call("ppermute", axis_name, algorithm=algorithm, timeout_s=timeout_s)
    pairs = _check_perm(call, perm)
    return jax.tree.map(lambda leaf: _leaf(leaf, pairs, call), x)


def _leaf(leaf: Any, pairs: Any, call: Call) -> Any:
    return _primitive.bind(SPEC, _primitive.as_array(call, leaf), call=call, perm=pairs)[0]


def _check_perm(call: Call, perm: Any) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [(src, dst) for src, dst in perm]
    except (TypeError, ValueError):
        problem = f"perm={perm!r} is not a sequence of (source, destination) pairs."
        fix = "Pass e.g. [(i, (i + 1) % n) for i in range(n)]."
        raise TypeError(errors.text(call.where, problem, fix)) from None
    pairs = [tuple(static_int(call.where, "perm", rank) for rank in pair) for pair in pairs]
    n = call.num_ranks
    for role, ranks in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        wrong = [r for r in ranks if not -n <= r < n]
        if wrong:
            problem = f"perm has {role} {wrong}, not among the {n} ranks."
            raise ValueError(errors.text(call.where, problem, f"Use 0 to {n - 1}, or -{n} to -1."))
        ranks = [r % n for r in ranks]
        twice = sorted({r for r in ranks if ranks.count(r) > 1})
        if twice:
            problem = f"perm has {role} {twice} more than once."
            fix = "A rank sends at most once and receives at most once; see all_to_all for more."
            raise ValueError(errors.text(call.where, problem, fix))
    return tuple((src % n, dst % n) for src, dst in pairs)


def _sources(perm: Sequence[tuple[int, int]], num_ranks: int) -> list[int]:
    """The source of every rank, ZERO if it has none."""
    source_of = {dst: src for src, dst in perm}
    return [source_of.get(rank, ZERO) for rank in range(num_ranks)]


def _stacked(xp: Any, xs: Any, *, perm: Any) -> Any:
    sources = _sources(perm, xs.shape[0])
    return [xp.stack([xp.zeros_like(xs[0]) if s == ZERO else xs[s] for s in sources])]


def _shapes(avals: Any, call: Call, *, perm: Any) -> Any:
    return [(avals[0].shape, avals[0].dtype)]


def _motion(avals: Any, call: Call, *, perm: Any) -> Motion:
    return Motion("blocks", source_map=[[s] for s in _sources(perm, call.num_ranks)])


def _xla(x: Any, *, call: Call, platform: str, perm: Any) -> Any:
    if len(call.axes) == 1:
        return [jax.lax.ppermute(x, call.axes, list(perm))]
    # Over several axes lax counts ranks in mesh order, not in the order of the tuple.
    sources = jnp.asarray(_sources(perm, call.num_ranks))
    xs = jax.lax.all_gather(x, call.axes)
    source = sources[jax.lax.axis_index(call.axes)]
    return [jnp.where(source == ZERO, jnp.zeros_like(x), xs[source])]


SPEC = CollectiveSpec(name="ppermute", stacked=_stacked, shapes=_shapes, motion=_motion, xla=_xla)


def _transpose(cts: Any, x: Any, *, call: Call, perm: Any) -> Any:
    inverse = tuple((dst, src) for src, dst in perm)
    return _primitive.bind(SPEC, *cts, call=call, perm=inverse)


ppermute_p = _primitive.define(SPEC, jvp=None, transpose=_transpose)
