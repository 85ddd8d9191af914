"""What the exchange operators accept."""

import dataclasses
import functools

import torch

from .. import lifetimes
from ..contract import (
    check_contiguous,
    check_dtype,
    check_no_overlap,
    check_same_device,
    check_shape,
    checked_mode,
    is_fake,
    refuse_checks_under_capture,
    reject,
    reject_first_row,
)
from .channel import STATE_WORDS, TAG, Channel, find_channel


@dataclasses.dataclass(frozen=True)
class ExchangeCall:
    """A call that passed its checks.

    Attributes:
        op: name of the operator.
        channel: the channel.
        caches: uint8 [pages, page_size, record_bytes], one for each layer, of equal shapes and strides.
        workspaces: uint8 [capacity_records, record_bytes], one for each layer.
        plan: the plan.
        state: the channel's counters.
    """

    op: str
    channel: Channel
    caches: list[torch.Tensor]
    workspaces: list[torch.Tensor]
    plan: torch.Tensor
    state: torch.Tensor

    @property
    def layers(self) -> int:
        return len(self.caches)

    @functools.cached_property
    def owner_offsets(self) -> torch.Tensor:
        """[requests, world + 1]"""
        offset, shape = self.channel.plan_sections["owner_offsets"]
        return self.plan.narrow(0, offset, shape[0] * shape[1]).view(shape)

    @functools.cached_property
    def owned_slots(self) -> torch.Tensor:
        """[capacity_records]"""
        offset, shape = self.channel.plan_sections["owned_slots"]
        return self.plan.narrow(0, offset, shape[0])


def check_ce_exchange(
    cache: torch.Tensor, plan: torch.Tensor, workspace: torch.Tensor, state: torch.Tensor, channel: str
) -> ExchangeCall:
    return _check("ce_exchange", [cache], plan, [workspace], state, channel, ("cache", "workspace"))


def check_ce_exchange_layers(
    caches: list[torch.Tensor], plan: torch.Tensor, workspaces: list[torch.Tensor], state: torch.Tensor, channel: str
) -> ExchangeCall:
    return _check("ce_exchange_layers", caches, plan, workspaces, state, channel)


def check_ce_exchange_start(
    caches: list[torch.Tensor], plan: torch.Tensor, workspaces: list[torch.Tensor], state: torch.Tensor, channel: str
) -> ExchangeCall:
    return _check("ce_exchange_start", caches, plan, workspaces, state, channel)


def check_ce_exchange_wait(
    caches: list[torch.Tensor], plan: torch.Tensor, workspaces: list[torch.Tensor], state: torch.Tensor, channel: str
) -> ExchangeCall:
    return _check("ce_exchange_wait", caches, plan, workspaces, state, channel)


def _check(
    op: str,
    caches: list[torch.Tensor],
    plan: torch.Tensor,
    workspaces: list[torch.Tensor],
    state: torch.Tensor,
    name: str,
    called: tuple[str, str] | None = None,
) -> ExchangeCall:
    channel = find_channel(op, name)
    lifetimes.note_use(channel.users)
    sizes = channel.configuration
    where = f"channel '{name}' on rank {channel.rank}"
    if not 1 <= len(caches) <= sizes.layers:
        reject(op, "caches", f"{len(caches)} layers", f"1 to {sizes.layers}, those of {where}")
    if len(workspaces) != len(caches):
        reject(op, "workspaces", f"{len(workspaces)} layers", f"{len(caches)}, as many as caches")
    cache_names = [called[0]] if called else [f"caches[{layer}]" for layer in range(len(caches))]
    workspace_names = [called[1]] if called else [f"workspaces[{layer}]" for layer in range(len(caches))]
    inputs = dict(zip(cache_names, caches, strict=True)) | {"plan": plan}
    outputs = dict(zip(workspace_names, workspaces, strict=True))
    check_same_device(op, state=state, **inputs, **outputs)
    if not is_fake(state) and state.device != channel.device:
        reject(op, "state", f"device {state.device}", f"device {channel.device}, that of {where}")
    for argument, cache in zip(cache_names, caches, strict=True):
        _check_cache(op, argument, cache, caches[0], channel)
    shape = (sizes.capacity_records, sizes.record_bytes)
    for argument, workspace in outputs.items():
        check_dtype(op, argument, workspace, (torch.uint8,))
        if workspace.shape != (1, *shape):
            check_shape(op, argument, workspace, shape, f"capacity_records, record_bytes of {where}")
        check_contiguous(op, argument, workspace)
    check_dtype(op, "plan", plan, (torch.int32,))
    check_shape(op, "plan", plan, (channel.plan_words,), f"words of a plan for {where}")
    check_contiguous(op, "plan", plan)
    check_dtype(op, "state", state, (torch.int32,))
    check_shape(op, "state", state, (STATE_WORDS,), "words")
    check_contiguous(op, "state", state)
    check_no_overlap(op, outputs | {"state": state}, inputs)
    if not is_fake(state) and not _is_state_of(state, channel):
        reject(op, "state", "the state of another channel", f"the state of {where}")
    call = ExchangeCall(op, channel, list(caches), [workspace.view(shape) for workspace in workspaces], plan, state)
    if checked_mode() and not is_fake(plan):
        _check_plan_values(call)
    return call


