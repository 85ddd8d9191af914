"""Warm-up, the cost model and what `auto` makes of it, refusals, the life of a rank."""

import dataclasses
import math

import pytest
import torch

from torch_sparse_mla import ExchangeError, LoopbackGroup
from torch_sparse_mla.dcp import DcpSparseDecode, LinkCosts, PeerCaches, run_loopback, union_growth
from torch_sparse_mla.dcp.costs import ASSUMED_UNION_GROWTH, Sizes, predict

from .cases import COSTS, Model, Shape, close, fill_context, layer_steps, make_rank, make_ranks, run_step

SIZES = Sizes(
    world=4, requests=1, rows_per_request=4, heads=16, topk=2048, record_bytes=656, query_bytes=1152,
    partial_bytes=1028, shared_layers=3,
)  # fmt: skip


def us(costs, sizes=SIZES):
    return {row.strategy: row.us_per_layer for row in predict(sizes, costs)}


def test_the_model_by_hand():
    costs = LinkCosts(
        hop_us=4,
        us_per_byte=1e-3,
        attend_local_us=10,
        attend_owner_us=11,
        plan_us=8,
        slots_us=4,
        union_growth=0.5,
        attend_peers_us=12,
        patch_us=6,
    )
    moved = 2048 * 2.5 * 656 * 3 / 4
    merged, read = 3 * 64 * (1152 + 1028), 4 * 2048 * 656 * 3 / 4
    rows = {row.strategy: row for row in predict(SIZES, costs)}
    assert [row.bytes_per_layer for row in rows.values()] == [merged, moved, moved, read]
    assert [row.hops_per_layer for row in rows.values()] == [2, 1, 0.5, 1]
    assert rows["owner_merge"].us_per_layer == pytest.approx(8 + merged * 1e-3 + 11 + 1)
    assert rows["exchange"].us_per_layer == pytest.approx(4 + moved * 1e-3 + 10 + 2)
    assert rows["exchange_bulk"].us_per_layer == pytest.approx((2 * 4 + 4 * moved * 1e-3 + 6) / 4 + 10 + 2)
    assert rows["peer_read"].us_per_layer == pytest.approx(4 + 12 + 1)
    covered = dataclasses.replace(costs, cover_us=1e9)
    assert us(covered)["exchange_bulk"] == pytest.approx((4 + moved * 1e-3 + 6) / 4 + 10 + 2)
    alone = us(costs, dataclasses.replace(SIZES, shared_layers=0))
    assert alone["exchange_bulk"] == alone["exchange"]


def test_owner_merge_takes_the_cheaper_way_to_move():
    costs = LinkCosts(hop_us=4, us_per_byte=1e-3, attend_local_us=10, attend_owner_us=11, slots_us=4)
    for measured, expected in (({"moves_us": 9}, [9]), ({"moves_us": 9, "moves_nccl_us": 7}, [9, 7])):
        rows = [row for row in predict(SIZES, dataclasses.replace(costs, **measured)) if row.strategy == "owner_merge"]
        assert [row.us_per_layer for row in rows] == [us + 11 + 1 for us in expected]
        assert [row.over for row in rows] == ["channel", "nccl"][: len(rows)]


def test_one_rank_moves_nothing():
    alone = dataclasses.replace(SIZES, world=1)
    assert us(COSTS, alone) == {"owner_merge": 12, "exchange": 10, "exchange_bulk": 10, "peer_read": 11}


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        # Slow attention over whole lists; slow hops; neither, where exchange and exchange_bulk take equally long.
        (LinkCosts(hop_us=1, us_per_byte=0, attend_local_us=100, attend_owner_us=10), "owner_merge"),
        (LinkCosts(hop_us=100, us_per_byte=0, attend_local_us=10, attend_owner_us=10), "exchange_bulk"),
        (LinkCosts(hop_us=0, us_per_byte=0, attend_local_us=10, attend_owner_us=20), "exchange"),
        # Attention over peers' caches that costs no more than over one's own.
        (LinkCosts(hop_us=4, us_per_byte=1, attend_local_us=10, attend_owner_us=20, attend_peers_us=10), "peer_read"),
    ],
)
def test_auto_chooses_the_cheapest_on_every_rank(costs, chosen, generator):
    shape = Shape(world=3, topk=32, heads=2, tokens=40)
    ranks = make_ranks(shape, "auto", costs=costs)
    assert [rank.chosen for rank in ranks] == [chosen] * 3
    explained = ranks[1].explain()
    assert explained["strategy"] == chosen and explained["asked"] == "auto"
    known = ["owner_merge", "exchange", "exchange_bulk", *(["peer_read"] if costs.attend_peers_us is not None else [])]
    assert [row["strategy"] for row in explained["table"]] == known
    assert ("peer_read" in explained["not_considered"]) == (costs.attend_peers_us is None)
    cheapest = min(explained["table"], key=lambda row: row["us_per_layer"])
    assert cheapest["strategy"] == chosen and f"{chosen} {cheapest['us_per_layer']:.1f}" in explained["why"]
    model = Model(shape, generator)
    fill_context(model)
    for (out, _), (want, _) in run_step(model, 0, lambda layer, *rest: layer_steps(model, ranks, layer, *rest)):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    close(ranks)


