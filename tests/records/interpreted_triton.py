"""The Triton kernels in Triton's interpreter, against the byte model. Run by `tests/test_triton_interpreted.py`.

What the interpreter cannot show: native conversions (the kernels use none), FTZ, and launch geometry.
"""

import os

import pytest
import torch

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla.records import triton_kernels

from .cases import (
    LAYOUT_NAMES,
    POISON,
    edge_tokens,
    model_records,
    model_values,
    paged_cache,
    random_tokens,
    rope_for,
    same_bits,
)

assert os.environ.get("TRITON_INTERPRET") == "1", "needs TRITON_INTERPRET=1 before Triton is imported"

PAGES, PAGE_SIZE, TAIL = 3, 5, 48
SLOTS = [3, 0, 14, -1, 7, 15, 8, 2]
PRESENT = [0, 1, 2, 4, 6, 7]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_write_matches_byte_model(layout, dtype, generator):
    latent, rope = (values.to(dtype) for values in random_tokens(generator, len(SLOTS), -4, 1))
    projection = torch.cat([latent, rope, latent[:, :16]], 1)
    latent, rope = projection[:, :512], projection[:, 512:576]
    cache, storage = paged_cache(layout, PAGES, PAGE_SIZE, TAIL)
    expected = storage.clone()
    page_bytes = PAGE_SIZE * LAYOUTS[layout].record_bytes
    records = expected[:, :page_bytes].unflatten(1, (PAGE_SIZE, -1))
    for row, record in zip(PRESENT, model_records(latent[PRESENT], rope[PRESENT], layout), strict=True):
        records[SLOTS[row] // PAGE_SIZE, SLOTS[row] % PAGE_SIZE] = record
    slots = torch.tensor(SLOTS, dtype=torch.int32 if dtype == torch.float16 else torch.int64)
    triton_kernels.write_ckv_records(latent, rope_for(layout, rope), slots, cache, layout)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_write_matches_byte_model_at_any_scale(layout, generator):
    latent, rope = (torch.cat(pair) for pair in zip(edge_tokens(), random_tokens(generator, 20), strict=True))
    cache, _ = paged_cache(layout, len(latent), 1)
    triton_kernels.write_ckv_records(latent, rope_for(layout, rope), torch.arange(len(latent)), cache, layout)
    assert torch.equal(cache.squeeze(1), model_records(latent, rope, layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_read_matches_byte_model_for_any_bytes(layout, dtype, generator):
    cache, storage = paged_cache(layout, PAGES, PAGE_SIZE, TAIL)
    storage.copy_(torch.randint(0, 256, storage.shape, generator=generator, dtype=torch.uint8))
    expected = torch.zeros(len(SLOTS), LAYOUTS[layout].query_dim)
    for row in PRESENT:
        expected[row] = model_values(cache[SLOTS[row] // PAGE_SIZE, SLOTS[row] % PAGE_SIZE][None], layout)[0]
    out = torch.full_like(expected, 7.0).to(dtype)
    slots = torch.tensor(SLOTS, dtype=torch.int32 if dtype == torch.float16 else torch.int64)
    triton_kernels.read_ckv_records(cache, slots, out, layout)
    assert same_bits(out, expected.to(dtype))


@pytest.mark.parametrize("layout", ["nvfp4_ds_mla", "nvfp4_ds_mla_fp8rope", "nvfp4_mla_nope", "fp8_mla_nope"])
def test_read_decodes_every_code_and_scale(layout):
    records = torch.zeros(8, LAYOUTS[layout].record_bytes, dtype=torch.uint8)
    records[:, :256] = torch.arange(256)
    if layout == "fp8_mla_nope":
        records[:, 512:] = torch.rand(8, 4, generator=torch.Generator().manual_seed(1)).view(torch.uint8)
    else:
        records[:, 256:288] = torch.arange(256).reshape(8, 32)
    out = torch.empty(8, LAYOUTS[layout].query_dim)
    triton_kernels.read_ckv_records(records[:, None], torch.arange(8), out, layout)
    assert same_bits(out, model_values(records, layout))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_non_finite_shows_in_its_own_record_only(layout, bad, generator):
    latent, rope = random_tokens(generator, 3, -1, 1)
    clean, _ = paged_cache(layout, 1, 3)
    cache = clean.clone()
    triton_kernels.write_ckv_records(latent, rope_for(layout, rope), torch.arange(3), clean, layout)
    latent[1, 37], rope[1, 5] = bad, bad
    triton_kernels.write_ckv_records(latent, rope_for(layout, rope), torch.arange(3), cache, layout)
    out = torch.empty(3, LAYOUTS[layout].query_dim)
    triton_kernels.read_ckv_records(cache, torch.arange(3), out, layout)
    if layout == "nvfp4_ds_mla" and bad == bad:
        assert abs(out[1, 37]) == 6 * 448, "the static layout saturates an infinity like any large number"
    else:
        assert not out[1, 37].isfinite()
    assert not LAYOUTS[layout].rope or not out[1, 517].isfinite()
    cache[0, 1] = clean[0, 1]
    assert torch.equal(cache, clean)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_nothing_to_do(layout):
    cache, _ = paged_cache(layout, PAGES, PAGE_SIZE)
    width = LAYOUTS[layout].query_dim
    for slots in (torch.empty(0, dtype=torch.int32), torch.tensor([-1, 15, 2**62])):
        latent, rope = torch.ones(len(slots), 512), torch.ones(len(slots), 64)
        out = torch.full((len(slots), width), 7.0)
        triton_kernels.write_ckv_records(latent, rope_for(layout, rope), slots, cache, layout)
        triton_kernels.read_ckv_records(cache, slots, out, layout)
        assert (cache == POISON).all() and (out == 0).all()


def test_bad_arguments_are_refused_before_the_launch():
    cache, _ = paged_cache("fp8_ds_mla", 1, 1)
    with pytest.raises(ValueError, match="write_ckv_records: argument 'rope'"):
        triton_kernels.write_ckv_records(torch.ones(1, 512), None, torch.tensor([0]), cache, "fp8_ds_mla")
    with pytest.raises(ValueError, match="read_ckv_records: argument 'out'"):
        triton_kernels.read_ckv_records(cache, torch.tensor([0]), torch.ones(1, 512), "fp8_ds_mla")
