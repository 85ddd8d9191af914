"""CUDA implementations of the gather operators in Triton.

`c4_plan_gather` is three small launches, once for each chunk: `_gather_starts_kernel`, one program, sums local lengths
and writes where slices begin; `_gather_slots_kernel` finds the request of each record of the own slice, and its cache
slot; `_gather_rows_kernel` finds the request of each query row, and what it may see. Their grids come from reserved
sizes. `c4_remap` is one program for each row. `c4_prefill_gather` is the exchange's push and wait, which pack as they
send.
"""

import torch
import triton
import triton.language as tl

from ..selection.contract import page_limit
from ..triton_launch import AotConfiguration, AotConfigurations, on_device
from .contract import check_c4_plan_gather, check_c4_remap
from .reference import c4_prefill_gather, c4_prefill_gather_start, c4_prefill_gather_wait

__all__ = ["c4_plan_gather", "c4_prefill_gather", "c4_prefill_gather_start", "c4_prefill_gather_wait", "c4_remap"]

REQUEST_BLOCK = 128
PLAN_BLOCK = 1024
REMAP_BLOCK = 1024
_INT32_MAX = 2**31 - 1
NUM_WARPS = 4
OPTIONS = {"num_warps": NUM_WARPS}


def c4_plan_gather(
    lengths: torch.Tensor,
    row_starts: torch.Tensor,
    block_table: torch.Tensor,
    plan: torch.Tensor,
    requests: int,
    rows: int,
    capacity: int,
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
    resident_starts: torch.Tensor | None = None,
    resident_lengths: torch.Tensor | None = None,
    resident: int = 0,
) -> None:
    sizes = check_c4_plan_gather(
        lengths,
        row_starts,
        block_table,
        plan,
        requests,
        rows,
        capacity,
        page_size,
        interleave,
        rank,
        world,
        resident_starts,
        resident_lengths,
        resident,
    )
    given, blocks = block_table.shape
    begins = {name: section.offset for name, section in sizes.sections.items()}
    views = (begins["starts"], begins["lengths"])
    resident_views = [begins.get(name, 0) for name in ("resident_starts", "resident_lengths")]
    geometry = {"WORLD": world, "INTERLEAVE": interleave, "RESIDENT": resident > 0}
    with on_device(plan):
        _gather_starts_kernel[(1,)](
            lengths,
            resident_starts if resident else lengths,
            resident_lengths if resident else lengths,
            plan,
            given,
            requests,
            capacity,
            sizes.padding_unit,
            *views,
            *resident_views,
            **geometry,
            OFFSETS=triton.next_power_of_2(world + 1),
            BLOCK=REQUEST_BLOCK,
            **OPTIONS,
        )
        _gather_slots_kernel[(triton.cdiv(capacity, PLAN_BLOCK),)](
            block_table,
            plan,
            given,
            requests,
            capacity,
            blocks,
            block_table.stride(0),
            page_limit(page_size),
            rank,
            *views,
            resident_views[1],
            begins["owned_slots"],
            **geometry,
            PAGE_SIZE=page_size,
            BLOCK=PLAN_BLOCK,
            **OPTIONS,
        )
        _gather_rows_kernel[(triton.cdiv(rows, PLAN_BLOCK),)](
            row_starts,
            plan,
            given,
            rows,
            begins["lengths"],
            begins["row_requests"],
            begins["causal_lengths"],
            BLOCK=PLAN_BLOCK,
            **OPTIONS,
        )


