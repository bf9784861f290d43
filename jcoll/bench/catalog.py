"""What can be measured: the ops, their bus factors, their peers, and which dtypes they take.

Nothing here needs jax: the command line is checked against this table before any child starts.

`S`, the size in bytes that a row is about, is nccl-tests': the larger of one rank's send and
receive buffer. algbw = S / time, busbw = algbw * factor, where the factor makes busbw the load
of the busiest link of an optimal algorithm, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16, float8_* and int4 names with numpy)
import numpy as np

from jcoll.ops._reductions import REDUCE_OPS as REDUCE_OPS

MAIN_OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "ppermute")


def _one(num_ranks: int) -> float:
    return 1.0


def _share(num_ranks: int) -> float:
    """Every rank keeps 1/n of the data where it is and moves the rest."""
    return (num_ranks - 1) / num_ranks


def _twice_share(num_ranks: int) -> float:
    """all_reduce is a reduce_scatter followed by an all_gather."""
    return 2.0 * _share(num_ranks)


def _zero(num_ranks: int) -> float:
    """A barrier moves no data: its bus bandwidth is 0."""
    return 0.0


@dataclass(frozen=True)
class Entry:
    """One op as the command line and the tables know it."""

    factor: Callable[[int], float]  # busbw = algbw * factor(num_ranks)
    size: str  # what S is, for --help
    peer: str  # what of jax.lax it is measured against
    split: bool = False  # the buffer of S bytes is cut into num_ranks equal blocks
    reduces: bool = False  # takes --op
    rooted: bool = False  # takes --root
    repeats: bool = True  # has a shape-preserving form for --chain and --loop


CATALOG: dict[str, Entry] = {
    "all_reduce": Entry(_twice_share, "the array", "lax.psum", reduces=True),
    "reduce_scatter": Entry(_share, "the input", "lax.psum_scatter", split=True, reduces=True),
    "all_gather": Entry(_share, "the output", "lax.all_gather", split=True),
    "all_to_all": Entry(_share, "one rank's buffer", "lax.all_to_all", split=True),
    "ppermute": Entry(_one, "the array", "lax.ppermute"),
    "ragged_all_to_all": Entry(_share, "one rank's rows", "padded lax.all_to_all"),
    "all_to_all_v": Entry(_share, "one rank's rows", "padded lax.all_to_all"),
    "broadcast": Entry(_one, "the array", "lax.psum, masked", rooted=True),
    "reduce": Entry(_one, "the array", "lax.psum", reduces=True, rooted=True, repeats=False),
    "gather": Entry(_share, "the output", "lax.all_gather", split=True, rooted=True, repeats=False),
    "scatter": Entry(
        _share, "the input", "lax.psum_scatter, masked", split=True, rooted=True, repeats=False
    ),
    "barrier": Entry(_zero, "the array passed through", "lax.all_gather of one element"),
}

_REDUCE_PEERS = {"sum": "lax.psum", "mean": "lax.pmean", "max": "lax.pmax", "min": "lax.pmin"}


def peer_name(op: str, redop: str) -> str:
    """The name of the jax.lax program that a row of `op` is compared with."""
    entry = CATALOG[op]
    if not entry.reduces or redop == "sum":
        return entry.peer
    if op == "reduce_scatter":
        return "lax.psum_scatter / n" if redop == "mean" else f"lax.all_to_all, then {redop}"
    return _REDUCE_PEERS.get(redop, f"lax.all_gather, then {redop}")


def bus_factor(op: str, num_ranks: int) -> float:
    """busbw / algbw of `op` on `num_ranks` ranks."""
    return CATALOG[op].factor(num_ranks)


def parse_dtype(name: str) -> np.dtype:
    """The dtype that numpy (with ml_dtypes) knows under `name`, if JAX has it."""
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = None
    is_jax = name not in ("float128", "complex256")
    if dtype is None or dtype.name != name or kind(dtype) == "other" or not is_jax:
        raise ValueError(
            f"{name!r} is not a dtype; a number dtype of JAX is needed: "
            "write float32, bfloat16, float16, int8, uint32, bool, complex64, float8_e4m3fn"
        )
    return dtype


def kind(dtype: np.dtype) -> str:
    """'bool', 'signed', 'unsigned', 'float', 'complex' or 'other'."""
    if dtype == np.bool_:
        return "bool"
    if dtype.name.startswith(("int", "uint")):
        return "unsigned" if dtype.name.startswith("u") else "signed"
    if dtype.name.startswith(("float", "bfloat")) and dtype.name != "float8_e8m0fnu":  # has no 0
        return "float"
    return "complex" if dtype.name.startswith("complex") else "other"


# More than jcoll refuses (ops/_reductions.py: check_dtype): chains and loops feed a result back, so
# it must have the dtype of the input, which means of integers and sums of bools have not.
_REFUSED = {
    "sum": (("bool",), "a number dtype"),
    "prod": (("bool",), "a number dtype"),
    "mean": (("bool", "signed", "unsigned"), "a float or complex dtype"),
    "max": (("complex",), "an ordered dtype"),
    "min": (("complex",), "an ordered dtype"),
    "and": (("float", "complex"), "bool or an integer dtype"),
    "or": (("float", "complex"), "bool or an integer dtype"),
}


def check_pair(redop: str, dtype_name: str) -> None:
    """Raise ValueError where a reduction by `redop` has no meaning for the dtype."""
    dtype = parse_dtype(dtype_name)
    refused, needed = _REFUSED[redop]
    if kind(dtype) in refused:
        fits = ", ".join(name for name, (kinds, _) in _REFUSED.items() if kind(dtype) not in kinds)
        raise ValueError(
            f"--op {redop} has no meaning for {dtype.name}; {needed} is needed: "
            f"change --dtype, or take one of {fits}"
        )


def element_count(op: str, nbytes: int, itemsize: int, num_ranks: int) -> int:
    """Elements of the buffer of `nbytes` bytes: rounded down to whole blocks, at least one each."""
    unit = num_ranks if CATALOG[op].split else 1
    return max(1, nbytes // (itemsize * unit)) * unit
