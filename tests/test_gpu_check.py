"""scripts/gpu_check.py where there is no GPU: its messages, and what it reads of the programs."""

import json

import project_scripts
import pytest

gpu_check = project_scripts.load("gpu_check")

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
    monkeypatch.setattr(gpu_check, "build", lambda folder, arch, options: [])
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
