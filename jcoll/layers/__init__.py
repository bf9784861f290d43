"""Parts of parallel training loops, made of collectives."""

from jcoll.layers.data_parallel import sync_gradients as sync_gradients

__all__ = ["sync_gradients"]
