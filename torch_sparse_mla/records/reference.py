"""CPU implementations of `write_ckv_records` and `read_ckv_records`, in plain PyTorch."""

import torch

from . import contract
from .codec import dequantise_records, quantise_records


def write_ckv_records(
    latent: torch.Tensor, rope: torch.Tensor | None, slots: torch.Tensor, cache: torch.Tensor, layout: str
) -> None:
    record_layout = contract.check_write_ckv_records(latent, rope, slots, cache, layout)
    num_slots = cache.shape[0] * cache.shape[1]
    for name, values in (("latent", latent), ("rope", rope)):
        if values is not None:
            contract.reject_non_finite("write_ckv_records", name, values, slots, num_slots)
    slots = slots.long()
    tokens = _last_writers(slots, num_slots)
    records = quantise_records(latent[tokens], None if rope is None else rope[tokens], record_layout)
    pages = torch.div(slots[tokens], cache.shape[1], rounding_mode="floor")
    cache[pages, slots[tokens] % cache.shape[1]] = records


def read_ckv_records(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, layout: str) -> None:
    record_layout = contract.check_read_ckv_records(cache, slots, out, layout)
    slots = slots.long()
    present = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    slots = slots[present]
    records = cache[torch.div(slots, cache.shape[1], rounding_mode="floor"), slots % cache.shape[1]]
    compute = torch.float64 if out.dtype == torch.float64 else torch.float32
    latent, rope = dequantise_records(records, record_layout, compute)
    out.zero_()
    out[present] = (latent if rope is None else torch.cat([latent, rope], -1)).to(out.dtype)


def _last_writers(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Tokens to write: those with a valid slot, and of several with one slot only the last."""
    valid = ((slots >= 0) & (slots < num_slots)).nonzero().flatten()
    _, inverse = torch.unique(slots[valid], return_inverse=True)
    last = torch.zeros(int(inverse.max()) + 1 if len(valid) else 0, dtype=torch.long)
    return last.scatter_reduce_(0, inverse, valid, "amax", include_self=False)
