"""Loads jcoll._native, configures it and registers its FFI targets with XLA.

Registered at import, before any backend exists, so that programs that come from `jax.export` or
the persistent compilation cache find them too.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from jcoll import errors
from jcoll.algorithms import registry
from jcoll.config import config
from jcoll.runtime import plans

try:
    from jcoll import _native
except ImportError as e:
    raise ImportError(
        errors.text(
            "_native",
            f"the compiled part of jcoll cannot be loaded ({e}).",
            "Install jcoll with pip (`pip install .` in a checkout); a source tree alone has none.",
        )
    ) from e

TARGET = "jcoll_collective"

# How the runtime has set itself up: the instruction set of its reductions, the size of its pool.
isa, num_threads = _native.isa, _native.num_threads


def _set_up() -> None:
    _native.set_default_timeout(config.timeout_s)
    _native.set_report_folder(os.fsencode(config.report_dir))  # Names need not be UTF-8.
    if config.num_threads:
        _native.set_num_threads(config.num_threads)
    if config.isa != "best" and not _native.set_isa(config.isa):
        problem = f"JCOLL_ISA={config.isa!r}, which this machine does not have."
        raise ValueError(
            errors.text("config", problem, f"It has {_native.isa()}; unset JCOLL_ISA.")
        )
    _native.set_plan_maker(plans.make)
    registry.on_register.append(_native.forget_plans)
    for name, stages in _native.targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")


def metrics() -> list[dict[str, Any]]:
    """What the CPU runtime has done in this process, one dict per call site.

    Keys: `op`, `algorithm`, `axis`, `dtype`, `num_ranks`, `call_site` ("file.py:line"); `nbytes`,
    one rank's size S as nccl-tests counts it; `calls`, completed collectives (one per group, not
    per rank); `bytes` = calls * nbytes; `row_bytes`, of ragged ops, the bytes of the rows that were
    sent, over all ranks and calls, those to oneself included (`bytes` counts whole operands);
    `mapped_bytes`, between processes, what the ranks of this one took straight from the others'
    buffers (JCOLL_SHARED_HEAP);
    `skew_s`, summed time from first to last arrival, as seen from this process: from its own first
    rank on; `exec_s`, summed time from the last arrival until all outputs of this process were
    written; `errors`.
    Collectives that XLA ran itself (`algorithm="xla"`, and what crosses hosts in `hierarchical`)
    are not seen. Those of several groups, or that overlap, count side by side: the sum can be more
    than the time that has passed.
    """
    return [row for row in _native.metrics() if row["calls"] or row["errors"]]


def reset_metrics() -> None:
    """Sets all counters of `metrics` to zero."""
    _native.reset_metrics()


_set_up()
