"""How: one file per family of algorithms. Importing this package fills the catalogue. No jax."""

from jcoll.algorithms import binomial as binomial
from jcoll.algorithms import bruck as bruck
from jcoll.algorithms import butterfly as butterfly
from jcoll.algorithms import direct as direct
from jcoll.algorithms import halving_doubling as halving_doubling
from jcoll.algorithms import hierarchical as hierarchical
from jcoll.algorithms import pairwise as pairwise
from jcoll.algorithms import pat as pat
from jcoll.algorithms import ring as ring
from jcoll.algorithms import tree as tree
from jcoll.algorithms.registry import algorithm as algorithm
from jcoll.algorithms.registry import all_of_ours_are_there

all_of_ours_are_there()
