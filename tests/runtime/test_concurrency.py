"""Several collectives, programs and threads at once, beside lax's blocking collectives too.

lax's in-process collectives hold a thread for every rank; jcoll's hold none. In any mixture, in
any order, on few cores, a program must come to its end, with the right numbers.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime_programs import (
    N,
    check_mixed,
    integers,
    mesh_of,
    place,
    program,
    run_ok,
)

import jcoll

# XLA:CPU admits 32 launches per device at once. In jaxlib 0.10.2 one that waits for admission holds
# a thread that an admitted one needs: a loop of launches gets stuck, with lax's collectives too.
IN_FLIGHT = 50 if jax.__version_info__ >= (0, 12) else 30

MIXED = ["jl", "lj", "pjl", "ljp", "jjllpp", "lgpaj", "jL", "lJ", "jJlL", "pJlG", "jLaPgL"]


@pytest.mark.parametrize("letters", MIXED)
def test_mixed_with_lax(letters):
    check_mixed(letters, 200, times=2)


@pytest.mark.slow
@pytest.mark.parametrize("letters", ["lj", "jjllpp", "lgpaj", "jLaPgL"])
def test_mixed_with_lax_for_long(letters):
    check_mixed(letters, 3000, times=3)


@pytest.mark.parametrize("num_threads", ["1", "2"])
def test_mixed_on_a_pool_of(num_threads):
    run_ok(
        """
        check_mixed("jlJ", 200, times=2)
        check_mixed("pJlG", 200, times=2)
        """,
        env={"JCOLL_NUM_THREADS": num_threads},
    )


def test_jcoll_alone_needs_no_thread_per_rank():
    out = run_ok(
        """
        from jcoll.runtime.native import _native
        check_mixed("jgaJ", 2000)
        print(_native.num_workers_alive(), _native.num_threads(), _native.num_stalls())
        """,
        env={"JCOLL_NUM_THREADS": "2"},
    )
    alive, pool, stalls = map(int, out.split())
    assert pool == 2
    # On a machine so busy that the queue stands still for a moment, the monitor adds some.
    assert alive <= pool or stalls > 0


def test_independent_collectives_in_one_program():
    mesh = mesh_of(N)

    def body(x):
        parts = [x + i for i in range(6)]
        sums = [jcoll.all_reduce(p * p, "x") for p in parts]
        gathers = [jcoll.all_gather(p, "x") for p in parts]
        return sum(s + g.sum(0) for s, g in zip(sums, gathers, strict=True))

    fn = program(body, mesh)
    x = integers(N, 5)
    expected = sum(((x + i) ** 2).sum(0) + (x + i).sum(0) for i in range(6))
    for _ in range(100):
        np.testing.assert_array_equal(np.asarray(fn(place(x, mesh))), np.tile(expected, (N, 1)))


def test_inner_function_called_twice():
    mesh = mesh_of(N)

    @jax.jit
    def inner(x):
        return jcoll.all_reduce(x, "x")

    def body(x):
        after = inner(x) - x
        return inner(after) + 2 * inner(x * 3)  # One after the other, and one beside them.

    fn = program(body, mesh)
    x = integers(N, 3)
    total = x.sum(0)
    expected = (total - x).sum(0) + 6 * total
    for _ in range(100):
        np.testing.assert_array_equal(np.asarray(fn(place(x, mesh))), np.tile(expected, (N, 1)))


def test_launched_again_before_it_ends():
    mesh = mesh_of(N)
    fn = program(lambda x, c: jcoll.all_reduce(x * c, "x"), mesh, num_replicated=1)
    x = integers(N, 1000)
    placed = place(x, mesh)
    for _ in range(4):
        launched = [fn(placed, jnp.float32(c)) for c in range(IN_FLIGHT)]
        for c, y in enumerate(launched):
            np.testing.assert_array_equal(np.asarray(y)[c % N], x.sum(0) * c)


def test_chained_launches():
    mesh = mesh_of(N)
    fn = program(lambda x: jcoll.all_gather(x, "x").sum(0, dtype=x.dtype) - x, mesh)
    x = place(np.ones((N, 4), np.int32), mesh)
    for _ in range(IN_FLIGHT):
        x = fn(x)
    y, expected = np.asarray(x), np.ones((N, 4), np.int32)
    for _ in range(IN_FLIGHT):
        expected = expected.sum(0, dtype=np.int32) - expected
    np.testing.assert_array_equal(y, expected)


def test_three_executables_from_three_threads():
    """Launched by a thread each; one has lax's collectives in it, the others only jcoll's."""
    mesh = mesh_of(N)
    fns = [
        program(lambda x: jcoll.all_reduce(jax.lax.psum(x, "x"), "x"), mesh),
        program(lambda x: jcoll.all_reduce(x * 2, "x") * 4, mesh),
        program(lambda x: jcoll.all_reduce(jcoll.all_reduce(x, "x"), "x"), mesh),
    ]
    x = integers(N, 17)
    placed, expected = place(x, mesh), x.sum(0) * 8
    failures = []

    def work(fn):
        try:
            for _ in range(100):
                np.testing.assert_array_equal(np.asarray(fn(placed)), np.tile(expected, (N, 1)))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(fn,)) for fn in fns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("num_steps", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_both_axes_of_a_mesh_at_once(num_steps):
    """Groups over rows, columns, both, and halves of both, in flight together."""
    mesh = mesh_of(2, 4)
    halves = [[0, 5, 2, 7], [4, 1, 6, 3]]

    def body(x):
        def step(i, y):
            z = y + i.astype(y.dtype)
            over_x, over_y = jcoll.all_reduce(y, "x"), jcoll.all_reduce(z, "y")
            over_both = jcoll.all_reduce(y, ("x", "y"))
            over_half = jcoll.all_reduce(z, ("x", "y"), axis_index_groups=halves)
            return y + 3 * over_x + 5 * over_y + 7 * over_both + 11 * over_half

        return jax.lax.fori_loop(0, num_steps, step, x)

    def reference(ys, i):
        zs = ys + np.int32(i)
        over_x = ys.sum(0, keepdims=True, dtype=np.int32)
        over_y = zs.sum(1, keepdims=True, dtype=np.int32)
        over_both = ys.sum(keepdims=True, dtype=np.int32)
        over_half = np.empty_like(zs)
        for half in halves:
            over_half.reshape(-1)[half] = zs.reshape(-1)[half].sum(dtype=np.int32)
        return ys + 3 * over_x + 5 * over_y + 7 * over_both + 11 * over_half

    x = np.arange(N, dtype=np.int32)
    expected = x.reshape(2, 4)
    for i in range(num_steps):
        expected = reference(expected, i)
    fn = program(body, mesh)
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(fn(place(x, mesh))), expected.reshape(-1))


def test_ranks_of_different_pace():
    """Every rank has another amount of work between the collectives; large ones among them."""
    mesh = mesh_of(N)

    def body(x):
        rank = jax.lax.axis_index("x")

        def step(_, y):
            z = jax.lax.fori_loop(0, 40 * rank, lambda _, v: -v, y)
            return (
                jcoll.all_reduce(z, "x") - jcoll.all_gather(z[:4], "x").sum(dtype=z.dtype) - 7 * z
            )

        return jax.lax.fori_loop(0, 10, step, x)

    x = np.arange(N * 20000, dtype=np.int32) % 17
    expected = x.reshape(N, -1)
    for _ in range(10):
        expected = (
            expected.sum(0, dtype=np.int32) - expected[:, :4].sum(dtype=np.int32) - 7 * expected
        )
    y = program(body, mesh)(place(x, mesh))
    np.testing.assert_array_equal(np.asarray(y), expected.reshape(-1))
