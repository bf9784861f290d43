"""The CUDA runtime: what it serves, and its custom call.

A kernel, the interpreter of plans or NCCL does an op in one custom call. An op that has none of
them is made of those that have: reduce of all_reduce, all_to_all_v of all_gather (the counts) and
ragged_all_to_all (CollectiveSpec.composed); gather, scatter and ppermute, which copy blocks, of
ragged_all_to_all with blocks as rows, which reads no more than they need.

The attributes of the custom call are read by cuda/ffi/call_site.h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat
from jcoll.algorithms import kernels, registry
from jcoll.algorithms.registry import plan_op
from jcoll.comm.mesh import Call, signature
from jcoll.ops import _primitive, _selection
from jcoll.ops._custom_call import attribute, to_wire
from jcoll.ops._motion import ZERO, Motion
from jcoll.plan.ops import OPS
from jcoll.runtime import cuda, world
from jcoll.tuning.candidates import CUDA, Request

COMMUNICATION_ID = 2
"""Of XLA's communicators, the ones that are ours: 0 and 1 are XLA's own. One for all calls, which
share signal pads: two at once on a device would be wrong. XLA runs them on one stream in an order
that is the same on all ranks, unless it is told otherwise: docs/gpu.md names the flags."""

ACROSS = "nccl"
"""The algorithm of what crosses between NVLink domains: NCCL's functions, called by the runtime on
the stream of its kernels, so that they have its deadline and its errors."""

_REDUCED_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
"""8-bit floats that the kernels reduce themselves: in float32, rounded once."""

_BOOLS_AS = {"and": "min", "or": "max"}  # Of 0 and 1.

# What can be served


def obstacle(mesh: Any, call: Call, avals: Any, reduce_op: str | None) -> str | None:
    """Why the runtime cannot serve a call, whatever the algorithm."""
    missing = cuda.obstacle()
    # A program for another machine, which may have what is missing here, is taken at its word.
    if missing and (call.algorithm == "auto" or cuda.has_gpus(mesh)):
        return missing
    if not call.groups.uniform:
        return "on CUDA groups must be of equal size"
    if call.op in OPS and OPS[call.op].reduces:
        return _reduction_obstacle(avals[0].dtype, reduce_op)
    return None


# Which reductions the kernels have: cuda/kernels/refusal.cc.


def _reduction_obstacle(dtype: Any, reduce_op: str | None) -> str | None:
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if is_complex and reduce_op not in ("sum", "mean", None):
        return f"on CUDA no kernel has a {reduce_op} of {dtype}"
    if reduce_op in ("and", "or") and dtype != jnp.bool_:
        return f"on CUDA no kernel has the bitwise {reduce_op!r}"
    return None


def _switch_reduces(dtype: Any, reduce_op: str | None) -> bool:
    """Whether the NVLink switch does. (It has a max of 16-bit floats, which loses NaN.)"""
    if jnp.issubdtype(dtype, jnp.inexact):
        return reduce_op in ("sum", "mean", None) and jnp.finfo(dtype).bits > 8
    return np.dtype(dtype).itemsize >= 4 and reduce_op in ("sum", "min", "max", None)


def placement(mesh: Any, call: Call) -> world.Placement:
    """Where the call's ranks are."""
    if call.algorithm == "nccl":  # Which reaches them wherever they are.
        return world.Placement()
    group_of, _ = call.groups.tables()
    found = cuda.placement(mesh, call.axes, call.groups.axis_size, group_of)
    if found.host_of is None and call.num_ranks > kernels.MAX_RANKS:
        reason = f"{call.num_ranks} ranks are more than a kernel's {kernels.MAX_RANKS}"
        return world.Placement(obstacle=reason)
    return found


def describe(
    call: Call, aval: Any, reduce_op: str | None, mesh: Any, where: world.Placement
) -> Request:
    """The call as the choice of its algorithm sees it."""
    del mesh
    # Processes do not tell each other here what their tuning files are.
    use_own = jax.process_count() == 1
    request = _selection.describe(call, aval, reduce_op, where=where, use_own=use_own)
    obstacle = _multimem_obstacle(call, aval.dtype, reduce_op)
    return replace(request, device_kind=CUDA, multimem_obstacle=obstacle)


