"""Peer memory on GPUs: a kernel stores each owned record where it belongs in the slab of every peer, then the flags.

The memory of a rank: two slabs [layers, capacity_records, record_bytes], by parity of the epoch; int64 flags
[2, world], by parity, that peers write at their own rank: which epoch arrived, how many layers, and a digest of owner
offsets; words of its own; and the sets of workspaces that the channel hands out, each as large as a slab.
Loopback ranks share a device, and run the same kernels on the same layout.

Into such a set peers store at once what they would else store into a slab, and nothing is copied, provided that at
least `REUSE_DISTANCE` exchanges lie between two that use it. The kernels look: which exchange used a set last is device
data, so that replays count, and the same on every rank. Where it is not so, the exchange goes by a slab like any other.
"""

import abc
import dataclasses
import importlib
import threading
from typing import Any

import torch

from .. import triton_kernels as kernels
from ..channel import CLOSED, ERROR, ExchangeError, places_of, set_of
from ..contract import ExchangeCall
from ..group import Board, LoopbackRank
from . import launching

SLABS = 2
# Memory of closed channels that a CUDA graph may still write: a graph cannot be asked whether it is alive.
_kept_for_graphs: list[object] = []


@dataclasses.dataclass(frozen=True)
class PeerMemory:
    """Every rank's memory as this rank sees it.

    Attributes:
        own: this rank's memory, uint8.
        addresses: where each rank's memory is mapped, in the order of ranks.
        owner: whatever keeps the mappings alive.
        board: what loopback ranks share; None between processes.
    """

    own: torch.Tensor
    addresses: list[int]
    owner: object
    board: Board | None = None


def memory_bytes(channel: Any) -> int:
    return _sets_begin(channel) + channel.configuration.workspace_sets * launching.slab_bytes(channel)


