"""Time against size, both axes logarithmic: one panel per op and device count."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from jcoll.bench import rows
from jcoll.bench.report import ranks_text
from jcoll.bench.rows import Row
from jcoll.sizes import format_size

_STYLES = {"jcoll_us": ("jcoll", "o-"), "lax_us": ("lax", "s--"), "copy_us": ("copy", "k:")}


def draw(measured: list[Row], path: Path) -> None:
    """Write a figure of all measured rows to `path`; the suffix says which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in measured if row.error is None]
    ops = list(dict.fromkeys(row.op for row in measured))
    counts = sorted({row.devices for row in measured})
    shape = (max(len(ops), 1), max(len(counts), 1))
    figure, axes = pyplot.subplots(
        *shape, figsize=(4.6 * shape[1], 3.4 * shape[0]), squeeze=False, layout="constrained"
    )
    for (down, op), (across, count) in itertools.product(enumerate(ops), enumerate(counts)):
        chosen = [row for row in measured if (row.op, row.devices) == (op, count)]
        if chosen:
            _panel(axes[down][across], f"{op}, {ranks_text(chosen[0])}", chosen)
        else:  # All errors.
            axes[down][across].set_axis_off()
    rows.write_figure(path, figure)
    pyplot.close(figure)


def _panel(axes: Any, title: str, rows: list[Row]) -> None:
    from matplotlib.ticker import LogFormatter

    keys = list(dict.fromkeys((row.dtype, row.malloc) for row in rows))
    for dtype, malloc in keys:
        chosen = [row for row in rows if (row.dtype, row.malloc) == (dtype, malloc)]
        for field, (name, style) in _STYLES.items():
            points = [(row.size, getattr(row, field)) for row in chosen]
            points = [point for point in points if point[1] is not None]
            if points:
                label = f"{name} {dtype} {malloc}" if len(keys) > 1 else f"{name} {dtype}"
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=3)
    axes.set(title=title, xlabel="size (bytes)", ylabel="µs per collective", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: format_size(round(size)))
    axes.yaxis.set_major_formatter(LogFormatter())  # 150, where the default has 1.5 x 10^2.
    axes.yaxis.set_minor_formatter(LogFormatter())
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="x-small")
