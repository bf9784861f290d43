"""What the command lines of all examples share. Imports no jax: flags decide how it must start."""

import os
import sys

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def add_int(group, flag: str, default: int, what: str) -> None:
    """A flag of a number; its help is `what`, and the default."""
    group.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{what} [{default}]".strip()
    )


def fail(parser, name: str, value, need: str) -> None:
    """Ends the program with an error about the flag of `name`."""
    flag = f"--{name.replace('_', '-')}"
    parser.error(f"{flag} {value} is not possible; it must be {need}.")


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
