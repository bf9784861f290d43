"""Rows as text: nccl-tests' table (jcoll and lax where it has out-of-place and in-place) and
Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from jcoll.bench import catalog
from jcoll.bench.rows import Row, bandwidths
from jcoll.sizes import format_size

_SIDE = f"{'time':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>7}"
_UNITS = f"{'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'':>7}"


def legend() -> list[str]:
    """Lines above the first table: what the columns mean."""
    return [
        "size: the larger of a rank's send and receive buffer (nccl-tests); algbw = size / time;",
        "busbw = algbw * factor; ratio = lax time / jcoll time, calls alternating.",
    ]


def group_of(row: Row) -> tuple[str, ...]:
    """Rows of one table share these."""
    return (
        row.op,
        str(row.devices),
        str(row.processes),
        row.mode,
        row.malloc,
        row.dispatch,
        row.algorithm,
        row.peer,
    )


def ranks_text(row: Row) -> str:
    return f"{row.devices} {'processes' if row.processes > 1 else 'devices'}"


def heading(row: Row, *, copy: bool) -> list[str]:
    """The head of a table, given its first row."""
    factor = catalog.bus_factor(row.op, row.devices)
    title = (
        f"{row.op}: {ranks_text(row)}, mode {row.mode}, algorithm {row.algorithm}, "
        f"malloc {row.malloc}, {row.dispatch} dispatch, busbw factor {factor:.4g}, peer {row.peer}"
    )
    keys = f"{'size':>12} {'count':>12} {'dtype':>13} {'redop':>6}"
    units = f"{'(B)':>12} {'(elements)':>12} {'':>13} {'':>6}"
    over = f"{'':>{len(keys)}}   {'jcoll':^{len(_SIDE)}}   {'lax':^{len(_SIDE)}}"
    extra = f" {'copy':>10}" if copy else ""
    return [
        "",
        title,
        over.rstrip(),
        f"{keys}   {_SIDE}   {_SIDE} {'ratio':>7}{extra}",
        f"{units}   {_UNITS}   {_UNITS} {'':>7}{'       (us)' if copy else ''}".rstrip(),
    ]


def line(row: Row) -> str:
    """One row of the table."""
    count = row.size // catalog.parse_dtype(row.dtype).itemsize
    keys = f"{row.size:>12} {count:>12} {row.dtype:>13} {row.redop or '-':>6}"
    if row.error is not None:
        return f"{keys}   error: {row.error}"
    ours = _side(row, row.jcoll_us, row.wrong)
    theirs = _side(row, row.lax_us, row.lax_wrong)
    copy = f" {row.copy_us:>10.1f}" if row.copy_us is not None else ""
    note = "" if row.carried_by == "jcoll" else "  (jcoll left it to XLA)"
    return f"{keys}   {ours}   {theirs} {row.ratio or 0:>7.2f}{copy}{note}"


def _side(row: Row, time_us: float | None, wrong: int | None) -> str:
    algbw, busbw = bandwidths(row.op, row.size, row.devices, (time_us or 0) / 1e6)
    shown = "N/A" if wrong is None else str(wrong)
    return f"{time_us:>10.1f} {algbw:>8.2f} {busbw:>8.2f} {shown:>7}"


def summary(rows: Iterable[Row]) -> str:
    """The last line: how many rows, how many bad, and the smallest ratio."""
    rows = list(rows)
    measured = [row for row in rows if row.ratio is not None]
    text = f"{len(rows)} rows, {sum(row.error is not None for row in rows)} errors, "
    text += f"{sum(bool(row.wrong) for row in rows)} with wrong elements"
    if measured:
        worst = min(measured, key=lambda row: row.ratio or 0)
        text += f"; lowest ratio {worst.ratio:.2f} ({worst.op}, {ranks_text(worst)}, "
        text += f"{worst.dtype}, {format_size(worst.size)}, malloc {worst.malloc})"
    return text


def markdown(rows: Iterable[Row]) -> str:
    """One table per (op, mode, dtype, malloc, dispatch): sizes down, device counts across."""

    def table_of(row: Row) -> tuple[str, ...]:
        redop = row.redop or ""
        return (row.op, row.mode, row.dtype, row.malloc, row.dispatch, redop, row.peer)

    ordered = sorted(rows, key=lambda row: (table_of(row), row.size, row.devices))
    tables = itertools.groupby(ordered, key=table_of)
    return "\n".join(text for key, group in tables for text in _markdown_table(key, [*group]))


def _markdown_table(key: tuple[str, ...], rows: list[Row]) -> Iterator[str]:
    op, mode, dtype, malloc, dispatch, redop, peer = key
    counts = sorted({row.devices for row in rows})
    what = f"{op} ({redop})" if redop else op
    yield f"### {what}, {dtype}, {mode}, malloc {malloc}, {dispatch} dispatch\n"
    copy = " (copy µs)" if any(row.copy_us is not None for row in rows) else ""
    yield f"Peer: {peer}. Cells: jcoll µs / lax µs{copy} **ratio**.\n"
    unit = "processes" if rows[0].processes > 1 else "devices"
    yield "| size | " + " | ".join(f"{count} {unit}" for count in counts) + " |"
    yield "|---:|" + "---:|" * len(counts)
    for size, group in itertools.groupby(rows, key=lambda row: row.size):
        cells = {row.devices: _cell(row) for row in group}
        texts = " | ".join(cells.get(count, "") for count in counts)
        yield f"| {format_size(size)} | {texts} |"
    yield ""


def _cell(row: Row) -> str:
    if row.error is not None:
        return "error"
    copy = f" ({row.copy_us:.0f})" if row.copy_us is not None else ""
    wrong = f" {row.wrong} wrong!" if row.wrong else ""
    return f"{row.jcoll_us:.0f} / {row.lax_us:.0f}{copy} **{row.ratio:.2f}**{wrong}"
