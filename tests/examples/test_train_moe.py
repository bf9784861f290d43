"""train_moe.py: train_gpt.py with experts. That it is right is in test_meshes.py."""

import json
import re

import example_programs
import pytest

for package in ("optax", "rich"):
    pytest.importorskip(package, reason="comes with jcoll[examples]")

EXAMPLE = example_programs.EXAMPLES / "train_moe.py"
TINY = ["--layers=1", "--width=32", "--heads=2", "--seq=32", "--batch=16", "--lr=0.02"]


def train(folder, *flags):
    """(report, what is printed)."""
    path = folder / "report.json"
    output = example_programs.run_here("train_moe", *TINY, "--json", path, *flags)
    return json.loads(path.read_text()), output


def losses(report):
    return [row["loss"] for row in report["history"]]


def test_experts_are_spread_and_rows_without_room_counted(tmp_path):
    flags = ["--expert-mode=capacity", "--capacity-factor=0.5", "--dtype=bfloat16", "--top-k=1"]
    report, output = train(tmp_path, *flags, "--steps=30")
    assert report["options"]["experts"] == 16
    assert report["options"]["mesh"] == {"data": 1, "expert": 8}
    dropped = [row["dropped"] for row in report["history"]]
    assert all(0.4 < share < 1 for share in dropped)  # Half finds no room if all are in balance.
    assert f"{sum(dropped) / 30:.2%} of the rows routed to experts were dropped" in output
    assert losses(report)[-1] < losses(report)[0] - 1


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    launch = ["-m", "jcoll", "launch", "-n", "2", "--devices-per-process", "4", EXAMPLE]
    path = tmp_path / "launched.json"
    flags = ["--mesh=data=2,expert=4", "--steps=5"]
    example_programs.run(*launch, *TINY, *flags, "--json", path)
    report = json.loads(path.read_text())
    assert report["device"]["processes"] == 2
    assert losses(report) == pytest.approx(losses(train(tmp_path, *flags)[0]), rel=1e-5)


def test_help_names_the_program():
    help_text = example_programs.run(EXAMPLE, "--help")
    assert help_text.startswith("usage: train_moe.py")
    assert "mixture-of-experts" in help_text
    assert "examples/train_moe.py" in help_text and "examples/train_gpt.py" not in help_text
    assert re.search(r"--experts N +of a layer \[16\]", help_text)
