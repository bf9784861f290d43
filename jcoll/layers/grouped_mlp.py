"""Rows in groups, each group through a two-layer network of its own:

    y[r] = activation(x[r] @ w_in[g]) @ w_out[g]      for row r of group g

The groups stand one after another, of sizes known only at run time; rows after the last belong to
none and give zero. On GPU and TPU the products are `jax.lax.ragged_dot`s. On CPU XLA multiplies all
rows of those by all matrices and masks, num_groups times the work; here a loop goes over tiles of
rows, as the kernels of MegaBlocks (Gale et al. 2022) do over blocks:

    for each group g, for each tile of its rows:
        y[tile] = activation(x[tile] @ w_in[g]) @ w_out[g]

A group's last tile is computed whole and written in part. The loop runs as often as there are tiles
of rows that exist, so a buffer that is mostly empty costs memory, and no products.

Derivative: the hidden rows are not kept but computed again, tile by tile, and

    dx[tile], dw_in[g] += .., dw_out[g] += ..    by the derivative of the network at that tile.

Of 7 products forward and back one is the repetition; the hidden rows of a whole buffer would be the
largest arrays of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat, errors

TILE_ROWS = (256, 64)
"""As many of the larger as a group has rows for, then of the smaller. Large tiles add to dw less
often, small ones compute fewer rows that are not there. 8 x 2048 rows in groups of 48 to 1000, 256
wide and 1024 inside, took 0.80 s of CPU time forth and back; tiles of 128 alone 0.86 s, of 256
alone 0.90 s, 512 and 128 0.83 s; twice as many rows in equal groups in one product 1.34 s."""

_WHERE = "grouped_mlp"

Activation = Callable[[jax.Array], jax.Array]


def grouped_mlp(
    x: Any, w_in: Any, w_out: Any, group_sizes: Any, *, activation: Activation = jax.nn.gelu
) -> jax.Array:
    """Applies one two-layer network per group of consecutive rows.

    Args:
      x: [rows, width], rows in groups.
      w_in: [num_groups, width, hidden], of x's dtype.
      w_out: [num_groups, hidden', out], of x's dtype.
      group_sizes: int32 [num_groups], whose sum is at most `rows`.
      activation: [any number of rows, hidden] -> [.., hidden'], row by row, of float32 (or x's
        dtype, if that is wider). hidden' = hidden for an elementwise one; SwiGLU, for example, has
        hidden = 2 hidden': lambda h: jax.nn.silu(h[:, :n]) * h[:, n:]. It closes over no tracers.

    Returns:
      [rows, out], of x's dtype; products are summed in float32 at least. Zero after the groups (on
      GPU and TPU: whatever `jax.lax.ragged_dot` leaves there).

    Derivative: reverse mode, in x, w_in and w_out; it ignores rows after the groups.

    Raises: ValueError for shapes or dtypes that do not fit.
    """
    arrays = x, w_in, w_out, _ = [jnp.asarray(a) for a in (x, w_in, w_out, group_sizes)]
    _check(*arrays)
    if x.shape[0] == 0:
        return jnp.zeros((0, w_out.shape[2]), x.dtype)
    axes = set().union(*(_compat.varying_axes(jax.typeof(a)) for a in arrays))
    return _mlp(activation, *(_compat.make_varying(a, sorted(axes, key=str)) for a in arrays))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(activation: Activation, *arrays: jax.Array) -> jax.Array:
    return _on_platform(partial(tiled, activation), partial(ragged, activation), *arrays)


def _forward(activation: Activation, *arrays: jax.Array) -> tuple[jax.Array, Any]:
    return _mlp(activation, *arrays), arrays


def _backward(activation: Activation, saved: Any, dy: jax.Array) -> tuple:
    fns = partial(tiled_vjp, activation), partial(ragged_vjp, activation)
    return *_on_platform(*fns, *saved, dy), None


_mlp.defvjp(_forward, _backward)


def _on_platform(cpu: Callable, other: Callable, *arrays: jax.Array) -> Any:
    """cpu(*arrays), or other(*arrays) elsewhere. Under jax.vmap one after the other: ragged_dot has
    no rule for operands of which only some are batched, and both functions are traced anyhow."""

    @jax.custom_batching.sequential_vmap
    def run(*arrays: jax.Array) -> Any:
        return jax.lax.platform_dependent(*arrays, cpu=cpu, default=other)

    return run(*arrays)


def network(activation: Activation, x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """The two layers of one group."""
    wide = _wide(x)
    hidden = _activated(activation, jnp.dot(x, w_in, preferred_element_type=wide), w_out)
    return jnp.dot(hidden.astype(x.dtype), w_out, preferred_element_type=wide).astype(x.dtype)


def tiled(
    activation: Activation, x: jax.Array, w_in: jax.Array, w_out: jax.Array, sizes: jax.Array
) -> jax.Array:
    """The loop over tiles. Results take the places of rows, where they are as wide: a large buffer
    of zeros costs more than it seems, a page fault for each 4 KiB."""
    in_place = w_out.shape[2] == x.shape[1]

    def step(tile: _Tile, y: jax.Array, weights: tuple) -> jax.Array:
        # Read once: XLA fuses a slice into each of its readers, and would copy all of y for them.
        old = jax.lax.optimization_barrier(tile.of(y))
        return tile.put(y, network(activation, old if in_place else tile.of(x), *weights), old)

    def group(g: Any, y: jax.Array) -> jax.Array:
        weights = tuple(jax.lax.dynamic_index_in_dim(w, g, keepdims=False) for w in (w_in, w_out))
        return _each_tile(sizes, g, x.shape[0], partial(step, weights=weights), y)

    y = _in_groups(x, sizes) if in_place else _zeros((x.shape[0], w_out.shape[2]), x.dtype, x)
    return jax.lax.fori_loop(0, sizes.shape[0], group, y)


def tiled_vjp(
    activation: Activation,
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    sizes: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dx, dw_in, dw_out) of `tiled`."""
    wide = _wide(x)

    def step(tile: _Tile, carry: tuple, weights: tuple) -> tuple:
        dx, *sums = carry
        _, pull = jax.vjp(partial(network, activation), tile.only(x), *weights)
        part, *parts = pull(tile.only(dy))
        sums = [total + p.astype(wide) for total, p in zip(sums, parts, strict=True)]
        return tile.put(dx, part, tile.of(dx)), *sums

    def group(g: Any, carry: tuple) -> tuple:
        dx, *dws = carry
        weights = tuple(jax.lax.dynamic_index_in_dim(w, g, keepdims=False) for w in (w_in, w_out))
        start = dx, *(_zeros(w.shape, wide, x) for w in weights)
        dx, *sums = _each_tile(sizes, g, x.shape[0], partial(step, weights=weights), start)
        sums = [s.astype(x.dtype) for s in sums]
        return dx, *(
            jax.lax.dynamic_update_index_in_dim(dw, s, g, 0)
            for dw, s in zip(dws, sums, strict=True)
        )

    start = tuple(_zeros(a.shape, x.dtype, x) for a in (x, w_in, w_out))
    return jax.lax.fori_loop(0, sizes.shape[0], group, start)


