"""A channel: the ranks, memory and counters of one sequence of exchanges.

Timeline of one exchange of epoch e, on each rank (one stream, or one thread on the CPU):

    start   e = started + 1, slab e % 2          counters are device data: a graph replay counts like an eager call
            own records   -> own workspaces      cache[slot] -> workspace[request * capacity_per_request + position]
            own records   -> slab of every peer  at the same place, so that nothing is sorted on arrival
            fence, then flag e % 2 = e           in the memory of every peer, a rank that owns nothing included
            started = e
    (other work; the workspaces are undefined)
    wait    poll flag e % 2 until it is e        gives up after the timeout, naming peer and epoch
            slab e % 2    -> own workspaces      the peer's segments
            waited = e
    (attention reads the workspaces)

Nobody releases a slab: to push epoch e + 2 a rank must have waited for e + 1 of every peer, and a peer sends e + 1 only
after it has emptied slab e. That holds as long as a wait follows every start, which the counters check. The caller's
own workspaces no peer writes.

Workspaces that the channel hands out (`Channel.workspaces`) peers do write, in place of a slab, and wait copies
nothing. A set that exchange e filled is the caller's from wait e to start e + 2, so that one start, a prefetch, may
come before it is read. To push e + 3 a rank has waited for e + 2 of every peer, which each sent after that. Hence the
peers of an exchange write into its set only if the exchange that used the set last is three behind or more; nearer, a
slab is used and copied. `tests/exchange/protocol_model.py` breaks each of these rules in turn.

Copy engines and NCCL keep the two halves and the counters, and have an order of their own: see `transports/ce.py` and
`transports/nccl.py`.
"""

import dataclasses
import functools
import importlib
import threading
import zlib
from typing import Any

import torch

from .. import lifetimes
from ..contract import reject
from ..selection.plan import Section, SelectionPlan
from .group import Group, as_group

TRANSPORTS = ("auto", "direct", "ce", "collective", "loopback")
MAX_RECORD_BYTES = 65_536
MAX_LAYERS = 1024
MAX_WORKSPACE_SETS = 30
MAX_CAPACITY_RECORDS = 2**31 - 1
DEFAULT_TIMEOUT_S = 5.0

# Words of the state tensor. A counter is an int32 that wraps; only differences of two counters mean anything.
STARTED, WAITED, START_BLOCKS, WAIT_BLOCKS, ERROR, ERROR_PEER, ERROR_EPOCH, TAG = range(8)
STATE_WORDS = 8
# Of workspaces that a channel hands out, by address: the set, and the layer in it.
Places = dict[int, tuple[int, int]]
# Exchanges from one that uses a set of workspaces to the next whose peers may write it at once.
REUSE_DISTANCE = 3

_OP = "Channel.create"


class ExchangeError(RuntimeError):
    """An exchange that cannot be completed: a peer did not come, left, or made a different call.

    What is left of the channel on this rank: workspaces of the open exchange are undefined. On a GPU and between
    processes the channel is over: later calls raise the same error and move nothing; close it on every rank, then
    create it again. Among loopback ranks on the CPU a call that came too early may be repeated, a wait that timed out
    included. Peers are not told; they find out by their own timeout.
    """


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
    expected_records: int
    scatter: bool = False
    workspace_sets: int = 0


