"""The training step as one device sees it, inside jax.shard_map, by stage of ZeRO.

A device's loss is its share of the loss of all, so that gradients add up: over every axis along
which a parameter is the same while tokens differ. Over `data` this is a matter of --zero:

    --zero   kept whole                 gradients over data
    0        all                        all_reduce; with --overlap layer by layer, as they appear
    1        parameters, gradients      reduce_scatter after the backward pass
    2        parameters                 reduce_scatter in the backward pass, layer by layer
    3        nothing                    the same; parameters gathered layer by layer, twice

What is left, over the other axes, is summed after that, for 1 to 3 in the shards. --remat computes
a layer again in the backward pass; with --zero 3 parameters are then gathered for that.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import jcoll
from gpt import finite, model, operators
from gpt.state import AXIS, Layouts, shape_of
from jcoll import layers
from jcoll.layers import zero


class Facts(NamedTuple):
    """What a step tells, on all devices alike."""

    loss: jax.Array  # The mean cross entropy.
    dropped: Any  # The share of the rows routed to experts that found no room there.
    finite: layers.FiniteReport | None  # With --check-finite.


class Rank(NamedTuple):
    """What a device knows."""

    args: Any
    layouts: Layouts
    optimizer: optax.GradientTransformation


class Replicated(Rank):
    """--zero 0, and what the other stages have in common with it."""

    def train(self, params, opt_state, tokens):
        """A step: (params, opt_state, Facts)."""
        grads, facts = self.gradients(params, tokens)
        return *self.updated(grads, opt_state, params), facts

    def gradients(self, params, tokens):
        """(gradients of the loss of all, split as layouts.shards says, Facts)."""

        def loss(variables, tokens):
            variables, alarms = variables
            values = self.computable(variables, params)
            cross_entropy, routed = self.losses(values, tokens, self.layer_in_training, alarms)
            balance = self.for_each(routed.balance) if self.args.experts else routed.balance
            share = (cross_entropy + model.BALANCE * balance) / self.num_shares
            return share, (cross_entropy, routed.dropped)

        differentiate = jax.value_and_grad(loss, has_aux=True)
        variables = self.variables(params), self.alarms()
        if self.args.accumulate > 1:
            count = self.args.accumulate
            results = layers.accumulate_gradients(differentiate, variables, tokens, count)
        else:
            results = differentiate(variables, tokens)
        (_, (cross_entropy, dropped)), (grads, alarms) = results
        facts = Facts(
            self.mean(cross_entropy, operators.loss_axes(self.args)),
            self.mean(dropped, operators.token_axes(self.args)) if self.args.experts else dropped,
            layers.check_finite(alarms, tuple(self.args.mesh)) if alarms else None,
        )
        return cast(self.reduced(grads), "float32"), facts

    def evaluate(self, params, tokens):
        """The mean cross entropy of all."""
        values = self.for_inference(params)
        cross_entropy, _ = self.losses(values, tokens, self.layer_in_inference)
        return self.mean(cross_entropy, operators.loss_axes(self.args))

    def losses(self, values, tokens, wrap: Callable, alarms=None):
        """Of this device's tokens."""
        parts = operators.on_mesh(self.args)
        if alarms:
            values, wrap = finite.arm(values, alarms, wrap)
        return model.losses(values, tokens, shape_of(self.args), parts, wrap)

    def alarms(self):
        """What --check-finite differentiates by as well; None without."""
        if not self.args.check_finite:
            return None
        return finite.alarms(self.layouts.params, self.args.layers, tuple(self.args.mesh))

    # The stages differ in the functions from here to `updated`.

    def variables(self, params):
        """What to differentiate by: of the type in which gradients are to travel."""
        if self.marks_layers:
            return params
        return vary(cast(params, self.args.dtype), self.layouts.params, self.sum_axes)

    def computable(self, variables, params):
        """What to compute with; its gradients become those of `variables`."""
        del params
        values = cast(variables, self.args.dtype)
        if not self.marks_layers:
            return values
        rest, layout = without_layers(values), without_layers(self.layouts.params)
        return {**self.mark(rest, layout), "layers": values["layers"]}

    def layer_in_training(self, block):
        """block(layer, x) with `layer` as `computable` has it."""
        if not self.marks_layers:
            return self.recomputed(block) if self.args.remat else block

        def marked(layer, x):
            return block(self.mark(layer, self.layouts.params["layers"]), x)

        return self.recomputed(marked)

    def recomputed(self, layer):
        """`layer`, whose backward pass finds what `kept` says, in the body of a scan."""
        return jax.checkpoint(layer, policy=self.kept, prevent_cse=False)

    @property
    def kept(self):
        """A policy of jax.checkpoint."""
        nothing = jax.checkpoint_policies.nothing_saveable
        return nothing if self.args.remat else zero.keep_arithmetic

    def for_inference(self, params):
        """What to compute with if no gradients are taken."""
        return cast(params, self.args.dtype)

    def layer_in_inference(self, block):
        """block(layer, x) with `layer` as `for_inference` has it."""
        return block

    def reduced(self, grads):
        """The gradients of the loss of all."""
        if self.marks_layers:
            return grads
        return by_axes(self.sum, grads, self.layouts.params, self.sum_axes)

    def updated(self, grads, opt_state, params):
        """(params, opt_state) after the optimizer."""
        if self.args.clip:
            specs = zero.specs(self.layouts.params, AXIS)
            grads, _ = layers.clip_by_global_norm(grads, self.args.clip, specs=specs)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @property
    def marks_layers(self) -> bool:
        """Whether gradients leave in the backward pass."""
        return self.args.overlap and self.args.zero == 0

    def mark(self, values, layout):
        """`values` of a layer, whose gradients are summed as soon as they are there."""
        sync = functools.partial(layers.sync_in_backward, **self.gradient_options)
        return by_axes(sync, values, layout, self.sum_axes)

    def sum(self, grads, axes):
        """Each of a list of gradients, summed over the axes."""
        if self.args.collectives == "lax":
            return jax.lax.psum(grads, axes)
        return jcoll.sync_gradients(grads, axes, **self.gradient_options)

    def mean(self, value, axes):
        """Of all devices' values."""
        if self.args.collectives == "lax":
            return jax.lax.pmean(value, axes)
        return jcoll.all_reduce(value, axes, op="mean")

    def for_each(self, value):
        """A value that is one for all devices, for each to add to its share of the loss. JAX would
        sum its gradient by a collective of its own."""
        if self.args.collectives == "lax":
            return value
        return layers.sync_in_backward(value, operators.loss_axes(self.args), op="sum")

    @property
    def gradient_options(self) -> dict:
        """How gradients travel."""
        args = self.args
        return {"op": "sum", "wire_dtype": args.wire_dtype, "bucket_bytes": args.bucket_bytes}

    @property
    def num_shares(self) -> int:
        """The devices that each have a share of the loss; tensor ranks have one together."""
        return jax.lax.axis_size(operators.loss_axes(self.args))

    def sum_axes(self, layout) -> tuple[str, ...]:
        """The axes over which the gradients of a parameter are summed."""
        axes = operators.token_axes(self.args)
        return tuple(axis for axis in axes if axis not in layout.spec)


