"""What the tests of the layers share: to run one rank's function on a mesh, and to compare it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Of the norm of the difference, as a part of the norm."""


def mesh_of(*shape):
    """(n) ranks over "tensor", or (m, n) over "data" and "tensor"; the first devices."""
    names = ("data", "tensor")[-len(shape) :]
    count = int(np.prod(shape))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(shape), names)


def run(fn, args, mesh, in_specs, out_specs, check_vma=True):
    """fn under jit and shard_map, its arguments placed as in_specs say."""
    sharded = jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )

    def place(spec, arg):
        return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), arg)

    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    placed = jax.tree.map(place, tuple(in_specs), tuple(args), is_leaf=is_spec)
    return jax.jit(sharded)(*placed)


def normal(seed, *shape, dtype="float32"):
    """Random values, smaller the more of them are summed in a product."""
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0])
    return jnp.asarray(values, dtype)


def assert_close(got, want, tolerance=None):
    """Leaf by leaf, by the norm of the difference; the tolerance is that of the dtype."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        limit = tolerance or TOLERANCE[str(g.dtype)]
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        error = np.linalg.norm(g - w) / max(np.linalg.norm(w), 1e-30)
        assert error <= limit, f"{keystr(path)}: relative error {error:.1e}"