class Channel:
    """One sequence of exchanges among the ranks of a group. Make it with `Channel.create`.

    Attributes:
        name: what the operators take as `channel`; for a loopback rank the given name, a colon, and the rank.
        rank, world: place in the group, and its size.
        state: int32 [8]; the channel's counters, given to every call, which makes the order of calls visible to a
            compiler.
        configuration: the sizes.
        workspaces: the sets that were asked for, each `layers` tensors [capacity_records, record_bytes] uint8. A call
            takes the first layers of one set, the same on every rank. Over "direct" records arrive there without being
            copied where calls take at least three sets in turn. A set that an exchange has filled is the caller's, to
            read and write, from its wait to the second start after its own; else it is the channel's.
        sharing: how many ranks have this rank's GPU.
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
        self.workspaces: list[list[torch.Tensor]] = []
        self.sharing = 1
        # Where kernels record errors so that the host sees them without waiting; set by the transport.
        self.host_words: torch.Tensor | None = None
        # CUDA graphs of `torch_sparse_mla.compile` that captured it.
        self.users = lifetimes.Users()

    @functools.cached_property
    def places(self) -> "Places":
        return places_of(self.workspaces)

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
        scatter: bool = False,
        expected_records: int | None = None,
        workspace_sets: int = 0,
    ) -> "Channel":
        """Make a channel. Every rank calls this, with the same arguments, before any capture.

        Args:
            name: unique among the open channels of a process.
            group: a `torch.distributed` process group, or `LoopbackGroup(...).rank(r)`.
            capacity_records: records of a workspace: requests x capacity per request.
            record_bytes: bytes of a record, 1 to 65,536.
            layers: the most layers that one call moves.
            transport: "direct" (kernels that write peer memory; CUDA), "ce" (copy engines that write it; CUDA),
                "collective" (messages: gloo on the CPU, NCCL on CUDA), "loopback" (ranks of one process), or "auto":
                direct for a process group on CUDA, collective for one on the CPU, loopback for a loopback group.
                Nothing else is tried where that one is not possible.
            requests: requests of a plan.
            timeout_s: seconds after which a wait for a peer fails.
            device: where caches and workspaces are; None: "cuda" for a group whose backend names nccl or where the
                loopback group says so, else "cpu".
            scatter: whether each rank gets records of its own, rather than all the same. A plan's `owned_slots` then
                lists the records for rank 0, as many for rank 1, and so on: as many each as the plan says are owned.
                One request only.
            expected_records: records that the unions of all requests have together as a rule, 1 to capacity_records;
                None: capacity_records. Transport "ce" sizes its copies by it, and moves what does not fit all the same.
            workspace_sets: sets of workspaces that the channel hands out; see the class.
        Returns: the channel, registered under `channel.name` until `close()`.
        Raises: ValueError for an argument that does not fit, RuntimeError where the transport cannot be set up; on
            every rank, whichever rank it is that fails. Loopback ranks come one after another: those that have a
            channel already raise at their next call.
        """
        ranks = as_group(group)
        reserved: list[str] = []

        def configure() -> ChannelConfiguration:
            sizes = (capacity_records, record_bytes, layers, requests, transport, timeout_s)
            expected = capacity_records if expected_records is None else expected_records
            configuration = ChannelConfiguration(
                name, *sizes, ranks.device(device).type, expected, scatter, workspace_sets
            )
            _check(configuration, ranks)
            registered = ranks.local_name(name)
            _reserve(registered)
            reserved.append(registered)
            return configuration

        try:
            configuration = ranks.agree(name, "arguments", configure, equal=True)
            channel = ranks.agree(
                name, "state", lambda: Channel(reserved[0], configuration, ranks, ranks.device(device))
            )
            _connect(channel)
        except BaseException:
            for registered in reserved:
                _free(registered)
            raise
        with _lock:
            _reserved.discard(channel.name)
            _registry[channel.name] = channel
        return channel

    def new_workspaces(self) -> list[list[torch.Tensor]]:
        """Sets of workspaces in memory of this rank alone, for transports that copy in any case."""
        sizes = self.configuration
        shape = (sizes.workspace_sets, sizes.layers, sizes.capacity_records, sizes.record_bytes)
        return [list(layers) for layers in torch.empty(shape, dtype=torch.uint8, device=self.device)]

    def close(self) -> None:
        """End the channel, before its process group is destroyed. Any later use raises; a second close does nothing.

        Memory that a CUDA graph captured stays mapped. Replays of such a graph move nothing, and `check()` says so.
        An exchange that was started and not waited for is given up, and peers that wait for it fail.
        Raises: RuntimeError, and closes nothing, while a `CompiledStep` holds graphs that captured the channel.
        """
        self.users.refuse_if_any(f"channel '{self.name}'")
        with _lock:
            if _registry.get(self.name) is self:
                del _registry[self.name]
                _closed.add(self.name)
        if self.transport is not None:
            self.transport.close()
            self.transport, self.workspaces = None, []
            self.group.leave(self.configuration.name, f"rank {self.rank} closed its channel")

    def check(self) -> None:
        """Wait for the device and raise what its kernels recorded: a peer that never came, or a call out of order.

        An eager call raises this too, as soon as it can be known without waiting; a graph replay cannot.
        """
        if self.state.is_cuda:
            torch.cuda.synchronize(self.state.device)
        if self.host_words is not None:
            self.raise_recorded(self.host_words.tolist())
        if self.transport is None:
            raise ExchangeError(f"torch_sparse_mla channel '{self.name}' is closed")

    def raise_recorded(self, words: list[int]) -> None:
        """Raise the error that a kernel wrote into host memory: code, peer, epoch."""
        code, peer, epoch = words[:3]
        if code:
            raise self.error(ERRORS[code].format(peer=peer, timeout=self.configuration.timeout_s), epoch)

    def error(self, what: str, epoch: int) -> ExchangeError:
        epoch &= 0xFFFFFFFF
        return ExchangeError(f"torch_sparse_mla channel '{self.name}': rank {self.rank}, epoch {epoch}: {what}")

    def explain(self) -> dict[str, str]:
        """Which transport was chosen and why, and the sizes."""
        sizes = self.configuration
        of_transport = getattr(self.transport, "explain", dict)()
        return {
            "channel": self.name,
            "transport": self.transport_name,
            "why": self.why,
            "ranks": f"rank {self.rank} of {self.world}",
            "device": str(self.device),
            "slab": f"{sizes.layers} layers x {sizes.capacity_records} records x {sizes.record_bytes} bytes",
            "timeout": f"{sizes.timeout_s} s",
            **({"workspaces": f"{sizes.workspace_sets} sets as large as the slab"} if sizes.workspace_sets else {}),
            **of_transport,
        }


TIMED_OUT, START_BEFORE_WAIT, WAIT_BEFORE_START, OTHER_CALL, OTHER_PLAN, CLOSED, OTHER_STATE, OTHER_EPOCH = range(1, 9)
ERRORS = {
    TIMED_OUT: "rank {peer} did not come within {timeout} s; start the same calls on every rank",
    START_BEFORE_WAIT: "started while the exchange before was not waited for; wait after every start",
    WAIT_BEFORE_START: "waited for an exchange that was not started; start first",
    OTHER_CALL: "rank {peer} moves another number of layers, or into another set of workspaces; make the same calls on "
    "every rank",
    OTHER_PLAN: "rank {peer} has other owner offsets; give every rank the same top-k lists and block table",
    CLOSED: "a CUDA graph that captured the channel was replayed after close()",
    OTHER_STATE: "argument 'state': got the state of another channel; allowed: channel.state",
    OTHER_EPOCH: "rank {peer} sent the records of another exchange; close the channel and create it on every rank",
}


def places_of(sets: list[list[torch.Tensor]]) -> Places:
    return {
        layer.data_ptr(): (number, place) for number, layers in enumerate(sets) for place, layer in enumerate(layers)
    }


def set_of(op: str, channel: Channel, workspaces: list[torch.Tensor], places: Places) -> int:
    """The set that a call fills; -1: workspaces of the caller's own.

    A set is used as one: what is known of it is when all of it was used last. Raises ValueError for a mixture.
    """
    found = [places.get(workspace.data_ptr()) for workspace in workspaces]
    if not any(found):
        return -1
    number = next(place for place in found if place is not None)[0]
    if found != [(number, layer) for layer in range(len(found))]:
        reject(
            op,
            "workspaces",
            f"(set, layer) {found} of those of channel '{channel.name}' on rank {channel.rank}",
            "the first layers of one set in order, or none of the channel's",
        )
    return number


_registry: dict[str, Channel] = {}
_closed: set[str] = set()
# Names of channels that are being made.
_reserved: set[str] = set()
_lock = threading.Lock()


def find_channel(op: str, name: str) -> Channel:
    """The open channel of a name. Raises ValueError, naming the op, where there is none."""
    channel = _registry.get(name)
    if channel is None:
        given = f"{name!r}, which is closed" if name in _closed else repr(name)
        reject(op, "channel", given, "the name of an open channel" + (f": {', '.join(_registry)}" if _registry else ""))
    return channel


def _reserve(registered: str) -> None:
    with _lock:
        if registered in _registry or registered in _reserved:
            reject(_OP, "name", repr(registered), "a name that no open channel has")
        _reserved.add(registered)
        _closed.discard(registered)


def _check(sizes: ChannelConfiguration, group: Group) -> None:
    if not isinstance(sizes.name, str) or not sizes.name:
        reject(_OP, "name", repr(sizes.name), "a string that is not empty")
    if sizes.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"torch_sparse_mla::{_OP}: make channel '{sizes.name}' before a CUDA graph is captured")
    for argument, value, most in (
        ("capacity_records", sizes.capacity_records, MAX_CAPACITY_RECORDS),
        ("record_bytes", sizes.record_bytes, MAX_RECORD_BYTES),
        ("layers", sizes.layers, MAX_LAYERS),
        ("requests", sizes.requests, sizes.capacity_records),
        ("expected_records", sizes.expected_records, sizes.capacity_records),
    ):
        if not isinstance(value, int) or not 1 <= value <= most:
            reject(_OP, argument, repr(value), f"an integer from 1 to {most}")
    if sizes.capacity_records % sizes.requests:
        reject(_OP, "capacity_records", sizes.capacity_records, f"a multiple of the {sizes.requests} requests")
    if sizes.scatter not in (False, True) or (sizes.scatter and sizes.requests > 1):
        reject(_OP, "scatter", f"{sizes.scatter!r} with {sizes.requests} request(s)", "False, or True with 1 request")
    packs = sizes.transport == "ce" or (sizes.transport == "collective" and sizes.device_type == "cuda")
    if sizes.scatter and packs:
        reject(_OP, "scatter", f"True with transport {sizes.transport}", "direct, loopback, or collective on the CPU")
    sets = sizes.workspace_sets
    if not isinstance(sets, int) or isinstance(sets, bool) or not 0 <= sets <= MAX_WORKSPACE_SETS:
        allowed = f"an integer from 0 to {MAX_WORKSPACE_SETS}"
        reject(_OP, "workspace_sets", repr(sets), allowed)
    try:
        SelectionPlan(sizes.requests, 1, sizes.capacity_records // sizes.requests, group.world)
    except ValueError as error:
        reject(_OP, "capacity_records", sizes.capacity_records, f"a capacity that a plan can have ({error})")
    if not isinstance(sizes.timeout_s, int | float) or not 0 < sizes.timeout_s <= 3600:
        reject(_OP, "timeout_s", repr(sizes.timeout_s), "above 0, at most 3600 seconds")
    possible = group.transports(sizes.device_type)
    if sizes.transport not in TRANSPORTS:
        reject(_OP, "transport", repr(sizes.transport), "one of " + ", ".join(TRANSPORTS))
    if sizes.transport not in ("auto", *possible):
        where = f"for {group.described} on {sizes.device_type}: auto or {' or '.join(possible)}"
        reject(_OP, "transport", repr(sizes.transport), where)


def _free(registered: str) -> None:
    with _lock:
        _reserved.discard(registered)


def _connect(channel: Channel) -> None:
    """Set up the transport: the one asked for, or with `auto` the one for such ranks and such a device."""
    group, device = channel.group, channel.device.type
    asked = channel.configuration.transport
    name = group.transports(device)[0] if asked == "auto" else asked
    module = {("loopback", "cuda"): "direct", ("collective", "cuda"): "nccl"}.get((name, device), name)
    # Every fallible step is agreed upon, an import too.
    connect = group.agree(
        channel.configuration.name,
        f"import {module}",
        lambda: importlib.import_module(f".transports.{module}", __package__).connect,
    )
    if device == "cuda":
        channel.sharing = group.sharing(channel.configuration.name, channel.device)
    channel.transport = connect(channel)
    if channel.configuration.workspace_sets:
        channel.workspaces = getattr(channel.transport, "workspaces", None) or _agreed_workspaces(channel)
    channel.transport_name = name
    channel.why = "asked for" if asked != "auto" else f"the transport for {group.described} on {device}"


def _agreed_workspaces(channel: Channel) -> list[list[torch.Tensor]]:
    try:
        return channel.group.agree(channel.configuration.name, "workspaces", channel.new_workspaces)
    except BaseException:
        channel.transport.close()
        raise
