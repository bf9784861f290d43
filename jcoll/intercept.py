"""`jcoll.intercept()`: jax.lax's collectives, lowered through jcoll.

A program's meaning stays lax's: its primitives with their types, derivatives and batching. Only
their lowering rules are replaced, once and for the whole process, by rules that look at a switch.
The switch is part of the key of every cache of JAX's: a function that was compiled with it on is
not reused with it off, nor the other way round. With it off, the rules are those that were there.

To intercept a primitive: add it to `_compat.LAX_PRIMITIVES` and to `_TRANSLATIONS` below.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat, errors
from jcoll.comm.group import Groups, make_groups
from jcoll.comm.mesh import Call, site_text, static_bool
from jcoll.config import config
from jcoll.ops import SPECS, _lowering, _rows
from jcoll.ops._primitive import CollectiveSpec, place_blocks, take_blocks
from jcoll.runtime import decisions

Run = Callable[..., Sequence[Any]]
"""run(spec, *arrays, **static): the collective in canonical form, traceable."""


def intercept(*, enabled: bool = True) -> Interception:
    """Lowers jax.lax's collectives through jcoll where it can serve them; else as without.

        with jcoll.intercept():
            train_step(params, batch)  # its psum, all_gather, ... run on jcoll

    Covers psum, pmean, pmax, pmin, all_gather, psum_scatter, all_to_all, ppermute, pbroadcast and
    ragged_all_to_all (the last two do not exist on CPU otherwise), and what is written in them.
    What jcoll cannot serve, e.g. in a mesh with axes that are not manual or over positional axes,
    falls back to lax's own lowering, call by call; `jcoll.explain` tells why.

    What counts is the switch at the time when a function is lowered, which is when it is first
    called, or `lower()`ed. A jitted function has two compiled forms, one for each state.

    The context is the calling thread's; it can be nested, entered again, and serves as a decorator.
    JCOLL_INTERCEPT=1 in the environment turns interception on for all threads of the process, from
    `import jcoll` on, which is the program's to do, or that of `jcoll launch`.

    Args:
      enabled: False turns interception off meanwhile.

    Raises:
      RuntimeError: entered while a function is traced; it would be over when that one is lowered.
    """
    return Interception(static_bool("intercept", "enabled", enabled))


class Interception(contextlib.ContextDecorator):
    """What intercept() returns: a context for any number of uses, at once and in any thread."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._thread = threading.local()

    def __enter__(self) -> None:
        if _compat.is_staging():
            problem = "entered inside a function that is being traced; over before it is lowered."
            fix = "Put the call of the jitted function inside the context, not vice versa."
            raise RuntimeError(errors.text("intercept", problem, fix))
        _install()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_compat.INTERCEPTING(self._enabled))
            stack.enter_context(_compat.each_lowered(_primitives() if self._enabled else ()))
            self._entered().append(stack.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._entered().pop().close()

    def _entered(self) -> list[contextlib.ExitStack]:
        """What this thread has entered, the last one last."""
        return self._thread.__dict__.setdefault("entered", [])


def _primitives() -> list[Any]:
    return list(_compat.LAX_PRIMITIVES.values())


@dataclass(frozen=True)
class _Translation:
    """How a primitive of lax's is written in jcoll's terms."""

    lax_name: str

    spec: CollectiveSpec

    body: Callable[..., Sequence[Any]]
    """body(run, *arrays, call=, **params of lax's primitive) -> arrays."""

    obstacle: Callable[..., str | None] = lambda *_: None
    """obstacle(ctx, call, params): why jcoll cannot serve this call."""

    exists_on_cpu: bool = True
    """Whether lax has it there."""


# The rule


def _install() -> None:
    """Replaces the rules of lax's primitives, once."""
    with _lock:
        for name, primitive in _compat.LAX_PRIMITIVES.items():
            if name not in _installed:
                _installed.add(name)
                _compat.replace_lowering(primitive, partial(partial, _lower, _TRANSLATIONS[name]))


_installed: set[str] = set()
_lock = threading.Lock()


def _lower(
    translation: _Translation, original: Callable, ctx: Any, *args: Any, **params: Any
) -> Any:
    """The lowering rule: jcoll's or the original one."""
    if not _compat.INTERCEPTING.value:
        return original(ctx, *args, **params)
    platforms = _compat.lowering_platforms(ctx)
    call, obstacle = _as_call(translation, ctx, params)
    algorithm, reason = _choose(platforms, ctx, call, obstacle)
    decisions.record(
        call,
        ctx.avals_in,
        algorithm,
        f"jax.lax.{translation.lax_name}, {reason}",
        None if obstacle else partial(_lowering.describe, platforms[0], ctx, call),
    )
    if algorithm != "xla":
        run = partial(_run, replace(call, algorithm=algorithm), platforms[0], ctx)
    elif translation.exists_on_cpu or platforms != ("cpu",) or obstacle is not None:
        return original(ctx, *args, **params)
    else:
        run = partial(_run_by_lax, call)
    body = partial(translation.body, run, call=call, **params)
    with _compat.untyped_axes():
        return _compat.lower_fun(body, multiple_results=True)(ctx, *args)


def _choose(
    platforms: Sequence[str], ctx: Any, call: Call, obstacle: str | None
) -> tuple[str, str]:
    """The algorithm for the call, and why."""
    if obstacle is None and len(platforms) > 1:
        obstacle = f"it is lowered for {' and '.join(platforms)} at once"
    if obstacle is not None:
        return "xla", f"not intercepted: {obstacle}"
    algorithm, reason = _lowering.choose(platforms[0], ctx, call)
    if algorithm == "xla":
        return "xla", f"not intercepted: {reason}"
    return algorithm, f"intercepted: {reason}"


def _run(
    call: Call, platform: str, ctx: Any, spec: CollectiveSpec, *arrays: Any, **static: Any
) -> Sequence[Any]:
    """Runs a collective by the algorithm that the call names."""
    return _lowering.run(spec, platform, ctx, *arrays, call=call, **static)


def _run_by_lax(call: Call, spec: CollectiveSpec, *arrays: Any, **static: Any) -> Sequence[Any]:
    """A collective that lax lacks on CPU, in terms of those that it has there."""
    return spec.xla(*arrays, call=call, platform="cpu", **static)


# From lax's parameters to a call


def _as_call(translation: _Translation, ctx: Any, params: Any) -> tuple[Call, str | None]:
    """The call, and what hinders jcoll from serving it, if anything does."""
    axes = params["axes"] if "axes" in params else params["axis_name"]
    axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    context = _compat.mesh_of_lowering(ctx)
    sizes = context[0].shape if context else {}
    size = math.prod(sizes.get(axis, 1) for axis in axes)
    groups, obstacle = _groups(translation.spec.name, size, params.get("axis_index_groups"))
    call = Call(
        op=translation.spec.name,
        axes=axes,
        groups=groups,
        algorithm="auto",
        timeout_s=0.0,
        call_site=_call_site(ctx),
    )
    if any(isinstance(axis, int) for axis in axes):
        return call, f"the axes {axes} are not all named"
    if any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in ctx.avals_in):
        return call, f"arrays of {ctx.avals_in[0].dtype}"
    return call, obstacle or translation.obstacle(ctx, call, params)


