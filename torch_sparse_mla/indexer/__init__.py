"""The C4 indexer: four tokens' index keys are pooled into one; the pools with the best scores are expanded to tokens.

takes: index keys and gates of new tokens, index queries. gives: pooled keys in pages, top-k lists of global positions.
Terms: a *pool* is four consecutive tokens `4 j .. 4 j + 3` of a request; the *tail* are the tokens after the last whole
pool; a *candidate* is a pool with its score, as one number.
Reading order: pools (layout of a page, order of candidates) -> codec (Hadamard, e4m3) -> contract -> reference ->
triton_kernels, triton_kernels_select -> api -> row_split, split_selector (rows split by rank).
"""

from .codec import exact_index_queries, quantise_index_queries
from .pools import POOL_TOKENS

__all__ = ["POOL_TOKENS", "exact_index_queries", "quantise_index_queries"]
