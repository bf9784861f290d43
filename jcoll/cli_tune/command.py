"""`python -m jcoll tune`: measures the algorithms on this machine, for `algorithm="auto"`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

from jcoll import sizes
from jcoll.algorithms import authored
from jcoll.bench import facts, rows
from jcoll.bench.catalog import CATALOG
from jcoll.bench.status_line import StatusLine
from jcoll.cli_tune import runs
from jcoll.cli_tune.combine import combined
from jcoll.cli_tune.summary import quality, summary
from jcoll.cores import num_cores
from jcoll.errors import UsageError
from jcoll.plan.ops import OPS
from jcoll.tuning import table
from jcoll.tuning.candidates import PROCESS, PROCESSES

DEVICE_KIND = "cpu"

_DESCRIPTION = """\
Measure every algorithm of every op on this machine and keep the costs, by which algorithm="auto"
chooses from then on. Without it the costs that come with jcoll are used.

Calls of the algorithms alternate; a cost is the lower quartile of the time of one collective
of float32, in a chain of several in one program where the op allows it. (The lower quartile: what
else the machine does only ever adds.) Ctrl-C keeps what was measured until then.
"""

_EPILOG = """\
examples:
  python -m jcoll tune                                     8 ops on 2, 4 and 8 virtual devices
  python -m jcoll tune --processes 2,4                     the same between processes
  python -m jcoll tune --ops all_reduce --devices 8 -b 64K -e 1M --seconds 3 -o mine.json
  python -m jcoll tune --ops all_reduce --module my_algorithms.py    with algorithms of your own

The file: $JCOLL_TUNING_FILE, or {path}; rows that
it has are replaced, others kept, unless they are of another machine. Sums of floats may have other
last bits where another algorithm is chosen; JCOLL_TUNING_FILE=none goes back to the shipped costs.

exit status: 0 all measured, 1 something failed (what was measured is kept), 130 Ctrl-C,
  2 bad command line
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG.format(path=table.own_path(DEVICE_KIND))
    add = parser.add_argument
    add("--ops", metavar="OPS", default=",".join(OPS), help="by commas (default: all with plans)")
    add("--devices", metavar="COUNTS", help="ranks in one process (default 2,4,8)")
    add("--processes", metavar="COUNTS", help="ranks, one in each process; without --devices only")
    add("-b", "--begin", metavar="SIZE", default="1K", help="smallest size (default 1K)")
    add("-e", "--end", metavar="SIZE", default="16M", help="largest size (default 16M)")
    add("-f", "--factor", type=int, default=4, metavar="N", help="between sizes (default 4)")
    add("--seconds", type=float, default=1.0, metavar="S", help="for a size (default 1)")
    add("--repeats", type=int, default=1, metavar="N", help="of everything; for a noisy machine")
    add("-T", "--timeout", type=float, default=300.0, metavar="S", help="for a size (default 300)")
    authored.add_flag(parser)
    add("-o", "--output", type=Path, metavar="FILE", help="another file than the usual one")


def run(args: argparse.Namespace) -> int:
    try:
        authored.load(args.module)
        todo = make_runs(args)
        path = output_path(args.output)
        old = _kept(path)
    except UsageError as error:
        args.fail(str(error))
    print(f"{facts.line()}\nto {path}", flush=True)
    found: list[table.Row] = []
    status, problem = _measure(todo, args.timeout, found)
    found = combined(found)
    if found:
        before = quality(found)
        kept = table.merged(old, found)
        rows.write_text(path, _text(kept))
        wrote = f"wrote {path}: {len(found)} rows measured now, {len(kept) - len(found)} kept"
        print(f"\n{summary(found)}\n", *filter(None, [before]), wrote, sep="\n")
    if problem:
        kept = "what was measured is kept" if found else "nothing was measured"
        print(f"jcoll tune: {problem}; {kept}", file=sys.stderr)
    return status


def make_runs(args: argparse.Namespace) -> list[runs.Run]:
    """One for each number of ranks. Raises UsageError."""
    ops = tuple(dict.fromkeys(name.strip() for name in args.ops.split(",")))
    if unknown := [name for name in ops if name not in CATALOG]:
        raise UsageError(f"--ops has {unknown[0]!r}; needed are some of {', '.join(CATALOG)}")
    if not args.seconds > 0 or not args.timeout > 0 or args.repeats < 1:
        raise UsageError("--seconds, --timeout and --repeats need more than 0: raise it")
    measured = _sizes(args)
    devices = args.devices or ("" if args.processes else "2,4,8")
    counts = [(PROCESS, n) for n in _counts("--devices", devices)]
    counts += [(PROCESSES, n) for n in _counts("--processes", args.processes or "")]
    module = str(args.module.absolute()) if args.module else None
    each = [runs.Run(placement, n, ops, measured, args.seconds, module) for placement, n in counts]
    return each * args.repeats


