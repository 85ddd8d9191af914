"""The serving form of index keys and queries in plain PyTorch: Hadamard transform, then e4m3 codes and one scale.

The transform is orthogonal, so products of a query and a key stay what they are, while outliers are spread over all
channels. The scale is a power of two, so that it costs no rounding.
"""

import functools
import math

import torch

from ..contract import is_fake, reject
from ..records.layouts import E4M3_MAX
from .pools import HEAD_DIM, INDEX_PAGE_BYTES, POOLS_PER_INDEX_PAGE

# The least normal number: below it a scale would lose its exactness.
_LEAST_SCALE = 2.0**-126


def _hadamard_matrix(values: torch.Tensor) -> torch.Tensor:
    """The matrix for values of a device: one for all calls, but for what is traced, which must not meet a real one or
    leave behind one of its own."""
    if is_fake(values) or torch.compiler.is_compiling():
        return _make_hadamard_matrix(values.device)
    return _kept_hadamard_matrix(values.device)


@functools.cache
def _kept_hadamard_matrix(device: torch.device) -> torch.Tensor:
    # A later call may be outside of inference mode.
    with torch.inference_mode(False):
        return _make_hadamard_matrix(device)


def _make_hadamard_matrix(device: torch.device) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < HEAD_DIM:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """bfloat16 [..., 128] through the 128-point Hadamard transform / sqrt(128); sums in float32, result bfloat16."""
    # Autocast would round the sums to its own type on the way.
    with torch.autocast("cuda" if values.is_cuda else "cpu", enabled=False):
        return (values.float() @ _hadamard_matrix(values) / math.sqrt(HEAD_DIM)).bfloat16()


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes, uint8 [..., 128], and one power-of-two float32 scale [...]: the least that does not saturate."""
    values = values.float()
    largest = values.abs().amax(-1)
    _, exponent = torch.frexp(largest / E4M3_MAX)
    # frexp: largest / 448 = mantissa * 2 ** exponent with a mantissa from a half to below 1; a half needs one less.
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    scale = torch.where(largest <= E4M3_MAX * (scale / 2), scale / 2, scale)
    scale = torch.where(largest > 0, scale.clamp(min=_LEAST_SCALE), 1.0)
    return (values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8), scale


def quantise_index_queries(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries and head weights in the serving form, for `c4_select`.

    Args:
        q: [rows, heads, 128] floating point.
        weights: [rows, heads] floating point: what the model's projection gives, without any factor.
    Returns: (uint8 [rows, heads, 128] e4m3 codes, float32 [rows, heads] weights that carry the scale of each query and
        `(heads * 128) ** -0.5`).
    Raises: ValueError for shapes that do not fit.
    """
    _check_queries("quantise_index_queries", q, weights)
    codes, scale = quantise(hadamard(q.bfloat16()))
    return codes, weights.float() * scale * (q.shape[1] * HEAD_DIM) ** -0.5


def exact_index_queries(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for pools in the exact form: queries as they are, weights with their factor."""
    _check_queries("exact_index_queries", q, weights)
    return q.contiguous(), weights.float() * (q.shape[1] * HEAD_DIM) ** -0.5


def decode_index_page(page: torch.Tensor) -> torch.Tensor:
    """float32 [..., 64, 128] keys of one index page, uint8 [..., 8448]."""
    split = POOLS_PER_INDEX_PAGE * HEAD_DIM
    if page.shape[-1] != INDEX_PAGE_BYTES:
        reject("decode_index_page", "page", f"shape {list(page.shape)}", f"shape [..., {INDEX_PAGE_BYTES}]")
    codes = page[..., :split].contiguous().view(torch.float8_e4m3fn).float()
    scales = page[..., split:].contiguous().view(torch.float32)
    return codes.unflatten(-1, (POOLS_PER_INDEX_PAGE, HEAD_DIM)) * scales.unsqueeze(-1)


def _check_queries(function: str, q: torch.Tensor, weights: torch.Tensor) -> None:
    if q.dim() != 3 or q.shape[2] != HEAD_DIM or not q.is_floating_point():
        reject(function, "q", f"{q.dtype} {list(q.shape)}", "floating point [rows, heads, 128]")
    if weights.shape != q.shape[:2]:
        allowed = f"shape [rows, heads] = {list(q.shape[:2])}"
        reject(function, "weights", f"shape {list(weights.shape)}", allowed)
