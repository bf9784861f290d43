"""Starting, watching and ending the processes of a job.

One thread: it waits for output, and looks every POLL_S at who has ended and what is due. Processes
are reaped only at the very end, so that their ids, which are also those of their process groups,
stay theirs for as long as they are signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import IO, Any, cast

from jcoll.launch.job import Job
from jcoll.launch.output import Lines, Output
from jcoll.launch.verdict import Fate, failure_text, first_failure, how_all_ended

POLL_S = 0.05
INTERRUPT_GRACE_S = 5.0  # from SIGINT to SIGTERM
FAILURE_GRACE_S = 2.0  # for the others to miss the failed rank, and say so
KILL_GRACE_S = 2.0  # from SIGTERM, which jax's preemption service may swallow, to SIGKILL
DRAIN_S = 1.0  # for output that came in last
STACKS = signal.SIGUSR2  # child.py answers with its main thread's stack

_Plan = list[tuple[float, signal.Signals]]


class _Process:
    """One rank: its process, its three pipes and its fate."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        self.fate = Fate()
        read_fd, write_fd = os.pipe()
        self.report = os.fdopen(read_fd, "rb", buffering=0)
        try:
            self._popen = subprocess.Popen(
                job.command(rank, write_fd),
                env=job.environment(rank),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=(write_fd,),
            )
        except BaseException:
            self.report.close()
            raise
        finally:
            os.close(write_fd)

    @property
    def group(self) -> int:
        return self._popen.pid

    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        return cast("IO[bytes]", self._popen.stdout), cast("IO[bytes]", self._popen.stderr)

    def send(self, number: signal.Signals) -> None:
        """To the process and all that it started; a stack is asked of the process alone."""
        if self.fate.status is not None:
            return
        if number == STACKS:
            os.kill(self._popen.pid, number)
            return
        self.fate.stopped = True
        os.killpg(self.group, number)

    def look(self) -> None:
        """Notes its end, without reaping."""
        if self.fate.status is None:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, self._popen.pid, flags)
            if ended:
                exited = ended.si_code == os.CLD_EXITED
                self.fate.status = ended.si_status if exited else -ended.si_status

    def hear(self) -> bool:
        """Reads what it reports; False at the end."""
        data = self.report.read(4096)
        for line in (data or b"").splitlines():
            said = json.loads(line)
            self.fate.reported, self.fate.reported_at = said["status"], said["time"]
        return bool(data)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)  # What it started may have outlived it.
        self._popen.wait()
        for file in (*self.pipes(), self.report):
            file.close()


