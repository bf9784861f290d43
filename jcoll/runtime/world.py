"""The processes of this host, and which of them a mesh needs.

Processes of a `jax.distributed` job introduce themselves to each other over JAX's own key-value
store, once, when a program over several of them is first lowered or loaded. Those of one host then
share memory (csrc/shm).
"""

from __future__ import annotations

import atexit
import json
import math
import platform
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jcoll import _compat, errors
from jcoll.config import config
from jcoll.tuning.table import own_digest

try:
    from jcoll import _native
except ImportError:  # native.py says what to do.
    _native: Any = None

KEY = "jcoll/world/1"
"""Where the store holds the processes' introductions; the number is that of their form."""
PATIENCE_S = 120.0
"""How long a process waits for another one's introduction: it may yet be compiling."""


@dataclass(frozen=True)
class World:
    """hosts[i]: the host of JAX's process i. on_host: the processes of this host.

    same_tuning: whether all processes have the same tuning file of their own, or none.
    """

    hosts: tuple[str, ...]
    on_host: tuple[int, ...]
    same_tuning: bool


_world: World | None = None
_lock = threading.Lock()


def host_id() -> str:
    """What tells this host from others: JCOLL_HOST_ID, or the boot and the name."""
    if config.host_id:
        return config.host_id
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
    except OSError:
        boot = ""
    return f"{boot}:{platform.node()}"


def join() -> World:
    """Introduces this process to the others, and waits for theirs; the first time.

    Raises RuntimeError if another process does not come, or its memory cannot be shared.
    """
    global _world
    with _lock:
        if _world is None:
            _world = _join()
            atexit.register(_leave)
        return _world


def _join() -> World:
    me, count = jax.process_index(), jax.process_count()
    pid, fd, nbytes = _native.prepare_world(config.shm_nbytes)
    client = _compat.distributed_client()
    own = {"host": host_id(), "pid": pid, "fd": fd, "nbytes": nbytes}
    own["tuning"] = own_digest()
    client.key_value_set(f"{KEY}/{me}", json.dumps(own))
    infos = [_introduction(client, i) for i in range(count)]
    on_host = tuple(i for i in range(count) if infos[i]["host"] == own["host"])
    _native.join_world(
        on_host.index(me),
        [(infos[i]["pid"], infos[i]["fd"], infos[i]["nbytes"], i) for i in on_host],
    )
    same_tuning = len({info["tuning"] for info in infos}) == 1
    if not same_tuning:
        problem = "the processes of this job have different tuning files; none of them is used."
        fix = "Give all the same JCOLL_TUNING_FILE, or none."
        warnings.warn(errors.text("world", problem, fix), RuntimeWarning, stacklevel=2)
    return World(tuple(i["host"] for i in infos), on_host, same_tuning)


def _introduction(client: Any, process: int) -> dict[str, Any]:
    try:
        text = client.blocking_key_value_get(f"{KEY}/{process}", int(PATIENCE_S * 1000))
    except Exception as e:
        problem = f"process {process} has not introduced itself within {PATIENCE_S:g} s ({e})."
        fix = "All processes must run the same programs: look for one that is slow or has ended."
        raise RuntimeError(errors.text("world", problem, fix)) from None
    return json.loads(text)


def _leave() -> None:
    """At exit, before JAX waits for the other processes: who waits for us hears why."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    reason = f"{type(error).__name__}: {error}" if error else "its program has ended"
    _native.leave_world(reason)


# Placement


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a call are.

    process_of: JAX's process of every position in the mesh, if a group has ranks in several on one
    host; else None. host_of: a number for the host of every position, if a group has ranks on
    several. obstacle: why nobody knows.
    """

    process_of: tuple[int, ...] | None = None
    host_of: tuple[int, ...] | None = None
    obstacle: str | None = None


def placement(
    mesh: Any, positions: Sequence[int], axis_size: int, group_of: Sequence[int]
) -> Placement:
    """Where the ranks of a call are; the same answer on all processes.

    positions[i]: the position of the mesh's i-th device: index of the mesh's other axes * axis_size
    + index on the call's axes; group_of: the group of the latter, empty for one group.
    """
    if jax.process_count() == 1:
        return Placement()
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return Placement(obstacle="an abstract mesh over several processes")
    process_of = np.empty(len(positions), np.int64)
    process_of[list(positions)] = [d.process_index for d in np.asarray(mesh.devices).flat]
    groups = _groups(process_of, axis_size, group_of)
    if all(len(set(group)) == 1 for group in groups):
        return Placement()
    hosts = join().hosts
    if any(len({hosts[p] for p in group}) > 1 for group in groups):
        return Placement(host_of=tuple(hosts.index(hosts[p]) for p in process_of))
    return Placement(process_of=tuple(process_of.tolist()))


def has_same_tuning(where: Placement) -> bool:
    """Whether the user's own tuning file may decide: all processes must come to one algorithm.

    The processes of a job tell each other when they join. A call within one process does not make
    them join, as the others may run other programs; there the shipped table decides.
    """
    if jax.process_count() == 1:
        return True
    if where.process_of is None and where.host_of is None:
        return False
    return join().same_tuning


def _groups(process_of: Any, axis_size: int, group_of: Sequence[int]) -> list[list[int]]:
    """The processes of every group of ranks."""
    rows = process_of.reshape(-1, axis_size)
    if not group_of:
        return rows.tolist()
    labels = np.asarray(group_of)
    return [row[labels == g].tolist() for row in rows for g in range(labels.max() + 1)]


def mesh_positions(mesh_shape: Mapping[Any, int], axes: Sequence[Any]) -> tuple[int, ...]:
    """For every device of the mesh: group * axis_size + index on `axes`, the group counting the
    mesh's other axes."""
    names = list(mesh_shape)
    order = [names.index(a) for a in (*(n for n in names if n not in axes), *axes)]
    ids = np.arange(math.prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    return tuple(np.argsort(ids.transpose(order).reshape(-1)).tolist())
