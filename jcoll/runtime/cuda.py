"""The CUDA runtime: loads jcoll._cuda where it was built, registers its FFI targets, tells why it
cannot serve, and where the ranks of a call are.

Registered at import, as runtime/native.py does; on a machine without a GPU that is without effect.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jcoll import _compat, errors
from jcoll.algorithms import registry
from jcoll.config import config
from jcoll.runtime import ffi_headers, plans, world

TARGET = "jcoll_cuda_collective"

MIN_EXTENSION = (0, 1)
"""The FFI extension with which XLA lends its communicators to others (jaxlib 0.11.2)."""


def check_health() -> None:
    """Raises if a collective has failed on a GPU since this process began; without GPUs, does
    nothing. Once it has raised it always does, as communicators that have failed stay dead.

    A kernel that waits for a rank longer than its deadline gives up, leaves NaN (or the type's
    largest value) in its outputs, and notes for whom it waited. NCCL, where it does a collective
    for jcoll, waits on, and leaves no output. Either way the next jcoll collective on that device
    raises, and so does this function: after a step, or where a result looks wrong. What is known
    besides goes to stderr when the failure is first seen.

    Raises:
      RuntimeError: with the op, call site, rank and peer of every failure of this process.
    """
    records = _library.check_health() if _library is not None else []
    if records:
        problem = "collectives have failed on the GPU:\n  " + "\n  ".join(records)
        fix = "Their outputs are poisoned, their ranks out of step: end all processes of the job."
        raise RuntimeError(errors.text("check_health", problem, fix))


# Is it there


def obstacle() -> str | None:
    """Why jcoll's CUDA runtime cannot serve programs that are compiled in this process."""
    if not config.cuda:
        return "JCOLL_CUDA=0"
    if _library is None:
        return _why_not_loaded
    return _extension_obstacle()


def _extension_obstacle() -> str | None:
    found = ffi_headers.collectives()
    if found is not None and found[0] == MIN_EXTENSION[0] and found >= MIN_EXTENSION:
        return None
    offered = "none" if found is None else ".".join(map(str, found))
    needed = ".".join(map(str, MIN_EXTENSION))
    return f"jaxlib's FFI lends no communicators (extension {offered}, not {needed}): 0.11.2 does"


def architectures() -> list[str]:
    """What the kernels were compiled for; none where they were not."""
    return [] if _library is None else _library.architectures()


def why_no_code(compute_capability: int) -> str:
    """Why the kernels do not run on a GPU (10 * major + minor); "": they do."""
    if _library is None:
        return _why_not_loaded
    return _library.why_no_code(compute_capability)


def _load() -> tuple[Any, str]:
    """The extension module, or None and why."""
    if not config.cuda:
        return None, "JCOLL_CUDA=0"
    try:
        import jcoll._cuda as library
    except ModuleNotFoundError:
        return None, "jcoll was built without CUDA"
    except ImportError as e:
        return None, f"jcoll._cuda cannot be loaded ({e})"
    return library, ""


_library, _why_not_loaded = _load()


def _set_up(library: Any) -> None:
    library.set_default_timeout(config.timeout_s)
    library.set_report_folder(os.fsencode(config.report_dir))
    library.set_plan_maker(plans.make)
    registry.on_register.append(library.forget_plans)
    for name, stages in library.targets().items():
        # The kernels take what changes between launches from device memory, so that XLA may record
        # them in a CUDA graph.
        jax.ffi.register_ffi_target(
            name, stages, platform="CUDA", traits=_compat.COMMAND_BUFFER_COMPATIBLE
        )


if _library is not None and _extension_obstacle() is None:
    _set_up(_library)


# Where the ranks are


def has_gpus(mesh: Any) -> bool:
    """Whether a program over this mesh is compiled for GPUs that are there; else it is for another
    machine (jax.export), of which nothing is known here."""
    return not isinstance(mesh, jax.sharding.AbstractMesh) and _devices(mesh)[0].platform == "gpu"


def placement(
    mesh: Any, axes: Sequence[Any], axis_size: int, group_of: Sequence[int]
) -> world.Placement:
    """Where the ranks of a call are: `host_of` numbers the NVLink domains, which are what a host is
    to the other runtime, if a group is over several. group_of: as world.placement has it."""
    if isinstance(mesh, jax.sharding.AbstractMesh) and jax.process_count() > 1:
        return world.Placement(obstacle="an abstract mesh over several processes")
    if not has_gpus(mesh):
        return world.Placement()
    positions = world.mesh_positions(mesh.shape, axes)
    domains = [_compat.nvlink_domain(device) for device in _devices(mesh)]
    numbers = list(dict.fromkeys(domains))
    domain_of = np.empty(len(positions), np.int64)
    domain_of[list(positions)] = [numbers.index(domain) for domain in domains]
    groups = world.by_group(domain_of, axis_size, group_of)
    if all(len(set(group)) == 1 for group in groups):
        return world.Placement()
    return world.Placement(host_of=tuple(domain_of.tolist()))


def _devices(mesh: Any) -> list[Any]:
    return list(np.asarray(mesh.devices).flat)
