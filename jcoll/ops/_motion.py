"""Where the data of a collective go: what a runtime is told of an op."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Motion:
    """How a runtime gets from inputs to outputs; csrc/description.h has the contract.

    kind "blocks": `source_map[rank][block]` says where each output block comes from (v >= 0: block
    v % in_blocks of rank v // in_blocks; ZERO; or reduced(b): the reduction of all ranks' block b).
    Other kinds move rows and are described by `rows`.
    """

    kind: str
    in_blocks: int = 1
    out_blocks: int = 1
    source_map: Any = None
    reduce_op: str = ""
    nbytes_array: str = "in"  # Whose size is S, nccl-tests' size: the input's or the output's.
    rows: dict[str, int] = field(default_factory=dict)
    aliases: tuple[tuple[int, int], ...] = ()  # (input, output) pairs that may share a buffer.


ZERO = -1


def reduced(block: int) -> int:
    """The source_map entry for the reduction over all ranks of their block `block`."""
    return -2 - block
