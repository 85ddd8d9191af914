"""Tokens and caches that the record tests share."""

import numpy as np
import torch

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla.records import LATENT_DIM, ROPE_DIM

from . import byte_model

POISON = 0xA5
LAYOUT_NAMES = tuple(LAYOUTS)
# Every dtype's largest and smallest numbers, and midpoints between neighbouring codes.
EDGES = {
    "zeros": [0.0],
    "negative_zeros": [-0.0, 0.0, -0.0],
    "largest_bf16": [3.3895313892515355e38, -1.0],
    "largest_fp16": [65504.0, -65504.0, 6e-8],
    "largest_fp32": [-3.4028234663852886e38, 3.4028234663852886e38, 1e30],
    "subnormal": [1e-40, -3e-42, 1.4e-45, 0.0],
    "subnormal_scale": [6e-37, 1e-43],
    "vanishing_scale": [1.4e-45, -1.4e-45],
    "e4m3_ties": [448.0, 17.0, -19.0, 0.0009765625, 0.0029296875, -232.0, 248.0],
    "e2m1_ties": [6.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0],
    "e2m1_ties_at_the_token_scale": [2688.0] + [0.0] * 15 + [6.0, 0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0] * 2,
    "saturates_static_nvfp4": [1e6, -5000.0, 2688.0, 2689.0],
    "bf16_ties": [1.00390625, 1.01171875, -1.00390625],
}


def edge_token(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An edge case's values repeated over the latent [512] and the RoPE part [64]."""
    values = np.array(EDGES[name], np.float32)
    return torch.from_numpy(np.resize(values, LATENT_DIM)), torch.from_numpy(np.resize(values, ROPE_DIM))


def edge_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    latents, ropes = zip(*map(edge_token, EDGES), strict=True)
    return torch.stack(latents), torch.stack(ropes)


def random_tokens(generator: torch.Generator, tokens: int, low: int = -30, high: int = 30):
    """Tokens at scales of 10^low..10^high, with 16-value groups 1e-3..1e3 about them, a zero group and a lone value."""

    def values(width: int) -> torch.Tensor:
        exponents = torch.rand(tokens, 1, generator=generator) * (high - low) + low
        spread = torch.rand(tokens, width // 16, generator=generator) * 6 - 3
        scale = 10 ** (exponents + spread).repeat_interleave(16, 1)
        return (torch.randn(tokens, width, generator=generator) * scale).clamp(-3e38, 3e38)

    latent, rope = values(LATENT_DIM), values(ROPE_DIM)
    latent[::3, 32:48] = 0
    latent[1::4, 1:] = 0
    return latent, rope


def rope_for(layout: str, rope: torch.Tensor) -> torch.Tensor | None:
    return rope if LAYOUTS[layout].rope else None


def model_records(latent: torch.Tensor, rope: torch.Tensor, layout: str) -> torch.Tensor:
    """Records of tokens by the byte model, uint8 [tokens, record_bytes]."""
    latents, ropes = latent.float().numpy(), rope.float().numpy()
    rows = [
        byte_model.encode(latents[i], ropes[i] if LAYOUTS[layout].rope else None, layout) for i in range(len(latents))
    ]
    return torch.from_numpy(np.array([list(row) for row in rows], np.uint8).reshape(-1, LAYOUTS[layout].record_bytes))


def model_values(records: torch.Tensor, layout: str) -> torch.Tensor:
    """fp32 values of records by the byte model."""
    rows = [byte_model.decode(bytes(record.tolist()), layout) for record in records.cpu()]
    return torch.from_numpy(np.array(rows, np.float32).reshape(-1, LAYOUTS[layout].query_dim))


def paged_cache(layout: str, pages: int, page_size: int, tail_bytes: int = 0, device: str = "cpu"):
    """A poisoned cache whose pages are followed by `tail_bytes`, and its whole storage [pages, page bytes]."""
    record_bytes = LAYOUTS[layout].record_bytes
    storage = torch.full((pages, page_size * record_bytes + tail_bytes), POISON, dtype=torch.uint8, device=device)
    cache = storage[:, : page_size * record_bytes].unflatten(1, (page_size, record_bytes))
    return cache, storage


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to the last bit, -0 apart from 0; a NaN equals any NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    both_nan = actual.isnan() & expected.isnan()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return bool((both_nan | (actual.view(integer) == expected.view(integer))).all())
