"""Two hosts of two processes: values against lax, and the bytes that cross. See test_hosts.py."""

import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rank
from jax import lax
from jax.sharding import PartitionSpec as P
from rank import ME, mesh_of, put, report

import jcoll

CALLS = 4
ELEMENTS = 2 << 20  # Of float32: 8 MiB.
IN_PIECES = 800_011  # Numbers of 4 bytes: 3.05 MiB, 3 pieces, whose last one needs padding.

OPS = {
    "psum": lambda m, axes, x: m.psum(x, axes),
    "pmax": lambda m, axes, x: m.pmax(x, axes),
    "pmean": lambda m, axes, x: m.pmean(x, axes),
    "psum_scatter": lambda m, axes, x: m.psum_scatter(x, axes, tiled=True),
    "all_gather": lambda m, axes, x: m.all_gather(x, axes, tiled=True),
    "all_to_all": lambda m, axes, x: m.all_to_all(x, axes, 0, 0, tiled=True),
}


def spmd(f, mesh):
    spec = P(mesh.axis_names)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def check(mesh, axes, name, count, ours=jcoll):
    """Whether jcoll's result is lax's, and which algorithm gave it."""
    n = jax.device_count()
    x = np.random.default_rng(count).integers(-50, 50, n * n * count).astype(np.float32)
    sharding = jax.sharding.NamedSharding(mesh, P(mesh.axis_names))
    placed = jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
    fn = spmd(functools.partial(OPS[name], ours, axes), mesh)
    algorithm = jcoll.explain(fn, placed)[0].algorithm
    found = fn(placed)
    with jcoll.intercept(enabled=False):
        expected = spmd(functools.partial(OPS[name], lax, axes), mesh)(placed)
    pairs = zip(found.addressable_shards, expected.addressable_shards, strict=True)
    same = all(np.allclose(a.data, b.data, rtol=1e-6) for a, b in pairs)
    return {"case": f"{name} over {axes}, {count}", "same": same, "algorithm": algorithm}


def check_pieces(mesh):
    """A large sum and max: their all_reduces between hosts, and which results are not numpy's."""
    shape, rng = (jax.device_count(), IN_PIECES), np.random.default_rng(0)
    x = {dtype: rng.integers(-999, 999, shape).astype(dtype) for dtype in ("float32", "int32")}
    expected = {"float32": x["float32"].sum(0), "int32": x["int32"].max(0)}

    def in_pieces(v):
        return {"float32": jcoll.psum(v["float32"], "x"), "int32": jcoll.pmax(v["int32"], "x")}

    lowered = rank.program(in_pieces, mesh).lower(put(mesh, x))
    out = lowered.compile()(put(mesh, x))
    wrong = [
        dtype
        for dtype, y in out.items()
        if any((part != expected[dtype]).any() for part in rank.local(y).values())
    ]
    return {"crossings": lowered.as_text().count("stablehlo.all_reduce"), "wrong": wrong}


def check_rounding(mesh, dtype, large, step):
    """What of jcoll's is not the sum in float32, rounded once. From `large` on its values are
    `step` apart: were a host's sum rounded, the first one's would lose half a step."""
    n = jax.device_count()
    numbers = np.array([large, step / 2, step / 4, step / 4])
    x = np.repeat(numbers[:, None], n * 3, 1)
    fns = {
        "sum": lambda v: jcoll.all_reduce(v, "x"),
        "mean": lambda v: jcoll.all_reduce(v, "x", op="mean"),
        "scattered sum": lambda v: jcoll.reduce_scatter(v, "x", scatter_dimension=1, tiled=True),
        "scattered mean": lambda v: jcoll.reduce_scatter(
            v, "x", op="mean", scatter_dimension=1, tiled=True
        ),
        "scattered max": lambda v: jcoll.reduce_scatter(
            v, "x", op="max", scatter_dimension=1, tiled=True
        ),
    }
    expected = {name: numbers.sum() / (n if "mean" in name else 1) for name in fns}
    expected["scattered max"] = numbers.max()
    outs = spmd(lambda v: {k: f(v) for k, f in fns.items()}, mesh)(put(mesh, x.astype(dtype)))
    rounded = {name: np.asarray(v, dtype) for name, v in expected.items()}
    return {
        f"{name} of {dtype}": [float(s.data[0, 0]) for s in out.addressable_shards]
        for name, out in outs.items()
        if any((np.asarray(s.data) != rounded[name]).any() for s in out.addressable_shards)
    }


def check_nan(mesh):
    """Which max or min loses the NaN of the first or of the last host, in an array so wide that
    XLA reduces it in vectors."""
    x = np.arange(jax.device_count() ** 2 * 3000, dtype=np.float32)
    x = x.reshape(jax.device_count(), -1)
    x[1, 0] = x[-1, 1] = np.nan
    fns = {
        "max": lambda v: jcoll.all_reduce(v, "x", op="max"),
        "min": lambda v: jcoll.all_reduce(v, "x", op="min"),
        "scattered max": lambda v: jcoll.reduce_scatter(
            v, "x", op="max", scatter_dimension=1, tiled=True
        ),
    }
    outs = spmd(lambda v: {k: f(v) for k, f in fns.items()}, mesh)(put(mesh, x))
    firsts = {name: out.addressable_shards[0].data for name, out in outs.items()}
    if jax.process_index() > 0:  # Whose part of the scattered one has none.
        del firsts["scattered max"]
    first_two = {k: np.asarray(y)[0, :2] for k, y in firsts.items()}
    return {f"{k} of NaN": y.tolist() for k, y in first_two.items() if not np.isnan(y).all()}


