"""CUDA implementations of `c4_write_index_keys` and `c4_merge_pools` in Triton.

`_write_index_keys_kernel`, a program for each request and 16 of its pools; the first one alone reads the ring and then
writes it. `_merge_pools_kernel`, a program for each row: a candidate's place among all lists is its place in its own
list and, found by bisection, the number of larger ones in each other list.
"""

import torch
import triton
import triton.language as tl

from ..records.layouts import E4M3_MAX
from ..records.triton_codec import encode_e4m3, round_to_bf16
from ..triton_launch import AotConfiguration, AotConfigurations, on_device
from . import pools as layout
from .contract import check_c4_merge_pools, check_c4_write_index_keys

POOLS_PER_PROGRAM = 16
WRITE_OPTIONS = {"num_warps": 4}
MERGE_OPTIONS = {"num_warps": 4}
MERGE_BLOCK = 1024

POOL = tl.constexpr(layout.POOL_TOKENS)
DIM = tl.constexpr(layout.HEAD_DIM)
INDEX_PAGE_POOLS = tl.constexpr(layout.POOLS_PER_INDEX_PAGE)
INDEX_PAGE_BYTES = tl.constexpr(layout.INDEX_PAGE_BYTES)
ABSENT = tl.constexpr(layout.ABSENT)
MAX_POOL = tl.constexpr(layout.MAX_POOL)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SQRT_DIM = tl.constexpr(layout.HEAD_DIM**0.5)
E4M3_LARGEST = tl.constexpr(E4M3_MAX)


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
    check_c4_write_index_keys(
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
    requests, blocks = block_table.shape
    if not requests or not len(keys):
        return
    # A request's pools: those that its tokens can complete, and the one that begins before them.
    programs = triton.cdiv(len(keys) // layout.POOL_TOKENS + 1, POOLS_PER_PROGRAM)
    with on_device(keys):
        _write_index_keys_kernel[(programs, requests)](
            keys,
            gates,
            bias,
            row_starts,
            starts,
            ring_rows,
            block_table,
            ring,
            pools,
            len(keys),
            len(ring),
            ring.shape[1],
            blocks,
            len(pools),
            block_table.stride(0),
            pools.stride(0) * pools.element_size() // 16,
            rank,
            WORLD=world,
            INTERLEAVE=interleave,
            PAGE_SIZE=page_size,
            POOLS=POOLS_PER_PROGRAM,
            **WRITE_OPTIONS,
        )


def c4_merge_pools(candidates: torch.Tensor, positions: torch.Tensor, topk: torch.Tensor, counts: torch.Tensor) -> None:
    check_c4_merge_pools(candidates, positions, topk, counts)
    lists, rows, num_pools = candidates.shape
    if not rows:
        return
    with on_device(candidates):
        _merge_pools_kernel[(rows,)](
            candidates,
            positions,
            topk,
            counts,
            lists,
            rows,
            num_pools,
            PADDED=triton.next_power_of_2(num_pools),
            BLOCK=MERGE_BLOCK,
            **MERGE_OPTIONS,
        )


# Sizes are not specialised on their values, so nothing is compiled when a batch of another size first comes.
WRITE_SIZES = [
    "num_tokens",
    "num_ring_rows",
    "ring_slots",
    "num_blocks",
    "num_pages",
    "block_table_stride",
    "page_stride_16",
    "rank",
]
MERGE_SIZES = ["lists", "rows", "num_pools"]
UNALIGNED = ["block_table_ptr", "row_starts_ptr", "starts_ptr", "ring_rows_ptr"]


@triton.jit(do_not_specialize=WRITE_SIZES, do_not_specialize_on_alignment=UNALIGNED)
def _write_index_keys_kernel(
    keys_ptr,
    gates_ptr,
    bias_ptr,
    row_starts_ptr,
    starts_ptr,
    ring_rows_ptr,
    block_table_ptr,
    ring_ptr,
    pools_ptr,
    num_tokens: tl.int32,
    num_ring_rows: tl.int32,
    ring_slots: tl.int32,
    num_blocks: tl.int32,
    num_pages: tl.int32,
    block_table_stride: tl.int64,
    page_stride_16: tl.int64,
    rank: tl.int32,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    POOLS: tl.constexpr,
):
    request = tl.program_id(1)
    begin = tl.minimum(tl.maximum(tl.load(row_starts_ptr + request), 0), num_tokens)
    end = tl.minimum(tl.maximum(tl.load(row_starts_ptr + request + 1), 0), num_tokens)
    start = tl.load(starts_ptr + request)
    ring_row = tl.load(ring_rows_ptr + request)
    first = start // POOL + tl.program_id(0) * POOLS
    if (end <= begin) | (start < 0) | (ring_row < 0) | (ring_row >= num_ring_rows):
        return
    if (first * POOL >= start + end - begin) & (tl.program_id(0) > 0):
        return
    ring_ptr += ring_row.to(tl.int64) * ring_slots * (2 * DIM)
    pool = first + tl.arange(0, POOLS)
    channel = tl.arange(0, DIM)
    # Whole pools are those whose last token is given; what others would hold is not stored.
    whole = pool * POOL + (POOL - 1) < start + end - begin
    largest = tl.full([POOLS, DIM], float("-inf"), tl.float32)
    for slot in tl.static_range(POOL):
        gate = _state(gates_ptr, ring_ptr + DIM, pool * POOL + slot, whole, begin, start, ring_slots)
        largest = tl.maximum(largest, gate + tl.load(bias_ptr + slot * DIM + channel)[None, :])
    total = tl.zeros([POOLS, DIM], tl.float32)
    pooled = tl.zeros([POOLS, DIM], tl.float32)
    for slot in tl.static_range(POOL):
        position = pool * POOL + slot
        gate = _state(gates_ptr, ring_ptr + DIM, position, whole, begin, start, ring_slots)
        weight = tl.exp(gate + tl.load(bias_ptr + slot * DIM + channel)[None, :] - largest)
        total += weight
        pooled += weight * _state(keys_ptr, ring_ptr, position, whole, begin, start, ring_slots)
    pooled = pooled / total

    run = pool * POOL // INTERLEAVE
    local = (run // WORLD * INTERLEAVE + pool * POOL % INTERLEAVE) // POOL
    block = local // (PAGE_SIZE // POOL)
    mine = whole & (run % WORLD == rank) & (block < num_blocks)
    page = tl.load(block_table_ptr + request.to(tl.int64) * block_table_stride + block, mask=mine, other=-1)
    mine = mine & (page >= 0) & (page < num_pages)
    pages_ptr = _page(pools_ptr, page, page_stride_16)
    _store_pools(pages_ptr, local % (PAGE_SIZE // POOL), pooled, mine, POOLS)

    # By the first program alone, and after every thread has read what the ring held.
    tl.debug_barrier()
    if tl.program_id(0) == 0:
        for offset in range(tl.maximum(end - begin - ring_slots, 0), end - begin):
            token = (begin + offset).to(tl.int64) * DIM + channel
            place = (start + offset) % ring_slots * (2 * DIM) + channel
            tl.store(ring_ptr + place, tl.load(keys_ptr + token))
            tl.store(ring_ptr + DIM + place, tl.load(gates_ptr + token))


@triton.jit
def _page(pools_ptr, page, page_stride_16):
    # The factor of 16 tells the compiler that pages are aligned, so that it emits wide loads.
    at = pools_ptr.to(tl.pointer_type(tl.uint8)) + page.to(tl.int64) * page_stride_16 * 16
    return at.to(pools_ptr.dtype)


@triton.jit
def _state(given_ptr, ring_ptr, position, whole, begin, start, ring_slots):
    """[pools, 128] float32 keys or gates at a position of each pool: a token of this call, or one that the ring has."""
    channel = tl.arange(0, DIM)[None, :]
    token = (begin + position - start).to(tl.int64) * DIM
    given = tl.load(given_ptr + token[:, None] + channel, mask=(whole & (position >= start))[:, None], other=0.0)
    place = position % ring_slots * (2 * DIM)
    kept = tl.load(ring_ptr + place[:, None] + channel, mask=(whole & (position < start))[:, None], other=0.0)
    return tl.where((position >= start)[:, None], given, kept).to(tl.float32)


@triton.jit
def _store_pools(pages_ptr, local, pooled, mine, POOLS: tl.constexpr):
    channel = tl.arange(0, DIM)[None, :]
    if pages_ptr.dtype.element_ty == tl.uint8:
        values = _hadamard(pooled)
        scale = _power_of_two_scale(tl.max(tl.abs(values), 1))
        index_page = local // INDEX_PAGE_POOLS * INDEX_PAGE_BYTES
        place = local % INDEX_PAGE_POOLS
        codes = encode_e4m3(values / scale[:, None])
        tl.store((pages_ptr + index_page + place * DIM)[:, None] + channel, codes, mask=mine[:, None])
        scale_ptr = pages_ptr + index_page + INDEX_PAGE_POOLS * DIM + place * 4
        tl.store(scale_ptr.to(tl.pointer_type(tl.float32)), scale, mask=mine)
    elif pages_ptr.dtype.element_ty == tl.bfloat16:
        target = (pages_ptr + local * DIM).to(tl.pointer_type(tl.uint16))[:, None] + channel
        tl.store(target, round_to_bf16(pooled, False), mask=mine[:, None])
    else:
        tl.store((pages_ptr + local * DIM)[:, None] + channel, pooled, mask=mine[:, None])


@triton.jit
def _bf16(values):
    """float32 values that are rounded to bfloat16."""
    return (round_to_bf16(values, False).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _hadamard(pooled):
    """The 128-point Hadamard transform / sqrt(128) of values rounded to bfloat16; the result rounded too."""
    row, column = tl.arange(0, DIM)[:, None], tl.arange(0, DIM)[None, :]
    bits = row & column
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    signs = (1 - 2 * (bits & 1)).to(tl.float32)
    # Exact factors: a tf32 has more bits than a bfloat16.
    return _bf16(tl.dot(_bf16(pooled), signs, input_precision="tf32") / SQRT_DIM)


@triton.jit
def _power_of_two_scale(largest):
    """The least power of two by which e4m3 holds a magnitude; 1 for zero."""
    bits = (largest / E4M3_LARGEST).to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits + 0x7FFFFF) >> 23, 1)
    return tl.where(largest > 0, (exponent << 23).to(tl.float32, bitcast=True), 1.0)


@triton.jit(do_not_specialize=MERGE_SIZES, do_not_specialize_on_alignment=["positions_ptr", "topk_ptr", "counts_ptr"])
def _merge_pools_kernel(
    candidates_ptr,
    positions_ptr,
    topk_ptr,
    counts_ptr,
    lists: tl.int32,
    rows: tl.int32,
    num_pools: tl.int32,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    candidates_ptr += row * num_pools
    list_stride = rows.to(tl.int64) * num_pools
    width = num_pools * POOL + (POOL - 1)
    topk_ptr += row * width
    entry = tl.arange(0, PADDED)
    total = tl.full((), 0, tl.int32)
    own_ptr = candidates_ptr
    for own in range(lists):
        candidate = tl.load(own_ptr + entry, mask=entry < num_pools, other=ABSENT)
        place = entry
        other_ptr = candidates_ptr
        for other in range(lists):
            if other != own:
                place += _number_above(other_ptr, candidate, num_pools, PADDED)
            other_ptr += list_stride
        found = candidate != ABSENT
        total += tl.sum(found.to(tl.int32))
        token = ((candidate & MAGNITUDE) ^ MAX_POOL).to(tl.int32) * POOL
        for slot in tl.static_range(POOL):
            tl.store(topk_ptr + place * POOL + slot, token + slot, mask=found & (place < num_pools))
        own_ptr += list_stride
    history = tl.minimum(total, num_pools) * POOL
    position = tl.maximum(tl.load(positions_ptr + row), -1)
    # Also right for 2**31 - 1, whose successor is no int32.
    tail = (position % POOL + 1) % POOL
    tail = tl.where(position < 0, 0, tail)
    for first in range(history // BLOCK * BLOCK, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        behind = column - history
        token = tl.where(behind < tail, position - tail + 1 + behind, -1)
        tl.store(topk_ptr + column, token, mask=(behind >= 0) & (column < width))
    tl.store(counts_ptr + row, history + tail)


@triton.jit
def _number_above(list_ptr, candidate, num_pools, PADDED: tl.constexpr):
    """How many entries of a list, largest first, are above each candidate."""
    found = tl.zeros_like(candidate).to(tl.int32)
    step = tl.full((), PADDED, tl.int32)
    while step > 0:
        reached = found + step
        value = tl.load(list_ptr + reached - 1, mask=reached <= num_pools, other=ABSENT)
        found = tl.where((reached <= num_pools) & (value > candidate), reached, found)
        step = step // 2
    return found


def aot_configurations(capability: int) -> AotConfigurations:
    """All forms of pools; for the serving form geometries of powers of two and one that is not."""
    wide = ("block_table_stride", "page_stride_16")
    geometries = ((1, 1, 2304), (4, 4, 256), (3, 12, 768))
    for name, pools in (("serving", "*u8:16"), ("bf16", "*bf16:16"), ("fp32", "*fp32:16")):
        states = "*bf16:16" if name == "serving" else pools
        for world, interleave, page_size in geometries if name == "serving" else geometries[:1]:
            signature = dict.fromkeys(UNALIGNED, "*i32")
            signature |= {size: "i64" if size in wide else "i32" for size in WRITE_SIZES}
            signature |= {"keys_ptr": states, "gates_ptr": states, "ring_ptr": states}
            signature |= {"bias_ptr": "*fp32:16", "pools_ptr": pools}
            constants = {"WORLD": world, "INTERLEAVE": interleave, "PAGE_SIZE": page_size, "POOLS": POOLS_PER_PROGRAM}
            yield AotConfiguration(
                f"write-{name}-w{world}", _write_index_keys_kernel, signature, constants, WRITE_OPTIONS
            )
    for num_pools in (16, 512):
        signature = {"candidates_ptr": "*i64:16", "positions_ptr": "*i32", "topk_ptr": "*i32", "counts_ptr": "*i32"}
        signature |= dict.fromkeys(MERGE_SIZES, "i32")
        constants = {"PADDED": triton.next_power_of_2(num_pools), "BLOCK": MERGE_BLOCK}
        yield AotConfiguration(f"merge-{num_pools}", _merge_pools_kernel, signature, constants, MERGE_OPTIONS)
