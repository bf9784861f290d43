"""A live line on a terminal; a plain line now and then where there is none (a log, a pipe)."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_LINE_EVERY_S = 5.0


class ProgressLine:
    """Shows each step, if `show`: only one of several processes should."""

    def __init__(self, label: str, steps: range, seconds: float | None, show: bool):
        self._steps, self._seconds, self._show = steps, seconds, show
        self._console = Console()
        self._live = self._console.is_terminal and show
        self._last_line_at = float("-inf")
        self._label = label
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._live,
            expand=True,
        )
        self._task = self._bar.add_task(label, total=seconds or len(steps), facts="")

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *exc):
        self._bar.stop()

    def show(self, row: dict) -> None:
        """One step of History."""
        text = facts(row)
        done = row["wall_s"] if self._seconds else row["step"] + 1 - self._steps.start
        self._bar.update(self._task, completed=done, facts=text)
        if self._live or not self._show:
            return
        last = row["step"] + 1 == self._steps.stop
        if last or time.monotonic() - self._last_line_at >= PLAIN_LINE_EVERY_S:
            self._last_line_at = time.monotonic()
            print(f"{self._label}  {text}", flush=True)


def facts(row: dict) -> str:
    """Fixed widths, so that the line does not wobble."""
    counted = row["collectives"]
    spent = "-"  # XLA ran them, and says nothing about it.
    if counted is not None and counted["calls"]:
        spent = f"{1e3 * counted['exec_s']:.1f} ms"
    return (
        f"step {row['step'] + 1:5d}  loss {row['loss']:6.3f}  "
        f"{row['tokens_per_s']:7,.0f} tokens/s  collectives {spent:>8}"
    )
