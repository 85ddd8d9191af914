"""CUDA implementations of the exchange operators: the checks, then the transport; and the kernels that move records.

Two kernels, push and wait, in a grid of (blocks, layers). Both walk over live segments of the plan, so that a launch of
fixed size moves as much as there is. Memory of peers is given by address: their slabs, flags, and workspaces.

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
from .triton_parts import (
    NUM_WARPS,
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
    now,
    peer_pointer,
    plan_digest,
    record_error,
    segment,
    sources,
    store_release,
    store_vectors,
)

__all__ = ["ce_exchange", "ce_exchange_layers", "ce_exchange_start", "ce_exchange_wait"]

# Told a limit, ptxas does not spill below it. Of 65,536 registers eight blocks of 4 warps have 64 a thread.
MAX_REGISTERS = 64
BLOCKS_PER_SM = 8
LAYERS_PER_LAUNCH = 4
OPTIONS = {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS}
# Words of four bytes, in vectors of 16 bytes; or as many vectors of one byte, each of which takes a register.
UNITS_PER_TILE = 2048

# Two slabs and two flags of each peer, by parity of the epoch. A flag is one 64-bit word, since a second store would
# have to be acknowledged before it: from the lowest bit the layers of the call, the set that it was placed into, and
# the end of the epoch; above them the digest of the plan.
SLABS = tl.constexpr(2)
LAYER_BITS = tl.constexpr(11)
EPOCH_SHIFT = tl.constexpr(16)
DIGEST_SHIFT = tl.constexpr(32)
FLAG_BYTES = 2 * 8
# Words of a rank's own, behind the flags: the last exchange that came straight into its workspaces; then for each set
# of them the last exchange that used it.
PLACED_WORD = tl.constexpr(0)
USED_WORD = tl.constexpr(1)
REUSE_DISTANCE = tl.constexpr(channels.REUSE_DISTANCE)
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
    "place",
    "place_16",
    "first_layer",
    "call_layers",
    "rank",
    "world",
    "tag",
    "timeout_ns",
]
GEOMETRY = {
    "requests": "i32",
    "capacity": "i32",
    "slab_layer_16": "i64",
    "slab_16": "i64",
    "place": "i32",
    "place_16": "i64",
    "first_layer": "i32",
    "call_layers": "i32",
    "rank": "i32",
    "world": "i32",
    "tag": "i32",
}


def tile(record_bytes: int, unit_bytes: int) -> dict[str, int]:
    """Constants of kernels: a record in vectors, the whole records of a tile (one, if it is longer), its vectors."""
    record = record_bytes // (16 if unit_bytes == 4 else 1)
    vectors = UNITS_PER_TILE // 4
    return {"UNIT": unit_bytes, "RECORD": record, "ROWS": max(vectors // record, 1), "VECTORS": vectors}


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def layer_pointers(names: tuple[str, ...], unit: int) -> dict[str, str]:
    """Signature of the pointers of a launch, one for each layer."""
    alignment = ":16" if unit == 4 else ""
    return {f"{name}_{layer}": f"*u8{alignment}" for name in names for layer in range(LAYERS_PER_LAUNCH)}


def aot_configurations(capability: int) -> AotConfigurations:
    """Widths of record layouts and of index pages in 16-byte vectors, and one width in bytes; of partial results."""
    for record_bytes, unit in ((304, 4), (368, 4), (432, 4), (656, 4), (1152, 4), (8448, 4), (64, 4), (4, 1), (37, 1)):
        common = {"owner_offsets": "*i32:16", "state": "*i32:16", "peers": "*i64:16"} | GEOMETRY
        push = layer_pointers(("cache", "workspace"), unit) | common | {"owned_slots": "*i32:16"}
        push |= {"page_stride": "i64", "page_size": "i32", "num_slots": "i32"}
        wait = layer_pointers(("workspace",), unit) | common | {"timeout_ns": "i64"}
        for last in (True, False) if record_bytes in (656, 37) else (True,):
            form = tile(record_bytes, unit) | {"LAST": last, "NATIVE": True}
            # Wait copies what came in vectors, of which it needs no record to be whole.
            waiting = {name: value for name, value in form.items() if name != "ROWS"}
            suffix = f"{record_bytes}{'' if last else '-more-layers-follow'}"
            yield AotConfiguration(f"push-{suffix}", _push_kernel, push, form | {"SCATTER": False}, OPTIONS)
            yield AotConfiguration(f"wait-{suffix}", _wait_kernel, wait, waiting, OPTIONS)
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
    place: tl.int32,
    place_16: tl.int64,
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
    SCATTER: tl.constexpr,
):
    """Own records to the own workspace and to the slab or the workspace of every target; then, in the last launch, the
    flags."""
    block, layer = tl.program_id(0), tl.program_id(1)
    num_targets = world - 1
    host_error = tl.load(peers + world)
    own = tl.load(peers)
    started = tl.load(state + STARTED)
    waited = tl.load(state + WAITED)
    if is_refused(state, peers, host_error, tag, rank, NATIVE):
        return
    if started != waited:
        record_error(state, peers, host_error, START_BEFORE_WAIT, rank, started, NATIVE)
        return
    epoch = started + 1
    words = _own_words(peers, own, slab_16, world)
    placed = _is_placed(words, place, epoch)
    cache = as_units(choose(layer, cache_0, cache_1, cache_2, cache_3), UNIT)
    workspace = as_units(choose(layer, workspace_0, workspace_1, workspace_2, workspace_3), UNIT)
    there = tl.where(placed != 0, place_16, (epoch & 1) * slab_16)
    there += (first_layer + layer).to(tl.int64) * slab_layer_16
    tile = tl.arange(0, VECTORS)
    # Which of the tile's records a vector belongs to, and where in it: the same in every tile.
    row, part = tile // RECORD, tile % RECORD
    if SCATTER:
        # One request. Tiles of all receivers are dealt to the blocks: one after another would add up their latencies.
        begin, end = segment(owner_offsets, 0, rank, world, capacity)
        tiles = tl.cdiv(end - begin, ROWS)
        for item in range(block, tiles * world, tl.num_programs(0)):
            step = item // tiles
            rows = begin + item % tiles * ROWS + row
            live = (row < ROWS) & (rows < end)
            entries = ((rank + step) % world).to(tl.int64) * (end - begin) + rows - begin
            source, present = sources(
                owned_slots, entries, live & (entries < capacity), page_stride, page_size, num_slots, RECORD
            )
            for column in range(0, RECORD, VECTORS):
                at = part + column
                inside = live & (at < RECORD)
                to = rows.to(tl.int64) * RECORD + at
                values = load_vectors(cache, source + at, inside & present, UNIT)
                if step == 0:
                    store_vectors(workspace, to, values, inside, UNIT)
                else:
                    memory = as_units(peer_pointer(peers, tl.load(peers + step) + there), UNIT)
                    store_vectors(memory, to, values, inside, UNIT)
    else:
        base = tl.full((), 0, tl.int64)
        for request in range(requests):
            begin, end = segment(owner_offsets, request, rank, world, capacity)
            for first in range(begin + block * ROWS, end, tl.num_programs(0) * ROWS):
                rows = first + row
                live = (row < ROWS) & (rows < end)
                entries = base + rows - begin
                source, present = sources(owned_slots, entries, live, page_stride, page_size, num_slots, RECORD)
                for column in range(0, RECORD, VECTORS):
                    at = part + column
                    inside = live & (at < RECORD)
                    to = (base + rows) * RECORD + at
                    values = load_vectors(cache, source + at, inside & present, UNIT)
                    store_vectors(workspace, to, values, inside, UNIT)
                    for target in range(num_targets):
                        memory = as_units(peer_pointer(peers, tl.load(peers + 1 + target) + there), UNIT)
                        store_vectors(memory, to, values, inside, UNIT)
            base += capacity
    if LAST:
        # Here, so that it is not waited for where stores are.
        digest = plan_digest(owner_offsets, requests * (world + 1))
    fence_system(NATIVE)
    if LAST:
        is_last = is_last_block(state + START_BLOCKS)
        if is_last:
            tl.store(state + STARTED, epoch)
            # Not the epoch, where it was not placed.
            tl.store(words + PLACED_WORD, epoch - 1 + placed)
            if place >= 0:
                tl.store(words + USED_WORD + place, epoch)
            flag = digest.to(tl.int64) << DIGEST_SHIFT
            flag |= _flag_low(epoch, call_layers, placed, place).to(tl.int64) & 0xFFFFFFFF
            for target in range(num_targets):
                flags = _flags(peers, tl.load(peers + 1 + target), slab_16)
                store_release(flags + (epoch & 1) * world + rank, flag, NATIVE)


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
    place: tl.int32,
    place_16: tl.int64,
    first_layer: tl.int32,
    call_layers: tl.int32,
    rank: tl.int32,
    world: tl.int32,
    tag: tl.int32,
    timeout_ns: tl.int64,
    UNIT: tl.constexpr,
    RECORD: tl.constexpr,
    VECTORS: tl.constexpr,
    LAST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Peer by peer: wait for its flag, then bring its segments from the own slab into the workspace, unless they came
    there at once: then one block waits."""
    block, layer = tl.program_id(0), tl.program_id(1)
    own = tl.load(peers)
    host_error = tl.load(peers + world)
    started = tl.load(state + STARTED)
    waited = tl.load(state + WAITED)
    if is_refused(state, peers, host_error, tag, rank, NATIVE):
        return
    # By the counter of starts: the block that waits may have counted the wait before another one looks.
    last_placed = tl.load(_own_words(peers, own, slab_16, world) + PLACED_WORD)
    placed = ((place >= 0) & (last_placed == started)).to(tl.int32)
    if (placed != 0) & (block + layer > 0):
        return
    epoch = waited + 1
    if started == waited:
        record_error(state, peers, host_error, WAIT_BEFORE_START, rank, waited, NATIVE)
        return
    workspace = as_units(choose(layer, workspace_0, workspace_1, workspace_2, workspace_3), UNIT)
    slab = own + (epoch & 1) * slab_16 + (first_layer + layer).to(tl.int64) * slab_layer_16
    flags = _flags(peers, own, slab_16)
    memory = as_units(peer_pointer(peers, slab), UNIT)
    digest = plan_digest(owner_offsets, requests * (world + 1))
    expected = _flag_low(epoch, call_layers, placed, place)
    arrived = flags + (epoch & 1) * world
    failed = 0
    for step in range(1, world):
        peer = (rank + step) % world
        if failed == 0:
            failed = _await(arrived + peer, expected, digest, timeout_ns, NATIVE)
            if failed != 0:
                record_error(state, peers, host_error, failed, peer, epoch, NATIVE)
        if (failed == 0) & (placed == 0):
            base = tl.full((), 0, tl.int64)
            for request in range(requests):
                begin, end = segment(owner_offsets, request, peer, world, capacity)
                skipped = (base + begin) * RECORD * (4 if UNIT == 4 else 1)
                count = (end - begin).to(tl.int64) * RECORD
                copy_vectors(memory + skipped, workspace + skipped, count, UNIT, VECTORS)
                base += capacity
    if LAST:
        is_last = placed != 0
        if (failed == 0) & (placed == 0):
            is_last = is_last_block(state + WAIT_BLOCKS)
        if is_last & (failed == 0):
            tl.store(state + WAITED, epoch)


