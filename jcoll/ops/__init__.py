"""The collectives: one file per op. Importing this package registers them all (see SPECS)."""

from jcoll.ops._primitive import SPECS as SPECS
from jcoll.ops.all_gather import all_gather as all_gather
from jcoll.ops.all_reduce import all_reduce as all_reduce
from jcoll.ops.all_reduce import pmax as pmax
from jcoll.ops.all_reduce import pmean as pmean
from jcoll.ops.all_reduce import pmin as pmin
from jcoll.ops.all_reduce import psum as psum
from jcoll.ops.all_to_all import all_to_all as all_to_all
from jcoll.ops.all_to_all_v import all_to_all_v as all_to_all_v
from jcoll.ops.barrier import barrier as barrier
from jcoll.ops.broadcast import broadcast as broadcast
from jcoll.ops.gather import gather as gather
from jcoll.ops.permute import ppermute as ppermute
from jcoll.ops.ragged_all_to_all import ragged_all_to_all as ragged_all_to_all
from jcoll.ops.reduce import reduce as reduce
from jcoll.ops.reduce_scatter import psum_scatter as psum_scatter
from jcoll.ops.reduce_scatter import reduce_scatter as reduce_scatter
from jcoll.ops.scatter import scatter as scatter
