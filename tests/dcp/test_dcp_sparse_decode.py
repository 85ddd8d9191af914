"""Every strategy against attention over the unsharded cache."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torch_sparse_mla import LAYOUTS
from torch_sparse_mla.dcp import run_loopback, strategies
from torch_sparse_mla.dcp.steps import finish

from .cases import Model, Shape, close, fill_context, layer_steps, make_ranks, rank_steps, run_step, step_lengths

STRATEGIES = ("owner_merge", "exchange", "exchange_bulk")
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
@pytest.mark.parametrize("world", [1, 2, 3, 4])
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
