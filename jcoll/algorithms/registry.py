"""The catalogue: every algorithm by op and name. No jax.

To add one:
  1. write a function that takes a Builder and sends (jcoll/plan/builder.py), one for each op;
  2. decorate it with @algorithm(name, op=..., ...); in jcoll itself, in a file of its own that
     jcoll/algorithms/__init__.py imports;
  3. nothing else: the tests, the command line's choices and the tuner's candidates are all read
     from here; `python -m jcoll.algorithms.table` and `python scripts/draw_algorithms.py` bring
     the docs up to date. A plan is proved before its first use.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

from jcoll import errors
from jcoll.algorithms import kernels
from jcoll.algorithms.authored import errors_of, told
from jcoll.plan.builder import Builder
from jcoll.plan.ir import Plan, PlanError, whole_number
from jcoll.plan.ops import OPS

# Exchanges of rows whose number is known at run time. Their algorithms are those of all_to_all that
# send whole blocks.
RAGGED_OPS = ("ragged_all_to_all", "all_to_all_v", "all_to_all_v_back")

BuildFn = Callable[[Builder], None]

# Names that are not plans: the native one-step path, XLA's own collectives, the choice among all.
RESERVED = ("auto", "direct", "xla")


@dataclass(frozen=True)
class Algorithm:
    """How one op is done. The functions take num_ranks.

    chunks: pieces that every block is divided into (default 1).
    rounds: messages that follow one another, if all else is free; None: no closed formula.
    sent: bytes on the wire of the busiest rank, in units of M (all_reduce, broadcast, reduce: the
        array; else the whole array of num_ranks blocks); None: no closed formula.
    unsupported: why it cannot serve this number of ranks, or None.
    ragged: it sends whole blocks from where they are to where they belong, so that an executor may
        give every block a size of its own, known only at run time (plan/ragged.py).
    """

    name: str
    op: str
    build: BuildFn
    chunks: Callable[[int], int]
    rounds: Callable[[int], float] | None = None
    sent: Callable[[int], float] | None = None
    unsupported: Callable[[int], str | None] | None = None
    ragged: bool = False

    @property
    def doc(self) -> str:
        """The idea and its source: the docstring of the file."""
        module = sys.modules.get(self.build.__module__)
        return (self.build.__doc__ or (module and module.__doc__) or "").strip()

    @property
    def is_ours(self) -> bool:
        """Whether it comes with jcoll, whose tests have proved it. A composition does not."""
        return self in _OURS

    def of(self, num_ranks: int) -> str:
        """For errors: ring all_reduce of 8 ranks"""
        return f"{self.name} {self.op} of {num_ranks} ranks"

    def supports(self, num_ranks: int) -> str | None:
        """None, or why not. A mistake in `unsupported` is a reason, too: others can still serve."""
        return self._asked(num_ranks)[0]

    def mistake(self, num_ranks: int) -> str | None:
        """What is wrong with the answer of `unsupported`; None: nothing."""
        reason, is_mistake = self._asked(num_ranks)
        return reason if is_mistake else None

    def _asked(self, num_ranks: int) -> tuple[str | None, bool]:
        """(`supports`, whether that is the author's mistake)"""
        if self.unsupported is None:
            return None, False
        try:
            reason = self.unsupported(num_ranks)
        except Exception as error:
            return f"its function `unsupported` failed, {told(error, self.unsupported)}", True
        if reason is None or isinstance(reason, str):
            return reason or None, False
        return f"its function `unsupported` returned {reason!r}, neither None nor a text", True

    def num_chunks(self, num_ranks: int) -> int:
        """`chunks` of num_ranks. PlanError if one of them is no whole number from 1 on."""
        where = self.of(num_ranks)
        if (whole_number(num_ranks) or 0) < 1:
            problem = f"num_ranks={num_ranks!r}; a whole number from 1 on is needed."
            raise PlanError(f"{self.name} {self.op}: {problem}\n  Pass the number of ranks.")
        with errors_of(self.chunks, where):
            found = self.chunks(num_ranks)
        chunks = whole_number(found) or 0
        if chunks < 1:
            problem = f"chunks={found!r}; a whole number from 1 on is needed."
            raise PlanError(f"{where}: {problem}\n  Let `chunks` be one, or return one.")
        return chunks

    def write(self, p: Builder) -> None:
        """Has the plan written. PlanError for a number of ranks that it does not serve, and for
        whatever goes wrong in it."""
        where = self.of(p.num_ranks)
        if reason := self.supports(p.num_ranks):
            raise PlanError(f"{where}: {reason}.\n  Ask `supports` first.")
        with errors_of(self.build, where):
            self.build(p)


_ALGORITHMS: dict[tuple[str, str], Algorithm] = {}
_OURS: set[Algorithm] = set()

on_register: list[Callable[[], None]] = []
"""Called when an algorithm is registered, perhaps anew: for those who keep plans."""


def algorithm(
    name: str,
    *,
    op: str,
    chunks: Callable[[int], int] | int = 1,
    rounds: Callable[[int], float] | None = None,
    sent: Callable[[int], float] | None = None,
    unsupported: Callable[[int], str | None] | None = None,
    ragged: bool = False,
) -> Callable[[BuildFn], BuildFn]:
    """Registers a function that builds plans; returns it unchanged. See Algorithm for the fields.

    Raises ValueError for an op that has no plans and for a name that is taken, TypeError for what
    is not of the type that Algorithm says.
    """
    _check_names(name, op)
    _check_types(name, op, chunks, rounds=rounds, sent=sent, unsupported=unsupported)

    def decorate(build: BuildFn) -> BuildFn:
        per_block = _constant(chunks)
        register(Algorithm(name, op, build, per_block, rounds, sent, unsupported, ragged))
        return build

    return decorate


def register(a: Algorithm) -> None:
    """What @algorithm does, for an Algorithm that exists already."""
    _check_names(a.name, a.op)
    old = _ALGORITHMS.get((a.op, a.name))
    if old and _origin(old.build) != _origin(a.build):
        problem = f"the name is taken by {'.'.join(_origin(old.build))}."
        raise ValueError(errors.text(_where(a.name, a.op), problem, "Choose another name."))
    _ALGORITHMS[a.op, a.name] = a
    for forget in on_register:
        forget()


def all_of_ours_are_there() -> None:
    """What is registered from here on does not come with jcoll."""
    _OURS.update(_ALGORITHMS.values())


def _check_types(name: str, op: str, chunks: object, **functions: object) -> None:
    if not callable(chunks) and whole_number(chunks) is None:
        problem = f"chunks={chunks!r} is neither a whole number nor a function."
        fix = "Pass one, or a function of the number of ranks that returns one."
        raise TypeError(errors.text(_where(name, op), problem, fix))
    for field, value in functions.items():
        if value is not None and not callable(value):
            problem = f"{field}={value!r} is not a function."
            fix = "Pass a function of the number of ranks, or leave it out."
            raise TypeError(errors.text(_where(name, op), problem, fix))


def _check_names(name: str, op: str) -> None:
    if not isinstance(op, str) or op not in OPS:
        fix = f"One of {', '.join(OPS)}."
        raise ValueError(errors.text(_where(name, op), "there is no such op.", fix))
    taken = (*RESERVED, *kernels.ONLY_ON_CUDA)
    if name in taken or not isinstance(name, str) or not name.isidentifier():
        problem = f"the name {name!r} cannot be used."
        fix = f"A Python identifier other than {', '.join(taken)}."
        raise ValueError(errors.text(_where(name, op), problem, fix))


def _where(name: str, op: str) -> str:
    return f"algorithm({name!r}, op={op!r})"


def _constant(value: Callable[[int], int] | int) -> Callable[[int], int]:
    return value if callable(value) else lambda num_ranks: value


def _origin(build: BuildFn) -> tuple[str, str]:
    """A function defined again (a notebook cell, a reload) takes the place of the old one."""
    return build.__module__, build.__qualname__


def is_plan(op: str, name: str, *, on_cuda: bool = False) -> bool:
    """Whether a runtime follows a plan; on CUDA some algorithms are kernels instead."""
    if name in RESERVED or name in kernels.ONLY_ON_CUDA:
        return False
    return not on_cuda or name not in kernels.BY_OP.get(op, ())


def plan_op(op: str) -> str:
    """The op whose plans an op follows: that of ragged exchanges is all_to_all."""
    return "all_to_all" if op in RAGGED_OPS else op


def all_algorithms(op: str | None = None) -> list[Algorithm]:
    """The catalogue, in the order of registration; of one op, if given."""
    if op is None:
        return list(_ALGORITHMS.values())
    found = [a for a in _ALGORITHMS.values() if a.op == plan_op(op)]
    return [a for a in found if a.ragged] if op in RAGGED_OPS else found


def names(op: str | None = None) -> list[str]:
    return list(dict.fromkeys(a.name for a in all_algorithms(op)))


def supporting(op: str, num_ranks: int) -> list[str]:
    return [a.name for a in all_algorithms(op) if a.supports(num_ranks) is None]


def get(op: str, name: str, num_ranks: int | None = None, *, where: str = "") -> Algorithm:
    """The algorithm; ValueError if it is unknown or, given num_ranks, cannot serve that many.

    `where`: the call, for the error.
    """
    found = {a.name: a for a in all_algorithms(op)}.get(name)
    where = where or op
    fix = f"Algorithms of {op}: {', '.join([*RESERVED, *names(op), *kernels.only_on_cuda(op)])}."
    if found is None and name in RESERVED:
        problem = f"algorithm={name!r} is no plan, which is asked for here."
        fix = f"Plans of {op}: {', '.join(names(op)) or 'none'}."
        raise ValueError(errors.text(where, problem, fix))
    if found is None:
        known = name in names() or name in kernels.ONLY_ON_CUDA
        problem = (
            f"algorithm={name!r} does not serve this op."
            if known
            else f"algorithm={name!r} is unknown."
        )
        raise ValueError(errors.text(where, problem, fix))
    if num_ranks is not None and (reason := found.supports(num_ranks)):
        problem = f"algorithm={name!r} cannot serve {num_ranks} ranks: {reason}."
        available = ", ".join([*RESERVED, *supporting(op, num_ranks)])
        fix = f"Available for {num_ranks} ranks: {available}."
        raise ValueError(errors.text(where, problem, fix))
    return found


def builder_for(a: Algorithm, num_ranks: int, *, root: int = 0, **kwargs: object) -> Builder:
    """A Builder as `a` wants it. kwargs: of Builder."""
    return Builder(
        a.op,
        num_ranks,
        algorithm=a.name,
        root=root,
        chunks_per_block=a.num_chunks(num_ranks),
        **kwargs,  # type: ignore[arg-type]
    )


def plan_for(op: str, name: str, num_ranks: int, root: int = 0) -> Plan:
    """The plan. ValueError (PlanError) for what cannot be had."""
    return _built(get(op, name, num_ranks), num_ranks, root)


@functools.lru_cache(maxsize=256)
def _built(a: Algorithm, num_ranks: int, root: int) -> Plan:
    """By algorithm, not by name: one may be defined anew while its old plan is being built."""
    builder = builder_for(a, num_ranks, root=root)
    a.write(builder)
    return builder.finish()
