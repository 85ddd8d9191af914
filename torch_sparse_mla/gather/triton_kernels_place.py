"""CUDA implementation of `c4_place_records` in Triton: a copy of as many records as a plan says, in a grid of reserved
size. Where a record belongs is found in the plan again for each layer: that costs less than a list of all places.
"""

import torch
import triton
import triton.language as tl

from ..exchange.triton_parts import as_units
from ..triton_launch import ALIGNMENT, AotConfiguration, AotConfigurations, on_device
from .contract import check_c4_place_records
from .triton_kernels import OPTIONS, _last_that_begins, _local_length

# Several for each SM: the copy is bound by memory.
MAX_PROGRAMS = 1024
UNITS_PER_TILE, MAX_COLUMNS = 2048, 1024


def tile(record_bytes: int, unit_bytes: int) -> tuple[int, int, int]:
    """Units in a record, and the records and units of a tile.

    A unit is four bytes, of which a thread moves 16 bytes at a time; or one byte, where tiles are smaller because each
    byte takes a register.
    """
    record = record_bytes // unit_bytes
    units = UNITS_PER_TILE * unit_bytes // 4
    columns = min(triton.next_power_of_2(record), units, MAX_COLUMNS)
    return record, units // columns, columns


def c4_place_records(
    gathered: torch.Tensor,
    plan: torch.Tensor,
    resident: torch.Tensor,
    requests: int,
    rows: int,
    interleave: int,
    world: int,
) -> None:
    begins = check_c4_place_records(gathered, plan, resident, requests, rows, interleave, world)
    records, record_bytes = gathered.shape
    addresses = (gathered.data_ptr(), resident.data_ptr(), record_bytes)
    unit = 1 if any(value % ALIGNMENT for value in addresses) else 4
    record, tile_rows, columns = tile(record_bytes, unit)
    names = ("starts", "lengths", "resident_starts", "resident_lengths")
    with on_device(plan):
        _place_records_kernel[(min(triton.cdiv(records, tile_rows), MAX_PROGRAMS),)](
            gathered,
            plan,
            resident,
            records,
            len(resident) // world,
            requests,
            *(begins[name] for name in names),
            WORLD=world,
            INTERLEAVE=interleave,
            UNIT=unit,
            RECORD=record,
            ROWS=tile_rows,
            COLUMNS=columns,
            **OPTIONS,
        )


# Sizes are not specialised on their values, so nothing is compiled when a chunk of another size first comes.
PLACE_SIZES = [
    "records",
    "slice_records",
    "requests",
    "starts_offset",
    "lengths_offset",
    "resident_starts_offset",
    "resident_lengths_offset",
]


@triton.jit(do_not_specialize=PLACE_SIZES)
def _place_records_kernel(
    gathered_ptr,
    plan_ptr,
    resident_ptr,
    records: tl.int32,
    slice_records: tl.int32,
    requests: tl.int32,
    starts_offset: tl.int64,
    lengths_offset: tl.int64,
    resident_starts_offset: tl.int64,
    resident_lengths_offset: tl.int64,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    UNIT: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    gathered, resident = as_units(gathered_ptr, UNIT), as_units(resident_ptr, UNIT)
    end = tl.minimum(tl.load(plan_ptr + WORLD), records)
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        record = first + tl.arange(0, ROWS)
        rank = _last_that_begins(plan_ptr, record, WORLD)
        within = record - tl.load(plan_ptr + rank)
        starts_ptr = plan_ptr + starts_offset + rank.to(tl.int64) * requests
        request = _last_that_begins(starts_ptr, within, requests)
        length = tl.load(plan_ptr + lengths_offset + request)
        known = tl.load(plan_ptr + resident_lengths_offset + request)
        local = within - tl.load(starts_ptr + request) + _local_length(known, rank, WORLD, INTERLEAVE)
        start = tl.load(plan_ptr + resident_starts_offset + request)
        live = (record < end) & (local >= 0) & (local < _local_length(length, rank, WORLD, INTERLEAVE))
        live = live & (start >= 0) & (local < slice_records - start)
        source = record.to(tl.int64) * RECORD
        place = (rank.to(tl.int64) * slice_records + start + local) * RECORD
        for column in range(0, RECORD, COLUMNS):
            unit = column + tl.arange(0, COLUMNS)
            inside = live[:, None] & (unit < RECORD)[None, :]
            values = tl.load(gathered + source[:, None] + unit[None, :], mask=inside)
            tl.store(resident + place[:, None] + unit[None, :], values, mask=inside)


def aot_configurations(capability: int) -> AotConfigurations:
    """A width in 16-byte vectors and one in bytes; geometries of powers of two, and one that is not."""
    for world, interleave in ((1, 1), (4, 4), (3, 5)):
        for record_bytes, unit in ((528, 4), (37, 1)):
            record, tile_rows, columns = tile(record_bytes, unit)
            pointers = {"gathered_ptr": "*u8", "resident_ptr": "*u8"}
            signature = {name: kind + (":16" if unit == 4 else "") for name, kind in pointers.items()}
            signature |= {"plan_ptr": "*i32:16"}
            signature |= {size: "i64" if size.endswith("_offset") else "i32" for size in PLACE_SIZES}
            constants = {"WORLD": world, "INTERLEAVE": interleave, "UNIT": unit}
            constants |= {"RECORD": record, "ROWS": tile_rows, "COLUMNS": columns}
            yield AotConfiguration(
                f"place-{record_bytes}-w{world}", _place_records_kernel, signature, constants, OPTIONS
            )
