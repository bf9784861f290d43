"""What goes wrong in one process, and what all others see. docs/reliability.md has the table."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import cache
from pathlib import Path

import pytest
from multiprocess.jobs import Result, run

TIMEOUT_S = 3.0
SOON_S = 2.0
"""A death or a mismatch is known within this."""
SLACK_S = 2.0
"""What a busy machine may add to a deadline."""
VICTIM, OTHERS = 1, (0, 2)

FATES = {
    "kill": r" \(pid \d+\) has died",
    "exit": r" \(pid \d+\) has died",
    "raise": r" has left \(OwnBug: a bug of the program\)",
    "quit": r" has left \(its program has ended\)",
}
"""What follows "process 1"."""
GONE = {how: "process 1" + words for how, words in FATES.items()}
GONE["stop"] = rf"timed out after {TIMEOUT_S:g} s"
DOCUMENTED = ("JaxRuntimeError: ", "ValueError: ")
"""By `all_reduce` and docs/reliability.md."""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Of jcoll's: other programs of the machine have files there, too."""

    def ours() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "jcoll" in name}

    before = ours()
    yield
    assert ours() <= before


# One of each is enough for every run.
OFTEN = [("kill", "inside"), ("raise", "start"), ("stop", "between"), ("quit", "inside")]
AT_END = [("kill", "end"), ("exit", "end"), ("raise", "end")]
CASES = [
    pytest.param(how, when, marks=[] if (how, when) in OFTEN else pytest.mark.slow)
    for how, when in [*((h, w) for h in GONE for w in ("start", "between", "inside")), *AT_END]
]


@pytest.mark.parametrize(("how", "when"), CASES)
def test_gone(how: str, when: str, tmp_path: Path) -> None:
    """Process 1 of 3 dies, ends or stops: the others get an exception, of which each has a report,
    and go on by themselves."""
    results = run(
        "faults.py",
        how,
        when,
        num_processes=3,
        wait_for=list(OTHERS),
        env={"JCOLL_TIMEOUT": str(TIMEOUT_S), "JCOLL_REPORT_DIR": str(tmp_path)},
    )
    assert not any(is_alive(r.pid) for r in results)
    wrong_at = results[VICTIM].report("wrong")["at"]
    for i in OTHERS:
        assert results[i].code == 0, results[i]
        failed = results[i].report("failed")
        if when == "end" or (how, when) == ("quit", "inside"):
            assert failed["text"] == ""  # It has done its part of all that it had dispatched.
            continue
        assert re.search(GONE[how], failed["text"]), failed["text"]
        assert failed["text"].startswith(DOCUMENTED), failed["text"]
        assert re.search(r"jcoll\.all_reduce over axis 'x' .*faults\.py:\d+", failed["text"])
        assert "rank 1 (process 1)" in failed["text"], failed["text"]
        (path,) = tmp_path.glob(f"jcoll-cpu-*-{results[i].pid}.json")
        reported = [failure["error"] for failure in json.loads(path.read_text())["failures"]]
        assert any(error in failed["text"] for error in reported), reported
        seconds = failed["at"] - wrong_at
        print(f"{how} {when}: process {i} after {seconds:.2f} s: {failed['text']}")
        if how == "stop":
            assert TIMEOUT_S - 1 < seconds < TIMEOUT_S + SLACK_S
        else:
            assert seconds < SOON_S
        assert results[i].report("goes_on")["text"] == ""


COORDINATOR = [pytest.param(h, marks=[] if h == "raise" else pytest.mark.slow) for h in FATES]


@pytest.mark.parametrize("how", COORDINATOR)
def test_coordinator_gone(how: str) -> None:
    """Process 0, by which JAX's processes know each other: they see jcoll's exception before JAX
    aborts them, which it does if that process is gone without a word."""
    results = run(
        "faults.py",
        *(how, "between", "0"),
        num_processes=3,
        wait_for=[1, 2],
        env={"JCOLL_TIMEOUT": str(TIMEOUT_S)},
    )
    wrong_at = results[0].report("wrong")["at"]
    is_aborted = how in ("kill", "exit")
    for result in results[1:]:
        assert result.code == (-signal.SIGABRT if is_aborted else 0), result
        failed = result.report("failed")
        assert "rank 0 (process 0)" in failed["text"], failed["text"]
        assert re.search("process 0" + FATES[how], failed["text"]), failed["text"]
        assert failed["at"] - wrong_at < SOON_S
        if not is_aborted:
            assert result.report("goes_on")["text"] == ""


