"""Data parallelism: the parameters everywhere, the batch split, the gradients averaged."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gpt import model

AXIS = "data"
WARMUP_STEPS = 50


class Trainer(NamedTuple):
    """A mesh of all devices and the functions that run on it."""

    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    step: jax.stages.Wrapped  # (params, opt_state, tokens) -> (params, opt_state, loss)
    evaluate: jax.stages.Wrapped  # (params, tokens) -> loss


def make_trainer(args) -> Trainer:
    """Compiles nothing yet. The two choices of --collectives differ in `average` alone."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule(args.lr), b2=0.98, weight_decay=0.01),
    )
    average = make_average(args.collectives, args.bucket_bytes)
    local_loss = functools.partial(model.loss, heads=args.heads)

    def train(params, opt_state, tokens):
        # One copy per device in JAX's eyes: the gradients then stay local, for `average` to sum.
        local = jax.lax.pcast(cast(params, args.dtype), AXIS, to="varying")
        loss, grads = average(jax.value_and_grad(local_loss)(local, tokens))
        updates, opt_state = optimizer.update(cast(grads, "float32"), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def evaluate(params, tokens):
        return average(local_loss(cast(params, args.dtype), tokens))

    split, whole = P(AXIS), P()
    wrap = functools.partial(jax.shard_map, mesh=mesh, out_specs=whole)
    step = jax.jit(wrap(train, in_specs=(whole, whole, split)), donate_argnums=(0, 1))
    return Trainer(mesh, optimizer, step, jax.jit(wrap(evaluate, in_specs=(whole, split))))


def make_average(collectives: str, bucket_bytes: int):
    """A function from a pytree that differs between ranks to its mean over them."""
    if collectives == "lax":
        return functools.partial(jax.lax.pmean, axis_name=AXIS)
    import jcoll

    return functools.partial(jcoll.sync_gradients, axis_name=AXIS, bucket_bytes=bucket_bytes)


def schedule(peak: float):
    """Linear warm-up, then peak * sqrt(warm-up / step): needs no total, so runs of any length
    agree on the steps that they share.
    """

    def rate(step):
        step = step + 1.0
        return peak * jnp.minimum(step / WARMUP_STEPS, jnp.sqrt(WARMUP_STEPS / step))

    return rate


def initial_state(trainer: Trainer, shape: model.Shape, seed: int):
    """(params, opt_state), the same on every device, made there and not sent."""
    whole = NamedSharding(trainer.mesh, P())
    params = jax.jit(lambda: model.init(jax.random.key(seed), shape), out_shardings=whole)()
    return params, jax.jit(trainer.optimizer.init, out_shardings=whole)(params)


def process_rows(num_rows: int) -> slice:
    """The part of a global batch that this process loads."""
    count = num_rows // jax.process_count()
    return slice(count * jax.process_index(), count * (jax.process_index() + 1))


def place(trainer: Trainer, local_rows: np.ndarray, num_rows: int) -> jax.Array:
    """The global batch, of which this process holds `local_rows`."""
    sharding = NamedSharding(trainer.mesh, P(AXIS))
    global_shape = (num_rows, *local_rows.shape[1:])
    return jax.make_array_from_process_local_data(sharding, local_rows, global_shape)


def cast(tree, dtype: str):
    """Every leaf as `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
