"""A rank that never comes is an error that names it, and everything goes on; a late one is none."""

import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime_programs import N, integers, mesh_of, place, program, run_ok

import jcoll
from jcoll.runtime.native import metrics

SHORT_S = 0.5  # Long enough for the ranks that do come, on a busy machine too.
LONG_S = 60.0
NOBODY = -1


def absent(fn, x, who):
    """fn(x) on every rank but `who`, which goes past it."""
    return jax.lax.cond(jax.lax.axis_index("x") == who, lambda y: y, fn, x)


def fails(fn, *args):
    """The text of the error that fn must end with."""
    with pytest.raises(jax.errors.JaxRuntimeError) as e:
        jax.block_until_ready(fn(*args))
    return str(e.value)


def test_error_names_everything():
    mesh = mesh_of(N)
    line = sys._getframe().f_lineno + 2
    fn = program(
        lambda x, who: absent(lambda y: jcoll.all_reduce(y, "x", timeout_s=SHORT_S), x, who),
        mesh,
        num_replicated=1,
    )
    x = integers(N, 5)
    start = time.monotonic()
    text = fails(fn, place(x, mesh), jnp.int32(3))
    assert SHORT_S <= time.monotonic() - start < LONG_S
    assert "jcoll.all_reduce over axis 'x' (float32[1,5], direct) called at " in text
    assert f"runtime/test_deadline.py:{line}: timed out after 0.5 s: " in text
    assert "7 of 8 ranks arrived (0-2, 4-7); missing: 3." in text
    assert "raise timeout_s= or JCOLL_TIMEOUT if a rank is only slow" in text


def test_everything_goes_on_afterwards():
    mesh = mesh_of(N)
    fn = program(
        lambda x, who: absent(lambda y: jcoll.all_reduce(y, "x", timeout_s=SHORT_S), x, who),
        mesh,
        num_replicated=1,
    )
    other = program(lambda x: jcoll.all_gather(x, "x").sum(0), mesh)
    with_lax = program(lambda x: jax.lax.psum(jcoll.all_reduce(x, "x"), "x"), mesh)
    x = integers(N, 5)
    placed, total = place(x, mesh), np.tile(x.sum(0), (N, 1))
    for who in (0, 3, 7):
        assert f"missing: {who}." in fails(fn, placed, jnp.int32(who))
        np.testing.assert_array_equal(np.asarray(fn(placed, jnp.int32(NOBODY))), total)
        np.testing.assert_array_equal(np.asarray(other(placed)), total)
        np.testing.assert_array_equal(np.asarray(with_lax(placed)), N * total)


def test_failure_in_flight_beside_good_launches():
    mesh = mesh_of(N)
    fn = program(
        lambda x, who: absent(lambda y: jcoll.all_reduce(y, "x", timeout_s=SHORT_S), x, who),
        mesh,
        num_replicated=1,
    )
    x = integers(N, 2)
    placed = place(x, mesh)
    whos = [NOBODY, 1, NOBODY, NOBODY, 6, NOBODY]
    launched = [fn(placed, jnp.int32(who)) for who in whos]
    for who, y in zip(whos, launched, strict=True):
        if who == NOBODY:
            np.testing.assert_array_equal(np.asarray(y), np.tile(x.sum(0), (N, 1)))
        else:
            assert f"missing: {who}." in fails(np.asarray, y)


ROOTED = {"root": 2}
OPS = {
    "all_reduce": {},
    "reduce_scatter": {},
    "all_gather": {},
    "all_to_all": {"split_axis": 0, "concat_axis": 0},
    "broadcast": ROOTED,
    "reduce": ROOTED,
    "gather": ROOTED,
    "scatter": ROOTED,
    "ppermute": {"perm": [(0, 1)]},
    "barrier": {},
}


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_deadline(op):
    mesh = mesh_of(N)

    def call(x):
        y = getattr(jcoll, op)(x, "x", timeout_s=SHORT_S, **OPS[op])
        return jnp.zeros_like(x) + jnp.sum(y)

    fn = program(lambda x, who: absent(call, x, who), mesh, num_replicated=1)
    text = fails(fn, place(integers(N * N, 2), mesh), jnp.int32(5))
    assert f"jcoll.{op} over axis 'x' (float32[8,2], " in text
    assert "7 of 8 ranks arrived (0-4, 6, 7); missing: 5." in text


def test_all_to_all_v_has_a_deadline():
    mesh = mesh_of(N)

    def call(x):
        counts = jnp.ones(N, jnp.int32)
        y, received = jcoll.all_to_all_v(x, counts, "x", output_size=N, timeout_s=SHORT_S)
        return y + received.sum(dtype=jnp.int32).astype(y.dtype)

    fn = program(lambda x, who: absent(call, x, who), mesh, num_replicated=1)
    text = fails(fn, place(integers(N * N), mesh), jnp.int32(0))
    assert "jcoll.all_to_all_v over axis 'x'" in text
    assert "7 of 8 ranks arrived (1-7); missing: 0." in text


