"""`GatherPolicy`: what is gathered and what is not, each reason counted; and the cost gate."""

import pytest
import torch

from torch_sparse_mla import GatherCosts, GatherPlan, GatherPolicy, PageGeometry, gather_capacity
from torch_sparse_mla.gather.policy import REASONS, gather_bytes, ordinary_bytes

WORLD, INTERLEAVE, PAGE_SIZE = 4, 4, 64
MIB = 2**20


def make_policy(costs: GatherCosts | None = None, **changes) -> GatherPolicy:
    geometry = PageGeometry()
    geometry.freeze(PAGE_SIZE)
    limits = {"max_tokens": 524_288, "max_requests": 4} | changes
    sizes = GatherPlan(
        limits["max_requests"],
        8_192,
        gather_capacity(**limits, world=WORLD, interleave=INTERLEAVE, page_size=PAGE_SIZE),
        WORLD,
        INTERLEAVE,
        PAGE_SIZE,
    )
    return GatherPolicy(geometry, sizes, layout="fp8_mla_nope", heads=64, costs=costs)


def test_a_long_prompt_is_gathered():
    choice = make_policy().choose([32_768], [4_096], num_decode_tokens=0)
    assert choice.gathers and (choice.path, choice.reason) == ("gather", "eligible")
    assert choice.padded == 8_192
    assert choice.gather_bytes == 3 * 8_192 * 528


@pytest.mark.parametrize("tokens, mib", [(32_320, 12.2), (131_072, 49.5), (524_288, 198)])
def test_bytes_of_a_gather_are_the_published_ones(tokens, mib):
    assert gather_bytes(tokens // WORLD, 528, WORLD) / MIB == pytest.approx(mib, rel=5e-3)


def test_bytes_of_ordinary_dcp_are_the_published_ones():
    assert ordinary_bytes(4_096, 64, 512, WORLD) / MIB == pytest.approx(384, rel=5e-3)
    assert ordinary_bytes(1, 64, 576, WORLD) == 3 * 16 * (576 * 2 + 512 * 2 + 4)


def test_by_bytes_the_gather_wins_below_248_tokens_a_row():
    policy = make_policy()
    gathered = {context for context in (247, 248, 250) if _choose(policy, 1_000, context * 1_000).gathers}
    assert gathered == {247, 248}
    dear = _choose(policy, 17, 500_000)
    assert (dear.path, dear.reason) == ("ordinary", "cost")
    assert dear.gather_bytes > 100 * dear.ordinary_bytes


def _choose(policy: GatherPolicy, rows: int, context: int):
    return policy.choose([context], [rows], num_decode_tokens=0)


def test_measured_costs_move_the_gate():
    """A link so slow to answer that one hop less outweighs the bytes; then a memory so slow that copies do."""
    assert not _choose(make_policy(), 17, 500_000).gathers
    assert _choose(make_policy(GatherCosts(us_per_byte=1e-9, hop_us=10.0)), 17, 500_000).gathers
    assert _choose(make_policy(), 4_096, 32_768).gathers
    assert not _choose(make_policy(GatherCosts(1e-6, 0.0, copy_us_per_byte=1e-3)), 4_096, 32_768).gathers


@pytest.mark.parametrize(
    "reason, lengths, new_lengths, options",
    [
        ("capturing", [64], [64], {"num_decode_tokens": 0, "capturing": True}),
        ("decode_tokens", [64], [64], {"num_decode_tokens": 1}),
        ("no_rows", [64], [0], {"num_decode_tokens": 0}),
        ("no_rows", [], [], {"num_decode_tokens": 0}),
        ("requests", [64] * 5, [64] * 5, {"num_decode_tokens": 0}),
        ("rows", [8_193], [8_193], {"num_decode_tokens": 0}),
        ("capacity", [524_289 + 1_024], [8_000], {"num_decode_tokens": 0}),
        ("cost", [500_000], [17], {"num_decode_tokens": 0}),
    ],
)
def test_each_fallback_is_counted_and_named(reason, lengths, new_lengths, options):
    policy = make_policy()
    assert _choose(policy, 64, 64).gathers
    choice = policy.choose(lengths, new_lengths, **options)
    assert (choice.path, choice.reason, choice.gathers) == ("ordinary", reason, False)
    explained = policy.explain()
    assert (explained["path"], explained["why"]) == ("ordinary", REASONS[reason])
    assert {name: count for name, count in explained["counts"].items() if count} == {"eligible": 1, reason: 1}


def test_nothing_is_gathered_before_the_geometry_is_frozen():
    policy = GatherPolicy(PageGeometry(64), None, layout="fp8_mla_nope", heads=64)
    assert policy.explain()["why"] == "no batch yet"
    assert policy.choose([64], [64], num_decode_tokens=0).reason == "provisional_geometry"
    assert policy.explain()["counts"]["provisional_geometry"] == 1


def test_one_rank_moves_nothing_and_gathers():
    geometry = PageGeometry()
    geometry.freeze(64)
    policy = GatherPolicy(geometry, GatherPlan(1, 16, 1024, 1, 1, 64), layout="bf16_mla_nope", heads=5)
    choice = policy.choose([1_000], [1], num_decode_tokens=0)
    assert choice.gathers and choice.gather_bytes == choice.ordinary_bytes == 0


@pytest.mark.parametrize(
    "lengths, new_lengths, argument",
    [
        ([64], [65], "new_lengths"),
        ([64], [-1], "new_lengths"),
        ([64, 3], [64], "new_lengths"),
        ([-1], [-1], "lengths"),
        ([64.5], [1], "lengths"),
        ([64], ["1"], "new_lengths"),
    ],
    ids=str,
)
def test_refuses_lengths_that_cannot_be(lengths, new_lengths, argument):
    policy = make_policy()
    with pytest.raises(ValueError, match=f"GatherPolicy: argument '{argument}'"):
        policy.choose(lengths, new_lengths, num_decode_tokens=0)
    assert not policy.counts


@pytest.mark.parametrize("tokens", [-1, None, 0.5])
def test_refuses_numbers_of_decode_tokens(tokens):
    with pytest.raises(ValueError, match="GatherPolicy: argument 'num_decode_tokens'"):
        make_policy().choose([64], [1], num_decode_tokens=tokens)


def test_lengths_may_be_integers_of_any_kind():
    policy = make_policy()
    expected = policy.choose([64, 9], [1, 2], num_decode_tokens=0)
    choice = policy.choose(torch.tensor([64, 9]), (torch.tensor(1), 2), num_decode_tokens=0)
    assert choice == expected and type(choice.gather_bytes) is int


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", None])
def test_refuses_costs_that_cannot_be(value):
    with pytest.raises(ValueError, match="GatherCosts: argument 'hop_us'"):
        GatherCosts(hop_us=value)


def test_refuses_what_does_not_fit():
    geometry = PageGeometry()
    geometry.freeze(64)
    sizes = GatherPlan(1, 16, 1024, 4, 4, 64)
    for options, named in (({"layout": "x", "heads": 64}, "layout"), ({"layout": "bf16_mla", "heads": 62}, "heads")):
        with pytest.raises(ValueError, match=f"argument '{named}'"):
            GatherPolicy(geometry, sizes, **options)
    with pytest.raises(ValueError, match="argument 'sizes'"):
        GatherPolicy(geometry, None, layout="bf16_mla", heads=64)
