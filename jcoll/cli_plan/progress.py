"""What is being done: on a terminal one line rewritten, elsewhere a line every half minute."""

from __future__ import annotations

import sys
import time


class Progress:
    """`starts` before each of `total` pieces of work; `clear` before anything else is printed."""

    def __init__(self, total: int) -> None:
        self._total, self._number = total, 0
        self._begun = self._told = time.monotonic()
        self._live = sys.stderr.isatty()

    def starts(self, text: str) -> None:
        self._number += 1
        now = time.monotonic()
        if not self._live and now - self._told < 30:
            return
        self._told = now
        line = f"[{self._number}/{self._total}] {text}, {now - self._begun:.0f} s so far"
        begin, end = ("\r\x1b[K", "") if self._live else ("", "\n")
        print(f"{begin}{line}", end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