def _groups(op: str, size: int, axis_index_groups: Any) -> tuple[Groups, str | None]:
    need_uniform = op != "all_reduce"
    try:
        return make_groups(op, size, axis_index_groups, need_uniform=need_uniform), None
    except (TypeError, ValueError):
        return Groups(size), f"axis_index_groups={axis_index_groups} on an axis of {size}"


def _call_site(ctx: Any) -> str:
    """folder/file.py:line, as jcoll's own ops have it."""
    site = _compat.lowering_site(ctx)
    return "" if site is None else site_text(*site)


# The bodies, and what is special about some


def _reduce(op: str, run: Run, x: Any, *, call: Call, **_: Any) -> Sequence[Any]:
    if x.dtype == jnp.bool_:
        op = {"max": "or", "min": "and"}[op]
    return run(SPECS["all_reduce"], x, op=op)


def _reduce_obstacle(op: str, ctx: Any, call: Call, params: Any) -> str | None:
    dtype = ctx.avals_in[0].dtype
    if op == "sum":
        return "a sum of bools" if dtype == jnp.bool_ else None
    return f"a {op} of {dtype}" if jnp.issubdtype(dtype, jnp.complexfloating) else None


def _reduce_scatter(
    run: Run, x: Any, *, call: Call, scatter_dimension: int, tiled: bool, **_: Any
) -> Sequence[Any]:
    x = take_blocks(x, scatter_dimension, tiled, call, "scatter_dimension")
    return run(SPECS["reduce_scatter"], x, op="sum")


