"""The flags of `python -m jcoll bench` (nccl-tests' letters); `checks` turns them into jobs."""

from __future__ import annotations

import argparse
from pathlib import Path

from jcoll.bench import catalog

_DESCRIPTION = """\
Measure jcoll's collectives against jax.lax's on virtual CPU devices: of one process, or of one
process each (--processes).

Both sides are compiled ahead of time, and the optimised program is checked to still hold their
collectives. Calls of the two alternate; a time is the median over repeats of a repeat's median
call, and "ratio" (lax time / jcoll time, above 1 is faster than lax) is the median of the ratios
of the repeats. Every result is compared with numpy: "#wrong" counts elements that differ.
"""

_EPILOG = """\
examples:
  python -m jcoll bench all_reduce -b 1K -e 16M -f 4 --devices 8
  python -m jcoll bench all_reduce -b 1K -e 1K --devices 8 --loop 1000
  python -m jcoll bench all_gather all_to_all -d float32,bfloat16 --devices 2,4,8 --json f.json
  python -m jcoll bench all_reduce --processes 2,4 --chain 8
  python -m jcoll bench --grid --json grid.json --markdown grid.md

size S: as in nccl-tests, the larger of one rank's send and receive buffer. algbw = S / time;
busbw = algbw * factor. On n ranks:
{table}

exit status: 0 all measured and right, 1 something failed or was wrong, 2 bad command line
"""

_GRID = "the five main ops, 1K to 16M (-f 4), on 2, 4 and 8 devices, both --malloc, --copy"
_CHOICES = ", ".join((*catalog.CATALOG, "all"))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG.format(table=_factor_table())
    parser.add_argument(
        "ops", nargs="*", metavar="OP", help=f"one or more of {_CHOICES} (the five main ones)"
    )
    parser.add_argument("--grid", action="store_true", help=f"fill in what is not given: {_GRID}")
    _add_sizes(parser.add_argument_group("what to measure"))
    _add_program(parser.add_argument_group("in what program"))
    _add_method(parser.add_argument_group("how"))
    _add_output(parser.add_argument_group("output"))


def _factor_table() -> str:
    shown = {0.0: "0", 1.0: "1", 0.75: "(n-1)/n", 1.5: "2(n-1)/n"}
    return "\n".join(
        f"  {op:<18} factor {shown[catalog.bus_factor(op, 4)]:<9} S = {entry.size:<24}"
        f" peer: {entry.peer}"
        for op, entry in catalog.CATALOG.items()
    )


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-b", "--begin", metavar="SIZE", help="smallest size (default 1K)")
    add("-e", "--end", metavar="SIZE", help="largest size (default 16M)")
    add("-f", "--factor", type=int, metavar="N", help="multiply by N between sizes (default 4)")
    add("-i", "--step", metavar="SIZE", help="add SIZE between sizes instead")
    add("-d", "--dtype", default="float32", metavar="NAMES", help="numpy's names, by commas")
    add("-o", "--op", dest="redop", metavar="REDOP", help=" ".join(catalog.REDUCE_OPS))
    add("-r", "--root", type=int, default=0, metavar="RANK", help="of rooted ops (default 0)")
    add("--devices", metavar="COUNTS", help="virtual CPU devices, by commas (default 8)")
    add(
        "--processes",
        metavar="COUNTS",
        help="processes of one device each, by commas, instead of --devices: jcoll over shared"
        " memory against XLA's gloo",
    )
    add("--algorithm", default="auto", metavar="NAME", help="jcoll's algorithm= (default auto)")


def _add_program(group: argparse._ArgumentGroup) -> None:
    form = group.add_mutually_exclusive_group()
    help_text = "N dependent collectives in one program, {}; times are per collective"
    form.add_argument("--chain", type=int, metavar="N", help=help_text.format("written out"))
    form.add_argument("--loop", type=int, metavar="N", help=help_text.format("in a fori_loop"))


def _add_method(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-n", "--iters", type=int, metavar="N", help="calls per repeat (default: by --seconds)")
    add("-w", "--warmup", type=int, default=3, metavar="N", help="calls before (default 3)")
    add("--repeats", type=int, default=5, metavar="N", help="repeats of both sides (default 5)")
    add("--seconds", type=float, default=2.0, metavar="S", help="time for a row (default 2)")
    add("-c", "--check", type=int, default=1, choices=(0, 1), help="compare results (default 1)")
    add(
        "--malloc",
        choices=("default", "reuse", "both"),
        help="reuse: glibc keeps freed pages, so large results do not page-fault anew in each call"
        " (MALLOC_MMAP_THRESHOLD_ and others set in the measuring process); several processes keep"
        " them either way, in shared heaps, unless JCOLL_SHARED_HEAP=0",
    )
    add(
        "--dispatch",
        choices=("default", "async", "sync"),
        default="default",
        help="sync: the thread that calls a program runs it (jax_cpu_enable_async_dispatch off);"
        " async: XLA hands all but the cheapest programs to a thread of its own, which on an idle"
        " machine takes longer than many a small collective; default: as JAX has it",
    )
    add(
        "--copy",
        action="store_true",
        default=None,
        help="add the time of a plain memory copy of as many bytes as all ranks' inputs or all"
        " their outputs hold, whichever is more: warm buffers, best of one and all cores",
    )
    add("-T", "--timeout", type=float, default=300.0, metavar="S", help="for a row (default 300)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="write all rows as a JSON list")
    add("--markdown", type=Path, metavar="FILE", help="write the rows as Markdown tables")
    add("--plot", type=Path, metavar="FILE", help="draw time against size (needs matplotlib)")
