"""Questions to the CUDA driver and to NCCL, by ctypes: they can be asked where jcoll was built
without CUDA, and nothing is started on a GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

# CUdevice_attribute.
COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76
MULTICAST_SUPPORTED = 132

_NAME_SIZE = 256


class DriverError(Exception):
    """A library is absent or does not answer; the text says which."""


@functools.cache
def _driver() -> Any:
    """libcuda, initialized."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise DriverError(f"no CUDA driver ({e})") from None
    if status := library.cuInit(0):
        raise DriverError(f"the CUDA driver does not start (cuInit: error {status})")
    return library


def _ask(function: str, *args: int) -> int:
    """The integer that a function of the driver writes to its first argument."""
    out = ctypes.c_int()
    if status := getattr(_driver(), function)(ctypes.byref(out), *args):
        raise DriverError(f"{function}: error {status}")
    return out.value


def version() -> tuple[int, int]:
    """The CUDA version that the driver knows."""
    number = _ask("cuDriverGetVersion")
    return number // 1000, number % 1000 // 10


def num_devices() -> int:
    return _ask("cuDeviceGetCount")


def attribute(ordinal: int, which: int) -> int:
    return _ask("cuDeviceGetAttribute", which, _handle(ordinal))


def compute_capability(ordinal: int) -> tuple[int, int]:
    major, minor = COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR
    return attribute(ordinal, major), attribute(ordinal, minor)


def name(ordinal: int) -> str:
    text = ctypes.create_string_buffer(_NAME_SIZE)
    if status := _driver().cuDeviceGetName(text, _NAME_SIZE, _handle(ordinal)):
        raise DriverError(f"cuDeviceGetName: error {status}")
    return text.value.decode(errors="replace")


def can_access_peer(ordinal: int, peer: int) -> bool:
    """Whether kernels on one device can load and store memory of the other."""
    return _ask("cuDeviceCanAccessPeer", _handle(ordinal), _handle(peer)) == 1


def _handle(ordinal: int) -> int:
    return _ask("cuDeviceGet", ordinal)


def nccl_version() -> tuple[int, int, int]:
    """Of the NCCL that JAX would load: that of the wheel, else the system's."""
    number = ctypes.c_int()
    if status := _nccl().ncclGetVersion(ctypes.byref(number)):
        raise DriverError(f"ncclGetVersion: error {status}")
    return number.value // 10000, number.value % 10000 // 100, number.value % 100


def _nccl() -> Any:
    reason = ""
    for path in [*_of_wheels(), "libnccl.so.2"]:
        try:
            return ctypes.CDLL(str(path))
        except OSError as e:
            reason = str(e)
    raise DriverError(f"no NCCL ({reason})")


def _of_wheels() -> list[Path]:
    """Where nvidia-nccl-cu12 and -cu13 put it."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return [path for folder in folders for path in Path(folder).glob("nccl/lib/libnccl.so.2")]
