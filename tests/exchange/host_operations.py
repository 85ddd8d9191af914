"""Stand-ins on the CPU for what streams and NCCL do: the same steps, done at once, on host memory."""

import contextlib
import ctypes
import functools
import threading
import time
from types import SimpleNamespace

from torch_sparse_mla.exchange.transports import ce, nccl
from torch_sparse_mla.exchange.transports.direct import loopback_memory
from torch_sparse_mla.exchange.transports.packed import layout_of
from torch_sparse_mla.exchange.transports.stream_operations import Await

from .cases import make_world

DEADLINE_S = 30
ABSENT, FORCED = 0, 2


class HostOperations:
    """Like `StreamOperations`. A value that is waited for is polled: the watchdog thread has to end a wait.

    Attributes:
        done: every step that was run, in order: copies as (destination, source, size).
        capture: what `capture_id` gives.
    """

    def __init__(self):
        self.done = []
        self.capture = 0
        self.releases = SimpleNamespace(synchronize=lambda: None)

    def prepare(self, steps):
        return list(steps)

    def run(self, prepared):
        for step in prepared:
            word = ctypes.c_int32.from_address(step.address)
            if isinstance(step, Await):
                until(lambda word=word, step=step: word.value - step.value >= 0)
            else:
                word.value = step.value
            self.done.append(step)

    def copy(self, destination, source, size):
        ctypes.memmove(destination, source, size)
        self.done.append((destination, source, size))

    def capture_id(self):
        return self.capture

    def fork(self):
        return contextlib.nullcontext()

    def beside(self):
        return contextlib.nullcontext()

    def join(self):
        pass

    def relax_thread(self):
        pass


class HostNccl:
    """One rank of an all-gather. A work is complete when every rank has given as many messages, or at an abort."""

    def __init__(self, rank, given):
        self.rank, self.given = rank, given
        self.aborted = threading.Event()

    def _allgather_base(self, into, message):
        number = len(self.given[self.rank])
        self.given[self.rank].append(message.clone())
        return SimpleNamespace(wait=lambda: self._complete(number, into.view(len(self.given), -1)))

    def _complete(self, number, into):
        until(lambda: self.aborted.is_set() or all(len(messages) > number for messages in self.given))
        for rank, messages in enumerate(self.given):
            if len(messages) > number:
                into[rank] = messages[number]

    def abort(self):
        self.aborted.set()


def until(is_true):
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, "nothing ends the wait"
        time.sleep(0.001)


def message_world(shape, transport, **arguments):
    """Loopback ranks on the CPU whose channels have the transport "ce" or "collective" of CUDA, on the stand-ins."""
    world = make_world(shape, **arguments)
    given = [[] for _ in world.channels]
    for channel in world.channels:
        if transport == "ce":
            layout = layout_of(channel, ce.fitting_records(channel))
            memory = loopback_memory(channel, layout.size)
            channel.transport = ce.CeTransport(channel, memory, layout, HostOperations())
        else:
            layout = layout_of(channel, channel.configuration.capacity_records)
            memory = nccl._memory(channel, layout)
            host_nccl = HostNccl(channel.rank, given)
            channel.transport = nccl.NcclTransport(channel, memory, layout, HostOperations(), host_nccl)
        channel.transport.force_flags = functools.partial(force_flags, channel.transport.signals)
    return world


def force_flags(signals):
    """For the watchdog's thread: the interpreter runs kernels of one thread at a time."""
    signals.masked_fill_(signals == ABSENT, FORCED)
