"""What the gather operators accept."""

import dataclasses
import functools
import itertools

import torch

from ..contract import (
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
from ..exchange.channel import STATE_WORDS, TAG, find_channel
from ..exchange.contract import ExchangeCall
from ..selection.contract import page_limit
from ..sharding import local_length
from .plan import GatherPlan


def check_c4_plan_gather(
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
) -> GatherPlan:
    op = "c4_plan_gather"
    tensors = {"lengths": lengths, "row_starts": row_starts, "block_table": block_table, "plan": plan}
    held = {"resident_starts": resident_starts, "resident_lengths": resident_lengths}
    for name, tensor in held.items():
        if (tensor is None) != (resident == 0):
            given = "None" if tensor is None else "a tensor"
            reject(op, name, f"{given} with resident {resident}", "a tensor where resident is above 0, else None")
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    tensors |= held
    check_same_device(op, **tensors)
    for name, tensor in tensors.items():
        check_dtype(op, name, tensor, (torch.int32,))
        dims = 2 if name == "block_table" else 1
        if tensor.dim() != dims:
            reject(op, name, f"shape {list(tensor.shape)}", f"a shape of {dims} dimension(s)")
    for name in ("lengths", "row_starts", "plan", *held):
        check_contiguous(op, name, tensors[name])
    check_last_dim_contiguous(op, "block_table", block_table)
    sizes = _sizes(op, requests, rows, capacity, world, interleave, page_size, resident)
    if not 0 <= rank < world:
        reject(op, "rank", rank, f"0 <= rank < world = {world}")
    given = block_table.shape[0]
    if given > requests:
        reject(op, "block_table", f"{given} requests", f"at most the reserved {requests}")
    for name in ("lengths", *held):
        check_shape(op, name, tensors[name], (given,), "requests")
    check_shape(op, "row_starts", row_starts, (given + 1,), "requests + 1")
    check_shape(op, "plan", plan, (sizes.words,), f"words of {sizes}")
    check_no_overlap(op, {"plan": plan}, {name: tensor for name, tensor in tensors.items() if name != "plan"})
    if checked_mode() and not is_fake(plan):
        if held:
            _check_resident_data(op, sizes, lengths, resident_starts, resident_lengths)
        _check_plan_data(op, sizes, lengths, row_starts, block_table, resident_lengths)
    return sizes


def check_c4_remap(
    topk: torch.Tensor,
    plan: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    requests: int = 1,
    rows: int = 0,
    interleave: int = 1,
    world: int = 1,
    resident: int = 0,
) -> dict[str, int]:
    """Returns the words at which the views of the plan begin; nothing for fake tensors, whose sizes may be symbols."""
    op = "c4_remap"
    tensors = {"topk": topk, "plan": plan, "slots": slots, "counts": counts}
    check_same_device(op, **tensors)
    for name, tensor in tensors.items():
        check_dtype(op, name, tensor, (torch.int32,))
    for name in ("plan", "slots", "counts"):
        check_contiguous(op, name, tensors[name])
    _check_sizes(op, requests=requests, rows=rows, interleave=interleave, world=world, resident=resident)
    if topk.dim() != 2:
        reject(op, "topk", f"shape {list(topk.shape)}", "shape [rows, K]")
    check_last_dim_contiguous(op, "topk", topk)
    given, columns = topk.shape
    if rows != 0 and given > rows:
        reject(op, "topk", f"{given} rows", f"at most the reserved {rows}")
    check_shape(op, "slots", slots, (given, columns), "rows, K of topk")
    check_shape(op, "counts", counts, (given,), "rows")
    if plan.dim() != 1:
        reject(op, "plan", f"shape {list(plan.shape)}", "shape [words], a GatherPlan buffer")
    if is_fake(plan):
        return {}
    offsets, words = plan_offsets(requests, rows or given, world, resident)
    if plan.numel() < words:
        allowed = f"more than {words} words, for {requests} requests, {rows or given} rows and {world} ranks"
        reject(op, "plan", f"{plan.numel()} words", allowed)
    check_no_overlap(op, {"slots": slots, "counts": counts}, {"topk": topk, "plan": plan})
    if checked_mode() and given:
        _check_positions(op, topk, plan, offsets)
    return offsets


def check_c4_place_records(
    gathered: torch.Tensor,
    plan: torch.Tensor,
    resident: torch.Tensor,
    requests: int,
    rows: int,
    interleave: int,
    world: int,
) -> dict[str, int]:
    """Returns the words at which the views of the plan begin; nothing for fake tensors, whose sizes may be symbols."""
    op = "c4_place_records"
    tensors = {"gathered": gathered, "plan": plan, "resident": resident}
    check_same_device(op, **tensors)
    check_dtype(op, "plan", plan, (torch.int32,))
    _check_sizes(op, requests=requests, rows=rows, interleave=interleave, world=world)
    for name in ("gathered", "resident"):
        tensor = tensors[name]
        check_dtype(op, name, tensor, (torch.uint8,))
        if tensor.dim() != 2 or tensor.shape[0] % world or tensor.shape[1] < 1:
            allowed = f"shape [a multiple of world = {world}, record_bytes]"
            reject(op, name, f"shape {list(tensor.shape)}", allowed)
    if resident.shape[1] != gathered.shape[1]:
        allowed = f"records of {gathered.shape[1]} bytes, those of gathered"
        reject(op, "resident", f"records of {resident.shape[1]} bytes", allowed)
    if plan.dim() != 1:
        reject(op, "plan", f"shape {list(plan.shape)}", "shape [words], a GatherPlan buffer")
    for name, tensor in tensors.items():
        check_contiguous(op, name, tensor)
    check_no_overlap(op, {"resident": resident}, {"gathered": gathered, "plan": plan})
    if is_fake(plan):
        return {}
    offsets, words = plan_offsets(requests, rows, world, 1)
    if plan.numel() != words + gathered.shape[0] // world:
        allowed = f"the plan of gathered, of {words + gathered.shape[0] // world} words with its resident views"
        reject(op, "plan", f"{plan.numel()} words", allowed)
    return offsets


@dataclasses.dataclass(frozen=True)
class GatherCall(ExchangeCall):
    """A gather as the exchange sees it: one request, whose union is all slices, and whose owners are the ranks."""

    @functools.cached_property
    def owner_offsets(self) -> torch.Tensor:
        """[1, world + 1]"""
        return self.plan.narrow(0, 0, self.channel.world + 1).view(1, -1)

    @functools.cached_property
    def owned_slots(self) -> torch.Tensor:
        """[capacity of a slice]"""
        capacity = self.channel.configuration.capacity_records // self.channel.world
        return self.plan.narrow(0, self.plan.numel() - capacity, capacity)


def check_c4_prefill_gather(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str
) -> GatherCall:
    return _check_gather("c4_prefill_gather", cache, plan, gathered, state, channel)


def check_c4_prefill_gather_start(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str
) -> GatherCall:
    return _check_gather("c4_prefill_gather_start", cache, plan, gathered, state, channel)


def check_c4_prefill_gather_wait(
    cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, channel: str
) -> GatherCall:
    return _check_gather("c4_prefill_gather_wait", cache, plan, gathered, state, channel)


def _check_gather(
    op: str, cache: torch.Tensor, plan: torch.Tensor, gathered: torch.Tensor, state: torch.Tensor, name: str
) -> GatherCall:
    channel = find_channel(op, name)
    configuration = channel.configuration
    where = f"channel '{name}' on rank {channel.rank}"
    records, record_bytes = configuration.capacity_records, configuration.record_bytes
    if configuration.requests != 1 or records % channel.world:
        given = f"{name!r}, of {configuration.requests} requests and {records} records"
        reject(op, "channel", given, f"a channel of 1 request and a multiple of {channel.world} records")
    check_same_device(op, state=state, cache=cache, plan=plan, gathered=gathered)
    if not is_fake(state) and state.device != channel.device:
        reject(op, "state", f"device {state.device}", f"device {channel.device}, that of {where}")
    _check_cache(op, cache, record_bytes, where)
    check_dtype(op, "gathered", gathered, (torch.uint8,))
    check_shape(op, "gathered", gathered, (records, record_bytes), f"capacity_records, record_bytes of {where}")
    check_dtype(op, "plan", plan, (torch.int32,))
    least = channel.world + 1 + records // channel.world
    if plan.dim() != 1 or plan.numel() < least:
        allowed = f"a GatherPlan buffer of capacity {records // channel.world}: at least {least} words"
        reject(op, "plan", f"shape {list(plan.shape)}", allowed)
    check_dtype(op, "state", state, (torch.int32,))
    check_shape(op, "state", state, (STATE_WORDS,), "words")
    for argument, tensor in (("gathered", gathered), ("plan", plan), ("state", state)):
        check_contiguous(op, argument, tensor)
    check_no_overlap(op, {"gathered": gathered, "state": state}, {"cache": cache, "plan": plan})
    # By the tag, not by the address: a compiler may pass a copy. On a GPU the kernels look.
    if not is_fake(state) and not state.is_cuda and int(state[TAG]) != channel.tag:
        reject(op, "state", "the state of another channel", f"the state of {where}")
    call = GatherCall(op, channel, [cache], [gathered], plan, state)
    if checked_mode() and not is_fake(plan):
        _check_gather_data(call)
    return call


def _check_sizes(op: str, **sizes: int) -> None:
    for name, value in sizes.items():
        least = 0 if name in ("rows", "resident") else 1
        if value < least:
            reject(op, name, value, f"{least} or more")


def _check_cache(op: str, cache: torch.Tensor, record_bytes: int, where: str) -> None:
    """A paged cache with any page stride: records of any width, packed within a page."""
    check_dtype(op, "cache", cache, (torch.uint8,))
    if cache.dim() != 3 or cache.shape[2] != record_bytes or cache.shape[1] < 1:
        allowed = f"shape [pages, page_size >= 1, {record_bytes}], the record width of {where}"
        reject(op, "cache", f"shape {list(cache.shape)}", allowed)
    pages, page_size, _ = cache.shape
    if (record_bytes > 1 and cache.stride(2) != 1) or (page_size > 1 and cache.stride(1) != record_bytes):
        reject(op, "cache", f"strides {list(cache.stride())}", f"strides [any, {record_bytes}, 1]")
    if pages > 1 and cache.stride(0) < page_size * record_bytes:
        reject(op, "cache", f"a page stride of {cache.stride(0)} bytes", f"{page_size * record_bytes} or more")


@functools.lru_cache(maxsize=256)
def _kept_sizes(*sizes: int) -> tuple[GatherPlan, int]:
    plan = GatherPlan(*sizes)
    return plan, plan.words


def _sizes(op: str, *sizes: int) -> GatherPlan:
    try:
        return _kept_sizes(*sizes)[0]
    except ValueError as error:
        reject(op, "plan", f"sizes of no plan ({error})", "the sizes of a GatherPlan")


@functools.lru_cache(maxsize=256)
def plan_offsets(requests: int, rows: int, world: int, resident: int) -> tuple[dict[str, int], int]:
    """Where the views that come before the slots begin; and the words up to their end. They take no other size."""
    sections = GatherPlan(requests, max(rows, 1), world, world, 1, world, min(resident, 1)).sections
    return {name: section.offset for name, section in sections.items()}, sections["owned_slots"].offset


def _check_plan_data(
    op: str,
    sizes: GatherPlan,
    lengths: torch.Tensor,
    row_starts: torch.Tensor,
    block_table: torch.Tensor,
    resident_lengths: torch.Tensor | None,
) -> None:
    """Refuse lengths and pages that do not fit. Reads the device."""
    if lengths.is_cuda:
        refuse_checks_under_capture(op)
    given, new = lengths.long(), row_starts.long().diff()
    most = block_table.shape[1] * sizes.page_size * sizes.world
    reject_first_row(op, "lengths", (given < 0) | (given > most), lengths, f"0 to {most}, what the block table holds")
    bad = row_starts < 0
    bad[1:] |= (new < 0) | (new > given)
    bad[:1] |= row_starts[:1] != 0
    allowed = "0, then sums of new lengths, none of them above the request's length"
    reject_first_row(op, "row_starts", bad | (row_starts > sizes.rows), row_starts, f"{allowed}, up to {sizes.rows}")
    if resident_lengths is None:
        needed = sizes.host_padded(lengths.tolist())
    else:
        needed = max(sizes.host_sent(lengths.tolist(), resident_lengths.tolist()))
    if needed > sizes.capacity:
        reject(
            op, "lengths", f"lengths that need {needed} records in a slice", f"at most the capacity {sizes.capacity}"
        )
    blocks = torch.arange(block_table.shape[1], device=lengths.device)
    used = blocks * sizes.page_size * sizes.world < given[:, None]
    bad = used & ((block_table < 0) | (block_table.long() >= page_limit(sizes.page_size)))
    reject_first_row(op, "block_table", bad, block_table, "a page number, where the request has tokens")


def _check_resident_data(
    op: str, sizes: GatherPlan, lengths: torch.Tensor, starts: torch.Tensor, resident_lengths: torch.Tensor
) -> None:
    """Refuse requests that are resident beyond their length, or beyond the buffer. Reads the device."""
    if lengths.is_cuda:
        refuse_checks_under_capture(op)
    bad = (resident_lengths < 0) | (resident_lengths > lengths)
    reject_first_row(op, "resident_lengths", bad, resident_lengths, "0 to the request's length")
    ends = starts.long() + local_length(0, lengths.long(), sizes.world, sizes.interleave)
    bad = (starts < 0) | (ends > sizes.resident)
    reject_first_row(op, "resident_starts", bad, starts, f"0 or more, with all records below {sizes.resident}")


def _check_positions(op: str, topk: torch.Tensor, plan: torch.Tensor, offsets: dict[str, int]) -> None:
    """Refuse a position that the row may not see. Reads the device."""
    if topk.is_cuda:
        refuse_checks_under_capture(op)
    causal = plan[offsets["causal_lengths"] :][: len(topk)]
    bad = (topk < -1) | (topk >= causal[:, None].clamp(min=0))
    allowed = "-1, or a position below the row's causal length"
    reject_first_row(op, "topk", bad, topk, allowed)


def _check_gather_data(call: GatherCall) -> None:
    """Refuse a plan that was refused itself, or that names records which the cache lacks. Reads the device."""
    if call.plan.is_cuda:
        refuse_checks_under_capture(call.op)
    offsets, capacity = call.owner_offsets[0].tolist(), len(call.owned_slots)
    slices = [end - begin for begin, end in itertools.pairwise(offsets)]
    if offsets[0] != 0 or not all(0 <= size <= capacity for size in slices):
        allowed = f"0, then slices of 0 to {capacity} records, as c4_plan_gather writes"
        reject(call.op, "plan", f"slices that begin at {offsets}", allowed)
    slots = call.owned_slots[: slices[call.channel.rank]]
    num_slots = call.caches[0].shape[0] * call.caches[0].shape[1]
    bad = (slots < -1) | (slots >= num_slots)
    reject_first_row(call.op, "plan", bad, slots, f"slots -1..{num_slots - 1}")
