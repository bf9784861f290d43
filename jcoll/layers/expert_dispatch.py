"""Token rows to the ranks that hold their experts, and back.

E experts lie on n ranks in order, E / n on each. Every rank has T tokens and for each the k experts
that it goes to: A = k T assignments, of which number j T + t is token t's choice j. Sorted by
expert (stably, so first choices come first, and among equal choices earlier tokens), they are one
block of rows per expert: block (s, e) goes from rank s to the rank of expert e.

Dropless: every rank learns the heights of all blocks (one all_gather of E numbers), and from them
where each stands in what it receives: by expert, among those by sender. One ragged_all_to_all
moves the rows, all and no others, each to its place. Only the number of rows that a rank can hold,
output_size, is fixed. If more are sent to it, all blocks for it are cut to the largest common
height at which they fit, so that the fullest lose, their last choices and last tokens first.

Capacity: every block has C = min(A, ceil(capacity_factor A / E)) rows, filled up with zeros or cut
off. One all_to_all moves them, whatever the routing: more bytes, but nothing that depends on the
data.

A row that is cut off is *dropped*: its expert contributes zero to its token, and it is counted.

Derivative. Both directions are linear and each other's transposes: the gradient of dispatch is
combine with weights of one, that of combine is dispatch. Neither needs anything but the layout,
which is kept from the way there.

Sources: Lepikhin et al. 2020, GShard (capacity, first choices first); Gale et al. 2022, MegaBlocks
(dropless); DeepSpeed-MoE and DeepEP (uneven exchanges).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, make_call, real_number, refuse_traced, static_int
from jcoll.layers.router import count
from jcoll.ops.all_gather import all_gather
from jcoll.ops.all_to_all import all_to_all
from jcoll.ops.ragged_all_to_all import ragged_all_to_all

MODES = ("dropless", "capacity")
DEFAULT_CAPACITY_FACTOR = 2.0

_STATIC = {"static": True}  # Part of the tree's structure, not an array.


class Wire(NamedTuple):
    """How rows travel: arguments of the collectives."""

    axis_name: tuple
    algorithm: str
    timeout_s: float | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ragged:
    """One dropless exchange: for block i, of all that this rank sends and receives."""

    sent_at: jax.Array  # [E] first row among the sorted rows here
    send_sizes: jax.Array  # [E]
    lands_at: jax.Array  # [E] first row on the rank that receives it
    recv_at: jax.Array  # [n * E / n], by sender and expert: first row here
    recv_sizes: jax.Array
    came_from: jax.Array  # first row among the sorted rows of its sender
    num_assignments: int = field(metadata=_STATIC)
    output_size: int = field(metadata=_STATIC)
    wire: Wire = field(metadata=_STATIC)

    def send(self, rows: jax.Array) -> jax.Array:
        """[A, ...] sorted rows -> [output_size, ...] rows by expert, then zeros."""
        index = (self.sent_at, self.send_sizes, self.lands_at, self.recv_sizes)
        return self._exchange(rows, self.output_size, index)

    def send_back(self, rows: jax.Array) -> jax.Array:
        """The transpose; zeros where a row was not sent."""
        index = (self.recv_at, self.recv_sizes, self.came_from, self.send_sizes)
        return self._exchange(rows, self.num_assignments, index)

    def _exchange(self, rows: jax.Array, num_rows: int, index: tuple) -> jax.Array:
        output = jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype)
        return ragged_all_to_all(rows, output, *index, **self.wire._asdict())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Padded:
    """One exchange of blocks of `capacity` rows."""

    num_ranks: int = field(metadata=_STATIC)
    capacity: int = field(metadata=_STATIC)
    output_size: int = field(metadata=_STATIC)
    wire: Wire = field(metadata=_STATIC)

    def send(self, rows: jax.Array) -> jax.Array:
        """[E * C, ...] by expert -> [E / n * n * C, ...] by local expert, then by sender."""
        blocks = rows.reshape(self.num_ranks, -1, self.capacity, *rows.shape[1:])
        return all_to_all(blocks, split_axis=0, concat_axis=1, **self.wire._asdict()).reshape(
            rows.shape
        )

    def send_back(self, rows: jax.Array) -> jax.Array:
        """The transpose."""
        blocks = rows.reshape(-1, self.num_ranks, self.capacity, *rows.shape[1:])
        return all_to_all(blocks, split_axis=1, concat_axis=0, **self.wire._asdict()).reshape(
            rows.shape
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dispatch:
    """Where the rows went, as `dispatch_to_experts` says; `combine_from_experts` needs it."""

    group_sizes: jax.Array
    """int32 [E / n]: the rows of each local expert, which stand one after another."""

    dropped: jax.Array
    """int32, a scalar: how many of this rank's assignments no expert gets to see."""

    slot_of: jax.Array
    """int32 [k, T]: the row of each assignment among those that this rank sends."""

    sent: jax.Array
    """int32 [rows sent]: which assignment each is; k T if none."""

    exchange: Ragged | Padded


