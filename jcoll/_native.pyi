"""The module that csrc/bindings.cc makes."""

from collections.abc import Callable
from typing import Any

def targets() -> dict[str, dict[str, object]]:
    """{target name: {stage: capsule}}, as jax.ffi.register_ffi_target takes it."""

def metrics() -> list[dict[str, Any]]:
    """One row per call site, as jcoll.metrics returns them, idle ones included."""

def reset_metrics() -> None:
    """Zeroes all counts."""

def set_default_timeout(seconds: float) -> None:
    """The deadline of the collectives that name none."""

def set_report_folder(folder: str | bytes) -> None:
    """Where failures are written to, in a file of this process; "": nowhere."""

def set_num_threads(num_threads: int) -> None:
    """The size of the pool; to be called before the first collective."""

def set_plan_maker(maker: Callable[[str, str, int, int], bytes]) -> None:
    """`maker`(op, algorithm, num_ranks, root) gives the plans that programs name, encoded."""

def prepare_world(arena_nbytes: int, peer_reads: int) -> tuple[int, int, int, list[int]]:
    """Makes this process's shared memory: (pid, fd, nbytes, nonce), for the others to open it."""

def join_world(self: int, infos: list[tuple[int, int, int, list[int], int]]) -> None:
    """Maps the memory of this host's processes: their (pid, fd, nbytes, nonce, JAX's process
    index)."""

def leave_world(reason: str) -> None:
    """Tells the others that this process will not take part any more."""

def world_quiet() -> float:
    """Seconds since a collective between processes was last open here; 0 if one is."""

def forget_plans() -> None:
    """Has plans made anew for programs that are loaded from now on."""

def num_threads() -> int:
    """The size of the pool: the cores of this process, unless set."""

def num_workers_alive() -> int:
    """Threads of the pool that run now."""

def num_sites() -> int:
    """Collective instructions of loaded executables."""

def num_stalls() -> int:
    """How often the pool was found stuck with work in its queue, and given another thread."""

def isa() -> str:
    """The instruction set of the reductions in use: avx512, avx2 or baseline."""

def set_isa(name: str) -> bool:
    """Uses that one from now on; False, and no change, if this machine has no such set."""
