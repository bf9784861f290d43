"""Jobs of several `jax.distributed` processes on this host, and what each of them said.

    results = run("values.py", "ring", num_processes=4)

The scripts are in this folder; their first line imports `rank`, which joins the job. Whatever
happens, no process outlives `run`: not a stopped one, and not if pytest itself is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARK = "@@ "
"""What starts a line of a process that is JSON for its test."""
_DEVICES = "--xla_force_host_platform_device_count"


@dataclass
class Result:
    """What became of one process. code: as subprocess has it; None: killed by `run`, too late."""

    process: int
    pid: int
    code: int | None
    text: str
    reports: list[dict[str, Any]] = field(default_factory=list)

    def report(self, name: str) -> dict[str, Any]:
        """The process's one report of that name."""
        found = [r for r in self.reports if r["name"] == name]
        assert len(found) == 1, f"{len(found)} reports {name!r}:\n{self}"
        return found[0]

    def __str__(self) -> str:
        how = "did not end" if self.code is None else f"ended with {self.code}"
        return f"--- process {self.process} {how}:\n{self.text[-4000:]}"


def environment(num_devices: int, more: dict[str, str]) -> dict[str, str]:
    path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    flags = re.sub(rf"{_DEVICES}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    ours = {name for name in os.environ if name.startswith("JCOLL_")}
    return {name: value for name, value in os.environ.items() if name not in ours} | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "XLA_FLAGS": f"{flags} {_DEVICES}={num_devices}".strip(),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        **more,
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


class Job:
    """The processes of a job while they run. A context: at its end all of them are killed."""

    def __init__(
        self,
        script: str,
        *args: str,
        num_processes: int,
        num_devices: int = 1,
        env: dict[str, str] | None = None,
        env_of: dict[int, dict[str, str]] | None = None,
        address: str = "localhost",
        prefix_of: dict[int, list[str]] | None = None,
    ) -> None:
        """`address`: the coordinator's; prefix_of: commands that start the processes' commands."""
        about = json.dumps(
            {
                "parent": os.getpid(),
                "count": num_processes,
                "coordinator": f"{address}:{free_port()}",
                "args": args,
            }
        )
        self._files = [tempfile.TemporaryFile() for _ in range(num_processes)]  # noqa: SIM115
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for i, file in enumerate(self._files):
                more = (env or {}) | (env_of or {}).get(i, {})
                self.processes.append(
                    subprocess.Popen(
                        [
                            *(prefix_of or {}).get(i, []),
                            *(sys.executable, "-u", str(HERE / script), about, str(i)),
                        ],
                        env=environment(num_devices, more),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for file in self._files:
            file.close()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # Ends stopped ones, too.
        for process in self.processes:
            process.wait()

    def wait(self, which: list[int], timeout_s: float) -> None:
        """Until these processes have ended, or the time is up."""
        until = time.monotonic() + timeout_s
        for i in which:
            try:
                self.processes[i].wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def results(self) -> list[Result]:
        """What has become of them up to now."""
        found = []
        for i, (process, file) in enumerate(zip(self.processes, self._files, strict=True)):
            code = process.poll()
            file.seek(0)
            text = file.read().decode(errors="replace")
            lines = [line for line in text.splitlines() if line.startswith(MARK)]
            reports = [json.loads(line[len(MARK) :]) for line in lines]
            found.append(Result(i, process.pid, code, text, reports))
        return found


def run(
    script: str,
    *args: str,
    num_processes: int,
    timeout_s: float = 300,
    wait_for: list[int] | None = None,
    **more: Any,
) -> list[Result]:
    """Runs a job until all processes, or those of `wait_for`, have ended; kills the rest."""
    with Job(script, *args, num_processes=num_processes, **more) as job:
        which = list(range(num_processes)) if wait_for is None else wait_for
        job.wait(which, timeout_s)
        return job.results()


def run_ok(script: str, *args: str, num_processes: int, **more: Any) -> list[Result]:
    """The results of a job in which every process must succeed."""
    results = run(script, *args, num_processes=num_processes, **more)
    assert all(r.code == 0 for r in results), "\n".join(map(str, results))
    return results