def dispatch_to_experts(
    x: Any,
    experts: Any,
    axis_name: AxisName,
    *,
    num_experts: int,
    mode: str = "dropless",
    output_size: int | None = None,
    capacity_factor: float | None = None,
    algorithm: str = "auto",
    timeout_s: float | None = None,
) -> tuple[jax.Array, Dispatch]:
    """Sends every token to the ranks of its experts.

    Args:
      x: [T, ...], this rank's tokens, of any dtype that travels.
      experts: integers [T, k], the experts of each token, as `top_k_router` gives them. Outside
        0 .. E - 1: the assignment goes nowhere, and is not counted as dropped. An expert that is
        named twice gets the row twice; the room for any routing does not count on that.
      axis_name: mesh axis, or tuple of axes, that the experts are spread over.
      num_experts: E, a multiple of the number of ranks n. Rank r has experts r E / n and on.
      mode: "dropless" or "capacity"; see the module's docstring.
      output_size: dropless only: the rows that this rank has room for. If not given, enough for any
        routing to k different experts: n T min(k, E / n); memory for them is taken whatever comes.
      capacity_factor: capacity only: the height of blocks, in units of their mean. A float above 0;
        2.0 if not given.
      algorithm, timeout_s: of the exchange of the rows, as in `jcoll.ragged_all_to_all` and
        `jcoll.all_to_all`.

    Returns:
      (rows, dispatch): rows [output_size, ...], or [E C, ...] with capacity, those of the first
      local expert first; dispatch.group_sizes says how many each has (with capacity n C, the unused
      ones zeros), and rows after them are zero.

    Derivative: reverse mode, in x: `combine_from_experts` with weights of one.

    Raises: ValueError for E not a multiple of n, arguments out of range, and those of the other
    mode.
    """
    where = "dispatch_to_experts"
    check_mode(where, mode, output_size, capacity_factor)
    plan_op = "all_to_all" if mode == "capacity" else "ragged_all_to_all"
    call = make_call(where, axis_name, plan_op=plan_op, algorithm=algorithm, timeout_s=timeout_s)
    x, experts = jnp.asarray(x), jnp.asarray(experts)
    _check(call, x, experts, num_experts)
    wire = Wire(call.axes, algorithm, timeout_s)
    experts = _known(experts, num_experts)
    if mode == "dropless":
        most = x.shape[0] * call.num_ranks * min(len(experts), num_experts // call.num_ranks)
        size = most if output_size is None else _check_size(call, output_size)
        can_overflow = size < experts.size * call.num_ranks  # Experts may be named twice.
        dispatch = _ragged(call, experts, num_experts, size, can_overflow, wire)
    else:
        capacity = _capacity(call, capacity_factor, experts.size, num_experts)
        dispatch = _padded(call, experts, num_experts, capacity, wire)
    return _to_experts(_varying_like(x, dispatch), dispatch), dispatch


def combine_from_experts(rows: Any, weights: Any, dispatch: Dispatch) -> jax.Array:
    """Brings the experts' rows back to their tokens: y_t = sum_j weights[t, j] row of (t, j).

    Args:
      rows: [output_size, ...] or [E C, ...], what the experts made of the rows that they got, in
        the same places; trailing shape and dtype may be others.
      weights: [T, k]; float32, or any type that multiplies.
      dispatch: what `dispatch_to_experts` returned.

    Returns:
      [T, ...] of rows' dtype, summed in float32 at least. A dropped assignment adds nothing.

    Derivative: reverse mode, in rows (a dispatch) and weights.

    Raises: ValueError for rows or weights of another dispatch.
    """
    if not isinstance(dispatch, Dispatch):
        problem = f"dispatch is a {type(dispatch).__name__}; a Dispatch is needed."
        fix = "Pass the second result of dispatch_to_experts."
        raise TypeError(errors.text("combine_from_experts", problem, fix))
    rows, weights = jnp.asarray(rows), jnp.asarray(weights)
    _check_combine(rows, weights, dispatch)
    picked = _from_experts(_varying_like(rows, dispatch), dispatch)  # [k, T, ...]
    wide = np.promote_types(rows.dtype, jnp.float32)
    weights = jnp.expand_dims(weights.T, tuple(range(2, picked.ndim)))
    return (weights.astype(wide) * picked.astype(wide)).sum(0).astype(rows.dtype)


@jax.custom_vjp
def _to_experts(x: jax.Array, dispatch: Dispatch) -> jax.Array:
    """[T, ...] -> rows at the experts."""
    num_tokens = dispatch.slot_of.shape[1]
    none = dispatch.slot_of.size
    token = jnp.where(dispatch.sent < none, dispatch.sent % max(num_tokens, 1), num_tokens)
    return dispatch.exchange.send(_take(x, token))


@jax.custom_vjp
def _from_experts(rows: jax.Array, dispatch: Dispatch) -> jax.Array:
    """Rows at the experts -> [k, T, ...]."""
    return _take(dispatch.exchange.send_back(rows), dispatch.slot_of)


def _to_experts_back(dispatch: Dispatch, ct: jax.Array) -> tuple[jax.Array, None]:
    wide = np.promote_types(ct.dtype, jnp.float32)
    return _from_experts(ct, dispatch).sum(0, dtype=wide).astype(ct.dtype), None


def _from_experts_back(dispatch: Dispatch, ct: jax.Array) -> tuple[jax.Array, None]:
    by_assignment = ct.reshape(-1, *ct.shape[2:])
    return dispatch.exchange.send(_take(by_assignment, dispatch.sent)), None


_to_experts.defvjp(lambda x, d: (_to_experts(x, d), d), _to_experts_back)
_from_experts.defvjp(lambda rows, d: (_from_experts(rows, d), d), _from_experts_back)


def _ragged(
    call: Call, experts: jax.Array, num_experts: int, size: int, can_overflow: bool, wire: Wire
) -> Dispatch:
    n, local = call.num_ranks, num_experts // call.num_ranks
    counts = count(experts, num_experts)
    every = all_gather(counts, call.axes, timeout_s=wire.timeout_s).reshape(n, n, local)
    # every[s, d, e]: the height of the block from rank s for local expert e of rank d.
    kept = jax.vmap(partial(fit, size=size), 1, 1)(every) if can_overflow else every
    by_expert = kept.transpose(1, 2, 0).reshape(n, -1)
    lands = _starts(by_expert).reshape(n, local, n).transpose(2, 0, 1)
    comes = _starts(every.reshape(n, -1)).reshape(n, n, local)
    me = jax.lax.axis_index(call.axes)
    exchange = Ragged(
        sent_at=comes[me].reshape(-1),
        send_sizes=kept[me].reshape(-1),
        lands_at=lands[me].reshape(-1),
        recv_at=lands[:, me].reshape(-1),
        recv_sizes=kept[:, me].reshape(-1),
        came_from=comes[:, me].reshape(-1),
        num_assignments=experts.size,
        output_size=size,
        wire=wire,
    )
    order, place = _sorted(experts)
    dropped = (counts - exchange.send_sizes).sum(dtype=jnp.int32)
    return Dispatch(kept[:, me].sum(0, dtype=jnp.int32), dropped, place, order, exchange)


def _padded(
    call: Call, experts: jax.Array, num_experts: int, capacity: int, wire: Wire
) -> Dispatch:
    order, place = _sorted(experts)
    counts = count(experts, num_experts)
    starts = _starts(counts)
    row = jnp.arange(capacity, dtype=jnp.int32)[None]
    filled = row < counts[:, None]
    sent = jnp.where(filled, _take(order, starts[:, None] + row), experts.size).reshape(-1)
    row = place - _take(starts, experts)
    there = (row < capacity) & (experts < num_experts)
    slot_of = jnp.where(there, experts * capacity + row, num_experts * capacity)
    exchange = Padded(call.num_ranks, capacity, num_experts * capacity, wire)
    sizes = jnp.full(num_experts // call.num_ranks, call.num_ranks * capacity, jnp.int32)
    dropped = jnp.maximum(counts - capacity, 0).sum(dtype=jnp.int32)
    return Dispatch(sizes, dropped, slot_of, sent, exchange)


def _known(experts: jax.Array, num_experts: int) -> jax.Array:
    """int32 [k, T] of [T, k]: num_experts in place of what is no expert."""
    if experts.dtype.itemsize < 4:  # A type that does not hold num_experts itself.
        experts = experts.astype(jnp.int32)
    nowhere = (experts < 0) | (experts >= num_experts)
    return jnp.where(nowhere, num_experts, experts).astype(jnp.int32).T


def _sorted(experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Assignments [k T] in the order of their experts, first choices first; and where each of
    [k, T] stands in it."""
    order = jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)
    numbers = jnp.arange(order.size, dtype=jnp.int32)
    place = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    return order, place.reshape(experts.shape)


def fit(blocks: jax.Array, size: int) -> jax.Array:
    """Block heights cut to the largest common height whose sum is at most `size`.

    With b sorted, sum_i min(b_i, c) <= b_0 + .. + b_(j-1) + (m - j) c for every j, with equality
    for one; so c fits iff (size - b_0 - .. - b_(j-1)) / (m - j) >= c for some j < m, or all fits.
    """
    b = jnp.sort(blocks.reshape(-1))
    others = b.size - jnp.arange(b.size, dtype=b.dtype)
    height = ((size - (jnp.cumsum(b, dtype=b.dtype) - b)) // others).max()
    return jnp.where(b.sum(dtype=b.dtype) <= size, blocks, jnp.minimum(blocks, height))


def _starts(sizes: jax.Array) -> jax.Array:
    """Where each of consecutive blocks begins, along the last dimension."""
    return jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index]; zeros for an index past the end."""
    if rows.shape[0] == 0:  # jnp.take wants a row to take.
        rows = jnp.pad(rows, [(0, 1)] + [(0, 0)] * (rows.ndim - 1))
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


def _varying_like(x: jax.Array, dispatch: Dispatch) -> jax.Array:
    """x, typed as varying over the axes that the layout does: as its cotangents will be."""
    return _compat.make_varying(
        x, sorted(_compat.varying_axes(jax.typeof(dispatch.slot_of)), key=str)
    )


def _capacity(call: Call, factor: Any, num_assignments: int, num_experts: int) -> int:
    refuse_traced(call.where, capacity_factor=factor)
    number = DEFAULT_CAPACITY_FACTOR if factor is None else real_number(factor)
    if number is None or not 0 < number < math.inf:
        problem = f"capacity_factor={factor!r} is not a positive number."
        raise ValueError(errors.text(call.where, problem, "1.0 is the mean of the blocks; try 2."))
    rows = min(number * num_assignments / num_experts, num_assignments)
    return max(1, math.ceil(rows))


def _check(call: Call, x: jax.Array, experts: jax.Array, num_experts: Any) -> None:
    check_experts(call, num_experts)
    if experts.ndim != 2 or not jnp.issubdtype(experts.dtype, jnp.integer):
        problem = f"experts is {experts.dtype}{list(experts.shape)}; integers [tokens, k] needed."
        raise ValueError(errors.text(call.where, problem, "Pass what top_k_router returns."))
    if x.ndim == 0 or x.shape[0] != experts.shape[0]:
        problem = f"x of shape {x.shape} has not a row for each of {experts.shape[0]} tokens."
        raise ValueError(errors.text(call.where, problem, "Pass x as [tokens, ...]."))
    if experts.shape[1] > num_experts:
        problem = f"{experts.shape[1]} experts a token of {num_experts} that there are."
        raise ValueError(errors.text(call.where, problem, "No token goes to an expert twice."))


def _check_combine(rows: jax.Array, weights: jax.Array, dispatch: Dispatch) -> None:
    exchange, wanted = dispatch.exchange, dispatch.slot_of.shape[::-1]
    if weights.shape == wanted and rows.ndim and rows.shape[0] == exchange.output_size:
        return
    where = make_call("combine_from_experts", exchange.wire.axis_name).where
    problem = (
        f"rows have shape {rows.shape} and weights {weights.shape}; this dispatch needs "
        f"[{exchange.output_size}, ...] and [tokens, k] = {list(wanted)}."
    )
    fix = "Pass a row for each that dispatch_to_experts returned, and the weights of its tokens."
    raise ValueError(errors.text(where, problem, fix))


def check_mode(where: str, mode: Any, output_size: Any, capacity_factor: Any) -> None:
    """ValueError unless there is such a mode, and it has the room that is given."""
    refuse_traced(where, mode=mode)
    if mode not in MODES:
        problem = f"mode={mode!r} is unknown."
        raise ValueError(errors.text(where, problem, f"Choose one of {', '.join(MODES)}."))
    name, value, other = (
        ("capacity_factor", capacity_factor, "capacity")
        if mode == "dropless"
        else ("output_size", output_size, "dropless")
    )
    if value is not None:
        problem = f"{name}={value!r} has no meaning in mode={mode!r}."
        raise ValueError(errors.text(where, problem, f"Leave it out, or pass mode={other!r}."))


def check_experts(call: Call, num_experts: Any) -> None:
    """ValueError unless the experts split evenly over the ranks."""
    n = call.num_ranks
    if static_int(call.where, "num_experts", num_experts) < 1 or num_experts % n:
        problem = f"num_experts={num_experts}, which {n} ranks do not divide evenly."
        fix = f"Use {max(1, -(-num_experts // n)) * n} experts, or an axis whose size divides them."
        raise ValueError(errors.text(call.where, problem, fix))


def _check_size(call: Call, output_size: Any) -> int:
    size = static_int(call.where, "output_size", output_size)
    if size < 1:
        problem = f"output_size={size}; a rank needs room for at least 1 row."
        fix = "Leave it out for room for any routing, or pass a multiple of the mean, tokens * k."
        raise ValueError(errors.text(call.where, problem, fix))
    return size
