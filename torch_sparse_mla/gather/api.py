"""Public functions of the gather family."""

from collections.abc import Sequence

import torch

from .. import _ops  # noqa: F401  (registers the operators)
from ..contract import reject
from ..exchange.channel import Channel
from .plan import GatherPlan, checked_lengths


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
    row_starts = [0]
    for new in new_lengths:
        row_starts.append(row_starts[-1] + new)
    if plan is None:
        plan = sizes.empty(block_table.device)
    if device_lengths is None:
        device_lengths = _on_device(lengths, block_table.device)
    if device_row_starts is None:
        device_row_starts = _on_device(row_starts, block_table.device)
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
    )
    return plan


def c4_prefill_gather(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str | Channel
) -> None:
    """Bring every rank's visible records of one layer together; an all-gather of packed records.

    Each rank packs its records straight into its own slice of `gathered`; rows from a slice's total up to its padded
    size are zero. What lies behind `world * padded` records stays as it is.

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
    entries come to the front in their order, -1 after them.

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
        topk, plan, slots, counts, sizes.requests, sizes.rows, sizes.interleave, sizes.world
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
    padded = sizes.host_padded(lengths)
    if padded > sizes.capacity:
        allowed = f"at most the capacity {sizes.capacity}; reserve for more tokens, or take the ordinary path"
        reject(op, "lengths", f"{sum(lengths)} tokens, {padded} records in a slice", allowed)


def _on_device(values: list[int], device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for: pinned memory is kept until the copy is done."""
    tensor = torch.tensor(values, dtype=torch.int32, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _name(channel: str | Channel) -> str:
    return channel.name if isinstance(channel, Channel) else channel