@dataclass(frozen=True)
class _Tile:
    """Rows [start, start + len(inside)) of a buffer, of which those `inside` are the group's."""

    start: jax.Array
    inside: jax.Array

    def of(self, rows: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(rows, self.start, self.inside.size)

    def only(self, rows: jax.Array) -> jax.Array:
        """The group's rows; zeros for the others."""
        return jnp.where(self.inside[:, None], self.of(rows), jnp.zeros((), rows.dtype))

    def put(self, rows: jax.Array, values: jax.Array, old: jax.Array) -> jax.Array:
        """`rows` with the group's rows replaced; `old` is what the tile has there."""
        values = jnp.where(self.inside[:, None], values, old)
        return jax.lax.dynamic_update_slice_in_dim(rows, values, self.start, 0)


def _each_tile(sizes: jax.Array, g: Any, num_rows: int, step: Callable, carry: Any) -> Any:
    """The carry after step(tile, carry) -> carry for all tiles of group g."""
    end = jnp.cumsum(sizes)[g]
    begin = end - sizes[g]
    for height in TILE_ROWS:
        height = min(height, num_rows)
        last = height == min(TILE_ROWS[-1], num_rows)
        count = (end - begin + (height - 1 if last else 0)) // height

        def body(t: Any, carry: Any, begin: Any = begin, height: int = height) -> Any:
            first = begin + t.astype(begin.dtype) * height
            start = jnp.minimum(first, num_rows - height)  # As dynamic_slice would.
            row = start + jnp.arange(height, dtype=start.dtype)
            return step(_Tile(start, (row >= first) & (row < end)), carry)

        carry = jax.lax.fori_loop(0, count, body, carry)
        begin = begin + count * height
    return carry


def ragged(
    activation: Activation, x: jax.Array, w_in: jax.Array, w_out: jax.Array, sizes: jax.Array
) -> jax.Array:
    """By jax.lax.ragged_dot."""
    wide = _wide(x)
    hidden = jax.lax.ragged_dot(x, w_in, sizes, preferred_element_type=wide)
    hidden = _activated(activation, hidden, w_out)
    y = jax.lax.ragged_dot(hidden.astype(x.dtype), w_out, sizes, preferred_element_type=wide)
    return y.astype(x.dtype)


def ragged_vjp(
    activation: Activation,
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    sizes: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dx, dw_in, dw_out) of `ragged`."""
    _, pull = jax.vjp(lambda *of: ragged(activation, of[0], of[1], of[2], sizes), x, w_in, w_out)
    return pull(dy)


def _activated(activation: Activation, hidden: jax.Array, w_out: jax.Array) -> jax.Array:
    """activation(hidden); ValueError unless w_out has a row for each column of it."""
    if not callable(activation):
        problem = f"activation={activation!r} is not a function."
        raise TypeError(errors.text(_WHERE, problem, "Pass e.g. jax.nn.gelu, or lambda h: h."))
    result = activation(hidden)
    needed = (hidden.shape[0], w_out.shape[-2])
    shape = getattr(result, "shape", None)
    if shape == needed:
        return result
    made = f"is a {type(result).__name__}" if shape is None else f"has shape {list(shape)}"
    problem = f"the activation of hidden rows {list(hidden.shape)} {made}; "
    problem += f"{list(needed)} is needed for w_out {list(w_out.shape)}."
    fix = "Give w_out as many rows a group as the activation leaves columns (w_in's, for most)."
    raise ValueError(errors.text(_WHERE, problem, fix))


def _wide(x: jax.Array) -> Any:
    return np.promote_types(x.dtype, jnp.float32)


def _in_groups(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """`rows`, and zeros after the groups."""
    inside = jnp.arange(rows.shape[0], dtype=sizes.dtype) < sizes.sum(dtype=sizes.dtype)
    return jnp.where(inside[:, None], rows, jnp.zeros((), rows.dtype))


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that vary over mesh axes as `like` does."""
    axes = sorted(_compat.varying_axes(jax.typeof(like)), key=str)
    return _compat.make_varying(jnp.zeros(shape, dtype), axes)


def _check(x: jax.Array, w_in: jax.Array, w_out: jax.Array, sizes: jax.Array) -> None:
    shapes = x.ndim == 2 and w_in.ndim == w_out.ndim == 3
    if not shapes or w_in.shape[:2] != (w_out.shape[0], x.shape[1]):
        problem = (
            f"x, w_in and w_out have shapes {x.shape}, {w_in.shape} and {w_out.shape}; "
            "[rows, width], [groups, width, hidden] and [groups, hidden, out] are needed."
        )
        raise ValueError(errors.text(_WHERE, problem, "Reshape leading dimensions into one."))
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.dtype == w_in.dtype == w_out.dtype:
        problem = f"x, w_in and w_out are {x.dtype}, {w_in.dtype} and {w_out.dtype}."
        raise ValueError(errors.text(_WHERE, problem, "Cast them to one floating-point type."))
    if sizes.shape != w_in.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        problem = f"group_sizes is {sizes.dtype}{list(sizes.shape)} for {w_in.shape[0]} groups."
        raise ValueError(errors.text(_WHERE, problem, "Pass one integer per group."))
