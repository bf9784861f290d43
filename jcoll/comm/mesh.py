"""Mesh axes: names to sizes, and the calling conventions that all ops share."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jcoll import _compat, errors
from jcoll.algorithms import kernels, registry
from jcoll.algorithms.hierarchical import HIERARCHICAL_OPS
from jcoll.algorithms.registry import RESERVED
from jcoll.comm.group import Groups, make_groups
from jcoll.config import config

AxisName = Hashable | Sequence[Hashable]

_JCOLL_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# contextlib: what jax decorates by it (jax.checkpoint) has frames of it between jax's own.
_NOT_USERS = (_JCOLL_DIR, _compat.JAX_DIR, contextlib.__file__, "<")


@dataclass(frozen=True)
class Call:
    """What every collective's call has: who takes part, how, by when, and where it was written.

    A static parameter of every primitive. `axes` are ordered as given: the rank is the index into
    them, the last axis varying fastest, as `jax.lax.axis_index(axes)` counts.
    """

    op: str
    axes: tuple[Hashable, ...]
    groups: Groups
    algorithm: str
    timeout_s: float
    call_site: str

    @property
    def where(self) -> str:
        return f"{self.op} over axis {self.axis_text}"

    @property
    def axis_text(self) -> str:
        return _axis_text(self.axes)

    @property
    def lax_args(self) -> dict[str, Any]:
        """Who takes part, as jax.lax's collectives take it."""
        return {"axis_name": self.axes, "axis_index_groups": self.groups.members}

    @property
    def num_ranks(self) -> int:
        return self.groups.num_ranks


def make_call(
    op: str,
    axis_name: AxisName,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
    need_uniform: bool = True,
    plan_op: str = "",
) -> Call:
    """Checks and gathers the arguments that all ops share. Raises errors of the four-part form.

    `plan_op`: the op whose algorithms serve, if it is not `op` itself.
    """
    axes = _axes(op, axis_name)
    where = f"{op} over axis {_axis_text(axes)}"
    size = 1
    for axis in axes:
        size *= _axis_size(op, axis)
    groups = make_groups(where, size, axis_index_groups, need_uniform=need_uniform)
    refuse_traced(where, algorithm=algorithm, timeout_s=timeout_s)
    _check_algorithm(where, plan_op or op, algorithm, groups)
    if timeout_s is not None and not _is_duration(timeout_s):
        problem = f"timeout_s={timeout_s!r} is not a positive number of seconds."
        raise ValueError(errors.text(where, problem, "Pass a static positive number, or None."))
    return Call(op, axes, groups, algorithm, float(timeout_s or 0.0), user_call_site())


def _check_algorithm(where: str, op: str, name: Any, groups: Groups) -> None:
    if not isinstance(name, str):
        problem = f"algorithm={name!r} is not a name."
        names = [*RESERVED, *registry.names(op), *kernels.only_on_cuda(op)]
        raise TypeError(errors.text(where, problem, f"Pass a str, one of {', '.join(names)}."))
    if name == "hierarchical" and op in HIERARCHICAL_OPS and name not in registry.names(op):
        return  # Not a plan: whether the ranks are on several hosts is known when it is lowered.
    if name not in RESERVED and name not in kernels.only_on_cuda(op):
        for size in set(groups.sizes):
            registry.get(op, name, size, where=where)


def serves(op: str, name: str, groups: Groups) -> bool:
    """Whether `op` has the algorithm, for all of the groups' sizes."""
    if name in RESERVED or name in kernels.only_on_cuda(op):
        return True
    if name == "hierarchical" and op in HIERARCHICAL_OPS:
        return True
    return all(name in registry.supporting(op, size) for size in groups.sizes)


def configured_algorithm(op: str, groups: Groups) -> str:
    """What JCOLL_ALGORITHM wants, "auto" if that is nothing or does not serve this op."""
    name = config.algorithm
    if name in RESERVED:
        return name
    known = [*RESERVED, *registry.names(), *kernels.ONLY_ON_CUDA]
    if name not in known:
        problem = f"JCOLL_ALGORITHM={name!r} in the environment is not an algorithm."
        fix = f"Use one of {', '.join(known)}, or unset it."
        raise ValueError(errors.text("config", problem, fix))
    if name in kernels.only_on_cuda(op):  # Whether the platform has it, `automatic` asks.
        return name
    served = all(name in registry.supporting(op, size) for size in groups.sizes)
    return name if served else "auto"


def _is_duration(x: Any) -> bool:
    seconds = real_number(x)
    return seconds is not None and 0 < seconds < math.inf


