"""`plan simulate`: time against size of an op's algorithms, and where the best one changes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from jcoll.algorithms import registry
from jcoll.algorithms.hierarchical import hierarchical
from jcoll.bench import rows
from jcoll.bench.checks import check_plot
from jcoll.cli_plan import arguments
from jcoll.cli_plan.progress import Progress
from jcoll.errors import UsageError
from jcoll.plan.simulate import simulate
from jcoll.plan.topology import Topology, TopologyError
from jcoll.plan.topology_file import get
from jcoll.sizes import format_size

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Comparison:
    """times: seconds of each algorithm, by its name, for each size. left_out: why, by name."""

    op: str
    num_ranks: int
    topology: Topology
    sizes: list[int]
    times: dict[str, Array]
    left_out: dict[str, str]

    def best(self) -> list[str]:
        """The fastest at each size; of equals, the first."""
        names = list(self.times)
        return [names[i] for i in np.argmin(np.stack(list(self.times.values())), axis=0)]


def run(args: argparse.Namespace) -> int:
    check_plot(args.plot)
    found = _compare(args)
    print(_as_json(found) if args.json else _as_text(found))
    if args.plot is not None:
        draw(found, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr if args.json else sys.stdout)
    return 0


def _compare(args: argparse.Namespace) -> Comparison:
    op = arguments.op(args.op)
    num_ranks = arguments.count("-n/--ranks", args.ranks)
    root = arguments.rank("-r/--root", args.root, num_ranks)
    sizes = arguments.size_sweep(args)
    try:
        topology = get(args.topology)
    except (TopologyError, OSError) as error:
        raise UsageError(f"-t/--topology: {error}") from None
    chosen, left_out = _algorithms(op, num_ranks, args.algorithms, topology)
    progress, times = Progress(total=len(chosen)), {}
    for algorithm in chosen:
        progress.starts(f"{algorithm.name} {op} of {num_ranks} ranks")
        times[algorithm.name] = simulate(algorithm, num_ranks, np.array(sizes), topology, root)
    progress.clear()
    return Comparison(op, num_ranks, topology, sizes, times, left_out)


def _algorithms(
    op: str, num_ranks: int, names: str | None, topology: Topology
) -> tuple[list[registry.Algorithm], dict[str, str]]:
    """Those named, which must serve; by default all that serve, and why the others do not."""
    if names is None:
        every = registry.all_algorithms(op)
    else:
        named = dict.fromkeys(name.strip() for name in names.split(","))
        every = [arguments.algorithm(op, name, num_ranks) for name in named]
    every = [_fitted(a, num_ranks, topology) for a in every]
    reasons = {a.name: reason for a in every if (reason := a.supports(num_ranks)) is not None}
    if names is not None and reasons:
        name, reason = next(iter(reasons.items()))
        raise UsageError(
            f"-a/--algorithms has {name!r}, which cannot serve {num_ranks} ranks on "
            f"{topology.name}: {reason}; leave it out, or change -n/--ranks"
        )
    return [a for a in every if a.name not in reasons], reasons


def _fitted(a: registry.Algorithm, num_ranks: int, topology: Topology) -> registry.Algorithm:
    """jcoll's hierarchical with the machine's hosts, where it has several, as its groups."""
    domain = topology.domain(num_ranks)
    if a.name != "hierarchical" or not a.is_ours or domain is None:
        return a
    return hierarchical(a.op, num_local=cast("int", domain.ranks))


def crossovers(sizes: list[int], best: list[str]) -> list[tuple[int, int, str]]:
    """(first size, last size, the best from one to the other)."""
    runs: list[tuple[int, int, str]] = []
    for size, name in zip(sizes, best, strict=True):
        first = runs.pop()[0] if runs and runs[-1][2] == name else size
        runs.append((first, size, name))
    return runs


def _as_text(found: Comparison) -> str:
    names, best = list(found.times), found.best()
    widths = [max(len(name), 10) for name in names]
    head = "  ".join(f"{name:>{width}} " for name, width in zip(names, widths, strict=True))
    lines = [
        f"{found.op} of {found.num_ranks} ranks, simulated on {found.topology.describe()}",
        "microseconds; *: the fastest",
        f"{'size':>8}  {head}",
    ]
    for i, size in enumerate(found.sizes):
        cells = (
            f"{found.times[name][i] * 1e6:>{width}.1f}{'*' if name == best[i] else ' '}"
            for name, width in zip(names, widths, strict=True)
        )
        lines.append(f"{format_size(size):>8}  {'  '.join(cells)}")
    lines += ["", *(_span_line(*run) for run in crossovers(found.sizes, best))]
    if "hierarchical" in names:
        lines.append(f"hierarchical: in groups of {_groups(found)}")
    lines += [f"left out: {name}: {reason}" for name, reason in found.left_out.items()]
    return "\n".join(line.rstrip() for line in lines)


def _groups(found: Comparison) -> str:
    domain = found.topology.domain(found.num_ranks)
    if domain is not None:
        return f"{domain.ranks} ranks, each of one {domain.name} domain"
    return "the divisor nearest to the square root of the ranks, as one host has them all"


def _span_line(first: int, last: int, name: str) -> str:
    span = [format_size(size) for size in dict.fromkeys((first, last))]
    return f"{' to '.join(span)}: {name}"


def _as_json(found: Comparison) -> str:
    data = {
        "op": found.op,
        "num_ranks": found.num_ranks,
        "topology": found.topology.name,
        "sizes": found.sizes,
        "seconds": {name: times.tolist() for name, times in found.times.items()},
        "best": [
            {"from": first, "to": last, "algorithm": name}
            for first, last, name in crossovers(found.sizes, found.best())
        ],
        "left_out": found.left_out,
    }
    return json.dumps(data, indent=2)


def draw(found: Comparison, path: Path, metadata: dict[str, Any] | None = None) -> None:
    """metadata: of the picture, as matplotlib's savefig takes it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
    for name, times in found.times.items():
        axes.plot(found.sizes, times * 1e6, "o-", label=name, markersize=3)
    for first, _, _ in crossovers(found.sizes, found.best())[1:]:
        axes.axvline(first, color="0.7", linestyle=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: format_size(round(size)))
    title = f"{found.op}, {found.num_ranks} ranks, {found.topology.name} (simulated)"
    axes.set(title=title, xlabel="size (bytes)", ylabel="µs")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    rows.write_figure(path, figure, metadata=metadata)
    pyplot.close(figure)
