"""The measuring processes of `jcoll tune`: one child, or a job of several by `jcoll launch`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

from jcoll.bench import spawn
from jcoll.config import LONGEST_S
from jcoll.tuning.candidates import PROCESS, PROCESSES

CHILD = "jcoll.cli_tune.child"
_ERROR_TAIL = 600  # characters of a dead child's stderr worth showing
_EXIT_S = 15.0


class RunFailed(RuntimeError):
    """A measuring process ended early; the rows before count."""


@dataclass(frozen=True)
class Run:
    """What one child, or one job of children, measures."""

    placement: str
    num_ranks: int
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    module: str | None = None
    """A file that registers algorithms of the user's."""

    def points(self) -> Iterator[tuple[str, int]]:
        return itertools.product(self.ops, self.sizes)

    @property
    def title(self) -> str:
        unit = "devices of one process" if self.placement == PROCESS else "processes"
        return f"{self.num_ranks} {unit}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        fields = json.loads(text)
        return cls(**fields | {name: tuple(fields[name]) for name in ("ops", "sizes")})

    def command(self) -> list[str]:
        child = ["-m", CHILD, self.to_json()]
        if self.placement == PROCESSES:
            child = ["-m", "jcoll", "launch", "-n", str(self.num_ranks), *child]
        return [sys.executable, *child]

    def environment(self) -> dict[str, str]:
        num_devices = self.num_ranks if self.placement == PROCESS else 1
        return spawn.environment(os.environ, num_devices, "default")


def rows_of(run: Run, timeout_s: float) -> Iterator[dict[str, Any]]:
    """The rows, as they come. RunFailed if the children end early, or are silent for too long."""
    number = len(list(run.points()))
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            run.command(),
            env=run.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        )
        try:
            lines = _lines(cast("IO[str]", process.stdout))
            for _ in range(number):
                yield _next_row(lines, timeout_s, process, errors)
        finally:
            _end(process)


def _lines(stdout: IO[str]) -> queue.Queue[str | None]:
    """Read by a thread, so that waiting can time out."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(ValueError):  # Closed.
            for line in stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _next_row(
    lines: queue.Queue[str | None], timeout_s: float, process: subprocess.Popen, errors: IO[str]
) -> dict[str, Any]:
    while True:
        try:
            line = lines.get(timeout=min(timeout_s, LONGEST_S))
        except queue.Empty:
            raise RunFailed(f"no result within {timeout_s:g} s (--timeout)") from None
        if line is None:
            raise RunFailed(_last_words(process, errors))
        line = line.removeprefix("[0] ")  # As launch marks lines.
        if line.startswith("{"):
            return json.loads(line)


def _last_words(process: subprocess.Popen, errors: IO[str]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_S)
    errors.seek(0)
    said = errors.read().strip()[-_ERROR_TAIL:]
    return f"the measuring process ended ({process.returncode}): {said or 'it said nothing'}"


def _end(process: subprocess.Popen) -> None:
    """SIGTERM, on which launch ends its ranks, then SIGKILL."""
    if process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)
    cast("IO[str]", process.stdout).close()
