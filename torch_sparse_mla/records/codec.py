"""The record codec in plain PyTorch: quantise and dequantise, on any device."""

import torch

from ..errors import reject
from .layouts import E2M1_MAX, E4M3_MAX, LATENT_DIM, LAYOUTS, ROPE_DIM, RecordLayout

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A magnitude rounds up past each of these; a tie goes to the code with an even last bit, hence the strictness flag.
E2M1_BOUNDARIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def quantise_records(latent: torch.Tensor, rope: torch.Tensor | None, layout: str | RecordLayout) -> torch.Tensor:
    """Encode tokens as records.

    Args:
        latent: `[..., 512]` floating point, finite (what becomes of NaN and infinity is in the tests; the operators
            refuse them where they can see them).
        rope: `[..., 64]` floating point, finite; None for the nope layouts.
        layout: a layout name or object.
    Returns: `uint8 [..., record_bytes]`.
    Raises: ValueError for an unknown layout, or widths that do not fit it.
    """
    layout = _layout("quantise_records", layout)
    _check_width("quantise_records", "latent", latent, LATENT_DIM)
    if (rope is None) != (layout.rope is None):
        allowed = "a [..., 64] tensor" if layout.rope else "None"
        reject("quantise_records", "rope", type(rope).__name__, f"{allowed} for layout {layout.name}")
    if rope is not None:
        _check_width("quantise_records", "rope", rope, ROPE_DIM)
        if rope.shape[:-1] != latent.shape[:-1]:
            allowed = f"shape {[*latent.shape[:-1], ROPE_DIM]}, for as many tokens as 'latent'"
            reject("quantise_records", "rope", f"shape {list(rope.shape)}", allowed)
    latent = latent.float()
    records = torch.zeros(*latent.shape[:-1], layout.record_bytes, dtype=torch.uint8, device=latent.device)
    if layout.latent == "bf16":
        _put(records, 0, _to_bf16(latent))
    elif layout.latent == "e4m3":
        groups = latent.unflatten(-1, (-1, layout.group_size))
        scales = _scale_or_one(_divide(groups.abs().amax(-1), E4M3_MAX))
        _put(records, 0, _to_e4m3(groups / scales.unsqueeze(-1)).flatten(-2))
        _put(records, layout.scale_offset, scales)
    else:
        _quantise_e2m1(records, latent, layout)
    if layout.rope == "bf16":
        _put(records, layout.rope_offset, _to_bf16(rope.float()))
    elif layout.rope == "e4m3":
        scale = _scale_or_one(_divide(rope.float().abs().amax(-1, keepdim=True), E4M3_MAX))
        _put(records, layout.rope_offset, _to_e4m3(rope.float() / scale))
        _put(records, layout.rope_scale_offset, scale)
    return records