def c4_remap(
    topk: torch.Tensor,
    plan: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    requests: int = 1,
    rows: int = 0,
    interleave: int = 1,
    world: int = 1,
    resident: int = 0,
) -> None:
    begins = check_c4_remap(topk, plan, slots, counts, requests, rows, interleave, world, resident)
    given, columns = topk.shape
    if not given:
        return
    with on_device(plan):
        _remap_kernel[(given,)](
            topk,
            plan,
            slots,
            counts,
            columns,
            topk.stride(0),
            requests,
            resident,
            resident or _INT32_MAX,
            0 if resident else requests,
            begins["resident_starts" if resident else "starts"],
            begins["lengths"],
            begins["row_requests"],
            begins["causal_lengths"],
            WORLD=world,
            INTERLEAVE=interleave,
            BLOCK=REMAP_BLOCK,
            **OPTIONS,
        )


# Sizes are not specialised on their values, so nothing is compiled when a chunk of another size first comes.
STARTS_SIZES = [
    "num_requests",
    "requests",
    "capacity",
    "unit",
    "starts_offset",
    "lengths_offset",
    "resident_starts_offset",
    "resident_lengths_offset",
]
SLOTS_SIZES = [
    "num_requests",
    "requests",
    "capacity",
    "num_blocks",
    "block_table_stride",
    "num_pages",
    "rank",
    "starts_offset",
    "lengths_offset",
    "resident_lengths_offset",
    "slots_offset",
]
ROWS_SIZES = ["num_requests", "rows", "lengths_offset", "row_requests_offset", "causal_offset"]
REMAP_SIZES = [
    "columns",
    "topk_stride",
    "requests",
    "resident",
    "limit",
    "starts_stride",
    "starts_offset",
    "lengths_offset",
    "row_requests_offset",
    "causal_offset",
]
STARTS_POINTERS = ["lengths_ptr", "resident_starts_ptr", "resident_lengths_ptr"]


