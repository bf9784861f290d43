"""`plan verify`: every plan that is asked for, built and proved; one line for each algorithm."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

from jcoll.algorithms import registry
from jcoll.algorithms.proof import prove
from jcoll.cli_plan import arguments
from jcoll.cli_plan.progress import Progress
from jcoll.plan.counts import rounds, sent
from jcoll.plan.ir import PlanError
from jcoll.plan.ops import OPS

_SMALL = 256
_COLUMNS = "{:<15} {:<18} {:>6} {:>8} {:>8} {:>9}  {}"


@dataclass
class _Result:
    """Of one algorithm: what was proved and what was not."""

    algorithm: registry.Algorithm
    proved: list[int] = field(default_factory=list)
    unsupported: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_plans: int = 0
    rounds: int = 0  # Of the last number of ranks.
    sent: float = 0
    seconds: float = 0


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 all proved, 1 one is wrong."""
    chosen, ranks = _chosen(args), arguments.counts("-n/--ranks", args.ranks)
    if args.root is not None:
        arguments.rank("-r/--root", args.root, min(ranks))
    _check_sizes(chosen, ranks)
    progress = Progress(total=len(chosen) * len(ranks))
    print(_COLUMNS.format("op", "algorithm", "plans", "rounds", "sent/M", "seconds", "ranks"))
    failures: list[str] = []
    num_plans = 0
    for algorithm in chosen:
        result = _prove(algorithm, ranks, args.root, progress)
        progress.clear()
        print(_line(result), flush=True)
        failures += result.failures
        num_plans += result.num_plans
    print(f"\n{_summary(num_plans, failures)}")
    return 1 if failures or num_plans == 0 else 0


def _check_sizes(chosen: list[registry.Algorithm], ranks: list[int]) -> None:
    """Before anything is proved. Few algorithms make too many steps, and only for many ranks."""
    for algorithm in chosen:
        for num_ranks in ranks:
            if num_ranks > _SMALL and algorithm.supports(num_ranks) is None:
                arguments.check_size(algorithm, num_ranks, 0)


def _chosen(args: argparse.Namespace) -> list[registry.Algorithm]:
    if args.op is None:
        return registry.all_algorithms()
    op = arguments.op(args.op)
    if args.algorithm is None:
        return registry.all_algorithms(op)
    return [arguments.algorithm(op, args.algorithm)]


def _prove(
    algorithm: registry.Algorithm, ranks: list[int], root: str | None, progress: Progress
) -> _Result:
    result, begun = _Result(algorithm), time.monotonic()
    for num_ranks in ranks:
        progress.starts(f"{algorithm.name} {algorithm.op}, {num_ranks} ranks")
        if mistake := algorithm.mistake(num_ranks):
            result.failures.append(f"{algorithm.of(num_ranks)}: {mistake}")
            continue
        if algorithm.supports(num_ranks) is not None:
            result.unsupported.append(num_ranks)
            continue
        failures = [_failure(result, num_ranks, r) for r in _roots(algorithm.op, num_ranks, root)]
        wrong = [text for text in failures if text]
        result.failures += wrong[:1]
        if not wrong:
            result.proved.append(num_ranks)
    result.seconds = time.monotonic() - begun
    return result


def _roots(op: str, num_ranks: int, root: str | None) -> list[int]:
    if not OPS[op].rooted:
        return [0]
    return [int(root)] if root else sorted({0, num_ranks // 2, num_ranks - 1})


def _failure(result: _Result, num_ranks: int, root: int) -> str:
    """What is wrong with one plan, or ''."""
    algorithm = result.algorithm
    result.num_plans += 1
    try:
        plan = arguments.build(algorithm, num_ranks, root)
        prove(algorithm, plan)
        result.rounds, result.sent = rounds(plan), sent(plan)
    except PlanError as error:
        return str(error)
    return ""


def _line(result: _Result) -> str:
    a = result.algorithm
    ranks = arguments.spell_counts(result.proved) or "none"
    if result.failures:
        ranks = f"WRONG, see below; right: {ranks}"
    if result.unsupported:
        ranks += f"; not for {arguments.spell_counts(result.unsupported)}"
    seconds, sent_text = f"{result.seconds:.2f}", f"{result.sent:.4g}"
    return _COLUMNS.format(a.op, a.name, result.num_plans, result.rounds, sent_text, seconds, ranks)


def _summary(num_plans: int, failures: list[str]) -> str:
    if not failures:
        if num_plans == 0:
            return "No plan was proved: these numbers of ranks are not served."
        return f"{num_plans} plans, all proved."
    return "\n".join([f"{num_plans} plans; wrong, for each number of ranks:", *failures])
