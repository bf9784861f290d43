"""`python -m jcoll bench`: run the jobs, print rows as they come, write what was asked for."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from jcoll.bench import checks, options, plot, report, rows, spawn
from jcoll.bench.job import Job
from jcoll.bench.status_line import StatusLine
from jcoll.errors import UsageError

configure = options.configure


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 all measured and right, 1 a failure or wrong result (2 is a usage error)."""
    try:
        todo = checks.jobs(args)
    except UsageError as error:
        args.fail(str(error))
    table = _Table(sys.stdout, copy=bool(args.copy))
    stopped = _run_jobs(todo, table, args.timeout)
    if table.rows:
        print(f"\n{report.summary(table.rows)}")
        _write_outputs(args, table.rows)
    if stopped:
        print(f"jcoll bench: {stopped}", file=sys.stderr)
    return 1 if stopped or any(row.failed for row in table.rows) else 0


def _run_jobs(todo: list[Job], table: _Table, timeout_s: float) -> str:
    """Run all jobs; returns why they were given up, or ''. Rows measured by then are kept."""
    progress = _Progress(sys.stderr, sum(len(list(job.blank_rows())) for job in todo))
    try:
        for job in todo:
            blank = job.blank_rows()
            progress.starts(next(blank, None))
            for row in spawn.run_job(job, timeout_s=timeout_s, on_facts=table.add_facts):
                progress.clear()
                table.add(row)
                progress.finished()
                progress.starts(next(blank, None))
    except spawn.ChildFailed as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        progress.clear()
    return ""


def _write_outputs(args: argparse.Namespace, measured: list[rows.Row]) -> None:
    wanted: list[tuple[Path | None, Callable[[Path], None]]] = [
        (args.json, lambda path: rows.write_text(path, rows.to_json(measured))),
        (args.markdown, lambda path: rows.write_text(path, report.markdown(measured))),
        (args.plot, lambda path: plot.draw(measured, path)),
    ]
    for path, write in wanted:
        if path is not None:
            write(path)
            print(f"wrote {path}")


class _Table:
    """Prints rows under the heading of their group; keeps them."""

    def __init__(self, out: TextIO, *, copy: bool) -> None:
        self.rows: list[rows.Row] = []
        self._out = out
        self._copy = copy
        self._facts = ""

    def add_facts(self, line: str) -> None:
        if line != self._facts:
            print("\n".join([line, *report.legend()]), file=self._out, flush=True)
        self._facts = line

    def add(self, row: rows.Row) -> None:
        if not self.rows or report.group_of(self.rows[-1]) != report.group_of(row):
            print("\n".join(report.heading(row, copy=self._copy)), file=self._out)
        print(report.line(row), file=self._out, flush=True)
        self.rows.append(row)


class _Progress:
    """What is being measured and how long the rest will take: on a terminal, one line rewritten;
    elsewhere a line every half minute."""

    def __init__(self, out: TextIO, total: int) -> None:
        self._line = StatusLine(out)
        self.clear = self._line.clear
        self._total = total
        self._done = 0
        self._begun = self._told = time.monotonic()

    def finished(self) -> None:
        self._done += 1

    def starts(self, row: rows.Row | None) -> None:
        now = time.monotonic()
        if row is None or (not self._line.is_live and now - self._told < 30):
            return
        self._told = now
        rest = (now - self._begun) / self._done * (self._total - self._done) if self._done else 0
        left = f", about {rest:.0f} s left" if rest else ""
        text = f"[{self._done + 1}/{self._total}] {row.op}, {row.devices} devices, {row.dtype}, "
        text += f"{report.format_size(row.size)}, malloc {row.malloc}{left}"
        self._line.show(text)
