"""A process that goes wrong, and what the others see; one process of
tests/multiprocess/test_faults.py.

    faults.py how when [victim]     process 1 goes wrong, or another

how: kill, stop, raise, exit (os._exit), quit (sys.exit); when: before (the processes know each
other), start (before the first collective), between (two collectives), inside (a chain of large
ones), end (it has done its last ones, which the others are late for). The others report the
exception of their collective, and one of the survivors' own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import rank
from jax import lax
from jax.sharding import Mesh

import jcoll

VICTIM = int(rank.ARGS[2]) if len(rank.ARGS) > 2 else 1


def small(v: Any) -> Any:
    return jcoll.psum(v, "x")


def chain(v: Any) -> Any:
    """Minutes of all_reduces of 4 MiB, if nothing happens."""
    return lax.fori_loop(0, 100_000, lambda i, u: jcoll.psum(u, "x") * 0.25, v)


def end_of(v: Any) -> Any:
    """What is still in flight when a program that is right ends, which has the result."""
    v = lax.fori_loop(0, 60, lambda i, u: jcoll.psum(u, "x") / rank.COUNT, v)
    return jcoll.psum(v, "x")


def last(v: Any) -> Any:
    """What the one that goes wrong sends last: it is done when the others have begun to read."""
    return jcoll.broadcast(v, "x", root=VICTIM)


class OwnBug(Exception):
    pass


def go_wrong(how: str) -> None:
    rank.report("wrong", at=time.monotonic())
    if how in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    elif how == "raise":
        raise OwnBug("a bug of the program")
    elif how == "exit":
        os._exit(3)
    elif how == "quit":
        sys.exit(4)


def go_wrong_inside(how: str, fn: Callable, x: Any) -> None:
    """While the chain runs. The main thread does not wait for it, so that it can raise."""
    if how == "quit":
        rank.kept = fn(x)
        go_wrong(how)
    y = fn(x)
    time.sleep(0.5)
    assert not y.is_ready()
    if how == "raise":
        go_wrong(how)
    threading.Thread(target=go_wrong, args=(how,)).start()
    y.block_until_ready()


def go_wrong_at_end(how: str, mesh: Mesh) -> None:
    """As soon as it has done the program's last collective, to which the others come late."""
    values = np.arange(mesh.size, dtype=np.float32)
    x = rank.put(mesh, np.repeat(values[:, None], 15_000, 1))  # 60 KB: staged, not read in place.
    fn = rank.program(last, mesh).lower(x).compile()
    if rank.ME == VICTIM:
        fn(x).block_until_ready()
        go_wrong(how)
    time.sleep(0.3)

    def receive() -> None:
        (part,) = rank.local(fn(x)).values()
        assert (part == VICTIM).all(), part

    report_failing(receive)


def report_failing(f: Callable, *args: Any) -> None:
    text, seconds, at = rank.failing(f, *args)
    rank.report("failed", text=text, seconds=seconds, at=at)


def go_on() -> None:
    """The survivors among themselves: a program of theirs, by jcoll."""
    rest = [d for d in jax.devices() if d.process_index != VICTIM]
    mesh = Mesh(np.array(rest), ("x",))
    x = rank.put(mesh, np.ones((len(rest), 4), np.float32))

    def among_survivors(v: Any) -> Any:
        return jcoll.psum(v, "x")

    text, seconds, _ = rank.failing(rank.program(among_survivors, mesh), x)
    rank.report("goes_on", text=text, seconds=seconds)


def go_wrong_before_end(how: str, when: str, mesh: Mesh) -> None:
    is_victim = rank.ME == VICTIM
    if when == "before" and is_victim:
        go_wrong(how)
    inside = end_of if how == "quit" else chain
    fn = rank.program(inside if when == "inside" else small, mesh)
    x = rank.put(mesh, np.ones((mesh.size, 1 << 20 if when == "inside" else 8), np.float32))
    if when == "start":
        fn = fn.lower(x).compile()
    elif when != "before":
        first = rank.program(small, mesh)
        for _ in range(10):
            first(x).block_until_ready()
    if is_victim:
        if when == "inside":
            go_wrong_inside(how, fn, x)
        go_wrong(how)
    if when == "inside" and how == "quit" and rank.ME == 2:
        time.sleep(0.3)  # It finds process 1 gone, or nearly.
    report_failing(fn, x)


def main(how: str, when: str, *_: str) -> None:
    if when == "end":
        go_wrong_at_end(how, rank.mesh_of())
    else:
        go_wrong_before_end(how, when, rank.mesh_of())
    if when != "before":
        go_on()
    rank.leave(*(i for i in range(rank.COUNT) if i != VICTIM))


if __name__ == "__main__":
    main(*rank.ARGS)
