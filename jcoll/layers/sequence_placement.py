"""Which tokens of a sequence are where, if N ranks hold a part each.

    contiguous   rank r holds part r of N.
    zigzag       of 2 N parts, rank r holds parts r and 2 N - 1 - r: an early and a late one.

Under a causal mask a token of part p looks at p parts, so that contiguous ranks do between 1 and N
shares of work and all wait for the last. In zigzag each does r + (2 N - 1 - r), whatever r is. (The
order of Megatron-LM's and zhuzilin's ring attention; Llama 3, section 3.3.2.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcoll import errors
from jcoll.comm.mesh import canonical_dim, refuse_traced, static_int

PLACEMENTS = ("contiguous", "zigzag")


def to_zigzag(x: Any, axis_size: int, dim: int = 1) -> Any:
    """x in the order in which an even split of `dim` over `axis_size` ranks is zigzag.

    For the whole sequence, before it is split: of token ids and labels, say, or of a whole batch.
    All else (embeddings, losses by token) follows; rotary and learned positions go by
    `positions_of`.

    Args:
      x: array of numpy or jax, or pytree of arrays.
      axis_size: the number of ranks along the mesh axis.
      dim: the dimension of tokens; 1, after that of the batch, if not given.

    Raises: ValueError, with the size to pad to, if 2 * axis_size does not divide `dim`.
    """
    return jax.tree.map(lambda leaf: _reorder("to_zigzag", leaf, axis_size, dim, _order), x)


def from_zigzag(x: Any, axis_size: int, dim: int = 1) -> Any:
    """The inverse of `to_zigzag`: tokens in the order of the text."""
    return jax.tree.map(lambda leaf: _reorder("from_zigzag", leaf, axis_size, dim, _inverse), x)


def positions_of(
    rank: Any, axis_size: int, local_length: int, placement: str = "contiguous"
) -> jax.Array:
    """The positions in the text of the tokens of a rank: int32 [local_length].

    Args:
      rank: a number, or `jax.lax.axis_index(axis_name)`.
      axis_size: the number of ranks along the mesh axis.
      local_length: tokens of a rank; even for zigzag.
      placement: "contiguous" or "zigzag".
    """
    where = "positions_of"
    axis_size = static_int(where, "axis_size", axis_size)
    length = static_int(where, "local_length", local_length)
    check_placement(where, placement, axis_size, length)
    rank = jnp.asarray(rank, jnp.int32)
    if placement == "contiguous":
        return rank * length + jnp.arange(length, dtype=jnp.int32)
    part = length // 2
    within = jnp.arange(part, dtype=jnp.int32)
    return jnp.concatenate([rank * part + within, (2 * axis_size - 1 - rank) * part + within])


def check_placement(where: str, placement: Any, axis_size: int, local_length: int) -> None:
    """ValueError unless `local_length` tokens of a rank can be placed so."""
    refuse_traced(where, placement=placement)
    if placement not in PLACEMENTS:
        problem = f"placement={placement!r} is none; 'contiguous' or 'zigzag' is needed."
        raise ValueError(errors.text(where, problem, "Zigzag balances causal attention."))
    if placement == "zigzag" and local_length % 2:
        total, parts = local_length * axis_size, 2 * axis_size
        problem = f"a rank has {local_length} tokens; placement='zigzag' needs an even number."
        fix = f"Pad the sequence of {total} tokens to {-(-total // parts) * parts}, then to_zigzag."
        raise ValueError(errors.text(where, problem, fix))


def _order(axis_size: int) -> np.ndarray:
    """The parts, in the order of the ranks: 0, 2 N - 1, 1, 2 N - 2, .."""
    early = np.arange(axis_size)
    return np.stack([early, 2 * axis_size - 1 - early], axis=1).reshape(-1)


def _inverse(axis_size: int) -> np.ndarray:
    return np.argsort(_order(axis_size))


def _reorder(where: str, x: Any, axis_size: Any, dim: Any, order: Any) -> Any:
    axis_size = static_int(where, "axis_size", axis_size)
    dim = canonical_dim(where, "dim", dim, x.ndim)
    if axis_size < 1:
        problem = f"axis_size={axis_size} is no number of ranks; at least 1 is needed."
        raise ValueError(errors.text(where, problem, "Pass the size of the mesh axis."))
    parts, size = 2 * axis_size, x.shape[dim]
    if size % parts:
        problem = f"dim={dim} has size {size}, which twice the {axis_size} ranks do not divide."
        raise ValueError(errors.text(where, problem, f"Pad it to {-(-size // parts) * parts}."))
    split = x.reshape(*x.shape[:dim], parts, size // parts, *x.shape[dim + 1 :])
    return split[(slice(None),) * dim + (order(axis_size),)].reshape(x.shape)
