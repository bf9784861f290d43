"""The flags of train_gpt.py that split the model over a mesh, and what each of them needs.

Every kind of parallelism says what it cannot divide, and which size to try. Imports no jax.
"""

import argparse
import math

from gpt.flags import round_up

AXES = ("data", "expert", "context", "tensor")
"""From the outermost to the innermost: tensor ranks, which talk most, are next to each other."""

ATTENTIONS = ("full", "ring", "ulysses", "gathered")
VOCABULARY = 256
CAPACITY_FACTOR = 2.0
SHORT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def add_flags(group) -> None:
    """All of them."""
    group.add_argument(
        "--mesh",
        type=mesh_axes,
        metavar="AXIS=N,..",
        help="axes data, tensor, expert, context [data=all devices; with --experts, expert=as many "
        "as divide them]",
    )
    group.add_argument(
        "--zero", type=int, choices=range(4), default=0, help="ZeRO's stage over data [%(default)s]"
    )
    group.add_argument(
        "--attention", choices=ATTENTIONS, help="over context [full; with context=N: ring]"
    )
    group.add_argument(
        "--sequence-parallel", action="store_true", help="split tokens between tensor ranks, too"
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        help="send gradients during the backward pass, and, with --sequence-parallel, activations "
        "during products",
    )
    group.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="microbatches [%(default)s]"
    )
    group.add_argument(
        "--remat",
        action="store_true",
        help="keep nothing of a layer for the backward pass but its input, and compute it again",
    )
    group.add_argument(
        "--expert-mode",
        choices=("dropless", "capacity"),
        default="dropless",
        help="whether experts take all rows, or as many as they have room for [%(default)s]",
    )
    group.add_argument(
        "--capacity-factor",
        type=float,
        metavar="X",
        help=f"that room / an equal share of the rows [{CAPACITY_FACTOR:g}]",
    )
    group.add_argument(
        "--wire-dtype",
        type=float_type,
        choices=("float32", "bfloat16", "float16"),
        help="in which gradients travel [as they are]",
    )
    group.add_argument(
        "--collectives",
        choices=("jcoll", "lax"),
        default="jcoll",
        help="who sums the gradients: jcoll, or jax.lax, which does data parallelism only "
        "[%(default)s]",
    )
    group.add_argument(
        "--bucket-bytes", type=int, default=25 * 2**20, metavar="N", help="jcoll only [25 MiB]"
    )


def mesh_axes(text: str) -> dict[str, int]:
    """ "data=2,tensor=4" -> its axes and sizes, in the order of AXES."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not possible; each part must be AXIS=N with N at least 1 and another "
                f"one of the axes {', '.join(AXES)}"
            )
        sizes[name] = int(size)
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def mesh_text(mesh: dict[str, int]) -> str:
    """As --mesh takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def float_type(text: str) -> str:
    """ "bf16" -> "bfloat16"."""
    return SHORT.get(text, text)


def check_flags(parser, args) -> None:
    """Ends the program if flags contradict each other, whatever the devices."""
    if args.experts < 0 or 0 < args.experts < args.top_k:
        parser.error(
            f"--experts {args.experts} with --top-k {args.top_k}: a byte goes to top-k different "
            f"experts. Use 0 experts (a dense model), or at least {args.top_k}."
        )
    if args.expert_mode == "capacity" and not args.experts:
        parser.error("--expert-mode capacity needs experts. Add --experts N, or drop it.")
    if args.expert_mode == "dropless" and args.capacity_factor is not None:
        parser.error(
            f"--capacity-factor {args.capacity_factor:g} without --expert-mode capacity: experts "
            "take all rows. Add it, or drop the factor."
        )
    if args.expert_mode == "capacity" and args.capacity_factor is None:
        args.capacity_factor = CAPACITY_FACTOR
    if args.experts and 4 * args.width % args.top_k:
        parser.error(
            f"--top-k {args.top_k} does not divide 4 * --width {args.width}, the inner width that "
            "the experts of a byte share. Try --top-k 1, 2 or 4."
        )
    if args.overlap and args.accumulate > 1 and args.zero == 0:
        parser.error(
            f"--overlap with --accumulate {args.accumulate} would send the gradients of each "
            "microbatch. Drop one of them, or use --zero 2, which keeps only shards of them."
        )
    if args.overlap and args.zero and not args.sequence_parallel:
        parser.error(
            f"--overlap with --zero {args.zero} has nothing to do: ZeRO 2 and 3 send gradients "
            "during the backward pass anyway, 1 after it. Drop it, or add --sequence-parallel."
        )


