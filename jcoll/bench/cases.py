"""One case per op: the same exchange written with jcoll and with jax.lax, and what it must give.

To add an op: one function here that returns its two sides, one line in `CASES`, and its entry in
`catalog.CATALOG`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import jcoll
from jcoll.bench import values

AXIS = "ranks"
Array = Any  # a jax array or, in `expected_state`, a numpy one: feedbacks run on both
Feedback = Callable[..., Array]


@dataclass(frozen=True)
class Problem:
    """What one row measures."""

    op: str
    num_ranks: int
    dtype: np.dtype
    count: int  # elements in the buffer of S bytes
    redop: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    form: str = "single"  # or chain, loop
    steps: int = 1  # collectives in one program

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def _keep(y: Array, *extras: Array) -> Array:
    return y


@dataclass(frozen=True)
class Side:
    """One of the two programs of a case; `x` and `extras` are [num_ranks, ...] arrays."""

    call: Callable[..., Array]  # (x, *extras) -> y, inside shard_map
    x: np.ndarray
    reference: Callable[[np.ndarray], np.ndarray]  # all ranks' x -> all ranks' y
    extras: tuple[np.ndarray, ...] = ()
    feedback: Feedback = _keep  # (y, *extras) -> the next x
    ranks_compared: tuple[int, ...] | None = None  # None: every rank's result is defined


@dataclass(frozen=True)
class Sides:
    jcoll: Side
    lax: Side = field(repr=False)


def _pair(ours: Callable[..., Array], theirs: Callable[..., Array], **shared: Any) -> Sides:
    return Sides(Side(call=ours, **shared), Side(call=theirs, **shared))


def _weigh(y: Array, weight: Array) -> Array:
    return y * weight


def _fold(stacked: Array, redop: str) -> Array:
    folds = {"prod": jnp.multiply, "and": jnp.bitwise_and, "or": jnp.bitwise_or}
    folds |= {"max": jnp.maximum, "min": jnp.minimum}
    return functools.reduce(folds[redop], list(stacked))


def _lax_all_reduce(x: Array, redop: str) -> Array:
    named = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}
    if redop in named:
        return named[redop](x, AXIS)
    return _fold(lax.all_gather(x, AXIS), redop)


def _lax_reduce_scatter(x: Array, redop: str, num_ranks: int) -> Array:
    if redop in ("sum", "mean"):
        y = lax.psum_scatter(x, AXIS, tiled=True)
        return y / num_ranks if redop == "mean" else y
    return _fold(lax.all_to_all(x.reshape(num_ranks, -1), AXIS, 0, 0), redop)


def _masked(x: Array, root: int) -> Array:
    return jnp.where(lax.axis_index(AXIS) == root, x, jnp.zeros_like(x))


def _reductions(p: Problem) -> dict[str, Any]:
    """The input of a reduction and, for sums, the weights that keep a chain of them exact."""
    shared: dict[str, Any] = {"x": values.reduced(p.dtype, p.num_ranks, p.count, p.redop)}
    if p.redop == "sum" and p.form != "single":
        shared |= {"extras": (values.weights(p.dtype, p.num_ranks),), "feedback": _weigh}
    return shared


def _all_reduce(p: Problem) -> Sides:
    return _pair(
        lambda x, *_: jcoll.all_reduce(x, AXIS, op=p.redop, algorithm=p.algorithm),
        lambda x, *_: _lax_all_reduce(x, p.redop),
        reference=lambda xs: values.all_reduce(xs, p.redop),
        **_reductions(p),
    )


def _reduce_scatter(p: Problem) -> Sides:
    shared = _reductions(p)
    inner = shared.pop("feedback", _keep)

    def repeat(y: Array, *extras: Array) -> Array:
        y = inner(y, *extras)
        return (np if isinstance(y, np.ndarray) else jnp).tile(y, p.num_ranks)

    return _pair(
        lambda x, *_: jcoll.reduce_scatter(x, AXIS, op=p.redop, tiled=True, algorithm=p.algorithm),
        lambda x, *_: _lax_reduce_scatter(x, p.redop, p.num_ranks),
        reference=lambda xs: values.reduce_scatter(xs, p.redop),
        feedback=repeat,
        **shared,
    )


def _all_gather(p: Problem) -> Sides:
    """Fed back: every rank goes on with its next neighbour's block."""
    following = (np.arange(p.num_ranks, dtype=np.int32) + 1) % p.num_ranks
    return _pair(
        lambda x, *_: jcoll.all_gather(x, AXIS, tiled=True, algorithm=p.algorithm),
        lambda x, *_: lax.all_gather(x, AXIS, tiled=True),
        x=values.moved(p.dtype, p.num_ranks, p.count // p.num_ranks),
        reference=values.all_gather,
        extras=(following.reshape(-1, 1),) if p.form != "single" else (),
        feedback=lambda y, index: y.reshape(p.num_ranks, -1)[index[0]],
    )


def _all_to_all(p: Problem) -> Sides:
    return _pair(
        lambda x: jcoll.all_to_all(x, AXIS, 0, 0, tiled=True, algorithm=p.algorithm),
        lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        x=values.moved(p.dtype, p.num_ranks, p.count),
        reference=values.all_to_all,
    )


def _ppermute(p: Problem) -> Sides:
    perm = [(rank, (rank + 1) % p.num_ranks) for rank in range(p.num_ranks)]
    return _pair(
        lambda x: jcoll.ppermute(x, AXIS, perm, algorithm=p.algorithm),
        lambda x: lax.ppermute(x, AXIS, perm),
        x=values.moved(p.dtype, p.num_ranks, p.count),
        reference=values.ppermute,
    )


def _padded_peer(p: Problem, counts: np.ndarray) -> Side:
    """lax has no ragged exchange on CPU: blocks padded to the largest count, as users do there.

    The rows are padded before and stay padded after the measured call, which favours the peer.
    """
    return Side(
        call=lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        x=values.moved(p.dtype, p.num_ranks, p.num_ranks * int(counts.max())),
        reference=values.all_to_all,
    )


def _ragged_all_to_all(p: Problem) -> Sides:
    counts = values.ragged_counts(p.num_ranks, p.count)  # symmetric: what is sent is also received
    sends = np.cumsum(counts, axis=1, dtype=np.int32) - counts
    lands = sends.T  # block (i, j) lands behind the blocks of the ranks before i
    ours = Side(
        call=lambda x, starts, sizes, targets: jcoll.ragged_all_to_all(
            x,
            jnp.zeros_like(x),
            starts,
            sizes,
            targets,
            sizes,
            axis_name=AXIS,
            algorithm=p.algorithm,
        ),
        x=values.moved(p.dtype, p.num_ranks, p.count),
        reference=lambda xs: values.ragged(xs, counts),
        extras=(sends, counts, lands),
    )
    return Sides(ours, _padded_peer(p, counts))


def _all_to_all_v(p: Problem) -> Sides:
    counts = values.ragged_counts(p.num_ranks, p.count)
    ours = Side(
        call=lambda x, sizes: jcoll.all_to_all_v(
            x, sizes, AXIS, output_size=p.count, algorithm=p.algorithm
        )[0],
        x=values.moved(p.dtype, p.num_ranks, p.count),
        reference=lambda xs: values.ragged(xs, counts),
        extras=(counts,),
    )
    return Sides(ours, _padded_peer(p, counts))


def _broadcast(p: Problem) -> Sides:
    return _pair(
        lambda x: jcoll.broadcast(x, AXIS, root=p.root, algorithm=p.algorithm),
        lambda x: lax.psum(_masked(x, p.root), AXIS),
        x=values.moved(p.dtype, p.num_ranks, p.count),
        reference=lambda xs: values.broadcast(xs, p.root),
    )


def _reduce(p: Problem) -> Sides:
    return _pair(
        lambda x: jcoll.reduce(x, AXIS, op=p.redop, root=p.root, algorithm=p.algorithm),
        lambda x: _lax_all_reduce(x, p.redop),
        reference=lambda xs: values.all_reduce(xs, p.redop),
        ranks_compared=(p.root,),
        **_reductions(p),
    )


def _gather(p: Problem) -> Sides:
    return _pair(
        lambda x: jcoll.gather(x, AXIS, root=p.root, tiled=True, algorithm=p.algorithm),
        lambda x: lax.all_gather(x, AXIS, tiled=True),
        x=values.moved(p.dtype, p.num_ranks, p.count // p.num_ranks),
        reference=values.all_gather,
        ranks_compared=(p.root,),
    )


def _scatter(p: Problem) -> Sides:
    return _pair(
        lambda x: jcoll.scatter(x, AXIS, root=p.root, tiled=True, algorithm=p.algorithm),
        lambda x: lax.psum_scatter(_masked(x, p.root), AXIS, tiled=True),
        x=values.moved(p.dtype, p.num_ranks, p.count),
        reference=lambda xs: xs[p.root].reshape(p.num_ranks, -1),
    )


def _barrier(p: Problem) -> Sides:
    """The peer keeps its collective alive by writing the gathered element into its result."""

    def first_of_root(xs: np.ndarray) -> np.ndarray:
        ys = xs.copy()
        ys[:, 0] = xs[0, 0]
        return ys

    x = values.moved(p.dtype, p.num_ranks, p.count)
    theirs = lambda x: x.at[:1].set(lax.all_gather(x[:1], AXIS)[0])  # noqa: E731
    ours = Side(
        call=lambda x: jcoll.barrier(x, AXIS, algorithm=p.algorithm), x=x, reference=lambda xs: xs
    )
    return Sides(ours, replace(ours, call=theirs, reference=first_of_root))


CASES: dict[str, Callable[[Problem], Sides]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "ragged_all_to_all": _ragged_all_to_all,
    "all_to_all_v": _all_to_all_v,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}


def expected_state(side: Side, form: str, steps: int) -> np.ndarray:
    """All ranks' results of the program, in numpy.

    A repeated step soon runs in a circle (a sum settles at once, a rotation returns after n steps),
    so once the state after the first step comes back, only the remainder is worked out.
    """
    if form == "single":
        return side.reference(side.x)
    state = first = _step(side, side.x)
    done = 1
    while done < steps:
        state = _step(side, state)
        done += 1
        if np.array_equal(state, first):
            steps, done = 1 + (steps - 1) % (done - 1), 1
            return functools.reduce(lambda s, _: _step(side, s), range(steps - done), state)
    return state


def _step(side: Side, xs: np.ndarray) -> np.ndarray:
    ys = side.reference(xs)
    rows = [side.feedback(y, *(e[rank] for e in side.extras)) for rank, y in enumerate(ys)]
    return np.stack(rows)
