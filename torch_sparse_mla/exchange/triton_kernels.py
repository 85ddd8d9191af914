"""CUDA implementations of the exchange operators: the checks, then the transport; and the kernels that move records.

Two kernels, push and wait, in a grid of (blocks, layers). Both walk over live segments of the plan, so that a launch of
fixed size moves as much as there is. Memory of peers is given by address: their slabs, then their flags.

Order of stores: each thread fences for the whole system what it stored, the block meets, and one thread counts it in;
the last block to be counted stores the flags with release. Polls are atomic reads with acquire, made by one thread,
after which the block meets before it reads. Triton's interpreter has no inline assembly, hence `NATIVE`.
"""

import os

import triton
import triton.language as tl

from ..triton_launch import AotConfiguration, AotConfigurations
from . import channel as channels
from .reference import ce_exchange, ce_exchange_layers, ce_exchange_start, ce_exchange_wait

__all__ = ["ce_exchange", "ce_exchange_layers", "ce_exchange_start", "ce_exchange_wait"]

NUM_WARPS = 4
# Eight waiting ranks of MAX_PROGRAMS blocks fit on one GPU of 132 SMs; and told a limit, ptxas does not spill below it.
MAX_REGISTERS = 64
LAYERS_PER_LAUNCH = 4
# Enough for the bandwidth of a link, and few enough that waiting kernels of several ranks fit on one GPU together.
MAX_PROGRAMS = 128
OPTIONS = {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS}
UNITS_PER_TILE = 2048
MAX_COLUMNS = 1024

STARTED = tl.constexpr(channels.STARTED)
WAITED = tl.constexpr(channels.WAITED)
START_BLOCKS = tl.constexpr(channels.START_BLOCKS)
WAIT_BLOCKS = tl.constexpr(channels.WAIT_BLOCKS)
ERROR = tl.constexpr(channels.ERROR)
ERROR_PEER = tl.constexpr(channels.ERROR_PEER)
ERROR_EPOCH = tl.constexpr(channels.ERROR_EPOCH)
TIMED_OUT = tl.constexpr(channels.TIMED_OUT)
START_BEFORE_WAIT = tl.constexpr(channels.START_BEFORE_WAIT)
WAIT_BEFORE_START = tl.constexpr(channels.WAIT_BEFORE_START)
OTHER_CALL = tl.constexpr(channels.OTHER_CALL)
OTHER_PLAN = tl.constexpr(channels.OTHER_PLAN)
OTHER_STATE = tl.constexpr(channels.OTHER_STATE)
CLOSED = tl.constexpr(channels.CLOSED)
TAG = tl.constexpr(channels.TAG)
# Two slabs, by parity of the epoch. Flag words, each [world]: the epoch that arrived; layers and plan, by parity.
SLABS = tl.constexpr(2)
LAYERS_ROW = tl.constexpr(1)
PLAN_ROW = tl.constexpr(3)
FLAG_ROWS = 5
DIGEST_TILE = tl.constexpr(256)
THREADS = tl.constexpr(32 * NUM_WARPS)
# The interpreter runs programs one after another: a flag that is not there at once never comes.
INTERPRETED_POLLS = tl.constexpr(3)

SCALARS = [
    "page_stride",
    "page_size",
    "num_slots",
    "requests",
    "capacity",
    "slab_layer_16",
    "slab_16",
    "first_layer",
    "call_layers",
    "rank",
    "world",
    "tag",
    "timeout_ns",
]


def tile(record_bytes: int, unit_bytes: int) -> tuple[int, int, int]:
    """Units in a record, and the records and units of a tile.

    A unit is four bytes, of which a thread moves 16 bytes at a time; or one byte, where tiles are smaller because each
    byte takes a register.
    """
    record = record_bytes // unit_bytes
    units = UNITS_PER_TILE * unit_bytes // 4
    columns = min(triton.next_power_of_2(record), units, MAX_COLUMNS)
    return record, units // columns, columns


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def aot_configurations(capability: int) -> AotConfigurations:
    """Widths of record layouts and of index pages in 16-byte vectors, and one width in bytes; of partial results."""
    pointers = ["cache", "workspace"]
    for record_bytes, unit in ((304, 4), (368, 4), (432, 4), (656, 4), (1152, 4), (8448, 4), (64, 4), (4, 1), (37, 1)):
        alignment = ":16" if unit == 4 else ""
        layers = {f"{name}_{layer}": f"*u8{alignment}" for name in pointers for layer in range(LAYERS_PER_LAUNCH)}
        record, rows, columns = tile(record_bytes, unit)
        common = {"owner_offsets": "*i32:16", "state": "*i32:16", "peers": "*i64:16"}
        geometry = {"requests": "i32", "capacity": "i32", "slab_layer_16": "i64", "slab_16": "i64"}
        geometry |= {"first_layer": "i32", "call_layers": "i32", "rank": "i32", "world": "i32", "tag": "i32"}
        push = {name: layers[name] for name in layers} | common | {"owned_slots": "*i32:16"} | geometry
        push |= {"page_stride": "i64", "page_size": "i32", "num_slots": "i32"}
        wait = {name: layers[name] for name in layers if name.startswith("workspace")} | common | geometry
        wait |= {"timeout_ns": "i64"}
        for last in (True, False) if record_bytes in (656, 37) else (True,):
            form = {"UNIT": unit, "RECORD": record, "ROWS": rows, "COLUMNS": columns, "LAST": last, "NATIVE": True}
            suffix = f"{record_bytes}{'' if last else '-more-layers-follow'}"
            yield AotConfiguration(f"push-{suffix}", _push_kernel, push, form | {"SCATTER": False}, OPTIONS)
            yield AotConfiguration(f"wait-{suffix}", _wait_kernel, wait, form, OPTIONS)
            if record_bytes in (64, 4):
                yield AotConfiguration(f"scatter-{suffix}", _push_kernel, push, form | {"SCATTER": True}, OPTIONS)


