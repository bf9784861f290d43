"""Running a per-rank function on all ranks of a mesh, for the tests of the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(num_ranks: int) -> Mesh:
    """A 1-D mesh over the first devices, axis "x"."""
    return Mesh(np.array(jax.devices()[:num_ranks]), ("x",))


def spmd(f: Callable, mesh: Mesh, *, check_vma: bool = True, jit: bool = True) -> Callable:
    """f of one rank's arrays -> a function of stacked arrays [ranks..., ...], one dim per axis.

    The result has the same leading dimensions.
    """
    axes = mesh.axis_names
    lead = len(axes)

    def per_rank(*xs: Any) -> Any:
        xs = jax.tree.map(lambda x: x.reshape(x.shape[lead:]), xs)
        ys = f(*xs)
        ys = jax.tree.map(lambda y: vary(y, axes) if check_vma else y, ys)
        return jax.tree.map(lambda y: y.reshape((1,) * lead + y.shape), ys)

    mapped = jax.shard_map(
        per_rank, mesh=mesh, in_specs=P(*axes), out_specs=P(*axes), check_vma=check_vma
    )
    return jax.jit(mapped) if jit else mapped


def vary(x: Any, axes: tuple[str, ...]) -> Any:
    """x typed as varying over all axes, so that out_specs may split it."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def put(mesh: Mesh, x: Any) -> Any:
    """x, placed with its leading dimensions over the mesh's axes."""
    return jax.device_put(x, NamedSharding(mesh, P(*mesh.axis_names)))


def kinds(tree: Any) -> Any:
    """Shapes, dtypes, types and values; as an array, what is one inside shard_map."""

    def kind(y: Any) -> Any:
        traced = isinstance(y, jax.Array)
        varying = jax.typeof(y).mat.varying if traced else None
        return str(y.dtype) if traced else (type(y).__name__, y), np.shape(y), varying

    return jax.tree.map(kind, tree, is_leaf=lambda y: not isinstance(y, list))


def seen_inside(f: Callable, x: Any) -> Any:
    """kinds of what f gives inside shard_map, over a mesh of 4."""
    seen = []

    def g(v: Any) -> Any:
        seen.append(kinds(f(v)))
        return v

    jax.eval_shape(spmd(g, mesh_of(4)), x)
    return seen[0]
