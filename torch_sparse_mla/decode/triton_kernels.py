"""Sparse CKV decode and partial merge as Triton kernels: the portable CUDA form, sm_80 and newer.

One program attends with one tile of heads to one part of one row's list. Its record tile is loaded in four chunks of
128 latents. Each is used twice: as keys, then as values, held in registers or loaded again from the L1 cache.

Codes stay unscaled through both matrix products: float16 holds e4m3 codes and e2m1 x e4m3 products exactly, bf16 holds
bf16 latents. A scale that belongs to a whole (token, chunk) multiplies scores before the softmax and weights after it,
in float32. What meets float16 codes is first divided by a power of two, so that queries and scales of any magnitude
fit. float16 and float32 queries keep their precision through pairs of tf32 operands, with any codes.

Where a part of a list begins is worked out here from the row's live length, so that a captured launch stays right when
lengths change. A row's parts are merged by a second kernel, which is also the operator `merge_partial_attention`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..contract import ALIGNMENT_BYTES
from ..records.layouts import LATENT_DIM, LAYOUTS, RecordLayout
from ..records.triton_codec import decode_e2m1, decode_e4m3
from ..triton_launch import AotConfiguration, AotConfigurations, PreparedCall, PreparedOp, capability_of, on_device
from . import contract

LOG2_E = tl.constexpr(1.4426950408889634)
# From the first of several caches to each other one, counted in 16 bytes: so the compiler knows that it is aligned.
DISTANCES = [f"distance_{cache}" for cache in range(1, contract.MAX_CACHES)]
MERGE_COLUMNS = 64
MERGE_PARTIALS = 32


_checked_decode = PreparedOp(contract.check_sparse_ckv_decode, outputs=("out", "lse", "workspace"))
_checked_merge = PreparedOp(contract.check_merge_partial_attention, outputs=("out", "lse"))


def sparse_ckv_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    softmax_scale: float,
    layout: str,
    batch_invariant: bool = False,
) -> None:
    call = _checked_decode(
        q, cache, indices, lengths, sink, out, lse, workspace, softmax_scale, layout, batch_invariant
    )
    _decode(call, q, [cache], indices, lengths, sink, out, lse, workspace, softmax_scale, batch_invariant)


def sparse_ckv_decode_peers(
    q: torch.Tensor,
    caches: list[torch.Tensor],
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    softmax_scale: float,
    layout: str,
    batch_invariant: bool = False,
) -> None:
    record_layout = contract.check_sparse_ckv_decode_peers(
        q, caches, indices, lengths, sink, out, lse, workspace, softmax_scale, layout, batch_invariant
    )
    # Not kept: the caches are a list.
    call = PreparedCall(record_layout, outputs=(), tensors=())
    _decode(call, q, caches, indices, lengths, sink, out, lse, workspace, softmax_scale, batch_invariant)


def _decode(
    call: PreparedCall, q, caches, indices, lengths, sink, out, lse, workspace, softmax_scale, batch_invariant
) -> None:
    record_layout = call.checked
    rows, num_heads, _ = q.shape
    if rows == 0:
        return
    topk = indices.shape[1]
    if call.kept is None:
        large = _is_large(rows, num_heads, batch_invariant)
        tile = attend_tile(record_layout, q.dtype, capability_of(q.device), large)
        call.kept = tile, contract.num_splits(rows, num_heads, topk, batch_invariant, tile.programs)
    tile, splits = call.kept
    arguments = (softmax_scale, record_layout, tile, splits, batch_invariant)
    with on_device(q):
        if splits == 1:
            _attend(call, 0, q, caches, indices, lengths, sink, out, lse, *arguments)
            return
        step = contract.rows_per_launch(rows, num_heads, topk, batch_invariant)
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            partial_out, partial_lse = _partial_views(workspace, splits, part.stop - first, num_heads)
            part_lengths = None if lengths is None else lengths[part]
            partials = (partial_out, partial_lse)
            _attend(call, first, q[part], caches, indices[part], part_lengths, None, *partials, *arguments)
            _merge(call, first, *partials, sink, out[part], lse[part])


def merge_partial_attention(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    call = _checked_merge(partial_out, partial_lse, sink, out, lse)
    if lse.numel():
        with on_device(out):
            _merge(call, 0, partial_out, partial_lse, sink, out, lse)


def _partial_views(
    workspace: torch.Tensor, splits: int, rows: int, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    words = splits * rows * num_heads
    floats = workspace[: words * (LATENT_DIM + 1) * 4].view(torch.float32)
    return (
        floats[: words * LATENT_DIM].view(splits, rows, num_heads, LATENT_DIM),
        floats[words * LATENT_DIM :].view(splits, rows, num_heads),
    )


class Tile(NamedTuple):
    """How a program attends.

    Attributes:
        tokens: records in a tile.
        num_warps, num_stages: Triton's launch options.
        programs: how many programs to split the rows into.
        reload: read a record tile twice, rather than hold it in registers between its two uses.
    """

    tokens: int
    num_warps: int
    num_stages: int
    programs: int
    reload: bool = True


def attend_tile(layout: RecordLayout, q_dtype: torch.dtype, capability: int, large: bool) -> Tile:
    """The tile for a layout, query type and GPU: the fastest measured on sm_90, elsewhere the largest without spills.

    `large` calls keep every multiprocessor busy with two small programs; small ones finish sooner as one wide program.
    """
    if q_dtype != torch.bfloat16:
        return Tile(tokens=32, num_warps=8, num_stages=1, programs=132)
    datacenter = capability == 80 or 90 <= capability < 120
    if layout.latent == "bf16":
        # Three stages take 159 KB of shared memory.
        return Tile(tokens=32, num_warps=4, num_stages=3 if datacenter else 2, programs=132)
    if layout.latent == "e4m3" and capability // 10 == 9:
        if large:
            return Tile(tokens=32, num_warps=4, num_stages=3, programs=264)
        return Tile(tokens=64, num_warps=8, num_stages=1, programs=132, reload=False)
    num_stages = 2 if layout.latent == "e4m3" and 100 <= capability < 120 else 1
    return Tile(tokens=64 if _has_native_e4m3(capability) else 32, num_warps=8, num_stages=num_stages, programs=132)


def _has_native_e4m3(capability: int) -> bool:
    """sm_89 converts e4m3 too, but Triton 3.6 goes on from there by an instruction of sm_90."""
    return capability >= 90


def _is_large(rows: int, num_heads: int, batch_invariant: bool) -> bool:
    return batch_invariant or rows * _head_tiles(num_heads) >= 16


def _head_tiles(num_heads: int) -> int:
    return -(-num_heads // contract.HEADS_PER_TILE)


def _attend(
    call: PreparedCall,
    site: int,
    q,
    caches,
    indices,
    lengths,
    sink,
    out,
    lse,
    softmax_scale,
    layout,
    tile,
    splits,
    batch_invariant,
) -> None:
    rows, num_heads, _ = q.shape
    cache = caches[0]
    distances = [(other.data_ptr() - cache.data_ptr()) // ALIGNMENT_BYTES for other in caches[1:]]
    call.launch(
        _sparse_ckv_decode_kernel,
        (rows, splits, _head_tiles(num_heads)),
        q,
        cache,
        indices,
        lengths,
        sink,
        out,
        lse,
        softmax_scale,
        num_heads,
        indices.shape[1],
        len(caches) * cache.shape[0] * cache.shape[1],
        cache.shape[1],
        cache.stride(0) // ALIGNMENT_BYTES,
        q.stride(0),
        indices.stride(0),
        max(cache.shape[0], 1),
        *distances,
        *[0] * (contract.MAX_CACHES - len(caches)),
        **_attend_constants(layout, q.dtype, tile, batch_invariant, capability_of(cache.device)),
        PEERS=len(caches) > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        site=site,
    )


def _attend_constants(
    layout: RecordLayout, q_dtype: torch.dtype, tile: Tile, batch_invariant: bool, capability: int
) -> dict[str, object]:
    exact = tl.bfloat16 if layout.latent == "bf16" else tl.float16
    return {
        "LAYOUT": layout,
        "DOT": exact if q_dtype == torch.bfloat16 else tl.float32,
        "NATIVE_E4M3": _has_native_e4m3(capability),
        "INVARIANT_TOKENS": contract.INVARIANT_TOKENS_PER_SPLIT if batch_invariant else 0,
        "HEADS": contract.HEADS_PER_TILE,
        "TOKENS": tile.tokens,
        "RELOAD": tile.reload,
    }


def _merge(call: PreparedCall, site: int, partial_out, partial_lse, sink, out, lse) -> None:
    partials, rows, num_heads, _ = partial_out.shape
    call.launch(
        _merge_partial_attention_kernel,
        (rows, num_heads, LATENT_DIM // MERGE_COLUMNS),
        partial_out,
        partial_lse,
        sink,
        out,
        lse,
        partials,
        num_heads,
        partial_out.stride(0) * partial_out.element_size() // ALIGNMENT_BYTES,
        partial_lse.stride(0),
        COLUMNS=MERGE_COLUMNS,
        PARTIALS=MERGE_PARTIALS,
        num_warps=4,
        site=site,
    )


def aot_configurations(capability: int) -> AotConfigurations:
    """Every layout, query type and tile, for partial and final results; fixed splits once; every merge type."""
    for layout in LAYOUTS.values():
        for q_type, q_dtype, out_type, sink in (
            ("bf16", torch.bfloat16, "fp32", None),
            ("bf16", torch.bfloat16, "bf16", "*fp32"),
            ("fp32", torch.float32, "fp32", None),
        ):
            for tile in {attend_tile(layout, q_dtype, capability, large) for large in (False, True)}:
                for peers in (False, True):
                    yield _attend_aot(layout, q_type, q_dtype, out_type, sink, tile, False, capability, peers)
    layout = LAYOUTS["fp8_ds_mla"]
    tile = attend_tile(layout, torch.bfloat16, capability, True)
    for peers in (False, True):
        yield _attend_aot(layout, "bf16", torch.bfloat16, "fp32", None, tile, True, capability, peers)
    for partial_type, out_type in (("fp32", "bf16"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")):
        signature = {"partial_out": f"*{partial_type}:16", "partial_lse": "*fp32", "sink": "*fp32"}
        signature |= {"out": f"*{out_type}:16", "lse": "*fp32"}
        signature |= {"partials": "i32", "num_heads": "i32", "out_stride_16": "i64", "lse_stride": "i64"}
        constants = {"COLUMNS": MERGE_COLUMNS, "PARTIALS": MERGE_PARTIALS}
        name = f"merge-{partial_type}-{out_type}"
        yield AotConfiguration(name, _merge_partial_attention_kernel, signature, constants, {"num_warps": 4})


def _attend_aot(layout, q_type, q_dtype, out_type, sink, tile, invariant, capability, peers) -> AotConfiguration:
    signature = {"q": f"*{q_type}:16", "cache": "*u8:16", "indices": "*i32", "lengths": "*i32"}
    signature |= {"out": f"*{out_type}:16", "lse": "*fp32", "softmax_scale": "fp32"} | ({"sink": sink} if sink else {})
    signature |= {"num_heads": "i32", "topk": "i32", "num_slots": "i64", "page_size": "i32"}
    signature |= {"page_stride_16": "i64", "q_row_stride": "i32:16", "indices_row_stride": "i64"}
    signature |= {"pages": "i32"} | dict.fromkeys(DISTANCES, "i64")
    constants = _attend_constants(layout, q_dtype, tile, invariant, capability) | {"PEERS": peers}
    constants |= {} if sink else {"sink": None}
    kind = ("-invariant" if invariant else "") + ("-peers" if peers else "")
    name = f"attend-{layout.name}-{q_type}-{out_type}-{tile.tokens}{kind}"
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return AotConfiguration(name, _sparse_ckv_decode_kernel, signature, constants, options)


# Sizes and list addresses are not specialised on their values: another cache or batch compiles nothing new.
@triton.jit(
    do_not_specialize=[
        *("num_heads", "topk", "num_slots", "page_size", "page_stride_16", "indices_row_stride", "pages"),
        *DISTANCES,
    ],
    do_not_specialize_on_alignment=["indices", "lengths", "sink", "lse"],
)
def _sparse_ckv_decode_kernel(
    q,
    cache,
    indices,
    lengths,
    sink,
    out,
    lse,
    softmax_scale,
    num_heads,
    topk,
    num_slots: tl.int64,
    page_size: tl.int32,
    page_stride_16: tl.int64,
    q_row_stride,
    indices_row_stride: tl.int64,
    pages: tl.int32,
    distance_1: tl.int64,
    distance_2: tl.int64,
    distance_3: tl.int64,
    distance_4: tl.int64,
    distance_5: tl.int64,
    distance_6: tl.int64,
    distance_7: tl.int64,
    LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    INVARIANT_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    RELOAD: tl.constexpr,
    PEERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    heads = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    live_head = heads < num_heads
    scale_log2 = softmax_scale * LOG2_E

    # This program's part of the list, from the live length.
    length = topk
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), topk)
    if INVARIANT_TOKENS > 0:
        tokens_per_split = INVARIANT_TOKENS
    else:
        tokens_per_split = tl.cdiv(tl.cdiv(length, TOKENS), tl.num_programs(1)) * TOKENS
    begin = split * tokens_per_split
    end = tl.minimum(begin + tokens_per_split, length)

    q_row = q + row * q_row_stride
    q_unit, q_factor = _query_unit(q_row, heads, live_head, LAYOUT, DOT)
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc0 = tl.zeros([HEADS, 128], tl.float32)
    acc1 = tl.zeros([HEADS, 128], tl.float32)
    acc2 = tl.zeros([HEADS, 128], tl.float32)
    acc3 = tl.zeros([HEADS, 128], tl.float32)
    indices_row = indices + row * indices_row_stride
    column = tl.arange(0, TOKENS)
    slots = tl.load(indices_row + begin + column, mask=begin + column < end, other=-1)
    for first in range(begin, end, TOKENS):
        valid = (slots >= 0) & (slots < num_slots)
        present = tl.where(valid, slots, 0)
        page = (present // page_size).to(tl.int64)
        in_page = (present % page_size).to(tl.int64)
        if PEERS:
            owner = (page // pages).to(tl.int32)
            begin_16 = (page - owner * pages) * page_stride_16
            begin_16 += tl.where(owner == 1, distance_1, 0) + tl.where(owner == 2, distance_2, 0)
            begin_16 += tl.where(owner == 3, distance_3, 0) + tl.where(owner == 4, distance_4, 0)
            begin_16 += tl.where(owner == 5, distance_5, 0) + tl.where(owner == 6, distance_6, 0)
            begin_16 += tl.where(owner == 7, distance_7, 0)
        else:
            begin_16 = page * page_stride_16
        records = cache + begin_16 * 16 + in_page * LAYOUT.record_bytes
        # The next tile's slots travel while this tile's records do.
        following = first + TOKENS + column
        slots = tl.load(indices_row + following, mask=following < end, other=-1)

        scores = tl.zeros([HEADS, TOKENS], tl.float32)
        if DOT == tl.float32 or LAYOUT.latent == "e2m1":
            # Not unrolled: the compiler would keep the whole query in registers, and spill.
            for index in tl.range(0, 4):
                scores = _add_scores(
                    scores, q_row, q_factor, heads, live_head, records, valid, index, LAYOUT, DOT, NATIVE_E4M3
                )
        else:
            for index in tl.static_range(0, 4):
                scores = _add_scores(
                    scores, q_row, q_factor, heads, live_head, records, valid, index, LAYOUT, DOT, NATIVE_E4M3
                )
        if DOT == tl.float16:
            scores *= q_unit[:, None]
        if LAYOUT.rope is not None:
            rope_dot: tl.constexpr = tl.bfloat16 if DOT == tl.float16 else DOT
            q_rope = _load_query(q_row, heads, live_head, 512 + tl.arange(0, 64), LAYOUT).to(rope_dot)
            rope, rope_scale = _load_rope(records, valid, LAYOUT, rope_dot, NATIVE_E4M3)
            scores += _dot(q_rope, tl.trans(rope)) * rope_scale[None, :]
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - shift)
        weights = tl.exp2(scores - shift[:, None])
        maximum = new_maximum
        total = total * decay + tl.sum(weights, 1)
        if DOT == tl.float16:
            # One unit per head for the four chunks: weights down to 2 ** -28 of the largest keep all their bits.
            unit, factor = _unit(tl.max(weights * _largest_scale(records, valid, LAYOUT)[None, :], 1))
        else:
            unit, factor = maximum, maximum
        # A second load needs another eviction policy than the keys', or the compiler merges the two.
        VALUES: tl.constexpr = "evict_first" if RELOAD else "evict_last"
        acc0 = _add_values(acc0, decay, weights, unit, factor, records, valid, 0, LAYOUT, DOT, NATIVE_E4M3, VALUES)
        acc1 = _add_values(acc1, decay, weights, unit, factor, records, valid, 1, LAYOUT, DOT, NATIVE_E4M3, VALUES)
        acc2 = _add_values(acc2, decay, weights, unit, factor, records, valid, 2, LAYOUT, DOT, NATIVE_E4M3, VALUES)
        acc3 = _add_values(acc3, decay, weights, unit, factor, records, valid, 3, LAYOUT, DOT, NATIVE_E4M3, VALUES)

    empty = total == 0.0
    row_lse = tl.where(empty, float("-inf"), (maximum + tl.log2(total)) / LOG2_E)
    factor = tl.where(empty, 0.0, 1.0 / total)
    if sink is not None:
        factor *= _sink_factor(row_lse, tl.load(sink + heads, mask=live_head, other=0.0))
    # Without splits there is one part: [row, head]; with splits [split, row, head].
    result_row = (split * tl.num_programs(0) + row) * num_heads
    tl.store(lse + result_row + heads, row_lse, mask=live_head)
    out_row = out + result_row * 512
    _store_chunk(out_row, acc0, factor, heads, live_head, 0, LAYOUT)
    _store_chunk(out_row, acc1, factor, heads, live_head, 1, LAYOUT)
    _store_chunk(out_row, acc2, factor, heads, live_head, 2, LAYOUT)
    _store_chunk(out_row, acc3, factor, heads, live_head, 3, LAYOUT)


@triton.jit
def _add_scores(
    scores,
    q_row,
    q_factor,
    heads,
    live_head,
    records,
    valid,
    index,
    LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    q = _load_query(q_row, heads, live_head, _chunk_columns(index, LAYOUT), LAYOUT)
    if DOT == tl.float16:
        q = q.to(tl.float32) * q_factor[:, None]
    keys = _load_chunk(records, valid, index, LAYOUT, DOT, NATIVE, "evict_last")
    scale = _chunk_scale(records, valid, index, LAYOUT)
    return scores + _dot(q.to(DOT), tl.trans(keys)) * scale[None, :]


@triton.jit
def _add_values(
    acc,
    decay,
    weights,
    unit,
    factor,
    records,
    valid,
    index,
    LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
    NATIVE: tl.constexpr,
    EVICTION: tl.constexpr,
):
    values = _load_chunk(records, valid, index, LAYOUT, DOT, NATIVE, EVICTION)
    scaled = weights * _chunk_scale(records, valid, index, LAYOUT)[None, :]
    if DOT == tl.float16:
        product = _dot((scaled * factor[:, None]).to(DOT), values) * unit[:, None]
    else:
        product = _dot(scaled.to(DOT), values)
    return acc * decay[:, None] + product


@triton.jit
def _query_unit(q_row, heads, live_head, LAYOUT: tl.constexpr, DOT: tl.constexpr):
    """Unit and factor of each head's latent query. Only float16 operands need them; else a placeholder."""
    if DOT == tl.float16:
        magnitudes = tl.abs(_load_query(q_row, heads, live_head, tl.arange(0, 512), LAYOUT).to(tl.float32))
        unit, factor = _unit(tl.max(magnitudes, 1))
    else:
        unit = heads
        factor = heads
    return unit, factor


