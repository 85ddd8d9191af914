"""Random inputs that look like the real ones: a large pool of valid records, slot lists all over it, queries.

Record scales are arbitrary, not powers of two, and nothing is zero: zeros run faster than data and hide wrong indices.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torch_sparse_mla import sparse_ckv_decode_workspace_bytes
from torch_sparse_mla.decode import reference
from torch_sparse_mla.records import LATENT_DIM, LAYOUTS, ROPE_DIM, quantise_records

from .shapes import DecodeShape
from .timing import cache_bytes, num_index_sets

PAGE_SIZE = 64
POOL_BYTES = {"cuda": 4 << 30, "cpu": 128 << 20}
# The pool repeats one block of records. A prime period: an index that is off by any round number finds other bytes.
BLOCK_RECORDS = {"cuda": 65_521, "cpu": 8_191}
ORACLE_ROWS = 3


class RecordPool:
    """One buffer of several GiB, viewed as a paged cache of any layout and filled with that layout's records."""

    def __init__(self, device: torch.device, seed: int = 0):
        self.device = device
        self._buffer = torch.empty(POOL_BYTES[device.type], dtype=torch.uint8, device=device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def fill(self, layout: str) -> torch.Tensor:
        """Returns the cache `uint8 [pages, 64, record_bytes]`. Overwrites the cache of the layout before."""
        record_bytes = LAYOUTS[layout].record_bytes
        pages = self._buffer.numel() // (PAGE_SIZE * record_bytes)
        records = self._buffer[: pages * PAGE_SIZE * record_bytes].view(-1, record_bytes)
        block = quantise_records(*self.tokens(BLOCK_RECORDS[self.device.type], layout), layout)
        for first in range(0, len(records), len(block)):
            part = records[first : first + len(block)]
            part.copy_(block[: len(part)])
        return records.view(pages, PAGE_SIZE, record_bytes)

    def tokens(self, count: int, layout: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """bf16 latents and RoPE parts of tokens whose magnitudes differ by up to 4 x."""
        magnitudes = 0.5 + 1.5 * torch.rand(count, 1, device=self.device, generator=self._generator)
        latent = self._normal(count, LATENT_DIM) * magnitudes
        rope = self._normal(count, ROPE_DIM) * magnitudes if LAYOUTS[layout].rope else None
        return latent.bfloat16(), None if rope is None else rope.bfloat16()

    def queries(self, shape: DecodeShape) -> torch.Tensor:
        return self._normal(shape.rows, shape.heads, shape.query_dim).bfloat16()

    def index_sets(self, shape: DecodeShape, num_sets: int, num_slots: int) -> torch.Tensor:
        """int32 `[sets, rows, topk]` slots anywhere in the pool; the rows of one request share a part of it.

        Every set starts at a multiple of 16 bytes, as a buffer of its own would.
        """
        entries = shape.rows * shape.topk
        storage = torch.empty(num_sets, -(-entries // 4) * 4, dtype=torch.int32, device=self.device)
        lists = storage[:, :entries].unflatten(1, (shape.rows, shape.topk))
        if shape.request_pool:
            return lists.copy_(self._mtp_lists(shape, num_sets, num_slots))
        return lists.copy_(self._slots(num_slots, num_sets, shape.rows, shape.topk))

    def _mtp_lists(self, shape: DecodeShape, num_sets: int, num_slots: int) -> torch.Tensor:
        requests = num_sets * (shape.rows // shape.rows_per_request)
        pools = self._slots(num_slots, requests, 1, shape.request_pool)
        keys = torch.rand(
            requests, shape.rows_per_request, shape.request_pool, device=self.device, generator=self._generator
        )
        chosen = pools.expand_as(keys).gather(-1, keys.argsort(-1)[..., : shape.topk])
        return chosen.reshape(num_sets, shape.rows, shape.topk)

    def slot_sets(self, num_sets: int, tokens: int, num_slots: int) -> torch.Tensor:
        """int64 `[sets, tokens]`, distinct within a set: single slots up to one page's worth, runs of pages beyond."""
        if tokens <= PAGE_SIZE:
            return self._distinct(num_slots, num_sets, tokens)
        pages = self._distinct(num_slots // PAGE_SIZE, num_sets, -(-tokens // PAGE_SIZE))
        slots = pages.unsqueeze(-1) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=self.device)
        return slots.flatten(1)[:, :tokens].contiguous()

    def _slots(self, num_slots: int, *size: int) -> torch.Tensor:
        return torch.randint(num_slots, size, dtype=torch.int32, device=self.device, generator=self._generator)

    def _distinct(self, below: int, sets: int, count: int) -> torch.Tensor:
        permutation = torch.randperm(below, device=self.device, generator=self._generator)
        copies = -(-sets * count // below)
        return permutation[: below // count * count].repeat(copies + 1)[: sets * count].view(sets, count)

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, generator=self._generator)


@dataclass(frozen=True)
class DecodeInputs:
    """Everything that the contenders of one decode shape share."""

    shape: DecodeShape
    q: torch.Tensor
    cache: torch.Tensor
    index_sets: torch.Tensor
    softmax_scale: float
    oracle: torch.Tensor

    @property
    def oracle_rows(self) -> list[int]:
        return oracle_rows(self.shape.rows)


def oracle_rows(rows: int) -> list[int]:
    """A few rows from the first to the last."""
    return sorted({position * (rows - 1) // max(ORACLE_ROWS - 1, 1) for position in range(ORACLE_ROWS)})


def decode_inputs(shape: DecodeShape, pool: RecordPool, cache: torch.Tensor) -> DecodeInputs:
    num_slots = cache.shape[0] * cache.shape[1]
    num_sets = num_index_sets(shape.rows, shape.distinct_records * shape.record_bytes, cache_bytes(pool.device))
    q = pool.queries(shape)
    index_sets = pool.index_sets(shape, num_sets, num_slots)
    # Scores with a standard deviation near 1.
    softmax_scale = shape.query_dim**-0.5
    oracle = exact_rows(q, cache, index_sets[-1], softmax_scale, shape.layout, oracle_rows(shape.rows))
    return DecodeInputs(shape, q, cache, index_sets, softmax_scale, oracle)


def exact_rows(
    q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, scale: float, layout: str, rows: Iterable[int]
) -> torch.Tensor:
    """The output of some rows in float64, by the reference, on the CPU: `[len(rows), heads, 512]`."""
    rows = list(rows)
    slots = indices[rows].long()
    records = cache.flatten(0, 1)[slots.flatten()].cpu().unsqueeze(0)
    local = torch.arange(slots.numel(), dtype=torch.int32).view(slots.shape)
    q = q[rows].double().cpu()
    out = torch.empty(len(rows), q.shape[1], LATENT_DIM, dtype=torch.float64)
    lse = torch.empty(out.shape[:2], dtype=torch.float64)
    workspace = torch.empty(sparse_ckv_decode_workspace_bytes(*q.shape[:2], slots.shape[1]), dtype=torch.uint8)
    reference.sparse_ckv_decode(q, records, local, None, None, out, lse, workspace, scale, layout)
    return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64 on the CPU; NaN where `actual` holds one."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())
