"""Pictures of runs, drawn from the JSON reports that train_gpt.py writes."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: no window, no display needed

import matplotlib.pyplot as plt

# A solid line under a dashed one: both stay visible where they coincide, as they should.
STYLES = ({"color": "#1f77b4", "lw": 2.6}, {"color": "#e4572e", "lw": 1.3, "ls": (0, (4, 3))})
SMALLEST_DIFFERENCE = 1e-8
MOST_SITES = 14


def plot_runs(path: str, runs: dict[str, dict], mesh_run: dict | None = None) -> None:
    """One run: its loss, and the time of a step. Two (label -> report): also their difference.

    Below: where the time in collectives went, in `mesh_run` if given, whose loss is drawn as well.
    """
    sited = mesh_run or next(iter(runs.values()))
    sites = sited["sites"][:MOST_SITES]
    widths = (5, 3, 3) if len(runs) == 2 else (5, 3)
    heights = (4.2, 0.7 + 0.25 * len(sites)) if sites else (4.2,)
    figure = plt.figure(figsize=(4.6 * len(widths), sum(heights)), layout="constrained")
    grid = figure.add_gridspec(
        len(heights), len(widths), width_ratios=widths, height_ratios=heights
    )
    panels = [figure.add_subplot(grid[0, i]) for i in range(len(widths))]
    _plot_history(panels, runs, mesh_run)
    if sites:
        axes = figure.add_subplot(grid[1, :])
        _plot_sites(axes, sites, len(sited["history"]))
        title = f"Time in collectives by place in the program, jcoll, {_mesh(sited)}"
        _dress(axes, title, "milliseconds a step", "")
    figure.suptitle(_title(next(iter(runs.values()))), fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_history(panels, runs, mesh_run):
    for (label, run), style in zip(runs.items(), STYLES, strict=False):
        _plot_loss(panels[0], label, run, style)
        _plot_times(panels[-1], label, run, style)
    if mesh_run:
        steps = np.arange(1, len(mesh_run["history"]) + 1)
        label = f"jcoll, {_mesh(mesh_run)}"
        panels[0].plot(steps, _losses(mesh_run), color="#2a9d5c", lw=0.9, label=label)
    _dress(panels[0], "Training loss", "step", "nats per byte")
    _dress(panels[-1], "Time of a step", "milliseconds", "share of steps that took no longer")
    if len(runs) == 2:
        _plot_difference(panels[1], *runs.values())
        x = f"step (no difference at all: {SMALLEST_DIFFERENCE:.0e})"
        _dress(panels[1], "Difference: rounding, amplified", x, "nats per byte")


def _plot_sites(axes, sites, num_steps):
    """A bar for each, colored by operation, the longest on top."""
    ops = sorted({site["op"] for site in sites})
    names = [f"{site['op']}  {Path(site['site']).name}" for site in sites]
    times = [1e3 * site["exec_s"] / num_steps for site in sites]
    colors = [f"C{ops.index(site['op'])}" for site in sites]
    bars = axes.barh(np.arange(len(sites)), times, color=colors, height=0.7)
    calls = [f"{site['calls'] / num_steps:.0f} calls" for site in sites]
    axes.bar_label(bars, calls, padding=3, fontsize=8)
    axes.set_yticks(np.arange(len(sites)), names, fontsize=8)
    axes.set_axisbelow(True)
    axes.invert_yaxis()
    axes.margins(x=0.1)


def _mesh(run):
    return ",".join(f"{axis}={size}" for axis, size in run["options"]["mesh"].items())


def _losses(run):
    return np.array([row["loss"] for row in run["history"]])


def _plot_loss(axes, label, run, style):
    """The running mean, before the faint losses of single batches."""
    losses = _losses(run)
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color=style["color"], lw=0.6, alpha=0.3)
    width = max(1, len(losses) // 40)
    mean = np.convolve(losses, np.ones(width) / width, mode="valid")
    text = f"{label} (unseen files: {run['val_loss']:.3f})"
    axes.plot(steps[width // 2 :][: len(mean)], mean, label=text, **style)


def _plot_difference(axes, ours, theirs):
    length = min(len(ours["history"]), len(theirs["history"]))
    difference = np.abs(_losses(ours)[:length] - _losses(theirs)[:length])
    steps = np.arange(1, length + 1)
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


def _dress(axes, title, x, y):
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(edgecolor="none", framealpha=0.9)


def _title(run):
    options, device = run["options"], run["device"]
    return (
        f"byte-level GPT, {device['parameters']:,} parameters, {options['dtype']}, "
        f"{device['count']} {device['kind']} devices, {options['batch']} x {options['seq']} bytes "
        "a step"
    )
