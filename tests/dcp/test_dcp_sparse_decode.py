"""Every strategy against attention over the unsharded cache."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla.dcp import run_loopback, strategies
from torch_sparse_mla.dcp.steps import finish

from .cases import (
    Model,
    Shape,
    close,
    fill_context,
    layer_steps,
    make_ranks,
    rank_steps,
    run_step,
    select,
    step_lengths,
)

STRATEGIES = ("owner_merge", "exchange", "exchange_bulk", "peer_read")
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def check(model, ranks, steps=3, topk=None, fetched=None):
    def run_layer(layer, *arguments):
        return layer_steps(model, ranks, layer, *arguments, fetched=fetched)

    for step in range(steps):
        for layer, ((out, lse), (want, want_lse)) in enumerate(run_step(model, step, run_layer, topk=topk)):
            where = f"step {step}, layer {layer}"
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5, msg=lambda text, where=where: f"{where} {text}")
            torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


@every_strategy
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_match_the_unsharded_cache(strategy, world, generator, device):
    model = Model(Shape(world=world), generator, device)
    fill_context(model)
    ranks = make_ranks(model.shape, strategy, device=device)
    check(model, ranks)
    close(ranks)


@every_strategy
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fp8_ds_mla"])
def test_every_layout(strategy, layout, generator):
    model = Model(Shape(world=2, layout=layout, shared_layers=1), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, strategy)
    check(model, ranks, steps=2)
    close(ranks)


@every_strategy
def test_many_rows_few_requests_and_owners_of_nothing(strategy, generator):
    """Three rows of one request, and an interleave that leaves the last rank without a record."""
    shape = Shape(world=4, requests=1, rows_per_request=3, page_size=16, interleave=16, tokens=40, topk=40)
    model = Model(shape, generator)
    fill_context(model)
    ranks = make_ranks(shape, strategy)
    topk = torch.arange(40, dtype=torch.int32).repeat(3, 1)
    assert max(step_lengths(shape, 2)) <= 48
    check(model, ranks, topk=topk)
    close(ranks)


@every_strategy
def test_a_page_that_the_cache_lacks_is_absent(strategy, generator):
    """One rank, whose block table means the same as the unsharded cache's."""
    model = Model(Shape(world=1), generator)
    fill_context(model)
    model.block_table[0, 0] = len(model.whole[0]) + 3
    ranks = make_ranks(model.shape, strategy)
    check(model, ranks, steps=2)
    close(ranks)


