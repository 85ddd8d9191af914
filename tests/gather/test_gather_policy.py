"""`GatherPolicy`: what is gathered and what is not, each reason counted; and the cost gate."""

import json

import pytest
import torch

from torch_sparse_mla import GatherCosts, GatherPlan, GatherPolicy, PageGeometry, gather_capacity
from torch_sparse_mla.gather.policy import ADMISSION_REASONS, FORM_REASONS, REASONS, gather_bytes, ordinary_bytes

WORLD, INTERLEAVE, PAGE_SIZE = 4, 4, 64
MIB = 2**20


def make_policy(costs: GatherCosts | None = None, records: str = "full", **changes) -> GatherPolicy:
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
    return GatherPolicy(geometry, sizes, layout="fp8_mla_nope", heads=64, costs=costs, records=records)


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


def test_an_incremental_gather_moves_what_is_new():
    """17 rows at 500 K tokens of context: 17 records, where the full gather moves all, and ordinary DCP 17 rows."""
    policy = make_policy(records="incremental")
    choice = policy.choose([500_000], [17], num_decode_tokens=0, resident_lengths=[499_983])
    assert choice.gathers and (choice.records, choice.records_reason) == ("incremental", "resident")
    # Runs of 4 tokens: one rank has 5 of the 17.
    assert choice.padded == 5 and choice.gather_bytes == 3 * 5 * 528
    assert choice.gather_bytes < choice.ordinary_bytes


def test_a_batch_that_is_not_resident_is_gathered_in_full_and_counted():
    policy = make_policy(records="auto")
    choice = policy.choose([32_768], [4_096], num_decode_tokens=0)
    assert choice.gathers and (choice.records, choice.records_reason) == ("full", "not_resident")
    assert policy.choose([32_768], [4_096], num_decode_tokens=0, resident_lengths=[28_672]).records == "incremental"
    assert policy.choose([64], [64], num_decode_tokens=1, resident_lengths=[0]).records_reason is None
    explained = policy.explain()["records"]
    assert explained["flag"] == "auto" and explained["why"] == "no gather considered"
    assert explained["counts"] == {"off": 0, "resident": 1, "not_resident": 1}
    assert set(explained["counts"]) == set(FORM_REASONS)


def test_context_beyond_the_workspace_is_gathered_incrementally_all_the_same():
    """The gathered buffer is transit: it holds what one chunk brings."""
    policy = make_policy(records="incremental", max_tokens=8_192)
    assert policy.choose([131_072], [4_096], num_decode_tokens=0).reason == "capacity"
    choice = policy.choose([131_072], [4_096], num_decode_tokens=0, resident_lengths=[126_976])
    assert choice.gathers and choice.padded == 1_024
    assert policy.choose([131_072], [4_096], num_decode_tokens=0, resident_lengths=[0]).reason == "capacity"


@pytest.mark.parametrize(
    "records, costs, length, rows, cached, reason",
    [
        ("full", None, 32_768, 4_096, 0, "off"),
        ("incremental", None, 64, 64, 0, "asked"),
        ("auto", None, 32_768, 4_096, 0, "pays"),
        ("auto", None, 4_096, 4_096, 0, "does_not_pay"),
        ("auto", None, 4_097, 4_096, 0, "pays"),
        # A prefix hit of which one chunk is left sends the prefix once in either form.
        ("auto", None, 36_864, 4_096, 32_768, "does_not_pay"),
        ("auto", None, 36_865, 4_096, 32_768, "pays"),
        # Copies that cost as much as the link: the records are put in place once more. Of 2 chunks the full form moves
        # (3 + 4) x 1.5 contexts, the incremental one 3 + 8: 10.5 against 11; of 3 chunks (3 + 4) x 2 against 11.
        ("auto", GatherCosts(1.0, 0.0, 1.0), 8_192, 4_096, 0, "does_not_pay"),
        ("auto", GatherCosts(1.0, 0.0, 1.0), 12_288, 4_096, 0, "pays"),
        ("auto", GatherCosts(1.0, 50.0, 0.0), 8_192, 4_096, 0, "pays"),
    ],
)
def test_admission_is_decided_by_the_cost_of_a_prompt(records, costs, length, rows, cached, reason):
    policy = make_policy(costs, records)
    assert policy.admits(length, rows, cached) == (reason in ("asked", "pays"))
    admissions = policy.explain()["records"]["admissions"]
    assert {name: count for name, count in admissions.items() if count} == {reason: 1}
    assert set(admissions) == set(ADMISSION_REASONS)


def test_admission_sums_what_each_chunk_would_cost():
    """Against a sum over chunks: bytes, hops and copies, for prompts that end within a chunk too."""
    costs = GatherCosts(1.0, 100.0, 0.25)
    policy, rate = make_policy(costs, "auto"), (3 + 0.25 * 4, 3 + 0.25 * 8)
    for length, rows, cached in (
        (10_000, 4_096, 0),
        (9_001, 3_000, 512),
        (700, 512, 64),
        (513, 512, 0),
        (600, 512, 500),
    ):
        ends = [*range(cached + rows, length, rows), length]
        full, once = (528 * rate[0] * sum(end / 4 for end in ends), 528 * rate[1] * length / 4)
        assert policy.admits(length, rows, cached) == (once < full), (length, rows, cached)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"resident_lengths": [65]}, "0 to 60, the tokens before the chunk"),
        ({"resident_lengths": [-1]}, "0 to 60"),
        ({"resident_lengths": [1, 2]}, "1 requests, as many as 'lengths'"),
        ({"resident_lengths": [1.5]}, "integers"),
    ],
    ids=str,
)
def test_refuses_resident_lengths_that_cannot_be(given, named):
    policy = make_policy(records="incremental")
    with pytest.raises(ValueError, match=f"GatherPolicy: argument 'resident_lengths'.*{named}"):
        policy.choose([64], [4], num_decode_tokens=0, **given)
    with pytest.raises(ValueError, match="None with records='full'"):
        make_policy().choose([64], [4], num_decode_tokens=0, resident_lengths=[0])
    assert not policy.counts and not policy.form_counts


def test_numbers_of_other_kinds_are_given_back_as_integers():
    policy = make_policy(records="incremental")
    choice = policy.choose(
        torch.tensor([64]), torch.tensor([4]), num_decode_tokens=0, resident_lengths=torch.tensor([8])
    )
    assert type(choice.padded) is type(choice.gather_bytes) is int
    json.dumps(policy.explain())


def test_costs_are_of_their_kind():
    with pytest.raises(ValueError, match=r"argument 'costs': got 5; allowed: None or GatherCosts"):
        make_policy(costs=5)


def test_flags_are_strict():
    for records in ("Full", "", "1", True, None, "incremental "):
        with pytest.raises(ValueError, match=r"argument 'records'.*full, incremental or auto"):
            make_policy(records=records)
    for arguments, named in (
        ((0, 1), "max_length"),
        ((5, 0), "chunk_rows"),
        ((5, 1, 6), "cached"),
        ((5, 1, -1), "cached"),
    ):
        with pytest.raises(ValueError, match=f"argument '{named}'"):
            make_policy(records="auto").admits(*arguments)
