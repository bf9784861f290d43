"""Every collective over every kind of axis, against its reference.

Generated from the registry: case x placement (a sub-axis of a 2-D mesh, two axes of a 3-D one,
permuted devices, groups) x dtype. One program holds all cases of a placement and an algorithm.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from ops.cases import CASES, Case, inputs
from ops.meshes import put, spmd
from ops.test_values import check

import jcoll
from jcoll.comm.mesh import make_call
from jcoll.ops import SPECS, _primitive

DTYPES = {
    "direct": ("float32", "bfloat16", "int8", "bool", "complex64"),
    "xla": ("float32", "int32"),
}
SHAPE = (5,)


@dataclass(frozen=True)
class Placement:
    """A mesh of 8 devices and who of them takes part in one collective."""

    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    order: tuple[int, ...] = tuple(range(8))
    groups: tuple[tuple[int, ...], ...] | None = None

    def mesh(self) -> Mesh:
        devices = np.array(jax.devices())[list(self.order)].reshape(self.sizes)
        return Mesh(devices, ("x", "y", "z")[: len(self.sizes)])

    def members(self) -> list[list[int]]:
        """The positions in the mesh, counted row by row, of each collective's ranks in order."""
        names = list("xyz"[: len(self.sizes)])
        others = [name for name in names if name not in self.axes]
        order = [names.index(name) for name in (*others, *self.axes)]
        positions = np.arange(8).reshape(self.sizes).transpose(order)
        rows = positions.reshape(math.prod(self.sizes[names.index(n)] for n in others), -1)
        groups = self.groups or [range(rows.shape[1])]
        return [row[list(group)].tolist() for row in rows for group in groups]

    def takes(self, case: Case) -> bool:
        """Whether the op has axis_index_groups where they are needed, and of unequal size."""
        if self.groups is None:
            return True
        if len(set(map(len, self.groups))) > 1:
            return case.op == "all_reduce"
        public = getattr(jcoll, case.op, None)
        return public is not None and "axis_index_groups" in inspect.signature(public).parameters


PLACEMENTS = {
    "1d": Placement((8,), ("x",)),
    "1d_permuted": Placement((8,), ("x",), order=(5, 2, 7, 0, 3, 6, 1, 4)),
    "2d_first": Placement((4, 2), ("x",)),
    "2d_second": Placement((2, 4), ("y",)),
    "2d_of_two": Placement((4, 2), ("y",)),
    "2d_permuted": Placement((4, 2), ("x",), order=(5, 2, 7, 0, 3, 6, 1, 4)),
    "3d_two": Placement((2, 2, 2), ("x", "z")),
    "3d_two_reversed": Placement((2, 2, 2), ("z", "x")),
    "3d_all_permuted": Placement((2, 2, 2), ("y", "z", "x"), order=(6, 1, 4, 3, 0, 7, 2, 5)),
    "groups": Placement((8,), ("x",), groups=((0, 3, 5, 6), (7, 1, 2, 4))),
    "groups_of_unequal_size": Placement((8,), ("x",), groups=((6, 1, 3), (0, 2, 7, 4, 5))),
    "groups_of_a_sub_axis": Placement((2, 4), ("y",), groups=((3, 0), (1, 2))),
    "groups_of_two_axes": Placement((2, 2, 2), ("z", "x"), groups=((3, 1), (0, 2))),
}


def stacked_inputs(case: Case, members: list[list[int]], dtype: str) -> tuple[list, list]:
    """(inputs of all 8 positions, inputs of each group): every group with data of its own."""
    per_group = [inputs(case, len(m), SHAPE, dtype, seed) for seed, m in enumerate(members)]
    everywhere = [np.concatenate(parts) for parts in zip(*per_group, strict=True)]
    back = np.argsort(np.concatenate(members))
    return [x[back] for x in everywhere], per_group


@pytest.mark.parametrize("algorithm", DTYPES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_placement(name: str, algorithm: str) -> None:
    placement = PLACEMENTS[name]
    mesh, members = placement.mesh(), placement.members()
    work = [
        (case, *stacked_inputs(case, members, dtype))
        for case in CASES
        for dtype in DTYPES[algorithm]
        if dtype in case.dtypes and placement.takes(case) and served(case, placement, algorithm)
    ]

    def per_rank(args: list) -> list:
        return [
            apply(case, placement, algorithm, x) for (case, *_), x in zip(work, args, strict=True)
        ]

    args = [[x.reshape(*placement.sizes, *x.shape[1:]) for x in xs] for _, xs, _ in work]
    results = spmd(per_rank, mesh)(put(mesh, args))
    for (case, _, per_group), outs in zip(work, results, strict=True):
        outs = [np.asarray(y).reshape(8, *y.shape[len(placement.sizes) :]) for y in outs]
        for group, arrays in zip(members, per_group, strict=True):
            check(case, len(group), arrays, [y[group] for y in outs])
    assert {case.op for case, *_ in work} >= {"all_reduce"}
    if placement.groups is None and algorithm == "direct":
        assert {case.op for case, *_ in work} == set(SPECS)


def apply(case: Case, placement: Placement, algorithm: str, arrays: list) -> Any:
    call = make_call(
        case.op,
        placement.axes,
        axis_index_groups=placement.groups,
        algorithm=algorithm,
        need_uniform=case.op != "all_reduce",
    )
    return _primitive.bind(case.spec, *arrays, call=call, **case.static(call.num_ranks))


def served(case: Case, placement: Placement, algorithm: str) -> bool:
    """Ragged ops by xla are num_ranks**2 selections: with 8 ranks XLA compiles them for a minute,
    with 4 (tests/ops/test_values.py) for seconds."""
    sizes = set(map(len, placement.members()))
    return algorithm == "direct" or case.index_arrays is None or max(sizes) <= 2
