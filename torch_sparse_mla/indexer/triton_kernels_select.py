"""CUDA implementation of `c4_select` in Triton.

`_select_pools_kernel`, a program for each few rows and each list: scores one tile of pools after another and keeps, for
each row, the candidates above the row's threshold. They are appended to a buffer of `kept_candidates` in the
workspace; when it could overflow, it is sorted, the best are kept, and the least of them is the new threshold. So a
row's scores are computed once and never stored but for these. A candidate's place in the buffer depends on the order
of tiles, the result does not: candidates are distinct numbers.
"""

import torch
import triton
import triton.language as tl

from ..records.triton_codec import decode_e4m3
from ..triton_launch import AotConfiguration, AotConfigurations, capability_of, on_device
from . import pools as layout
from .contract import MANY_ROWS, check_c4_select, kept_candidates

MAX_HEADS_TOGETHER = 128
# Candidates that a program sorts at once: more would not fit into registers.
MAX_SORTED = 4096

POOL = tl.constexpr(layout.POOL_TOKENS)
DIM = tl.constexpr(layout.HEAD_DIM)
INDEX_PAGE_POOLS = tl.constexpr(layout.POOLS_PER_INDEX_PAGE)
INDEX_PAGE_BYTES = tl.constexpr(layout.INDEX_PAGE_BYTES)
TILE = tl.constexpr(layout.TILE_POOLS)
ABSENT = tl.constexpr(layout.ABSENT)
MAX_POOL = tl.constexpr(layout.MAX_POOL)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Of float32 keys, at once.
CHANNELS = tl.constexpr(16)


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
    check_c4_select(
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
    rows, heads, _ = q.shape
    if not rows:
        return
    lists, _, num_pools = candidates.shape
    requests, blocks = block_table.shape
    form = select_form(q.dtype, rows, heads, num_pools, capability_of(q.device))
    with on_device(q):
        _select_pools_kernel[(triton.cdiv(rows, form["ROWS"]), lists)](
            q,
            weights,
            pools,
            block_table,
            row_requests,
            positions,
            candidates,
            workspace,
            rows,
            num_pools,
            requests,
            blocks,
            len(pools),
            block_table.stride(0),
            pools.stride(0) * pools.element_size() // 16,
            rank,
            WORLD=world,
            INTERLEAVE=interleave,
            PAGE_SIZE=page_size,
            **form,
        )


def select_form(dtype: torch.dtype, rows: int, heads: int, num_pools: int, capability: int) -> dict[str, int]:
    """Constants and options of `_select_pools_kernel`: of static sizes alone."""
    kept, native = kept_candidates(num_pools), capability >= 89
    # Keys pass through registers where they are decoded, multiplied in parts, or the tensor cores take them from there.
    is_decoded = dtype == torch.uint8 and not native
    share = rows >= MANY_ROWS and dtype != torch.float32 and not is_decoded
    most = MAX_HEADS_TOGETHER if dtype == torch.uint8 else MAX_HEADS_TOGETHER // 2
    together = min(most // heads, MAX_SORTED // kept) if share else 1
    few = together == 1 and dtype != torch.float32 and capability >= 89
    warps = 16 if is_decoded else 4 if few else 8
    # Told a limit, ptxas does not spill below it.
    options = {"num_warps": warps, "num_stages": 2, "maxnreg": 128 if warps == 16 else 255}
    return {"HEADS": heads, "ROWS": together, "KEPT": kept, "NATIVE": native, **options}


# Sizes are not specialised on their values, so nothing is compiled when a batch of another size first comes.
SELECT_SIZES = [
    "rows",
    "num_pools",
    "num_requests",
    "num_blocks",
    "num_pages",
    "block_table_stride",
    "page_stride_16",
    "rank",
]
UNALIGNED = ["block_table_ptr", "row_requests_ptr", "positions_ptr"]


@triton.jit(do_not_specialize=SELECT_SIZES, do_not_specialize_on_alignment=UNALIGNED)
def _select_pools_kernel(
    q_ptr,
    weights_ptr,
    pools_ptr,
    block_table_ptr,
    row_requests_ptr,
    positions_ptr,
    candidates_ptr,
    workspace_ptr,
    rows: tl.int32,
    num_pools: tl.int32,
    num_requests: tl.int32,
    num_blocks: tl.int32,
    num_pages: tl.int32,
    block_table_stride: tl.int64,
    page_stride_16: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.load(row_requests_ptr + row, mask=row < rows, other=-1)
    position = tl.load(positions_ptr + row, mask=row < rows, other=-1)
    live = (request >= 0) & (request < num_requests) & (position >= 0)
    # A padded row sees nothing; a block table too short hides what lies behind it.
    visible = tl.where(live, _local_pools(position, rank, WORLD, INTERLEAVE), 0)
    visible = tl.minimum(visible.to(tl.int64), num_blocks.to(tl.int64) * (PAGE_SIZE // POOL)).to(tl.int32)
    queries, weights = _load_queries(q_ptr, weights_ptr, rows, HEADS, ROWS, NATIVE)
    list_row = tl.program_id(1).to(tl.int64) * rows + row
    kept_ptr = workspace_ptr.to(tl.pointer_type(tl.int64)) + list_row * KEPT
    count = tl.zeros([ROWS], tl.int32)
    threshold = tl.full([ROWS], ABSENT, tl.int64)
    # One more turn, without any pool, sorts what is left: a second sort would double the code.
    last = tl.max(tl.where(live, request, -1))
    for current in range(tl.min(tl.where(live, request, last + 1)), last + 2):
        mine = tl.where(live & (request == current), visible, 0)
        table_ptr = block_table_ptr + block_table_stride * current
        most = tl.max(mine)
        begin = tl.where(current > last, 0, tl.program_id(1) * TILE)
        for first in range(begin, tl.where(current > last, 1, most), tl.num_programs(1) * TILE):
            at, present = _places(table_ptr, first, most, num_pages, page_stride_16, pools_ptr, PAGE_SIZE)
            if pools_ptr.dtype.element_ty == tl.float32:
                products = _exact_products(q_ptr, rows * HEADS, pools_ptr + at, present, ROWS * HEADS)
                scale = tl.full([TILE], 1.0, tl.float32)
            else:
                keys, scale = _load_keys(pools_ptr, at, present, NATIVE)
                products = tl.dot(keys, tl.trans(queries))
            # As `relu` does; a score that is no number then counts as the lowest.
            weighted = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
            scores = tl.sum(tl.reshape(weighted, [TILE, ROWS, HEADS]), 2) * scale[:, None]
            pool = first + tl.arange(0, TILE)
            candidate = _candidates(scores, _global_pool(pool, rank, WORLD, INTERLEAVE))
            keep = present[:, None] & (pool[:, None] < mine[None, :]) & (candidate > threshold[None, :])
            place = count[None, :] + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(kept_ptr[None, :] + place, candidate, mask=keep)
            count += tl.sum(keep.to(tl.int32), 0)
            if (tl.max(count) > KEPT - TILE) | (current > last):
                best = _sorted(kept_ptr, count, KEPT)
                column = tl.arange(0, KEPT)[None, :]
                stored = (row < rows)[:, None] & (column < num_pools)
                # Behind the last row lies what another list keeps.
                tl.store(kept_ptr[:, None] + column, best, mask=stored)
                if current > last:
                    tl.store(candidates_ptr + list_row[:, None] * num_pools + column, best, mask=stored)
                threshold = tl.max(tl.where(column == num_pools - 1, best, ABSENT), 1)
                count = tl.minimum(count, num_pools)


@triton.jit
def _load_queries(q_ptr, weights_ptr, rows, HEADS: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    head = tl.program_id(0).to(tl.int64) * (ROWS * HEADS) + tl.arange(0, ROWS * HEADS)
    live = head < rows.to(tl.int64) * HEADS
    queries = tl.load(q_ptr + head[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=live[:, None], other=0)
    return _decoded(queries, NATIVE), tl.load(weights_ptr + head, mask=live, other=0.0)


@triton.jit
def _places(table_ptr, first, most, num_pages, page_stride_16, pools_ptr, PAGE_SIZE: tl.constexpr):
    """Where the keys of a tile of pools lie, in elements, and which pools have a page.

    A page holds whole index pages, so that half a tile lies in one index page and has one address.
    """
    # A scalar also where the interpreter counts loops with Python's numbers.
    first = tl.full((), 0, tl.int32) + first
    pool = tl.arange(0, TILE)
    lower, has_lower = _index_page(table_ptr, first, most, num_pages, page_stride_16, pools_ptr, PAGE_SIZE)
    middle = first + INDEX_PAGE_POOLS
    upper, has_upper = _index_page(table_ptr, middle, most, num_pages, page_stride_16, pools_ptr, PAGE_SIZE)
    is_lower = pool < INDEX_PAGE_POOLS
    at = tl.where(is_lower, lower, upper) + pool % INDEX_PAGE_POOLS * DIM
    return at, (is_lower & has_lower) | ((pool >= INDEX_PAGE_POOLS) & has_upper)


@triton.jit
def _index_page(table_ptr, pool, most, num_pages, page_stride_16, pools_ptr, PAGE_SIZE: tl.constexpr):
    """Where the 64 keys from `pool` on begin, in elements, and whether they have a page."""
    per_page: tl.constexpr = PAGE_SIZE // POOL
    page = tl.load(table_ptr + pool // per_page, mask=pool < most, other=-1)
    # The factor of 16 tells the compiler that pages are aligned, so that it emits wide loads.
    begin = page.to(tl.int64) * page_stride_16 * (128 // pools_ptr.dtype.element_ty.primitive_bitwidth)
    if pools_ptr.dtype.element_ty == tl.uint8:
        begin += pool % per_page // INDEX_PAGE_POOLS * INDEX_PAGE_BYTES
    else:
        begin += pool % per_page * DIM
    return begin, (page >= 0) & (page < num_pages)


@triton.jit
def _load_keys(pools_ptr, at, present, NATIVE: tl.constexpr):
    """Keys [tile, 128] as the dot product takes them, and their scales."""
    keys = tl.load((pools_ptr + at)[:, None] + tl.arange(0, DIM)[None, :], mask=present[:, None], other=0)
    if pools_ptr.dtype.element_ty == tl.uint8:
        place = tl.arange(0, TILE) % INDEX_PAGE_POOLS
        scale_at = at - place * DIM + (INDEX_PAGE_POOLS * DIM + place * 4)
        scale = tl.load((pools_ptr + scale_at).to(tl.pointer_type(tl.float32)), mask=present, other=0.0)
    else:
        scale = tl.full([TILE], 1.0, tl.float32)
    return _decoded(keys, NATIVE), scale


@triton.jit
def _exact_products(q_ptr, num_heads, keys_ptr, present, HEADS: tl.constexpr):
    """float32 keys times float32 queries, a few channels at a time: whole ones do not fit into registers. Three
    products of tf32 parts lose nothing that a float32 sum would keep."""
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, CHANNELS)[None, :]
    products = tl.zeros([TILE, HEADS], tl.float32)
    for first in range(0, DIM, CHANNELS):
        offsets = head.to(tl.int64)[:, None] * DIM + first + channel
        queries = tl.load(q_ptr + offsets, mask=(head < num_heads)[:, None], other=0.0)
        keys = tl.load(keys_ptr[:, None] + first + channel, mask=present[:, None], other=0.0)
        products = tl.dot(keys, tl.trans(queries), products, input_precision="tf32x3")
    return products


@triton.jit
def _decoded(values, NATIVE: tl.constexpr):
    """e4m3 codes as what tensor cores multiply; other numbers as they are."""
    if values.dtype == tl.uint8:
        if NATIVE:
            return values.to(tl.float8e4nv, bitcast=True)
        else:
            return decode_e4m3(values, tl.float16, False)
    else:
        return values


@triton.jit
def _candidates(scores, pool):
    """int64 numbers in the order of selection: see `pools`."""
    scores = tl.where(scores == scores, scores, float("-inf")) + 0.0
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ MAGNITUDE, bits).to(tl.int64)
    # All bits of a pool number turned over are MAX_POOL less it.
    return (ordered << 32) | (pool ^ MAX_POOL).to(tl.int64)[:, None]


@triton.jit
def _sorted(kept_ptr, count, KEPT: tl.constexpr):
    """[rows, KEPT]: what was kept, the largest first, `ABSENT` behind it. Other threads stored it and will store."""
    tl.debug_barrier()
    column = tl.arange(0, KEPT)[None, :]
    values = tl.load(kept_ptr[:, None] + column, mask=column < count[:, None], other=ABSENT, cache_modifier=".cg")
    tl.debug_barrier()
    return tl.sort(values, descending=True)


@triton.jit
def _local_pools(position, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """How many of a rank's pools end at a position or before."""
    # Before the sum, which could overflow: a position of 2**31 - 1 ends a pool.
    whole = position // POOL + (position % POOL == POOL - 1).to(tl.int32)
    if WORLD == 1:
        return whole
    else:
        run: tl.constexpr = INTERLEAVE // POOL
        rest = tl.minimum(tl.maximum(whole % (run * WORLD) - rank * run, 0), run)
        return whole // (run * WORLD) * run + rest


@triton.jit
def _global_pool(local, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    if WORLD == 1:
        return local
    else:
        run: tl.constexpr = INTERLEAVE // POOL
        return (local // run * WORLD + rank) * run + local % run


def aot_configurations(capability: int) -> AotConfigurations:
    """All forms of pools, few rows and many, the fewest and the most candidates kept."""
    wide = ("block_table_stride", "page_stride_16")
    forms = {
        "serving": ("*u8:16", torch.uint8),
        "bf16": ("*bf16:16", torch.bfloat16),
        "fp32": ("*fp32:16", torch.float32),
    }
    for name, (pools, dtype) in forms.items():
        for rows, heads, num_pools, world in ((1, 32, 512, 4), (4096, 32, 512, 4), (64, 64, 100, 1), (1, 16, 16, 3)):
            form = select_form(dtype, rows, heads, num_pools, capability)
            options = {option: form.pop(option) for option in ("num_warps", "num_stages", "maxnreg")}
            signature = dict.fromkeys(UNALIGNED, "*i32")
            signature |= {size: "i64" if size in wide else "i32" for size in SELECT_SIZES}
            signature |= {"q_ptr": pools, "weights_ptr": "*fp32:16", "pools_ptr": pools}
            signature |= {"candidates_ptr": "*i64:16", "workspace_ptr": "*u8:16"}
            constants = form | {"WORLD": world, "INTERLEAVE": 4 * world, "PAGE_SIZE": 768}
            title = f"select-{name}-{rows}x{heads}x{num_pools}"
            yield AotConfiguration(title, _select_pools_kernel, signature, constants, options)
