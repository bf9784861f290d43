"""Listings and pictures: complete, in their places, well-formed."""

from __future__ import annotations

import itertools
from collections import Counter
from xml.etree import ElementTree

import pytest
from plan.handmade import copy, plan, recv, recv_reduce, reduce, send

from jcoll.algorithms.registry import all_algorithms, plan_for
from jcoll.plan.ir import Kind, Plan, PlanError
from jcoll.plan.render import as_svg, as_text

SVG = "{http://www.w3.org/2000/svg}"
SMALL = plan(
    "all_reduce",
    [recv("s0", 1), copy("o0", "i0"), reduce("o0", "s0"), send("o0", 1)],
    [send("i0", 0), recv("o0", 0)],
    scratch=1,
)


def picture(p: Plan) -> ElementTree.Element:
    return ElementTree.fromstring(as_svg(p))


def labels(p: Plan) -> Counter[str]:
    """Texts, without their halos."""
    return Counter(t.text or "" for t in picture(p).findall(f"{SVG}text"))


def arrows(p: Plan) -> list[ElementTree.Element]:
    return [path for path in picture(p).iter(f"{SVG}path") if path.get("marker-end")]


def ends(arrow: ElementTree.Element) -> list[list[float]]:
    points = (arrow.get("d") or "")[1:].split("L")
    return [[float(x) for x in point.split()] for point in points]


def test_text_of_a_small_plan():
    assert as_text(SMALL) == (
        "handmade all_reduce of 2 ranks: 2 rounds, 2 messages, "
        "1 of the array sent by the busiest rank, 1 chunk per block, 1 chunk of scratch\n"
        "rank 0: 4 steps\n"
        "    0  recv scratch[0] from 1\n"
        "    1  copy output[0] = input[0]\n"
        "    2  reduce output[0] = output[0] + scratch[0]\n"
        "    3  send output[0] to 1\n"
        "rank 1: 2 steps\n"
        "    0  send input[0] to 0\n"
        "    1  recv output[0] from 0\n"
    )


def test_text_of_a_large_plan_is_shortened():
    text = as_text(plan_for("all_reduce", "ring", 64), max_ranks=4, max_steps=5)
    assert len(text.splitlines()) == 1 + 4 * (1 + 6) + 1
    assert "... 60 more ranks ..." in text and "... 247 more steps ..." in text
    heads = [line for line in text.splitlines() if line.startswith("rank ")]
    assert heads == [f"rank {r}: 252 steps" for r in (0, 1, 62, 63)]
    assert "    2  send" in text and "  251  recv" in text


def test_text_names_the_root():
    assert "root 1" in as_text(
        plan("reduce", [send("i0", 1)], [recv_reduce("o0", "i0", 0)], root=1)
    )


def test_picture_of_a_small_plan():
    assert [a.get("marker-end") for a in arrows(SMALL)] == ["url(#copy)", "url(#copy)"]
    found = labels(SMALL)
    for label in ("s0", "o0 = i0", "o0 += s0", "i0", "0", "1", "2"):
        assert found[label], (label, found)
    assert found["o0"] == 2


def test_reductions_and_copies_differ():
    p = plan_for("all_reduce", "ring", 4)
    markers = Counter(a.get("marker-end") for a in arrows(p))
    assert markers == {"url(#reduce)": 12, "url(#copy)": 12}
    assert len({a.get("stroke") for a in arrows(p)}) == 2


def test_labels_of_ranges():
    p = plan("broadcast", [send("i0", 1, 3), copy("o0", "i0", 3)], [recv("o0", 0, 3)], chunks=3)
    assert labels(p)["i0-2"] == 1 and labels(p)["o0-2"] == 1 and labels(p)["o0-2 = i0-2"] == 1


@pytest.mark.parametrize("a", all_algorithms(), ids=lambda a: f"{a.op}-{a.name}")
def test_the_catalogue(a):
    for n in (n for n in (1, 2, 6, 8) if a.supports(n) is None):
        p = plan_for(a.op, a.name, n)
        root = picture(p)
        width, height = (float(root.get(side) or 0) for side in ("width", "height"))
        drawn = [ends(arrow) for arrow in arrows(p)]
        assert len(drawn) == (p.steps[:, 1] == Kind.SEND).sum()
        for (x0, y0), (x1, y1) in drawn:
            assert 0 < y0 < y1 < height  # Downwards: time.
            assert 0 < x0 < width and 0 < x1 < width and x0 != x1
        # No two steps of a rank in one place.
        points = Counter((x, y) for x, y in itertools.chain.from_iterable(drawn))
        assert max(points.values(), default=1) == 1
        assert str(next(p.steps_of(0), "")) in as_text(p)


def test_names_are_escaped():
    hostile = Plan("all_reduce", "<&>", 1, 0, 1, 0, plan("all_reduce", [copy("o0", "i0")]).steps)
    assert labels(hostile)["<&> all_reduce of 1 ranks"] == 1


def test_what_hangs_has_no_picture():
    with pytest.raises(PlanError, match="deadlock"):
        as_svg(plan("gather", [recv("o1", 1), send("i0", 1)], [recv("o0", 0), send("i0", 0)]))
