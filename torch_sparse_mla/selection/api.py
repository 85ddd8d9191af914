"""Public functions of the selection family."""

import torch

from .. import _ops  # noqa: F401  (registers the operators)
from ..contract import check_contiguous, check_dtype, check_same_device, check_shape, reject
from .plan import SelectionPlan


def plan_selection(
    topk: torch.Tensor,
    block_table: torch.Tensor,
    selection: SelectionPlan,
    *,
    page_size: int,
    interleave: int,
    rank: int,
    plan: torch.Tensor | None = None,
    pages: int | None = None,
) -> torch.Tensor:
    """Which records a DCP group must bring together for the rows' top-k lists, in which order, and who holds them.

    For each request by itself: the distinct positions of all its rows (its union), in segments by owner, and within a
    segment in order of first occurrence, row by row. Ranks that are given the same lists and block table get the same
    plan but for `owned_slots`, so nothing about it has to be sent.

    Args:
        topk: [requests * rows_per_request, K] int32 global positions within the request, contiguous; -1 anywhere is
            absent. A position that names no record (beyond the block table, or on a page of it that is negative or
            beyond `pages`) counts as absent as well (checked mode, `TORCH_SPARSE_MLA_CHECK=1`, raises and names the
            row).
        block_table: [requests, blocks] int32 page numbers, the same on every rank; row stride free.
        selection: the reserved sizes. Requests and rows per request of the call may be fewer.
        page_size, interleave, rank: the DCP geometry, with `selection.world`; see `torch_sparse_mla.sharding`.
        plan: [selection.words] int32 or more, 16-byte aligned; its views are overwritten. Allocated when None.
        pages: of every rank's cache, so that what a cache lacks is not in the plan; None: not known.
    Returns: plan. Look into it by `selection.remap(plan)`, `.owner_offsets(plan)`, `.owned_slots(plan)`,
        `.counts(plan)`.
    Raises: ValueError for an argument that does not fit, among them more rows or requests than reserved. Nothing is
        written then.
    Capture: safe when plan is given; topk and block_table may change between replays. One plan buffer may serve calls
        that run one after another; calls that can run at the same time need one each. Ranks: each calls by itself.
    """
    if topk.dim() != 2 or topk.shape[1] != selection.topk:
        allowed = f"shape [rows, {selection.topk}], the K of the selection plan"
        reject("plan_selection", "topk", f"shape {list(topk.shape)}", allowed)
    if block_table.dim() != 2:
        reject("plan_selection", "block_table", f"shape {list(block_table.shape)}", "shape [requests, blocks]")
    if plan is None:
        plan = selection.empty(topk.device)
    if not topk.shape[0]:
        # Requests without any row are no different from those that the call does not bring.
        block_table = block_table[:0]
    requests = block_table.shape[0]
    rows_per_request = topk.shape[0] // requests if requests else 1
    torch.ops.torch_sparse_mla.plan_selection(
        topk,
        block_table,
        plan,
        rows_per_request,
        page_size,
        interleave,
        rank,
        selection.world,
        selection.requests,
        selection.rows_per_request,
        pages,
    )
    return plan


def selected_slots(
    topk: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_size: int,
    interleave: int,
    rank: int,
    world: int,
    slots_per_rank: int = 0,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Where the rows' selected tokens lie: slots of one rank's cache, or of all ranks' caches as if they were one.

    Args:
        topk: [requests * rows_per_request, K] int32 global positions within the request, contiguous; -1 anywhere is
            absent, and so is a position that names no record.
        block_table: [requests, blocks] int32 page numbers, the same on every rank; row stride free.
        lengths: [rows] int32 global lengths: a row sees positions below its length; <= 0: none.
        page_size, interleave, rank, world: the DCP geometry; see `torch_sparse_mla.sharding`.
        slots_per_rank: 0: slots of the rank's own cache, -1 for a token of another rank. Else the slots of each rank's
            cache: `owner * slots_per_rank + slot`, as `sparse_ckv_decode_peers` takes them.
        slots: [copies * rows, K] int32, overwritten with as many copies as it has room for. One copy when None.
        counts: [copies * rows] int32, overwritten with the slots found in each row, which then come first in it, in the
            order of the list: `lengths` for attention. None: slots stay at the places of their tokens.
    Returns: slots.
    Raises: ValueError for an argument that does not fit, before anything is written.
    Capture: safe when slots is given; topk, block_table and lengths may change between replays.
    """
    if slots is None:
        slots = torch.empty_like(topk)
    torch.ops.torch_sparse_mla.selected_slots(
        topk, block_table, lengths, slots, counts, page_size, interleave, rank, world, slots_per_rank
    )
    return slots


def current_token_slots(
    topk: torch.Tensor,
    lengths: torch.Tensor,
    selection: SelectionPlan,
    plan: torch.Tensor,
    *,
    rows_per_request: int | None = None,
) -> torch.Tensor:
    """Where in a workspace the rows' own tokens belong, for records that were fetched before this step wrote them.

    A layer that is fetched ahead of its own write lacks the tokens of this step. `write_ckv_records` with these slots,
    into the workspace, puts them there. A row's token has a place if any row of its request selected it: a later row of
    the request may have, where the row itself has not.

    Args:
        topk: [requests * rows_per_request, K] int32, as given to `plan_selection`.
        lengths: [requests * rows_per_request] integer global lengths: a row's token is at position `length - 1`; <= 0
            is a padded row.
        selection, plan: what `plan_selection` made of `topk`.
        rows_per_request: rows of each request in this call; None: as many as reserved.
    Returns: [requests * rows_per_request] int32 workspace record indices, -1 for a token that nobody selected.
    Raises: ValueError for an argument that does not fit.
    Capture: safe; the lists, lengths and plan may change between replays.
    """
    name = "current_token_slots"
    rows_per_request = selection.rows_per_request if rows_per_request is None else rows_per_request
    check_same_device(name, topk=topk, lengths=lengths, plan=plan)
    check_dtype(name, "topk", topk, (torch.int32,))
    check_dtype(name, "lengths", lengths, (torch.int32, torch.int64))
    if not 1 <= rows_per_request <= selection.rows_per_request:
        reject(name, "rows_per_request", rows_per_request, f"1 to the reserved {selection.rows_per_request}")
    if topk.dim() != 2 or topk.shape[1] != selection.topk or topk.shape[0] % rows_per_request:
        allowed = f"shape [a multiple of rows_per_request = {rows_per_request}, {selection.topk}]"
        reject(name, "topk", f"shape {list(topk.shape)}", allowed)
    rows = topk.shape[0]
    if rows > selection.requests * rows_per_request:
        reject(name, "topk", f"{rows} rows", f"up to {selection.requests} requests of {rows_per_request} rows")
    check_contiguous(name, "topk", topk)
    check_shape(name, "lengths", lengths, (rows,), "rows")
    check_dtype(name, "plan", plan, (torch.int32,))
    if plan.dim() != 1 or plan.numel() < selection.words:
        reject(name, "plan", f"shape {list(plan.shape)}", f"a plan buffer of {selection.words} words or more")
    slots = torch.empty(rows, dtype=torch.int32, device=topk.device)
    remap = selection.remap(plan)[:rows]
    torch.ops.torch_sparse_mla.current_token_slots(topk, lengths, remap, slots, rows_per_request)
    return slots
