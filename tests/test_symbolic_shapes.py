"""Programs of symbolic shapes use XLA's collectives: the runtime's calls are of fixed size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jcoll

BODIES = {
    "psum": lambda m, v: m.psum(v, "x"),
    "all_to_all": lambda m, v: m.all_to_all(v, "x", 0, 0, tiled=True),
    "ppermute": lambda m, v: m.ppermute(v, "x", [(0, 1), (1, 0)]),
    "all_gather": lambda m, v: m.all_gather(v, "x", tiled=True),
    "psum_scatter": lambda m, v: m.psum_scatter(v, "x", tiled=True),
}
# XLA's refinement of shapes does not see through the reshapes of the others.
RUN = ("psum", "ppermute")


def exported(module, name):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    fn = jax.shard_map(
        lambda v: BODIES[name](module, v),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    shape = export.symbolic_shape("64*a, b")
    return mesh, export.export(jax.jit(fn))(jax.ShapeDtypeStruct(shape, jnp.float32))


def result(module, name):
    mesh, program = exported(module, name)
    x = np.random.default_rng(0).normal(size=(128, 3)).astype(np.float32)
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    return np.asarray(jax.jit(program.call)(jax.device_put(x, sharding)))


@pytest.mark.parametrize("name", RUN)
def test_results(name):
    want = result(lax, name)
    np.testing.assert_allclose(result(jcoll, name), want, rtol=1e-5)
    with jcoll.intercept():
        np.testing.assert_allclose(result(lax, name), want, rtol=1e-5)


@pytest.mark.parametrize("name", BODIES)
def test_intercept_exports_what_lax_exports(name):
    with jcoll.intercept():
        exported(lax, name)


def test_intercept_leaves_ranks_that_do_not_exist_to_lax():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    fn = jax.shard_map(
        lambda v: lax.ppermute(v, "x", [(0, 9)]), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    with jcoll.intercept(), pytest.raises(IndexError):
        jax.jit(fn)(jnp.zeros(8))
