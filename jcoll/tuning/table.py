"""Measured costs: JSON files, the shipped ones and the user's own. No jax.

    {"format": "jcoll-tuning", "version": 1, "device_kind": "cpu", "machine": "...",
     "rows": [{"placement": "process", "op": "all_reduce", "num_ranks": 8, "nbytes": 1024,
               "us": {"direct": 11.2, "ring": 40.1, "xla": 220.5}}, ...]}

"source": "estimated" at the top says that nobody has measured the numbers.

Fields of other names are ignored, wherever they are. A file that is damaged, of another version or
for another kind of device is ignored as a whole, with one warning.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jcoll.config import config
from jcoll.tuning.candidates import PLACEMENTS

FORMAT = "jcoll-tuning"
VERSION = 1
MEASURED, ESTIMATED = "measured", "estimated"

DTYPE = "float32"
"""What costs are of: other dtypes are taken to cost what as many bytes of it do."""
SHIPPED = Path(__file__).with_name("tables")

MAX_RANKS = 1 << 20
"""Of a row: more than this are a mistake, and the model would take for ever to scale them."""

Point = tuple[int, float]  # (nbytes, microseconds)


class TableError(ValueError):
    """A file that is no table; the text says why."""


@dataclass(frozen=True)
class Row:
    """us: microseconds of one collective, by algorithm."""

    placement: str
    op: str
    num_ranks: int
    nbytes: int
    us: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.placement, self.op, self.num_ranks, self.nbytes


@dataclass(frozen=True)
class Found:
    """Costs of a size, for how many ranks they were measured, and between which sizes."""

    us: Mapping[str, float]
    num_ranks: int
    smallest: int
    largest: int


@dataclass(frozen=True)
class Table:
    device_kind: str
    machine: str
    rows: tuple[Row, ...]
    digest: str = ""
    source: str = MEASURED
    _curves: dict[tuple[str, str], dict[int, dict[str, list[Point]]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for row in sorted(self.rows, key=lambda row: row.key):
            by_ranks = self._curves.setdefault((row.placement, row.op), {})
            by_algorithm = by_ranks.setdefault(row.num_ranks, {})
            for algorithm, us in row.us.items():
                by_algorithm.setdefault(algorithm, []).append((row.nbytes, us))

    def find(self, placement: str, op: str, num_ranks: int, nbytes: int) -> Found | None:
        """By the nearest number of ranks (of ratio), and between sizes; None: never measured."""
        by_ranks = self._curves.get((placement, op))
        if not by_ranks:
            return None
        nearest = min(by_ranks, key=lambda n: (abs(math.log(n / num_ranks)), n))
        curves = by_ranks[nearest]
        us = {name: _at(curve, nbytes) for name, curve in curves.items()}
        sizes = [size for curve in curves.values() for size, _ in curve]
        return Found(us, nearest, min(sizes), max(sizes))


def _at(curve: list[Point], nbytes: int) -> float:
    """Straight lines between the logarithms. Less than the smallest size costs as much as it, more
    than the largest in proportion."""
    i = bisect_left(curve, (nbytes, 0.0))
    if i == 0:
        return curve[0][1]
    (x0, y0) = curve[i - 1]
    if i == len(curve):
        return y0 * nbytes / x0
    (x1, y1) = curve[i]
    share = math.log(nbytes / x0) / math.log(x1 / x0)
    return y0 ** (1 - share) * y1**share


# Files


def parse(text: str) -> Table:
    """TableError for anything that is not a table of this version."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TableError(f'no "format": "{FORMAT}" at its top')
    if data.get("version") != VERSION:
        raise TableError(f"version {data.get('version')!r}, this jcoll reads version {VERSION}")
    kind, rows = data.get("device_kind"), data.get("rows")
    if not isinstance(kind, str) or not isinstance(rows, list):
        raise TableError("device_kind must be a string and rows a list")
    parsed = {row.key: row for row in (_row(i, row) for i, row in enumerate(rows))}
    digest = hashlib.sha256(text.encode()).hexdigest()
    source = data.get("source", MEASURED)
    if source not in (MEASURED, ESTIMATED):
        raise TableError(f"source is {source!r}, neither {MEASURED!r} nor {ESTIMATED!r}")
    return Table(kind, str(data.get("machine", "")), tuple(parsed.values()), digest, source)


