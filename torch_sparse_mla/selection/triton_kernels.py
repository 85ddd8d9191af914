"""CUDA implementation of `plan_selection` in Triton: two launches, no initial state, no order left to chance.

1. `_first_entries_kernel`, PARTITIONS programs a request: for every entry of the request's lists the first entry that
   names the same position. Each program has some of the cells of a table to itself, so programs share nothing. Every
   entry bids its number for the cell of its position, which no position has in common but those a multiple of the
   table's size away, and the least bid wins. If the winner names the same position, it is that position's first entry.
   Entries that lost to another position go on in rounds: in one of two spare tables of the program, in a cell chosen by
   a hash of the position and the round. A cell that is bid for settles a position, so the rounds end. Least bids do not
   depend on the order in which they come.
2. `_union_kernel`, one program for each request and owner: an entry that is its own first is in the union. A program
   counts those of the owners before its own, which is where its segment begins, numbers its own by a prefix sum, and
   gives every entry of its owner the number of its first. This rank's slots are in union order too.

Each has a second form, `_blocks`, for requests whose entries do not fit the registers of one program. What one phase of
a program stores and the next one loads is then in global memory; the barriers between phases make it visible within
the program.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..triton_launch import AotConfiguration, AotConfigurations, PreparedOp, on_device
from .contract import check_plan_selection, page_limit
from .plan import PARTITIONS, SelectionPlan

# The most entries that a program keeps in registers, and what it takes at once where it keeps none.
MAX_ENTRIES_IN_REGISTERS = 8192
MAX_BLOCK = 2048
MIN_BLOCK = 128
MAX_WARPS = 32
# Entries whose prefix sums one warp makes by itself.
ROW = tl.constexpr(32)

NUM_PARTITIONS = tl.constexpr(PARTITIONS)
# What `first_entries` holds: the entry, or one of these.
ABSENT = tl.constexpr(-1)
OPEN = tl.constexpr(-2)
# In the place of a first entry that is another program's to deal with.
OTHER = tl.constexpr(-2)
UNCLAIMED = tl.constexpr(2**31 - 1)


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
    pages: int | None = None,
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
        pages,
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
                page_limit(page_size, pages) - 1,
                selection.capacity_per_request,
                launches.offsets["first_entries"],
                launches.offsets["tables"],
                selection.table_words,
                WORLD=world,
                PAGE_SIZE=page_size,
                CELLS=selection.cells,
                SPARE_CELLS=selection.spare_cells,
                **launches.options,
            )
        call.launch(
            launches.union_kernel,
            (selection.requests, world + launches.slot_programs),
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
            selection.table_words,
            WORLD=world,
            INTERLEAVE=interleave,
            PAGE_SIZE=page_size,
            **launches.options,
        )


class _Launches(NamedTuple):
    """What the launches take from the reserved sizes alone. No block size comes from a call's own: no call compiles.

    Attributes:
        first_kernel, union_kernel: the form of each kernel.
        options: BLOCK, the entries that a program takes at once, and num_warps.
        slot_programs: programs of a request in the union kernel beside those of the owners.
        offsets: word at which each section begins.
    """

    first_kernel: triton.JITFunction
    union_kernel: triton.JITFunction
    options: dict[str, int]
    slot_programs: int
    offsets: dict[str, int]


@functools.lru_cache(maxsize=256)
def _launches(selection: SelectionPlan) -> _Launches:
    in_registers = selection.capacity_per_request <= MAX_ENTRIES_IN_REGISTERS
    if in_registers:
        kernels, largest = (_first_entries_kernel, _union_kernel), MAX_ENTRIES_IN_REGISTERS
    else:
        kernels, largest = (_first_entries_blocks_kernel, _union_blocks_kernel), MAX_BLOCK
    block = min(max(triton.next_power_of_2(selection.capacity_per_request), MIN_BLOCK), largest)
    return _Launches(
        *kernels,
        {"BLOCK": block, "num_warps": min(block // MIN_BLOCK, MAX_WARPS)},
        int(in_registers),
        {name: section.offset for name, section in selection.sections.items()},
    )


# Sizes are not specialised on their values, so nothing is compiled when a batch of another size first comes, and lists
# may start anywhere. The geometry is constant for a cache: a division by it is a shift or a multiplication.
FIRST_SIZES = [
    "num_entries",
    "num_blocks",
    "block_table_stride",
    "last_page",
    "capacity",
    "first_entries_offset",
    "tables_offset",
    "table_words",
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
    last_page: tl.int32,
    capacity: tl.int64,
    first_entries_offset: tl.int64,
    tables_offset: tl.int64,
    table_words: tl.int64,
    WORLD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CELLS: tl.constexpr,
    SPARE_CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All of a request's entries in registers."""
    request = tl.program_id(0).to(tl.int64)
    topk_ptr += request * num_entries
    block_table_ptr += request * block_table_stride
    first_ptr = plan_ptr + first_entries_offset + request * capacity
    table = plan_ptr + tables_offset + request * table_words

    _clear_cells(table, CELLS, BLOCK)
    entry = tl.arange(0, BLOCK)
    position, mine = _positions(topk_ptr, entry, num_entries)
    # Looked at only in the end: what has no record settles like the rest, and the page travels meanwhile.
    page = _page(block_table_ptr, position, mine, num_blocks, WORLD, PAGE_SIZE)
    is_open = mine & (position >= 0)
    cell = _cell(position, CELLS)
    first = tl.full([BLOCK], ABSENT, tl.int32)
    round = 0
    num_open = 1
    while num_open > 0:
        tl.debug_barrier()
        tl.atomic_min(table + cell, entry, mask=is_open, sem="relaxed")
        tl.debug_barrier()
        least = tl.load(table + cell, mask=is_open, other=0, cache_modifier=".cg")
        settled = is_open & (tl.load(topk_ptr + least, mask=is_open, other=ABSENT) == position)
        first = tl.where(settled, least, first)
        is_open = is_open & ~settled
        num_open = tl.max(is_open.to(tl.int32), 0)
        if num_open > 0:
            round += 1
            cell = _spare_cell(position, round, CELLS, SPARE_CELLS)
            tl.store(table + cell, UNCLAIMED, mask=is_open)
    tl.store(first_ptr + entry, tl.where(_is_record(page, last_page), first, ABSENT), mask=mine)