@triton.jit
def _unit(peak):
    """A power of two that brings `peak` to 2 ** 14 or more but below 2 ** 15, and its inverse."""
    exponent = tl.maximum(peak.to(tl.int32, bitcast=True) & 0x7F800000, 15 << 23) - (14 << 23)
    return exponent.to(tl.float32, bitcast=True), ((254 << 23) - exponent).to(tl.float32, bitcast=True)


@triton.jit
def _largest_scale(records, valid, LAYOUT: tl.constexpr):
    """The largest of each token's chunk scales, [tokens]."""
    scale = _chunk_scale(records, valid, 0, LAYOUT)
    if LAYOUT.latent == "e4m3":
        scale = tl.maximum(scale, _chunk_scale(records, valid, 1, LAYOUT))
        scale = tl.maximum(scale, _chunk_scale(records, valid, 2, LAYOUT))
        scale = tl.maximum(scale, _chunk_scale(records, valid, 3, LAYOUT))
    return scale


@triton.jit
def _dot(left, codes):
    """left @ codes. Float32 `left` is split in two: tf32 holds the codes of every layout exactly, but not `left`."""
    if left.dtype == tl.float32:
        high = (left.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        low = tl.dot(left - high, codes, input_precision="tf32")
        product = tl.dot(high, codes, low, input_precision="tf32")
    else:
        product = tl.dot(left, codes)
    return product


@triton.jit
def _chunk_columns(index, LAYOUT: tl.constexpr):
    """The 128 latents of a chunk: neighbours, or for two-a-byte storage every second one of 256."""
    column = tl.arange(0, 128)
    if LAYOUT.latent == "e2m1":
        columns = (index // 2) * 256 + index % 2 + 2 * column
    else:
        columns = index * 128 + column
    return columns


@triton.jit
def _load_query(q_row, heads, live_head, columns, LAYOUT: tl.constexpr):
    at = q_row + heads[:, None] * LAYOUT.query_dim + columns[None, :]
    return tl.load(at, mask=live_head[:, None], other=0.0)


@triton.jit
def _load_chunk(
    records, valid, index, LAYOUT: tl.constexpr, DOT: tl.constexpr, NATIVE: tl.constexpr, EVICTION: tl.constexpr
):
    """One chunk of a record tile, [tokens, 128], without the scale that `_chunk_scale` gives. Absent tokens: zeros."""
    column = tl.arange(0, 128)
    if LAYOUT.latent == "bf16":
        at = records.to(tl.pointer_type(tl.bfloat16))[:, None] + index * 128 + column[None, :]
        values = tl.load(at, mask=valid[:, None], other=0.0, eviction_policy=EVICTION).to(DOT)
    elif LAYOUT.latent == "e4m3":
        at = records[:, None] + index * 128 + column[None, :]
        codes = tl.load(at, mask=valid[:, None], other=0, eviction_policy=EVICTION)
        values = decode_e4m3(codes, DOT, NATIVE)
    else:
        half = index // 2
        at = records[:, None] + half * 128 + column[None, :]
        codes = tl.load(at, mask=valid[:, None], other=0, eviction_policy=EVICTION)
        # 16 latents, so 8 bytes, share a scale: 16 scales for this half of the record.
        at = records[:, None] + LAYOUT.scale_offset + half * 16 + tl.arange(0, 16)[None, :]
        scales = decode_e4m3(tl.load(at, mask=valid[:, None], other=0, eviction_policy=EVICTION), tl.float32, NATIVE)
        tokens: tl.constexpr = records.shape[0]
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], [tokens, 16, 8]), [tokens, 128])
        values = (decode_e2m1(codes >> (4 * (index % 2))) * scales).to(DOT)
    return values


