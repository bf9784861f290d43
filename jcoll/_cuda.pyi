"""The extension module of the CUDA runtime, which is there only where nvcc was at build time."""

from collections.abc import Callable

def targets() -> dict[str, dict[str, object]]:
    """{target name: {stage: capsule}}, as jax.ffi.register_ffi_target takes it."""

def architectures() -> list[str]:
    """What the kernels were compiled for: "sm_80-real", ...; without "-real" also as PTX."""

def why_no_code(compute_capability: int) -> str:
    """Why they do not run on a GPU of this capability (10 * major + minor); "": they do."""

def check_health() -> list[str]:
    """What went wrong in collectives of this process since it began, a text for each dead
    communicator; [] if nothing."""

def set_default_timeout(seconds: float) -> None:
    """The deadline of the collectives that name none."""

def set_report_folder(folder: str | bytes) -> None:
    """Where failures are written to, in a file of this process; "": nowhere."""

def set_plan_maker(maker: Callable[[str, str, int, int], bytes]) -> None:
    """`maker`(op, algorithm, num_ranks, root) gives the plans that programs name, encoded."""

def forget_plans() -> None:
    """Has plans made anew for programs that are loaded from now on."""
