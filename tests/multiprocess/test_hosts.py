"""Several hosts on this machine: by JCOLL_HOST_ID, and in network namespaces of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from multiprocess import jobs

HOSTS = {i: {"JCOLL_HOST_ID": f"host{i // 2}"} for i in range(4)}


def test_values() -> None:
    results = jobs.run_ok("hosts.py", "values", num_processes=4, env_of=HOSTS)
    for result in results:
        assert result.report("values")["wrong"] == {}
        assert result.report("values")["pieces"] == {"crossings": 3 + 3, "wrong": []}
        for row in result.report("values")["rows"]:
            assert row["same"], row
            inside, across = row["case"].split(" over ")[1], row["algorithm"]
            if inside.startswith("local"):
                assert across not in ("xla", "hierarchical"), row
            elif inside.startswith("host"):
                assert across == "xla", row  # One rank on each host: nothing to do inside.
            else:
                assert across == "hierarchical", row


def test_several_devices_per_process() -> None:
    hosts = {i: {"JCOLL_HOST_ID": f"host{i}"} for i in range(2)}
    results = jobs.run_ok("hosts.py", "values", num_processes=2, num_devices=2, env_of=hosts)
    for result in results:
        assert all(row["same"] for row in result.report("values")["rows"])
        assert result.report("values")["pieces"] == {"crossings": 3 + 3, "wrong": []}


def expect_ragged(results: list[jobs.Result]) -> None:
    for result in results:
        for row in result.report("ragged")["rows"]:
            assert row["same"], row
            assert "hierarchical" in row["by"] and "xla" not in row["by"], row


def test_ragged() -> None:
    expect_ragged(jobs.run_ok("hosts.py", "ragged", "6", num_processes=4, env_of=HOSTS))


@pytest.mark.slow
def test_ragged_with_several_devices_per_process() -> None:
    hosts = {i: {"JCOLL_HOST_ID": f"host{i}"} for i in range(2)}
    expect_ragged(
        jobs.run_ok("hosts.py", "ragged", "2", num_processes=2, num_devices=3, env_of=hosts)
    )


NAMES = ("jcoll-test-0", "jcoll-test-1")


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)


def make_namespaces() -> None:
    """Two namespaces joined by a pair of virtual interfaces; the host's name is theirs in each."""
    name = os.uname().nodename
    for i, ns in enumerate(NAMES):
        os.makedirs(f"/etc/netns/{ns}", exist_ok=True)
        with open(f"/etc/netns/{ns}/hosts", "w") as f:
            f.write(f"127.0.0.1 localhost\n10.77.0.{i + 1} {name}\n")
        ip("netns", "add", ns)
    ip("link", "add", "veth-jc0", "netns", NAMES[0], "type", "veth", "peer", "name", "veth-jc1",
       "netns", NAMES[1])  # fmt: skip
    for i, ns in enumerate(NAMES):
        ip("-n", ns, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"veth-jc{i}")
        ip("-n", ns, "link", "set", f"veth-jc{i}", "up")
        ip("-n", ns, "link", "set", "lo", "up")


def remove_namespaces() -> None:
    for ns in NAMES:
        subprocess.run(["ip", "netns", "del", ns], capture_output=True, timeout=20)
        shutil.rmtree(f"/etc/netns/{ns}", ignore_errors=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, ...]]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    remove_namespaces()
    try:
        make_namespaces()
    except (subprocess.SubprocessError, OSError) as e:
        remove_namespaces()
        pytest.skip(f"network namespaces are not allowed here: {e}")
    yield NAMES
    remove_namespaces()


def test_bytes_that_cross(namespaces: tuple[str, ...]) -> None:
    """2 (K - 1) / K * M / G per rank, and with it M per host of two ranks, plus headers."""
    results = jobs.run_ok(
        "hosts.py",
        "traffic",
        num_processes=4,
        env_of=HOSTS,
        address="10.77.0.1",
        prefix_of={i: ["ip", "netns", "exec", namespaces[i // 2]] for i in range(4)},
    )
    for process in (0, 2):
        ours, theirs = (results[process].report(name) for name in ("jcoll", "lax"))
        expected = 2 * (2 - 1) / 2 * ours["nbytes"] / 2 * 2
        print(f"host {process // 2}: {ours['bytes']:.0f} bytes a call, lax {theirs['bytes']:.0f}")
        assert 0.95 * expected < ours["bytes"] < 1.1 * expected, (ours, theirs)
