"""The CPU runtime: what it serves, and its custom call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jcoll import _compat
from jcoll.algorithms import registry
from jcoll.algorithms.registry import plan_op
from jcoll.comm.mesh import Call, signature
from jcoll.ops import _selection
from jcoll.ops._custom_call import attribute, nbytes, to_wire
from jcoll.ops._motion import Motion
from jcoll.runtime import native, world
from jcoll.tuning.candidates import Request

ACROSS = "xla"
"""The algorithm of what crosses between hosts: XLA's collectives, which are gloo's."""


def obstacle(mesh: Any, call: Call, avals: Any, reduce_op: str | None) -> str | None:
    """Why the runtime cannot serve a call, whatever the algorithm; it serves all."""
    del mesh, call, avals, reduce_op


def placement(mesh: Any, call: Call) -> world.Placement:
    """Where the call's ranks are."""
    group_of, _ = call.groups.tables()
    return world.placement(mesh, call.axes, call.groups.axis_size, group_of)


def describe(
    call: Call, aval: Any, reduce_op: str | None, mesh: Any, where: world.Placement
) -> Request:
    """The call as the choice of its algorithm sees it."""
    del mesh
    use_own = world.has_same_tuning(where)
    return _selection.describe(call, aval, reduce_op, where=where, use_own=use_own)


def is_plan(call: Call) -> bool:
    """Whether the runtime follows a plan."""
    return registry.is_plan(call.op, call.algorithm)


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
    return rule(ctx, *operands, **{k: attribute(v) for k, v in attributes})


_compat.register_lowering(_native_p, _native_lowering, platform="cpu")


def run(spec: Any, ctx: Any, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """The collective as a custom call of the CPU runtime."""
    context = _compat.mesh_of_lowering(ctx)
    assert context is not None  # See _lowering._setting.
    out_dtypes = [d for _, d in spec.shapes([jax.typeof(x) for x in arrays], call, **static)]
    wire = [to_wire(x, static.get("op")) for x in arrays]
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


def _attributes(
    call: Call, mesh_shape: Mapping[Any, int], motion: Motion, avals: Any, shapes: Any, given: Any
) -> tuple:
    """The custom call's attributes, hashable; ffi.cc reads them into a Description."""
    group_of, rank_of = call.groups.tables()
    in_nbytes = nbytes(avals[0].shape, avals[0].dtype)
    out_nbytes = nbytes(*shapes[0])
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
        if not is_plan(call):  # Else the plan says it.
            source_map = np.asarray(motion.source_map, np.int64).reshape(-1)
            attributes["source_map"] = tuple(source_map.tolist())
    return tuple(sorted((attributes | motion.rows).items()))


def _plan_attributes(spec: Any, call: Call, root: int | None) -> tuple:
    """The name of the plan, if one is to be followed; resolved when the program is loaded."""
    attributes = () if root is None else (("root", root),)
    return (*attributes, ("plan_op", plan_op(spec.name))) if is_plan(call) else attributes


def _process_attributes(ctx: Any, mesh: Any, call: Call) -> tuple:
    """Which process every rank is in, and a name for the call that all of them agree on."""
    process_of = placement(mesh, call).process_of
    if process_of is None:
        return ()
    program, site = _compat.module_and_site(ctx)
    return (("process_of", process_of), ("program", program), ("site_index", site))
