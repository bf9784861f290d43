"""Draws docs/pictures: of every algorithm of the catalogue a plan, and where the best one changes.

    python scripts/draw_algorithms.py      (needs matplotlib)

A test compares the files with what is drawn, or simulated, today.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from jcoll import sizes
from jcoll.algorithms import registry
from jcoll.cli_plan.comparison import Comparison, draw
from jcoll.plan.render import as_svg
from jcoll.plan.simulate import simulate
from jcoll.plan.topology import PRESETS

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
NUM_RANKS = 8
CROSSOVERS = "crossovers.svg"


def plans() -> dict[str, str]:
    """SVG by file name: the all_reduce of an algorithm, or of those that have none the first op."""
    ours = [a for a in registry.all_algorithms() if a.is_ours]
    shown = {a.name: a for a in reversed(ours)} | {a.name: a for a in ours if a.op == "all_reduce"}
    plan_of = {name: registry.plan_for(a.op, name, NUM_RANKS) for name, a in sorted(shown.items())}
    return {f"{name}.svg": as_svg(plan) for name, plan in plan_of.items()}


def crossovers() -> Comparison:
    """all_reduce on eight nodes of 8 GPUs."""
    op, num_ranks, topology = "all_reduce", 64, PRESETS["nvswitch"]
    swept = sizes.sweep(1 << 10, 1 << 30, factor=4)
    times = {
        a.name: simulate(a, num_ranks, np.array(swept), topology)
        for a in registry.all_algorithms(op)
        if a.is_ours
    }
    return Comparison(op, num_ranks, topology, swept, times, {})


def described(found: Comparison) -> str:
    """The numbers of the drawing, which carries them: versions of matplotlib draw differently."""
    us = {name: [float(f"{t * 1e6:.3g}") for t in times] for name, times in found.times.items()}
    return json.dumps(us)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    import matplotlib

    PICTURES.mkdir(exist_ok=True)
    for name, svg in plans().items():
        (PICTURES / name).write_text(svg)
    found = crossovers()
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "jcoll"}
    metadata = {"Date": None, "Creator": None, "Description": described(found)}
    draw(found, PICTURES / CROSSOVERS, metadata=metadata)
    print(f"wrote {PICTURES}")


if __name__ == "__main__":
    main()
