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
) -> None:
    sizes = contract.check_c4_plan_gather(
        lengths, row_starts, block_table, plan, requests, rows, capacity, page_size, interleave, rank, world
    )
    given, blocks = block_table.shape
    held = lengths.long().clamp(min=0)
    sizes.lengths(plan).zero_()[:given] = held
    local = torch.zeros(world, requests, dtype=torch.long)
    for owning in range(world):
        local[owning, :given] = local_length(owning, held, world, interleave)
    ends = local.cumsum(1)
    starts = ends - local
    sizes.starts(plan).copy_(starts)
    padded = round_up(int(ends[:, -1].max()), sizes.padding_unit)
    padded = padded if padded <= capacity else 0
    sizes.owner_offsets(plan).copy_(torch.arange(world + 1) * padded)

    slots = sizes.owned_slots(plan).fill_(-1)
    limit = page_limit(page_size)
    for request in range(given if padded else 0):
        begin, count = int(starts[rank, request]), int(local[rank, request])
        positions = torch.arange(min(count, blocks * page_size))
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
) -> None:
    offsets = contract.check_c4_remap(topk, plan, slots, counts, requests, rows, interleave, world)
    if not len(topk):
        return
    words = plan.long()
    padded = words[1]
    starts = words[offsets["starts"] :][: world * requests].view(world, requests)
    lengths = words[offsets["lengths"] :][:requests]
    of_row = words[offsets["row_requests"] :][: len(topk)]
    causal = words[offsets["causal_lengths"] :][: len(topk)]
    live = (of_row >= 0) & (of_row < requests) & (padded > 0)
    of_row = torch.where(live, of_row, 0)
    positions = topk.long()
    present = (positions >= 0) & (positions < lengths[of_row, None]) & live[:, None]
    owners = owner(positions, world, interleave)
    found = owners * padded + starts[owners, of_row[:, None]] + local_position(positions, world, interleave)
    # A stable sort of absent behind present keeps the order of what is present.
    order = torch.sort(~present, dim=1, stable=True).indices
    slots.copy_(torch.where(present, found, -1).gather(1, order))
    counts.copy_(torch.minimum(present.sum(1), causal))


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
