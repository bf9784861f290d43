"""The scripts that measure layers run, and print their tables. Whether the numbers are good, they
say themselves: sizes are tiny here.
"""

import json
import re
import sys

import example_programs
import pytest

pytestmark = pytest.mark.slow  # Each of them compiles some 10 to 80 programs.

MEASURED = r"\s+\d+\.\d ms\s+\d+\.\d MiB\s+(\d+) dropped"


def run(name, folder, *flags):
    """(lines that it prints, what it writes)"""
    path = folder / "rows.json"
    script = example_programs.ROOT / "scripts" / f"{name}.py"
    printed = example_programs.run(script, *flags, "--json", path, timeout=600)
    return printed.splitlines(), json.loads(path.read_text())


def numbers(lines):
    """Of the lines that are rows of numbers."""
    return [
        [float(x) for x in line.split()]
        for line in lines
        if re.fullmatch(r"[\d\s.]*\d[\d\s.]*", line)
    ]


def test_bench_moe(tmp_path):
    sizes = "--tokens 8 --width 8 --hidden 8 --experts 8 --seconds 0.1 --repeats 1"
    lines, rows = run("bench_moe", tmp_path, *sizes.split())
    what = [(w, d) for w in ("exchange", "layer") for d in ("forward", "both ways")]
    assert [(row["what"], row["direction"]) for row in rows] == what
    for line, row in zip(lines, rows, strict=True):
        name = rf"\s*8 experts {row['what']}\s+{row['direction']}"
        dropped = re.match(name + MEASURED * 2 + r"\s+ratio\s+\d+\.\d\d", line)
        assert dropped, line
        assert list(map(int, dropped.groups())) == row["rows_dropped"]
        assert row["rows_dropped"][0] == 0 < row["nbytes"][0]


def test_measure_attention_memory(tmp_path):
    columns = ["devices", "tokens", "q", "matrix", "all_gather", "ulysses", "ring", "ring zigzag"]
    rows = check_attention(tmp_path, columns, "--tokens 64 --devices 1,8")
    assert [row["devices"] for row in rows] == 4 * [1, 8]
    assert [row["tokens"] for row in rows] == 2 * [64, 8] + 2 * [16, 16]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_measured_attention_memory(tmp_path):
    columns = ["devices", "tokens", "all_gather", "ulysses", "ring", "ring zigzag"]
    rows = check_attention(
        tmp_path, columns, "--measured --tokens 1024 --head-dim 32 --block-size 64 --devices 2"
    )
    assert [row["backward"] for row in rows] == [False, True]


def check_attention(folder, columns, flags):
    """The rows of the tables, which say the same in both forms."""
    sizes = "--local-tokens 16 --heads 8 --head-dim 4 --block-size 8"
    lines, report = run("measure_attention_memory", folder, *f"{sizes} {flags}".split())
    table, rows = numbers(lines), report["rows"]
    assert {" ".join(columns)} == {" ".join(li.split()) for li in lines if "devices " in li}
    for shown, row in zip(table, rows, strict=True):
        wanted = [row[name] / 2**20 for name in columns[2:]]
        assert shown == pytest.approx([row["devices"], row["tokens"], *wanted], abs=0.0051)
        assert min(wanted) > 0
    return rows


def test_measure_zero_memory(tmp_path):
    lines, report = run("measure_zero_memory", tmp_path, "--layers=2", "--width=32", "--rows=1")
    header = "stage devices arguments results donated temporaries peak of stage 0"
    assert lines[0].split() == header.split()
    table, rows = numbers(lines[1:]), report["rows"]
    of = {(row["stage"], row["devices"]): row["peak"] for row in rows}
    assert list(of) == [(stage, n) for stage in range(4) for n in (1, 2, 4, 8)]
    assert [tuple(row[:2]) for row in table] == list(of)
    for shown, ((_, n), peak) in zip(table, of.items(), strict=True):
        assert shown[-1] == pytest.approx(peak / of[0, n], abs=0.00051)
    assert of[3, 8] < of[2, 8] < of[1, 8] < of[0, 8]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_measured_zero_memory(tmp_path):
    sizes = "--measured --layers=4 --width=512 --rows=1"
    lines, report = run("measure_zero_memory", tmp_path, *sizes.split())
    assert lines[0].split() == ["stage", "devices", "peak", "of", "stage", "0"]
    of = {(row["stage"], row["devices"]): row["peak"] for row in report["rows"]}
    assert len(of) == 16
    assert of[3, 8] < of[1, 8] < of[0, 8]


def test_measure_overlap(tmp_path):
    sizes = "--rows 64 --width 128 --calls 3 --layers 4"
    lines, report = run("measure_overlap", tmp_path, *sizes.split())
    assert len(lines) == 5
    shares = report["buckets"]["sync_in_backward"]
    assert len(shares) == 4
    assert shares == sorted(shares, reverse=True)
    assert report["buckets"]["one bucket"] == [0]
    assert all(row["overlap"] > 0 for row in report["ring"])
