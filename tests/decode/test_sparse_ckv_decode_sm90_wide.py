"""The wide form of the sm_90 kernels, for 33 heads and more, as emulated on the CPU: as much of
test_sparse_ckv_decode_sm90.py as always runs. On a GPU all of that file runs in this form too.

Tiles hold 48 tokens, two of them lie in shared memory, and a batch-invariant part has 256 tokens.
"""

import dataclasses

import pytest
import torch

from torch_sparse_mla import LAYOUTS

from . import emulated_sm90
from .cases import POISON_BYTE, assert_accurate, assert_close_to, assert_same_bits, make_case, oracle, with_outputs
from .test_sparse_ckv_decode_memory import far_case
from .test_sparse_ckv_decode_sm90 import SCALED, holes, strided, write_scales

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
HEADS = 33


@pytest.fixture
def attend(emulator):
    return lambda case: emulated_sm90.run(emulator, with_outputs(case, case.out.dtype), emulated_sm90.WIDE)


@pytest.mark.parametrize("heads", [HEADS, 64, 65, 128])
def test_matches_float64_at_every_head_tile(attend, heads):
    case = make_case(rows=1, heads=heads, topk=50, sink=[0.1 * head - 1 for head in range(heads)])
    assert_accurate(case, *attend(case), 3e-3)


@every_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matches_float64_at_every_length(attend, layout, dtype):
    if dtype == torch.float16 and LAYOUTS[layout].latent == "bf16":
        dtype = torch.bfloat16  # the Triton kernel's, which has tests of its own
    settings = {"rows": 4, "heads": HEADS, "topk": 97, "layout": layout, "dtype": dtype, "out_dtype": torch.float32}
    case = make_case(**settings, lengths=[0, 1, 49, 9000], batch_invariant=True, edit_indices=holes)
    assert_accurate(case, *attend(case), 3e-3)


@every_layout
def test_a_part_of_many_tiles(attend, layout):
    case = make_case(rows=1, heads=HEADS, topk=300, layout=layout, batch_invariant=True, edit_indices=holes)
    assert_accurate(case, *attend(case), 3e-3)


@pytest.mark.parametrize("layout", SCALED)
@pytest.mark.parametrize("low, high", [(-30, 0), (-8, 8)])
def test_matches_float64_at_any_mix_of_scales(attend, layout, low, high):
    generator = torch.Generator().manual_seed(1)

    def edit(records: torch.Tensor) -> None:
        exponents = low + (high - low) * torch.rand(len(records), 4, generator=generator)
        write_scales(records, layout, 1.37 * 10.0**exponents)

    settings = {"rows": 1, "heads": HEADS, "topk": 120, "softmax_scale": min(10.0 ** (-high - 4), 0.04)}
    case = make_case(**settings, layout=layout, batch_invariant=True, edit_records=edit)
    assert_accurate(case, *attend(case), 3e-3)


@pytest.mark.parametrize("small, large", [(1e-30, 1e30), (0.7, 1.3e12)])
def test_tokens_of_small_values_count_when_large_ones_come_late(attend, small, large):
    case = make_case(rows=1, heads=HEADS, topk=144, softmax_scale=1.0, batch_invariant=True)
    q = torch.zeros_like(case.q)
    q[..., 512] = 1.0
    slots = case.indices[0].long()
    records = case.cache[slots // 64, slots % 64]
    write_scales(records, "fp8_ds_mla", torch.where(torch.arange(144) < 96, small, large).unsqueeze(1).expand(-1, 4))
    case.cache[slots // 64, slots % 64] = records
    case = dataclasses.replace(case, q=q)
    assert_accurate(case, *attend(case), 3e-3)


@pytest.mark.parametrize("topk", [40, 250])
def test_nan_in_a_selected_record_shows_in_its_row_alone(attend, topk):
    case = make_case(rows=2, heads=HEADS, topk=topk, batch_invariant=True)
    slot = min(set(case.indices[1].tolist()) - set(case.indices[0].tolist()))
    case.cache[slot // 64, slot % 64] = POISON_BYTE
    out, lse = attend(case)
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert_accurate(case.with_rows([0]), out[[0]], lse[[0]], 3e-3)


def test_queries_at_any_alignment_give_the_same_bits(attend):
    case = make_case(rows=2, heads=HEADS, topk=20)
    assert_same_bits(attend(strided(case, 1)), attend(case))


def test_addresses_beyond_32_bits(attend):
    case, near = far_case("cpu", 2**31, 64 * 656, 64, HEADS)
    assert_close_to(*attend(case), *oracle(near), 3e-3)


def test_few_heads_run_in_the_narrow_form(emulator):
    case = make_case(rows=1, heads=32, topk=20)
    narrow, wide = (
        emulated_sm90.run(emulator, with_outputs(case, case.out.dtype), form)
        for form in (emulated_sm90.NARROW, emulated_sm90.WIDE)
    )
    assert_same_bits(narrow, wide)


@pytest.mark.parametrize(("rows", "form"), [(3, emulated_sm90.NARROW), (34, emulated_sm90.WIDE)])
def test_a_call_runs_in_the_form_that_the_model_chooses(emulator, sm90_plan, rows, form):
    """34 rows are more blocks of 16 heads than run in two rounds, and fewer of 64 than run in one."""
    case = make_case(rows=rows, heads=128, topk=10)
    assert sm90_plan(rows, 128, 10)[0] == form
    chosen, asked = (
        emulated_sm90.run(emulator, with_outputs(case, case.out.dtype), which)
        for which in (emulated_sm90.BY_MODEL, form)
    )
    assert_same_bits(chosen, asked)


MISTAKES = {
    "fence": "a product without a fence since the last wait",
    "commit": "a wait while products belong to no group",
    "wait": "a thread ended before its products",
    "operand not fenced": "a product reads what its writer has not fenced",
    "operand overwritten": "a store to an operand of a product under way",
    "sums touched": "sums were touched while a product was under way",
    "threads disagree": "the threads of a warpgroup disagree about a product",
    "swizzle": "a descriptor without the 128-byte swizzle",
    "off its row": "an operand that begins off its first row",
    "odd groups": "groups of rows that are no multiple of 1,024 bytes apart",
    "off its column": "an operand across rows that begins off a multiple of 1,024 bytes",
    "beyond memory": "an operand beyond the shared memory of the launch",
    "word not waited for": "a thread ended before its words had come",
    "word not fenced": "a product reads what its writer has not fenced",
    "word misaligned": "a misaligned word",
}


def test_the_emulator_sees_mistakes(emulator):
    assert emulator.mistake(0) is None
    said = [emulator.mistake(1 + number) for number in range(len(MISTAKES))]
    assert [text.decode() for text in said] == list(MISTAKES.values())
    assert emulator.mistake(1 + len(MISTAKES)) == b"no such mistake"
