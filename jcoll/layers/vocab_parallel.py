"""The embedding and the loss of a tensor-parallel model, the vocabulary split over the ranks.

Rank r of N has the words r V / N to (r + 1) V / N. The largest arrays of a language model, the
table [V, H] and the logits [tokens, V], then exist only in parts: a looked-up row is on one rank
(the others add zeros), and of the softmax only its maximum and its sum need all ranks, two numbers
a token instead of V. (Shoeybi et al. 2019, "Megatron-LM", section 3.)

Where N does not divide the vocabulary, pad the table to the next multiple and pass the true size as
`vocab_size`: the padded logits are left out of the loss and get zero gradients.

Gradients as in jcoll.layers.tensor_parallel: `jax.grad` inside `jax.shard_map`, check_vma on or
off; each rank gets that of its own part of the table, or of the logits, without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jcoll import _compat, errors
from jcoll.comm.mesh import (
    AxisName,
    Call,
    make_call,
    real_number,
    refuse_traced,
    static_bool,
    static_int,
)
from jcoll.layers import _conjugates
from jcoll.ops import _primitive
from jcoll.ops._reductions import accumulation_dtype
from jcoll.ops.all_reduce import SPEC as ALL_REDUCE


def vocab_parallel_embedding(
    ids: Any,
    table: Any,
    axis_name: AxisName,
    *,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = -2,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """Rows of an embedding table that is split over the ranks: `table[ids]`.

    Args:
      ids: [...], integers from 0 to vocab_size - 1, replicated over `axis_name`.
      table: [V / N, H], this rank's rows: `in_specs=P(axis_name, None)`.
      axis_name: the mesh axis, or a tuple of them, of N ranks.
      vocab_size: the number of words, if the table is padded; V if not given.
      sequence_parallel: each rank gets its part of the sequence (reduce_scatter, not all_reduce).
      sequence_dim: which dimension of the result that is; N must divide it.
      algorithm, timeout_s: as for `jcoll.all_reduce`, or `reduce_scatter`.

    Returns:
      [..., H], replicated, of the table's dtype, the exact bits; with `sequence_parallel` this
      rank's part. The row of an id out of range is NaN, as `jnp.take` has it.

    Raises:
      TypeError: ids that are no integers, a table that is none of floats. ValueError: shapes that
      do not fit.

    Derivative: rows of the gradient are added to the rows they came from, on the rank that has
    them.
    """
    where = "vocab_parallel_embedding"
    sequence_parallel = static_bool(where, "sequence_parallel", sequence_parallel)
    plan_op = "reduce_scatter" if sequence_parallel else "all_reduce"
    call = make_call(
        where,
        axis_name,
        algorithm=algorithm,
        timeout_s=timeout_s,
        plan_op=plan_op,
    )
    ids = _integers(call, "ids", ids)
    table = _primitive.as_array(call, table, "table")
    if table.ndim != 2:
        problem = f"table has shape {table.shape}; this rank's rows are needed, [V / N, H]."
        raise ValueError(errors.text(call.where, problem, "Pass one row per word."))
    if not jnp.issubdtype(table.dtype, jnp.inexact):
        problem = f"table has dtype {table.dtype}, which has no NaN for ids out of range; floats "
        problem += "are needed."
        fix = "Convert it: table.astype('float32')."
        raise TypeError(errors.text(call.where, problem, fix))
    words = _words(call, table.shape[0], vocab_size, "table has", "rows")
    local, is_here, is_word = words.locate(ids, call)
    found = jnp.take(table, local, axis=0, mode="clip")
    # Adding -0.0 keeps all bits of a row; adding 0.0 would make 0.0 of its -0.0.
    other = jnp.where(is_word, -0.0, jnp.nan).astype(table.dtype)
    rows = jnp.where(is_here[..., None], found, jnp.broadcast_to(other[..., None], found.shape))
    if sequence_parallel:
        return _conjugates.sum_scatter(rows, sequence_dim, call, "sequence_dim")
    return _conjugates.reduce_from(rows, call)


def vocab_parallel_cross_entropy(
    logits: Any,
    labels: Any,
    axis_name: AxisName,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> Any:
    """The cross entropy of each token, its logits split over the ranks and never gathered.

        loss = log(sum_j exp(x_j)) - (1 - e) x_label - e mean_j x_j,     e = label_smoothing

    that is the cross entropy to `(1 - e) onehot(label) + e / vocab_size` (Szegedy et al. 2016).
    Computed in float32 with the maximum subtracted, in two all_reduces: the maximum, and the sums.
    Their size is that of `labels`, and does not depend on the vocabulary.

    Args:
      logits: [..., V / N], this rank's words: what `column_parallel` gives for a head [H, V / N].
      labels: [...], integers from 0 to vocab_size - 1, replicated over `axis_name`.
      axis_name: the mesh axis, or a tuple of them, of N ranks.
      vocab_size: the number of words, if the logits are padded: the others, at the end, do not
        count. V if not given.
      label_smoothing: e above, from 0 to 1.
      algorithm, timeout_s: as for `jcoll.all_reduce`.

    Returns:
      [...], float32 (float64 of float64), replicated. NaN where a label is out of range: to leave
      tokens out, give them any label and multiply their loss by zero.

    Raises:
      TypeError: labels that are no integers, logits that are no floats. ValueError: shapes that do
      not fit, vocab_size or label_smoothing out of range.

    Derivative: `softmax(x) - target` on each rank's own words, without communication; the logits
    and one float a token are kept for it.
    """
    call = make_call(
        "vocab_parallel_cross_entropy",
        axis_name,
        algorithm=algorithm,
        timeout_s=timeout_s,
        plan_op="all_reduce",
    )
    labels = _integers(call, "labels", labels)
    logits = _logits(call, logits, labels)
    words = _words(call, logits.shape[-1], vocab_size, "logits have", "columns")
    axes = {*call.axes, *_compat.varying_axes(jax.typeof(labels))}  # The gradient's, then, too.
    logits = _compat.make_varying(logits, sorted(axes, key=str))
    return _cross_entropy(logits, labels, words, _smoothing(call, label_smoothing), call)


@dataclass(frozen=True)
class _Words:
    """Which words are on which rank: `per_rank` each, `total` in all, padding not counted."""

    per_rank: int
    total: int

    def locate(self, ids: Any, call: Call) -> tuple[Any, Any, Any]:
        """(index on this rank, whether it is here, whether it is a word at all), for each id."""
        is_word = (ids >= 0) & (ids < self.total)
        local = ids - self._first(ids.dtype, call)
        return local, is_word & (local >= 0) & (local < self.per_rank), is_word

    def columns(self, shape: Any, dtype: Any, call: Call) -> tuple[Any, Any]:
        """(index on this rank, whether it is a word), for each of [..., columns of this rank]."""
        index = jax.lax.broadcasted_iota(dtype, shape, len(shape) - 1)
        return index, self._first(dtype, call) + index < self.total

    def _first(self, dtype: Any, call: Call) -> Any:
        return jax.lax.axis_index(call.axes).astype(dtype) * self.per_rank


def _words(call: Call, per_rank: int, vocab_size: Any, array: str, unit: str) -> _Words:
    """ValueError unless the ranks have `vocab_size` words, and that is at least one."""
    n = call.num_ranks
    padded = per_rank * n
    total = padded if vocab_size is None else static_int(call.where, "vocab_size", vocab_size)
    if 0 < total <= padded:
        return _Words(per_rank, total)
    problem = f"{array} {per_rank} {unit} on each of {n} ranks, {padded} in all; "
    problem += f"vocab_size={total} must be from 1 to that."
    fix = f"Pad the vocabulary to {-(-max(total, 1) // n) * n} before it is split by in_specs."
    raise ValueError(errors.text(call.where, problem, fix))


def _integers(call: Call, name: str, x: Any) -> Any:
    """x, in a type that holds the number of words."""
    x = _primitive.as_array(call, x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        problem = f"{name} have dtype {x.dtype}; integers are needed, one per token."
        raise TypeError(errors.text(call.where, problem, f"Convert them: {name}.astype('int32')."))
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def _logits(call: Call, x: Any, labels: Any) -> Any:
    x = _primitive.as_array(call, x, "logits")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        problem = f"logits have dtype {x.dtype}; floats are needed."
        raise TypeError(errors.text(call.where, problem, "Convert them: logits.astype('float32')."))
    if x.shape[:-1] != labels.shape or x.ndim == 0:
        problem = f"logits have shape {x.shape} and labels {labels.shape}; all dimensions of the "
        problem += "logits but the last must be those of the labels."
        fix = "Pass one row of this rank's logits, and one label, per token."
        raise ValueError(errors.text(call.where, problem, fix))
    return x


def _smoothing(call: Call, value: Any) -> float:
    refuse_traced(call.where, label_smoothing=value)
    number = real_number(value)
    if number is not None and 0 <= number <= 1:
        return number
    problem = f"label_smoothing={value!r} is not a number from 0 to 1."
    raise ValueError(errors.text(call.where, problem, "0, the default, is no smoothing."))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _cross_entropy(logits: Any, labels: Any, words: _Words, smoothing: float, call: Call) -> Any:
    return _forward(logits, labels, words, smoothing, call)[0]


def _forward(logits: Any, labels: Any, words: _Words, smoothing: float, call: Call) -> Any:
    """(loss, log of the sum of the exponentials), one number a token each."""
    x = logits.astype(accumulation_dtype(logits.dtype))
    _, is_word = words.columns(x.shape, labels.dtype, call)
    local, is_here, is_label = words.locate(labels, call)
    largest = jnp.max(x, axis=-1, where=is_word, initial=-jnp.inf)
    (largest,) = _primitive.bind(ALL_REDUCE, jax.lax.stop_gradient(largest), call=call, op="max")
    x = x - largest[..., None]
    picked = jnp.take_along_axis(x, local[..., None], axis=-1, mode="clip")[..., 0]
    parts = [
        jnp.sum(jnp.exp(x), axis=-1, where=is_word),
        jnp.where(is_here, picked, jnp.zeros_like(picked)),
    ]
    if smoothing:
        parts.append(jnp.sum(x, axis=-1, where=is_word))
    total, of_label, *of_all = _conjugates.reduce_from(jnp.stack(parts), call)
    loss = jnp.log(total) - (1 - smoothing) * of_label
    for sum_of_all in of_all:
        loss = loss - smoothing / words.total * sum_of_all
    # NaN where there is no such label; in the other result too, which makes the gradient NaN.
    not_a_number = jnp.where(is_label, 0.0, jnp.nan).astype(x.dtype)
    return loss + not_a_number, jnp.log(total) + largest + not_a_number


def _cross_entropy_fwd(logits: Any, labels: Any, words: Any, smoothing: float, call: Call) -> Any:
    loss, log_total = _forward(logits, labels, words, smoothing, call)
    return loss, (logits, labels, log_total)


def _cross_entropy_bwd(words: _Words, smoothing: float, call: Call, saved: Any, ct: Any) -> Any:
    logits, labels, log_total = saved
    x = logits.astype(log_total.dtype)
    index, is_word = words.columns(x.shape, labels.dtype, call)
    local, is_here, _ = words.locate(labels, call)
    is_label = is_here[..., None] & (local[..., None] == index)
    target = (1 - smoothing) * is_label.astype(x.dtype) + smoothing / words.total
    difference = jnp.exp(x - _conjugates.copy_to(log_total, call)[..., None]) - target
    difference = jnp.where(is_word, difference, jnp.zeros_like(difference))
    dlogits = _conjugates.copy_to(ct, call)[..., None] * difference
    return dlogits.astype(logits.dtype), None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)
