"""CPU implementations of the selection operators, in plain PyTorch."""

import torch

from .contract import check_current_token_slots, check_plan_selection, check_selected_slots, resolve


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
    selection = check_plan_selection(
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
    remap, owned_slots = selection.remap(plan), selection.owned_slots(plan)
    owner_offsets, counts = selection.owner_offsets(plan), selection.counts(plan)
    for view in (remap, owned_slots):
        view.fill_(-1)
    for view in (owner_offsets, counts):
        view.zero_()
    requests, capacity = len(block_table), selection.capacity_per_request
    entries = topk.view(requests, rows_per_request * selection.topk)
    owners, slots = resolve(entries, block_table, page_size, interleave, world, pages)
    remap_of_request = remap[: len(topk)].view(entries.shape)
    for request in range(requests):
        found = (owners[request] >= 0).nonzero().flatten()
        distinct, inverse = torch.unique(entries[request, found], return_inverse=True)
        first = torch.zeros(len(distinct), dtype=torch.long).scatter_reduce_(
            0, inverse, found, "amin", include_self=False
        )
        order = first[torch.argsort(owners[request, first] * entries.shape[1] + first)]
        place = torch.zeros(entries.shape[1], dtype=torch.int32)
        place[order] = torch.arange(len(order), dtype=torch.int32)
        remap_of_request[request, found] = request * capacity + place[first[inverse]]
        segment_sizes = torch.bincount(owners[request, order], minlength=world)
        owner_offsets[request, 1:] = segment_sizes.cumsum(0)
        counts[request] = len(order)
        owned = order[owners[request, order] == rank]
        owned_slots[request * capacity : request * capacity + len(owned)] = slots[request, owned].int()


def current_token_slots(
    topk: torch.Tensor, lengths: torch.Tensor, remap: torch.Tensor, slots: torch.Tensor, rows_per_request: int
) -> None:
    check_current_token_slots(topk, lengths, remap, slots, rows_per_request)
    if len(topk) == 0:
        return
    entries = rows_per_request * topk.shape[1]
    # The position of a padded row is negative, and so is the remap of every negative entry.
    is_current = topk.view(-1, 1, entries) == (lengths.long() - 1).view(-1, rows_per_request, 1)
    slots.copy_(torch.where(is_current, remap.view(-1, 1, entries), -1).amax(2).view(-1))


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
    if topk.numel() == 0:
        return
    visible = torch.where(topk < lengths.unsqueeze(1), topk, -1)
    owners, own_slots = resolve(visible.view(len(block_table), -1), block_table, page_size, interleave, world)
    if slots_per_rank:
        found = torch.where(own_slots < slots_per_rank, owners * slots_per_rank + own_slots, -1).clamp(min=-1)
    else:
        found = torch.where(owners == rank, own_slots, -1)
    found = found.view(topk.shape)
    if counts is not None:
        found = found.gather(1, torch.argsort(found < 0, dim=1, stable=True))
        counts.view(-1, len(topk)).copy_((found >= 0).sum(1))
    slots.view(-1, *topk.shape).copy_(found)
