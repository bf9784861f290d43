"""The command line of serve_tp.py. Imports no jax: the flags decide how jax must start."""

import argparse

from gpt.flags import Parser, add_int, check_output, check_seed, round_up

EPILOG = """\
examples:
  python examples/serve_tp.py --tokens 500
  python examples/serve_tp.py --compare --json serve.json
  python -m jcoll launch -n 4 --devices-per-process 2 examples/serve_tp.py
"""


def parse(argv=None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The checked options, and the parser, for errors that only the device count brings out."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("tokens", "batch", "prompt", "layers", "width", "heads", "vocabulary", "devices"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not possible; it must be at least 1.")
    if args.warmup < 0:
        parser.error(f"--warmup {args.warmup} is not possible; it must be at least 0.")
    check_seed(parser, args.seed)
    check_output(parser, "json", args.json)
    if args.width % args.heads:
        parser.error(
            f"--width {args.width} does not split into --heads {args.heads} equal heads. "
            f"Try --width {round_up(args.width, args.heads)}."
        )
    return parser, args


def build_parser() -> argparse.ArgumentParser:
    """All flags; the defaults suit 8 virtual CPU devices on 2 cores."""
    parser = Parser(
        prog="serve_tp.py",
        description="Decode with a tensor-parallel GPT of random weights, and time each token.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("run")
    add_int(run, "--tokens", 200, "decoded and timed, of each sequence")
    add_int(run, "--warmup", 20, "decoded before the clock starts")
    add_int(run, "--prompt", 16, "tokens that are there at first")
    add_int(run, "--batch", 1, "sequences decoded at once")
    add_int(run, "--seed", 0, "of weights and prompt")
    run.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    model = parser.add_argument_group("model")
    add_int(model, "--layers", 8, "")
    add_int(model, "--width", 256, "")
    add_int(model, "--heads", 8, "a multiple of the devices")
    add_int(model, "--vocabulary", 256, "padded to a multiple of the devices")
    parallel = parser.add_argument_group("parallelism")
    add_int(parallel, "--devices", 8, "virtual CPU devices, in a process of its own")
    which = parallel.add_mutually_exclusive_group()
    which.add_argument(
        "--collectives",
        choices=("jcoll", "lax"),
        default="jcoll",
        help='whose: jcoll\'s, or by algorithm="xla" those of jax.lax [%(default)s]',
    )
    which.add_argument("--compare", action="store_true", help="both, a few tokens of each in turn")
    report = parser.add_argument_group("reports")
    report.add_argument("--json", metavar="FILE", help="write what was measured")
    return parser


def check_devices(parser, args, num_devices: int) -> None:
    """Ends the program unless every device gets as many heads, and columns, as the others."""
    if args.heads % num_devices:
        parser.error(
            f"--heads {args.heads} does not split over {num_devices} devices, each of which "
            f"computes whole heads. Try --heads {round_up(args.heads, num_devices)}, with --width "
            "a multiple of that, or fewer --devices."
        )
