"""Collectives across processes: every op by every algorithm that serves it, sub-axes, groups,
transformations, several at once. The processes compare with numpy and lax: values.py, programs.py.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from multiprocess.jobs import run_ok

from jcoll import shared_heap

slow = pytest.mark.slow

# When processes read the memory of peers: always; from 1 MiB on; process 0 from 512 KiB on, the
# others always; never. Whether it is mapped: all processes' is, that of process 0.
READS = "JCOLL_PEER_READS"
HEAP = {"LD_PRELOAD": str(shared_heap.library())}
ALWAYS, USUAL, MIXED, NEVER = [{READS: "1"}], [{}], [{READS: "512K"}, {READS: "1"}], [{READS: "0"}]
HEAPS, ONE_HEAP = [HEAP | {READS: "1"}], [HEAP, {}]
JOBS = [
    # processes, devices of each, script, what it checks, settings of process 0 and of the others
    (2, 1, "values.py", "matrix lanes bits rows", ALWAYS),
    (2, 1, "programs.py", "transforms independent in_flight intercepted", HEAPS),
    (2, 3, "values.py", "permuted", ALWAYS),
    (2, 3, "programs.py", "sub_axes in_flight independent", ALWAYS),
    (2, 2, "programs.py", "groups", ALWAYS),
    (4, 1, "values.py", "permuted", NEVER),
    (2, 2, "values.py", "lanes bits rows", HEAPS),
    (2, 1, "values.py", "lanes", ONE_HEAP),
    pytest.param(2, 1, "values.py", "matrix lanes", NEVER, marks=slow),
    pytest.param(2, 1, "values.py", "large", MIXED, marks=slow),
    pytest.param(2, 1, "values.py", "matrix large", HEAPS, marks=slow),
    pytest.param(4, 1, "values.py", "large bits permuted", HEAPS, marks=slow),
    pytest.param(2, 1, "programs.py", "transforms independent in_flight", USUAL, marks=slow),
    pytest.param(2, 3, "values.py", "lanes large bits rows", USUAL, marks=slow),
    pytest.param(2, 3, "programs.py", "transforms groups intercepted", NEVER, marks=slow),
    pytest.param(4, 1, "values.py", "lanes bits rows", ALWAYS, marks=slow),
    pytest.param(4, 1, "programs.py", "in_flight groups", USUAL, marks=slow),
]


@pytest.mark.parametrize(("processes", "devices", "script", "checks", "settings"), JOBS)
def test_agrees(
    processes: int, devices: int, script: str, checks: str, settings: list[dict[str, str]]
) -> None:
    results = run_ok(
        script,
        *checks.split(),
        num_processes=processes,
        num_devices=devices,
        env={"JCOLL_TIMEOUT": "60"} | settings[-1],
        env_of={0: settings[0]},
        timeout_s=600,
    )
    hashes = defaultdict(set)
    for result in results:
        result.report("done")
        for report in result.reports:
            if report["name"] == "bits":
                hashes[report["what"]] |= set(report["hashes"])
    assert bool(hashes) == ("bits" in checks)
    differing = [what for what, found in hashes.items() if len(found) > 1]
    assert not differing, f"not the same bits on all ranks: {differing}"
