"""The programs of examples/: their modules, and runs of them in this process or in their own."""

import contextlib
import importlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))  # As when one of them runs.


def load(name: str) -> ModuleType:
    """ "train_gpt", "gpt.model", ..."""
    return importlib.import_module(name)


@contextlib.contextmanager
def as_users_have_it() -> Iterator[None]:
    """The examples rely on broadcasting and on 32 bits being the default."""
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.enable_x64(False),
    ):
        yield


def run_here(name: str, *flags: object) -> str:
    """What the program prints, on the 8 devices of this process."""
    printed = io.StringIO()
    with as_users_have_it(), contextlib.redirect_stdout(printed):
        assert load(name).main(list(map(str, flags))) == 0
    return printed.getvalue()


def start(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command of Python to its end, good or bad."""
    words = [sys.executable, *map(str, command)]
    options = {"timeout": 300, "cwd": ROOT, **options}
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def run(*command: object, **options: object) -> str:
    """What a command of Python prints that must succeed."""
    done = start(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
