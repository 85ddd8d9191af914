"""CUDA implementation of `selected_slots` in Triton: one program for each row and block of its list."""

import torch
import triton
import triton.language as tl

from ..triton_launch import AotConfiguration, AotConfigurations, on_device
from .contract import check_selected_slots, page_limit

BLOCK = 1024
NUM_WARPS = 4
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
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
    slots_per_rank: int = 0,
) -> None:
    check_selected_slots(topk, block_table, lengths, slots, page_size, interleave, rank, world, slots_per_rank)
    rows, columns = topk.shape
    if rows == 0:
        return
    requests, blocks = block_table.shape
    with on_device(slots):
        _selected_slots_kernel[(rows, triton.cdiv(columns, BLOCK))](
            topk,
            block_table,
            lengths,
            slots,
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


# Nothing is compiled for lists of another length or batch.
@triton.jit(
    do_not_specialize=list(SIZES), do_not_specialize_on_alignment=["topk_ptr", "block_table_ptr", "lengths_ptr"]
)
def _selected_slots_kernel(
    topk_ptr,
    block_table_ptr,
    lengths_ptr,
    slots_ptr,
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
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = tl.load(topk_ptr + row * columns + column, mask=column < columns, other=-1)
    visible = (token >= 0) & (token < tl.load(lengths_ptr + row))
    token = tl.where(visible, token, 0)
    run = token // INTERLEAVE
    local = run // WORLD * INTERLEAVE + token % INTERLEAVE
    block = local // PAGE_SIZE
    pages = block_table_ptr + row // rows_per_request * block_table_stride
    page = tl.load(pages + block, mask=visible & (block < blocks), other=-1)
    slot = page.to(tl.int64) * PAGE_SIZE + local % PAGE_SIZE
    found = (page >= 0) & (page < num_pages)
    if slots_per_rank > 0:
        found = found & (slot < slots_per_rank)
        slot += run % WORLD * slots_per_rank
    else:
        found = found & (run % WORLD == rank)
    slot = tl.where(found, slot, -1).to(tl.int32)
    for copy in range(copies):
        tl.store(slots_ptr + (copy * rows + row) * columns + column, slot, mask=column < columns)


def aot_configurations(capability: int) -> AotConfigurations:
    """Geometries of powers of two, and one that is not."""
    pointers = {"topk_ptr": "*i32", "block_table_ptr": "*i32", "lengths_ptr": "*i32", "slots_ptr": "*i32:16"}
    for world, interleave, page_size in ((1, 1, 64), (8, 4, 64), (3, 5, 80)):
        constants = {"WORLD": world, "INTERLEAVE": interleave, "PAGE_SIZE": page_size, "TILE": BLOCK}
        name = f"w{world}-i{interleave}-p{page_size}"
        yield AotConfiguration(name, _selected_slots_kernel, pointers | SIZES, constants, {"num_warps": NUM_WARPS})
