"""The Triton kernels in Triton's interpreter, against the models. Run by `tests/test_triton_interpreted.py`.

Programs run one after another and their lanes in step, so what barriers are for does not show here. The interpreter
multiplies bfloat16 wrongly: the exact form in bfloat16 is selected from on a GPU only, by the same code as float32.
"""

import dataclasses
import os

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from torch_sparse_mla.indexer import triton_kernels, triton_kernels_select

from ..decode.rejections import expect_rejection
from .cases import decoded, encode, every_form, expand, orders_case, poisoned, select_case, write_case

assert os.environ.get("TRITON_INTERPRET") == "1", "needs TRITON_INTERPRET=1 before Triton is imported"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ABSENT = -(2**63)


@every_form
@pytest.mark.parametrize("world, rank", [(1, 0), (3, 1)])
def test_write_matches_the_definition(form, world, rank):
    case = write_case(form, (90, 6, 0), world=world, rank=rank, interleave=8, gap=64)
    for parts in ([(0, 70), (0, 1), (0, 0)], [(70, 71), (1, 6), (0, 0)], [(71, 90), (6, 6), (0, 0)]):
        triton_kernels.c4_write_index_keys(*case.args(parts))
    case.assert_pools([90, 6, 0])


@pytest.mark.parametrize("accepted", [1, 3, 6])
def test_write_after_rejected_drafts(accepted):
    case = write_case("fp32", (40,), slots=8, seed=accepted)
    triton_kernels.c4_write_index_keys(*case.args([(0, 10)]))
    keys = case.keys[0].clone()
    case.keys[0][10 + accepted :] = 99.0
    triton_kernels.c4_write_index_keys(*case.args([(10, 16)], drafts=5))
    case.keys[0] = keys
    triton_kernels.c4_write_index_keys(*case.args([(10 + accepted, 40)], drafts=5))
    case.assert_pools([40])


def test_write_skips_padded_requests_and_missing_pages():
    case = write_case("fp32", (20, 300))
    before = case.pools.clone()
    case.block_table[1, 1:] = -1
    triton_kernels.c4_write_index_keys(*case.args([(0, 20), (0, 300)], ring_rows=[-1, 1]))
    touched = {int(page) for page in (case.pools != before).flatten(1).any(1).nonzero()}
    assert touched == {int(case.block_table[1, 0])}
    assert torch.equal(case.ring[0], poisoned(tuple(case.ring[0].shape), torch.float32))


def test_write_of_positions_beyond_int32():
    """Requests of one program and of several; what they would write lies before the ring, in the guard."""
    case = write_case("fp32", (20, 20, 300), slots=8)
    guarded = poisoned((6, 8, 2, 128), torch.float32)
    case.ring = guarded[2:]
    before = guarded.clone()
    for start in (2**31 - 1, 2**31 - 20, -5):
        arguments = case.args([(0, 20), (0, 20), (0, 300)], ring_rows=[0, 1, -1])
        arguments[4][:2] = start
        triton_kernels.c4_write_index_keys(*arguments)
    assert torch.equal(guarded.view(torch.int32), before.view(torch.int32))
    # As many tokens as there is room for, beside a request of several programs.
    arguments = case.args([(0, 20), (0, 20), (0, 300)])
    arguments[4][:2] = 2**31 - 21
    triton_kernels.c4_write_index_keys(*arguments)
    expected = torch.stack([case.keys[0][12:], case.gates[0][12:]], 1).roll((2**31 - 9) % 8, 0)
    assert torch.equal(case.ring[0], expected)
    assert torch.equal(guarded[:2].view(torch.int32), before[:2].view(torch.int32))


@pytest.mark.parametrize("form", ["serving", "fp32"])
@pytest.mark.parametrize("world, lists, num_pools", [(1, 1, 16), (2, 2, 40)])
def test_select_matches_model(form, world, lists, num_pools):
    rows = ((0, 799), (0, 600), (1, 13), (-1, -1))
    sizes = {"num_pools": num_pools, "world": world, "rank": world - 1, "lists": lists, "page_size": 256}
    case = select_case(form, (200, 20), rows, **sizes)
    arguments = case.args(gap=64)
    triton_kernels_select.c4_select(*arguments)
    assert decoded(arguments[6]) == case.expected()


