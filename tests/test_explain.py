"""jcoll.explain: a row per collective, with the algorithm and the reason."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lax_programs import TARGET, N, integers, mesh_of, place, psum_of, sharded

import jcoll
from jcoll.algorithms.hierarchical import HIERARCHICAL_OPS
from jcoll.ops import SPECS

P = jax.P
LINES = Path(__file__).read_text().splitlines()


def site(mark: str) -> str:
    """The line of this file that ends in the comment `mark`, as call sites are written."""
    (number,) = [n for n, line in enumerate(LINES, 1) if line.endswith(f"  # {mark}")]
    return f"tests/test_explain.py:{number}"


def argument(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(mesh_of(N), P("x"))
    return jax.ShapeDtypeStruct((N, *shape), dtype, sharding=sharding)


def test_rows_of_jcoll():
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def body(x):
        y = jcoll.all_reduce(x, "x", op="max")  # reduced
        return jcoll.all_gather(y.astype(jnp.float16), "x", axis_index_groups=halves)

    (reduce, gather) = jcoll.explain(sharded(body, check_vma=False), argument(5))
    assert (reduce.op, reduce.axis, reduce.signature) == ("all_reduce", "'x'", "float32[1,5]")
    assert (reduce.num_ranks, reduce.algorithm) == (N, "direct")
    assert reduce.reason.endswith("measured at 1K")
    assert reduce.call_site == site("reduced")
    assert (gather.op, gather.signature, gather.num_ranks) == ("all_gather", "float16[1,5]", 4)


def test_reasons():
    def body(x, algorithm):
        return jcoll.all_reduce(x, "x", algorithm=algorithm)

    mesh = mesh_of(4, 2)
    for algorithm, names, expected in [
        ("direct", {"x", "y"}, ("direct", "asked for")),
        ("xla", {"x", "y"}, ("xla", "asked for")),
        ("auto", {"x"}, ("xla", "the mesh axes ['y'] are not manual in this shard_map")),
    ]:
        fn = jax.shard_map(
            partial(body, algorithm=algorithm),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P(),
            axis_names=names,
        )
        (row,) = jcoll.explain(fn, place(integers((8, 4)), mesh, P("x")))
        assert (row.algorithm, row.reason) == expected


def test_rows_of_lax():
    def body(x):
        total = lax.psum(x, "x")  # total
        return lax.all_gather(x, "x"), total + lax.ppermute(x, "x", [(0, 1)])  # others

    fn = jax.jit(sharded(body))
    assert len(jcoll.explain(fn, argument(5))) == 0
    with jcoll.intercept():
        rows = jcoll.explain(fn, argument(5))
    assert [(row.op, row.call_site) for row in rows] == [
        ("all_reduce", site("total")),
        ("all_gather", site("others")),
        ("ppermute", site("others")),
    ]
    for name, row in zip(("psum", "all_gather", "ppermute"), rows, strict=True):
        assert row.reason.startswith(f"jax.lax.{name}, intercepted: ")
    assert rows[2].reason == "jax.lax.ppermute, intercepted: jcoll's only algorithm for this op"
    assert {row.signature for row in rows} == {"float32[1,5]"}


def test_equal_calls_are_rows_of_their_own():
    def body(x, psum):
        for _ in range(3):
            x = x + psum(x, "x")
        return x

    x = argument(2)
    with jcoll.intercept():
        for psum in (jcoll.psum, lax.psum):
            assert len(jcoll.explain(sharded(partial(body, psum=psum)), x)) == 3


@pytest.mark.parametrize("intercepted", [True, False])
def test_caches_hide_nothing(intercepted):
    inner, x = psum_of(mesh_of(N))
    ours = sharded(lambda x: jcoll.all_reduce(x, "x") + jcoll.pmax(x[:, 0], "x")[:, None])
    scale = partial(jax.jit, static_argnames="times")(lambda x, *, times: inner(x) * times)
    fn = jax.jit(lambda x: scale(jax.jit(ours)(x), times=2))
    with jcoll.intercept(enabled=intercepted):
        rows = jcoll.explain(fn, x)
        assert [row.op for row in rows] == ["all_reduce"] * (2 + intercepted)
        fn.lower(x)
        fn(x)
        assert jcoll.explain(fn, x) == rows
        assert jcoll.explain(fn, x) == rows
    with jcoll.intercept(enabled=not intercepted):
        assert len(jcoll.explain(fn, x)) == 3 - intercepted
    with jcoll.intercept(enabled=intercepted):
        assert jcoll.explain(fn, x) == rows


def test_loops_and_branches():
    def body(x):
        x = lax.fori_loop(0, 9, lambda _, v: jcoll.ppermute(v, "x", [(0, 1)]), x)
        return lax.cond(x.sum() > 0, lambda v: jcoll.psum(v, "x"), lambda v: v, x)

    rows = jcoll.explain(sharded(body, check_vma=False), argument(2))
    assert [row.op for row in rows] == ["ppermute", "all_reduce"]


def test_gradient():
    fn = sharded(lambda x: jcoll.all_gather(x, "x"))
    rows = jcoll.explain(jax.grad(lambda x: (fn(x) ** 2).sum()), argument(2))
    assert [(row.op, row.signature) for row in rows] == [
        ("all_gather", "float32[1,2]"),
        ("reduce_scatter", "float32[8,1,2]"),
    ]


def test_nothing_runs_and_nothing_stays():
    fn, x = psum_of(mesh_of(N))
    program = jax.jit(sharded(lambda x: jcoll.psum(x, "x")))
    jcoll.reset_metrics()
    before = program.lower(x).as_text()
    with jcoll.intercept():
        jcoll.explain(fn, x)
        jcoll.explain(program, x)
    assert jcoll.metrics() == []
    assert program.lower(x).as_text() == before
    assert TARGET not in fn.lower(x).as_text()


def test_options_of_a_jitted_function():
    @partial(jax.jit, static_argnums=1, donate_argnums=0)
    def fn(x, op):
        return sharded(lambda v: jcoll.all_reduce(v, "x", op=op))(x)

    x = place(np.ones((N, 2), np.float32), mesh_of(N), P("x"))
    assert len(jcoll.explain(fn, x, "max")) == 1
    assert not x.is_deleted()


def test_table():
    fn = sharded(lambda x: jcoll.all_reduce(x, "x", algorithm="xla"))  # in the table
    head, row = str(jcoll.explain(fn, argument(3))).splitlines()
    assert head == "op          axis  signature     ranks  algorithm  reason     call site"
    assert (
        row
        == f"all_reduce  'x'   float32[1,3]  8      xla        asked for  {site('in the table')}"
    )


def test_costs():
    def body(x):
        y = jcoll.all_reduce(x.astype(jnp.bfloat16), "x").astype(x.dtype)  # narrow
        return jcoll.all_gather(x, "x", algorithm="xla"), y

    rows = jcoll.explain(sharded(body, check_vma=False), argument(512))
    reduce, gather = rows
    assert reduce.request.nbytes == 512 * 2
    assert gather.request.nbytes == N * 512 * 4, "of the larger side"
    by_name = {c.algorithm: c for c in reduce.candidates}
    assert by_name["ring"].obstacle == "would round partial sums to 16 bits"
    assert by_name["direct"].us is not None
    assert by_name["direct"].source == "measured, 8 ranks, shipped"
    text = rows.costs()
    assert f"all_reduce bfloat16[1,512] over 'x', {N} ranks at {site('narrow')}\n" in text
    assert "\n*  xla " in text.partition("all_gather")[2]
    assert jcoll.explain(jnp.sin, 1.0).costs() == ""


def test_without_collectives():
    assert str(jcoll.explain(jnp.sin, 1.0)) == (
        "no collectives of jcoll (jax.lax's: inside jcoll.intercept())"
    )
    with jcoll.intercept():
        assert str(jcoll.explain(jnp.sin, 1.0)) == "no collectives of jcoll"


def test_environment():
    found = jcoll.explain()
    assert (found.platform, found.devices, found.processes) == ("cpu", N, 1)
    assert found.served
    assert found.threads > 0
    assert not found.intercepting
    assert f"platform   cpu, {N} devices in 1 process\n" in str(found)
    assert f"in process: {found.isa}, {found.threads} threads" in str(found)
    with jcoll.intercept():
        assert jcoll.explain().intercepting
        assert "lowered through jcoll" in str(jcoll.explain())


def test_function_with_a_lower_of_its_own():
    class Word:
        def lower(self):
            return "word"

        def __call__(self, x):
            return x

    assert "no collectives" in str(jcoll.explain(Word(), 1.0))


def test_not_a_function():
    with pytest.raises(TypeError, match=r"explain: fn=3 is not a function.\n  Pass the function"):
        jcoll.explain(3)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_ops_with_two_levels():
    """The selection, which knows no specs, names the ops whose specs have them."""
    assert {name for name, spec in SPECS.items() if spec.hierarchical} == set(HIERARCHICAL_OPS)
