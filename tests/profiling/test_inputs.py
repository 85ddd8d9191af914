"""Shapes and inputs: counted bytes are right, records are finite and varied, slot lists fit the pool."""

import pytest
import torch

from profiling import inputs, shapes
from profiling.inputs import RecordPool, exact_rows, oracle_rows, relative_error
from profiling.shapes import DecodeShape, RecordShape, decode_grid, record_grid
from torch_sparse_mla import LAYOUTS, dequantise_records, sparse_ckv_decode

CPU = torch.device("cpu")


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setitem(inputs.POOL_BYTES, "cpu", 4 << 20)
    monkeypatch.setitem(inputs.BLOCK_RECORDS, "cpu", 251)
    return RecordPool(CPU)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("grid", [decode_grid, record_grid])
def test_grid_names_each_shape_once_and_each_layout_in_one_run(grid, device, quick):
    found = grid(device, quick)
    assert len(found) == len(set(found)) > 0
    runs = [a.layout for a, b in zip(found, [*found[1:], None], strict=True) if b is None or a.layout != b.layout]
    assert len(runs) == len(set(runs))
    assert quick or device == "cpu" or set(runs) == set(LAYOUTS)


def test_default_cuda_grid_covers_every_row_and_head_count():
    found = decode_grid("cuda", False)
    for rows in shapes.ROWS:
        for heads in shapes.HEADS:
            assert DecodeShape(rows, heads, 2048, "fp8_ds_mla") in found
    assert {shape.topk for shape in found} == set(shapes.TOPKS)


def test_bytes_and_operations_of_a_decode_call():
    shape = DecodeShape(2, 16, 100, "fp8_ds_mla")
    records, lists = 2 * 100 * 656, 2 * 100 * 4
    queries, results = 2 * 16 * 576 * 2, 2 * 16 * (512 * 2 + 4)
    assert shape.bytes == records + lists + queries + results
    assert shape.flops == 2 * (2 * 16 * 100) * (576 + 512)


def test_bytes_of_a_record_call():
    assert RecordShape("write_ckv_records", 3, "fp8_mla_nope").bytes == 3 * (528 + 512 * 2 + 8)


def test_mtp_rows_share_the_union_that_is_counted(pool):
    shape = DecodeShape(8, 16, 512, "nvfp4_mla_nope", rows_per_request=4)
    lists = pool.index_sets(shape, 2, 1_000_000)
    assert lists.shape == (2, 8, 512)
    for request in lists.view(4, 4 * 512):
        assert abs(len(request.unique()) - shape.distinct_records / 2) < 0.03 * shape.distinct_records
    assert 2900 < DecodeShape(4, 16, 2048, "fp8_ds_mla", 4).distinct_records < 3100


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pool_holds_finite_varied_records(pool, layout):
    cache = pool.fill(layout)
    assert cache.shape[1:] == (inputs.PAGE_SIZE, LAYOUTS[layout].record_bytes)
    assert cache.numel() > 0.95 * inputs.POOL_BYTES["cpu"]
    latent, rope = dequantise_records(cache.flatten(0, 1), layout)
    for values in (latent, rope) if rope is not None else (latent,):
        assert values.isfinite().all()
        assert (values.norm(dim=-1) > 0).all()
    # Equal bytes come back only after a prime number of records.
    assert not torch.equal(cache[0], cache[1]) and not torch.equal(cache[0], cache[4])


def test_fp8_scales_are_not_powers_of_two(pool):
    scales = pool.fill("fp8_ds_mla").flatten(0, 1)[:251, 512:528].contiguous().view(torch.float32)
    assert (torch.frexp(scales).mantissa == 0.5).float().mean() < 0.01


def test_index_sets_reach_the_whole_pool_and_nothing_else(pool):
    lists = pool.index_sets(DecodeShape(4, 16, 2048, "fp8_ds_mla"), 8, 5000)
    assert lists.dtype == torch.int32
    assert lists.min() < 10 and 4990 <= lists.max() < 5000
    assert not torch.equal(lists[0], lists[1])


@pytest.mark.parametrize("rows_per_request", [1, 2])
def test_every_index_set_is_aligned(pool, rows_per_request):
    lists = pool.index_sets(DecodeShape(2, 16, 2051, "fp8_ds_mla", rows_per_request), 8, 5000)
    assert all(of_set.is_contiguous() and of_set.data_ptr() % 16 == 0 for of_set in lists)


@pytest.mark.parametrize("tokens", [1, 64, 65, 1000])
def test_slot_sets_are_distinct_within_a_call(pool, tokens):
    slots = pool.slot_sets(8, tokens, 6400)
    assert slots.shape == (8, tokens) and slots.is_contiguous()
    assert slots.min() >= 0 and slots.max() < 6400
    assert all(len(of_set.unique()) == tokens for of_set in slots)


@pytest.mark.parametrize(("rows", "expected"), [(1, [0]), (2, [0, 1]), (128, [0, 63, 127])])
def test_oracle_rows_run_from_first_to_last(rows, expected):
    assert oracle_rows(rows) == expected


def test_oracle_agrees_with_the_operator(pool):
    shape = DecodeShape(5, 3, 40, "nvfp4_ds_mla_fp8rope")
    cache = pool.fill(shape.layout)
    prepared = inputs.decode_inputs(shape, pool, cache)
    last = prepared.index_sets[-1]
    out, _ = sparse_ckv_decode(prepared.q, cache, last, softmax_scale=prepared.softmax_scale, layout=shape.layout)
    assert relative_error(out[prepared.oracle_rows], prepared.oracle) < 3e-3
    other = exact_rows(prepared.q, cache, prepared.index_sets[0], prepared.softmax_scale, shape.layout, [0])
    assert relative_error(out[:1], other) > 0.1
