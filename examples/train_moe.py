"""Train a small byte-level mixture-of-experts GPT, its experts spread over the devices.

    python examples/train_moe.py --steps 100                  on 8 virtual CPU devices, or on GPUs
    python examples/train_moe.py --mesh data=1,expert=8
    python -m jcoll launch -n 4 --devices-per-process 2 examples/train_moe.py --steps 100

The data is the source code of Python's standard library, as for train_gpt.py. The mesh has two
axes: each device has sequences of its own; the devices along `expert` share one set of experts.
"""

import functools
import sys

from gpt import flags
from moe import options

VALIDATION_BATCHES = 4


def main(argv=None) -> int:
    """Reads the flags, starts jax as they say, trains, reports."""
    parser, args = options.parse(argv)
    flags.start_cpu_devices(args.devices)
    import jax  # only now: it reads what the line above has set

    options.check_mesh(parser, args, jax.device_count())
    run(args, say=print if jax.process_index() == 0 else None)
    return 0


def run(args, say) -> None:
    """One training run and its report. `say` prints; None on all processes but the first."""
    from gpt import data, history
    from moe import parallel

    corpus = data.Corpus()
    trainer = parallel.make_trainer(args)
    device = parallel.describe(trainer.state[0])
    if say:
        say(
            f"{device['parameters']:,} parameters, {args.experts} experts a layer, "
            f"{device['experts_here']} on each of {device['count']} {device['kind']} devices "
            f"({options.mesh_text(args.mesh)}), {args.mode}"
        )
    params, log, dropped = train(args, trainer, corpus, show=say is not None)
    device["rows_dropped"] = dropped
    val_loss = validate(args, trainer, corpus, params)
    if not say:
        return
    routed = args.batch * args.seq * args.top_k * args.layers * len(log.rows)
    say(f"{sum(dropped):,} of {routed:,} routed rows dropped")
    say(f"loss {val_loss:.3f} nats per byte on {len(corpus.validation):,} bytes never seen")
    if args.json:
        history.write_json(args.json, history.make_report(args, device, log, val_loss))


def train(args, trainer, corpus, show):
    """(trained params, History, rows dropped by step). The clock starts once it is compiled."""
    from gpt import history, progress
    from moe import parallel

    def batch(index):
        cut = functools.partial(corpus.batch, index, args.seed, args.batch, args.seq)
        return parallel.place_batch(trainer, cut, args.batch)

    tokens, state, dropped = batch(0), trainer.state, []
    step = trainer.step.lower(state, tokens).compile()
    meter = history.CollectiveMeter("jcoll")
    log = history.History(args.batch * args.seq)
    with progress.ProgressLine(args.mode, args.steps, None, show) as line:
        for index in range(args.steps):
            state, (loss, lost) = step(state, tokens)
            tokens = batch(index + 1)  # while the devices work
            dropped.append(int(lost))
            line.show(log.add(float(loss), meter.take()))
    return state[0], log, dropped


def validate(args, trainer, corpus, params) -> float:
    """The mean cross entropy on held-out files."""
    from moe import parallel

    losses = []
    for index in range(VALIDATION_BATCHES):
        cut = functools.partial(corpus.validation_batch, index, args.batch, args.seq)
        tokens = parallel.place_batch(trainer, cut, args.batch)
        losses.append(float(trainer.evaluate(params, tokens)))
    return sum(losses) / len(losses)


if __name__ == "__main__":
    sys.exit(main())