@triton.jit
def _chunk_scale(records, valid, index, LAYOUT: tl.constexpr):
    """The float32 factor of a whole chunk of each token, [tokens]."""
    if LAYOUT.latent == "e4m3":
        at = (records + LAYOUT.scale_offset).to(tl.pointer_type(tl.float32)) + index
        scale = tl.load(at, mask=valid, other=0.0)
    elif LAYOUT.token_scale_offset is not None:
        at = (records + LAYOUT.token_scale_offset).to(tl.pointer_type(tl.float32))
        scale = tl.load(at, mask=valid, other=0.0)
        # Zero marks a record without a token scale.
        scale = tl.where(scale == 0.0, 1.0, scale)
    else:
        scale = tl.full(records.shape, 1.0, tl.float32)
    return scale


@triton.jit
def _load_rope(records, valid, LAYOUT: tl.constexpr, DOT: tl.constexpr, NATIVE: tl.constexpr):
    """RoPE part of a record tile, [tokens, 64], and its factor, [tokens]."""
    column = tl.arange(0, 64)
    if LAYOUT.rope == "bf16":
        at = (records + LAYOUT.rope_offset).to(tl.pointer_type(tl.bfloat16))[:, None] + column[None, :]
        rope = tl.load(at, mask=valid[:, None], other=0.0).to(DOT)
        scale = tl.full(records.shape, 1.0, tl.float32)
    else:
        codes = tl.load(records[:, None] + LAYOUT.rope_offset + column[None, :], mask=valid[:, None], other=0)
        rope = decode_e4m3(codes, DOT, NATIVE)
        scale = tl.load((records + LAYOUT.rope_scale_offset).to(tl.pointer_type(tl.float32)), mask=valid, other=0.0)
    return rope, scale


