"""Which tokens of a sequence are where, if N ranks hold a part each.

    contiguous   rank r holds part r of N.
    zigzag       of 2 N parts, rank r holds parts r and 2 N - 1 - r: an early and a late one.

Under a causal mask a token of part p looks at p parts, so that contiguous ranks do between 1 and N
shares of work and all wait for the last. In zigzag each does r + (2 N - 1 - r), whatever r is. (The
order of Megatron-LM's and zhuzilin's ring attention; Llama 3, section 3.3.2.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import _compat, errors
from jcoll.comm.mesh import canonical_dim, refuse_traced, static_int

PLACEMENTS = ("contiguous", "zigzag")


def to_zigzag(x: Any, num_ranks: int, *, sequence_dim: int = 1) -> Any:
    """x in the order in which an even split of `sequence_dim` over `num_ranks` ranks is zigzag.

    For the whole sequence, before it is split: of token ids and labels, say, or of a whole batch.
    All else (embeddings, losses by token) follows; rotary and learned positions go by
    `positions_of`.

    Args:
      x: array of numpy or jax, or pytree of arrays: [..., S, ...] of any dtype, S tokens in
        `sequence_dim`, all of them; 2 * num_ranks divides S.
      num_ranks: N, the number of ranks along the mesh axis.
      sequence_dim: the dimension of tokens; 1, after that of the batch, if not given.

    Returns: x, of the same shape and dtype, of numpy if x is. Its 2 N parts of S / (2 N) tokens are
      in the order 0, 2 N - 1, 1, 2 N - 2, ..

    Derivative: `from_zigzag` of the cotangent.

    Raises: ValueError, with the size to pad to, if 2 * num_ranks does not divide the dimension.

    Source: Megatron-LM's context parallelism, and ring-flash-attention (zhuzilin), "zigzag".
    """
    reorder = functools.partial(_reorder, "to_zigzag", num_ranks, sequence_dim, _order)
    return jax.tree.map(reorder, x)


def from_zigzag(x: Any, num_ranks: int, *, sequence_dim: int = 1) -> Any:
    """The inverse of `to_zigzag`: tokens in the order of the text.

    Args, Returns, Raises, Source: as for `to_zigzag`, of which x is the result: [..., S, ...] of
      the whole sequence, or what a model made of it token by token.

    Derivative: `to_zigzag` of the cotangent.
    """
    reorder = functools.partial(_reorder, "from_zigzag", num_ranks, sequence_dim, _inverse)
    return jax.tree.map(reorder, x)


def positions_of(
    rank: Any, num_ranks: int, local_length: int, *, placement: str = "contiguous"
) -> jax.Array:
    """The positions in the text of the tokens of a rank: int32 [local_length].

    Args:
      rank: a number, or `jax.lax.axis_index(axis_name)`.
      num_ranks: the number of ranks along the mesh axis.
      local_length: tokens of a rank; even for zigzag.
      placement: "contiguous" or "zigzag".
    """
    where = "positions_of"
    num_ranks = _check_ranks(where, num_ranks)
    length = static_int(where, "local_length", local_length)
    if length < 0:
        problem = f"local_length={length} is no number of tokens; 0 or more are needed."
        raise ValueError(errors.text(where, problem, "Pass the number of tokens of a rank."))
    check_placement(where, placement, num_ranks, length)
    rank = _checked_rank(where, rank, num_ranks)
    if placement == "contiguous":
        return rank * length + jnp.arange(length, dtype=jnp.int32)
    part = length // 2
    within = jnp.arange(part, dtype=jnp.int32)
    return jnp.concatenate([rank * part + within, (2 * num_ranks - 1 - rank) * part + within])


def check_placement(where: str, placement: Any, num_ranks: int, local_length: int) -> None:
    """ValueError unless `local_length` tokens of a rank can be placed so."""
    refuse_traced(where, placement=placement)
    if placement not in PLACEMENTS:
        problem = f"placement={placement!r} is none; 'contiguous' or 'zigzag' is needed."
        raise ValueError(errors.text(where, problem, "Zigzag balances causal attention."))
    if placement == "zigzag" and local_length % 2:
        total, parts = local_length * num_ranks, 2 * num_ranks
        problem = f"a rank has {local_length} tokens; placement='zigzag' needs an even number."
        fix = f"Pad the sequence of {total} tokens to {-(-total // parts) * parts}, then to_zigzag."
        raise ValueError(errors.text(where, problem, fix))


def _check_ranks(where: str, num_ranks: Any) -> int:
    number = static_int(where, "num_ranks", num_ranks)
    if number >= 1:
        return number
    problem = f"num_ranks={number} is no number of ranks; at least 1 is needed."
    raise ValueError(errors.text(where, problem, "Pass the size of the mesh axis."))


def _checked_rank(where: str, rank: Any, num_ranks: int) -> jax.Array:
    """An int32; of one that is not known yet the type is all that can be wrong."""
    dtype, shape = jnp.result_type(rank), jnp.shape(rank)
    if shape or not jnp.issubdtype(dtype, jnp.integer):
        problem = f"rank is {dtype}{list(shape)}; one integer is needed."
        raise TypeError(errors.text(where, problem, "Pass jax.lax.axis_index(axis_name)."))
    known = not isinstance(rank, _compat.Tracer)
    if known and not 0 <= int(rank) < num_ranks:
        problem = f"rank={int(rank)} of {num_ranks} ranks; 0 to {num_ranks - 1} is needed."
        raise ValueError(errors.text(where, problem, "Pass jax.lax.axis_index(axis_name)."))
    return jnp.asarray(rank, jnp.int32)


def _order(num_ranks: int) -> np.ndarray:
    """The parts, in the order of the ranks: 0, 2 N - 1, 1, 2 N - 2, .."""
    early = np.arange(num_ranks)
    return np.stack([early, 2 * num_ranks - 1 - early], axis=1).reshape(-1)


def _inverse(num_ranks: int) -> np.ndarray:
    return np.argsort(_order(num_ranks))


def _reorder(where: str, num_ranks: Any, sequence_dim: Any, order: Callable, x: Any) -> Any:
    num_ranks = _check_ranks(where, num_ranks)
    if not isinstance(x, jax.Array | np.ndarray):
        problem = f"x has a {type(x).__name__}; arrays of numpy or jax are needed."
        raise TypeError(errors.text(where, problem, "Pass numpy.asarray(x)."))
    dim = canonical_dim(where, "sequence_dim", sequence_dim, x.ndim)
    parts, size = 2 * num_ranks, x.shape[dim]
    if size % parts:
        problem = f"sequence_dim={dim} has size {size}, which twice the {num_ranks} ranks do not "
        problem += "divide."
        raise ValueError(errors.text(where, problem, f"Pad it to {-(-size // parts) * parts}."))
    split = x.reshape(*x.shape[:dim], parts, size // parts, *x.shape[dim + 1 :])
    return split[(slice(None),) * dim + (order(num_ranks),)].reshape(x.shape)
