"""A channel: the ranks, memory and counters of one sequence of exchanges.

Timeline of one exchange of epoch e, on each rank (one stream, or one thread on the CPU):

    start   e = started + 1, slab e % 2          counters are device data: a graph replay counts like an eager call
            own records   -> own workspaces      cache[slot] -> workspace[request * capacity_per_request + position]
            own records   -> slab of every peer  at the same place, so that nothing is sorted on arrival
            fence, then flag[own rank] = e       in the memory of every peer, a rank that owns nothing included
            started = e
    (other work; the workspaces are undefined)
    wait    poll flag[peer] until it reaches e   cyclic comparison; gives up after the timeout, naming peer and epoch
            slab e % 2    -> own workspaces      the peer's segments
            waited = e
    (attention reads the workspaces)

Nobody releases a slab: to push epoch e + 2 a rank must have waited for e + 1 of every peer, and a peer sends e + 1 only
after it has emptied slab e. That holds as long as a wait follows every start, which the counters check. The workspaces
are the caller's, and no peer writes them. `tests/exchange/protocol_model.py` breaks each of these rules in turn.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ..contract import reject
from ..selection.plan import Section, SelectionPlan
from .group import Group, as_group

TRANSPORTS = ("auto", "direct", "collective", "loopback")
MAX_RECORD_BYTES = 65_536
MAX_CAPACITY_RECORDS = 2**31 - 1
DEFAULT_TIMEOUT_S = 5.0

# Words of the state tensor. A counter is an int32 that wraps; only differences of two counters mean anything.
STARTED, WAITED, START_BLOCKS, WAIT_BLOCKS, ERROR, ERROR_PEER, ERROR_EPOCH, TAG = range(8)
STATE_WORDS = 8

_OP = "Channel.create"


class ExchangeError(RuntimeError):
    """An exchange that cannot be completed: a peer did not come, left, or made a different call."""


@dataclasses.dataclass(frozen=True)
class ChannelConfiguration:
    """What must be equal on every rank."""

    name: str
    capacity_records: int
    record_bytes: int
    layers: int
    requests: int
    transport: str
    timeout_s: float
    device_type: str


class Channel:
    """One sequence of exchanges among the ranks of a group. Make it with `Channel.create`.

    Attributes:
        name: what the operators take as `channel`; for a loopback rank the given name, a colon, and the rank.
        rank, world: place in the group, and its size.
        state: int32 [8]; the channel's counters, given to every call, which makes the order of calls visible to a
            compiler.
        configuration: the sizes.
    """

    def __init__(self, name: str, configuration: ChannelConfiguration, group: Group, device: torch.device) -> None:
        self.name = name
        self.configuration = configuration
        self.group = group
        self.rank, self.world = group.rank, group.world
        self.device = device
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        self.state[TAG] = self.tag
        self.transport: Any = None
        self.transport_name, self.why = "", ""

    @functools.cached_property
    def tag(self) -> int:
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    @functools.cached_property
    def capacity_per_request(self) -> int:
        return self.configuration.capacity_records // self.configuration.requests

    @functools.cached_property
    def plan_words(self) -> int:
        return self._selection.words

    @functools.cached_property
    def plan_sections(self) -> dict[str, Section]:
        """Where the views of a plan lie. They depend on the capacity alone, not on the rows that make it up."""
        return self._selection.sections

    @property
    def _selection(self) -> SelectionPlan:
        return SelectionPlan(self.configuration.requests, 1, self.capacity_per_request, self.world)

    @staticmethod
    def create(
        name: str,
        group: Any,
        capacity_records: int,
        record_bytes: int,
        layers: int = 3,
        transport: str = "auto",
        *,
        requests: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: str | torch.device | None = None,
    ) -> "Channel":
        """Make a channel. Every rank calls this, with the same arguments, before any capture.

        Args:
            name: unique among the open channels of a process.
            group: a `torch.distributed` process group, or `LoopbackGroup(...).rank(r)`.
            capacity_records: records of a workspace: requests x capacity per request.
            record_bytes: bytes of a record, 1 to 65,536.
            layers: the most layers that one call moves.
            transport: "auto", "direct" (peer memory), "collective" (NCCL, gloo) or "loopback" (ranks of one process).
            requests: requests of a plan.
            timeout_s: seconds after which a wait for a peer fails.
            device: where caches and workspaces are; None: "cuda" for a group that has NCCL or where the loopback group
                says so, else "cpu".
        Returns: the channel, registered under `channel.name` until `close()`.
        Raises: ValueError for an argument that does not fit, RuntimeError where the transport cannot be set up; on
            every rank, whichever rank it is that fails.
        """
        ranks = as_group(group)
        configuration = ChannelConfiguration(
            name, capacity_records, record_bytes, layers, requests, transport, timeout_s, ranks.device_type(device)
        )
        if configuration.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"torch_sparse_mla::{_OP}: make channel '{name}' before a CUDA graph is captured")
        registered = ranks.local_name(name)
        ranks.agree("arguments", lambda: _check(registered, configuration, ranks), configuration)
        try:
            channel = ranks.agree("device", lambda: Channel(registered, configuration, ranks, ranks.device(device)))
            _connect(channel)
        except BaseException:
            ranks.leave(name, f"rank {ranks.rank} could not make its channel")
            raise
        _registry[registered] = channel
        _closed.discard(registered)
        return channel

    def close(self) -> None:
        """End the channel, before its process group is destroyed. Any later use raises; a second close does nothing.

        Memory that a CUDA graph captured stays mapped, and replays of such a graph record an error instead of moving
        records.
        """
        if _registry.get(self.name) is self:
            del _registry[self.name]
            _closed.add(self.name)
        if self.transport is not None:
            self.transport.close()
            self.transport = None
            self.group.leave(self.configuration.name, f"rank {self.rank} closed its channel")

    def check(self) -> None:
        """Wait for the device and raise what its kernels recorded: a peer that never came, or a call out of order.

        An eager call raises this too, as soon as it can be known without waiting; a graph replay cannot.
        """
        if self.transport is None:
            raise ExchangeError(f"torch_sparse_mla channel '{self.name}' is closed")
        if self.state.is_cuda:
            torch.cuda.synchronize(self.state.device)
        self.raise_recorded(self.state.tolist())

    def raise_recorded(self, state: list[int]) -> None:
        """Raise the error that a kernel wrote into the state."""
        if state[ERROR]:
            what = ERRORS[state[ERROR]].format(peer=state[ERROR_PEER], timeout=self.configuration.timeout_s)
            raise self.error(what, state[ERROR_EPOCH])

    def error(self, what: str, epoch: int) -> ExchangeError:
        epoch &= 0xFFFFFFFF
        return ExchangeError(f"torch_sparse_mla channel '{self.name}': rank {self.rank}, epoch {epoch}: {what}")

    def explain(self) -> dict[str, str]:
        """Which transport was chosen and why, and the sizes."""
        sizes = self.configuration
        return {
            "channel": self.name,
            "transport": self.transport_name,
            "why": self.why,
            "ranks": f"rank {self.rank} of {self.world}",
            "device": str(self.device),
            "slab": f"{sizes.layers} layers x {sizes.capacity_records} records x {sizes.record_bytes} bytes",
            "timeout": f"{sizes.timeout_s} s",
        }


TIMED_OUT, START_BEFORE_WAIT, WAIT_BEFORE_START, OTHER_CALL, OTHER_PLAN, CLOSED = range(1, 7)
ERRORS = {
    TIMED_OUT: "rank {peer} did not come within {timeout} s; start the same calls on every rank",
    START_BEFORE_WAIT: "started while the exchange before was not waited for; wait after every start",
    WAIT_BEFORE_START: "waited for an exchange that was not started; start first",
    OTHER_CALL: "rank {peer} moves another number of layers; make the same calls on every rank",
    OTHER_PLAN: "rank {peer} sends another number of records; give every rank the same top-k lists and block table",
    CLOSED: "a CUDA graph that captured the channel was replayed after close()",
}

_registry: dict[str, Channel] = {}
_closed: set[str] = set()


def find_channel(op: str, name: str) -> Channel:
    """The open channel of a name. Raises ValueError, naming the op, where there is none."""
    channel = _registry.get(name)
    if channel is None:
        given = f"{name!r}, which is closed" if name in _closed else repr(name)
        reject(op, "channel", given, "the name of an open channel" + (f": {', '.join(_registry)}" if _registry else ""))
    return channel


def _check(registered: str, sizes: ChannelConfiguration, group: Group) -> None:
    if not isinstance(sizes.name, str) or not sizes.name:
        reject(_OP, "name", repr(sizes.name), "a string that is not empty")
    if registered in _registry:
        reject(_OP, "name", repr(registered), "a name that no open channel has")
    for argument, value, most in (
        ("capacity_records", sizes.capacity_records, MAX_CAPACITY_RECORDS),
        ("record_bytes", sizes.record_bytes, MAX_RECORD_BYTES),
        ("layers", sizes.layers, 1024),
        ("requests", sizes.requests, sizes.capacity_records),
    ):
        if not isinstance(value, int) or not 1 <= value <= most:
            reject(_OP, argument, repr(value), f"an integer from 1 to {most}")
    if sizes.capacity_records % sizes.requests:
        reject(_OP, "capacity_records", sizes.capacity_records, f"a multiple of the {sizes.requests} requests")
    if not 0 < sizes.timeout_s <= 3600:
        reject(_OP, "timeout_s", sizes.timeout_s, "above 0, at most 3600 seconds")
    if sizes.transport not in TRANSPORTS:
        reject(_OP, "transport", repr(sizes.transport), "one of " + ", ".join(TRANSPORTS))
    if sizes.transport not in ("auto", *group.transports(sizes.device_type)):
        reject(
            _OP,
            "transport",
            repr(sizes.transport),
            f"for {group.described} on {sizes.device_type}: auto or {', '.join(group.transports(sizes.device_type))}",
        )


def _connect(channel: Channel) -> None:
    """Set up the transport: the one asked for, or with `auto` the first that works on every rank."""
    asked = channel.configuration.transport
    possible = channel.group.transports(channel.configuration.device_type)
    reasons = []
    for name in (asked,) if asked != "auto" else possible:
        try:
            channel.transport = channel.group.agree(f"transport {name}", lambda name=name: _open(name, channel))
        except Exception as error:
            if name == possible[-1] or asked != "auto":
                raise
            reasons.append(f"{name} is not possible: {error}")
            continue
        channel.transport_name = name
        reasons.insert(0, "asked for" if asked != "auto" else f"the first of {', '.join(possible)} that works here")
        channel.why = "; ".join(reasons)
        return


def _open(name: str, channel: Channel) -> Any:
    opened: dict[str, Callable[[Channel], Any]] = {
        "loopback": _open_loopback,
        "collective": _open_collective,
        "direct": _open_direct,
    }
    return opened[name](channel)


def _open_loopback(channel: Channel) -> Any:
    if channel.device.type == "cuda":
        from .transports.direct import DirectTransport, loopback_memory

        return DirectTransport(channel, loopback_memory(channel))
    from .transports.loopback import LoopbackTransport

    return LoopbackTransport(channel)


def _open_collective(channel: Channel) -> Any:
    if channel.device.type == "cuda":
        from .transports.device_collective import DeviceCollectiveTransport

        return DeviceCollectiveTransport(channel)
    from .transports.collective import CollectiveTransport

    return CollectiveTransport(channel)


def _open_direct(channel: Channel) -> Any:
    from .transports.direct import DirectTransport, symmetric_memory

    return DirectTransport(channel, symmetric_memory(channel))
