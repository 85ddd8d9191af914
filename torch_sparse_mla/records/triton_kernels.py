"""CUDA implementations of `write_ckv_records` and `read_ckv_records` in Triton: one program per token.

Bit-exact with `codec` for finite input. Minifloats (e4m3, e2m1, bf16) are encoded by integer arithmetic on fp32 bits:
sm_80 has no e4m3 conversion, and Triton's interpreter rounds e4m3 and bf16 wrongly, so native conversions could not be
tested without a GPU. A NaN or infinity spoils the values that share a scale with it and nothing else.
"""

import torch
import triton
import triton.language as tl

from ..triton_launch import AotConfiguration, AotConfigurations, PreparedOp, on_device
from . import contract
from .layouts import E2M1_MAX, E4M3_MAX, LATENT_DIM, LAYOUTS, ROPE_DIM
from .triton_codec import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3, round_to_bf16

NUM_WARPS = 4

LATENT = tl.constexpr(LATENT_DIM)
ROPE = tl.constexpr(ROPE_DIM)
E4M3_LARGEST = tl.constexpr(E4M3_MAX)
E2M1_LARGEST = tl.constexpr(E2M1_MAX)


_write = PreparedOp(contract.check_write_ckv_records, outputs=("cache",))
_read = PreparedOp(contract.check_read_ckv_records, outputs=("out",))


def write_ckv_records(
    latent: torch.Tensor, rope: torch.Tensor | None, slots: torch.Tensor, cache: torch.Tensor, layout: str
) -> None:
    call = _write(latent, rope, slots, cache, layout)
    tokens = slots.shape[0]
    if tokens == 0:
        return
    pages, page_size, _ = cache.shape
    with on_device(cache):
        call.launch(
            _write_kernel,
            (tokens,),
            latent,
            rope,
            slots,
            cache,
            latent.stride(0),
            None if rope is None else rope.stride(0),
            cache.stride(0) // 16,
            page_size,
            pages * page_size,
            LAYOUT=call.checked,
            num_warps=NUM_WARPS,
        )


def read_ckv_records(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, layout: str) -> None:
    call = _read(cache, slots, out, layout)
    tokens = slots.shape[0]
    if tokens == 0:
        return
    pages, page_size, _ = cache.shape
    with on_device(cache):
        call.launch(
            _read_kernel,
            (tokens,),
            cache,
            slots,
            out,
            cache.stride(0) // 16,
            page_size,
            pages * page_size,
            LAYOUT=call.checked,
            num_warps=NUM_WARPS,
        )


def aot_configurations(capability: int) -> AotConfigurations:
    """On any GPU: every layout with bf16 values and int64 slots; the other dtypes on one layout of each kind."""
    geometry = {"page_stride_16": "i64", "page_size": "i64", "num_slots": "i64"}
    options = {"num_warps": NUM_WARPS}
    for layout in LAYOUTS.values():
        every_dtype = layout.name in ("bf16_mla", "fp8_ds_mla", "nvfp4_ds_mla_fp8rope")
        for dtype, slot_dtype in (("bf16", "i64"), ("fp16", "i32"), ("fp32", "i64"))[: 3 if every_dtype else 1]:
            name = f"{layout.name}-{dtype}-{slot_dtype}"
            values = {"latent_ptr": f"*{dtype}:16", "latent_stride": "i32:16"}
            absent = {"rope_ptr": None, "rope_stride": None}
            if layout.rope:
                values |= {"rope_ptr": f"*{dtype}:16", "rope_stride": "i32:16"}
                absent = {}
            pointers = {"slots_ptr": f"*{slot_dtype}", "cache_ptr": "*u8:16"}
            write_signature = values | pointers | geometry
            yield AotConfiguration(
                f"write-{name}", _write_kernel, write_signature, absent | {"LAYOUT": layout}, options
            )
            read_signature = pointers | {"out_ptr": f"*{dtype}:16"} | geometry
            yield AotConfiguration(f"read-{name}", _read_kernel, read_signature, {"LAYOUT": layout}, options)


# The geometry is not specialised on its values, and a slot list may start anywhere: one binary serves every cache, so
# nothing is compiled when a second cache of another size is first used. The page stride is in units of 16 bytes.
GEOMETRY = ["page_stride_16", "page_size", "num_slots"]


