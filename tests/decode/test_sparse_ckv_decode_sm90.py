"""The sm_90 kernels of `sparse_ckv_decode` where they could differ from the others: tile edges, parts, fp16 ranges,
what shared memory holds, replays.

"emulated": the kernels' own sources on the CPU, on any machine. "op-cuda": the operator on the GPU at hand; one that is
no Hopper GPU runs the same cases on the Triton kernel. "-wide": the wide form, with 32 heads more. Emulated, it runs
here with TORCH_SPARSE_MLA_TEST_EMULATED=all alone, which takes minutes: test_sparse_ckv_decode_sm90_wide.py is what
always runs.
"""

import dataclasses
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla.decode.contract import MAX_HEADS

from ..ops.test_registration import run_python
from . import emulated_sm90
from .cases import (
    POISON_BYTE,
    DecodeCase,
    assert_accurate,
    assert_close_to,
    assert_same_bits,
    call,
    decode,
    make_case,
    oracle,
    with_outputs,
)
from .test_graph import Captured
from .test_sparse_ckv_decode_memory import far_case

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


FORMS = {"narrow": emulated_sm90.NARROW, "wide": emulated_sm90.WIDE}
CUDA_FORMS = [pytest.param(f"op-cuda-{form}", marks=pytest.mark.gpu) for form in FORMS]
EMULATED_FORMS = ["emulated-narrow"]
if os.environ.get("TORCH_SPARSE_MLA_TEST_EMULATED") == "all":
    EMULATED_FORMS.append("emulated-wide")


@dataclasses.dataclass(frozen=True)
class Attend:
    """Runs a case: `out` and `lse` on the CPU."""

    run: Callable[[DecodeCase], tuple[torch.Tensor, torch.Tensor]]
    wide: bool

    def __call__(self, case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(case)

    def heads(self, heads: int) -> int:
        """So many, or as many as the wide form takes."""
        return min(heads + 32, MAX_HEADS) if self.wide else heads


@pytest.fixture(params=[*EMULATED_FORMS, *CUDA_FORMS])
def attend(request, monkeypatch):
    return attend_of(request, monkeypatch)


@pytest.fixture(params=CUDA_FORMS)
def attend_cuda(request, monkeypatch):
    return attend_of(request, monkeypatch)


def attend_of(request, monkeypatch) -> Attend:
    where, _, form = request.param.rpartition("-")
    if where == "emulated":
        emulator, run = request.getfixturevalue("emulator"), emulated_sm90.run
        return Attend(lambda case: run(emulator, with_outputs(case, case.out.dtype), FORMS[form]), form == "wide")
    monkeypatch.setenv("TORCH_SPARSE_MLA_NATIVE", form)
    return Attend(lambda case: decode("op-cuda", case), form == "wide")


def holes(indices: torch.Tensor) -> None:
    """Absent, out-of-range and repeated slots at odd places."""
    indices[:, ::7] = -1
    indices[:, 3::11] = torch.iinfo(torch.int32).max
    indices[:, 5::13] = indices[:, 1:2].clone()


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 15, 16, 17, 24, 32, 33, 128])
def test_matches_float64_at_every_head_tile(attend, heads):
    heads = attend.heads(heads)
    case = make_case(rows=2, heads=heads, topk=97, sink=[0.1 * head - 1 for head in range(heads)])
    assert_accurate(case, *attend(case), 3e-3)


@every_layout
@pytest.mark.parametrize("topk", [1, 7, 8, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97, 300])
def test_matches_float64_at_every_token_tile(attend, layout, topk):
    case = make_case(rows=2, heads=attend.heads(3), topk=topk, layout=layout, edit_indices=holes)
    assert_accurate(case, *attend(case), 3e-3)


@every_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matches_float64_at_every_length(attend, layout, dtype):
    if dtype == torch.float16 and LAYOUTS[layout].latent == "bf16":
        dtype = torch.bfloat16  # the Triton kernel's, which has tests of its own
    lengths = [0, 1, 31, 33, 150, -5, 64, 9000]
    settings = {
        "rows": 8,
        "heads": attend.heads(9),
        "topk": 150,
        "layout": layout,
        "dtype": dtype,
        "out_dtype": torch.float32,
    }
    case = make_case(**settings, lengths=lengths, edit_indices=holes)
    assert_accurate(case, *attend(case), 3e-3)


@pytest.mark.parametrize("rows, batch_invariant", [(1, False), (3, False), (2, True)])
def test_long_lists_in_many_parts(attend, rows, batch_invariant):
    lengths = [1100, 700, 0][:rows]
    case = make_case(
        rows=rows,
        heads=attend.heads(3),
        topk=1100,
        lengths=lengths,
        batch_invariant=batch_invariant,
        sink=[0.2] * attend.heads(3),
    )
    assert_accurate(case, *attend(case), 3e-3)


