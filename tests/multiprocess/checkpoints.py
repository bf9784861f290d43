"""Saves and restores sharded state; one process of tests/layers/test_sharded_state.py.

Arguments: "save", "restore" or "restore damaged", a folder. The state is numbers that tell their
own places, so that each process can check what its devices hold.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rank

from jcoll.layers import sharded_state, zero

SHAPES = {"matrix": (6, 10), "bias": (3,), "scalar": (), "own": (3,), "numpy": (5,)}
LOCAL = {"own": jnp.asarray, "numpy": np.asarray}
"""What each process has for itself: no global array."""


def expected(name: str) -> np.ndarray:
    shape = SHAPES[name]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + len(name)


def save(folder: str, layout: dict, mesh: jax.sharding.Mesh) -> str:
    """Saves after an attempt that fails in the last process alone; how it failed here."""
    state = {name: expected(name) for name in SHAPES}
    shardings = zero.shardings(layout, "x", mesh)
    padded = dict(jax.jit(lambda: zero.pad(state, layout), out_shardings=shardings)())
    padded |= {name: local(state[name]) for name, local in LOCAL.items()}
    is_last = jax.process_index() == jax.process_count() - 1
    wrong = {"metadata": np.int64(1) if is_last else 1}
    failed, _, _ = rank.failing(lambda: sharded_state.save(folder, padded, layout, **wrong))
    sharded_state.save(folder, padded, layout, metadata={"ranks": mesh.size})
    return failed


def restore_damaged(folder: str, layout: dict, mesh: jax.sharding.Mesh) -> str:
    """Restores what the last process alone finds to be damaged; how it failed here."""
    if jax.process_index() == jax.process_count() - 1:
        np.load = missing
    text, _, _ = rank.failing(lambda: sharded_state.restore(folder, layout, "x", mesh))
    return text


def missing(path: Path, **_: object) -> None:
    raise FileNotFoundError(path)


def main() -> None:
    action, folder = rank.ARGS
    mesh = rank.mesh_of()
    layout = zero.layouts({name: expected(name) for name in SHAPES}, mesh.size)
    failed = save(folder, layout, mesh) if action == "save" else ""
    if action == "restore damaged":
        rank.report("done", failed=restore_damaged(folder, layout, mesh))
        return
    restored = sharded_state.restore(folder, layout, "x", mesh)
    for name, leaf in restored.items():
        want = np.asarray(zero.pad({name: expected(name)}, {name: layout[name]})[name])
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index], err_msg=name)
    written = len(list(Path(folder).glob("process-*.json")))
    metadata = sharded_state.read_metadata(folder)
    rank.report("done", saved_by=written, metadata=metadata, failed=failed)


main()
