"""Running jobs in child processes and yielding their rows as they come.

A child that dies or goes silent costs the row it was at, never the run: that row gets the child's
last words as its error, and a fresh child takes over after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import IO, cast

from jcoll import shared_heap
from jcoll.bench import rows
from jcoll.bench.job import Job
from jcoll.config import LONGEST_S, pool_sizes

CHILD = ("-m", "jcoll.bench.child")
_DEVICE_FLAG = "--xla_force_host_platform_device_count"

# Fresh pages dominate large results: glibc maps them anew for every call and gives them back. With
# these settings it keeps and reuses them, so the collective itself is what remains.
MALLOC_REUSE = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "MALLOC_MMAP_MAX_": "0",  # also above the threshold, whose highest value that is
}
_ERROR_TAIL = 600  # characters of a dead child's stderr worth showing
_START_S = 120.0  # to import jax and make the devices, on a machine that is busy with others
_EXIT_S = 30.0  # for a child that has said everything


def environment(
    base: Mapping[str, str], num_devices: int, malloc: str, num_processes: int = 1
) -> dict[str, str]:
    """The child's environment: its virtual CPU devices, and exactly the asked allocator. Several
    processes share cores and have shared heaps as under `jcoll launch`."""
    if num_processes > 1:
        base = pool_sizes(num_processes) | dict(base)
    env = {name: value for name, value in base.items() if name not in MALLOC_REUSE}
    others = re.sub(rf"{_DEVICE_FLAG}=\S*", "", env.get("XLA_FLAGS", ""))
    env["XLA_FLAGS"] = f"{others} {_DEVICE_FLAG}={num_devices}".strip()
    env["JAX_PLATFORMS"] = "cpu"
    if malloc == "reuse":
        env.update(MALLOC_REUSE)
    return shared_heap.preloaded(env) if num_processes > 1 else env


class ChildFailed(RuntimeError):
    """A measuring process could not start at all."""


def run_job(job: Job, *, timeout_s: float, on_facts: Callable[[str], None]) -> Iterator[rows.Row]:
    """All rows of `job`, in order; `on_facts` gets the child's line about the machine."""
    pending = deque(job.blank_rows())
    total = job.skip + len(pending)
    while pending:
        with _Child(dataclasses.replace(job, skip=total - len(pending))) as child:
            on_facts(child.facts(max(timeout_s, _START_S)))
            while pending and (row := child.next_row(timeout_s)) is not None:
                pending.popleft()
                yield row
            if pending:
                yield dataclasses.replace(pending.popleft(), error=child.last_words())


class _Child:
    """One measuring process; its stdout is read by a thread, so that waiting can time out."""

    def __init__(self, job: Job) -> None:
        # A file, closed by __exit__: a pipe that nobody reads would block a talkative child.
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )
        devices = job.num_ranks // job.processes
        self._process = subprocess.Popen(
            [sys.executable, *CHILD],
            env=environment(os.environ, devices, job.malloc, job.processes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._silent_s = 0.0  # set once the child has been given up as silent
        threading.Thread(target=self._read_lines, daemon=True).start()
        self._send(job.to_json())

    def _send(self, text: str) -> None:
        stdin = cast("IO[str]", self._process.stdin)
        with contextlib.suppress(BrokenPipeError), stdin:  # a dead child: next_row tells
            stdin.write(text)

    def _read_lines(self) -> None:
        with cast("IO[str]", self._process.stdout) as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _next_line(self, timeout_s: float) -> str | None:
        try:
            return self._lines.get(timeout=min(timeout_s, LONGEST_S))
        except queue.Empty:
            self._silent_s = timeout_s
            return None

    def facts(self, timeout_s: float) -> str:
        line = self._next_line(timeout_s)
        if line is None:
            raise ChildFailed(f"the measuring process could not start: {self.last_words()}")
        return json.loads(line)

    def next_row(self, timeout_s: float) -> rows.Row | None:
        line = self._next_line(timeout_s)
        return None if line is None else rows.from_line(line)

    def last_words(self) -> str:
        """Why there is no further row: silence, or how the process ended and what it said."""
        if self._silent_s:
            return f"no result within {self._silent_s:g} s; the process was stopped (--timeout)"
        status = self._end()
        self._errors.seek(0)
        said = self._errors.read().strip()[-_ERROR_TAIL:]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"the measuring process ended with {how}: {said or 'it said nothing'}"

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None and (self._silent_s or exc_info[0] is not None):
            self._process.kill()
        self._end()
        self._errors.close()

    def _end(self) -> int:
        """Wait for the process to exit; one that hangs on its way out is killed."""
        try:
            return self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
