"""Questions to the CUDA driver and to NCCL, where they are installed. Starts nothing on a GPU.

By ctypes, so that they can be asked where jcoll was built without CUDA; `python -m jcoll doctor`
shows the answers.
"""

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

_SUCCESS = 0
_NAME_SIZE = 256


class DriverError(Exception):
    """The driver is absent or does not answer; the text says which."""


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


def _ask(function: str, kind: Any, *args: Any) -> Any:
    """What a function of the driver writes to its first argument."""
    out = kind()
    if status := getattr(_driver(), function)(ctypes.byref(out), *args):
        raise DriverError(f"{function}: error {status}")
    return out.value


def version() -> tuple[int, int]:
    """The CUDA version that the driver knows."""
    number = _ask("cuDriverGetVersion", ctypes.c_int)
    return number // 1000, number % 1000 // 10


def num_devices() -> int:
    return _ask("cuDeviceGetCount", ctypes.c_int)


def attribute(ordinal: int, which: int) -> int | None:
    """A device's attribute; None where it cannot be asked."""
    try:
        return _ask("cuDeviceGetAttribute", ctypes.c_int, which, _ask_device(ordinal))
    except DriverError:
        return None


def name(ordinal: int) -> str:
    text = ctypes.create_string_buffer(_NAME_SIZE)
    if status := _driver().cuDeviceGetName(text, _NAME_SIZE, _ask_device(ordinal)):
        raise DriverError(f"cuDeviceGetName: error {status}")
    return text.value.decode(errors="replace")


def can_access_peer(ordinal: int, peer: int) -> bool:
    """Whether kernels on one device can load and store memory of the other."""
    args = _ask_device(ordinal), _ask_device(peer)
    return _ask("cuDeviceCanAccessPeer", ctypes.c_int, *args) == 1


def _ask_device(ordinal: int) -> int:
    return _ask("cuDeviceGet", ctypes.c_int, ordinal)


def nccl_version() -> tuple[int, int, int]:
    """Of the NCCL that XLA would load: that of the wheel, else the system's."""
    library = _nccl()
    number = ctypes.c_int()
    if status := library.ncclGetVersion(ctypes.byref(number)):
        raise DriverError(f"ncclGetVersion: error {status}")
    major, rest = divmod(number.value, 10000)
    return major, rest // 100, rest % 100


def _nccl() -> Any:
    reasons = []
    for path in [*_wheels_nccl(), "libnccl.so.2"]:
        try:
            return ctypes.CDLL(str(path))
        except OSError as e:
            reasons.append(str(e))
    raise DriverError(f"no NCCL ({reasons[-1]})")


def _wheels_nccl() -> list[Path]:
    """Where the wheels nvidia-nccl-cu12 and -cu13 put it."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return [path for folder in folders for path in Path(folder).glob("nccl/lib/libnccl.so.2")]
