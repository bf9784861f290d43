"""Who failed first, how every rank ended, and what is said about it."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jcoll.errors import ranges

_TRACES = (b"Traceback (most recent call last)", b"Fatal Python error")
_MEANING: dict[int, str] = {
    signal.SIGKILL: "someone, or the kernel for want of memory, killed it",
    signal.SIGSEGV: "it touched memory that is not its own",
    signal.SIGABRT: "it aborted",
}


@dataclass
class Fate:
    """What is known of one rank's end."""

    status: int | None = None
    """Exit status, or minus a signal; None: still running."""

    reported: int | None = None
    """The exit status that it announced on failing; it may have been stopped since."""

    reported_at: float = 0.0
    stopped: bool = False
    """The launcher had sent it a signal before it ended."""

    last_errors: deque[bytes] = field(default_factory=lambda: deque(maxlen=100))

    @property
    def failed(self) -> bool:
        return self.reported is not None or (not self.stopped and self.status not in (None, 0))

    @property
    def exit_status(self) -> int:
        """As a shell has it."""
        if self.reported is not None:
            return self.reported
        status = self.status or 0
        return 128 - status if status < 0 else status

    def words(self) -> str:
        if self.stopped and self.reported == 128 + signal.SIGINT:
            return "interrupted"
        if self.reported is None and self.stopped and self.status != 0:
            return "stopped"
        if self.reported is None and self.status is not None and self.status < 0:
            return f"killed by {_signal_name(-self.status)}"
        return f"exit status {self.exit_status}" if self.exit_status else "done"

    def traceback(self) -> list[bytes]:
        """The lines from the first of the last tracebacks on; [] if it had none."""
        lines = list(self.last_errors)
        starts = [i for i, line in enumerate(lines) if line.startswith(_TRACES)]
        return lines[starts[0] :] if starts else []


def first_failure(fates: list[Fate]) -> int | None:
    """The rank that failed first, of those known to have failed.

    A rank that reports did so before it left, so before anyone could miss it. One that was gone
    without a word is the cause, not a consequence, unless it aborted: jax does on losing a peer.
    """
    failed = [rank for rank, fate in enumerate(fates) if fate.failed]

    def key(rank: int) -> tuple[int, float]:
        fate = fates[rank]
        if fate.reported is not None:
            return 1, fate.reported_at
        return (2 if fate.status == -signal.SIGABRT else 0), 0.0

    return min(failed, key=key, default=None)


def failure_text(fates: list[Fate], first: int) -> str:
    fate = fates[first]
    text = f"rank {first} of {len(fates)} failed: {fate.words()}"
    if fate.reported is None and (meaning := _MEANING.get(-(fate.status or 0))):
        text += f" ({meaning})"
    others = how_all_ended(fates, [rank for rank in range(len(fates)) if rank != first])
    return f"{text}. Then {others}" if others else text


def how_all_ended(fates: list[Fate], ranks: Iterable[int]) -> str:
    """rank 0: exit status 1; ranks 2-4: stopped"""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(fates[rank].words(), []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(those) > 1)} {ranges(those)}: {words}" for words, those in groups.items()
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
