"""What the CUDA transports launch: sizes of a slab, tables of addresses, and the launches of push and wait.

How many programs a launch has. Those that move records through a GPU's own memory take all that run at once, which is
what it takes to keep the memory busy. Those that store at peers are held up by the link; half leaves registers to what
runs beside them. Those that poll are one for a multiprocessor at most, and all ranks that share the GPU together leave
an eighth of the multiprocessors alone: what a peer waits for may come, on this very GPU, behind an attention kernel,
whose blocks take a whole multiprocessor each and would wait for one that does not poll until the timeout.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]


class Operands(NamedTuple):
    """What the launches of a call get from it.

    Attributes:
        unit: 4 where every record of every tensor starts at a multiple of 16 bytes, else 1.
        stride: from page to page, in vectors.
    """

    caches: list[torch.Tensor]
    workspaces: list[torch.Tensor]
    owner_offsets: torch.Tensor
    owned_slots: torch.Tensor
    state: torch.Tensor
    unit: int
    stride: int
    page_size: int
    num_slots: int

    @staticmethod
    def of(call: ExchangeCall) -> "Operands":
        pages, page_size, _ = call.caches[0].shape
        unit = unit_of(call)
        return Operands(
            call.caches,
            call.workspaces,
            call.owner_offsets,
            call.owned_slots,
            call.state,
            unit,
            call.caches[0].stride(0) // (VECTOR_BYTES if unit == UNIT_BYTES else 1),
            page_size,
            min(pages * page_size, INT32_MAX),
        )

    @staticmethod
    def to_compile(channel: Any) -> "Operands":
        """Of aligned caches and workspaces, as many layers as a call may have. Others compile at their first call."""
        some = torch.zeros(VECTOR_BYTES, dtype=torch.uint8, device=channel.device)
        words, layers = some.view(torch.int32), [some] * channel.configuration.layers
        unit = 1 if channel.configuration.record_bytes % VECTOR_BYTES else UNIT_BYTES
        return Operands(layers, layers, words, words, channel.state, unit, 1, 1, 1)

    @property
    def source(self) -> tuple:
        return self.stride, self.page_size, self.num_slots


def run(launches: Iterable[Launch], state: torch.Tensor) -> None:
    with on_device(state):
        for kernel, grid, arguments, constants in launches:
            kernel[grid](*arguments, **constants)


def compile_all(launches: Iterable[Launch], channel: Any) -> None:
    """So that no rank compiles, or loads a module, while a peer's clock runs. CUDA only."""
    if channel.device.type != "cuda":
        return
    with on_device(channel.state):
        for kernel, grid, arguments, constants in launches:
            # Loading the module is lazy too, and it may wait for kernels that run.
            kernel.warmup(*arguments, grid=grid, **constants)._init_handles()


def push_launches(channel: Any, operands: Operands, peers: torch.Tensor, place: tuple[int, int]) -> Iterator[Launch]:
    """Store what this rank owns into its workspaces and where every peer gets it, and count the exchange as started.

    Args: place: the set of workspaces that this call fills, and where it lies; see `DirectTransport`.
    """
    per_sm = kernels.BLOCKS_PER_SM if channel.world == 1 else kernels.BLOCKS_PER_SM // 2
    programs = per_sm * num_sms(channel.device)
    for first, grid, form in launches(channel, len(operands.caches), operands.unit, programs):
        arguments = (
            *padded(operands.caches, first),
            *padded(operands.workspaces, first),
            operands.owner_offsets,
            operands.owned_slots,
            operands.state,
            peers,
            *operands.source,
            *_geometry(channel, place, first, len(operands.caches)),
        )
        yield Launch(kernels._push_kernel, grid, arguments, form | {"SCATTER": channel.configuration.scatter})


def wait_launches(channel: Any, operands: Operands, peers: torch.Tensor, place: tuple[int, int]) -> Iterator[Launch]:
    """Bring the peers' records from where they arrived into the workspaces, and count the exchange as waited for."""
    sms = num_sms(channel.device)
    programs = (sms - sms // 8) // channel.sharing
    for first, grid, form in launches(channel, len(operands.caches), operands.unit, programs):
        arguments = (
            *padded(operands.workspaces, first),
            operands.owner_offsets,
            operands.state,
            peers,
            *_geometry(channel, place, first, len(operands.caches)),
            int(channel.configuration.timeout_s * 1e9),
        )
        del form["ROWS"]
        yield Launch(kernels._wait_kernel, grid, arguments, form)


def unit_of(call: ExchangeCall) -> int:
    cache = call.caches[0]
    sizes = (cache.shape[2], cache.stride(0) if cache.shape[0] > 1 else 0)
    addresses = (tensor.data_ptr() for tensor in (*call.caches, *call.workspaces))
    aligned = not any(value % VECTOR_BYTES for value in (*sizes, *addresses))
    return UNIT_BYTES if aligned else 1


def launches(
    channel: Any, call_layers: int, unit: int, programs: int
) -> Iterator[tuple[int, tuple[int, int], dict[str, Any]]]:
    """First layer, grid and constants of each launch: of static sizes alone. Args: programs: the most of a launch."""
    form = kernels.tile(channel.configuration.record_bytes, unit)
    for first in range(0, call_layers, kernels.LAYERS_PER_LAUNCH):
        layers = min(kernels.LAYERS_PER_LAUNCH, call_layers - first)
        blocks = max(min(-(-channel.configuration.capacity_records // form["ROWS"]), programs // layers), 1)
        constants = {"LAST": first + layers == call_layers, "NATIVE": not kernels.interpreted(), **kernels.OPTIONS}
        yield first, (blocks, layers), form | constants


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for the interpreter's CPU tensors, since it runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _geometry(channel: Any, place: tuple[int, int], first: int, call_layers: int) -> tuple[int, ...]:
    return (
        channel.configuration.requests,
        channel.capacity_per_request,
        layer_bytes(channel) // VECTOR_BYTES,
        slab_bytes(channel) // VECTOR_BYTES,
        *place,
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
