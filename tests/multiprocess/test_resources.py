"""What collectives across processes cost: CPU while they wait, memory, shared memory; and what is
said when there is too little of it, or none."""

from __future__ import annotations

import os

import pytest
from multiprocess.jobs import run, run_ok

MIB = 1 << 20


def test_who_waits_uses_no_cpu() -> None:
    for result in run_ok("resources.py", "idle", num_processes=4)[:-1]:
        report = result.report("idle")
        print(f"waiting: {report['waiting']:.2%} of a core; without: {report['without']:.2%}")
        assert report["waiting"] < 0.1  # The aim is 2 %; tests run on busy machines.


def test_waiting_for_another_process_is_skew() -> None:
    first, second = run_ok("resources.py", "late", num_processes=2)
    for name in ("blocks", "rows"):
        assert first.report(name)["skew"] > 0.5 > first.report(name)["exec"]
        assert second.report(name)["skew"] < 0.5


@pytest.mark.parametrize(
    ("num_processes", "steps"),
    [
        (2, 4_000),
        pytest.param(2, 70_000, marks=pytest.mark.slow),
        pytest.param(4, 2_500_000, marks=pytest.mark.slow),  # ten million in all: minutes
    ],
)
def test_memory_is_flat(num_processes: int, steps: int) -> None:
    """Over three times so many small collectives, after as many that do not count."""
    for result in run_ok(
        "resources.py", "memory", str(steps), num_processes=num_processes, timeout_s=1500
    ):
        report = result.report("memory")
        microseconds = report["seconds"] / (3 * steps) * 1e6
        print(f"{report['before']} -> {report['after']} KiB; {microseconds:.1f} us a collective")
        assert report["after"] - report["before"] < 4096


@pytest.mark.parametrize("nbytes", [64 * MIB, pytest.param(1024 * MIB, marks=pytest.mark.slow)])
def test_large_arrays_need_little_shared_memory(nbytes: int) -> None:
    """JCOLL_SHM_SIZE is far below the array's size."""
    results = run_ok(
        "resources.py", "large", str(nbytes), num_processes=2, env={"JCOLL_SHM_SIZE": str(4 * MIB)}
    )
    for result in results:
        shared = result.report("large")["shared"]
        print(f"{nbytes // MIB} MiB: {shared} KiB of shared memory")
        assert shared < 16 * 1024


def test_more_in_flight_than_there_is_memory_for() -> None:
    """They take turns."""
    env = {"JCOLL_SHM_SIZE": "65536", "JCOLL_TIMEOUT": "20"}
    for result in run_ok("resources.py", "in_flight", num_processes=2, env=env):
        assert result.report("in_flight")["text"] == ""
        assert result.report("after")["text"] == ""


def test_less_memory_than_one_collective_needs() -> None:
    """An error that names the setting, on all ranks."""
    env = {"JCOLL_SHM_SIZE": "256", "JCOLL_TIMEOUT": "3"}
    for result in run("resources.py", "in_flight", num_processes=2, env=env):
        assert result.code == 0, result
        text = result.report("in_flight")["text"]
        assert "JCOLL_SHM_SIZE" in text and "shared memory" in text, text


def test_processes_of_different_hosts() -> None:
    """JCOLL_HOST_ID makes hosts: XLA's collectives serve, and explain says why."""
    env_of = {i: {"JCOLL_HOST_ID": f"host{i}"} for i in range(2)}
    for result in run_ok("resources.py", "hosts", num_processes=2, env_of=env_of):
        report = result.report("hosts")
        assert report["algorithm"] == "xla" and report["value"] == 2
        assert "on several hosts" in report["reason"]
        text = result.report("direct")["text"]
        assert "cannot serve this call" in text and "on several hosts" in text


def test_memory_that_cannot_be_opened() -> None:
    """An error on all ranks that says what to do, not a wait."""
    for result in run("resources.py", "closed", num_processes=3, env={"JCOLL_TIMEOUT": "20"}):
        assert result.code == 0, result
        report = result.report("closed")
        assert "cannot be opened" in report["text"] and "JCOLL_HOST_ID" in report["text"]
        assert report["seconds"] < 5


def test_no_process_outlives_its_job() -> None:
    results = run("faults.py", "stop", "start", num_processes=3, timeout_s=0.1)
    assert all(r.code is None for r in results)
    assert not any(os.path.exists(f"/proc/{r.pid}") for r in results)
