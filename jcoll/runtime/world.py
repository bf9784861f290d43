"""The processes of this host, and which of them a mesh needs.

Processes of a `jax.distributed` job introduce themselves to each other over JAX's own key-value
store, once, when a program over several of them is first lowered or loaded. Those of one host then
share memory (csrc/shm). Whoever imports jcoll in a job (after jax.distributed.initialize, as under
`jcoll launch`) says so at once: the others then need not wait for one that dies before that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import platform
import sys
import threading
import time
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

KEY = "jcoll/world/2"
"""Where the store holds the processes' introductions; the number is that of their form."""
_POLL_S = 0.2
"""How often a process that waits for another one's introduction looks whether that still lives."""
_QUIET_S = 0.3
"""A process that leaves has done its part when no collective has been open here for so long: what
it has just dispatched may not have come to its first one yet."""


@dataclass(frozen=True)
class World:
    """hosts[i]: the host of JAX's process i. on_host: the processes of this host.

    same_tuning: whether all processes have the same tuning file of their own, or none.
    """

    hosts: tuple[str, ...]
    on_host: tuple[int, ...]
    same_tuning: bool


_world: World | None = None
_failure = ""
_lock = threading.Lock()


def host_id() -> str:
    """What tells this host from others: JCOLL_HOST_ID, or the boot, the name, and how processes are
    numbered: containers of one machine that do not see each other's processes are hosts apart."""
    return config.host_id or f"{_boot()}:{platform.node()}:{_pid_space()}"


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return ""


