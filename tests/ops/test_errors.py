"""Bad input: an error of the four-part form, at trace time where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ops.meshes import mesh_of, put, spmd

import jcoll
from jcoll.config import MAX_THREADS, Config
from jcoll.errors import AxisError

N = 4


def trace(f: Callable, x: Any = None) -> None:
    x = np.zeros((N, N, 6), np.float32) if x is None else x
    jax.eval_shape(spmd(f, mesh_of(N)), x)


# what -> (call, exception, words that the message must have)
BAD: dict[str, tuple[Callable, type[Exception], list[str]]] = {
    "unknown axis": (lambda x: jcoll.psum(x, "z"), AxisError, ["all_reduce", "'z'", "['x']"]),
    "positional axis": (lambda x: jcoll.psum(x, 0), TypeError, ["positional", "jax.numpy"]),
    "axis twice": (lambda x: jcoll.psum(x, ("x", "x")), ValueError, ["twice"]),
    "indivisible scatter": (
        lambda x: jcoll.reduce_scatter(x, "x", scatter_dimension=1, tiled=True),
        ValueError,
        ["scatter_dimension=1 has size 6", "4 ranks", "Pad it to 8"],
    ),
    "indivisible split": (
        lambda x: jcoll.all_to_all(x, "x", 1, 0, tiled=True),
        ValueError,
        ["split_axis=1 has size 6", "Pad it to 8", "all_to_all_v"],
    ),
    "untiled size": (
        lambda x: jcoll.all_to_all(x, "x", 1, 0),
        ValueError,
        ["split_axis=1 has size 6", "number of ranks, 4", "tiled=True"],
    ),
    "dimension out of range": (
        lambda x: jcoll.all_gather(x, "x", axis=5),
        ValueError,
        ["axis=5", "3 dimensions", "-3 to 2"],
    ),
    "overlapping groups": (
        lambda x: jcoll.psum(x, "x", axis_index_groups=[[0, 1], [1, 2, 3]]),
        ValueError,
        ["overlap", "[1]", "exactly once"],
    ),
    "groups miss ranks": (
        lambda x: jcoll.psum(x, "x", axis_index_groups=[[0, 1]]),
        ValueError,
        ["miss", "[2, 3]"],
    ),
    "groups name a rank that is not there": (
        lambda x: jcoll.psum(x, "x", axis_index_groups=[[0, 1, 2, 3, 4]]),
        ValueError,
        ["[4]", "not on the axis"],
    ),
    "unequal groups": (
        lambda x: jcoll.all_gather(x, "x", axis_index_groups=[[0], [1, 2, 3]]),
        ValueError,
        ["sizes [1, 3]", "equal size"],
    ),
    "groups that are no lists": (
        lambda x: jcoll.psum(x, "x", axis_index_groups=3),
        TypeError,
        ["axis_index_groups=3"],
    ),
    "root out of range": (
        lambda x: jcoll.broadcast(x, "x", root=4),
        ValueError,
        ["root=4", "Use 0 to 3"],
    ),
    "negative root": (lambda x: jcoll.gather(x, "x", root=-1), ValueError, ["root=-1"]),
    "traced root": (
        lambda x: jcoll.broadcast(x, "x", root=x[0, 0].astype(int)),
        TypeError,
        ["root", "traced", "static"],
    ),
    "traced axis": (
        lambda x: jcoll.all_gather(x, "x", axis=x[0, 0].astype(int)),
        TypeError,
        ["axis", "traced"],
    ),
    "float root": (lambda x: jcoll.reduce(x, "x", root=1.5), TypeError, ["root=1.5"]),
    "bool root": (lambda x: jcoll.reduce(x, "x", root=True), TypeError, ["root=True"]),
    "no array": (lambda x: jcoll.psum("abc", "x"), TypeError, ["got str"]),
    "tree of rows": (
        lambda x: jcoll.all_to_all_v({"a": x}, jnp.zeros(4, int), "x", output_size=4),
        TypeError,
        ["got dict", "one by one"],
    ),
    "unknown op": (
        lambda x: jcoll.all_reduce(x, "x", op="add"),
        ValueError,
        ["op='add'", "sum, mean"],
    ),
    "and of floats": (
        lambda x: jcoll.all_reduce(x, "x", op="and"),
        TypeError,
        ["op='and'", "float32"],
    ),
    "max of complex": (
        lambda x: jcoll.all_reduce(x.astype(jnp.complex64), "x", op="max"),
        TypeError,
        ["op='max'", "complex64"],
    ),
    "sum of keys": (
        lambda x: jcoll.psum(jax.random.key(0), "x"),
        TypeError,
        ["op='sum' is not defined for key", "numbers or bools"],
    ),
    "sum of traced keys": (
        lambda x: jcoll.psum(jax.random.split(jax.random.key(x[0, 0].astype(int)))[0], "x"),
        TypeError,
        ["op='sum' is not defined for key"],
    ),
    "traced axis_name": (
        lambda x: jcoll.psum(x, x[0, 0]),
        TypeError,
        ["axis_name is a traced value"],
    ),
    "axis_name in a tuple that is traced": (
        lambda x: jcoll.psum(x, ("x", x[0, 0])),
        TypeError,
        ["axis_name is a traced value"],
    ),
    "unhashable axis_name": (
        lambda x: jcoll.psum(x, ({"x": 1},)),
        TypeError,
        ["axis_name=({'x': 1},)", "dict", "name of a mesh axis"],
    ),
    "tiled that is no bool": (
        lambda x: jcoll.all_gather(x, "x", tiled="no"),
        TypeError,
        ["tiled='no' is not a bool", "True or False"],
    ),
    "tiled that is several": (
        lambda x: jcoll.all_gather(x, "x", tiled=np.zeros(2)),
        TypeError,
        ["tiled=array([0., 0.]) is not a bool"],
    ),
    "traced op": (
        lambda x: jcoll.all_reduce(x, "x", op=x[0, 0]),
        TypeError,
        ["op is a traced value"],
    ),
    "algorithm that is no name": (
        lambda x: jcoll.all_gather(x, "x", algorithm=None),
        TypeError,
        ["algorithm=None is not a name", "Pass a str, one of auto, direct, xla, bruck,"],
    ),
    "traced algorithm": (
        lambda x: jcoll.all_gather(x, "x", algorithm=x[0, 0]),
        TypeError,
        ["algorithm is a traced value"],
    ),
    "traced timeout": (
        lambda x: jcoll.all_gather(x, "x", timeout_s=x[0, 0]),
        TypeError,
        ["timeout_s is a traced value"],
    ),
    "traced overflow": (
        lambda x: jcoll.all_to_all_v(x, jnp.zeros(4, int), "x", output_size=4, overflow=x[0, 0]),
        TypeError,
        ["overflow is a traced value"],
    ),
    "counts that are no array": (
        lambda x: jcoll.all_to_all_v(x, "abc", "x", output_size=4),
        TypeError,
        ["send_counts: got str", "number is needed"],
    ),
    "unknown algorithm": (
        lambda x: jcoll.all_reduce(x, "x", algorithm="rings"),
        ValueError,
        ["'rings'", "direct"],
    ),
    "bad timeout": (
        lambda x: jcoll.all_reduce(x, "x", timeout_s=-1),
        ValueError,
        ["timeout_s=-1", "positive"],
    ),
    "perm out of range": (
        lambda x: jcoll.ppermute(x, "x", [(0, 9)]),
        ValueError,
        ["destination [9]", "4 ranks", "Use 0 to 3, or -4 to -1"],
    ),
    "perm with two senders": (
        lambda x: jcoll.ppermute(x, "x", [(0, 1), (2, 1)]),
        ValueError,
        ["destination [1] more than once"],
    ),
    "perm that is no perm": (lambda x: jcoll.ppermute(x, "x", [1, 2]), TypeError, ["pairs"]),
    "counts of another length": (
        lambda x: jcoll.all_to_all_v(x, jnp.zeros(3, int), "x", output_size=4),
        ValueError,
        ["send_counts", "(3,)", "(4,)"],
    ),
    "float counts": (
        lambda x: jcoll.all_to_all_v(x, jnp.zeros(4), "x", output_size=4),
        TypeError,
        ["send_counts", "float"],
    ),
    "negative output_size": (
        lambda x: jcoll.all_to_all_v(x, jnp.zeros(4, int), "x", output_size=-4),
        ValueError,
        ["output_size=-4"],
    ),
    "traced output_size": (
        lambda x: jcoll.all_to_all_v(x, jnp.zeros(4, int), "x", output_size=x[0, 0].astype(int)),
        TypeError,
        ["output_size", "traced"],
    ),
    "unknown overflow": (
        lambda x: jcoll.all_to_all_v(x, jnp.zeros(4, int), "x", output_size=4, overflow="clip"),
        ValueError,
        ["overflow='clip'", "drop"],
    ),
    "op that is an array": (
        lambda x: jcoll.all_reduce(x, "x", op=np.array(["sum", "max"])),
        ValueError,
        ["op=array(", "sum, mean"],
    ),
    "overflow that is an array": (
        lambda x: jcoll.all_to_all_v(
            x, jnp.zeros(4, int), "x", output_size=4, overflow=np.array(["drop", "error"])
        ),
        ValueError,
        ["overflow=array("],
    ),
    "timeout that no float holds": (
        lambda x: jcoll.all_gather(x, "x", timeout_s=10**400),
        ValueError,
        ["timeout_s=1000", "positive number"],
    ),
    **{
        f"{op} of an integer that no array holds": (
            lambda x, op=op, i=i: getattr(jcoll, op)(i, "x", **({"perm": []} if i < 0 else {})),
            ValueError,
            ["got an integer that does not fit int64", "smaller"],
        )
        for op, i in [("all_reduce", 10**30), ("broadcast", 2**64), ("ppermute", -(2**63) - 1)]
    },
    "array of text": (
        lambda x: jcoll.broadcast(np.array(["a"]), "x"),
        TypeError,
        ["got ndarray of <U1"],
    ),
    "counts that no integer type holds": (
        lambda x: jcoll.all_to_all_v(x, [2**64] * 4, "x", output_size=4),
        ValueError,
        ["send_counts: got an integer", "int64"],
    ),
    "counts of uint64 that int64 does not hold": (
        lambda x: jcoll.all_to_all_v(x, np.full(4, 2**63, np.uint64), "x", output_size=4),
        ValueError,
        ["send_counts has 9223372036854775808", "int64"],
    ),
    "no counts": (
        lambda x: jcoll.all_to_all_v(x, None, "x", output_size=4),
        TypeError,
        ["send_counts: got NoneType"],
    ),
    "no offsets": (
        lambda x: jcoll.ragged_all_to_all(x, x, None, *(jnp.zeros(4, int),) * 3, axis_name="x"),
        TypeError,
        ["input_offsets: got NoneType"],
    ),
    "more rows than int32 counts": (
        lambda x: jcoll.all_to_all_v(x, jnp.zeros(4, jnp.int32), "x", output_size=2**31),
        ValueError,
        ["output_size=2147483648", "at most 2147483647", "int64"],
    ),
    "more rows than int64 counts": (
        lambda x: jcoll.all_to_all_v(x, jnp.zeros(4, jnp.int64), "x", output_size=2**63),
        ValueError,
        ["output_size=9223372036854775808", "at most 9223372036854775807"],
    ),
    "bools as groups": (
        lambda x: jcoll.psum(x, "x", axis_index_groups=[[False, True], [2, 3]]),
        TypeError,
        ["axis_index_groups=[[False, True], [2, 3]]", "False is a bool"],
    ),
    "tiled that is None": (
        lambda x: jcoll.all_to_all(x, "x", 0, 0, tiled=None),
        TypeError,
        ["tiled=None is not a bool"],
    ),
    "ragged dtypes": (
        lambda x: jcoll.ragged_all_to_all(
            x, x.astype(jnp.int32), *(jnp.zeros(4, int),) * 4, axis_name="x"
        ),
        ValueError,
        ["float32", "int32", "agree"],
    ),
    "ragged scalars": (
        lambda x: jcoll.ragged_all_to_all(
            x[0, 0], x[0, 0], *(jnp.zeros(4, int),) * 4, axis_name="x"
        ),
        ValueError,
        ["rows"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_argument(what: str) -> None:
    call, exception, words = BAD[what]
    with pytest.raises(exception) as info:
        trace(call)
    assert words
    for word in words:
        assert word in str(info.value)
    assert str(info.value).startswith("jcoll.")
    assert "\n  " in str(info.value), "no fix is offered"


TILED: dict[str, Callable] = {
    "all_gather": lambda x, tiled: jcoll.all_gather(x, "x", tiled=tiled),
    "all_to_all": lambda x, tiled: jcoll.all_to_all(x, "x", 0, 0, tiled=tiled),
    "gather": lambda x, tiled: jcoll.gather(x, "x", tiled=tiled),
    "psum_scatter": lambda x, tiled: jcoll.psum_scatter(x, "x", tiled=tiled),
    "scatter": lambda x, tiled: jcoll.scatter(x, "x", tiled=tiled),
}


@pytest.mark.parametrize("name", TILED)
def test_traced_tiled(name: str) -> None:
    with pytest.raises(TypeError, match=r"^jcoll\..*tiled is a traced value(.|\n)*static"):
        trace(lambda x: TILED[name](x, x[0, 0] > 0))
    for tiled in (np.True_, 1, np.asarray(True)):
        trace(lambda x, tiled=tiled: TILED[name](x, tiled))


def test_where_is_the_same_for_a_name_and_for_a_tuple_of_one() -> None:
    texts = []
    for axis in ("x", ("x",)):
        with pytest.raises(ValueError, match="rings") as info:
            trace(lambda x, axis=axis: jcoll.all_reduce(x, axis, algorithm="rings"))
        texts.append(str(info.value))
    assert texts[0] == texts[1]


def test_outside_shard_map() -> None:
    for f in (lambda x: jcoll.psum(x, "x"), lambda x: jcoll.all_gather(x, "x")):
        for run in (f, jax.jit(f)):
            with pytest.raises(NameError, match=r"'x' is not bound here(.|\n)*jax.shard_map"):
                run(jnp.ones(3))


def test_axis_that_is_not_manual() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    f = jax.shard_map(
        lambda x: jcoll.psum(x, "y"), mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    with jax.set_mesh(mesh), pytest.raises(AxisError, match=r"'y' is not manual here"):
        jax.jit(f)(jnp.ones(4))


def test_direct_where_it_cannot_serve() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    f = jax.shard_map(
        lambda x: jcoll.all_reduce(x, "x", algorithm="direct"),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(),
        axis_names={"x"},
    )
    with pytest.raises(ValueError, match=r"'direct' cannot serve this call: .*\['y'\]"):
        jax.jit(f)(jnp.ones(4))


# At run time: errors that name the ranks, after which the process goes on.


def failing(f: Callable, *arrays: Any) -> str:
    mesh = mesh_of(N)
    g = spmd(f, mesh)
    with pytest.raises(jax.errors.JaxRuntimeError) as info:
        jax.block_until_ready(g(*put(mesh, arrays)))
    y = spmd(lambda x: jcoll.psum(x, "x"), mesh)(put(mesh, np.ones((N, 2))))
    np.testing.assert_array_equal(y, np.full((N, 2), 4.0))
    return str(info.value)


def variable(output_size: int) -> Callable:
    return lambda x, counts: jcoll.all_to_all_v(x, counts, "x", output_size=output_size)


def test_variable_counts() -> None:
    x = np.ones((N, 8, 2), np.float32)
    counts = np.ones((N, N), np.int32)
    negative, too_many = counts.copy(), counts.copy()
    negative[2, 1] = -1
    too_many[3, 2] = 8
    assert "rank 2 sends to rank 1 send_counts[1]=-1" in failing(variable(16), x, negative)
    assert "rank 3 sends to rank 2 send_counts[2]=8" in failing(variable(16), x, too_many)
    text = failing(variable(3), x, counts)
    assert "output_size=3" in text and "at least 4" in text and "rank 3 for rank 0" in text
    assert "test_errors.py:" in text


def test_ragged_sizes() -> None:
    x, out = np.ones((N, 8, 2), np.float32), np.zeros((N, 8, 2), np.float32)
    sizes = np.ones((N, N), np.int32)
    inputs = np.tile(np.arange(N, dtype=np.int32), (N, 1))
    outputs = np.tile(np.arange(N, dtype=np.int32)[:, None], (1, N))

    def ragged(x: Any, out: Any, *index: Any) -> Any:
        return jcoll.ragged_all_to_all(x, out, *index, axis_name="x")

    def at(a: np.ndarray, i: int, j: int, value: int) -> np.ndarray:
        a = a.copy()
        a[i, j] = value
        return a

    good = spmd(ragged, mesh_of(N))(*put(mesh_of(N), (x, out, inputs, sizes, outputs, sizes)))
    assert float(np.asarray(good).sum()) == N * N * 2
    text = failing(ragged, x, out, inputs, at(sizes, 1, 2, -3), outputs, at(sizes, 2, 1, -3))
    assert "rank 1 sends to rank 2 a negative size" in text
    text = failing(ragged, x, out, inputs, sizes, outputs, at(sizes, 2, 1, 5))
    assert "rank 1 sends to rank 2 1 rows" in text and "rank 2 expects 5" in text
    text = failing(ragged, x, out, at(inputs, 0, 3, 8), sizes, outputs, sizes)
    assert "rank 0 sends to rank 3 rows 8" in text and "operand has 8 rows" in text
    text = failing(ragged, x, out, inputs, sizes, at(outputs, 0, 3, 8), sizes)
    assert "rank 0 sends to rank 3" in text and "output there has 8 rows" in text
    text = failing(ragged, x, out, inputs, sizes, at(outputs, 0, 3, 1), sizes)
    assert "ranks 0 and 1 both write row 1 of rank 3" in text


def test_ragged_under_vmap_stays_in_its_own_element() -> None:
    """An offset that leaves its element must not reach into the next one's rows."""
    x, out = np.ones((N, 2, 4, 2), np.float32), np.zeros((N, 2, 8, 2), np.float32)
    sizes = np.ones((N, 2, N), np.int32)
    inputs = np.zeros((N, 2, N), np.int32)
    outputs = np.tile(np.arange(N, dtype=np.int32)[:, None, None], (1, 2, N))

    def ragged(*arrays: Any) -> Any:
        return jax.vmap(lambda *a: jcoll.ragged_all_to_all(*a, axis_name="x"))(*arrays)

    mesh = mesh_of(N)
    spmd(ragged, mesh)(*put(mesh, (x, out, inputs, sizes, outputs, sizes)))
    for offset in (4, -1):
        bad = inputs.copy()
        bad[1, 0 if offset > 0 else 1, 2] = offset
        assert "rank 1 sends to rank 2" in failing(ragged, x, out, bad, sizes, outputs, sizes)


