"""What an algorithm's author wrote: files that register algorithms, and calls of their functions;
what these raise, told by where. No jax."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jcoll.errors import UsageError
from jcoll.plan.ir import PlanError

_Frames = list[traceback.FrameSummary]


def add_flag(parser: argparse.ArgumentParser) -> None:
    """--module, for `load`."""
    help_text = "Python file that registers algorithms (jcoll.algorithms.algorithm)"
    parser.add_argument("--module", type=Path, metavar="FILE", help=help_text)


def load(path: Path | None) -> None:
    """Runs a user's file, which registers algorithms. UsageError if that cannot be done."""
    if path is None:
        return
    spec = importlib.util.spec_from_file_location(f"jcoll_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--module is {path}; an existing .py file is needed: check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        _, own = _frames(error, spec.origin)
        line = f":{own[-1].lineno}" if own else ""
        raise UsageError(f"--module: {path}{line}: {type(error).__name__}: {error}") from None


@contextmanager
def errors_of(fn: Callable[..., Any], where: str) -> Iterator[None]:
    """Whatever `fn` raises within becomes a PlanError that says where, and at which line of its.

    Not what says so already, nor what a command line stops a plan with, nor want of memory.
    """
    try:
        yield
    except (PlanError, UsageError, MemoryError):
        raise
    except Exception as error:
        fix = "Correct the algorithm's function."
        raise PlanError(f"{where}: {told(error, fn)}.\n  {fix}") from error


def told(error: Exception, fn: Callable[..., Any]) -> str:
    """ZeroDivisionError at mine.py:3: division by zero"""
    frames, own = _frames(error, getattr(getattr(fn, "__code__", None), "co_filename", None))
    found = own or frames
    at = f" at {found[-1].filename}:{found[-1].lineno}" if found else ""
    return f"{type(error).__name__}{at}: {error}"


def _frames(error: BaseException, file: str | None) -> tuple[_Frames, _Frames]:
    """Where it was raised, outermost first: all frames, and those of a file."""
    frames = list(traceback.extract_tb(error.__traceback__))
    return frames, [frame for frame in frames if frame.filename == file]
