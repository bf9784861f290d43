"""jcoll through JAX on one GPU, for scripts/gpu_check.py: `gpu_check_jax.py`.

With one rank most collectives come to nothing. ragged_all_to_all is a call of jcoll's kernel there
too, through all stages of XLA's FFI: the whole way but for the peers.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jcoll
from jcoll.runtime import cuda

P = jax.sharding.PartitionSpec
ROWS, REPEATS = 1000, 5


def exchange(x):
    """The rows 10 ... 89 of the one rank, to the rows 5 ... 84 of zeros."""
    output = jnp.zeros_like(x)
    ints = [jnp.array([n], jnp.int32) for n in (10, 80, 5, 80)]
    return jcoll.ragged_all_to_all(x, output, *ints, axis_name="data")


def main() -> None:
    assert cuda.obstacle() is None, cuda.obstacle()
    mesh = jax.make_mesh((1,), ("data",))
    f = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        x = jnp.arange(ROWS * 24).reshape(ROWS, 24).astype(dtype)
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))
        assert cuda.TARGET in f.lower(x).as_text()
        expected = np.zeros_like(np.asarray(x))
        expected[5:85] = np.asarray(x)[10:90]
        for _ in range(REPEATS):
            np.testing.assert_array_equal(np.asarray(f(x)), expected)
    jcoll.check_health()
    print(f"jcoll in JAX {jax.__version__} on {jax.devices()[0].device_kind}: ok")


if __name__ == "__main__":
    main()
