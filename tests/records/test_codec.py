"""The codec against an independent byte-level model, bit by bit."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_sparse_mla import LAYOUTS, dequantise_records, quantise_records

from . import byte_model
from .cases import (
    EDGES,
    LAYOUT_NAMES,
    edge_token,
    model_records,
    model_values,
    random_tokens,
    rope_for,
    same_bits,
)

SCALED_LAYOUTS = tuple(name for name in LAYOUT_NAMES if not name.startswith("bf16"))
E2M1_LAYOUTS = tuple(name for name in LAYOUT_NAMES if name.startswith("nvfp4"))


def decoded(records: torch.Tensor, layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    latent, rope = dequantise_records(records, layout, dtype)
    return latent if rope is None else torch.cat([latent, rope], -1)


def test_layout_table_matches_the_description():
    assert {name: layout.record_bytes for name, layout in LAYOUTS.items()} == byte_model.RECORD_BYTES
    assert all(layout.record_bytes % 16 == 0 for layout in LAYOUTS.values())
    dims = {name: 512 if name.endswith("nope") else 576 for name in LAYOUTS}
    assert {name: layout.query_dim for name, layout in LAYOUTS.items()} == dims


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_random_tokens_match_the_byte_model(layout, generator):
    latent, rope = random_tokens(generator, 24)
    records = quantise_records(latent, rope_for(layout, rope), layout)
    assert torch.equal(records, model_records(latent, rope, layout))
    assert same_bits(decoded(records, layout), model_values(records, layout))


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_edge_values_match_the_byte_model(layout, edge):
    latent, rope = (values[None] for values in edge_token(edge))
    records = quantise_records(latent, rope_for(layout, rope), layout)
    assert torch.equal(records, model_records(latent, rope, layout))
    assert same_bits(decoded(records, layout), model_values(records, layout))
    assert decoded(records, layout).isfinite().all()


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@settings(max_examples=40)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    zeros=st.integers(0, 500),
)
def test_any_finite_values_match_the_byte_model(layout, values, zeros):
    pattern = np.resize(np.array(values, np.float32), 576)
    pattern[:zeros] = 0
    latent, rope = torch.from_numpy(pattern).split([512, 64])
    records = quantise_records(latent, rope_for(layout, rope), layout)
    assert torch.equal(records, model_records(latent[None], rope[None], layout)[0])
    assert same_bits(decoded(records, layout)[None], model_values(records[None], layout))
    assert decoded(records, layout, torch.float64).isfinite().all()


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_record_decodes_as_the_byte_model(layout, seed):
    """Any bytes: every code, every scale, NaN and negative scales among them."""
    raw = np.random.default_rng(seed).integers(0, 256, (1, LAYOUTS[layout].record_bytes), np.uint8)
    records = torch.from_numpy(raw)
    with np.errstate(all="ignore"):
        expected = model_values(records, layout)
    assert same_bits(decoded(records, layout), expected)


@pytest.mark.parametrize("layout", ("fp8_ds_mla", "fp8_mla_nope"))
def test_every_e4m3_code_decodes(layout):
    records = torch.zeros(1, LAYOUTS[layout].record_bytes, dtype=torch.uint8)
    records[0, :512] = torch.arange(512) % 256
    records[0, 512:528] = torch.tensor([1.0, 0.7, 1.0, 0.7]).view(torch.uint8)
    latent = decoded(records, layout)[0, :512]
    assert same_bits(latent, model_values(records, layout)[0, :512])
    assert latent[:256].isnan().nonzero().flatten().tolist() == [127, 255]
    assert (latent[126], latent[1], latent[8]) == (448.0, 2.0**-9, 2.0**-6)


@pytest.mark.parametrize("layout", E2M1_LAYOUTS)
def test_every_e2m1_code_and_scale_decodes(layout):
    """256 bytes of codes hold every pair; eight records hold every scale byte."""
    records = torch.zeros(8, LAYOUTS[layout].record_bytes, dtype=torch.uint8)
    records[:, :256] = torch.arange(256)
    records[:, 256:288] = torch.arange(256).reshape(8, 32)
    values = decoded(records, layout)
    assert same_bits(values, model_values(records, layout))
    unit_scale = decoded(torch.cat([records[:1, :256], torch.full((1, 32), 0x38), records[:1, 288:]], 1).byte(), layout)
    expected = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(unit_scale[0, 0:32:2], torch.cat([expected, -expected])), (
        "even indices: the low nibble counts up"
    )
    assert torch.equal(unit_scale[0, 1:512:32], torch.cat([expected, -expected])), "odd indices: the high nibble"


def test_static_and_two_level_records_in_one_cache(generator):
    """A zero token scale marks a static record, record by record."""
    layout = "nvfp4_ds_mla_fp8rope"
    latent, rope = random_tokens(generator, 6, -1, 1)
    records = quantise_records(latent, rope, layout)
    static = quantise_records(latent, rope, "nvfp4_ds_mla")
    records[::2, :288] = static[::2, :288]
    records[::2, 292:296] = 0
    values = decoded(records, layout)
    assert torch.equal(values[::2, :512], decoded(static, "nvfp4_ds_mla")[::2, :512])
    assert torch.equal(values[1::2], decoded(quantise_records(latent, rope, layout), layout)[1::2])
    assert same_bits(values, model_values(records, layout))


@pytest.mark.parametrize("layout", SCALED_LAYOUTS)
def test_fp32_scales_are_not_rounded_to_powers_of_two(layout):
    latent = torch.full((1, 512), 1.3)
    rope = torch.full((1, 64), 0.9)
    record = quantise_records(latent, rope_for(layout, rope), layout)[0]
    scales = {
        "fp8_ds_mla": {512: 1.3 / 448, 524: 1.3 / 448},
        "fp8_mla_nope": {512: 1.3 / 448, 524: 1.3 / 448},
        "nvfp4_ds_mla": {},
        "nvfp4_ds_mla_fp8rope": {288: 0.9 / 448, 292: 1.3 / 2688},
        "nvfp4_mla_nope": {292: 1.3 / 2688},
    }[layout]
    for offset, expected in scales.items():
        torch.testing.assert_close(
            record[offset : offset + 4].view(torch.float32)[0].item(), expected, rtol=1e-7, atol=0
        )
    # 1.3 / 6 falls between two e4m3 numbers: the static layout rounds its scale by up to 1/16, the others by nothing.
    error = 1 / 16 if layout == "nvfp4_ds_mla" else 1e-6
    torch.testing.assert_close(decoded(record, layout)[:512], latent[0], rtol=error, atol=0)


@pytest.mark.parametrize("layout", SCALED_LAYOUTS)
def test_quantisation_error_is_within_half_a_step(layout, generator):
    latent, rope = torch.randn(16, 512, generator=generator), torch.randn(16, 64, generator=generator)
    values = decoded(quantise_records(latent, rope_for(layout, rope), layout), layout, torch.float64)
    if layout.startswith("fp8"):
        step = latent.unflatten(1, (4, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1) / 448 * 2**-9
        bound = (latent.abs() * 2**-4).maximum(step / 2)
    else:
        # The widest e2m1 gap is a third of the group's amax; the e4m3 scale moves that by another 1/16.
        amax = latent.unflatten(1, (32, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
        bound = amax * (1 / 6 + 1 / 16)
    assert ((values[:, :512] - latent).abs() <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_float64_values_are_exact_products(layout, generator):
    latent, rope = random_tokens(generator, 4, -5, 5)
    records = quantise_records(latent, rope_for(layout, rope), layout)
    exact = decoded(records, layout, torch.float64)
    assert exact.dtype == torch.float64
    # Code and scale have at most 4 + 24 significant bits, e2m1 x e4m3 x fp32 at most 2 + 4 + 24: float64 holds them.
    mantissa, _ = torch.frexp(exact)
    assert torch.equal(mantissa * 2**30, (mantissa * 2**30).round())
    assert torch.equal(exact.float(), decoded(records, layout))


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_leading_dimensions_and_dtypes(layout, generator):
    latent, rope = (values.clamp(-65504, 65504) for values in random_tokens(generator, 6, -2, 2))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        latent_in, rope_in = latent.to(dtype), rope_for(layout, rope.to(dtype))
        flat = quantise_records(latent_in, rope_in, layout)
        assert torch.equal(flat, model_records(latent_in, rope.to(dtype), layout))
        nested = quantise_records(
            latent_in.unflatten(0, (2, 3)), None if rope_in is None else rope_in.unflatten(0, (2, 3)), LAYOUTS[layout]
        )
        assert torch.equal(nested.flatten(0, 1), flat)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_cuda_codec_gives_the_same_bytes(layout, generator):
    latent, rope = random_tokens(generator, 32)
    expected = quantise_records(latent, rope_for(layout, rope), layout)
    records = quantise_records(latent.cuda(), rope_for(layout, rope.cuda()), layout)
    assert torch.equal(records.cpu(), expected)
    assert same_bits(decoded(records, layout).cpu(), decoded(expected, layout))


@pytest.mark.parametrize(
    "latent, rope, layout, message",
    [
        ((2, 512), None, "fp8", "'layout': got 'fp8'; allowed: one of bf16_mla"),
        ((2, 256), None, "bf16_mla_nope", "'latent': got shape [2, 256]; allowed: shape [..., 512]"),
        ((2, 512), (2, 64), "fp8_mla_nope", "'rope': got Tensor; allowed: None for layout fp8_mla_nope"),
        ((2, 512), None, "fp8_ds_mla", "'rope': got NoneType; allowed: a [..., 64] tensor for layout fp8_ds_mla"),
        ((2, 512), (2, 32), "fp8_ds_mla", "'rope': got shape [2, 32]; allowed: shape [..., 64]"),
        ((2, 512), (3, 64), "fp8_ds_mla", "'rope': got shape [3, 64]; allowed: shape [2, 64], for as many tokens"),
    ],
)
def test_quantise_rejects(latent, rope, layout, message):
    with pytest.raises(ValueError, match=re.escape("torch_sparse_mla::quantise_records: argument " + message)):
        quantise_records(torch.zeros(latent), None if rope is None else torch.zeros(rope), layout)


@pytest.mark.parametrize(("width", "dtype"), [(528, torch.uint8), (656, torch.float32)])
def test_dequantise_rejects(width, dtype):
    with pytest.raises(ValueError, match="dequantise_records: argument 'records': got "):
        dequantise_records(torch.zeros(2, width, dtype=dtype), "fp8_ds_mla")
