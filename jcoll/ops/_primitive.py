"""From the meaning of a collective (a CollectiveSpec) to a JAX primitive with all its rules.

To add an op:
 1. write `ops/<op>.py`: the public function, a CollectiveSpec, its derivative, `define(SPEC)`;
 2. export it in `jcoll/__init__.py`;
 3. export it in `ops/__init__.py` too, which registers it;
 4. add a Case to `tests/ops/cases.py`, from which its tests are generated, and an Entry to
    `bench/catalog.py`.
Lowering, batching and typing follow from the spec.

Canonical form. A primitive sees an array of one rank either whole or as *blocks*: a leading
dimension of num_ranks. The public functions bring `axis`, `tiled` and the like into this form with
reshapes and transposes, so that the rules below need no case distinctions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat, errors
from jcoll.comm.group import Groups
from jcoll.comm.mesh import Call, serves
from jcoll.ops import _lowering
from jcoll.ops._motion import Motion

SPECS: dict[str, CollectiveSpec] = {}
"""All collectives by name, in the order of their files' import."""


@dataclass(frozen=True)
class CollectiveSpec:
    """What a collective means. Functions get the static parameters of the primitive as keywords."""

    name: str

    stacked: Callable[..., Sequence[Any]]
    """stacked(xp, *arrays, **static) -> arrays: the reference, on all ranks of one group at once.

    Inputs and outputs have a leading dimension of ranks; `xp` is numpy (the oracle of the tests)
    or jax.numpy (the batching rule where the collective's own axis is vmapped).
    """

    shapes: Callable[..., Sequence[tuple[tuple[int, ...], Any]]]
    """shapes(avals, call, **static) -> (shape, dtype) of each output."""

    motion: Callable[..., Motion]
    """motion(avals, call, **static) -> where the data go: for jcoll's runtimes."""

    xla: Callable[..., Sequence[Any]]
    """xla(*arrays, call, **static) -> arrays: the same by jax.lax's collectives."""

    hierarchical: Callable[..., Sequence[Any]] | None = None
    """hierarchical(*arrays, call, levels, **static) -> arrays: the same for ranks on several hosts;
    None: only by xla. tuning.candidates has the names of the ops that have it."""

    composed: Callable[..., Sequence[Any]] | None = None
    """composed(run, *arrays, call, **static) -> arrays: the same by other collectives, run(name,
    *arrays, **static) -> arrays: for a runtime that has no kernel for it."""

    blocked_in: bool = False
    blocked_out: bool = False
    """Whether the first array in (out) has the leading dimension of blocks."""

    replicated: bool = False
    """Whether all ranks of a group get the same value."""

    invariant: bool = False
    """Whether its type says so: it does not vary over the axes (but where they are in groups)."""

    index_inputs: bool = False
    """Whether inputs after the first describe rows: counts, offsets; the runtime checks them."""

    mixed: Callable[..., tuple[Sequence[Any], int | None]] | None = None
    """Batching where only some of the axes are vmapped; see _batching."""

    @property
    def primitive(self) -> Any:
        return _PRIMITIVES[self.name]


_PRIMITIVES: dict[str, Any] = {}


def define(
    spec: CollectiveSpec,
    *,
    jvp: Callable | None,
    transpose: Callable | None,
    batch: Callable | None = None,
) -> Any:
    """Registers the primitive of `spec` with JAX and returns it.

    jvp(primals, tangents, **params), transpose(cts, *args, **params) as JAX defines them; None for
    `jvp` means linear in all inputs. `transpose` is not called for a zero cotangent. `batch`
    overrides the rule for an unrelated mapped axis.
    """
    primitive = _compat.Primitive(f"jcoll_{spec.name}")
    primitive.multiple_results = True
    _PRIMITIVES[spec.name] = primitive
    SPECS[spec.name] = spec
    primitive.def_impl(partial(_impl, spec))
    primitive.def_effectful_abstract_eval(partial(_abstract_eval, spec))
    _compat.primitive_jvps[primitive] = jvp or partial(_linear_jvp, primitive)
    if transpose is not None:
        _compat.primitive_transposes[primitive] = partial(_transpose, transpose)
    _compat.axis_batchers[primitive] = partial(_batch, spec, batch or _batch_unrelated)
    _lowering.register(spec, primitive)
    return primitive


