"""`jcoll.explain`: which algorithm each collective of a function gets, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import jax

from jcoll import _compat, errors
from jcoll.config import config
from jcoll.ops import SPECS
from jcoll.runtime import cuda, decisions, native
from jcoll.runtime.decisions import Decision
from jcoll.tuning.candidates import Candidate
from jcoll.tuning.table import DTYPE


@overload
def explain() -> Environment: ...


@overload
def explain(fn: Callable, *args: Any, **kwargs: Any) -> Explanation: ...


def explain(fn: Callable | None = None, *args: Any, **kwargs: Any) -> Explanation | Environment:
    """Tells which algorithms the collectives of fn(*args, **kwargs) get; without fn, what is there.

        print(jcoll.explain(train_step, params, batch))

    The function is traced and lowered, neither compiled nor run. There is a row for each of jcoll's
    collectives and, inside `jcoll.intercept()`, for each of jax.lax's that it covers. The body of a
    loop, or of an inner jitted function that is called several times, is lowered once.

    Args:
      fn: function, jitted or not. If jitted, with its static arguments, shardings etc.
      args, kwargs: its arguments; arrays may be jax.ShapeDtypeStruct.

    Returns:
      An Explanation, a sequence of rows; an Environment without a function. Both print as a table.
    """
    if fn is None:
        return _environment()
    if not callable(fn):
        problem = f"fn={fn!r} is not a function."
        fix = "Pass the function and its arguments apart: jcoll.explain(fn, *args)."
        raise TypeError(errors.text("explain", problem, fix))
    jitted = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
    with _lock, _compat.each_lowered(_primitives()), _FRESH(object()):
        with decisions.listening() as rows:
            jitted.lower(*args, **kwargs)
        return Explanation(tuple(rows))


_FRESH = jax.make_user_context(None)
"""Part of the key of JAX's caches: a new value has everything traced and lowered anew."""

_lock = threading.RLock()


def _primitives() -> list[Any]:
    return [spec.primitive for spec in SPECS.values()]


@dataclass(frozen=True)
class Explanation(Sequence[Decision]):
    """The collectives of a function, in the order of their lowering."""

    rows: tuple[Decision, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __str__(self) -> str:
        if not self.rows:
            hint = "" if _compat.INTERCEPTING.value else " (jax.lax's: inside jcoll.intercept())"
            return f"no collectives of jcoll{hint}"
        return "\n".join(_table(_HEAD, [_cells(row) for row in self.rows]))

    def costs(self) -> str:
        """For each row, the algorithms that could have been chosen, with their costs, and those
        that could not, with the reason: `row.candidates` as tables."""
        return "\n\n".join(map(_costs, self.rows))


_HEAD = ("op", "axis", "signature", "ranks", "algorithm", "reason", "call site")


def _cells(row: Decision) -> tuple[str, ...]:
    return tuple(str(getattr(row, field.name)) for field in fields(row) if field.repr)


def _costs(row: Decision) -> str:
    where = f" at {row.call_site}" if row.call_site else ""
    head = f"{row.op} {row.signature} over {row.axis}, {row.num_ranks} ranks{where}"
    chosen = f"{row.algorithm}: {row.reason}"
    dtype = row.signature.partition("[")[0]
    return "\n".join([head, chosen, *candidate_lines(row.candidates, row.algorithm, dtype)])


def candidate_lines(found: Sequence[Candidate], chosen: str, dtype: str) -> Iterator[str]:
    """A table of candidates; a star marks the chosen one."""
    if dtype != DTYPE and any(c.us is not None for c in found):
        yield f"(costs are those of as many bytes of {DTYPE}; {dtype} is not measured)"
    rows = [
        (
            "*" if c.algorithm == chosen else "",
            c.algorithm,
            _us(c.us),
            f"no: {c.obstacle}" if c.obstacle else c.source or "not measured",
        )
        for c in found
    ]
    yield from _table(("", "algorithm", "    us", ""), rows)


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:8.1f}" if us < 100 else f"{us:6.0f}  "


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


@dataclass(frozen=True)
class Environment:
    """What collectives would run on here."""

    platform: str
    devices: int
    processes: int
    served: bool
    """Whether jcoll has a runtime for the platform."""
    runtime: str
    """Which one, or why none."""
    isa: str
    threads: int
    timeout_s: float
    algorithm: str
    """What algorithm="auto" means: auto, direct or xla."""
    intercepting: bool

    def __str__(self) -> str:
        return "\n".join(_table(("setting", "value"), list(self._lines())))

    def _lines(self) -> Iterator[tuple[str, str]]:
        devices = f"{self.devices} device{'s' * (self.devices != 1)}"
        processes = f"{self.processes} process{'es' * (self.processes != 1)}"
        yield "platform", f"{self.platform}, {devices} in {processes}"
        yield "runtime", self.runtime
        yield "timeout", f"{self.timeout_s:g} s for the last rank to arrive (JCOLL_TIMEOUT)"
        yield "algorithm", f"{self.algorithm} (JCOLL_ALGORITHM)"
        state = "lowered through jcoll" if self.intercepting else "XLA's own"
        yield "jax.lax", f"collectives are {state} (jcoll.intercept(), JCOLL_INTERCEPT)"


def _environment() -> Environment:
    platform = jax.default_backend()
    served, runtime = _runtime(platform)
    return Environment(
        platform=platform,
        devices=jax.device_count(),
        processes=jax.process_count(),
        served=served,
        runtime=runtime,
        isa=native.isa(),
        threads=native.num_threads(),
        timeout_s=config.timeout_s,
        algorithm=config.algorithm,
        intercepting=_compat.INTERCEPTING.value,
    )


def _runtime(platform: str) -> tuple[bool, str]:
    """Whether jcoll serves a platform, and how or why not."""
    if platform == "cpu":
        return True, f"in process: {native.isa()}, {native.num_threads()} threads"
    obstacle = cuda.obstacle() if platform == "gpu" else "it has no jcoll runtime"
    if obstacle is None:
        return True, f"kernels for {', '.join(cuda.architectures())}"
    return False, f"none for {platform}: XLA's own collectives ({obstacle})"
