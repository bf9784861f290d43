"""A memory of which algorithm each lowered collective got, and why; `jcoll.explain` shows it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jcoll.comm.mesh import Call, signature
from jcoll.tuning.candidates import Candidate, Request
from jcoll.tuning.select import priced


@dataclass(frozen=True)
class Decision:
    """One lowered collective."""

    op: str
    axis: str
    signature: str
    num_ranks: int
    algorithm: str
    reason: str
    call_site: str
    request: Request | None = field(default=None, repr=False, compare=False)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All algorithms with costs, the cheapest first; those that could not serve, with why."""
        return priced(self.request) if self.request else ()


class _Listeners(threading.local):
    """Of one thread: what others lower meanwhile is not its business."""

    def __init__(self) -> None:
        self.lists: list[list[Decision]] = []


_listeners = _Listeners()


def record(
    call: Call,
    avals: Any,
    algorithm: str,
    reason: str,
    request: Callable[[], Request] | None = None,
) -> None:
    """Tells everyone who is listening. `request()`: what the choice depended on."""
    if not _listeners.lists:
        return
    decision = Decision(
        op=call.op,
        axis=call.axis_text,
        signature=signature(avals[0]),
        num_ranks=call.num_ranks,
        algorithm=algorithm,
        reason=reason,
        call_site=call.call_site,
        request=request and request(),
    )
    for listener in _listeners.lists:
        listener.append(decision)


@contextlib.contextmanager
def listening() -> Iterator[list[Decision]]:
    """Collects the decisions made meanwhile."""
    decisions: list[Decision] = []
    _listeners.lists.append(decisions)
    try:
        yield decisions
    finally:
        # By identity: two listeners with equal lists are different listeners.
        _listeners.lists = [entry for entry in _listeners.lists if entry is not decisions]
