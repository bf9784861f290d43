"""The measuring process: reads a Job from stdin, writes JSON lines to stdout: facts, then Rows.

Run by `jcoll.bench.spawn` with the device count and the allocator's settings in the environment.
For a job of several processes it starts the others, which are this program with two arguments
(their index and the coordinator), measure the same, and keep it to themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TextIO

import jax
from jax.sharding import Mesh

import jcoll
from jcoll.bench import catalog, facts, measure, rows
from jcoll.bench.cases import CASES, Problem, Side, Sides, expected_state
from jcoll.bench.job import Job
from jcoll.bench.programs import Program, compile_side, count_wrong, make_mesh

_RUN, _SETTLING = 20, 5  # calls between processes; see measure
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})  # jax narrows them unless told


def measure_row(job: Job, row: rows.Row, mesh: Mesh) -> rows.Row:
    """Compile, check and time both sides of one row; what fails becomes the row's error."""
    try:
        return _measured(job, row, mesh)
    except Exception as error:  # one op that fails must not take the rest of the table with it
        return dataclasses.replace(row, error=f"{type(error).__name__}: {error}")


def _measured(job: Job, row: rows.Row, mesh: Mesh) -> rows.Row:
    problem = _problem(job, row)
    sides = CASES[row.op](problem)
    ours = compile_side("jcoll", sides.jcoll, problem, mesh)
    with jcoll.intercept(enabled=False):  # JCOLL_INTERCEPT=1 would compare jcoll with itself.
        theirs = compile_side("lax", sides.lax, problem, mesh)
    wrong = _wrong(job, sides.jcoll, problem, ours)
    lax_wrong = _wrong(job, sides.lax, problem, theirs)
    timing = measure.compare(
        _finished(ours),
        _finished(theirs),
        warmup=job.warmup,
        calls=job.calls or _agreed_calls(job, row),
        repeats=job.repeats,
        seconds=job.seconds,
        run=1 if job.processes == 1 else _RUN,
        settling=0 if job.processes == 1 else _SETTLING,
    )
    seconds = timing.ours_s / problem.steps
    algbw, busbw = rows.bandwidths(row.op, row.size, row.devices, seconds)
    return dataclasses.replace(
        row,
        jcoll_us=seconds * 1e6,
        lax_us=timing.theirs_s / problem.steps * 1e6,
        ratio=timing.ratio,
        ratio_low=timing.ratio_low,
        ratio_high=timing.ratio_high,
        algbw=algbw,
        busbw=busbw,
        wrong=wrong,
        lax_wrong=lax_wrong,
        carried_by=ours.carried_by,
        calls=timing.calls,
        copy_us=_copy_us(sides, job.processes) if job.copy else None,
    )


def _problem(job: Job, row: rows.Row) -> Problem:
    dtype = catalog.parse_dtype(row.dtype)
    return Problem(
        op=row.op,
        num_ranks=row.devices,
        dtype=dtype,
        count=row.size // dtype.itemsize,
        redop=job.redop,
        root=job.root,
        algorithm=job.algorithm,
        form=job.form,
        steps=job.steps,
    )


def _agreed_calls(job: Job, row: rows.Row) -> int | None:
    """All processes must make the same calls, whatever their clocks say."""
    if job.processes == 1:
        return None
    return 60 if row.size <= 1 << 16 else 20 if row.size <= 1 << 20 else 5


def _wrong(job: Job, side: Side, problem: Problem, program: Program) -> int | None:
    if not job.check:
        return None
    expected = expected_state(side, problem.form, problem.steps)
    return count_wrong(program(), expected, side.ranks_compared)


def _finished(program: Program) -> Callable[[], jax.Array]:
    return lambda: program().block_until_ready()


def _copy_us(sides: Sides, processes: int) -> float:
    """All ranks' inputs must be read and all their outputs written: copy the larger of the two."""
    side = sides.jcoll
    return _copy_us_of(max(side.x.nbytes, side.reference(side.x).nbytes), processes)


@functools.cache
def _copy_us_of(nbytes: int, processes: int) -> float:
    return measure.copy_seconds(nbytes, sharers=processes) * 1e6


def _start_peers(job_text: str, count: int) -> str:
    """Starts the other processes; the coordinator's address. They end with this one, which is the
    coordinator."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        coordinator = f"localhost:{s.getsockname()[1]}"
    for index in range(1, count):
        peer = subprocess.Popen(
            [sys.executable, "-m", "jcoll.bench.child", str(index), coordinator],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert peer.stdin is not None
        peer.stdin.write(job_text)
        peer.stdin.close()
    return coordinator


def main(source: TextIO, sink: TextIO, index: int = 0, coordinator: str = "") -> None:
    text = source.read()
    job = Job.from_json(text)
    if job.processes > 1:
        coordinator = coordinator or _start_peers(text, job.processes)
        jax.distributed.initialize(coordinator, job.processes, index)
    if job.dispatch != "default":
        jax.config.update("jax_cpu_enable_async_dispatch", job.dispatch == "async")
    if _WIDE.intersection(job.dtypes):
        jax.config.update("jax_enable_x64", True)
    mesh = make_mesh(job.num_ranks)
    print(json.dumps(facts.line()), file=sink, flush=True)
    for row in job.blank_rows():
        print(rows.to_line(measure_row(job, row, mesh)), file=sink, flush=True)


if __name__ == "__main__":
    # Rows travel on a private copy of stdout; whatever libraries print goes to stderr instead.
    row_sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, row_sink, *([int(sys.argv[1]), sys.argv[2]] if len(sys.argv) > 1 else []))
