"""How: one file per family of algorithms. Importing this package fills the catalogue. No jax."""

from jcoll.algorithms import ring as ring
from jcoll.algorithms.registry import algorithm

__all__ = ["algorithm"]
