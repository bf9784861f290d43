"""What the CUDA runtime does without a plan: by its kernels (cuda/kernels), by NCCL. No jax."""

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

BY_NCCL = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier")
"""The ops that have the algorithm "nccl": NCCL's own function, called by the CUDA runtime on XLA's
stream, and watched. It needs no memory that ranks reach of each other, so it serves across NVLink
domains too."""

ONLY_ON_CUDA = ("multimem", "nccl")
"""Algorithms that are no plans, so that no other platform has them: multimem has the NVLink switch
add what it fetches from all ranks."""

MAX_RANKS = 72
"""What a kernel's table of peers holds: kMaxRanks in cuda/kernels/peer_table.h."""


def only_on_cuda(op: str) -> list[str]:
    kernels = [name for name in BY_OP.get(op, ()) if name in ONLY_ON_CUDA]
    return [*kernels, "nccl"] if op in BY_NCCL else kernels