def test_ranks_agree_on_the_highest_figures():
    shape, group = Shape(world=3), LoopbackGroup(3)
    given = [
        LinkCosts(hop_us=rank + 1, us_per_byte=0.1 * (3 - rank), attend_local_us=10, attend_owner_us=10)
        for rank in range(3)
    ]
    ranks = [make_rank(shape, "auto", group.rank(rank), "agree", given[rank]) for rank in range(3)]
    run_loopback([rank.warmup_steps() for rank in ranks])
    for rank in ranks:
        assert rank.costs.hop_us == 3 and rank.costs.us_per_byte == pytest.approx(0.3)
    close(ranks)


def test_warmup_measures_what_is_not_given():
    ranks = make_ranks(Shape(world=2), "auto", costs=None)
    figures = dataclasses.asdict(ranks[0].costs)
    assert ranks[0].costs == ranks[1].costs and ranks[0].chosen == ranks[1].chosen
    for name in ("hop_us", "attend_local_us", "attend_owner_us", "attend_peers_us", "plan_us", "slots_us", "patch_us"):
        assert figures[name] > 0
    assert math.isfinite(figures["cover_us"]) and figures["union_growth"] == ASSUMED_UNION_GROWTH
    # A second warm-up does nothing.
    assert run_loopback([rank.warmup_steps() for rank in ranks]) == [ranks[0].chosen] * 2
    close(ranks)


def test_explain_says_what_auto_would_have_done():
    costs = LinkCosts(hop_us=100, us_per_byte=0, attend_local_us=10, attend_owner_us=10)
    ranks = make_ranks(Shape(), "exchange", costs=costs)
    explained = ranks[0].explain()
    assert explained["why"] == "asked for; auto would choose exchange_bulk"
    assert explained["costs"]["hop_us"] == 100
    assert [channel["transport"] for channel in explained["channels"]] == ["loopback"]
    close(ranks)


def test_what_is_asked_for_needs_no_prediction():
    """Costs of another machine may lack what only peer_read takes."""
    costs = LinkCosts(hop_us=1, us_per_byte=0, attend_local_us=1, attend_owner_us=1)
    ranks = make_ranks(Shape(), "peer_read", costs=costs)
    explained = ranks[0].explain()
    assert explained["strategy"] == "peer_read" and explained["over"] == "channel"
    assert "peer_read" not in [row["strategy"] for row in explained["table"]]
    close(ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "Exchange"}, r"'strategy': got 'Exchange'; allowed: auto, owner_merge, exchange, exchange_bulk"),
        ({"strategy": "replicate"}, r"'strategy': got 'replicate'"),
        ({"layout": "fp8"}, r"'layout': got 'fp8'"),
        ({"heads": 0}, r"'heads': got 0; allowed: an integer from 1 to 128"),
        ({"shared_layers": -1}, r"'shared_layers': got -1"),
        ({"dtype": torch.int8}, r"'dtype': got torch.int8"),
        ({"softmax_scale": 0.0}, r"'softmax_scale'"),
        ({"softmax_scale": None}, r"'softmax_scale': got None"),
        ({"costs": {"hop_us": 1.0}}, r"'costs': got .*; allowed: None or LinkCosts"),
        ({"peers": 3}, r"'peers': got 3; allowed: None or PeerCaches"),
        ({"interleave": 3}, r"page_size, interleave: got 8, 3"),
    ],
)
def test_construction_refuses(options, message):
    options = dict(options)
    strategy = options.pop("strategy", "exchange")
    with pytest.raises(ValueError, match=message):
        make_rank(Shape(world=1), strategy, LoopbackGroup(1).rank(0), "refused", **options)


