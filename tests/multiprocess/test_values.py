"""Collectives across processes: every op by every algorithm that serves it, sub-axes, groups,
transformations, several at once. The processes compare with numpy and lax: values.py, programs.py.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from multiprocess.jobs import run_ok

slow = pytest.mark.slow

JOBS = [
    # processes, devices of each, script, what it checks
    (2, 1, "values.py", "matrix lanes bits rows"),
    (2, 1, "programs.py", "transforms independent in_flight intercepted"),
    (2, 3, "values.py", "permuted"),
    (2, 3, "programs.py", "sub_axes in_flight independent"),
    (2, 2, "programs.py", "groups"),
    (4, 1, "values.py", "permuted"),
    pytest.param(2, 1, "values.py", "large", marks=slow),
    pytest.param(2, 3, "values.py", "lanes large bits rows", marks=slow),
    pytest.param(2, 3, "programs.py", "transforms groups intercepted", marks=slow),
    pytest.param(4, 1, "values.py", "lanes bits rows", marks=slow),
    pytest.param(4, 1, "programs.py", "in_flight groups", marks=slow),
]


@pytest.mark.parametrize(("processes", "devices", "script", "checks"), JOBS)
def test_agrees(processes: int, devices: int, script: str, checks: str) -> None:
    results = run_ok(
        script,
        *checks.split(),
        num_processes=processes,
        num_devices=devices,
        env={"JCOLL_TIMEOUT": "60"},
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
