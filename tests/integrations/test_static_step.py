"""The decode step of fixed shapes: the same tokens as the growing one, one graph, and what it refuses."""

import pytest
import torch

from torch_sparse_mla.commands.generation import decode, prefill
from torch_sparse_mla.integrations import static_step, tiny_models
from torch_sparse_mla.integrations.static_step import StaticStep
from torch_sparse_mla.integrations.transformers import Dcp, convert, new_cache

from .models import prompt

STEPS = 4


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    torch._dynamo.reset()


def filled(model, tokens, dcp_room: int = STEPS + 3):
    cache = new_cache(model, tokens.shape[0], tokens.shape[1] + dcp_room)
    prefill(model, tokens[:, :-1], cache)
    return cache


def generate_static(model, cache, tokens, mode: str, backend: str = "eager"):
    static = StaticStep(model, cache, backend=backend)
    static.token.copy_(tokens[:, -1:])
    chosen, logits = [], []
    with torch.no_grad(), static.ready(mode) as step:
        for _ in range(STEPS):
            step_logits = step(static.token, static.position).clone()
            static.token.copy_(step_logits.argmax(-1, keepdim=True))
            static.position.add_(1)
            chosen.append(static.token.flatten().tolist())
            logits.append(step_logits)
        statistics = step.statistics
    return chosen, torch.stack(logits), statistics


@pytest.mark.parametrize(
    ("name", "layout", "dcp", "length"),
    [
        # Shorter than the top-k of 64, and longer.
        ("glm_moe_dsa", "fp8_ds_mla", None, 30),
        ("glm_moe_dsa", "nvfp4_ds_mla", Dcp(world=2), 100),
        ("deepseek_v32", "bf16_mla", None, 100),
    ],
    ids=["short", "two-shards", "long"],
)
def test_gives_the_tokens_of_the_growing_step(name, layout, dcp, length):
    model = convert(tiny_models.build(name), layout, dcp)
    tokens = prompt(1, length)
    with torch.no_grad():
        expected, expected_logits, _ = decode(model, filled(model, tokens), tokens[:, -1:], STEPS)
        cache = filled(model, tokens)
        chosen, logits, statistics = generate_static(model, cache, tokens, "compile")
        assert [token for (token,) in chosen] == expected
        torch.testing.assert_close(logits[:, 0], expected_logits, rtol=0, atol=1e-4)
        assert statistics.traces == 1
        # Afterwards the cache goes on as any other.
        assert cache.get_seq_length() == length - 1 + STEPS
        after, _, _ = decode(model, cache, torch.tensor([chosen[-1]]), 2)
        whole, _, _ = decode(model, filled(model, tokens), tokens[:, -1:], STEPS + 2)
        assert after == whole[STEPS:]


def test_a_batch_of_sequences():
    model = convert(tiny_models.build("glm_moe_dsa"), "fp8_ds_mla")
    tokens = prompt(3, 80)
    with torch.no_grad():
        chosen, _, _ = generate_static(model, filled(model, tokens), tokens, "compile")
        for row in range(3):
            one = tokens[row : row + 1]
            expected, _, _ = decode(model, filled(model, one), one[:, -1:], STEPS)
            assert [step[row] for step in chosen] == expected


def test_is_split_at_every_attention():
    model = convert(tiny_models.build("glm_moe_dsa"), "fp8_ds_mla")
    tokens = prompt(1, 70)
    with torch.no_grad():
        static = StaticStep(model, filled(model, tokens), backend="eager")
        static.position.fill_(69)
        static.pages.position = static.position
        step = static_step.compile(static.run, "PIECEWISE", backend="eager")
        step(static.token, static.position)
    splits = [piece.split for piece in step.pieces if piece.split]
    assert splits == ["torch_sparse_mla::sparse_ckv_decode"] * 4


def test_a_failure_gives_the_cache_back(monkeypatch):
    model = convert(tiny_models.build("glm_moe_dsa"), "fp8_ds_mla")
    tokens = prompt(1, 70)
    with torch.no_grad():
        cache = filled(model, tokens)
        static = StaticStep(model, cache, backend="eager")
        with pytest.raises(ZeroDivisionError), static.ready("compile"):
            raise ZeroDivisionError
        assert static.pages.position is None and cache.get_seq_length() == 69
        expected, _, _ = decode(model, filled(model, tokens), tokens[:, -1:], 2)
        assert decode(model, cache, tokens[:, -1:], 2)[0] == expected


def test_refuses_more_tokens_than_the_cache_has_room_for():
    model = convert(tiny_models.build("glm_moe_dsa"), "fp8_ds_mla")
    tokens = prompt(1, 70)
    with torch.no_grad():
        cache = new_cache(model, 1, 69)
        prefill(model, tokens[:, :-1], cache)
        with pytest.raises(ValueError, match="got 69 tokens; allowed: fewer than max_len = 69"):
            StaticStep(model, cache)


def test_refuses_caches_of_other_kinds():
    model = convert(tiny_models.build("glm5_next"), "bf16_mla_nope")
    with pytest.raises(ValueError, match=r"cache: got layers of .*; allowed: a model whose layers are all sparse MLA"):
        StaticStep(model, new_cache(model, 1, 8))
    model = convert(tiny_models.build("glm_moe_dsa"), "bf16_mla", Dcp(world=2, strategy="exchange"))
    with pytest.raises(ValueError, match="cache: got shards that are ranks"):
        StaticStep(model, new_cache(model, 1, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v32"])
def test_graphs_give_the_tokens_of_the_growing_step(name, mode):
    model = convert(tiny_models.build(name, device="cuda"), "fp8_ds_mla")
    tokens = prompt(1, 100).cuda()
    with torch.no_grad():
        expected, expected_logits, _ = decode(model, filled(model, tokens), tokens[:, -1:], STEPS)
        chosen, logits, statistics = generate_static(model, filled(model, tokens), tokens, mode)
    assert [token for (token,) in chosen] == expected
    torch.testing.assert_close(logits[:, 0], expected_logits, rtol=0, atol=2e-2)
    assert statistics.calls == {mode: STEPS} and statistics.fallbacks == {}
