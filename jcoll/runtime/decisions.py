"""A memory of which algorithm each lowered collective got, and why; `jcoll.explain` shows it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jcoll.comm.mesh import Call, signature


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


class _Listeners(threading.local):
    """Of one thread: what others lower meanwhile is not its business."""

    def __init__(self) -> None:
        self.lists: list[list[Decision]] = []


_listeners = _Listeners()


def record(call: Call, avals: Any, algorithm: str, reason: str) -> None:
    """Tells everyone who is listening."""
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
