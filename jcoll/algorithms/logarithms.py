"""Logarithms of numbers of ranks. No jax."""

from __future__ import annotations


def ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def floor_log2(n: int) -> int:
    return n.bit_length() - 1
