"""Compiling one side of a case ahead of time, and proving from its HLO what it will really run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jcoll.bench.cases import AXIS, Problem, Side

_OPCODE = re.compile(
    r"[\])}] (?:all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"
    r"|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
_CUSTOM_CALL = re.compile(r'custom_call_target="jcoll')


class LostCollective(RuntimeError):
    """The optimised program has fewer collectives than the measured source."""


@dataclass(frozen=True)
class Program:
    """An executable, its placed inputs, and how its collectives are carried out."""

    run: Callable[..., jax.Array]
    operands: tuple[jax.Array, ...]
    carried_by: str  # "jcoll" (custom calls) or "xla" (XLA's own collectives)

    def __call__(self) -> jax.Array:
        return self.run(*self.operands)


def make_mesh(num_ranks: int) -> Mesh:
    return jax.make_mesh((num_ranks,), (AXIS,), devices=jax.devices()[:num_ranks])


def place(side: Side, mesh: Mesh) -> tuple[jax.Array, ...]:
    """The operands of a side's program."""
    return tuple(_place(array, mesh) for array in (side.x, *side.extras))


def compile_side(
    name: str, side: Side, problem: Problem, mesh: Mesh, operands: tuple[jax.Array, ...] = ()
) -> Program:
    """Lower, compile and check one side; `name` is "jcoll" or "lax". `operands`: placed before."""
    operands = operands or place(side, mesh)
    # check_vma off: a loop's carry may then go in varying and come out equal on all ranks, with no
    # cast in between; the collectives lower to the same HLO either way.
    sharded = jax.shard_map(
        _repeated(side, problem), mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    compiled = jax.jit(sharded).lower(*operands).compile()
    needed = problem.steps if problem.form == "chain" else 1
    return Program(compiled, operands, carried_by(name, compiled.as_text() or "", needed))


def carried_by(name: str, hlo: str, needed: int) -> str:
    """Who carries out the collectives of `hlo`: raises LostCollective if fewer than `needed` do."""
    native, xla = len(_CUSTOM_CALL.findall(hlo)), len(_OPCODE.findall(hlo))
    ours = native if name == "jcoll" else 0
    if ours + xla < needed:
        raise LostCollective(
            f"{name}: the optimised program keeps {ours + xla} collectives of {needed}; XLA took "
            "the others out, so a time would mean nothing: measure another op, size or mode"
        )
    return "jcoll" if ours else "xla"


def _place(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """[num_ranks, k] -> a global [num_ranks * k] array with row r on rank r's device."""
    flat = array.reshape(-1)
    # Not device_put, which compares the array between processes.
    sharding = NamedSharding(mesh, P(AXIS))
    return jax.make_array_from_callback(flat.shape, sharding, lambda index: flat[index])


def _repeated(side: Side, problem: Problem) -> Callable[..., Any]:
    def step(x: Any, *extras: Any) -> Any:
        return side.feedback(side.call(x, *extras), *extras)

    def chain(x: Any, *extras: Any) -> Any:
        for _ in range(problem.steps):
            x = step(x, *extras)
        return x

    def loop(x: Any, *extras: Any) -> Any:
        return lax.fori_loop(0, problem.steps, lambda _, carry: step(carry, *extras), x)

    return {"single": side.call, "chain": chain, "loop": loop}[problem.form]


def count_wrong(got: jax.Array, expected: np.ndarray, ranks: tuple[int, ...] | None) -> int:
    """Elements of `got` that differ from `expected` ([num_ranks, k]) on the compared ranks."""
    num_ranks, width = expected.shape
    if got.shape != (num_ranks * width,) or got.dtype != expected.dtype:
        raise ValueError(
            f"the result is {got.dtype}[{', '.join(map(str, got.shape))}] over all ranks; "
            f"{expected.dtype}[{num_ranks * width}] was expected"
        )
    wrong = 0
    for shard in got.addressable_shards:
        rank = (shard.index[0].start or 0) // width
        if ranks is None or rank in ranks:
            wrong += int(np.count_nonzero(np.asarray(shard.data) != expected[rank]))
    return wrong
