"""Writes the catalogue's plans for 2 to 8 ranks, and one of a user's own algorithm, encoded, into
one file: `encode_plans.py FILE`. Each is preceded by its length in bytes, as int32. Needs numpy.
"""

import sys
import types
from pathlib import Path

import numpy as np

# Without jcoll/__init__.py, which imports jax.
_package = types.ModuleType("jcoll")
_package.__path__ = [str(Path(__file__).resolve().parents[2] / "jcoll")]
sys.modules["jcoll"] = _package

from jcoll.algorithms import algorithm, registry  # noqa: E402
from jcoll.plan.builder import Builder  # noqa: E402
from jcoll.plan.encode import encode_bytes  # noqa: E402
from jcoll.plan.ops import OPS  # noqa: E402
from jcoll.plan.verify import verify  # noqa: E402

RANKS = range(2, 9)


@algorithm("relay", op="all_reduce", chunks=3)
def relay(p: Builder) -> None:
    """A user's own: sums pass along the line of ranks by way of scratch, three pieces to a block,
    and the result comes back in one message for each rank."""
    n, spare = p.num_ranks, p.scratch(3)
    for r in range(n - 1):
        p.send(r, r + 1, chunk=0, to=spare, count=3)
        p.send(r + 1, r + 1, chunk=spare, to=0, count=3, reduce=True)
    for r in range(n - 1, 0, -1):
        p.send(r, r - 1, chunk=0, count=3)


def roots(op: str, num_ranks: int) -> list[int]:
    return [0, num_ranks - 1] if OPS[op].rooted else [0]


def main(path: str) -> None:
    with Path(path).open("wb") as file:
        for a in registry.all_algorithms():
            for n in RANKS:
                if a.supports(n) is not None:
                    continue
                for root in roots(a.op, n):
                    plan = registry.plan_for(a.op, a.name, n, root)
                    if not a.is_ours:
                        verify(plan)
                    data = encode_bytes(plan)
                    file.write(np.int32(len(data)).tobytes() + data)


if __name__ == "__main__":
    main(sys.argv[1])
