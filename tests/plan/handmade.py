"""Plans written by hand: `plan("all_gather", [steps of rank 0], [steps of rank 1], ...)`.

A chunk is "i0", "o1", "s2": the buffer's letter and the number.
"""

from __future__ import annotations

import numpy as np

from jcoll.plan.ir import NO_PEER, Kind, Plan, Step

Part = tuple[int, ...]  # A Step without its rank.


def _ref(text: str) -> tuple[int, int]:
    return "ios".index(text[0]), int(text[1:])


def send(src: str, peer: int, count: int = 1) -> Part:
    return (Kind.SEND, peer, *_ref(src), 0, 0, count)


def recv(dst: str, peer: int, count: int = 1) -> Part:
    return (Kind.RECV, peer, 0, 0, *_ref(dst), count)


def recv_reduce(dst: str, src: str, peer: int, count: int = 1) -> Part:
    return (Kind.RECV_REDUCE, peer, *_ref(src), *_ref(dst), count)


def copy(dst: str, src: str, count: int = 1) -> Part:
    return (Kind.COPY, NO_PEER, *_ref(src), *_ref(dst), count)


def reduce(dst: str, src: str, count: int = 1) -> Part:
    return (Kind.REDUCE, NO_PEER, *_ref(src), *_ref(dst), count)


def plan(op: str, *ranks: list[Part], scratch: int = 0, chunks: int = 1, root: int = 0) -> Plan:
    rows = [(rank, *part) for rank, parts in enumerate(ranks) for part in parts]
    steps = np.array(rows, np.int32).reshape(-1, len(Step._fields))
    return Plan(op, "handmade", len(ranks), root, chunks, scratch, steps)
