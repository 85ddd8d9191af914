"""What the CUDA transport launches: sizes of a slab, tables of addresses, and the launches of push and wait."""

from typing import Any

import torch

from ...triton_launch import on_device
from .. import triton_kernels as kernels
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
    return table.copy_(torch.tensor([distance // VECTOR_BYTES for distance in distances], device="cpu"))


def host_words(device: torch.device) -> torch.Tensor:
    """Host memory that kernels can write: error code, peer, epoch."""
    words = torch.zeros(HOST_WORDS, dtype=torch.int32, device="cpu")
    return words.pin_memory() if device.type == "cuda" else words


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def current_stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def push(call: ExchangeCall, peers: torch.Tensor) -> None:
    """Store what this rank owns into its workspaces and into every peer's slab, and count the exchange as started."""
    pages, page_size, _ = call.caches[0].shape
    unit = unit_of(call)
    stride = call.caches[0].stride(0) // (VECTOR_BYTES if unit == UNIT_BYTES else 1)
    with on_device(call.state):
        for first, grid, form in launches(call.channel, call.layers, unit):
            kernels._push_kernel[grid](
                *padded(call.caches, first),
                *padded(call.workspaces, first),
                call.owner_offsets,
                call.owned_slots,
                call.state,
                peers,
                stride,
                page_size,
                min(pages * page_size, INT32_MAX),
                *_geometry(call.channel, first, call.layers),
                SCATTER=call.channel.configuration.scatter,
                **form,
            )


def wait(call: ExchangeCall, peers: torch.Tensor) -> None:
    """Bring the peers' records from where they arrived into the workspaces, and count the exchange as waited for."""
    with on_device(call.state):
        for first, grid, form in launches(call.channel, call.layers, unit_of(call)):
            kernels._wait_kernel[grid](
                *padded(call.workspaces, first),
                call.owner_offsets,
                call.state,
                peers,
                *_geometry(call.channel, first, call.layers),
                _timeout_ns(call.channel),
                **form,
            )


def compile_kernels(channel: Any, peers: torch.Tensor) -> None:
    """Compile what the calls of a channel launch, so that no rank compiles while a peer's clock runs. CUDA only.

    For aligned caches and workspaces where the record width allows 16-byte vectors; others compile at their first call.
    """
    if channel.device.type != "cuda":
        return
    record_bytes = channel.configuration.record_bytes
    some = torch.zeros(VECTOR_BYTES, dtype=torch.uint8, device=channel.device)
    words = some.view(torch.int32)
    layers = [some] * kernels.LAYERS_PER_LAUNCH
    unit = 1 if record_bytes % VECTOR_BYTES else UNIT_BYTES
    with on_device(channel.state):
        for first, grid, form in launches(channel, channel.configuration.layers, unit):
            geometry = _geometry(channel, first, channel.configuration.layers)
            push = (*layers, *layers, words, words, channel.state, peers, 1, 1, 1, *geometry)
            wait = (*layers, words, channel.state, peers, *geometry, _timeout_ns(channel))
            pushing = {**form, "SCATTER": channel.configuration.scatter}
            for kernel, arguments, given in ((kernels._push_kernel, push, pushing), (kernels._wait_kernel, wait, form)):
                # Loading the module is lazy too, and it may wait for kernels that run.
                kernel.warmup(*arguments, grid=grid, **given)._init_handles()


def _timeout_ns(channel: Any) -> int:
    return int(channel.configuration.timeout_s * 1e9)


def unit_of(call: ExchangeCall) -> int:
    """4 where every record of every tensor starts at a multiple of 16 bytes, else 1."""
    cache = call.caches[0]
    sizes = (cache.shape[2], cache.stride(0) if cache.shape[0] > 1 else 0)
    addresses = (tensor.data_ptr() for tensor in (*call.caches, *call.workspaces))
    aligned = not any(value % VECTOR_BYTES for value in (*sizes, *addresses))
    return UNIT_BYTES if aligned else 1


def launches(channel: Any, call_layers: int, unit: int):
    """First layer, grid and constants of each launch: of static sizes alone."""
    sizes = channel.configuration
    record, rows, columns = kernels.tile(sizes.record_bytes, unit)
    for first in range(0, call_layers, kernels.LAYERS_PER_LAUNCH):
        layers = min(kernels.LAYERS_PER_LAUNCH, call_layers - first)
        blocks = min(-(-sizes.capacity_records // rows), kernels.MAX_PROGRAMS // layers)
        form = {"UNIT": unit, "RECORD": record, "ROWS": rows, "COLUMNS": columns}
        form |= {"LAST": first + layers == call_layers, "NATIVE": not kernels.interpreted(), **kernels.OPTIONS}
        yield first, (blocks, layers), form


def _geometry(channel: Any, first: int, call_layers: int) -> tuple[int, ...]:
    return (
        channel.configuration.requests,
        channel.capacity_per_request,
        layer_bytes(channel) // VECTOR_BYTES,
        slab_bytes(channel) // VECTOR_BYTES,
        first,
        call_layers,
        channel.rank,
        channel.world,
        channel.tag,
    )


def padded(tensors: list[torch.Tensor], first: int) -> list[torch.Tensor]:
    """The tensors of one launch; those beyond the last layer repeat the first and are not looked at."""
    some = list(tensors[first : first + kernels.LAYERS_PER_LAUNCH])
    return some + some[:1] * (kernels.LAYERS_PER_LAUNCH - len(some))
