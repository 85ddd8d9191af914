"""What `plan_selection` accepts."""

import functools

import torch

from ..contract import (
    ALIGNMENT_BYTES,
    check_contiguous,
    check_dtype,
    check_last_dim_contiguous,
    check_no_overlap,
    check_same_device,
    check_shape,
    checked_mode,
    is_fake,
    refuse_checks_under_capture,
    reject,
    reject_first_row,
)
from ..sharding import local_position, owner
from .plan import SelectionPlan

_INT32_MAX = 2**31 - 1


def check_plan_selection(
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
) -> SelectionPlan | None:
    """Returns the reserved sizes; None for fake tensors, whose sizes may be symbols."""
    op = "plan_selection"
    check_same_device(op, topk=topk, block_table=block_table, plan=plan)
    for name, tensor, dims in (("topk", topk, 2), ("block_table", block_table, 2), ("plan", plan, 1)):
        check_dtype(op, name, tensor, (torch.int32,))
        if tensor.dim() != dims:
            reject(op, name, f"shape {list(tensor.shape)}", f"a shape of {dims} dimension(s)")
    check_contiguous(op, "topk", topk)
    check_last_dim_contiguous(op, "block_table", block_table)
    check_contiguous(op, "plan", plan)
    _check_sizes(op, topk, block_table, rows_per_request, reserved_requests, reserved_rows_per_request)
    _check_geometry(op, page_size, interleave, rank, world)
    if pages is not None and pages < 0:
        reject(op, "pages", pages, "None, or 0 and up")
    if is_fake(topk):
        return None
    selection, words = _reserved(
        reserved_requests or block_table.shape[0],
        reserved_rows_per_request or rows_per_request,
        topk.shape[1],
        world,
    )
    if plan.numel() < words:
        reject(op, "plan", f"{plan.numel()} words", f"at least {words} words for {selection}")
    if words and plan.data_ptr() % ALIGNMENT_BYTES:
        reject(op, "plan", "a misaligned first word", f"storage aligned to {ALIGNMENT_BYTES} bytes")
    check_no_overlap(op, {"plan": plan}, {"topk": topk, "block_table": block_table})
    if checked_mode():
        _check_positions(op, topk, block_table, page_size, interleave, world, pages)
    return selection