def _multimem_obstacle(call: Call, dtype: Any, reduce_op: str | None) -> str | None:
    if not _switch_reduces(dtype, reduce_op):
        return f"the switch has no {reduce_op or 'reduction'} of {dtype}"
    # What the GPUs can is known to the runtime alone, once all ranks have met.
    return None if call.algorithm == "multimem" else "direct takes it where the GPUs can"


# How


def run(spec: Any, ctx: Any, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """The collective as a custom call of the CUDA runtime, or as several."""
    if spec.name in kernels.BY_OP or is_plan(call):
        return _run_alone(spec, ctx, *arrays, call=call, **static)
    inner = partial(_run_inner, ctx, call)
    if spec.composed is not None:
        return list(spec.composed(inner, *arrays, call=call, **static))
    return [_run_by_rows(inner, spec, *arrays, call=call, **static)]


def is_plan(call: Call) -> bool:
    """Whether the interpreter of plans does it; else kernels do."""
    return registry.is_plan(call.op, call.algorithm, on_cuda=True)


def _run_inner(ctx: Any, call: Call, name: str, *arrays: Any, **static: Any) -> list[Any]:
    """Another op of the same ranks, by its kernel."""
    inner = replace(call, op=name, algorithm="direct")
    return _run_alone(_primitive.SPECS[name], ctx, *arrays, call=inner, **static)


def _run_by_rows(run: Any, spec: Any, x: Any, *, call: Call, **static: Any) -> Any:
    """An op that copies blocks, by ragged_all_to_all: the blocks are its rows."""
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits == 8:
        # As bits: not all of these types have a zero, which a rank gets that nobody sends to.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
        y = _run_by_rows(run, spec, bits, call=call, **static)
        return jax.lax.bitcast_convert_type(y, x.dtype)
    motion = spec.motion([jax.typeof(x)], call, **static)
    ((shape, dtype),) = spec.shapes([jax.typeof(x)], call, **static)
    width = x.size // motion.in_blocks
    rank = _primitive.rank_in_group(call)
    index = jax.lax.dynamic_index_in_dim(_rows_of_blocks(motion), rank, axis=1, keepdims=False)
    zeros = jnp.zeros((motion.out_blocks, width), dtype)
    (y,) = run("ragged_all_to_all", x.reshape(motion.in_blocks, width), zeros, *index)
    return y.reshape(shape)


def _rows_of_blocks(motion: Motion) -> Any:
    """[input_offsets, send_sizes, output_offsets, recv_sizes] of all ranks for a source_map of
    copies: a row for every block, as many for every pair of ranks as the busiest pair needs."""
    n = len(motion.source_map)
    moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for dst, blocks in enumerate(motion.source_map):
        for at, source in enumerate(blocks):
            assert source >= ZERO, "a reduction: its CollectiveSpec needs a `composed`"
            if source != ZERO:
                src, block = divmod(source, motion.in_blocks)
                moves.setdefault((src, dst), []).append((block, at))
    most = max(map(len, moves.values()), default=1)
    index = np.zeros((4, n, n * most), np.int32)
    inputs, sends, outputs, recvs = index
    for (src, dst), rows in moves.items():
        for i, (block, at) in enumerate(rows):
            to, come = dst * most + i, src * most + i
            inputs[src, to], outputs[src, to] = block, at
            sends[src, to] = recvs[dst, come] = 1
    return index


_cuda_p = _compat.Primitive("jcoll_cuda")
_cuda_p.multiple_results = True


@_cuda_p.def_abstract_eval
def _cuda_abstract_eval(*avals: Any, shape: Any, dtype: Any, **_: Any) -> Any:
    return [_compat.result_aval(avals[0], shape, dtype)]


def _cuda_lowering(
    ctx: Any, *args: Any, shape: Any, dtype: Any, aliases: Any, attributes: Any
) -> Any:
    del shape, dtype
    rule = jax.ffi.ffi_lowering(cuda.TARGET, operand_output_aliases=dict(aliases))
    return rule(ctx, *args, **{name: attribute(value) for name, value in attributes})


_compat.register_lowering(_cuda_p, _cuda_lowering, platform="cuda")


def _run_alone(spec: Any, ctx: Any, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """The op as one custom call. All that have one have one output."""
    context = _compat.mesh_of_lowering(ctx)
    assert context is not None  # See _lowering._setting.
    given = jax.typeof(arrays[0])
    ((_, out_dtype),) = spec.shapes([jax.typeof(x) for x in arrays], call, **static)
    if given.dtype == jnp.bool_ and "op" in static:
        arrays = (arrays[0].astype(jnp.uint8),)
        static["op"] = _BOOLS_AS[static["op"]]
    wire = [_to_wire(x, call, static.get("op")) for x in arrays]
    avals = [jax.typeof(x) for x in wire]
    ((shape, dtype),) = spec.shapes(avals, call, **static)
    motion = spec.motion(avals, call, **static)
    (y,) = _cuda_p.bind(
        *wire,
        shape=tuple(shape),
        dtype=np.dtype(dtype),
        aliases=motion.aliases,
        attributes=_attributes(call, context[0].shape, motion, avals[0])
        + _call_attributes(call, given, static.get("root", -1)),
    )
    return [y if y.dtype == out_dtype else y.astype(out_dtype)]


def _to_wire(x: Any, call: Call, reduce_op: str | None) -> Any:
    """The array in a type that whoever does the call takes."""
    is_kernel = call.algorithm != "nccl" and not is_plan(call)
    x = to_wire(x, reduce_op, reduces=_REDUCED_FP8 if is_kernel else ())
    if call.algorithm != "nccl" or reduce_op is None or x.dtype not in (jnp.int16, jnp.uint16):
        return x
    # NCCL has no integers of 16 bits. The lowest 16 of a result in 32 are the result in 16.
    return x.astype(jnp.int32 if x.dtype == jnp.int16 else jnp.uint32)


def _call_attributes(call: Call, given: Any, root: int) -> tuple[tuple[str, Any], ...]:
    """Those that follow from the call alone; hashable, as all attributes."""
    return (
        ("op", call.op),
        ("algorithm", call.algorithm),
        ("plan_op", plan_op(call.op) if is_plan(call) else ""),
        ("root", root),
        ("axis", call.axis_text),
        ("call_site", call.call_site),
        ("signature", signature(given)),
        ("timeout_s", call.timeout_s),
        ("communication_id", COMMUNICATION_ID),
    )


def _attributes(
    call: Call, mesh_shape: Mapping[Any, int], motion: Motion, aval: Any
) -> tuple[tuple[str, Any], ...]:
    """Who takes part, and with how much of what."""
    attributes = {
        "dtype": str(aval.dtype),
        "reduce_op": motion.reduce_op,
        "count": aval.size // motion.in_blocks,
        "groups": device_groups(mesh_shape, call),
        "group_size": call.num_ranks,
    }
    if motion.kind == "ragged":
        attributes |= {
            "row_nbytes": motion.rows["row_nbytes"],
            "updates_per_rank": motion.rows["num_updates"],
            "input_rows": motion.rows["in_rows"],
            "output_rows": motion.rows["out_rows"],
        }
    return tuple(attributes.items())


def device_groups(mesh_shape: Mapping[Any, int], call: Call) -> tuple[int, ...]:
    """The groups of the whole mesh, one after the other, as XLA numbers devices: by their place in
    the mesh. Always in the same order for the same axes: XLA has a communicator for each order, in
    which a rank is the place in the group."""
    positions = world.mesh_positions(mesh_shape, call.axes)
    device_at: Sequence[int] = np.argsort(positions).tolist()
    size = call.groups.axis_size
    rows = [device_at[i : i + size] for i in range(0, len(device_at), size)]
    groups = call.groups.as_lists()
    return tuple(row[position] for row in rows for group in groups for position in group)
