"""Which SEND meets which receive, and an order in which all steps can be done. No jax."""

from __future__ import annotations

from typing import Any

import numpy as np

from jcoll.errors import ranges
from jcoll.plan.form import where
from jcoll.plan.ir import Kind, Plan, PlanError, Step

Array = np.ndarray[Any, np.dtype[Any]]

_LISTED = 8  # Waiting ranks that an error text names.


def partners(plan: Plan) -> list[int]:
    """For the row of each SEND that of the receive that takes it, and the reverse; local steps: -1.

    Raises PlanError if a message is not received, or not sent, or differs in its count.
    """
    sends, send_keys = _by_connection(plan, sending=True)
    receives, receive_keys = _by_connection(plan, sending=False)
    _check_paired(plan, sends, send_keys, receives, receive_keys)
    count = plan.steps[:, Step._fields.index("count")]
    unequal = np.flatnonzero(count[sends] != count[receives])
    if len(unequal):
        row, other = int(sends[unequal[0]]), int(receives[unequal[0]])
        raise PlanError(
            f"{where(plan, row)}: sends {count[row]} chunks, but they meet step "
            f"{step_number(plan, other)} of rank {plan.steps[other, 0]} "
            f"({step_at(plan, other)}), which takes {count[other]}."
        )
    partner = np.full(len(plan.steps), -1)
    partner[sends], partner[receives] = receives, sends
    return partner.tolist()


def execution_order(plan: Plan, partner: list[int]) -> list[int]:
    """All rows in an order in which they can be done with one message in flight per connection.

    Every step waits for at most one step of another rank: a receive for its message, a SEND for the
    receive of the message before it on the same connection. So nothing that a rank does can take
    from another what it waits for, and if one order ends, all do (Kahn 1974); if one gets stuck,
    all get stuck at the same steps, and PlanError names them.
    """
    needs = _needs(plan, partner)
    following, end = plan.first_step[:-1].tolist(), plan.first_step[1:].tolist()
    waiting = [-1] * len(needs)  # Row -> the rank that waits for it.
    done = bytearray(len(needs))
    order: list[int] = []
    ready = list(range(plan.num_ranks))
    while ready:
        rank = ready.pop()
        row = following[rank]
        while row < end[rank]:
            need = needs[row]
            if need >= 0 and not done[need]:
                waiting[need] = rank
                break
            done[row] = 1
            order.append(row)
            if waiting[row] >= 0:
                ready.append(waiting[row])
            row += 1
        following[rank] = row
    if len(order) < len(needs):
        raise PlanError(_deadlock(plan, following, needs))
    return order


def step_number(plan: Plan, row: int) -> int:
    """The row's place among the steps of its rank."""
    return row - int(plan.first_step[plan.steps[row, 0]])


def step_at(plan: Plan, row: int) -> Step:
    return Step(*plan.steps[row].tolist())


def _by_connection(plan: Plan, *, sending: bool) -> tuple[Array, Array]:
    """(rows, keys) by connection, then time. A connection's key: sender * num_ranks + receiver."""
    rank, kind, peer = plan.steps.T[:3].astype(np.int64)
    kinds = [Kind.SEND] if sending else [Kind.RECV, Kind.RECV_REDUCE]
    rows = np.flatnonzero(np.isin(kind, kinds))
    key = rank * plan.num_ranks + peer if sending else peer * plan.num_ranks + rank
    by_key = rows[np.argsort(key[rows], kind="stable")]
    return by_key, key[by_key]


def _check_paired(
    plan: Plan, sends: Array, send_keys: Array, receives: Array, receive_keys: Array
) -> None:
    """Both sides list connections in one order: where they first differ, one has a step more."""
    common = min(len(sends), len(receives))
    differ = np.flatnonzero(send_keys[:common] != receive_keys[:common])
    i = int(differ[0]) if len(differ) else common
    if i == len(sends) == len(receives):
        return
    if i == len(receives) or (i < len(sends) and send_keys[i] < receive_keys[i]):
        row, problem = int(sends[i]), "meets no receive: rank {} has {} from rank {}"
        number = int(np.sum(receive_keys == send_keys[i]))
    else:
        row, problem = int(receives[i]), "meets no send: rank {} has {} to rank {}"
        number = int(np.sum(send_keys == receive_keys[i]))
    step = step_at(plan, row)
    raise PlanError(
        f"{where(plan, row)}: {problem.format(step.peer, number, step.rank)}, and they are taken.\n"
        "  The k-th send from a to b meets the k-th receive of b from a."
    )


def _needs(plan: Plan, partner: list[int]) -> list[int]:
    """For every row the row of another rank that must be done before it, or -1."""
    is_send = plan.steps[:, 1] == Kind.SEND
    needs = np.where(is_send, -1, np.array(partner, np.int64))
    sends, keys = _by_connection(plan, sending=True)
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    needs[sends[repeated + 1]] = np.array(partner, np.int64)[sends[repeated]]
    return needs.tolist()


def _deadlock(plan: Plan, following: list[int], needs: list[int]) -> str:
    stuck = [r for r in range(plan.num_ranks) if following[r] < plan.first_step[r + 1]]
    lines = [_waits(plan, following[r], needs[following[r]]) for r in stuck[:_LISTED]]
    if len(stuck) > _LISTED:
        lines.append(f"and {len(stuck) - _LISTED} more")
    ranks = ranges(stuck)
    return f"{plan.name}: deadlock of ranks {ranks}:\n  " + "\n  ".join(lines)


def _waits(plan: Plan, row: int, need: int) -> str:
    step, other = step_at(plan, row), step_at(plan, need)
    what = "a message" if Kind(step.kind).receives else "its message before this to be taken"
    return (
        f"rank {step.rank}, step {step_number(plan, row)} ({step}) waits for {what}: rank "
        f"{other.rank}, step {step_number(plan, need)} ({other})"
    )
