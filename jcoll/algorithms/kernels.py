"""What is a kernel of the CUDA runtime (cuda/kernels) instead of a plan. No jax."""

from __future__ import annotations

BY_OP: dict[str, tuple[str, ...]] = {
    "all_reduce": ("direct", "one_shot", "two_shot", "multimem"),
    "reduce_scatter": ("direct", "one_shot"),
    "all_gather": ("direct", "one_shot"),
    "all_to_all": ("direct", "one_shot"),
    "ragged_all_to_all": ("direct", "one_shot"),
    "broadcast": ("direct", "one_shot"),
    "barrier": ("direct",),
}
"""The algorithms that kernels follow, by op. "direct": the kernel that the runtime thinks best for
the size. The other ops are made of these, see jcoll/ops/_cuda.py."""

ONLY_ON_CUDA = ("multimem",)
"""Algorithms that are no plans, so that no other platform has them: multimem has the NVLink switch
add what it fetches from all ranks."""

MAX_RANKS = 72
"""What a kernel's table of peers holds: kMaxRanks in cuda/kernels/peer_table.h."""


def only_on_cuda(op: str) -> list[str]:
    return [name for name in BY_OP.get(op, ()) if name in ONLY_ON_CUDA]
