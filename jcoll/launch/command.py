"""`python -m jcoll launch`: its flags, and what is wrong with them."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import sys
from pathlib import Path

from jcoll.errors import UsageError
from jcoll.launch.job import Job, free_port, is_free
from jcoll.launch.output import Output
from jcoll.launch.supervise import Supervisor

MAX_PROCESSES = 256
MAX_DEVICES = 1024

_USAGE = """\
%(prog)s -n N [options] script.py [argument ...]
       %(prog)s -n N [options] -m module [argument ...]"""

_DESCRIPTION = """\
Run a program in N processes on this machine that form one JAX job on CPU: jax.process_count() is
N, jax.devices() has the devices of all, XLA's collectives work between them (gloo).

The program needs no code for it: jax.distributed.initialize has been called when it starts, and
does nothing if it calls it again. Options come before the program, all that follows it is its own.
"""

_EPILOG = """\
examples:
  python -m jcoll launch -n 4 train.py --steps 100
  python -m jcoll launch -n 2 --devices-per-process 4 -m mypackage.train
  python -m jcoll launch -n 4 --hosts 2 --timeout 600 --log-dir logs train.py

Each line of output has its rank in front; gloo's lines, which say that ranks have connected, are
in the logs only. The first rank to fail ends all: the others have 2 s to say what they miss, then
they are stopped, and its traceback comes last. Ctrl-C (SIGINT, SIGTERM, SIGHUP) interrupts all;
those that still run after 5 s show where they are and are stopped; a second one kills at once.
Should the launcher itself be killed, the kernel kills the processes with it.

set for each process: JAX_PLATFORMS, JAX_NUM_CPU_DEVICES, JAX_CPU_COLLECTIVES_IMPLEMENTATION,
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, PYTHONUNBUFFERED, JCOLL_HOST_ID with
--hosts, and its share of the cores as NPROC (XLA's threads), OMP_NUM_THREADS and JCOLL_NUM_THREADS
unless these are set. LD_PRELOAD has libjcoll_heap, by which the processes read each other's large
results where they are, unless JCOLL_SHARED_HEAP=0. stdin is empty. jax is imported before the
program, so other JAX_ variables that it sets itself come too late: set them outside.

exit status: 0 all succeeded; that of the first rank to fail (128 + signal if one killed it);
  124 --timeout; 130 Ctrl-C; 2 bad command line
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = _USAGE
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("-n", "--num-processes", type=int, metavar="N", help="how many processes; required")
    add(
        "--devices-per-process",
        type=int,
        default=1,
        metavar="D",
        help="virtual CPU devices of each, whatever XLA_FLAGS says (default 1)",
    )
    add("--hosts", type=int, metavar="K", help="let them count as K hosts with N/K processes each")
    add("--timeout", type=float, metavar="S", help="end all after S seconds, with their stacks")
    add("--log-dir", type=Path, metavar="DIR", help="also write DIR/rank-0.log, ... without ranks")
    add("--port", type=int, metavar="P", help="of the coordinator (default: a free one)")
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module")
    add("script", nargs=argparse.REMAINDER, help="script.py and its arguments")


def run(args: argparse.Namespace) -> int:
    try:
        job = make_job(args)
        make_log_dir(args.log_dir)
    except UsageError as error:
        args.fail(str(error))
    with Output(job.num_processes, args.log_dir) as output:
        return Supervisor(job, output, args.timeout).run()


def make_job(args: argparse.Namespace) -> Job:
    check_counts(args)
    is_module = args.module is not None
    # argparse ends -m's arguments at "--"; before a script one means nothing.
    script = args.script[1:] if args.script[:1] == ["--"] and not is_module else args.script
    target = (*(args.module or ()), *script)
    if not target:
        raise UsageError(
            "no program is given; a script or -m module is needed after the options: "
            "launch -n 2 train.py"
        )
    check_module(target[0]) if is_module else check_script(target[0])
    if args.port is not None and not (0 < args.port < 65536 and is_free(args.port)):
        raise UsageError(
            f"--port is {args.port}, which is in use or not allowed; a free port from 1 to 65535 "
            "is needed: leave it out, and a free one is found"
        )
    return Job(
        target=target,
        is_module=is_module,
        num_processes=args.num_processes,
        port=args.port or free_port(),
        devices_per_process=args.devices_per_process,
        num_hosts=args.hosts,
    )


def check_counts(args: argparse.Namespace) -> None:
    n = args.num_processes
    if n is None or not 1 <= n <= MAX_PROCESSES:
        given = "-n/--num-processes is " + ("not given" if n is None else str(n))
        raise UsageError(
            f"{given}; a number of processes from 1 to {MAX_PROCESSES} is needed: write -n 4, "
            "before the program"
        )
    if not 1 <= args.devices_per_process <= MAX_DEVICES:
        raise UsageError(
            f"--devices-per-process is {args.devices_per_process}; 1 to {MAX_DEVICES} devices are "
            "needed: write 1, or leave it out"
        )
    if args.hosts is not None and (args.hosts < 1 or n % args.hosts):
        raise UsageError(
            f"--hosts is {args.hosts} with -n {n}; a number of hosts that divides the processes "
            f"is needed: write one of {', '.join(str(k) for k in range(1, n + 1) if n % k == 0)}"
        )
    if args.timeout is not None and not args.timeout > 0:
        raise UsageError(
            f"--timeout is {args.timeout:g}; more than 0 seconds are needed: raise it, or leave it "
            "out to wait for ever"
        )


def check_script(text: str) -> None:
    path = Path(text)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(
            f"script {text!r} is a folder without __main__.py; a Python file is needed: name the "
            "file in it"
        )
    if path.exists() and os.access(path, os.R_OK):
        return
    problem = "cannot be read" if path.exists() else f"does not exist in {Path.cwd()}"
    siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.75)
    fix = f"did you mean {path.parent / near[0]}?" if near else "check the path"
    raise UsageError(f"script {text!r} {problem}; a Python file is needed: {fix}")


def check_module(name: str) -> None:
    """Looks for the top package only: finding what is in it would import it."""
    top = name.partition(".")[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = bool(top) and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise UsageError(
            f"-m is {name!r}, which is not found; a module that can be imported from {Path.cwd()} "
            "is needed: check the name, install its package, or set PYTHONPATH"
        )


def make_log_dir(path: Path | None) -> None:
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError("not writable")
    except OSError as error:
        raise UsageError(
            f"--log-dir is {path}, which cannot be written: {error.strerror or error}; a folder "
            "for the logs is needed: name another"
        ) from None
