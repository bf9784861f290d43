"""Sizes as people write them: `1K`, `16M`, `1G` (powers of 1024); counts; sweeps over sizes."""

from __future__ import annotations

import re

MAX_NBYTES = 1 << 40
"""What a size may be at most: 1 TiB."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PATTERN = re.compile(r"(\d{1,15})([KMG]?)(?:I?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes named by `text`: a whole number, optionally followed by K, M or G (and B or iB)."""
    match = _PATTERN.fullmatch(text.strip())
    nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else MAX_NBYTES + 1
    if nbytes > MAX_NBYTES:
        raise ValueError(
            f"{text!r} is not a size; a whole number with an optional K, M or G is needed "
            "(powers of 1024), at most 1024G: write 512, 16K or 4M"
        )
    return nbytes


def format_size(nbytes: int) -> str:
    """The shortest exact spelling: 1048576 -> '1M', 1020 -> '1020'."""
    for unit in ("G", "M", "K"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def parse_count(text: str) -> int:
    """The whole number in `text`; -1 for anything else, and for more digits than make sense."""
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else -1


def sweep(begin: int, end: int, *, factor: int = 2, step: int = 0) -> list[int]:
    """Sizes from `begin` to at most `end`: adding `step` where it is given, else times `factor`."""
    sizes, size = [], begin
    while size <= end:
        sizes.append(size)
        size = size + step if step else size * factor
    return sizes
