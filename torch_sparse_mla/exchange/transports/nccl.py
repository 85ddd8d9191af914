"""The collective transport on CUDA: one NCCL all-gather of messages, over any topology.

    start   stream   pack: own records -> own workspaces and message
            NCCL     all-gather of the messages, on a stream of its own
    (other work on the stream; the workspaces are undefined)
    wait    stream   join NCCL
                     unpack: check the headers, records -> workspaces

NCCL orders the messages of a communicator, and a rank's next message is packed behind its last wait, so nothing needs
the leave of a peer. Sizes are constants of a graph, and NCCL has no way for the device to say how much there is: every
message has room for all that one rank could own.

NCCL waits without a clock, so the watchdog forces the flags and then aborts the communicator, which is the channel's
own. PyTorch's own watchdog answers a failure by ending the process: it is told to leave this group alone.
"""

import contextlib
import datetime
import os
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...triton_launch import on_device
from ..channel import ExchangeError
from ..contract import ExchangeCall
from .direct import PeerMemory
from .packed import Layout, PackedTransport, closed_on_failure, layout_of
from .stream_operations import StreamOperations, Write
from .watchdog import NOT_WAITING, WAITING_FOR_MESSAGES

CONNECT_S = 60.0
# Where graphs hold the communicator, an abort returns only when they are gone; its kernels end at once.
ABORT_S = 2.0
UNSUPERVISED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_environment = threading.Lock()


def connect(channel: Any) -> "NcclTransport":
    group, name = channel.group, channel.configuration.name
    generation = group.word_of_first("generation", lambda: uuid.uuid4().hex)
    operations = group.agree(name, "stream memory operations", lambda: StreamOperations(channel.device))
    layout = layout_of(channel, channel.configuration.capacity_records)
    nccl = group.agree(name, "private NCCL group", lambda: _private_group(channel, generation))
    transport = group.agree(
        name, "transport collective", lambda: NcclTransport(channel, _memory(channel, layout), layout, operations, nccl)
    )
    with closed_on_failure(transport):
        group.agree(name, "connect NCCL", transport.connect)
        group.agree(name, "compile kernels", transport.compile_kernels)
    return transport


def _private_group(channel: Any, generation: str) -> Any:
    """A communicator that an error may end without harm to the user's group, or to a later channel of the same name."""
    store = dist.distributed_c10d._get_process_group_store(channel.group.group)
    store = dist.PrefixStore(f"torch_sparse_mla/{generation}", store)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(days=365)
    with _unsupervised(), on_device(channel.state):
        return dist.ProcessGroupNCCL(store, channel.rank, channel.world, options)


@contextlib.contextmanager
def _unsupervised() -> Iterator[None]:
    """PyTorch reads these where a group is made."""
    with _environment:
        before = {key: os.environ.get(key) for key in UNSUPERVISED}
        os.environ.update(UNSUPERVISED)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


def _memory(channel: Any, layout: Layout) -> PeerMemory:
    """Own memory only: nobody else writes it."""
    own = torch.zeros(layout.size, dtype=torch.uint8, device=channel.device)
    return PeerMemory(own, [own.data_ptr()] * channel.world, own)


class NcclTransport(PackedTransport):
    leave = False

    def __init__(
        self, channel: Any, memory: PeerMemory, layout: Layout, operations: StreamOperations, nccl: Any
    ) -> None:
        self.nccl, self.aborted = nccl, False
        self.work: dict[int, Any] = {}
        super().__init__(channel, memory, layout, operations)
        word = self.waiting.data_ptr()
        self.begin_wait = operations.prepare([Write(word, WAITING_FOR_MESSAGES)])
        self.end_wait = operations.prepare([Write(word, NOT_WAITING)])

    def connect(self) -> None:
        """The communicator is made by its first collective, which must not be a captured one."""
        with on_device(self.channel.state):
            work = self._gather(self.layout.message)
            deadline = time.monotonic() + CONNECT_S
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"NCCL did not connect the ranks within {CONNECT_S} s")
                time.sleep(0.001)
            work.wait()

    def release(self) -> None:
        super().release()
        self.operations.releases.synchronize()
        self._abort()

    def close(self) -> None:
        """The communicator first: nobody may come to end an exchange that was started and not waited for."""
        self._abort()
        super().close()

    def explain(self) -> dict[str, str]:
        return super().explain() | {"collective": "NCCL all-gather; its size is fixed by the capacity"}

    def _abort(self) -> None:
        if self.aborted:
            return
        self.aborted = True
        thread = threading.Thread(target=self.nccl.abort, name="torch_sparse_mla abort", daemon=True)
        thread.start()
        thread.join(ABORT_S if self.captured else None)

    def _pack_and_move(self, call: ExchangeCall) -> None:
        self._pack(call)
        with self._named_errors(call):
            self.work[self.operations.capture_id()] = self._gather(self.layout.message_of(call.layers))

    def _await_messages(self, call: ExchangeCall) -> None:
        self.operations.run(self.begin_wait)
        with self._named_errors(call):
            self.work.pop(self.operations.capture_id()).wait()
        self.operations.run(self.end_wait)

    def _message_distance(self, call: ExchangeCall) -> int:
        return self.layout.message_of(call.layers)

    def _gather(self, size: int) -> Any:
        into = self.memory.own[: self.channel.world * size]
        return self.nccl._allgather_base(into, self.message[:size])

    @contextlib.contextmanager
    def _named_errors(self, call: ExchangeCall) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            where = f"channel '{self.channel.name}': rank {self.channel.rank}"
            what = str(error).splitlines()[0]
            raise ExchangeError(f"torch_sparse_mla::{call.op}: {where}: NCCL: {what}") from error
