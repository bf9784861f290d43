"""The step on a data x expert mesh: the batch split over both axes, the experts over one."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from gpt.parallel import cast, process_rows, schedule
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from jcoll import layers
from moe import model
from moe.options import AXES

MAX_NORM = 1.0


class Trainer(NamedTuple):
    """A mesh of all devices, the state on it, and the functions that run on it."""

    mesh: jax.sharding.Mesh
    state: tuple  # (params, opt_state) at the start
    step: jax.stages.Wrapped  # (state, tokens) -> (state, (loss, rows dropped))
    evaluate: jax.stages.Wrapped  # (params, tokens) -> loss


def make_trainer(args) -> Trainer:
    """The initial state, made where it belongs, and the programs, not yet compiled."""
    mesh = jax.make_mesh(tuple(args.mesh.values()), tuple(args.mesh))
    optimizer = optax.adamw(schedule(args.lr), b2=0.98, weight_decay=0.01)
    shape = model.Shape(args.seq, args.layers, args.width, args.heads, args.hidden, args.experts)
    init = functools.partial(model.init, jax.random.key(args.seed), shape)
    specs = model.specs(jax.eval_shape(init))
    params = jax.jit(init, out_shardings=placed(mesh, specs))()
    # The optimizer's trees are like the parameters', and its counter is everywhere.
    opt_specs = optax.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(optimizer.init, params),
        specs,
        transform_non_params=lambda _: P(),
    )
    opt_state = jax.jit(optimizer.init, out_shardings=placed(mesh, opt_specs))(params)
    losses = functools.partial(model.losses, heads=args.heads, moe=model.make_moe(args))
    train = functools.partial(train_step, losses, optimizer, specs, args.dtype, mesh.size)

    def evaluate(params, tokens):
        return jcoll.all_reduce(losses(cast(params, args.dtype), tokens)[0], AXES, op="mean")

    batch, state_specs = P(AXES), (specs, opt_specs)
    wrap = functools.partial(jax.shard_map, mesh=mesh)
    step = wrap(train, in_specs=(state_specs, batch), out_specs=(state_specs, P()))
    return Trainer(
        mesh,
        (params, opt_state),
        jax.jit(step, donate_argnums=0),
        jax.jit(wrap(evaluate, in_specs=(specs, batch), out_specs=P())),
    )


def train_step(losses, optimizer, specs, dtype, num_ranks, state, tokens) -> tuple:
    """One rank's view of a step. Its loss is its share of the loss of all, so gradients add up."""
    params, opt_state = state

    def share(params):
        cross_entropy, balance, dropped = losses(cast(params, dtype), tokens)
        return (cross_entropy + model.BALANCE * balance) / num_ranks, (cross_entropy, dropped)

    # One copy per rank in JAX's eyes: what is replicated is then summed here, by jcoll.
    local = jax.tree.map(
        lambda p, spec: jax.lax.pcast(p, replicas(spec), to="varying"), params, specs
    )
    grads, (cross_entropy, dropped) = jax.grad(share, has_aux=True)(local)
    grads, _ = layers.clip_by_global_norm(sync(grads, specs), MAX_NORM, specs)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    facts = jcoll.all_reduce(cross_entropy, AXES, op="mean"), jcoll.all_reduce(dropped, AXES)
    return (optax.apply_updates(params, updates), opt_state), facts


def sync(grads, specs):
    """Each gradient summed over the ranks that hold the same parameter, in one call per group."""
    leaves, treedef = jax.tree.flatten(grads)
    axes_of = [replicas(spec) for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
    for axes in sorted(set(axes_of)):
        group = [i for i, its_axes in enumerate(axes_of) if its_axes == axes]
        summed = jcoll.sync_gradients([leaves[i] for i in group], axes, op="sum")
        for i, leaf in zip(group, summed, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def replicas(spec: P) -> tuple[str, ...]:
    """The axes along which a parameter of this spec is the same."""
    return tuple(axis for axis in AXES if axis not in spec)


def is_spec(x) -> bool:
    return isinstance(x, P)


def placed(mesh: jax.sharding.Mesh, specs):
    """The shardings of a tree of specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def place_batch(trainer: Trainer, cut, num_rows: int) -> jax.Array:
    """The global batch: cut(rows=slice) gives this process's rows of it."""
    local_rows = cut(rows=process_rows(num_rows))
    sharding = NamedSharding(trainer.mesh, P(AXES))
    shape = (num_rows, *local_rows.shape[1:])
    return jax.make_array_from_process_local_data(sharding, local_rows, shape)


def count_parameters(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def describe(params) -> dict:
    """What the run ran on and with."""
    return {
        "count": jax.device_count(),
        "kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "parameters": count_parameters(params),
        "experts_here": jnp.shape(params["layers"][0]["w_in"].addressable_data(0))[0],
    }
