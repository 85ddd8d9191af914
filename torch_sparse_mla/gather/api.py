"""Public functions of the gather family."""

from collections.abc import Sequence

import torch

from .. import _ops  # noqa: F401  (registers the operators)
from ..contract import reject
from ..exchange.channel import Channel
from ..sharding import local_length
from .plan import GatherPlan, checked_integers, checked_lengths


def c4_plan_gather(
    lengths: Sequence[int],
    new_lengths: Sequence[int],
    block_table: torch.Tensor,
    sizes: GatherPlan,
    *,
    rank: int,
    plan: torch.Tensor | None = None,
    device_lengths: torch.Tensor | None = None,
    device_row_starts: torch.Tensor | None = None,
    resident_starts: Sequence[int] | None = None,
    resident_lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Where every record of a prefill chunk goes: once for each chunk, for all of its layers.

    Args:
        lengths: global length of each request on the host, cached and new tokens together.
        new_lengths: query rows of each request; rows are packed, request by request.
        block_table: [requests, blocks] int32 page numbers, the same on every rank; row stride free.
        sizes: the reserved sizes, `Workspace.sizes`. Requests and rows of the call may be fewer.
        rank: this rank.
        plan: [sizes.words] int32, such as a slot's; overwritten. Allocated when None.
        device_lengths, device_row_starts: [requests] and [requests + 1] int32, the same numbers on the device of
            block_table (lengths, and exclusive sums of new lengths), where an engine has them; None: copied, without
            waiting for the device.
        resident_starts, resident_lengths: for sizes with `resident`, the incremental form, as `Residency.begin` gives
            them: where each request's records begin in every slice of a resident buffer, and of how many of its tokens
            the records are there already. Only the others are gathered; `c4_place_records` puts them there.
    Returns: plan. Look into it by `sizes.owner_offsets(plan)`, `.starts(plan)`, `.row_requests(plan)`,
        `.causal_lengths(plan)`, `.owned_slots(plan)`.
    Raises: ValueError for an argument that does not fit, among them lengths beyond the block table or the capacity:
        before anything is written. A plan whose lengths on the device exceed the capacity is refused as a whole: every
        slice is empty, every remapped list too (checked mode, `TORCH_SPARSE_MLA_CHECK=1`, raises).
    Capture: not with host lengths, which a graph would freeze; `GatherPolicy` takes the ordinary path then. The
        operator itself can be captured. Ranks: each by itself, with the same numbers; other ones are noticed by
        `c4_prefill_gather`, which raises ExchangeError.
    """
    lengths, new_lengths = checked_lengths("c4_plan_gather", lengths, new_lengths)
    _check_host(lengths, new_lengths, block_table, sizes)
    _check_resident(lengths, new_lengths, sizes, resident_starts, resident_lengths)
    row_starts = [0]
    for new in new_lengths:
        row_starts.append(row_starts[-1] + new)
    if plan is None:
        plan = sizes.empty(block_table.device)
    if device_lengths is None:
        device_lengths = copied_to(lengths, block_table.device)
    if device_row_starts is None:
        device_row_starts = copied_to(row_starts, block_table.device)
    held = (None, None)
    if sizes.resident:
        held = tuple(copied_to(list(values), block_table.device) for values in (resident_starts, resident_lengths))
    torch.ops.torch_sparse_mla.c4_plan_gather(
        device_lengths,
        device_row_starts,
        block_table,
        plan,
        sizes.requests,
        sizes.rows,
        sizes.capacity,
        sizes.page_size,
        sizes.interleave,
        rank,
        sizes.world,
        *held,
        sizes.resident,
    )
    return plan


def c4_prefill_gather(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str | Channel
) -> None:
    """Bring every rank's visible records of one layer together; an all-gather of packed records.

    Each rank packs its records straight into its own slice of `gathered`; rows from a slice's total up to its padded
    size are zero. What lies behind `world * padded` records stays as it is. By a plan of the incremental form only new
    records travel, in slices of exact size, one behind the other: `c4_place_records` puts them where they stay.

    Args:
        cache: [pages, page_size, record_bytes] uint8, this rank's part, the chunk's own records written already; page
            stride free, records packed in a page.
        plan: int32, what `c4_plan_gather` wrote for this rank.
        gathered: [world * capacity, record_bytes] uint8, contiguous; overwritten: [world, padded, record_bytes] from
            the beginning. `gathered.unsqueeze(0)` is a cache of one page for `sparse_ckv_decode`.
        state: `channel.state`.
        channel: the channel, or its name: of 1 request and `sizes.gathered_records` records.
    Raises: as `ce_exchange`; ExchangeError where a peer's slices have another size, as rank-dependent lengths give.
    Capture: the operator can be captured. Ranks: all, one that owns nothing included.
    """
    torch.ops.torch_sparse_mla.c4_prefill_gather(cache, plan, gathered, state, _name(channel))


def c4_prefill_gather_start(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str | Channel
) -> None:
    """First half of `c4_prefill_gather`: pack and send. What follows, such as the indexer, runs while records travel.

    Args:
        cache, plan, state, channel: as for `c4_prefill_gather`; the cache may change once the call is done, in stream
            order.
        gathered: as for `c4_prefill_gather`; undefined until `c4_prefill_gather_wait`.
    Raises: as `c4_prefill_gather`; ExchangeError where the gather before was not waited for.
    Capture: as `c4_prefill_gather`. Ranks: all.
    """
    torch.ops.torch_sparse_mla.c4_prefill_gather_start(cache, plan, gathered, state, _name(channel))


def c4_prefill_gather_wait(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str | Channel
) -> None:
    """Second half of `c4_prefill_gather`: wait for every peer's records.

    Args:
        cache, plan, gathered, state, channel: those of `c4_prefill_gather_start`, the plan unchanged.
    Raises: as `c4_prefill_gather`; ExchangeError where nothing was started.
    Capture: as `c4_prefill_gather`. Ranks: all.
    """
    torch.ops.torch_sparse_mla.c4_prefill_gather_wait(cache, plan, gathered, state, _name(channel))


def c4_place_records(gathered: torch.Tensor, plan: torch.Tensor, resident: torch.Tensor, sizes: GatherPlan) -> None:
    """Put the records of an incremental gather where they stay: `resident[places] = gathered`, for one layer.

    Args:
        gathered: [world * capacity, record_bytes] uint8, contiguous; what `c4_prefill_gather` brought by the plan.
        plan: int32, what `c4_plan_gather` wrote, with its resident views.
        resident: [world * sizes.resident, record_bytes] uint8, contiguous; this layer's records of all requests that
            are resident. Those of the plan's new tokens are overwritten, nothing else. `resident.unsqueeze(0)` is a
            cache of one page for `sparse_ckv_decode`, with the slots of `c4_remap`.
        sizes: those of the plan.
    Raises: ValueError for an argument that does not fit. Nothing is written then.
    Capture: safe; plan and records may change between replays. Ranks: each by itself.
    """
    if not sizes.resident:
        reject("c4_place_records", "sizes", "sizes of the full gather", "sizes with resident above 0")
    records = sizes.world * sizes.resident
    if resident.dim() != 2 or len(resident) != records:
        allowed = f"shape [world * resident = {records}, record_bytes]"
        reject("c4_place_records", "resident", f"shape {list(resident.shape)}", allowed)
    geometry = (sizes.requests, sizes.rows, sizes.interleave, sizes.world)
    torch.ops.torch_sparse_mla.c4_place_records(gathered, plan, resident, *geometry)


def c4_remap(
    topk: torch.Tensor,
    plan: torch.Tensor,
    sizes: GatherPlan,
    *,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' top-k lists as slots of the gathered buffer.

    slot = owner(t) * padded + starts[owner(t), request] + local(t), for each t from 0 to the request's length; such
    entries come to the front in their order, -1 after them. In the incremental form they are slots of a resident
    buffer, owner(t) * resident + resident_starts[request] + local(t).

    Args:
        topk: [rows, K] int32 global positions within the request, rows in the order of the plan; -1 anywhere is absent,
            and so is a position beyond the request. A list must hold no position that its row may not see (checked
            mode, `TORCH_SPARSE_MLA_CHECK=1`, raises). Row stride free.
        plan: int32, what `c4_plan_gather` wrote.
        sizes: the reserved sizes of the plan. Rows beyond those of the plan's chunk get no slot.
        slots: [rows, K] int32, contiguous; overwritten. Allocated when None.
        counts: [rows] int32; overwritten with the number of slots, and no more than the row's causal length, which is a
            global one. Allocated when None.
    Returns: (slots, counts), as `indices` and `lengths` of `sparse_ckv_decode`.
    Raises: ValueError for an argument that does not fit. Nothing is written then.
    Capture: safe when slots and counts are given. Ranks: each by itself.
    """
    if topk.dim() != 2:
        reject("c4_remap", "topk", f"shape {list(topk.shape)}", "shape [rows, K]")
    if plan.numel() != sizes.words:
        reject("c4_remap", "plan", f"{plan.numel()} words", f"the {sizes.words} words of {sizes}")
    if slots is None:
        slots = torch.empty(topk.shape, dtype=torch.int32, device=topk.device)
    if counts is None:
        counts = torch.empty(topk.shape[:1], dtype=torch.int32, device=topk.device)
    torch.ops.torch_sparse_mla.c4_remap(
        topk, plan, slots, counts, sizes.requests, sizes.rows, sizes.interleave, sizes.world, sizes.resident
    )
    return slots, counts


def _check_host(lengths: list[int], new_lengths: list[int], block_table: torch.Tensor, sizes: GatherPlan) -> None:
    op = "c4_plan_gather"
    if len(lengths) > sizes.requests:
        reject(op, "lengths", f"{len(lengths)} requests", f"at most the reserved {sizes.requests}")
    if block_table.dim() != 2 or len(block_table) != len(lengths):
        reject(op, "block_table", f"shape {list(block_table.shape)}", f"shape [{len(lengths)} requests, blocks]")
    most = block_table.shape[1] * sizes.page_size * sizes.world
    for request, length in enumerate(lengths):
        if length > most:
            reject(op, "lengths", f"{length} in request {request}", f"0 to {most}, what the block table holds")
    if sum(new_lengths) > sizes.rows:
        reject(op, "new_lengths", f"{sum(new_lengths)} rows", f"at most the reserved {sizes.rows}")
    padded = 0 if sizes.resident else sizes.host_padded(lengths)
    if padded > sizes.capacity:
        allowed = f"at most the capacity {sizes.capacity}; reserve for more tokens, or take the ordinary path"
        reject(op, "lengths", f"{sum(lengths)} tokens, {padded} records in a slice", allowed)


def _check_resident(
    lengths: Sequence[int],
    new_lengths: Sequence[int],
    sizes: GatherPlan,
    starts: Sequence[int] | None,
    known: Sequence[int] | None,
) -> None:
    op = "c4_plan_gather"
    for name, values in (("resident_starts", starts), ("resident_lengths", known)):
        if not sizes.resident and values is not None:
            reject(op, name, "a list", "None for sizes of the full gather; set GatherPlan.resident for the incremental")
        if sizes.resident and (values is None or len(values) != len(lengths)):
            given = "None" if values is None else f"{len(values)} requests"
            reject(op, name, given, f"{len(lengths)} requests, as Residency.begin gives them for these lengths")
    if not sizes.resident:
        return
    starts, known = checked_integers(op, "resident_starts", starts), checked_integers(op, "resident_lengths", known)
    for request, (length, new, kept) in enumerate(zip(lengths, new_lengths, known, strict=True)):
        if not 0 <= kept <= length - new:
            allowed = f"0 to {length - new}, the tokens before the chunk: its own records are written anew"
            reject(op, "resident_lengths", f"{kept} in request {request}", allowed)
    end = 0
    for start, request in sorted((start, request) for request, start in enumerate(starts)):
        if start < end:
            allowed = f"{end} or more, behind the records of the request before it"
            reject(op, "resident_starts", f"{start} in request {request}", allowed)
        end = start + local_length(0, lengths[request], sizes.world, sizes.interleave)
        if end > sizes.resident:
            allowed = f"records up to {sizes.resident}, those of a slice of a resident buffer"
            reject(op, "resident_starts", f"{start} in request {request}, whose records end at {end}", allowed)
    sent = max(sizes.host_sent(lengths, known))
    if sent > sizes.capacity:
        allowed = f"at most the capacity {sizes.capacity}; send fewer new tokens in a chunk, or reserve for more"
        reject(op, "lengths", f"{sent} records to send in a slice", allowed)


def copied_to(values: list[int], device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for: pinned memory is kept until the copy is done."""
    tensor = torch.tensor(values, dtype=torch.int32, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _name(channel: str | Channel) -> str:
    return channel.name if isinstance(channel, Channel) else channel
