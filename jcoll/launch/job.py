"""What `jcoll launch` runs: the environment and the command line of each process."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jcoll import shared_heap
from jcoll.config import pool_sizes

ADDRESS = "127.0.0.1"
_CHILD = Path(__file__).with_name("child.py")
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Job:
    target: tuple[str, ...]
    """The script or module, and its arguments."""

    is_module: bool
    num_processes: int
    port: int
    devices_per_process: int = 1
    num_hosts: int | None = None

    def environment(self, rank: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """`base` and what makes this process rank `rank`; the sizes of thread pools stay if set."""
        env = pool_sizes(self.num_processes) | dict(base)
        # JAX_NUM_CPU_DEVICES overrules this flag; without it nobody need know.
        env["XLA_FLAGS"] = re.sub(rf"{_DEVICE_FLAG}=\S*", "", env.get("XLA_FLAGS", "")).strip()
        env |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices_per_process),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            # jax.distributed.initialize reads the addresses; programs often read the other two.
            "JAX_COORDINATOR_ADDRESS": f"{ADDRESS}:{self.port}",
            "JAX_COORDINATOR_BIND_ADDRESS": f"{ADDRESS}:{self.port}",
            "JAX_NUM_PROCESSES": str(self.num_processes),
            "JAX_PROCESS_ID": str(rank),
            "no_grpc_proxy": ADDRESS,
            "PYTHONUNBUFFERED": "1",
        }
        if self.num_hosts is not None:
            env["JCOLL_HOST_ID"] = f"host{rank * self.num_hosts // self.num_processes}"
        return shared_heap.preloaded(env)

    def command(self, rank: int, report_fd: int) -> list[str]:
        about = {
            "rank": rank,
            "num_processes": self.num_processes,
            "coordinator": f"{ADDRESS}:{self.port}",
            "launcher": os.getpid(),
            "report_fd": report_fd,
            "is_module": self.is_module,
        }
        return [sys.executable, str(_CHILD), json.dumps(about), *self.target]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Not: ports of jobs just ended
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
    return True
