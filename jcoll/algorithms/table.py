"""The catalogue as a table for docs/algorithms.md. No jax.

python -m jcoll.algorithms.table     brings docs/algorithms.md up to date
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from jcoll.algorithms.registry import Algorithm, all_algorithms
from jcoll.plan.ops import OPS

BEGIN = "<!-- begin: python -m jcoll.algorithms.table -->"
END = "<!-- end -->"
NUM_RANKS = (7, 8, 64)


def markdown_table() -> str:
    """The families; then for each op the counts: rounds, and bytes sent in units of M."""
    return "\n\n".join([_families(), *map(_counts, OPS)])


def update(text: str) -> str:
    """`text` with the table of today between the marks."""
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    block = f"{BEGIN}\n\n{markdown_table()}\n\n{END}"
    new, found = re.subn(pattern, lambda _: block, text, flags=re.DOTALL)
    if found != 1:
        raise ValueError(f"{found} tables between {BEGIN} and {END}; there must be one.")
    return new


def _catalogue(op: str | None = None) -> list[Algorithm]:
    """Our own, by name."""
    return sorted((a for a in all_algorithms(op) if a.is_ours), key=lambda a: a.name)


def _families() -> str:
    ops: dict[str, list[str]] = {}
    for a in _catalogue():
        ops.setdefault(a.name, []).append(f"{a.op}{' (ragged)' * a.ragged}")
    first = {a.name: a for a in reversed(_catalogue())}
    rows = [
        [_linked(name), _idea(first[name]), ", ".join(ops[name]), _ranks(first[name])]
        for name in ops
    ]
    sources = [f"- `{name}`: {_source(first[name])}." for name in ops]
    table = _table(["algorithm", "idea", "ops", "ranks"], rows)
    return "\n".join([table, "", "Sources:", "", *sources])


def _linked(name: str) -> str:
    """To its picture, by scripts/draw_algorithms.py."""
    return f"[`{name}`](pictures/{name}.svg)"


def _counts(op: str) -> str:
    head = [op, *(f"n = {n}" for n in NUM_RANKS)]
    rows = [[f"`{a.name}`", *(_cell(a, n) for n in NUM_RANKS)] for a in _catalogue(op)]
    return _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _ranks(a: Algorithm) -> str:
    reasons = [reason for n in range(2, 65) if (reason := a.supports(n))]
    return f"not if {reasons[0]}" if reasons else "any"


def _cell(a: Algorithm, n: int) -> str:
    if a.supports(n) is not None:
        return "-"
    return f"{_number(a.rounds, n)}, {_number(a.sent, n)} M"


def _number(formula: Callable[[int], float] | None, n: int) -> str:
    return f"{formula(n):.3g}" if formula else "?"


def _idea(a: Algorithm) -> str:
    """The first line of the docstring, after the name."""
    return a.doc.partition("\n")[0].partition(": ")[2].rstrip(".").replace("|", "\\|")


def _source(a: Algorithm) -> str:
    """What follows "Source:" in the docstring, up to the next paragraph."""
    text = a.doc.partition("Source: ")[2].partition("\n\n")[0]
    return " ".join(text.split()).rstrip(".").replace("|", "\\|")


def main() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
    path.write_text(update(path.read_text()))


if __name__ == "__main__":
    main()
