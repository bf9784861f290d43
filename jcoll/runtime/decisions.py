"""A memory of which algorithm each lowered collective got, and why; `jcoll.explain` shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jcoll.comm.mesh import Call


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


_listeners: list[list[Decision]] = []


def record(call: Call, avals: Any, algorithm: str, reason: str) -> None:
    """Tells everyone who is listening."""
    if not _listeners:
        return
    signature = f"{avals[0].dtype}[{','.join(map(str, avals[0].shape))}]"
    decision = Decision(
        call.op, call.axis_text, signature, call.num_ranks, algorithm, reason, call.call_site
    )
    for listener in _listeners:
        listener.append(decision)


@contextlib.contextmanager
def listening() -> Iterator[list[Decision]]:
    """Collects the decisions made meanwhile."""
    decisions: list[Decision] = []
    _listeners.append(decisions)
    try:
        yield decisions
    finally:
        # By identity: two listeners with equal lists are different listeners.
        _listeners[:] = [entry for entry in _listeners if entry is not decisions]
