"""Plans for people: text, and one picture in SVG. No jax.

The picture: a lane for every rank, rounds downwards (counts.clocks), within a round the steps of a
rank in their order. A message is an arrow from its SEND, labelled with the chunks sent, to its
receive, labelled with the chunks written; a square is a step within a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from jcoll.plan.counts import clocks, counts
from jcoll.plan.ir import Buffer, Kind, Plan, Step
from jcoll.plan.order import partners

_LANE, _STEP, _GAP, _MARGIN, _HEAD, _MIN_WIDTH = 100, 18, 5, 60, 78, 640  # Pixels.
_COPY, _REDUCE, _INK, _PALE_INK, _LINE, _BAND = (
    "#2563a8",
    "#c2410c",
    "#1f2937",
    "#9ca3af",
    "#c3c8d0",
    "#f3f5f8",
)

_RECEIVES = [kind for kind in Kind if kind.receives]


def as_text(plan: Plan, max_ranks: int = 16, max_steps: int = 40) -> str:
    """A listing, rank by rank. Of more ranks or steps than the limits, the first and the last."""
    lines = [f"{plan.name}: {_facts(plan)}"]
    for rank in _shortened(plan.num_ranks, max_ranks):
        if rank is None:
            lines.append(f"... {plan.num_ranks - max_ranks} more ranks ...")
            continue
        steps = list(plan.steps_of(rank))
        lines.append(f"rank {rank}: {_number(len(steps), 'step')}")
        for i in _shortened(len(steps), max_steps):
            text = f"... {len(steps) - max_steps} more steps ..." if i is None else f"{steps[i]}"
            lines.append(f"  {'' if i is None else i:>3}  {text}")
    return "\n".join(lines) + "\n"


def as_svg(plan: Plan) -> str:
    """One picture of the whole plan, legible up to 16 ranks. PlanError for a plan that hangs."""
    layout = _layout(plan)
    steps = [Step(*row) for row in plan.steps.tolist()]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width}" height="{layout.height}" '
        f'viewBox="0 0 {layout.width} {layout.height}" font-family="sans-serif" font-size="11">',
        *_frame(plan, layout),
        *(part for row, step in enumerate(steps) for part in _shapes(layout, row, step)),
        # What keeps the labels legible on lines. Not every program knows paint-order.
        '<g fill="white" stroke="white" stroke-width="3" stroke-linejoin="round">',
        *(_label(layout, row, step, "") for row, step in enumerate(steps)),
        "</g>",
        *(_label(layout, row, step, _color(step)) for row, step in enumerate(steps)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _facts(plan: Plan) -> str:
    c = counts(plan)
    facts = [
        _number(c.rounds, "round"),
        _number(c.num_messages, "message"),
        f"{c.sent:.4g} of the array sent by the busiest rank",
        f"{_number(plan.chunks_per_block, 'chunk')} per block",
    ]
    if plan.num_scratch:
        facts.append(f"{_number(plan.num_scratch, 'chunk')} of scratch")
    return ", ".join(facts + [f"root {plan.root}"] * plan.spec.rooted)


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _shortened(number: int, limit: int) -> list[int | None]:
    """0 to number - 1, of which `limit` are left; None where some are left out."""
    if number <= limit:
        return list(range(number))
    last = limit // 2
    return [*range(limit - last), None, *range(number - last, number)]


@dataclass(frozen=True)
class _Layout:
    """Where things are, in pixels."""

    width: int
    height: int
    bands: list[float]  # The top of each round; the end of the last.
    x: list[float]  # Of each step.
    y: list[float]
    partner: list[int]


def _layout(plan: Plan) -> _Layout:
    clock, (rank, kind, peer) = clocks(plan), plan.steps.T[:3].astype(np.int64)
    num_bands = int(clock.max(initial=0)) + 1
    # A step's place among those of its rank and round: neighbours, as a clock never goes back.
    group = rank * num_bands + clock
    place = np.arange(len(group)) - np.searchsorted(group, group)
    heights, room = np.ones((2, num_bands), np.int64)
    np.maximum.at(heights, clock, place + 1)
    np.maximum.at(room, clock, np.abs(rank - peer) * np.isin(kind, _RECEIVES))
    above = _GAP + np.minimum(3 * room, 24)  # Wide arrows are flat: less so with more room above.
    bands = _HEAD + np.concatenate([[0], np.cumsum(above + heights * _STEP + _GAP)])
    return _Layout(
        width=max(2 * _MARGIN + (plan.num_ranks - 1) * _LANE, _MIN_WIDTH),
        height=int(bands[-1]) + _GAP,
        bands=bands.tolist(),
        x=(_MARGIN + rank * _LANE).tolist(),
        y=(bands[clock] + above[clock] + (place + 0.5) * _STEP).tolist(),
        partner=partners(plan),
    )


def _frame(plan: Plan, layout: _Layout) -> Iterator[str]:
    """Background, title, legend, rounds, lanes."""
    yield f'<rect width="{layout.width}" height="{layout.height}" fill="white"/>'
    for name, color in (("copy", _COPY), ("reduce", _REDUCE)):
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        )
    yield _text(12, 18, plan.name, 'font-size="14" font-weight="bold"')
    yield _text(12, 34, _facts(plan))
    for x, text, color in ((12, "copied", _COPY), (64, "reduced", _REDUCE)):
        yield _text(x, 50, text, f'fill="{color}" font-weight="bold"')
    yield _text(122, 50, "i, o, s: chunk of input, output, scratch")
    for k, (top, bottom) in enumerate(itertools.pairwise(layout.bands)):
        fill = _BAND if k % 2 else "white"
        yield f'<rect y="{top}" width="{layout.width}" height="{bottom - top}" fill="{fill}"/>'
        yield _text(6, top + 14, str(k), f'fill="{_PALE_INK}"')
    for rank in range(plan.num_ranks):
        x = _MARGIN + rank * _LANE
        yield f'<path d="M{x} {_HEAD}V{layout.bands[-1]}" stroke="{_LINE}"/>'
        yield _text(x, _HEAD - 6, str(rank), 'text-anchor="middle" font-weight="bold"')


def _shapes(layout: _Layout, row: int, step: Step) -> Iterator[str]:
    """A message's arrow, from the row of its SEND; a local step's square."""
    x, y = layout.x[row], layout.y[row]
    if step.kind == Kind.SEND:
        yield f'<circle cx="{x}" cy="{y}" r="2.5" fill="{_INK}"/>'
    elif Kind(step.kind).receives:
        name, color = "copy" if step.kind == Kind.RECV else "reduce", _color(step)
        x0, y0 = layout.x[layout.partner[row]], layout.y[layout.partner[row]]
        yield (
            f'<path d="M{x0} {y0}L{x} {y}" stroke="{color}" stroke-width="1.3" '
            f'marker-end="url(#{name})"/>'
        )
    else:
        yield f'<rect x="{x - 3.5}" y="{y - 3.5}" width="7" height="7" fill="{_color(step)}"/>'


def _label(layout: _Layout, row: int, step: Step, color: str) -> str:
    """What a step sends, or what it writes; on the side where the step has no arrow."""
    if step.kind == Kind.SEND:
        text = _chunks(step.src_buffer, step.src_chunk, step.count)
    else:
        text = _chunks(step.dst_buffer, step.dst_chunk, step.count)
    if step.kind in (Kind.COPY, Kind.REDUCE):
        text += " = " if step.kind == Kind.COPY else " += "
        text += _chunks(step.src_buffer, step.src_chunk, step.count)
    is_left = step.peer > step.rank
    attributes = [f'fill="{color}"'] * bool(color) + ['text-anchor="end"'] * is_left
    x = layout.x[row] + (-6 if is_left else 6)
    return _text(x, layout.y[row] + 4, text, " ".join(attributes))


def _color(step: Step) -> str:
    if step.kind == Kind.SEND:
        return _INK
    return _COPY if step.kind in (Kind.RECV, Kind.COPY) else _REDUCE


def _chunks(buffer: int, chunk: int, count: int) -> str:
    """ "o3-5": output[3..5]."""
    last = f"-{chunk + count - 1}" if count > 1 else ""
    return f"{Buffer(buffer).name[0].lower()}{chunk}{last}"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}"{" " * bool(attributes)}{attributes}>{escape(text)}</text>'
