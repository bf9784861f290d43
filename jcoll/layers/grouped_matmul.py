"""Rows in groups, each group times a matrix of its own: y[r] = x[r] @ w[g] for r in group g.

The groups stand one after another, of sizes known only at run time; rows after the last belong to
none and give zero. On GPU and TPU this is `jax.lax.ragged_dot`. On CPU XLA multiplies all rows by
all matrices and masks, num_groups times the work; here a loop goes over tiles of rows, as
MegaBlocks' (Gale et al. 2022) kernels do over blocks:

    for each group g, for each tile of TILE_ROWS rows of it:   y[tile] = x[tile] @ w[g]

A group's last tile is computed whole and written in part. The loop runs as often as there are
tiles of rows that exist, so a buffer that is mostly empty costs its memory but not its matmuls.

Derivative: dx = the same with dy and w[g]^T; dw[g] = x[g]^T @ dy[g], summed tile by tile.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat, errors

TILE_ROWS = 128
_WHERE = "grouped_matmul"


def grouped_matmul(x: Any, w: Any, group_sizes: Any) -> jax.Array:
    """Multiplies consecutive groups of rows by one matrix each.

    Args:
      x: [rows, in], rows in groups.
      w: [num_groups, in, out] of the same dtype.
      group_sizes: int32 [num_groups], whose sum is at most `rows`.

    Returns:
      [rows, out], of x's dtype; products are summed in float32 at least. Zero after the groups (on
      GPU and TPU: whatever `jax.lax.ragged_dot` leaves there).

    Derivative: reverse mode, in x and w; it ignores rows after the groups.

    Raises: ValueError for shapes or dtypes that do not fit.
    """
    x, w, group_sizes = jnp.asarray(x), jnp.asarray(w), jnp.asarray(group_sizes)
    _check(x, w, group_sizes)
    axes = set().union(*(_compat.varying_axes(jax.typeof(a)) for a in (x, w, group_sizes)))
    return _product(*(_compat.make_varying(a, sorted(axes, key=str)) for a in (x, w, group_sizes)))


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, w, sizes, cpu=tiled, default=_ragged_dot)


def _forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _product(x, w, sizes), (x, w, sizes)


def _backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    dx = _product(dy, jnp.swapaxes(w, 1, 2), sizes)
    dw = jax.lax.platform_dependent(x, dy, sizes, cpu=tiled_outer, default=_ragged_outer)
    return dx, dw, None


_product.defvjp(_forward, _backward)


def tiled(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """y[r] = x[r] @ w[group of r]."""
    zeros = _zeros((x.shape[0], w.shape[2]), x.dtype, x)
    if x.shape[0] == 0:
        return zeros
    next_tile, num_tiles = _tiles(sizes, x.shape[0])

    def step(t: Any, y: jax.Array) -> jax.Array:
        group, start, inside = next_tile(t)
        rows = jax.lax.dynamic_slice_in_dim(x, start, inside.shape[0])
        matrix = jax.lax.dynamic_index_in_dim(w, group, keepdims=False)
        product = jnp.dot(rows, matrix, preferred_element_type=_wide(x)).astype(x.dtype)
        there = jax.lax.dynamic_slice_in_dim(y, start, inside.shape[0])
        product = jnp.where(inside[:, None], product, there)
        return jax.lax.dynamic_update_slice_in_dim(y, product, start, 0)

    return jax.lax.fori_loop(0, num_tiles, step, zeros)


def tiled_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """dw[g] = x[g]^T @ dy[g]."""
    zeros = _zeros((sizes.shape[0], x.shape[1], dy.shape[1]), _wide(x), x)
    if x.shape[0] == 0:
        return zeros.astype(x.dtype)
    next_tile, num_tiles = _tiles(sizes, x.shape[0])

    def step(t: Any, dw: jax.Array) -> jax.Array:
        group, start, inside = next_tile(t)
        left, right = (jax.lax.dynamic_slice_in_dim(a, start, inside.shape[0]) for a in (x, dy))
        left = jnp.where(inside[:, None], left, jnp.zeros_like(left))
        right = jnp.where(inside[:, None], right, jnp.zeros_like(right))
        part = jnp.dot(left.T, right, preferred_element_type=_wide(x))
        total = part + jax.lax.dynamic_index_in_dim(dw, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw, total, group, 0)

    return jax.lax.fori_loop(0, num_tiles, step, zeros).astype(x.dtype)


def _tiles(sizes: jax.Array, num_rows: int) -> tuple[Any, jax.Array]:
    """next_tile(t) -> the tile's group, first row, and which of its rows are the group's; and the
    number of tiles."""
    tile = min(TILE_ROWS, num_rows)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    sizes = sizes.astype(jnp.int32)
    tiles = (sizes + (tile - 1)) // tile
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)

    def next_tile(t: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        group = jnp.sum(tile_ends <= t, dtype=jnp.int32)  # Groups without tiles are passed over.
        first = ends[group] - sizes[group] + (t - tile_ends[group] + tiles[group]) * tile
        start = jnp.minimum(first, num_rows - tile)  # As dynamic_slice would.
        row = start + jnp.arange(tile, dtype=jnp.int32)
        return group, start, (row >= first) & (row < ends[group])

    return next_tile, tile_ends[-1]


def _ragged_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=_wide(x))
    return y.astype(x.dtype)


def _ragged_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    dw = jax.lax.ragged_dot_general(x, dy, sizes, dims, preferred_element_type=_wide(x))
    return dw.astype(x.dtype)


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that vary over mesh axes as `like` does."""
    axes = sorted(_compat.varying_axes(jax.typeof(like)), key=str)
    return _compat.make_varying(jnp.zeros(shape, dtype), axes)


def _check(x: jax.Array, w: jax.Array, sizes: jax.Array) -> None:
    fits = x.ndim == 2 and w.ndim == 3 and x.shape[1] == w.shape[1] and x.dtype == w.dtype
    if not fits or not jnp.issubdtype(x.dtype, jnp.floating):
        problem = (
            f"x is {x.dtype}{list(x.shape)} and w {w.dtype}{list(w.shape)}; [rows, in] and "
            "[groups, in, out] of one floating-point type are needed."
        )
        raise ValueError(errors.text(_WHERE, problem, "Reshape or cast one of them."))
    if sizes.shape != w.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        problem = f"group_sizes is {sizes.dtype}{list(sizes.shape)} for {w.shape[0]} matrices."
        raise ValueError(errors.text(_WHERE, problem, "Pass one integer per matrix."))
