"""`c4_merge_pools`: lists of any ranks merge to what one rank would select; expansion, tail; what it refuses."""

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies

import torch_sparse_mla
from torch_sparse_mla.indexer import reference

from ..decode.rejections import expect_rejection
from .cases import decoded, device_of, encode, every_form, every_implementation, expand, poisoned, select_case

OP = "c4_merge_pools"
op = torch.ops.torch_sparse_mla.c4_merge_pools.default
ABSENT = -(2**63)


def merged(implementation: str, candidates: torch.Tensor, positions: list[int]) -> tuple[list, list]:
    device = device_of(implementation)
    _, rows, num_pools = candidates.shape
    topk = poisoned((rows, 4 * num_pools + 3), torch.int32, device)
    counts = poisoned((rows,), torch.int32, device)
    function = reference.c4_merge_pools if implementation == "reference" else op
    function(candidates.to(device), torch.tensor(positions, dtype=torch.int32, device=device), topk, counts)
    return topk.tolist(), counts.tolist()


def as_candidates(lists: list[list[list[tuple[float, int]]]], num_pools: int) -> torch.Tensor:
    rows = [[[encode(*pair) for pair in row] + [ABSENT] * (num_pools - len(row)) for row in some] for some in lists]
    return torch.tensor(rows, dtype=torch.int64).view(len(lists), -1, num_pools)


@every_implementation
def test_tokens_ascend_in_a_pool_and_the_tail_comes_behind(implementation):
    candidates = as_candidates([[[(5.0, 7), (2.0, 1)], [(1.0, 0)], []]], 3)
    topk, counts = merged(implementation, candidates, [34, 3, 1])
    assert topk[0] == [28, 29, 30, 31, 4, 5, 6, 7, 32, 33, 34, -1, -1, -1, -1]
    assert topk[1] == [0, 1, 2, 3] + [-1] * 11
    assert topk[2] == [0, 1] + [-1] * 13
    assert counts == [11, 4, 2]


@every_implementation
def test_of_equal_scores_the_earlier_pool_comes_first_whichever_list_it_is_in(implementation):
    lists = [[[(1.0, 5), (0.0, 4)]], [[(1.0, 2), (0.0, 3)]], [[(1.0, 9), (-1.0, 0)]]]
    topk, counts = merged(implementation, as_candidates(lists, 2), [47])
    assert topk == [[8, 9, 10, 11, 20, 21, 22, 23, -1, -1, -1]] and counts == [8]


@every_implementation
def test_a_list_given_twice_leaves_no_entry_unwritten(implementation):
    once = as_candidates([[[(3.0, 6), (1.0, 2)]]], 3)
    topk, counts = merged(implementation, torch.cat([once, once]), [30])
    assert topk == [[24, 25, 26, 27, 24, 25, 26, 27, 8, 9, 10, 11, 28, 29, 30]] and counts == [15]


@strategies.composite
def candidate_lists(draw: strategies.DrawFn):
    """Lists of several ranks: few distinct scores, pools that no other list has, rows of any fill."""
    num_lists, rows, num_pools = (draw(strategies.integers(1, most)) for most in (5, 3, 9))
    lists = [[[] for _ in range(rows)] for _ in range(num_lists)]
    for row in range(rows):
        pools = draw(strategies.permutations(range(40)))
        for number in range(num_lists):
            mine = pools[number * 8 : number * 8 + draw(strategies.integers(0, min(num_pools, 8)))]
            scored = [(float(draw(strategies.sampled_from((-2.5, 0.0, 1.0, 3.0)))), pool) for pool in mine]
            lists[number][row] = sorted(scored, key=lambda pair: (-pair[0], pair[1]))
    return lists, num_pools, [draw(strategies.integers(-1, 200)) for _ in range(rows)]


@every_implementation
@hypothesis.given(given=candidate_lists())
@hypothesis.settings(max_examples=80)
def test_matches_model(implementation, given):
    lists, num_pools, positions = given
    topk, counts = merged(implementation, as_candidates(lists, num_pools), positions)
    for row, position in enumerate(positions):
        expected = expand([some[row] for some in lists], position, num_pools)
        assert (topk[row], counts[row]) == expected


@every_implementation
@every_form
@pytest.mark.parametrize("world, lists", [(1, 3), (2, 1), (3, 2), (4, 1)])
def test_ranks_and_lists_merge_to_what_one_rank_selects(implementation, form, world, lists):
    """The sharded selector is exact, ties included."""
    rows = ((0, 1_638), (0, 1_639), (1, 307), (1, 14), (-1, -1), (0, 2))
    sizes = {"num_pools": 40, "interleave": 4, "page_size": 256}
    one = select_case(form, (410, 77), rows, **sizes)
    whole = as_candidates(one.expected(), 40)
    parts = []
    for rank in range(world):
        case = select_case(form, (410, 77), rows, **sizes, world=world, rank=rank, lists=lists)
        arguments = case.args(device_of(implementation))
        torch.ops.torch_sparse_mla.c4_select(*arguments)
        parts.append(arguments[6].cpu())
    assert decoded(whole) == one.expected()
    positions = [position for _, position in rows]
    assert merged(implementation, torch.cat(parts), positions) == merged(implementation, whole, positions)