@pytest.mark.parametrize("smaller", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_a_page_that_one_layer_lacks_is_absent_in_that_layer(strategy, smaller, generator):
    """One plan serves a Full layer and its Shared layers, whose caches need not have as many pages."""
    model = Model(Shape(world=1), generator)
    table, last = model.block_table, len(model.whole[0]) - 1
    table[table == last], table[0, 0] = int(table[0, 0]), last
    fill_context(model)
    for caches in (model.whole, *model.caches):
        assert caches[smaller, last].any()
    layers = range(len(model.whole))
    model.whole, *model.caches = (
        [caches[layer][: last + (layer != smaller)] for layer in layers] for caches in (model.whole, *model.caches)
    )
    ranks = make_ranks(model.shape, strategy)
    check(model, ranks, steps=2)
    close(ranks)


@every_strategy
def test_nothing_selected_gives_zeros(strategy, generator):
    model = Model(Shape(), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, strategy)

    def run_layer(layer, *arguments):
        return layer_steps(model, ranks, layer, *arguments)

    nothing = torch.full((model.shape.rows, model.shape.topk), -1, dtype=torch.int32)
    for (out, lse), _ in run_step(model, 0, run_layer, topk=nothing):
        assert not out.any() and (lse == -torch.inf).all()
    check(model, ranks, steps=2)
    close(ranks)


@every_strategy
def test_fewer_requests_and_rows_than_reserved(strategy, generator):
    small = Shape(world=2, requests=1, rows_per_request=1)
    model = Model(small, generator)
    fill_context(model)
    ranks = make_ranks(small, strategy, requests=3, rows_per_request=2)
    check(model, ranks, steps=2)
    close(ranks)


@pytest.mark.parametrize("fetched", [0, 1])
def test_bulk_exchanges_what_was_not_fetched_ahead(fetched, generator):
    model = Model(Shape(), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "exchange_bulk")
    check(model, ranks, fetched=fetched)
    # Each step: the Full layer, what is fetched ahead, and one exchange for each layer that is not; warm-up: 2.
    assert ranks[0].channels[0].state[1] == 2 + 3 * (1 + fetched + 2 - fetched)
    alone = ranks[0].explain()["bulk"]["exchanged_alone"]
    assert alone == {"group not full: its cache was not among shared_caches": 3 * (2 - fetched)}
    close(ranks)


def test_bulk_makes_two_exchanges_a_step(generator):
    model = Model(Shape(shared_layers=3), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "exchange_bulk")
    check(model, ranks, steps=3)
    assert ranks[0].channels[0].state[:2].tolist() == [2 * 4] * 2
    close(ranks)


def test_bulk_skipped_shared_layers_do_not_spoil_the_next_step(generator):
    model = Model(Shape(), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "exchange_bulk")

    def only_full(layer, *arguments):
        return layer_steps(model, ranks, layer, *arguments) if layer == 0 else None

    run_step(model, 0, only_full)
    for step in (1, 2):
        pairs = run_step(model, step, lambda layer, *rest: layer_steps(model, ranks, layer, *rest))
        for (out, _), (want, _) in pairs:
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    close(ranks)


def test_bulk_needs_the_patch_of_current_tokens(generator, monkeypatch):
    """The comparison above would notice a missing patch."""
    model = Model(Shape(), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "exchange_bulk")
    monkeypatch.setattr(strategies, "write_ckv_records", lambda *arguments: None)
    with pytest.raises(AssertionError, match="layer 1"):
        check(model, ranks)
    close(ranks)


@every_strategy
def test_a_sink_takes_part_once(strategy, generator):
    shape = Shape(world=2)
    model = Model(shape, generator)
    fill_context(model)
    ranks = make_ranks(shape, strategy)
    lengths = step_lengths(shape, 0)
    topk = torch.randint(0, int(lengths.min()) - 1, (shape.rows, shape.topk), generator=generator).int()
    q, sink = model.queries(), torch.randn(shape.world * shape.heads, generator=generator)
    heads = [slice(rank * shape.heads, (rank + 1) * shape.heads) for rank in range(shape.world)]
    results = run_loopback(
        [
            rank.full_steps(
                q[:, own].contiguous(), caches[0], topk, model.block_table, lengths, sink=sink[own].contiguous()
            )
            for rank, caches, own in zip(ranks, model.caches, heads, strict=True)
        ]
    )
    want, want_lse = model.unsharded(0, q, topk, lengths, sink)
    torch.testing.assert_close(torch.cat([out for out, _ in results], 1), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([lse for _, lse in results], 1), want_lse, rtol=1e-4, atol=1e-4)
    close(ranks)


@every_strategy
def test_a_broken_shard_shows(strategy, generator):
    model = Model(Shape(), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, strategy)
    model.caches[1].zero_()
    with pytest.raises(AssertionError, match="not close"):
        check(model, ranks, steps=1)
    close(ranks)


@every_strategy
def test_ranks_on_threads_of_their_own(strategy, generator):
    """The combined calls, as processes make them; warm-up in turns."""
    shape = Shape(world=3)
    model = Model(shape, generator)
    fill_context(model)
    ranks = make_ranks(shape, strategy, timeout_s=20.0)

    def run_layer(layer, *arguments):
        with ThreadPoolExecutor(shape.world) as threads:
            results = threads.map(lambda rank: finish(rank_steps(model, rank, layer, *arguments)), ranks)
            return tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))

    for (out, lse), (want, want_lse) in run_step(model, 0, run_layer):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    close(ranks)


def test_bulk_counts_layers_beyond_its_room(generator):
    model = Model(Shape(shared_layers=3), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "exchange_bulk", shared_layers=2)
    check(model, ranks, steps=2)
    bulk = ranks[0].explain()["bulk"]
    assert bulk["fetches_ahead"] == 2
    assert bulk["exchanged_alone"] == {"capacity: the channel has room for 2 layers (shared_layers)": 2}
    close(ranks)


