"""Where `sparse_ckv_decode` reads and writes: strides, addresses beyond 2 GiB, bounds, workspace size and reuse."""

import dataclasses

import numpy as np
import pytest
import torch

from torch_sparse_mla import LAYOUTS, sparse_ckv_decode_workspace_bytes
from torch_sparse_mla.decode.contract import HEADS_PER_TILE, MAX_HEADS, MAX_TOPK, rows_per_launch

from .cases import (
    POISON_BYTE,
    DecodeCase,
    assert_accurate,
    assert_close_to,
    assert_same_bits,
    call,
    decode,
    device_of,
    every_implementation,
    make_case,
    oracle,
    random_records,
    with_outputs,
)


@every_implementation
def test_row_strides_of_queries_and_indices_are_free(implementation):
    case = make_case(rows=3, heads=5, topk=70)
    wide_q = torch.full((3, 7, 576), torch.nan, dtype=case.q.dtype)
    wide_indices = torch.zeros(3, 96, dtype=torch.int32)
    wide_q[:, :5], wide_indices[:, :70] = case.q, case.indices
    strided = dataclasses.replace(case, q=wide_q[:, :5], indices=wide_indices[:, :70])
    assert not strided.q.is_contiguous() and not strided.indices.is_contiguous()
    assert_same_bits(decode(implementation, strided), decode(implementation, case))


