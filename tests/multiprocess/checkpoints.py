"""Saves and restores sharded state; one process of tests/layers/test_sharded_state.py.

Arguments: "save" or "restore", a folder. The state is numbers that tell their own places, so that
each process can check what its devices hold.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import rank

from jcoll.layers import sharded_state, zero

SHAPES = {"matrix": (6, 10), "bias": (3,), "scalar": ()}


def expected(name: str) -> np.ndarray:
    shape = SHAPES[name]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + len(name)


def main() -> None:
    action, folder = rank.ARGS
    mesh = rank.mesh_of()
    state = {name: expected(name) for name in SHAPES}
    layout = zero.layouts(state, mesh.size)
    if action == "save":
        padded = jax.jit(
            lambda: zero.pad(state, layout), out_shardings=zero.shardings(layout, "x", mesh)
        )()
        sharded_state.save(folder, padded, layout, metadata={"ranks": mesh.size})
    restored = sharded_state.restore(folder, layout, "x", mesh)
    for name, leaf in restored.items():
        want = np.asarray(zero.pad({name: expected(name)}, {name: layout[name]})[name])
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index], err_msg=name)
    written = len(list(Path(folder).glob("process-*.json")))
    rank.report("done", saved_by=written, metadata=sharded_state.read_metadata(folder))


main()
