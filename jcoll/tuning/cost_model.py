"""Estimated costs, where nothing is measured: the alpha-beta model of one host. No jax.

On CUDA the shipped table is an estimate itself (scripts/estimate_cuda_costs.py).

Good for an order among algorithms, not for microseconds: see jcoll/plan/simulate.py for what it
leaves out. There is no model of XLA's collectives, nor of jcoll's between hosts.
"""

from __future__ import annotations

import functools

import numpy as np

from jcoll.algorithms import registry
from jcoll.algorithms.authored import errors_of
from jcoll.plan.ir import PlanError
from jcoll.plan.simulate import simulate
from jcoll.plan.topology import CPU_HOST
from jcoll.tuning.candidates import CPU, HOSTS, NOWHERE, PROCESS

MAX_SIMULATED_RANKS = 64
"""Above, the formulas of the catalogue: a plan of thousands of ranks takes seconds to build."""

_LINK = CPU_HOST.links[0]


@functools.lru_cache(maxsize=1024)
def estimate(
    op: str, name: str, num_ranks: int, nbytes: int, placement: str, device_kind: str = CPU
) -> float | None:
    """Microseconds; None if there is no model."""
    if name == "xla" or placement in (HOSTS, NOWHERE) or device_kind != CPU:
        return None
    if name == "direct":
        return _direct(op, num_ranks, nbytes, placement)
    return _plan(op, name, num_ranks, nbytes)


registry.on_register.append(estimate.cache_clear)


def _plan(op: str, name: str, num_ranks: int, nbytes: int) -> float | None:
    if name not in registry.names(op):
        return None
    a = registry.get(op, name)
    if a.supports(num_ranks) is not None:
        return None
    try:
        if num_ranks <= MAX_SIMULATED_RANKS:
            return float(simulate(a, num_ranks, np.array([nbytes]), CPU_HOST)[0]) * 1e6
        return _by_formulas(a, num_ranks, nbytes)
    except PlanError:  # Its author's mistake, which is told whoever names it.
        return None


def _by_formulas(a: registry.Algorithm, num_ranks: int, nbytes: int) -> float | None:
    if a.rounds is None or a.sent is None:
        return None
    with errors_of(a.rounds, a.name):
        return _formula(a.rounds(num_ranks), num_ranks * a.sent(num_ranks) * nbytes)


def _direct(op: str, num_ranks: int, nbytes: int, placement: str) -> float | None:
    """One step, in which every rank reads what it needs from all others.

    In one process a sum that all ranks need is made once, not by each of them.
    """
    if op == "all_reduce" and placement == PROCESS:
        return _formula(1, 2 * (num_ranks - 1) * nbytes)
    return _plan(op, "one_shot", num_ranks, nbytes)


def _formula(rounds: float, total_nbytes: float) -> float:
    """All ranks' bytes go over one memory bus."""
    return (_LINK.alpha * rounds + _LINK.beta * total_nbytes) * 1e6
