"""--check-finite: NaN and Inf in gradients, by parameter and device, before gradients are reduced.

With --overlap, and from --zero 2 on, gradients are reduced in the backward pass, and nobody gets to
see a device's own. So each parameter gets an alarm: a zero that it passes on its way to the model,
whose "gradient" is NaN on the devices where the parameter's is not finite.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def alarms(params_layout, num_layers: int, axes: tuple[str, ...]):
    """Zeros to differentiate by, one for each parameter and, of the stacked ones, for each layer.

    Every device of `axes` has its own.
    """
    zeros = jax.tree.map(lambda _: jnp.float32(0), params_layout)
    stack = jax.tree.map(lambda _: jnp.zeros(num_layers), params_layout["layers"])
    return jax.lax.pcast({**zeros, "layers": stack}, axes, to="varying")


def arm(values, alarms, wrap: Callable):
    """(values, wrap) for model.losses, with alarms between parameters and model."""

    def armed_wrap(block):
        def run(layer_and_alarms, x):
            layer, its_alarms = layer_and_alarms
            return wrap(lambda layer, x: block(_armed(layer, its_alarms), x))(layer, x)

        return run

    rest = _armed({**values, "layers": {}}, {**alarms, "layers": {}})
    return {**rest, "layers": (values["layers"], alarms["layers"])}, armed_wrap


@jax.custom_vjp
def _armed(values, alarms):
    del alarms
    return values


def _forward(values, alarms):
    return values, alarms


def _backward(alarms, cts):
    def alarm(ct, zero):
        return jnp.where(jnp.isfinite(ct).all(), zero, jnp.nan)

    return cts, jax.tree.map(alarm, cts, alarms)


_armed.defvjp(_forward, _backward)
