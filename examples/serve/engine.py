"""Decoding on a mesh of all devices: one program for the prompt, one for each token after it."""

import functools
import time

import jax
import numpy as np
from gpt.history import COUNTERS
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jcoll
from serve import model

ALGORITHM = {"jcoll": "auto", "lax": "xla"}
"""The two differ in this alone, which all collectives of the model are given."""


class Engine:
    """A model in its place, and the sequences that it has written so far."""

    def __init__(self, collectives: str, shape: model.Shape, mesh: jax.sharding.Mesh, params: dict):
        self.collectives = collectives
        self.latencies_s: list[float] = []
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self._mesh = mesh
        self._shape = shape
        self._params = params
        options = {"axis_name": model.AXIS, "algorithm": ALGORITHM[collectives]}
        # No gradients are taken, so that nobody needs to know what varies over which axis.
        self._step = jax.jit(
            jax.shard_map(
                functools.partial(model.step, shape=shape, options=options),
                mesh=mesh,
                in_specs=(model.weight_specs(shape), model.CACHE_SPEC, P(), P()),
                out_specs=(model.CACHE_SPEC, P(), P()),
                check_vma=False,
            ),
            donate_argnums=1,
        )

    def start(self, prompt: np.ndarray, dtype: str) -> None:
        """Reads the prompts [B, T], which gives the first token of each sequence."""
        split = NamedSharding(self._mesh, model.CACHE_SPEC)
        empty = functools.partial(model.empty_cache, self._shape, len(prompt), dtype)
        self._cache = jax.jit(empty, out_shardings=split)()
        self._tokens = self._place(prompt)
        self._position = self._place(np.zeros((), np.int32))
        self._text: list[np.ndarray] = []
        self._advance()

    def decode(self, count: int, timed: bool) -> None:
        """`count` more tokens, each of which arrives before the next one is begun: a token depends
        on the last, and someone reads along.
        """
        before = self._count()
        for _ in range(count):
            started = time.perf_counter()
            self._advance()
            if timed:
                self.latencies_s.append(time.perf_counter() - started)
        if timed:
            now = self._count()
            for name in COUNTERS:
                self.counters[name] += now[name] - before[name]

    def text(self) -> np.ndarray:
        """The tokens so far, [B, count]."""
        return np.concatenate(self._text, axis=1)

    def _advance(self) -> None:
        # The position stays on the devices, too: to send it to each of them is a tenth of a step.
        state = self._cache, self._tokens, self._position
        self._cache, self._tokens, self._position = self._step(self._params, *state)
        self._text.append(np.asarray(self._tokens.addressable_data(0)))

    def _place(self, x: np.ndarray) -> jax.Array:
        everywhere = NamedSharding(self._mesh, P())
        return jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])

    def _count(self) -> dict:
        """What this process's collectives have cost so far. jcoll counts its own on the CPU."""
        rows = jcoll.metrics()
        return {name: sum(row[name] for row in rows) for name in COUNTERS}


def make_params(shape: model.Shape, mesh: jax.sharding.Mesh, seed: int, dtype: str) -> dict:
    """Random weights, made on the devices that hold them."""
    specs = model.weight_specs(shape)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )
    make = functools.partial(model.init, shape=shape, num_ranks=mesh.size, dtype=dtype)
    return jax.jit(lambda: make(jax.random.key(seed)), out_shardings=shardings)()
