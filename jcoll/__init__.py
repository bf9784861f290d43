"""jcoll: collectives for JAX, to be called inside jax.shard_map like jax.lax's."""

import importlib.metadata as _metadata

from jcoll import errors as _errors

_why_broken: Exception | None = None  # jcoll/cli.py tells it.

try:
    from jcoll.explain import explain as explain
    from jcoll.intercept import intercept as intercept
    from jcoll.layers.data_parallel import sync_gradients as sync_gradients
    from jcoll.ops import all_gather as all_gather
    from jcoll.ops import all_reduce as all_reduce
    from jcoll.ops import all_to_all as all_to_all
    from jcoll.ops import all_to_all_v as all_to_all_v
    from jcoll.ops import barrier as barrier
    from jcoll.ops import broadcast as broadcast
    from jcoll.ops import gather as gather
    from jcoll.ops import pmax as pmax
    from jcoll.ops import pmean as pmean
    from jcoll.ops import pmin as pmin
    from jcoll.ops import ppermute as ppermute
    from jcoll.ops import psum as psum
    from jcoll.ops import psum_scatter as psum_scatter
    from jcoll.ops import ragged_all_to_all as ragged_all_to_all
    from jcoll.ops import reduce as reduce
    from jcoll.ops import reduce_scatter as reduce_scatter
    from jcoll.ops import scatter as scatter
    from jcoll.runtime.cuda import check_health as check_health
    from jcoll.runtime.native import metrics as metrics
    from jcoll.runtime.native import reset_metrics as reset_metrics
except Exception as error:
    if not _errors.is_command_line():
        raise
    _why_broken = error

try:
    __version__ = _metadata.version("jcoll")
except _metadata.PackageNotFoundError:
    __version__ = "0+unknown"
