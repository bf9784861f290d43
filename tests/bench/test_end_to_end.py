"""Real, small runs of `python -m jcoll bench` in a process of its own."""

import json
import subprocess
import sys

import pytest

from jcoll.bench import catalog, spawn
from jcoll.bench.job import Job

KEYS = {"op", "devices", "dtype", "size", "mode", "jcoll_us", "lax_us", "ratio", "algbw", "busbw"}
QUICK = ["-n", "2", "-w", "1", "--repeats", "1"]


def bench(tmp_path, *argv: str) -> tuple[list[dict], str]:
    """The rows and the printed table of a run that must succeed."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "jcoll", "bench", *argv, *QUICK, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"\nwrote {path}\n")
    return json.loads(path.read_text()), done.stdout


def check(row: dict) -> None:
    assert row.keys() >= KEYS | {"wrong"}
    assert row["error"] is None
    assert (row["wrong"], row["lax_wrong"]) == (0, 0)
    assert row["jcoll_us"] > 0
    assert row["lax_us"] > 0
    assert row["ratio"] == pytest.approx(row["lax_us"] / row["jcoll_us"]), "of the one repeat"
    assert row["algbw"] == pytest.approx(row["size"] / row["jcoll_us"] / 1e3)
    factor = catalog.bus_factor(row["op"], row["devices"])
    assert row["busbw"] == pytest.approx(row["algbw"] * factor)


def test_all_reduce_on_two_devices(tmp_path):
    found, table = bench(
        tmp_path, "all_reduce", "-b", "1K", "-e", "4K", "-f", "4", "--devices", "2", "--copy"
    )
    for row in found:
        check(row)
    assert [(row["size"], row["devices"]) for row in found] == [(1024, 2), (4096, 2)]
    assert all(row["carried_by"] == "jcoll" and row["copy_us"] > 0 for row in found)
    assert "peer lax.psum" in table
    assert "2 rows, 0 errors, 0 with wrong elements" in table


def test_every_op_on_three_devices(tmp_path):
    found, _ = bench(tmp_path, *catalog.CATALOG, "-b", "999", "-e", "999", "--devices", "3")
    for row in found:
        check(row)
    assert [row["op"] for row in found] == list(catalog.CATALOG)


@pytest.mark.parametrize("form", ["chain", "loop"])
def test_repeated_collectives(tmp_path, form):
    ops = [op for op, entry in catalog.CATALOG.items() if entry.repeats]
    found, _ = bench(
        tmp_path, *ops, f"--{form}", "5", "-b", "1K", "-e", "1K", "--devices", "3",
        "--malloc", "reuse",
    )  # fmt: skip
    for row in found:
        check(row)
        assert row["mode"] == f"{form}5"
    assert [row["op"] for row in found] == ops


@pytest.mark.parametrize("redop", ["mean", "max", "prod", "or"])
def test_reduce_ops(tmp_path, redop):
    dtype = "uint8" if redop == "or" else "bfloat16"
    found, _ = bench(
        tmp_path, "all_reduce", "reduce_scatter", "-o", redop, "-d", dtype, "-b", "1K", "-e", "1K",
        "--devices", "2",
    )  # fmt: skip
    for row in found:
        check(row)
        assert row["redop"] == redop


# The measuring process with another all_reduce in jcoll's place.
PATCHED_CHILD = """
import runpy, jcoll
right = jcoll.all_reduce
jcoll.all_reduce = lambda x, axis, **kwargs: {body}
runpy.run_module("jcoll.bench.child", run_name="__main__")
"""


def patched_row(monkeypatch, body: str):
    monkeypatch.setattr(spawn, "CHILD", ("-c", PATCHED_CHILD.format(body=body)))
    job = Job(("all_reduce",), ("float32",), (1024,), num_ranks=2, calls=1, repeats=1)
    (row,) = spawn.run_job(job, timeout_s=120, on_facts=lambda line: None)
    return row


def test_wrong_elements_are_counted(monkeypatch):
    row = patched_row(monkeypatch, "right(x, axis, **kwargs).at[:3].add(1)")
    assert (row.wrong, row.lax_wrong, row.error) == (3 * 2, 0, None)
    assert row.failed


def test_a_collective_that_is_not_there_is_an_error_not_a_time(monkeypatch):
    row = patched_row(monkeypatch, "x * 2")
    assert "LostCollective: jcoll: the optimised program keeps 0 collectives of 1" in str(row.error)
    assert row.jcoll_us is None


def test_two_processes(tmp_path):
    sizes = ("-b", "1K", "-e", "64K", "-f", "64")
    found, table = bench(tmp_path, "all_reduce", "--processes", "2", "--chain", "3", *sizes)
    for row in found:
        check(row)
        assert row["processes"] == row["devices"] == 2
        assert row["carried_by"] == "jcoll"
    assert "2 processes" in table
