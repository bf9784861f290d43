"""Train a small byte-level GPT on a mesh of devices that exchange everything through jcoll.

    python examples/train_gpt.py --seconds 60 --sample 300      on 8 virtual CPU devices, or on GPUs
    python examples/train_gpt.py --mesh data=2,tensor=2,expert=2 --experts 8 --zero 3
    python -m jcoll launch -n 2 --devices-per-process 4 examples/train_gpt.py --mesh data=2,tensor=4
    python examples/train_gpt.py --help

The data is the source code of Python's standard library, so nothing is downloaded.
"""

import math
import re
import statistics
import sys

from gpt import flags, mesh_options, options

VALIDATION_BATCHES = 4
PROMPT = b"def main("


class Stopped(Exception):
    """The end of a run that is no bug: the text is all that there is to say."""


def main(argv=None, **program) -> int:
    """Reads the flags, starts jax as they say, trains, reports. `program` as in options.parse."""
    parser, args = options.parse(argv, **program)
    flags.start_cpu_devices(args.devices)
    import jax  # only now: it reads what the line above has set

    options.check_processes(parser, args, args.distributed or jax.distributed.is_initialized())
    if args.distributed:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    mesh_options.check_mesh(parser, args, jax.device_count())
    try:
        run(args, say=print if jax.process_index() == 0 else None)
    except Stopped as why:
        parser.exit(1, f"{parser.prog}: {why}\n")
    return 0


def run(args, say) -> None:
    """One training run and its reports. `say` prints; None on all processes but the first."""
    from gpt import data, model, parallel, state

    corpus = data.Corpus()
    trainer = parallel.make_trainer(args)
    start, first = first_state(trainer)
    device = describe(trainer)
    if say:
        say(
            f"{device['parameters']:,} parameters on {device['count']} {device['kind']} devices "
            f"({mesh_options.mesh_text(args.mesh)}), {len(corpus.train):,} bytes of "
            f"{len(corpus.files)} files, {args.collectives}"
        )
    trained, log, program = train(trainer, corpus, start, first, show=say is not None)
    device["all_reduces_in_step"] = count_all_reduces(program)
    device["peak_bytes"] = planned_peak(program)
    if args.save:
        state.save(args.save, trained, first + len(log.rows), trainer.layouts)
        if say:
            say(f"wrote {args.save}")
    val_loss = validate(trainer, corpus, trained[0])
    if say:
        if args.experts:
            dropped = statistics.fmean(row["dropped"] for row in log.rows)
            say(f"{dropped:.2%} of the rows routed to experts were dropped")
        if device["peak_bytes"]:
            say(f"a step takes {device['peak_bytes'] / 1e6:.1f} MB of each device")
        say(f"loss {val_loss:.3f} nats per byte on {len(corpus.validation):,} bytes never seen")
        report(args, device, log, val_loss)
    if args.sample:
        params = state.whole_params(trained[0], trainer.layouts, trainer.mesh)
        if say:
            text = model.sample(params, state.shape_of(args), PROMPT, args.sample, args.seed)
            say(printable(text))


def first_state(trainer):
    """As parallel.first_state; ends the program if there is no such checkpoint, or no good one."""
    from gpt import parallel

    try:
        return parallel.first_state(trainer)
    except (OSError, ValueError, RuntimeError) as error:
        if not trainer.args.resume or type(error).__module__.startswith("jax"):
            raise  # A bug.
        # What jcoll.layers.restore says of a checkpoint.
        raise Stopped(f"--resume {trainer.args.resume}: {error}") from None


def stop_unless_finite(report, step) -> None:
    """Ends the program with the table of what is not finite; None: --check-finite is not given."""
    try:
        if report is not None:
            report.raise_if_not_finite()
    except FloatingPointError as error:
        raise Stopped(f"--check-finite, in step {step + 1}: {error}") from None


def train(trainer, corpus, start, first, show):
    """((params, opt_state), History, compiled step). The clock starts once the step is compiled."""
    from gpt import history, parallel, progress

    args = trainer.args

    def batch(index):
        return parallel.place(trainer, corpus.batch(index, args.seed, args.batch, args.seq))

    tokens, (params, opt_state) = batch(first), start
    step = trainer.step.lower(params, opt_state, tokens).compile()
    meter = history.CollectiveMeter(args.collectives)
    log = history.History(args.batch * args.seq, first)
    steps = range(first, first + args.steps)
    with progress.ProgressLine(args.collectives, steps, args.seconds, show) as line:
        for index in steps:
            params, opt_state, facts = step(params, opt_state, tokens)
            tokens = batch(index + 1)  # while the devices work
            loss, dropped = float(facts.loss), float(facts.dropped)
            line.show(log.add(loss, dropped, meter.take()))
            stop_unless_finite(facts.finite, index)
            if args.seconds and log.seconds() > args.seconds:
                break
    log.sites = meter.by_site()
    return (params, opt_state), log, step


def validate(trainer, corpus, params) -> float:
    """The mean loss on held-out files."""
    from gpt import parallel

    args, losses = trainer.args, []
    for index in range(VALIDATION_BATCHES):
        windows = corpus.validation_batch(index, args.batch, args.seq)
        losses.append(float(trainer.evaluate(params, parallel.place(trainer, windows))))
    return sum(losses) / len(losses)


def describe(trainer) -> dict:
    """What the run ran on and with."""
    import jax

    sizes = [math.prod(layout.shape) for layout in jax.tree.leaves(trainer.layouts.params)]
    return {
        "count": jax.device_count(),
        "kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "parameters": sum(sizes),
        "gradient_leaves": len(sizes),
    }


def printable(text: bytes) -> str:
    """ASCII and line breaks; whatever else a young model writes, as dots."""
    return "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "." for byte in text)


def count_all_reduces(program) -> int:
    """XLA's own all-reduces in a compiled program, after XLA has combined what it could."""
    return len(re.findall(r" all-reduce(?:-start)?\(", program.as_text()))


def planned_peak(program) -> int | None:
    """The bytes of a device that a compiled step takes, as XLA plans it, if it tells."""
    plan = program.memory_analysis()
    if plan is None:
        return None
    state = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return state + plan.temp_size_in_bytes


def report(args, device, log, val_loss) -> None:
    """The files asked for."""
    from gpt import history

    run_report = history.make_report(args, device, log, val_loss)
    if args.json:
        history.write_json(args.json, run_report)
        print(f"wrote {args.json}")
    if args.plot:
        from gpt import plots

        plots.plot_runs(args.plot, {args.collectives: run_report})
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
