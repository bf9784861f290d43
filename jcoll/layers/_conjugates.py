"""What a tensor-parallel layer does where an activation enters or leaves the part that is split.

    operator      forward                         backward
    copy_to       identity (Megatron's f)         sum over the ranks
    reduce_from   sum over the ranks (its g)      identity
    gather_from   all blocks, gathered            this rank's block

The backward of each is the forward of its conjugate: the first two are each other's, and that of
gather_from is here for it alone. So derivatives of any order are right. (Shoeybi et al. 2019,
"Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.)

Outside the split part a value is *replicated*: one value, of which each rank has a copy. So has it
one gradient, of which each rank has a copy. With check_vma=True that is what the types say anyway:
replicated is invariant, and the operators change the type along with the value. With
check_vma=False nothing says it, and `jax.lax.psum` assumes the contrary (N values with N
gradients); these operators keep to it all the same, provided that `jax.grad` is called inside
`jax.shard_map`: outside, shard_map splits the gradient of a replicated result among the ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from jcoll import _compat
from jcoll.comm.mesh import Call, canonical_dim
from jcoll.ops import _primitive
from jcoll.ops._invariant import as_invariant
from jcoll.ops.all_gather import SPEC as ALL_GATHER
from jcoll.ops.all_reduce import SPEC as ALL_REDUCE
from jcoll.ops.reduce_scatter import SPEC as REDUCE_SCATTER


def copy_to(x: Any, call: Call) -> Any:
    """x, replicated, for use by each rank on its own.

    With check_vma=True, what varies already is each rank's own, and so is its gradient: it stays.
    """
    return _copy_to(x, call) if _is_replicated(x, call) else x


def reduce_from(x: Any, call: Call) -> Any:
    """The sum of x over the ranks, replicated."""
    return _reduce_from(_compat.make_varying(x, call.axes), call)


def gather_from(x: Any, dim: int, call: Call, what: str) -> Any:
    """The ranks' arrays, one after the other along `dim`, the argument `what`; replicated."""
    dim = canonical_dim(call.where, what, dim, x.ndim)
    return _gather_from(_compat.make_varying(x, call.axes), dim, call)


# Linear operators that are each rank's own on both sides. JAX transposes them by itself.


def gather(x: Any, dim: int, call: Call, what: str) -> Any:
    """As gather_from, but each rank's result is its own; backward: sum_scatter."""
    dim = canonical_dim(call.where, what, dim, x.ndim)
    (y,) = _primitive.bind(ALL_GATHER, x, call=call) if call.axes else (x[None],)
    return _primitive.place_blocks(y, dim, True)


def sum_scatter(x: Any, dim: int, call: Call, what: str) -> Any:
    """This rank's block, along `dim`, of the sum of x over the ranks; backward: gather."""
    dim = canonical_dim(call.where, what, dim, x.ndim)
    blocks = _primitive.take_blocks(x, dim, True, call, what)
    return _primitive.bind(REDUCE_SCATTER, blocks, call=call, op="sum")[0]


def _is_replicated(x: Any, call: Call) -> bool:
    """False only if the types say that x varies over one of the axes."""
    tracked = _compat.check_vma()
    return not (tracked and _compat.varying_axes(jax.typeof(x)) & set(call.axes))


# The forward rules call the operators, not their bodies: then second derivatives find them too.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy_to(x: Any, call: Call) -> Any:
    return _compat.make_varying(x, call.axes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduce_from(x: Any, call: Call) -> Any:
    return _primitive.bind(ALL_REDUCE, x, call=call, op="sum")[0]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter_to(x: Any, dim: int, call: Call) -> Any:
    return _own_block(_compat.make_varying(x, call.axes), dim, call)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_from(x: Any, dim: int, call: Call) -> Any:
    return as_invariant(gather(x, dim, call, "dim"), call.axes)


_copy_to.defvjp(
    lambda x, call: (_copy_to(x, call), None),
    lambda call, _, ct: (_reduce_from(ct, call),),
)
_reduce_from.defvjp(
    lambda x, call: (_reduce_from(x, call), None),
    lambda call, _, ct: (_copy_to(ct, call),),
)
_scatter_to.defvjp(
    lambda x, dim, call: (_scatter_to(x, dim, call), None),
    lambda dim, call, _, ct: (_gather_from(ct, dim, call),),
)
_gather_from.defvjp(
    lambda x, dim, call: (_gather_from(x, dim, call), None),
    lambda dim, call, _, ct: (_scatter_to(ct, dim, call),),
)


def _own_block(x: Any, dim: int, call: Call) -> Any:
    size = x.shape[dim] // call.num_ranks
    start = jax.lax.axis_index(call.axes) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)
