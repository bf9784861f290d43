"""The winners of a measurement as a table: what `auto` now means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jcoll.bench.sizes import format_size
from jcoll.tuning.candidates import PLACEMENTS
from jcoll.tuning.select import winner
from jcoll.tuning.table import Row


def summary(rows: Iterable[Row]) -> str:
    """For each op and size the algorithm of the lowest cost, or "direct" if that is close."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.placement, row.num_ranks), []).append(row)
    note = (
        "times as fast as direct, where it is not direct; (xla) would be 1.1 times as fast or more"
    )
    return "\n".join([*(line for key in groups for line in _lines(*key, groups[key])), note])


def _lines(placement: str, num_ranks: int, rows: list[Row]) -> Iterator[str]:
    yield f"{num_ranks} ranks, {PLACEMENTS[placement]}"
    for op in dict.fromkeys(row.op for row in rows):
        yield f"  {op}: " + ", ".join(_spans([row for row in rows if row.op == op]))


def _spans(rows: list[Row]) -> Iterator[str]:
    """Neighbouring sizes of one winner together."""
    runs: list[tuple[str, list[Row]]] = []
    for row in rows:
        name = _name(row)
        if not runs or runs[-1][0] != name:
            runs.append((name, []))
        runs[-1][1].append(row)
    for name, members in runs:
        sizes = [format_size(row.nbytes) for row in (members[0], members[-1])]
        yield f"{'-'.join(dict.fromkeys(sizes))} {name}{_gains(name, members)}"


def _name(row: Row) -> str:
    ours = {name: us for name, us in row.us.items() if name != "xla"}
    return winner(ours or row.us)


def _gains(name: str, rows: list[Row]) -> str:
    best = name.partition(" ")[0]
    gains = [row.us["direct"] / row.us[best] for row in rows if "direct" in row.us]
    text = "" if best == "direct" or not gains else f" {min(gains):.2g}"
    if text and max(gains) > min(gains):
        text += f"..{max(gains):.2g}"
    faster = [row for row in rows if row.us.get("xla", float("inf")) < 0.9 * row.us[best]]
    return text + (" (xla)" if faster else "")