class _Guard:
    """A shell that outlives a launcher killed with -9, and kills the process groups it left.

    The processes themselves end then (child.py); this is for those that they started.
    """

    _PROGRAM = """\
while read -r group; do
  [ "$group" = done ] && exit
  groups="$groups -$group"
done
for group in $groups; do
  kill -s KILL -- "$group"
done"""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            ["/bin/sh", "-c", self._PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def tell(self, word: int | str) -> None:
        with contextlib.suppress(BrokenPipeError):
            cast("IO[bytes]", self._popen.stdin).write(f"{word}\n".encode())

    def end(self) -> None:
        self.tell("done")
        self._popen.communicate()


class Supervisor:
    def __init__(self, job: Job, output: Output, timeout_s: float | None) -> None:
        self._job = job
        self._output = output
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._lines: dict[IO[bytes], Lines] = {}
        self._begun = time.monotonic()
        self._deadline = self._begun + timeout_s if timeout_s else float("inf")
        self._signals: list[int] = []
        self._first: int | None = None
        self._why = ""
        self._status = 0
        self._due: _Plan = []

    def run(self) -> int:
        """Runs the job to its end, whatever that is; returns the exit status."""
        with self._handling_signals():
            guard = _Guard()
            try:
                for rank in range(self._job.num_processes):
                    self._add(_Process(self._job, rank))
                    guard.tell(self._processes[-1].group)
                while any(process.fate.status is None for process in self._processes):
                    self._step()
                self._drain()
                self._conclude()
            except BrokenPipeError:
                self._status = self._status or 128 + signal.SIGPIPE
            finally:
                for process in self._processes:
                    process.end()
                guard.end()
                self._selector.close()
        return self._status

    def _add(self, process: _Process) -> None:
        self._processes.append(process)
        self._selector.register(process.report, selectors.EVENT_READ, (process, None))
        for is_error, pipe in enumerate(process.pipes()):
            self._lines[pipe] = Lines()
            self._selector.register(pipe, selectors.EVENT_READ, (process, bool(is_error)))

    def _step(self) -> None:
        self._read(POLL_S)
        for process in self._processes:
            process.look()
        self._judge()
        while self._due and self._due[0][0] <= time.monotonic():
            _, number = self._due.pop(0)
            for process in self._processes:
                process.send(number)

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            process, is_error = key.data
            if is_error is not None:
                self._read_output(cast("IO[bytes]", key.fileobj), process, is_error)
            elif not process.hear():
                self._selector.unregister(key.fileobj)
                _wait_for_end(process)

    def _read_output(self, pipe: IO[bytes], process: _Process, is_error: bool) -> None:
        data = pipe.read(1 << 16)
        lines = self._lines[pipe]
        for line in lines.feed(data) if data else filter(None, [lines.finish()]):
            if is_error:
                process.fate.last_errors.append(line)
            self._output.line(process.rank, line, is_error=is_error)
        if not data:
            self._selector.unregister(pipe)

    def _drain(self) -> None:
        """Reads to the end; what a program left running in the background may keep it open."""
        until = time.monotonic() + DRAIN_S
        while self._selector.get_map() and time.monotonic() < until:
            self._read(POLL_S)
        for pipe, lines in self._lines.items():
            if rest := lines.finish():
                process, is_error = self._selector.get_key(pipe).data
                self._output.line(process.rank, rest, is_error=is_error)

    def _judge(self) -> None:
        """Looks for the first reason to end the job."""
        fates = [process.fate for process in self._processes]
        if self._why:
            return
        if (first := first_failure(fates)) is not None:
            self._first, self._status = first, fates[first].exit_status
            self._stop("failure", (FAILURE_GRACE_S, signal.SIGTERM))
        elif time.monotonic() > self._deadline:
            self._status = 124
            waited = f"{self._deadline - self._begun:g} s have passed (--timeout)"
            self._stop(waited, (0, STACKS), (0.5, signal.SIGTERM))

    def _stop(self, why: str, *plan: tuple[float, signal.Signals]) -> None:
        """Sends the plan's signals at its times, in seconds from now, and SIGKILL last."""
        self._why = self._why or why
        now = time.monotonic()
        kill = (plan[-1][0] + KILL_GRACE_S, signal.SIGKILL)
        self._due = [(now + after, number) for after, number in (*plan, kill)]

    def _conclude(self) -> None:
        """The first failure's traceback once more, unless nobody spoke after it; the verdict."""
        fates = [process.fate for process in self._processes]
        if self._first is None:
            if self._why:
                self._output.say(f"{self._why}; {how_all_ended(fates, range(len(fates)))}")
            return
        if self._output.last_rank != self._first:
            for line in fates[self._first].traceback():
                self._output.repeat(self._first, line, is_error=True)
        self._output.say(failure_text(fates, self._first))

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it.
            handled.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self._stop("", (0, signal.SIGKILL))
            return
        self._status = self._status or 128 + number
        self._stop(
            f"stopped by {signal.Signals(number).name}",
            (0, signal.SIGINT),
            (INTERRUPT_GRACE_S - 0.5, STACKS),
            (INTERRUPT_GRACE_S, signal.SIGTERM),
        )


def _wait_for_end(process: _Process) -> None:
    """It closes its pipe just before it ends; who misses it must not be heard before that."""
    until = time.monotonic() + 0.5
    while process.fate.status is None and time.monotonic() < until:
        process.look()
        time.sleep(0.001)