@pytest.mark.parametrize("figure", [-1.0, float("nan"), float("inf"), "1", None])
def test_costs_must_be_figures(figure):
    with pytest.raises(ValueError, match="'hop_us'"):
        LinkCosts(hop_us=figure, us_per_byte=0, attend_local_us=1, attend_owner_us=1)


def call(model, **changes):
    shape = model.shape
    arguments = {
        "q": model.queries()[:, : shape.heads].contiguous(),
        "cache": model.caches[0][0],
        "topk": torch.zeros(shape.rows, shape.topk, dtype=torch.int32),
        "block_table": model.block_table,
        "lengths": torch.ones(shape.rows, dtype=torch.int32),
    }
    return arguments | changes


def overlapping(argument):
    """Results over what is read."""

    def change(model):
        given = call(model)[argument]
        flat = given.reshape(-1) if argument == "q" else model.caches[0].view(-1)[: 4 * 4 * 512 * 4].view(torch.float32)
        return {argument: given} | {"out": flat[: 4 * 4 * 512].view(4, 4, 512)}

    return change


@pytest.mark.parametrize("strategy", ["owner_merge", "exchange_bulk", "peer_read"])
@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"q": torch.zeros(4, 3, 576)}, "q"),
        ({"q": torch.zeros(4, 576, 4).transpose(1, 2)}, "q"),
        ({"q": torch.zeros(4, 4, 576, requires_grad=True)}, "q"),
        (overlapping("q"), "out"),
        (overlapping("cache"), "out"),
        ({"lengths": torch.ones(8, dtype=torch.int32)[::2]}, "lengths"),
        ({"q": torch.zeros(4, 4, 576, dtype=torch.bfloat16)}, "q"),
        ({"cache": torch.zeros(4, 8, 432, dtype=torch.uint8)}, "cache"),
        ({"cache": torch.zeros(4, 16, 656, dtype=torch.uint8)}, "cache"),
        ({"topk": torch.zeros(6, 12, dtype=torch.int32)}, "topk"),
        ({"topk": torch.zeros(4, 11, dtype=torch.int32)}, "topk"),
        ({"topk": torch.zeros(4, 12, dtype=torch.int64)}, "topk"),
        ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, "block_table"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, "lengths"),
        ({"sink": torch.ones(3)}, "sink"),
        ({"shared_caches": [torch.zeros(1, 8, 640, dtype=torch.uint8)]}, r"shared_caches\[0\]"),
        ({"out": torch.zeros(4, 4, 576)}, "out"),
        ({"out": torch.zeros(4, 4, 512).bfloat16()}, "out"),
        ({"lse": torch.zeros(4, 8)[:, ::2]}, "lse"),
    ],
)
def test_a_call_refuses_before_anything_is_sent(strategy, changes, argument, generator):
    model = Model(Shape(world=1, requests=2), generator)
    ranks = make_ranks(model.shape, strategy)
    before = [channel.state.clone() for channel in ranks[0].channels]
    changes = changes(model) if callable(changes) else changes
    with pytest.raises(ValueError, match=f"DcpSparseDecode: argument '{argument}'"):
        ranks[0].full_steps(**call(model, **changes))
    assert all(torch.equal(old, channel.state) for old, channel in zip(before, ranks[0].channels, strict=True))
    close(ranks)


def test_a_layer_fetched_ahead_needs_its_tokens(generator):
    model = Model(Shape(world=1), generator)
    ranks = make_ranks(model.shape, "exchange_bulk")
    arguments = call(model)
    ranks[0].full(**arguments, shared_caches=list(model.caches[0][1:]))
    with pytest.raises(ValueError, match="'latent': got None"):
        ranks[0].shared(arguments["q"], model.caches[0][1], 0)
    with pytest.raises(ValueError, match="'rope': got None"):
        ranks[0].shared(arguments["q"], model.caches[0][1], 0, latent=torch.zeros(4, 512))
    for latent, found in ((torch.zeros(4, 512).double(), "dtype"), (torch.zeros(4, 1024)[:, ::2], "strides")):
        with pytest.raises(ValueError, match=f"DcpSparseDecode: argument 'latent': got {found}"):
            ranks[0].shared_steps(arguments["q"], model.caches[0][1], 0, latent=latent, rope=torch.zeros(4, 64))
    close(ranks)


