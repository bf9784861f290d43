"""Memory of XLA:CPU's buffers that other processes can read where it is: libjcoll_heap (csrc/heap).

`jcoll launch` preloads it. Where others start the processes, it is named to the loader:

    mpirun -n 4 -x LD_PRELOAD=$(python -m jcoll shared-heap) python train.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "JCOLL_SHARED_HEAP"
_NAME = "libjcoll_heap.so"
_SEPARATOR = re.compile("[: ]")  # In the loader's list, which knows no quotes.

_DESCRIPTION = f"""\
Print the path of the library that makes XLA's CPU buffers readable by the other processes of this
machine, for LD_PRELOAD, where mpirun, srun or the like start the processes:

  mpirun -n 4 -x LD_PRELOAD=$(python -m jcoll shared-heap) python train.py

`jcoll launch` needs no such help. {VARIABLE}=0 turns it off. Exit status: 1 if there is none.
"""


def library() -> Path | None:
    """Where it is: beside jcoll._native. None: it has not been built."""
    spec = importlib.util.find_spec("jcoll._native")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(_NAME)
    return path if path.is_file() else None


def obstacle(env: Mapping[str, str] = os.environ) -> str | None:
    """Why processes do not get it from `preloaded`; None: they do."""
    if env.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    path = library()
    if path is None:
        return f"{_NAME} has not been built"
    if _SEPARATOR.search(str(path)):
        return f"LD_PRELOAD cannot name {str(path)!r}, which has a space or a colon in it"
    return None


def preloaded(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the library in front of what LD_PRELOAD names, if nothing is in the way."""
    if obstacle(env) is not None:
        return dict(env)
    path, before = str(library()), env.get("LD_PRELOAD", "")
    if path in _SEPARATOR.split(before):
        return dict(env)
    return dict(env) | {"LD_PRELOAD": f"{path}:{before}".rstrip(":")}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION


def run(args: argparse.Namespace) -> int:
    if (why := obstacle({})) is not None:
        print(f"jcoll: there is no shared heap: {why}.\n  Install jcoll with pip.", file=sys.stderr)
        return 1
    print(library())
    return 0
