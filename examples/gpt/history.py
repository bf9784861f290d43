"""What a run did, step by step, and the totals; written as JSON for demo.py and for plots."""

import dataclasses
import json
import math
import time
from pathlib import Path

COUNTERS = ("calls", "bytes", "exec_s", "skew_s")


class CollectiveMeter:
    """What this process's collectives have cost since the last look. jcoll counts; lax does not."""

    def __init__(self, collectives: str):
        self._metrics = None
        if collectives == "jcoll":
            import jcoll

            self._metrics = jcoll.metrics
        self._before = self._total()

    def take(self) -> dict | None:
        """Calls, bytes, seconds of execution, and from first to last arrival; None for lax.

        Collectives overlap with each other and with computing: the seconds are no part of a whole.
        """
        now = self._total()
        if now is None or self._before is None:
            return None
        delta = {name: now[name] - self._before[name] for name in COUNTERS}
        self._before = now
        return delta

    def by_site(self) -> list[dict]:
        """All so far by operation and place in the program, the longest first; [] for lax."""
        sums = {}
        for row in self._metrics() if self._metrics else []:
            key = row["op"], row["call_site"]
            site = sums.setdefault(
                key, {"op": key[0], "site": key[1], **dict.fromkeys(COUNTERS, 0)}
            )
            for name in COUNTERS:
                site[name] += row[name]
        return sorted(sums.values(), key=lambda site: -site["exec_s"])

    def _total(self):
        if self._metrics is None:
            return None
        rows = self._metrics()
        return {name: sum(row[name] for row in rows) for name in COUNTERS}


@dataclasses.dataclass
class History:
    """The steps so far."""

    tokens_per_step: int
    first: int = 0
    """The steps that were taken before, by the run that this one goes on with."""

    rows: list[dict] = dataclasses.field(default_factory=list)
    sites: list[dict] = dataclasses.field(default_factory=list)  # CollectiveMeter.by_site
    _started: float = dataclasses.field(default_factory=time.perf_counter)
    _cpu_s: float = dataclasses.field(default_factory=time.process_time)

    def seconds(self) -> float:
        """Since training started; compiling came before."""
        return time.perf_counter() - self._started

    def add(self, loss: float, dropped: float, collectives: dict | None) -> dict:
        """Records a step that has just ended; its number counts from 0."""
        wall_s = self.seconds()
        step_s = wall_s - (self.rows[-1]["wall_s"] if self.rows else 0.0)
        cpu_s = time.process_time()
        row = {
            "step": self.first + len(self.rows),
            "loss": loss,
            "dropped": dropped,
            "wall_s": wall_s,
            "step_s": step_s,
            "step_cpu_s": cpu_s - self._cpu_s,
            "tokens_per_s": self.tokens_per_step / step_s,
            "collectives": collectives,
        }
        self.rows.append(row)
        self._cpu_s = cpu_s
        return row

    def totals(self) -> dict:
        """Sums over the run; the collectives' are None if nobody counted them."""
        wall_s = self.rows[-1]["wall_s"]
        counted = [row["collectives"] for row in self.rows if row["collectives"] is not None]
        sums = {name: sum(row[name] for row in counted) for name in COUNTERS} if counted else None
        return {
            "steps": len(self.rows),
            "wall_s": wall_s,
            "tokens_per_s": self.tokens_per_step * len(self.rows) / wall_s,
            "collectives": sums,
        }


def make_report(args, device: dict, history: History, val_loss: float) -> dict:
    """Everything about a run."""
    return {
        "options": vars(args),
        "device": device,
        "history": history.rows,
        "totals": history.totals(),
        "sites": history.sites,
        "val_loss": val_loss,
    }


def write_json(path: str, report: dict) -> None:
    """One object, indented; null where a number is not finite, as JSON has none of those."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(_finite(report), indent=1, allow_nan=False) + "\n")


def read_json(path: str | Path) -> dict:
    """A report, with NaN for losses that were no numbers."""
    report = json.loads(Path(path).read_text())
    for holder, name in [(report, "val_loss"), *((row, "loss") for row in report["history"])]:
        holder[name] = math.nan if holder[name] is None else holder[name]
    return report


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
