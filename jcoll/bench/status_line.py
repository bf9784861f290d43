"""What is being done: on a terminal one line, rewritten; elsewhere a line each time."""

from __future__ import annotations

from typing import TextIO


class StatusLine:
    """`show` it; `clear` before anything else is printed. is_live: on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.is_live = out.isatty()

    def show(self, text: str) -> None:
        begin, end = ("\r\x1b[K", "") if self.is_live else ("", "\n")
        print(f"{begin}{text}", end=end, file=self._out, flush=True)

    def clear(self) -> None:
        if self.is_live:
            self.show("")