def _counts(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    for part in parts:
        if not 2 <= sizes.parse_count(part) <= 256:
            raise UsageError(f"{flag} has {part!r}; numbers from 2 to 256 are needed: write 2,4")
    return list(dict.fromkeys(map(int, parts)))


def _sizes(args: argparse.Namespace) -> tuple[int, ...]:
    try:
        begin, end = sizes.parse_size(args.begin), sizes.parse_size(args.end)
    except ValueError as error:
        raise UsageError(f"-b/--begin, -e/--end: {error}") from None
    if not 0 < begin <= end or args.factor < 2:
        raise UsageError(
            f"-b/--begin is {args.begin}, -e/--end {args.end} and -f/--factor {args.factor}; "
            "needed is 0 < begin <= end and a factor of at least 2"
        )
    return tuple(sizes.sweep(begin, end, factor=args.factor))


def output_path(given: Path | None) -> Path:
    """Where to write; must be known before the measuring, not after it."""
    path = given or table.own_path(DEVICE_KIND)
    if given is None and str(path) == "none":
        raise UsageError("JCOLL_TUNING_FILE is none, so no file would be read: unset it, or use -o")
    if given is None:
        with contextlib.suppress(OSError):  # can_write finds it.
            path.parent.mkdir(parents=True, exist_ok=True)
    if not rows.can_write(path):
        raise UsageError(f"-o/--output: {path} cannot be written; a file name is needed: use -o")
    return path


def _kept(path: Path) -> list[table.Row]:
    """Rows that the file has already, if they are of this machine."""
    if not path.exists():
        return []
    try:
        old = table.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warnings.warn(f"jcoll tune: {path} is replaced: {error}", RuntimeWarning, stacklevel=2)
        return []
    return list(old.rows) if old.machine == machine() else []


def machine() -> str:
    return f"{facts.cpu_model()}, {num_cores()} cores"


def _text(kept: list[table.Row]) -> str:
    today = datetime.date.today().isoformat()
    more = {"measured": today} | {f"with_{k}": v for k, v in facts.versions().items()}
    return table.to_text(DEVICE_KIND, machine(), kept, **more)


def _measure(todo: list[runs.Run], timeout_s: float, found: list[table.Row]) -> tuple[int, str]:
    """Fills `found`; (exit status, why not all was measured)."""
    progress = _Progress(sys.stderr, sum(len(list(run.points())) for run in todo))
    status, problem = 0, ""
    try:
        for run in todo:
            try:
                for row in runs.rows_of(run, timeout_s):
                    _keep(row, found)
                    progress.finished(run, row)
            except runs.RunFailed as error:
                progress.clear()
                status, problem = 1, f"{run.title}: {error}"
                print(problem, file=sys.stderr)
    except KeyboardInterrupt:
        status, problem = 130, "interrupted"
    progress.clear()
    return status, problem


def _keep(row: dict[str, Any], found: list[table.Row]) -> None:
    for name, error in row["errors"].items():
        if name != "xla":  # Which takes some collectives out of the program.
            print(f"{row['op']}, {name}: {error}", file=sys.stderr)
    if row["us"]:
        names = ("placement", "op", "num_ranks", "nbytes", "us")
        found.append(table.Row(**{name: row[name] for name in names}))


class _Progress:
    """On a terminal a bar in one line, rewritten; elsewhere a line for each op."""

    WIDTH = 24

    def __init__(self, out: TextIO, total: int) -> None:
        self._line = StatusLine(out)
        self.clear = self._line.clear
        self._total, self._done = total, 0
        self._begun = time.monotonic()
        self._last = ""

    def finished(self, run: runs.Run, row: dict[str, Any]) -> None:
        self._done += 1
        spent = time.monotonic() - self._begun
        left = spent / self._done * (self._total - self._done)
        what = f"{run.title}, {row['op']}"
        if self._line.is_live:
            filled = self.WIDTH * self._done // self._total
            bar = "#" * filled + "." * (self.WIDTH - filled)
            size = sizes.format_size(row["nbytes"])
            progress = f"[{bar}] {self._done}/{self._total} {what} {size}"
            self._line.show(f"{progress}, about {left:.0f} s left")
        elif what != self._last or self._done == self._total:
            self._line.show(f"[{self._done}/{self._total}] {what}, about {left:.0f} s left")
        self._last = what