@every_implementation
def test_real_widths(implementation):
    """512 pools of four ranks: 2,051 wide."""
    generator = torch.Generator().manual_seed(1)
    lists = []
    for rank in range(4):
        pools = torch.randperm(2_000, generator=generator)[:512].tolist()
        scores = torch.randint(-40, 40, (512,), generator=generator).tolist()
        pairs = [(score / 4, 4 * pool + rank) for score, pool in zip(scores, pools, strict=True)]
        lists.append([sorted(pairs, key=lambda pair: (-pair[0], pair[1])), []])
    topk, counts = merged(implementation, as_candidates(lists, 512), [8_005, 2_000_002])
    assert (topk[0], counts[0]) == expand([some[0] for some in lists], 8_005, 512)
    assert topk[1][:4] == [2_000_000, 2_000_001, 2_000_002, -1] and counts[1] == 3


@every_implementation
def test_last_position_of_int32(implementation):
    last = 2**31 - 1
    topk, counts = merged(implementation, as_candidates([[[(1.0, 2**29 - 1)], [], []]], 1), [last, last - 1, -7])
    assert topk[0] == [last - 3, last - 2, last - 1, last, -1, -1, -1] and counts == [4, 3, 0]
    assert topk[1] == [last - 3, last - 2, last - 1, -1, -1, -1, -1] and topk[2] == [-1] * 7


@every_implementation
def test_no_rows(implementation):
    assert merged(implementation, torch.empty(2, 0, 3, dtype=torch.int64), []) == ([], [])


def test_public_function_allocates(device):
    candidates = as_candidates([[[(5.0, 7), (2.0, 1)]]], 3).to(device)
    positions = torch.tensor([34], dtype=torch.int32, device=device)
    topk, counts = torch_sparse_mla.c4_merge_pools(candidates, positions)
    given = torch.empty_like(topk), torch.empty_like(counts)
    again = torch_sparse_mla.c4_merge_pools(candidates, positions, topk=given[0], counts=given[1])
    assert again[0] is given[0] and torch.equal(given[0], topk) and torch.equal(given[1], counts)
    assert topk.shape == (1, 15) and counts.tolist() == [11]


@dataclasses.dataclass
class Call:
    candidates: torch.Tensor
    positions: torch.Tensor
    topk: torch.Tensor
    counts: torch.Tensor


@every_implementation
@pytest.mark.parametrize(
    "change, argument, allowed",
    [
        ({"candidates": lambda t: t.int()}, "candidates", "dtype int64"),
        ({"candidates": lambda t: t[0]}, "candidates", "shape [lists >= 1, rows, 1 to 512 pools]"),
        ({"candidates": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)}, "candidates", "a contiguous"),
        ({"positions": lambda t: t[:-1]}, "positions", "shape [rows] = [2]"),
        ({"positions": lambda t: t.long()}, "positions", "dtype int32"),
        ({"topk": lambda t: t[:, :-3]}, "topk", "rows, 4 * pools + 3"),
        ({"topk": lambda t: t.long()}, "topk", "dtype int32"),
        ({"counts": lambda t: t[:-1]}, "counts", "shape [rows] = [2]"),
    ],
)
def test_rejects(implementation, change, argument, allowed):
    device = device_of(implementation)
    candidates = as_candidates([[[(5.0, 7)], []]] * 3, 4).to(device)
    positions = torch.tensor([34, 5], dtype=torch.int32, device=device)
    call = Call(candidates, positions, poisoned((2, 19), torch.int32, device), poisoned((2,), torch.int32, device))
    before = call.topk.clone()
    original = call.topk
    for name, function in change.items():
        setattr(call, name, function(getattr(call, name)))
    with expect_rejection(OP, argument, allowed):
        op(call.candidates, call.positions, call.topk, call.counts)
    assert torch.equal(original, before)


def test_rejects_outputs_that_overlap():
    candidates = as_candidates([[[(5.0, 7)], []]], 4)
    inside = candidates.view(torch.int32).flatten()
    positions = torch.tensor([34, 5], dtype=torch.int32)
    with expect_rejection(OP, "counts", "memory of its own"):
        op(candidates, positions, poisoned((2, 19), torch.int32), inside[:2])


def test_opcheck():
    candidates = as_candidates([[[(5.0, 7), (2.0, 1)], []]] * 2, 3)
    positions = torch.tensor([34, 5], dtype=torch.int32)
    torch.library.opcheck(op, (candidates, positions, poisoned((2, 15), torch.int32), poisoned((2,), torch.int32)))
