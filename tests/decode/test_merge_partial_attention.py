"""`merge_partial_attention`: an exact log-sum-exp merge of partial attention."""

import dataclasses

import numpy as np
import pytest
import torch

import torch_sparse_mla

from .cases import (
    assert_close_to,
    assert_same_bits,
    call,
    decode,
    device_of,
    every_implementation,
    make_case,
    move,
    oracle,
    tolerance_of,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def make_partials(
    partials: int, rows: int = 3, heads: int = 5, dtype: torch.dtype = FP32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(partials, rows, heads, 512, generator=generator).to(dtype)
    lse = torch.randn(partials, rows, heads, generator=generator) * 2
    return out, lse.to(torch.promote_types(dtype, FP32))


def merge(
    implementation: str,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sink: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = device_of(implementation)
    out = torch.full(partial_out.shape[1:], torch.nan, dtype=out_dtype or partial_out.dtype, device=device)
    lse = torch.full(partial_lse.shape[1:], torch.nan, dtype=partial_lse.dtype, device=device)
    moved = [tensor if tensor is None else move(tensor, device) for tensor in (partial_out, partial_lse, sink)]
    call(implementation, "merge_partial_attention", (*moved, out, lse))
    return out.cpu(), lse.cpu()


def merge_oracle(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, sink: torch.Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The merge in float64, a row and a head at a time."""
    values, logs = partial_out.double().numpy(), partial_lse.double().numpy()
    _, rows, heads, _ = values.shape
    out, lse = np.zeros((rows, heads, 512)), np.full((rows, heads), -np.inf)
    for row, head in np.ndindex(rows, heads):
        parts = [part for part in range(len(logs)) if logs[part, row, head] > -np.inf]
        if not parts:
            continue
        top = max(logs[part, row, head] for part in parts)
        weights = np.array([np.exp(logs[part, row, head] - top) for part in parts])
        lse[row, head] = top + np.log(weights.sum())
        total = weights.sum() + (0.0 if sink is None else np.exp(np.float64(sink[head]) - top))
        out[row, head] = (
            sum(weight * values[part, row, head] for weight, part in zip(weights, parts, strict=True)) / total
        )
    return out, lse


@every_implementation
@pytest.mark.parametrize(
    "partials, dtype, out_dtype",
    [(1, FP32, FP32), (2, BF16, BF16), (2, FP32, BF16), (33, FP32, FP32), (33, FP16, FP16), (7, BF16, FP32)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_matches_float64(implementation, partials, dtype, out_dtype):
    partial_out, partial_lse = make_partials(partials, dtype=dtype)
    out, lse = merge(implementation, partial_out, partial_lse, out_dtype=out_dtype)
    # Unlike decode, nothing is multiplied in 16 bits: the CPU's tolerances hold on the GPU.
    assert_close_to(out, lse, *merge_oracle(partial_out, partial_lse), tolerance_of("reference", dtype, out_dtype))


@pytest.mark.parametrize("implementation", ("reference", "op-cpu"))
def test_matches_float64_with_float64_partials(implementation):
    partial_out, partial_lse = make_partials(4, dtype=FP64)
    partial_lse[1] = -torch.inf
    sink = torch.tensor([0.0, 1.0, -1.0, 3.0, -torch.inf])
    out, lse = merge(implementation, partial_out, partial_lse, sink)
    assert_close_to(out, lse, *merge_oracle(partial_out, partial_lse, sink), 1e-12)


@every_implementation
def test_one_partial_comes_back_unchanged(implementation):
    partial_out, partial_lse = make_partials(1)
    assert_same_bits(merge(implementation, partial_out, partial_lse), (partial_out[0], partial_lse[0]))


@every_implementation
@pytest.mark.parametrize("partials", [1, 2, 33])
def test_empty_partials_give_zero_and_minus_infinity(implementation, partials):
    partial_out, partial_lse = make_partials(partials)
    partial_out[:, 1], partial_lse[:, 1] = torch.nan, -torch.inf
    out, lse = merge(implementation, partial_out, partial_lse, torch.zeros(5))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.isneginf(lse[1]).all()
    assert_close_to(out, lse, *merge_oracle(partial_out, partial_lse, torch.zeros(5)), 1e-5)


@every_implementation
@pytest.mark.parametrize("payload", [torch.nan, torch.inf, 3e38])
def test_an_empty_partial_weighs_nothing_whatever_it_holds(implementation, payload):
    partial_out, partial_lse = make_partials(4)
    for part, row in ((0, 0), (2, 0), (3, 1)):
        partial_out[part, row], partial_lse[part, row] = payload, -torch.inf
    assert_close_to(*merge(implementation, partial_out, partial_lse), *merge_oracle(partial_out, partial_lse), 1e-5)


@every_implementation
def test_large_and_distant_lse(implementation):
    partial_out, partial_lse = make_partials(3)
    partial_lse += torch.tensor([5000.0, 5001.0, -5000.0]).view(3, 1, 1)
    out, lse = merge(implementation, partial_out, partial_lse)
    # fp32 spaces numbers near 5000 by 4.9e-4: weights carry that error.
    assert_close_to(out, lse, *merge_oracle(partial_out, partial_lse), 1e-3)


@every_implementation
def test_sink_scales_out_and_leaves_lse(implementation):
    partial_out, partial_lse = make_partials(3)
    sink = torch.tensor([0.0, 4.0, -torch.inf, torch.inf, -2.5])
    out, lse = merge(implementation, partial_out, partial_lse, sink)
    plain_out, plain_lse = merge(implementation, partial_out, partial_lse)
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out[:, 2], plain_out[:, 2])
    assert torch.equal(out[:, 3], torch.zeros_like(out[:, 3]))
    assert_close_to(out, lse, *merge_oracle(partial_out, partial_lse, sink), 1e-5)


@every_implementation
@pytest.mark.parametrize("partials", [1, 2])
def test_accepts_no_rows(implementation, partials):
    out, lse = merge(implementation, *make_partials(partials, rows=0))
    assert out.shape == (0, 5, 512)
    assert lse.shape == (0, 5)


@every_implementation
def test_the_same_call_gives_the_same_bits(implementation):
    partial_out, partial_lse = make_partials(33, rows=7)
    first = merge(implementation, partial_out, partial_lse)
    assert_same_bits(merge(implementation, partial_out, partial_lse), first)
    fewer = merge(implementation, partial_out[:, 2:3].contiguous(), partial_lse[:, 2:3].contiguous())
    assert_same_bits(fewer, (first[0][2:3], first[1][2:3]))


@every_implementation
@pytest.mark.parametrize("owners", [2, 4])
def test_merged_parts_of_a_list_equal_the_whole(implementation, owners):
    """Each owner attends to its own slots (-1 elsewhere); one row belongs to the first owner alone."""
    whole = make_case(rows=3, topk=130, dtype=FP32, sink=[0.4, -1.0, 2.0], lengths=[130, 70, 0])
    owner = torch.arange(130) // 5 % owners
    parts = []
    for rank in range(owners):
        indices = torch.where(owner == rank, whole.indices, -1)
        indices[1] = whole.indices[1] if rank == 0 else -1
        parts.append(decode(implementation, dataclasses.replace(whole, indices=indices.int(), sink=None)))
    partial_out, partial_lse = (torch.stack(values) for values in zip(*parts, strict=True))
    out, lse = merge(implementation, partial_out, partial_lse, whole.sink)
    assert_close_to(out, lse, *oracle(whole), tolerance_of(implementation, FP32, FP32))


@every_implementation
def test_public_function_allocates_what_is_not_given(implementation):
    partial_out, partial_lse = make_partials(3, dtype=BF16)
    sink = torch.tensor([0.0, 4.0, 1.0, 0.5, -2.5])
    device = device_of(implementation)
    given = [tensor.to(device) for tensor in (partial_out, partial_lse, sink)]
    out, lse = torch_sparse_mla.merge_partial_attention(given[0], given[1], sink=given[2])
    assert (out.dtype, lse.dtype, out.device) == (BF16, FP32, given[0].device)
    assert_close_to(out.cpu(), lse.cpu(), *merge_oracle(partial_out, partial_lse, sink), 3e-3)


@every_implementation
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_parts_may_lie_apart(implementation, dtype):
    """As they arrive from other ranks: output and log-sum-exp of a part, then those of the next, in one buffer."""
    partial_out, partial_lse = make_partials(5, rows=3, heads=5, dtype=dtype)
    out_bytes, lse_bytes = partial_out[0].numel() * partial_out.element_size(), partial_lse[0].numel() * 4
    buffer = torch.full((5, out_bytes + lse_bytes + 4), 0xFF, dtype=torch.uint8)
    buffer[:, :out_bytes] = partial_out.flatten(1).view(torch.uint8)
    buffer[:, out_bytes : out_bytes + lse_bytes] = partial_lse.flatten(1).view(torch.uint8)
    apart_out = buffer[:, :out_bytes].view(dtype).unflatten(1, (3, 5, 512))
    apart_lse = buffer[:, out_bytes : out_bytes + lse_bytes].view(FP32).unflatten(1, (3, 5))
    assert apart_out.data_ptr() == buffer.data_ptr() and apart_out.stride(0) > 3 * 5 * 512
    expected = merge(implementation, partial_out, partial_lse)
    assert_same_bits(merge(implementation, apart_out, apart_lse), expected)


@pytest.mark.gpu
def test_seventy_thousand_rows():
    """More rows than a grid's second or third dimension allows."""
    partial_out, partial_lse = make_partials(2, rows=8, heads=1, dtype=BF16)
    repeats = 70_000 // 8
    out, lse = merge("op-cuda", partial_out.repeat(1, repeats, 1, 1), partial_lse.repeat(1, repeats, 1))
    expected = merge("op-cuda", partial_out, partial_lse)
    assert_same_bits((out, lse), (expected[0].repeat(repeats, 1, 1), expected[1].repeat(repeats, 1)))
