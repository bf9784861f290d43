"""What machine and which versions a measurement comes from; also `python -m jcoll info`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

from jcoll import _native
from jcoll.cores import num_cores

_PACKAGES = ("jcoll", "jax", "jaxlib", "numpy")


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def runtime() -> dict[str, str]:
    """How jcoll's CPU runtime has set itself up."""
    return {"isa": _native.isa(), "threads": str(_native.num_threads())}


def line() -> str:
    """One line for the head of a table."""
    named = (f"{name} {value}" for name, value in (versions() | runtime()).items())
    return ", ".join([cpu_model(), f"{num_cores()} cores", *named])


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print what jcoll runs on: machine, versions, devices, environment."


def run(args: argparse.Namespace) -> int:
    import jax  # here, not above: nothing else in this file needs to start it

    facts = {"machine": cpu_model(), "cores": str(num_cores()), **versions(), **runtime()}
    facts["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    facts |= {k: v for k, v in sorted(os.environ.items()) if k.startswith(("JCOLL_", "XLA_FLAGS"))}
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0