def _axis_text(axes: tuple[Hashable, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def _axes(op: str, axis_name: AxisName) -> tuple[Hashable, ...]:
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    for axis in axes:
        _check_axis_name(op, axis_name, axis)
    if len(set(axes)) != len(axes):
        problem = f"axis_name={axis_name!r} names an axis twice."
        raise ValueError(errors.text(op, problem, "Name each axis once."))
    return axes


def _check_axis_name(op: str, axis_name: AxisName, axis: Any) -> None:
    refuse_traced(op, axis_name=axis)
    if isinstance(axis, int):
        problem = f"axis_name={axis_name!r} has a positional axis; mesh axis names are needed."
        raise TypeError(errors.text(op, problem, "Reduce positional axes with jax.numpy."))
    try:
        hash(axis)
    except TypeError:
        problem = f"axis_name={axis_name!r} has a {type(axis).__name__}, which names no axis."
        fix = "Pass the name of a mesh axis, or a tuple of names."
        raise TypeError(errors.text(op, problem, fix)) from None


def _axis_size(op: str, axis: Hashable) -> int:
    if _compat.axis_exists(axis):
        return _compat.axis_size(axis)
    bound = [a for a in _compat.bound_axes() if isinstance(a, str)]
    if axis in _compat.mesh_axes_not_manual():
        problem = f"mesh axis {axis!r} is not manual here (manual: {bound or 'none'})."
        fix = f"Call it inside jax.shard_map, with {axis!r} among its axis_names."
    else:
        problem = f"axis {axis!r} is not bound here (bound: {bound or 'none'})."
        fix = "Call it inside jax.shard_map over a mesh that has this axis, or jax.vmap with it."
    raise errors.AxisError(errors.text(op, problem, fix))


def refuse_traced(where: str, **arguments: Any) -> None:
    """TypeError with the fix if an argument that a program is compiled for is traced."""
    for name, value in arguments.items():
        if isinstance(value, _compat.Tracer):
            problem = f"{name} is a traced value; it must be known when the program is compiled."
            fix = "Pass a Python value, e.g. a static argument of jax.jit (static_argnames)."
            raise TypeError(errors.text(where, problem, fix))


def static_bool(where: str, name: str, value: Any) -> bool:
    """`value` as a bool; TypeError with the fix if it is traced or neither a bool nor 0 or 1."""
    refuse_traced(where, **{name: value})
    try:
        if value in (False, True):
            return bool(value)
    except ValueError:  # An array of several.
        pass
    problem = f"{name}={value!r} is not a bool."
    raise TypeError(errors.text(where, problem, "Pass True or False."))


def static_int(where: str, name: str, value: Any) -> int:
    """`value` as an int; TypeError with the fix if it is traced or not an integer."""
    refuse_traced(where, **{name: value})
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        problem = f"{name}={value!r} is not an integer."
        raise TypeError(errors.text(where, problem, "Pass a Python int.")) from None


def real_number(value: Any) -> float | None:
    """`value` as a float; None unless it is one real number, of Python, numpy or jax, and known."""
    no_number = bool | str | bytes | complex | _compat.Tracer
    if isinstance(value, no_number) or getattr(value, "shape", ()):
        return None
    # Not bools, complex numbers, durations, text, or objects.
    if getattr(getattr(value, "dtype", None), "kind", "f") in "bcmMSUO":
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def canonical_dim(where: str, name: str, value: Any, ndim: int) -> int:
    """A dimension number, negative ones counted from the end; ValueError if out of range."""
    dim = static_int(where, name, value)
    if -ndim <= dim < ndim:
        return dim % ndim
    problem = f"{name}={dim} is out of range for an array of {ndim} dimensions."
    fix = f"Use {-ndim} to {ndim - 1}." if ndim else "The array needs at least one dimension."
    raise ValueError(errors.text(where, problem, fix))


def check_root(where: str, root: Any, groups: Groups) -> int:
    """A root rank as an int; ValueError if a group has no such rank."""
    rank = static_int(where, "root", root)
    smallest = min(groups.sizes)
    if 0 <= rank < smallest:
        return rank
    problem = f"root={rank} is not a rank of the group of {smallest}."
    raise ValueError(errors.text(where, problem, f"Use 0 to {smallest - 1}."))


def site_text(file: str, line: int) -> str:
    """folder/file.py:line: enough to find the file, and no machine's path in a program."""
    return f"{os.sep.join(file.split(os.sep)[-2:])}:{line}"


def signature(aval: Any) -> str:
    """An array type for people: "float32[8,128]"."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def user_call_site() -> str:
    """folder/file.py:line of the nearest frame outside jcoll and jax."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_USERS):
            return site_text(name, frame.f_lineno)
        frame = frame.f_back
    return ""
