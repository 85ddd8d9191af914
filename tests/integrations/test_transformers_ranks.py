"""Decode steps of converted models by loopback ranks, against the same shards attended to in place."""

import copy

import pytest
import torch

from torch_sparse_mla.exchange.channel import _registry
from torch_sparse_mla.integrations.transformers import Dcp, convert, new_cache

from .models import forward, left_padded_positions, prompt, shared_model

# Left padding, then a prompt; after it three tokens at once (a draft's check), one, and one.
PADDING, CONTEXT, STEPS = 5, 66, (3, 1)


def logits_of(model, layout, dcp, batch=2):
    """Logits of the steps, and the cache."""
    convert(model, layout, dcp, page_size=16)
    cache = new_cache(model, batch, CONTEXT + sum(STEPS))
    tokens = prompt(batch, CONTEXT + sum(STEPS))
    mask = torch.ones_like(tokens)
    mask[0, :PADDING] = 0
    logits, done = [], 0
    for count in (CONTEXT, *STEPS):
        seen = mask[:, : done + count]
        new = tokens[:, done : done + count]
        extra = {"attention_mask": seen, "position_ids": left_padded_positions(new, seen)}
        logits.append(forward(model, new, cache, **extra))
        done += count
    return torch.cat(logits[1:], 1), cache


@pytest.mark.parametrize(
    ("name", "layout", "world", "strategies"),
    [
        ("glm_moe_dsa", "fp8_ds_mla", 4, ["owner_merge", "exchange", "exchange_bulk", "peer_read", "auto"]),
        ("deepseek_v32", "nvfp4_ds_mla", 2, ["exchange_bulk"]),
        ("glm5_next", "nvfp4_mla_nope", 2, ["owner_merge", "exchange_bulk", "peer_read"]),
    ],
    ids=["glm_moe_dsa", "deepseek_v32", "glm5_next"],
)
def test_ranks_give_the_logits_of_shards_in_place(name, layout, world, strategies):
    model = shared_model(name, torch.float64)
    with torch.inference_mode():
        want, _ = logits_of(model, layout, Dcp(world))
        for strategy in strategies:
            given, cache = logits_of(model, layout, Dcp(world, strategy=strategy))
            torch.testing.assert_close(given, want, rtol=0, atol=1e-9, msg=lambda text, s=strategy: f"{s}: {text}")
            ranks = cache.layers[-1].pages.ranks
            assert ranks.explain()["strategy"] == strategy or strategy == "auto"
            assert len(ranks.ranks) == world


def test_channels_go_with_the_cache_and_a_copy_has_its_own():
    model = shared_model("glm_moe_dsa")
    with torch.inference_mode():
        _, cache = logits_of(model, "fp8_ds_mla", Dcp(2, strategy="exchange"))
        other = copy.deepcopy(cache)
        tokens = prompt(2, 1, seed=1)
        for layer in (*cache.layers, *other.layers):
            layer.crop(-1)
        assert torch.equal(forward(model, tokens, cache), forward(model, tokens, other))
    names = {
        channel.name
        for each in (cache, other)
        for rank in each.layers[0].pages.ranks.ranks
        for channel in rank.channels
    }
    assert len(names) == 4 and names <= set(_registry)
    del cache, other, layer
    assert not names & set(_registry)


def test_ranks_made_in_inference_mode_serve_outside_of_it():
    model = convert(shared_model("glm_moe_dsa"), "bf16_mla", Dcp(2, strategy="exchange_bulk"))
    cache = new_cache(model, 1, 12)
    with torch.no_grad():
        forward(model, prompt(1, 8), cache)
        with torch.inference_mode():
            forward(model, prompt(1, 1), cache)
        ranks = cache.layers[0].pages.ranks.ranks
        forward(model, prompt(1, 1), cache)
    assert cache.layers[0].pages.ranks.ranks is ranks


def test_a_forward_without_a_cache_needs_no_ranks():
    model = convert(shared_model("glm_moe_dsa"), "bf16_mla", Dcp(2, strategy="exchange_bulk"))
    with torch.inference_mode():
        given = model(prompt(1, 4), use_cache=False).logits
        want = convert(model, "bf16_mla")(prompt(1, 4), use_cache=False).logits
    torch.testing.assert_close(given, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("dcp", "message"),
    [
        (Dcp(2, strategy="gather"), "strategy: got 'gather'; allowed: in_place, auto, owner_merge, exchange"),
        (Dcp(16, strategy="peer_read"), r"strategy: got 'peer_read'; allowed: another one here \(.*at most 8 ranks"),
        (
            Dcp(2, strategy="exchange", processes=True),
            "world: got 2 with processes=True; allowed: the processes of the default group, which is not initialised",
        ),
        (
            Dcp(3, strategy="exchange"),
            "world: got 3; allowed with strategy exchange: a divisor of the model's 16 heads",
        ),
    ],
)
def test_convert_refuses(dcp, message):
    with pytest.raises(ValueError, match=message):
        convert(shared_model("glm_moe_dsa"), "fp8_ds_mla", dcp)
