"""train_gpt.py and demo.py as a user runs them, with few and small steps."""

import functools
import importlib.util
import json
import math
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import example_programs
import jax
import pytest

import jcoll

for package in ("optax", "rich", "matplotlib"):
    pytest.importorskip(package, reason="comes with jcoll[examples]")

TRAIN = example_programs.EXAMPLES / "train_gpt.py"
TINY = ["--layers=1", "--width=32", "--heads=2", "--seq=32", "--batch=16", "--lr=0.02"]
STEPS = 30
ROW_KEYS = {
    *("step", "loss", "dropped", "wall_s", "step_s", "step_cpu_s", "tokens_per_s", "collectives")
}
TOTAL_KEYS = {"steps", "wall_s", "tokens_per_s", "collectives"}
COUNTERS = {"calls", "bytes", "exec_s", "skew_s"}


def train(run, folder, *flags):
    """(report, what is printed) of a run by run(*words)."""
    report = folder / "report.json"
    output = run(*TINY, "--json", report, *flags)
    return json.loads(report.read_text()), output


train_here = functools.partial(train, functools.partial(example_programs.run_here, "train_gpt"))
train_there = functools.partial(train, functools.partial(example_programs.run, TRAIN))


def losses(report):
    return [row["loss"] for row in report["history"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    files = ["--plot", folder / "loss.png", "--save", folder / "saved"]
    extra = {"jcoll": ["--sample", "40", *files], "lax": []}
    jcoll.reset_metrics()
    return folder, {
        name: train_here(folder, "--collectives", name, "--steps", STEPS, *flags)
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
    assert all("gpt/ranks.py:" in site["site"] for site in report["sites"])
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


def test_in_a_process_of_its_own(tmp_path):
    """On other devices, in 16 bits and small buckets, for some seconds."""
    flags = ["--devices=4", "--dtype=bfloat16", "--bucket-bytes=16384", "--seconds=0.5"]
    report, _ = train_there(tmp_path, *flags)
    assert report["device"]["count"] == 4
    steps = report["totals"]["steps"]
    assert steps >= 1
    assert report["totals"]["wall_s"] - report["history"][-1]["step_s"] <= 0.5
    wire_bytes = report["totals"]["collectives"]["bytes"]
    assert wire_bytes == steps * (2 * report["device"]["parameters"] + 4)
    assert all(math.isfinite(loss) for loss in losses(report))


def test_goes_on_where_another_run_ended(runs, tmp_path):
    """Steps are counted on, in the report, on the screen and in what is saved."""
    saved, new = runs[0] / "saved", tmp_path / "new"
    report, output = train_here(tmp_path, "--steps=2", "--resume", saved, "--save", new)
    assert [row["step"] for row in report["history"]] == [STEPS, STEPS + 1]
    assert f"step {STEPS + 2:5d}  loss" in output
    assert json.loads((new / "manifest.json").read_text())["metadata"] == {"step": STEPS + 2}
    assert losses(report)[0] < losses(runs[1]["jcoll"][0])[0] - 1


def test_help():
    assert "--collectives" in example_programs.run(TRAIN, "--help")
    assert "--quick" in example_programs.run(example_programs.EXAMPLES / "demo.py", "--help")


def refused(capsys, *flags):
    """The error of flags with which nothing runs."""
    with pytest.raises(SystemExit) as stopped:
        example_programs.load("train_gpt").main(list(flags))
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("train_gpt.py: error: ")
    return message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--batch 12", ["--batch 12", "8 devices", "Try --batch 16"]),
        ("--width 100 --heads 8", ["--width 100", "--heads 8", "Try --width 104"]),
        ("--collectives mpi", ["--collectives", "'mpi'", "jcoll", "lax"]),
        ("--steps 0", ["--steps 0", "at least 1"]),
        ("--lr -1", ["--lr -1", "above 0"]),
        ("--lr nan", ["--lr nan", "above 0"]),
        ("--lr inf", ["--lr inf", "finite"]),
        ("--seconds 0", ["--seconds 0", "above 0"]),
        ("--bucket-bytes 0", ["--bucket-bytes 0", "at least 1"]),
        ("--num-processes 2", ["--num-processes", "--distributed"]),
        ("--distributed --seconds 5", ["--seconds 5", "--steps"]),
        ("--dtype float8", ["--dtype", "float32", "bfloat16"]),
        (f"--save {TRAIN.parent}", ["--save", "is there already"]),
        ("--save=", ["--save", "is there already"]),
        (f"--save {TRAIN}/step-1", ["--save", f"{TRAIN} is none"]),
        ("--json /dev/null/history.json", ["--json", "/dev/null is none"]),
        ("--json .", ["--json '.'", "a folder"]),
        ("--plot loss.txt", ["--plot loss.txt", ".png"]),
        ("--seed -1", ["--seed -1", "from 0"]),
        ("--seed 4294967296", ["--seed 4294967296", "to 4294967295"]),
    ],
)
def test_bad_flags(flags, words, capsys):
    message = refused(capsys, *flags.split())
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--seconds -1", ["--seconds -1", "above 0"]),
        ("--seconds 0", ["--seconds 0", "above 0"]),
        ("--plot /dev/null/loss.png", ["--plot", "/dev/null is none"]),
        (f"--out {TRAIN}", ["--out", f"{TRAIN}"]),
    ],
)
def test_bad_flags_of_the_demo(flags, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        example_programs.load("demo").main(flags.split())
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message


def test_demo_ends_with_a_leg_that_fails(tmp_path):
    demo = example_programs.load("demo")
    with pytest.raises(SystemExit, match=r"the leg lax ended with 2: .*train_gpt.py .*--steps 0"):
        demo.run_leg(tmp_path, "lax", "--steps", "0")


def test_demo_is_no_program_for_launch(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    with pytest.raises(SystemExit) as stopped:
        example_programs.load("demo").main(["--quick"])
    assert stopped.value.code == 2
    assert "Run it alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume", "nowhere"], ["--resume nowhere: ", "there is no checkpoint"]),
        (["--lr", "1e30", "--clip", "0", "--check-finite"], ["in step 2: ", "['embedding']"]),
    ],
    ids=["resume", "check-finite"],
)
def test_what_is_no_bug_ends_without_a_traceback(flags, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        example_programs.run_here("train_gpt", *TINY, "--steps", "9", *flags)
    assert stopped.value.code == 1
    message = capsys.readouterr().err
    for word in ["train_gpt.py: ", *words]:
        assert word in message


def test_what_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", {"rich": "there"}.get)
    assert "needs optax, which this Python does not have. Run pip install" in refused(
        capsys, "--steps=1"
    )


def test_seconds_under_launch(monkeypatch, capsys):
    """Where jax.distributed has started already: each process would stop at another step."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert "--seconds 5 with several processes" in refused(capsys, "--seconds=5")


def test_all_reduce_example():
    program = example_programs.EXAMPLES / "all_reduce.py"
    output = example_programs.run(program)
    assert "[[ 84.  92. 100.]]" in output
    assert re.search(r"1 all_reduce of 12 bytes by 8 ranks, called at \S*all_reduce.py:", output)
    assert len(program.read_text().splitlines()) < 80


@pytest.mark.parametrize("name", ["all_reduce.py", "own_algorithm.py"])
def test_flags_of_the_small_examples(name):
    program = example_programs.EXAMPLES / name
    assert f"python examples/{name}" in example_programs.run(program, "--help")
    done = example_programs.start(program, "--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr


@pytest.mark.slow
def test_demo(tmp_path):
    picture = tmp_path / "loss.png"
    flags = ["--quick", "--seconds", "3", "--out", tmp_path / "out", "--plot", picture]
    output = example_programs.run(example_programs.EXAMPLES / "demo.py", *flags)
    assert picture.read_bytes().startswith(b"\x89PNG")
    for word in ("jcoll", "lax", "mesh", "|difference|", "ratio", "collectives a step", "ppermute"):
        assert word in output
    assert "The losses agree" in output


@pytest.mark.slow
def test_launched_mesh_goes_on_elsewhere(tmp_path):
    """Two processes train on a mesh of three axes; one goes on with another, from their folder."""
    folder = tmp_path / "step-4"
    mesh = ["--mesh=data=2,tensor=2,context=2", "--zero=3", "--sequence-parallel"]
    launch = ["-m", "jcoll", "launch", "-n", "2", "--devices-per-process", "4", TRAIN]
    launched = functools.partial(example_programs.run, *launch)
    before, output = train(launched, tmp_path, *mesh, "--steps=4", "--sample=20", "--save", folder)
    assert "def main(" in output
    assert before["device"]["processes"] == 2
    assert {site["op"] for site in before["sites"]} >= {"all_gather", "reduce_scatter", "ppermute"}
    assert all("gpt/" in site["site"] for site in before["sites"])
    other = ["--resume", folder, "--mesh=data=4,tensor=2", "--zero=1", "--steps=3"]
    after, _ = train_here(tmp_path, *other)
    alone, _ = train_there(tmp_path, "--devices=1", "--steps=7")
    assert losses(before) + losses(after) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    distributed = ["--distributed", "--num-processes=2", "--coordinator", address]
    command = [TRAIN, *TINY, "--steps=5", "--devices=4", *distributed]
    reports = [tmp_path / f"{i}.json" for i in range(2)]

    def start(i):
        return example_programs.start(*command, "--process-id", i, "--json", reports[i])

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(start, range(2)))
    assert [each.returncode for each in done] == [0, 0], done
    assert not reports[1].exists()
    assert "step" not in done[1].stdout
    alone, _ = train_here(tmp_path, "--steps=5")
    got = json.loads(reports[0].read_text())
    assert got["device"]["processes"] == 2
    assert losses(got) == pytest.approx(losses(alone), rel=1e-5)
