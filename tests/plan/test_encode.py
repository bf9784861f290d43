"""Encoding and decoding: exact round trips; whatever is damaged is refused, never misread."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.handmade import copy, plan, recv, send

from jcoll.algorithms.registry import all_algorithms, plan_for
from jcoll.plan import encode as module
from jcoll.plan.encode import decode, encode, encode_bytes
from jcoll.plan.ir import Plan, PlanError
from jcoll.plan.ops import OPS

HEADER = len(module._Header._fields)
SMALL = plan("gather", [recv("o0", 1), copy("o1", "i0")], [send("i0", 0)], root=0)


def assert_same(a: Plan, b: Plan) -> None:
    for field in fields(Plan):
        if field.name != "steps":
            assert getattr(a, field.name) == getattr(b, field.name)
    assert a.steps.dtype == b.steps.dtype and np.array_equal(a.steps, b.steps)


@pytest.mark.parametrize("a", all_algorithms(), ids=lambda a: f"{a.op}-{a.name}")
def test_round_trip(a):
    for n in (n for n in (1, 2, 5, 8) if a.supports(n) is None):
        p = plan_for(a.op, a.name, n, n - 1 if OPS[a.op].rooted else 0)
        words = encode(p)
        assert_same(decode(words), p)
        assert_same(decode(encode_bytes(p)), p)
        assert np.array_equal(encode(decode(words)), words)


@pytest.mark.parametrize("name", ["", "a", "abcd", "größer", "x" * 100])
def test_names(name):
    assert_same(
        decode(encode_bytes(replace(SMALL, algorithm=name))), replace(SMALL, algorithm=name)
    )


def test_the_layout_is_the_documented_one():
    words = encode(SMALL)
    assert words.dtype == np.dtype("<i4")
    assert words[:HEADER].tobytes()[:4] == b"JCPL"
    assert words[1:HEADER].tolist() == [1, len(words), 6, 2, 0, 1, 0, 3, 2]
    assert words[HEADER : HEADER + 2].tobytes() == b"handmade"
    assert words[HEADER + 2 : HEADER + 5].tolist() == [0, 2, 3]
    assert words[HEADER + 5 :].tolist() == SMALL.steps.ravel().tolist()


def test_every_op_has_a_number():
    assert set(module.OP_IDS) == set(OPS)
    assert len(set(module.OP_IDS.values())) == len(OPS)


def test_decoded_steps_can_be_changed():
    decode(encode_bytes(SMALL)).steps[0, 0] = 0


def with_word(i: int, value: int) -> np.ndarray:
    words = encode(SMALL).copy()
    words[i] = value
    return words


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 words that do not begin like a plan"),
        (b"abc", "3 bytes, which are not words of 4"),
        (b"JCPL", "1 words that do not begin"),
        (bytes(400), "100 words that do not begin like a plan"),
        (encode(SMALL)[:-1], "cut off or damaged"),
        (np.append(encode(SMALL), np.int32(0)), "cut off or damaged"),
        (encode(SMALL).astype(np.int64), "int64[39]; it must be int32[words]"),
        (encode(SMALL)[None], "int32[1, 39]; it must be"),
        (with_word(1, 2), "version 2; this jcoll reads version 1"),
        (with_word(3, 8), "there is no op 8"),
        (with_word(3, -1), "there is no op -1"),
        (with_word(4, -1), "negative num_ranks"),
        (with_word(4, 3), "cut off or damaged"),
        (with_word(5, 2), "root=2 is not a rank"),
        (with_word(6, 0), "chunks_per_block=0"),
        (with_word(8, 2**31 - 1), "cut off or damaged"),
        (with_word(HEADER, -1), "not UTF-8"),
        (with_word(HEADER + 3, 1), "first_step in the encoded plan contradicts its steps"),
        (with_word(HEADER + 5 + 1, 9), "there is no kind 9"),
        (with_word(HEADER + 5 + 6, 2), "dst is not inside output"),
    ],
)
def test_damaged_plans(data, text):
    with pytest.raises(PlanError) as error:
        decode(data)
    assert text in str(error.value)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_word_is_refused_or_means_what_it_says(data):
    words = encode(SMALL).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(words) - 1))
        words[i] = data.draw(st.integers(-2, 9) | st.integers(-(2**31), 2**31 - 1))
    try:
        decoded = decode(words)
    except PlanError:
        return
    again = encode(decoded)
    without_name = np.r_[0 : HEADER - 1, HEADER + words[HEADER - 1] : len(words)]
    if len(again) == len(words):
        assert np.array_equal(again[without_name], words[without_name])


def test_malformed_plans_are_not_encoded():
    with pytest.raises(PlanError, match="root=7"):
        encode(replace(SMALL, root=7))
