"""`python -m jcoll plan`: its four actions and their flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from jcoll.algorithms import authored, registry
from jcoll.bench import rows
from jcoll.bench.checks import check_output
from jcoll.cli_plan import arguments, comparison, proofs
from jcoll.errors import UsageError
from jcoll.plan import render
from jcoll.plan.ir import PlanError
from jcoll.plan.ops import OPS
from jcoll.plan.topology import PRESETS

_DESCRIPTION = """\
Plans: what every rank sends, receives and reduces in a collective, as data.

  show      print the steps
  verify    prove that plans do what their op promises, whatever the timing
  simulate  time against size of every algorithm on a machine, and where the best one changes
  draw      the plan as a picture (SVG)
"""

_CATALOGUE = "ops and their algorithms:\n{table}\n\nwith --module FILE also those of a file.\n"

_SHOW = """\
examples:
  python -m jcoll plan show all_reduce ring -n 4
  python -m jcoll plan show broadcast binomial -n 8 --root 3 --rank 0
"""
_VERIFY = """\
examples:
  python -m jcoll plan verify                                all there are, 1..17, 32 and 64 ranks
  python -m jcoll plan verify all_reduce ring -n 1..9,100
  python -m jcoll plan verify --module my_algorithms.py all_reduce mine

rounds, sent/M (bytes sent by the busiest rank, in arrays) are those of the last number of ranks.
exit status: 0 all proved, 1 one is wrong, or none was to be proved, 2 bad command line
"""
_SIMULATE = """\
examples:
  python -m jcoll plan simulate all_reduce -n 4096
  python -m jcoll plan simulate all_gather -n 64 --topology pcie -b 1K -e 64M -a ring,bruck
  python -m jcoll plan simulate all_reduce -n 256 --topology mine.toml --plot times.svg --json

size: the array of all_reduce, broadcast and reduce; else all blocks together (as in bench).
hierarchical: a group is the ranks of the topology's smallest domain, such as one NVSwitch.
Alpha-beta model: docs/topologies.md says what it knows and what not, and the format of files.

topologies:
{presets}
"""
_DRAW = """\
example:
  python -m jcoll plan draw all_reduce halving_doubling -n 8 -o plan.svg
"""


def configure(parser: argparse.ArgumentParser) -> None:
    _lay_out(parser, _DESCRIPTION, _CATALOGUE.format(table=_table()))
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "show", _show, "print the steps of a plan", _SHOW, _flags_of_show)
    _add(actions, "verify", proofs.run, "prove plans", _VERIFY, _flags_of_verify)
    presets = "\n".join(f"  {topology.describe()}" for topology in PRESETS.values())
    epilog = _SIMULATE.format(presets=presets)
    _add(actions, "simulate", comparison.run, "time against size", epilog, _flags_of_simulate)
    _add(actions, "draw", _draw, "draw a plan as SVG", _DRAW, _flags_of_draw)


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 done, 1 a plan is wrong (2 is a usage error)."""
    try:
        authored.load(args.module)
        return args.action(args)
    except UsageError as error:
        args.fail(str(error))
        raise  # `fail` does not return.
    except MemoryError as error:
        args.fail(
            f"-n/--ranks is {args.ranks}; more memory than there is would be needed: lower it"
        )
        raise error  # `fail` does not return.
    except PlanError as error:  # Of an algorithm that cannot build, or a plan that hangs.
        print(error, file=sys.stderr)
        return 1


def _lay_out(parser: argparse.ArgumentParser, description: str, epilog: str) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = description, epilog


def _table() -> str:
    return "\n".join(f"  {op:<15} {', '.join(registry.names(op))}" for op in OPS)


def _add(
    actions: argparse._SubParsersAction,
    name: str,
    action: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
    add_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = actions.add_parser(name, help=summary)
    _lay_out(parser, summary[0].upper() + summary[1:] + ".", epilog)
    add_flags(parser)
    authored.add_flag(parser)
    parser.set_defaults(action=action, fail=parser.error)


def _flags_of_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", metavar="OP", help=", ".join(OPS))
    add("algorithm", metavar="ALGORITHM", help="one of the op's: see `plan --help`")
    add("-n", "--ranks", metavar="RANKS", required=True, help="number of ranks")
    add("-r", "--root", metavar="RANK", default="0", help="of rooted ops (default 0)")


def _flags_of_show(parser: argparse.ArgumentParser) -> None:
    _flags_of_plan(parser)
    parser.add_argument("--rank", metavar="RANK", help="only this rank's steps, all of them")
    parser.add_argument("--all", action="store_true", help="all ranks and steps, however many")


def _flags_of_draw(parser: argparse.ArgumentParser) -> None:
    _flags_of_plan(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help=".svg")


def _flags_of_verify(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", metavar="OP", nargs="?", help="only this op (default: all)")
    add("algorithm", metavar="ALGORITHM", nargs="?", help="only this algorithm (default: all)")
    help_text = "numbers of ranks, e.g. 8 or 1..17,32,64 (the default)"
    add("-n", "--ranks", metavar="RANKS", default="1..17,32,64", help=help_text)
    help_text = "of rooted ops (default: the first, the middle and the last rank)"
    add("-r", "--root", metavar="RANK", help=help_text)


def _flags_of_simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", metavar="OP", help=", ".join(OPS))
    add("-n", "--ranks", metavar="RANKS", required=True, help="number of ranks")
    help_text = "a preset or a .toml or .json file (default nvswitch)"
    add("-t", "--topology", metavar="NAME|FILE", default="nvswitch", help=help_text)
    add("-b", "--begin", metavar="SIZE", default="1K", help="smallest size (default 1K)")
    add("-e", "--end", metavar="SIZE", default="1G", help="largest size (default 1G)")
    add("-f", "--factor", type=int, default=2, metavar="N", help="between sizes (default 2)")
    add("-a", "--algorithms", metavar="NAMES", help="by commas (default: all that serve)")
    add("-r", "--root", metavar="RANK", default="0", help="of rooted ops (default 0)")
    add("--plot", type=Path, metavar="FILE", help="draw the curves: .png, .svg (needs matplotlib)")
    add("--json", action="store_true", help="print JSON instead of the table")


def _show(args: argparse.Namespace) -> int:
    plan = arguments.plan(args)
    if args.rank is not None:
        rank = arguments.rank("--rank", args.rank, plan.num_ranks)
        steps = list(plan.steps_of(rank))
        print(f"{plan.name}: rank {rank}, {len(steps)} steps")
        print("\n".join(f"  {number:>3}  {step}" for number, step in enumerate(steps)))
    elif args.all:
        print(render.as_text(plan, max_ranks=plan.num_ranks, max_steps=len(plan.steps)), end="")
    else:
        print(render.as_text(plan), end="")
    return 0


def _draw(args: argparse.Namespace) -> int:
    check_output("-o/--output", args.output, (".svg",))
    plan = arguments.plan(args)
    rows.write_text(args.output, render.as_svg(plan))
    print(f"wrote {args.output}: {plan.name}")
    return 0
