"""The choice among the candidates, and its reason. No jax.

The rules, in order:
  1. Where jcoll's runtime cannot serve, XLA's collectives do, for the reason that it gives.
  2. Costs are those of the first table that has "direct" for the op and the placement: the user's
     own, then the shipped one. Without any, all are modelled: measured and modelled numbers are
     not compared with each other. (A table as a whole may be estimated, and then says so.)
  3. "direct", unless the cheapest costs at least MARGIN less. Of equals, the first registered.
  4. "xla" is not chosen for its speed: it has no deadline, no error that names a rank, no metrics,
     and other results where the types are narrow or a NaN is reduced. Its cost is shown.

The answer depends on the Request and the tables alone. Processes of one job must agree on it:
Request.use_own is for them (runtime/world.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from jcoll.algorithms import registry
from jcoll.sizes import format_size
from jcoll.tuning import cost_model, table
from jcoll.tuning.candidates import (
    HOSTS,
    NO_LEVELS,
    ON_HOSTS,
    Candidate,
    Request,
    candidates,
    refusal,
)

MARGIN = 0.1
"""Measurements are not better than that; and who is not clearly faster shall not change bits."""

MODELLED = "modelled"
"""Of costs that are in no table: tuning/cost_model.py."""

FAR = 1.6
"""A number of ranks so many times that of the measurement has costs of its own."""


@dataclass(frozen=True)
class Choice:
    algorithm: str
    reason: str
    request: Request

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return priced(self.request)


def automatic(request: Request, configured: str) -> tuple[str, str]:
    """What algorithm="auto" means for a call, and why. configured: JCOLL_ALGORITHM, "auto" where it
    does not serve the op."""
    choice = select(request)
    has_choice = choice.algorithm != "xla" and (request.placement != HOSTS or configured == "xla")
    if has_choice and configured != "auto" and refusal(request, configured) is None:
        return configured, "JCOLL_ALGORITHM"
    return choice.algorithm, choice.reason


@functools.lru_cache(maxsize=4096)
def select(request: Request) -> Choice:
    able = [c.algorithm for c in candidates(request) if c.obstacle is None]
    ours = [name for name in able if name != "xla"]
    if not ours:
        return Choice("xla", _why_none(request), request)
    if request.num_ranks == 1:
        return Choice(ours[0], "one rank", request)
    if len(ours) == 1:
        return Choice(ours[0], _why_only(request), request)
    known, source = _tabled(request)
    us = _among(ours, known) or _modelled(request, ours)
    source = source.partition(",")[0] or MODELLED
    name = winner(us)
    return Choice(name, _why(name, us, source), request)


registry.on_register.append(select.cache_clear)


def winner(us: Mapping[str, float]) -> str:
    """Rule 3, among jcoll's own."""
    name = min(us, key=lambda name: us[name])
    if "direct" in us and us[name] > (1 - MARGIN) * us["direct"]:
        return "direct"
    return name


def priced(request: Request) -> tuple[Candidate, ...]:
    """All candidates with what is known of their costs: the measured ones first, the cheapest
    first among these and among the others; the unable last."""
    known, source = _tabled(request)
    found = [_priced(request, c, known, source) for c in candidates(request)]

    def place(c: Candidate) -> tuple[bool, bool, bool, float]:
        return c.obstacle is not None, c.us is None, c.source != source, c.us or 0.0

    return tuple(sorted(found, key=place))


def _priced(request: Request, c: Candidate, known: Mapping[str, float], source: str) -> Candidate:
    if c.obstacle is not None:
        return c
    if c.algorithm in known:
        return Candidate(c.algorithm, us=known[c.algorithm], source=source)
    us = _estimate(request, c.algorithm, request.num_ranks)
    return Candidate(c.algorithm, us=us, source=MODELLED if us is not None else "")


def _tabled(request: Request) -> tuple[Mapping[str, float], str]:
    """Microseconds by algorithm, and where they come from; nothing without "direct"."""
    nbytes = max(1, request.nbytes)
    for t in table.tables(request.device_kind, request.use_own):
        found = t.find(request.placement, request.op, request.num_ranks, nbytes)
        if found is not None and "direct" in found.us:
            whose = "shipped" if t is table.shipped(request.device_kind) else "own table"
            source = f"{_origin(t.source, request, found)}, {whose}"
            us = _scaled(request, found) if _is_far(request, found) else found.us
            return us, source
    return {}, ""


def _is_far(request: Request, found: table.Found) -> bool:
    return not 1 / FAR < request.num_ranks / found.num_ranks < FAR


def _origin(source: str, request: Request, found: table.Found) -> str:
    """measured, 4 ranks; measured at 4 ranks, if 5 are asked for; scaled from 4 ranks, if 8 are."""
    ranks = f"{found.num_ranks} ranks"
    other = [] if request.num_ranks == found.num_ranks else [ranks]
    if not found.smallest <= max(1, request.nbytes) <= found.largest:
        other.append(format_size(min(found.largest, max(found.smallest, request.nbytes))))
    if _is_far(request, found) or request.nbytes > found.largest:
        prefix = "" if source == table.MEASURED else f"{source}, "
        return f"{prefix}scaled from {' and '.join(other)}"
    return f"{source} at {' and '.join(other)}" if other else f"{source}, {ranks}"


def _scaled(request: Request, found: table.Found) -> dict[str, float]:
    """Costs for another number of ranks: as the model says that they grow. Those that it does not
    know are left out."""
    scaled = {}
    for name, us in found.us.items():
        here, there = (_estimate(request, name, n) for n in (request.num_ranks, found.num_ranks))
        if here is not None and there:
            scaled[name] = us * here / there
    return scaled


def _estimate(r: Request, name: str, num_ranks: int) -> float | None:
    return cost_model.estimate(r.op, name, num_ranks, r.nbytes, r.placement, r.device_kind)


def _among(names: list[str], us: Mapping[str, float]) -> dict[str, float]:
    return {name: us[name] for name in names if name in us}


def _modelled(request: Request, names: list[str]) -> dict[str, float]:
    costs = {name: _estimate(request, name, request.num_ranks) for name in names}
    known = {name: us for name, us in costs.items() if us is not None}
    return known or {names[0]: 0.0}


def _why(name: str, us: Mapping[str, float], source: str) -> str:
    if name != "direct":
        if "direct" not in us:
            return f"fastest, {source}"
        return f"{us['direct'] / us[name]:.2g} times as fast as direct, {source}"
    if us["direct"] == min(us.values()):
        return f"fastest, {source}"
    return f"within {MARGIN:.0%} of the fastest, {source}"


def _why_only(request: Request) -> str:
    if request.placement == HOSTS:
        return ON_HOSTS
    if len(registry.names(request.op)) == 0:
        return "jcoll's only algorithm for this op"
    return "the only one that rounds once" if request.is_narrow else "the only one that serves"


def _why_none(request: Request) -> str:
    if request.obstacle is not None:
        return request.obstacle
    return NO_LEVELS