class Sharded(Replicated):
    """--zero 1: reduce_scatter over `data`, and an optimizer that sees shards."""

    stage = 1

    def reduced(self, grads):
        grads = zero.reduce_scatter_gradients(
            grads, self.layouts.shards, AXIS, **self.gradient_options
        )
        return self.summed_over_other_axes(grads)

    def summed_over_other_axes(self, shards):
        return by_axes(self.sum, shards, self.layouts.shards, self.other_axes)

    def other_axes(self, layout) -> tuple[str, ...]:
        return tuple(axis for axis in self.sum_axes(layout) if axis != AXIS)

    def updated(self, grads, opt_state, params):
        return zero.update(
            self.optimizer,
            grads,
            opt_state,
            params,
            self.layouts.shards,
            AXIS,
            stage=max(2, self.stage),  # Scattered already.
            max_norm=self.args.clip or None,
        )


class ShardedGradients(Sharded):
    """--zero 2: gradients are scattered as the backward pass makes them."""

    stage = 2

    def variables(self, params):
        shards = zero.shard(params, self.layouts.shards, AXIS)
        return vary(shards, self.layouts.shards, self.other_axes)

    def computable(self, variables, params):
        values = cast(vary(params, self.layouts.params, self.sum_axes), self.args.dtype)
        layout = without_layers(self.layouts.shards)
        rest = self.redirect(without_layers(values), without_layers(variables), layout)
        return {**rest, "layers": (values["layers"], variables["layers"])}

    def layer_in_training(self, block):
        layout = self.layouts.shards["layers"]

        def redirected(layer, x):
            values, shards = layer
            return block(self.redirect(values, shards, layout), x)

        return self.recomputed(redirected) if self.args.remat else redirected

    def redirect(self, values, shards, layout):
        """`values`, whose gradients are scattered to those of `shards`."""
        return zero.redirect_gradients(values, shards, layout, AXIS, **self.gradient_options)

    def reduced(self, grads):
        return self.summed_over_other_axes(grads)


class ShardedParameters(ShardedGradients):
    """--zero 3: parameters are gathered where they are used."""

    stage = 3

    def variables(self, params):
        return vary(params, self.layouts.shards, self.other_axes)

    def computable(self, variables, params):
        del params
        return self.for_inference(variables)

    def for_inference(self, params):
        layout = without_layers(self.layouts.shards)
        rest = zero.gather(without_layers(params), layout, **self.gather_options)
        return {**rest, "layers": params["layers"]}

    def layer_in_training(self, block):
        layout = self.layouts.shards["layers"]
        return zero.regathered(
            block, layout, policy=self.kept, prevent_cse=False, **self.gather_options
        )

    layer_in_inference = layer_in_training

    @property
    def gather_options(self) -> dict:
        return {"axis_name": AXIS, "dtype": self.args.dtype, **self.gradient_options}


STAGES = (Replicated, Sharded, ShardedGradients, ShardedParameters)


def vary(tree, layout, axes_of: Callable):
    """One copy per device in JAX's eyes: gradients then stay local, for jcoll to sum."""
    return jax.tree.map(lambda x, part: jax.lax.pcast(x, axes_of(part), to="varying"), tree, layout)


def by_axes(fn: Callable, tree, layout, axes_of: Callable):
    """fn(list of leaves, axes) for all leaves of the same axes together; none if there are none."""
    leaves, treedef = jax.tree.flatten(tree)
    axes = [axes_of(part) for part in jax.tree.leaves(layout)]
    for group in sorted(set(axes) - {()}):
        indices = [i for i, its_axes in enumerate(axes) if its_axes == group]
        results = fn([leaves[i] for i in indices], group)
        for i, leaf in zip(indices, results, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def without_layers(tree):
    """What a model has beside its stack of layers."""
    return {**tree, "layers": {}}


def cast(tree, dtype: str):
    """Every leaf as `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
