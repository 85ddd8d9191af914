"""Checked mode: `TORCH_SPARSE_MLA_CHECK=1` looks at device data and names the first bad row."""

import dataclasses

import pytest
import torch

from .cases import assert_accurate, call, decode, device_of, every_implementation, make_case
from .rejections import assert_untouched, expect_rejection, snapshot


@pytest.fixture(autouse=True)
def checked_mode(monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")


def set_index(row: int, column: int, value: int):
    def edit(indices: torch.Tensor) -> None:
        indices[row, column] = value

    return edit


@every_implementation
@pytest.mark.parametrize("value", [-2, 512, 2**31 - 1, -(2**31)])
def test_names_the_first_bad_index(implementation, value):
    case = make_case(rows=4, topk=200, edit_indices=set_index(2, 17, value)).to(device_of(implementation))
    case.indices[3, 4] = value
    assert case.cache.shape[0] * case.cache.shape[1] == 512
    before = snapshot(case)
    with expect_rejection("sparse_ckv_decode", "indices", "-1 or a slot in 0..511") as error:
        call(implementation, "sparse_ckv_decode", case.args())
    assert f"got {value} in row 2, column 17;" in str(error.value)
    assert_untouched(case, before)


@every_implementation
def test_names_the_first_row_with_a_length_beyond_topk(implementation):
    case = make_case(rows=4, topk=70, lengths=[70, 71, -3, 700]).to(device_of(implementation))
    before = snapshot(case)
    with expect_rejection("sparse_ckv_decode", "lengths", "at most K = 70") as error:
        call(implementation, "sparse_ckv_decode", case.args())
    assert "got 71 in row 1;" in str(error.value)
    assert_untouched(case, before)


@every_implementation
def test_accepts_what_is_absent_or_beyond_the_length(implementation):
    def edit(indices: torch.Tensor) -> None:
        indices[0, 5:] = 10**9
        indices[1, ::2] = -1

    case = make_case(rows=3, topk=70, lengths=[5, 70, -1], edit_indices=edit)
    assert_accurate(case, *decode(implementation, case), 3e-3)


@every_implementation
def test_accepts_no_rows(implementation):
    out, _ = decode(implementation, make_case(rows=0, lengths=[]))
    assert out.shape == (0, 3, 512)


@every_implementation
@pytest.mark.parametrize("value", ["yes", "true", "2", "", " 1"])
def test_rejects_an_unknown_flag_value(implementation, value, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", value)
    case = make_case().to(device_of(implementation))
    before = snapshot(case)
    with pytest.raises(ValueError, match=r"environment variable TORCH_SPARSE_MLA_CHECK: got '.*'; allowed: 0 or 1"):
        call(implementation, "sparse_ckv_decode", case.args())
    assert_untouched(case, before)


@every_implementation
@pytest.mark.parametrize("value", ["0", None])
def test_is_off_by_default(implementation, value, monkeypatch):
    if value is None:
        monkeypatch.delenv("TORCH_SPARSE_MLA_CHECK")
    else:
        monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", value)
    case = make_case(rows=3, topk=70, lengths=[71, 70, 70], edit_indices=set_index(1, 3, 10**6))
    assert_accurate(case, *decode(implementation, case), 3e-3)


@pytest.mark.gpu
def test_refuses_to_read_back_during_capture():
    case = make_case().to("cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="TORCH_SPARSE_MLA_CHECK=1 synchronises"), torch.cuda.graph(graph):
        call("op-cuda", "sparse_ckv_decode", case.args())


def test_fake_tensors_have_no_data_to_check():
    case = make_case(edit_indices=set_index(0, 0, 10**6))
    torch.ops.torch_sparse_mla.sparse_ckv_decode(*dataclasses.replace(case).to("meta").args())
