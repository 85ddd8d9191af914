"""What the indexer operators accept."""

import torch

from ..contract import (
    ALIGNMENT_BYTES,
    check_contiguous,
    check_dtype,
    check_last_dim_contiguous,
    check_no_overlap,
    check_same_device,
    check_shape,
    checked_mode,
    is_fake,
    refuse_checks_under_capture,
    reject,
    reject_first_row,
)
from .pools import HEAD_DIM, POOL_TOKENS, TOKENS_PER_INDEX_PAGE, index_bytes

EXACT_DTYPES = (torch.float32, torch.bfloat16)
MAX_POOLS = 512
HEADS = (16, 32, 64)
# From so many rows on, a program of the selector takes several: they share the keys that they load.
MANY_ROWS = 64
MAX_ROWS_TOGETHER = 8
# From so many rows on, of all lists together, programs of that many keep each of an H200's 132 multiprocessors busy;
# with fewer rows, those of half as many do sooner. A constant, so that forms depend on sizes alone.
FULL_ROWS = 132 * MAX_ROWS_TOGETHER
# What a call keeps for each row and list while it scores: four times the pools, or four tiles.
_LEAST_KEPT = 512


def c4_select_workspace_bytes(rows: int, num_pools: int, lists: int = 1) -> int:
    """Bytes of scratch for `c4_select`: what a row's pools can be at once before the best of them are kept.

    Args:
        rows: query rows.
        num_pools: pools that a row selects, the last size of `candidates`.
        lists: the first size of `candidates`.
    """
    return 8 * lists * rows * kept_candidates(num_pools)


def kept_candidates(num_pools: int) -> int:
    """A power of two, four times the pools or more. With fewer, the best would have to be found more often."""
    return max(4 << (num_pools - 1).bit_length(), _LEAST_KEPT)


