"""Several measurements of one row as one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jcoll.tuning.table import Row


def combined(rows: Iterable[Row]) -> list[Row]:
    """One row for each key, in order of appearance.

    What drifts between measurements hits all algorithms of one alike: so the median is taken of
    their ratios to "direct", which then scale the median cost of "direct".
    """
    by_key: dict[object, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    return [_as_one(found) for found in by_key.values()]


def _as_one(rows: Sequence[Row]) -> Row:
    rows = [row for row in rows if "direct" in row.us] or rows[-1:]
    if len(rows) == 1:
        return rows[0]
    scale = statistics.median(row.us["direct"] for row in rows)
    names = dict.fromkeys(name for row in rows for name in row.us)
    ratios = {n: [row.us[n] / row.us["direct"] for row in rows if n in row.us] for n in names}
    return replace(rows[0], us={n: scale * statistics.median(found) for n, found in ratios.items()})
