"""Parameters and optimizer state: how the mesh and --zero split them, made in place, saved."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gpt import model
from jcoll.layers import sharded_state, zero

AXIS = "data"  # ZeRO's: what all its ranks have, each of them has a part of.


class Layouts(NamedTuple):
    """Trees of Layouts (jcoll.layers.zero)."""

    params: Any
    opt_state: Any
    shards: Any  # Of gradients and of what the optimizer sees.

    @property
    def state(self) -> tuple:
        """Of (params, opt_state)."""
        return self.params, self.opt_state

    @property
    def specs(self) -> tuple:
        """PartitionSpecs of (params, opt_state), for jax.shard_map."""
        return zero.specs(self.state, AXIS)


def make_layouts(args, mesh, optimizer: optax.GradientTransformation) -> Layouts:
    """From --zero and the axes of the mesh, without making the parameters."""
    params = jax.eval_shape(initializer(args))

    def make(split):
        plan = functools.partial(zero.layouts, num_ranks=mesh.shape[AXIS], split=split)
        rest, stack = {**params, "layers": {}}, params["layers"]
        layers = plan(stack, specs=specs(stack, mesh, keep_dims=1), keep_dims=1)
        return {**plan(rest, specs=specs(rest, mesh)), "layers": layers}

    shards = make(split=args.zero > 0)
    opt_state = jax.eval_shape(optimizer.init, zero.shapes(shards))
    return Layouts(
        params=shards if args.zero == 3 else make(split=False),
        opt_state=zero.layouts_of_state(opt_state, shards),
        shards=shards,
    )


def specs(params: dict, mesh, keep_dims: int = 0) -> dict:
    """model.SPECS after `keep_dims` others, without the axes that this mesh has not."""

    def spec(path, _):
        parts = model.SPECS.get(path[-1].key, ())
        present = [axis if axis in mesh.shape else None for axis in parts]
        return P(*(None,) * keep_dims, *present)

    return jax.tree_util.tree_map_with_path(spec, params)


def initializer(args):
    """A function of nothing to the parameters."""
    return functools.partial(model.init, jax.random.key(args.seed), shape_of(args))


def shape_of(args) -> model.Shape:
    """The model that the flags describe."""
    sizes = args.seq, args.layers, args.width, args.heads
    return model.Shape(*sizes, args.experts, args.top_k)


def initial(args, mesh, layouts: Layouts, optimizer: optax.GradientTransformation) -> tuple:
    """(params, opt_state), each part made on the devices that keep it."""
    init = initializer(args)
    params, opt_state = (zero.shardings(layout, AXIS, mesh) for layout in layouts.state)
    make_params = jax.jit(lambda: zero.pad(init(), layouts.params), out_shardings=params)

    def init_optimizer():
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zero.shapes(layouts.shards))
        return optimizer.init(zeros)

    return make_params(), jax.jit(init_optimizer, out_shardings=opt_state)()


def whole_params(params, layouts: Layouts, mesh):
    """Every parameter in one piece, as numpy has it. All processes call it."""
    gather = functools.partial(zero.trim, layout=layouts.params)
    return jax.device_get(jax.jit(gather, out_shardings=NamedSharding(mesh, P()))(params))


def save(folder: str, state: tuple, step: int, layouts: Layouts) -> None:
    """Writes a checkpoint that any mesh and any --zero can take up."""
    sharded_state.save(folder, state, layouts.state, metadata={"step": step})


def restore(folder: str, layouts: Layouts, mesh) -> tuple[tuple, int]:
    """((params, opt_state), the number of steps that were taken)."""
    state = sharded_state.restore(folder, layouts.state, AXIS, mesh)
    return state, sharded_state.read_metadata(folder)["step"]