def _all_gather(
    run: Run, x: Any, *, call: Call, all_gather_dimension: int, tiled: bool, **_: Any
) -> Sequence[Any]:
    (y,) = run(SPECS["all_gather"], x)
    return [place_blocks(y, all_gather_dimension, tiled)]


def _all_to_all(
    run: Run, x: Any, *, call: Call, split_axis: int, concat_axis: int, **_: Any
) -> Sequence[Any]:
    """The primitive is always tiled: lax.all_to_all adds and removes dimensions around it."""
    x = take_blocks(x, split_axis, True, call, "split_axis")
    (y,) = run(SPECS["all_to_all"], x)
    return [place_blocks(y, concat_axis, True)]


def _ppermute(run: Run, x: Any, *, call: Call, perm: Any, **_: Any) -> Sequence[Any]:
    return run(SPECS["ppermute"], x, perm=_ranks(perm, call))


def _ranks(perm: Any, call: Call) -> tuple[tuple[int, int], ...]:
    n = call.num_ranks
    return tuple((operator.index(src) % n, operator.index(dst) % n) for src, dst in perm)


def _ppermute_obstacle(ctx: Any, call: Call, params: Any) -> str | None:
    context = _compat.mesh_of_lowering(ctx)
    mesh_order = [axis for axis in context[0].axis_names if axis in call.axes] if context else []
    if len(call.axes) > 1 and list(call.axes) != mesh_order:
        return f"ppermute counts ranks in the mesh's order, {mesh_order}"
    n = call.num_ranks
    if ctx.avals_in[0].dtype == jnp.float8_e8m0fnu and len(params["perm"]) < n:
        return "float8_e8m0fnu has no zero for the ranks that get nothing"
    if not all(-n <= operator.index(rank) < n for pair in params["perm"] for rank in pair):
        return "perm names a rank that is not there"
    for ranks in zip(*_ranks(params["perm"], call), strict=True):
        if len(set(ranks)) != len(ranks):
            return "perm names a rank twice"
    return None


def _ragged_all_to_all(
    run: Run, operand: Any, output: Any, *index: Any, call: Call, **_: Any
) -> Sequence[Any]:
    names = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
    index = tuple(
        _rows.check_index(call, name, x, call.num_ranks)
        for name, x in zip(names, index, strict=True)
    )
    spec = SPECS["ragged_all_to_all"]
    return run(spec, operand, output, *_rows.common_index_dtype(*index))


def _pbroadcast(run: Run, x: Any, *, call: Call, source: int, **_: Any) -> Sequence[Any]:
    return run(SPECS["broadcast"], x, root=source)


def _reduction(lax_name: str, op: str) -> _Translation:
    obstacle = partial(_reduce_obstacle, op)
    return _Translation(lax_name, SPECS["all_reduce"], partial(_reduce, op), obstacle)


_GATHER = _Translation("all_gather", SPECS["all_gather"], _all_gather)

_TRANSLATIONS = {
    "psum": _reduction("psum", "sum"),
    "psum_invariant": _reduction("psum", "sum"),
    "pmax": _reduction("pmax", "max"),
    "pmin": _reduction("pmin", "min"),
    "all_gather": _GATHER,
    "all_gather_invariant": _GATHER,
    "reduce_scatter": _Translation(
        "psum_scatter",
        SPECS["reduce_scatter"],
        _reduce_scatter,
        partial(_reduce_obstacle, "sum"),
    ),
    "all_to_all": _Translation("all_to_all", SPECS["all_to_all"], _all_to_all),
    "ppermute": _Translation("ppermute", SPECS["ppermute"], _ppermute, _ppermute_obstacle),
    "ragged_all_to_all": _Translation(
        "ragged_all_to_all",
        SPECS["ragged_all_to_all"],
        _ragged_all_to_all,
        exists_on_cpu=False,
    ),
    "pbroadcast": _Translation("pbroadcast", SPECS["broadcast"], _pbroadcast, exists_on_cpu=False),
}

if config.intercept:
    _install()
    _compat.lower_each(_primitives(), 1)
    _compat.INTERCEPTING.set_global(True)
