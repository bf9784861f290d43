"""`python -m jcoll tune`: small real runs, what it keeps and what it refuses."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
import types

import pytest

from jcoll import cli
from jcoll.cli_tune import command, runs
from jcoll.cli_tune import summary as tune_summary
from jcoll.cli_tune.combine import combined
from jcoll.cli_tune.summary import summary
from jcoll.tuning import table
from jcoll.tuning.table import Row

QUICK = ["--ops", "all_reduce", "-b", "1K", "-e", "4K", "--seconds", "0.01"]


def row_of(run: runs.Run, op: str, nbytes: int, us: dict[str, float]) -> dict:
    fields = {"placement": run.placement, "op": op, "num_ranks": run.num_ranks, "nbytes": nbytes}
    return fields | {"us": us, "errors": {}}


@pytest.fixture
def measured(monkeypatch):
    """measured(stop_after=n): rows of fixed costs, and Ctrl-C or a failure after n."""

    def measured(stop_after=None, stop=KeyboardInterrupt):
        def rows_of(run, timeout_s):
            for i, (op, nbytes) in enumerate(run.points()):
                if i == stop_after:
                    raise stop
                yield row_of(run, op, nbytes, {"direct": 10.0, "ring": 20.0 / (1 + i)})

        monkeypatch.setattr(runs, "rows_of", rows_of)

    return measured


def tune(*argv, status=0):
    assert cli.main(["tune", *map(str, argv)]) == status


def test_writes_and_merges(tmp_path, measured, capsys):
    path = tmp_path / "t.json"
    measured()
    tune("--ops", "all_reduce,gather", "--devices", "2,4", "-e", "4K", "-o", path)
    out, err = capsys.readouterr()
    assert out.endswith(f"wrote {path}: 8 rows measured now, 0 kept\n")
    assert "  all_reduce: 1K-4K direct\n  gather: 1K-4K ring 1.5..2\n" in out
    assert "[1/8] 2 devices of one process, all_reduce" in err
    first = table.parse(path.read_text())
    assert {r.num_ranks for r in first.rows} == {2, 4}
    assert first.machine == command.machine()
    tune("--ops", "gather", "--processes", "2", "-e", "1K", "-o", path)
    second = table.parse(path.read_text())
    assert len(second.rows) == len(first.rows) + 1
    assert {r.placement for r in second.rows} == {"process", "processes"}


def test_another_machine_is_not_mixed_in(tmp_path, measured):
    path = tmp_path / "t.json"
    path.write_text(table.to_text("cpu", "else", [Row("process", "reduce", 2, 1, {"direct": 1.0})]))
    measured()
    tune(*QUICK, "--devices", "2", "-o", path)
    assert {r.op for r in table.parse(path.read_text()).rows} == {"all_reduce"}


@pytest.mark.parametrize(
    ("stop", "status", "message"),
    [
        (KeyboardInterrupt, 130, "interrupted; what was measured is kept"),
        (runs.RunFailed("it died"), 1, "2 devices of one process: it died"),
    ],
)
def test_stopped(tmp_path, measured, capsys, stop, status, message):
    path = tmp_path / "t.json"
    measured(1, stop)
    tune(*QUICK, "--devices", "2", "-o", path, status=status)
    assert message in capsys.readouterr().err
    assert [r.nbytes for r in table.parse(path.read_text()).rows] == [1024]


def test_stopped_before_anything(tmp_path, measured, capsys):
    path = tmp_path / "t.json"
    measured(0)
    tune(*QUICK, "--devices", "2", "-o", path, status=130)
    assert "nothing was measured" in capsys.readouterr().err
    assert not path.exists()


def test_a_damaged_file_is_replaced(tmp_path, measured):
    path = tmp_path / "t.json"
    path.write_text("{")
    measured()
    with pytest.warns(RuntimeWarning, match="is replaced: not JSON"):
        tune(*QUICK, "--devices", "2", "-o", path)
    assert len(table.parse(path.read_text()).rows) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ops", "sum"], "--ops has 'sum'; needed are some of all_reduce"),
        (["--devices", "1"], "--devices has '1'; numbers from 2"),
        (["--processes", "two"], "--processes has 'two'"),
        (["-b", "2K", "-e", "1K"], "needed is 0 < begin <= end"),
        (["-b", "x"], "'x' is not a size"),
        (["-f", "1"], "a factor of at least 2"),
        (["--seconds", "0"], "need more than 0"),
        (["-o", "/no/such/folder/t.json"], "cannot be written"),
        (["-o", "/proc/t.json"], "cannot be written"),
    ],
)
def test_refused(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_quality_of_what_auto_chose(monkeypatch):
    chosen = types.SimpleNamespace(algorithm="direct")
    monkeypatch.setattr(tune_summary, "select", lambda request: chosen)
    costs = [{"direct": 10.0, "ring": 8.0, "xla": 1.0}, {"direct": 3.0, "ring": 5.0}, {"ring": 1.0}]
    rows = [Row("process", "all_reduce", 4, 1024 * 4**i, us) for i, us in enumerate(costs)]
    assert tune_summary.quality(rows).splitlines()[1:] == [
        "  median    1.12 times its time",
        "  worst     1.25 times (direct for all_reduce of 1K, 4 ranks)",
        "  over 1.1  in 1 of 2 cases",
    ]
    assert tune_summary.quality(rows[2:]) == ""


def test_summary():
    rows = [
        Row("process", "all_reduce", 4, 1024, {"direct": 10.0, "ring": 9.5, "xla": 5.0}),
        Row("process", "all_reduce", 4, 4096, {"direct": 20.0, "ring": 10.0}),
        Row("process", "all_reduce", 4, 8192, {"direct": 30.0, "ring": 10.0}),
    ]
    head, line, *_ = summary(rows).splitlines()
    assert head == "4 ranks, one process"
    assert line == "  all_reduce: 1K direct (xla), 4K-8K ring 2..3"


def test_repeats(tmp_path, measured):
    path = tmp_path / "t.json"
    measured()
    tune(*QUICK, "--devices", "2", "--repeats", "3", "-o", path)
    assert len(table.parse(path.read_text()).rows) == 2


def test_combined():
    def row(direct, ring, **more):
        return Row("process", "all_reduce", 4, 1024, {"direct": direct, "ring": ring, **more})

    other = Row("process", "all_reduce", 4, 4096, {"direct": 7.0})
    # The second time all was slow; the third, ring alone.
    rows = [row(10.0, 8.0, tree=5.0), other, row(40.0, 32.0), row(11.0, 33.0)]
    assert combined(rows) == [row(11.0, pytest.approx(8.8), tree=pytest.approx(5.5)), other]
    assert combined([Row("process", "x", 2, 1, {"xla": 1.0})] * 2)[0].us == {"xla": 1.0}


# Real runs


def environment():
    return os.environ | {"XLA_FLAGS": ""}


@pytest.mark.parametrize("flags", [["--devices", "2"], ["--processes", "2"]])
def test_measures(tmp_path, flags):
    path = tmp_path / "t.json"
    quick = ["--ops", "broadcast", *QUICK[2:], *flags, "-o", str(path)]
    argv = [sys.executable, "-m", "jcoll", "tune", *quick]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [r["nbytes"] for r in rows] == [1024, 4096]
    for r in rows:
        assert r["placement"] == ("process" if flags[0] == "--devices" else "processes")
        assert set(r["us"]) == {"direct", "binomial", "one_shot", "tree", "xla"}


OWN = """
from jcoll.algorithms import algorithm

