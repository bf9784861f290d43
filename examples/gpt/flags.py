"""What the command lines of all examples share. Imports no jax: flags decide how it must start."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class Parser(argparse.ArgumentParser):
    """argparse's errors without the page of usage in front of them, once for each process."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n  See: {self.prog} --help\n")


def add_int(group, flag: str, default: int, what: str) -> None:
    """A flag of a number; its help is `what`, and the default."""
    group.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{what} [{default}]".strip()
    )


def fail(parser, name: str, value, need: str) -> None:
    """Ends the program with an error about the flag of `name`."""
    flag = f"--{name.replace('_', '-')}"
    parser.error(f"{flag} {value} is not possible; it must be {need}.")


def check_seed(parser, seed: int) -> None:
    """Ends the program unless jax and numpy take it: of 2^32 and more, jax would drop the rest."""
    if not 0 <= seed < 2**32:
        fail(parser, "seed", seed, "from 0 to 4294967295")


def check_output(parser, name: str, path) -> None:
    """Ends the program, before the run that it is to tell of, if the file `path` cannot be written.
    None: nobody asked for it.
    """
    if path is None:
        return
    if Path(path).is_dir():
        fail(parser, name, repr(str(path)), "the name of a file, and that is a folder")
    check_folder(parser, name, Path(path).parent)
    if Path(path).exists() and not os.access(path, os.W_OK):
        fail(parser, name, path, "a file that may be written")


def check_packages(parser, *names: str) -> None:
    """Ends the program, before jax starts, unless the packages are there."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        parser.error(
            f"this program needs {' and '.join(missing)}, which this Python does not have. Run "
            "pip install '.[examples]' in a checkout of jcoll."
        )


def check_picture(parser, name: str, path) -> None:
    """The same for a picture, of one of the kinds that matplotlib draws."""
    check_output(parser, name, path)
    if path is None:
        return
    check_packages(parser, "matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if (suffix := Path(path).suffix) and suffix[1:].lower() not in kinds:
        fail(parser, name, path, f"a name that ends in .{', .'.join(sorted(kinds))}")


def check_folder(parser, name: str, path) -> None:
    """The same for a folder, which is made if it is not there, with those above it."""
    if path is None:
        return
    path = Path(path).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        fail(parser, name, path, f"a folder that may be written; {there} is none")


def round_up(value: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-value // multiple) * multiple


def start_cpu_devices(count: int) -> None:
    """Makes a CPU-only jax show `count` devices. Does nothing to GPUs, all of which are used, nor
    under `python -m jcoll launch`, where jax has started with its own.
    """
    if "jax" in sys.modules:
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith(DEVICE_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{DEVICE_COUNT_FLAG}={count}"])
