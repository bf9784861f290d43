"""`python -m jcoll doctor`: what it says of this machine, of others, and of broken ones."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jcoll import cli, config, errors
from jcoll.cli_doctor import cuda_driver, probes
from jcoll.cli_doctor.features import features, used
from jcoll.cli_doctor.probes import Failed
from jcoll.comm import mesh
from jcoll.runtime import cuda
from jcoll.tuning import table

# A machine where everything is as it should be.
HEALTHY = {
    "machine": {"shared memory": True},
    "jcoll": {"imports": True},
    "jax": {"FFI collectives": "0.2", "GPU allocator": "vmm", "CUDA devices": 2},
    "cuda": {
        "GPUs": ["H100", "H100"],
        "compute capabilities": [90, 90],
        "pairs without access": [],
        "GPUs with multicast": 2,
        "NCCL": "2.29.0",
        "jcoll's kernels": ["sm_80-real", "sm_90a-real"],
        "GPUs without kernels": [],
        "obstacle": None,
    },
}
CUDA = ("jcoll's collectives", "kernels over NVLink or PCIe peers")
STAGING, MULTIMEM = "without copies to staging memory", "multimem"


def report(capsys, *flags: str) -> str:
    assert cli.main(["doctor", *flags]) == 0
    return capsys.readouterr().out


def test_json(capsys) -> None:
    found = json.loads(report(capsys, "--json"))
    assert set(found) == {*probes.PROBES, "uses"}
    assert found["versions"]["jax"] == jax.__version__
    assert found["jax"]["backend"] == "cpu"
    assert found["jax"]["devices"] == ["8 x cpu"]
    assert found["machine"]["shared memory"] is True
    assert found["jcoll"]["settings"]["JCOLL_TUNING_FILE"] == "none"
    cpu = found["uses"]["cpu"]
    assert cpu["used"] == "jcoll's runtime, all algorithms"
    assert set(cpu["features"].values()) == {"yes"}
    assert found["uses"]["others"]["used"] == "XLA's collectives"


def test_text_has_the_same_facts(capsys) -> None:
    text = report(capsys)
    for section, names in probes.PROBES.items():
        assert f"\n{section}\n" in f"\n{text}"
        for name in names:
            assert f"\n  {name} " in text
    assert "\non cpu: jcoll's runtime, all algorithms\n" in text
    assert "\non others: XLA's collectives\n" in text


def test_settings_that_name_nothing(capsys, monkeypatch, tmp_path) -> None:
    """Every call fails, or the file is ignored: whoever asks the doctor is to be told."""
    settings = replace(table.config, algorithm="rnig", tuning_file=str(tmp_path / "none.json"))
    for module in (config, mesh, table):
        monkeypatch.setattr(module, "config", settings)
    table.own.cache_clear()
    found = json.loads(report(capsys, "--json"))["jcoll"]
    table.own.cache_clear()
    assert "JCOLL_ALGORITHM='rnig' in the environment is not an al" in found["algorithm"]["error"]
    assert "none.json is ignored: No such file" in found["tuning file"]["error"]


def test_a_machine_without_a_gpu(monkeypatch, capsys) -> None:
    def absent():
        raise cuda_driver.DriverError("no CUDA driver (because)")

    monkeypatch.setattr(cuda_driver, "_driver", absent)
    text = report(capsys)
    assert "GPUs                  ? no CUDA driver (because)\n" in text
    assert (
        "on cuda: XLA's collectives\n"
        "  jcoll's collectives: no, no CUDA driver (because)\n"
        "  kernels over NVLink or PCIe peers: no, for the same reason\n" in text
    )


# Other machines


def obstacles(changes: dict[str, object]) -> dict[str, str | None]:
    facts = copy.deepcopy(HEALTHY)
    for path, value in changes.items():
        section, _, name = path.partition("/")
        assert name in facts[section]
        facts[section][name] = value
    return {f.name: f.obstacle for f in features(facts) if f.platform == "cuda"}


def test_all_is_well() -> None:
    assert set(obstacles({}).values()) == {None}
    assert used(list(features(HEALTHY)), "cuda") == "jcoll's collectives"


@pytest.mark.parametrize(
    ("changes", "first", "text"),
    [
        ({"cuda/GPUs": []}, CUDA[0], "the driver sees no GPU"),
        ({"cuda/GPUs": Failed("no driver")}, CUDA[0], "no driver"),
        ({"jax/CUDA devices": Failed("no plugin")}, CUDA[0], "does not use the GPUs: no plugin"),
        ({"cuda/obstacle": "JCOLL_CUDA=0"}, CUDA[0], "JCOLL_CUDA=0"),
        ({"jcoll/imports": Failed("no jax")}, CUDA[0], "import jcoll fails: no jax"),
        ({"cuda/GPUs without kernels": ["compiled for 80-real"]}, CUDA[0], "for 80-real"),
        ({"cuda/GPUs without kernels": Failed("no driver")}, CUDA[0], "no driver"),
        ({"cuda/NCCL": Failed("no NCCL")}, CUDA[1], "no NCCL"),
        ({"cuda/NCCL": "2.28.9"}, CUDA[1], "NCCL 2.28.9, 2.29 gives pointers to peers"),
        ({"cuda/pairs without access": ["0->1"]}, CUDA[1], "no peer access 0->1"),
        ({"jax/FFI collectives": "0.1"}, STAGING, "FFI collectives 0.1, 0.2 has windows"),
        ({"jax/FFI collectives": None}, STAGING, "FFI collectives None, 0.2 has windows"),
        ({"jax/GPU allocator": "bfc"}, STAGING, "XLA_PYTHON_CLIENT_ALLOCATOR=bfc: vmm's memory"),
        ({"cuda/GPUs with multicast": 1}, MULTIMEM, "1 of 2 GPUs have multicast"),
        ({"cuda/GPUs with multicast": Failed("why")}, MULTIMEM, "why"),
    ],
)
def test_what_is_in_the_way(changes, first, text) -> None:
    """Of the first feature that is hindered; what builds on it is hindered too."""
    found = obstacles(changes)
    assert text in str(found[first])
    names = [*CUDA, STAGING, MULTIMEM]
    before = names[: names.index(first)] + ([STAGING] if first == MULTIMEM else [])
    assert all(found[name] is None for name in before)
    if first in CUDA:
        assert all(found[name] for name in names[names.index(first) :])


def test_gpus_without_kernels(monkeypatch) -> None:
    monkeypatch.setattr(probes, "_compute_capabilities", lambda: [90, 75, 90, 80])
    monkeypatch.setattr(cuda, "why_no_code", lambda c: f"not sm_{c}" if c != 80 else "")
    assert probes.collect()["cuda"]["GPUs without kernels"] == ["not sm_75", "not sm_90"]


# The driver


def fake_driver(num_devices: int = 2, status: int = 0) -> SimpleNamespace:
    def answer(value):
        def function(out, *args):
            out._obj.value = value(*args) if callable(value) else value
            return status

        return function

    def name(text, size, handle):
        text.value = f"GPU {handle}".encode()
        return status

    attributes = {75: 9, 76: 0, 132: 1}
    return SimpleNamespace(
        cuDriverGetVersion=answer(13010),
        cuDeviceGetCount=answer(num_devices),
        cuDeviceGet=answer(lambda ordinal: ordinal + 10),
        cuDeviceGetAttribute=answer(lambda which, handle: attributes[which]),
        cuDeviceCanAccessPeer=answer(lambda a, b: int(a < b)),
        cuDeviceGetName=name,
    )


def test_driver(monkeypatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", fake_driver)
    facts = probes.collect()["cuda"]
    assert facts["driver"] == "13.1"
    assert facts["GPUs"] == ["GPU 10", "GPU 11"]
    assert facts["compute capabilities"] == [90, 90]
    assert facts["pairs without access"] == ["1->0"]
    assert facts["GPUs with multicast"] == 2


def test_driver_that_fails(monkeypatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: fake_driver(status=999))
    facts = probes.collect()["cuda"]
    assert facts["driver"] == Failed("cuDriverGetVersion: error 999")
    assert facts["GPUs"] == Failed("cuDeviceGetCount: error 999")


@pytest.mark.parametrize(("status", "expected"), [(0, "2.29.3"), (3, "? ncclGetVersion: error 3")])
def test_nccl(monkeypatch, status, expected) -> None:
    def get_version(out):
        out._obj.value = 22903
        return status

    monkeypatch.setattr(cuda_driver, "_nccl", lambda: SimpleNamespace(ncclGetVersion=get_version))
    assert str(probes.collect()["cuda"]["NCCL"]) == expected


def test_libraries_that_do_not_load(monkeypatch) -> None:
    def load(name):
        raise OSError(f"{name} is broken")

    monkeypatch.setattr(ctypes, "CDLL", load)
    cuda_driver._driver.cache_clear()
    facts = probes.collect()["cuda"]
    assert facts["driver"] == Failed("no CUDA driver (libcuda.so.1 is broken)")
    assert facts["NCCL"] == Failed("no NCCL (libnccl.so.2 is broken)")


# Machines where jcoll does not even import


def run(tmp_path, *argv: str, customize: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(customize)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "jcoll", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": path} | env,
    )


BROKEN = [
    ({"JCOLL_TIMEOUT": "soon"}, "jcoll: JCOLL_TIMEOUT='soon' in the environment"),
    ({"customize": "import sys; sys.modules['jcoll._native'] = None"}, "the compiled part of"),
    ({"customize": "import sys; sys.modules['jax'] = None"}, "import of jax halted"),
]


@pytest.mark.parametrize(("broken", "text"), BROKEN)
def test_broken(tmp_path, broken, text) -> None:
    done = run(tmp_path, "doctor", **broken)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    imports = next(line for line in done.stdout.splitlines() if line.startswith("  imports"))
    assert text in imports
    assert "on cpu: XLA's collectives\n" in done.stdout
    assert "  python  " in done.stdout


@pytest.mark.parametrize(("broken", "text"), BROKEN)
def test_other_commands_where_it_is_broken(tmp_path, broken, text) -> None:
    done = run(tmp_path, "plan", "verify", **broken)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("python -m jcoll plan: ")
    assert text in done.stderr
    assert ("doctor says more" in done.stderr) == ("customize" in broken)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_what_needs_no_jax(tmp_path, flag) -> None:
    done = run(tmp_path, flag, customize="import sys; sys.modules['jax'] = None")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("jcoll " if flag == "--version" else "usage: ")


def test_a_bug_keeps_its_traceback(tmp_path) -> None:
    """Of what a user cannot mend, where it is must be seen."""
    customize = """
