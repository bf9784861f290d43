"""The winners of a measurement as a table: what `auto` now means."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from jcoll.sizes import format_size
from jcoll.tuning.candidates import PLACEMENTS, Request
from jcoll.tuning.select import select, winner
from jcoll.tuning.table import Row

_GAINS = "A number behind an algorithm: so many times as fast as direct."
_XLA = (
    "(xla): XLA's own would be at least 1.1 times as fast, but auto does not choose it for speed."
)


def summary(rows: Iterable[Row]) -> str:
    """For each op and size the algorithm of the lowest cost, or "direct" if that is close."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.placement, row.num_ranks), []).append(row)
    lines = [line for key in groups for line in _lines(*key, groups[key])]
    return "\n".join([*lines, _GAINS, *([_XLA] if any("(xla)" in line for line in lines) else [])])


def quality(rows: Iterable[Row]) -> str:
    """How good the choices of `auto` are, by the costs that it has now and these measurements."""
    found = sorted(_excesses(rows), key=lambda item: item[0])
    if not found:
        return ""
    middle = statistics.median(excess for excess, _, _ in found)
    worst, row, name = found[-1]
    where = f"{name} for {row.op} of {format_size(row.nbytes)}, {row.num_ranks} ranks"
    return f"""\
What auto would have chosen by the costs before, against the best algorithm measured now:
  median    {middle:.2f} times its time
  worst     {worst:.2f} times ({where})
  over 1.1  in {sum(item[0] > 1.1 for item in found)} of {len(found)} cases"""


def _excesses(rows: Iterable[Row]) -> Iterator[tuple[float, Row, str]]:
    """(auto's time / the best of jcoll's algorithms, row, auto's choice)."""
    for row in rows:
        name = select(Request(row.op, (row.num_ranks,), row.nbytes, row.placement)).algorithm
        ours = [us for algorithm, us in row.us.items() if algorithm != "xla"]
        if name in row.us and ours:
            yield row.us[name] / min(ours), row, name


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
