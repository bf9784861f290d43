"""JCOLL_REPORT_DIR: what is known of a failure is in a file, whatever becomes of the exception."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from runtime_programs import run_ok

from jcoll.config import Config

LATE = """
mesh = mesh_of(N)

def body(x):
    y = jcoll.all_gather(x, "x").sum(0)
    late = jax.lax.axis_index("x") == 3
    return jax.lax.cond(late, lambda v: v, lambda v: jcoll.all_reduce(v, "x", timeout_s=0.5), y)

try:
    jax.block_until_ready(program(body, mesh)(place(integers(N, 5), mesh)))
except jax.errors.JaxRuntimeError:
    print(os.getpid())
"""


def test_a_rank_that_never_comes(tmp_path) -> None:
    folder = tmp_path / "made" / "here"
    pid = run_ok(LATE, env={"JCOLL_REPORT_DIR": str(folder)}).strip()
    (path,) = folder.iterdir()
    assert path.name == f"jcoll-cpu-{socket.gethostname()}-{pid}.json"
    report = json.loads(path.read_text())
    assert (report["runtime"], report["pid"]) == ("cpu", int(pid))
    (failure,) = report["failures"]
    assert "7 of 8 ranks arrived (0-2, 4-7); missing: 3." in failure["error"]
    sites = {site["op"]: site for site in failure["sites"]}
    assert (sites["all_gather"]["calls"], sites["all_gather"]["errors"]) == (1, 0)
    assert (sites["all_reduce"]["calls"], sites["all_reduce"]["errors"]) == (0, 1)
    assert sites["all_reduce"]["num_ranks"] == 8


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # Root may write everywhere.
    with pytest.raises(ValueError, match=r"JCOLL_REPORT_DIR='.*' .* cannot be written to"):
        Config.from_environment({"JCOLL_REPORT_DIR": str(tmp_path)})


def test_no_folder(tmp_path) -> None:
    assert Config.from_environment({}).report_dir == ""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match=r"JCOLL_REPORT_DIR='.*/file' .* is no folder"):
        Config.from_environment({"JCOLL_REPORT_DIR": str(blocked)})


def test_a_folder_whose_name_is_no_utf8(tmp_path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    pid = run_ok(LATE, env={"JCOLL_REPORT_DIR": os.fsdecode(folder)}).strip()
    (path,) = Path(os.fsdecode(folder)).iterdir()
    assert json.loads(path.read_text())["pid"] == int(pid)