def bind(spec: CollectiveSpec, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """Applies the primitive; arrays are first made to vary over the call's axes."""
    if is_key(arrays[0]):
        return _bind_keys(spec, *arrays, call=call, **static)
    if not call.axes and not spec.index_inputs:  # Counts must be checked, so they are bound.
        return [y[0] for y in spec.stacked(jnp, *(x[None] for x in arrays), **static)]
    axes = set(call.axes).union(*(_compat.varying_axes(jax.typeof(x)) for x in arrays))
    # Sorted: a set's order differs between processes, and must not between their programs.
    arrays = tuple(_compat.make_varying(x, sorted(axes, key=str)) for x in arrays)
    return spec.primitive.bind(*arrays, call=call_of(spec, call), **static)


def call_of(spec: CollectiveSpec, call: Call) -> Call:
    """A transpose is another op with its operator's call, but for an algorithm that it has not."""
    if call.op == spec.name:
        return call
    served = serves(spec.name, call.algorithm, call.groups)
    return replace(call, op=spec.name, algorithm=call.algorithm if served else "auto")


def as_array(call: Call, x: Any, name: str = "") -> Any:
    """x, the argument `name`, as a jax array; an error of the four-part form if it is none."""
    given = f"{name}: got" if name else "got"
    try:
        return jnp.asarray(x)
    except OverflowError:
        problem = f"{given} an integer that does not fit {jax.dtypes.canonicalize_dtype(int)}."
        fix = "Pass a smaller one, a float, or an array of a type that holds it."
        raise ValueError(errors.text(call.where, problem, fix)) from None
    except (TypeError, ValueError):
        kind = f"{type(x).__name__} of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
        problem = f"{given} {kind}, an array or a number is needed."
        raise TypeError(errors.text(call.where, problem, "Pass arrays one by one.")) from None


def is_key(x: Any) -> bool:
    """Whether x is an array of random keys."""
    return jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)


def _bind_keys(spec: CollectiveSpec, *arrays: Any, call: Call, **static: Any) -> list[Any]:
    """Random keys travel as the integers they are made of, one more trailing dimension."""
    impl = jax.random.key_impl(arrays[0])
    arrays = tuple(jax.random.key_data(x) if is_key(x) else x for x in arrays)
    first, *others = bind(spec, *arrays, call=call, **static)
    return [jax.random.wrap_key_data(first, impl=impl), *others]


def bind_rest(
    spec: CollectiveSpec, name: Any, *arrays: Any, call: Call, **static: Any
) -> list[Any]:
    """Applies the primitive over the call's axes other than `name`."""
    axes = tuple(axis for axis in call.axes if axis != name)
    size = math.prod(_compat.axis_size(axis) for axis in axes)
    return bind(spec, *arrays, call=replace(call, axes=axes, groups=Groups(size)), **static)


def rank_in_group(call: Call) -> Any:
    """This rank, a traced int32."""
    index = jax.lax.axis_index(call.axes)
    _, rank_of = call.groups.tables()
    return jnp.asarray(rank_of, index.dtype)[index] if rank_of else index


def keep_at_root(y: Any, call: Call, root: int) -> Any:
    """y on the root of the group, zeros on the other ranks."""
    # Explicitly, as `where` does not make an array of size 0 vary, and its transpose then fails.
    y = _compat.make_varying(y, call.axes)
    return jnp.where(rank_in_group(call) == root, y, jnp.zeros_like(y))


def stack_at_root(xp: Any, y: Any, num_ranks: int, root: int) -> Any:
    """The same for all ranks at once, [num_ranks, ...]: for references."""
    at_root = (xp.arange(num_ranks) == root).reshape(-1, *(1,) * y.ndim)
    return xp.where(at_root, y[None], xp.zeros_like(y)[None])


# Between dimensions of an array and blocks


