"""Public functions of the record family."""

import torch

from .. import _ops  # noqa: F401  (registers the operators)
from ..contract import refuse_gradients
from .layouts import LAYOUTS


def write_ckv_records(
    latent: torch.Tensor, rope: torch.Tensor | None, slots: torch.Tensor, cache: torch.Tensor, layout: str
) -> None:
    """Quantise tokens and store them as records of a paged cache, in place.

    Args:
        latent: [tokens, 512] bfloat16, float16 or float32; the compressed key/value of each token.
        rope: [tokens, 64], the positional part; None for the nope layouts.
        slots: [tokens] int32 or int64, `page * page_size + offset`; -1 skips the token.
        cache: [pages, page_size, record_bytes] uint8, page stride free (a multiple of 16 bytes); written at `slots`.
        layout: a key of `torch_sparse_mla.LAYOUTS`.
    Raises: ValueError for an argument that does not fit; on the CPU, and in checked mode
        (`TORCH_SPARSE_MLA_CHECK=1`), also for NaN or infinity. A slot beyond the cache is skipped (or raises, checked).
    Capture: safe. Two tokens with one slot are the caller's error; on the CPU the last one wins.
    """
    refuse_gradients("write_ckv_records", latent=latent, rope=rope)
    torch.ops.torch_sparse_mla.write_ckv_records(latent, rope, slots, cache, layout)


def read_ckv_records(
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Read records of a paged cache back as numbers: latent, then RoPE part.

    Args:
        cache, layout: as for `write_ckv_records`.
        slots: [tokens] int32 or int64; a slot of -1, or beyond the cache, reads as zeros.
        out: [tokens, 576] ([tokens, 512] for the nope layouts) bfloat16, float16 or float32, contiguous; overwritten.
            Allocated in `dtype` when None.
    Returns: `out`.
    Raises: ValueError for an argument that does not fit.
    Capture: safe when `out` is given.
    """
    if out is None:
        dim = LAYOUTS[layout].query_dim if layout in LAYOUTS else 0
        out = torch.empty(slots.numel(), dim, dtype=dtype, device=cache.device)
    torch.ops.torch_sparse_mla.read_ckv_records(cache, slots, out, layout)
    return out