def test_bulk_exchanges_everything_alone_where_the_flag_is_off(generator, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_BULK_PREFETCH", "0")
    model = Model(Shape(), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "exchange_bulk")
    check(model, ranks, steps=2)
    # Warm-up counts as well: a step of three layers.
    assert ranks[0].explain()["bulk"] == {
        "flag": "TORCH_SPARSE_MLA_BULK_PREFETCH=0",
        "fetches_ahead": 0,
        "exchanged_alone": {"TORCH_SPARSE_MLA_BULK_PREFETCH=0": 2 * 3},
    }
    close(ranks)


@pytest.mark.parametrize(("other", "alone"), [(0, 4), (1, 2)])
def test_bulk_exchanges_another_geometry_alone(other, alone, generator):
    """One of the Shared layers' caches has more pages: it goes by itself, and so does what comes after it."""
    model = Model(Shape(), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "exchange_bulk")

    def wider(caches):
        grown = list(caches)
        grown[1 + other] = torch.cat([caches[1 + other], torch.zeros_like(caches[0][:1])])
        return grown

    def run_layer(layer, *arguments):
        whole = model.caches
        model.caches = [wider(caches) for caches in whole]
        try:
            return layer_steps(model, ranks, layer, *arguments)
        finally:
            model.caches = whole

    for step in range(2):
        for (out, _), (want, _) in run_step(model, step, run_layer):
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    counted = ranks[0].explain()["bulk"]["exchanged_alone"]
    assert sum(counted.values()) == alone
    assert counted["geometry: its cache has other pages or strides than the Full layer's"] == 2
    close(ranks)


@every_strategy
def test_results_go_where_they_are_wanted(strategy, generator, device):
    model = Model(Shape(world=1), generator, device)
    fill_context(model)
    ranks = make_ranks(model.shape, strategy, device=device)
    lengths = step_lengths(model.shape, 0)
    model.write(0, lengths.view(model.shape.requests, -1) - 1)
    topk, q = select(model.shape, lengths, generator), model.queries()
    out = torch.full((model.shape.rows, 4, 512), torch.nan, device=device)
    lse = torch.full((model.shape.rows, 4), torch.nan, device=device)
    given = [tensor.to(device) for tensor in (topk, model.block_table, lengths)]
    results = ranks[0].full(q, model.caches[0][0], *given, out=out, lse=lse)
    assert results[0] is out and results[1] is lse
    want, want_lse = model.unsharded(0, q, topk, lengths)
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    out.fill_(torch.nan)
    assert ranks[0].shared(q, model.caches[0][0], 3, out=out, lse=lse)[0] is out
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)
    close(ranks)


