"""Tensor parallelism: dense layers whose weight is split over the ranks of an axis.

For `Y = f(X A) B` with N ranks, A is split by columns and B by rows:

    A = [A_0 .. A_(N-1)]     Y_r = f(X A_r)           column_parallel: no communication
    B = [B_0; ..; B_(N-1)]   Z = sum_r Y_r B_r        row_parallel: one all_reduce of Z

f being elementwise, or attention with its heads split. Backward it is the other way round: the
gradient of X, `sum_r dY_r A_r^T`, is the all_reduce of column_parallel. (Shoeybi et al. 2019,
"Megatron-LM".)

**Sequence parallelism** (Korthikanti et al. 2022). Between the pairs, X is replicated: norms,
dropout and residuals are computed N times and stored N times. With `sequence_parallel=True` each
rank has its part of the sequence there: column_parallel gathers it (all_gather), row_parallel
leaves each rank its part of the sum (reduce_scatter). An all_reduce moves as many bytes as the two
together; activations between the pairs take 1 / N of the memory. So does what column_parallel keeps
of X for the backward pass: its part, which it gathers there once more, for half an all_reduce.

`overlap=True` takes these apart into ring steps between the parts of the product; see
jcoll.layers.collective_matmul.

**Gradients** are those of the one-device model with `jax.grad` inside `jax.shard_map`, check_vma on
or off: each rank gets that of its own block of a weight, and that of what is replicated (X, the
bias of row_parallel) in full, summed over the axis by the layer. Only what else is used in the
sequence-parallel part (the gain of a norm) is left to the caller: with check_vma=True JAX sums it,
with check_vma=False it needs a `jcoll.all_reduce`. With check_vma=True, `jax.grad` may as well
be outside. First-order reverse mode, and reverse over reverse; no `jax.jvp`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jcoll import errors
from jcoll.comm.mesh import AxisName, Call, make_call, static_bool
from jcoll.layers import _conjugates, collective_matmul
from jcoll.ops import _primitive


def column_parallel(
    x: Any,
    w: Any,
    axis_name: AxisName,
    *,
    b: Any = None,
    sequence_parallel: bool = False,
    sequence_dim: int = -2,
    gather_output: bool = False,
    overlap: bool = False,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """`x @ w + b`, the columns of w split over the ranks: this rank's columns of the result.

    Args:
      x: [..., K], replicated over `axis_name`. With `sequence_parallel` this rank's part of the
        sequence: [..., S / N, K].
      w: [K, M / N], this rank's columns: `in_specs=P(None, axis_name)`.
      axis_name: the mesh axis, or a tuple of them, that w is split over; N ranks.
      b: [M / N] or None: `P(axis_name)`.
      sequence_parallel: gathers x along the sequence.
      sequence_dim: which dimension of x that is.
      gather_output: the result is gathered along its last dimension: [..., M], replicated.
      overlap: with `sequence_parallel`, the gathering is taken apart: `all_gather_matmul`.
      algorithm: as for the collective it names first: all_reduce (of the backward pass), or
        all_gather with `sequence_parallel` or `gather_output`, or ppermute with `overlap`. The
        collectives that do not have it are "auto".
      timeout_s: how long a collective may wait for its last rank, in seconds.

    Returns:
      [..., M / N], of the dtype of `x @ w`; over the whole sequence.

    Raises:
      ValueError: shapes that do not fit; `overlap` without `sequence_parallel`.

    Source: ColumnParallelLinear of Megatron-LM.
    """
    sequence_parallel, overlap = _split("column_parallel", sequence_parallel, overlap)
    gather_output = static_bool("column_parallel", "gather_output", gather_output)
    gathers = sequence_parallel or gather_output
    plan_op = "ppermute" if overlap else "all_gather" if gathers else "all_reduce"
    call = make_call(
        "column_parallel", axis_name, algorithm=algorithm, timeout_s=timeout_s, plan_op=plan_op
    )
    x, w, b = _operands(call, x, w, b, "[K, M / N], this rank's columns")
    dim = collective_matmul.check_sequence_dim(call, x, sequence_dim) if sequence_parallel else None
    if dim is None:
        y = collective_matmul.product(_conjugates.copy_to(x, call), w)
    elif overlap:
        y = collective_matmul.gathered(x, w, dim, call)
    else:
        y = collective_matmul.regathered(x, w, dim, call)
    y = _plus(y, b)
    if gather_output:
        return _conjugates.gather_from(y, -1, call, "dim")
    return y


def row_parallel(
    x: Any,
    w: Any,
    axis_name: AxisName,
    *,
    b: Any = None,
    sequence_parallel: bool = False,
    sequence_dim: int = -2,
    overlap: bool = False,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """`x @ w + b`, the rows of w and the columns of x split over the ranks: the sum of the parts.

    Args:
      x: [..., K / N], this rank's columns: what `column_parallel` gives.
      w: [K / N, M], this rank's rows: `in_specs=P(axis_name, None)`.
      axis_name: the mesh axis, or a tuple of them, that w is split over; N ranks.
      b: [M] or None, replicated; added once.
      sequence_parallel: the sum is scattered along the sequence.
      sequence_dim: which dimension of x that is; N must divide it.
      overlap: with `sequence_parallel`, the sum is taken apart: `matmul_reduce_scatter`.
      algorithm: as for all_reduce, or reduce_scatter with `sequence_parallel`, or ppermute with
        `overlap`; in the backward pass "auto" if that has no such algorithm.
      timeout_s: how long a collective may wait for its last rank, in seconds.

    Returns:
      [..., M], replicated; with `sequence_parallel` this rank's part, [..., S / N, M]. The ranks'
      parts of a 16-bit product are rounded before they are added.

    Raises:
      ValueError: shapes that do not fit, a sequence that N does not divide (with the size to pad it
        to); `overlap` without `sequence_parallel`.

    Source: RowParallelLinear of Megatron-LM.
    """
    sequence_parallel, overlap = _split("row_parallel", sequence_parallel, overlap)
    plan_op = "ppermute" if overlap else "reduce_scatter" if sequence_parallel else "all_reduce"
    call = make_call(
        "row_parallel", axis_name, algorithm=algorithm, timeout_s=timeout_s, plan_op=plan_op
    )
    x, w, b = _operands(call, x, w, b, "[K / N, M], this rank's rows")
    dim = collective_matmul.check_sequence_dim(call, x, sequence_dim) if sequence_parallel else None
    if dim is None:
        return _plus(_conjugates.reduce_from(collective_matmul.product(x, w), call), b)
    if b is not None:  # Each rank adds it to other rows, so that its gradient is a sum.
        b = _conjugates.copy_to(b, call)
    if overlap:
        return _plus(collective_matmul.scattered(x, w, dim, call), b)
    y = collective_matmul.product(x, w)
    return _plus(_conjugates.sum_scatter(y, dim, call, "sequence_dim"), b)


def _plus(y: Any, b: Any) -> Any:
    return y if b is None else y + jnp.broadcast_to(b, y.shape)


def _operands(call: Call, x: Any, w: Any, b: Any, w_shape: str) -> tuple[Any, Any, Any]:
    x, w = _primitive.as_array(call, x, "x"), _primitive.as_array(call, w, "w")
    collective_matmul.check_product(call, x, w, w_shape)
    if b is not None:
        b = _primitive.as_array(call, b, "b")
        if b.shape != w.shape[1:]:
            problem = f"b has shape {b.shape}; for w of {w.shape} it must be {w.shape[1:]}."
            fix = "Split it as the columns of w are split, or not at all if they are not."
            raise ValueError(errors.text(call.where, problem, fix))
    return x, w, b


def _split(where: str, sequence_parallel: Any, overlap: Any) -> tuple[bool, bool]:
    """The two flags, checked."""
    sequence_parallel = static_bool(where, "sequence_parallel", sequence_parallel)
    overlap = static_bool(where, "overlap", overlap)
    if overlap and not sequence_parallel:
        problem = "overlap=True without sequence_parallel=True; only an all_gather before the "
        problem += "product or a reduce_scatter after it can be taken apart."
        fix = "Pass sequence_parallel=True and x split along the sequence, or overlap=False."
        raise ValueError(errors.text(where, problem, fix))
    return sequence_parallel, overlap
