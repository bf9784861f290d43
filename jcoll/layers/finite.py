"""NaN and Inf in gradients, found before a reduction spreads them from one rank to all.

After an all_reduce every rank has the NaN and nothing says whose it was. `check_finite` counts on
each rank, leaf by leaf, and exchanges the counts: all ranks get one table, so that all take the
same decision (skip the step, stop), and the program that waits on the host can name leaf and rank.

Where the backward pass itself reduces (`sync_in_backward`, `zero.gather`, `zero.regathered`,
`zero.redirect_gradients`), nobody has the gradients before it. There `watch_finite` counts, in the
backward pass, and the counts come out as the gradients of numbers that are zero, the probes:

    def loss_of(shards, probes):                               # inside jax.shard_map
        params = zero.gather(shards, layout, "data")
        return loss(watch_finite(params, probes), batch)

    probes = finite_probes(layout, "data")
    grads, counts = jax.grad(loss_of, (0, 1))(shards, probes)
    report = report_finite(counts, "data")

Sources: Micikevicius et al. 2018, "Mixed Precision Training" (a step with Inf or NaN in its
gradients is skipped, on all ranks alike); gradients of inputs that add nothing as a way out of a
backward pass: Flax's `perturb`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import (
    keystr,
    register_dataclass,
    tree_flatten_with_path,
    tree_leaves_with_path,
)

from jcoll import _compat, errors
from jcoll.comm.mesh import AxisName, Call, make_call
from jcoll.layers.data_parallel import check_leaf, is_float0
from jcoll.ops._invariant import as_invariant
from jcoll.ops.all_gather import all_gather


@functools.partial(register_dataclass, data_fields=["counts"], meta_fields=["paths", "where"])
@dataclass(frozen=True)
class FiniteReport:
    """How many elements of which leaf are NaN or Inf on which rank; the same on all ranks."""

    counts: Any
    """int32 [ranks, leaves]"""

    paths: tuple[str, ...]
    """The leaves' paths in the tree, in the order of `counts`."""

    where: str

    @property
    def all_finite(self) -> Any:
        """A bool; inside jit a traced one: `jax.lax.cond(report.all_finite, update, skip)`."""
        return (self.counts == 0).all()

    def raise_if_not_finite(self) -> None:
        """FloatingPointError that names leaves and ranks. Outside jit, on a report it returned."""
        counts = np.asarray(self.counts)
        if not counts.any():
            return
        bad = [
            f"{path} ({counts[:, leaf].sum()} on {_ranks(np.flatnonzero(counts[:, leaf]))})"
            for leaf, path in enumerate(self.paths)
            if counts[:, leaf].any()
        ]
        problem = f"NaN or Inf, before the reduction, in {len(bad)} of {len(self.paths)} leaves: "
        fix = (
            "Look at these ranks' batches and losses; jax.config.update('jax_debug_nans', True) "
            "names the operation."
        )
        raise FloatingPointError(errors.text(self.where, problem + "; ".join(bad) + ".", fix))


