"""Tensor-parallel decoding with a key-value cache: tokens per second, and how long each one takes.

    python examples/serve_tp.py                      on 8 virtual CPU devices, or on all GPUs
    python examples/serve_tp.py --compare            jcoll's collectives and jax.lax's, in turn
    python -m jcoll launch -n 4 --devices-per-process 2 examples/serve_tp.py

A small GPT of random weights, its heads, inner layers and vocabulary split over the devices. A step
decodes one token of each sequence, which takes 2 all_reduces a layer, one for the embedding and an
all_gather for the choice of the token: of 1 KiB each, so that their latency is what counts.
"""

import sys

from gpt import flags
from serve import options

BURST = 16
"""How many tokens an engine decodes before it is another one's turn."""


def main(argv=None) -> int:
    """Reads the flags, starts jax as they say, decodes, reports."""
    parser, args = options.parse(argv)
    flags.start_cpu_devices(args.devices)
    import jax  # only now: it reads what the line above has set

    options.check_devices(parser, args, jax.device_count())
    engines = serve(args)
    if jax.process_index() == 0:
        report(args, engines)
    return 0


def serve(args) -> list:
    """The engines, when they have decoded what was asked for."""
    import jax
    import numpy as np
    from serve import engine, model

    context = args.prompt + args.warmup + args.tokens
    shape = model.Shape(args.layers, args.width, args.heads, args.vocabulary, context)
    mesh = jax.make_mesh((jax.device_count(),), (model.AXIS,))
    params = engine.make_params(shape, mesh, args.seed, args.dtype)
    names = ("jcoll", "lax") if args.compare else (args.collectives,)
    engines = [engine.Engine(name, shape, mesh, params) for name in names]
    random = np.random.default_rng(args.seed)
    prompt = random.integers(args.vocabulary, size=(args.batch, args.prompt), dtype=np.int32)
    for each in engines:
        each.start(prompt, args.dtype)
        each.decode(args.warmup, timed=False)
    for first in range(0, args.tokens, BURST):
        for each in engines:
            each.decode(min(BURST, args.tokens - first), timed=True)
    return engines


def report(args, engines) -> None:
    """Prints what was measured, and writes it if asked to."""
    import jax
    from gpt import history
    from serve import report

    runs = {engine.collectives: report.measured(engine, args.batch) for engine in engines}
    result = {
        "options": vars(args),
        "device": {"count": jax.device_count(), "kind": jax.devices()[0].device_kind},
        "processes": jax.process_count(),
        "runs": runs,
    }
    print(
        f"{args.layers} layers of width {args.width} on {jax.device_count()} "
        f"{jax.devices()[0].device_kind} devices, batch {args.batch}, {args.tokens} tokens"
    )
    for name, numbers in runs.items():
        print(report.line(name, numbers))
    if args.compare:
        result["speedup"] = runs["jcoll"]["tokens_per_s"] / runs["lax"]["tokens_per_s"]
        result["same_tokens"] = report.same_tokens(*(engine.text() for engine in engines))
        print(
            f"jcoll / lax: {result['speedup']:.2f}; the same {result['same_tokens']} tokens, of "
            f"{engines[0].text().shape[1]}"
        )
    if args.json:
        history.write_json(args.json, result)
        print(f"wrote {args.json}")


if __name__ == "__main__":
    sys.exit(main())
