"""Pictures of runs, drawn from the JSON reports that train_gpt.py writes."""

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: no window, no display needed

import matplotlib.pyplot as plt

# A solid line under a dashed one: both stay visible where they coincide, as they should.
STYLES = ({"color": "#1f77b4", "lw": 2.4}, {"color": "#e4572e", "lw": 1.3, "ls": (0, (4, 3))})


def plot_runs(path: str, runs: dict[str, dict]) -> None:
    """Loss by step and the time of a step, of one or more runs (label -> report)."""
    figure, (loss_axes, time_axes) = plt.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained"
    )
    for (label, run), style in zip(runs.items(), STYLES, strict=False):
        _plot_loss(loss_axes, label, run, style)
        _plot_times(time_axes, label, run, style)
    _label(loss_axes, "Training loss", "step", "nats per byte")
    _label(time_axes, "Time of a step", "milliseconds", "share of steps not slower")
    first = next(iter(runs.values()))
    figure.suptitle(_title(first), fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_loss(axes, label, run, style):
    losses = [row["loss"] for row in run["history"]]
    validation = f"{label} (unseen files: {run['val_loss']:.3f})"
    axes.plot(np.arange(1, len(losses) + 1), losses, label=validation, **style)


def _plot_times(axes, label, run, style):
    """A cumulative curve shows the typical step and the tail without binning."""
    times = np.sort([1e3 * row["step_s"] for row in run["history"]])
    share = np.arange(1, len(times) + 1) / len(times)
    axes.plot(times, share, label=f"{label} (median {np.median(times):.0f} ms)", **style)
    axes.set_xlim(left=0, right=1.15 * np.quantile(times, 0.98))


def _label(axes, title, x, y):
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _title(run):
    options, device = run["options"], run["device"]
    return (
        f"byte-level GPT, {device['parameters']:,} parameters, {options['dtype']}, "
        f"{device['count']} {device['kind']} devices, {options['batch']} x {options['seq']} bytes "
        "a step"
    )