@triton.jit(do_not_specialize=STARTS_SIZES, do_not_specialize_on_alignment=STARTS_POINTERS)
def _gather_starts_kernel(
    lengths_ptr,
    resident_starts_ptr,
    resident_lengths_ptr,
    plan_ptr,
    num_requests: tl.int32,
    requests: tl.int32,
    capacity: tl.int64,
    unit: tl.int64,
    starts_offset: tl.int64,
    lengths_offset: tl.int64,
    resident_starts_offset: tl.int64,
    resident_lengths_offset: tl.int64,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    RESIDENT: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Also copies what the other kernels and operators read of the call: they are given the plan alone."""
    largest = tl.full((), 0, tl.int64)
    number = tl.arange(0, OFFSETS)
    offsets = tl.zeros([OFFSETS], tl.int64)
    starts_ptr = plan_ptr + starts_offset
    for rank in range(WORLD):
        total = tl.full((), 0, tl.int64)
        for first in range(0, requests, BLOCK):
            request = first + tl.arange(0, BLOCK)
            length = tl.load(lengths_ptr + request, mask=request < num_requests, other=0)
            length = tl.maximum(length, 0)
            local = _local_length(length, rank, WORLD, INTERLEAVE).to(tl.int64)
            if RESIDENT:
                given = request < num_requests
                known = tl.load(resident_lengths_ptr + request, mask=given, other=0)
                known = tl.minimum(tl.maximum(known, 0), length)
                local -= _local_length(known, rank, WORLD, INTERLEAVE)
                start = tl.load(resident_starts_ptr + request, mask=given, other=0)
                tl.store(plan_ptr + resident_starts_offset + request, start, mask=request < requests)
                tl.store(plan_ptr + resident_lengths_offset + request, known, mask=request < requests)
            tl.store(starts_ptr + request, (total + tl.cumsum(local) - local).to(tl.int32), mask=request < requests)
            tl.store(plan_ptr + lengths_offset + request, length, mask=request < requests)
            total += tl.sum(local)
        largest = tl.maximum(largest, total)
        offsets += tl.where(number > rank, total, 0)
        starts_ptr += requests
    if not RESIDENT:
        largest = (largest + unit - 1) // unit * unit
        offsets = number * largest
    offsets = tl.where(largest <= capacity, offsets, 0)
    tl.store(plan_ptr + number, offsets.to(tl.int32), mask=number <= WORLD)


@triton.jit(do_not_specialize=SLOTS_SIZES, do_not_specialize_on_alignment=["block_table_ptr"])
def _gather_slots_kernel(
    block_table_ptr,
    plan_ptr,
    num_requests: tl.int32,
    requests: tl.int32,
    capacity: tl.int32,
    num_blocks: tl.int32,
    block_table_stride: tl.int64,
    num_pages: tl.int64,
    rank: tl.int32,
    starts_offset: tl.int64,
    lengths_offset: tl.int64,
    resident_lengths_offset: tl.int64,
    slots_offset: tl.int64,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    RESIDENT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    record = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    starts_ptr = plan_ptr + starts_offset + rank.to(tl.int64) * requests
    request = _last_that_begins(starts_ptr, record, num_requests)
    inside = (record < capacity) & (request < num_requests) & (tl.load(plan_ptr + WORLD) > 0)
    local = record - tl.load(starts_ptr + request, mask=inside, other=0)
    if RESIDENT:
        known = tl.load(plan_ptr + resident_lengths_offset + request, mask=inside, other=0)
        local += _local_length(known, rank, WORLD, INTERLEAVE)
    length = tl.load(plan_ptr + lengths_offset + request, mask=inside, other=0)
    block = local // PAGE_SIZE
    inside = inside & (local < _local_length(length, rank, WORLD, INTERLEAVE)) & (block < num_blocks)
    page = tl.load(block_table_ptr + request * block_table_stride + block, mask=inside, other=-1)
    found = inside & (page >= 0) & (page < num_pages)
    slot = tl.where(found, page * PAGE_SIZE + local % PAGE_SIZE, -1)
    tl.store(plan_ptr + slots_offset + record, slot, mask=record < capacity)


@triton.jit(do_not_specialize=ROWS_SIZES, do_not_specialize_on_alignment=["row_starts_ptr"])
def _gather_rows_kernel(
    row_starts_ptr,
    plan_ptr,
    num_requests: tl.int32,
    rows: tl.int32,
    lengths_offset: tl.int64,
    row_requests_offset: tl.int64,
    causal_offset: tl.int64,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = _last_that_begins(row_starts_ptr, row, num_requests)
    live = (row < rows) & (request < num_requests)
    begin = tl.load(row_starts_ptr + request, mask=live, other=0)
    end = tl.load(row_starts_ptr + request + 1, mask=live, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), rows)
    end = tl.minimum(tl.maximum(end, 0), rows)
    live = live & (row >= begin) & (row < end)
    length = tl.load(plan_ptr + lengths_offset + request, mask=live, other=0)
    causal = tl.maximum(length - (end - begin) + (row - begin) + 1, 0)
    tl.store(plan_ptr + row_requests_offset + row, tl.where(live, request, -1), mask=row < rows)
    tl.store(plan_ptr + causal_offset + row, tl.where(live, causal, 0), mask=row < rows)


@triton.jit(do_not_specialize=REMAP_SIZES, do_not_specialize_on_alignment=["topk_ptr", "slots_ptr", "counts_ptr"])
def _remap_kernel(
    topk_ptr,
    plan_ptr,
    slots_ptr,
    counts_ptr,
    columns: tl.int32,
    topk_stride: tl.int64,
    requests: tl.int32,
    resident: tl.int32,
    limit: tl.int32,
    starts_stride: tl.int32,
    starts_offset: tl.int64,
    lengths_offset: tl.int64,
    row_requests_offset: tl.int64,
    causal_offset: tl.int64,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slice_records = tl.where(resident > 0, resident, tl.load(plan_ptr + 1))
    request = tl.load(plan_ptr + row_requests_offset + row)
    live = (request >= 0) & (request < requests) & (tl.load(plan_ptr + WORLD) > 0)
    request = tl.where(live, request, 0)
    # Without a length no position is present.
    length = tl.where(live, tl.load(plan_ptr + lengths_offset + request), 0)
    starts_ptr = plan_ptr + starts_offset + request
    slots_ptr += row * columns
    count = tl.full((), 0, tl.int32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        position = tl.load(topk_ptr + row * topk_stride + column, mask=column < columns, other=-1)
        present = (position >= 0) & (position < length)
        # Unsigned, because that is a mere shift by a power of two.
        run = position.to(tl.uint32) // INTERLEAVE
        turn = run // WORLD
        rank = (run - turn * WORLD).to(tl.int32)
        local = (turn * INTERLEAVE + position.to(tl.uint32) % INTERLEAVE).to(tl.int32)
        start = tl.load(starts_ptr + rank.to(tl.int64) * starts_stride, mask=present, other=0)
        present = present & (start >= 0) & (local < limit - start)
        place = count + tl.cumsum(present.to(tl.int32)) - 1
        tl.store(slots_ptr + place, rank * slice_records + start + local, mask=present)
        count += tl.sum(present.to(tl.int32))
    for first in range(count // BLOCK * BLOCK, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(slots_ptr + column, -1, mask=(column >= count) & (column < columns))
    tl.store(counts_ptr + row, tl.minimum(count, tl.load(plan_ptr + causal_offset + row)))


@triton.jit
def _local_length(length, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """How many of a request's first `length` tokens a rank holds."""
    period = WORLD * INTERLEAVE
    rest = tl.minimum(tl.maximum(length % period - rank * INTERLEAVE, 0), INTERLEAVE)
    return length // period * INTERLEAVE + rest


@triton.jit
def _last_that_begins(begins_ptr, number, count):
    """The last of `count` segments that begins at `number` or before; 0 where none does. Empty segments are passed."""
    found = tl.zeros_like(number)
    step = tl.full((), 1, tl.int32)
    while step < count:
        step *= 2
    while step > 0:
        candidate = found + step
        begins = tl.load(begins_ptr + candidate, mask=candidate < count, other=0)
        found = tl.where((candidate < count) & (begins <= number), candidate, found)
        step = step // 2
    return found


def aot_configurations(capability: int) -> AotConfigurations:
    """On any GPU: geometries of powers of two, and one that is not."""
    for world, interleave, page_size in ((1, 1, 64), (4, 4, 64), (4, 4, 2304), (3, 5, 80)):
        name = f"w{world}-i{interleave}-p{page_size}"
        geometry = {"WORLD": world, "INTERLEAVE": interleave}
        resident = {"RESIDENT": world == 4}
        plan = {"plan_ptr": "*i32:16"}
        starts = {"OFFSETS": triton.next_power_of_2(world + 1), "BLOCK": REQUEST_BLOCK}
        slots = {"PAGE_SIZE": page_size, "BLOCK": PLAN_BLOCK}
        for kernel, pointers, sizes, wide, constants in (
            (
                _gather_starts_kernel,
                STARTS_POINTERS,
                STARTS_SIZES,
                ["capacity", "unit"],
                geometry | resident | starts,
            ),
            (
                _gather_slots_kernel,
                ["block_table_ptr"],
                SLOTS_SIZES,
                ["block_table_stride", "num_pages"],
                geometry | resident | slots,
            ),
            (_gather_rows_kernel, ["row_starts_ptr"], ROWS_SIZES, [], {"BLOCK": PLAN_BLOCK}),
            (
                _remap_kernel,
                ["topk_ptr", "slots_ptr", "counts_ptr"],
                REMAP_SIZES,
                ["topk_stride"],
                geometry | {"BLOCK": REMAP_BLOCK},
            ),
        ):
            signature = dict.fromkeys(pointers, "*i32") | plan
            signature |= {size: "i64" if size in wide or size.endswith("_offset") else "i32" for size in sizes}
            yield AotConfiguration(f"{kernel.__name__}-{name}", kernel, signature, constants, OPTIONS)