import sys
class Broken:
    def __getattr__(self, name):
        1 / 0
sys.modules["jcoll.explain"] = Broken()
"""
    done = run(tmp_path, "info", customize=customize)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("python -m jcoll doctor says more.\n")


def test_a_backend_that_does_not_start(tmp_path) -> None:
    done = run(tmp_path, "doctor", JAX_PLATFORMS="no_such_platform")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "backend               ? RuntimeError: " in done.stdout


def test_an_error_without_words_says_where_it_comes_from() -> None:
    def probe():
        raise AssertionError

    found = str(probes._asked(probe))
    assert re.fullmatch(r"\? AssertionError at test_doctor\.py:\d+, in probe", found)


def test_gpus_that_jax_does_not_use(monkeypatch, capsys) -> None:
    """As without JAX's plugin for CUDA: whatever else is there, programs run elsewhere."""
    monkeypatch.setattr(cuda_driver, "_driver", fake_driver)
    monkeypatch.setattr(cuda, "obstacle", lambda: None)
    monkeypatch.setattr(cuda, "why_no_code", lambda capability: "")
    text = report(capsys)
    assert (
        "on cuda: XLA's collectives\n  jcoll's collectives: no, JAX does not use the GPUs: " in text
    )


@pytest.mark.parametrize(
    ("orig", "argv", "expected"),
    [
        (["python", "-m", "jcoll", "doctor"], ["-m", "doctor"], True),
        (["python", "-X", "dev", "-m", "jcoll"], ["-m"], True),
        (["python", "-mjcoll", "bench", "jcoll"], ["-m", "bench", "jcoll"], True),
        (["python", "-um", "jcoll", "info"], ["-m", "info"], True),
        (["python", "-m", "jcoll.bench.child", "jcoll"], ["-m", "jcoll"], False),
        (["python", "/usr/bin/jcoll", "doctor"], ["/usr/bin/jcoll", "doctor"], True),
        (["python", "-m", "mine", "-m", "jcoll"], ["-m", "-m", "jcoll"], False),
        (["python", "train.py", "doctor"], ["train.py", "doctor"], False),
        (["python"], [], False),
    ],
)
def test_only_the_command_line_survives(monkeypatch, orig, argv, expected) -> None:
    monkeypatch.setattr(sys, "orig_argv", orig)
    monkeypatch.setattr(sys, "argv", argv)
    assert errors.is_command_line() is expected
