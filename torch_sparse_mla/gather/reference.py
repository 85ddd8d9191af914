"""CPU implementations of the gather operators, in plain PyTorch."""

import torch

from ..selection.contract import page_limit
from ..sharding import local_length, local_position, owner
from . import contract
from .plan import round_up


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
    sizes = contract.check_c4_plan_gather(
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
    held = lengths.long().clamp(min=0)
    sizes.lengths(plan).zero_()[:given] = held
    known = torch.zeros_like(held)
    if resident:
        known = torch.minimum(resident_lengths.long().clamp(min=0), held)
        sizes.resident_starts(plan).zero_()[:given] = resident_starts
        sizes.resident_lengths(plan).zero_()[:given] = known
    local, skipped = torch.zeros(world, requests, dtype=torch.long), torch.zeros(world, requests, dtype=torch.long)
    for owning in range(world):
        skipped[owning, :given] = local_length(owning, known, world, interleave)
        local[owning, :given] = local_length(owning, held, world, interleave) - skipped[owning, :given]
    ends = local.cumsum(1)
    starts = ends - local
    sizes.starts(plan).copy_(starts)
    totals = ends[:, -1]
    if not resident:
        totals = torch.full_like(totals, round_up(int(totals.max()), sizes.padding_unit))
    fits = int(totals.max()) <= capacity
    offsets = sizes.owner_offsets(plan).zero_()
    offsets[0, 1:] = totals.cumsum(0) if fits else 0

    slots = sizes.owned_slots(plan).fill_(-1)
    limit = page_limit(page_size)
    for request in range(given if fits else 0):
        begin, first = int(starts[rank, request]), int(skipped[rank, request])
        positions = torch.arange(first, max(first, min(first + int(local[rank, request]), blocks * page_size)))
        pages = block_table[request, positions // page_size].long()
        found = (pages >= 0) & (pages < limit)
        slots[begin : begin + len(positions)] = torch.where(found, pages * page_size + positions % page_size, -1)

    row_requests, causal = sizes.row_requests(plan).fill_(-1), sizes.causal_lengths(plan).zero_()
    edges = row_starts.long().clamp(0, rows).tolist()
    for request in range(given):
        begin, end = edges[request], edges[request + 1]
        row_requests[begin:end] = request
        number = torch.arange(max(end - begin, 0))
        causal[begin:end] = (held[request] - (end - begin) + number + 1).clamp(min=0)


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
    offsets = contract.check_c4_remap(topk, plan, slots, counts, requests, rows, interleave, world, resident)
    if not len(topk):
        return
    words = plan.long()
    slice_records, limit = (resident, resident) if resident else (words[1], 2**31)
    if resident:
        starts = words[offsets["resident_starts"] :][:requests].expand(world, requests)
    else:
        starts = words[offsets["starts"] :][: world * requests].view(world, requests)
    lengths = words[offsets["lengths"] :][:requests]
    of_row = words[offsets["row_requests"] :][: len(topk)]
    causal = words[offsets["causal_lengths"] :][: len(topk)]
    live = (of_row >= 0) & (of_row < requests) & (words[world] > 0)
    of_row = torch.where(live, of_row, 0)
    positions = topk.long()
    present = (positions >= 0) & (positions < lengths[of_row, None]) & live[:, None]
    owners = owner(positions, world, interleave)
    begins = starts[owners, of_row[:, None]]
    places = begins + local_position(positions, world, interleave)
    present = present & (begins >= 0) & (places < limit)
    found = owners * slice_records + places
    # A stable sort of absent behind present keeps the order of what is present.
    order = torch.sort(~present, dim=1, stable=True).indices
    slots.copy_(torch.where(present, found, -1).gather(1, order))
    counts.copy_(torch.minimum(present.sum(1), causal))


def c4_place_records(
    gathered: torch.Tensor,
    plan: torch.Tensor,
    resident: torch.Tensor,
    requests: int,
    rows: int,
    interleave: int,
    world: int,
) -> None:
    views = contract.check_c4_place_records(gathered, plan, resident, requests, rows, interleave, world)
    words = plan.long()
    slice_records = len(resident) // world
    record = torch.arange(int(words[world].clamp(0, len(gathered))))
    owners = _last_that_begins(words[:world], record)
    within = record - words[owners]
    starts = words[views["starts"] :][: world * requests].view(world, requests)
    of_record = torch.zeros_like(record)
    for owning in range(world):
        of_record[owners == owning] = _last_that_begins(starts[owning], within[owners == owning])
    names = ("lengths", "resident_starts", "resident_lengths")
    lengths, begins, known = (words[views[name] + of_record] for name in names)
    held, skipped = torch.zeros_like(record), torch.zeros_like(record)
    for owning in range(world):
        mine = owners == owning
        held[mine] = local_length(owning, lengths[mine], world, interleave)
        skipped[mine] = local_length(owning, known[mine], world, interleave)
    local = within - starts[owners, of_record] + skipped
    there = (local >= 0) & (local < held) & (begins >= 0) & (begins + local < slice_records)
    places = owners * slice_records + begins + local
    resident[places[there]] = gathered[record[there]]


def _last_that_begins(begins: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The last segment that begins at each number or before; 0 where none does. Empty segments are passed."""
    return (torch.searchsorted(begins.contiguous(), numbers, right=True) - 1).clamp(min=0)


def c4_prefill_gather(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str
) -> None:
    call = contract.check_c4_prefill_gather(cache, plan, gathered, state, channel)
    call.channel.transport.refuse_if_alone(call)
    call.channel.transport.start(call)
    call.channel.transport.wait(call)


def c4_prefill_gather_start(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str
) -> None:
    call = contract.check_c4_prefill_gather_start(cache, plan, gathered, state, channel)
    call.channel.transport.start(call)


def c4_prefill_gather_wait(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str
) -> None:
    call = contract.check_c4_prefill_gather_wait(cache, plan, gathered, state, channel)
    call.channel.transport.wait(call)
