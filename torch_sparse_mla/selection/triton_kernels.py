"""CUDA implementation of `plan_selection` in Triton: two launches, no initial state, no order left to chance.

1. `_first_entries_kernel`, PARTITIONS programs a request: for every entry of the request's lists the first entry that
   names the same position. A program takes the positions of its partition, so programs share nothing. It settles them
   in rounds: each open entry bids `position << 32 | entry` for a cell chosen by a hash of the position and the round,
   and the least bid wins. All entries of the winner's position are then settled, the others go on to the next round
   with another hash. A cell that is bid for settles a position, so the rounds end; with at least two cells for each
   position there are three or four. Least bids do not depend on the order in which they come.
2. `_union_kernel`, one program for each request and owner: an entry that is its own first is in the union. A program
   counts those of the owners before its own, which is where its segment begins, numbers its own by a prefix sum, and
   gives every entry of its owner the number of its first.

What one phase of a program stores and the next one loads is in global memory (Triton has no scatter into shared
memory); the barriers between phases make it visible within the program.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..triton_launch import AotConfiguration, AotConfigurations, PreparedOp, on_device
from .contract import check_plan_selection, page_limit
from .plan import PARTITIONS, SelectionPlan

# The most entries that the first kernel keeps in registers, and what a program takes at once where it keeps none.
MAX_ENTRIES_IN_REGISTERS = 8192
MAX_BLOCK = 4096
MIN_BLOCK = 128
MAX_WARPS = 16

NUM_PARTITIONS = tl.constexpr(PARTITIONS)
# What `first_entries` holds: the entry, or one of these.
ABSENT = tl.constexpr(-1)
OPEN = tl.constexpr(-2)
UNCLAIMED = tl.constexpr(2**63 - 1)


_checked = PreparedOp(check_plan_selection, outputs=("plan",))


def plan_selection(
    topk: torch.Tensor,
    block_table: torch.Tensor,
    plan: torch.Tensor,
    rows_per_request: int,
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
    reserved_requests: int = 0,
    reserved_rows_per_request: int = 0,
) -> None:
    call = _checked(
        topk,
        block_table,
        plan,
        rows_per_request,
        page_size,
        interleave,
        rank,
        world,
        reserved_requests,
        reserved_rows_per_request,
    )
    selection = call.checked
    if selection.requests == 0:
        return
    requests, blocks = block_table.shape
    entries = rows_per_request * selection.topk
    launches = _launches(selection)
    with on_device(plan):
        if requests:
            call.launch(
                launches.first_kernel,
                (requests, PARTITIONS),
                topk,
                block_table,
                plan,
                entries,
                blocks,
                block_table.stride(0),
                page_limit(page_size),
                selection.capacity_per_request,
                launches.offsets["first_entries"],
                launches.offsets["tables"],
                WORLD=world,
                PAGE_SIZE=page_size,
                CELLS=launches.cells,
                **launches.first_options,
            )
        call.launch(
            _union_kernel,
            (selection.requests, world),
            topk,
            block_table,
            plan,
            requests,
            entries,
            block_table.stride(0),
            rank,
            selection.capacity_per_request,
            launches.offsets["owner_offsets"],
            launches.offsets["owned_slots"],
            launches.offsets["counts"],
            launches.offsets["first_entries"],
            launches.offsets["tables"],
            launches.table_words,
            WORLD=world,
            INTERLEAVE=interleave,
            PAGE_SIZE=page_size,
            **launches.union_options,
        )


class _Launches(NamedTuple):
    """What the launches take from the reserved sizes alone. No block size comes from a call's own: no call compiles.

    Attributes:
        first_kernel: the form of the first kernel.
        first_options, union_options: BLOCK, the entries that a program takes at once, and num_warps.
        offsets: word at which each section begins.
        cells: of one table.
        table_words: of all tables of a request.
    """

    first_kernel: triton.JITFunction
    first_options: dict[str, int]
    union_options: dict[str, int]
    offsets: dict[str, int]
    cells: int
    table_words: int


@functools.lru_cache(maxsize=256)
def _launches(selection: SelectionPlan) -> _Launches:
    in_registers = selection.capacity_per_request <= MAX_ENTRIES_IN_REGISTERS
    sections = selection.sections
    return _Launches(
        _first_entries_kernel if in_registers else _first_entries_blocks_kernel,
        _options(selection.capacity_per_request, MAX_ENTRIES_IN_REGISTERS if in_registers else MAX_BLOCK),
        _options(selection.capacity_per_request, MAX_BLOCK),
        {name: section.offset for name, section in sections.items()},
        selection.cells,
        math.prod(sections["tables"].shape[1:]),
    )


def _options(entries: int, largest_block: int) -> dict[str, int]:
    block = min(max(triton.next_power_of_2(entries), MIN_BLOCK), largest_block)
    return {"BLOCK": block, "num_warps": min(block // MIN_BLOCK, MAX_WARPS)}


# Sizes are not specialised on their values, so nothing is compiled when a batch of another size first comes, and lists
# may start anywhere. The geometry is constant for a cache: a division by it is a shift or a multiplication.
FIRST_SIZES = [
    "num_entries",
    "num_blocks",
    "block_table_stride",
    "num_pages",
    "capacity",
    "first_entries_offset",
    "tables_offset",
]
UNION_SIZES = [
    "num_requests",
    "num_entries",
    "block_table_stride",
    "rank",
    "capacity",
    "owner_offsets_offset",
    "owned_slots_offset",
    "counts_offset",
    "first_entries_offset",
    "tables_offset",
    "table_words",
]
LISTS = ["topk_ptr", "block_table_ptr"]


@triton.jit(do_not_specialize=FIRST_SIZES, do_not_specialize_on_alignment=LISTS)
def _first_entries_kernel(
    topk_ptr,
    block_table_ptr,
    plan_ptr,
    num_entries: tl.int32,
    num_blocks: tl.int32,
    block_table_stride: tl.int64,
    num_pages: tl.int64,
    capacity: tl.int64,
    first_entries_offset: tl.int64,
    tables_offset: tl.int64,
    WORLD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All of a request's entries in registers."""
    request = tl.program_id(0).to(tl.int64)
    topk_ptr += request * num_entries
    block_table_ptr += request * block_table_stride
    first_ptr = plan_ptr + first_entries_offset + request * capacity
    table = _table(plan_ptr + tables_offset, request, CELLS)

    entry = tl.arange(0, BLOCK)
    position, mine = _positions(topk_ptr, entry, num_entries)
    is_open = mine & _has_record(block_table_ptr, position, mine, num_blocks, num_pages, WORLD, PAGE_SIZE)
    first = tl.full([BLOCK], ABSENT, tl.int32)
    bid = (position.to(tl.int64) << 32) | entry
    cell = table + _cell(position, 0, CELLS)
    tl.store(cell, UNCLAIMED, mask=is_open)
    round = 0
    num_open = 1
    while num_open > 0:
        tl.debug_barrier()
        tl.atomic_min(cell, bid, mask=is_open, sem="relaxed")
        tl.debug_barrier()
        least = tl.load(cell, mask=is_open, other=-1, cache_modifier=".cg")
        settled = is_open & ((least >> 32).to(tl.int32) == position)
        first = tl.where(settled, least.to(tl.int32), first)
        is_open = is_open & ~settled
        round += 1
        cell = table + _cell(position, round, CELLS)
        tl.store(cell, UNCLAIMED, mask=is_open)
        num_open = tl.max(is_open.to(tl.int32), 0)
    tl.store(first_ptr + entry, first, mask=mine)


