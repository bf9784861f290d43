"""What a choice of algorithm depends on, and who could serve. No jax."""

from __future__ import annotations

from dataclasses import dataclass

import jcoll.algorithms  # noqa: F401  (fills the catalogue)
from jcoll.algorithms import kernels, registry
from jcoll.algorithms.hierarchical import HIERARCHICAL_OPS
from jcoll.plan.ops import OPS

# Where the ranks of a group are.
PROCESS = "process"
PROCESSES = "processes"
HOSTS = "hosts"
NOWHERE = "nowhere"  # Where jcoll has no runtime.
PLACEMENTS = {
    PROCESS: "one process",
    PROCESSES: "several processes of one host",
    HOSTS: "several hosts",
    NOWHERE: "no runtime of jcoll's",
}

# Algorithms that add the values of all ranks at once, so that the executor rounds once, whatever
# the type. Others pass on partial sums.
_ROUND_ONCE = ("direct", "one_shot", "two_shot", "multimem")
CPU, CUDA = "cpu", "cuda"  # Device kinds.
ON_HOSTS = "its ranks are on several hosts"
NO_LEVELS = f"{ON_HOSTS}, and this op has no hierarchical algorithm"


@dataclass(frozen=True)
class Request:
    """A call, as far as the choice of its algorithm depends on it.

    sizes: of its groups. nbytes: as the benchmark counts, the larger of a rank's input and output.
    obstacle: why jcoll's runtime cannot serve it. is_narrow: reduces floats of 16 bits, of which
    the ops promise that they are rounded once. is_mean: divides by the number of ranks.
    use_own: whether the user's own table may decide, i.e. all processes of the job have the same.
    multimem_obstacle: why the kernel "multimem" cannot serve, on CUDA.
    """

    op: str
    sizes: tuple[int, ...]
    nbytes: int
    placement: str = PROCESS
    obstacle: str | None = None
    is_narrow: bool = False
    is_mean: bool = False
    use_own: bool = True
    device_kind: str = CPU
    multimem_obstacle: str | None = None

    @property
    def num_ranks(self) -> int:
        return max(self.sizes)


@dataclass(frozen=True)
class Candidate:
    """us: microseconds, if known; source: where from, e.g. "measured, 4 ranks, shipped", "scaled
    from 4 ranks, own table" or "modelled". obstacle: why not it."""

    algorithm: str
    obstacle: str | None = None
    us: float | None = None
    source: str = ""


def size_of(op: str, block_nbytes: int, num_ranks: int) -> int:
    """Request.nbytes from the size of a rank's input."""
    spec = OPS.get(op)
    gathers = spec is not None and spec.out_per_rank and not spec.in_per_rank
    return block_nbytes * num_ranks if gathers else block_nbytes


def candidates(request: Request) -> list[Candidate]:
    """All of the op, "direct" first and "xla", which always can, last."""
    names = ["direct", *registry.names(request.op)]
    names += kernels.only_on_cuda(request.op) if request.device_kind == CUDA else []
    if request.placement == HOSTS and request.op in HIERARCHICAL_OPS:
        names += [] if "hierarchical" in names else ["hierarchical"]  # Not a plan.
    return [*(Candidate(name, _obstacle(request, name)) for name in names), Candidate("xla")]


def serving(request: Request) -> list[str]:
    return [c.algorithm for c in candidates(request) if c.obstacle is None]


def refusal(request: Request, name: str) -> str | None:
    """Why the device cannot follow an algorithm, whoever asks for it."""
    on_cuda = request.device_kind == CUDA
    if name in kernels.ONLY_ON_CUDA:
        if not on_cuda:
            return "only CUDA has it"
        return request.multimem_obstacle if name == "multimem" else None
    if on_cuda and request.op in registry.RAGGED_OPS and _is_plan(request, name):
        return "on CUDA plans move blocks of one size"
    if name == "hierarchical" and name not in registry.names(request.op):
        return "its ranks are on one host"
    return None


def _is_plan(request: Request, name: str) -> bool:
    return registry.is_plan(request.op, name, on_cuda=request.device_kind == CUDA)


def _obstacle(request: Request, name: str) -> str | None:
    if request.obstacle is not None:
        return request.obstacle
    if name == "nccl" and request.device_kind == CUDA:
        return "only where it is asked for, and by hierarchical between NVLink domains"
    if request.placement == HOSTS:
        return _obstacle_between_hosts(request.op, name)
    if reason := refusal(request, name):
        return reason
    if name != "direct" and name not in kernels.ONLY_ON_CUDA:
        a = registry.get(request.op, name)
        for size in request.sizes:
            if reason := a.supports(size):
                return f"{size} ranks: {reason}"
    if request.is_narrow and name not in _ROUND_ONCE:
        return "would round partial sums to 16 bits"
    if request.is_narrow and request.is_mean and _is_plan(request, name):
        return "would round the sum to 16 bits before it is divided"
    return None


def _obstacle_between_hosts(op: str, name: str) -> str | None:
    if name == "hierarchical" and op in HIERARCHICAL_OPS:
        return None
    return ON_HOSTS
