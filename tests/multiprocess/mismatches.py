"""Ranks that do not make the same call: one process of tests/multiprocess/test_faults.py.

Every case is a pair of functions, what process 1 runs and what the others run, and words of both
calls. All run all cases, one after the other, and a collective that must work in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import rank
from jax import lax

import jcoll.algorithms
from jcoll.plan.builder import Builder

ODD = 1


def reduction() -> Any:
    def odd(v: Any) -> Any:
        return jcoll.pmax(v, "x")

    def others(v: Any) -> Any:
        return jcoll.psum(v, "x")

    return odd, others


def op() -> Any:
    def odd(v: Any) -> Any:
        return jcoll.all_gather(v, "x")[0]

    def others(v: Any) -> Any:
        return jcoll.broadcast(v, "x")

    return odd, others


def dtype() -> Any:
    def odd(v: Any) -> Any:
        return jcoll.psum(v.astype(jnp.int32), "x")

    def others(v: Any) -> Any:
        return jcoll.psum(v, "x")

    return odd, others


def shape() -> Any:
    def odd(v: Any) -> Any:
        return jcoll.psum(v[:5], "x")

    def others(v: Any) -> Any:
        return jcoll.psum(v[:6], "x")

    return odd, others


def root() -> Any:
    def odd(v: Any) -> Any:
        return jcoll.reduce(v, "x", root=1)

    def others(v: Any) -> Any:
        return jcoll.reduce(v, "x", root=2)

    return odd, others


def algorithm() -> Any:
    def odd(v: Any) -> Any:
        return jcoll.all_reduce(v, "x", algorithm="ring")

    def others(v: Any) -> Any:
        return jcoll.all_reduce(v, "x", algorithm="tree")

    return odd, others


def plan() -> Any:
    """Algorithms of one name, of which each is right by itself: their messages do not fit."""
    center = int(rank.ME == ODD)

    @jcoll.algorithms.algorithm("own_star", op="all_reduce")
    def own_star(p: Builder) -> None:
        leaves = [r for r in range(p.num_ranks) if r != center]
        for leaf in leaves:
            p.send(leaf, center, reduce=True)
        for leaf in leaves:
            p.send(center, leaf)

    def odd(v: Any) -> Any:
        return jcoll.all_reduce(v, "x", algorithm="own_star")

    def others(v: Any) -> Any:
        return jcoll.all_reduce(v, "x", algorithm="own_star")

    return odd, others


def groups() -> Any:
    def odd(v: Any) -> Any:
        return jcoll.all_gather(v, "x", axis_index_groups=[[0, 1, 2]])

    def others(v: Any) -> Any:
        return jcoll.all_gather(v, "x", axis_index_groups=[[2, 1, 0]])

    return odd, others


def order() -> Any:
    def odd(v: Any) -> Any:
        return jcoll.pmin(jcoll.all_gather(v, "x")[0], "x")

    def others(v: Any) -> Any:
        return jcoll.all_gather(jcoll.pmin(v, "x"), "x")[0]

    return odd, others


def inside(case: Callable[[], Any]) -> Callable[[], Any]:
    """The same, far into a program of large collectives."""

    def after_many(f: Callable) -> Callable:
        def run(v: Any) -> Any:
            big = jnp.broadcast_to(v[0], (1 << 18,))
            big = lax.fori_loop(0, 20, lambda i, u: jcoll.psum(u, "x") * 0.25, big)
            return f(v + big[:8])

        return run

    def pair() -> Any:
        odd, others = case()
        return after_many(odd), after_many(others)

    pair.__name__ = "inside_" + case.__name__
    return pair


def at_end() -> Any:
    """The last call of the processes."""
    return shape()


def branch() -> Any:
    """A condition that differs: the calls are at different places of one program."""

    def body(v: Any) -> Any:
        def left(u: Any) -> Any:
            return jcoll.psum(u, "x")

        def right(u: Any) -> Any:
            return jcoll.pmax(u, "x")

        return lax.cond(lax.axis_index("x") == ODD, left, right, v)

    return body, body


def one_more() -> Any:
    """One rank makes a call that the others do not make, before one that all make."""

    def common(v: Any) -> Any:
        return jcoll.pmin(v, "x")

    def extra(v: Any) -> Any:
        return jcoll.pmax(v, "x")

    return (extra, common), common


def iterations() -> Any:
    """A loop that one rank leaves early; its next call meets the others' in the loop."""

    def body(v: Any) -> Any:
        n = jnp.where(lax.axis_index("x") == ODD, 3, 5)
        v = lax.fori_loop(0, n, lambda i, u: jcoll.psum(u, "x"), v)
        return jcoll.pmax(v, "x")

    return body, body


def different_program() -> Any:
    def one_program(v: Any) -> Any:
        return jcoll.all_gather(v, "x")

    def another_program(v: Any) -> Any:
        return jcoll.pmin(v, "x")

    return one_program, another_program


AT_ONE_PLACE = [reduction, op, dtype, shape, root, algorithm, plan, groups, order]
# The first is the first call of all.
CASES: list[Callable[[], Any]] = [
    *AT_ONE_PLACE, *map(inside, AT_ONE_PLACE), branch, one_more, iterations, different_program,
]  # fmt: skip


def works(v: Any) -> Any:
    return jcoll.psum(v, "x")


def run(case: Callable[[], Any], mesh: Any, x: Any) -> None:
    mine = case()[0 if rank.ME == ODD else 1]
    calls = [
        rank.program(named(f, case.__name__), mesh).lower(x).compile()
        for f in (mine if isinstance(mine, tuple) else (mine,))
    ]
    failures = [rank.failing(fn, x) for fn in calls]
    texts = [text for text, _, _ in failures]
    _, seconds, at = failures[0]
    rank.report(case.__name__, texts=texts, began=at - seconds, ended=failures[-1][2])


def tries(check: Callable, x: Any) -> list[str]:
    """The errors of a collective until it works, at most four."""
    texts = []
    for _ in range(4):
        text, _, _ = rank.failing(check, x)
        if not text:
            break
        texts.append(text)
    return texts


def named(f: Callable, name: str) -> Callable:
    """Programs of one name, but for the case that is about that, and calls of several programs."""
    if name not in ("different_program", "one_more"):
        f.__name__ = name
    return f


def main() -> None:
    mesh = rank.mesh_of()
    x = rank.put(mesh, np.ones((mesh.size, 8), np.float32))
    check = rank.program(works, mesh)
    for case in CASES:
        run(case, mesh, x)
        rank.report("after " + case.__name__, texts=tries(check, x))
    run(at_end, mesh, x)
    rank.leave()


if __name__ == "__main__":
    main()
