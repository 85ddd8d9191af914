"""The Triton kernels in Triton's interpreter, against the float64 oracle. Run by `tests/test_triton_interpreted.py`.

The interpreter computes bf16 wrongly, so queries are float32 here (float16 once). bf16 queries take the same code with
other operand types; their conversions and the power-of-two units are left to the GPU tests.
"""

import os

import pytest
import torch

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla.decode import contract, triton_kernels

from .cases import DecodeCase, assert_accurate, make_case, with_outputs
from .peer_cases import split_cache

assert os.environ.get("TRITON_INTERPRET") == "1", "needs TRITON_INTERPRET=1 before Triton is imported"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def attend(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    triton_kernels.sparse_ckv_decode(*case.args())
    return case.out, case.lse


def float_case(**settings) -> DecodeCase:
    return make_case(dtype=torch.float32, **settings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_float64(layout):
    case = float_case(rows=2, heads=3, topk=130, layout=layout, lengths=[130, 71], sink=[0.3, -2.0, 4.0])
    assert_accurate(case, *attend(case), 1e-5)


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "nvfp4_ds_mla_fp8rope"])
def test_matches_float64_with_float16_queries(layout):
    case = make_case(rows=1, heads=2, topk=40, layout=layout, dtype=torch.float16, out_dtype=torch.float32)
    assert_accurate(case, *attend(case), 1e-5)


def test_matches_float64_batch_invariant():
    case = float_case(rows=2, heads=2, topk=520, batch_invariant=True, lengths=[520, 257])
    assert_accurate(case, *attend(case), 1e-5)


def test_more_rows_than_one_launch_takes(monkeypatch):
    monkeypatch.setattr(contract, "INVARIANT_PROGRAMS_PER_LAUNCH", 6)
    case = float_case(rows=5, heads=1, topk=600, batch_invariant=True, lengths=[600, 0, 3, 256, 599])
    assert contract.rows_per_launch(5, 1, 600, True) == 2
    assert_accurate(case, *attend(case), 1e-5)


def test_more_heads_than_a_tile():
    case = float_case(rows=1, heads=19, topk=33)
    assert_accurate(case, *attend(case), 1e-5)


def test_without_splits():
    case = float_case(rows=1, heads=2, topk=64, sink=[1.0, -torch.inf])
    assert contract.num_splits(1, 2, 64, False) == 1
    assert_accurate(case, *attend(case), 1e-5)


def test_absent_and_bad_entries_anywhere():
    def edit(indices):
        indices[0, ::3] = -1
        indices[0, 1] = 2**31 - 1
        indices[0, 5] = -(2**31)
        indices[1] = -1
        indices[2, 40:] = 2**30

    case = float_case(rows=4, heads=2, topk=100, lengths=[100, 100, 40, -7], edit_indices=edit)
    out, lse = attend(case)
    assert_accurate(case, out, lse, 1e-5)
    assert (out[[1, 3]] == 0).all() and (lse[[1, 3]] == -torch.inf).all()


def test_scales_far_apart_in_one_row():
    def edit(records):
        scales = records[:, 512:528].view(torch.float32)
        scales[::2] *= 1e-20
        scales[1::2] *= 1e-3

    case = float_case(rows=1, heads=2, topk=64, layout="fp8_mla_nope", edit_records=edit)
    assert_accurate(case, *attend(case), 1e-5)


@pytest.mark.parametrize("owners", [1, 2, 3, 8])
def test_peers_give_the_bits_of_one_cache(owners):
    case = float_case(rows=2, heads=3, topk=130, page_size=16, lengths=[130, 71], sink=[0.3, -2.0, 4.0])
    peers = split_cache(case, owners)
    triton_kernels.sparse_ckv_decode_peers(*peers.args())
    assert_accurate(case, peers.out, peers.lse, 1e-5)
    attend(case)
    assert torch.equal(peers.out, case.out) and torch.equal(peers.lse, case.lse)


@pytest.mark.parametrize("partials", [1, 2, 70])
def test_merge_matches_whole(partials):
    case = float_case(rows=2, heads=3, topk=140, sink=[0.5, -1.0, 2.0])
    parts = [
        with_outputs(
            DecodeCase(
                **{
                    **vars(case),
                    "indices": case.indices[:, start :: max(partials, 2)].contiguous(),
                    "sink": None,
                }
            ),
            torch.float32,
        )
        for start in range(partials)
    ]
    if partials == 1:
        parts[0] = with_outputs(DecodeCase(**{**vars(case), "sink": None}), torch.float32)
    for part in parts:
        attend(part)
    partial_out = torch.stack([part.out for part in parts])
    partial_lse = torch.stack([part.lse for part in parts])
    triton_kernels.merge_partial_attention(partial_out, partial_lse, case.sink, case.out, case.lse)
    assert_accurate(case, case.out, case.lse, 1e-5)


def test_merge_ignores_empty_parts():
    partial_out = torch.full((3, 1, 2, 512), torch.nan)
    partial_lse = torch.full((3, 1, 2), -torch.inf)
    partial_out[1, 0, 0], partial_lse[1, 0, 0] = 1.5, 0.25
    out, lse = torch.full((1, 2, 512), torch.nan), torch.full((1, 2), torch.nan)
    triton_kernels.merge_partial_attention(partial_out, partial_lse, None, out, lse)
    assert (out[0, 0] == 1.5).all() and (out[0, 1] == 0).all()
    assert lse[0].tolist() == [0.25, -torch.inf]
