"""All knowledge of JAX versions, and all imports of its private modules. jax 0.10.2 .. 0.12."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import source_info_util as _source_info
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import parallel as _parallel
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.sharding_impls import SPMDAxisContext as _SPMDAxisContext

Primitive = _core.Primitive
Tracer = _core.Tracer
Zero = _ad.Zero
zero_tangent = _ad.p2tz
instantiate_zeros = _ad.instantiate_zeros
is_undefined_primal = _ad.is_undefined_primal
primitive_jvps = _ad.primitive_jvps
primitive_transposes = _ad.primitive_transposes
axis_batchers = _batching.fancy_primitive_batchers
register_lowering = _mlir.register_lowering
lower_fun = _mlir.lower_fun
bdim_at_front = _batching.bdim_at_front

COMMAND_BUFFER_COMPATIBLE = _xla_client.CustomCallTargetTraits.COMMAND_BUFFER_COMPATIBLE

JAX_DIR = os.path.dirname(jax.__file__) + os.sep

LAX_PRIMITIVES = {
    "psum": _parallel.psum_p,
    "psum_invariant": _parallel.psum_invariant_p,
    "pmax": _parallel.pmax_p,
    "pmin": _parallel.pmin_p,
    "all_gather": _parallel.all_gather_p,
    "all_gather_invariant": _parallel.all_gather_invariant_p,
    "reduce_scatter": _parallel.reduce_scatter_p,
    "all_to_all": _parallel.all_to_all_p,
    "ppermute": _parallel.ppermute_p,
    "ragged_all_to_all": _parallel.ragged_all_to_all_p,
    "pbroadcast": _parallel.pbroadcast_p,
}
"""The primitives of `jax.lax`'s collectives, which `jcoll.intercept` gives another lowering."""


INTERCEPTING = jax.make_user_context(False)
"""Whether lax's collectives are lowered through jcoll here. A thread's own value over a global one;
part of the key of every cache of traced, lowered and compiled functions."""


def axis_exists(name: Hashable) -> bool:
    """True if `name` is bound by an enclosing shard_map or vmap."""
    return _core.get_axis_env().axis_exists(name)


def axis_size(name: Hashable) -> int:
    return _core.get_axis_env().axis_size(name)


def bound_axes() -> list[Hashable]:
    return list(_core.get_axis_env().axis_sizes)


def mesh_axes_not_manual() -> tuple[Hashable, ...]:
    """Axes of the current mesh that are not manual here."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return ()
    return tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)


def axis_effects(axes: Sequence[Hashable]) -> set[Any]:
    return {_core.NamedAxisEffect(axis) for axis in axes}


def check_vma() -> bool:
    """True where types track the mesh axes that a value varies over."""
    return _config._check_vma.value


def varying_axes(aval: Any) -> frozenset:
    """The mesh axes that an array type, or a result of jax.eval_shape, varies over."""
    if isinstance(aval, jax.ShapeDtypeStruct):
        return aval.manual_axis_type.varying if aval.manual_axis_type else frozenset()
    return aval.mat.varying


def with_varying(aval: Any, varying: frozenset, shape: Any, dtype: Any, spec: Any) -> Any:
    """An array type like `aval`, which varies over `varying`, with `spec` on explicit axes."""
    return aval.update(
        shape=shape,
        dtype=dtype,
        weak_type=False,
        sharding=aval.sharding.update(spec=spec),
        manual_axis_type=aval.mat.update(varying=varying),
    )


def result_aval(like: Any, shape: Sequence[int], dtype: Any) -> Any:
    """A new array type that varies as `like` does; not sharded over explicit axes."""
    spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
    return with_varying(like, like.mat.varying, tuple(shape), dtype, spec)


def make_varying(x: Any, axes: Sequence[Hashable]) -> Any:
    """x, typed as varying over `axes` too. The identity where types do not track this."""
    if not check_vma():
        return x
    manual = jax.sharding.get_abstract_mesh().manual_axes  # Not: names that vmap binds.
    missing = tuple(a for a in axes if a in manual and a not in varying_axes(jax.typeof(x)))
    return _core.pvary(x, missing) if missing else x


@contextlib.contextmanager
def untyped_axes() -> Iterator[None]:
    """A context for code below the typed level, where types do not track varying axes.

    lax's collectives are lax's own in it: jcoll's `algorithm="xla"` is written in them.
    """
    with _config._check_vma(False), INTERCEPTING(False):
        yield


def with_partition_id(ctx: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """(context, operands) with XLA's partition id, a uint32 scalar, as the first operand.

    The id is the device's index in the mesh, which `axis_index` is computed from; taking it as it
    is saves a kernel per call.
    """
    aval = _core.ShapedArray((), np.dtype(np.uint32))
    return ctx.replace(avals_in=[aval, *ctx.avals_in]), [_hlo.partition_id(), *operands]


def mesh_of_lowering(ctx: Any) -> tuple[Any, frozenset] | None:
    """(mesh, its manual axes) of a lowering rule's context; None outside shard_map."""
    axis_context = ctx.module_context.axis_context
    if not isinstance(axis_context, _SPMDAxisContext):
        return None
    return axis_context.mesh, frozenset(axis_context.manual_axes)


