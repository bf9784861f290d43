"""The command line: `python -m jcoll COMMAND`.

A command is a module with `configure(parser)` and `run(args) -> exit status`, and one line in
`COMMANDS`. Only the module of the command that is called gets imported. `args.fail(text)` ends
the program with status 2, as flags that do not parse do.

Where `import jcoll` fails, as without jax, the doctor reports it and the others end with one line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import jcoll

PROGRAM = "python -m jcoll"


@dataclass(frozen=True)
class Command:
    name: str
    module: str
    summary: str
    needs_jax: bool = True


COMMANDS = (
    Command("bench", "jcoll.bench.command", "measure collectives against jax.lax"),
    Command("plan", "jcoll.cli_plan.command", "show, prove, simulate and draw plans"),
    Command("tune", "jcoll.cli_tune.command", "measure the algorithms here, for algorithm='auto'"),
    Command("explain", "jcoll.cli_tune.explain", "print what algorithm='auto' means for a call"),
    Command("launch", "jcoll.launch.command", "run a program in several processes, as one job"),
    Command(
        "shared-heap",
        "jcoll.shared_heap",
        "print what to preload where others start the processes",
        needs_jax=False,
    ),
    Command(
        "doctor",
        "jcoll.cli_doctor.command",
        "tell what jcoll can use here, and why not more",
        needs_jax=False,
    ),
    Command("info", "jcoll.bench.facts", "print machine, versions and devices"),
)


class _Parser(argparse.ArgumentParser):
    """argparse's errors without the page of usage in front of them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n  See: {self.prog} --help\n")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """All commands by name; only the chosen one's flags, which need its module."""
    parser = _Parser(prog=PROGRAM, description="Collectives for JAX: tools.")
    version = f"jcoll {jcoll.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.summary)
        if command.name == chosen:
            if command.needs_jax and jcoll._why_broken is not None:
                sub.exit(2, _broken_text(sub.prog, jcoll._why_broken))
            module = importlib.import_module(command.module)
            module.configure(sub)
            sub.set_defaults(run=module.run, fail=sub.error)
    return parser


def _broken_text(program: str, error: Exception) -> str:
    """What the user can mend, in a line or two; of what may be a bug also where it is."""
    if isinstance(error, ValueError) and str(error).startswith("jcoll"):  # Of a JCOLL_ variable.
        return f"{program}: {error}\n"
    if not isinstance(error, ImportError):
        traceback.print_exception(error)
    what = str(error) or type(error).__name__
    return f"{program}: import jcoll fails: {what}\n  {PROGRAM} doctor says more.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status. A bad command line raises SystemExit(2)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args, unknown = _parser(argv[0] if argv else None).parse_known_args(argv)
    if unknown:
        args.fail(f"unknown: {' '.join(unknown)}; only the flags of the help are: leave it out")
    try:
        status = args.run(args)
        if sys.stdout is not None:  # It is where the program was started without one.
            sys.stdout.flush()
    except BrokenPipeError:  # Nobody reads any more: `| head`.
        _write_to_nobody()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"{PROGRAM} {args.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _write_to_nobody() -> None:
    """What is still in the buffers would be written at exit, and fail once more."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            continue
        os.dup2(nobody, stream.fileno())
    os.close(nobody)
