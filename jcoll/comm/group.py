"""Groups of ranks on a collective's axes. No jax."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jcoll import errors


@dataclass(frozen=True)
class Groups:
    """How the positions 0..axis_size-1 on a collective's axes form groups.

    `members` is None for one group of all, else a tuple of groups, each a tuple of positions; the
    rank of a position is its index in its group.
    """

    axis_size: int
    members: tuple[tuple[int, ...], ...] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.axis_size,) if self.members is None else tuple(map(len, self.members))

    @property
    def uniform(self) -> bool:
        return len(set(self.sizes)) == 1

    @property
    def num_ranks(self) -> int:
        """Size of the largest group; of every group if they are uniform."""
        return max(self.sizes)

    def as_lists(self) -> list[list[int]]:
        """The groups, explicit also if there is only one."""
        if self.members is None:
            return [list(range(self.axis_size))]
        return [list(group) for group in self.members]

    def tables(self) -> tuple[list[int], list[int]]:
        """(group, rank) of every position; two empty lists for one group of all."""
        if self.members is None:
            return [], []
        group_of, rank_of = [0] * self.axis_size, [0] * self.axis_size
        for g, group in enumerate(self.members):
            for rank, position in enumerate(group):
                group_of[position], rank_of[position] = g, rank
        return group_of, rank_of


def make_groups(
    where: str,
    axis_size: int,
    axis_index_groups: Sequence[Sequence[int]] | None,
    *,
    need_uniform: bool,
) -> Groups:
    """Checks `axis_index_groups` as lax has it: every index of the axis in exactly one group.

    Raises ValueError for groups that overlap, miss an index, name one that does not exist, or
    differ in size where `need_uniform`; TypeError for indices that are not static integers.
    """
    if axis_index_groups is None:
        return Groups(axis_size)
    members = _as_tuples(where, axis_index_groups)
    flat = [i for group in members for i in group]
    given = f"axis_index_groups={[list(g) for g in members]}"
    fix = f"List every index 0..{axis_size - 1} exactly once."
    wrong = sorted({i for i in flat if not 0 <= i < axis_size})
    if wrong:
        raise ValueError(errors.text(where, f"{given} has {wrong}, not on the axis.", fix))
    twice = sorted({i for i in flat if flat.count(i) > 1})
    if twice:
        raise ValueError(errors.text(where, f"{given} overlap: {twice} is in two places.", fix))
    missing = sorted(set(range(axis_size)) - set(flat))
    if missing:
        raise ValueError(errors.text(where, f"{given} miss the indices {missing}.", fix))
    members = tuple(group for group in members if group)
    groups = Groups(axis_size, members)
    if need_uniform and not groups.uniform:
        problem = f"{given} have sizes {list(groups.sizes)}; this op needs groups of equal size."
        raise ValueError(errors.text(where, problem, "Use groups of equal size."))
    return groups


def _as_tuples(where: str, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(_as_index(i) for i in group) for group in groups)
    except TypeError as e:
        problem = f"axis_index_groups={groups!r} is not a sequence of sequences of integers ({e})."
        raise TypeError(errors.text(where, problem, "Pass static Python integers.")) from None


def _as_index(i: Any) -> int:
    if isinstance(i, bool):
        raise TypeError(f"{i} is a bool")
    return operator.index(i)
