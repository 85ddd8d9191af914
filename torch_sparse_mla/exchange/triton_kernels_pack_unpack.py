"""The kernels around a message: pack what a rank owns into one, unpack those of the peers, release a wait.

For transports that move messages of fixed size (`transports/packed.py` has the layout): a header, then the records that
a rank owns, request after request, as many as fit. What does not fit is stored by the pack kernel into the overflow
slab of every peer, where a record has the place that it has in the workspace.

A stream waits for messages, not these kernels. What they find in the headers is what counts; a flag says whether a
message came (1), did not (0), or was given up (`FORCED`): then a message may be there in part.
"""

import triton
import triton.language as tl

from ..triton_launch import AotConfiguration, AotConfigurations
from . import channel as channels
from . import triton_kernels as kernels
from .triton_parts import (
    OTHER_CALL,
    OTHER_PLAN,
    START_BEFORE_WAIT,
    START_BLOCKS,
    STARTED,
    TIMED_OUT,
    WAIT_BEFORE_START,
    WAIT_BLOCKS,
    WAITED,
    as_units,
    choose,
    copy_vectors,
    fence_system,
    is_last_block,
    is_refused,
    load_vectors,
    peer_pointer,
    plan_digest,
    record_error,
    segment,
    sources,
    store_release,
    store_vectors,
)

OTHER_EPOCH = tl.constexpr(channels.OTHER_EPOCH)
# Rows of the flags, each [world]: messages that came from each peer; leave of each peer to send it the next one.
FLAG_ROWS = 2
ARRIVED, FORCED = tl.constexpr(1), tl.constexpr(2)
# Where in the host's words the kernel counts exchanges, for the watchdog.
PROGRESS_WORD = tl.constexpr(3)
HEADER_BYTES = 16
# Packing with two places to store at takes more registers than pushing, so that six blocks run at once.
OPTIONS = {"num_warps": kernels.NUM_WARPS, "maxnreg": 80}
BLOCKS_PER_SM = 6

SCALARS = [
    "page_stride",
    "page_size",
    "num_slots",
    "requests",
    "capacity",
    "fitting",
    "message_16",
    "message_layer_16",
    "overflow_16",
    "overflow_layer_16",
    "flags_16",
    "first_layer",
    "call_layers",
    "rank",
    "world",
    "tag",
]
GEOMETRY = {
    "requests": "i32",
    "capacity": "i32",
    "fitting": "i32",
    "message_16": "i64",
    "message_layer_16": "i64",
    "overflow_16": "i64",
    "overflow_layer_16": "i64",
    "flags_16": "i64",
    "first_layer": "i32",
    "call_layers": "i32",
    "rank": "i32",
    "world": "i32",
    "tag": "i32",
}


def aot_configurations(capability: int) -> AotConfigurations:
    """The widths of the record layouts, in 16-byte vectors, and one width in bytes; with leave to send and without."""
    for record_bytes, unit in ((304, 4), (368, 4), (432, 4), (656, 4), (1152, 4), (37, 1)):
        common = {"owner_offsets": "*i32:16", "state": "*i32:16", "memory": "*i64:16"} | GEOMETRY
        pack = kernels.layer_pointers(("cache", "workspace"), unit) | common | {"owned_slots": "*i32:16"}
        pack |= {"page_stride": "i64", "page_size": "i32", "num_slots": "i32"}
        unpack = kernels.layer_pointers(("workspace",), unit) | common
        for leave, last in (
            ((True, True), (False, True), (True, False)) if record_bytes in (656, 37) else ((True, True),)
        ):
            form = kernels.tile(record_bytes, unit) | {"LAST": last, "NATIVE": True, "LEAVE": leave}
            unpacking = {name: value for name, value in form.items() if name != "ROWS"}
            suffix = f"{record_bytes}{'' if leave else '-without-leave'}{'' if last else '-more-layers-follow'}"
            yield AotConfiguration(f"pack-{suffix}", _pack_kernel, pack, form, OPTIONS)
            yield AotConfiguration(f"unpack-{suffix}", _unpack_kernel, unpack, unpacking, OPTIONS)
    yield AotConfiguration("release", _release_kernel, {"flags": "*i32:16", "count": "i32"}, {}, {"num_warps": 1})


