"""From what was typed to ops, numbers of ranks, plans and sizes; UsageError for what cannot be."""

from __future__ import annotations

import argparse

from jcoll import sizes
from jcoll.algorithms import registry
from jcoll.errors import UsageError, ranges
from jcoll.plan.builder import Batch
from jcoll.plan.ir import Plan
from jcoll.plan.ops import OPS

MAX_STEPS = 4_000_000  # Of a plan that is kept: 130 MB, more while it is sorted.
MAX_RANKS = 1 << 16


def op(text: str) -> str:
    if text not in OPS:
        raise UsageError(f"OP {text!r} is not an op with plans; needed is one of {', '.join(OPS)}")
    return text


def count(flag: str, text: str) -> int:
    """One number of ranks."""
    number = sizes.parse_count(text)
    if not 1 <= number <= MAX_RANKS:
        raise UsageError(
            f"{flag} is {text!r}; a number of ranks from 1 to {MAX_RANKS} is needed: write 8"
        )
    return number


def counts(flag: str, text: str) -> list[int]:
    """Numbers of ranks and ranges of them: 1..17,32,64."""
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        begin = count(flag, first)
        end = count(flag, last) if dots else begin
        if end < begin:
            raise UsageError(f"{flag} has {part!r}; the smaller number is needed first")
        found += range(begin, end + 1)
    return list(dict.fromkeys(found))


def spell_counts(numbers: list[int]) -> str:
    """The reverse of `counts`: [1, 2, 3, 8] -> '1..3,8'."""
    return ranges(numbers, "..", ",")


def rank(flag: str, text: str, num_ranks: int) -> int:
    number = sizes.parse_count(text)
    if not 0 <= number < num_ranks:
        raise UsageError(f"{flag} is {text!r}; a rank from 0 to {num_ranks - 1} is needed")
    return number


def algorithm(op_name: str, name: str, num_ranks: int | None = None) -> registry.Algorithm:
    if name not in registry.names(op_name):
        known = ", ".join(registry.names(op_name))
        raise UsageError(f"{name!r} is not an algorithm of {op_name}; needed is one of {known}")
    try:
        return registry.get(op_name, name, num_ranks)
    except ValueError as error:  # It cannot serve so many ranks.
        raise UsageError(str(error)) from None


def plan(args: argparse.Namespace) -> Plan:
    """The one that OP ALGORITHM -n RANKS --root RANK name."""
    num_ranks = count("-n/--ranks", args.ranks)
    chosen = algorithm(op(args.op), args.algorithm, num_ranks)
    root = rank("-r/--root", args.root, num_ranks)
    check_size(chosen, num_ranks, root)
    return build(chosen, num_ranks, root)


def build(chosen: registry.Algorithm, num_ranks: int, root: int) -> Plan:
    builder = registry.builder_for(chosen, num_ranks, root=root)
    chosen.write(builder)
    return builder.finish()


def check_size(chosen: registry.Algorithm, num_ranks: int, root: int) -> None:
    """Before a plan is kept that does not fit: the steps are counted as they are made."""
    num_steps = 0

    def count_steps(batch: Batch) -> None:
        nonlocal num_steps
        num_steps += 2 * len(batch.src)
        if num_steps > MAX_STEPS:
            raise UsageError(
                f"-n/--ranks is {num_ranks}; {chosen.name} {chosen.op} then has more than "
                f"{MAX_STEPS:,} steps, which are not kept: lower it (`simulate` has no such limit)"
            )

    chosen.write(registry.builder_for(chosen, num_ranks, root=root, on_batch=count_steps))


def size_sweep(args: argparse.Namespace) -> list[int]:
    begin, end = _size("-b/--begin", args.begin), _size("-e/--end", args.end)
    if not 0 < begin <= end:
        raise UsageError(
            f"-b/--begin is {args.begin} and -e/--end is {args.end}; needed is 0 < begin <= end: "
            "raise --end, or lower --begin"
        )
    if args.factor < 2:
        raise UsageError(f"-f/--factor is {args.factor}; at least 2 is needed: raise it")
    return sizes.sweep(begin, end, factor=args.factor)


def _size(flag: str, text: str) -> int:
    try:
        return sizes.parse_size(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