PACKED = {
    "max": lambda v: jcoll.all_reduce(v, "x", op="max"),
    "and": lambda v: jcoll.all_reduce(v, "x", op="and"),
    "scattered sum": lambda v: jcoll.reduce_scatter(v, "x", tiled=True),
    "all_gather": lambda v: jcoll.all_gather(v, "x", tiled=True),
    "all_to_all": lambda v: jcoll.all_to_all(v, "x", 0, 0, tiled=True),
    "all_to_all_v": lambda v: jcoll.all_to_all_v(
        v, jnp.full(jax.device_count(), 3), "x", output_size=v.size
    )[0],
    "broadcast": lambda v: jcoll.broadcast(v, "x", root=1),
}


def check_packed(mesh, dtype):
    """Which ops do not do with integers of less than a byte what they do with larger ones."""
    n, signed = jax.device_count(), dtype.startswith("i")
    x = np.random.default_rng(0).integers(-2 * signed, 2, n * n * 10).astype(np.int32)
    wrong = {}
    for name, f in PACKED.items():
        fn = spmd(lambda v, f=f: f(v.astype(dtype)).astype(jnp.int32), mesh)
        wide = spmd(lambda v, f=f: f(v).astype(dtype).astype(jnp.int32), mesh)
        shards = (g(put(mesh, x)).addressable_shards for g in (fn, wide))
        pairs = zip(*shards, strict=True)
        if not all(np.array_equal(a.data, b.data) for a, b in pairs):
            wrong[f"{name} of {dtype}"] = "is not that of int32"
    return wrong


def values():
    flat, both = mesh_of(), mesh_of(host=2, local=jax.device_count() // 2)
    rows = [
        check(mesh, axes, name, count)
        for mesh, axes in ((flat, "x"), (both, ("host", "local")), (both, "local"), (both, "host"))
        for name in OPS
        for count in (5, 70_001)
        if count < 10 or name == "psum"
    ]
    with jcoll.intercept():
        rows += [check(flat, "x", name, 5, ours=lax) for name in OPS]
    wrong = (
        check_nan(flat)
        | check_rounding(flat, "bfloat16", 256, 2)
        | check_rounding(flat, "float8_e5m2", 4, 1)
        | check_packed(flat, "int2")
        | check_packed(flat, "uint4")
    )
    report("values", rows=rows, wrong=wrong, pieces=check_pieces(flat))


# rows of x, output_size, overflow, and whether counts may be more than the rows
RAGGED = (
    (5, 3, "drop", False),
    (5, 3, "drop", False, "hierarchical"),  # By its name.
    (4, 9, "error", True),  # Bad counts: poisoned.
    (6, 40, "error", False),
    (0, 3, "error", False),
    (3, 0, "drop", False),
)


def counts_of(n, rows, bad, rng):
    counts = np.stack([rng.multinomial(rng.integers(0, rows + 1), [1 / n] * n) for _ in range(n)])
    counts[0, 0] += bad * (rows + 1)
    return counts.astype(np.int32)


def check_ragged(rows, output_size, overflow, bad, algorithm="auto"):
    """Whether all_to_all_v and its derivative are the same as by algorithm="xla"."""
    mesh, n, rng = mesh_of(), jax.device_count(), np.random.default_rng(rows)
    x = put(mesh, rng.standard_normal((n, rows, 2)).astype(np.float32))
    counts = put(mesh, counts_of(n, rows, bad, rng))

    def value_and_grad(algorithm, x, counts):
        def loss(x):
            y, *rest = jcoll.all_to_all_v(
                x, counts[0], "x", output_size=output_size, overflow=overflow, algorithm=algorithm
            )
            weight = np.arange(y.size, dtype=np.float32).reshape(y.shape) + 1
            return (y * weight).sum(), (y, *rest)

        grad, outs = jax.grad(loss, has_aux=True)(x[0])
        return (grad, *outs)

    results, algorithms = [], []
    for name in (algorithm, "xla"):
        fn = spmd(functools.partial(value_and_grad, name), mesh)
        algorithms.append([row.algorithm for row in jcoll.explain(fn, x, counts)])
        grad, *outs = fn(x, counts)
        # The derivative at a poisoned result means nothing.
        outs += [] if bad else [grad]
        results.append([s.data for out in outs for s in out.addressable_shards])
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*results, strict=True))
    return {"case": f"{rows} {output_size} {overflow} {bad}", "same": same, "by": algorithms[0]}


def ragged():
    report("ragged", rows=[check_ragged(*case) for case in RAGGED[: int(rank.ARGS[1])]])


def sent():
    (counter,) = Path("/sys/class/net").glob("veth*/statistics/tx_bytes")
    return int(counter.read_text())


def traffic():
    """Bytes that leave this host per call, by jcoll and by lax."""
    mesh = mesh_of(host=2, local=2)
    x = put(mesh, np.ones((2, 2, ELEMENTS), np.float32))
    for name, m in (("jcoll", jcoll), ("lax", lax)):
        spec = P("host", "local")
        f = jax.jit(
            jax.shard_map(
                lambda v, m=m: m.psum(v, ("host", "local")),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
        )
        f(x).block_until_ready()
        time.sleep(0.5)  # Until the others are done, too.
        before = sent()
        for _ in range(CALLS):
            f(x).block_until_ready()
        time.sleep(0.5)
        report(name, bytes=(sent() - before) / CALLS, nbytes=ELEMENTS * 4, process=ME)


{"values": values, "ragged": ragged, "traffic": traffic}[rank.ARGS[0]]()
