"""Copy engines: a rank packs what it owns into one message, and one copy for each peer puts it into the peer's memory.

    start   stream   wait for the leave of every peer     it has unpacked the last message
                     pack: own records -> own workspaces, message, and peers' overflow slabs for what does not fit
            copies   message -> memory of each peer       in rank-rotated order, by copy engine
                     flag[own rank] = 1 at each peer      the stream orders it after the copies
    (other work on the stream, beside the copies; the workspaces are undefined)
    wait    stream   join the copies; wait for the flag of every peer
                     unpack: check the headers, records -> workspaces, flags = 0, leave[own rank] = 1 at each peer

Copies and values are constants of a graph, and so is where they go. Two slabs by parity of the epoch, as `direct` has,
would need another graph for every other replay. Hence one message from each peer at a time, and leave to send the next:
the flag is then written once for each time that it is taken back, so the constant 1 is enough, and nothing has to
count. Kernels take flags back, and not the batch that waits, so that after an error they can leave them as they are:
a later replay finds them set and waits for nobody. Which exchange a message belongs to is in its header.

A stream that waits has no clock. The watchdog forces the flags that are not there; the kernel behind the wait finds
them forced, and names the rank. Such a stream also holds up its hardware queue, which other streams of the process may
share: ranks that use two channels in different order want more queues (CUDA_DEVICE_MAX_CONNECTIONS) than streams.

The copies of a graph are joined by the wait, so one graph captures both halves of an exchange.
"""

from typing import Any

from ..contract import ExchangeCall
from . import packed
from .direct import PeerMemory, memory_of_ranks
from .packed import Layout, PackedTransport, closed_on_failure, layout_of
from .stream_operations import Await, StreamOperations, Write
from .watchdog import NOT_WAITING, WAITING_FOR_LEAVE, WAITING_FOR_MESSAGES

ARRIVED = packed.kernels.ARRIVED.value
# Of the owner's share. Owners of 2,048 selected tokens are random in the low bits of a position: with 4 ranks the share
# is 512 with a standard deviation of 20, so an eighth is three deviations, and larger unions have more.
MARGIN = 1 / 8


def connect(channel: Any) -> "CeTransport":
    group, name = channel.group, channel.configuration.name
    operations = group.agree(name, "stream memory operations", lambda: StreamOperations(channel.device))
    layout = layout_of(channel, fitting_records(channel))
    memory = memory_of_ranks(channel, "ce", layout.size)
    transport = group.agree(name, "transport ce", lambda: CeTransport(channel, memory, layout, operations))
    with closed_on_failure(transport):
        group.agree(name, "compile kernels", transport.compile_kernels)
    return transport


def fitting_records(channel: Any) -> int:
    """Records of a layer that a copy has room for: the expected share of an owner, and a margin."""
    if channel.world == 1:
        return 0
    sizes = channel.configuration
    share = sizes.expected_records / channel.world
    return min(int(share * (1 + MARGIN)) + 1, sizes.capacity_records)


class CeTransport(PackedTransport):
    leave = True

    def __init__(self, channel: Any, memory: PeerMemory, layout: Layout, operations: StreamOperations) -> None:
        super().__init__(channel, memory, layout, operations)
        self.signals[1].fill_(ARRIVED)
        packed.launching.synchronise(channel.device)
        rank, world = channel.rank, channel.world
        self.targets = [(rank + step) % world for step in range(1, world)]
        of_rank = [address + layout.flags for address in memory.addresses]
        came, leave = (of_rank[rank] + 4 * row * world for row in range(packed.kernels.FLAG_ROWS))
        self.await_leave = self._await(WAITING_FOR_LEAVE, leave)
        self.await_messages = self._await(WAITING_FOR_MESSAGES, came)
        self.tell = operations.prepare([Write(of_rank[peer] + 4 * rank, ARRIVED) for peer in self.targets])

    def explain(self) -> dict[str, str]:
        sizes = self.channel.configuration
        beyond = sizes.capacity_records - self.layout.fitting
        overflow = f"up to {beyond} records of a layer beyond the message, stored by the pack kernel"
        return super().explain() | {"overflow": overflow if self.targets else "none: there is one rank"}

    def _await(self, what: int, flags: int) -> Any:
        if not self.targets:
            return []
        word = self.waiting.data_ptr()
        waits = [Await(flags + 4 * peer, ARRIVED) for peer in self.targets]
        return self.operations.prepare([Write(word, what), *waits, Write(word, NOT_WAITING)])

    def _pack_and_move(self, call: ExchangeCall) -> None:
        self.operations.run(self.await_leave)
        self._pack(call)
        with self.operations.fork():
            for peer in self.targets:
                there = self.memory.addresses[peer] + self.channel.rank * self.layout.message
                self.operations.copy(there, self.message.data_ptr(), self.layout.message_of(call.layers))
            self.operations.run(self.tell)

    def _await_messages(self, call: ExchangeCall) -> None:
        self.operations.join()
        self.operations.run(self.await_messages)

    def _message_distance(self, call: ExchangeCall) -> int:
        return self.layout.message
