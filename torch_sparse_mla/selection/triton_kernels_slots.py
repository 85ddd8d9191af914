"""CUDA implementations of `selected_slots` and `current_token_slots` in Triton: one program for each row, or for
`selected_slots` where nothing is packed also for each block of its list."""

import torch
import triton
import triton.language as tl

from ..triton_launch import AotConfiguration, AotConfigurations, on_device
from .contract import check_current_token_slots, check_selected_slots, page_limit

BLOCK = 1024
NUM_WARPS = 4
# A request's lists are looked through by one program: many loads at once.
REQUEST_BLOCK = 4096
REQUEST_WARPS = 8
LISTS = ["topk_ptr", "block_table_ptr", "lengths_ptr", "counts_ptr"]
SIZES = {
    "columns": "i32",
    "rows": "i64",
    "copies": "i32",
    "rows_per_request": "i32",
    "blocks": "i32",
    "block_table_stride": "i64",
    "num_pages": "i64",
    "rank": "i32",
    "slots_per_rank": "i64",
}


def selected_slots(
    topk: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor | None,
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
    slots_per_rank: int = 0,
) -> None:
    check_selected_slots(topk, block_table, lengths, slots, counts, page_size, interleave, rank, world, slots_per_rank)
    rows, columns = topk.shape
    if rows == 0:
        return
    requests, blocks = block_table.shape
    with on_device(slots):
        # Packing goes through a row from its beginning, in one program.
        _selected_slots_kernel[(rows, 1 if counts is not None else triton.cdiv(columns, BLOCK))](
            topk,
            block_table,
            lengths,
            slots,
            counts,
            columns,
            rows,
            slots.shape[0] // rows,
            rows // requests,
            blocks,
            block_table.stride(0),
            page_limit(page_size),
            rank,
            slots_per_rank,
            WORLD=world,
            INTERLEAVE=interleave,
            PAGE_SIZE=page_size,
            TILE=BLOCK,
            num_warps=NUM_WARPS,
        )


def current_token_slots(
    topk: torch.Tensor, lengths: torch.Tensor, remap: torch.Tensor, slots: torch.Tensor, rows_per_request: int
) -> None:
    check_current_token_slots(topk, lengths, remap, slots, rows_per_request)
    rows, columns = topk.shape
    if rows == 0:
        return
    with on_device(slots):
        _current_token_slots_kernel[(rows,)](
            topk,
            lengths,
            remap,
            slots,
            rows_per_request,
            rows_per_request * columns,
            TILE=REQUEST_BLOCK,
            num_warps=REQUEST_WARPS,
        )


