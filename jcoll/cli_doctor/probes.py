"""The facts, section by section. A probe that fails gives its error in the place of its fact."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jcoll.cli_doctor import cuda_driver
from jcoll.cores import num_cores

PACKAGES = (
    "jcoll",
    "jax",
    "jaxlib",
    "numpy",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


@dataclass(frozen=True)
class Failed:
    """What stands for a fact that could not be had."""

    why: str

    def __str__(self) -> str:
        return f"? {self.why}"


Probe = Callable[[], Any]
Facts = dict[str, dict[str, Any]]
"""By section and name: strings, numbers, lists and bools; None: there is no such thing; Failed."""


def collect() -> Facts:
    """All facts. Never raises."""
    return {
        section: {name: _asked(probe) for name, probe in probes.items()}
        for section, probes in PROBES.items()
    }


def _asked(probe: Probe) -> Any:
    try:
        return probe()
    except cuda_driver.DriverError as e:
        return Failed(str(e))
    except Exception as e:  # Whatever is wrong here is what the report is for.
        return Failed(f"{type(e).__name__}{_what_it_says(e)}")


def _what_it_says(e: Exception) -> str:
    """Its first line or, as an assertion of JAX's has none, where it comes from."""
    if first_line := str(e).partition("\n")[0]:
        return f": {first_line}"
    place = traceback.extract_tb(e.__traceback__)[-1]
    return f" at {os.path.basename(place.filename)}:{place.lineno}, in {place.name}"


# The machine


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _shares_memory() -> bool:
    """Whether memory can be made that other processes open: what csrc/shm needs."""
    fd = os.memfd_create("jcoll-doctor")
    try:
        os.ftruncate(fd, 4096)
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
    finally:
        os.close(fd)
    return True


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# jcoll


def _imports() -> bool:
    """`import jcoll` fails as a whole where one of these does."""
    import jcoll.explain
    import jcoll.intercept
    import jcoll.ops

    return bool(jcoll.ops.SPECS)


def _isa() -> str:
    from jcoll import _native

    return f"{_native.isa()}, {_native.num_threads()} threads"


def _host_id() -> str:
    from jcoll.runtime import world

    return world.host_id()


def _shm_mib() -> int:
    from jcoll.config import config

    return config.shm_nbytes >> 20


def _algorithm() -> str:
    from jcoll.comm.group import Groups
    from jcoll.comm.mesh import configured_algorithm
    from jcoll.config import config

    # Every call that is auto fails where this does.
    try:
        configured_algorithm("all_reduce", Groups(1))
    except ValueError as error:
        problem = str(error).partition("\n")[0]
        raise ValueError(f"{problem} (Unless the program registers it.)") from None
    return config.algorithm


def _tuning_file() -> str | None:
    from jcoll.tuning import table

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        own = table.own("cpu")
    if told:
        raise ValueError(str(told[0].message))
    return str(table.own_path()) if own else None


def _settings() -> dict[str, str]:
    names = ("JCOLL_", "XLA_", "JAX_PLATFORMS", "NCCL_", "CUDA_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(names)}


# JAX


def _backend() -> str:
    # A look at the devices is not to take their memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax.default_backend()


def _devices() -> list[str]:
    import jax

    kinds = [device.device_kind for device in jax.devices()]
    return [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]


def _cuda_devices() -> int:
    """Which JAX has only with its plugin for CUDA, and if JAX_PLATFORMS lets it."""
    import jax

    return len(jax.devices("cuda"))


def _allocator() -> str:
    """Of GPU memory, as JAX's client for GPUs reads it."""
    return os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()


def _processes() -> int:
    import jax

    return jax.process_count()


def _ffi() -> str | None:
    from jcoll.runtime import ffi_headers

    return _dotted(ffi_headers.api())


def _ffi_collectives() -> str | None:
    from jcoll.runtime import ffi_headers

    return _dotted(ffi_headers.collectives())


def _dotted(version: tuple[int, ...] | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


# CUDA


def _library() -> list[str]:
    """The architectures of jcoll's CUDA library; none: not built, or not loaded."""
    from jcoll.runtime import cuda

    return cuda.architectures()


def _gpus_without_kernels() -> list[str]:
    """Why, for each kind of GPU on which the library's kernels do not run."""
    from jcoll.runtime import cuda

    reasons = map(cuda.why_no_code, _compute_capabilities())
    return sorted({reason for reason in reasons if reason})


def _cuda_obstacle() -> str | None:
    from jcoll.runtime import cuda

    return cuda.obstacle()


def _driver() -> str:
    return str(_dotted(cuda_driver.version()))


def _nccl() -> str:
    return str(_dotted(cuda_driver.nccl_version()))


def _gpus() -> list[str]:
    return [cuda_driver.name(i) for i in range(cuda_driver.num_devices())]


def _compute_capabilities() -> list[int]:
    """10 * major + minor, as in sm_90."""
    found = map(cuda_driver.compute_capability, range(cuda_driver.num_devices()))
    return [10 * major + minor for major, minor in found]


def _pairs_without_access() -> list[str]:
    """Pairs of GPUs of which the first cannot load from the second."""
    ordinals = range(cuda_driver.num_devices())
    return [
        f"{a}->{b}"
        for a in ordinals
        for b in ordinals
        if a != b and not cuda_driver.can_access_peer(a, b)
    ]


def _gpus_with_multicast() -> int:
    which = cuda_driver.MULTICAST_SUPPORTED
    return sum(cuda_driver.attribute(i, which) == 1 for i in range(cuda_driver.num_devices()))


PROBES: dict[str, dict[str, Probe]] = {
    "machine": {
        "host": socket.gethostname,
        "system": platform.platform,
        "processor": platform.machine,
        "cores": num_cores,
        "memory GiB": _memory_gib,
        "shared memory": _shares_memory,
    },
    "versions": {"python": platform.python_version}
    | {package: (lambda package=package: _version(package)) for package in PACKAGES},
    "jcoll": {
        "imports": _imports,
        "CPU runtime": _isa,
        "host id": _host_id,
        "shared MiB": _shm_mib,
        "algorithm": _algorithm,
        "tuning file": _tuning_file,
        "settings": _settings,
    },
    "jax": {
        "backend": _backend,
        "devices": _devices,
        "CUDA devices": _cuda_devices,
        "processes": _processes,
        "GPU allocator": _allocator,
        "FFI": _ffi,
        "FFI collectives": _ffi_collectives,
    },
    "cuda": {
        "driver": _driver,
        "GPUs": _gpus,
        "compute capabilities": _compute_capabilities,
        "pairs without access": _pairs_without_access,
        "GPUs with multicast": _gpus_with_multicast,
        "NCCL": _nccl,
        "jcoll's kernels": _library,
        "GPUs without kernels": _gpus_without_kernels,
        "obstacle": _cuda_obstacle,
    },
}
