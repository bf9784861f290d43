"""The mesh of all devices, and the programs that run on it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gpt import operators, ranks, state
from jcoll import layers

WARMUP_STEPS = 50


class Trainer(NamedTuple):
    """A mesh of all devices and the functions that run on it."""

    args: Any
    mesh: jax.sharding.Mesh
    layouts: state.Layouts
    optimizer: optax.GradientTransformation
    step: jax.stages.Wrapped  # (params, opt_state, tokens) -> (params, opt_state, Facts)
    evaluate: jax.stages.Wrapped  # (params, tokens) -> loss


def make_trainer(args) -> Trainer:
    """Compiles nothing yet."""
    sizes = tuple(args.mesh.values())
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, tuple(args.mesh))
    optimizer = optax.adamw(schedule(args.lr), b2=0.98, eps=args.adam_eps, weight_decay=0.01)
    layouts = state.make_layouts(args, mesh, optimizer)
    rank = ranks.STAGES[args.zero](args, layouts, optimizer)
    params, opt_state = layouts.specs
    split = batch_spec(args)
    wrap = functools.partial(jax.shard_map, mesh=mesh)
    step = wrap(rank.train, in_specs=(params, opt_state, split), out_specs=(params, opt_state, P()))
    evaluate = wrap(rank.evaluate, in_specs=(params, split), out_specs=P())
    step = jax.jit(step, donate_argnums=(0, 1))
    return Trainer(args, mesh, layouts, optimizer, step, jax.jit(evaluate))


def schedule(peak: float):
    """Linear warm-up, then peak * sqrt(warm-up / step): needs no total, so runs of any length
    agree on the steps that they share.
    """

    def rate(step):
        step = step + 1.0
        return peak * jnp.minimum(step / WARMUP_STEPS, jnp.sqrt(WARMUP_STEPS / step))

    return rate


def first_state(trainer: Trainer) -> tuple[tuple, int]:
    """((params, opt_state), the step to begin with): random, or those of --resume."""
    args, mesh, layouts = trainer.args, trainer.mesh, trainer.layouts
    if args.resume:
        return state.restore(args.resume, layouts, mesh)
    return state.initial(args, mesh, layouts, trainer.optimizer), 0


def batch_spec(args) -> P:
    """How inputs and targets, [B, T] each, are split."""
    sequences = tuple(axis for axis in ("data", "expert") if axis in args.mesh)
    return P(sequences, "context" if "context" in args.mesh else None)


def place(trainer: Trainer, windows: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(inputs, targets), of which each device gets its own: a byte's target is the one after it.

    windows: [B, T + 1], all of the batch, in every process.
    """
    args = trainer.args
    sharding = NamedSharding(trainer.mesh, batch_spec(args))

    def put(tokens):
        if "context" in args.mesh and operators.placement(args) == "zigzag":
            tokens = layers.to_zigzag(tokens, args.mesh["context"])
        return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])

    return put(windows[:, :-1]), put(windows[:, 1:])
