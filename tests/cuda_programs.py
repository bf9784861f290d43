"""Programs lowered for CUDA on a machine without: their custom calls, and what they would compute.

`custom_calls` reads the calls back from the lowered module. `stand_in` has the CPU platform lower
as CUDA does and puts the meaning of the custom calls in their place: it looks at nothing but their
attributes and operands, as the CUDA runtime will.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jcoll import _compat
from jcoll.ops import SPECS, _cuda, _lowering
from jcoll.runtime import cuda, world

ATTRIBUTES = {
    "op": str,
    "algorithm": str,
    "plan_op": str,
    "axis": str,
    "call_site": str,
    "signature": str,
    "dtype": str,
    "timeout_s": float,
    "reduce_op": str,
    "count": int,
    "root": int,
    "groups": list,
    "group_size": int,
    "communication_id": int,
}
"""Of every call, with their types."""
XLA_COLLECTIVE = re.compile(r"stablehlo\.(?:all_|reduce_scatter|collective_)\w*")
ROW_ATTRIBUTES = ("row_nbytes", "updates_per_rank", "input_rows", "output_rows")


def lowered(fn: Callable, *args: Any, platforms: tuple[str, ...] = ("cuda",)) -> Any:
    jitted = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
    return jitted.trace(*args).lower(lowering_platforms=platforms)


def custom_calls(fn: Callable, *args: Any, platforms: tuple[str, ...] = ("cuda",)) -> list[dict]:
    """The attributes of each of jcoll's custom calls in a program lowered for CUDA."""
    module = lowered(fn, *args, platforms=platforms).compiler_ir("stablehlo")
    return [
        {a.name: _value(a.attr) for a in op.attributes["mhlo.backend_config"]}
        for op in _operations(module.operation)
        if op.name == "stablehlo.custom_call"
        and op.attributes["call_target_name"].value == cuda.TARGET
    ]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _operations(op.operation)


def _value(attribute: Any) -> Any:
    return list(attribute) if isinstance(attribute, ir.DenseIntElementsAttr) else attribute.value


def two_nvlink_domains(monkeypatch: Any, num_devices: int) -> None:
    """From here on half of the devices are in one NVLink domain, the others in another."""
    half = num_devices // 2
    where = world.Placement(host_of=(0,) * half + (1,) * half)

    def placement(mesh: Any, axes: Any, axis_size: int, group_of: Any) -> world.Placement:
        del mesh, axes
        domain_of = np.asarray(where.host_of)
        groups = world.by_group(domain_of, axis_size, group_of)
        return world.Placement() if all(len(set(g)) == 1 for g in groups) else where

    monkeypatch.setattr(cuda, "placement", placement)


def stand_in(monkeypatch: Any) -> None:
    """From here on what is lowered for CPU is lowered as for CUDA, with the runtime there."""
    monkeypatch.setitem(_lowering._RUNTIMES, "cpu", _cuda)
    monkeypatch.setattr(cuda, "obstacle", lambda: None)
    mlir.register_lowering(_cuda._cuda_p, _meaning, platform="cpu")


def _meaning(ctx: Any, *args: Any, attributes: Any, **_: Any) -> Any:
    context = _compat.mesh_of_lowering(ctx)
    assert context is not None

    def body(*args: Any) -> list[Any]:
        return [_compute(dict(attributes), context[0].axis_names, args)]

    with _compat.untyped_axes():
        return _compat.lower_fun(body, multiple_results=True)(ctx, *args)


def _compute(call: dict[str, Any], axes: Any, args: Any) -> Any:
    """This device's result: `groups` are of devices by their place in the mesh, and everybody's
    operands are at hand."""
    groups = np.asarray(call["groups"], np.int32).reshape(-1, call["group_size"])
    device = jax.lax.axis_index(axes)
    at = jnp.argmax((groups == device).reshape(-1))
    group, rank = at // call["group_size"], at % call["group_size"]
    members = jnp.asarray(groups)[group]
    stacked = [jax.lax.all_gather(x, axes)[members] for x in args]
    if call["op"] == "ragged_all_to_all":
        return _ragged(call, rank, args[1], stacked)
    static = {"op": call["reduce_op"]} if call["reduce_op"] else {}
    static |= {"root": call["root"]} if call["root"] >= 0 else {}
    return SPECS[call["op"]].stacked(jnp, *stacked, **static)[0][rank]


def _ragged(call: dict[str, Any], rank: Any, output: Any, stacked: Any) -> Any:
    """SPECS' reference makes all ranks' results, which is slow to compile."""
    operand, _, inputs, sends, outputs, _ = stacked
    row = jnp.arange(call["output_rows"], dtype=sends.dtype)
    for src in range(call["group_size"]):
        for update in range(call["updates_per_rank"]):
            entry = rank * call["updates_per_rank"] + update
            offset = row - outputs[src][entry]
            hit = (offset >= 0) & (offset < sends[src][entry])
            at = jnp.clip(offset + inputs[src][entry], 0, call["input_rows"] - 1)
            hit = hit.reshape(-1, *(1,) * (output.ndim - 1))
            output = jnp.where(hit, operand[src][at], output)
    return output