@triton.jit(do_not_specialize=SCALARS)
def _pack_kernel(
    cache_0,
    cache_1,
    cache_2,
    cache_3,
    workspace_0,
    workspace_1,
    workspace_2,
    workspace_3,
    owner_offsets,
    owned_slots,
    state,
    memory,
    page_stride: tl.int64,
    page_size: tl.int32,
    num_slots: tl.int32,
    requests: tl.int32,
    capacity: tl.int32,
    fitting: tl.int32,
    message_16: tl.int64,
    message_layer_16: tl.int64,
    overflow_16: tl.int64,
    overflow_layer_16: tl.int64,
    flags_16: tl.int64,
    first_layer: tl.int32,
    call_layers: tl.int32,
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int32,
    UNIT: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
    LAST: tl.constexpr,
    NATIVE: tl.constexpr,
    LEAVE: tl.constexpr,
):
    """Own records to the own workspace and into the message, or where they do not fit, to every peer; then the header.

    `memory`: own memory, that of the other ranks, words of the host, the message.
    """
    block, layer = tl.program_id(0), tl.program_id(1)
    host_error = tl.load(memory + world)
    flags = _int32(memory, tl.load(memory) + flags_16)
    if is_refused(state, memory, host_error, tag, rank, NATIVE):
        return
    started = tl.load(state + STARTED)
    if started != tl.load(state + WAITED):
        _give_up(state, memory, host_error, START_BEFORE_WAIT, rank, started, flags, world, NATIVE)
        return
    epoch = started + 1
    if LEAVE:
        withheld = _first_forced(flags + world, rank, world)
        if withheld != rank:
            _give_up(state, memory, host_error, TIMED_OUT, withheld, epoch, flags, world, NATIVE)
            return
    cache = as_units(choose(layer, cache_0, cache_1, cache_2, cache_3), UNIT)
    workspace = as_units(choose(layer, workspace_0, workspace_1, workspace_2, workspace_3), UNIT)
    message = tl.load(memory + world + 1)
    in_message = as_units(
        peer_pointer(memory, message + 1 + (first_layer + layer).to(tl.int64) * message_layer_16), UNIT
    )
    overflow = overflow_16 + (first_layer + layer).to(tl.int64) * overflow_layer_16
    tile = tl.arange(0, VECTORS)
    row, part = tile // RECORD, tile % RECORD
    base = tl.full((), 0, tl.int64)
    packed = tl.full((), 0, tl.int64)
    for request in range(requests):
        begin, end = segment(owner_offsets, request, rank, world, capacity)
        for first in range(begin + block * ROWS, end, tl.num_programs(0) * ROWS):
            rows = first + row
            live = (row < ROWS) & (rows < end)
            owned = base + rows - begin
            source, present = sources(owned_slots, owned, live, page_stride, page_size, num_slots, RECORD)
            entries = packed + rows - begin
            fits = entries < fitting
            for column in range(0, RECORD, VECTORS):
                at = part + column
                inside = live & (at < RECORD)
                to = (base + rows) * RECORD + at
                values = load_vectors(cache, source + at, inside & present, UNIT)
                store_vectors(workspace, to, values, inside, UNIT)
                store_vectors(in_message, entries * RECORD + at, values, inside & fits, UNIT)
                if packed + tl.minimum(first + ROWS, end) - begin > fitting:
                    for target in range(1, world):
                        there = as_units(peer_pointer(memory, tl.load(memory + target) + overflow), UNIT)
                        store_vectors(there, to, values, inside & (fits == 0), UNIT)
        base += capacity
        packed += tl.maximum(end - begin, 0)
    fence_system(NATIVE)
    if LAST:
        is_last = is_last_block(state + START_BLOCKS)
        if is_last:
            tl.store(state + STARTED, epoch)
            header = _int32(memory, message)
            tl.store(header, epoch)
            tl.store(header + 1, call_layers)
            tl.store(header + 2, plan_digest(owner_offsets, requests * (world + 1)))
            if LEAVE:
                for peer in range(world):
                    tl.store(flags + world + peer, 0)


