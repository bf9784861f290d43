"""A memory of which algorithm each lowered collective got, and why; `jcoll.explain` shows it."""

from __future__ import annotations

import contextlib
import threading
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


class _Listeners(threading.local):
    """Of one thread: what others lower meanwhile is not its business."""

    def __init__(self) -> None:
        self.lists: list[list[Decision]] = []


_listeners = _Listeners()


def record(call: Call, avals: Any, algorithm: str, reason: str) -> None:
    """Tells everyone who is listening."""
    if not _listeners.lists:
        return
    signature = f"{avals[0].dtype}[{','.join(map(str, avals[0].shape))}]"
    decision = Decision(
        call.op, call.axis_text, signature, call.num_ranks, algorithm, reason, call.call_site
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
