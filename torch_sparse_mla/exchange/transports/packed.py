"""Transports that move messages of fixed size: one message of each rank, the same for every peer.

    message         header of 16 bytes: epoch, layers of the call, digest of its owner offsets (int32 each)
                    for each layer: the rank's records, request after request, room for `fitting` of them
    memory of a rank
                    the messages of all ranks as they come in, in the order of ranks
                    overflow slab: layers x capacity_records; what fits no message, at its place in the workspace
                    flags, int32 [2, world]: message that came; leave of a peer to send it the next one

A message is as long as the layers of the call make it, however many records there are.
"""

import abc
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from .. import triton_kernels_pack_unpack as kernels
from ..channel import ERRORS, START_BEFORE_WAIT, WAIT_BEFORE_START, ExchangeError
from ..contract import ExchangeCall
from . import launching
from .direct import PeerMemory, PeerTransport
from .launching import VECTOR_BYTES, Launch, Operands
from .stream_operations import StreamOperations
from .watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places in the memory of a rank, in bytes, each a multiple of 16.

    Attributes:
        fitting: records of a layer that a message has room for.
        message_layer: from one layer of a message to the next.
        message: the longest message.
        overflow, overflow_layer: where the overflow slab begins, and from one of its layers to the next.
        flags: where the flags begin.
        size: all of it.
    """

    fitting: int
    message_layer: int
    message: int
    overflow: int
    overflow_layer: int
    flags: int
    size: int

    def message_of(self, layers: int) -> int:
        """Bytes of the message of a call."""
        return kernels.HEADER_BYTES + layers * self.message_layer


def layout_of(channel: Any, fitting: int) -> Layout:
    """Where less fits than there may be, with an overflow slab."""
    sizes = channel.configuration
    message_layer = _aligned(fitting * sizes.record_bytes)
    message = kernels.HEADER_BYTES + sizes.layers * message_layer
    overflow = channel.world * message
    overflow_layer = launching.layer_bytes(channel) if channel.world > 1 and fitting < sizes.capacity_records else 0
    flags = overflow + sizes.layers * overflow_layer
    size = flags + _aligned(4 * kernels.FLAG_ROWS * channel.world)
    return Layout(fitting, message_layer, message, overflow, overflow_layer, flags, size)


class PackedTransport(PeerTransport):
    """Packs, and unpacks what has come. How messages travel, and how a stream waits for them, the subclasses say.

    Attributes:
        leave: whether a message needs the leave of the peer that it goes to, given when the last one is unpacked.
        message: the outgoing message.
        signals: int32 [2, world], the flags of this rank.
        open: the captures (0: none) in which an exchange is started and not waited for. A graph begins and ends with
            none open, or CUDA refuses it, so this is known here.
    """

    leave: bool

    def __init__(self, channel: Any, memory: PeerMemory, layout: Layout, operations: StreamOperations) -> None:
        self.layout, self.operations = layout, operations
        self.message = torch.zeros(layout.message, dtype=torch.uint8, device=channel.device)
        super().__init__(channel, memory, (self.message.data_ptr(),))
        words = memory.own[layout.flags :].view(torch.int32)[: kernels.FLAG_ROWS * channel.world]
        self.signals = words.view(kernels.FLAG_ROWS, channel.world)
        self.waiting = launching.host_words(channel.device)[:1]
        self.open: set[int] = set()
        progress = self.host_error[kernels.PROGRESS_WORD.value :]
        timeout_s = channel.configuration.timeout_s
        self.watchdog = Watchdog(self.waiting, progress, timeout_s, self.release, operations.relax_thread)

    def explain(self) -> dict[str, str]:
        sizes, layout = self.channel.configuration, self.layout
        fits = f"{layout.fitting} of {sizes.capacity_records} records of a layer"
        return {"message": f"{layout.message_of(sizes.layers)} bytes to each rank: {fits}"}

    def release(self) -> None:
        """End every wait of this rank."""
        self.force_flags()

    def force_flags(self) -> None:
        """From beside the streams that wait."""
        with self.operations.beside():
            kernels._release_kernel[(1,)](self.signals, self.signals.numel(), num_warps=1)

    def close(self) -> None:
        if self.captured:
            self.signals.fill_(kernels.FORCED.value)
        super().close()
        self.watchdog.stop()

    def _send(self, call: ExchangeCall) -> None:
        capture = self.operations.capture_id()
        if capture in self.open:
            raise self._out_of_order(call, ERRORS[START_BEFORE_WAIT])
        self._pack_and_move(call)
        self.open.add(capture)

    def _receive(self, call: ExchangeCall) -> None:
        capture = self.operations.capture_id()
        if capture not in self.open:
            hint = "; a CUDA graph that captures one of start and wait captures both" if capture else ""
            raise self._out_of_order(call, ERRORS[WAIT_BEFORE_START] + hint)
        self._await_messages(call)
        self._unpack(call)
        self.open.discard(capture)

    @abc.abstractmethod
    def _pack_and_move(self, call: ExchangeCall) -> None:
        """Pack the message and send it to every peer, in stream order."""

    @abc.abstractmethod
    def _await_messages(self, call: ExchangeCall) -> None:
        """Make the stream wait until every peer's message is there, or forced."""

    @abc.abstractmethod
    def _message_distance(self, call: ExchangeCall) -> int:
        """Bytes from one rank's message to the next, as they come in."""

    def _out_of_order(self, call: ExchangeCall, what: str) -> ExchangeError:
        where = f"channel '{self.channel.name}': rank {self.channel.rank}"
        return ExchangeError(f"torch_sparse_mla::{call.op}: {where}: {what}")

    def _pack(self, call: ExchangeCall) -> None:
        launching.run(self._pack_launches(Operands.of(call)), call.state)

    def _unpack(self, call: ExchangeCall) -> None:
        launching.run(self._unpack_launches(Operands.of(call), self._message_distance(call)), call.state)

    def compile_kernels(self) -> None:
        """Nothing compiles while a stream waits."""
        operands, released = Operands.to_compile(self.channel), (self.signals, self.signals.numel())
        some = (self._pack_launches(operands), self._unpack_launches(operands, self.layout.message))
        release = Launch(kernels._release_kernel, (1,), released, {"num_warps": 1})
        launching.compile_all(itertools.chain(*some, [release]), self.channel)

    def _pack_launches(self, operands: Operands) -> Iterator[Launch]:
        call_layers = len(operands.caches)
        for first, grid, form in self._launches(operands):
            arguments = (
                *launching.padded(operands.caches, first),
                *launching.padded(operands.workspaces, first),
                operands.owner_offsets,
                operands.owned_slots,
                operands.state,
                self.peers,
                *operands.source,
                *self._geometry(call_layers, self.layout.message, first),
            )
            yield Launch(kernels._pack_kernel, grid, arguments, form)

    def _unpack_launches(self, operands: Operands, message_distance: int) -> Iterator[Launch]:
        call_layers = len(operands.caches)
        for first, grid, form in self._launches(operands):
            arguments = (
                *launching.padded(operands.workspaces, first),
                operands.owner_offsets,
                operands.state,
                self.peers,
                *self._geometry(call_layers, message_distance, first),
            )
            del form["ROWS"]
            yield Launch(kernels._unpack_kernel, grid, arguments, form)

    def _launches(self, operands: Operands) -> Iterator[tuple[int, tuple[int, int], dict[str, Any]]]:
        """Nothing here polls."""
        layers, programs = len(operands.caches), kernels.BLOCKS_PER_SM * launching.num_sms(self.channel.device)
        for first, grid, form in launching.launches(self.channel, layers, operands.unit, programs):
            yield first, grid, form | {"LEAVE": self.leave, **kernels.OPTIONS}

    def _geometry(self, call_layers: int, message_distance: int, first: int) -> tuple[int, ...]:
        layout, channel = self.layout, self.channel
        places = (message_distance, layout.message_layer, layout.overflow, layout.overflow_layer, layout.flags)
        return (
            channel.configuration.requests,
            channel.capacity_per_request,
            layout.fitting,
            *(place // VECTOR_BYTES for place in places),
            first,
            call_layers,
            channel.rank,
            channel.world,
            channel.tag,
        )


@contextlib.contextmanager
def closed_on_failure(transport: PackedTransport) -> Iterator[None]:
    """Where a rank cannot make its channel, no thread and no communicator of it stays behind."""
    try:
        yield
    except BaseException:
        transport.close()
        raise


def _aligned(size: int) -> int:
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES
