"""Good plans pass; for every rule a bad plan fails, with a text that says where and why."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from plan.handmade import Part, copy, plan, recv, recv_reduce, reduce, send

from jcoll.algorithms.registry import plan_for
from jcoll.plan.ir import Plan, PlanError, Step
from jcoll.plan.ops import OPS
from jcoll.plan.verify import verify

# Both ranks send their input, then add what comes.
EXCHANGE: list[list[Part]] = [
    [send("i0", 1), recv_reduce("o0", "i0", 1)],
    [send("i0", 0), recv_reduce("o0", "i0", 0)],
]


def exchange() -> Plan:
    return plan("all_reduce", *EXCHANGE)


def changed(p: Plan, row: int, **fields: int) -> Plan:
    steps = p.steps.copy()
    for field, value in fields.items():
        steps[row, Step._fields.index(field)] = value
    return replace(p, steps=steps)


def fails(p: Plan, *texts: str) -> None:
    with pytest.raises(PlanError) as error:
        verify(p)
    missing = [text for text in texts if text not in str(error.value)]
    assert not missing, f"{missing} not in:\n{error.value}"


GOOD = {
    "exchange": exchange(),
    "alone": plan("all_reduce", [copy("o0", "i0")]),
    "through scratch": plan(
        "all_reduce",
        [recv("s0", 1), copy("o0", "i0"), reduce("o0", "s0"), send("o0", 1)],
        [send("i0", 0), recv("o0", 0)],
        scratch=1,
    ),
    "two chunks in one message": plan(
        "broadcast",
        [recv("o0", 1, 2)],
        [send("i0", 0, 2), copy("o0", "i0", 2)],
        chunks=2,
        root=1,
    ),
    "all_to_all": plan(
        "all_to_all",
        [send("i1", 1), copy("o0", "i0"), recv("o1", 1)],
        [send("i0", 0), copy("o1", "i1"), recv("o0", 0)],
    ),
    "reduce, the root last": plan("reduce", [send("i0", 1)], [recv_reduce("o0", "i0", 0)], root=1),
    "gather": plan("gather", [copy("o0", "i0"), recv("o1", 1)], [send("i0", 0)]),
    "scatter": plan("scatter", [copy("o0", "i0"), send("i1", 1)], [recv("o0", 0)]),
    # The accumulator is still offered to 1, but only read; the result goes elsewhere.
    "offered accumulator": plan(
        "all_reduce",
        [copy("s0", "i0"), send("s0", 1), recv_reduce("o0", "s0", 1)],
        [send("i0", 0), recv_reduce("o0", "i0", 0)],
        scratch=1,
    ),
    # Rank 0's second use of s0 comes after rank 1's answer, sent after rank 1 has read it.
    "reuse after an answer": plan(
        "all_gather",
        [copy("s0", "i0"), send("s0", 1), recv("s0", 1), copy("o1", "s0"), copy("o0", "i0")],
        [recv("o0", 0), copy("o1", "i0"), send("o1", 0)],
        scratch=1,
    ),
    # The same, known through a third rank.
    "reuse after an answer through another": plan(
        "broadcast",
        [copy("s0", "i0"), send("s0", 1), recv("s0", 2), copy("o0", "i0")],
        [recv("o0", 0), send("o0", 2)],
        [recv("o0", 1), send("o0", 0)],
        scratch=1,
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_plans_pass(name):
    verify(GOOD[name])


# a: form


@pytest.mark.parametrize(
    ("row", "fields", "text"),
    [
        (0, {"rank": -1}, "-1 is not a rank of 2"),
        (3, {"rank": 2}, "2 is not a rank of 2"),
        (0, {"rank": 1}, "Sort the steps by rank"),
        (1, {"kind": 5}, "there is no kind 5"),
        (1, {"count": 0}, "count=0; it must be at least 1"),
        (0, {"peer": 2}, "its peer 2 is not a rank of 2"),
        (0, {"peer": -1}, "its peer -1 is not a rank of 2"),
        (0, {"peer": 0}, "its peer is the rank itself"),
        (1, {"kind": 3}, "a step without peer must have peer=-1"),
        (0, {"dst_chunk": 1}, "dst is not used by this kind"),
        (1, {"src_buffer": 3}, "its src_buffer is not one of 0 to 2"),
        (1, {"src_chunk": 1}, "src is not inside input, which has 1 chunks"),
        (1, {"src_chunk": -1}, "src is not inside input"),
        (1, {"dst_chunk": 1}, "dst is not inside output, which has 1 chunks"),
        (1, {"dst_buffer": 2}, "dst is not inside scratch, which has 0 chunks"),
        (0, {"count": 2**31 - 1}, "src is not inside input"),
        (1, {"src_buffer": 0, "dst_buffer": 0}, "it writes to INPUT, which is read only"),
    ],
)
def test_malformed_steps(row, fields, text):
    fails(changed(exchange(), row, **fields), "handmade all_reduce of 2 ranks: rank ", text)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_ranks": 0}, "num_ranks=0; it must be at least 1"),
        ({"root": 2}, "root=2 is not a rank"),
        ({"root": -1}, "root=-1; it must be at least 0"),
        ({"chunks_per_block": 0}, "chunks_per_block=0"),
        ({"num_scratch": -1}, "num_scratch=-1"),
        ({"op": "sum"}, "there is no such op"),
        ({"steps": np.zeros((2, 7), np.int32)}, "it must be int32[steps, 8]"),
        ({"steps": np.zeros((2, 8), np.int64)}, "int64[2, 8]"),
    ],
)
def test_malformed_headers(fields, text):
    fails(replace(exchange(), **fields), text)


@pytest.mark.parametrize(
    "step", [copy("o1", "o0", 2), copy("o0", "o0"), reduce("o0", "o0"), reduce("o0", "o1", 2)]
)
def test_overlapping_operands(step):
    fails(plan("all_reduce", [copy("o0", "i0", 3), step], chunks=3), "src and dst overlap")


def test_only_the_very_accumulator_may_be_written():
    start = [copy("s0", "i0", 2), recv_reduce("s1", "s0", 1, 2)]
    p = plan("all_reduce", start, [send("i0", 0, 2)], chunks=2, scratch=3)
    fails(p, "step 1 (recv_reduce scratch[1..2]", "src and dst overlap")


@pytest.mark.parametrize("op", [op for op, spec in OPS.items() if not spec.reduces])
@pytest.mark.parametrize("step", [recv_reduce("o0", "i0", 1), reduce("o0", "i0")])
def test_ops_that_do_not_reduce(op, step):
    fails(plan(op, [copy("o0", "i0"), step], [send("i0", 0)]), f"{op} does not reduce")


# b: messages


def test_a_send_that_nobody_receives():
    p = plan("all_reduce", [*EXCHANGE[0], send("o0", 1)], EXCHANGE[1])
    fails(p, "rank 0, step 2 (send output[0] to 1): meets no receive", "rank 1 has 1 from rank 0")


def test_a_receive_that_nobody_sends():
    p = plan("all_reduce", EXCHANGE[0], [*EXCHANGE[1], recv("o0", 0)])
    fails(p, "rank 1, step 2 (recv output[0] from 0): meets no send", "rank 0 has 1 to rank 1")


def test_a_send_to_another_rank():
    p = plan("broadcast", [send("i0", 1), copy("o0", "i0")], [], [recv("o0", 0)])
    fails(p, "rank 0, step 0 (send input[0] to 1): meets no receive")


def test_counts_that_differ():
    p = plan("all_reduce", [send("i0", 1, 2)], [recv("o0", 0)], chunks=2)
    fails(p, "step 0 (send input[0..1] to 1): sends 2 chunks", "step 0 of rank 1", "takes 1")


def test_deadlock_names_who_waits_for_what():
    p = plan(
        "all_gather",
        [recv("o1", 1), send("i0", 1), copy("o0", "i0")],
        [recv("o0", 0), send("i0", 0), copy("o1", "i0")],
    )
    fails(
        p,
        "deadlock of ranks 0-1",
        "rank 0, step 0 (recv output[1] from 1) waits for a message: rank 1, step 1 (send input[0]",
        "rank 1, step 0 (recv output[0] from 0) waits for a message: rank 0, step 1",
    )


def test_one_message_in_flight():
    # Each sends two before it takes any: only room for two messages would let them go on.
    def both(peer: int) -> list[Part]:
        sends = [send("i0", peer), send("i1", peer)]
        return [*sends, copy(f"o{2 - 2 * peer}", "i0", 2), recv(f"o{2 * peer}", peer), last(peer)]

    def last(peer: int) -> Part:
        return recv(f"o{2 * peer + 1}", peer)

    p = plan("all_gather", both(1), both(0), chunks=2)
    fails(p, "deadlock of ranks 0-1", "waits for its message before this to be taken: rank 1, step")


def test_long_deadlocks_are_cut():
    ring = [[recv("s0", (r + 1) % 20), send("i0", (r - 1) % 20)] for r in range(20)]
    fails(plan("all_reduce", *ring, scratch=1), "deadlock of ranks 0-19", "and 12 more")


# c: values


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([copy("o0", "s1")], "step 0 (copy output[0] = scratch[1]): reads scratch[1], to which"),
        ([reduce("o0", "i0")], "reads output[0], to which nothing has been written"),
        (
            [copy("s0", "i0"), copy("o0", "s0", 2)],
            "step 1 (copy output[0..1] = scratch[0..1]): rea",
        ),
    ],
)
def test_reading_what_was_never_written(steps, text):
    fails(plan("all_reduce", steps, chunks=2, scratch=2), text)


def test_sending_what_was_never_written():
    fails(plan("all_gather", [send("o1", 1)], [recv("o0", 0)]), "reads output[1], to which nothing")


def test_only_the_root_has_input():
    p = plan("broadcast", [recv("o0", 1)], [send("i0", 0), copy("o0", "i0")])
    fails(p, "rank 1, step 0 (send input[0] to 0): reads input[0], to which nothing")


def test_reducing_different_chunks():
    p = plan("all_reduce", [recv_reduce("o0", "i0", 1)], [send("i1", 0)], chunks=2)
    fails(p, "step 0", "different chunks into output[0]: input[0] of rank 0 and input[1] of rank 1")


def test_reducing_a_contribution_twice():
    p = plan("all_reduce", [*EXCHANGE[0], reduce("o0", "i0")], EXCHANGE[1])
    fails(
        p,
        "rank 0, step 2 (reduce output[0] = output[0] + input[0]): adds to output[0]",
        "the contribution of rank 0 twice: input[0] of ranks 0-1 and input[0] of rank 0",
    )


def test_the_chunk_of_a_long_range_is_named():
    first = [send("i0", 1, 3), copy("o0", "i0", 3), reduce("o2", "i2"), recv_reduce("o0", "o0", 1)]
    p = plan("all_reduce", first, [recv("o0", 0, 3), send("o0", 0)], chunks=3)
    fails(p, "rank 0, step 2", "adds to output[2] the contribution of rank 0 twice")


# d: result


def test_a_missing_contribution():
    p = plan("all_reduce", [copy("o0", "i0"), send("i0", 1)], EXCHANGE[1][1:])
    fails(p, "rank 0, at the end: output[0] holds input[0] of rank 0; missing: 1", "promises input")


def test_an_output_that_is_never_written():
    p = plan("all_gather", [copy("o0", "i0"), recv("o1", 1)], [copy("o1", "i0"), send("i0", 0)])
    fails(
        p, "rank 1, at the end: output[0] holds nothing", "all_gather promises input[0] of rank 0"
    )


def test_the_wrong_block():
    p = plan(
        "all_to_all",
        [send("i0", 1), copy("o0", "i0"), recv("o1", 1)],
        [send("i0", 0), copy("o1", "i1"), recv("o0", 0)],
    )
    fails(
        p, "rank 1, at the end: output[0] holds input[0] of rank 0", "promises input[1] of rank 0"
    )


def test_ranks_that_are_promised_nothing_may_hold_anything():
    first = [recv_reduce("o0", "i0", 1)]
    verify(plan("reduce", first, [send("i0", 0), copy("o0", "i0")]))


# e: overwriting


def test_overwriting_what_may_still_be_read():
    p = plan(
        "all_reduce",
        [copy("o0", "i0"), send("o0", 1), recv_reduce("o0", "o0", 1)],
        [send("i0", 0), recv_reduce("o0", "i0", 0)],
    )
    fails(
        p,
        "rank 0, step 2 (recv_reduce output[0] = output[0] + message from 1): overwrites output[0]",
        "step 1 (send output[0] to 1) offered and rank 1 may not have read yet, at its step 1",
    )


def test_the_reader_may_not_even_have_begun():
    p = plan(
        "broadcast",
        [recv("o0", 1)],
        [copy("s0", "i0"), send("s0", 0), copy("s0", "i0"), copy("o0", "i0")],
        scratch=1,
        root=1,
    )
    fails(
        p, "rank 1, step 2", "overwrites scratch[0]", "rank 0 may not have read yet, at its step 0"
    )


def test_one_message_in_flight_is_no_proof_of_reading():
    """The second SEND waits for the first message to be taken, where there is room for only one."""
    p = plan(
        "broadcast",
        [copy("s0", "i0"), send("s0", 1), send("i0", 1), copy("s0", "i0"), copy("o0", "i0")],
        [recv("s0", 0), recv("o0", 0)],
        scratch=1,
    )
    fails(p, "rank 0, step 3 (copy scratch[0] = input[0]): overwrites scratch[0]")


def test_an_answer_sent_before_the_reading_proves_nothing():
    p = plan(
        "all_gather",
        [copy("s0", "i0"), send("s0", 1), recv("s0", 1), copy("o1", "s0"), copy("o0", "i0")],
        [send("i0", 0), recv("o0", 0), copy("o1", "i0")],
        scratch=1,
    )
    fails(p, "rank 0, step 2 (recv scratch[0] from 1): overwrites scratch[0]")


def test_every_reader_counts():
    """Rank 1 answers, rank 2 does not."""
    p = plan(
        "broadcast",
        [copy("s0", "i0"), send("s0", 2), send("s0", 1), recv("s0", 1), copy("o0", "i0")],
        [recv("o0", 0), send("o0", 0)],
        [recv("o0", 0)],
        scratch=1,
    )
    fails(p, "rank 0, step 3", "overwrites scratch[0]", "rank 2 may not have read yet")


def test_a_part_of_an_offered_range():
    p = plan(
        "broadcast",
        [copy("o0", "i0", 3), send("o0", 1, 3), copy("o1", "i1")],
        [recv("o0", 0, 3)],
        chunks=3,
    )
    fails(p, "rank 0, step 2", "overwrites output[1], which step 1 (send output[0..2] to 1)")


def test_large_plans_take_seconds_at_most():
    p = plan_for("all_reduce", "ring", 64)
    start = time.process_time()
    verify(p)
    assert time.process_time() - start < 2  # Takes 0.07.


def test_steps_are_numbered_within_their_rank():
    ranks = [
        EXCHANGE[0],
        [*EXCHANGE[1], *itertools.repeat(copy("s0", "i0"), 3), reduce("o0", "s0")],
    ]
    fails(plan("all_reduce", *ranks, scratch=1), "rank 1, step 5 (reduce")
