"""train_moe.py as a user runs it: in processes of its own, with few and small steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"
TINY = "--layers=1 --width=32 --hidden=32 --heads=2 --seq=32 --batch=16 --experts=8 --lr=0.02"
STEPS = 30

for package in ("optax", "rich"):
    pytest.importorskip(package, reason="comes with jcoll[examples]")


def start(*command):
    """Runs a command to its end, good or bad."""
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def train(folder, *flags, steps=STEPS, launcher=()):
    """(report, output) of a run that must succeed."""
    path = folder / "report.json"
    done = start(*launcher, EXAMPLE, *TINY.split(), f"--steps={steps}", "--json", path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def losses(report):
    return [row["loss"] for row in report["history"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same model on one device."""
    return train(tmp_path_factory.mktemp("alone"), "--devices=1")[0]


def test_loss_is_that_of_one_device_and_falls(tmp_path, alone):
    report, output = train(tmp_path, "--devices=8", "--mesh=data=2,expert=4")
    ours, theirs = losses(report), losses(alone)
    assert report["device"]["experts_here"] == 2
    assert report["device"]["rows_dropped"] == [0] * STEPS
    assert "0 of 30,720 routed rows dropped" in output
    assert ours[:10] == pytest.approx(theirs[:10], rel=1e-5)
    assert sum(ours[-5:]) == pytest.approx(sum(theirs[-5:]), rel=0.02)
    assert sum(ours[-5:]) / 5 < ours[0] - 1
    assert report["val_loss"] == pytest.approx(alone["val_loss"], rel=0.02)


def test_capacity_that_is_too_small_drops_and_says_so(tmp_path):
    flags = ["--mode=capacity", "--capacity-factor=0.5", "--dtype=bfloat16", "--top-k=1"]
    report, output = train(tmp_path, *flags, "--mesh=expert=8", steps=2)
    dropped = report["device"]["rows_dropped"]
    assert all(0 < rows < 16 * 32 for rows in dropped)
    assert f"{sum(dropped):,} of 1,024 routed rows dropped" in output


@pytest.mark.slow
def test_two_processes_train_like_one_device(tmp_path, alone):
    launcher = ["-m", "jcoll", "launch", "-n", "2", "--devices-per-process", "2"]
    report, _ = train(tmp_path, "--mesh=data=1,expert=4", steps=5, launcher=launcher)
    assert report["device"]["processes"] == 2
    assert losses(report) == pytest.approx(losses(alone)[:5], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--mesh data=2,expert=2", ["--mesh data=2,expert=2 has 4 devices", "8"]),
        ("--mesh data=2,tensor=4", ["'tensor=4'", "data=N or expert=N"]),
        ("--mesh expert=0", ["'expert=0'", "at least 1"]),
        ("--batch 12", ["--batch 12", "8 devices", "Try --batch 16"]),
        ("--experts 6", ["--experts 6", "expert=4", "Try --experts 8"]),
        ("--experts 4 --top-k 5", ["--top-k 5", "at most --experts 4"]),
        ("--width 100 --heads 8", ["--width 100", "Try --width 104"]),
        ("--steps 0", ["--steps 0", "at least 1"]),
        ("--lr nan", ["--lr nan", "above 0"]),
        ("--capacity-factor 0", ["--capacity-factor 0", "above 0"]),
        ("--mode padded", ["--mode", "dropless", "capacity"]),
    ],
)
def test_bad_flags(flags, words):
    done = start(EXAMPLE, *flags.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