@pytest.mark.parametrize("heads", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_partials_travel_once_whatever_the_heads(heads, dtype, generator):
    """Numbers of heads whose log-sum-exps are no whole vectors; and what a peer receives is counted."""
    shape = Shape(world=3, heads=heads, layout="bf16_mla", shared_layers=0)
    model = Model(shape, generator)
    fill_context(model)
    ranks = make_ranks(shape, "owner_merge", dtype=dtype)

    def run_layer(layer, q, *arguments):
        return layer_steps(model, ranks, layer, q.to(dtype), *arguments)

    for (out, lse), (want, want_lse) in run_step(model, 0, run_layer):
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.float(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse, want_lse, rtol=tolerance, atol=tolerance)
    partials = ranks[0].strategy.partials
    part = shape.rows * heads * (512 * dtype.itemsize + 4)
    *_, sent = partials.channel.transport.slabs[1][int(partials.channel.state[0]) % 2]
    assert [records.numel() for records in sent] == [-(-part // 16) * 16] * 3
    close(ranks)


def test_peer_read_reads_slices_of_caches_made_for_it(generator):
    """One allocation holds all layers; each rank gives its slices, and no cache is shown to the others."""
    shape = Shape()
    model = Model(shape, generator)
    ranks = make_ranks(shape, "peer_read")
    layers, pages = model.caches[0].shape[:2]
    whole = [rank.empty_cache(layers * pages) for rank in ranks]
    model.caches = [cache.view(layers, pages, *cache.shape[1:]) for cache in whole]
    fill_context(model)
    for rank in ranks:
        rank.strategy._show = lambda cache: []
    check(model, ranks, steps=2)
    # A cache of another allocation is not known.
    for rank in ranks:
        # What was shown in an earlier call is not taken for this one's.
        rank.strategy._show = lambda cache: [(0, cache)] * shape.world
    with pytest.raises(ValueError, match="'cache': got none from rank"):
        model.caches[0] = model.caches[0].clone()
        check(model, ranks, steps=1)
    close(ranks)


@pytest.mark.parametrize("pages", [-1, 1.5])
def test_peer_caches_refuse_numbers_of_pages(pages):
    ranks = make_ranks(Shape(world=1), "peer_read")
    with pytest.raises(ValueError, match=f"PeerCaches: argument 'pages': got {pages}; allowed: an integer, 0 or more"):
        ranks[0].empty_cache(pages)
    close(ranks)


def test_peer_caches_must_have_one_shape(generator):
    ranks = make_ranks(Shape(world=2), "peer_read")
    ranks[0].empty_cache(3)
    with pytest.raises(
        ValueError, match=r"PeerCaches: argument 'pages': got shape \[4, 8, 656\]; allowed: \[3, 8, 656\]"
    ):
        ranks[1].empty_cache(4)
    close(ranks)


def test_peer_read_needs_the_pages_of_the_full_layer(generator):
    model = Model(Shape(world=1), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "peer_read")
    check(model, ranks, steps=1)
    with pytest.raises(ValueError, match="'cache': got 9 pages; allowed: 10, as the Full layer's"):
        ranks[0].shared(model.queries(), model.caches[0][1][:9], 0)
    close(ranks)


@every_strategy
def test_a_fence_between_steps(strategy, generator):
    """It changes no result, and every rank has to come."""
    model = Model(Shape(world=2), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, strategy)
    for _ in range(2):
        check(model, ranks, steps=1)
        run_loopback([rank.fence_steps() for rank in ranks])
    before = [int(channel.state[1]) for channel in ranks[0].channels]
    run_loopback([rank.fence_steps() for rank in ranks])
    after = [int(channel.state[1]) for channel in ranks[0].channels]
    assert [b - a for a, b in zip(before, after, strict=True)] == ([1] if strategy == "peer_read" else [0] * len(after))
    close(ranks)


@every_strategy
def test_buffers_are_made_once(strategy, generator):
    model = Model(Shape(world=2), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, strategy)
    check(model, ranks, steps=1)
    held = buffers_of(ranks[0].strategy)
    assert len(held) >= 3
    check(model, ranks, steps=2)
    assert buffers_of(ranks[0].strategy) == held
    close(ranks)


def buffers_of(strategy) -> dict[str, int]:
    """Addresses of the tensors that a strategy and its moves hold, but for views and results."""
    found = {}
    for name, part in {"": strategy, **{key: vars(strategy).get(key) for key in ("queries", "partials")}}.items():
        for key, value in vars(part).items() if part is not None else ():
            for number, tensor in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(tensor, torch.Tensor) and key not in ("given", "current"):
                    found[f"{name}.{key}.{number}"] = tensor.untyped_storage().data_ptr()
    return found


def test_owner_merge_walks_over_its_own_slots_alone(generator):
    model = Model(Shape(world=3), generator)
    fill_context(model)
    ranks = make_ranks(model.shape, "owner_merge")
    lengths = step_lengths(model.shape, 0)
    topk = select(model.shape, lengths, generator)
    visible = ((topk >= 0) & (topk < lengths.unsqueeze(1))).sum(1)
    run_step(model, 0, lambda layer, *rest: layer_steps(model, ranks, layer, *rest), topk=topk)
    counts = torch.stack([rank.strategy.counts.view(3, -1)[0] for rank in ranks])
    assert torch.equal(counts.sum(0), visible) and (counts > 0).any(1).all()
    for rank in ranks:
        assert rank.strategy.counts.view(3, -1).unique(dim=0).shape[0] == 1
    close(ranks)