@triton.jit(do_not_specialize=GEOMETRY, do_not_specialize_on_alignment=["slots_ptr"])
def _write_kernel(
    latent_ptr,
    rope_ptr,
    slots_ptr,
    cache_ptr,
    latent_stride,
    rope_stride,
    page_stride_16: tl.int64,
    page_size: tl.int64,
    num_slots: tl.int64,
    LAYOUT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    record = cache_ptr + _record_offset(slot, page_stride_16, page_size, LAYOUT)
    latent_row = latent_ptr + token * latent_stride
    rope_scale = 0.0
    if LAYOUT.rope == "bf16":
        _write_bf16(record + LAYOUT.rope_offset, rope_ptr + token * rope_stride, ROPE)
    elif LAYOUT.rope == "e4m3":
        rope_scale = _write_e4m3(record + LAYOUT.rope_offset, rope_ptr + token * rope_stride, 1, ROPE)
    if LAYOUT.latent == "bf16":
        _write_bf16(record, latent_row, LATENT)
    elif LAYOUT.latent == "e4m3":
        num_groups: tl.constexpr = LATENT // LAYOUT.group_size
        scales = _write_e4m3(record, latent_row, num_groups, LAYOUT.group_size)
        scale_ptr = (record + LAYOUT.scale_offset).to(tl.pointer_type(tl.float32))
        tl.store(scale_ptr + tl.arange(0, num_groups), scales)
    else:
        token_scale = _write_e2m1(record, latent_row, LAYOUT)
        _write_scale_words(record, token_scale, rope_scale, LAYOUT)


@triton.jit(do_not_specialize=GEOMETRY, do_not_specialize_on_alignment=["slots_ptr"])
def _read_kernel(
    cache_ptr,
    slots_ptr,
    out_ptr,
    page_stride_16: tl.int64,
    page_size: tl.int64,
    num_slots: tl.int64,
    LAYOUT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    # A masked load gives zero bytes, and a record of zero bytes decodes to zeros in every layout.
    present = (slot >= 0) & (slot < num_slots)
    record = cache_ptr + _record_offset(slot, page_stride_16, page_size, LAYOUT)
    out_row = out_ptr + token * LAYOUT.query_dim
    if LAYOUT.latent == "bf16":
        _read_bf16(record, out_row, LATENT, present)
    elif LAYOUT.latent == "e4m3":
        _read_e4m3(record, LAYOUT.scale_offset, out_row, LATENT // LAYOUT.group_size, LAYOUT.group_size, present)
    else:
        _read_e2m1(record, out_row, LAYOUT, present)
    if LAYOUT.rope == "bf16":
        _read_bf16(record + LAYOUT.rope_offset, out_row + LATENT, ROPE, present)
    elif LAYOUT.rope == "e4m3":
        rope_scale_offset: tl.constexpr = LAYOUT.rope_scale_offset - LAYOUT.rope_offset
        _read_e4m3(record + LAYOUT.rope_offset, rope_scale_offset, out_row + LATENT, 1, ROPE, present)


@triton.jit
def _record_offset(slot, page_stride_16, page_size, LAYOUT: tl.constexpr):
    # The factors of 16 tell the compiler that records are aligned, so that it emits wide loads and stores.
    return slot // page_size * page_stride_16 * 16 + slot % page_size * LAYOUT.record_bytes


@triton.jit
def _write_bf16(field, values_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    bits = round_to_bf16(tl.load(values_ptr + i).to(tl.float32), True)
    tl.store(field.to(tl.pointer_type(tl.uint16)) + i, bits)


@triton.jit
def _write_e4m3(field, values_ptr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Write codes; return the fp32 scale of each group."""
    i = tl.arange(0, GROUPS)[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    values = tl.load(values_ptr + i).to(tl.float32)
    scales = _scale_or_one(tl.div_rn(_absolute_maximum(values, 1), E4M3_LARGEST))
    tl.store(field + i, encode_e4m3(tl.div_rn(values, scales[:, None])))
    return scales


@triton.jit
def _write_e2m1(record, values_ptr, LAYOUT: tl.constexpr):
    """Write codes and group scales; return the token scale, 1.0 where the layout has none."""
    groups: tl.constexpr = LATENT // LAYOUT.group_size
    group = tl.arange(0, groups)
    values = tl.load(values_ptr + group[:, None] * LAYOUT.group_size + tl.arange(0, LAYOUT.group_size)[None, :]).to(
        tl.float32
    )
    group_maximum = _absolute_maximum(values, 1)
    token_scale = 1.0
    relative = tl.div_rn(group_maximum, E2M1_LARGEST)
    if LAYOUT.token_scale_offset is not None:
        token_scale = _scale_or_one(tl.div_rn(_absolute_maximum(group_maximum, 0), E2M1_LARGEST * E4M3_LARGEST))
        relative = tl.div_rn(relative, token_scale)
    scale_codes = encode_e4m3(relative)
    tl.store(record + LAYOUT.scale_offset + group, scale_codes)
    scales = (decode_e4m3(scale_codes, tl.float32, False) * token_scale)[:, None]
    codes = tl.where(scales > 0, encode_e2m1(tl.div_rn(values, tl.where(scales > 0, scales, 1.0))), 0)
    even, odd = tl.split(tl.reshape(codes, [groups, LAYOUT.group_size // 2, 2]))
    i = group[:, None] * (LAYOUT.group_size // 2) + tl.arange(0, LAYOUT.group_size // 2)[None, :]
    tl.store(record + i, (even | (odd << 4)).to(tl.uint8))
    return token_scale


@triton.jit
def _write_scale_words(record, token_scale, rope_scale, LAYOUT: tl.constexpr):
    """The 16 bytes after the group scales of an e2m1 record: the scales that the layout has there, and zeros."""
    first: tl.constexpr = LAYOUT.scale_offset + LATENT // LAYOUT.group_size
    word = tl.arange(0, 4)
    words = tl.zeros([4], tl.float32)
    if LAYOUT.rope_scale_offset is not None:
        words = tl.where(word == (LAYOUT.rope_scale_offset - first) // 4, rope_scale, words)
    if LAYOUT.token_scale_offset is not None:
        words = tl.where(word == (LAYOUT.token_scale_offset - first) // 4, token_scale, words)
    tl.store((record + first).to(tl.pointer_type(tl.float32)) + word, words)


@triton.jit
def _read_bf16(field, out_ptr, COUNT: tl.constexpr, present):
    i = tl.arange(0, COUNT)
    bits = tl.load(field.to(tl.pointer_type(tl.uint16)) + i, mask=present, other=0)
    _store_as(out_ptr, i, (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True))


@triton.jit
def _read_e4m3(field, SCALE_OFFSET: tl.constexpr, out_ptr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, present):
    group = tl.arange(0, GROUPS)
    i = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    codes = tl.load(field + i, mask=present, other=0)
    scales = tl.load((field + SCALE_OFFSET).to(tl.pointer_type(tl.float32)) + group, mask=present, other=0.0)
    _store_as(out_ptr, i, decode_e4m3(codes, tl.float32, False) * scales[:, None])


@triton.jit
def _read_e2m1(record, out_ptr, LAYOUT: tl.constexpr, present):
    groups: tl.constexpr = LATENT // LAYOUT.group_size
    group = tl.arange(0, groups)
    pairs = group[:, None] * (LAYOUT.group_size // 2) + tl.arange(0, LAYOUT.group_size // 2)[None, :]
    packed = tl.load(record + pairs, mask=present, other=0)
    scale_codes = tl.load(record + LAYOUT.scale_offset + group, mask=present, other=0)
    scales = decode_e4m3(scale_codes, tl.float32, False)
    codes = tl.reshape(tl.join(packed & 0xF, packed >> 4), [groups, LAYOUT.group_size])
    values = decode_e2m1(codes) * scales[:, None]
    if LAYOUT.token_scale_offset is not None:
        scale_ptr = (record + LAYOUT.token_scale_offset).to(tl.pointer_type(tl.float32))
        values = values * _scale_or_one(tl.load(scale_ptr, mask=present, other=0.0))
    i = group[:, None] * LAYOUT.group_size + tl.arange(0, LAYOUT.group_size)[None, :]
    _store_as(out_ptr, i, values)


@triton.jit
def _store_as(out_ptr, i, values):
    """Store fp32 values in the dtype of `out_ptr`, rounded to nearest even."""
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr.to(tl.pointer_type(tl.uint16)) + i, round_to_bf16(values, False))
    else:
        tl.store(out_ptr + i, values.to(out_ptr.dtype.element_ty))


@triton.jit
def _absolute_maximum(values, AXIS: tl.constexpr):
    """Largest magnitude. As integers, fp32 magnitudes keep their order and NaN is the largest: it is not lost."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def _scale_or_one(scale):
    return tl.where(scale == 0, 1.0, scale)