def check_c4_write_index_keys(
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
    op = "c4_write_index_keys"
    named = {"keys": keys, "gates": gates, "bias": bias, "row_starts": row_starts, "starts": starts}
    named |= {"ring_rows": ring_rows, "block_table": block_table}
    check_same_device(op, **named, ring=ring, pools=pools)
    check_dtype(op, "keys", keys, EXACT_DTYPES)
    if keys.dim() != 2 or keys.shape[1] != HEAD_DIM:
        reject(op, "keys", f"shape {list(keys.shape)}", f"shape [tokens, {HEAD_DIM}]")
    check_dtype(op, "gates", gates, (keys.dtype,))
    check_shape(op, "gates", gates, tuple(keys.shape), "those of keys")
    check_dtype(op, "bias", bias, (torch.float32,))
    check_shape(op, "bias", bias, (POOL_TOKENS, HEAD_DIM), "tokens of a pool, channels")
    requests = _check_requests(op, block_table, row_starts=row_starts, starts=starts, ring_rows=ring_rows)
    check_shape(op, "row_starts", row_starts, (requests + 1,), "requests + 1")
    for name in ("starts", "ring_rows"):
        check_shape(op, name, named[name], (requests,), "requests")
    for name in ("keys", "gates", "bias"):
        check_contiguous(op, name, named[name])
    if drafts < 0:
        reject(op, "drafts", drafts, "0 or more")
    _check_ring(op, ring, keys, drafts)
    _check_geometry(op, page_size, interleave, rank, world)
    check_pools(op, pools, page_size)
    check_no_overlap(op, {"ring": ring, "pools": pools}, named)
    if checked_mode() and not is_fake(keys):
        _check_write_data(op, keys, named, ring, page_size * world)


def check_c4_select(
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
    op = "c4_select"
    inputs = {"q": q, "weights": weights, "pools": pools, "block_table": block_table}
    inputs |= {"row_requests": row_requests, "positions": positions}
    check_same_device(op, **inputs, candidates=candidates, workspace=workspace)
    check_dtype(op, "q", q, (torch.uint8, *EXACT_DTYPES))
    if q.dim() != 3 or q.shape[2] != HEAD_DIM or q.shape[1] not in HEADS:
        reject(op, "q", f"shape {list(q.shape)}", f"shape [rows, {' or '.join(map(str, HEADS))} heads, {HEAD_DIM}]")
    rows, heads, _ = q.shape
    check_dtype(op, "weights", weights, (torch.float32,))
    check_shape(op, "weights", weights, (rows, heads), "rows, heads")
    _check_requests(op, block_table, row_requests=row_requests, positions=positions)
    check_shape(op, "row_requests", row_requests, (rows,), "rows")
    check_shape(op, "positions", positions, (rows,), "rows")
    _check_geometry(op, page_size, interleave, rank, world)
    check_dtype(op, "pools", pools, (q.dtype,))
    check_pools(op, pools, page_size)
    check_dtype(op, "candidates", candidates, (torch.int64,))
    if candidates.dim() != 3 or candidates.shape[1] != rows or not 1 <= candidates.shape[2] <= MAX_POOLS:
        allowed = f"shape [lists, {rows} rows, 1 to {MAX_POOLS} pools]"
        reject(op, "candidates", f"shape {list(candidates.shape)}", allowed)
    if candidates.shape[0] < 1:
        reject(op, "candidates", f"shape {list(candidates.shape)}", "at least one list")
    for name, tensor in (("q", q), ("weights", weights), ("candidates", candidates), ("workspace", workspace)):
        check_contiguous(op, name, tensor)
    check_dtype(op, "workspace", workspace, (torch.uint8,))
    least = c4_select_workspace_bytes(rows, candidates.shape[2], candidates.shape[0])
    if workspace.dim() != 1 or workspace.shape[0] < least:
        allowed = f"at least {least} bytes, c4_select_workspace_bytes(rows, num_pools, lists)"
        reject(op, "workspace", f"shape {list(workspace.shape)}", allowed)
    if not is_fake(workspace) and workspace.data_ptr() % ALIGNMENT_BYTES:
        reject(op, "workspace", "a misaligned first byte", f"storage aligned to {ALIGNMENT_BYTES} bytes")
    check_no_overlap(op, {"candidates": candidates, "workspace": workspace}, inputs)
    if checked_mode() and not is_fake(q):
        _check_select_data(op, block_table, row_requests, positions, page_size * world)


def check_c4_merge_pools(
    candidates: torch.Tensor, positions: torch.Tensor, topk: torch.Tensor, counts: torch.Tensor
) -> None:
    op = "c4_merge_pools"
    check_same_device(op, candidates=candidates, positions=positions, topk=topk, counts=counts)
    check_dtype(op, "candidates", candidates, (torch.int64,))
    if candidates.dim() != 3 or candidates.shape[0] < 1 or not 1 <= candidates.shape[2] <= MAX_POOLS:
        allowed = f"shape [lists >= 1, rows, 1 to {MAX_POOLS} pools]"
        reject(op, "candidates", f"shape {list(candidates.shape)}", allowed)
    _, rows, num_pools = candidates.shape
    for name, tensor in (("positions", positions), ("topk", topk), ("counts", counts)):
        check_dtype(op, name, tensor, (torch.int32,))
    check_shape(op, "positions", positions, (rows,), "rows")
    width = POOL_TOKENS * num_pools + POOL_TOKENS - 1
    check_shape(op, "topk", topk, (rows, width), "rows, 4 * pools + 3")
    check_shape(op, "counts", counts, (rows,), "rows")
    tensors = {"candidates": candidates, "positions": positions, "topk": topk, "counts": counts}
    for name, tensor in tensors.items():
        check_contiguous(op, name, tensor)
    check_no_overlap(op, {"topk": topk, "counts": counts}, {"candidates": candidates, "positions": positions})


def check_pools(op: str, pools: torch.Tensor, page_size: int) -> None:
    """Pages of pooled keys in the serving form (uint8) or the exact one, with any page stride."""
    check_dtype(op, "pools", pools, (torch.uint8, *EXACT_DTYPES))
    if page_size % TOKENS_PER_INDEX_PAGE:
        reject(op, "page_size", page_size, f"a multiple of {TOKENS_PER_INDEX_PAGE} tokens, an index page")
    shape = (index_bytes(page_size),) if pools.dtype == torch.uint8 else (page_size // POOL_TOKENS, HEAD_DIM)
    if pools.dim() != 1 + len(shape) or tuple(pools.shape[1:]) != shape:
        reject(op, "pools", f"shape {list(pools.shape)}", f"shape [pages, {', '.join(map(str, shape))}]")
    inner = 1
    for size, stride in zip(reversed(shape), reversed(pools.stride()[1:]), strict=True):
        if size > 1 and stride != inner:
            reject(op, "pools", f"strides {list(pools.stride())}", "pages that are contiguous, with any page stride")
        inner *= size
    if pools.shape[0] > 1 and (pools.stride(0) < inner or pools.stride(0) * pools.element_size() % ALIGNMENT_BYTES):
        allowed = f"a multiple of {ALIGNMENT_BYTES} bytes, no less than a page"
        reject(op, "pools", f"a page stride of {pools.stride(0)} elements", allowed)
    if not is_fake(pools) and pools.data_ptr() % ALIGNMENT_BYTES:
        reject(op, "pools", "a misaligned first byte", f"storage aligned to {ALIGNMENT_BYTES} bytes")


def _check_requests(op: str, block_table: torch.Tensor, **vectors: torch.Tensor) -> int:
    check_dtype(op, "block_table", block_table, (torch.int32,))
    if block_table.dim() != 2:
        reject(op, "block_table", f"shape {list(block_table.shape)}", "shape [requests, blocks]")
    check_last_dim_contiguous(op, "block_table", block_table)
    for name, vector in vectors.items():
        check_dtype(op, name, vector, (torch.int32,))
        if vector.dim() != 1:
            reject(op, name, f"shape {list(vector.shape)}", "a shape of 1 dimension")
        check_contiguous(op, name, vector)
    return block_table.shape[0]


def _check_geometry(op: str, page_size: int, interleave: int, rank: int, world: int) -> None:
    if world < 1 or not 0 <= rank < world:
        reject(op, "rank", f"{rank} of world {world}", "0 <= rank < world")
    if interleave < 1 or (world > 1 and interleave % POOL_TOKENS):
        reject(op, "interleave", interleave, f"a multiple of {POOL_TOKENS}, or a pool is split between ranks")
    if page_size < 1 or page_size % interleave or page_size % POOL_TOKENS:
        reject(op, "page_size", page_size, f"a multiple of the interleave {interleave} and of {POOL_TOKENS}")
    if page_size * world >= 2**31:
        reject(op, "page_size", page_size, "page_size * world below 2147483648")


def _check_ring(op: str, ring: torch.Tensor, keys: torch.Tensor, drafts: int) -> None:
    check_dtype(op, "ring", ring, (keys.dtype,))
    if ring.dim() != 4 or tuple(ring.shape[2:]) != (2, HEAD_DIM) or ring.shape[1] % POOL_TOKENS or not ring.shape[1]:
        allowed = f"shape [ring rows, a multiple of {POOL_TOKENS} slots, 2 (key, gate), {HEAD_DIM}]"
        reject(op, "ring", f"shape {list(ring.shape)}", allowed)
    if ring.shape[1] < drafts + POOL_TOKENS - 1:
        allowed = f"{drafts + POOL_TOKENS - 1} or more, or {drafts} rejected drafts would overwrite accepted tokens"
        reject(op, "ring", f"{ring.shape[1]} slots", allowed)
    check_contiguous(op, "ring", ring)


def _check_write_data(
    op: str, keys: torch.Tensor, named: dict[str, torch.Tensor], ring: torch.Tensor, page_tokens: int
) -> None:
    """Refuse values that would be skipped or misplaced. Reads the device."""
    if keys.is_cuda:
        refuse_checks_under_capture(op)
    for name in ("keys", "gates"):
        reject_first_row(op, name, ~named[name].isfinite(), named[name], "finite values")
    row_starts, starts, ring_rows = named["row_starts"], named["starts"], named["ring_rows"]
    bad = (row_starts < 0) | (row_starts > len(keys))
    bad[1:] |= row_starts[1:] < row_starts[:-1]
    reject_first_row(op, "row_starts", bad, row_starts, f"sums that do not fall, from 0 to {len(keys)}")
    reject_first_row(op, "ring_rows", (ring_rows < -1) | (ring_rows >= len(ring)), ring_rows, f"-1..{len(ring) - 1}")
    most = named["block_table"].shape[1] * page_tokens
    bad = (starts < 0) | (starts.long() + row_starts.long().diff() > most)
    allowed = f"0 or more, with all new tokens below {most}, what the block table holds"
    reject_first_row(op, "starts", bad & (ring_rows >= 0), starts, allowed)


def _check_select_data(
    op: str, block_table: torch.Tensor, row_requests: torch.Tensor, positions: torch.Tensor, page_tokens: int
) -> None:
    """Refuse rows of no request and positions beyond the block table. Reads the device."""
    if positions.is_cuda:
        refuse_checks_under_capture(op)
    requests, blocks = block_table.shape
    bad = (row_requests < -1) | (row_requests >= requests)
    reject_first_row(op, "row_requests", bad, row_requests, f"-1..{requests - 1}")
    most = blocks * page_tokens
    bad = (row_requests >= 0) & ((positions < -1) | (positions >= most))
    reject_first_row(op, "positions", bad, positions, f"-1 (a padded row) to {most - 1}, what the block table holds")
