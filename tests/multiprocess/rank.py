"""What the scripts of the jobs share: joining the job, the mesh, reports. See jobs.py."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

_about = json.loads(sys.argv[1])
_PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != _about["parent"]:  # It died before prctl.
    os._exit(1)

COUNT: int = _about["count"]
ME = int(sys.argv[2])
ARGS: list[str] = _about["args"]
kept: Any = None
"""What is to live until the process ends."""

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

jax.config.update("jax_check_proxy_envs", False)
jax.distributed.initialize(_about["coordinator"], COUNT, ME)


def report(name: str, **values: Any) -> None:
    """Tells the test something."""
    print("@@ " + json.dumps({"name": name, **values}), flush=True)


def leave(*survivors: int) -> None:
    """Ends without JAX's shutdown, which aborts processes whose peers are gone.

    Nobody ends before all survivors have come to this, and process 0, whose end ends the others
    too, not before they have ended.
    """
    from jcoll import _compat

    client = _compat.distributed_client()
    for step in ("has come", "ends"):
        client.key_value_set(f"tests/{step}/{ME}", str(os.getpid()))
        for other in survivors or range(COUNT):
            if step == "has come" or ME == 0:
                pid = int(client.blocking_key_value_get(f"tests/{step}/{other}", 20_000))
                if step == "ends" and other != ME:
                    wait_for_end(pid)
    sys.stdout.flush()
    os._exit(0)


def wait_for_end(pid: int, timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] in "ZX":
                    return
        except OSError:
            return
        time.sleep(0.01)


def mesh_of(**sizes: int) -> Mesh:
    """A mesh over all devices, process by process; by default, one axis "x"."""
    sizes = sizes or {"x": jax.device_count()}
    return Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))


def put(mesh: Mesh, x: Any) -> Any:
    """Arrays that all processes have, with their leading dimensions over the mesh's axes."""
    sharding = NamedSharding(mesh, P(*mesh.axis_names))

    def place(a: Any) -> Any:
        a = np.asarray(a)
        return jax.make_array_from_callback(a.shape, sharding, lambda i: a[i])

    return jax.tree.map(place, x)


def program(f: Callable, mesh: Mesh) -> Callable:
    """f of one rank's arrays -> a jitted function of arrays [ranks..., ...]."""
    lead, spec = len(mesh.axis_names), P(*mesh.axis_names)

    def per_rank(*xs: Any) -> Any:
        ys = f(*jax.tree.map(lambda x: x.reshape(x.shape[lead:]), xs))
        return jax.tree.map(lambda y: y.reshape((1,) * lead + y.shape), ys)

    per_rank.__name__ = getattr(f, "__name__", "per_rank").strip("<>")
    return jax.jit(
        jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def local(y: Any) -> dict[tuple[int, ...], np.ndarray]:
    """The parts of an array [ranks..., ...] that are here, by index in the mesh."""
    found = {}
    for shard in y.addressable_shards:
        index = tuple(i.start or 0 for i in shard.index)
        data = np.asarray(shard.data)
        lead = len(y.sharding.mesh.axis_names)
        found[index[:lead]] = data.reshape(data.shape[lead:])
    return found


def failing(f: Callable, *args: Any) -> tuple[str, float, float]:
    """The text of the exception that f(*args) ends with ("" for none), seconds, and when."""
    begin = time.monotonic()
    try:
        jax.block_until_ready(f(*args))
        text = ""
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
    end = time.monotonic()
    return text, end - begin, end