def take_blocks(x: Any, dim: int, tiled: bool, call: Call, what: str) -> Any:
    """Splits `dim` into [num_ranks, ...]; `dim` itself goes, or (tiled) stays, divided."""
    size, num_ranks = x.shape[dim], call.num_ranks
    given = f"{what}={dim} has size {size}"
    if tiled:
        if size % num_ranks:
            problem = f"{given}, which {num_ranks} ranks do not divide."
            fix = f"Pad it to {-(-size // num_ranks) * num_ranks}"
            fix += ", or use jcoll.all_to_all_v." if what == "split_axis" else "."
            raise ValueError(errors.text(call.where, problem, fix))
        x = x.reshape(*x.shape[:dim], num_ranks, size // num_ranks, *x.shape[dim + 1 :])
    elif size != num_ranks:
        problem = f"{given}; without tiled=True it must be the number of ranks, {num_ranks}."
        fix = "Pass tiled=True to split a longer dimension, or reshape."
        raise ValueError(errors.text(call.where, problem, fix))
    return jnp.moveaxis(x, dim, 0)


def place_blocks(y: Any, dim: int, tiled: bool) -> Any:
    """The inverse: the blocks [num_ranks, ...] as a new dimension or (tiled) along an old one."""
    y = jnp.moveaxis(y, 0, dim)
    if not tiled:
        return y
    return y.reshape(*y.shape[:dim], y.shape[dim] * y.shape[dim + 1], *y.shape[dim + 2 :])


def split_axis(x: Any, name: Any, call: Call) -> Any:
    """[num_ranks, ...] -> [ranks on the other axes, ranks on `name`, ...]."""
    major, size, minor = _sizes_around(name, call)
    x = jnp.moveaxis(x.reshape(major, size, minor, *x.shape[1:]), 1, 2)
    return x.reshape(major * minor, size, *x.shape[3:])


def merge_axis(x: Any, name: Any, call: Call) -> Any:
    """The inverse of split_axis."""
    major, size, minor = _sizes_around(name, call)
    x = jnp.moveaxis(x.reshape(major, minor, size, *x.shape[2:]), 2, 1)
    return x.reshape(major * size * minor, *x.shape[3:])


def split_rank(rank: int, name: Any, call: Call) -> tuple[int, int]:
    """A rank as (its index on `name`, its rank on the other axes)."""
    _, size, minor = _sizes_around(name, call)
    return rank // minor % size, rank // (minor * size) * minor + rank % minor


def _sizes_around(name: Any, call: Call) -> tuple[int, int, int]:
    """Ranks on the axes before `name`, on `name`, and on the axes after it."""
    i = call.axes.index(name)
    major = math.prod(_compat.axis_size(axis) for axis in call.axes[:i])
    minor = math.prod(_compat.axis_size(axis) for axis in call.axes[i + 1 :])
    return major, call.num_ranks // (major * minor), minor


def _impl(spec: CollectiveSpec, *_: Any, call: Call, **__: Any) -> Any:
    problem = "called outside jax.shard_map: there are no ranks here."
    raise ValueError(errors.text(call.where, problem, "Call it inside jax.shard_map."))


def _abstract_eval(spec: CollectiveSpec, *avals: Any, call: Call, **static: Any) -> Any:
    varying = _compat.varying_axes(avals[0])
    for aval in avals[1:]:
        varying |= _compat.varying_axes(aval)
    if spec.invariant and call.groups.members is None:
        varying -= set(call.axes)
    outs = []
    for shape, dtype in spec.shapes(avals, call, **static):
        spec_dims = _out_partition(spec, avals[0], len(shape))
        outs.append(_compat.with_varying(avals[0], varying, shape, dtype, spec_dims))
    return outs, _compat.axis_effects(call.axes)


def _out_partition(spec: CollectiveSpec, aval: Any, ndim: int) -> Any:
    """The sharding over explicit axes of an output: the input's, blocks aside."""
    dims = list(aval.sharding.spec)
    dims = dims[1:] if spec.blocked_in else dims
    dims = [None, *dims] if spec.blocked_out else dims
    dims = (dims + [None] * ndim)[:ndim]
    return jax.sharding.PartitionSpec(*dims)


def _linear_jvp(primitive: Any, primals: Any, tangents: Any, **params: Any) -> Any:
    outs = primitive.bind(*primals, **params)
    if all(type(t) is _compat.Zero for t in tangents):
        return outs, [_compat.zero_tangent(o) for o in outs]
    tangents = [_compat.instantiate_zeros(t) for t in tangents]
    return outs, primitive.bind(*tangents, **params)


def _transpose(rule: Callable, cts: Any, *args: Any, **params: Any) -> Any:
    # Of all the ops only the first output has a derivative.
    if type(cts[0]) is not _compat.Zero:
        return rule(cts, *args, **params)
    return [_compat.Zero(x.aval) if _compat.is_undefined_primal(x) else None for x in args]


def reduction_jvp(spec: CollectiveSpec, nonlinear: Callable) -> Callable:
    """The JVP rule of an op with reduce ops: sum and mean are linear, for the others
    nonlinear(x, t, y, call=, op=, ...) is the tangent of y."""

    def jvp(primals: Any, tangents: Any, *, op: str, **params: Any) -> Any:
        (x,), (t,) = primals, tangents
        (y,) = bind(spec, x, op=op, **params)
        if type(t) is _compat.Zero:
            return [y], [_compat.zero_tangent(y)]
        if op in ("sum", "mean"):
            return [y], bind(spec, t, op=op, **params)
        return [y], [nonlinear(x, t, y, op=op, **params)]

    return jvp


# Batching


def _batch(
    spec: CollectiveSpec,
    unrelated: Callable,
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    call: Call,
    **static: Any,
) -> Any:
    if axis_data.name not in call.axes:
        if all(d is None for d in dims):
            outs = spec.primitive.bind(*args, call=call, **static)
            return outs, [None] * len(outs)
        return unrelated(spec, axis_data.size, args, dims, call=call, **static)
    stacked = [_compat.bdim_at_front(x, d, axis_data.size) for x, d in zip(args, dims, strict=True)]
    if len(call.axes) > 1:
        return _batch_mixed(spec, axis_data.name, stacked, call=call, **static)
    return _batch_own_axis(spec, stacked, call=call, **static)


def _batch_unrelated(
    spec: CollectiveSpec, size: int, args: Any, dims: Any, *, call: Call, **static: Any
) -> Any:
    """An unrelated mapped axis is one more dimension of the data, after that of the blocks."""
    del size
    (x,), (d,) = args, dims
    position = 1 if spec.blocked_in else 0
    x = jnp.moveaxis(x, d, position)
    outs = spec.primitive.bind(x, call=call, **static)
    return outs, [1 if spec.blocked_out else 0] * len(outs)


def batch_sequentially(
    spec: CollectiveSpec, size: int, args: Any, dims: Any, *, call: Call, **static: Any
) -> Any:
    """One collective per batch element; all ranks loop alike. Where there is no better way."""
    per_element = []
    for i in range(size):
        picked = [
            x if d is None else jax.lax.index_in_dim(x, i, d, keepdims=False)
            for x, d in zip(args, dims, strict=True)
        ]
        per_element.append(spec.primitive.bind(*picked, call=call, **static))
    outs = [jnp.stack(parts) for parts in zip(*per_element, strict=True)]
    return outs, [0] * len(outs)


def _batch_own_axis(spec: CollectiveSpec, stacked: Any, *, call: Call, **static: Any) -> Any:
    """The collective's own axis is vmapped: all ranks are here; the reference does it."""
    if call.groups.members is None:
        outs = spec.stacked(jnp, *stacked, **static)
        if spec.replicated:
            return [y[0] for y in outs], [None] * len(outs)
        return list(outs), [0] * len(outs)
    order = np.concatenate(call.groups.as_lists())
    parts = [
        spec.stacked(jnp, *(x[np.asarray(group)] for x in stacked), **static)
        for group in call.groups.as_lists()
    ]
    back = np.argsort(order)
    outs = [jnp.concatenate(ys)[back] for ys in zip(*parts, strict=True)]
    return outs, [0] * len(outs)


def _batch_mixed(
    spec: CollectiveSpec, name: Any, stacked: Any, *, call: Call, **static: Any
) -> Any:
    """Some axes are vmapped, others are of the mesh."""
    if spec.mixed is None or call.groups.members is not None:
        problem = f"axis {name!r} is vmapped and the other axes are not; that is not supported"
        problem += " with axis_index_groups." if spec.mixed else " for this op."
        fix = "Use one call per axis, or vmap (shard_map) over all of the axes."
        raise NotImplementedError(errors.text(call.where, problem, fix))
    return spec.mixed(name, *stacked, call=call, **static)
