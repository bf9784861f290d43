"""What all commands of `python -m jcoll` have in common."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from jcoll import cli

SHOW = ["plan", "show", "all_reduce", "ring", "-n", "64", "--all"]
EXPLAIN = ["explain", "all_reduce", "--size", "1M", "--mesh", "d=4"]


@pytest.mark.parametrize("argv", [SHOW, EXPLAIN], ids=lambda argv: argv[0])
def test_who_reads_no_further_is_no_error(argv):
    """As with `| head -1`: more output than a pipe holds, and less."""
    command = [sys.executable, "-m", "jcoll", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE
    process.stderr.close()


def test_an_interrupt_is_one_line(tmp_path, capsys):
    path = tmp_path / "user.py"
    path.write_text("raise KeyboardInterrupt\n")
    assert cli.main([*SHOW, "--module", str(path)]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "python -m jcoll plan: interrupted\n"


def test_no_stdout():
    """As a daemon has none."""
    argv = [sys.executable, "-m", "jcoll", "plan", "show", "all_reduce", "ring", "-n", "2"]
    argv = ["sh", "-c", 'exec "$@" >&-', "sh", *argv]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
