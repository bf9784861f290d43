"""`python -m jcoll explain`: what `algorithm="auto"` would choose for a call, and why."""

from __future__ import annotations

import argparse
import math
import re

import numpy as np

from jcoll import sizes
from jcoll.algorithms import authored
from jcoll.bench.catalog import CATALOG, kind, parse_dtype
from jcoll.comm.group import Groups
from jcoll.comm.mesh import configured_algorithm
from jcoll.errors import UsageError
from jcoll.explain import candidate_lines
from jcoll.ops import _hierarchical, _selection
from jcoll.ops._reductions import REDUCE_OPS, check_dtype
from jcoll.runtime import world
from jcoll.tuning.candidates import PLACEMENTS, Request
from jcoll.tuning.select import automatic, priced

_DESCRIPTION = """\
Print which algorithm algorithm="auto" means for a call on CPU, the costs of all algorithms, and
why those that cannot serve cannot. Nothing runs. For the collectives of a program of your own there
is jcoll.explain(fn, *args).
"""

_EPILOG = """\
examples:
  python -m jcoll explain all_reduce --size 4M --mesh data=8
  python -m jcoll explain all_reduce --size 4M --mesh host=2,local=4 --axis local --dtype bfloat16
  python -m jcoll explain all_gather --size 64K --mesh data=8 --processes 4

size: as in bench, the larger of a rank's input and output. The devices of the mesh are numbered
along its last axis first, and dealt out to processes, and these to hosts, in equal runs. All
processes are taken to have this one's tuning file.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add = parser.add_argument
    add("op", metavar="OP", help=", ".join(CATALOG))
    add("--size", required=True, metavar="SIZE", help="bytes, e.g. 16K or 4M")
    add("--mesh", required=True, metavar="AXES", help="the mesh: name=size, by commas")
    add("--axis", metavar="NAMES", help="the collective's axes, by commas (default: all)")
    add("--dtype", default="float32", metavar="NAME", help="numpy's name (default float32)")
    help_text = f"of ops that reduce: {' '.join(REDUCE_OPS)} (default sum)"
    add("--op", dest="redop", metavar="REDOP", help=help_text)
    add("--processes", type=int, default=1, metavar="N", help="that the mesh is over (default 1)")
    add("--hosts", type=int, default=1, metavar="K", help="that these are on (default 1)")
    authored.add_flag(parser)


def run(args: argparse.Namespace) -> int:
    try:
        authored.load(args.module)
        request = make_request(args)
        configured = configured_algorithm(request.op, Groups(request.num_ranks))
    except (ValueError, TypeError) as error:  # UsageError is a ValueError.
        args.fail(str(error))
    algorithm, reason = automatic(request, configured)
    size = sizes.format_size(request.nbytes)
    where = PLACEMENTS[request.placement]
    print(f"{args.op} of {size} ({args.dtype}), {request.num_ranks} ranks, {where}, on CPU")
    print(f"{algorithm}: {reason}\n")
    print("\n".join(candidate_lines(priced(request), algorithm, args.dtype)))
    return 0


def make_request(args: argparse.Namespace) -> Request:
    if args.op not in CATALOG:
        raise UsageError(f"OP is {args.op!r}; needed is one of {', '.join(CATALOG)}")
    dtype = parse_dtype(args.dtype)
    redop = _redop(args, dtype)
    mesh = _mesh(args.mesh)
    axes = _axes(args.axis, mesh)
    num_ranks = math.prod(mesh[axis] for axis in axes)
    where = _placement(mesh, axes, args.processes, args.hosts)
    obstacle = None
    if where.host_of is not None:
        obstacle = _hierarchical.obstacle(args.op, where.host_of, num_ranks, Groups(num_ranks))
    reduces = redop in ("sum", "mean", "prod")
    return Request(
        op=args.op,
        sizes=(num_ranks,),
        nbytes=sizes.parse_size(args.size),
        placement=_selection.placement_of(where),
        obstacle=obstacle,
        is_narrow=reduces and kind(dtype) == "float" and dtype.itemsize == 2,
        is_mean=redop == "mean",
        # As world.has_same_tuning says: who is within one process has not asked the others.
        use_own=args.processes == 1 or where != world.Placement(),
    )


def _redop(args: argparse.Namespace, dtype: np.dtype) -> str | None:
    """The reduction, as the op would take it; None for ops without."""
    if not CATALOG[args.op].reduces:
        if args.redop is not None:
            raise UsageError(f"--op is {args.redop!r}; {args.op} does not reduce: leave it out")
        return None
    redop = args.redop or "sum"
    if redop not in REDUCE_OPS:
        raise UsageError(f"--op is {redop!r}; needed is one of {', '.join(REDUCE_OPS)}")
    check_dtype(args.op, redop, dtype)
    return redop


def _mesh(text: str) -> dict[str, int]:
    parts = [part.strip() for part in text.split(",")]
    pairs = [re.fullmatch(r"(\w+)=([1-9]\d{0,5})", part) for part in parts]
    mesh = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if len(mesh) != len(parts) or math.prod(mesh.values()) > 1 << 20:
        raise UsageError(f"--mesh is {text!r}; axes with sizes are needed: write host=2,local=4")
    return mesh


def _axes(text: str | None, mesh: dict[str, int]) -> list[str]:
    axes = [name.strip() for name in text.split(",")] if text else list(mesh)
    if wrong := [name for name in axes if name not in mesh]:
        raise UsageError(f"--axis has {wrong[0]!r}; needed are some of {', '.join(mesh)}")
    if len(set(axes)) < len(axes):
        raise UsageError(f"--axis is {text!r}; every axis is needed once: leave out the second")
    return axes


def _placement(
    mesh: dict[str, int], axes: list[str], processes: int, hosts: int
) -> world.Placement:
    total = math.prod(mesh.values())
    if processes < 1 or total % processes:
        raise UsageError(f"--processes is {processes}; a divisor of the mesh's {total} is needed")
    if hosts < 1 or processes % hosts:
        raise UsageError(f"--hosts is {hosts}; a divisor of the {processes} --processes is needed")
    size = math.prod(mesh[axis] for axis in axes)
    positions = list(world.mesh_positions(mesh, axes))
    process_of, host_of = np.empty((2, total), np.int64)
    process_of[positions] = np.arange(total) // (total // processes)
    host_of[positions] = np.arange(total) // (total // hosts)
    if world.are_groups_split(host_of, size, ()):
        return world.Placement(host_of=tuple(host_of.tolist()))
    if world.are_groups_split(process_of, size, ()):
        return world.Placement(process_of=tuple(process_of.tolist()))
    return world.Placement()
