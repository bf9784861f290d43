"""Timing two programs against each other, and the memory-copy limit beside them.

A time alone means little on a shared machine. Calls of the two sides alternate, the order turning
round each time, so that drift and neighbours hit both alike; a repeat takes the median of its
calls, and the ratio is formed inside a repeat before the median over repeats is taken.

Between processes it is runs of calls that alternate, and the first calls of a run do not count:
they inherit in what state the other side has left the processes (out of step, threads of both on
one core, other data in the caches), which would be charged to the faster side. A training run has
one side only.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jcoll.cores import num_cores

MIN_CALLS, MAX_CALLS = 3, 2000


@dataclass(frozen=True)
class Timing:
    """Median seconds a call, over repeats, and the quartiles of the ratio theirs / ours."""

    ours_s: float
    theirs_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    calls: int  # per side and repeat


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    warmup: int,
    calls: int | None,
    repeats: int,
    seconds: float,
    run: int = 1,
    settling: int = 0,
) -> Timing:
    """Time both; `calls` a side and repeat, or (None) as many as fill `seconds` in all.

    They alternate in runs of `run`, each after `settling` calls that do not count.
    """
    for _ in range(warmup):
        ours()
        theirs()
    with _no_collection():
        if calls is None:
            round_s = _timed(ours) + _timed(theirs)
            calls = int(min(max(seconds / repeats / round_s, MIN_CALLS), MAX_CALLS))
        pairs = [_repeat(ours, theirs, calls, run, settling, turn=r) for r in range(repeats)]
    low, ratio, high = _quartiles([b / a for a, b in pairs])
    ours_s, theirs_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Timing(ours_s, theirs_s, ratio, low, high, calls)


def _repeat(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    calls: int,
    run: int,
    settling: int,
    turn: int,
) -> tuple[float, float]:
    """Median seconds of each side over `calls` calls, in alternating runs; `turn`: who begins."""
    first, second = [], []
    for begin in range(0, calls, run):
        sides = [(ours, first), (theirs, second)]
        if (turn + begin // run) % 2:
            sides.reverse()
        for call, times in sides:
            for _ in range(settling):
                call()
            times += [_timed(call) for _ in range(min(run, calls - begin))]
    return statistics.median(first), statistics.median(second)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result  # giving large buffers back to the kernel takes time: after the clock has stopped
    return elapsed


def _quartiles(samples: list[float]) -> tuple[float, float, float]:
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No cyclic collection inside a timing: a pause would land on one side only."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def copy_seconds(nbytes: int, *, sharers: int = 1, repeats: int = 7) -> float:
    """Seconds of a plain copy of `nbytes` between two warm buffers: the better of one thread and
    one thread a core.

    With `sharers` processes, which must all call this at the same time, each has its share of the
    bytes and of the cores; where they outnumber these they take turns, which the copy of one does
    not show, as it fits into its turn.
    """
    turns = max(1.0, sharers / num_cores())
    nbytes, cores = nbytes // sharers, max(1, num_cores() // sharers)
    src, dst = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    parts = list(zip(np.array_split(dst, cores), np.array_split(src, cores), strict=True))
    with ThreadPoolExecutor(cores) as pool:
        ways = (
            lambda: np.copyto(dst, src),
            lambda: list(pool.map(lambda part: np.copyto(*part), parts)),
        )
        best = min(statistics.median(_timed(way) for _ in range(repeats)) for way in ways)
    return best * turns
