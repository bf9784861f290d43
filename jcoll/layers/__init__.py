"""Parts of parallel training loops, made of collectives."""

from jcoll.layers import sharded_state as sharded_state
from jcoll.layers import zero as zero
from jcoll.layers.accumulation import accumulate_gradients as accumulate_gradients
from jcoll.layers.attention import blockwise_attention as blockwise_attention
from jcoll.layers.clip import clip_by_global_norm as clip_by_global_norm
from jcoll.layers.clip import global_norm as global_norm
from jcoll.layers.collective_matmul import all_gather_matmul as all_gather_matmul
from jcoll.layers.collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
from jcoll.layers.context_parallel import all_gather_attention as all_gather_attention
from jcoll.layers.context_parallel import ring_attention as ring_attention
from jcoll.layers.context_parallel import ulysses_attention as ulysses_attention
from jcoll.layers.data_parallel import sync_gradients as sync_gradients
from jcoll.layers.data_parallel import sync_in_backward as sync_in_backward
from jcoll.layers.expert_dispatch import Dispatch as Dispatch
from jcoll.layers.expert_dispatch import combine_from_experts as combine_from_experts
from jcoll.layers.expert_dispatch import dispatch_to_experts as dispatch_to_experts
from jcoll.layers.expert_parallel import MoeAux as MoeAux
from jcoll.layers.expert_parallel import moe_layer as moe_layer
from jcoll.layers.finite import FiniteReport as FiniteReport
from jcoll.layers.finite import check_finite as check_finite
from jcoll.layers.finite import finite_probes as finite_probes
from jcoll.layers.finite import report_finite as report_finite
from jcoll.layers.finite import watch_finite as watch_finite
from jcoll.layers.grouped_mlp import grouped_mlp as grouped_mlp
from jcoll.layers.layout import Layout as Layout
from jcoll.layers.router import Routing as Routing
from jcoll.layers.router import top_k_router as top_k_router
from jcoll.layers.sequence_placement import from_zigzag as from_zigzag
from jcoll.layers.sequence_placement import positions_of as positions_of
from jcoll.layers.sequence_placement import to_zigzag as to_zigzag
from jcoll.layers.tensor_parallel import column_parallel as column_parallel
from jcoll.layers.tensor_parallel import row_parallel as row_parallel
from jcoll.layers.vocab_parallel import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from jcoll.layers.vocab_parallel import vocab_parallel_embedding as vocab_parallel_embedding

__all__ = [
    "Dispatch",
    "FiniteReport",
    "Layout",
    "MoeAux",
    "Routing",
    "accumulate_gradients",
    "all_gather_attention",
    "all_gather_matmul",
    "blockwise_attention",
    "check_finite",
    "clip_by_global_norm",
    "column_parallel",
    "combine_from_experts",
    "dispatch_to_experts",
    "finite_probes",
    "from_zigzag",
    "global_norm",
    "grouped_mlp",
    "matmul_reduce_scatter",
    "moe_layer",
    "positions_of",
    "report_finite",
    "ring_attention",
    "row_parallel",
    "sharded_state",
    "sync_gradients",
    "sync_in_backward",
    "to_zigzag",
    "top_k_router",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "watch_finite",
    "zero",
]
