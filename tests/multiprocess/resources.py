"""What collectives across processes cost while and after they run; one process of
tests/multiprocess/test_resources.py. Argument: the name of a function below."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import rank
from jax import lax

import jcoll


def status_kib(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field + ":"))


def psum(v: Any) -> Any:
    return jcoll.psum(v, "x")


def idle() -> None:
    """All wait for the last: for a collective, then, when it has come, for nothing."""
    mesh = rank.mesh_of()
    x = rank.put(mesh, np.ones((mesh.size, 8), np.float32))
    fn = rank.program(psum, mesh)
    fn(x).block_until_ready()
    used = []

    def measure() -> None:
        time.sleep(0.5)
        begin, cpu = time.monotonic(), time.process_time()
        time.sleep(3)
        used.append((time.process_time() - cpu) / (time.monotonic() - begin))

    if rank.ME in range(mesh.size - 1):
        thread = threading.Thread(target=measure)
        thread.start()
        fn(x).block_until_ready()
        thread.join()
        waiting = used.pop()
        measure()
        rank.report("idle", waiting=waiting, without=used[0])
    else:
        time.sleep(4)
        fn(x).block_until_ready()


def late() -> None:
    """Process 1 comes a second later; what process 0's metrics make of it."""
    mesh = rank.mesh_of()
    x = rank.put(mesh, np.ones((mesh.size, 8), np.float32))

    def rows(v: Any) -> Any:
        return jcoll.all_to_all_v(v, jnp.ones(mesh.size, np.int32), "x", output_size=mesh.size)[0]

    for name, fn in {"blocks": psum, "rows": rows}.items():
        run = rank.program(fn, mesh)
        run(x).block_until_ready()
        jcoll.reset_metrics()
        if rank.ME == 1:
            time.sleep(1)
        run(x).block_until_ready()
        (row,) = jcoll.metrics()
        rank.report(name, skew=row["skew_s"], exec=row["exec_s"])


def memory(steps: str) -> None:
    """Many small collectives: a loop in one program, and many programs."""
    mesh = rank.mesh_of()

    def loop(v: Any) -> Any:
        return lax.fori_loop(0, int(steps), lambda i, u: jcoll.psum(u, "x") / mesh.size, v)

    fn = rank.program(loop, mesh)
    x = rank.put(mesh, np.ones((mesh.size, 8), np.float32))
    fn(x).block_until_ready()
    before, begin = status_kib("VmRSS"), time.monotonic()
    for _ in range(3):
        y = fn(x)
        y.block_until_ready()
    seconds = time.monotonic() - begin
    for part in rank.local(y).values():
        assert (part == 1).all()
    rank.report("memory", before=before, after=status_kib("VmRSS"), seconds=seconds)


def large(nbytes: str) -> None:
    """One all_reduce of so much."""
    mesh = rank.mesh_of()

    def ones(v: Any) -> Any:
        return jnp.full((int(nbytes) // 4,), 1.0 + lax.axis_index("x"), jnp.float32)

    x = rank.program(ones, mesh)(rank.put(mesh, np.zeros((mesh.size, 1), np.float32)))
    fn = rank.program(psum, mesh)
    y = fn(x).block_until_ready()
    shared = status_kib("RssShmem")
    right = all(bool((shard.data == 3).all()) for shard in y.addressable_shards)
    assert right
    rank.report("large", shared=shared)


def in_flight() -> None:
    """More collectives at once than JCOLL_SHM_SIZE has room for."""
    mesh = rank.mesh_of()

    def many(v: Any) -> Any:
        return [jcoll.psum(v + k, "x") for k in range(64)]

    x = rank.put(mesh, np.ones((mesh.size, 4096), np.float32))
    if rank.ME == 1:
        time.sleep(1)  # They pile up in the others.
    text, seconds, _ = rank.failing(rank.program(many, mesh), x)
    rank.report("in_flight", text=text, seconds=seconds)
    one = rank.program(psum, mesh)
    text, _, _ = rank.failing(one, rank.put(mesh, np.ones((mesh.size, 8), np.float32)))
    rank.report("after", text=text)
    rank.leave()


def hosts() -> None:
    """Each process says, with JCOLL_HOST_ID, that it is a host of its own."""
    mesh = rank.mesh_of()
    x = rank.put(mesh, np.ones((mesh.size, 8), np.float32))
    fn = rank.program(psum, mesh)
    (row,) = jcoll.explain(fn, x)
    (part,) = rank.local(fn(x)).values()
    rank.report("hosts", algorithm=row.algorithm, reason=row.reason, value=float(part[0]))

    def direct(v: Any) -> Any:
        return jcoll.all_reduce(v, "x", algorithm="direct")

    rank.report("direct", text=rank.failing(rank.program(direct, mesh), x)[0])


def closed() -> None:
    """Nobody can open process 1's memory."""
    from jcoll import _native

    if rank.ME == 1:
        prepare = _native.prepare_world
        _native.prepare_world = lambda *settings: (os.getpid(), 9999, *prepare(*settings)[2:])
    mesh = rank.mesh_of()
    x = rank.put(mesh, np.ones((mesh.size, 8), np.float32))
    text, seconds, _ = rank.failing(rank.program(psum, mesh), x)
    rank.report("closed", text=text, seconds=seconds)
    time.sleep(1)
    rank.leave()


if __name__ == "__main__":
    globals()[rank.ARGS[0]](*rank.ARGS[1:])
