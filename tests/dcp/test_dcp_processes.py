"""Ranks that are processes of a gloo group."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist

from torch_sparse_mla import ExchangeError
from torch_sparse_mla.dcp import decode
from torch_sparse_mla.dcp.steps import finish

from ..exchange.processes import die, run_ranks
from .cases import COSTS, Model, Shape, fill_context, make_rank, rank_steps, run_step


def decode_steps(rank, shape, strategy, costs):
    """Every process holds all shards, and uses its own."""
    model = Model(shape, torch.Generator().manual_seed(3))
    fill_context(model)
    step = make_rank(shape, strategy, dist.group.WORLD, "dcp", costs)
    chosen = step.warmup()
    own = slice(rank * shape.heads, (rank + 1) * shape.heads)

    def run_layer(layer, *arguments):
        return finish(rank_steps(model, step, layer, *arguments))

    for number in range(3):
        for (out, lse), (want, want_lse) in run_step(model, number, run_layer):
            torch.testing.assert_close(out, want[:, own], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse, want_lse[:, own], rtol=1e-4, atol=1e-4)
    transports = {channel["transport"] for channel in step.explain()["channels"]}
    step.close()
    return chosen, transports


def one_rank_missing(rank, shape):
    model = Model(shape, torch.Generator().manual_seed(3))
    fill_context(model)
    step = make_rank(shape, "owner_merge", dist.group.WORLD, "dcp", timeout_s=1.5)
    step.warmup()
    if rank == 1:
        die()
    with pytest.raises(ExchangeError) as caught:
        run_step(model, 0, lambda layer, *rest: finish(rank_steps(model, step, layer, *rest)))
    return str(caught.value)


def test_a_killed_rank_is_an_error(tmp_path):
    results = run_ranks(2, one_rank_missing, tmp_path, Shape(world=2))
    assert results[1] is None and "rank 0" in results[0] and "rank 1" in results[0]


@pytest.mark.parametrize(
    ("world", "strategy", "costs"),
    [(2, "owner_merge", COSTS), (3, "exchange", COSTS), (2, "exchange_bulk", COSTS), (3, "auto", None)],
)
def test_processes_match_the_unsharded_cache(world, strategy, costs, tmp_path):
    results = run_ranks(world, decode_steps, tmp_path, Shape(world=world), strategy, costs)
    assert len({chosen for chosen, _ in results}) == 1
    assert strategy in ("auto", results[0][0])
    assert all(transports == {"collective"} for _, transports in results)


def refused(rank, shape):
    """On every rank, and nobody hangs: a strategy that processes on the CPU cannot run, and flags that differ."""
    with pytest.raises(ValueError, match=r"'strategy': got 'peer_read'; .*a process maps no memory of another"):
        make_rank(shape, "peer_read", dist.group.WORLD, "dcp")
    for values, error in ((("1", "0"), "by rank; allowed: the same on every rank"), (("1", "yes"), "got 'yes'")):
        os.environ["TORCH_SPARSE_MLA_BULK_PREFETCH"] = values[rank]
        step = make_rank(shape, "exchange_bulk", dist.group.WORLD, "dcp")
        with pytest.raises((ValueError, RuntimeError), match=error):
            step.warmup()
    os.environ["TORCH_SPARSE_MLA_BULK_PREFETCH"] = "1"
    step = make_rank(shape, "auto", dist.group.WORLD, "dcp", None)
    step.warmup()
    explained = step.explain()["not_considered"]
    step.close()
    return explained


def test_refusals_are_those_of_every_rank(tmp_path):
    for explained in run_ranks(2, refused, tmp_path, Shape(world=2)):
        assert explained == {"peer_read": "a gloo group of 2 on the CPU: a process maps no memory of another"}


def messages_of_the_group(rank, shape, costs):
    """As NCCL groups have them: here gloo carries the group's own collectives."""
    decode._can_send_messages = lambda *arguments: True
    model = Model(shape, torch.Generator().manual_seed(3))
    fill_context(model)
    step = make_rank(shape, "owner_merge", dist.group.WORLD, "dcp", costs)
    step.warmup()
    own = slice(rank * shape.heads, (rank + 1) * shape.heads)
    for (out, _), (want, _) in run_step(model, 0, lambda layer, *rest: finish(rank_steps(model, step, layer, *rest))):
        torch.testing.assert_close(out, want[:, own], rtol=1e-4, atol=1e-5)
    explained = step.explain()
    step.close()
    return explained


@pytest.mark.parametrize("costs", [None, (9.0, 7.0)], ids=["measured", "nccl"])
def test_owner_merge_moves_by_what_costs_less(costs, tmp_path):
    given = costs and dataclasses.replace(COSTS, moves_us=costs[0], moves_nccl_us=costs[1])
    first, second = run_ranks(2, messages_of_the_group, tmp_path, Shape(world=2), given)
    ways = {row["over"]: row["us_per_layer"] for row in first["table"] if row["strategy"] == "owner_merge"}
    assert set(ways) == {"channel", "nccl"} and first["over"] == second["over"] == min(ways, key=ways.get)
    assert len(first["channels"]) == (0 if first["over"] == "nccl" else 2)
    if costs:
        assert first["over"] == "nccl"
    else:
        assert first["costs"]["moves_us"] == second["costs"]["moves_us"] > 0
