"""Train a small byte-level GPT, data parallel, with gradients that travel through jcoll.

    python examples/train_gpt.py --seconds 60 --sample 300      on 8 virtual CPU devices, or on GPUs
    python examples/train_gpt.py --help

The data is the source code of Python's standard library, so nothing is downloaded.
"""

import functools
import re
import sys

from gpt import options

VALIDATION_BATCHES = 4
PROMPT = b"def main("


def main(argv=None) -> int:
    """Reads the flags, starts jax as they say, trains, reports."""
    parser, args = options.parse(argv)
    options.set_cpu_device_count(args.devices)
    import jax  # only now: it reads what the line above has set

    if args.distributed:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    options.check_batch(parser, args, jax.device_count())
    run(args, say=print if jax.process_index() == 0 else None)
    return 0


def run(args, say) -> None:
    """One training run and its reports. `say` prints; None on all processes but the first."""
    from gpt import data, model, parallel

    corpus = data.Corpus()
    shape = model.Shape(args.seq, args.layers, args.width, args.heads)
    trainer = parallel.make_trainer(args)
    params, opt_state = parallel.initial_state(trainer, shape, args.seed)
    device = describe(params)
    if say:
        say(
            f"{device['parameters']:,} parameters on {device['count']} {device['kind']} devices, "
            f"{len(corpus.train):,} bytes of {len(corpus.files)} files, {args.collectives}"
        )
    params, log, program = train(args, trainer, corpus, params, opt_state, show=say is not None)
    device["all_reduces_in_step"] = count_all_reduces(program)
    val_loss = validate(args, trainer, corpus, params)
    if say:
        say(f"loss {val_loss:.3f} nats per byte on {len(corpus.validation):,} bytes never seen")
        report(args, device, log, val_loss)
        if args.sample:
            say(printable(model.sample(params, shape, PROMPT, args.sample, args.seed)))


def train(args, trainer, corpus, params, opt_state, show):
    """(trained params, History, compiled step). The clock starts once the step is compiled."""
    from gpt import history, parallel, progress

    rows = parallel.process_rows(args.batch)

    def batch(index):
        tokens = corpus.batch(index, args.seed, args.batch, args.seq, rows)
        return parallel.place(trainer, tokens, args.batch)

    tokens = batch(0)
    step = trainer.step.lower(params, opt_state, tokens).compile()
    meter = history.CollectiveMeter(args.collectives)
    log = history.History(args.batch * args.seq)
    with progress.ProgressLine(args.collectives, args.steps, args.seconds, show) as line:
        for index in range(args.steps):
            params, opt_state, loss = step(params, opt_state, tokens)
            tokens = batch(index + 1)  # while the devices work
            line.show(log.add(float(loss), meter.take()))
            if args.seconds and log.seconds() > args.seconds:
                break
    return params, log, step


def validate(args, trainer, corpus, params) -> float:
    """The mean loss on held-out files."""
    from gpt import parallel

    rows = parallel.process_rows(args.batch)
    cut = functools.partial(corpus.validation_batch, num_rows=args.batch, seq=args.seq, rows=rows)
    losses = [
        float(trainer.evaluate(params, parallel.place(trainer, cut(index), args.batch)))
        for index in range(VALIDATION_BATCHES)
    ]
    return sum(losses) / len(losses)


def describe(params) -> dict:
    """What the run ran on and with."""
    import jax

    return {
        "count": jax.device_count(),
        "kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "gradient_leaves": len(jax.tree.leaves(params)),
    }


def printable(text: bytes) -> str:
    """ASCII and line breaks; whatever else a young model writes, as dots."""
    return "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "." for byte in text)


def count_all_reduces(program) -> int:
    """XLA's own all-reduces in a compiled program, after XLA has combined what it could."""
    return len(re.findall(r" all-reduce(?:-start)?\(", program.as_text()))


def report(args, device, log, val_loss) -> None:
    """The files asked for."""
    from gpt import history

    run_report = history.make_report(args, device, log, val_loss)
    if args.json:
        history.write_json(args.json, run_report)
    if args.plot:
        from gpt import plots

        plots.plot_runs(args.plot, {args.collectives: run_report})


if __name__ == "__main__":
    sys.exit(main())