@triton.jit(do_not_specialize=FIRST_SIZES, do_not_specialize_on_alignment=LISTS)
def _first_entries_blocks_kernel(
    topk_ptr,
    block_table_ptr,
    plan_ptr,
    num_entries: tl.int32,
    num_blocks: tl.int32,
    block_table_stride: tl.int64,
    last_page: tl.int32,
    capacity: tl.int64,
    first_entries_offset: tl.int64,
    tables_offset: tl.int64,
    table_words: tl.int64,
    WORLD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CELLS: tl.constexpr,
    SPARE_CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same with any number of entries, block by block; which of them are open is kept in `first_entries`."""
    request = tl.program_id(0).to(tl.int64)
    topk_ptr += request * num_entries
    block_table_ptr += request * block_table_stride
    first_ptr = plan_ptr + first_entries_offset + request * capacity
    table = plan_ptr + tables_offset + request * table_words

    _clear_cells(table, CELLS, BLOCK)
    for start in range(0, num_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        position, mine = _positions(topk_ptr, entry, num_entries)
        page = _page(block_table_ptr, position, mine, num_blocks, WORLD, PAGE_SIZE)
        tl.store(first_ptr + entry, tl.where(_is_record(page, last_page), OPEN, ABSENT), mask=mine)
    round = 0
    num_open = 1
    while num_open > 0:
        tl.debug_barrier()
        for start in range(0, num_entries, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            position, is_open = _open_positions(topk_ptr, first_ptr, entry, num_entries)
            cell = _cell_of_round(position, round, CELLS, SPARE_CELLS)
            tl.atomic_min(table + cell, entry, mask=is_open, sem="relaxed")
        tl.debug_barrier()
        num_open = 0
        for start in range(0, num_entries, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            position, is_open = _open_positions(topk_ptr, first_ptr, entry, num_entries)
            cell = _cell_of_round(position, round, CELLS, SPARE_CELLS)
            least = tl.load(table + cell, mask=is_open, other=0, cache_modifier=".cg")
            settled = is_open & (tl.load(topk_ptr + least, mask=is_open, other=ABSENT) == position)
            tl.store(first_ptr + entry, least, mask=settled)
            is_open = is_open & ~settled
            tl.store(table + _spare_cell(position, round + 1, CELLS, SPARE_CELLS), UNCLAIMED, mask=is_open)
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
    """All of a request's entries in registers. One more program than owners: this rank's slots are its part alone."""
    request = tl.program_id(0).to(tl.int64)
    owner = tl.where(tl.program_id(1) == WORLD, rank, tl.program_id(1))
    topk_ptr += request * num_entries
    block_table_ptr += request * block_table_stride
    first_ptr = plan_ptr + first_entries_offset + request * capacity
    owned_slots_ptr = plan_ptr + owned_slots_offset + request * capacity
    remap_ptr = plan_ptr + request * num_entries
    # A reserved request that the call does not bring has no entries.
    live_entries = tl.where(request < num_requests, num_entries, 0)

    entry = tl.arange(0, BLOCK)
    _, first, entry_owner = _owned_entries(topk_ptr, first_ptr, entry, live_entries, INTERLEAVE, WORLD)
    # Absent entries belong to no owner: the first one's program writes them.
    is_own = tl.where(first < 0, owner == 0, entry_owner == owner) & (entry < live_entries)
    own_first = tl.where(is_own, first, OTHER)

    if tl.program_id(1) == WORLD:
        # Read again: kept in registers all the while it would be too much.
        position = tl.load(topk_ptr + entry, mask=own_first == entry, other=0)
        slot = _slot(block_table_ptr, position, own_first == entry, INTERLEAVE, WORLD, PAGE_SIZE)
        place, num_own = _count_up(own_first == entry, BLOCK)
        tl.store(owned_slots_ptr + place - 1, slot, mask=own_first == entry)
        # Nothing of an earlier, larger call may stay behind.
        tl.store(owned_slots_ptr + entry, ABSENT, mask=(entry >= num_own) & (entry < capacity))
    else:
        num_before = tl.sum(((first == entry) & (entry_owner < owner)).to(tl.int32), 0)
        place, num_own = _count_up(own_first == entry, BLOCK)
        number = (request * capacity).to(tl.int32) + num_before + place - 1
        chosen = tl.gather(number, tl.maximum(own_first, 0), 0)
        tl.store(remap_ptr + entry, tl.where(own_first < 0, ABSENT, chosen), mask=own_first > OTHER)
        _store_sizes(plan_ptr, request, owner, num_before, num_own, owner_offsets_offset, counts_offset, WORLD)
        _clear_remap(plan_ptr, num_requests * num_entries, capacity, owner, WORLD, BLOCK)


@triton.jit(do_not_specialize=UNION_SIZES, do_not_specialize_on_alignment=LISTS)
def _union_blocks_kernel(
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
    """The same with any number of entries, block by block."""
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
    _store_sizes(plan_ptr, request, owner, num_before, num_own, owner_offsets_offset, counts_offset, WORLD)

    tl.debug_barrier()
    begin = (request * capacity).to(tl.int32) + num_before
    for start in range(0, live_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        position, first, entry_owner = _owned_entries(topk_ptr, first_ptr, entry, live_entries, INTERLEAVE, WORLD)
        is_own = (first >= 0) & (entry_owner == owner)
        number = tl.load(number_ptr + first, mask=is_own, other=0)
        # Absent entries belong to no owner: the first one's program writes them.
        is_absent = (entry < live_entries) & (first < 0) & (owner == 0)
        tl.store(remap_ptr + entry, tl.where(is_own, begin + number, ABSENT), mask=is_own | is_absent)

    # Nothing of an earlier, larger call may stay behind.
    if owner == rank:
        for start in range(num_own, capacity.to(tl.int32), BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(owned_slots_ptr + place, ABSENT, mask=place < capacity)
    _clear_remap(plan_ptr, num_requests * num_entries, capacity, owner, WORLD, BLOCK)


@triton.jit
def _count_up(flags, BLOCK: tl.constexpr):
    """For each flag how many are set up to it, itself included; and how many are set at all. Rows of a warp's width, so
    that only their sums cross warps."""
    rows = tl.reshape(flags.to(tl.int32), [BLOCK // ROW, ROW])
    sums = tl.sum(rows, 1)
    before = tl.cumsum(sums, 0) - sums
    return tl.reshape(tl.cumsum(rows, 1) + before[:, None], [BLOCK]), tl.sum(sums, 0)


@triton.jit
def _store_sizes(
    plan_ptr, request, owner, num_before, num_own, owner_offsets_offset, counts_offset, WORLD: tl.constexpr
):
    offset_ptr = plan_ptr + owner_offsets_offset + request * (WORLD + 1) + owner
    tl.store(offset_ptr, num_before)
    if owner == WORLD - 1:
        tl.store(offset_ptr + 1, num_before + num_own)
        tl.store(plan_ptr + counts_offset + request, num_before + num_own)


@triton.jit
def _clear_remap(plan_ptr, live_entries, capacity, owner, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Beyond the entries of all of the call's requests: shared by all programs."""
    num_programs = tl.num_programs(0) * WORLD
    program = tl.program_id(0) * WORLD + owner
    reserved = (tl.num_programs(0) * capacity).to(tl.int32)
    for start in range(live_entries + program * BLOCK, reserved, num_programs * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(plan_ptr + place, ABSENT, mask=place < reserved)


@triton.jit
def _clear_cells(table, CELLS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's cells of the first table."""
    own: tl.constexpr = CELLS // NUM_PARTITIONS
    tile: tl.constexpr = own if own < BLOCK else BLOCK
    for start in range(0, own, tile):
        tl.store(table + _first_cell(CELLS) + start + tl.arange(0, tile), UNCLAIMED)


@triton.jit
def _positions(topk_ptr, entry, num_entries):
    """Positions of entries, and which of the entries are in this program's partition.

    Positions are dealt to the partitions one by one, in another order in each turn: strides do not meet in one.
    """
    position = tl.load(topk_ptr + entry, mask=entry < num_entries, other=-1)
    turn = _divide(position, NUM_PARTITIONS)
    partition = (position ^ turn ^ _divide(turn, NUM_PARTITIONS)) & (NUM_PARTITIONS - 1)
    return position, (entry < num_entries) & (partition == tl.program_id(1))


@triton.jit
def _open_positions(topk_ptr, first_ptr, entry, num_entries):
    position, mine = _positions(topk_ptr, entry, num_entries)
    first = tl.load(first_ptr + entry, mask=mine, other=ABSENT, cache_modifier=".cg")
    return position, mine & (first == OPEN)


@triton.jit
def _page(block_table_ptr, position, mask, num_blocks, WORLD: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The page of each position; -1 where there is none."""
    block = _divide(position, WORLD * PAGE_SIZE)
    return tl.load(block_table_ptr + block, mask=mask & (position >= 0) & (block < num_blocks), other=-1)


@triton.jit
def _is_record(page, last_page):
    """Whether the cache has the page, and its slots fit int32."""
    return (page >= 0) & (page <= last_page)


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
def _first_cell(CELLS: tl.constexpr):
    return tl.program_id(1) * (CELLS // NUM_PARTITIONS)


@triton.jit
def _cell(position, CELLS: tl.constexpr):
    """Where a position's entries meet first: of a partition's positions, one in each turn."""
    return _first_cell(CELLS) + (_divide(position, NUM_PARTITIONS) & (CELLS // NUM_PARTITIONS - 1))


@triton.jit
def _spare_cell(position, round, CELLS: tl.constexpr, SPARE_CELLS: tl.constexpr):
    """Where they meet in a later round: in the program's spare table of the round's parity. Losers prepare the next
    round's cells while others still read this round's."""
    table = CELLS + (tl.program_id(1) * 2 + round % 2) * SPARE_CELLS
    return table + (_hash(position, round) % SPARE_CELLS).to(tl.int32)


@triton.jit
def _cell_of_round(position, round, CELLS: tl.constexpr, SPARE_CELLS: tl.constexpr):
    return tl.where(round == 0, _cell(position, CELLS), _spare_cell(position, round, CELLS, SPARE_CELLS))


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
    wide = {"last_page": "i32", "num_entries": "i32", "num_blocks": "i32", "num_requests": "i32", "rank": "i32"}
    for rows, topk, world, interleave, page_size in (
        (1, 100, 1, 1, 64),
        (1, 2048, 8, 1, 64),
        (4, 2048, 1, 1, 64),
        (4, 2048, 4, 1, 64),
        (4, 2048, 3, 5, 80),
        (4, 2051, 4, 4, 64),
    ):
        selection = SelectionPlan(1, rows, topk, world)
        launches = _launches(selection)
        tables = {"CELLS": selection.cells, "SPARE_CELLS": selection.spare_cells}
        name = f"{rows}x{topk}-w{world}-i{interleave}-p{page_size}"
        geometry = {"WORLD": world, "PAGE_SIZE": page_size}
        for kernel, sizes, constants in (
            (launches.first_kernel, FIRST_SIZES, tables),
            (launches.union_kernel, UNION_SIZES, {"INTERLEAVE": interleave}),
        ):
            signature = pointers | {size: wide.get(size, "i64") for size in sizes}
            constants = constants | geometry | {"BLOCK": launches.options["BLOCK"]}
            warps = {"num_warps": launches.options["num_warps"]}
            yield AotConfiguration(f"{kernel.__name__}-{name}", kernel, signature, constants, warps)
