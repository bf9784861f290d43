"""Train the example GPT through jcoll, then the same steps through jax.lax and on a mesh; compare.

    make demo                              about two minutes on 2 cores
    python examples/demo.py --quick        a smaller model for a few seconds

Three legs, each train_gpt.py in a process of its own, from the same seed, on the same batches:

    jcoll    data parallel, gradients through jcoll
    lax      the same steps, gradients through jax.lax
    mesh     the first of these steps, jcoll, on data x context x tensor: ZeRO-3 and ring attention

Only the order of sums differs. Prints the losses side by side and what the collectives cost, and
writes loss.png: the losses, the time in collectives by kind, and for the mesh by place in the
program. Exit status 1: the losses disagree.
"""

import argparse
import math
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from gpt import flags, history

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError:
    flags.check_packages(flags.Parser(prog="demo.py"), "rich")
    raise

TRAIN = Path(__file__).with_name("train_gpt.py")
MESH = ("--mesh", "data=2,context=2,tensor=2", "--zero", "3", "--attention", "ring")
QUICK = ("--layers", "2", "--width", "64", "--seq", "64")

# A sum of n floats, in whatever order, is off by at most (n - 1) 2^-24: 4e-7 for 8 ranks. The first
# losses must agree to within a small multiple of it. After that the difference grows by itself:
# Adam divides by the size of a gradient, which turns a rounding error in a tiny one into a
# different step, and training is chaotic. The runs stay equal in distribution, so that their
# averages over many steps stay close.
EARLY_STEPS, EARLY_TOLERANCE = 10, 1e-5
LATE_SHARE, LATE_TOLERANCE = 0.1, 0.02


