"""That the table of seeded bugs fits the kernels; `make mutants` is what compiles and runs them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import mutate
from seeded_bugs import BUGS, CALLS, TIMEOUT, Bug, Place


def test_every_place_is_in_the_sources_once():
    changed = mutate.changed_files()
    for number, bug in enumerate(BUGS, start=1):
        assert changed[mutate.KERNELS / bug.place.file].count(f"Seeded({number})") == 1, bug.name
    names = [bug.name for bug in BUGS]
    assert len(set(names)) == len(names)


def test_kinds_of_text_agree():
    for bug in BUGS:
        assert bug.place.is_statement == bug.text.endswith(";"), bug.name
        assert bug.text != bug.place.text, bug.name


def make_bug(text: str, new: str, context: str = "") -> Bug:
    return Bug(text, Place("a.cu", text, context), new, CALLS, (TIMEOUT,))


def test_bugs_of_one_place_are_alternatives():
    seeded = mutate.seed(
        "if (a < b) f();", {1: make_bug("a < b", "a"), 2: make_bug("a < b", "b")}, ""
    )
    assert seeded == "if ((Seeded(2) ? (b) : ((Seeded(1) ? (a) : (a < b))))) f();"


def test_statements_and_contexts():
    bugs = {3: make_bug("f();", ";", context="g(); ")}
    assert mutate.seed("f(); g(); f();", bugs, "") == "f(); g(); if (Seeded(3)) { ; } else { f(); }"


@pytest.mark.parametrize(
    ("text", "bugs"),
    [
        ("a < c", {1: make_bug("a < b", "a")}),
        ("a < b, a < b", {1: make_bug("a < b", "a")}),
        ("a < b + c", {1: make_bug("a < b", "a"), 2: make_bug("b + c", "b")}),
    ],
    ids=["missing", "twice", "overlapping"],
)
def test_a_place_that_does_not_fit_fails(text: str, bugs: dict[int, Bug]):
    with pytest.raises(mutate.PatchError, match=r"a\.cu: "):
        mutate.seed(text, bugs, "a.cu")


def test_a_bug_that_hides_is_looked_for_again(monkeypatch, tmp_path):
    ends = {0: [mutate.PASSED], 1: [mutate.VALUES], 2: [TIMEOUT]}
    monkeypatch.setattr(mutate, "run", lambda source, test, number, limit, tries: ends[tries])
    bug = make_bug("a < b", "a")  # Which wants a time-out.
    assert mutate.find(tmp_path, bug, 1, 9.0) == (True, [ends[0], ends[1], ends[2]])


@pytest.mark.parametrize(
    ("end", "num_tries"), [(mutate.PASSED, mutate.NUM_TRIES), (mutate.HANG, 1)]
)
def test_a_bug_that_stays_hidden_is_missed(monkeypatch, tmp_path, end: str, num_tries: int):
    monkeypatch.setattr(mutate, "run", lambda *args: [end])
    found, ends = mutate.find(tmp_path, make_bug("a < b", "a"), 1, 9.0)
    assert (found, ends) == (False, [[end]] * num_tries)
