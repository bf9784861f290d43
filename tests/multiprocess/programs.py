"""Transformed, nested and concurrent programs, against lax and numpy; one process of
tests/multiprocess/test_values.py. Arguments: names of functions below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rank
from jax import lax

import jcoll
from jcoll.algorithms import registry


def integers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Small integers as floats: sums are exact, so that all bits must agree."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def expect(got: Any, want: Any, what: str) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        ours, theirs = rank.local(g), rank.local(w)
        for index, part in ours.items():
            np.testing.assert_array_equal(part, theirs[index], err_msg=f"{what} at {index}")


def same(ours: Callable, theirs: Callable, mesh: Any, *xs: Any, native: bool = True) -> None:
    """ours and theirs, functions of one rank's arrays, give the same; ours not by XLA."""
    fn, placed = rank.program(ours, mesh), rank.put(mesh, xs)
    for row in jcoll.explain(fn, *placed) if native else ():
        assert row.algorithm != "xla", row
    expect(fn(*placed), rank.program(theirs, mesh)(*placed), ours.__name__)


def transforms() -> None:
    mesh = rank.mesh_of()
    n = mesh.size
    x = integers((n, 6, n))

    def scan(psum: Callable) -> Callable:
        def scanned(v: Any) -> Any:
            def step(c: Any, k: Any) -> Any:
                c = psum(c, "x") * (1 / n) + k
                return c, c.sum()

            return lax.scan(step, v, jnp.arange(100, dtype=v.dtype))

        return scanned

    def grad(psum: Callable, gather: Callable) -> Callable:
        def gradient(v: Any) -> Any:
            return jax.grad(lambda u: (psum(u * u, "x") * gather(u, "x").sum(0)).sum())(v)

        return gradient

    def vmap(reduce_scatter: Callable, exchange: Callable) -> Callable:
        def mapped(v: Any) -> Any:
            a = jax.vmap(lambda u: reduce_scatter(u, "x"))(v)
            return a, jax.vmap(lambda u: exchange(u, "x", 0, 0), in_axes=0, out_axes=1)(v)

        return mapped

    power = integers((n, 6, n)) * 0 + np.arange(n, dtype=np.float32)[:, None, None]
    same(scan(jcoll.psum), scan(lax.psum), mesh, power)
    same(grad(jcoll.psum, jcoll.all_gather), grad(lax.psum, lax.all_gather), mesh, x)
    scatter = (jcoll.reduce_scatter, lax.psum_scatter)
    same(vmap(scatter[0], jcoll.all_to_all), vmap(scatter[1], lax.all_to_all), mesh, x)


def independent() -> None:
    """Collectives that do not depend on each other: XLA may run them in any order."""
    mesh = rank.mesh_of()
    n = mesh.size

    def many(m: Any) -> Callable:
        def body(v: Any) -> Any:
            return [m.psum(v * k, "x") + m.pmax(v + k, "x") for k in range(8)], m.all_gather(v, "x")

        return body

    for size in (3, 40_000):
        same(many(jcoll), many(lax), mesh, integers((n, size)))


def in_flight() -> None:
    """Programs that are dispatched before the last ones are done: two in turns, and one again."""
    mesh = rank.mesh_of()
    n = mesh.size

    def slow(v: Any) -> Any:
        late = (v[0].astype(jnp.int32) * 7 + lax.axis_index("x") * 13) % 40
        m = lax.fori_loop(0, late, lambda i, a: jnp.sin(a) @ a * 0.01, jnp.ones((64, 64)))
        v = v + m[0, 0] * 0
        return lax.fori_loop(0, 20, lambda i, u: jcoll.psum(u, "x") / n + 1, v)

    def other(v: Any) -> Any:
        return jcoll.all_gather(jcoll.pmax(v, "x"), "x")

    first, second = rank.program(slow, mesh), rank.program(other, mesh)
    for step in range(10):
        xs = [rank.put(mesh, np.full((n, 4), step * 8 + k, np.float32)) for k in range(8)]
        ys = [(first(x), second(x)) for x in xs]
        for k, (a, b) in enumerate(ys):
            for part in rank.local(a).values():
                assert (part == step * 8 + k + 20).all(), (step, k, part)
            for part in rank.local(b).values():
                assert part.shape == (n, 4) and (part == step * 8 + k).all(), (step, k, part)