@every_implementation
@pytest.mark.parametrize("layout, dtype", [("fp8_ds_mla", torch.bfloat16), ("nvfp4_mla_nope", torch.float32)])
def test_queries_and_indices_need_no_alignment(implementation, layout, dtype):
    case = make_case(rows=3, topk=70, layout=layout, dtype=dtype)
    moved = case.to(device_of(implementation))
    odd = dataclasses.replace(moved, q=unaligned(moved.q), indices=unaligned(moved.indices))
    assert odd.q.data_ptr() % 16 and odd.indices.data_ptr() % 16
    call(implementation, "sparse_ckv_decode", odd.args())
    assert_same_bits((odd.out.cpu(), odd.lse.cpu()), decode(implementation, case))


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose first element and row stride are off every power of two, as in a slice of a fused projection."""
    row_size = tensor[0].numel()
    storage = torch.zeros(1 + len(tensor) * (row_size + 13), dtype=tensor.dtype, device=tensor.device)
    strides = (row_size + 13, *tensor.stride()[1:])
    return storage.as_strided(tensor.shape, strides, storage_offset=1).copy_(tensor)


@every_implementation
def test_one_query_may_serve_every_row(implementation):
    """A row stride of 0, as `expand` gives."""
    case = make_case(rows=3)
    expanded = dataclasses.replace(case, q=case.q[:1].expand(3, -1, -1), indices=case.indices[:1].expand(3, -1))
    out, lse = decode(implementation, expanded)
    assert_same_bits((out[1:], lse[1:]), (out[:2], lse[:2]))
    assert_accurate(expanded, out, lse, 3e-3)


@every_implementation
@pytest.mark.parametrize("page_size", [1, 3, 64, 2304])
def test_pages_of_any_size_with_a_tail(implementation, page_size):
    case = make_case(topk=90, page_size=page_size)
    assert case.cache.stride(0) > page_size * case.cache.shape[2]
    assert_accurate(case, *decode(implementation, case), 3e-3)


@every_implementation
def test_a_contiguous_cache(implementation):
    case = make_case(topk=90)
    assert_same_bits(
        decode(implementation, dataclasses.replace(case, cache=case.cache.contiguous())), decode(implementation, case)
    )


def far_case(device: str, span: int, page_stride: int, page_size: int, heads: int = 3) -> tuple[DecodeCase, DecodeCase]:
    """A case with slots on both sides of `span` bytes, and the same records in a small cache."""
    record_bytes = LAYOUTS["fp8_ds_mla"].record_bytes
    pages = span // page_stride + 3
    # Not filled: the operating system gives zero pages where a test touches the memory and nowhere else.
    storage = torch.empty(pages * page_stride, dtype=torch.uint8, device=device)
    cache = storage.as_strided((pages, page_size, record_bytes), (page_stride, record_bytes, 1))
    far_slots = torch.tensor([0, span // page_stride * page_size + page_size, pages * page_size - 1])
    near = make_case(rows=1, heads=heads, topk=3, page_size=4)
    near.indices[0] = torch.arange(3)
    records = random_records(3, "fp8_ds_mla", torch.Generator().manual_seed(1))
    near.cache[0, :3] = records
    moved = near.to(device)
    for slot, record in zip(far_slots.tolist(), records, strict=True):
        cache[slot // page_size, slot % page_size] = record.to(device)
    return dataclasses.replace(moved, cache=cache, indices=far_slots.int().unsqueeze(0).to(device)), near


@every_implementation
@pytest.mark.parametrize("page_size, gap", [(64, 0), (1, 4080)], ids=["packed", "sparse-pages"])
def test_addresses_beyond_32_bits(implementation, page_size, gap):
    """Slot x record bytes and page x page stride beyond 2^31, on the GPU beyond 2^32."""
    device = device_of(implementation)
    span = 2**31 if device == "cpu" else 2**32
    case, near = far_case(device, span, page_size * 656 + gap, page_size)
    call(implementation, "sparse_ckv_decode", case.args())
    assert_close_to(case.out.cpu(), case.lse.cpu(), *oracle(near), 3e-3)


@every_implementation
@pytest.mark.parametrize(
    "rows, heads, topk, batch_invariant", [(2, 3, 200, False), (2, 17, 300, True), (1, 1, 1, False)]
)
def test_writes_stay_within_the_outputs(implementation, rows, heads, topk, batch_invariant):
    """Outputs and an exactly sized workspace lie between guard bytes; inputs keep theirs."""
    case = make_case(rows=rows, heads=heads, topk=topk, batch_invariant=batch_invariant, lengths=[topk, 5][:rows])
    case = case.to(device_of(implementation))
    guard = 512
    guarded = {}
    for name in ("out", "lse", "workspace"):
        tensor = getattr(case, name)
        size = tensor.numel() * tensor.element_size()
        storage = torch.full((guard + size + guard,), 0xA5, dtype=torch.uint8, device=tensor.device)
        guarded[name] = (storage, storage[guard : guard + size].view(tensor.dtype).view(tensor.shape))
    case = dataclasses.replace(case, **{name: view for name, (_, view) in guarded.items()})
    before = {name: tensor.clone() for name, tensor in case.tensors().items() if name not in guarded}
    call(implementation, "sparse_ckv_decode", case.args())
    for name, (storage, _) in guarded.items():
        assert (storage[:guard] == 0xA5).all() and (storage[-guard:] == 0xA5).all(), name
    for name, tensor in before.items():
        same = torch.equal(tensor.view(torch.uint8), getattr(case, name).contiguous().view(torch.uint8))
        assert same, name
    assert_accurate(case.to("cpu"), case.out.cpu(), case.lse.cpu(), 3e-3)


@every_implementation
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_the_workspace_holds_does_not_matter(implementation, batch_invariant):
    """Poison, zeros, and what a larger call left behind give the same bits."""
    case = make_case(rows=3, topk=700, lengths=[700, 90, 0], batch_invariant=batch_invariant)
    expected = decode(implementation, case)
    assert_accurate(case, *expected, 3e-3)
    zeroed = dataclasses.replace(case, workspace=torch.zeros_like(case.workspace))
    assert_same_bits(decode(implementation, zeroed), expected)
    larger = make_case(rows=4, heads=8, topk=1500, batch_invariant=batch_invariant, seed=1)
    larger = larger.to(device_of(implementation))
    assert larger.workspace.numel() > case.workspace.numel()
    call(implementation, "sparse_ckv_decode", larger.args())
    reused = dataclasses.replace(case, workspace=larger.workspace.cpu())
    assert_same_bits(decode(implementation, reused), expected)


def test_workspace_size_is_a_bounded_integer():
    """At most the partials of 264 programs without batch_invariant, of 1024 with it, whatever the number of rows.

    Or those of 132 programs of the wide form, which are fp16.
    """
    partial_bytes = (512 + 1) * 4
    wide_bytes = 132 * 64 * (512 * 2 + 5 * 4)
    for heads in (1, 8, 16, 17, 64, MAX_HEADS):
        for topk in (1, 64, 65, 256, 2051, MAX_TOPK):
            for rows in (0, 1, 2, 7, 132, 133, 4096, 70_000, 2**17):
                for batch_invariant, programs in ((False, 264), (True, 1024)):
                    size = sparse_ckv_decode_workspace_bytes(rows, heads, topk, batch_invariant)
                    assert type(size) is int
                    assert 0 <= size <= max(programs * HEADS_PER_TILE * partial_bytes, wide_bytes)


def test_workspace_size_is_zero_with_one_split():
    assert sparse_ckv_decode_workspace_bytes(1, 16, 64) == 0
    assert sparse_ckv_decode_workspace_bytes(2**17, 128, MAX_TOPK) == 0
    assert sparse_ckv_decode_workspace_bytes(3, 16, 256, batch_invariant=True) == 0
    assert sparse_ckv_decode_workspace_bytes(1, 16, 65) > 0


def test_workspace_size_does_not_shrink_with_topk_or_rows():
    for batch_invariant in (False, True):
        by_topk = [sparse_ckv_decode_workspace_bytes(2, 16, topk, batch_invariant) for topk in range(1, 3000, 31)]
        assert by_topk == sorted(by_topk)
    by_rows = [sparse_ckv_decode_workspace_bytes(rows, 16, 2048, batch_invariant=True) for rows in range(1, 400)]
    assert by_rows == sorted(by_rows)
    assert by_rows[-1] == by_rows[200]


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_seventy_thousand_rows(batch_invariant):
    """More rows than a grid's second or third dimension allows."""
    rows = 70_000
    case = many_rows(rows, batch_invariant).to("cuda")
    call("op-cuda", "sparse_ckv_decode", case.args())
    sample = [0, 1, 32_767, 32_768, 65_534, 65_535, 65_536, rows - 1]
    sampled = case.to("cpu").with_rows(sample)
    assert_accurate(sampled, case.out.cpu()[sample], case.lse.cpu()[sample], 3e-3)
    # Row i's list is that of row i % 8, so the samples stand for all rows.
    assert torch.equal(case.out, case.out[:8].repeat(rows // 8, 1, 1))


def many_rows(rows: int, batch_invariant: bool) -> DecodeCase:
    few = make_case(rows=8, heads=1, topk=4, lengths=[4, 3, 0, 1, 4, 4, 2, 4], batch_invariant=batch_invariant)
    return few.with_rows([row % 8 for row in range(rows)])


@pytest.mark.gpu
def test_rows_beyond_one_launch():
    """With batch_invariant, rows run in groups that share the workspace."""
    heads, topk = 16, 2051
    group = rows_per_launch(10**6, heads, topk, True)
    rows = 2 * group + 1
    few = make_case(rows=3, heads=heads, topk=topk, lengths=[topk, 300, 0], batch_invariant=True)
    case = few.with_rows([row % 3 for row in range(rows)])
    out, lse = decode("op-cuda", case)
    expected_out, expected_lse = oracle(few)
    repeats = -(-rows // 3)
    assert_close_to(
        out, lse, np.tile(expected_out, (repeats, 1, 1))[:rows], np.tile(expected_lse, (repeats, 1))[:rows], 3e-3
    )


def test_poison_bytes_are_not_numbers():
    """The poison that the other tests rest on reads as NaN in every layout."""
    for layout in LAYOUTS.values():
        records = torch.full((1, layout.record_bytes), POISON_BYTE, dtype=torch.uint8)
        case = with_outputs(
            dataclasses.replace(make_case(layout=layout.name), cache=records.view(1, 1, -1)), torch.float32
        )
        case.indices.zero_()
        assert torch.isnan(decode("reference", case)[0]).all(), layout.name
