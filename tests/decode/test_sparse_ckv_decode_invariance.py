"""Bits of `sparse_ckv_decode`: the same in every call, whatever other rows hold, and with batch_invariant whatever
their number.
"""

import dataclasses

import pytest
import torch

from torch_sparse_mla.decode.contract import rows_per_launch

from .cases import assert_same_bits, decode, every_implementation, make_case


@every_implementation
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_same_call_gives_the_same_bits(implementation, batch_invariant):
    case = make_case(rows=3, heads=17, topk=600, lengths=[600, 1, 333], batch_invariant=batch_invariant)
    first = decode(implementation, case)
    for _ in range(3):
        assert_same_bits(decode(implementation, case), first)


@every_implementation
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("topk", [64, 600])
def test_a_row_does_not_depend_on_what_other_rows_hold(implementation, topk, batch_invariant):
    case = make_case(rows=4, topk=topk, lengths=[topk] * 4, batch_invariant=batch_invariant)
    out, lse = decode(implementation, case)
    for kept in (0, 2):
        other = dataclasses.replace(
            case, q=case.q.clone(), indices=case.indices.clone(), lengths=torch.tensor([0, 1, 3, topk + 9]).int()
        )
        others = [row for row in range(4) if row != kept]
        other.q[others] = torch.nan
        other.indices[others] = 0
        other.lengths[kept] = topk
        other_out, other_lse = decode(implementation, other)
        assert_same_bits((other_out[kept], other_lse[kept]), (out[kept], lse[kept]))


@every_implementation
def test_a_row_does_not_depend_on_the_number_of_rows(implementation):
    """With batch_invariant: alone, with one other, in a batch, and beyond one launch of 1024 programs."""
    heads, topk = 16, 1300
    few = make_case(rows=3, heads=heads, topk=topk, lengths=[topk, 257, 700], batch_invariant=True)
    expected = decode(implementation, few)
    for rows in (1, 2, 7, 200):
        out, lse = decode(implementation, few.with_rows([row % 3 for row in range(rows)]))
        assert rows < 200 or rows > rows_per_launch(rows, heads, topk, True)
        for row in range(rows):
            assert_same_bits((out[row], lse[row]), (expected[0][row % 3], expected[1][row % 3]))


@every_implementation
def test_equal_rows_give_equal_bits(implementation):
    """Without batch_invariant too, a row's place in the batch does not matter."""
    case = make_case(rows=1, heads=5, topk=500).with_rows([0] * 9)
    out, lse = decode(implementation, case)
    assert_same_bits((out, lse), (out[:1].expand_as(out), lse[:1].expand_as(lse)))
