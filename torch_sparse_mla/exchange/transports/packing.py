"""Pack and unpack on the CPU, in plain PyTorch: what `triton_kernels` does on a GPU."""

import array
import zlib

import torch

from ..channel import set_of
from ..contract import ExchangeCall


def plan_digest(call: ExchangeCall) -> int:
    """Equal where owner offsets are equal, and next to never where they are not."""
    # Not by NumPy, which PyTorch can do without.
    return zlib.crc32(array.array("q", call.owner_offsets.flatten().tolist()))


def layers_and_set(call: ExchangeCall) -> tuple[int, int]:
    """What has to be equal on every rank: the layers of a call, and the set of the channel's workspaces."""
    return call.layers, set_of(call.op, call.channel, call.workspaces, call.channel.places)


def owned_places(call: ExchangeCall, rank: int) -> torch.Tensor:
    """Workspace record indices of a rank's segments, in union order."""
    capacity = call.channel.capacity_per_request
    offsets = _offsets(call)
    begins, ends = offsets[:, rank].tolist(), offsets[:, rank + 1].tolist()
    places = [
        torch.arange(request * capacity + begin, request * capacity + max(begin, end))
        for request, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    return torch.cat(places)


def _offsets(call: ExchangeCall) -> torch.Tensor:
    """Owner offsets; whatever the plan says, within the request's capacity."""
    return call.owner_offsets.long().clamp(0, call.channel.capacity_per_request)


def outgoing(call: ExchangeCall, places: torch.Tensor) -> list[torch.Tensor]:
    """What each rank gets of this one: [layers, records, record_bytes]."""
    world = call.channel.world
    if call.channel.configuration.scatter:
        return [owned_records(call, places, receiver * len(places)) for receiver in range(world)]
    return [owned_records(call, places)] * world


def owned_records(call: ExchangeCall, places: torch.Tensor, skipped: int = 0) -> torch.Tensor:
    """This rank's records as they go out, those of the slots behind the first `skipped`: [layers, records,
    record_bytes]. A slot that the cache lacks gives zeros."""
    pages, page_size, record_bytes = call.caches[0].shape
    capacity = call.channel.capacity_per_request
    begins = _offsets(call)[:, call.channel.rank]
    requests = places // capacity
    # The owned slots of a request lie at the beginning of its part, its records at their place in the union.
    entries = places - begins[requests] + skipped
    slots = call.owned_slots[entries.clamp(max=len(call.owned_slots) - 1)].long()
    present = (slots >= 0) & (slots < pages * page_size) & (entries < len(call.owned_slots))
    records = torch.zeros(call.layers, len(places), record_bytes, dtype=torch.uint8)
    for layer, cache in enumerate(call.caches):
        records[layer, present] = cache[slots[present] // page_size, slots[present] % page_size]
    return records


def place(call: ExchangeCall, places: torch.Tensor, records: torch.Tensor) -> None:
    for workspace, layer in zip(call.workspaces, records, strict=True):
        workspace[places] = layer
