"""Who can serve a call, and why others cannot."""

from __future__ import annotations

import pytest

from jcoll.algorithms import registry
from jcoll.tuning.candidates import (
    HOSTS,
    NOWHERE,
    PROCESSES,
    Request,
    candidates,
    serving,
    size_of,
)


def obstacles(request: Request) -> dict[str, str | None]:
    return {c.algorithm: c.obstacle for c in candidates(request)}


@pytest.mark.parametrize("op", ["all_reduce", "all_to_all", "gather", "ppermute", "barrier"])
def test_all_of_the_op_and_xla(op):
    found = [c.algorithm for c in candidates(Request(op, (6,), 1024))]
    assert found == ["direct", *registry.names(op), "xla"]


def test_counts_that_an_algorithm_does_not_serve():
    assert obstacles(Request("all_reduce", (5,), 1024))["hierarchical"].startswith("5 ranks: ")
    assert "hierarchical" in serving(Request("all_reduce", (6,), 1024))
    # Groups of several sizes: all must be served.
    assert "hierarchical" not in serving(Request("all_reduce", (6, 5), 1024))


def test_narrow_sums_are_rounded_once():
    assert serving(Request("all_reduce", (6,), 1024, PROCESSES, is_narrow=True)) == [
        *("direct", "one_shot", "two_shot", "xla")
    ]
    assert serving(Request("all_reduce", (6,), 1024, is_narrow=True, is_mean=True)) == [
        *("direct", "xla")
    ]


def test_an_obstacle_leaves_xla():
    request = Request("all_reduce", (8,), 1024, NOWHERE, obstacle="no such thing")
    assert serving(request) == ["xla"]
    assert obstacles(request)["direct"] == "no such thing"


def test_several_hosts():
    assert serving(Request("all_reduce", (8,), 1024, HOSTS)) == ["hierarchical", "xla"]
    assert serving(Request("broadcast", (8,), 1024, HOSTS)) == ["xla"]


def test_size():
    assert size_of("all_gather", 10, 4) == 40, "the output"
    assert size_of("reduce_scatter", 40, 4) == 40, "the input"
    assert size_of("all_reduce", 10, 4) == 10
    assert size_of("ppermute", 10, 4) == 10