BEFORE = [pytest.param(how, marks=[] if how == "kill" else pytest.mark.slow) for how in GONE]


@pytest.mark.parametrize("how", BEFORE)
def test_gone_before_they_knew_each_other(how: str) -> None:
    """The others learn it while they wait for its introduction."""
    results = run(
        "faults.py",
        how,
        "before",
        num_processes=3,
        wait_for=list(OTHERS),
        env={"JCOLL_TIMEOUT": str(TIMEOUT_S)},
    )
    wrong_at = results[VICTIM].report("wrong")["at"]
    words = FATES.get(how, rf"not introduced itself within {TIMEOUT_S:g} s")
    for i in OTHERS:
        assert results[i].code == 0, results[i]
        failed = results[i].report("failed")
        assert "process 1 " in failed["text"] and re.search(words, failed["text"]), failed["text"]
        seconds = failed["at"] - wrong_at
        print(f"{how} before: process {i} after {seconds:.2f} s: {failed['text']}")
        # When it goes, the others may not have started to wait.
        assert seconds < (TIMEOUT_S + 2 * SLACK_S if how == "stop" else SOON_S)


# Ranks that do not make the same call: words of process 1's call, and of the others'.
MISMATCHES = {
    "reduction": ("float32[8], max", "float32[8], sum"),
    "op": ("all_gather", "broadcast"),
    "dtype": ("int32[8], sum", "float32[8], sum"),
    "shape": ("float32[5], sum", "float32[6], sum"),
    "root": ("sum, root 1", "sum, root 2"),
    "algorithm": ("sum, ring", "sum, tree"),
    "plan": ("sum, own_star", "sum, own_star"),
    "groups": ("all_gather", "all_gather"),
    "order": ("all_gather", "float32[8], min"),
}
MISMATCHES |= {f"inside_{name}": words for name, words in MISMATCHES.items()}
MISMATCHES |= {
    "at_end": MISMATCHES["shape"],
    "branch": ("float32[8], sum", "float32[8], max"),
    "one_more": ("float32[8], max", "float32[8], min"),
    "iterations": ("float32[8], max", "float32[8], sum"),
    "different_program": ("all_gather", "float32[8], min"),
}
# Found by their waiting for each other in different calls. The next call may fail once more: a
# process may have gone on to it when the last one sees its own failure.
AT_OTHER_PLACES = ("branch", "one_more", "iterations", "different_program")


@cache
def mismatches() -> list[Result]:
    return run("mismatches.py", num_processes=3, env={"JCOLL_TIMEOUT": "20"})


@pytest.mark.parametrize("case", list(MISMATCHES))
def test_mismatch(case: str) -> None:
    """Every rank, the odd one too, gets an exception with both calls; all go on afterwards."""
    odd, others = MISMATCHES[case]
    call = r"rank \d \(process {}\) made jcoll\.[a-z_]+ over axis 'x' \([^)]*{}[^)]*\)"
    call += r" called at \S*mismatches\.py:(\d+)"
    odd_call = call.format("1", re.escape(odd) if "[" in odd or "," in odd else "")
    others_call = call.format("[02]", re.escape(others) if "[" in others or "," in others else "")
    # There is nothing to be found before the last one comes, and compiling takes its time.
    began = max(result.report(case)["began"] for result in mismatches())
    for result in mismatches():
        assert result.code == 0, result
        report = result.report(case)
        seconds = report["ended"] - began
        print(f"{case}: process {result.process} after {seconds:.2f} s")
        assert seconds < SOON_S
        assert report["texts"], "no error"
        for text in report["texts"]:
            assert "do not make the same call" in text, text
            assert odd.split("[")[0].split(",")[0] in text
            assert ("The two read alike. What differs is" in text) == (odd == others)
            one, other = re.search(odd_call, text), re.search(others_call, text)
            assert one and other and one[1] != other[1], text
        if case != "at_end":
            after = result.report("after " + case)["texts"]
            assert len(after) <= (case in AT_OTHER_PLACES), after