def _row(index: int, row: Any) -> Row:
    if not isinstance(row, dict):
        raise TableError(f"rows[{index}] is not an object")
    for name in ("placement", "op", "num_ranks", "nbytes", "us"):
        if not _FIELDS[name](row.get(name)):
            raise TableError(f"rows[{index}].{name} is {row.get(name)!r}")
    names = ("placement", "op", "num_ranks", "nbytes", "us")
    return Row(**{name: row[name] for name in names})


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < 1e15  # So that nothing overflows that is made of it.


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


_FIELDS = {
    "placement": lambda value: isinstance(value, str) and value in PLACEMENTS,
    "op": lambda value: isinstance(value, str),
    "num_ranks": lambda value: _is_count(value) and value <= MAX_RANKS,
    "nbytes": _is_count,
    "us": lambda value: (
        isinstance(value, dict) and bool(value) and all(map(_is_number, value.values()))
    ),
}


def to_text(device_kind: str, machine: str, rows: Iterable[Row], **more: str) -> str:
    """The file; `more`: fields for people."""
    head = {"format": FORMAT, "version": VERSION, "device_kind": device_kind, "machine": machine}
    lines = [f' "{name}": {json.dumps(value)},' for name, value in (head | more).items()]
    body = ",\n".join(f"  {_row_text(row)}" for row in sorted(rows, key=lambda row: row.key))
    return "\n".join(["{", *lines, ' "rows": [', body, " ]", "}"]) + "\n"


def _row_text(row: Row) -> str:
    us = {name: float(f"{value:.4g}") for name, value in row.us.items()}
    keys = ("placement", "op", "num_ranks", "nbytes")
    return json.dumps({name: getattr(row, name) for name in keys} | {"us": us})


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """New rows take the place of old ones of the same key."""
    return list(({row.key: row for row in old} | {row.key: row for row in new}).values())


def own_path(device_kind: str = "cpu") -> Path:
    """Where the user's own table is: JCOLL_TUNING_FILE, or in the user's cache."""
    if config.tuning_file:
        return Path(config.tuning_file)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = re.sub(r"\W+", "_", device_kind.lower())
    return Path(os.path.expanduser(home)) / "jcoll" / "tuning" / f"{name}.json"


@functools.cache
def own(device_kind: str) -> Table | None:
    """The user's own table, as it was when first looked at."""
    if config.tuning_file == "none":
        return None
    path = own_path(device_kind)
    if not config.tuning_file and not _exists(path):
        return None
    return _load(path, device_kind)


@functools.cache
def shipped(device_kind: str) -> Table | None:
    path = SHIPPED / f"{device_kind}.json"
    return _load(path, device_kind) if path.exists() else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # A home that cannot be looked into.
        return False


def _load(path: Path, device_kind: str) -> Table | None:
    try:
        table = parse(path.read_text(encoding="utf-8"))
        if table.device_kind != device_kind:
            raise TableError(f"it is of {table.device_kind!r} devices, not {device_kind!r}")
        return table
    except (OSError, UnicodeError, TableError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        warnings.warn(
            f"jcoll: the tuning file {path} is ignored: {reason}.\n"
            "  Make a new one with `python -m jcoll tune`, or unset JCOLL_TUNING_FILE.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def own_digest(device_kind: str = "cpu") -> str:
    """What tells whether two processes have the same table of their own; "" for none."""
    table = own(device_kind)
    return table.digest if table else ""


def tables(device_kind: str, use_own: bool) -> list[Table]:
    """Those that may decide, the first that knows an op and a placement does."""
    found = (own(device_kind) if use_own else None, shipped(device_kind))
    return [table for table in found if table is not None]