def check_mesh(parser, args, num_devices: int) -> None:
    """Settles --mesh and --attention; ends the program unless the mesh divides all that it splits.

    Axes of one device are dropped, but for data, and expert where there are experts.
    """
    mesh = args.mesh or _default_mesh(args, num_devices)
    if math.prod(mesh.values()) != num_devices:
        parser.error(
            f"--mesh {mesh_text(mesh)} has {math.prod(mesh.values())} devices, and there are "
            f"{num_devices}; all are needed. Change it, or --devices."
        )
    needed = ("data", "expert") if args.experts else ("data",)
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    args.mesh = {axis: n for axis, n in sizes.items() if n > 1 or axis in needed}
    _check_data(parser, args, sizes)
    _check_experts(parser, args, sizes["expert"])
    _check_context(parser, args, sizes)
    _check_tensor(parser, args, sizes)
    if args.collectives == "lax" and (set(args.mesh) != {"data"} or _jcoll_only(args)):
        parser.error(
            f"--collectives lax with --mesh {mesh_text(args.mesh)}{_jcoll_only(args)}: jax.lax "
            "stands for plain data parallelism here. Use --mesh data=N alone, or jcoll."
        )


def _default_mesh(args, num_devices) -> dict[str, int]:
    ranks = math.gcd(args.experts, num_devices) if args.experts else 1
    return {"data": num_devices // ranks, "expert": ranks}


def _jcoll_only(args) -> str:
    flags = {
        f" --zero {args.zero}": args.zero,
        " --overlap": args.overlap,
        f" --wire-dtype {args.wire_dtype}": args.wire_dtype,
    }
    return "".join(text for text, given in flags.items() if given)


def _check_data(parser, args, sizes) -> None:
    ranks = sizes["data"] * sizes["expert"]
    parts = ranks * args.accumulate
    if args.batch % parts:
        times = f" in {args.accumulate} microbatches" if args.accumulate > 1 else ""
        parser.error(
            f"--batch {args.batch} does not split over {ranks} devices{times}; each takes the same "
            f"number of sequences. Try --batch {round_up(args.batch, parts)}."
        )


def _check_experts(parser, args, ranks) -> None:
    if ranks > 1 and not args.experts:
        parser.error(
            f"--mesh with expert={ranks} needs experts. Add --experts {2 * ranks}, or use data."
        )
    if args.experts % ranks:
        parser.error(
            f"--experts {args.experts} do not split over expert={ranks} devices. "
            f"Try --experts {round_up(args.experts, ranks)}."
        )


def _check_context(parser, args, sizes) -> None:
    ranks, given = sizes["context"], args.attention
    args.attention = given or ("ring" if ranks > 1 else "full")
    if ranks == 1 and given not in (None, "full"):
        parser.error(
            f"--attention {given} splits sequences over the context axis, of which there is one "
            "device. Add context=N to --mesh, or drop it."
        )
    if ranks > 1 and args.attention == "full":
        parser.error(
            f"--attention full needs whole sequences, and context={ranks} splits them. "
            "Use ring, ulysses or gathered."
        )
    parts = 2 * ranks if args.attention == "ring" else ranks
    if args.seq % parts:
        parser.error(
            f"--seq {args.seq} does not split into {parts} parts for context={ranks} devices and "
            f"--attention {args.attention}. Try --seq {round_up(args.seq, parts)}."
        )
    heads = args.heads // sizes["tensor"]
    if args.attention == "ulysses" and args.heads % sizes["tensor"] == 0 and heads % ranks:
        parts = ranks * sizes["tensor"]
        parser.error(
            f"--attention ulysses splits heads over context={ranks} devices, and each tensor rank "
            f"has {heads}. Try --heads {round_up(args.heads, parts)}, or --attention ring."
        )


def _check_tensor(parser, args, sizes) -> None:
    ranks = sizes["tensor"]
    for flag, size in (("--heads", args.heads), ("--width", args.width)):
        if size % ranks:
            parser.error(
                f"{flag} {size} does not split over tensor={ranks} devices. "
                f"Try {flag} {round_up(size, ranks)}."
            )
    if VOCABULARY % ranks:
        parser.error(
            f"tensor={ranks} devices do not divide the {VOCABULARY} bytes of the vocabulary. "
            "Use a power of two."
        )
    if not args.sequence_parallel:
        return
    if ranks == 1:
        parser.error("--sequence-parallel needs tensor=N with N above 1 in --mesh. Add it.")
    parts = ranks * sizes["context"]
    if args.seq // sizes["context"] % ranks:
        parser.error(
            f"--seq {args.seq} with --sequence-parallel does not split over {parts} devices "
            f"(context times tensor). Try --seq {round_up(args.seq, parts)}."
        )