def replace_lowering(primitive: Any, wrap: Callable[[Callable], Callable]) -> None:
    """Replaces the lowering rules of a primitive, for all platforms, by wrap(what they did)."""
    tables = _mlir._platform_specific_lowerings
    rules = {p: table[primitive].rule for p, table in tables.items() if primitive in table}
    default = _mlir._lowerings.get(primitive)

    def original(ctx: Any, *args: Any, **params: Any) -> Any:
        ctx = ctx.replace(avals_out=list(ctx.avals_out))  # A tuple here fails on several platforms.
        return _mlir.lower_per_platform(
            ctx, str(primitive), rules, default and default.rule, frozenset(), *args, **params
        )

    _mlir.register_lowering(primitive, wrap(original))
    for platform in rules:
        del tables[platform][primitive]


@contextlib.contextmanager
def each_lowered(primitives: Iterable[Any]) -> Iterator[None]:
    """A context in which each equation of these primitives is lowered by itself.

    Else equal equations of a module share the lowering of the first, and its rule cannot tell where
    they were written. Affects all threads; without harm, as a shared lowering is only a saving.
    """
    primitives = tuple(primitives)
    lower_each(primitives, 1)
    try:
        yield
    finally:
        lower_each(primitives, -1)


def lower_each(primitives: Iterable[Any], count: int) -> None:
    """Adds to the number of users who want these primitives' equations lowered one by one."""
    with _lowered_each_lock:
        _lowered_each.update(dict.fromkeys(primitives, count))
        wanted = {primitive for primitive, users in _lowered_each.items() if users > 0}
        _mlir._uncacheable_primitives.difference_update(_lowered_each)
        _mlir._uncacheable_primitives.update(wanted)


_lowered_each: Counter[Any] = Counter()
_lowered_each_lock = threading.Lock()


def checkpoint_names(params: dict[str, Any]) -> set[str]:
    """The names that `jax.ad_checkpoint.checkpoint_name` gives in the function of a jax.custom_vjp.

    `params`: what a policy of jax.checkpoint is told of its call, which is one operation to it.
    """
    if "call_jaxpr" not in params:
        return set()
    equations = params["call_jaxpr"].jaxpr.eqns
    return {eqn.params["name"] for eqn in equations if eqn.primitive.name == "name"}


def distributed_client() -> Any:
    """The client of jax.distributed's key-value store. RuntimeError if there is none."""
    client = _distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized.")
    return client


def distributed_process() -> int | None:
    """This process's number in jax.distributed's job; None before it is initialized."""
    state = _distributed.global_state
    return None if state.client is None else state.process_id


def nvlink_domain(device: Any) -> Any:
    """What the GPUs share that reach each other's memory over NVLink; else the device's process.

    XLA tells it by the machine, or where NVLink joins several, by its fabric.
    """
    for name in ("partition_index", "slice_index"):  # The first is the newer name.
        if (domain := getattr(device, name, None)) is not None:
            return domain
    return device.process_index


def module_and_site(ctx: Any) -> tuple[str, int]:
    """The name of the module that is being lowered, and a number for one more call in it."""
    module_context = ctx.module_context
    name = _mlir.ir.StringAttr(module_context.module.operation.attributes["sym_name"]).value
    return name, module_context.new_channel()


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule is called for; usually one."""
    return _mlir._platforms_for_eqn(ctx)


def lowering_site(ctx: Any) -> tuple[str, int] | None:
    """(file, line) of the user's frame that wrote the equation which is being lowered."""
    frame = _source_info.user_frame(ctx.traceback)
    return None if frame is None else (frame.file_name, frame.start_line)


def is_staging() -> bool:
    """True while a function is traced to be lowered later, by jit, scan and the like."""
    trace = _core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, _partial_eval.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False