def rows_together(monkeypatch, count):
    form = triton_kernels_select.select_form
    monkeypatch.setattr(triton_kernels_select, "select_form", lambda *sizes: form(*sizes) | {"ROWS": count})


def not_native(function):
    """The form of a GPU that multiplies e4m3, but for the multiplication, which the interpreter lacks."""
    return lambda *arguments: function(*arguments) | {"NATIVE": False}


def test_select_of_rows_that_share_a_program(monkeypatch, numpy_sort):
    monkeypatch.setattr(triton_kernels_select, "MANY_ROWS", 2)
    rows = ((0, 599), (1, 200), (-1, -1), (2, 70), (0, 30))
    case = select_case("serving", (150, 60, 20), rows, heads=32)
    arguments = case.args()
    monkeypatch.setattr(triton_kernels_select, "capability_of", lambda device: 90)
    monkeypatch.setattr(triton_kernels_select, "select_form", not_native(triton_kernels_select.select_form))
    assert triton_kernels_select.select_form(torch.uint8, len(rows), 1, 32, 16, 90)["ROWS"] > 2
    triton_kernels_select.c4_select(*arguments)
    assert decoded(arguments[6]) == case.expected()


@pytest.fixture
def numpy_sort(monkeypatch):
    """In place of Triton's own sort, which the tests above run, and which takes the interpreter seconds."""

    def descending(values, descending):
        return tl.core.tensor(TensorHandle(np.sort(values.handle.data)[::-1].copy(), values.dtype), values.type)

    monkeypatch.setattr(tl, "sort", descending)


@pytest.mark.parametrize(
    "order, pools, num_pools, missing",
    [
        ("rising", 900, 1, 1),
        ("rising", 448, 16, 0),
        ("rising", 449, 16, 0),
        ("shuffled", 900, 100, 2),
        ("tied", 960, 100, 0),
        ("rising", 2_700, 512, 1),
    ],
)
def test_select_of_any_order_of_scores(order, pools, num_pools, missing, monkeypatch, numpy_sort):
    """What is kept overflows again and again, in rows that share a program."""
    rows_together(monkeypatch, 4)
    case = orders_case("serving", order, pools, num_pools, first=3 * missing)
    arguments = case.args()
    arguments[3][0, 1 : 1 + missing] = -1
    triton_kernels_select.c4_select(*arguments)
    assert decoded(arguments[6]) == case.expected(range(64, 64 + 64 * missing))


def test_scores_do_not_depend_on_the_rows_of_a_program(monkeypatch, numpy_sort):
    """Bit for bit, with sums that are rounded. Products are exact, since numpy adds them in another order for each."""
    case = select_case("fp32", (20,), ((0, 79),) * 5, heads=16, num_pools=20)
    case = dataclasses.replace(case, weights=torch.randn(5, 16, generator=torch.Generator().manual_seed(1)))
    results = []
    for together in (1, 2, 4, 8):
        rows_together(monkeypatch, together)
        arguments = case.args()
        triton_kernels_select.c4_select(*arguments)
        results.append(arguments[6])
        assert torch.equal(results[0], results[-1]), together


def test_select_ends_whatever_lies_in_the_workspace(monkeypatch, numpy_sort):
    """As when another call writes there: candidates that are not distinct leave no threshold to be found."""
    keep_best, calls = triton_kernels_select._keep_best, []

    def counted(*arguments):
        calls.append(arguments)
        assert len(calls) < 20, "no progress"
        return keep_best(*arguments)

    monkeypatch.setattr(triton_kernels_select, "_candidates", lambda ordered, pool: (pool * 0 + 7).to(tl.int64))
    monkeypatch.setattr(triton_kernels_select, "_keep_best", counted)
    arguments = select_case("serving", (900,), ((0, 3_599),)).args()
    triton_kernels_select.c4_select(*arguments)
    assert len(calls) >= 2 and (arguments[6] == 7).all()


