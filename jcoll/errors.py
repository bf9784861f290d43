"""Error texts. Every user error has four parts: where, what was given, what is needed, what to do.

jcoll.all_to_all over axis 'x': split_axis=1 has size 10, which 4 ranks do not divide.
  Pad it to 12, or use jcoll.all_to_all_v.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


class AxisError(NameError, ValueError):
    """An axis name that is not bound here. A NameError, as `jax.lax` raises, and a ValueError."""


class UsageError(ValueError):
    """A command line that cannot be carried out; the text says what to change."""


def text(where: str, problem: str, fix: str) -> str:
    """Joins the parts; `problem` says what was given and what is needed."""
    return f"jcoll.{where}: {problem}\n  {fix}"


def ranges(numbers: Iterable[int], to: str = "-", between: str = ", ") -> str:
    """ "0-2, 5" for [0, 1, 2, 5]."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return between.join(to.join(map(str, span)) for span in spans)


def is_command_line() -> bool:
    """Whether this process is `python -m jcoll ...`, or `jcoll ...`.

    It imports the package like any other program, but says itself why that fails (cli.py).
    """
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program != "-m":
        return program == "jcoll"
    # So it is while the packages of any `python -m` program are imported.
    named = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    return named[-1:] in (["jcoll"], ["-mjcoll"])  # After -m, -um, ...