@algorithm("fan_for_test", op="broadcast")
def fan(p):
    for rank in range(p.num_ranks):
        if rank != p.root:
            p.send(p.root, rank)
"""


@pytest.mark.parametrize("flags", [["--devices", "2"], ["--processes", "2"]])
def test_measures_algorithms_of_the_users(tmp_path, flags):
    own, path = tmp_path / "own.py", tmp_path / "t.json"
    own.write_text(OWN)
    quick = ["--ops", "broadcast", "-b", "1K", "-e", "1K", "--seconds", "0.01", *flags]
    argv = [sys.executable, "-m", "jcoll", "tune", *quick, "--module", "own.py", "-o", "t.json"]
    done = subprocess.run(
        argv, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["us"]["fan_for_test"] > 0


def test_ctrl_c(tmp_path):
    path = tmp_path / "t.json"
    flags = ["--ops", "broadcast,reduce", "--devices", "2", "-o", str(path)]
    argv = [sys.executable, "-m", "jcoll", "tune", *flags]
    process = subprocess.Popen(
        argv,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs this in the background of a shell without job control has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert "[1/" in process.stderr.readline()
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # As a terminal does it.
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert time.monotonic() - begun < 10
    assert len(table.parse(path.read_text()).rows) >= 1
    assert "what was measured is kept" in err
    assert "Traceback" not in err


def test_a_timeout_without_end():
    """For which a thread cannot wait by the clock."""
    lines = queue.Queue()
    for timeout_s in (float("inf"), 1e300):
        lines.put('{"op": "all_reduce"}')
        assert runs._next_row(lines, timeout_s, None, None) == {"op": "all_reduce"}
