"""`SplitSelector`, `RowSplit`: rows split by rank select what the merge of all ranks' candidates does, bit for bit."""

import dataclasses
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies

from torch_sparse_mla import (
    GatherCosts,
    GatherPlan,
    GatherPolicy,
    LoopbackGroup,
    PageGeometry,
    RowSplit,
    SplitSelector,
    c4_merge_pools,
    c4_select,
)
from torch_sparse_mla.gather.policy import SELECT_REASONS
from torch_sparse_mla.indexer.pools import pools_of_lists, ranked_candidates

from ..decode.rejections import expect_rejection
from .cases import FORMS, POISON, SelectCase, every_form, select_case

_names = itertools.count()
ROWS = ((0, 1_638), (0, 1_639), (1, 307), (1, 14), (-1, -1), (0, 2), (1, 308))


def make_selectors(split: RowSplit, heads: int, device: str = "cpu") -> list[SplitSelector]:
    """Every byte that nothing has written yet is poison."""
    group, name = LoopbackGroup(split.world, device), f"split{next(_names)}"
    selectors = [
        SplitSelector(group.rank(rank), split, heads=heads, name=name, device=device) for rank in range(split.world)
    ]
    for selector in selectors:
        for buffer in (selector._pages, selector._own, selector._numbers, selector._candidates, selector._workspace):
            buffer.fill_(POISON)
    return selectors


def split_of(case: SelectCase, lists: int = 1) -> RowSplit:
    return RowSplit(
        len(case.keys),
        len(case.positions),
        # Each request may have a tail.
        sum(4 * len(keys) + 3 for keys in case.keys),
        case.num_pools,
        case.world,
        case.interleave,
        case.page_size,
        FORMS[case.form],
        lists,
    )


def cases_of(world: int, form: str, pools: tuple, rows: tuple, **sizes: int) -> list[SelectCase]:
    return [select_case(form, pools, rows, world=world, rank=rank, **sizes) for rank in range(world)]


