"""The examples as a user runs them: in processes of their own, with few and small steps."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--layers=1", "--width=32", "--heads=2", "--seq=32", "--batch=16", "--lr=0.02"]
STEPS = 30
ROW_KEYS = {"step", "loss", "wall_s", "step_s", "step_cpu_s", "tokens_per_s", "collectives"}
TOTAL_KEYS = {"steps", "wall_s", "tokens_per_s", "collectives"}
COUNTERS = {"calls", "bytes", "exec_s", "skew_s"}

for package in ("optax", "rich", "matplotlib"):
    pytest.importorskip(package, reason="comes with jcoll[examples]")


def start(name, *flags):
    """Runs an example to its end, good or bad."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def example(name, *flags):
    """The output of an example that must succeed."""
    done = start(name, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder, collectives, *flags):
    report = folder / f"{collectives}.json"
    output = example("train_gpt.py", *TINY, "--collectives", collectives, "--json", report, *flags)
    return json.loads(report.read_text()), output


def losses(report):
    return [row["loss"] for row in report["history"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    extra = {"jcoll": ["--sample", "40", "--plot", folder / "loss.png"], "lax": []}
    return folder, {
        name: train(folder, name, "--steps", STEPS, "--devices", 8, *flags)
        for name, flags in extra.items()
    }


def test_losses_agree_and_decrease(runs):
    ours, theirs = (losses(report) for report, _ in runs[1].values())
    assert len(ours) == len(theirs) == STEPS
    for a, b in zip(ours[:10], theirs[:10], strict=True):
        assert abs(a - b) <= 1e-5 * b
    assert sum(ours[-5:]) / 5 == pytest.approx(sum(theirs[-5:]) / 5, rel=0.02)
    assert ours[0] == pytest.approx(math.log(256), rel=0.03)
    assert sum(ours[-5:]) / 5 < ours[0] - 1


@pytest.mark.parametrize("name", ["jcoll", "lax"])
def test_json_report(runs, name):
    report, _ = runs[1][name]
    assert set(report) == {"options", "device", "history", "totals", "sites", "val_loss"}
    assert report["options"]["collectives"] == name
    assert report["device"]["count"] == 8
    assert [row["step"] for row in report["history"]] == list(range(STEPS))
    assert all(set(row) == ROW_KEYS for row in report["history"])
    assert set(report["totals"]) == TOTAL_KEYS
    assert report["totals"]["steps"] == STEPS
    assert report["totals"]["wall_s"] == report["history"][-1]["wall_s"]
    assert 0 < report["val_loss"] < math.log(256)


def test_collectives_are_counted_where_jcoll_runs_them(runs):
    report, _ = runs[1]["jcoll"]
    totals = report["totals"]["collectives"]
    assert set(totals) == COUNTERS
    gradients_and_loss = 4 * (report["device"]["parameters"] + 1)
    assert totals["bytes"] == STEPS * gradients_and_loss
    assert all(row["collectives"]["bytes"] == gradients_and_loss for row in report["history"])
    assert report["device"]["all_reduces_in_step"] == 0
    assert sum(site["exec_s"] for site in report["sites"]) == pytest.approx(totals["exec_s"])
    assert {site["op"] for site in report["sites"]} == {"all_reduce"}
    assert all(site["site"].startswith("gpt/ranks.py:") for site in report["sites"])
    assert 0 < totals["exec_s"] < report["totals"]["wall_s"]


def test_lax_leg_says_that_it_cannot_know(runs):
    report, output = runs[1]["lax"]
    assert report["totals"]["collectives"] is None
    assert report["sites"] == []
    assert report["device"]["all_reduces_in_step"] >= 1
    assert "collectives        -" in output


def test_sample_and_plot(runs):
    folder, reports = runs
    assert "def main(" in reports["jcoll"][1]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_four_devices_bfloat16_and_small_buckets(tmp_path):
    flags = ["--steps", 3, "--devices", 4, "--dtype", "bfloat16", "--bucket-bytes", 2048]
    report, _ = train(tmp_path, "jcoll", *flags)
    assert report["device"]["count"] == 4
    wire_bytes = report["totals"]["collectives"]["bytes"]
    assert wire_bytes == 3 * (2 * report["device"]["parameters"] + 4)
    assert all(math.isfinite(loss) for loss in losses(report))


def test_stops_after_the_given_seconds(tmp_path):
    report, _ = train(tmp_path, "jcoll", "--seconds", "0.5", "--devices", 4)
    assert report["totals"]["wall_s"] - report["history"][-1]["step_s"] <= 0.5
    assert report["totals"]["steps"] >= 1


def test_help():
    assert "--collectives" in example("train_gpt.py", "--help")
    assert "--quick" in example("demo.py", "--help")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--batch 12 --devices 8", ["--batch 12", "8 devices", "Try --batch 16"]),
        ("--width 100 --heads 8", ["--width 100", "--heads 8", "Try --width 104"]),
        ("--collectives mpi", ["--collectives", "'mpi'", "jcoll", "lax"]),
        ("--steps 0", ["--steps 0", "at least 1"]),
        ("--lr -1", ["--lr -1", "above 0"]),
        ("--lr nan", ["--lr nan", "above 0"]),
        ("--seconds 0", ["--seconds 0", "above 0"]),
        ("--bucket-bytes 0", ["--bucket-bytes 0", "at least 1"]),
        ("--num-processes 2", ["--num-processes", "--distributed"]),
        ("--distributed --seconds 5", ["--seconds 5", "--steps"]),
        ("--dtype float8", ["--dtype", "float32", "bfloat16"]),
    ],
)
def test_bad_flags(flags, words):
    done = start("train_gpt.py", *flags.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_all_reduce_example():
    output = example("all_reduce.py")
    assert "[[ 84.  92. 100.]]" in output
    assert "1 all_reduce of 12 bytes by 8 ranks, called at examples/all_reduce.py:" in output
    assert len((EXAMPLES / "all_reduce.py").read_text().splitlines()) < 80


@pytest.mark.slow
def test_demo(tmp_path):
    picture = tmp_path / "loss.png"
    flags = ["--quick", "--seconds", "3", "--out", tmp_path / "out", "--plot", picture]
    output = example("demo.py", *flags)
    assert picture.read_bytes().startswith(b"\x89PNG")
    for word in ("jcoll", "lax", "mesh", "|difference|", "ratio", "collectives a step", "ppermute"):
        assert word in output
    assert "The losses agree" in output


@pytest.mark.slow
def test_launched_mesh_goes_on_elsewhere(tmp_path):
    """Two processes train on a mesh of three axes; one goes on with another, from their folder."""
    folder, report = tmp_path / "step-4", tmp_path / "launched.json"
    mesh = ["--mesh=data=2,tensor=2,context=2", "--zero=3", "--seq=32", "--sequence-parallel"]
    launcher = ["-m", "jcoll", "launch", "-n", "2", "--devices-per-process", "4"]
    program = [EXAMPLES / "train_gpt.py", *TINY, *mesh, "--steps=4", "--sample=20"]
    command = [sys.executable, *launcher, *program, "--save", folder, "--json", report]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "def main(" in done.stdout
    before = json.loads(report.read_text())
    assert before["device"]["processes"] == 2
    assert {site["op"] for site in before["sites"]} >= {"all_gather", "reduce_scatter", "ppermute"}
    assert all("gpt/" in site["site"] for site in before["sites"])
    other = ["--resume", folder, "--mesh=data=4,tensor=2", "--zero=1", "--steps=3"]
    after, _ = train(tmp_path, "jcoll", *other)
    alone, _ = train(tmp_path, "jcoll", "--devices=1", "--steps=7")
    assert losses(before) + losses(after) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("collectives", ["jcoll", "lax"])
def test_two_processes_train_like_one(tmp_path, collectives):
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, "--steps=5", "--devices=4"]
    command += ["--collectives", collectives, "--distributed", "--num-processes=2"]
    command += ["--coordinator", f"127.0.0.1:{free_port()}"]
    reports = [tmp_path / f"{i}.json" for i in range(2)]
    processes = [
        subprocess.Popen(
            [*command, "--process-id", str(i), "--json", str(reports[i])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert not reports[1].exists()
    assert "step" not in outputs[1]
    alone, _ = train(tmp_path, collectives, "--steps", 5, "--devices", 8)
    got = json.loads(reports[0].read_text())
    assert got["device"]["processes"] == 2
    assert losses(got) == pytest.approx(losses(alone), rel=1e-5)


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
