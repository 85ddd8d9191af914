"""What `sparse_ckv_decode` computes: accuracy over shapes, layouts and dtypes, and which slots count."""

import dataclasses

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla.records import LAYOUTS

from .cases import (
    DecodeCase,
    assert_accurate,
    assert_same_bits,
    decode,
    every_implementation,
    make_case,
    oracle,
    tolerance_of,
    with_outputs,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Pairs of every layout, head count (below, at and between tiles of 16) and top-k (below, at and between tiles of 64)
# with some of the others, not the full product.
SHAPES = [
    # layout, rows, heads, topk, q, out
    ("fp8_ds_mla", 1, 1, 1, BF16, BF16),
    ("fp8_ds_mla", 2, 128, 192, BF16, BF16),
    ("fp8_ds_mla", 1, 16, 2051, FP32, FP32),
    ("bf16_mla", 2, 3, 63, FP16, FP16),
    ("bf16_mla", 1, 64, 256, BF16, FP32),
    ("bf16_mla_nope", 2, 17, 64, FP32, FP32),
    ("bf16_mla_nope", 1, 1, 2048, BF16, BF16),
    ("fp8_mla_nope", 3, 8, 640, FP16, FP32),
    ("fp8_mla_nope", 1, 64, 1, BF16, BF16),
    ("nvfp4_ds_mla", 2, 16, 256, BF16, BF16),
    ("nvfp4_ds_mla", 1, 3, 1152, FP32, BF16),
    ("nvfp4_ds_mla_fp8rope", 2, 8, 192, BF16, BF16),
    ("nvfp4_ds_mla_fp8rope", 1, 17, 2051, FP16, FP32),
    ("nvfp4_mla_nope", 1, 128, 63, FP16, FP16),
    ("nvfp4_mla_nope", 4, 1, 640, FP32, FP32),
]


def shape_id(value: object) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@every_implementation
@pytest.mark.parametrize("layout, rows, heads, topk, q_dtype, out_dtype", SHAPES, ids=shape_id)
def test_matches_float64(implementation, layout, rows, heads, topk, q_dtype, out_dtype):
    case = make_case(rows=rows, heads=heads, topk=topk, layout=layout, dtype=q_dtype, out_dtype=out_dtype)
    assert_accurate(case, *decode(implementation, case), tolerance_of(implementation, q_dtype, out_dtype))


@pytest.mark.parametrize("implementation", ("reference", "op-cpu"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_float64_with_float64_queries(implementation, layout):
    case = make_case(layout=layout, dtype=FP64, lengths=[64, 21], sink=[0.5, -1.0, 2.0])
    assert_accurate(case, *decode(implementation, case), tolerance_of(implementation, FP64, FP64))


@every_implementation
@pytest.mark.parametrize("rows, heads, topk", [(1, 8, 640), (5, 17, 300), (2, 3, 2051)])
def test_matches_float64_when_batch_invariant(implementation, rows, heads, topk):
    lengths = [topk, 0, 1, 257, topk - 1][:rows]
    case = make_case(rows=rows, heads=heads, topk=topk, lengths=lengths, batch_invariant=True, sink=[0.3] * heads)
    assert_accurate(case, *decode(implementation, case), 3e-3)


def scale_bytes(layout: str, scales: torch.Tensor):
    """An editor that writes `scales` (one a record) over the fp32 latent scales of every record."""
    record_layout = LAYOUTS[layout]
    offset = record_layout.token_scale_offset or record_layout.scale_offset
    count = 1 if record_layout.token_scale_offset else 512 // record_layout.group_size

    def edit(records: torch.Tensor) -> None:
        values = scales.repeat(-(-len(records) // len(scales)))[: len(records)].unsqueeze(1).repeat(1, count)
        records[:, offset : offset + 4 * count] = values.contiguous().view(torch.uint8)

    return edit


@every_implementation
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_mla_nope", "nvfp4_ds_mla_fp8rope", "nvfp4_mla_nope"])
@pytest.mark.parametrize(
    "scales, softmax_scale",
    [([1.1e-20], 1 / 24), ([0.9e20], 1e-24), ([1.1e-20, 0.9e20, 1.3], 1e-24), ([1e-30, 3.3e-3, 0.7], 1 / 240)],
    ids=["tiny", "huge", "tiny-huge-one", "spread"],
)
def test_matches_float64_at_extreme_record_scales(implementation, layout, scales, softmax_scale):
    edit = scale_bytes(layout, torch.tensor(scales))
    case = make_case(heads=5, topk=130, layout=layout, edit_records=edit, softmax_scale=softmax_scale)
    assert_accurate(case, *decode(implementation, case), 3e-3)


@every_implementation
def test_record_scales_are_not_rounded_to_powers_of_two(implementation):
    exact = torch.tensor([1.0, 1.45, 1.9])
    case = make_case(edit_records=scale_bytes("fp8_ds_mla", exact), softmax_scale=1 / 2400)
    rounded = make_case(edit_records=scale_bytes("fp8_ds_mla", exact.log2().ceil().exp2()), softmax_scale=1 / 2400)
    out, lse = decode(implementation, case)
    assert_accurate(case, out, lse, 3e-3)
    with pytest.raises(AssertionError, match="relative error"):
        assert_accurate(rounded, out, lse, 3e-3)


@every_implementation
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "nvfp4_mla_nope"])
def test_matches_float64_at_large_scores(implementation, layout):
    """Scores of several hundreds: exp overflows fp32 unless the largest score is taken off first."""
    case = make_case(heads=4, topk=200, layout=layout, softmax_scale=6.0, sink=[0.0, 300.0, -300.0, 1e4])
    _, lse = oracle(case)
    assert lse.min() > 200
    assert_accurate(case, *decode(implementation, case), 3e-3)


@every_implementation
def test_lse_is_natural_and_has_the_rows_first(implementation):
    """One slot: the log-sum-exp is the score itself, and the output is the record."""
    case = make_case(rows=3, heads=2, topk=1, dtype=FP32)
    out, lse = decode(implementation, case)
    assert_accurate(case, out, lse, 5e-5)
    assert lse.shape == (3, 2)
    torch.testing.assert_close(out[:, 0], out[:, 1], rtol=1e-5, atol=0)


@every_implementation
@pytest.mark.parametrize("topk", [64, 700])
def test_sink_scales_out_and_leaves_lse(implementation, topk):
    sink = [0.0, 3.0, -torch.inf, torch.inf, -2.5]
    case = make_case(heads=5, topk=topk, lengths=[topk, 0], sink=sink)
    out, lse = decode(implementation, case)
    assert_accurate(case, out, lse, 3e-3)
    plain_out, plain_lse = decode(implementation, dataclasses.replace(case, sink=None))
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out[:, 2], plain_out[:, 2])
    assert torch.equal(out[:, 3], torch.zeros_like(out[:, 3]))


@every_implementation
@pytest.mark.parametrize("topk", [64, 700])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_empty_rows_give_zero_and_minus_infinity(implementation, topk, batch_invariant):
    """Lengths <= 0, and a full length over nothing but absent slots; every split of such a row is empty."""

    def absent(indices: torch.Tensor) -> None:
        indices[2] = -1

    lengths = [0, -7, topk, -(2**31), topk]
    case = make_case(rows=5, topk=topk, lengths=lengths, batch_invariant=batch_invariant, edit_indices=absent)
    out, lse = decode(implementation, case)
    assert torch.equal(out[:4], torch.zeros_like(out[:4]))
    assert torch.equal(lse[:4], torch.full_like(lse[:4], -torch.inf))
    assert_accurate(case, out, lse, 3e-3)


@every_implementation
def test_a_length_beyond_topk_means_topk(implementation):
    case = make_case(topk=100, lengths=[101, 2**31 - 1])
    full = dataclasses.replace(case, lengths=None)
    out, lse = decode(implementation, case)
    assert_accurate(case, out, lse, 3e-3)
    assert_same_bits((out, lse), decode(implementation, full))


@every_implementation
@pytest.mark.parametrize("topk", [70, 520])
def test_absent_slots_may_stand_anywhere(implementation, topk):
    def scatter(indices: torch.Tensor) -> None:
        indices[0, ::3] = -1
        indices[0, 0] = -1
        indices[1, : topk - 1] = -1
        indices[2, 10:40] = -1
        indices[3, 1:] = -1

    case = make_case(rows=4, topk=topk, edit_indices=scatter)
    assert_accurate(case, *decode(implementation, case), 3e-3)


@every_implementation
@pytest.mark.parametrize("value", [-2, -64, -(2**31), 10**6, 2**31 - 1])
def test_indices_beyond_the_cache_count_as_absent(implementation, value):
    def misplace(indices: torch.Tensor) -> None:
        indices[0, [0, 5, 69]] = value
        indices[1, :] = value

    case = make_case(topk=70, edit_indices=misplace)
    assert_accurate(case, *decode(implementation, case), 3e-3)


@every_implementation
def test_the_first_slot_beyond_the_cache_counts_as_absent(implementation):
    case = make_case(topk=8)
    num_slots = case.cache.shape[0] * case.cache.shape[1]
    case.indices[0, 3] = num_slots
    assert_accurate(case, *decode(implementation, case), 3e-3)
    # The last page's tail follows it in memory, so a wrong bound would read poison there.
    assert not torch.isnan(decode(implementation, case)[0]).any()


@every_implementation
def test_repeated_slots_count_each_time(implementation):
    def repeat(indices: torch.Tensor) -> None:
        indices[0, 1:40] = indices[0, 0]
        indices[1, :] = indices[1, 7]

    case = make_case(topk=70, edit_indices=repeat)
    out, lse = decode(implementation, case)
    assert_accurate(case, out, lse, 3e-3)
    once = dataclasses.replace(case, indices=case.indices[:, 7:8].contiguous())
    once_out, once_lse = decode(implementation, with_outputs(once, BF16))
    torch.testing.assert_close(lse[1], once_lse[1] + torch.tensor(70.0).log(), rtol=0, atol=1e-4)
    torch.testing.assert_close(out[1], once_out[1], rtol=2**-7, atol=0)


@every_implementation
@pytest.mark.parametrize("stale", [0, -1, 2**31 - 1, -(2**31), 10**6], ids=lambda value: f"stale{value}")
def test_columns_beyond_the_length_are_not_used(implementation, stale):
    """Slot 0 is poison here (no row selects it), the others are absent or far outside the cache."""
    lengths = [65, 3]

    def age(indices: torch.Tensor) -> None:
        indices[indices == 0] = 1
        for row, length in enumerate(lengths):
            indices[row, length:] = stale

    case = make_case(topk=200, lengths=lengths, edit_indices=age)
    out, lse = decode(implementation, case)
    assert_accurate(case, out, lse, 3e-3)


@every_implementation
def test_static_and_two_level_records_mix_in_one_cache(implementation):
    """A token scale of 0 marks a static 368-byte record: value = e2m1 x e4m3, decided record by record."""
    case, with_scale_one = (
        make_case(
            heads=9,
            topk=150,
            layout="nvfp4_ds_mla_fp8rope",
            dtype=FP32,
            # Group scales relative to a token scale reach 448, so static records are far larger: both must weigh.
            softmax_scale=1 / 24000,
            edit_records=set_some_token_scales(value),
        )
        for value in (0.0, 1.0)
    )
    _, lse = oracle(case)
    assert abs(lse).max() < 100
    out, lse = decode(implementation, case)
    assert_accurate(case, out, lse, tolerance_of(implementation, FP32, FP32))
    assert_same_bits((out, lse), decode(implementation, with_scale_one))


def set_some_token_scales(value: float):
    def edit(records: torch.Tensor) -> None:
        offset = LAYOUTS["nvfp4_ds_mla_fp8rope"].token_scale_offset
        records[::3, offset : offset + 4] = torch.tensor([value]).view(torch.uint8)

    return edit


@every_implementation
@pytest.mark.parametrize("heads, topk, batch_invariant", [(3, 64, False), (16, 300, True), (128, 64, False)])
def test_accepts_no_rows(implementation, heads, topk, batch_invariant):
    case = make_case(rows=0, heads=heads, topk=topk, lengths=[], batch_invariant=batch_invariant)
    out, lse = decode(implementation, case)
    assert out.shape == (0, heads, 512)
    assert lse.shape == (0, heads)


@every_implementation
def test_accepts_an_empty_cache_when_every_slot_is_absent(implementation):
    case = make_case(edit_indices=lambda indices: indices.fill_(-1))
    case = dataclasses.replace(case, cache=case.cache[:0])
    out, lse = decode(implementation, case)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()


@every_implementation
def test_rows_of_one_request_are_rows(implementation):
    """Multi-token prediction: 2 requests of 4 draft rows, each a slot longer than the one before."""
    requests, drafts, context = 2, 4, 60

    def continue_each_request(indices: torch.Tensor) -> None:
        for first in range(0, requests * drafts, drafts):
            indices[first : first + drafts] = indices[first].clone()

    lengths = [context + draft for _ in range(requests) for draft in range(drafts)]
    case = make_case(rows=requests * drafts, topk=context + drafts, lengths=lengths, edit_indices=continue_each_request)
    assert_accurate(case, *decode(implementation, case), 3e-3)


def test_public_function_allocates_what_is_not_given(device):
    case = make_case(lengths=[64, 9], topk=300, sink=[0.1, 0.2, 0.3])
    expected = decode(f"op-{device}", case)
    moved = case.to(device)
    out, lse = torch_sparse_mla.sparse_ckv_decode(
        moved.q,
        moved.cache,
        moved.indices,
        softmax_scale=moved.softmax_scale,
        layout=moved.layout,
        lengths=moved.lengths,
        sink=moved.sink,
    )
    assert (out.dtype, lse.dtype, out.device) == (BF16, FP32, moved.q.device)
    assert_same_bits((out.cpu(), lse.cpu()), expected)


def test_the_oracle_can_fail():
    """The oracle notices each thing that it is there to notice."""
    case = make_case(lengths=[64, 0], sink=[0.0, 1.0, 2.0])
    out, lse = (torch.from_numpy(value) for value in oracle(case))
    assert_accurate(case, out, lse, 1e-12)
    poisoned = out.clone()
    poisoned[0, 1, 5] = torch.nan
    wrong: list[tuple[DecodeCase, torch.Tensor, torch.Tensor]] = [
        (case, out * 1.004, lse),
        (case, poisoned, lse),
        (case, out, lse / torch.tensor(2.0).log()),
        (case, out, lse.nan_to_num(neginf=torch.inf)),
        (dataclasses.replace(case, sink=None), out, lse),
        (dataclasses.replace(case, lengths=case.lengths.flip(0)), out, lse),
    ]
    for changed, given_out, given_lse in wrong:
        with pytest.raises(AssertionError):
            assert_accurate(changed, given_out, given_lse, 3e-3)
