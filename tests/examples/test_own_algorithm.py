import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_own_algorithm(tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_algorithm.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "my_star all_reduce of 4 ranks: 2 rounds, 6 messages" in run.stdout
    assert "The sum of the rows of 8 ranks: [[ 84.  92. 100.]]" in run.stdout
    assert (tmp_path / "own_algorithm.svg").read_text().startswith("<svg")
