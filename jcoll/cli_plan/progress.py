"""What is being done: on a terminal all the time, elsewhere a line every half minute."""

from __future__ import annotations

import sys
import time

from jcoll.bench.status_line import StatusLine


class Progress:
    """`starts` before each of `total` pieces of work; `clear` before anything else is printed."""

    def __init__(self, total: int) -> None:
        self._total, self._number = total, 0
        self._begun = self._told = time.monotonic()
        self._line = StatusLine(sys.stderr)
        self.clear = self._line.clear

    def starts(self, text: str) -> None:
        self._number += 1
        now = time.monotonic()
        if not self._line.is_live and now - self._told < 30:
            return
        self._told = now
        self._line.show(f"[{self._number}/{self._total}] {text}, {now - self._begun:.0f} s so far")
