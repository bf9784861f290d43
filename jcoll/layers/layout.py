"""Which part of a parameter each rank of the data axis holds: the layout of sharded state.

A leaf is split along one of its dimensions, so that it keeps its rank and the global array is the
leaf itself with a PartitionSpec: jit, jax.device_put and checkpoints take it as any other array,
and a leaf that is split over tensor ranks along another dimension is so still.

The dimension is the first that the ranks divide: blocks of dimension 0 are contiguous, so that a
gather needs no copy. If none divides, the largest is padded with zeros, at most n - 1 rows; zeros
get zero gradients and stay zeros under optimizers that work element by element. What has no
dimension to split (scalars, empty arrays, a bias whose one dimension is split over tensor ranks)
every rank holds whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from jcoll import errors
from jcoll.comm.mesh import static_bool, static_int

_WHERE = "layers.zero.layouts"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one leaf is split over `num_ranks`. A leaf of pytrees, static."""

    shape: tuple[int, ...]
    """The whole leaf's, without padding."""

    dtype: Any

    dim: int | None
    """The split dimension, counted from the end (-1: the last), so that it is right for one layer
    of a stack, too; None: every rank has the whole leaf."""

    num_ranks: int

    spec: PartitionSpec
    """How the leaf is split over other mesh axes."""

    @property
    def size(self) -> int:
        """That of the split dimension, without padding."""
        assert self.dim is not None
        return self.shape[self.dim]

    @property
    def block_size(self) -> int:
        """One rank's part of the split dimension."""
        return -(-self.size // self.num_ranks)

    @property
    def padding(self) -> int:
        return 0 if self.dim is None else self.block_size * self.num_ranks - self.size

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The global array's."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] += self.padding
        return tuple(shape)

    def local_shape(self, ndim: int, *, is_shard: bool) -> tuple[int | None, ...]:
        """What an array of `ndim` dimensions is to have inside jax.shard_map: one rank's shard, or
        the whole leaf; None for a size that depends on other mesh axes.

        Fewer dimensions than the leaf's are those of one layer of a stack.
        """
        sizes: list[int | None] = list(self.shape)
        for d, axes in enumerate(self.spec):
            sizes[d] = sizes[d] if axes is None else None
        if self.dim is not None and is_shard:
            sizes[self.dim] = self.block_size
        kept = max(ndim, 0 if self.dim is None else -self.dim)
        return tuple(sizes[max(0, len(sizes) - kept) :])

    def full_spec(self, axis_name: Any) -> PartitionSpec:
        """`spec` with the split over `axis_name` added."""
        if self.dim is None:
            return self.spec
        parts = list(self.spec) + [None] * (len(self.shape) - len(self.spec))
        parts[self.dim] = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        return PartitionSpec(*parts)


def layouts(
    params: Any, num_ranks: int, *, specs: Any = None, keep_dims: int = 0, split: bool = True
) -> Any:
    """A pytree like `params` of Layouts over `num_ranks` ranks.

    Args:
      params: a pytree of arrays or jax.ShapeDtypeStructs: whole, global parameters.
      num_ranks: the size of the axis, or the product of the axes, that they will be split over.
      specs: how they are split over other axes (tensor, expert): a pytree of PartitionSpecs, like
        `params` or a prefix of it. Their dimensions are left alone.
      keep_dims: leading dimensions that are never split: 1 for the parameters of a stack of layers,
        whose first dimension `jax.lax.scan` takes off.
      split: False: every rank holds all leaves whole (the parameters of ZeRO-1 and 2).
    """
    n = static_int(_WHERE, "num_ranks", num_ranks)
    if n < 1:
        problem = f"num_ranks={n} is too small; at least 1 is needed."
        raise ValueError(errors.text(_WHERE, problem, "Pass mesh.shape[axis_name]."))
    keep = static_int(_WHERE, "keep_dims", keep_dims)
    if keep < 0:
        problem = f"keep_dims={keep} is too small; at least 0 is needed."
        raise ValueError(errors.text(_WHERE, problem, "Pass 1 for a stack of layers."))
    split = static_bool(_WHERE, "split", split)
    spec_leaves = leaf_specs(_WHERE, params, specs)
    entries = tree_leaves_with_path(params)
    found = []
    for (path, leaf), spec in zip(entries, spec_leaves, strict=True):
        shape = jnp.shape(leaf)
        _check_ndim(f"params{keystr(path)}", shape, keep, spec)
        dim = _split_dim(shape, n, keep, spec) if split and n > 1 else None
        found.append(Layout(shape, jnp.result_type(leaf), dim, n, spec))
    return jax.tree.unflatten(jax.tree.structure(params), found)


def layouts_of_state(state: Any, params_layout: Any) -> Any:
    """Layouts of an optimizer's state: what is shaped like the parameters is split like them.

    `state`: arrays or shapes as `tx.init` gives them for the parameters of `params_layout`
    (`jax.eval_shape(tx.init, zero.shapes(params_layout))`). Each part of it with the tree structure
    of the parameters (Adam's mu, nu) is taken leaf by leaf; all else is whole on every rank. Right
    for optimizers that work element by element, and not for those with factored moments.
    """
    wanted = jax.tree.structure(params_layout)
    num_ranks = max((x.num_ranks for x in jax.tree.leaves(params_layout)), default=1)

    def whole(leaf: Any) -> Layout:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        return Layout(shape, dtype, None, num_ranks, PartitionSpec())

    def like(leaf: Any, layout: Layout) -> Layout:
        if jnp.shape(leaf) != layout.padded_shape:
            return whole(leaf)
        return dataclasses.replace(layout, dtype=jnp.result_type(leaf))

    def part(node: Any) -> Any:
        if jax.tree.structure(node) == wanted:
            return jax.tree.map(like, node, params_layout)
        return whole(node)

    return jax.tree.map(part, state, is_leaf=lambda node: jax.tree.structure(node) == wanted)


def specs(layout: Any, axis_name: Any) -> Any:
    """The PartitionSpecs of the sharded state, for jax.shard_map's in_specs and out_specs."""
    return jax.tree.map(lambda x: x.full_spec(axis_name), layout)


def shardings(layout: Any, axis_name: Any, mesh: Mesh) -> Any:
    """The same as NamedShardings, for jit and jax.device_put."""
    check_mesh("zero.shardings", layout, axis_name, mesh)
    return jax.tree.map(lambda x: NamedSharding(mesh, x.full_spec(axis_name)), layout)


def check_mesh(where: str, layout: Any, axis_name: Any, mesh: Mesh) -> None:
    """ValueError unless the leaves are split over as many ranks as the mesh axis has."""
    axes = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        problem = f"the mesh has no axis {missing[0]!r}; it has {dict(mesh.shape)}."
        raise ValueError(errors.text(where, problem, "Name axes of the mesh."))
    n = math.prod(mesh.shape[axis] for axis in axes)
    for path, leaf in tree_leaves_with_path(layout):
        if leaf.dim is not None and leaf.num_ranks != n:
            problem = (
                f"leaf {keystr(path)} has a layout for {leaf.num_ranks} ranks; axis {axis_name!r} "
                f"of the mesh has {n}."
            )
            raise ValueError(errors.text(where, problem, f"Make it by zero.layouts(params, {n})."))


def shapes(layout: Any) -> Any:
    """The global arrays as jax.ShapeDtypeStructs, with padding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.padded_shape, x.dtype), layout)


def pad(params: Any, layout: Any) -> Any:
    """Whole parameters -> global arrays that the axis divides. Outside jax.shard_map."""
    leaves, plan = _matched("zero.pad", params, layout, lambda part: part.shape)
    return jax.tree.unflatten(jax.tree.structure(layout), map(pad_leaf, leaves, plan))


def trim(state: Any, layout: Any) -> Any:
    """The inverse of `pad`."""
    leaves, plan = _matched("zero.trim", state, layout, lambda part: part.padded_shape)
    return jax.tree.unflatten(jax.tree.structure(layout), map(trim_leaf, leaves, plan))


def _matched(where: str, tree: Any, layout: Any, shape_of: Callable) -> tuple[list, list[Layout]]:
    """(leaves, their Layouts); ValueError unless they have the shapes that these say."""
    plan = flat_plan(where, tree, layout, "the tree")
    entries = tree_leaves_with_path(tree)
    for (path, leaf), part in zip(entries, plan, strict=True):
        if jnp.shape(leaf) != shape_of(part):
            problem = f"leaf {keystr(path)} has shape {jnp.shape(leaf)}, by its layout "
            problem += f"{shape_of(part)}."
            fix = "Make the layout of this tree: zero.layouts(params, num_ranks)."
            raise ValueError(errors.text(where, problem, fix))
    return [leaf for _, leaf in entries], plan


def flat_plan(where: str, tree: Any, layout: Any, name: str) -> list[Layout]:
    """The Layouts of the leaves of `tree`; an error unless `layout` is a tree of them like it."""
    plan, expected = jax.tree.flatten(layout)
    if jax.tree.structure(tree) != expected:
        problem = f"{name} is a tree {jax.tree.structure(tree)}, its layout {expected}."
        fix = "Make the layout of this tree: zero.layouts, or zero.layouts_of_state."
        raise ValueError(errors.text(where, problem, fix))
    for part in plan:
        if not isinstance(part, Layout):
            problem = f"the layout of {name} has a {type(part).__name__}; Layouts are needed."
            fix = "Make it by zero.layouts(params, num_ranks); it comes after the arrays."
            raise TypeError(errors.text(where, problem, fix))
    return plan


def place(params: Any, layout: Any, axis_name: Any, mesh: Mesh) -> Any:
    """Whole parameters, padded and put onto the devices: the sharded state to begin with.

    For parameters that one device can hold. Larger ones are made in place, by jit of `pad` of the
    initializer with out_shardings=zero.shardings(...).
    """
    return jax.device_put(pad(params, layout), shardings(layout, axis_name, mesh))


def pad_leaf(leaf: Any, layout: Layout) -> Any:
    """The leaf, or one layer's of a stack, with zeros at the end of the split dimension."""
    if not layout.padding:
        return leaf
    assert layout.dim is not None
    widths = [(0, 0)] * jnp.ndim(leaf)
    widths[layout.dim] = (0, layout.padding)
    return jnp.pad(leaf, widths)


def trim_leaf(leaf: Any, layout: Layout) -> Any:
    """The inverse of pad_leaf."""
    if not layout.padding:
        return leaf
    assert layout.dim is not None
    return jax.lax.slice_in_dim(leaf, 0, layout.size, axis=leaf.ndim + layout.dim)


def leaf_specs(where: str, tree: Any, specs: Any) -> list[PartitionSpec]:
    """A PartitionSpec for each leaf of `tree`; `specs` is a pytree of them, like it or a prefix."""

    def spread(spec: PartitionSpec | None, part: Any) -> Any:
        return jax.tree.map(lambda _: PartitionSpec() if spec is None else spec, part)

    try:
        full = jax.tree.map(spread, specs, tree, is_leaf=lambda x: x is None or _is_spec(x))
    except ValueError as error:
        problem = f"specs is no prefix of the tree that it describes: {error}."
        fix = "Pass a pytree of PartitionSpecs like the one that jax.shard_map takes."
        raise ValueError(errors.text(where, problem, fix)) from None
    found = jax.tree.leaves(full, is_leaf=_is_spec)
    for spec in found:
        if not _is_spec(spec):
            problem = f"specs has {spec!r}; a PartitionSpec, or None, is needed for each leaf."
            fix = f"Pass e.g. jax.sharding.PartitionSpec({spec!r})."
            raise TypeError(errors.text(where, problem, fix))
    return found


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _split_dim(shape: Sequence[int], n: int, keep: int, spec: PartitionSpec) -> int | None:
    taken = [part is not None for part in spec] + [False] * (len(shape) - len(spec))
    free = [d for d in range(keep, len(shape)) if not taken[d]]
    if 0 in shape or not free:
        return None
    dim = next((d for d in free if shape[d] % n == 0), None)
    if dim is None:
        dim = max(free, key=lambda d: shape[d])
    return dim - len(shape)


def _check_ndim(name: str, shape: Sequence[int], keep: int, spec: PartitionSpec) -> None:
    if len(spec) > len(shape):
        problem = f"{name} has {len(shape)} dimensions, its spec {spec} is for {len(spec)}."
        raise ValueError(errors.text(_WHERE, problem, "Give specs of the whole parameters."))
    if len(shape) < keep:
        problem = f"{name} has {len(shape)} dimensions, fewer than keep_dims={keep}."
        fix = "Plan the stacked layers and the rest of the parameters by a call each."
        raise ValueError(errors.text(_WHERE, problem, fix))