def check_finite(
    grads: Any, axis_name: AxisName, *, algorithm: str = "auto", timeout_s: float | None = None
) -> FiniteReport:
    """Counts NaN and Inf in `grads`, this rank's, not yet summed; on all ranks of `axis_name`.

        report = check_finite(grads, "data")          # inside jax.shard_map, out_specs=P()
        grads = jcoll.sync_gradients(grads, "data")
        ...
        report.raise_if_not_finite()                  # outside, on what the step returned

    Args:
      grads: a pytree of arrays of any shapes and dtypes, or Python numbers; integers, and their
        `float0`, count as finite; of complex numbers either part may be NaN or Inf.
      axis_name: the axis, or a tuple of all axes, over which the gradients differ.
      algorithm, timeout_s: as in `jcoll.all_gather`, for the one collective: 4 bytes per leaf.

    Returns:
      A FiniteReport, a pytree with `counts` int32 [ranks, leaves], replicated over the axis. A
      report and not an exception: none can leave compiled code of one rank while the others wait in
      a collective.

    Derivative: none, counts are integers.

    Source: the overflow check of loss scaling (Micikevicius et al. 2018), by leaf and rank.
    """
    settings: dict[str, Any] = {"algorithm": algorithm, "timeout_s": timeout_s}
    call = make_call("check_finite", axis_name, plan_op="all_gather", **settings)
    leaves = tree_leaves_with_path(grads)
    paths = tuple(f"grads{keystr(path)}" for path, _ in leaves)
    counts = [_count(call.where, path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    return _exchange(counts, paths, call, settings)


def finite_probes(params: Any, axis_name: AxisName) -> Any:
    """A pytree like `params` of zeros, float32 scalars, for `watch_finite`; varying over the axis.

    `params`: any pytree of the parameters' structure, such as their layout; for stacked layers and
    jax.lax.scan, of one layer's, and the counts are those of all layers together.
    """
    call = make_call("finite_probes", axis_name, plan_op="all_gather")
    return jax.tree.map(
        lambda _: _compat.make_varying(jnp.zeros((), jnp.float32), call.axes), params
    )


def watch_finite(params: Any, probes: Any) -> Any:
    """`params` themselves. The gradient of each probe is how many elements of the parameter's
    gradient are NaN or Inf on this rank.

    Put it between what reduces gradients and what uses the parameters: the gradients that it sees
    are those that have not been reduced. Inside of `zero.regathered`, probes are one of the layer's
    arguments.

    Args:
      params: a pytree of arrays of any shapes and dtypes; gradients of integers count as finite.
      probes: `finite_probes` of it: as many float32 scalars, varying over all axes that params do.

    Returns: `params`, of the same shapes, dtypes and types over the axes.

    Derivative: to `params` the identity; to `probes` the counts, each a float32. Reverse mode.
    """
    entries, treedef = tree_flatten_with_path(params)
    numbers, given = jax.tree.flatten(probes)
    if given != treedef:
        problem = f"probes is a tree {given}, params {treedef}."
        fix = "Make it by finite_probes(params, axis_name)."
        raise ValueError(errors.text("watch_finite", problem, fix))
    watched = []
    for (path, leaf), probe in zip(entries, numbers, strict=True):
        _check_probe(f"params{keystr(path)}", leaf, probe)
        watched.append(_watched(leaf, probe))
    return jax.tree.unflatten(treedef, watched)


def _check_probe(name: str, leaf: Any, probe: Any) -> None:
    if jnp.shape(probe) or jnp.result_type(probe) != jnp.float32:
        given = f"{jnp.result_type(probe)}{list(jnp.shape(probe))}"
        problem = f"the probe of {name} is {given}; a float32 scalar is needed."
        fix = "Make it by finite_probes(params, axis_name)."
        raise ValueError(errors.text("watch_finite", problem, fix))
    if not _compat.check_vma():
        return
    extra = _compat.varying_axes(jax.typeof(leaf)) - _compat.varying_axes(jax.typeof(probe))
    if extra:
        axis = repr(min(extra, key=str))
        problem = f"{name} differs between the ranks of axis {axis}, and its probe does not."
        fix = f"Make the probes, and the report, over all axes: {axis} as well."
        raise ValueError(errors.text("watch_finite", problem, fix))


@jax.custom_vjp
def _watched(param: Any, probe: Any) -> Any:
    del probe
    return param


def _watched_bwd(probe: Any, grad: Any) -> tuple[Any, Any]:
    count = _count("watch_finite", "grads", grad).astype(jnp.float32)
    axes = sorted(_compat.varying_axes(jax.typeof(probe)), key=str)
    return grad, _compat.make_varying(count, axes)


_watched.defvjp(lambda param, probe: (_watched(param, probe), probe), _watched_bwd)


def report_finite(
    counts: Any, axis_name: AxisName, *, algorithm: str = "auto", timeout_s: float | None = None
) -> FiniteReport:
    """As `check_finite`, of the gradients of `watch_finite`'s probes."""
    settings: dict[str, Any] = {"algorithm": algorithm, "timeout_s": timeout_s}
    call = make_call("report_finite", axis_name, plan_op="all_gather", **settings)
    leaves = tree_leaves_with_path(counts)
    paths = tuple(f"grads{keystr(path)}" for path, _ in leaves)
    return _exchange([jnp.asarray(leaf, jnp.int32) for _, leaf in leaves], paths, call, settings)


def _exchange(counts: list, paths: tuple[str, ...], call: Call, settings: dict) -> FiniteReport:
    own = jnp.stack(counts) if counts else jnp.zeros(0, jnp.int32)
    every = all_gather(own, call.axes, **settings)
    every = as_invariant(every.reshape(call.num_ranks, len(counts)), call.axes)
    return FiniteReport(every, paths, call.where)


def _count(where: str, name: str, leaf: Any) -> jax.Array:
    if is_float0(leaf):
        return jnp.zeros((), jnp.int32)
    check_leaf(where, name, leaf)
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros((), jnp.int32)
    return jnp.sum(~jnp.isfinite(array), dtype=jnp.int32)


def _ranks(ranks: np.ndarray) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
