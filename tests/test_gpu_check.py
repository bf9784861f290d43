"""scripts/gpu_check.py where there is no GPU: its messages, and what it reads of the programs."""

import importlib
import json
import os
import time

import jax
import numpy as np
import project_scripts
import pytest
from cuda_programs import custom_calls

from jcoll.runtime import cuda

gpu_check = project_scripts.load("gpu_check")
gpu_check_jax = project_scripts.load("gpu_check_jax")

PRINTED = """\
copy\t3.5e+12
kernel\tall_gather\t4\t65536\t1.2e-05\t2.7e+10\t0.008\tok
kernel\tring by plan_ll\t4\t5040\t9e-06\t4e+09\t0.001\tWRONG
ok     FourRanks
"""


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "gpu", lambda: None)
    assert gpu_check.main([]) == 2
    assert "finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("says", "status", "found"),
    [
        ("NVIDIA H200, 9.0, 580.1\nNVIDIA H200, 9.0, 580.1", 0, "NVIDIA H200, 9.0, 580.1"),
        ("No devices were found", 0, None),
        ("", 0, None),
        ("NVIDIA-SMI has failed, as it could not, somehow", 9, None),
    ],
)
def test_what_nvidia_smi_says(monkeypatch, tmp_path, says, status, found):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_check.gpu() == found


@pytest.mark.parametrize("plugin", ["xla_cuda13", "xla_cuda12", "mps", None])
def test_jax_without_its_plugin_for_cuda_is_not_used(monkeypatch, tmp_path, plugin):
    if plugin is not None:
        (tmp_path / "jax_plugins" / plugin).mkdir(parents=True)
    monkeypatch.setattr(gpu_check.sys, "path", [str(tmp_path)])
    monkeypatch.delitem(gpu_check.sys.modules, "jax_plugins", raising=False)
    importlib.invalidate_caches()
    assert gpu_check.has_cuda_plugin() is (plugin is not None and "cuda" in plugin)


def test_speeds(capsys):
    first, second = gpu_check.speeds(PRINTED)
    assert (first.kernel, first.ranks, first.nbytes, first.right) == ("all_gather", 4, 65536, True)
    assert (second.kernel, second.right) == ("ring by plan_ll", False)
    gpu_check.print_speeds([first])
    assert "| all_gather | 4 | 65536 | 12.0 | 27.0 | 0.01 |" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "verdict"), [(0, "ok"), (3, "FAILED")])
def test_failed_step_fails_the_check(monkeypatch, tmp_path, capsys, code, verdict):
    """The programs are replaced by ones that end with `code`."""
    monkeypatch.setattr(gpu_check, "gpu", lambda: "H200, 9.0, 580")
    monkeypatch.setattr(gpu_check, "build", lambda folder, arch, options, deadline: [])
    monkeypatch.setattr(gpu_check, "python_options", lambda: ([], "no pybind11"))
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    tests = tmp_path / "tests" / "cuda"
    tests.mkdir(parents=True)
    for name in (*gpu_check.TESTS, "bandwidth"):
        program = tests / f"gpu_{name}_test"
        program.write_text(f"#!/bin/sh\nexit {code if name == 'moves' else 0}\n")
        program.chmod(0o755)
    report = tmp_path / "report.json"
    assert gpu_check.main(["--build", str(tmp_path), "--json", str(report)]) == int(code != 0)
    steps = {step["name"]: step["verdict"] for step in json.loads(report.read_text())["steps"]}
    assert steps["moves"] == verdict and steps["ragged"] == "ok"
    assert steps["compute-sanitizer"] == steps["in JAX"] == "skipped"
    capsys.readouterr()


def test_a_step_that_hangs_is_killed_with_all_that_it_started(tmp_path, capsys):
    command = f"echo first; sleep 60 & echo $! > {tmp_path}/child; wait"
    step, output = gpu_check.run("hangs", ["sh", "-c", command], timeout=1)
    assert (step.verdict, step.why, output) == ("FAILED", "not done after 1 s", "first\n")
    expect_end_of(int((tmp_path / "child").read_text()))
    capsys.readouterr()


def test_ctrl_c_ends_what_a_step_has_started(monkeypatch, tmp_path, capsys):
    child = tmp_path / "child"

    def interrupted(*args, **kwargs):
        while not (child.exists() and child.read_text().endswith("\n")):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check.subprocess.Popen, "communicate", interrupted)
    command = f"sleep 60 & echo $! > {child}; wait"
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run("is interrupted", ["sh", "-c", command], timeout=50)
    expect_end_of(int(child.read_text()))
    capsys.readouterr()


