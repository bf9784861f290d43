"""Output of many processes as one: whole lines, each with its rank in front; log files."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import BinaryIO

_COLORS = (36, 33, 32, 35, 34, 31)
_MAX_LINE = 1 << 16

# What XLA's gloo writes, piece by piece, each time that ranks have connected: between two pieces
# there may be some of the process' other devices.
_GLOO = (
    rb"\[Gloo\] Rank ",
    rb" is connected to ",
    rb" peer ranks\. Expected number of connected peer ranks is : ",
)
_CONNECTED = re.compile(rb"%b\d+%b(\d+)%b(\d+)" % _GLOO)
# Digits stand in one place of it only: in two, a line that nearly matches would take for ever.
_MIXED = re.compile(rb"\d*(?:(?:%b|%b|%b)\d*)+" % _GLOO)


class Lines:
    """Cuts a stream into lines. Of what a progress bar wrote over, only the last state is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = _visible(rest)
        if len(self._rest) > _MAX_LINE:
            lines.append(self.finish())
        return [_visible(line).rstrip(b"\r") for line in lines]

    def finish(self) -> bytes:
        """The last line, which had no end; b"" if there is none."""
        rest, self._rest = self._rest, b""
        return rest.rstrip(b"\r")


def is_noise(line: bytes) -> bool:
    """Whether gloo says no more than that as many ranks have connected as were expected."""
    if whole := _CONNECTED.fullmatch(line):
        return whole[1] == whole[2]
    return bool(_MIXED.fullmatch(line))


def _visible(line: bytes) -> bytes:
    ended = line.endswith(b"\r")
    kept = line.rstrip(b"\r").rpartition(b"\r")[2]
    return kept + b"\r" if ended and kept else kept


class Output:
    """Writes lines to stdout and stderr, but for noise, and all to one file per rank."""

    def __init__(self, num_ranks: int, log_dir: Path | None) -> None:
        self._sinks = {False: sys.stdout.buffer, True: sys.stderr.buffer}
        self._colors = {is_error: _wants_color(sink) for is_error, sink in self._sinks.items()}
        self._closing = contextlib.ExitStack()
        self._logs = [
            self._closing.enter_context((log_dir / f"rank-{rank}.log").open("wb", buffering=0))
            for rank in (range(num_ranks) if log_dir else ())
            if log_dir
        ]
        self.last_rank: int | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.close()

    def line(self, rank: int, text: bytes, *, is_error: bool) -> None:
        if self._logs:
            self._logs[rank].write(text + b"\n")
        if not is_noise(text):
            self.repeat(rank, text, is_error=is_error)

    def repeat(self, rank: int, text: bytes, *, is_error: bool) -> None:
        """A line that is in the log already."""
        self.last_rank = rank
        self._write(self._prefix(rank, is_error) + text + b"\n", is_error)

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        self._write(f"jcoll launch: {text}\n".encode(errors="replace"), is_error=True)

    def _prefix(self, rank: int, is_error: bool) -> bytes:
        plain = f"[{rank}]"
        color = _COLORS[rank % len(_COLORS)]
        shown = f"\x1b[{color}m{plain}\x1b[0m" if self._colors[is_error] else plain
        return f"{shown} ".encode()

    def _write(self, data: bytes, is_error: bool) -> None:
        """Raises BrokenPipeError, once, if nobody reads any more."""
        sink = self._sinks[is_error]
        try:
            sink.write(data)
            sink.flush()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sink.fileno())
            os.close(null)
            raise


def _wants_color(sink: BinaryIO) -> bool:
    return sink.isatty() and not os.environ.get("NO_COLOR")
