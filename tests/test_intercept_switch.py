"""The switch of jcoll.intercept: when it counts, and for whom."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lax_programs import TARGET, N, integers, mesh_of, place, psum_of, run_on, sharded

import jcoll

P = jax.P


def psum_rows(x: Any) -> np.ndarray:
    return np.asarray(x).sum(0, keepdims=True).repeat(N, 0)


def calls() -> int:
    return sum(row["calls"] for row in jcoll.metrics())


def test_one_function_before_inside_and_after():
    fn, x = psum_of(mesh_of(N))
    jcoll.reset_metrics()
    results = [fn(x)]
    for inside in range(1, 4):
        with jcoll.intercept():
            results.append(fn(x).block_until_ready())
        assert calls() == inside
        results.append(fn(x).block_until_ready())
        assert calls() == inside
    for found in results:
        np.testing.assert_array_equal(found, results[0])


def test_inner_jit_compiled_before():
    inner, x = psum_of(mesh_of(N))
    outer = jax.jit(lambda x: inner(inner(x)))
    expected = outer(x)
    with jcoll.intercept():
        np.testing.assert_array_equal(run_on("jcoll", outer, x), expected)
    run_on("xla", outer, x)


def test_nesting_and_exceptions():
    fn, x = psum_of(mesh_of(N))
    with jcoll.intercept():
        with jcoll.intercept(enabled=False):
            run_on("xla", fn, x)
            with jcoll.intercept():
                run_on("jcoll", fn, x)
            run_on("xla", fn, x)
        with pytest.raises(ZeroDivisionError), jcoll.intercept(enabled=False):
            raise ZeroDivisionError
        run_on("jcoll", fn, x)
    with pytest.raises(ZeroDivisionError), jcoll.intercept():
        raise ZeroDivisionError
    run_on("xla", fn, x)


def test_one_context_entered_again_and_in_two_threads():
    fn, x = psum_of(mesh_of(N))
    context = jcoll.intercept()
    with context:
        with context:
            run_on("jcoll", fn, x)
        thread = threading.Thread(target=context.__enter__)  # Its own, and over with it.
        thread.start()
        thread.join()
        run_on("jcoll", fn, x)
    run_on("xla", fn, x)
    with context:
        run_on("jcoll", fn, x)
    run_on("xla", fn, x)


def test_enabled_that_is_no_bool():
    with pytest.raises(TypeError, match=r"intercept: enabled='no' is not a bool.\n  Pass True"):
        jcoll.intercept(enabled="no")  # pyright: ignore[reportArgumentType]


def test_error_while_lowering_leaves_it_off():
    mesh = mesh_of(N)

    def body(x):
        index = jnp.ones(3, int)  # Three entries cannot be for eight ranks.
        return lax.ragged_all_to_all(x, x, index, index, index, index, axis_name="x")

    with pytest.raises(ValueError, match="input_offsets has shape"), jcoll.intercept():
        jax.jit(sharded(body, check_vma=False)).lower(place(integers((N, 4)), mesh, P("x")))
    fn, x = psum_of(mesh)
    run_on("xla", fn, x)


def test_decorator():
    fn, x = psum_of(mesh_of(N))
    jcoll.reset_metrics()
    decorated = jcoll.intercept()(fn)
    np.testing.assert_array_equal(decorated(x), decorated(x))
    assert calls() == 2


def test_what_counts_is_the_time_of_lowering():
    fn, x = psum_of(mesh_of(N))
    traced = fn.trace(x)
    with jcoll.intercept():
        lowered = fn.lower(x)
        assert TARGET in traced.lower().compile().as_text()
        traced = fn.trace(x)
    assert TARGET in lowered.compile().as_text()
    assert TARGET not in traced.lower().compile().as_text()
    assert TARGET not in fn.lower(x).compile().as_text()


def test_entered_inside_a_traced_function():
    def body(x):
        with jcoll.intercept():
            return lax.psum(x, "x")

    x = place(integers((N, 4)), mesh_of(N), P("x"))
    fn = sharded(body, check_vma=False)
    with pytest.raises(RuntimeError, match=r"intercept: entered inside.*\n  Put the call"):
        jax.jit(fn)(x)
    jcoll.reset_metrics()
    np.testing.assert_array_equal(fn(x), psum_rows(x))  # eager: lowered at once
    assert calls() == 1


def test_other_threads():
    fn, x = psum_of(mesh_of(N))
    on, off = threading.Event(), threading.Event()
    seen = []

    def other():
        on.wait()
        seen.append(TARGET in fn.lower(x).compile().as_text())
        off.set()

    thread = threading.Thread(target=other)
    thread.start()
    with jcoll.intercept():
        on.set()
        off.wait()
        run_on("jcoll", fn, x)
    thread.join()
    assert seen == [False]


PROGRAM = """
import threading
import jax, jcoll, numpy as np
P = jax.P
mesh = jax.make_mesh((8,), ("x",))
x = jax.device_put(np.ones((8, 2), np.float32), jax.NamedSharding(mesh, P("x")))
fn = jax.jit(jax.shard_map(lambda x: x + jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"),
                           out_specs=P("x")))
def lowered(): return "jcoll_collective" in fn.lower(x).as_text()
results = []
thread = threading.Thread(target=lambda: results.append(lowered()))
thread.start(); thread.join()
results += [lowered(), float(fn(x).sum()) == 144, jcoll.explain(fn, x)[0].reason]
with jcoll.intercept(enabled=False): results.append(lowered())
print(results + [lowered()])
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"JCOLL_INTERCEPT": "1", "JCOLL_ALGORITHM": "direct"},
            [True, True, True, "jax.lax.psum, intercepted: JCOLL_ALGORITHM", False, True],
        ),
        (
            {"JCOLL_INTERCEPT": "1", "JCOLL_ALGORITHM": "xla"},
            [False, False, True, "jax.lax.psum, not intercepted: JCOLL_ALGORITHM", False, False],
        ),
    ],
    ids=["intercept", "xla"],
)
def test_environment(variables, expected):
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | variables, capture_output=True, text=True
    )
    assert program.stdout.strip() == str(expected), program.stderr


LAUNCHED = """
import jax, numpy as np
P = jax.P
mesh = jax.make_mesh((2,), ("x",))
ranks = jax.NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback((2,), ranks, lambda i: np.arange(2, dtype=np.float32)[i])
f = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
print("sum", float(jax.jit(f)(x)[0]))
import jcoll
print("calls", sum(row["calls"] for row in jcoll.metrics()))
"""


def test_launch_sees_to_it_for_programs_of_lax_alone(tmp_path):
    (tmp_path / "program.py").write_text(LAUNCHED)
    launched = subprocess.run(
        [sys.executable, "-m", "jcoll", "launch", "-n", "2", str(tmp_path / "program.py")],
        env=os.environ | {"JCOLL_INTERCEPT": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert launched.returncode == 0, launched.stderr
    said = launched.stdout.splitlines()
    assert all(f"[{rank}] {words}" in said for rank in (0, 1) for words in ("sum 1.0", "calls 1"))
