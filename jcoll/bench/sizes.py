"""Sizes and counts of the command line, and sweeps over sizes."""

from __future__ import annotations

import re

from jcoll.sizes import format_size as format_size
from jcoll.sizes import parse_size as parse_size


def parse_count(text: str) -> int:
    """The whole number in `text`; -1 for anything else, and for more digits than make sense."""
    return int(text) if re.fullmatch(r"\d{1,15}", text) else -1


def sweep(begin: int, end: int, *, factor: int = 2, step: int = 0) -> list[int]:
    """Sizes from `begin` to at most `end`: adding `step` where it is given, else times `factor`."""
    sizes, size = [], begin
    while size <= end:
        sizes.append(size)
        size = size + step if step else size * factor
    return sizes