def merged(cases: list[SelectCase], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The other form: each rank selects of its own pools for all rows, and all candidates are merged."""
    candidates = []
    for case in cases:
        q, weights, pools, table, requests, positions, *_ = case.args(device)
        geometry = {"page_size": case.page_size, "interleave": case.interleave, "rank": case.rank, "world": case.world}
        candidates.append(
            c4_select(q, weights, pools, table, requests, positions, num_pools=case.num_pools, **geometry)
        )
    return c4_merge_pools(torch.cat(candidates), positions)


def run(selectors: list[SplitSelector], cases: list[SelectCase], device: str = "cpu", gap: int = 0) -> list[tuple]:
    """One layer on every rank of this thread, after a plan of its chunk."""
    arguments = [case.args(device, gap) for case in cases]
    lengths = [4 * len(keys) + request % 4 for request, keys in enumerate(cases[0].keys)]
    new = [len(cases[0].positions)] + [0] * (len(lengths) - 1)
    for selector, given in zip(selectors, arguments, strict=True):
        selector.plan(lengths, new, given[3])
        selector.send_keys(given[2])
    for selector, (q, weights, _, _, requests, positions, *_) in zip(selectors, arguments, strict=True):
        selector.select(q, weights, requests, positions)
    return [selector.receive() for selector in selectors]


def assert_same(results: list[tuple], expected: tuple) -> None:
    for rank, (topk, counts) in enumerate(results):
        assert torch.equal(topk, expected[0]) and torch.equal(counts, expected[1]), f"rank {rank}"


def close(selectors: list[SplitSelector]) -> None:
    for selector in selectors:
        for channel in selector._channels:
            channel.check()
        selector.close()
        selector.close()


@every_form
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_selects_what_the_merge_of_all_ranks_does(form, world, device):
    cases = cases_of(world, form, (410, 77), ROWS, num_pools=40)
    selectors = make_selectors(split_of(cases[0]), 16, device)
    expected = merged(cases, device)
    assert_same(run(selectors, cases, device, gap=48), expected)
    # And that is what one rank selects, ties included.
    assert_same([expected], merged(cases_of(1, form, (410, 77), ROWS, num_pools=40), device))
    close(selectors)


@strategies.composite
def split_cases(draw: strategies.DrawFn) -> list[SelectCase]:
    """Requests without pools, rows of any request or of none, pages of several index pages."""

    def number(least: int, most: int) -> int:
        return draw(strategies.integers(least, most))

    pools = tuple(number(0, 90) for _ in range(number(1, 3)))
    hypothesis.assume(any(pools))
    rows = [(number(-1, len(pools) - 1), number(-1, 4 * max(pools) + 2)) for _ in range(number(1, 7))]
    rows = tuple((request, min(position, 4 * pools[request] + 2) if request >= 0 else -1) for request, position in rows)
    world = draw(strategies.sampled_from((1, 2, 3, 4, 8)))
    sizes = {
        "num_pools": draw(strategies.sampled_from((1, 4, 16, 33))),
        "page_size": 256 * number(1, 3),
        "interleave": draw(strategies.sampled_from((4, 8, 16, 64, 256))),
        "seed": number(0, 9),
    }
    return cases_of(world, "serving", pools, rows, **sizes)


@hypothesis.given(cases=split_cases(), lists=strategies.integers(1, 3))
@hypothesis.settings(max_examples=15, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_any_split_selects_what_the_merge_does(cases, lists):
    selectors = make_selectors(split_of(cases[0], lists), 16)
    assert_same(run(selectors, cases), merged(cases, "cpu"))
    close(selectors)


def test_layer_after_layer_and_chunk_after_chunk(device):
    """Smaller after larger: nothing of an earlier chunk is read. Fewer rows than ranks: some ranks have none."""
    split = RowSplit(3, 16, 2_000, 8, 4, 4, 512)
    selectors = make_selectors(split, 16, device)
    chunks = [((300, 60), ROWS), ((310, 100), ROWS[:3]), ((7,), ((0, 29),)), ((0, 3), ((1, 12), (0, 1), (1, 2)))]
    for seed, (pools, rows) in enumerate(chunks):
        rows = tuple((request, min(position, 4 * pools[request] + 2)) for request, position in rows)
        cases = cases_of(4, "serving", pools, rows, num_pools=8, page_size=512, seed=seed)
        assert_same(run(selectors, cases, device), merged(cases, device))
        # Another layer of the same chunk: other keys, the same plan.
        other = cases_of(4, "serving", pools, rows, num_pools=8, page_size=512, seed=seed + 50)
        other = [dataclasses.replace(case, block_table=cases[0].block_table) for case in other]
        arguments = [case.args(device) for case in other]
        for selector, given in zip(selectors, arguments, strict=True):
            selector.send_keys(given[2])
        for selector, given in zip(selectors, arguments, strict=True):
            selector.select(*given[:2], *given[4:6])
        assert_same([selector.receive() for selector in selectors], merged(other, device))
    close(selectors)


def test_a_chunk_without_rows_or_requests(device):
    selectors = make_selectors(RowSplit(2, 8, 512, 4, 2, 4, 256), 16, device)
    table, none = torch.zeros(0, 1, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    for selector in selectors:
        selector.plan([], [], table)
        selector.send_keys(torch.zeros(1, 8_448, dtype=torch.uint8, device=device))
    for selector in selectors:
        q = torch.zeros(0, 16, 128, dtype=torch.uint8, device=device)
        selector.select(q, torch.zeros(0, 16, device=device), none, none)
    for selector in selectors:
        topk, counts = selector.receive()
        assert topk.shape == (0, 19) and counts.shape == (0,)
    close(selectors)


@hypothesis.given(
    rows=strategies.lists(strategies.lists(strategies.integers(0, 2**29 - 1), unique=True, max_size=6), max_size=4),
    tail=strategies.integers(0, 3),
)
@hypothesis.settings(max_examples=40)
def test_pool_numbers_hold_all_that_a_list_does(rows, tail):
    pools = torch.tensor([row + [-1] * (6 - len(row)) for row in rows], dtype=torch.int32).view(-1, 6)
    positions = torch.full((len(rows),), 2**31 - 5 + tail, dtype=torch.int32)
    topk, counts = c4_merge_pools(ranked_candidates(pools).unsqueeze(0), positions)
    assert torch.equal(pools_of_lists(topk, counts), pools)
    for row, listed in zip(rows, topk.tolist(), strict=True):
        assert listed[: 4 * len(row)] == [4 * pool + slot for pool in row for slot in range(4)]


def test_bytes_are_those_of_the_page():
    """33 bytes a token: 3.1 MiB of 131,072 tokens and 12.4 of 524,288, against 48 MiB of candidates of 4,096 rows."""
    split = RowSplit(1, 4_096, 524_288, 512, 4, 4, 2_304)
    lists = 3 * 1_024 * 2_048
    for tokens, mib in ((32_320, 0.8), (131_072, 3.1), (524_288, 12.4)):
        keys = split.gathered_bytes([tokens], 4_096) // 4 * 3 - lists
        # A slice is padded to a page of 9 index pages.
        assert 0 <= keys - 3 * 33 * tokens // 4 <= 3 * 9 * 8_448
        assert (3 * 33 * tokens / 4) / 2**20 == pytest.approx(mib, abs=0.06)
    assert split.candidate_bytes(4_096) // 4 * 3 == 48 * 2**20
    assert lists == 6 * 2**20


def test_reserved_bytes_are_what_is_kept():
    split = RowSplit(2, 10, 1_000, 8, 2, 4, 512, lists=3)
    (first, second) = make_selectors(split, 16)
    kept = [first._pages, first._own, first._numbers, first._candidates, first._workspace, first._row_table]
    assert split.reserved_bytes("cpu") == sum(buffer.nbytes for buffer in kept + first._plans)
    # Two slabs of what is gathered, as on a GPU.
    assert split.reserved_bytes() - split.reserved_bytes("cpu") == 2 * (first._pages.nbytes + first._numbers.nbytes)
    close([first, second])


def test_calls_out_of_order_are_refused():
    cases = cases_of(1, "serving", (30,), ((0, 50), (0, 119)), num_pools=4)
    (selector,) = make_selectors(split_of(cases[0]), 16)
    q, weights, pools, table, requests, positions, *_ = cases[0].args()
    calls = {
        "send_keys": lambda: selector.send_keys(pools),
        "select": lambda: selector.select(q, weights, requests, positions),
        "receive": lambda: selector.receive(),
        "plan": lambda: selector.plan([120], [2], table),
    }

    def only(*allowed: str) -> None:
        for name in calls.keys() - set(allowed):
            with pytest.raises(RuntimeError, match=rf"{name}\(\) out of order; call {allowed[0]}\(\)"):
                calls[name]()

    only("plan")
    calls["plan"]()
    only("send_keys", "plan")
    for name, following in (("send_keys", ("select",)), ("select", ("receive",)), ("receive", ("send_keys", "plan"))):
        calls[name]()
        only(*following)
    selector.close()
    for call in calls.values():
        with pytest.raises(RuntimeError, match="closed; make a new one"):
            call()


def test_refuses_what_does_not_fit():
    cases = cases_of(1, "serving", (30,), ((0, 50), (0, 119)), num_pools=4)
    (selector,) = make_selectors(split_of(cases[0]), 16)
    q, weights, pools, table, requests, positions, *_ = cases[0].args()
    with expect_rejection("SplitSelector", "new_lengths", "at most the reserved 2"):
        selector.plan([120], [3], table)
    for lengths, new, argument, allowed in (
        ([120], [1, 1], "new_lengths", "1 requests, as many as 'lengths'"),
        ([-4], [1], "lengths", "0 or more"),
        ([120, 120], [3, -1], "new_lengths", "integers, 0 or more"),
    ):
        with expect_rejection("SplitSelector", argument, allowed):
            selector.plan(lengths, new, table)
    with pytest.raises(ValueError, match="argument 'lengths'"):
        selector.plan([2_000], [2], table)
    with pytest.raises(ValueError, match=r"argument 'lengths'.*at most the reserved 1"):
        selector.plan([20, 20], [1, 1], table.expand(2, -1))
    selector.plan([120], [2], table)
    with expect_rejection("SplitSelector", "pools", "dtype uint8"):
        selector.send_keys(torch.zeros(1, 64, 128))
    with expect_rejection("SplitSelector", "pools", "shape [pages, 8448]"):
        selector.send_keys(pools[:, :-1])
    selector.send_keys(pools)
    with expect_rejection("SplitSelector", "q", "2, the rows of the plan"):
        selector.select(q[:1], weights, requests, positions)
    with expect_rejection("SplitSelector", "positions", "2, the rows of the plan"):
        selector.select(q, weights, requests, positions[:1])
    # What is refused after the keys have come may be called again.
    with expect_rejection("c4_select", "weights", "dtype float32"):
        selector.select(q, weights.double(), requests, positions)
    selector.select(q, weights, requests, positions)
    with expect_rejection("c4_merge_pools", "topk", "rows, 4 * pools + 3"):
        selector.receive(torch.zeros(2, 5, dtype=torch.int32))
    assert_same([selector.receive()], merged(cases, "cpu"))
    selector.close()
    with expect_rejection("SplitSelector", "split", "those of the group's 2 ranks"):
        SplitSelector(LoopbackGroup(2).rank(0), split_of(cases[0]), heads=16)
    # One that cannot be made leaves no channel open.
    group = LoopbackGroup(1)
    with expect_rejection("c4_select", "q", "16 or 32 or 64 heads"):
        SplitSelector(group.rank(0), split_of(cases[0]), heads=3, name="again")
    SplitSelector(group.rank(0), split_of(cases[0]), heads=16, name="again").close()


@pytest.mark.parametrize(
    "change, allowed",
    [
        ({"requests": 0}, "an integer from 1"),
        ({"rows": 1.5}, "an integer from 1"),
        ({"num_pools": 513}, "an integer from 1 to 512"),
        ({"page_size": 128}, "a multiple of 256 tokens"),
        ({"interleave": 2}, "a multiple of 4 that divides 256"),
        ({"interleave": 12}, "a multiple of 4 that divides 256"),
        ({"lists": 0}, "an integer from 1"),
        ({"dtype": torch.float16}, "uint8, float32 or bfloat16"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(change, allowed):
    (argument,) = change
    with expect_rejection("RowSplit", argument, allowed):
        dataclasses.replace(RowSplit(2, 8, 512, 4, 2, 4, 256), **change)


def make_policy(select: str = "auto", costs: GatherCosts | None = None, **changes: int) -> GatherPolicy:
    geometry = PageGeometry()
    geometry.freeze(2_304)
    split = RowSplit(**{"requests": 4, "rows": 8_192, "max_tokens": 2**21, "num_pools": 512} | changes, **GEOMETRY)
    sizes = GatherPlan(4, 8_192, 2_304, 4, 4, 2_304)
    return GatherPolicy(geometry, sizes, layout="fp8_mla_nope", heads=64, costs=costs, select=select, split=split)


GEOMETRY = {"world": 4, "interleave": 4, "page_size": 2_304}


def test_by_bytes_splitting_rows_pays_up_to_434_tokens_a_row():
    """(W - 1) x 4,096 bytes of candidates a row, against 33 bytes a token and 2,048 a row from (W - 1) / W of both."""
    policy = make_policy()
    for context, splits in ((8_192, True), (400 * 4_096, True), (440 * 4_096, False)):
        choice = policy.choose_select([context], [4_096], num_decode_tokens=0)
        assert (choice.splits, choice.reason) == (splits, "eligible" if splits else "cost"), context
        assert choice.merge_bytes == 48 * 2**20 and (choice.rows_bytes < choice.merge_bytes) == splits
    assert make_policy("rows").choose_select([440 * 4_096], [4_096], num_decode_tokens=0).splits
    assert not make_policy(costs=GatherCosts(1e-5, 1e6)).choose_select([8_192], [4_096], num_decode_tokens=0).splits


@pytest.mark.parametrize(
    "reason, lengths, new, options",
    [
        ("capturing", [64], [64], {"num_decode_tokens": 0, "capturing": True}),
        ("decode_tokens", [64], [64], {"num_decode_tokens": 1}),
        ("no_rows", [64], [0], {"num_decode_tokens": 0}),
        ("requests", [64] * 5, [64] * 5, {"num_decode_tokens": 0}),
        ("rows", [8_193], [8_193], {"num_decode_tokens": 0}),
        ("capacity", [2**21 + 2**17], [8_000], {"num_decode_tokens": 0}),
        ("cost", [500_000], [17], {"num_decode_tokens": 0}),
    ],
)
def test_each_fallback_is_counted_and_named(reason, lengths, new, options):
    policy = make_policy()
    assert policy.choose_select([4_096], [4_096], num_decode_tokens=0).splits
    choice = policy.choose_select(lengths, new, **options)
    assert (choice.path, choice.reason) == ("merge", reason)
    explained = policy.explain()["select"]
    assert explained["flag"] == "auto" and explained["why"] == SELECT_REASONS[reason]
    assert {name: count for name, count in explained["counts"].items() if count} == {"eligible": 1, reason: 1}


def test_without_the_flag_candidates_are_merged():
    geometry = PageGeometry()
    policy = GatherPolicy(geometry, None, layout="bf16_mla", heads=64)
    assert policy.choose_select([64], [64], num_decode_tokens=0).reason == "off"
    split = RowSplit(4, 64, 512, 8, **GEOMETRY)
    late = GatherPolicy(geometry, None, layout="bf16_mla", heads=64, select="rows", split=split)
    assert late.choose_select([64], [64], num_decode_tokens=0).reason == "provisional_geometry"


@pytest.mark.parametrize("select", ["Rows", "", "1", True, None])
def test_flags_are_strict(select):
    with expect_rejection("GatherPolicy", "select", "merge, rows or auto"):
        make_policy(select)


@pytest.mark.parametrize(
    "select, split", [("rows", None), ("auto", None), ("merge", RowSplit(4, 64, 512, 8, **GEOMETRY))]
)
def test_sizes_come_with_the_flag(select, split):
    with expect_rejection("GatherPolicy", "split", "the sizes of a SplitSelector"):
        GatherPolicy(PageGeometry(), None, layout="bf16_mla", heads=64, select=select, split=split)


@pytest.mark.parametrize("split", [5, RowSplit(4, 64, 512, 8, 2, 4, 2_304)], ids=["a-number", "of-two-ranks"])
def test_sizes_are_those_of_as_many_ranks(split):
    geometry = PageGeometry()
    geometry.freeze(2_304)
    sizes = GatherPlan(4, 8_192, 2_304, 4, 4, 2_304)
    with expect_rejection("GatherPolicy", "split", "RowSplit of 4 ranks, those of sizes"):
        GatherPolicy(geometry, sizes, layout="bf16_mla", heads=64, select="rows", split=split)
