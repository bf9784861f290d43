"""One process of `jcoll launch`: joins the job, then runs the user's program as `__main__`.

Run by its path and with the standard library alone until it is certain to end with its launcher:
`-m` would import jcoll, and so jax, before. Its first argument is JSON (`Job.command`), the rest is
the user's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import types
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with(launcher: int) -> None:
    """Has the kernel kill this process when its launcher dies, however it dies."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:  # It died before prctl.
        os._exit(1)


class Failure:
    """The first failure here: told to the launcher at once, then the way out is a short one."""

    def __init__(self, report_fd: int) -> None:
        os.set_inheritable(report_fd, False)
        self._report_fd = report_fd
        self._pid = os.getpid()
        self._status = 0

    def tell(self, status: int) -> None:
        if os.getpid() != self._pid or self._status:  # Not: in a fork of this process.
            return
        self._status = status
        line = json.dumps({"status": status, "time": time.monotonic()})
        with contextlib.suppress(OSError):  # A program that closed it: the exit tells.
            os.write(self._report_fd, line.encode() + b"\n")

    def leave(self) -> None:
        """After the program's own exit handlers, before jax's, which waits for the other ranks.

        Not on Ctrl-C, which all ranks have: without rank 0 jax aborts the others, also those that
        are about to save what they have.
        """
        if self._status not in (0, INTERRUPTED) and os.getpid() == self._pid:
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()
            _LIBC.fflush(None)
            os._exit(self._status)


def join(about: dict[str, Any], failure: Failure) -> None:
    """Makes this process a rank of the job; the program's own call of initialize finds it done."""
    import jax

    atexit.register(failure.leave)  # After jax's: these are called last in, first out.
    given = {
        "coordinator_address": about["coordinator"],
        "num_processes": about["num_processes"],
        "process_id": about["rank"],
        "cluster_detection_method": "deactivate",
        "shutdown_timeout_seconds": 7 * 86400,  # Ranks may end far apart; the launcher watches.
    }
    jax.config.update("jax_check_proxy_envs", False)  # It warns of them; no_grpc_proxy helps.
    initialize = jax.distributed.initialize
    initialize(**given)

    def initialize_once(
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        **options: Any,
    ) -> None:
        """Does nothing: `jcoll launch` has done it. Another size or rank is an error."""
        for name, value in (("num_processes", num_processes), ("process_id", process_id)):
            if value is not None and value != given[name]:
                raise ValueError(
                    f"jax.distributed.initialize under jcoll launch: {name}={value}, but this is "
                    f"rank {about['rank']} of {about['num_processes']}.\n  Leave the arguments "
                    "out, or take them from JAX_NUM_PROCESSES and JAX_PROCESS_ID."
                )
        if not jax.distributed.is_initialized():  # After the program's jax.distributed.shutdown.
            initialize(**options | given)

    jax.distributed.initialize = initialize_once


def run(is_module: bool) -> None:
    """The program as `python program.py` or `python -m program` runs it."""
    target = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    if os.environ.get("JCOLL_INTERCEPT", "0") != "0":  # Programs of lax alone do not import it.
        import jcoll  # noqa: F401
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def show(error: BaseException) -> None:
    """The traceback as the program alone would have had it."""
    trace: types.TracebackType | None = error.__traceback__
    above = (__file__, runpy.__file__, "<frozen runpy>")
    while trace and trace.tb_frame.f_code.co_filename in above:
        trace = trace.tb_next
    sys.last_value = error  # As Python does; exit handlers look for it.
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def main() -> None:
    about = json.loads(sys.argv[1])
    end_with(about["launcher"])
    del sys.argv[:2]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored in a shell's background.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=False)
    failure = Failure(about["report_fd"])
    try:
        join(about, failure)
        run(about["is_module"])
    except SystemExit as error:
        code = 0 if error.code is None else error.code
        if status := code & 255 if isinstance(code, int) else 1:  # 256 is 0, as the system has it.
            failure.tell(status)
        raise
    except BaseException as error:
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        failure.tell(status)
        show(error)
        sys.exit(status)


if __name__ == "__main__":
    main()
