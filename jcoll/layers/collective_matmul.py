"""Collective matmul: an all_gather before, or a reduce_scatter after a product, taken apart.

    all_gather_matmul       Y   = [X_0; ..; X_(N-1)] W     X_r: a part of the rows, W: own columns
    matmul_reduce_scatter   Y_r = (sum_s X_s W_s)[block r] X_s: own columns, W_s: own rows

The collective is a ring of N - 1 steps, and so is the product: while the block of a neighbour
travels (ppermute), the one that has come is multiplied. The two do not depend on each other, so
that a runtime that can move and compute at once hides the shorter of the two:

    gather, rank r, step k   has X_(r-k);  sends it on to r + 1;  Y[block r-k] = X_(r-k) W
    scatter, rank r, step k  adds X[block d] W to the sum for rank d that has come, and sends it on

Bidirectionally, blocks come from both sides at once: N / 2 steps instead of N - 1, and both
directions of the links in use. Derivatives are made of the same parts: dX of the one is the other,
of dY and W^T; dW adds up one product per block that comes by, so that no rank ever holds a gathered
operand. (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in
Large Deep Learning Models".)

What it costs: N small products instead of a large one, and N - 1 small messages instead of one
collective. Where moving and computing share their cores, as on the CPU, that is all it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, canonical_dim, make_call, static_bool
from jcoll.layers import _conjugates
from jcoll.ops import _primitive
from jcoll.ops._reductions import accumulation_dtype
from jcoll.ops.permute import SPEC as PPERMUTE


def all_gather_matmul(
    x: Any,
    w: Any,
    axis_name: AxisName,
    *,
    sequence_dim: int = -2,
    bidirectional: bool = True,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """`all_gather(x, axis=sequence_dim, tiled=True) @ w`, by ring steps that overlap.

    Args:
      x: [..., S / N, K], this rank's part of the sequence.
      w: [K, M], this rank's own.
      axis_name: the mesh axis, or a tuple of them, of N ranks.
      sequence_dim: the dimension of x that is gathered; not the last.
      bidirectional: blocks travel both ways round the ring, in N // 2 steps; False: one way, in
        N - 1 steps.
      algorithm, timeout_s: as for `jcoll.ppermute`.

    Returns:
      [..., S, M], of the dtype of `x @ w`. Each row is the product of that row alone: the same as
      the plain form up to how XLA orders the sum over K for another number of rows.

    Raises:
      ValueError: shapes that do not fit.

    Derivative: dX = matmul_reduce_scatter(dY, W^T); dW by ring steps over X. Reverse mode.
    """
    call, dim = _checked("all_gather_matmul", x, w, axis_name, sequence_dim, algorithm, timeout_s)
    bidirectional = static_bool(call.where, "bidirectional", bidirectional)
    return gathered(jnp.asarray(x), jnp.asarray(w), dim, call, bidirectional)


def matmul_reduce_scatter(
    x: Any,
    w: Any,
    axis_name: AxisName,
    *,
    sequence_dim: int = -2,
    bidirectional: bool = True,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """`reduce_scatter(x @ w, scatter_dimension=sequence_dim, tiled=True)`, by ring steps.

    Args:
      x: [..., S, K], this rank's columns.
      w: [K, M], this rank's rows.
      axis_name: the mesh axis, or a tuple of them, of N ranks.
      sequence_dim: the dimension of x that is scattered; not the last. N must divide it.
      bidirectional: as for `all_gather_matmul`.
      algorithm, timeout_s: as for `jcoll.ppermute`.

    Returns:
      [..., S / N, M], of the dtype of `x @ w`. The order of the sum is that of the ring. 16-bit
      products are added in float32 and rounded at each hop, where `jcoll.reduce_scatter` rounds
      once: a relative error of up to N 2^-9 in bfloat16.

    Raises:
      ValueError: shapes that do not fit, or a dimension that N does not divide.

    Derivative: dX = all_gather_matmul(dY, W^T); dW by the same ring steps. Reverse mode.
    """
    call, dim = _checked(
        "matmul_reduce_scatter", x, w, axis_name, sequence_dim, algorithm, timeout_s
    )
    bidirectional = static_bool(call.where, "bidirectional", bidirectional)
    return scattered(jnp.asarray(x), jnp.asarray(w), dim, call, bidirectional)


def gathered(x: Any, w: Any, dim: int, call: Call, bidirectional: bool = True) -> Any:
    """`all_gather_matmul` of checked arguments."""
    return _gathered(*_typed_alike(x, w, call), dim, _Ring(call, bidirectional))


def scattered(x: Any, w: Any, dim: int, call: Call, bidirectional: bool = True) -> Any:
    """`matmul_reduce_scatter` of checked arguments."""
    _primitive.take_blocks(x, dim, True, call, "sequence_dim")  # ValueError if it does not divide.
    return _scattered(*_typed_alike(x, w, call), dim, _Ring(call, bidirectional))


def regathered(x: Any, w: Any, dim: int, call: Call) -> Any:
    """The value of `gathered`, by one all_gather, which the backward pass repeats: it keeps x."""
    return _regathered(*_typed_alike(x, w, call), dim, call)


def product(x: Any, w: Any, dtype: Any = None) -> Any:
    """[..., K] times [K, M]; `dtype` as the preferred_element_type of jnp.matmul."""
    return jnp.tensordot(x, w, 1, preferred_element_type=dtype)


def check_product(call: Call, x: Any, w: Any, w_shape: str) -> None:
    """ValueError unless x [..., K] can be multiplied with w [K, M]."""
    if w.ndim != 2:
        problem = f"w has {w.ndim} dimensions, {w.shape}; a matrix is needed, {w_shape}."
        raise ValueError(errors.text(call.where, problem, "Reshape it, e.g. to one column a head."))
    if x.ndim == 0 or x.shape[-1] != w.shape[0]:
        problem = f"x of shape {x.shape} cannot be multiplied with w of shape {w.shape}: the last "
        problem += f"dimension of x must be the first of w, {w_shape}, of N = {call.num_ranks}."
        fix = "These are one rank's shapes: look how in_specs splits the two over the mesh."
        raise ValueError(errors.text(call.where, problem, fix))


def check_sequence_dim(call: Call, x: Any, dim: Any) -> int:
    """The dimension, counted from the front; ValueError if it is the one that is multiplied."""
    canonical = canonical_dim(call.where, "sequence_dim", dim, x.ndim)
    if canonical == x.ndim - 1:
        problem = f"sequence_dim={dim} is the last dimension of x, {x.shape}, which w contracts."
        raise ValueError(errors.text(call.where, problem, "Name the one that counts positions."))
    return canonical


def _checked(
    op: str, x: Any, w: Any, axis_name: AxisName, dim: Any, algorithm: str, timeout_s: float | None
) -> tuple[Call, int]:
    call = make_call(op, axis_name, algorithm=algorithm, timeout_s=timeout_s, plan_op="ppermute")
    x, w = _primitive.as_array(call, x, "x"), _primitive.as_array(call, w, "w")
    check_product(call, x, w, "[K, M]")
    return call, check_sequence_dim(call, x, dim)


def _typed_alike(x: Any, w: Any, call: Call) -> tuple[Any, Any]:
    """Both varying over the axes of either, so that their gradients have the types of the two;
    what JAX adds for a data-parallel W that does not vary is the sum over those axes."""
    axes = set(call.axes).union(*(_compat.varying_axes(jax.typeof(a)) for a in (x, w)))
    ordered = sorted(axes, key=str)
    return _compat.make_varying(x, ordered), _compat.make_varying(w, ordered)


@dataclass(frozen=True)
class _Ring:
    call: Call
    bidirectional: bool

    @property
    def lengths(self) -> tuple[int, int]:
        """From how many ranks behind (rank - 1, - 2, ..) and ahead (+ 1, ..) blocks come."""
        n = self.call.num_ranks
        return (n // 2, (n - 1) // 2) if self.bidirectional else (n - 1, 0)

    def shift(self, x: Any, by: int) -> Any:
        """x to the rank `by` ahead."""
        n = self.call.num_ranks
        perm = tuple((rank, (rank + by) % n) for rank in range(n))
        return _primitive.bind(PPERMUTE, x, call=self.call, perm=perm)[0]

    def pass_by(self, x: Any) -> Iterator[tuple[int, Any]]:
        """(distance, x of rank + distance), for all ranks, as they come by."""
        yield 0, x
        num_behind, num_ahead = self.lengths
        behind = ahead = x
        for step in range(1, num_behind + 1):
            behind = self.shift(behind, 1)
            ahead = self.shift(ahead, -1) if step <= num_ahead else None
            yield -step, behind
            if ahead is not None:
                yield step, ahead

    def rank_at(self, distance: int) -> Any:
        return (jax.lax.axis_index(self.call.axes) + distance) % self.call.num_ranks

    def block_of(self, x: Any, distance: int, dim: int) -> Any:
        """The block of x, along `dim`, for the rank at this distance."""
        size = x.shape[dim] // self.call.num_ranks
        return jax.lax.dynamic_slice_in_dim(x, self.rank_at(distance) * size, size, dim)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gathered(x: Any, w: Any, dim: int, ring: _Ring) -> Any:
    return _joined([(d, product(block, w)) for d, block in ring.pass_by(x)], dim, ring)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _scattered(x: Any, w: Any, dim: int, ring: _Ring) -> Any:
    dtype = jnp.result_type(x, w)
    wide = accumulation_dtype(dtype)

    def part(distance: int) -> Any:
        return product(ring.block_of(x, distance, dim), w, wide)

    def hop(total: Any, by: int) -> Any:
        return ring.shift(total.astype(dtype), by).astype(wide)

    def from_side(length: int, sign: int) -> Any:
        """What the `length` ranks on one side, from the farthest on, add up for this one."""
        total = part(sign * length)
        for distance in range(length - 1, 0, -1):
            total = part(sign * distance) + hop(total, sign)
        return hop(total, sign)

    # A rank sends backwards what it has for those behind it, which is how this one's comes from
    # those ahead.
    sums = [from_side(n, sign) for n, sign in zip(ring.lengths, (-1, 1), strict=True) if n]
    return reduce(jnp.add, sums, part(0)).astype(dtype)


def _gathered_bwd(dim: int, ring: _Ring, saved: Any, dy: Any) -> Any:
    x, w = saved
    dx: Any = _scattered(dy, w.T, dim, ring)
    parts = [_outer(block, ring.block_of(dy, d, dim)) for d, block in ring.pass_by(x)]
    return dx.astype(x.dtype), reduce(jnp.add, parts).astype(w.dtype)


def _scattered_bwd(dim: int, ring: _Ring, saved: Any, dy: Any) -> Any:
    """One round of the ring serves both gradients."""
    x, w = saved
    blocks = list(ring.pass_by(dy))
    dx = _joined([(d, product(block, w.T)) for d, block in blocks], dim, ring)
    parts = [_outer(ring.block_of(x, d, dim), block) for d, block in blocks]
    return dx.astype(x.dtype), reduce(jnp.add, parts).astype(w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _regathered(x: Any, w: Any, dim: int, call: Call) -> Any:
    return product(_conjugates.gather(x, dim, call, "sequence_dim"), w)


def _regathered_bwd(dim: int, call: Call, saved: Any, dy: Any) -> Any:
    x, w = saved
    # Or XLA might take the gathered array of the forward pass, and keep it until now.
    x, dy = jax.lax.optimization_barrier((x, dy))
    whole = _conjugates.gather(x, dim, call, "sequence_dim")
    dx = product(dy, w.T).astype(x.dtype)
    dx = _conjugates.sum_scatter(dx, dim, call, "sequence_dim")
    return dx, _outer(whole, dy).astype(w.dtype)


_regathered.defvjp(lambda x, w, dim, call: (_regathered(x, w, dim, call), (x, w)), _regathered_bwd)
_gathered.defvjp(lambda x, w, dim, ring: (_gathered(x, w, dim, ring), (x, w)), _gathered_bwd)
_scattered.defvjp(lambda x, w, dim, ring: (_scattered(x, w, dim, ring), (x, w)), _scattered_bwd)


def _joined(blocks: Sequence[tuple[int, Any]], dim: int, ring: _Ring) -> Any:
    """(distance, block) of all ranks as one array, along `dim` in the order of the ranks."""
    first = blocks[0][1]
    shape = list(first.shape)
    shape[dim] *= len(blocks)
    y = jnp.zeros(shape, first.dtype)
    for distance, block in blocks:
        start = ring.rank_at(distance) * first.shape[dim]
        y = jax.lax.dynamic_update_slice_in_dim(y, block, start, dim)
    return y


def _outer(x: Any, dy: Any) -> Any:
    """[..., K], [..., M] -> [K, M], summed over the rest, 16-bit types in float32."""
    rest = list(range(x.ndim - 1))
    wide = accumulation_dtype(jnp.result_type(x, dy))
    return jnp.tensordot(x, dy, (rest, rest), preferred_element_type=wide)
