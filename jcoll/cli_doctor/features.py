"""What jcoll uses on each platform, and what keeps it from more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jcoll import shared_heap
from jcoll.cli_doctor.probes import Facts, Failed

WINDOWS_EXTENSION = (0, 2)
"""The FFI extension by which XLA registers a program's own buffers (jaxlib 0.12)."""
SHARING_ALLOCATOR = "vmm"
"""The allocator of XLA's that gives memory which other GPUs may map."""
PEER_POINTERS_NCCL = (2, 29)
"""The NCCL that gives pointers to registered peers' memory: cuda/ffi/nccl.h."""


@dataclass(frozen=True)
class Feature:
    """Something that jcoll does on a platform if nothing is in the way."""

    platform: str
    name: str
    obstacle: str | None  # None: it does it.


def features(facts: Facts) -> Iterator[Feature]:
    """All features, by platform. Never raises, whatever of the facts has failed."""
    cpu = _cpu_obstacle(facts)
    yield Feature("cpu", "jcoll's runtime, all algorithms", cpu)
    memory = cpu or _memory_obstacle(facts)
    yield Feature("cpu", "shared memory between processes", memory)
    heap = memory or shared_heap.obstacle()
    yield Feature("cpu", "no staging of large blocks between them (jcoll launch)", heap)
    obstacle = _cuda_obstacle(facts)
    yield Feature("cuda", "jcoll's collectives", obstacle)
    peers = obstacle or _peers_obstacle(facts)
    yield Feature("cuda", "kernels over NVLink or PCIe peers", peers)
    yield Feature("cuda", "without copies to staging memory", peers or _windows_obstacle(facts))
    yield Feature("cuda", "multimem", peers or _multicast_obstacle(facts))
    yield Feature("others", "jcoll's collectives", "there is no runtime for them; XLA's are used")


def used(found: list[Feature], platform: str) -> str:
    """What a platform gets, in a few words: its first feature, or XLA's collectives."""
    first = next(feature for feature in found if feature.platform == platform)
    return "XLA's collectives" if first.obstacle else first.name


def _cpu_obstacle(facts: Facts) -> str | None:
    imports = facts["jcoll"]["imports"]
    return f"import jcoll fails: {imports.why}" if isinstance(imports, Failed) else None


def _memory_obstacle(facts: Facts) -> str | None:
    shares = facts["machine"]["shared memory"]
    return shares.why if isinstance(shares, Failed) else None


def _cuda_obstacle(facts: Facts) -> str | None:
    if imports := _cpu_obstacle(facts):
        return imports
    gpus = facts["cuda"]["GPUs"]
    if isinstance(gpus, Failed) or not gpus:
        return gpus.why if isinstance(gpus, Failed) else "the driver sees no GPU"
    if isinstance(devices := facts["jax"]["CUDA devices"], Failed):
        return f"JAX does not use the GPUs: {devices.why}"
    obstacle = facts["cuda"]["obstacle"]
    return str(obstacle) if obstacle is not None else _kernels_obstacle(facts)


def _kernels_obstacle(facts: Facts) -> str | None:
    without = facts["cuda"]["GPUs without kernels"]
    if isinstance(without, Failed):
        return without.why
    return without[0] if without else None


def _peers_obstacle(facts: Facts) -> str | None:
    cuda = facts["cuda"]
    nccl = cuda["NCCL"]
    if isinstance(nccl, Failed):
        return nccl.why
    if _numbers(nccl) < PEER_POINTERS_NCCL:
        return f"NCCL {nccl}, {_text(PEER_POINTERS_NCCL)} gives pointers to peers; NCCL's are used"
    pairs = cuda["pairs without access"]
    if isinstance(pairs, Failed):
        return pairs.why
    return f"no peer access {', '.join(pairs)}; NCCL's are used" if pairs else None


def _windows_obstacle(facts: Facts) -> str | None:
    extension = facts["jax"]["FFI collectives"]
    if isinstance(extension, Failed):
        return extension.why
    if extension is None or _numbers(extension) < WINDOWS_EXTENSION:
        return f"FFI collectives {extension}, {_text(WINDOWS_EXTENSION)} has windows (jaxlib 0.12)"
    allocator = facts["jax"]["GPU allocator"]
    if allocator != SHARING_ALLOCATOR:
        return (
            f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}: {SHARING_ALLOCATOR}'s memory can be shared"
        )
    return None


def _multicast_obstacle(facts: Facts) -> str | None:
    count, gpus = facts["cuda"]["GPUs with multicast"], facts["cuda"]["GPUs"]
    if isinstance(count, Failed):
        return count.why
    return None if count == len(gpus) else f"{count} of {len(gpus)} GPUs have multicast"


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).split("."))


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
