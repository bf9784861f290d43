"""Every environment variable of jcoll, read once at import; and those that share out the cores."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from jcoll.cores import num_cores
from jcoll.sizes import MAX_NBYTES, format_size, parse_size

MAX_THREADS = 1024
"""More than this the runtime never starts (csrc/executor.cc)."""

LONGEST_S = 1e9
"""30 years, which stand for ever: for longer, threads and stores cannot wait by the clock."""

_POOLS = ("NPROC", "OMP_NUM_THREADS", "JCOLL_NUM_THREADS")  # NPROC: XLA's


def pool_sizes(num_processes: int) -> dict[str, str]:
    """Variables that give each of so many processes its share of this process's cores."""
    share = max(1, num_cores() // num_processes)
    return dict.fromkeys(_POOLS, str(share))


def _positive(env: Mapping[str, str], name: str, default: float, kind: type) -> float:
    text = env.get(name, "")
    if not text:
        return default
    try:  # Python's own numbers may have _ in them, and digits of all scripts.
        value = kind(text) if text.isascii() and "_" not in text else -1
    except ValueError:
        value = -1
    if not 0 < value < math.inf:
        what = "integer" if kind is int else "number"
        raise ValueError(
            f"jcoll: {name}={text!r} in the environment is not a positive {what}.\n"
            f"  Set it to one, e.g. {name}={default or 4:.0f}, or unset it."
        )
    return value


def _nbytes(env: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        nbytes = parse_size(text)
    except ValueError:
        nbytes = -1
    if nbytes < least:
        raise ValueError(
            f"jcoll: {name}={text!r} in the environment is not a size from {least} to "
            f"{format_size(MAX_NBYTES)} bytes.\n"
            f"  Set it to one, e.g. {name}={format_size(default)}, or unset it."
        )
    return nbytes


def _choice(env: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> str:
    value = env.get(name) or default
    if value not in choices:
        raise ValueError(
            f"jcoll: {name}={value!r} in the environment is not one of {', '.join(choices)}.\n"
            f"  Set it to one of these, or unset it (default: {default})."
        )
    return value


def _folder(env: Mapping[str, str], name: str) -> str:
    path = env.get(name, "")
    if not path:
        return ""
    why = ""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        why = f"is no folder and cannot be made one ({e.strerror})"
    else:
        if not os.access(path, os.W_OK | os.X_OK):
            why = "cannot be written to"
    if why:
        raise ValueError(
            f"jcoll: {name}={path!r} in the environment {why}.\n"
            "  Set it to a folder that can be written to, or unset it."
        )
    return os.path.abspath(path)


@dataclass(frozen=True)
class Config:
    """The settings, with their variables."""

    timeout_s: float = 300.0
    """`JCOLL_TIMEOUT`, seconds: how long a collective waits for its last rank before it fails."""

    num_threads: int = 0
    """`JCOLL_NUM_THREADS`: size of the CPU runtime's pool, at most MAX_THREADS; unset: the cores of
    this process."""

    algorithm: str = "auto"
    """`JCOLL_ALGORITHM`: what `algorithm="auto"` means where it serves the op: auto, direct, xla
    (XLA's own), or the name of an algorithm."""

    intercept: bool = False
    """`JCOLL_INTERCEPT`: 1 lowers `jax.lax`'s collectives through jcoll from import on."""

    host_id: str = ""
    """`JCOLL_HOST_ID`: processes with the same one share memory; unset: boot id, host name and PID
    namespace."""

    shm_nbytes: int = 256 << 20
    """`JCOLL_SHM_SIZE`, bytes, or 64M and the like: shared memory of each process, of which a
    large collective takes 1 MiB a rank while it runs; pages that are not used take none."""

    peer_reads: int = 1 << 20
    """`JCOLL_PEER_READS`, bytes, or 256K: blocks from this size on are read in the memory of other
    processes (process_vm_readv), where the system allows it, instead of being copied through shared
    memory; 0: none are. Where they map that memory (JCOLL_SHARED_HEAP), 64K are large enough."""

    shared_heap: bool = True
    """`JCOLL_SHARED_HEAP`: 0 keeps XLA's buffers out of memory that other processes of this host
    map. Else they are there if libjcoll_heap is preloaded, as it is by `jcoll launch`
    (jcoll.shared_heap). It reads the variable itself, as it is there before Python."""

    tuning_file: str = ""
    """`JCOLL_TUNING_FILE`: costs by which `algorithm="auto"` chooses, as `python -m jcoll tune`
    writes them; unset: those in the user's cache, if any; none: only those that come with jcoll."""

    cuda: bool = True
    """`JCOLL_CUDA`: 0 leaves jcoll's CUDA runtime alone; GPUs then have XLA's collectives."""

    report_dir: str = ""
    """`JCOLL_REPORT_DIR`: a folder, made where there is none, for files in which each process tells
    of its failures: a JSON file each, by host and process id; unset: stderr has what is known."""

    isa: str = "best"
    """`JCOLL_ISA`: best, avx512, avx2 or baseline: caps the instruction set of the reductions."""

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> Config:
        """Reads the variables. Raises ValueError that names the variable, its value and a fix."""
        return Config(
            timeout_s=_positive(env, "JCOLL_TIMEOUT", Config.timeout_s, float),
            num_threads=min(MAX_THREADS, int(_positive(env, "JCOLL_NUM_THREADS", 0, int))),
            algorithm=env.get("JCOLL_ALGORITHM") or "auto",
            intercept=_choice(env, "JCOLL_INTERCEPT", "0", ("0", "1")) == "1",
            host_id=env.get("JCOLL_HOST_ID", ""),
            shm_nbytes=_nbytes(env, "JCOLL_SHM_SIZE", Config.shm_nbytes),
            peer_reads=_nbytes(env, "JCOLL_PEER_READS", Config.peer_reads, least=0),
            shared_heap=_choice(env, "JCOLL_SHARED_HEAP", "1", ("0", "1")) == "1",
            tuning_file=env.get("JCOLL_TUNING_FILE", ""),
            cuda=_choice(env, "JCOLL_CUDA", "1", ("0", "1")) == "1",
            report_dir=_folder(env, "JCOLL_REPORT_DIR"),
            isa=_choice(env, "JCOLL_ISA", "best", ("best", "avx512", "avx2", "baseline")),
        )


config = Config.from_environment()