@pytest.mark.parametrize("capability", ["7.5", "[N/A]"])
def test_a_gpu_without_kernels_is_nothing_to_run_on(monkeypatch, capsys, capability):
    monkeypatch.setattr(gpu_check, "gpu", lambda: f"Tesla T4, {capability}, 580")
    assert gpu_check.main([]) == 2
    said = capsys.readouterr().err
    assert f"(Tesla T4) has compute capability {capability}" in said and "8.0 or later" in said


def test_a_report_that_cannot_be_written_is_known_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check, "gpu", lambda: "H200, 9.0, 580")
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--json", str(tmp_path / "nowhere" / "report.json")])
    assert ended.value.code == 2
    assert "No such file or directory; name a file that can be written" in capsys.readouterr().err


def expect_end_of(child: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline, "the child of the step outlived it"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


@pytest.mark.parametrize(
    ("code", "alone", "together"), [(1, "FAILED", "skipped"), (9, "FAILED", "FAILED")]
)
def test_ranks_that_wait_in_vain_under_a_tool(
    monkeypatch, tmp_path, capsys, code: int, alone: str, together: str
):
    fake_sanitizer(monkeypatch, tmp_path, f"exit {code}")
    steps = gpu_check.sanitize(tmp_path, gpu_check.Deadline(60))
    cases = [several for cases in gpu_check.TOOLS.values() for _, _, several in cases]
    assert [step.verdict for step in steps] == [together if several else alone for several in cases]
    capsys.readouterr()


def fake_sanitizer(monkeypatch, tmp_path, script: str) -> None:
    """What compute-sanitizer is to do; `$2` is the tool."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: str(tool))


def verdicts(tmp_path, seconds: float) -> dict[str, set[str]]:
    """By tool."""
    found: dict[str, set[str]] = {}
    for step in gpu_check.sanitize(tmp_path, gpu_check.Deadline(seconds)):
        found.setdefault(step.name.split()[0], set()).add(step.verdict)
    return found


def test_racecheck_is_run_and_fails_by_what_it_finds(monkeypatch, tmp_path, capsys):
    fake_sanitizer(monkeypatch, tmp_path, "[ $2 != racecheck ] || exit 9")
    expected = {"memcheck": {"ok"}, "synccheck": {"ok"}, "racecheck": {"FAILED"}}
    assert verdicts(tmp_path, 60) == expected
    capsys.readouterr()


@pytest.mark.parametrize(
    ("limit", "left", "why"), [(0.2, 60, "not done after 0 s"), (30, 20, " s are left")]
)
def test_racecheck_is_left_out_if_time_is_short(monkeypatch, tmp_path, capsys, limit, left, why):
    """It has little to find, and is no reason for the check to fail."""
    fake_sanitizer(monkeypatch, tmp_path, "[ $2 != racecheck ] || sleep 20")
    monkeypatch.setattr(gpu_check, "RACECHECK_TIMEOUT_S", limit)
    found = verdicts(tmp_path, left)
    assert found == {"memcheck": {"ok"}, "synccheck": {"ok"}, "racecheck": {"skipped"}}
    said = capsys.readouterr().out
    assert "racecheck moves Alone: skipped, " in said and why in said


def test_the_program_in_jax_runs(monkeypatch, capsys):
    """On CPU, by the CPU runtime; that it lowers for CUDA as it expects is the test below."""
    monkeypatch.setattr(cuda, "obstacle", lambda: None)
    monkeypatch.setattr(cuda, "TARGET", "jcoll_collective")
    gpu_check_jax.main()
    assert capsys.readouterr().out.endswith(": ok\n")


def test_the_program_in_jax_is_a_call_of_the_cuda_runtime(monkeypatch):
    monkeypatch.setattr(cuda, "obstacle", lambda: None)
    mesh = jax.make_mesh((1,), ("data",))
    x = jax.device_put(np.zeros((100, 24), np.float32), jax.NamedSharding(mesh, jax.P("data")))
    over = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P("data")}
    (call,) = custom_calls(jax.shard_map(gpu_check_jax.exchange, **over), x)
    assert (call["op"], call["algorithm"]) == ("ragged_all_to_all", "direct")


def test_what_is_left_of_the_time():
    assert gpu_check.Deadline(60).left(120) <= 60
    assert gpu_check.Deadline(60).left(5) == 5
    assert 0 < gpu_check.Deadline(-1).left(5) < 1