def main(argv=None) -> int:
    """Runs the legs, prints the comparison, returns the exit status."""
    args = parse(argv)
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    model = QUICK if args.quick else ()
    seconds = args.seconds or (5 if args.quick else 40)
    jcoll = run_leg(args.out, "jcoll", *model, "--seconds", str(seconds), "--sample", "300")
    lax = run_leg(args.out, "lax", *model, "--steps", str(jcoll["totals"]["steps"]))
    steps = max(EARLY_STEPS, jcoll["totals"]["steps"] // 10)
    mesh = run_leg(args.out, "jcoll", *model, *MESH, "--steps", str(steps), name="mesh")
    console.print(loss_table(jcoll, lax, mesh))
    console.print(cost_table(jcoll, lax))
    console.print(site_table(mesh))
    plot(args.plot, jcoll, lax, mesh)
    problems = disagreements(losses(jcoll), losses(lax))
    problems += early_disagreements(losses(mesh), losses(lax), "mesh, ")
    print("\n".join(problems) or verdict(jcoll, lax))
    if note := disturbance(*(cores_used(run) for run in (jcoll, lax))):
        print(note)
    print(f"wrote {args.plot}, and the histories in {args.out}/")
    return 1 if problems else 0


def parse(argv) -> argparse.Namespace:
    """The checked flags: what is wrong is said before the first leg, not after the last."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if "JAX_PROCESS_ID" in os.environ:
        parser.error(
            "this is one of several processes, as under `jcoll launch`, and each would start legs "
            "of its own, all with the same files. Run it alone: python examples/demo.py"
        )
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        flags.fail(parser, "seconds", args.seconds, "above 0, and finite")
    flags.check_picture(parser, "plot", args.plot)
    flags.check_folder(parser, "out", args.out)
    return args


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = flags.Parser(
        prog="demo.py", description="Train a GPT through jcoll, then through jax.lax, and compare."
    )
    parser.add_argument("--seconds", type=float, help="of training, for the first leg [40]")
    parser.add_argument("--quick", action="store_true", help="a smaller model, 5 seconds")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="[%(default)s]")
    parser.add_argument("--plot", type=Path, default=Path("loss.png"), help="[%(default)s]")
    return parser


def run_leg(out: Path, collectives: str, *options: str, name: str | None = None) -> dict:
    """Trains in a new process, whose progress is shown here, and returns its report."""
    report = out / f"{name or collectives}.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, TRAIN, "--collectives", collectives, "--json", report, *options]
    done = subprocess.run(list(map(str, command)), check=False)
    if done.returncode:
        leg = shlex.join(map(str, command))
        sys.exit(f"demo.py: the leg {name or collectives} ended with {done.returncode}: {leg}")
    return history.read_json(report)


def losses(run: dict) -> list[float]:
    """The training loss of every step."""
    return [row["loss"] for row in run["history"]]


def disagreements(ours: list[float], theirs: list[float]) -> list[str]:
    """What is wrong, in words; empty if the two runs agree. The reasons are at the top."""
    problems = []
    if len(ours) != len(theirs):
        problems.append(f"jcoll took {len(ours)} steps and lax {len(theirs)}; both must be equal.")
    problems += early_disagreements(ours, theirs)
    late_a, late_b = late_mean(ours), late_mean(theirs)
    if not abs(late_a - late_b) <= LATE_TOLERANCE * late_b:
        problems.append(
            f"the last steps: the mean losses {late_a:.4f} and {late_b:.4f} differ by more than "
            f"{LATE_TOLERANCE:.0%}. One of the runs does not train as the other does."
        )
    return problems


def early_disagreements(ours: list[float], theirs: list[float], leg: str = "") -> list[str]:
    """The first steps whose losses differ by more than rounding does."""
    problems = []
    for step, (a, b) in enumerate(list(zip(ours, theirs, strict=False))[:EARLY_STEPS], 1):
        if not abs(a - b) <= EARLY_TOLERANCE * abs(b):
            problems.append(
                f"{leg}step {step}: the losses {a:.8f} and {b:.8f} differ by "
                f"{abs(a - b) / abs(b):.1e}; up to {EARLY_TOLERANCE:.0e} is rounding. The "
                "gradients are not the same."
            )
    return problems


def late_mean(values: list[float]) -> float:
    """The mean over the last tenth of the steps, or 10 of them if that is more."""
    return statistics.fmean(values[-max(10, round(len(values) * LATE_SHARE)) :])


def loss_table(jcoll: dict, lax: dict, mesh: dict) -> Table:
    """Losses side by side at steps 1, 2, 5, 10, 20, 50, ... and the last."""
    columns = "step", "loss, jcoll", "loss, lax", "|difference|", "loss, mesh"
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    ours, theirs, on_mesh = (losses(run) for run in (jcoll, lax, mesh))
    for step in shown_steps(min(len(ours), len(theirs))):
        a, b = ours[step - 1], theirs[step - 1]
        c = f"{on_mesh[step - 1]:.6f}" if step <= len(on_mesh) else ""
        table.add_row(f"{step}", f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}", c)
    table.add_section()
    a, b = jcoll["val_loss"], lax["val_loss"]
    table.add_row("unseen files", f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    return table


def shown_steps(total: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... below total, and total."""
    steps = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    return [*(step for step in steps if step < total), total]


def cost_table(jcoll: dict, lax: dict) -> Table:
    """Times, their ratios (above 1: jcoll is faster), and what the collectives did."""
    table = Table("", "jcoll", "lax", "ratio", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    a, b = jcoll["totals"], lax["totals"]
    add_ratio(table, "time of all steps, s", a["wall_s"], b["wall_s"], ".1f")
    for name, key in (("median step, ms", "step_s"), ("  processor time of it, ms", "step_cpu_s")):
        ours, theirs = (median_ms(run, key) for run in (jcoll, lax))
        add_ratio(table, name, ours, theirs, ".1f")
    speeds = f"{a['tokens_per_s']:,.0f}", f"{b['tokens_per_s']:,.0f}"
    table.add_row("tokens/s", *speeds, f"{a['tokens_per_s'] / b['tokens_per_s']:.2f}")
    table.add_section()
    for row in collective_rows(jcoll, lax):
        table.add_row(*row)
    return table


def median_ms(run: dict, key: str) -> float:
    """The median over the steps, in milliseconds."""
    return 1e3 * statistics.median(row[key] for row in run["history"])


def add_ratio(table: Table, name: str, ours: float, theirs: float, form: str) -> None:
    """A row of two times and lax time / jcoll time."""
    table.add_row(name, f"{ours:{form}}", f"{theirs:{form}}", f"{theirs / ours:.2f}")


def collective_rows(jcoll: dict, lax: dict) -> list[tuple[str, str, str]]:
    """What jcoll counted; of lax's only the number in the compiled program is known."""
    totals, per_step = jcoll["totals"], lax["device"]["all_reduces_in_step"]
    steps, done = totals["steps"], totals["collectives"]
    return [
        ("collectives a step", f"{done['calls'] / steps:.0f}", f"{per_step}"),
        ("  in all", f"{done['calls']:,}", f"{per_step * steps:,}"),
        ("MB a step, of each rank", f"{done['bytes'] / steps / 1e6:.2f}", "-"),
        ("  in all", f"{done['bytes'] / 1e6:,.0f}", "-"),
        ("time in collectives, ms a step", f"{1e3 * done['exec_s'] / steps:.1f}", "-"),
        ("  in all, s", f"{done['exec_s']:.2f}", "-"),
        ("  of all time", f"{done['exec_s'] / totals['wall_s']:.1%}", "-"),
        ("first to last arrival, ms each", f"{1e3 * done['skew_s'] / done['calls']:.1f}", "-"),
    ]


def site_table(mesh: dict) -> Table:
    """The collectives of the mesh's leg, by kind."""
    table = Table("on the mesh", "a step", "MB a step", "ms a step", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    steps = mesh["totals"]["steps"]
    for op in sorted({site["op"] for site in mesh["sites"]}):
        of_op = [site for site in mesh["sites"] if site["op"] == op]
        calls, size, time_s = (sum(s[k] for s in of_op) for k in ("calls", "bytes", "exec_s"))
        cells = f"{calls / steps:.0f}", f"{size / steps / 1e6:.2f}", f"{1e3 * time_s / steps:.2f}"
        table.add_row(op, *cells)
    return table


def verdict(jcoll: dict, lax: dict) -> str:
    """The outcome in a sentence."""
    ours = losses(jcoll)
    pairs = list(zip(ours, losses(lax), strict=True))[:EARLY_STEPS]
    worst = max(abs(a - b) / b for a, b in pairs)
    return (
        f"The losses agree: within {worst:.1e} over the first {len(pairs)} steps, and at the end "
        f"{late_mean(ours):.3f} and {late_mean(losses(lax)):.3f}. Training took the loss from "
        f"{ours[0]:.2f} to {late_mean(ours):.2f}."
    )


def cores_used(run: dict) -> float:
    """By the median step."""
    return median_ms(run, "step_cpu_s") / median_ms(run, "step_s")


def disturbance(ours: float, theirs: float) -> str:
    """What to say where one leg had much less of the machine than the other; else nothing."""
    if max(ours, theirs) < 1.25 * min(ours, theirs):
        return ""
    return (
        f"The legs ran one after the other, and something else kept the machine busy: jcoll had "
        f"{ours:.1f} cores, lax {theirs:.1f}. Their times do not compare; run it again."
    )


def plot(path: Path, jcoll: dict, lax: dict, mesh: dict) -> None:
    """loss.png"""
    from gpt import plots

    plots.plot_runs(str(path), {"jcoll": jcoll, "lax": lax}, mesh)


if __name__ == "__main__":
    sys.exit(main())
