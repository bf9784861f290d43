"""NaN and Inf in gradients, found before a reduction spreads them from one rank to all.

After an all_reduce every rank has the NaN and nothing says whose it was. `check_finite` counts on
each rank, leaf by leaf, and exchanges the counts: all ranks get one table, so that all take the
same decision (skip the step, stop), and the program that waits on the host can name leaf and rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, register_dataclass, tree_leaves_with_path

from jcoll import errors
from jcoll.comm.mesh import AxisName, make_call
from jcoll.layers.data_parallel import check_gradient, is_float0
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
      grads: a pytree of arrays or Python numbers; integers, and their `float0`, count as finite.
      axis_name: the axis, or a tuple of all axes, over which the gradients differ.
      algorithm, timeout_s: as in `jcoll.all_gather`, for the one collective: 4 bytes per leaf.

    Returns:
      A FiniteReport, a pytree, replicated over the axis. A report and not an exception: none can
      leave compiled code of one rank while the others wait in a collective.
    """
    settings: dict[str, Any] = {"algorithm": algorithm, "timeout_s": timeout_s}
    call = make_call("check_finite", axis_name, plan_op="all_gather", **settings)
    leaves = tree_leaves_with_path(grads)
    paths = tuple(f"grads{keystr(path)}" for path, _ in leaves)
    counts = [_count(call.where, path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    own = jnp.stack(counts) if counts else jnp.zeros(0, jnp.int32)
    every = all_gather(own, axis_name, **settings)
    every = as_invariant(every.reshape(call.num_ranks, len(leaves)), call.axes)
    return FiniteReport(every, paths, call.where)


def _count(where: str, name: str, leaf: Any) -> jax.Array:
    if is_float0(leaf):
        return jnp.zeros((), jnp.int32)
    check_gradient(where, name, leaf)
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros((), jnp.int32)
    return jnp.sum(~jnp.isfinite(array), dtype=jnp.int32)


def _ranks(ranks: np.ndarray) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
