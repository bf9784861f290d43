"""Algorithms whose authors made mistakes: told by name and line, and nobody else's problem."""

from __future__ import annotations

import numpy as np
import pytest

from jcoll.algorithms import registry
from jcoll.algorithms.hierarchical import hierarchical
from jcoll.algorithms.registry import algorithm
from jcoll.plan.builder import Builder
from jcoll.plan.ir import PlanError
from jcoll.plan.simulate import simulate
from jcoll.plan.topology import CPU_HOST
from jcoll.runtime import plans
from jcoll.tuning.candidates import Request, candidates
from jcoll.tuning.select import priced, select


def registered(build, **fields):
    """ "mistaken" of all_reduce."""
    algorithm("mistaken", op="all_reduce", **fields)(build)
    return registry.get("all_reduce", "mistaken")


def nothing(p: Builder) -> None:
    del p


def wrong_index(p: Builder) -> None:
    p.send(0, [1, 2][p.num_ranks])


def nested(p: Builder) -> None:
    with p.at_once(), p.at_once():
        p.send(0, 1)


def scratch(count):
    return lambda p: p.send(0, 1, to=p.scratch(count))


MISTAKES = [
    (wrong_index, {}, r"IndexError at .*test_authored\.py:\d+: list index out of range\."),
    (nothing, {"chunks": lambda n: n / 2}, r"chunks=2\.0; a whole number from 1 on is needed"),
    (nothing, {"chunks": 0}, "chunks=0; a whole number from 1 on is needed"),
    (nothing, {"chunks": lambda n: n // 0}, r"ZeroDivisionError at .*test_authored\.py:\d+"),
    (nested, {}, r"at_once\(\) within at_once\(\)"),
    (scratch(-1), {}, r"scratch\(-1\); a whole number from 0 on"),
    (scratch(1.5), {}, r"scratch\(1\.5\); a whole number from 0 on"),
    (lambda p: p.send(3 / 2, 0), {}, r"src=1\.5 of send\(\); a whole number, or"),
    (lambda p: p.send(0, 1, to="0"), {}, r"to='0' of send\(\)"),
    (lambda p: p.send(p.ranks > 1, 0), {}, r"(?s)src=array.*of a mask take np.flatnonzero"),
    (lambda p: p.send(p.ranks, [1, 2]), {}, "4 of src, 2 of dst, 1 of chunk"),
    (lambda p: p.send(p.ranks[None], 0), {}, "a one-dimensional array of them, is needed"),
]


@pytest.mark.parametrize(("build", "fields", "message"), MISTAKES)
def test_mistakes_are_plan_errors(build, fields, message):
    a = registered(build, **fields)
    for use in (
        lambda: registry.plan_for("all_reduce", "mistaken", 4),
        lambda: plans.make("all_reduce", "mistaken", 4, 0),
        lambda: simulate(a, 4, np.array([1024]), CPU_HOST),
    ):
        with pytest.raises(PlanError, match=message) as error:
            use()
        assert str(error.value).startswith("mistaken all_reduce")


@pytest.mark.parametrize(
    ("unsupported", "reason"),
    [
        (lambda n: n % 0, r"its function `unsupported` failed, ZeroDivisionError at .*\.py:\d+: "),
        (lambda n: True, "its function `unsupported` returned True, neither None nor a text"),
    ],
)
def test_who_cannot_say_what_it_serves_serves_nothing(unsupported, reason):
    registered(nothing, unsupported=unsupported)
    with pytest.raises(ValueError, match=f"'mistaken' cannot serve 4 ranks: {reason}"):
        registry.get("all_reduce", "mistaken", 4)
    assert "mistaken" not in registry.supporting("all_reduce", 4)


@pytest.mark.parametrize(
    ("build", "fields"), [*(m[:2] for m in MISTAKES), (nothing, {"unsupported": lambda n: n % 0})]
)
def test_others_choose_among_the_rest(build, fields):
    """Ranks of which no table knows, so that all are estimated; by formulas, from 65 ranks on."""
    registered(build, rounds=lambda n: "few", sent=lambda n: 1, **fields)
    for num_ranks in (4, 64, 100):
        request = Request("all_reduce", (num_ranks,), 1 << 16)
        assert select(request).algorithm != "mistaken"
        (found,) = (c for c in priced(request) if c.algorithm == "mistaken")
        assert found.us is None
        assert len(priced(request)) == len(candidates(request))


@pytest.mark.parametrize(
    ("name", "fields", "error"),
    [
        (3, {"op": "all_reduce"}, "the name 3 cannot be used"),
        ("mistaken", {"op": ["all_reduce"]}, "there is no such op"),
        ("mistaken", {"op": "all_reduce", "chunks": "3"}, "chunks='3' is neither a whole number"),
        ("mistaken", {"op": "all_reduce", "unsupported": "odd"}, "unsupported='odd' is not a func"),
        ("mistaken", {"op": "all_reduce", "sent": 2}, "sent=2 is not a function"),
    ],
)
def test_what_cannot_be_registered(name, fields, error):
    with pytest.raises((ValueError, TypeError), match=error):
        algorithm(name, **fields)


@pytest.mark.parametrize("num_local", [0, -2, 2.5, True])
def test_hosts_of_no_size(num_local):
    with pytest.raises(ValueError, match=rf"num_local={num_local}; a whole number from 1 on"):
        hierarchical("all_reduce", num_local=num_local)


def test_hosts_of_a_size_that_numpy_has_computed():
    assert hierarchical("all_reduce", num_local=np.prod([2, 2])).supports(8) is None


def test_ranks_that_are_not_served_are_told_before_anything_is_built():
    with pytest.raises(PlanError, match="hierarchical all_reduce of 7 ranks: they do not divide"):
        simulate(registry.get("all_reduce", "hierarchical"), 7, np.array([1024]), CPU_HOST)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: registry.plan_for("all_reduce", "ring", 0),
            "ring all_reduce: num_ranks=0; a whole",
        ),
        (lambda: registry.plan_for("all_reduce", "ring", 2.5), r"num_ranks=2\.5; a whole number"),
        (lambda: registry.plan_for("broadcast", "tree", 4, root=4), "root=4 is not a rank of 4"),
        (lambda: registry.plan_for("broadcast", "tree", 4, root=-1), "root=-1 is not a rank of 4"),
        (lambda: registry.plan_for("all_reduce", "direct", 4), "algorithm='direct' is no plan, wh"),
        (lambda: Builder("all_scatter", 4), "there is no such op"),
        (
            lambda: simulate(registry.get("all_reduce", "ring"), 4, np.array([-1]), CPU_HOST),
            "Pass sizes in bytes, 0 or more",
        ),
    ],
)
def test_what_cannot_be_asked_for(use, message):
    with pytest.raises(ValueError, match=message):
        use()