@triton.jit(do_not_specialize=FIRST_SIZES, do_not_specialize_on_alignment=LISTS)
def _first_entries_blocks_kernel(
    topk_ptr,
    block_table_ptr,
    plan_ptr,
    num_entries: tl.int32,
    num_blocks: tl.int32,
    block_table_stride: tl.int64,
    num_pages: tl.int64,
    capacity: tl.int64,
    first_entries_offset: tl.int64,
    tables_offset: tl.int64,
    WORLD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same with any number of entries, block by block; which of them are open is kept in `first_entries`."""
    request = tl.program_id(0).to(tl.int64)
    topk_ptr += request * num_entries
    block_table_ptr += request * block_table_stride
    first_ptr = plan_ptr + first_entries_offset + request * capacity
    table = _table(plan_ptr + tables_offset, request, CELLS)

    for start in range(0, num_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        position, mine = _positions(topk_ptr, entry, num_entries)
        is_open = mine & _has_record(block_table_ptr, position, mine, num_blocks, num_pages, WORLD, PAGE_SIZE)
        tl.store(first_ptr + entry, tl.where(is_open, OPEN, ABSENT), mask=mine)
        tl.store(table + _cell(position, 0, CELLS), UNCLAIMED, mask=is_open)
    round = 0
    num_open = 1
    while num_open > 0:
        tl.debug_barrier()
        for start in range(0, num_entries, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            position, is_open = _open_positions(topk_ptr, first_ptr, entry, num_entries)
            bid = (position.to(tl.int64) << 32) | entry
            tl.atomic_min(table + _cell(position, round, CELLS), bid, mask=is_open, sem="relaxed")
        tl.debug_barrier()
        num_open = 0
        for start in range(0, num_entries, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            position, is_open = _open_positions(topk_ptr, first_ptr, entry, num_entries)
            least = tl.load(table + _cell(position, round, CELLS), mask=is_open, other=-1, cache_modifier=".cg")
            settled = is_open & ((least >> 32).to(tl.int32) == position)
            tl.store(first_ptr + entry, least.to(tl.int32), mask=settled)
            is_open = is_open & ~settled
            tl.store(table + _cell(position, round + 1, CELLS), UNCLAIMED, mask=is_open)
            num_open += tl.sum(is_open.to(tl.int32), 0)
        round += 1


@triton.jit(do_not_specialize=UNION_SIZES, do_not_specialize_on_alignment=LISTS)
def _union_kernel(
    topk_ptr,
    block_table_ptr,
    plan_ptr,
    num_requests: tl.int32,
    num_entries: tl.int32,
    block_table_stride: tl.int64,
    rank: tl.int32,
    capacity: tl.int64,
    owner_offsets_offset: tl.int64,
    owned_slots_offset: tl.int64,
    counts_offset: tl.int64,
    first_entries_offset: tl.int64,
    tables_offset: tl.int64,
    table_words: tl.int64,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    owner = tl.program_id(1)
    topk_ptr += request * num_entries
    block_table_ptr += request * block_table_stride
    first_ptr = plan_ptr + first_entries_offset + request * capacity
    owned_slots_ptr = plan_ptr + owned_slots_offset + request * capacity
    remap_ptr = plan_ptr + request * num_entries
    # The first kernel is done with its tables. Here they hold, for the first entry of a position, its number.
    number_ptr = plan_ptr + tables_offset + request * table_words
    # A reserved request that the call does not bring has no entries.
    live_entries = tl.where(request < num_requests, num_entries, 0)

    num_before = 0
    num_own = 0
    for start in range(0, live_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        position, first, entry_owner = _owned_entries(topk_ptr, first_ptr, entry, live_entries, INTERLEAVE, WORLD)
        is_first = first == entry
        num_before += tl.sum((is_first & (entry_owner < owner)).to(tl.int32), 0)
        is_own_first = is_first & (entry_owner == owner)
        number = num_own + tl.cumsum(is_own_first.to(tl.int32), 0) - 1
        num_own += tl.sum(is_own_first.to(tl.int32), 0)
        tl.store(number_ptr + entry, number, mask=is_own_first)
        if owner == rank:
            slot = _slot(block_table_ptr, position, is_own_first, INTERLEAVE, WORLD, PAGE_SIZE)
            tl.store(owned_slots_ptr + number, slot, mask=is_own_first)

    offset_ptr = plan_ptr + owner_offsets_offset + request * (WORLD + 1) + owner
    tl.store(offset_ptr, num_before)
    if owner == WORLD - 1:
        tl.store(offset_ptr + 1, num_before + num_own)
        tl.store(plan_ptr + counts_offset + request, num_before + num_own)

    tl.debug_barrier()
    begin = (request * capacity).to(tl.int32) + num_before
    for start in range(0, live_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        position, first, entry_owner = _owned_entries(topk_ptr, first_ptr, entry, live_entries, INTERLEAVE, WORLD)
        is_own = (first >= 0) & (entry_owner == owner)
        number = tl.load(number_ptr + first, mask=is_own, other=0)
        # Absent entries belong to no owner: the first one's program writes them.
        is_absent = (entry < live_entries) & (first < 0) & (owner == 0)
        tl.store(remap_ptr + entry, tl.where(is_own, begin + number, -1), mask=is_own | is_absent)

    # Nothing of an earlier, larger call may stay behind.
    if owner == rank:
        for start in range(num_own, capacity.to(tl.int32), BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(owned_slots_ptr + place, -1, mask=place < capacity)
    num_programs = tl.num_programs(0) * WORLD
    program = tl.program_id(0) * WORLD + owner
    reserved = (tl.num_programs(0) * capacity).to(tl.int32)
    for start in range(num_requests * num_entries + program * BLOCK, reserved, num_programs * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(plan_ptr + place, -1, mask=place < reserved)


@triton.jit
def _table(tables_ptr, request, CELLS: tl.constexpr):
    """The two tables of this program, for even and odd rounds: losers prepare the next round's while others read."""
    tables = tables_ptr.to(tl.pointer_type(tl.int64))
    return tables + (request * NUM_PARTITIONS + tl.program_id(1)) * (2 * CELLS)


@triton.jit
def _positions(topk_ptr, entry, num_entries):
    """Positions of entries, and which of the entries are in this program's partition."""
    position = tl.load(topk_ptr + entry, mask=entry < num_entries, other=-1)
    partition = (_hash(position, 0) >> 16) % NUM_PARTITIONS
    return position, (entry < num_entries) & (partition.to(tl.int32) == tl.program_id(1))


@triton.jit
def _open_positions(topk_ptr, first_ptr, entry, num_entries):
    position, mine = _positions(topk_ptr, entry, num_entries)
    first = tl.load(first_ptr + entry, mask=mine, other=ABSENT, cache_modifier=".cg")
    return position, mine & (first == OPEN)


@triton.jit
def _has_record(block_table_ptr, position, mask, num_blocks, num_pages, WORLD: tl.constexpr, PAGE_SIZE: tl.constexpr):
    block = _divide(position, WORLD * PAGE_SIZE)
    page = tl.load(block_table_ptr + block, mask=mask & (position >= 0) & (block < num_blocks), other=-1)
    return (page >= 0) & (page < num_pages)


@triton.jit
def _owned_entries(topk_ptr, first_ptr, entry, num_entries, INTERLEAVE: tl.constexpr, WORLD: tl.constexpr):
    """Positions, first entries and owners of entries. Beyond the end the first entry is -1, as of an absent one."""
    position = tl.load(topk_ptr + entry, mask=entry < num_entries, other=-1)
    first = tl.load(first_ptr + entry, mask=entry < num_entries, other=ABSENT)
    run = _divide(position, INTERLEAVE)
    return position, first, run - _divide(run, WORLD) * WORLD


@triton.jit
def _slot(block_table_ptr, position, mask, INTERLEAVE: tl.constexpr, WORLD: tl.constexpr, PAGE_SIZE: tl.constexpr):
    page = tl.load(block_table_ptr + _divide(position, WORLD * PAGE_SIZE), mask=mask, other=0)
    local = _divide(position, WORLD * INTERLEAVE) * INTERLEAVE + position % INTERLEAVE
    return page * PAGE_SIZE + local % PAGE_SIZE


@triton.jit
def _divide(position, DIVISOR: tl.constexpr):
    """Quotient of a position that is not negative; unsigned, because that is a mere shift by a power of two."""
    return (position.to(tl.uint32) // DIVISOR).to(tl.int32)


@triton.jit
def _cell(position, round, CELLS: tl.constexpr):
    """Where a position's entries meet in a round: in the table of the round's parity."""
    return (round % 2) * CELLS + (_hash(position, round) % CELLS).to(tl.int32)


@triton.jit
def _hash(position, round):
    """32 mixed bits of a position, other ones in each round."""
    bits = (position ^ (round << 24)).to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


def aot_configurations(capability: int) -> AotConfigurations:
    """On any GPU: block sizes from one short list to many; geometries of powers of two, and one that is not."""
    pointers = {"topk_ptr": "*i32", "block_table_ptr": "*i32", "plan_ptr": "*i32:16"}
    wide = {"num_entries": "i32", "num_blocks": "i32", "num_requests": "i32", "rank": "i32"}
    for rows, topk, world, interleave, page_size in (
        (1, 100, 1, 1, 64),
        (1, 2048, 8, 1, 64),
        (4, 2048, 1, 1, 64),
        (4, 2048, 4, 1, 64),
        (4, 2048, 3, 5, 80),
        (4, 2051, 4, 4, 64),
    ):
        launches = _launches(SelectionPlan(1, rows, topk, world))
        name = f"{rows}x{topk}-w{world}-i{interleave}-p{page_size}"
        geometry = {"WORLD": world, "PAGE_SIZE": page_size}
        for kernel, sizes, constants, options in (
            (launches.first_kernel, FIRST_SIZES, {"CELLS": launches.cells}, launches.first_options),
            (_union_kernel, UNION_SIZES, {"INTERLEAVE": interleave}, launches.union_options),
        ):
            signature = pointers | {size: wide.get(size, "i64") for size in sizes}
            constants |= geometry | {"BLOCK": options["BLOCK"]}
            warps = {"num_warps": options["num_warps"]}
            yield AotConfiguration(f"{kernel.__name__}-{name}", kernel, signature, constants, warps)