def test_select_of_a_key_that_is_no_number():
    case = select_case("fp32", (6,), ((0, 23),))
    arguments = case.args()
    arguments[2][case.block_table[0, 0], 2] = float("nan")
    triton_kernels_select.c4_select(*arguments)
    assert decoded(arguments[6])[0][0][-1] == (float("-inf"), 2)


def test_select_sees_no_missing_page(numpy_sort):
    case = select_case("fp32", (200,), ((0, 799),), num_pools=200)
    arguments = case.args()
    arguments[3][0, 1] = 10_000
    triton_kernels_select.c4_select(*arguments)
    found = {pool for _, pool in decoded(arguments[6])[0][0]}
    assert found == set(range(64)) | set(range(128, 200))


@pytest.mark.parametrize("num_lists, num_pools", [(1, 1), (2, 5), (4, 16)])
def test_merge_matches_model(num_lists, num_pools):
    generator = torch.Generator().manual_seed(num_pools)
    positions = [203, 2**31 - 1, -1, 4]
    lists = []
    for number in range(num_lists):
        lists.append([])
        for row in range(len(positions)):
            pools = (torch.randperm(50, generator=generator) * num_lists + number)[: (row * 7) % (num_pools + 1)]
            scores = torch.randint(-2, 3, (len(pools),), generator=generator)
            pairs = zip(scores.float().tolist(), pools.tolist(), strict=True)
            lists[-1].append(sorted(pairs, key=lambda pair: (-pair[0], pair[1])))
    rows = [[[encode(*p) for p in row] + [ABSENT] * (num_pools - len(row)) for row in some] for some in lists]
    topk, counts = poisoned((4, 4 * num_pools + 3), torch.int32), poisoned((4,), torch.int32)
    given = torch.tensor(positions, dtype=torch.int32)
    triton_kernels.c4_merge_pools(torch.tensor(rows), given, topk, counts)
    for row, position in enumerate(positions):
        assert (topk[row].tolist(), counts[row].item()) == expand([some[row] for some in lists], position, num_pools)


def test_merge_of_a_list_given_twice():
    once = torch.tensor([[[encode(3.0, 6), encode(1.0, 2), ABSENT]]])
    topk, counts = poisoned((1, 15), torch.int32), poisoned((1,), torch.int32)
    triton_kernels.c4_merge_pools(torch.cat([once, once]), torch.tensor([30], dtype=torch.int32), topk, counts)
    assert topk[0].tolist() == [24, 25, 26, 27, 24, 25, 26, 27, 8, 9, 10, 11, 28, 29, 30]


def test_merge_fills_wide_rows(monkeypatch):
    monkeypatch.setattr(triton_kernels, "MERGE_BLOCK", 16)
    rows = torch.full((2, 1, 20), ABSENT)
    rows[1, 0, :3] = torch.tensor([encode(1.0, pool) for pool in (4, 6, 9)])
    topk, counts = poisoned((1, 83), torch.int32), poisoned((1,), torch.int32)
    triton_kernels.c4_merge_pools(rows, torch.tensor([41], dtype=torch.int32), topk, counts)
    assert (topk[0].tolist(), counts[0].item()) == expand([[(1.0, 4), (1.0, 6), (1.0, 9)]], 41, 20)


def test_bad_arguments_are_refused_before_the_launch():
    arguments = list(select_case().args())
    with expect_rejection("c4_select", "rank", "0 <= rank"):
        triton_kernels_select.c4_select(*arguments[:10], 1, 1)
    with expect_rejection("c4_merge_pools", "topk", "4 * pools"):
        triton_kernels.c4_merge_pools(arguments[6], arguments[5], arguments[5].view(1, -1), arguments[5])
    with expect_rejection("c4_write_index_keys", "drafts", "0 or more"):
        triton_kernels.c4_write_index_keys(*write_case("fp32", (4,)).args([(0, 4)], drafts=-1))