@triton.jit
def _store_chunk(out_row, acc, factor, heads, live_head, index, LAYOUT: tl.constexpr):
    at = out_row + heads[:, None] * 512 + _chunk_columns(index, LAYOUT)[None, :]
    tl.store(at, (acc * factor[:, None]).to(out_row.dtype.element_ty), mask=live_head[:, None])


@triton.jit
def _sink_factor(lse, sink):
    """exp(lse) / (exp(lse) + exp(sink)); 0 for an empty row."""
    return tl.where(lse == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp(sink - lse)))


@triton.jit(
    do_not_specialize=["partials", "num_heads", "out_stride_16", "lse_stride"],
    do_not_specialize_on_alignment=["partial_lse", "sink", "lse"],
)
def _merge_partial_attention_kernel(
    partial_out,
    partial_lse,
    sink,
    out,
    lse,
    partials,
    num_heads,
    out_stride_16: tl.int64,
    lse_stride: tl.int64,
    COLUMNS: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    head = tl.program_id(1)
    result = tl.program_id(0).to(tl.int64) * num_heads + head
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, PARTIALS)

    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, partials, PARTIALS):
        partial = (first + lane).to(tl.int64)
        part_lse = tl.load(
            partial_lse + partial * lse_stride + result, mask=first + lane < partials, other=float("-inf")
        )
        # An empty part is not loaded: whatever its buffer holds weighs nothing.
        filled = part_lse != float("-inf")
        begin = partial * out_stride_16 * (128 // partial_out.dtype.element_ty.primitive_bitwidth) + result * 512
        part_out = tl.load(partial_out + begin[:, None] + columns[None, :], mask=filled[:, None], other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part_lse, 0))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp(maximum - shift)
        weights = tl.exp(part_lse - shift)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * part_out.to(tl.float32), 0)
        maximum = new_maximum

    empty = total == 0.0
    row_lse = tl.where(empty, float("-inf"), maximum + tl.log(total))
    factor = tl.where(empty, 0.0, 1.0 / total)
    if sink is not None:
        factor *= _sink_factor(row_lse, tl.load(sink + head))
    tl.store(out + result * 512 + columns, (acc * factor).to(out.dtype.element_ty))
    if tl.program_id(2) == 0:
        tl.store(lse + result, row_lse)
