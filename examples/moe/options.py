"""The command line of train_moe.py. Imports no jax: the flags decide how jax must start."""

import argparse
import math

from gpt.flags import add_int, fail, round_up
from gpt.mesh_options import mesh_text as mesh_text

AXES: tuple[str, ...] = ("data", "expert")
EPILOG = """\
examples:
  python examples/train_moe.py --steps 100
  python examples/train_moe.py --mesh data=1,expert=8 --experts 16 --mode capacity
  python -m jcoll launch -n 4 --devices-per-process 2 examples/train_moe.py --steps 100
"""


def parse(argv=None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The checked options, and the parser, for errors that only the device count brings out."""
    parser = build_parser()
    args = parser.parse_args(argv)
    sizes = ("steps", "batch", "seq", "layers", "width", "heads", "hidden", "experts", "top_k")
    for name in (*sizes, "devices"):
        if getattr(args, name) < 1:
            fail(parser, name, getattr(args, name), "at least 1")
    for name in ("lr", "capacity_factor"):
        if not 0 < getattr(args, name) < math.inf:
            fail(parser, name, getattr(args, name), "above 0")
    if args.width % args.heads:
        parser.error(
            f"--width {args.width} does not split into --heads {args.heads} equal heads. "
            f"Try --width {round_up(args.width, args.heads)}."
        )
    if args.top_k > args.experts:
        fail(parser, "top_k", args.top_k, f"at most --experts {args.experts}")
    return parser, args


def check_mesh(parser, args, num_devices: int) -> None:
    """Ends the program unless mesh, batch and experts fit each other and the devices."""
    if args.mesh is None:
        expert = math.gcd(4, num_devices)
        args.mesh = {"data": num_devices // expert, "expert": expert}
    size = math.prod(args.mesh.values())
    if size != num_devices:
        parser.error(
            f"--mesh {mesh_text(args.mesh)} has {size} devices, and there are {num_devices}; all "
            "are needed. Change it, or --devices."
        )
    if args.batch % num_devices:
        parser.error(
            f"--batch {args.batch} does not split over {num_devices} devices; each device takes "
            f"the same number of sequences. Try --batch {round_up(args.batch, num_devices)}."
        )
    ranks = args.mesh["expert"]
    if args.experts % ranks:
        parser.error(
            f"--experts {args.experts} do not split over expert={ranks} devices. "
            f"Try --experts {round_up(args.experts, ranks)}."
        )


def build_parser() -> argparse.ArgumentParser:
    """All flags; the defaults suit 8 virtual CPU devices on 2 cores."""
    parser = argparse.ArgumentParser(
        prog="train_moe.py",
        description="Train a small byte-level mixture-of-experts GPT on Python's standard library.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("run")
    add_int(run, "--steps", 200, "")
    add_int(run, "--batch", 16, "sequences")
    add_int(run, "--seq", 128, "bytes each")
    add_int(run, "--seed", 0, "")
    run.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    model = parser.add_argument_group("model and optimizer")
    add_int(model, "--layers", 2, "")
    add_int(model, "--width", 128, "")
    add_int(model, "--heads", 4, "")
    add_int(model, "--hidden", 256, "inside an expert")
    add_int(model, "--experts", 16, "of each layer")
    add_int(model, "--top-k", 2, "experts of a byte")
    model.add_argument("--lr", type=float, default=4e-3, help="peak learning rate [%(default)s]")
    parallel = parser.add_argument_group("parallelism")
    parallel.add_argument(
        "--mesh", type=_mesh, metavar="data=D,expert=E", help="[expert=4 and the rest, if possible]"
    )
    parallel.add_argument("--mode", choices=("dropless", "capacity"), default="dropless")
    parallel.add_argument(
        "--capacity-factor", type=float, default=2.0, help="of --mode capacity [%(default)s]"
    )
    add_int(parallel, "--devices", 8, "virtual CPU devices, in a process of its own")
    reports = parser.add_argument_group("reports")
    reports.add_argument("--json", metavar="FILE", help="write the history of the run")
    return parser


def _mesh(text: str) -> dict[str, int]:
    """ "data=2,expert=4" -> its axes and sizes; an axis that is not named has size 1."""
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not possible; each part must be data=N or expert=N with N at least 1"
            )
        sizes[name] = int(size)
    return sizes
