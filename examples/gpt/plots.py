"""Pictures of runs, drawn from the JSON reports that train_gpt.py writes."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: no window, no display needed

import matplotlib.pyplot as plt
from matplotlib.transforms import ScaledTranslation

# A solid line under a dashed one: both stay visible where they coincide, as they should.
STYLES = ({"color": "#1f77b4", "lw": 2.6}, {"color": "#e4572e", "lw": 1.3, "ls": (0, (4, 3))})
SMALLEST_DIFFERENCE = 1e-8
MOST_SITES = 14
LEGEND_INCHES = 0.5  # Below an axis: its numbers and its label.


def plot_runs(path: str, runs: dict[str, dict], mesh_run: dict | None = None) -> None:
    """One run: its loss, and the time of a step. Two (label -> report): also their difference.

    Below: the time in collectives by kind in all runs that jcoll counted, `mesh_run` among them,
    whose loss is drawn as well; and by place in the program, in the last of these.
    """
    counted = [run for run in (*runs.values(), mesh_run) if run and run["sites"]]
    bars = max((min(len(run["sites"]), MOST_SITES) for run in counted), default=0)
    widths = (5, 3, 3) if len(runs) == 2 else (5, 3)
    heights = (4.9, 1.8 + 0.25 * bars) if counted else (4.9,)
    figure = plt.figure(
        figsize=(13.8 if counted else 4.6 * len(widths), sum(heights)), layout="constrained"
    )
    top, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _plot_history(top.subplots(1, len(widths), width_ratios=widths), runs, mesh_run)
    if counted:
        by_kind, by_place = below[0].subplots(1, 2, width_ratios=(2, 3))
        _plot_collectives(by_kind, by_place, counted)
    figure.suptitle(_title(next(iter(runs.values()))), fontsize=10)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_history(panels, runs, mesh_run):
    for (label, run), style in zip(runs.items(), STYLES, strict=False):
        _plot_loss(panels[0], label, run, style)
        _plot_times(panels[-1], label, run, style)
    if mesh_run:
        label = f"jcoll, {_mesh(mesh_run)}"
        panels[0].plot(_steps(mesh_run), _losses(mesh_run), color="#2a9d5c", lw=0.9, label=label)
    _dress(panels[0], "Training loss", "step", "nats per byte")
    _dress(panels[-1], "Time of a step", "milliseconds", "share of steps that took no longer")
    if len(runs) == 2:
        _plot_difference(panels[1], *runs.values())
        x = f"step (no difference at all: {SMALLEST_DIFFERENCE:.0e})"
        _dress(panels[1], "Difference: rounding, amplified", x, "nats per byte")


def _plot_collectives(by_kind, by_place, runs):
    """Milliseconds a step: of each kind and run; and in the last run of each call."""
    ops = sorted({site["op"] for run in runs for site in run["sites"]})
    bars = [
        (f"{op}  {_mesh(run)}", op, *sums[op])
        for run in runs
        for sums in [_by_op(run)]
        for op in sums
    ]
    _plot_bars(by_kind, bars, ops)
    _dress(by_kind, "Time in collectives by kind, jcoll", "milliseconds a step", "", 2)
    run = runs[-1]
    sites = [(Path(site["site"]).name, site["op"], *_a_step(run, [site])) for site in run["sites"]]
    _plot_bars(by_place, sites[:MOST_SITES], ops)
    title = f"The same by place in the program, {_mesh(run)}"
    if sites[MOST_SITES:]:
        rest_ms = sum(ms for _, _, ms, _ in sites[MOST_SITES:])
        title += f"\n(not shown: {len(sites) - MOST_SITES} more, {rest_ms:.1f} ms a step together)"
    _dress(by_place, title, "milliseconds a step", "", 4)


def _by_op(run):
    """operation -> (milliseconds, calls) a step, the longest first."""
    ops = {site["op"] for site in run["sites"]}
    sums = {op: _a_step(run, [s for s in run["sites"] if s["op"] == op]) for op in ops}
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def _a_step(run, sites):
    steps = len(run["history"])
    return 1e3 * sum(s["exec_s"] for s in sites) / steps, sum(s["calls"] for s in sites) / steps


def _plot_bars(axes, bars, ops):
    """bars: (name, operation, milliseconds, calls); a color for each of `ops`."""
    for op in dict.fromkeys(bar[1] for bar in bars):
        of_op = [
            (row, ms, calls) for row, (_, its_op, ms, calls) in enumerate(bars) if its_op == op
        ]
        rows, times, calls = zip(*of_op, strict=True)
        drawn = axes.barh(rows, times, color=f"C{ops.index(op)}", height=0.7, label=op)
        axes.bar_label(drawn, [f"{count:.0f} calls" for count in calls], padding=3, fontsize=8)
    axes.set_yticks(range(len(bars)), [bar[0] for bar in bars], fontsize=8)
    axes.set_axisbelow(True)
    axes.invert_yaxis()
    axes.margins(x=0.15)


def _mesh(run):
    return ",".join(f"{axis}={size}" for axis, size in run["options"]["mesh"].items())


def _steps(run):
    """Counted from 1."""
    return np.array([row["step"] for row in run["history"]]) + 1


def _losses(run):
    return np.array([row["loss"] for row in run["history"]])


def _plot_loss(axes, label, run, style):
    """The running mean, before the faint losses of single batches."""
    losses, steps = _losses(run), _steps(run)
    axes.plot(steps, losses, color=style["color"], lw=0.6, alpha=0.3)
    width = max(1, len(losses) // 40)
    mean = np.convolve(losses, np.ones(width) / width, mode="valid")
    text = f"{label} (unseen files: {run['val_loss']:.3f})"
    axes.plot(steps[width // 2 :][: len(mean)], mean, label=text, **style)


def _plot_difference(axes, ours, theirs):
    length = min(len(ours["history"]), len(theirs["history"]))
    difference = np.abs(_losses(ours)[:length] - _losses(theirs)[:length])
    steps = _steps(ours)[:length]
    shown = np.maximum(difference, SMALLEST_DIFFERENCE)
    axes.semilogy(steps, shown, ".", ms=3, color="#555555")


def _plot_times(axes, label, run, style):
    """A cumulative curve shows the typical step and the tail without binning."""
    times = np.sort([1e3 * row["step_s"] for row in run["history"]])
    share = np.arange(1, len(times) + 1) / len(times)
    axes.plot(times, share, label=f"{label} (median {np.median(times):.0f} ms)", **style)
    axes.set_xlim(
        0, max(axes.get_xlim()[1] if axes.lines[1:] else 0, 1.1 * np.quantile(times, 0.95))
    )


def _dress(axes, title, x, y, legend_columns=1):
    """Labels; and a legend below the axis, where no curve is, whatever the run was like."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        below = ScaledTranslation(0, -LEGEND_INCHES, axes.figure.dpi_scale_trans)
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            bbox_transform=axes.transAxes + below,
            ncols=legend_columns,
            frameon=False,
        )


def _title(run):
    options, device = run["options"], run["device"]
    return (
        f"byte-level GPT, {device['parameters']:,} parameters, {options['dtype']}, "
        f"{device['count']} {device['kind']} devices, {options['batch']} x {options['seq']} bytes "
        "a step"
    )