@triton.jit(
    do_not_specialize=["rows_per_request", "entries"], do_not_specialize_on_alignment=["topk_ptr", "lengths_ptr"]
)
def _current_token_slots_kernel(
    topk_ptr,
    lengths_ptr,
    remap_ptr,
    slots_ptr,
    rows_per_request: tl.int32,
    entries: tl.int32,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    begin = (row // rows_per_request).to(tl.int64) * entries
    position = tl.load(lengths_ptr + row).to(tl.int64) - 1
    lane = tl.arange(0, TILE)
    found = tl.full((TILE,), -1, tl.int32)
    for first in range(0, entries, TILE):
        inside = first + lane < entries
        token = tl.load(topk_ptr + begin + first + lane, mask=inside, other=-1)
        # The position of a padded row is negative, and so is the remap of every negative entry.
        place = tl.load(remap_ptr + begin + first + lane, mask=inside & (token == position), other=-1)
        found = tl.maximum(found, place)
    tl.store(slots_ptr + row, tl.max(found, 0))


# Nothing is compiled for lists of another length or batch.
@triton.jit(do_not_specialize=list(SIZES), do_not_specialize_on_alignment=LISTS)
def _selected_slots_kernel(
    topk_ptr,
    block_table_ptr,
    lengths_ptr,
    slots_ptr,
    counts_ptr,
    columns: tl.int32,
    rows: tl.int64,
    copies: tl.int32,
    rows_per_request: tl.int32,
    blocks: tl.int32,
    block_table_stride: tl.int64,
    num_pages: tl.int64,
    rank: tl.int32,
    slots_per_rank: tl.int64,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    pages_ptr = block_table_ptr + row // rows_per_request * block_table_stride
    lane = tl.arange(0, TILE)
    if counts_ptr is None:
        column = tl.program_id(1) * TILE + lane
        token = tl.load(topk_ptr + row * columns + column, mask=column < columns, other=-1)
        slot = _slots(token, length, pages_ptr, blocks, num_pages, rank, slots_per_rank, WORLD, INTERLEAVE, PAGE_SIZE)
        for copy in range(copies):
            tl.store(slots_ptr + (copy * rows + row) * columns + column, slot, mask=column < columns)
    else:
        count = 0
        for first in range(0, columns, TILE):
            token = tl.load(topk_ptr + row * columns + first + lane, mask=first + lane < columns, other=-1)
            slot = _slots(
                token, length, pages_ptr, blocks, num_pages, rank, slots_per_rank, WORLD, INTERLEAVE, PAGE_SIZE
            )
            found = (slot >= 0).to(tl.int32)
            place = count + tl.cumsum(found, 0) - 1
            for copy in range(copies):
                tl.store(slots_ptr + (copy * rows + row) * columns + place, slot, mask=slot >= 0)
            count += tl.sum(found, 0)
        for copy in range(copies):
            tl.store(counts_ptr + copy * rows + row, count)
            for first in range(0, columns, TILE):
                column = first + lane
                rest = (column >= count) & (column < columns)
                tl.store(slots_ptr + (copy * rows + row) * columns + column, -1, mask=rest)


@triton.jit
def _slots(
    token,
    length,
    pages_ptr,
    blocks,
    num_pages,
    rank,
    slots_per_rank,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Slots of tokens, int32; -1 where there is none, or none that is asked for."""
    visible = (token >= 0) & (token < length)
    token = tl.where(visible, token, 0)
    run = token // INTERLEAVE
    local = run // WORLD * INTERLEAVE + token % INTERLEAVE
    block = local // PAGE_SIZE
    page = tl.load(pages_ptr + block, mask=visible & (block < blocks), other=-1)
    slot = page.to(tl.int64) * PAGE_SIZE + local % PAGE_SIZE
    found = (page >= 0) & (page < num_pages)
    if slots_per_rank > 0:
        found = found & (slot < slots_per_rank)
        slot += run % WORLD * slots_per_rank
    else:
        found = found & (run % WORLD == rank)
    return tl.where(found, slot, -1).to(tl.int32)


def aot_configurations(capability: int) -> AotConfigurations:
    """Geometries of powers of two, and one that is not; lengths of both types."""
    for name, lengths in (("current-tokens", "*i32"), ("current-tokens-int64", "*i64")):
        signature = {"topk_ptr": "*i32", "lengths_ptr": lengths, "remap_ptr": "*i32:16", "slots_ptr": "*i32:16"}
        signature |= {"rows_per_request": "i32", "entries": "i32"}
        warps = {"num_warps": REQUEST_WARPS}
        yield AotConfiguration(name, _current_token_slots_kernel, signature, {"TILE": REQUEST_BLOCK}, warps)
    pointers = {"topk_ptr": "*i32", "block_table_ptr": "*i32", "lengths_ptr": "*i32", "slots_ptr": "*i32:16"}
    for world, interleave, page_size in ((1, 1, 64), (8, 4, 64), (3, 5, 80)):
        constants = {"WORLD": world, "INTERLEAVE": interleave, "PAGE_SIZE": page_size, "TILE": BLOCK}
        name, options = f"w{world}-i{interleave}-p{page_size}", {"num_warps": NUM_WARPS}
        whole = constants | {"counts_ptr": None}
        yield AotConfiguration(f"{name}-in-place", _selected_slots_kernel, pointers | SIZES, whole, options)
        packed = pointers | {"counts_ptr": "*i32"} | SIZES
        yield AotConfiguration(f"{name}-packed", _selected_slots_kernel, packed, constants, options)
