"""Inputs for the decode tests, a float64 oracle, and the implementations under test.

Every buffer that a kernel must overwrite or must not use starts as NaN: outputs, workspace, page tails, and every
record that no row selects (bytes 0xFF are NaN as bf16, fp32 and e4m3, and -6 as e2m1 under NaN scales).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from torch_sparse_mla.decode import reference, triton_kernels
from torch_sparse_mla.decode.contract import compute_dtype, sparse_ckv_decode_workspace_bytes
from torch_sparse_mla.records import LATENT_DIM, LAYOUTS, dequantise_records, quantise_records

POISON_BYTE = 0xFF
# A tail as a page with an index tail has, and a stride that is no multiple of a record.
TAIL_BYTES = 96

# "op-cuda" is what the operator runs on the GPU at hand: on Hopper the native kernels, where they take the call.
IMPLEMENTATIONS = (
    "reference",
    "op-cpu",
    pytest.param("op-cuda", marks=pytest.mark.gpu),
    pytest.param("triton-cuda", marks=pytest.mark.gpu),
)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@dataclass(frozen=True)
class DecodeCase:
    """The arguments of one `sparse_ckv_decode` call, in the operator's order."""

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    workspace: torch.Tensor
    softmax_scale: float
    layout: str
    batch_invariant: bool

    def args(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def to(self, device: str) -> "DecodeCase":
        return replace(self, **{name: move(tensor, device) for name, tensor in self.tensors().items()})

    def with_rows(self, rows: list[int]) -> "DecodeCase":
        """The same rows in another order, number or company, with new outputs and workspace."""
        lengths = None if self.lengths is None else self.lengths[rows]
        case = replace(self, q=self.q[rows], indices=self.indices[rows], lengths=lengths)
        return with_outputs(case, self.out.dtype)


def make_case(
    *,
    rows: int = 2,
    heads: int = 3,
    topk: int = 64,
    layout: str = "fp8_ds_mla",
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    lengths: list[int] | None = None,
    sink: list[float] | None = None,
    batch_invariant: bool = False,
    page_size: int = 64,
    softmax_scale: float | None = None,
    edit_indices: Callable[[torch.Tensor], object] | None = None,
    edit_records: Callable[[torch.Tensor], object] | None = None,
    seed: int = 0,
) -> DecodeCase:
    """A random case. `edit_indices` and `edit_records` change the slot lists and the encoded records in place."""
    generator = torch.Generator().manual_seed(seed)
    record_layout = LAYOUTS[layout]
    pages = -(-2 * topk // page_size) + 1
    num_slots = pages * page_size
    shuffled = torch.stack([torch.randperm(num_slots, generator=generator)[:topk] for _ in range(max(rows, 1))])
    indices = shuffled[:rows].int()
    if edit_indices is not None:
        edit_indices(indices)
    cache = empty_cache(pages, page_size, layout)
    live = torch.tensor([topk] * rows if lengths is None else lengths)
    counted = indices[torch.arange(topk) < live.unsqueeze(1)].long().unique()
    slots = counted[(counted >= 0) & (counted < num_slots)]
    records = random_records(len(slots), layout, generator)
    if edit_records is not None:
        edit_records(records)
    cache[slots // page_size, slots % page_size] = records
    dim = record_layout.query_dim
    # Unit queries and keys under dim ** -0.5 give scores of a standard deviation of 0.5 to 2: neither flat nor one-hot.
    case = DecodeCase(
        q=torch.randn(rows, heads, dim, generator=generator).to(dtype),
        cache=cache,
        indices=indices,
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        sink=None if sink is None else torch.tensor(sink, dtype=torch.float32),
        out=torch.empty(0),
        lse=torch.empty(0),
        workspace=torch.empty(0),
        softmax_scale=dim**-0.5 if softmax_scale is None else softmax_scale,
        layout=layout,
        batch_invariant=batch_invariant,
    )
    return with_outputs(case, out_dtype or dtype)


def empty_cache(pages: int, page_size: int, layout: str) -> torch.Tensor:
    """A cache of poison whose pages are followed by a tail."""
    record_bytes = LAYOUTS[layout].record_bytes
    page_stride = page_size * record_bytes + TAIL_BYTES
    storage = torch.full((pages * page_stride,), POISON_BYTE, dtype=torch.uint8)
    return storage.as_strided((pages, page_size, record_bytes), (page_stride, record_bytes, 1))


def random_records(count: int, layout: str, generator: torch.Generator) -> torch.Tensor:
    """Encoded tokens of unequal magnitude, so that scales are not powers of two and differ from token to token."""
    magnitude = torch.rand(count, 1, generator=generator) * 1.5 + 0.5
    latent = torch.randn(count, LATENT_DIM, generator=generator) * magnitude
    rope = torch.randn(count, 64, generator=generator) * magnitude
    return quantise_records(latent, rope if LAYOUTS[layout].rope else None, layout)


def with_outputs(case: DecodeCase, out_dtype: torch.dtype) -> DecodeCase:
    """New poisoned outputs and workspace of exactly the size that the case needs."""
    rows, heads, _ = case.q.shape
    size = sparse_ckv_decode_workspace_bytes(rows, heads, case.indices.shape[1], case.batch_invariant)
    device = case.q.device
    return replace(
        case,
        out=torch.full((rows, heads, LATENT_DIM), torch.nan, dtype=out_dtype, device=device),
        lse=torch.full((rows, heads), torch.nan, dtype=compute_dtype(case.q.dtype), device=device),
        workspace=torch.full((size,), POISON_BYTE, dtype=torch.uint8, device=device),
    )


def move(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides and the same bytes between its elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    flat = tensor.as_strided((last + 1,), (1,)).to(device, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride())


def device_of(implementation: str) -> str:
    return "cuda" if implementation.endswith("-cuda") else "cpu"


def call(implementation: str, op: str, args: tuple) -> None:
    """Run one implementation of an operator on arguments that are on its device."""
    if implementation == "reference":
        getattr(reference, op)(*args)
    elif implementation == "triton-cuda":
        getattr(triton_kernels, op)(*args)
    else:
        getattr(torch.ops.torch_sparse_mla, op)(*args)


def decode(implementation: str, case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the case on the implementation's device; `out` and `lse` come back on the CPU."""
    moved = case.to(device_of(implementation))
    call(implementation, "sparse_ckv_decode", moved.args())
    return moved.out.cpu(), moved.lse.cpu()


def counted_slots(case: DecodeCase, row: int) -> list[int]:
    """The slots that count in a row, one by one as the contract words it."""
    pages, page_size, _ = case.cache.shape
    topk = case.indices.shape[1]
    length = topk if case.lengths is None else min(int(case.lengths[row]), topk)
    slots = case.indices[row].tolist()
    return [slot for column, slot in enumerate(slots) if column < length and 0 <= slot < pages * page_size]


def oracle(case: DecodeCase) -> tuple[np.ndarray, np.ndarray]:
    """`out` and `lse` in float64 on exactly decoded records, a row and a head at a time. CPU cases only."""
    rows, heads, _ = case.q.shape
    queries = case.q.double().numpy()
    out = np.zeros((rows, heads, LATENT_DIM))
    lse = np.full((rows, heads), -np.inf)
    for row in range(rows):
        slots = counted_slots(case, row)
        if not slots:
            continue
        page_size = case.cache.shape[1]
        records = torch.stack([case.cache[slot // page_size, slot % page_size] for slot in slots])
        latent, rope = (part if part is None else part.numpy() for part in decode_records(records, case.layout))
        keys = latent if rope is None else np.concatenate([latent, rope], axis=1)
        for head in range(heads):
            scores = keys @ queries[row, head] * case.softmax_scale
            weights = np.exp(scores - scores.max())
            lse[row, head] = scores.max() + np.log(weights.sum())
            share = 1.0 if case.sink is None else 1.0 / (1.0 + _exp(float(case.sink[head]) - lse[row, head]))
            out[row, head] = weights @ latent / weights.sum() * share
    return out, lse


def decode_records(records: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    return dequantise_records(records, layout, torch.float64)


def assert_accurate(case: DecodeCase, out: torch.Tensor, lse: torch.Tensor, tolerance: float) -> None:
    """Relative error of each row and head of `out` below `tolerance`; `lse` within 1e-4."""
    assert_close_to(out, lse, *oracle(case), tolerance)


def assert_close_to(
    out: torch.Tensor, lse: torch.Tensor, expected_out: np.ndarray, expected_lse: np.ndarray, tolerance: float
) -> None:
    error = np.linalg.norm(out.double().numpy() - expected_out, axis=-1)
    norm = np.linalg.norm(expected_out, axis=-1)
    # An empty row has a norm of 0: there the output must be exactly 0.
    assert (error <= tolerance * norm).all(), f"relative error {np.nanmax(error / np.where(norm > 0, norm, 1))}"
    given_lse = lse.double().numpy()
    empty = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(given_lse), empty)
    limit = 1e-4 * np.maximum(1.0, np.abs(expected_lse[~empty]))
    difference = np.abs(given_lse[~empty] - expected_lse[~empty])
    assert (difference <= limit).all(), f"lse is off by up to {difference.max()}"


def tolerance_of(implementation: str, q_dtype: torch.dtype, out_dtype: torch.dtype) -> float:
    """Twice the output's own rounding; without it, the CPU sums in fp32 and the GPU multiplies 16-bit operands."""
    if out_dtype == torch.bfloat16:
        return 3e-3
    if out_dtype == torch.float64:
        return 1e-12
    if device_of(implementation) == "cpu":
        return 1e-3 if out_dtype == torch.float16 else 1e-5
    return 5e-5 if q_dtype == out_dtype == torch.float32 else 3e-3


def assert_same_bits(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name, a, b in zip(("out", "lse"), first, second, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), f"{name} differs"


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(value)))
