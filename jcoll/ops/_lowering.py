"""Lowering: which algorithm a call gets on its platform, and its way to that platform's runtime."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat, errors
from jcoll.comm.mesh import Call, configured_algorithm
from jcoll.ops import _cpu, _cuda, _hierarchical, _selection
from jcoll.ops._by_xla import by_xla
from jcoll.runtime import decisions, world
from jcoll.tuning.candidates import ON_HOSTS, Request, refusal, serving
from jcoll.tuning.select import automatic

_RUNTIMES: dict[str, Any] = {"cpu": _cpu, "cuda": _cuda}
"""By platform, modules with obstacle, placement, describe, is_plan, run and ACROSS: see _cpu.py."""


def register(spec: Any, primitive: Any) -> None:
    """Registers the lowering rules of a collective's primitive."""
    _compat.register_lowering(primitive, partial(_lower, spec, "default"))
    for platform in _RUNTIMES:
        _compat.register_lowering(primitive, partial(_lower, spec, platform), platform=platform)


def _lower(spec: Any, platform: str, ctx: Any, *args: Any, call: Call, **static: Any) -> Any:
    reduce_op = static.get("op")
    algorithm, reason = choose(platform, ctx, call, reduce_op)
    request = partial(describe, platform, ctx, call, reduce_op)
    # XLA's, where it is asked for, need not wait for other processes to tell where they are.
    joined = call.algorithm != "xla" or jax.process_count() == 1
    decisions.record(call, ctx.avals_in, algorithm, reason, request if joined else None)
    if algorithm == "xla" and not _is_alone(spec, call):
        fn = partial(by_xla, spec, call=call, platform=platform, **static)
    else:
        call = replace(call, algorithm=algorithm)
        fn = partial(run, spec, platform, ctx, call=call, **static)
    with _compat.untyped_axes():
        return _compat.lower_fun(fn, multiple_results=True)(ctx, *args)


def choose(platform: str, ctx: Any, call: Call, reduce_op: str | None = None) -> tuple[str, str]:
    """The algorithm for a call, and why. Raises if the one asked for cannot serve it."""
    if call.algorithm == "xla":
        return "xla", "asked for"
    setting = _setting(platform, ctx, call, reduce_op)
    obstacle = setting.obstacle
    request = _request(platform, setting, ctx, call, reduce_op)
    if call.algorithm == "auto":
        if obstacle is not None:
            return "xla", obstacle
        return automatic(request, configured_algorithm(call.op, call.groups))
    if obstacle is None and setting.where.host_of is not None:
        if call.algorithm == "hierarchical":
            return "hierarchical", ON_HOSTS
        obstacle = ON_HOSTS
    obstacle = obstacle or refusal(request, call.algorithm)
    if obstacle is None:
        return call.algorithm, "asked for"
    problem = f"algorithm={call.algorithm!r} cannot serve this call: {obstacle}."
    fix = f"Available here: {', '.join(['auto', *serving(request)])}."
    raise ValueError(errors.text(call.where, problem, fix))


def describe(platform: str, ctx: Any, call: Call, reduce_op: str | None = None) -> Request:
    """The call as the choice of its algorithm sees it."""
    setting = _setting(platform, ctx, call, reduce_op)
    return _request(platform, setting, ctx, call, reduce_op)


@dataclass(frozen=True)
class _Setting:
    """What a call meets where it is lowered: why jcoll cannot serve it, or where its ranks are."""

    obstacle: str | None
    where: world.Placement = field(default_factory=world.Placement)
    mesh: Any = None


def _request(
    platform: str, setting: _Setting, ctx: Any, call: Call, reduce_op: str | None
) -> Request:
    aval = ctx.avals_in[0]
    if setting.obstacle is not None:
        return _selection.describe(call, aval, reduce_op, obstacle=setting.obstacle)
    runtime = _RUNTIMES[platform]
    return runtime.describe(call, aval, reduce_op, setting.mesh, setting.where)


def _setting(platform: str, ctx: Any, call: Call, reduce_op: str | None) -> _Setting:
    if platform not in _RUNTIMES:
        return _Setting("the platform has no jcoll runtime yet")
    if not all(isinstance(d, int) for aval in ctx.avals_in for d in aval.shape):
        return _Setting("a dimension is symbolic, and the runtime's calls are of fixed size")
    context = _compat.mesh_of_lowering(ctx)
    if context is None:
        return _Setting("the call is not inside shard_map")
    mesh, manual = context
    auto = [name for name in mesh.axis_names if name not in manual and mesh.shape[name] > 1]
    if auto:
        # XLA would all-gather the operands of a custom call over these axes.
        return _Setting(f"the mesh axes {auto} are not manual in this shard_map")
    runtime = _RUNTIMES[platform]
    obstacle = runtime.obstacle(mesh, call, ctx.avals_in, reduce_op)
    if obstacle is not None:
        return _Setting(obstacle)
    where = runtime.placement(mesh, call)
    if where.host_of is None:
        return _Setting(where.obstacle, where, mesh)
    size = call.groups.axis_size
    obstacle = _hierarchical.obstacle(call.op, where.host_of, size, call.groups)
    return _Setting(obstacle, where, mesh)


def run(spec: Any, platform: str, ctx: Any, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """The collective by call.algorithm, as `choose` has chosen it, if that is not "xla";
    traceable, inside a lowering rule."""
    runtime = _RUNTIMES[platform]
    if call.algorithm == "hierarchical":
        context = _compat.mesh_of_lowering(ctx)
        assert context is not None  # See _setting.
        where = runtime.placement(context[0], call)
        if where.host_of is not None:
            levels = _hierarchical.split(where.host_of, call.groups.axis_size, call.groups)
            assert isinstance(levels, _hierarchical.Split)  # See _setting.
            levels = replace(levels, across=runtime.ACROSS)
            return spec.hierarchical(*arrays, call=call, levels=levels, **static)
    if _is_alone(spec, call):
        return [y[0] for y in spec.stacked(jnp, *(x[None] for x in arrays), **static)]
    if runtime.is_plan(call) and static.get("op") == "mean":
        return _mean_by_plan(runtime, spec, ctx, *arrays, call=call, **static)
    return runtime.run(spec, ctx, *arrays, call=call, **static)


def _is_alone(spec: Any, call: Call) -> bool:
    """Whether the reference will do: one rank, and no counts that must be checked."""
    return call.num_ranks == 1 and not spec.index_inputs


def _mean_by_plan(
    runtime: Any, spec: Any, ctx: Any, x: Any, *, call: Call, op: str, **static: Any
) -> list[Any]:
    """A plan reduces step by step, so that nobody knows by what to divide before the end."""
    del op
    (y,) = runtime.run(spec, ctx, x, call=call, op="sum", **static)
    return [y / jnp.asarray(call.num_ranks, y.dtype)]