@triton.jit(do_not_specialize=SCALARS)
def _push_kernel(
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
    peers,
    page_stride: tl.int64,
    page_size: tl.int32,
    num_slots: tl.int32,
    requests: tl.int32,
    capacity: tl.int32,
    slab_layer_16: tl.int64,
    slab_16: tl.int64,
    first_layer: tl.int32,
    call_layers: tl.int32,
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int32,
    UNIT: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    NATIVE: tl.constexpr,
    SCATTER: tl.constexpr,
):
    """Own records to the own workspace and to the slab of every target; then, in the last launch, the flags."""
    block, layer = tl.program_id(0), tl.program_id(1)
    num_targets = world - 1
    host_error = tl.load(peers + world)
    if _is_refused(state, peers, host_error, tag, rank, NATIVE):
        return
    started = tl.load(state + STARTED)
    if started != tl.load(state + WAITED):
        _record_error(state, peers, host_error, START_BEFORE_WAIT, rank, started, NATIVE)
        return
    epoch = started + 1
    cache = _units(_choose(layer, cache_0, cache_1, cache_2, cache_3), UNIT)
    workspace = _units(_choose(layer, workspace_0, workspace_1, workspace_2, workspace_3), UNIT)
    slab = (epoch & 1) * slab_16 + (first_layer + layer).to(tl.int64) * slab_layer_16
    stride = page_stride * (4 if UNIT == 4 else 1)
    columns = tl.arange(0, COLUMNS)
    if SCATTER:
        # One request. Tiles of all receivers are dealt to the blocks: one after another would add up their latencies.
        begin, end = _segment(owner_offsets, 0, rank, world, capacity)
        tiles = tl.cdiv(end - begin, ROWS)
        for item in range(block, tiles * world, tl.num_programs(0)):
            step = item // tiles
            rows = begin + item % tiles * ROWS + tl.arange(0, ROWS)
            entries = ((rank + step) % world).to(tl.int64) * (end - begin) + rows - begin
            live, place = rows < end, rows.to(tl.int64) * RECORD
            source, present = _sources(
                owned_slots, entries, live & (entries < capacity), stride, page_size, num_slots, RECORD
            )
            for column in range(0, RECORD, COLUMNS):
                unit = column + columns
                inside = live[:, None] & (unit < RECORD)[None, :]
                values = tl.load(cache + source[:, None] + unit[None, :], mask=inside & present[:, None], other=0)
                if step == 0:
                    tl.store(workspace + place[:, None] + unit[None, :], values, mask=inside)
                else:
                    memory = _units(_pointer(peers, tl.load(peers + step) + slab), UNIT)
                    tl.store(memory + place[:, None] + unit[None, :], values, mask=inside)
    else:
        base = tl.full((), 0, tl.int64)
        for request in range(requests):
            begin, end = _segment(owner_offsets, request, rank, world, capacity)
            for first in range(begin + block * ROWS, end, tl.num_programs(0) * ROWS):
                rows = first + tl.arange(0, ROWS)
                live, place = rows < end, (base + rows) * RECORD
                entries = base + rows - begin
                source, present = _sources(owned_slots, entries, live, stride, page_size, num_slots, RECORD)
                for column in range(0, RECORD, COLUMNS):
                    unit = column + columns
                    inside = live[:, None] & (unit < RECORD)[None, :]
                    values = tl.load(cache + source[:, None] + unit[None, :], mask=inside & present[:, None], other=0)
                    tl.store(workspace + place[:, None] + unit[None, :], values, mask=inside)
                    for target in range(num_targets):
                        memory = _units(_pointer(peers, tl.load(peers + 1 + target) + slab), UNIT)
                        tl.store(memory + place[:, None] + unit[None, :], values, mask=inside)
            base += capacity
    if LAST:
        _fence(NATIVE)
        tl.debug_barrier()
        blocks = tl.num_programs(0) * tl.num_programs(1)
        if tl.atomic_add(state + START_BLOCKS, 1, sem="acq_rel", scope="sys") == blocks - 1:
            tl.store(state + START_BLOCKS, 0)
            tl.store(state + STARTED, epoch)
            digest = _plan_digest(owner_offsets, requests * (world + 1))
            for target in range(num_targets):
                flags = _pointer(peers, tl.load(peers + 1 + target) + SLABS * slab_16).to(tl.pointer_type(tl.int32))
                tl.store(flags + (LAYERS_ROW + (epoch & 1)) * world + rank, call_layers)
                tl.store(flags + (PLAN_ROW + (epoch & 1)) * world + rank, digest)
                _store_release(flags + rank, epoch, NATIVE)
    else:
        _fence(NATIVE)