@triton.jit(do_not_specialize=SCALARS)
def _unpack_kernel(
    workspace_0,
    workspace_1,
    workspace_2,
    workspace_3,
    owner_offsets,
    state,
    memory,
    requests: tl.int32,
    capacity: tl.int32,
    fitting: tl.int32,
    message_16: tl.int64,
    message_layer_16: tl.int64,
    overflow_16: tl.int64,
    overflow_layer_16: tl.int64,
    flags_16: tl.int64,
    first_layer: tl.int32,
    call_layers: tl.int32,
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int32,
    UNIT: tl.constexpr,
    RECORD: tl.constexpr,
    VECTORS: tl.constexpr,
    LAST: tl.constexpr,
    NATIVE: tl.constexpr,
    LEAVE: tl.constexpr,
):
    """Check the header of every peer's message, bring the records to their places, and give leave to send the next."""
    layer = tl.program_id(1)
    own = tl.load(memory)
    host_error = tl.load(memory + world)
    flags = _int32(memory, own + flags_16)
    if is_refused(state, memory, host_error, tag, rank, NATIVE):
        return
    waited = tl.load(state + WAITED)
    epoch = waited + 1
    if tl.load(state + STARTED) == waited:
        _give_up(state, memory, host_error, WAIT_BEFORE_START, rank, waited, flags, world, NATIVE)
        return
    digest = plan_digest(owner_offsets, requests * (world + 1))
    failed, culprit = _failure(memory, flags, own, message_16, rank, world, epoch, call_layers, digest)
    if failed != 0:
        _give_up(state, memory, host_error, failed, culprit, epoch, flags, world, NATIVE)
        return
    workspace = as_units(choose(layer, workspace_0, workspace_1, workspace_2, workspace_3), UNIT)
    distance = 1 + (first_layer + layer).to(tl.int64) * message_layer_16
    overflow = own + overflow_16 + (first_layer + layer).to(tl.int64) * overflow_layer_16
    beyond = as_units(peer_pointer(memory, overflow), UNIT)
    for step in range(1, world):
        peer = (rank + step) % world
        message = as_units(peer_pointer(memory, own + peer.to(tl.int64) * message_16 + distance), UNIT)
        base = tl.full((), 0, tl.int64)
        packed = tl.full((), 0, tl.int64)
        for request in range(requests):
            begin, end = segment(owner_offsets, request, peer, world, capacity)
            count = tl.maximum(end - begin, 0).to(tl.int64)
            fits = tl.minimum(tl.maximum(fitting - packed, 0), count)
            vector = 4 if UNIT == 4 else 1
            to = (base + begin) * RECORD * vector
            copy_vectors(message + packed * RECORD * vector, workspace + to, fits * RECORD, UNIT, VECTORS)
            to += fits * RECORD * vector
            copy_vectors(beyond + to, workspace + to, (count - fits) * RECORD, UNIT, VECTORS)
            base += capacity
            packed += count
    if LAST:
        is_last = is_last_block(state + WAIT_BLOCKS)
        if is_last:
            tl.store(state + WAITED, epoch)
            tl.store(_int32(memory, host_error) + PROGRESS_WORD, epoch)
            if LEAVE:
                for peer in range(world):
                    tl.store(flags + peer, 0)
                for target in range(1, world):
                    theirs = _int32(memory, tl.load(memory + target) + flags_16)
                    store_release(theirs + world + rank, tl.full((), 0, tl.int32) + ARRIVED, NATIVE)


@triton.jit(do_not_specialize=["count"])
def _release_kernel(flags, count: tl.int32):
    """Give up what has not come, so that a waiting stream goes on, into a kernel that finds the flag."""
    for flag in range(count):
        tl.atomic_cas(flags + flag, 0, tl.full((), 0, tl.int32) + FORCED, sem="acq_rel", scope="sys")


@triton.jit
def _failure(memory, flags, own, message_16, rank, world, epoch, call_layers, digest):
    """The error to record, 0 for none, and whose it is.

    Where messages were given up, one whose header is not of this epoch did not come at all: its sender is named before
    one whose message may be there in part.
    """
    failed = tl.full((), 0, tl.int32)
    culprit = tl.full((), 0, tl.int32) + rank
    is_absent = tl.full((), 0, tl.int32)
    for step in range(1, world):
        peer = (rank + step) % world
        forced = tl.load(flags + peer) == FORCED
        header = _int32(memory, own + peer.to(tl.int64) * message_16)
        stale = tl.load(header) != epoch
        code = tl.full((), 0, tl.int32)
        if tl.load(header + 2) != digest:
            code = tl.full((), 0, tl.int32) + OTHER_PLAN
        if tl.load(header + 1) != call_layers:
            code = tl.full((), 0, tl.int32) + OTHER_CALL
        if stale:
            code = tl.full((), 0, tl.int32) + OTHER_EPOCH
        if forced:
            code = tl.full((), 0, tl.int32) + TIMED_OUT
        absent = (forced & stale).to(tl.int32)
        if (code != 0) & ((failed == 0) | (absent > is_absent)):
            failed = code
            culprit = peer
            is_absent = absent
    return failed, culprit


@triton.jit
def _first_forced(flags, rank, world):
    """The next peer whose flag was forced; the rank itself where there is none."""
    found = tl.full((), 0, tl.int32) + rank
    for step in range(1, world):
        peer = (rank + step) % world
        if (tl.load(flags + peer) == FORCED) & (found == rank):
            found = peer
    return found


@triton.jit
def _give_up(state, memory, host_error, code, peer, epoch, flags, world, NATIVE: tl.constexpr):
    """Record the error. From then on no stream waits here, in a replay either: nobody takes back a forced flag, and all
    that peers write is that they came."""
    record_error(state, memory, host_error, code, peer, epoch, NATIVE)
    for flag in range(2 * world):
        tl.store(flags + flag, tl.full((), 0, tl.int32) + FORCED)


@triton.jit
def _int32(memory, distance_16):
    return peer_pointer(memory, distance_16).to(tl.pointer_type(tl.int32))
