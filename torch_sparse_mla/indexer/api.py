"""Public functions of the indexer family."""

import torch

from .. import _ops  # noqa: F401  (registers the operators)
from ..contract import refuse_gradients, reject
from .contract import FULL_ROWS, MANY_ROWS, c4_select_workspace_bytes
from .pools import HEAD_DIM, POOL_TOKENS


def c4_write_index_keys(
    keys: torch.Tensor,
    gates: torch.Tensor,
    bias: torch.Tensor,
    row_starts: torch.Tensor,
    starts: torch.Tensor,
    ring_rows: torch.Tensor,
    block_table: torch.Tensor,
    ring: torch.Tensor,
    pools: torch.Tensor,
    *,
    page_size: int,
    interleave: int = 1,
    rank: int = 0,
    world: int = 1,
    drafts: int = 0,
) -> None:
    """Pool the index keys of new tokens, four by four, and write the pools that this rank owns.

    Key of a pool: for each channel, softmax over its four tokens of (gate + bias) weights the four keys. Tokens of a
    pool that is not whole yet wait in the request's ring. Every token of a call is also in the ring afterwards, as far
    as it has slots, so a call may begin again at an earlier token: after rejected drafts, with the token that follows
    the last accepted one.

    Args:
        keys, gates: [tokens, 128] bfloat16 or float32, contiguous; new tokens, request by request. The same on every
            rank.
        bias: [4, 128] float32: by place in the pool.
        row_starts: [requests + 1] int32: where each request's tokens begin; the last one where they end.
        starts: [requests] int32: the position of each request's first token of this call. Where it is no multiple of 4,
            the ring must hold the tokens before it: a prefix hit ends with a whole pool.
        ring_rows: [requests] int32: the row of `ring`; -1 is a padded request, of which nothing is written.
        block_table: [requests, blocks] int32 page numbers, the same on every rank; row stride free.
        ring: [ring rows, slots, 2, 128] in the dtype of keys: the key and the gate of the token at position p in slot
            `p % slots`. Slots are a multiple of 4, and `drafts + 3` or more.
        pools: uint8 [pages, page_size / 256 * 8448] (serving form: bfloat16, Hadamard transform, bfloat16, e4m3 with
            one power-of-two scale), or float32 or bfloat16 [pages, page_size / 4, 128] (exact form). Page stride free.
        page_size: tokens in a page of this rank, a multiple of 256 (64 pools).
        interleave, rank, world: the DCP geometry; the interleave is a multiple of 4 where there are several ranks.
        drafts: the most tokens at the end of a request's part that may be rejected later.
    Raises: ValueError for an argument that does not fit. Nothing is written then.
    Capture: safe; contents may change between replays. Ranks: each by itself. A rejected draft's pool stays in its page
        until the pool is written again; no query sees it before.
    """
    refuse_gradients("c4_write_index_keys", keys=keys, gates=gates, bias=bias)
    torch.ops.torch_sparse_mla.c4_write_index_keys(
        keys,
        gates,
        bias,
        row_starts,
        starts,
        ring_rows,
        block_table,
        ring,
        pools,
        page_size,
        interleave,
        rank,
        world,
        drafts,
    )