def _sets_begin(channel: Any) -> int:
    """Behind the slabs, the flags, and the words of a rank's own: one, and one for each set but at least one."""
    own_words = kernels.USED_WORD.value + max(channel.configuration.workspace_sets, 1)
    flags = kernels.FLAG_BYTES * channel.world
    return SLABS * launching.slab_bytes(channel) + flags + -(-4 * own_words // 16) * 16


def loopback_memory(channel: Any, size: int) -> PeerMemory:
    """One tensor for each rank, made for all ranks by the first that comes."""
    board = channel.group.board(channel.configuration.name)
    if "memory" not in board.shared:
        board.shared["memory"] = torch.zeros(channel.world, size, dtype=torch.uint8, device=channel.device)
        board.shared["issued"] = [0] * channel.world
        board.shared["places"] = [None] * channel.world
        board.shared["captured"] = False
        launching.synchronise(channel.device)
    memory = board.shared["memory"]
    return PeerMemory(memory[channel.rank], [rank.data_ptr() for rank in memory], memory, board)


def symmetric_memory(channel: Any, size: int) -> PeerMemory:
    """PyTorch symmetric memory. Nobody goes on before all memory is zero."""
    group, name = channel.group, channel.configuration.name
    symmetric = group.agree(
        name, "import symmetric memory", lambda: importlib.import_module("torch.distributed._symmetric_memory")
    )
    own = group.agree(name, "allocate", lambda: symmetric.empty(size, dtype=torch.uint8, device=channel.device))
    handle = group.agree(name, "map peers", lambda: symmetric.rendezvous(own, group.group.group_name))

    def clear() -> None:
        own.zero_()
        launching.synchronise(channel.device)

    group.agree(name, "clear", clear)
    return PeerMemory(own, list(handle.buffer_ptrs), handle)


def memory_of_ranks(channel: Any, transport: str, size: int) -> PeerMemory:
    """`size` bytes for each rank, which all ranks can write."""
    group = channel.group
    if isinstance(group, LoopbackRank):
        return group.agree(channel.configuration.name, "memory", lambda: loopback_memory(channel, size))
    try:
        return symmetric_memory(channel, size)
    except Exception as error:
        raise RuntimeError(
            f"torch_sparse_mla::Channel.create: transport {transport}: rank {channel.rank} on {channel.device} has no "
            f"memory that all of {group.described} can write, which takes PyTorch symmetric memory: GPUs of one host "
            f"with peer access: {error}"
        ) from error


def connect(channel: Any) -> "DirectTransport":
    group, name = channel.group, channel.configuration.name
    memory = memory_of_ranks(channel, "direct", memory_bytes(channel))
    transport = group.agree(name, "transport direct", lambda: DirectTransport(channel, memory))
    group.agree(name, "compile kernels", transport.compile_kernels)
    return transport


class PeerTransport(abc.ABC):
    """What transports whose ranks write one another's memory have in common; they say how to send and to receive.

    Args:
        beyond: addresses that follow the host's words in the table which kernels get.
    """

    def __init__(self, channel: Any, memory: PeerMemory, beyond: tuple[int, ...] = ()) -> None:
        self.channel, self.memory, self.board = channel, memory, memory.board
        rank, world = channel.rank, channel.world
        self.host_error = channel.host_words = launching.host_words(channel.device)
        targets = [memory.addresses[(rank + step) % world] for step in range(1, world)]
        addresses = [memory.addresses[rank], *targets, self.host_error.data_ptr(), *beyond]
        self.peers = launching.address_table(addresses, channel)
        self.captured = False

    def start(self, call: ExchangeCall) -> None:
        self._before(call)
        self._send(call)
        if self.board is not None and not launching.is_capturing(call.state):
            self.board.shared["issued"][self.channel.rank] += 1
            self.board.shared["places"][self.channel.rank] = _stream_of(call.state)

    def wait(self, call: ExchangeCall) -> None:
        self._before(call)
        self._refuse_own_stream(call, 0)
        self._receive(call)

    @abc.abstractmethod
    def _send(self, call: ExchangeCall) -> None:
        """Bring what this rank owns into its own workspaces and on its way to every peer, in stream order."""

    @abc.abstractmethod
    def _receive(self, call: ExchangeCall) -> None:
        """Wait for every peer's records, in stream order, and bring them into the own workspaces."""

    def refuse_if_alone(self, call: ExchangeCall) -> None:
        self._refuse_own_stream(call, 1)

    def close(self) -> None:
        """Memory of a channel that no graph captured is given back; else replays find the error and tell the host."""
        if self.captured:
            self.channel.state[ERROR] = CLOSED
            _kept_for_graphs.append(dict(vars(self)))
        launching.synchronise(self.channel.device)
        self.memory = None

    def _before(self, call: ExchangeCall) -> None:
        """Raise what is known to be wrong, without waiting for the device."""
        self.channel.raise_recorded(self.host_error.tolist())
        if self.board is not None and self.board.failure:
            raise ExchangeError(f"torch_sparse_mla channel '{self.channel.name}': {self.board.failure}")
        if launching.is_capturing(call.state):
            self.captured = True
            if self.board is not None:
                self.board.shared["captured"] = True

    def _refuse_own_stream(self, call: ExchangeCall, ahead: int) -> None:
        """Loopback ranks: a wait for a peer whose start will be queued behind it can only time out.

        Where a peer starts is known from its last start; before its first one, and once there are graphs, whose replays
        are not seen here, this waits, and the timeout ends it.
        """
        if self.board is None or self.board.shared["captured"] or launching.is_capturing(call.state):
            return
        issued, places = self.board.shared["issued"], self.board.shared["places"]
        needed = issued[self.channel.rank] + ahead
        for peer in range(self.channel.world):
            if peer == self.channel.rank or issued[peer] >= needed or places[peer] != _stream_of(call.state):
                continue
            raise ExchangeError(
                f"torch_sparse_mla::{call.op}: channel '{self.channel.name}': rank {self.channel.rank}: rank {peer} "
                "was last seen on the calling thread and stream and did not start, so it would not come while this "
                "call waits; call ce_exchange_start for every rank, then ce_exchange_wait for every rank, or give each "
                "rank a stream or a thread of its own"
            )


class DirectTransport(PeerTransport):
    def __init__(self, channel: Any, memory: PeerMemory) -> None:
        super().__init__(channel, memory)
        begin, size = SLABS * launching.slab_bytes(channel), kernels.FLAG_BYTES * channel.world
        self.flags = memory.own[begin : begin + size].view(torch.int64)
        # The last exchange that peers wrote into a set; for each set the last that used it.
        words = memory.own[begin + size :].view(torch.int32)
        self.own_words = words[: kernels.USED_WORD.value + channel.configuration.workspace_sets]
        sizes, begin = channel.configuration, _sets_begin(channel)
        layer_bytes, used = launching.layer_bytes(channel), sizes.capacity_records * sizes.record_bytes
        sets = memory.own[begin:].view(sizes.workspace_sets, sizes.layers, layer_bytes)[..., :used]
        shape = (sizes.capacity_records, sizes.record_bytes)
        self.workspaces = [[layer.view(shape) for layer in workspaces] for workspaces in sets]
        self.places = places_of(self.workspaces)

    def compile_kernels(self) -> None:
        operands = launching.Operands.to_compile(self.channel)
        for kind in (launching.push_launches, launching.wait_launches):
            launching.compile_all(kind(self.channel, operands, self.peers, (-1, 0)), self.channel)

    def _send(self, call: ExchangeCall) -> None:
        place, operands = self._place(call), launching.Operands.of(call)
        launching.run(launching.push_launches(self.channel, operands, self.peers, place), call.state)

    def _receive(self, call: ExchangeCall) -> None:
        place, operands = self._place(call), launching.Operands.of(call)
        launching.run(launching.wait_launches(self.channel, operands, self.peers, place), call.state)

    def _place(self, call: ExchangeCall) -> tuple[int, int]:
        """The set that a call fills, and where it lies in every rank's memory, in vectors; -1 for other workspaces."""
        number = set_of(call.op, self.channel, call.workspaces, self.places)
        if number < 0:
            return -1, 0
        begin = _sets_begin(self.channel) + number * launching.slab_bytes(self.channel)
        return number, begin // launching.VECTOR_BYTES


def _stream_of(state: torch.Tensor) -> tuple[threading.Thread, int]:
    """Where a rank starts."""
    return threading.current_thread(), launching.current_stream(state)
