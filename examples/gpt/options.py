"""The command line of train_gpt.py. Imports no jax: the flags decide how jax must start.

What the mesh must divide is checked in mesh_options.py.
"""

import argparse
import math
import sys
from pathlib import Path

from gpt import mesh_options
from gpt.flags import (
    Parser,
    check_folder,
    check_output,
    check_packages,
    check_picture,
    check_seed,
    fail,
    round_up,
)

DEFAULT_STEPS = 200
DESCRIPTION = "Train a small byte-level GPT on Python's standard library, in parallel."
EPILOG = """\
examples:
  python examples/train_gpt.py --seconds 60 --sample 300
  python examples/train_gpt.py --steps 100 --collectives lax --json lax.json
  python examples/train_gpt.py --mesh data=2,tensor=2,expert=2 --experts 8 --zero 3
  python examples/train_gpt.py --mesh data=2,tensor=2,context=2 --attention ring --zero 2
  python -m jcoll launch -n 2 --devices-per-process 4 examples/train_gpt.py --mesh data=2,tensor=4
  python examples/train_gpt.py --steps 100 --distributed --coordinator 127.0.0.1:9876 \\
      --num-processes 2 --process-id 0 --devices 4      (and the same with --process-id 1)
"""


def build_parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """All flags, in groups; the defaults suit 8 virtual CPU devices on 2 cores."""
    parser = Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run_flags(parser.add_argument_group("run"))
    _add_model_flags(parser.add_argument_group("model and optimizer"))
    mesh_options.add_flags(parser.add_argument_group("parallelism"))
    _add_device_flags(parser.add_argument_group("devices"))
    _add_report_flags(parser.add_argument_group("reports"))
    return parser


def parse(
    argv=None,
    prog: str = "train_gpt.py",
    description: str = DESCRIPTION,
    epilog: str = EPILOG,
    **defaults,
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The checked options, and the parser, for errors that only devices and processes bring out.

    `defaults` are those of flags of which the program `prog` has others.
    """
    parser = build_parser(prog, description, epilog)
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    check_packages(parser, "optax", "rich")
    if args.steps is None:
        args.steps = sys.maxsize if args.seconds else DEFAULT_STEPS
    sizes = ("steps", "batch", "seq", "layers", "width", "heads", "top_k", "accumulate", "devices")
    for name in (*sizes, "bucket_bytes"):
        if getattr(args, name) < 1:
            fail(parser, name, getattr(args, name), "at least 1")
    for name in ("seconds", "lr", "adam_eps", "capacity_factor"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            fail(parser, name, getattr(args, name), "above 0, and finite")
    if not args.clip >= 0:
        fail(parser, "clip", args.clip, "0 (no clipping) or the largest norm")
    if args.sample < 0:
        fail(parser, "sample", args.sample, "0 (no sample) or a number of bytes")
    if args.width % args.heads:
        width = round_up(args.width, args.heads)
        parser.error(
            f"--width {args.width} does not split into --heads {args.heads} equal heads; width "
            f"must be a multiple of heads. Try --width {width}."
        )
    check_seed(parser, args.seed)
    mesh_options.check_flags(parser, args)
    _check_distributed(parser, args)
    _check_save(parser, args)
    return parser, args


def check_processes(parser, args, several: bool) -> None:
    """Ends the program if the flags are not for several processes, and there are."""
    if several and args.seconds is not None:
        parser.error(
            f"--seconds {args.seconds:g} with several processes: every process would stop at a "
            "step of its own, and the rest would wait for it. Use --steps."
        )


def _add_run_flags(group):
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"after those of --resume [{DEFAULT_STEPS}, or no limit with --seconds]",
    )
    group.add_argument(
        "--seconds", type=float, metavar="S", help="stop after S seconds; one process"
    )
    group.add_argument("--batch", type=int, default=16, metavar="N", help="sequences [%(default)s]")
    group.add_argument("--seq", type=int, default=128, metavar="N", help="bytes each [%(default)s]")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="[%(default)s]")
    group.add_argument(
        "--dtype",
        type=mesh_options.float_type,
        choices=("float32", "bfloat16"),
        default="float32",
        help="to compute in; also f32, bf16 [%(default)s]",
    )


def _add_model_flags(group):
    group.add_argument("--layers", type=int, default=3, metavar="N", help="[%(default)s]")
    group.add_argument("--width", type=int, default=128, metavar="N", help="[%(default)s]")
    group.add_argument("--heads", type=int, default=4, metavar="N", help="[%(default)s]")
    group.add_argument(
        "--experts", type=int, default=0, metavar="N", help="of a layer [%(default)s]"
    )
    group.add_argument("--top-k", type=int, default=2, metavar="K", help="of a byte [%(default)s]")
    group.add_argument("--lr", type=float, default=4e-3, help="peak learning rate [%(default)s]")
    group.add_argument("--adam-eps", type=float, default=1e-8, metavar="X", help="[%(default)s]")
    group.add_argument(
        "--clip", type=float, default=1.0, metavar="X", help="gradients' norm; 0: no [%(default)s]"
    )


def _add_device_flags(group):
    group.add_argument(
        "--devices", type=int, default=8, metavar="N", help="virtual CPU devices [%(default)s]"
    )
    group.add_argument("--distributed", action="store_true", help="call jax.distributed.initialize")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="if no cluster tells it")
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I")


def _add_report_flags(group):
    group.add_argument("--save", metavar="DIR", help="write a checkpoint at the end")
    group.add_argument(
        "--resume", metavar="DIR", help="go on from one, on this mesh and with this --zero"
    )
    group.add_argument(
        "--check-finite",
        action="store_true",
        help="stop if a gradient is NaN or Inf, and say which, and on which device",
    )
    group.add_argument("--json", metavar="FILE", help="write the history of the run")
    group.add_argument("--plot", metavar="FILE", help="write a picture of the loss")
    group.add_argument("--sample", type=int, default=0, metavar="N", help="write N bytes of text")


def _check_distributed(parser, args):
    given = [args.coordinator, args.num_processes, args.process_id]
    if not args.distributed and any(value is not None for value in given):
        parser.error(
            "--coordinator, --num-processes and --process-id describe a run of several processes, "
            "which needs --distributed as well. Add it, or drop them."
        )


def _check_save(parser, args):
    """Before anything is trained that could then not be saved."""
    check_output(parser, "json", args.json)
    check_picture(parser, "plot", args.plot)
    if args.save is not None and Path(args.save).exists():
        parser.error(
            f"--save {args.save} is there already, and no checkpoint is written over. "
            "Name a folder that is not, or remove it."
        )
    check_folder(parser, "save", args.save)