def check_selected_slots(
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
    op = "selected_slots"
    check_same_device(op, topk=topk, block_table=block_table, lengths=lengths, slots=slots, counts=counts)
    tensors = {"topk": (topk, 2), "block_table": (block_table, 2), "lengths": (lengths, 1), "slots": (slots, 2)}
    tensors |= {} if counts is None else {"counts": (counts, 1)}
    for name, (tensor, dims) in tensors.items():
        check_dtype(op, name, tensor, (torch.int32,))
        if tensor.dim() != dims:
            reject(op, name, f"shape {list(tensor.shape)}", f"a shape of {dims} dimension(s)")
    for name in tensors.keys() - {"block_table"}:
        check_contiguous(op, name, tensors[name][0])
    check_last_dim_contiguous(op, "block_table", block_table)
    rows, columns = topk.shape
    requests = block_table.shape[0]
    if rows and (requests == 0 or rows % requests):
        reject(op, "topk", f"{rows} rows", f"a multiple of the {requests} requests of 'block_table'")
    if columns < 1:
        reject(op, "topk", f"shape {list(topk.shape)}", "at least one entry in a row")
    check_shape(op, "lengths", lengths, (rows,), "rows")
    if slots.shape[1] != columns or (slots.shape[0] % rows if rows else slots.shape[0]):
        reject(op, "slots", f"shape {list(slots.shape)}", f"shape [a multiple of {rows} rows, {columns}]")
    if counts is not None:
        check_shape(op, "counts", counts, (slots.shape[0],), "rows of slots")
    _check_geometry(op, page_size, interleave, rank, world)
    if not 0 <= slots_per_rank <= (_INT32_MAX + 1) // world:
        allowed = f"0, or at most {(_INT32_MAX + 1) // world}, so that int32 can name a slot of {world} ranks"
        reject(op, "slots_per_rank", slots_per_rank, allowed)
    if not is_fake(topk):
        inputs = {"topk": topk, "block_table": block_table, "lengths": lengths}
        check_no_overlap(op, {"slots": slots, "counts": counts}, inputs)


def check_current_token_slots(
    topk: torch.Tensor, lengths: torch.Tensor, remap: torch.Tensor, slots: torch.Tensor, rows_per_request: int
) -> None:
    op = "current_token_slots"
    check_same_device(op, topk=topk, lengths=lengths, remap=remap, slots=slots)
    for name, tensor in (("topk", topk), ("remap", remap), ("slots", slots)):
        check_dtype(op, name, tensor, (torch.int32,))
    check_dtype(op, "lengths", lengths, (torch.int32, torch.int64))
    if topk.dim() != 2 or topk.shape[1] < 1:
        reject(op, "topk", f"shape {list(topk.shape)}", "shape [rows, K >= 1]")
    rows = topk.shape[0]
    if rows_per_request < 1 or rows % rows_per_request:
        reject(op, "rows_per_request", rows_per_request, f"1 or more, of which the {rows} rows are a multiple")
    check_shape(op, "remap", remap, tuple(topk.shape), "that of 'topk'")
    check_shape(op, "lengths", lengths, (rows,), "rows")
    check_shape(op, "slots", slots, (rows,), "rows")
    for name, tensor in (("topk", topk), ("lengths", lengths), ("remap", remap), ("slots", slots)):
        check_contiguous(op, name, tensor)
    if not is_fake(topk):
        check_no_overlap(op, {"slots": slots}, {"topk": topk, "lengths": lengths, "remap": remap})


def resolve(
    topk: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    interleave: int,
    world: int,
    num_pages: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each position is, in the cache of its owner: the same on every rank.

    Args:
        topk: [requests, entries] positions.
        num_pages: of a cache; None: not known.
    Returns: (owners, slots), int64 of the same shape. Both are -1 for an entry that names no record: a negative
        position, one beyond the block table, one in a page of the block table that is negative, or that the cache
        lacks, or too large for its slots to be int32.
    """
    positions = topk.long()
    blocks = block_table.shape[1]
    if blocks == 0 or positions.numel() == 0:
        return torch.full_like(positions, -1), torch.full_like(positions, -1)
    local = local_position(positions, world, interleave)
    block = local // page_size
    inside = (positions >= 0) & (block < blocks)
    pages = block_table.long().gather(1, torch.where(inside, block, 0))
    found = inside & (pages >= 0) & (pages < page_limit(page_size, num_pages))
    slots = pages * page_size + local % page_size
    return torch.where(found, owner(positions, world, interleave), -1), torch.where(found, slots, -1)


def page_limit(page_size: int, num_pages: int | None = None) -> int:
    """Pages below this one have slots that fit int32, and are among those of a cache where their number is known."""
    limit = (_INT32_MAX + 1) // page_size
    return limit if num_pages is None else min(limit, num_pages)


@functools.lru_cache(maxsize=256)
def _reserved(requests: int, rows_per_request: int, topk: int, world: int) -> tuple[SelectionPlan, int]:
    """The plan of these sizes and its words, kept because an eager call would spend most of its time on them."""
    selection = SelectionPlan(requests, rows_per_request, topk, world)
    return selection, selection.words


def _check_sizes(
    op: str,
    topk: torch.Tensor,
    block_table: torch.Tensor,
    rows_per_request: int,
    reserved_requests: int,
    reserved_rows_per_request: int,
) -> None:
    requests = block_table.shape[0]
    if topk.shape[1] < 1:
        reject(op, "topk", f"shape {list(topk.shape)}", "at least one entry in a row")
    if rows_per_request < 1:
        reject(op, "rows_per_request", rows_per_request, "1 or more")
    if topk.shape[0] != requests * rows_per_request:
        reject(
            op,
            "topk",
            f"{topk.shape[0]} rows",
            f"requests * rows_per_request = {requests} * {rows_per_request}, as 'block_table' has them",
        )
    if reserved_requests != 0 and reserved_requests < requests:
        reject(op, "reserved_requests", reserved_requests, f"0 (as many as in the call), or the call's {requests} up")
    if reserved_rows_per_request != 0 and reserved_rows_per_request < rows_per_request:
        reject(
            op,
            "reserved_rows_per_request",
            reserved_rows_per_request,
            f"0 (as many as in the call), or the call's {rows_per_request} up",
        )


def _check_geometry(op: str, page_size: int, interleave: int, rank: int, world: int) -> None:
    if world < 1:
        reject(op, "world", world, "1 or more")
    if not 0 <= rank < world:
        reject(op, "rank", rank, f"0 <= rank < world = {world}")
    if interleave < 1:
        reject(op, "interleave", interleave, "1 or more")
    if page_size < 1 or page_size % interleave or page_size * world > _INT32_MAX:
        allowed = f"a multiple of the interleave {interleave}, with page_size * world up to {_INT32_MAX}"
        reject(op, "page_size", page_size, allowed)


def _check_positions(
    op: str,
    topk: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    interleave: int,
    world: int,
    pages: int | None,
) -> None:
    if topk.is_cuda:
        refuse_checks_under_capture(op)
    if topk.numel() == 0:
        return
    owners, _ = resolve(topk.view(len(block_table), -1), block_table, page_size, interleave, world, pages)
    bad = (topk != -1) & (owners.view_as(topk) < 0)
    limit = block_table.shape[1] * page_size * world
    reject_first_row(op, "topk", bad, topk, f"-1, or a position below {limit} on a page of the block table")