def _pid_space() -> str:
    """Processes that have the same one know each other by the same numbers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def join() -> World:
    """Introduces this process to the others, and waits for theirs; the first time.

    Raises RuntimeError, in all processes of a host, if another process does not come, or if memory
    cannot be shared.
    """
    global _world, _failure
    with _lock:
        if _failure:
            raise RuntimeError(_failure)
        if _world is not None:
            return _world
        try:
            _world = _join()
        except Exception as e:  # Whatever it is: a second introduction would find nobody.
            _failure = str(e)
            raise RuntimeError(_failure) from (None if isinstance(e, RuntimeError) else e)
        atexit.register(_leave, os.getpid())
        world = _world
    if not world.same_tuning:  # Perhaps an exception: this call's alone.
        problem = "the processes of this job have different tuning files; none of them is used."
        fix = "Give all the same JCOLL_TUNING_FILE, or none."
        warnings.warn(errors.text("world", problem, fix), RuntimeWarning, stacklevel=2)
    return world


def _join() -> World:
    me, count = jax.process_index(), jax.process_count()
    client = _compat.distributed_client()
    own: dict[str, Any] = {"host": host_id(), "problem": ""}
    try:
        own["tuning"] = own_digest()
        own["memory"] = _native.prepare_world(config.shm_nbytes, config.peer_reads)
    except Exception as e:
        own["problem"] = str(e)
    client.key_value_set(f"{KEY}/{me}", json.dumps(own))
    infos = [json.loads(_heard(client, "", i)) for i in range(count)]
    if problem := next((info["problem"] for info in infos if info["problem"]), ""):
        raise RuntimeError(problem)
    on_host = tuple(i for i in range(count) if infos[i]["host"] == own["host"])
    _share(client, me, {i: infos[i] for i in on_host})
    same_tuning = len({info["tuning"] for info in infos}) == 1
    return World(tuple(i["host"] for i in infos), on_host, same_tuning)


def _share(client: Any, me: int, infos: Mapping[int, Mapping[str, Any]]) -> None:
    """Maps the memory of this host's processes. All of them fail if one does: else it would be
    waited for."""
    problem = ""
    try:
        _native.join_world(list(infos).index(me), [(*v["memory"], i) for i, v in infos.items()])
    except Exception as e:
        problem = str(e)
    client.key_value_set(f"{KEY}/shared/{me}", json.dumps(problem))
    problems = [problem, *(json.loads(_heard(client, "shared/", i)) for i in infos)]
    if any(problems):
        raise RuntimeError(next(filter(None, problems)))


def _heard(client: Any, what: str, process: int) -> str:
    """What a process has said of itself; waits for it as long as it lives and there is time."""
    until = time.monotonic() + config.timeout_s
    while True:
        try:
            return client.blocking_key_value_get(f"{KEY}/{what}{process}", int(_POLL_S * 1000))
        except Exception as e:
            problem = _fate(client, process)
            if not problem and "DEADLINE_EXCEEDED" not in str(e):
                problem = f"cannot be asked for ({e})"
        if not problem and time.monotonic() > until:
            problem = f"has not introduced itself within {config.timeout_s:g} s (JCOLL_TIMEOUT)"
        if problem:
            problem = f"process {process} {problem}."
            fix = (
                "All processes must run the same programs: look for one that is slow or has ended."
            )
            raise RuntimeError(errors.text("world", problem, fix)) from None


def greet() -> None:
    """Says that this process is here, if jax.distributed is up. Starts no backend."""
    me = _compat.distributed_process()
    if me is not None:
        pid = os.getpid()
        own = {"host": host_id(), "space": _pid_space(), "pid": pid, "started": _start_of(pid)}
        _compat.distributed_client().key_value_set(f"{KEY}/here/{me}", json.dumps(own), True)
        atexit.register(_leave_early, me, pid)


def _fate(client: Any, process: int) -> str:
    """What became of a process that has not introduced itself: "" for nothing that is known."""
    if left := _said(client, f"left/{process}"):
        return f"has left ({json.loads(left)})"
    here = json.loads(_said(client, f"here/{process}") or "null")
    is_near = here and (here["host"], here["space"]) == (host_id(), _pid_space())
    if is_near and _start_of(here["pid"]) != here["started"]:
        return f"(pid {here['pid']}) has died"
    return ""


def _said(client: Any, key: str) -> str:
    try:
        return client.key_value_try_get(f"{KEY}/{key}")
    except Exception:  # Nothing.
        return ""


def _start_of(pid: int) -> str:
    """When a process was started, in the kernel's ticks; "" if there is none, or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _own_error() -> BaseException | None:
    """The exception that ends this program."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _reason() -> str:
    error = _own_error()
    return f"{type(error).__name__}: {error}" if error else "its program has ended"


# Children of a fork run what was registered before it, too, when they end; the parent stays.


def _leave_early(me: int, pid: int) -> None:
    """At exit without a World, in which the others would see it."""
    if os.getpid() != pid:
        return
    if _world is None and _compat.distributed_process() is not None:
        with contextlib.suppress(Exception):  # The store may have gone first.
            client = _compat.distributed_client()
            client.key_value_set(f"{KEY}/left/{me}", json.dumps(_reason()), True)


def _leave(pid: int) -> None:
    """At exit, before JAX waits for the other processes: who waits for us hears why.

    What has been dispatched is done first, unless the program has failed: the others count on it.
    """
    if os.getpid() != pid:
        return
    if not _own_error():
        begin = time.monotonic()
        while not _has_done_its_part(begin) and time.monotonic() < begin + config.timeout_s:
            time.sleep(0.005)
    _native.leave_world(_reason())


def _has_done_its_part(since: float) -> bool:
    """As far as can be known: XLA does not tell what is in flight but by arrays that are kept."""
    is_ready = all(a.is_deleted() or a.is_ready() for a in jax.live_arrays())
    return is_ready and min(_native.world_quiet(), time.monotonic() - since) > _QUIET_S


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


def placement(mesh: Any, axes: Sequence[Any], axis_size: int, group_of: Sequence[int]) -> Placement:
    """Where the ranks of a call over `axes` are; the same answer on all processes.

    group_of: the group of every position on the axes, empty for one group.
    """
    if jax.process_count() == 1:
        return Placement()
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return Placement(obstacle="an abstract mesh over several processes")
    positions = mesh_positions(mesh.shape, axes)
    process_of = np.empty(len(positions), np.int64)
    process_of[list(positions)] = [d.process_index for d in np.asarray(mesh.devices).flat]
    if not are_groups_split(process_of, axis_size, group_of):
        return Placement()
    hosts = join().hosts
    host_of = np.array([hosts.index(hosts[p]) for p in process_of])
    if are_groups_split(host_of, axis_size, group_of):
        return Placement(host_of=tuple(host_of.tolist()))
    return Placement(process_of=tuple(process_of.tolist()))


def are_groups_split(of_position: np.ndarray, axis_size: int, group_of: Sequence[int]) -> bool:
    """Whether some group has ranks in several processes (or hosts), which are given by position."""
    return any(len(set(group)) > 1 for group in by_group(of_position, axis_size, group_of))


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


def by_group(of_position: Any, axis_size: int, group_of: Sequence[int]) -> list[list[int]]:
    """What is known of every position in the mesh, for every group of ranks. group_of: the group of
    every position on the axes, empty for one group; ranks count as the positions do."""
    rows = of_position.reshape(-1, axis_size)
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


greet()