@triton.jit(do_not_specialize=SCALARS)
def _wait_kernel(
    workspace_0,
    workspace_1,
    workspace_2,
    workspace_3,
    owner_offsets,
    state,
    peers,
    requests: tl.int32,
    capacity: tl.int32,
    slab_layer_16: tl.int64,
    slab_16: tl.int64,
    first_layer: tl.int32,
    call_layers: tl.int32,
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int32,
    timeout_ns: tl.int64,
    UNIT: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Peer by peer: wait for its flag, then bring its segments from the own slab into the workspace."""
    block, layer = tl.program_id(0), tl.program_id(1)
    own = tl.load(peers)
    host_error = tl.load(peers + world)
    if _is_refused(state, peers, host_error, tag, rank, NATIVE):
        return
    waited = tl.load(state + WAITED)
    epoch = waited + 1
    if tl.load(state + STARTED) == waited:
        _record_error(state, peers, host_error, WAIT_BEFORE_START, rank, waited, NATIVE)
        return
    workspace = _units(_choose(layer, workspace_0, workspace_1, workspace_2, workspace_3), UNIT)
    slab = own + (epoch & 1) * slab_16 + (first_layer + layer).to(tl.int64) * slab_layer_16
    columns = tl.arange(0, COLUMNS)
    flags = _pointer(peers, own + SLABS * slab_16).to(tl.pointer_type(tl.int32))
    memory = _units(_pointer(peers, slab), UNIT)
    digest = _plan_digest(owner_offsets, requests * (world + 1))
    failed = 0
    for step in range(1, world):
        peer = (rank + step) % world
        if failed == 0:
            failed = _await(flags, peer, world, epoch, call_layers, digest, timeout_ns, NATIVE)
            if failed != 0:
                _record_error(state, peers, host_error, failed, peer, epoch, NATIVE)
        if failed == 0:
            base = tl.full((), 0, tl.int64)
            for request in range(requests):
                begin, end = _segment(owner_offsets, request, peer, world, capacity)
                for first in range(begin + block * ROWS, end, tl.num_programs(0) * ROWS):
                    rows = first + tl.arange(0, ROWS)
                    place = (base + rows) * RECORD
                    for column in range(0, RECORD, COLUMNS):
                        unit = column + columns
                        inside = (rows < end)[:, None] & (unit < RECORD)[None, :]
                        values = tl.load(memory + place[:, None] + unit[None, :], mask=inside, other=0)
                        tl.store(workspace + place[:, None] + unit[None, :], values, mask=inside)
                base += capacity
    if LAST:
        tl.debug_barrier()
        if failed == 0:
            blocks = tl.num_programs(0) * tl.num_programs(1)
            if tl.atomic_add(state + WAIT_BLOCKS, 1, sem="acq_rel", scope="sys") == blocks - 1:
                tl.store(state + WAIT_BLOCKS, 0)
                tl.store(state + WAITED, epoch)


@triton.jit
def _await(flags, peer, world, epoch, call_layers, digest, timeout_ns, NATIVE: tl.constexpr):
    """Poll until the peer's flag reaches the epoch. Returns 0, or the error."""
    behind = tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys") - epoch
    polls = 0
    waiting = (behind < 0).to(tl.int32)
    begin = _now(NATIVE)
    while waiting != 0:
        behind = tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys") - epoch
        polls += 1
        late = _now(NATIVE) - begin > timeout_ns if NATIVE else polls >= INTERPRETED_POLLS
        waiting = ((behind < 0) & (late == 0)).to(tl.int32)
    tl.debug_barrier()
    result = 0
    if behind < 0:
        result = TIMED_OUT
    elif tl.load(flags + (LAYERS_ROW + (epoch & 1)) * world + peer, cache_modifier=".cv") != call_layers:
        result = OTHER_CALL
    elif tl.load(flags + (PLAN_ROW + (epoch & 1)) * world + peer, cache_modifier=".cv") != digest:
        result = OTHER_PLAN
    return result


@triton.jit
def _is_refused(state, peers, host_error, tag, rank, NATIVE: tl.constexpr):
    """Whether the state is another channel's, or tells of an error. Of these two nothing but this call knows: another
    channel's state, which is left alone, and a replay after close."""
    error = tl.load(state + ERROR)
    if tl.load(state + TAG) != tag:
        error = OTHER_STATE
    if (error == OTHER_STATE) | (error == CLOSED):
        _tell_host(peers, host_error, error, rank, tl.load(state + STARTED), NATIVE)
    return error != 0


@triton.jit
def _record_error(state, peers, host_error, code, peer, epoch, NATIVE: tl.constexpr):
    """Keep the first error, on the device for later kernels and in host memory for the next eager call."""
    if tl.atomic_cas(state + ERROR, 0, code, sem="acq_rel", scope="sys") == 0:
        tl.store(state + ERROR_PEER, peer)
        tl.store(state + ERROR_EPOCH, epoch)
        _tell_host(peers, host_error, tl.full((), 0, tl.int32) + code, peer, epoch, NATIVE)


@triton.jit
def _tell_host(peers, host_error, code, peer, epoch, NATIVE: tl.constexpr):
    host = _pointer(peers, host_error).to(tl.pointer_type(tl.int32))
    tl.store(host + 1, peer)
    tl.store(host + 2, epoch)
    _store_release(host, code, NATIVE)


@triton.jit
def _segment(owner_offsets, request, owner, world, capacity):
    """Where an owner's records lie in a request's union; whatever the plan says, within the request's capacity."""
    offsets = owner_offsets + request * (world + 1) + owner
    begin = tl.minimum(tl.maximum(tl.load(offsets), 0), capacity)
    return begin, tl.minimum(tl.maximum(tl.load(offsets + 1), 0), capacity)


@triton.jit
def _sources(owned_slots, entries, live, stride, page_size, num_slots, RECORD: tl.constexpr):
    """Where the records of a plan's entries lie in the cache, in units, and which of them there are."""
    slots = tl.load(owned_slots + entries, mask=live, other=-1)
    present = live & (slots >= 0) & (slots < num_slots)
    slots = tl.where(present, slots, 0)
    return (slots // page_size).to(tl.int64) * stride + (slots % page_size).to(tl.int64) * RECORD, present


@triton.jit
def _plan_digest(owner_offsets, words):
    """A sum of the owner offsets with odd weights: two plans that differ in one word never have the same."""
    digest = tl.full((), 0, tl.int64)
    for first in range(0, words, DIGEST_TILE):
        word = first + tl.arange(0, DIGEST_TILE)
        offsets = tl.load(owner_offsets + word, mask=word < words, other=0)
        weights = word.to(tl.int64) * 0x1E3779B2 + 1
        digest += tl.sum(offsets * (weights & 0x7FFFFFFF) & 0xFFFFFFFF)
    return digest.to(tl.int32)


@triton.jit
def _choose(layer, first, second, third, fourth):
    chosen = first
    if layer == 1:
        chosen = second
    if layer == 2:
        chosen = third
    if layer == 3:
        chosen = fourth
    return chosen


@triton.jit
def _pointer(peers, distance_16):
    """The memory that lies so many times 16 bytes after the table: so the compiler knows that it is aligned."""
    return peers.to(tl.pointer_type(tl.uint8)) + distance_16 * 16


@triton.jit
def _units(pointer, UNIT: tl.constexpr):
    if UNIT == 4:
        return pointer.to(tl.pointer_type(tl.int32))
    else:
        return pointer


@triton.jit
def _fence(NATIVE: tl.constexpr):
    """By every thread: what it stored is visible to all GPUs before what follows."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [tl.arange(0, THREADS)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _store_release(pointer, value, NATIVE: tl.constexpr):
    """By one thread, after all that it knows of. A plain store: PCIe carries no atomics."""
    if NATIVE:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.b32 [$1], $2;
            mov.b32 $0, $2;
            }""",
            "=r,l,r",
            [pointer, value],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(pointer, value, sem="release", scope="sys")


@triton.jit
def _now(NATIVE: tl.constexpr):
    """Nanoseconds, the same in every thread: what a thread decides by a clock of its own splits the block."""
    if NATIVE:
        times = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [tl.arange(0, THREADS)], tl.int64, is_pure=False, pack=1
        )
        return tl.max(times, 0)
    else:
        return tl.full((), 0, tl.int64)
