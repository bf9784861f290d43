"""The two levels of a collective over several hosts: who is in which."""

from __future__ import annotations

import pytest

from jcoll.comm.group import Groups
from jcoll.ops._hierarchical import Split, split

FOUR = Groups(4)


def test_hosts_in_runs():
    assert split([7, 7, 3, 3], 4, FOUR) == Split(((0, 1), (2, 3)), ((0, 2), (1, 3)))
    # Another row of the mesh, on other hosts, but with the same positions.
    assert split([7, 7, 3, 3, 0, 0, 1, 1], 4, FOUR) == split([7, 7, 3, 3], 4, FOUR)
    groups = Groups(8, ((0, 1, 2, 3), (7, 6, 5, 4)))
    levels = split([0, 0, 1, 1, 2, 2, 3, 3], 8, groups)
    assert levels == Split(((0, 1), (2, 3), (7, 6), (5, 4)), ((0, 2), (1, 3), (7, 5), (6, 4)))


@pytest.mark.parametrize(
    ("host_of", "groups", "reason"),
    [
        ([0, 1, 0, 1], FOUR, "not in equal runs"),
        ([0, 0, 0, 1], FOUR, "not in equal runs"),
        ([0, 0, 1, 1, 0, 1, 1, 1], FOUR, "not in equal runs"),  # Rows that differ.
        ([0, 1, 2, 3], FOUR, "one on each"),
        ([0, 0, 1, 1, 2, 3], Groups(6, ((0, 1, 2, 3), (4, 5))), "not as many on each"),
        ([0, 0, 1, 1, 2, 2], Groups(6, ((0, 1, 2, 3), (4, 5))), "not on as many for every group"),
    ],
)
def test_no_two_levels(host_of, groups, reason):
    levels = split(host_of, groups.axis_size, groups)
    assert isinstance(levels, str) and reason in levels