def _is_state_of(state: torch.Tensor, channel: Channel) -> bool:
    """By the tag, not by the address: a compiler may pass a copy. On a GPU the kernels look."""
    return state.is_cuda or int(state[TAG]) == channel.tag


def _check_plan_values(call: ExchangeCall) -> None:
    """Refuse a plan that names records which the cache lacks, or segments beyond the capacity. Reads the device."""
    if call.plan.is_cuda:
        refuse_checks_under_capture(call.op)
    rank, capacity = call.channel.rank, call.channel.capacity_per_request
    offsets = call.owner_offsets
    bad = (offsets < 0) | (offsets > capacity)
    bad[:, 1:] |= offsets[:, 1:] < offsets[:, :-1]
    reject_first_row(call.op, "plan", bad, offsets, f"owner offsets that do not fall, from 0 to {capacity}")
    slots = call.owned_slots.view(-1, capacity)
    lists = call.channel.world if call.channel.configuration.scatter else 1
    owned = torch.arange(capacity, device=slots.device) < lists * (offsets[:, rank + 1] - offsets[:, rank])[:, None]
    num_slots = call.caches[0].shape[0] * call.caches[0].shape[1]
    bad = owned & ((slots < 0) | (slots >= num_slots))
    reject_first_row(call.op, "plan", bad, slots, f"owned slots 0..{num_slots - 1}")


def _check_cache(op: str, argument: str, cache: torch.Tensor, first: torch.Tensor, channel: Channel) -> None:
    """A paged cache with any page stride: records of any width, packed within a page. Every layer like the first."""
    record_bytes = channel.configuration.record_bytes
    check_dtype(op, argument, cache, (torch.uint8,))
    if cache.dim() != 3 or cache.shape[2] != record_bytes or cache.shape[1] < 1:
        width = f"the record width of channel '{channel.name}' on rank {channel.rank}"
        reject(op, argument, f"shape {list(cache.shape)}", f"shape [pages, page_size >= 1, {record_bytes}], {width}")
    pages, page_size, _ = cache.shape
    if (record_bytes > 1 and cache.stride(2) != 1) or (page_size > 1 and cache.stride(1) != record_bytes):
        reject(op, argument, f"strides {list(cache.stride())}", f"strides [any, {record_bytes}, 1]")
    if pages > 1 and cache.stride(0) < page_size * record_bytes:
        reject(op, argument, f"a page stride of {cache.stride(0)} bytes", f"{page_size * record_bytes} or more")
    if cache.shape != first.shape or cache.stride() != first.stride():
        given = f"shape {list(cache.shape)}, strides {list(cache.stride())}"
        reject(op, argument, given, f"those of the first layer: {list(first.shape)}, {list(first.stride())}")
