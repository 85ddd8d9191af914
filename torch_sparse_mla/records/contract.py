"""What `write_ckv_records` and `read_ckv_records` accept."""

import torch

from ..contract import (
    FLOAT_DTYPES,
    check_cache,
    check_contiguous,
    check_dtype,
    check_last_dim_contiguous,
    check_layout,
    check_no_overlap,
    check_same_device,
    check_shape,
    checked_mode,
    is_fake,
    refuse_checks_under_capture,
    reject,
    reject_first_row,
)
from .layouts import LATENT_DIM, ROPE_DIM, RecordLayout

SLOT_DTYPES = (torch.int32, torch.int64)


def check_write_ckv_records(
    latent: torch.Tensor, rope: torch.Tensor | None, slots: torch.Tensor, cache: torch.Tensor, layout: str
) -> RecordLayout:
    op = "write_ckv_records"
    record_layout = check_layout(op, layout)
    check_same_device(op, cache=cache, latent=latent, rope=rope, slots=slots)
    check_cache(op, cache, record_layout)
    _check_slots(op, slots)
    tokens = slots.shape[0]
    check_dtype(op, "latent", latent, FLOAT_DTYPES)
    check_shape(op, "latent", latent, (tokens, LATENT_DIM), "tokens, 512")
    check_last_dim_contiguous(op, "latent", latent)
    if (rope is None) != (record_layout.rope is None):
        reject(op, "rope", "None" if rope is None else "a tensor", _rope_rule(record_layout))
    if rope is not None:
        check_dtype(op, "rope", rope, FLOAT_DTYPES)
        check_shape(op, "rope", rope, (tokens, ROPE_DIM), "tokens, 64")
        check_last_dim_contiguous(op, "rope", rope)
    check_no_overlap(op, {"cache": cache}, {"latent": latent, "rope": rope, "slots": slots})
    _check_slot_values(op, slots, cache)
    if checked_mode() and latent.device.type == "cuda":
        for name, values in (("latent", latent), ("rope", rope)):
            if values is not None and not is_fake(values):
                reject_non_finite(op, name, values, slots, cache.shape[0] * cache.shape[1])
    return record_layout


def check_read_ckv_records(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, layout: str) -> RecordLayout:
    op = "read_ckv_records"
    record_layout = check_layout(op, layout)
    check_same_device(op, cache=cache, slots=slots, out=out)
    check_cache(op, cache, record_layout)
    _check_slots(op, slots)
    check_dtype(op, "out", out, FLOAT_DTYPES if out.device.type == "cuda" else (*FLOAT_DTYPES, torch.float64))
    check_shape(op, "out", out, (slots.shape[0], record_layout.query_dim), "tokens, query_dim")
    check_contiguous(op, "out", out)
    check_no_overlap(op, {"out": out}, {"cache": cache, "slots": slots})
    _check_slot_values(op, slots, cache)
    return record_layout


def reject_non_finite(op: str, argument: str, values: torch.Tensor, slots: torch.Tensor, num_slots: int) -> None:
    """Refuse NaN and infinity in tokens that would be written. Reads the device."""
    bad = ~torch.isfinite(values).all(-1) & (slots >= 0) & (slots < num_slots)
    if bool(bad.any()):
        reject(op, argument, f"a non-finite value in row {int(bad.nonzero()[0])}", "finite values")


def _check_slots(op: str, slots: torch.Tensor) -> None:
    check_dtype(op, "slots", slots, SLOT_DTYPES)
    if slots.dim() != 1:
        reject(op, "slots", f"shape {list(slots.shape)}", "shape [tokens]")
    check_contiguous(op, "slots", slots)


def _check_slot_values(op: str, slots: torch.Tensor, cache: torch.Tensor) -> None:
    if not checked_mode() or is_fake(slots):
        return
    if slots.is_cuda:
        refuse_checks_under_capture(op)
    num_slots = cache.shape[0] * cache.shape[1]
    reject_first_row(op, "slots", (slots < -1) | (slots >= num_slots), slots, f"-1 or 0..{num_slots - 1}")


def _rope_rule(layout: RecordLayout) -> str:
    return f"{'a [tokens, 64] tensor' if layout.rope else 'None'} for layout {layout.name}"