def test_names_ranks_of_the_group():
    """On a 2x4 mesh rank 2 of the second row is absent: the first row is whole."""
    mesh = mesh_of(2, 4)

    def body(x, who):
        return jax.lax.cond(
            jax.lax.axis_index(("x", "y")) == who,
            lambda y: y,
            lambda y: jcoll.all_reduce(y, "y", timeout_s=SHORT_S),
            x,
        )

    fn = program(body, mesh, num_replicated=1)
    x = integers(N, 3)
    text = fails(fn, place(x, mesh), jnp.int32(6))
    assert "over axis 'y'" in text
    assert "3 of 4 ranks arrived (0, 1, 3); missing: 2, at index 1 of the mesh" in text
    y = np.asarray(fn(place(x, mesh), jnp.int32(NOBODY)))
    rows = x.reshape(2, 4, 3)
    np.testing.assert_array_equal(y.reshape(2, 4, 3), np.repeat(rows.sum(1)[:, None], 4, axis=1))


def test_in_the_middle_of_a_loop():
    """A loop whose length differs between ranks."""
    mesh = mesh_of(N)

    def body(x, who):
        length = jnp.where(jax.lax.axis_index("x") == who, 50, 100)
        return jax.lax.fori_loop(
            0, length, lambda _, y: jcoll.all_reduce(y, "x", op="mean", timeout_s=SHORT_S), x
        )

    fn = program(body, mesh, num_replicated=1)
    x = np.ones((N, 3), np.float32)
    assert "7 of 8 ranks arrived (0-3, 5-7); missing: 4." in fails(fn, place(x, mesh), jnp.int32(4))
    np.testing.assert_array_equal(np.asarray(fn(place(x, mesh), jnp.int32(NOBODY))), x)


def late(seconds, x):
    """x, on rank 5 after a while."""

    def wait(y):
        time.sleep(seconds)
        return y

    def on_the_host(y):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    return jax.lax.cond(jax.lax.axis_index("x") == 5, on_the_host, lambda y: y, x)


def test_a_late_rank_is_waited_for():
    mesh = mesh_of(N)
    jcoll.reset_metrics()
    fn = program(lambda x: jcoll.all_reduce(late(0.4, x), "x", timeout_s=LONG_S), mesh)
    x = integers(N, 5)
    np.testing.assert_array_equal(np.asarray(fn(place(x, mesh))), np.tile(x.sum(0), (N, 1)))
    (row,) = [row for row in metrics() if row["calls"]]
    assert row["skew_s"] >= 0.3  # Who waited, and how long, shows in the metrics.


def test_a_rank_that_is_too_late_gets_the_error_too():
    """In a process of its own: jax complains of the callback's failed token once more at exit."""
    out = run_ok(
        """
        def late(y):
            time.sleep(1.5)
            return y
        def body(x):
            on_the_host = lambda y: jax.pure_callback(late, jax.typeof(y), y)
            x = jax.lax.cond(jax.lax.axis_index("x") == 5, on_the_host, lambda y: y, x)
            return jcoll.all_reduce(x, "x", timeout_s=0.5)
        mesh = mesh_of(N)
        x = place(np.ones((N, 5), np.float32), mesh)
        try:
            jax.block_until_ready(program(body, mesh)(x))
        except jax.errors.JaxRuntimeError as e:
            print(e)
        y = program(lambda x: jcoll.all_reduce(x, "x"), mesh)(x)
        np.testing.assert_array_equal(np.asarray(y), N)
        print("goes on")
        """
    )
    assert "missing: 5." in out
    assert "goes on" in out


def test_errors_are_counted():
    mesh = mesh_of(N)
    fn = program(
        lambda x, who: absent(lambda y: jcoll.all_reduce(y, "x", timeout_s=SHORT_S), x, who),
        mesh,
        num_replicated=1,
    )
    jcoll.reset_metrics()
    placed = place(integers(N, 1), mesh)
    fails(fn, placed, jnp.int32(1))
    fails(fn, placed, jnp.int32(2))
    jax.block_until_ready(fn(placed, jnp.int32(NOBODY)))
    (row,) = metrics()
    assert (row["op"], row["calls"], row["errors"]) == ("all_reduce", 1, 2)
    assert re.fullmatch(r"runtime/test_deadline\.py:\d+", row["call_site"])


def test_jcoll_timeout_in_the_environment():
    out = run_ok(
        """
        mesh = mesh_of(N)
        def body(x, who):
            skip = jax.lax.axis_index("x") == who
            return jax.lax.cond(skip, lambda y: y, lambda y: jcoll.all_reduce(y, "x"), x)
        fn = program(body, mesh, num_replicated=1)
        x = place(integers(N, 2), mesh)
        start = time.monotonic()
        try:
            jax.block_until_ready(fn(x, 7))
        except jax.errors.JaxRuntimeError as e:
            print(time.monotonic() - start >= 0.5, e)
        jax.block_until_ready(fn(x, -1))
        """,
        env={"JCOLL_TIMEOUT": "0.5"},
    )
    assert out.startswith("True")
    assert "timed out after 0.5 s: 7 of 8 ranks arrived (0-6); missing: 7." in out
