"""What the kernels of the exchange family are made of: moving records, order of stores, errors, counting blocks.

Records move in vectors: 16 bytes of a thread where every address allows it (`LANES` 4-byte words), else one byte. Those
of a tile are numbered through, so that no lane idles where a record ends.
"""

import triton
import triton.language as tl

from . import channel as channels

NUM_WARPS = 4
VECTOR_WORDS = tl.constexpr(4)

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
DIGEST_TILE = tl.constexpr(256)
THREADS = tl.constexpr(32 * NUM_WARPS)


@triton.jit
def _lanes(UNIT: tl.constexpr):
    """Elements of a vector."""
    return tl.arange(0, 4 if UNIT == 4 else 1)


@triton.jit
def load_vectors(pointer, at, inside, UNIT: tl.constexpr):
    """Those at `at` [n] vectors behind the pointer: [n, elements]; zeros where not inside."""
    lanes = _lanes(UNIT)
    places = at[:, None] * lanes.shape[0] + lanes[None, :]
    return tl.load(pointer + places, mask=inside[:, None], other=0)


@triton.jit
def store_vectors(pointer, at, values, inside, UNIT: tl.constexpr):
    lanes = _lanes(UNIT)
    places = at[:, None] * lanes.shape[0] + lanes[None, :]
    tl.store(pointer + places, values, mask=inside[:, None])


@triton.jit
def copy_vectors(source, target, count, UNIT: tl.constexpr, VECTORS: tl.constexpr):
    """The blocks of one layer copy `count` vectors that follow one another."""
    tile = tl.arange(0, VECTORS)
    block = tl.program_id(0).to(tl.int64)
    for first in range(block * VECTORS, count, tl.num_programs(0) * VECTORS):
        inside = first + tile < count
        store_vectors(target, first + tile, load_vectors(source, first + tile, inside, UNIT), inside, UNIT)


@triton.jit
def is_last_block(counter):
    """Counts the block in. Whether it is the last of the grid, which resets the counter.

    What all blocks stored and fenced is then visible to this one, and through its releases to whoever acquires them.
    The counter is for blocks of one GPU, so its scope is the GPU.
    """
    tl.debug_barrier()
    blocks = tl.num_programs(0) * tl.num_programs(1)
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == blocks - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def is_refused(state, peers, host_error, tag, rank, NATIVE: tl.constexpr):
    """Whether the state is another channel's, or tells of an error. Of these two nothing but this call knows: another
    channel's state, which is left alone, and a replay after close."""
    error = tl.load(state + ERROR)
    if tl.load(state + TAG) != tag:
        error = OTHER_STATE
    if (error == OTHER_STATE) | (error == CLOSED):
        _tell_host(peers, host_error, error, rank, tl.load(state + STARTED), NATIVE)
    return error != 0


@triton.jit
def record_error(state, peers, host_error, code, peer, epoch, NATIVE: tl.constexpr):
    """Keep the first error, on the device for later kernels and in host memory for the next eager call."""
    if tl.atomic_cas(state + ERROR, 0, code, sem="acq_rel", scope="sys") == 0:
        tl.store(state + ERROR_PEER, peer)
        tl.store(state + ERROR_EPOCH, epoch)
        _tell_host(peers, host_error, tl.full((), 0, tl.int32) + code, peer, epoch, NATIVE)


@triton.jit
def _tell_host(peers, host_error, code, peer, epoch, NATIVE: tl.constexpr):
    host = peer_pointer(peers, host_error).to(tl.pointer_type(tl.int32))
    tl.store(host + 1, peer)
    tl.store(host + 2, epoch)
    store_release(host, code, NATIVE)


@triton.jit
def segment(owner_offsets, request, owner, world, capacity):
    """Where an owner's records lie in a request's union; whatever the plan says, within the request's capacity."""
    offsets = owner_offsets + request * (world + 1) + owner
    begin = tl.minimum(tl.maximum(tl.load(offsets), 0), capacity)
    return begin, tl.minimum(tl.maximum(tl.load(offsets + 1), 0), capacity)


@triton.jit
def sources(owned_slots, entries, live, stride, page_size, num_slots, RECORD: tl.constexpr):
    """Where the records of a plan's entries lie in the cache, in vectors, and which of them there are."""
    slots = tl.load(owned_slots + entries, mask=live, other=-1)
    present = live & (slots >= 0) & (slots < num_slots)
    slots = tl.where(present, slots, 0)
    # The exponent of a float: the power of two that a page size almost always is. A division takes 20 instructions, and
    # where one follows each load, loads wait for one another.
    shift = (page_size.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    if page_size & (page_size - 1) == 0:
        page = slots >> shift
    else:
        page = slots // page_size
    within = slots - page * page_size
    return page.to(tl.int64) * stride + within.to(tl.int64) * RECORD, present


@triton.jit
def plan_digest(owner_offsets, words):
    """A sum of the owner offsets with odd weights: two plans that differ in one word never have the same."""
    digest = tl.full((), 0, tl.int64)
    for first in range(0, words, DIGEST_TILE):
        word = first + tl.arange(0, DIGEST_TILE)
        offsets = tl.load(owner_offsets + word, mask=word < words, other=0)
        weights = word.to(tl.int64) * 0x1E3779B2 + 1
        digest += tl.sum(offsets * (weights & 0x7FFFFFFF) & 0xFFFFFFFF)
    return digest.to(tl.int32)


@triton.jit
def choose(layer, first, second, third, fourth):
    chosen = first
    if layer == 1:
        chosen = second
    if layer == 2:
        chosen = third
    if layer == 3:
        chosen = fourth
    return chosen


@triton.jit
def peer_pointer(peers, distance_16):
    """The memory that lies so many times 16 bytes after the table: so the compiler knows that it is aligned."""
    return peers.to(tl.pointer_type(tl.uint8)) + distance_16 * 16


@triton.jit
def as_units(pointer, UNIT: tl.constexpr):
    if UNIT == 4:
        return pointer.to(tl.pointer_type(tl.int32))
    else:
        return pointer


@triton.jit
def fence_system(NATIVE: tl.constexpr):
    """By every thread: what it stored is visible to all GPUs before what follows."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [tl.arange(0, THREADS)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def store_release(pointer, value, NATIVE: tl.constexpr):
    """By one thread, after all that it knows of. A plain store, of 4 or 8 bytes: PCIe carries no atomics."""
    if not NATIVE:
        tl.atomic_xchg(pointer, value, sem="release", scope="sys")
    elif pointer.dtype.element_ty == tl.int64:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.b64 [$1], $2;
            mov.b32 $0, thread;
            }""",
            "=r,l,l",
            [pointer, value],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
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


@triton.jit
def now(NATIVE: tl.constexpr):
    """Nanoseconds, the same in every thread: what a thread decides by a clock of its own splits the block."""
    if NATIVE:
        times = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [tl.arange(0, THREADS)], tl.int64, is_pure=False, pack=1
        )
        return tl.max(times, 0)
    else:
        return tl.full((), 0, tl.int64)
