"""`python -m jcoll launch`: real jobs of up to three processes, and errors before any start."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jcoll import cli
from jcoll.launch.output import Lines, is_noise
from jcoll.launch.verdict import Fate, failure_text, first_failure

LIMIT_S = 60  # for a job on a busy machine; all of them are done in seconds

HEAD = """\
import os, signal, subprocess, sys, time
import jax, numpy as np
rank = jax.process_index()
print("pid", os.getpid())

def psum():
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    ranks = np.arange(n, dtype=np.float32)
    x = jax.make_array_from_callback((n,), sharding, lambda index: ranks[index])
    body = lambda x: jax.lax.psum(x, "x")
    f = jax.shard_map(body, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
    return float(jax.jit(f)(x)[0])

def others_wait(me):
    # Until all are there: a rank that ends before the others have joined would be another test.
    jax.experimental.multihost_utils.sync_global_devices("all there")
    print("ready")
    if rank != me:
        time.sleep(1000)
"""
HEAD = HEAD.replace("import jax,", "import jax, jax.experimental.multihost_utils,")


class Job:
    """A launcher at work in tmp_path, and what it and its processes have said so far."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "jcoll", "launch", *argv],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._popen.pid
        self.out: list[str] = []
        self.err: list[str] = []
        self.deaf = False  # True: with the next line each, nobody reads any more
        self._threads = [
            threading.Thread(target=self._collect, args=(pipe, lines), daemon=True)
            for pipe, lines in ((self._popen.stdout, self.out), (self._popen.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    def _collect(self, pipe, lines):
        with pipe:
            for line in pipe:
                lines.append(line)
                if self.deaf:
                    return

    def pids(self) -> list[int]:
        return [int(n) for n in re.findall(r"pid (\d+)", "".join(self.out))]

    def wait_for(self, text: str, times: int) -> None:
        until = time.monotonic() + LIMIT_S
        while "".join(self.out).count(text) < times:
            assert self._popen.poll() is None and time.monotonic() < until, self.out + self.err
            time.sleep(0.02)

    def end(self) -> int:
        """Waits for the launcher; all processes that said their pid must be gone with it."""
        status = self._popen.wait(LIMIT_S)
        assert_gone(self.pids())
        for thread in self._threads:
            thread.join(10)
        return status

    def cleanup(self) -> None:
        for pid in [self.pid] if self._popen.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self._popen.wait(10)


def assert_gone(pids: list[int], within_s: float = 3.0) -> None:
    until = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # In a container nobody may reap orphans.


@pytest.fixture
def launch(tmp_path):
    jobs = []

    def launch(*argv: str, program: str, name: str = "program.py") -> Job:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(HEAD + textwrap.dedent(program))
        jobs.append(Job(tmp_path, list(argv)))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.cleanup()


# Jobs that succeed


def test_one_job(launch, tmp_path):
    job = launch(
        *("-n", "3", "--devices-per-process", "2", "--hosts", "3", "--log-dir", "logs/new"),
        *("program.py", "-n", "5", "--", "--help", "-m"),
        program="""
        jax.distributed.initialize()
        jax.distributed.initialize("elsewhere:1", int(os.environ["JAX_NUM_PROCESSES"]), rank)
        try:
            jax.distributed.initialize(num_processes=7)
        except ValueError as error:
            print(error)
        print(sys.argv, __name__, os.path.basename(sys.path[0] + "/program.py"), sys.stdin.read())
        print("sum", psum(), jax.process_count(), jax.local_device_count())
        print("host", os.environ["JCOLL_HOST_ID"], file=sys.stderr)
        for i in range(200):
            print("line", i, "x" * 2000)
        print("no newline", end="")
        """,
    )
    assert job.end() == 0, job.err
    assert not [
        line for line in job.out if re.fullmatch(r"\[.\] \[Gloo\] Rank [^\[]*: \d+\n", line)
    ]
    # Gloo writes its lines in pieces, which ours may come between.
    out = [line for line in job.out if "[Gloo]" not in line and "peer ranks" not in line]
    assert all(re.match(r"\[[012]\] .*\n", line) for line in out)
    for rank in range(3):
        lines = [line[4:] for line in out if line.startswith(f"[{rank}]")]
        log = (tmp_path / f"logs/new/rank-{rank}.log").read_text().splitlines(keepends=True)
        assert lines == [
            line for line in log if not re.match(r"host|.*(\[Gloo\]|peer ranks)|\n", line)
        ]
        assert lines[1] == (
            "jax.distributed.initialize under jcoll launch: num_processes=7, but this is rank "
            f"{rank} of 3.\n"
        )
        program = "['program.py', '-n', '5', '--', '--help', '-m'] __main__ program.py \n"
        assert lines[3:5] == [program, "sum 15.0 3 2\n"]
        assert lines[5:205] == [f"line {i} {'x' * 2000}\n" for i in range(200)]
        assert lines[205:] == ["no newline\n"]
    assert sorted(job.err) == [f"[{rank}] host host{rank}\n" for rank in range(3)]


def test_module(launch):
    job = launch(
        *("-n", "2", "-m", "pack.program", "--steps", "--", "-n"),
        name="pack/program.py",
        program="""
        sleeper = subprocess.Popen(["sleep", "1000"])
        print("pid", sleeper.pid)
        print("sum", psum(), sys.argv[1:], __name__, __spec__.name)
        """,
    )
    assert job.end() == 0, job.err  # `end` also looks for what the ranks left behind.
    assert len(job.pids()) == 4
    for rank in range(2):
        assert f"[{rank}] sum 1.0 ['--steps', '--', '-n'] __main__ pack.program\n" in job.out


# Failures


def test_exception_in_one_rank(launch):
    job = launch(
        *("-n", "3", "program.py"),
        program="""
        def fails():
            raise RuntimeError("no such file of mine")
        psum()
        if rank == 1:
            fails()
        if rank == 2:
            time.sleep(1000)
        psum()
        """,
    )
    assert job.end() == 1
    text = "".join(job.err)
    verdict = "jcoll launch: rank 1 of 3 failed: exit status 1. Then rank 0: exit status 1; "
    assert job.err[-1] in (f"{verdict}rank 2: {end}\n" for end in ("stopped", "killed by SIGABRT"))
    assert re.match(r"\[1\] RuntimeError: no such file of mine", job.err[-2])
    last = text.rpartition("[1] Traceback (most recent call last)")[2]
    assert all(line.startswith("[1] ") for line in last.splitlines()[1:-1])
    assert "program.py" in last and "jcoll/launch" not in last and "runpy" not in last


def test_kill_9_of_one(launch):
    job = launch(*("-n", "2", "program.py"), program="others_wait(-1)")
    job.wait_for("ready", 2)
    victim = int(next(line for line in job.out if line.startswith("[1] pid")).split()[-1])
    os.kill(victim, signal.SIGKILL)
    assert job.end() == 128 + signal.SIGKILL
    assert job.err[-1].startswith("jcoll launch: rank 1 of 2 failed: killed by SIGKILL (")


def test_exit_of_the_coordinator(launch):
    job = launch(*("-n", "2", "program.py"), program="others_wait(0); os._exit(3)")
    assert job.end() == 3
    assert job.err[-1].startswith("jcoll launch: rank 0 of 2 failed: exit status 3. Then rank 1: ")


@pytest.mark.parametrize(
    ("fault", "status", "fate"),
    [
        ("raise KeyError('own bug')", 1, r"has left \(KeyError: 'own bug'\)"),
        pytest.param("os._exit(3)", 3, r"\(pid \d+\) has died", marks=pytest.mark.slow),
        pytest.param(
            "os.kill(os.getpid(), 9)", 137, r"\(pid \d+\) has died", marks=pytest.mark.slow
        ),
    ],
    ids=["raise", "exit", "kill"],
)
def test_others_name_the_coordinator_that_failed(launch, fault, status, fate):
    """Before JAX, which has then nobody to ask, aborts them."""
    job = launch(
        *("-n", "2", "program.py"),
        program=f"""
        import jcoll
        mesh = jax.make_mesh((2,), ("x",))
        sharding = jax.NamedSharding(mesh, jax.P("x"))
        x = jax.make_array_from_callback((2,), sharding, lambda i: np.ones(2, np.float32)[i])
        body = lambda x: jcoll.psum(x, "x")
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P()))
        f(x).block_until_ready()
        if rank == 0:
            time.sleep(0.5)  # Until the other waits for it.
            {fault}
        f(x).block_until_ready()
        """,
    )
    assert job.end() == status
    text = "".join(job.err)
    assert re.search(rf"^\[1\] .*Error: .*rank 0 \(process 0\) .*process 0 {fate}", text, re.M), (
        text
    )
    assert "jcoll launch: rank 0 of 2 failed: " in job.err[-1]


def test_segfault_shows_where(launch):
    job = launch(
        *("-n", "2", "program.py"),
        program="""
        others_wait(1)
        import ctypes
        ctypes.string_at(0)
        """,
    )
    assert job.end() == 128 + signal.SIGSEGV
    assert "failed: killed by SIGSEGV" in job.err[-1]
    assert "[1] Fatal Python error: Segmentation fault\n" in job.err


def test_exit_status_of_sys_exit(launch):
    job = launch(
        *("-n", "2", "program.py"),
        program="""
        import atexit
        atexit.register(print, "my own handler")
        others_wait(1)
        sys.exit(7)
        """,
    )
    assert job.end() == 7
    assert "[1] my own handler\n" in job.out


# Being stopped


def test_exit_status_of_which_the_system_keeps_nothing(launch):
    """As without a launcher: 256 is 0."""
    job = launch(*("-n", "2", "program.py"), program="sys.exit(256 * rank)")
    assert job.end() == 0
    assert "failed" not in "".join(job.err)


def test_ctrl_c(launch):
    job = launch(
        *("-n", "2", "program.py"),
        program="""
        try:
            others_wait(-1)
        finally:
            time.sleep(rank)
            print("saved")
        """,
    )
    job.wait_for("ready", 2)
    os.kill(job.pid, signal.SIGINT)
    assert job.end() == 130
    assert {"[0] saved\n", "[1] saved\n"} <= set(job.out)
    assert job.err[-1] == "jcoll launch: stopped by SIGINT; ranks 0-1: interrupted\n"


def test_ctrl_c_ignored_by_one_rank(launch):
    job = launch(
        *("-n", "2", "program.py"),
        program="""
        if rank == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def stubborn():
            time.sleep(1000)
        jax.experimental.multihost_utils.sync_global_devices("all there")
        print("ready")
        stubborn()
        """,
    )
    job.wait_for("ready", 2)
    os.kill(job.pid, signal.SIGINT)
    assert job.end() == 130
    assert "[1] KeyboardInterrupt\n" in job.err
    assert re.search(r"\[0\] .*line \d+ in stubborn", "".join(job.err))
    ends = "rank 0: stopped; rank 1: interrupted"
    assert job.err[-1] == f"jcoll launch: stopped by SIGINT; {ends}\n"


def test_launcher_killed(launch):
    program = """print("pid", subprocess.Popen(["sleep", "1000"]).pid)
others_wait(-1)"""
    job = launch(*("-n", "2", "program.py"), program=program)
    job.wait_for("ready", 2)
    assert len(job.pids()) == 4 and all(is_running(pid) for pid in job.pids())
    os.kill(job.pid, signal.SIGKILL)
    assert job.end() == -signal.SIGKILL


def test_timeout_shows_where(launch):
    job = launch(
        *("-n", "1", "--timeout", "6", "program.py"),
        program="""
        def lost():
            time.sleep(1000)
        lost()
        """,
    )
    assert job.end() == 124
    assert re.search(r"\[0\] .*line \d+ in lost", "".join(job.err))
    assert job.err[-1] == "jcoll launch: 6 s have passed (--timeout); rank 0: stopped\n"


def test_nobody_reads(launch):
    program = "print('ready')\nwhile True: print('more'); time.sleep(0.1)"
    job = launch(*("-n", "1", "program.py"), program=program)
    job.wait_for("ready", 1)
    pids = job.pids()
    job.deaf = True
    assert job.end() == 128 + signal.SIGPIPE
    assert_gone(pids)
    assert job.err == []


# Without processes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("x.py", "-n/--num-processes is not given; a number of processes from 1 to 256 is"),
        ("-n 0 x.py", "-n/--num-processes is 0; a number of processes"),
        ("-n 2", "no program is given; a script or -m module is needed"),
        ("-n 2 -m", "no program is given"),
        ("-n 2 trian.py", "script 'trian.py' does not exist in "),
        ("-n 2 trian.py", "a Python file is needed: did you mean train.py\\?"),
        ("-n 2 --bad x.py", "unknown: --bad; only the flags of the help are"),
        ("-n 2 -- no.py -n", "script 'no.py' does not exist"),
        ("-n 2 .", "script '.' is a folder without __main__.py; a Python file"),
        ("-n 2 -m no_such_module_here", "-m is 'no_such_module_here', which is not found; a"),
        ("-n 2 --devices-per-process 0 train.py", "--devices-per-process is 0; 1 to 1024 devices"),
        ("-n 4 --hosts 3 train.py", "--hosts is 3 with -n 4; .* write one of 1, 2, 4"),
        ("-n 2 --timeout 0 train.py", "--timeout is 0; more than 0 seconds are needed"),
        ("-n 2 --port 70000 train.py", "--port is 70000, which is in use or not allowed; a free"),
        ("-n 2 --log-dir train.py/x train.py", "--log-dir is train.py/x, which cannot be written"),
    ],
)
def test_bad_arguments(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("train.py").write_text("raise SystemExit(0)")
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", *argv.split()])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err), err


def test_port_in_use(capsys, tmp_path):
    (tmp_path / "train.py").write_text("")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(SystemExit):
            cli.main(["launch", "-n", "2", "--port", str(port), str(tmp_path / "train.py")])
    assert f"--port is {port}, which is in use" in capsys.readouterr().err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", "--help"])
    assert caught.value.code == 0
    assert "python -m jcoll launch -n 4 train.py" in capsys.readouterr().out


def test_lines():
    lines = Lines()
    assert lines.feed(b"one\r\ntwo\nthr") == [b"one", b"two"]
    assert lines.feed(b"ee\n 10%\r 20%\r") == [b"three"]
    assert lines.feed(b" 30%\n") == [b" 30%"]
    assert lines.feed(b" 40%\r") == []
    assert lines.finish() == b" 40%"
    assert lines.feed(b"x" * 70_000) == [b"x" * 70_000]
    assert lines.finish() == b""


CONNECTED = (
    b"[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peer ranks is : "
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (CONNECTED + b"7", True),
        (CONNECTED + b"8", False),
        (b"[Gloo] Rank [Gloo] Rank 31 is connected to 7 peer ranks. Expected", False),
        (b"[Gloo] Rank [Gloo] Rank 31 is connected to  is connected to 77", True),
        (b"[Gloo] Rank 3 lost its connection to 7", False),
        (CONNECTED + b"7loss 3", False),
        (b"42", False),
        (b"", False),
    ],
)
def test_gloo_without_news(line, expected):
    assert is_noise(line) is expected


def test_much_of_gloo_and_then_news():
    """As ranks of two digits write it on one line: looked at in one pass."""
    line = 200 * (CONNECTED.replace(b"3", b"13").replace(b"7", b"15") + b"15")
    begun = time.monotonic()
    assert is_noise(line)
    assert not is_noise(line + b"loss 3")
    assert time.monotonic() - begun < 1


def test_who_failed_first():
    missed = Fate(status=1, reported=1, reported_at=2.0)
    raised = Fate(status=1, reported=1, reported_at=1.0)
    killed, aborted, done = Fate(status=-9), Fate(status=-6), Fate(status=0)
    assert first_failure([done, Fate()]) is None
    assert first_failure([missed, raised]) == 1
    assert first_failure([missed, killed]) == 1
    assert first_failure([aborted, missed]) == 1
    assert first_failure([done, aborted]) == 1
    stopped = [Fate(status=-15, stopped=True) for _ in range(3)]
    text = failure_text([killed, done, *stopped], 0)
    assert text.endswith("killed it). Then rank 1: done; ranks 2-4: stopped")
