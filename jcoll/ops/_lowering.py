"""Lowering: which algorithm a call gets on its platform, and the custom call of the CPU runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat, errors
from jcoll.algorithms.registry import RESERVED, plan_op
from jcoll.comm.mesh import Call, configured_algorithm, signature
from jcoll.ops import _hierarchical, _selection
from jcoll.ops._reductions import accumulation_dtype
from jcoll.runtime import decisions, native, world
from jcoll.tuning.candidates import HIERARCHICAL_OPS, ON_HOSTS, Request
from jcoll.tuning.select import select


@dataclass(frozen=True)
class Motion:
    """How the native runtime gets from inputs to outputs; csrc/description.h has the contract.

    kind "blocks": `source_map[rank][block]` says where each output block comes from (v >= 0: block
    v % in_blocks of rank v // in_blocks; ZERO; or reduced(b): the reduction of all ranks' block b).
    Other kinds move rows and are described by `rows`.
    """

    kind: str
    in_blocks: int = 1
    out_blocks: int = 1
    source_map: Any = None
    reduce_op: str = ""
    nbytes_array: str = "in"  # Whose size is S, nccl-tests' size: the input's or the output's.
    rows: dict[str, int] = field(default_factory=dict)
    aliases: tuple[tuple[int, int], ...] = ()  # (input, output) pairs that may share a buffer.


ZERO = -1


def reduced(block: int) -> int:
    """The source_map entry for the reduction over all ranks of their block `block`."""
    return -2 - block


def register(spec: Any, primitive: Any) -> None:
    """Registers the lowering rules of a collective's primitive."""
    _compat.register_lowering(primitive, partial(_lower, spec, "default"))
    _compat.register_lowering(primitive, partial(_lower, spec, "cpu"), platform="cpu")


def _lower(spec: Any, platform: str, ctx: Any, *args: Any, call: Call, **static: Any) -> Any:
    reduce_op = static.get("op")
    algorithm, reason = choose(platform, ctx, call, reduce_op)
    request = partial(describe, platform, ctx, call, reduce_op)
    # XLA's, where it is asked for, need not wait for other processes to tell where they are.
    joined = call.algorithm != "xla" or jax.process_count() == 1
    decisions.record(call, ctx.avals_in, algorithm, reason, request if joined else None)
    call = replace(call, algorithm=algorithm)
    if algorithm == "xla" and not _is_alone(spec, call):
        fn = partial(spec.xla, call=call, platform=platform, **static)
    else:
        fn = partial(run, spec, ctx, call=call, **static)
    with _compat.untyped_axes():
        return _compat.lower_fun(fn, multiple_results=True)(ctx, *args)


def choose(platform: str, ctx: Any, call: Call, reduce_op: str | None = None) -> tuple[str, str]:
    """The algorithm for a call, and why. Raises if the one asked for cannot serve it."""
    if call.algorithm == "xla":
        return "xla", "asked for"
    setting = _setting(platform, ctx, call)
    obstacle = setting.obstacle
    if obstacle is None and setting.where.host_of is not None:
        if call.algorithm in ("auto", "hierarchical"):
            return "hierarchical", ON_HOSTS
        obstacle = ON_HOSTS
    if call.algorithm != "auto":
        if obstacle is None:
            return call.algorithm, "asked for"
        problem = f"algorithm={call.algorithm!r} cannot serve this call: {obstacle}."
        raise ValueError(errors.text(call.where, problem, "Available here: auto, xla."))
    if obstacle is not None:
        return "xla", obstacle
    configured = configured_algorithm(call.op, call.groups)
    if configured != "auto":
        return configured, "JCOLL_ALGORITHM"
    choice = select(_request(setting, ctx, call, reduce_op))
    return choice.algorithm, choice.reason


def describe(platform: str, ctx: Any, call: Call, reduce_op: str | None = None) -> Request:
    """The call as the choice of its algorithm sees it."""
    return _request(_setting(platform, ctx, call), ctx, call, reduce_op)


@dataclass(frozen=True)
class _Setting:
    """What a call meets where it is lowered: why jcoll cannot serve it, or where its ranks are."""

    obstacle: str | None
    where: world.Placement = field(default_factory=world.Placement)


def _request(setting: _Setting, ctx: Any, call: Call, reduce_op: str | None) -> Request:
    where = world.Placement() if setting.obstacle else setting.where
    return _selection.describe(call, ctx.avals_in[0], setting.obstacle, where, reduce_op)


def _setting(platform: str, ctx: Any, call: Call) -> _Setting:
    if platform != "cpu":
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
    where = _placement(mesh, call)
    if where.host_of is None:
        return _Setting(where.obstacle, where)
    if call.op not in HIERARCHICAL_OPS:
        return _Setting(f"{ON_HOSTS}, and this op has no hierarchical algorithm")
    levels = _levels(where, call)
    return _Setting(levels if isinstance(levels, str) else None, where)


def _placement(mesh: Any, call: Call) -> world.Placement:
    group_of, _ = call.groups.tables()
    return world.placement(mesh, call.axes, call.groups.axis_size, group_of)


def _levels(where: world.Placement, call: Call) -> Any:
    """The hosts and rails of a call whose ranks are on several hosts; a str if it has none."""
    assert where.host_of is not None
    return _hierarchical.split(where.host_of, call.groups.axis_size, call.groups)


def run(spec: Any, ctx: Any, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """The collective by call.algorithm, as `choose` has chosen it, if that is not "xla";
    traceable, inside a lowering rule."""
    if call.algorithm == "hierarchical":
        context = _compat.mesh_of_lowering(ctx)
        assert context is not None  # See _setting.
        where = _placement(context[0], call)
        if where.host_of is not None:
            levels = _levels(where, call)
            return spec.hierarchical(*arrays, call=call, levels=levels, **static)
    if static.get("op") == "mean" and call.algorithm not in RESERVED:
        return _mean_by_plan(spec, ctx, *arrays, call=call, **static)
    return _run_native(spec, ctx, *arrays, call=call, **static)


# The native path

_native_p = _compat.Primitive("jcoll_native")
_native_p.multiple_results = True


@_native_p.def_abstract_eval
def _native_abstract_eval(*avals: Any, shapes: Any, **_: Any) -> Any:
    return [_compat.result_aval(avals[0], shape, dtype) for shape, dtype in shapes]


def _native_lowering(ctx: Any, *args: Any, shapes: Any, aliases: Any, attributes: Any) -> Any:
    del shapes
    rule = jax.ffi.ffi_lowering(
        native.TARGET,
        operand_output_aliases={i + 1: o for i, o in aliases},  # Operand 0 is the partition id.
    )
    ctx, operands = _compat.with_partition_id(ctx, args)
    return rule(ctx, *operands, **{k: _attribute(v) for k, v in attributes})


_compat.register_lowering(_native_p, _native_lowering, platform="cpu")


def _attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return np.asarray(value, np.int64)
    if isinstance(value, str):
        return value
    return np.float64(value) if isinstance(value, float) else np.int64(value)


def _is_alone(spec: Any, call: Call) -> bool:
    """Whether the reference will do: one rank, and no counts that must be checked."""
    return call.num_ranks == 1 and not spec.index_inputs


def _mean_by_plan(spec: Any, ctx: Any, x: Any, *, call: Call, op: str, **static: Any) -> list[Any]:
    """A plan reduces step by step, so that nobody knows by what to divide before the end."""
    del op
    (y,) = _run_native(spec, ctx, x, call=call, op="sum", **static)
    return [y / jnp.asarray(call.num_ranks, y.dtype)]


def _run_native(spec: Any, ctx: Any, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """The collective as a custom call of the CPU runtime."""
    if _is_alone(spec, call):
        return [y[0] for y in spec.stacked(jnp, *(x[None] for x in arrays), **static)]
    context = _compat.mesh_of_lowering(ctx)
    assert context is not None  # See _setting.
    out_dtypes = [d for _, d in spec.shapes([jax.typeof(x) for x in arrays], call, **static)]
    wire = [_to_wire(x, static.get("op")) for x in arrays]
    avals = [jax.typeof(x) for x in wire]
    motion = spec.motion(avals, call, **static)
    shapes = [(tuple(s), np.dtype(d)) for s, d in spec.shapes(avals, call, **static)]
    outs = _native_p.bind(
        *wire,
        shapes=tuple(shapes),
        aliases=motion.aliases,
        attributes=_attributes(call, context[0].shape, motion, avals, shapes, jax.typeof(arrays[0]))
        + _plan_attributes(spec, call, static.get("root"))
        + _process_attributes(ctx, context[0], call),
    )
    return [y if y.dtype == d else y.astype(d) for y, d in zip(outs, out_dtypes, strict=True)]


def _to_wire(x: Any, reduce_op: str | None) -> Any:
    """The array in a type that the runtime takes.

    Integers of less than a byte travel as int8: XLA:CPU keeps them so anyway. Reductions of 8-bit
    floats happen in float32, rounded once at the end: their own range and precision are too small
    to add in. Everything else travels as it is: XLA's collectives would widen 16-bit types.
    """
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return x.astype(accumulation_dtype(dtype))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8:
        if reduce_op is not None:
            return x.astype(accumulation_dtype(dtype))
        if jnp.finfo(dtype).bits < 8:
            return x.astype(jnp.float8_e4m3fn)  # Has every value of the smaller types.
    return x


def _attributes(
    call: Call, mesh_shape: Mapping[Any, int], motion: Motion, avals: Any, shapes: Any, given: Any
) -> tuple:
    """The custom call's attributes, hashable; ffi.cc reads them into a Description."""
    group_of, rank_of = call.groups.tables()
    in_nbytes = _nbytes(avals[0].shape, avals[0].dtype)
    out_nbytes = _nbytes(*shapes[0])
    attributes: dict[str, Any] = {
        "op": call.op,
        "axis": call.axis_text,
        "algorithm": call.algorithm,
        "call_site": call.call_site,
        "signature": signature(given),
        "dtype": str(avals[0].dtype),
        "timeout_s": call.timeout_s,
        "nbytes": in_nbytes if motion.nbytes_array == "in" else out_nbytes,
        "axis_size": call.groups.axis_size,
        "motion": motion.kind,
    }
    positions = world.mesh_positions(mesh_shape, call.axes)
    if positions != tuple(range(len(positions))):
        attributes["position_of"] = positions
    if group_of:
        attributes |= {"group_of": tuple(group_of), "rank_of": tuple(rank_of)}
    if motion.kind == "blocks":
        attributes |= {
            "reduce_op": motion.reduce_op,
            "in_blocks": motion.in_blocks,
            "out_blocks": motion.out_blocks,
            "block_nbytes": in_nbytes // motion.in_blocks,
        }
        if call.algorithm in RESERVED:  # Else the plan says it.
            source_map = np.asarray(motion.source_map, np.int64).reshape(-1)
            attributes["source_map"] = tuple(source_map.tolist())
    return tuple(sorted((attributes | motion.rows).items()))


def _plan_attributes(spec: Any, call: Call, root: int | None) -> tuple:
    """The name of the plan, if one is to be followed; resolved when the program is loaded."""
    attributes = () if root is None else (("root", root),)
    return (
        attributes if call.algorithm in RESERVED else (*attributes, ("plan_op", plan_op(spec.name)))
    )


def _process_attributes(ctx: Any, mesh: Any, call: Call) -> tuple:
    """Which process every rank is in, and a name for the call that all of them agree on."""
    process_of = _placement(mesh, call).process_of
    if process_of is None:
        return ()
    program, site = _compat.module_and_site(ctx)
    return (("process_of", process_of), ("program", program), ("site_index", site))


def _nbytes(shape: Sequence[int], dtype: Any) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
