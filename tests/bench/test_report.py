"""Rows, tables, Markdown, and what becomes of a child that dies."""

import json
import os
import subprocess
import sys

import pytest

from jcoll.bench import plot, report, rows, spawn
from jcoll.bench.job import Job
from jcoll.bench.programs import LostCollective, carried_by

ROW = rows.Row(
    op="all_reduce",
    devices=8,
    dtype="float32",
    size=1 << 20,
    mode="single",
    redop="sum",
    algorithm="auto",
    peer="lax.psum",
    malloc="default",
    jcoll_us=1000.0,
    lax_us=2500.0,
    ratio=2.5,
    ratio_low=2.4,
    ratio_high=2.6,
    algbw=1.048576,
    busbw=1.835008,
    wrong=0,
    lax_wrong=0,
    carried_by="jcoll",
    calls=100,
    copy_us=700.0,
)


def changed(**fields) -> rows.Row:
    return rows.Row(**(ROW.as_dict() | fields))


def test_bandwidths():
    algbw, busbw = rows.bandwidths("all_reduce", 1 << 20, 8, 1e-3)
    assert (algbw, busbw) == pytest.approx((ROW.algbw, ROW.busbw))


def test_line_has_the_columns_of_its_heading():
    heading = report.heading(ROW, copy=True)
    for word in ("size", "count", "dtype", "time", "algbw", "busbw", "#wrong", "ratio", "copy"):
        assert word in heading[-2]
    assert "busbw factor 1.75" in heading[1]
    assert "peer lax.psum" in heading[1]
    cells = " ".join(report.line(ROW).split())
    assert cells == "1048576 262144 float32 sum 1000.0 1.05 1.84 0 2500.0 0.42 0.73 0 2.50 700.0"
    assert len(report.line(ROW)) == len(heading[-2])


def test_line_of_xla_and_of_errors():
    assert "left it to XLA" in report.line(changed(carried_by="xla"))
    assert "error: it broke" in report.line(changed(error="it broke"))
    assert " N/A " in report.line(changed(wrong=None))


def test_summary_names_the_lowest_ratio():
    text = report.summary([ROW, changed(ratio=0.5, size=4096, wrong=3), changed(ratio=None)])
    assert "3 rows" in text
    assert "1 with wrong" in text
    assert "lowest ratio 0.50 (all_reduce, 8 devices, float32, 4K" in text


def test_markdown_puts_devices_side_by_side():
    text = report.markdown([ROW, changed(devices=2, ratio=1.5), changed(size=1024, error="no")])
    lines = text.splitlines()
    assert "| size | 2 devices | 8 devices |" in lines
    assert "| 1K |  | error |" in lines
    assert "| 1M | 1000 / 2500 (700) **1.50** | 1000 / 2500 (700) **2.50** |" in lines


def test_json_is_a_list_of_rows(tmp_path):
    path = tmp_path / "f.json"
    rows.write_text(path, rows.to_json([ROW, ROW]))
    assert json.loads(path.read_text()) == [ROW.as_dict()] * 2
    assert rows.from_line(rows.to_line(ROW)) == ROW
    assert os.listdir(tmp_path) == ["f.json"]


def test_links_and_pipes_are_written_to_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "pipe"):
        assert rows.can_write(tmp_path / name)
        rows.write_text(tmp_path / name, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]
    for no_file in (tmp_path, tmp_path / "none" / "f", tmp_path / "file" / "f"):
        assert not rows.can_write(no_file)


def test_failed_rows():
    assert not ROW.failed
    assert changed(wrong=1).failed
    assert changed(error="no").failed


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw([ROW, changed(size=4096), changed(devices=2, error="no")], tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


HLO = """
  %a = f32[8]{0} all-reduce(%p), channel_id=1
  %b = (f32[8]{0}, f32[8]{0}) all-to-all(%a, %a)
  ROOT %c = f32[8]{0} custom-call(%b), custom_call_target="jcoll_cpu"
"""


def test_collectives_are_counted_in_the_hlo():
    assert carried_by("lax", HLO, 2) == "xla"
    assert carried_by("jcoll", HLO, 3) == "jcoll"
    with pytest.raises(LostCollective, match="keeps 2 collectives of 3"):
        carried_by("lax", HLO, 3)


JOB = Job(ops=("all_reduce",), dtypes=("float32",), sizes=(64, 128, 256), num_ranks=2)

# Stands for the measuring process: acts up at the second row, the way `how` says.
FAKE_CHILD = """
import json, os, sys, time
from jcoll.bench import rows
from jcoll.bench.job import Job
job = Job.from_json(sys.stdin.read())
print(json.dumps("facts"), flush=True)
for row in job.blank_rows():
    if row.size == 128:
        print("it went wrong", file=sys.stderr, flush=True)
        {how}
    print(rows.to_line(row), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("os.abort()", "signal SIGABRT: it went wrong"),
        ("sys.exit(3)", "exit status 3: it went wrong"),
        ("time.sleep(600)", "no result within"),
    ],
)
def test_a_child_that_fails_costs_one_row(how, text, monkeypatch):
    code = FAKE_CHILD.format(how=how)
    monkeypatch.setattr(spawn, "CHILD", ("-c", code))
    timeout_s = 5.0 if "sleep" in how else 60.0
    found = list(spawn.run_job(JOB, timeout_s=timeout_s, on_facts=lambda line: None))
    assert [row.size for row in found] == [64, 128, 256]
    assert [row.error is None for row in found] == [True, False, True]
    assert text in (found[1].error or "")


def test_a_child_that_cannot_start(monkeypatch):
    monkeypatch.setattr(spawn, "CHILD", ("-c", "raise SystemExit('no jax here')"))
    with pytest.raises(spawn.ChildFailed, match=r"could not start: .*no jax here"):
        list(spawn.run_job(JOB, timeout_s=60, on_facts=lambda line: None))


def test_stdout_keeps_what_it_has(tmp_path):
    """Also where it is a file, which replacing would empty."""
    program = (
        "from pathlib import Path; from jcoll.bench import rows; print('before');"
        "rows.write_text(Path('/dev/stdout'), 'JSON\\n'); print('after')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text().split() == ["before", "JSON", "after"]
