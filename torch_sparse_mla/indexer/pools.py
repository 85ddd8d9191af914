"""Where a pooled key lies in a page, and how pools with scores are put in order.

Serving form, uint8 [pages, page_size / 256 * 8448]: index pages of 64 pools (256 tokens) each, 64 x 128 e4m3 codes and
then 64 fp32 scales. It may be the tail of a page of records, so that the page stride is free.
Exact form, float [pages, page_size / 4, 128]: the keys themselves.
In both a page holds whole index pages: its size is a multiple of 256 tokens.

A candidate is an int64 whose order is the order of selection, so that lists of them merge by comparing numbers: the
score in the upper 32 bits, mapped so that integers compare as the scores do; in the lower 32, `2**31 - 1 - pool`, so
that of two pools with equal scores the earlier one is larger. `ABSENT` is below every candidate.
"""

import torch

POOL_TOKENS = 4
HEAD_DIM = 128
POOLS_PER_INDEX_PAGE = 64
SCALE_BYTES = 4
INDEX_PAGE_BYTES = POOLS_PER_INDEX_PAGE * (HEAD_DIM + SCALE_BYTES)
TOKENS_PER_INDEX_PAGE = POOLS_PER_INDEX_PAGE * POOL_TOKENS
# Consecutive pools of one rank that are scored together, those of an index page; dealt out to the lists of a split call
# in turn.
TILE_POOLS = POOLS_PER_INDEX_PAGE
ABSENT = -(2**63)
MAX_POOL = 2**31 - 1
# Positions are int32, and so is the one behind the last.
MAX_POSITION = 2**31 - 1
_MAGNITUDE = 0x7FFFFFFF


def index_bytes(page_size: int) -> int:
    """Bytes of a page of `page_size` tokens in the serving form."""
    return page_size // TOKENS_PER_INDEX_PAGE * INDEX_PAGE_BYTES


def candidates_of(scores: torch.Tensor, pools: torch.Tensor) -> torch.Tensor:
    """int64 candidates from float32 scores and pool numbers. A NaN counts as the lowest score, -0.0 as 0.0."""
    scores = torch.where(scores.isnan(), float("-inf"), scores) + 0.0
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _MAGNITUDE, bits).long()
    return (ordered << 32) | (MAX_POOL - pools.long())


def pools_of(candidates: torch.Tensor) -> torch.Tensor:
    """Pool numbers of candidates, int64; -1 for `ABSENT`."""
    return torch.where(candidates == ABSENT, -1, MAX_POOL - (candidates & _MAGNITUDE))


def scores_of(candidates: torch.Tensor) -> torch.Tensor:
    """float32 scores of candidates; -inf for `ABSENT`."""
    ordered = (candidates >> 32).int()
    scores = torch.where(ordered < 0, ordered ^ _MAGNITUDE, ordered).view(torch.float32)
    return torch.where(candidates == ABSENT, float("-inf"), scores)


def pools_of_lists(topk: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """int32 [rows, pools]: the pool numbers that top-k lists were made of, -1 behind them.

    Args:
        topk, counts: as `c4_merge_pools` writes them, [rows, 4 * pools + 3] and [rows].
    """
    num_pools = topk.shape[1] // POOL_TOKENS
    # The tail is shorter than a pool, and lies behind all of them.
    present = torch.arange(num_pools, device=topk.device) < (counts // POOL_TOKENS)[:, None]
    return torch.where(present, topk[:, : num_pools * POOL_TOKENS : POOL_TOKENS] // POOL_TOKENS, -1).int()


def ranked_candidates(pools: torch.Tensor) -> torch.Tensor:
    """int64 candidates in the order of lists of pool numbers, int32 [rows, pools]: places stand in for scores."""
    places = torch.arange(pools.shape[1], 0, -1, device=pools.device)
    return torch.where(pools >= 0, (places << 32) | (MAX_POOL - pools.long()), ABSENT)