def sub_axes() -> None:
    """A mesh of two axes, one of which stays inside the processes; by every algorithm."""
    inside = jax.local_device_count()
    mesh = rank.mesh_of(host=rank.COUNT, local=inside)
    x = integers((rank.COUNT, inside, 12 * rank.COUNT * inside))
    for axes in ("host", "local", ("host", "local"), ("local", "host")):
        size = int(np.prod([mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes)]))
        for name in ["auto", *registry.supporting("all_reduce", size)]:

            def ours(v: Any, axes: Any = axes, name: str = name) -> Any:
                return jcoll.all_reduce(v, axes, algorithm=name)

            same(ours, lambda v, axes=axes: lax.psum(v, axes), mesh, x)
        each_way(axes, mesh, x)


def each_way(axes: Any, mesh: Any, x: Any) -> None:
    def shift(m: Any, v: Any) -> Any:
        if axes == ("local", "host"):  # lax.ppermute counts in the mesh's order.
            return v
        return m.ppermute(v, axes, [(0, 1)])

    def ours(v: Any) -> Any:
        scattered = jcoll.reduce_scatter(v, axes, tiled=True)
        swapped = jcoll.all_to_all(v, axes, 0, 0, tiled=True)
        return scattered, jcoll.all_gather(v[:5], axes), swapped, shift(jcoll, v)

    def theirs(v: Any) -> Any:
        scattered = lax.psum_scatter(v, axes, tiled=True)
        swapped = lax.all_to_all(v, axes, 0, 0, tiled=True)
        return scattered, lax.all_gather(v[:5], axes), swapped, shift(lax, v)

    same(ours, theirs, mesh, x)


def groups() -> None:
    """axis_index_groups: across processes, inside one, and of unequal place."""
    mesh = rank.mesh_of()
    n = mesh.size
    half = n // 2
    x = integers((n, n * half))
    for members in (
        [[i, i + half] for i in range(half)],  # Every group over two processes.
        [list(range(half)), list(range(half, n))],
        [[*range(1, half), n - 1], [0, *range(half, n - 1)]],
    ):
        for name in ["auto", *registry.supporting("all_reduce", len(members[0]))]:

            def ours(v: Any, members: Any = members, name: str = name) -> Any:
                return jcoll.all_reduce(v, "x", axis_index_groups=members, algorithm=name)

            got = rank.program(ours, mesh)(rank.put(mesh, x))
            want = x.copy()
            for group in members:
                want[group] = x[group].sum(0)
            for (r,), part in rank.local(got).items():
                np.testing.assert_array_equal(part, want[r], err_msg=f"{members} {name}")

        def gather(m: Any, members: Any = members) -> Callable:
            def gathered(v: Any) -> Any:
                scattered = m.psum_scatter(v, "x", axis_index_groups=members, tiled=True)
                return m.all_gather(scattered, "x", axis_index_groups=members, tiled=True)

            return gathered

        same(gather(jcoll), gather(lax), mesh, x)


def intercepted() -> None:
    mesh = rank.mesh_of()
    x = rank.put(mesh, integers((mesh.size, 9)))

    def body(v: Any) -> Any:
        return lax.psum(v, "x"), lax.all_gather(v, "x")

    with jcoll.intercept():
        fn = rank.program(body, mesh)
        assert "jcoll_collective" in fn.lower(x).as_text()
        got = fn(x)
    jax.clear_caches()
    expect(got, rank.program(body, mesh)(x), "intercepted")


if __name__ == "__main__":
    for argument in rank.ARGS:
        globals()[argument]()
    rank.report("done")
