"""A measuring process of `jcoll tune`: a Run as JSON on its command line, rows on stdout.

All algorithms of a row are compiled first; then their calls alternate, the order turning round each
time, so that drift and neighbours hit all alike. What counts is the lower quartile. Where the op's
result can be fed back, a program is a chain of collectives: a single one is hidden by its launch.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jcoll import _compat
from jcoll.algorithms import authored
from jcoll.bench.cases import CASES, Problem
from jcoll.bench.catalog import CATALOG, element_count
from jcoll.bench.programs import Program, compile_side, make_mesh, place
from jcoll.cli_tune.runs import Run
from jcoll.tuning.candidates import PROCESSES, Request, serving
from jcoll.tuning.select import winner

FIRST_CALLS = 3
MAX_CALLS = 200
CONTENDERS = 3.0
"""Who takes more than so many times as long as the fastest at first is not measured again."""
AGREE_S = 120.0


def measure(run: Run) -> Iterator[dict[str, Any]]:
    """Rows as table.Row has them, with "errors" for the algorithms that failed."""
    mesh = make_mesh(run.num_ranks)
    agree = _Agreement()
    for op, nbytes in run.points():
        gc.collect()
        yield _row(run, op, nbytes, mesh, agree)


def _row(run: Run, op: str, nbytes: int, mesh: Any, agree: _Agreement) -> dict[str, Any]:
    count = element_count(op, nbytes, 4, run.num_ranks)
    row = {
        "placement": run.placement,
        "op": op,
        "num_ranks": run.num_ranks,
        "nbytes": count * 4,
    }
    names = serving(Request(op, (run.num_ranks,), nbytes, run.placement))
    programs, errors, steps = _compile(op, count, names, mesh)
    seconds = _timed_all(programs, run.seconds, agree)
    us = {name: s / steps * 1e6 for name, s in seconds.items()}
    return row | {"us": us, "errors": errors}


def _compile(
    op: str, count: int, names: Sequence[str], mesh: Any
) -> tuple[dict[str, Program], dict[str, str], int]:
    programs: dict[str, Program] = {}
    errors: dict[str, str] = {}
    steps = _steps(count * 4) if CATALOG[op].repeats else 1
    operands: tuple[jax.Array, ...] = ()
    for name in names:
        problem = Problem(
            op,
            mesh.size,
            np.dtype(np.float32),
            count,
            algorithm=name,
            form="chain" if CATALOG[op].repeats else "single",
            steps=steps,
        )
        side = CASES[op](problem).jcoll
        operands = operands or place(side, mesh)
        try:
            programs[name] = compile_side("jcoll", side, problem, mesh, operands)
        except Exception as error:  # Others can still be measured.
            errors[name] = f"{type(error).__name__}: {error}"
    return programs, errors, steps


def _steps(nbytes: int) -> int:
    return 8 if nbytes <= 64 << 10 else 4 if nbytes <= 1 << 20 else 2


def _timed_all(
    programs: Mapping[str, Program], seconds: float, agree: _Agreement
) -> dict[str, float]:
    """Seconds of each; the close ones more often, and who beats "direct" once more."""
    for program in programs.values():
        program().block_until_ready()
    found = agree(_interleaved(programs, FIRST_CALLS))
    limit = CONTENDERS * min(found.values(), default=0.0)
    close = [name for name in found if found[name] <= limit or name == "direct"]
    found |= _again(programs, close, found, seconds, agree)
    ours = {name: s for name, s in found.items() if name != "xla"}
    if "direct" in ours and (best := winner(ours)) != "direct":
        found |= _again(programs, ["direct", best], found, seconds, agree)
    return found


def _again(
    programs: Mapping[str, Program],
    names: Sequence[str],
    first: Mapping[str, float],
    seconds: float,
    agree: _Agreement,
) -> dict[str, float]:
    round_s = sum(first[name] for name in names)
    calls = int(min(max(seconds / round_s, FIRST_CALLS), MAX_CALLS)) if round_s else 0
    chosen = {name: programs[name] for name in names}
    return agree(_interleaved(chosen, calls)) if calls else {}


def _interleaved(programs: Mapping[str, Program], calls: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in programs}
    order = list(programs)
    for _ in range(calls):
        for name in order:
            begun = time.perf_counter()
            result = programs[name]().block_until_ready()
            samples[name].append(time.perf_counter() - begun)
            del result
        order = [*order[1:], order[0]]
    return {name: _lower_quartile(values) for name, values in samples.items()}


def _lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


class _Agreement:
    """What process 0 has measured, on all processes: they must make the same calls next."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, value: dict[str, float]) -> dict[str, float]:
        if jax.process_count() == 1:
            return value
        client, self._count = _compat.distributed_client(), self._count + 1
        key = f"jcoll/tune/{self._count}"
        if jax.process_index() == 0:
            client.key_value_set(key, json.dumps(value))
        return json.loads(client.blocking_key_value_get(key, int(AGREE_S * 1000)))


def main() -> None:
    run = Run.from_json(sys.argv[1])
    authored.load(Path(run.module) if run.module else None)
    if run.placement == PROCESSES:  # XLA's hand-over to a thread of its own would hide small ones.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    gc.disable()
    for row in measure(run):
        if jax.process_index() == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