def test_a_part_of_more_tiles_than_memory_holds(attend, sm90_plan):
    """Each place in shared memory holds several tiles, one after another."""
    rows, heads, topk = 67, attend.heads(3), 600
    assert sm90_plan(rows, heads, topk, form=FORMS["wide" if attend.wide else "narrow"])[1] == 1
    case = make_case(rows=rows, heads=heads, topk=topk, lengths=[600, 590] + [0] * (rows - 2), edit_indices=holes)
    assert_accurate(case, *attend(case), 3e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 31, 33, 64, 66, 67, 100, 130, 133, 265])
@pytest.mark.parametrize("heads", [16, 20])
def test_any_number_of_rows(attend_cuda, rows, heads):
    """Every count of parts from 1 up. Row i is row i % 3, so that three rows stand for all."""
    few = make_case(rows=3, heads=attend_cuda.heads(heads), topk=640, lengths=[640, 333, 1])
    case = few.with_rows([row % 3 for row in range(rows)])
    out, lse = attend_cuda(case)
    sample = few.with_rows([row % 3 for row in range(min(rows, 3))])
    assert_accurate(sample, out[:3], lse[:3], 3e-3)
    repeats = -(-rows // 3)
    assert_same_bits((out, lse), (out[:3].repeat(repeats, 1, 1)[:rows], lse[:3].repeat(repeats, 1)[:rows]))


@pytest.mark.parametrize("topk", [16_384, 16_383])
def test_the_longest_lists(attend_cuda, topk):
    case = make_case(rows=2, heads=attend_cuda.heads(2), topk=topk, lengths=[topk, topk - 40])
    assert_accurate(case, *attend_cuda(case), 3e-3)


def write_scales(records: torch.Tensor, layout: str, scales: torch.Tensor) -> None:
    """`scales` [records, 4], one for each 128 latents; the first of them where a layout has one a token."""
    record_layout = LAYOUTS[layout]
    if record_layout.token_scale_offset:
        offset, scales = record_layout.token_scale_offset, scales[:, :1]
    else:
        offset = record_layout.scale_offset
    records[:, offset : offset + 4 * scales.shape[1]] = scales.contiguous().view(torch.uint8)


SCALED = ["fp8_ds_mla", "fp8_mla_nope", "nvfp4_ds_mla_fp8rope", "nvfp4_mla_nope"]


@pytest.mark.parametrize("layout", SCALED)
@pytest.mark.parametrize("low, high", [(-30, -30), (30, 30), (-30, 0), (-8, 8), (-3, 3)])
@pytest.mark.parametrize("topk", [40, 300])
def test_matches_float64_at_any_mix_of_scales(attend, layout, low, high, topk):
    """Scales of every magnitude from 10 ** low to 10 ** high in one row, in every order, none a power of two."""
    generator = torch.Generator().manual_seed(topk)

    def edit(records: torch.Tensor) -> None:
        exponents = low + (high - low) * torch.rand(len(records), 4, generator=generator)
        write_scales(records, layout, 1.37 * 10.0**exponents)

    # RoPE parts keep their magnitude, so that small scales are no reason for a large factor.
    softmax_scale = min(10.0 ** (-high - 4), 0.04)
    case = make_case(
        rows=2, heads=attend.heads(3), topk=topk, layout=layout, edit_records=edit, softmax_scale=softmax_scale
    )
    assert_accurate(case, *attend(case), 3e-3)


@pytest.mark.parametrize("order", [1, -1])
def test_large_scales_at_low_scores_do_not_drown_the_rest(attend, order):
    """Tokens of huge values that weigh nothing beside tokens of ordinary values that weigh all, and the reverse order.

    RoPE parts alone make the scores: 60 nats apart.
    """
    case = make_case(rows=1, heads=attend.heads(5), topk=256, softmax_scale=1.0)
    q = torch.zeros_like(case.q)
    q[..., 512] = 1.0
    slots = case.indices[0].long()
    records = case.cache[slots // 64, slots % 64]
    late = (torch.arange(256) < 128) == (order > 0)
    scales = torch.where(late.unsqueeze(1), 1.3e12, 0.7).expand(-1, 4)
    write_scales(records, "fp8_ds_mla", scales)
    rope = torch.zeros(256, 64, dtype=torch.bfloat16)
    rope[:, 0] = torch.where(late, 0.0, 60.0) + torch.rand(256, generator=torch.Generator().manual_seed(0))
    records[:, 528:] = rope.view(torch.uint8)
    case.cache[slots // 64, slots % 64] = records
    case = dataclasses.replace(case, q=q)
    assert_accurate(case, *attend(case), 3e-3)


@pytest.mark.parametrize("small, large", [(1e-30, 1e30), (1e-20, 1e-3)])
def test_tokens_of_tiny_values_count_when_large_ones_come_late(attend, small, large):
    """All tokens weigh about the same: the large values are divided by the weights of all."""
    # Batch-invariant: one part, of several tiles.
    case = make_case(rows=1, heads=attend.heads(3), topk=256, softmax_scale=1.0, batch_invariant=True)
    q = torch.zeros_like(case.q)
    q[..., 512] = 1.0
    slots = case.indices[0].long()
    records = case.cache[slots // 64, slots % 64]
    scales = torch.where(torch.arange(256) < 192, small, large).unsqueeze(1).expand(-1, 4)
    write_scales(records, "fp8_ds_mla", scales)
    case.cache[slots // 64, slots % 64] = records
    case = dataclasses.replace(case, q=q)
    assert_accurate(case, *attend(case), 3e-3)


@every_layout
@pytest.mark.parametrize("magnitudes", [(1e-30, 1e30), (1e-12, 1.0, 1e12), (3e4, 1e-4)], ids=str)
def test_heads_of_any_magnitude_side_by_side(attend, layout, magnitudes):
    """Each head's scores are small or ordinary; none may lose its precision to a neighbour."""
    heads = attend.heads(12)
    case = make_case(rows=2, heads=heads, topk=130, layout=layout)
    factors = torch.tensor([magnitudes[head % len(magnitudes)] for head in range(heads)])
    q = (case.q.float() * factors.unsqueeze(1)).to(case.q.dtype)
    case = dataclasses.replace(case, q=q, softmax_scale=case.softmax_scale / max(magnitudes))
    assert_accurate(case, *attend(case), 3e-3)


def test_query_elements_of_any_magnitude_in_one_head(attend):
    case = make_case(rows=2, heads=attend.heads(4), topk=130)
    factors = 10.0 ** torch.linspace(-6, 3, 576)
    q = (case.q.float() * factors).to(case.q.dtype)
    case = dataclasses.replace(case, q=q, softmax_scale=case.softmax_scale * 1e-2)
    assert_accurate(case, *attend(case), 3e-3)


@every_layout
def test_what_an_earlier_kernel_left_in_shared_memory_is_not_used(attend_cuda, layout):
    """Every multiprocessor is filled with NaN records first; then most slots are absent."""
    poison = make_case(rows=264, heads=attend_cuda.heads(1), topk=320, layout=layout).to("cuda")
    poison.cache.fill_(POISON_BYTE)

    def few(indices: torch.Tensor) -> None:
        indices[:, 2:] = -1
        indices[1, :] = -1

    case = make_case(rows=3, heads=attend_cuda.heads(4), topk=320, layout=layout, edit_indices=few)
    moved = case.to("cuda")
    call("op-cuda", "sparse_ckv_decode", poison.args())
    assert poison.out.isnan().all()
    call("op-cuda", "sparse_ckv_decode", moved.args())
    assert_accurate(case, moved.out.cpu(), moved.lse.cpu(), 3e-3)


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16_mla"])
@pytest.mark.parametrize("topk", [40, 700])
def test_nan_in_a_selected_record_shows_in_its_row_alone(attend, layout, topk):
    case = make_case(rows=3, heads=attend.heads(2), topk=topk, layout=layout)
    slot = min(set(case.indices[1].tolist()) - set(case.indices[0].tolist()) - set(case.indices[2].tolist()))
    case.cache[slot // 64, slot % 64] = POISON_BYTE
    out, lse = attend(case)
    assert out[1].isnan().all() and lse[1].isnan().all()
    others = case.with_rows([0, 2])
    assert_accurate(others, out[[0, 2]], lse[[0, 2]], 3e-3)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.04, 1e-42])
def test_scales_of_the_softmax_that_the_native_kernels_leave_to_triton(attend_cuda, softmax_scale):
    heads = attend_cuda.heads(3)
    case = make_case(rows=2, heads=heads, topk=130, softmax_scale=softmax_scale, edit_indices=holes)
    assert_accurate(case, *attend_cuda(case), 3e-3)


def test_scores_of_every_size_rise_and_fall_along_the_list(attend):
    """The running maximum is raised late, early, often and never."""
    case = make_case(rows=4, heads=attend.heads(3), topk=512, softmax_scale=1.0)
    q = torch.zeros_like(case.q)
    q[..., 512] = 1.0
    ramps = [torch.linspace(-300, 300, 512), torch.linspace(300, -300, 512), torch.zeros(512), torch.arange(512) % 40.0]
    for row, ramp in enumerate(ramps):
        slots = case.indices[row].long()
        rope = torch.zeros(512, 64, dtype=torch.bfloat16)
        rope[:, 0] = ramp
        case.cache[slots // 64, slots % 64, 528:] = rope.view(torch.uint8)
        one = dataclasses.replace(case.with_rows([row]), q=q[row : row + 1])
        assert_accurate(one, *attend(one), 3e-3)


SHAPE = {"rows": 5, "topk": 2051, "lengths": [2051, 700, 1, 0, 2050]}


def test_a_thousand_replays_give_the_same_bits(attend_cuda):
    captured = Captured(make_case(**SHAPE, heads=attend_cuda.heads(16)))
    expected = captured.eager()
    assert_accurate(captured.case.to("cpu"), *expected, 3e-3)
    for _ in range(100):
        captured.poison()
        for _ in range(10):
            captured.graph.replay()
        assert_same_bits((captured.case.out.cpu(), captured.case.lse.cpu()), expected)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_replays_see_other_lengths(attend_cuda, batch_invariant):
    heads = attend_cuda.heads(16)
    captured = Captured(
        make_case(**{**SHAPE, "lengths": [1, 0, 2, 3, 1]}, heads=heads, batch_invariant=batch_invariant)
    )
    full = make_case(**SHAPE, heads=heads, batch_invariant=batch_invariant)
    captured.set(q=full.q, lengths=full.lengths, indices=full.indices, cache=full.cache)
    replayed = captured.replay()
    assert_accurate(full, *replayed, 3e-3)
    assert_same_bits(replayed, captured.eager())


def test_addresses_beyond_32_bits_on_the_gpu(attend_cuda):
    case, near = far_case("cuda", 2**32, 64 * 656, 64, attend_cuda.heads(3))
    call("op-cuda", "sparse_ckv_decode", case.args())
    assert_close_to(case.out.cpu(), case.lse.cpu(), *oracle(near), 3e-3)


def test_seventy_thousand_rows_on_the_gpu(attend_cuda):
    """More rows than a grid's second or third dimension allows. Row i is row i % 7."""
    few = make_case(rows=7, heads=attend_cuda.heads(1), topk=80, lengths=[80, 1, 0, 49, 48, 79, 30])
    many = few.to("cuda").with_rows([row % 7 for row in range(70_000)])
    call("op-cuda", "sparse_ckv_decode", many.args())
    assert_accurate(few, many.out[:7].cpu(), many.lse[:7].cpu(), 3e-3)
    for results in (many.out, many.lse):
        assert bool((results.view(10_000, 7, *results.shape[1:]) == results[:7]).all())


def test_two_streams_with_workspaces_of_their_own(attend_cuda):
    cases = [make_case(**SHAPE, heads=attend_cuda.heads(16), seed=seed).to("cuda") for seed in (1, 2)]
    expected = [attend_cuda(case.to("cpu")) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(50):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                call("op-cuda", "sparse_ckv_decode", case.args())
    torch.cuda.synchronize()
    for case, bits in zip(cases, expected, strict=True):
        assert_same_bits((case.out.cpu(), case.lse.cpu()), bits)


def test_calls_one_after_another_share_a_workspace(attend_cuda):
    """The second call's prologue overlaps the first call's end, but not its use of the workspace."""
    cases = [make_case(**SHAPE, heads=attend_cuda.heads(16), seed=seed).to("cuda") for seed in range(4)]
    expected = [attend_cuda(case.to("cpu")) for case in cases]
    shared = cases[0].workspace
    cases = [dataclasses.replace(case, workspace=shared) for case in cases]
    for _ in range(20):
        for case in cases:
            case.out.fill_(torch.nan)
        for case in cases:
            call("op-cuda", "sparse_ckv_decode", case.args())
        for case, bits in zip(cases, expected, strict=True):
            assert_same_bits((case.out.cpu(), case.lse.cpu()), bits)


def test_inputs_written_just_before_are_seen(attend_cuda):
    """Queries, lists and records come from kernels that are still running when the call is made."""
    case = make_case(**SHAPE, heads=attend_cuda.heads(16))
    moved = case.to("cuda")
    final = moved.q.clone(), moved.indices.clone(), moved.cache.clone()
    expected = attend_cuda(case)
    for _ in range(20):
        moved.q.fill_(torch.nan)
        moved.indices.fill_(-1)
        moved.cache.fill_(POISON_BYTE)
        moved.q.copy_(final[0])
        moved.indices.copy_(final[1])
        moved.cache.copy_(final[2])
        call("op-cuda", "sparse_ckv_decode", moved.args())
        moved.q.fill_(0)  # written after the call: it must not see this
        assert_same_bits((moved.out.cpu(), moved.lse.cpu()), expected)


def test_many_rows_with_long_lists(attend_cuda):
    """As in prefill: hundreds of rows of 2,051, more than the GPU holds at a time."""
    few = make_case(rows=4, heads=attend_cuda.heads(16), topk=2051, lengths=[2051, 2048, 31, 0])
    case = few.with_rows([row % 4 for row in range(700)])
    out, lse = attend_cuda(case)
    assert_accurate(few, out[:4], lse[:4], 3e-3)
    assert_same_bits((out, lse), (out[:4].repeat(175, 1, 1), lse[:4].repeat(175, 1)))


def test_equals_the_portable_kernel_to_rounding(attend_cuda):
    """Two kernels written apart agree where both are far more accurate than the output's rounding."""
    heads = attend_cuda.heads(32)
    case = make_case(rows=6, heads=heads, topk=1000, lengths=[1000, 999, 500, 32, 1, 0], out_dtype=torch.float32)
    native, portable = attend_cuda(case), decode("triton-cuda", with_outputs(case, torch.float32))
    expected, _ = oracle(case)
    limit = 1e-3 * np.linalg.norm(expected)
    assert np.linalg.norm(native[0].double().numpy() - portable[0].double().numpy()) <= limit
    torch.testing.assert_close(native[1], portable[1], rtol=1e-5, atol=1e-4)


def strided(case: DecodeCase, shift: int) -> DecodeCase:
    """Queries whose rows start `shift` elements off an aligned address."""
    rows, heads, dim = case.q.shape
    storage = torch.zeros(rows * (heads * dim + 8) + shift, dtype=case.q.dtype)
    view = storage.as_strided(case.q.shape, (heads * dim + 8, dim, 1), storage_offset=shift)
    return dataclasses.replace(case, q=view.copy_(case.q))


@every_layout
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_queries_at_any_alignment_give_the_same_bits(attend, layout, shift):
    case = make_case(rows=2, heads=attend.heads(5), topk=40, layout=layout)
    assert_same_bits(attend(strided(case, shift)), attend(case))


def with_misaligned_out(case: DecodeCase) -> DecodeCase:
    storage = torch.full((case.out.numel() + 1,), torch.nan, dtype=case.out.dtype, device=case.out.device)
    return dataclasses.replace(case, out=storage[1:].view(case.out.shape))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_misaligned_outputs_are_left_to_triton(emulator, form):
    case = with_misaligned_out(make_case(rows=1, heads=33, topk=20))
    with pytest.raises(RuntimeError, match="an output that is not aligned to 16 bytes"):
        emulated_sm90.run(emulator, case, form)


def test_misaligned_outputs_are_written(attend_cuda):
    case = make_case(rows=3, heads=attend_cuda.heads(5), topk=200)
    moved = with_misaligned_out(case.to("cuda"))
    call("op-cuda", "sparse_ckv_decode", moved.args())
    assert_accurate(case, moved.out.cpu(), moved.lse.cpu(), 3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "form"), [(2, "narrow"), (64, "wide")])
def test_a_call_runs_in_the_form_that_the_model_chooses(monkeypatch, rows, form):
    case = make_case(rows=rows, heads=64, topk=2048, edit_indices=holes)
    monkeypatch.delenv("TORCH_SPARSE_MLA_NATIVE", raising=False)
    chosen = decode("op-cuda", case)
    monkeypatch.setenv("TORCH_SPARSE_MLA_NATIVE", form)
    assert_same_bits(chosen, decode("op-cuda", case))


FIRST_CALL_CAPTURED = """
import torch, torch_sparse_mla
from tests.decode.cases import assert_accurate, call, make_case
torch_sparse_mla.warmup_sparse_ckv_decode(64, "fp8_ds_mla")
case = make_case(rows=64, heads=64, topk=2048)
moved = case.to("cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    call("op-cuda", "sparse_ckv_decode", moved.args())
graph.replay()
assert_accurate(case, moved.out.cpu(), moved.lse.cpu(), 3e-3)
"""


@pytest.mark.gpu
def test_the_first_call_in_a_form_may_be_captured():
    """Once warmed up, with kernels that no call has run yet."""
    result = run_python(FIRST_CALL_CAPTURED, CUDA_MODULE_LOADING="LAZY")
    assert result.returncode == 0, result.stderr