def c4_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    pools: torch.Tensor,
    block_table: torch.Tensor,
    row_requests: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_pools: int,
    page_size: int,
    interleave: int = 1,
    rank: int = 0,
    world: int = 1,
    lists: int = 1,
    candidates: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best of this rank's pools for each row, by `sum over heads of weight * relu(query . key)`.

    A pool is seen by a query at position p if its last token is: `4 j + 3 <= p`. Of equal scores the earlier pool is
    better. `c4_merge_pools` makes top-k lists of tokens of the result, of one rank or of all.

    On GPUs of one kind a pool's score for a row has the same bits in every call: whatever other rows there are and how
    many, however pools are dealt out to lists and ranks. On the CPU, and on another kind of GPU, the last bits differ.

    Args:
        q, weights: queries and head weights as `quantise_index_queries` gives them for pools in the serving form, or
            `exact_index_queries` for the exact form: uint8 or the dtype of pools [rows, 16, 32 or 64 heads, 128], and
            float32 [rows, heads]; contiguous. The same on every rank.
        pools: what `c4_write_index_keys` wrote.
        block_table: [requests, blocks] int32 page numbers; row stride free.
        row_requests: [rows] int32: the request of each row, -1 for a padded row. Rows of a request that lie together
            share its keys.
        positions: [rows] int32 global positions of the rows' own tokens; -1 for a padded row.
        num_pools: pools that a row selects, 1 to 512 (512 for a top-k of 2048).
        page_size, interleave, rank, world: as for `c4_write_index_keys`.
        lists: lists that a row's pools are dealt out to, 64 by turns, each with its own best; more than one lets few
            rows fill a GPU.
        candidates: [lists, rows, num_pools] int64, contiguous; overwritten with the best of each list, the best first:
            numbers that are compared as they are, see `indexer.pools`. Allocated when None.
        workspace: uint8 [c4_select_workspace_bytes(rows, num_pools, lists)] or more, 16-byte aligned; scratch.
            Allocated when None.
    Returns: candidates.
    Raises: ValueError for an argument that does not fit. Nothing is written then.
    Capture: safe when candidates and workspace are given; contents may change between replays. Ranks: each by itself.
    """
    refuse_gradients("c4_select", q=q, weights=weights, pools=pools)
    if q.dim() != 3:
        reject("c4_select", "q", f"shape {list(q.shape)}", "shape [rows, heads, 128]")
    for name, value in (("num_pools", num_pools), ("lists", lists)):
        if not isinstance(value, int | torch.SymInt) or value < 1:
            reject("c4_select", name, repr(value), "an integer, 1 or more")
    rows = q.shape[0]
    if candidates is None:
        candidates = torch.empty(lists, rows, num_pools, dtype=torch.int64, device=q.device)
    if candidates.dim() != 3 or candidates.shape[2] != num_pools or candidates.shape[0] != lists:
        allowed = f"shape [{lists}, rows, {num_pools}], those of lists and num_pools"
        reject("c4_select", "candidates", f"shape {list(candidates.shape)}", allowed)
    if workspace is None:
        needed = c4_select_workspace_bytes(rows, num_pools, lists)
        workspace = torch.empty(needed, dtype=torch.uint8, device=q.device)
    torch.ops.torch_sparse_mla.c4_select(
        q,
        weights,
        pools,
        block_table,
        row_requests,
        positions,
        candidates,
        workspace,
        page_size,
        interleave,
        rank,
        world,
    )
    return candidates


def c4_merge_pools(
    candidates: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k lists of tokens: the best pools of all lists, four tokens each, and the row's tail behind them.

    The merge is exact: lists of several ranks, or of a split call, give what one list of all pools would.

    Args:
        candidates: [lists, rows, pools] int64, each list of a row with its best first, as `c4_select` writes them;
            those of several ranks, and of several lists of a rank, one behind the other.
        positions: [rows] int32, as given to `c4_select`.
        topk: [rows, 4 * pools + 3] int32, contiguous; overwritten: the tokens of the best pools, the best first and
            ascending in each; then the tokens after the last whole pool up to the row's own, always; then -1.
            Allocated when None.
        counts: [rows] int32; overwritten with the number of tokens. Allocated when None.
    Returns: (topk, counts).
    Raises: ValueError for an argument that does not fit. Nothing is written then.
    Capture: safe when topk and counts are given. Ranks: each by itself; equal candidates give equal lists.
    """
    if candidates.dim() != 3:
        reject("c4_merge_pools", "candidates", f"shape {list(candidates.shape)}", "shape [lists, rows, pools]")
    rows, num_pools = candidates.shape[1:]
    if topk is None:
        width = POOL_TOKENS * num_pools + POOL_TOKENS - 1
        topk = torch.empty(rows, width, dtype=torch.int32, device=candidates.device)
    if counts is None:
        counts = torch.empty(rows, dtype=torch.int32, device=candidates.device)
    torch.ops.torch_sparse_mla.c4_merge_pools(candidates, positions, topk, counts)
    return topk, counts


def warmup_c4_indexer(
    pools: torch.Tensor,
    *,
    heads: int,
    num_pools: int,
    page_size: int,
    interleave: int = 1,
    rank: int = 0,
    world: int = 1,
    keys_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compile what the indexer's operators launch, for any number of rows. Writes nothing into `pools`.

    Args:
        pools, page_size, interleave, rank, world: as for `c4_select`.
        heads, num_pools: of the queries, and that a row selects.
        keys_dtype: of the keys that `c4_write_index_keys` takes.
    Raises: ValueError for an argument that does not fit.
    Capture: before. Ranks: each by itself.
    """
    geometry = {"page_size": page_size, "interleave": interleave, "rank": rank, "world": world}
    table = torch.zeros(1, 1, dtype=torch.int32, device=pools.device)
    for rows in (1, MANY_ROWS, FULL_ROWS):
        q = torch.zeros(rows, heads, HEAD_DIM, dtype=pools.dtype, device=pools.device)
        weights = torch.zeros(rows, heads, dtype=torch.float32, device=pools.device)
        padded = torch.full((rows,), -1, dtype=torch.int32, device=pools.device)
        candidates = c4_select(q, weights, pools, table, padded, padded, num_pools=num_pools, **geometry)
        c4_merge_pools(candidates, padded)
    keys = torch.zeros(1, HEAD_DIM, dtype=keys_dtype, device=pools.device)
    bias = torch.zeros(POOL_TOKENS, HEAD_DIM, dtype=torch.float32, device=pools.device)
    edges = torch.tensor([0, 1], dtype=torch.int32, device=pools.device)
    ring = torch.zeros(1, POOL_TOKENS, 2, HEAD_DIM, dtype=keys_dtype, device=pools.device)
    c4_write_index_keys(keys, keys, bias, edges, table[0], padded[:1], table, ring, pools, **geometry)