@triton.jit
def _await(flag, expected, digest, timeout_ns, NATIVE: tl.constexpr):
    """Poll until the flag is of this epoch. Returns 0, or the error."""
    found = _poll(flag)
    polls = 0
    waiting = _is_behind(found, expected).to(tl.int32)
    begin = now(NATIVE)
    while waiting != 0:
        found = _poll(flag)
        polls += 1
        late = now(NATIVE) - begin > timeout_ns if NATIVE else polls >= INTERPRETED_POLLS
        waiting = (_is_behind(found, expected) & (late == 0)).to(tl.int32)
    tl.debug_barrier()
    result = 0
    if _is_behind(found, expected):
        result = TIMED_OUT
    elif found.to(tl.int32) != expected:
        result = OTHER_CALL
    elif (found >> DIGEST_SHIFT).to(tl.int32) != digest:
        result = OTHER_PLAN
    return result


@triton.jit
def _poll(flag):
    return tl.atomic_add(flag, tl.full((), 0, tl.int64), sem="acquire", scope="sys")


@triton.jit
def _is_behind(found, expected):
    """A peer's last flag of the same parity is this exchange's or the one's two before."""
    return ((found.to(tl.int32) ^ expected) >> EPOCH_SHIFT) != 0


@triton.jit
def _flag_low(epoch, call_layers, placed, place):
    """The lower half of a flag."""
    return (epoch << EPOCH_SHIFT) | (placed * (place + 1) << LAYER_BITS) | call_layers


@triton.jit
def _flags(peers, memory, slab_16):
    """Of the rank whose memory is so many times 16 bytes after the table."""
    return peer_pointer(peers, memory + SLABS * slab_16).to(tl.pointer_type(tl.int64))


@triton.jit
def _own_words(peers, own, slab_16, world):
    return (_flags(peers, own, slab_16) + 2 * world).to(tl.pointer_type(tl.int32))


@triton.jit
def _is_placed(words, place, epoch):
    """Whether records may go straight into the workspaces of a set: every peer has sent an exchange that it started
    after it had read what this set held. The same on every rank, since all use the same sets in the same exchanges."""
    used = tl.load(words + USED_WORD + tl.maximum(place, 0))
    return ((place >= 0) & (epoch - used >= REUSE_DISTANCE)).to(tl.int32)
