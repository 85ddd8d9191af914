"""CPU implementations of the indexer operators, in plain PyTorch."""

import torch

from ..sharding import global_position, local_length, local_position, owner
from . import contract
from .codec import decode_index_page, hadamard, quantise
from .pools import (
    ABSENT,
    HEAD_DIM,
    INDEX_PAGE_BYTES,
    MAX_POSITION,
    POOL_TOKENS,
    POOLS_PER_INDEX_PAGE,
    TILE_POOLS,
    candidates_of,
    pools_of,
)


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
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
    drafts: int = 0,
) -> None:
    contract.check_c4_write_index_keys(
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
    slots = ring.shape[1]
    edges = row_starts.long().clamp(0, len(keys)).tolist()
    for request, (start, ring_row) in enumerate(zip(starts.tolist(), ring_rows.tolist(), strict=True)):
        begin, end = edges[request], edges[request + 1]
        if end <= begin or not 0 <= start <= MAX_POSITION - (end - begin) or not 0 <= ring_row < len(ring):
            continue
        first = start // POOL_TOKENS * POOL_TOKENS
        before = torch.arange(first, start) % slots
        states = torch.stack([keys[begin:end], gates[begin:end]], 1)
        states = torch.cat([ring[ring_row, before], states])
        whole = len(states) // POOL_TOKENS
        pooled = _pool(states[: whole * POOL_TOKENS].float().unflatten(0, (whole, POOL_TOKENS)), bias)
        _store(pools, pooled, first // POOL_TOKENS, block_table[request], page_size, interleave, rank, world)
        # Of several tokens with one slot the last one stays.
        kept = torch.arange(max(start, start + end - begin - slots), start + end - begin)
        ring[ring_row, kept % slots] = states[kept - first]


def c4_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    pools: torch.Tensor,
    block_table: torch.Tensor,
    row_requests: torch.Tensor,
    positions: torch.Tensor,
    candidates: torch.Tensor,
    workspace: torch.Tensor,
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
) -> None:
    contract.check_c4_select(
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
    lists, _, num_pools = candidates.shape
    candidates.fill_(ABSENT)
    # In float64, rounded once: a score has the same bits beside any other pools, so that merges are exact.
    queries = q.view(torch.float8_e4m3fn).double() if q.dtype == torch.uint8 else q.double()
    visible = _local_pools(positions.long(), rank, world, interleave)
    for request in row_requests.unique().tolist():
        rows = (row_requests == request).nonzero().flatten()
        most = int(visible[rows].max())
        if not 0 <= request < len(block_table) or most <= 0:
            continue
        keys, present = _load(pools, most, block_table[request], page_size)
        numbers = global_position(rank, torch.arange(len(keys)) * POOL_TOKENS, world, interleave) // POOL_TOKENS
        for row in rows.tolist():
            count = min(int(visible[row]), len(keys))
            products = torch.relu(queries[row] @ keys[:count].double().T)
            scored = candidates_of((weights[row, :, None] * products).sum(0).float(), numbers[:count])
            scored = torch.where(present[:count], scored, ABSENT)
            for number in range(lists):
                mine = scored[torch.arange(count) // TILE_POOLS % lists == number]
                best = mine.sort(descending=True).values[:num_pools]
                candidates[number, row, : len(best)] = best


def c4_merge_pools(candidates: torch.Tensor, positions: torch.Tensor, topk: torch.Tensor, counts: torch.Tensor) -> None:
    contract.check_c4_merge_pools(candidates, positions, topk, counts)
    lists, rows, num_pools = candidates.shape
    together = candidates.transpose(0, 1).reshape(rows, lists * num_pools)
    best = together.sort(1, descending=True).values[:, :num_pools]
    selected = pools_of(best)
    tokens = (selected.unsqueeze(2) * POOL_TOKENS + torch.arange(POOL_TOKENS)).flatten(1)
    history = POOL_TOKENS * (selected >= 0).sum(1)
    positions = positions.long().clamp(min=-1)
    tail = (positions + 1) % POOL_TOKENS
    column = torch.arange(topk.shape[1]).expand(rows, -1)
    tokens = torch.nn.functional.pad(tokens, (0, POOL_TOKENS - 1), value=-1)
    in_tail = (column >= history[:, None]) & (column < (history + tail)[:, None])
    tail_tokens = (positions + 1 - tail)[:, None] + column - history[:, None]
    topk.copy_(torch.where(column < history[:, None], tokens, torch.where(in_tail, tail_tokens, -1)))
    counts.copy_(history + tail)


def _pool(states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[pools, 128] from the keys and gates of whole pools, [pools, 4, 2, 128]."""
    return (torch.softmax(states[:, :, 1] + bias, 1) * states[:, :, 0]).sum(1)


def _store(
    pools: torch.Tensor,
    pooled: torch.Tensor,
    first: int,
    block_table: torch.Tensor,
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
) -> None:
    """Write pools `first` and the following ones, those that this rank owns and has a page for."""
    tokens = (first + torch.arange(len(pooled))) * POOL_TOKENS
    mine = owner(tokens, world, interleave) == rank
    local = local_position(tokens[mine], world, interleave) // POOL_TOKENS
    pages, inside = _pages(local, block_table, page_size, len(pools))
    local, pages, keys = local[inside] % (page_size // POOL_TOKENS), pages[inside], pooled[mine][inside]
    if pools.dtype != torch.uint8:
        pools[pages, local] = keys.to(pools.dtype)
        return
    codes, scales = quantise(hadamard(keys.bfloat16()))
    place = local % POOLS_PER_INDEX_PAGE
    index_page = local // POOLS_PER_INDEX_PAGE * INDEX_PAGE_BYTES
    pools[pages[:, None], (index_page + place * HEAD_DIM)[:, None] + torch.arange(HEAD_DIM)] = codes
    scale_at = index_page + POOLS_PER_INDEX_PAGE * HEAD_DIM + place * 4
    pools[pages[:, None], scale_at[:, None] + torch.arange(4)] = scales.unsqueeze(1).view(torch.uint8)


def _load(
    pools: torch.Tensor, count: int, block_table: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [count, 128] keys of a request's first local pools, and which of them have a page."""
    per_page = page_size // POOL_TOKENS
    count = min(count, per_page * len(block_table))
    pages, present = _pages(torch.arange(-(-count // per_page)) * per_page, block_table, page_size, len(pools))
    taken = pools[pages] if len(pools) else pools.new_zeros(len(pages), *pools.shape[1:])
    if pools.dtype == torch.uint8:
        taken = decode_index_page(taken.unflatten(1, (-1, INDEX_PAGE_BYTES)))
    keys = taken.reshape(-1, HEAD_DIM)[:count].float()
    return keys, present.repeat_interleave(per_page)[:count]


def _pages(
    local: torch.Tensor, block_table: torch.Tensor, page_size: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of local pools, 0 where there is none, and where there is one."""
    block = local // (page_size // POOL_TOKENS)
    inside = block < len(block_table)
    pages = block_table.long()[torch.where(inside, block, 0)] if len(block_table) else torch.zeros_like(local)
    inside = inside & (pages >= 0) & (pages < num_pages)
    return torch.where(inside, pages, 0), inside


def _local_pools(positions: torch.Tensor, rank: int, world: int, interleave: int) -> torch.Tensor:
    """How many of this rank's pools a query at each position sees: those whose last token is no later."""
    whole = (positions.clamp(min=-1) + 1) // POOL_TOKENS * POOL_TOKENS
    return local_length(rank, whole, world, interleave) // POOL_TOKENS
