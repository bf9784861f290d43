"""Calls of functions that an algorithm's author wrote: what they raise, told by where. No jax."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jcoll.errors import UsageError
from jcoll.plan.ir import PlanError


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
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(getattr(fn, "__code__", None), "co_filename", None)
    found = [f for f in frames if f.filename == own] or frames
    at = f" at {found[-1].filename}:{found[-1].lineno}" if found else ""
    return f"{type(error).__name__}{at}: {error}"