def test_order_of_calls(generator):
    model, group = Model(Shape(world=2), generator), LoopbackGroup(2)
    ranks = [make_rank(model.shape, "exchange", group.rank(rank), "order") for rank in range(2)]
    with pytest.raises(RuntimeError, match=r"call warmup\(\) on every rank first"):
        ranks[0].full(**call(model))
    run_loopback([rank.warmup_steps() for rank in ranks])
    # A rank that shares its thread with its peers cannot run to the end alone: an error, not a wait.
    with pytest.raises(ExchangeError, match="rank 1 was last seen on the calling thread and did not start"):
        ranks[0].full(**call(model))
    close(ranks)
    close(ranks)
    assert ranks[0].explain()["strategy"] == "exchange"
    for use in (lambda: ranks[0].full(**call(model)), ranks[0].warmup, ranks[0].fence, lambda: ranks[0].empty_cache(1)):
        with pytest.raises(ValueError, match="which is closed"):
            use()


def test_peer_read_is_refused_where_nobody_could_read():
    with pytest.raises(ValueError, match=r"'strategy': got 'peer_read'; .*reads the caches of at most 8 ranks"):
        make_rank(Shape(world=9), "peer_read", LoopbackGroup(9).rank(0), "nine")
    step = make_rank(Shape(world=9), "exchange", LoopbackGroup(9).rank(0), "nine")
    with pytest.raises(ValueError, match="'empty_cache': got ranks that cannot read one another's memory"):
        step.empty_cache(1)
    with pytest.raises(ValueError, match="PeerCaches: argument 'group'"):
        PeerCaches(LoopbackGroup(9).rank(0))


def test_union_growth_of_real_lists():
    lists = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [5, 6, 7, -1], [5, 6, 7, -1]])
    assert union_growth(lists, 2) == pytest.approx((1 / 4 + 0) / 2)
    assert union_growth(torch.full((4, 3), -1), 4) == 0
    apart = torch.arange(12).view(3, 4)
    assert union_growth(apart, 3) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="allowed: one request or more, of 2 rows or more"):
        union_growth(lists, 1)


def test_union_growth_can_be_given_beside_measured_costs():
    ranks = make_ranks(Shape(world=2), "owner_merge", costs=None, union_growth=0.6)
    assert ranks[0].explain()["costs"]["union_growth"] == 0.6
    close(ranks)
    with pytest.raises(ValueError, match="'union_growth': got -1"):
        make_ranks(Shape(world=1), "owner_merge", costs=None, union_growth=-1)


def test_auto_keeps_away_from_bulk_where_the_flag_is_off(monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_BULK_PREFETCH", "0")
    costs = LinkCosts(hop_us=100, us_per_byte=0, attend_local_us=10, attend_owner_us=10)
    ranks = make_ranks(Shape(world=2), "auto", costs=costs)
    explained = ranks[0].explain()
    assert explained["strategy"] == "exchange"
    assert explained["not_considered"]["exchange_bulk"] == "TORCH_SPARSE_MLA_BULK_PREFETCH=0"
    assert "exchange_bulk" not in explained["why"]
    close(ranks)


@pytest.mark.parametrize("value", ["", "true", "2", " 1"])
def test_the_bulk_flag_is_strict(value, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_BULK_PREFETCH", value)
    with pytest.raises(ValueError, match=f"TORCH_SPARSE_MLA_BULK_PREFETCH: got '{value}'; allowed: 0 or 1"):
        make_ranks(Shape(world=1), "exchange_bulk")


def test_the_bulk_flag_must_be_the_same_on_every_rank(monkeypatch):
    group = LoopbackGroup(2)
    ranks = [make_rank(Shape(world=2), "exchange_bulk", group.rank(rank), "flags") for rank in range(2)]

    def steps(rank: DcpSparseDecode, value: str):
        monkeypatch.setenv("TORCH_SPARSE_MLA_BULK_PREFETCH", value)
        yield from rank.warmup_steps()

    with pytest.raises(ValueError, match=r"BULK_PREFETCH: got \{0: 0, 1: 1\} by rank; allowed: the same"):
        run_loopback([steps(rank, str(number)) for number, rank in enumerate(ranks)])
