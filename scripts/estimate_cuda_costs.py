"""Writes jcoll/tuning/tables/cuda.json: costs of the CUDA kernels, by formulas, not measured.

python scripts/estimate_cuda_costs.py     brings the table up to date

cost = latency + bytes over the busiest link / bandwidth, with the constants that NCCL's own model
has for Hopper (src/sym_kernels.cc of NCCL 2.30): so the order of the algorithms, and where they
cross, is what NCCL's authors hold to be right for their kernels of the same kinds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from jcoll.tuning.candidates import PROCESS
from jcoll.tuning.table import ESTIMATED, Row, to_text

PATH = Path(__file__).resolve().parent.parent / "jcoll" / "tuning" / "tables" / "cuda.json"
NUM_RANKS = (2, 4, 8, 16, 32, 64)
SIZES = tuple(1 << bits for bits in range(10, 29, 2))

LL_US = 4.5  # One way: the flag comes with the data.
BARRIERS_US = 7.8  # A kernel with a barrier before and after.
BANDWIDTH = 320e3  # Bytes a microsecond over NVLink 4,
MULTIMEM_BANDWIDTH = 480e3  # and what the switch adds or copies counted once.
LL_WEIGHT = 9  # What a byte costs that every rank pushes to all others as LL lines.


def _one_shot(n: int, nbytes: int) -> float:
    ll = LL_US + LL_WEIGHT * n * nbytes / BANDWIDTH
    return min(ll, BARRIERS_US + (n - 1) * nbytes / BANDWIDTH)


def _two_shot(n: int, nbytes: int) -> float:
    return BARRIERS_US + 2 * (n - 1) / n * nbytes / BANDWIDTH


def _multimem(n: int, nbytes: int) -> float:
    return BARRIERS_US + (1 + 1 / n) * nbytes / MULTIMEM_BANDWIDTH


def _all_reduce(n: int, nbytes: int) -> dict[str, float]:
    one, two = _one_shot(n, nbytes), _two_shot(n, nbytes)
    return {
        "direct": min(one, two),
        "one_shot": one,
        "two_shot": two,
        "multimem": _multimem(n, nbytes),
    }


def _direct(share: Callable[[int], float], kernels: int = 1) -> Callable[[int, int], dict]:
    """`share`: bytes over the busiest link, of a call's size; kernels: one after the other."""

    def cost(n: int, nbytes: int) -> dict[str, float]:
        return {"direct": kernels * BARRIERS_US + share(n) * nbytes / BANDWIDTH}

    return cost


def _others(n: int) -> float:
    return (n - 1) / n


COSTS: dict[str, Callable[[int, int], dict[str, float]]] = {
    "all_reduce": _all_reduce,
    "reduce": lambda n, nbytes: {"direct": _all_reduce(n, nbytes)["direct"]},
    "reduce_scatter": _direct(_others),
    "all_gather": _direct(_others),
    "all_to_all": _direct(_others),
    "ragged_all_to_all": _direct(_others),
    "all_to_all_v": _direct(_others, kernels=2),
    "all_to_all_v_back": _direct(_others, kernels=2),
    "broadcast": _direct(lambda n: 2 * _others(n)),  # Of the root: cuda/kernels/broadcast.cu.
    "gather": _direct(_others),
    "scatter": _direct(_others),
    "ppermute": _direct(lambda n: 1),
    "barrier": _direct(lambda n: 0),
}


def rows() -> Iterator[Row]:
    for op, cost in COSTS.items():
        for n in NUM_RANKS:
            for nbytes in SIZES:
                yield Row(PROCESS, op, n, nbytes, cost(n, nbytes))


def text() -> str:
    note = "by the formulas of scripts/estimate_cuda_costs.py; nobody has measured these"
    return to_text("cuda", "8 x H100, NVLink 4", rows(), source=ESTIMATED, note=note)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PATH.write_text(text())
    print(f"wrote {PATH}")