def test_environment() -> None:
    for name, value in [
        ("JCOLL_TIMEOUT", "nan"),
        ("JCOLL_TIMEOUT", "-1"),
        ("JCOLL_TIMEOUT", "1_0"),
        ("JCOLL_NUM_THREADS", "\u0664"),  # An Arabic 4.
        ("JCOLL_SHM_SIZE", "\u0664K"),
        ("JCOLL_ISA", "sse9"),
        ("JCOLL_SHM_SIZE", "1" + 30 * "0"),
        ("JCOLL_SHM_SIZE", "0"),
        ("JCOLL_PEER_READS", "1" + 30 * "0"),
    ]:
        with pytest.raises(ValueError, match=name):
            Config.from_environment({name: value})
    assert Config.from_environment({"JCOLL_NUM_THREADS": "9999"}).num_threads == MAX_THREADS
    sizes = Config.from_environment({"JCOLL_SHM_SIZE": "64M", "JCOLL_PEER_READS": "4KiB"})
    assert (sizes.shm_nbytes, sizes.peer_reads) == (64 << 20, 4096)
    assert Config.from_environment({"JCOLL_PEER_READS": "0"}).peer_reads == 0


@pytest.mark.parametrize("name", ["JCOLL_SHM_SIZE", "JCOLL_PEER_READS", "JCOLL_TIMEOUT"])
def test_what_an_environment_error_proposes_is_accepted(name) -> None:
    with pytest.raises(ValueError, match=r"Set it to one, e\.g\. ") as error:
        Config.from_environment({name: "256X"})
    proposed = str(error.value).partition(f"e.g. {name}=")[2].partition(",")[0]
    assert Config.from_environment({name: proposed}) == Config()