def dequantise_records(
    records: torch.Tensor, layout: str | RecordLayout, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode records.

    Args:
        records: `uint8 [..., record_bytes]`.
        layout: a layout name or object.
        dtype: float32, or float64 for exact products of code and scale.
    Returns: latent `[..., 512]` and RoPE part `[..., 64]` (None for the nope layouts), in `dtype`.
    Raises: ValueError for an unknown layout, or records of another width or type.
    """
    layout = _layout("dequantise_records", layout)
    _check_width("dequantise_records", "records", records, layout.record_bytes)
    if records.dtype != torch.uint8:
        reject("dequantise_records", "records", f"dtype {records.dtype}", "dtype uint8")
    if layout.latent == "bf16":
        latent = _get(records, 0, LATENT_DIM, torch.bfloat16).to(dtype)
    elif layout.latent == "e4m3":
        codes = _get(records, 0, LATENT_DIM, torch.float8_e4m3fn).to(dtype)
        scales = _get(records, layout.scale_offset, LATENT_DIM // layout.group_size, torch.float32).to(dtype)
        latent = (codes.unflatten(-1, (-1, layout.group_size)) * scales.unsqueeze(-1)).flatten(-2)
    else:
        latent = _dequantise_e2m1(records, layout, dtype)
    rope = None
    if layout.rope == "bf16":
        rope = _get(records, layout.rope_offset, ROPE_DIM, torch.bfloat16).to(dtype)
    elif layout.rope == "e4m3":
        codes = _get(records, layout.rope_offset, ROPE_DIM, torch.float8_e4m3fn).to(dtype)
        rope = codes * _get(records, layout.rope_scale_offset, 1, torch.float32).to(dtype)
    return latent, rope


def _layout(function: str, layout: str | RecordLayout) -> RecordLayout:
    if isinstance(layout, RecordLayout):
        return layout
    if layout not in LAYOUTS:
        reject(function, "layout", repr(layout), "one of " + ", ".join(LAYOUTS))
    return LAYOUTS[layout]


def _check_width(function: str, argument: str, tensor: torch.Tensor, width: int) -> None:
    if tensor.dim() < 1 or tensor.shape[-1] != width:
        reject(function, argument, f"shape {list(tensor.shape)}", f"shape [..., {width}]")


def _quantise_e2m1(records: torch.Tensor, latent: torch.Tensor, layout: RecordLayout) -> None:
    groups = latent.unflatten(-1, (-1, layout.group_size))
    group_amax = groups.abs().amax(-1)
    token_scale = torch.ones_like(group_amax[..., :1])
    if layout.token_scale_offset is not None:
        token_scale = _scale_or_one(_divide(group_amax.amax(-1, keepdim=True), E2M1_MAX * E4M3_MAX))
        _put(records, layout.token_scale_offset, token_scale)
    group_scales = _to_e4m3(_divide(group_amax, E2M1_MAX) / token_scale)
    _put(records, layout.scale_offset, group_scales)
    scales = (group_scales.float() * token_scale).unsqueeze(-1)
    codes = _to_e2m1(torch.where(scales > 0, groups / scales, torch.zeros_like(groups))).flatten(-2)
    _put(records, 0, codes[..., 0::2] | (codes[..., 1::2] << 4))


def _dequantise_e2m1(records: torch.Tensor, layout: RecordLayout, dtype: torch.dtype) -> torch.Tensor:
    packed = records[..., : LATENT_DIM // 2]
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)
    magnitudes = torch.tensor(E2M1_VALUES, dtype=dtype, device=records.device)[(codes & 7).long()]
    values = torch.where(codes >= 8, -magnitudes, magnitudes).unflatten(-1, (-1, layout.group_size))
    scales = _get(records, layout.scale_offset, LATENT_DIM // layout.group_size, torch.float8_e4m3fn).to(dtype)
    latent = (values * scales.unsqueeze(-1)).flatten(-2)
    if layout.token_scale_offset is not None:
        token_scale = _get(records, layout.token_scale_offset, 1, torch.float32).to(dtype)
        latent = latent * torch.where(token_scale == 0, torch.ones_like(token_scale), token_scale)
    return latent


def _divide(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """IEEE division on every device: PyTorch multiplies CUDA tensors by the reciprocal of a Python number."""
    return values / torch.full_like(values, divisor)


def _scale_or_one(scale: torch.Tensor) -> torch.Tensor:
    """1.0 where the values are all zero, or so small that the fp32 scale itself underflows."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Nearest bf16; a finite value beyond the bf16 range saturates instead of turning infinite."""
    limit = torch.finfo(torch.bfloat16).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(torch.bfloat16)


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3, saturating: beyond 448 some versions of PyTorch convert to NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code, ties to even, saturating at 6. Returns `uint8`, sign in bit 3."""
    magnitudes = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for boundary, tie_rounds_up in E2M1_BOUNDARIES:
        codes += magnitudes >= boundary if tie_rounds_up else magnitudes > boundary
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def _put(records: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    raw = values.contiguous().view(torch.uint8)
    records[..., offset : offset + raw.shape[-1]] = raw


def _get(records: torch.Tensor, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return records[..., offset : offset + count * dtype.itemsize].contiguous().view(dtype)
