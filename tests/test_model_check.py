"""That the check of the models of the CUDA protocols can fail; `make model-check` is it."""

import project_scripts
import pytest

model_check = project_scripts.load("model_check")

Case = model_check.Case
needs_spin = pytest.mark.skipif(
    model_check.missing_tools() is not None, reason=str(model_check.missing_tools())
)


@needs_spin
@pytest.mark.parametrize(
    "case",
    [
        Case("barrier", "N=2 THREADED=2"),
        Case("barrier", "N=2 THREADED=2", "BUG_EQUALITY", model_check.DEADLOCK),
        Case("ll", "LINES=2", "BUG_SECOND_FLAG_UNCHECKED", model_check.ASSERTION),
        Case("ll", "LINES=2", "BUG_READS_ROOT_ONLY", model_check.OVERRUN),
        Case("timeout", "THREADED=2", "BUG_RETRIES", model_check.LIVELOCK, progress=True),
    ],
    ids=str,
)
def test_verdict(case):
    result = model_check.search(case)
    assert result.verdict == case.expected, result.output
    assert result.states > 0


@needs_spin
def test_search_that_is_cut_short_is_no_proof():
    assert model_check.search(Case("barrier"), max_depth=50).verdict == model_check.INCOMPLETE


def test_bug_that_is_not_found_fails_the_check(monkeypatch, capsys):
    found_nothing = model_check.Result(model_check.HOLDS, 1, 0.0, "errors: 0")
    monkeypatch.setattr(model_check, "missing_tools", lambda: None)
    monkeypatch.setattr(model_check, "search", lambda case: found_nothing)
    assert model_check.main([]) == 1
    assert "FAILED: holds, expected deadlock" in capsys.readouterr().out


def test_bug_that_is_not_listed_fails_the_check(monkeypatch, capsys):
    monkeypatch.setattr(model_check, "missing_tools", lambda: None)
    unlisted, *listed = model_check.BUGS
    monkeypatch.setattr(model_check, "BUGS", listed)
    assert model_check.main([]) == 1
    assert unlisted.bug in capsys.readouterr().err


def test_missing_spin_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert model_check.main([]) == 1
    assert "apt-get install spin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("State-vector 112 byte, depth reached 9, errors: 0", "holds"),
        ("error: max search depth too small\ndepth reached 9, errors: 0", "incomplete"),
        ("pan: out of memory\nerrors: 0", "incomplete"),
        ("pan: reached -DMEMLIM bound", "incomplete"),
        ("", "incomplete"),
        ("pan:1: invalid end state (at depth 9)", "deadlock"),
        ("pan:1: assertion violated (x==y) (at depth 9)", "assertion"),
        ("pan:1: assertion violated  !(q_full(c[0])) (at depth 9)", "overrun"),
        ("pan:1: non-progress cycle (at depth 9)", "livelock"),
    ],
)
def test_verdict_of_what_pan_prints(output, verdict):
    assert model_check.verdict_of(output) == verdict


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_jobs_that_are_no_number_of_jobs(jobs, capsys):
    with pytest.raises(SystemExit) as ended:
        model_check.main(["--jobs", jobs])
    assert ended.value.code == 2
    assert "argument --jobs: " in capsys.readouterr().err
