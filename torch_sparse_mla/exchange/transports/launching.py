"""What the CUDA transports share: sizes of a slab, tables of addresses, and the launches of push and wait."""

from typing import Any

import torch

from ...triton_launch import on_device
from .. import triton_kernels as kernels
from ..channel import ERROR, ERROR_EPOCH, ERROR_PEER, STATE_WORDS
from ..contract import ExchangeCall

HOST_WORDS = 4
# Slots are int32: a cache may have more, but none can be named.
INT32_MAX = 2**31 - 1
UNIT_BYTES = 4
VECTOR_BYTES = 16


def layer_bytes(channel: Any) -> int:
    """From one layer of a slab to the next: a multiple of a vector."""
    sizes = channel.configuration
    return -(-sizes.capacity_records * sizes.record_bytes // VECTOR_BYTES) * VECTOR_BYTES


def slab_bytes(channel: Any) -> int:
    return channel.configuration.layers * layer_bytes(channel)


def address_table(addresses: list[int], channel: Any) -> torch.Tensor:
    """int64 on the device: where memory lies, counted in 16 bytes from the table itself."""
    table = torch.empty(len(addresses), dtype=torch.int64, device=channel.device)
    distances = [address - table.data_ptr() for address in addresses]
    if any(distance % VECTOR_BYTES for distance in distances):
        raise RuntimeError(f"peer memory at {addresses} is not aligned to {VECTOR_BYTES} bytes")
    return table.copy_(torch.tensor([distance // VECTOR_BYTES for distance in distances]))


def host_words(device: torch.device) -> torch.Tensor:
    """Host memory that kernels can write: error code, peer, epoch."""
    words = torch.zeros(HOST_WORDS, dtype=torch.int32)
    return words.pin_memory() if device.type == "cuda" else words


def raise_host_error(channel: Any, words: torch.Tensor) -> None:
    """Raise what an earlier kernel recorded, as far as it is known without waiting for the device."""
    code, peer, epoch = words[:3].tolist()
    if code:
        recorded = [0] * STATE_WORDS
        recorded[ERROR], recorded[ERROR_PEER], recorded[ERROR_EPOCH] = code, peer, epoch
        channel.raise_recorded(recorded)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def current_stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def push(call: ExchangeCall, peers: torch.Tensor, num_targets: int, *, flags: bool) -> None:
    """Store what this rank owns into its workspaces and into every target, and count the exchange as started."""
    pages, page_size, _ = call.caches[0].shape
    unit = _unit(call)
    stride = call.caches[0].stride(0) // (VECTOR_BYTES if unit == UNIT_BYTES else 1)
    with on_device(call.state):
        for first, grid, form in _launches(call, unit, flags):
            kernels._push_kernel[grid](
                *_padded(call.caches, first),
                *_padded(call.workspaces, first),
                call.owner_offsets,
                call.owned_slots,
                call.state,
                peers,
                stride,
                page_size,
                min(pages * page_size, INT32_MAX),
                *_geometry(call, first),
                num_targets,
                **form,
            )


def wait(call: ExchangeCall, peers: torch.Tensor, peer_stride: int, *, flags: bool) -> None:
    """Bring the peers' records from where they arrived into the workspaces, and count the exchange as waited for."""
    timeout_ns = int(call.channel.configuration.timeout_s * 1e9)
    with on_device(call.state):
        for first, grid, form in _launches(call, _unit(call), flags):
            kernels._wait_kernel[grid](
                *_padded(call.workspaces, first),
                call.owner_offsets,
                call.state,
                peers,
                *_geometry(call, first),
                peer_stride // VECTOR_BYTES,
                timeout_ns,
                **form,
            )


def _unit(call: ExchangeCall) -> int:
    """4 where every record of every tensor starts at a multiple of 16 bytes, else 1."""
    cache = call.caches[0]
    sizes = (cache.shape[2], cache.stride(0) if cache.shape[0] > 1 else 0)
    addresses = (tensor.data_ptr() for tensor in (*call.caches, *call.workspaces))
    aligned = not any(value % VECTOR_BYTES for value in (*sizes, *addresses))
    return UNIT_BYTES if aligned else 1


def _launches(call: ExchangeCall, unit: int, flags: bool):
    """First layer, grid and constants of each launch: of static sizes alone."""
    sizes = call.channel.configuration
    record, rows, columns = kernels.tile(sizes.record_bytes, unit)
    for first in range(0, call.layers, kernels.LAYERS_PER_LAUNCH):
        layers = min(kernels.LAYERS_PER_LAUNCH, call.layers - first)
        blocks = min(-(-sizes.capacity_records // rows), kernels.MAX_PROGRAMS // layers)
        form = {"UNIT": unit, "RECORD": record, "ROWS": rows, "COLUMNS": columns, "FLAGS": flags}
        form |= {"LAST": first + layers == call.layers, "SLABS": 2 if flags else 1}
        yield first, (blocks, layers), {**form, "NATIVE": not kernels.interpreted(), **kernels.OPTIONS}


def _geometry(call: ExchangeCall, first: int) -> tuple[int, ...]:
    channel = call.channel
    return (
        channel.configuration.requests,
        channel.capacity_per_request,
        layer_bytes(channel) // VECTOR_BYTES,
        slab_bytes(channel) // VECTOR_BYTES,
        first,
        call.layers,
        channel.rank,
        channel.world,
    )


def _padded(tensors: list[torch.Tensor], first: int) -> list[torch.Tensor]:
    """The tensors of one launch; those beyond the last layer repeat the first and are not looked at."""
    some = list(tensors[first : first + kernels.LAYERS_PER_LAUNCH])
    return some + some[:1] * (kernels.LAYERS_PER_LAUNCH - len(some))
