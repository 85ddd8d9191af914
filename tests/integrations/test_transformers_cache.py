"""The cache of a converted model, weights that change after `convert`, `restore`, and what is refused."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from torch_sparse_mla import LAYOUTS, sharding
from torch_sparse_mla.integrations import tiny_models
from torch_sparse_mla.integrations.paged_cache import CacheSettings, SparseMlaLayer, TokenPages
from torch_sparse_mla.integrations.transformers import (
    Dcp,
    cache_bytes_per_token,
    convert,
    fake_quantise,
    layouts_for,
    new_cache,
    reference_bytes_per_token,
    restore,
)

from .models import NOPE_LAYOUTS, ROPE_LAYOUTS, attentions, forward, generate, prompt, shared_model


def test_pages_are_scattered_and_no_slot_has_two_tokens():
    pages = TokenPages(CacheSettings("fp8_ds_mla", Dcp(world=3, interleave=4), page_size=16), 2, 500, "cpu")
    flat = pages.block_table.flatten()
    assert sorted(flat.tolist()) == list(range(pages.num_pages))
    assert not torch.equal(flat, flat.sort().values)
    owned = torch.stack(pages.slots_of_new(0, 500))
    assert torch.equal((owned >= 0).sum(0), torch.ones(1000, dtype=torch.long))
    for shard, slots in enumerate(owned):
        held = slots[slots >= 0]
        assert len(held.unique()) == len(held) == 2 * sharding.local_length(shard, 500, 3, 4)
        assert int(held.max()) < pages.num_pages * 16


def test_selection_is_translated_once_for_shared_layers():
    pages = TokenPages(CacheSettings("fp8_ds_mla"), 1, 100, "cpu")
    selected = torch.arange(64).view(1, 1, 64)
    visible = torch.ones(1, 1, 1, 100, dtype=torch.bool)
    visible[..., 10] = False
    first = pages.slots_of_selected(selected, visible)
    assert pages.slots_of_selected(selected, visible) is first
    assert (first[0] < 0).nonzero().tolist() == [[0, 10]]
    assert int(pages.slots_of_selected(selected.clone(), None)[0].min()) >= 0
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    assert torch.equal(pages.slots_of_selected(selected, additive)[0], first[0])


@pytest.mark.parametrize(("layout", "dcp"), [("bf16_mla", Dcp()), ("nvfp4_ds_mla", Dcp(world=3))])
def test_crop_forgets_tokens(layout, dcp):
    model = convert(shared_model("glm_moe_dsa"), layout, dcp)
    cache = new_cache(model, 2, 90)
    forward(model, prompt(2, 80), cache)
    expected = [forward(model, prompt(2, 1, seed), cache) for seed in (1, 2)]
    forward(model, prompt(2, 5, seed=9), cache)
    cache.crop(-7)
    assert cache.get_seq_length() == 80
    for seed, logits in zip((1, 2), expected, strict=True):
        assert torch.equal(forward(model, prompt(2, 1, seed), cache), logits)
    cache.crop(0)
    assert cache.get_seq_length() == 82


@pytest.mark.parametrize("name", ["glm_moe_dsa", "glm5_next"])
def test_reset_starts_afresh(name):
    model = convert(shared_model(name), layouts_for(shared_model(name))[1])
    cache = new_cache(model, 1, 80)
    expected = forward(model, prompt(1, 70), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(forward(model, prompt(1, 70), cache), expected)


@pytest.mark.parametrize(
    ("name", "layout", "dcp"),
    [("deepseek_v32", "fp8_ds_mla", Dcp(world=3)), ("glm5_next", "nvfp4_mla_nope", Dcp())],
)
def test_reorder_cache_copies_whole_sequences(name, layout, dcp):
    model = convert(shared_model(name, torch.float64), layout, dcp, page_size=16)
    tokens, order = prompt(3, 70), torch.tensor([2, 0, 0])
    reordered = new_cache(model, 3, 80)
    forward(model, tokens, reordered)
    reordered.reorder_cache(order)
    built = new_cache(model, 3, 80)
    forward(model, tokens[order], built)
    # Linear layers of glm5_next compute in float32 in a float64 model too. A sequence in the wrong place is off by 1.
    atol = 1e-5 if name == "glm5_next" else 1e-9
    for seed in (1, 2):  # copies of one parent go on with different tokens
        step = prompt(3, 1, seed)
        torch.testing.assert_close(forward(model, step, reordered), forward(model, step, built), rtol=0, atol=atol)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_state_dict_keeps_its_keys_and_restore_gives_the_model_back(name):
    model = restore(shared_model(name))
    keys, implementation = list(model.state_dict()), model.config.get_text_config()._attn_implementation
    classes = [type(module) for module in model.modules()]
    expected = generate(model, prompt(1, 70), None, steps=3)
    convert(model, layouts_for(model)[0])
    assert list(model.state_dict()) == keys
    generate(model, prompt(1, 70), new_cache(model, 1, 80), steps=3)
    assert list(model.state_dict()) == keys
    assert restore(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert model.config.get_text_config()._attn_implementation == implementation == "sdpa"
    actual = generate(model, prompt(1, 70), None, steps=3)
    assert torch.equal(torch.stack(actual.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_after_convert(assign):
    model = convert(tiny_models.build("deepseek_v32", seed=1), "fp8_ds_mla")
    other = tiny_models.build("deepseek_v32", seed=2)
    tokens = prompt(1, 70)
    before = forward(model, tokens, new_cache(model, 1, 70))
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    after = forward(model, tokens, new_cache(model, 1, 70))
    convert(other, "fp8_ds_mla")
    assert torch.equal(after, forward(other, tokens, new_cache(other, 1, 70)))
    assert not torch.equal(before, after)


class Adapted(nn.Module):
    """A projection with an adapter, as fine-tuning libraries put in place of an `nn.Linear`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.delta = nn.Parameter(torch.zeros_like(base.weight), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.delta.T


def test_absorbed_weights_follow_an_adapted_projection():
    model = convert(tiny_models.build("deepseek_v32", seed=3), "bf16_mla")
    tokens = prompt(1, 70)
    plain = forward(model, tokens, new_cache(model, 1, 70))
    for module in attentions(model).values():
        module.kv_b_proj = Adapted(module.kv_b_proj)
    # A zero adapter, by another route: the weight comes from a product with the identity.
    torch.testing.assert_close(forward(model, tokens, new_cache(model, 1, 70)), plain, rtol=0, atol=1e-5)
    for module in attentions(model).values():
        module.kv_b_proj.delta += 0.5 * module.kv_b_proj.base.weight.flip(0)
    adapted = forward(model, tokens, new_cache(model, 1, 70))
    for module in attentions(model).values():
        module.kv_b_proj.delta.data = torch.zeros_like(module.kv_b_proj.delta)
    torch.testing.assert_close(forward(model, tokens, new_cache(model, 1, 70)), plain, rtol=0, atol=1e-5)
    assert float((adapted - plain).abs().max()) > 1


def test_projection_with_a_bias_is_refused():
    model = tiny_models.build("deepseek_v32")
    projection = attentions(model)[0].kv_b_proj
    projection.bias = nn.Parameter(torch.ones(projection.out_features), requires_grad=False)
    with pytest.raises(ValueError, match="kv_b_proj: got a projection with a bias"):
        convert(model, "bf16_mla")


def test_bytes_per_token():
    model = convert(shared_model("glm_moe_dsa"), "nvfp4_ds_mla")
    assert cache_bytes_per_token(model) == cache_bytes_per_token(new_cache(model, 1, 64)) == 4 * 432
    assert reference_bytes_per_token(model) == 4 * 576 * 4
    hybrid = convert(shared_model("glm5_next"), "fp8_mla_nope", Dcp(world=4))
    assert cache_bytes_per_token(hybrid) == cache_bytes_per_token(new_cache(hybrid, 2, 64)) == 4 * 528
    assert reference_bytes_per_token(hybrid) == 4 * 512 * 4


def test_layouts_for():
    assert layouts_for(shared_model("glm_moe_dsa")) == layouts_for(shared_model("deepseek_v32")) == ROPE_LAYOUTS
    assert layouts_for(shared_model("glm5_next")) == NOPE_LAYOUTS
    assert {*ROPE_LAYOUTS, *NOPE_LAYOUTS} == set(LAYOUTS)
    assert layouts_for(nn.Linear(2, 2)) == ()


@pytest.mark.parametrize("name", ["deepseek_v32", "glm5_next"])
def test_a_full_cache_refuses_and_writes_nothing(name):
    model = convert(shared_model(name), layouts_for(shared_model(name))[0])
    small, large = new_cache(model, 1, 70), new_cache(model, 1, 100)
    for cache in (small, large):
        forward(model, prompt(1, 68), cache)
    with pytest.raises(ValueError, match=r"got 3 more after 68; allowed: up to max_len = 70 .* larger max_len"):
        forward(model, prompt(1, 3, seed=1), small)
    for seed in (2, 3):
        assert torch.equal(forward(model, prompt(1, 1, seed), small), forward(model, prompt(1, 1, seed), large))
    with pytest.raises(ValueError, match="max_len = 70"):
        forward(model, prompt(1, 1), small)


def test_layer_refuses_too_many_tokens_by_itself():
    layer = SparseMlaLayer(TokenPages(CacheSettings("bf16_mla_nope"), 1, 8, "cpu"))
    with pytest.raises(ValueError, match="got 9 more after 0"):
        layer.update(torch.zeros(1, 1, 9, 512), torch.zeros(1, 1, 9, 0))
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize(("batch", "max_len", "match"), [(0, 8, "batch: got 0"), (1, 0, "max_len: got 0")])
def test_new_cache_rejects_sizes(batch, max_len, match):
    model = convert(shared_model("glm_moe_dsa"), "bf16_mla")
    with pytest.raises(ValueError, match=match):
        new_cache(model, batch, max_len)


def test_wrong_batch_is_refused():
    model = convert(shared_model("glm_moe_dsa"), "bf16_mla")
    with pytest.raises(ValueError, match=r"got 2 sequences; allowed: 3, as new_cache was told \(for beam search"):
        forward(model, prompt(2, 5), new_cache(model, 3, 20))


@pytest.mark.parametrize("remove", [1, -6])
def test_crop_rejects_tokens_to_remove(remove):
    model = convert(shared_model("glm_moe_dsa"), "bf16_mla")
    cache = new_cache(model, 1, 20)
    forward(model, prompt(1, 5), cache)
    with pytest.raises(ValueError, match=f"tokens_to_remove: got {remove}; allowed: -5..0"):
        cache.crop(remove)
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("function", [convert, fake_quantise])
@pytest.mark.parametrize(
    ("name", "layout", "match"),
    [
        ("glm_moe_dsa", "fp8_mla_nope", "RoPE part of 64: bf16_mla, fp8_ds_mla, nvfp4_ds_mla, nvfp4_ds_mla_fp8rope$"),
        ("glm5_next", "fp8_ds_mla", "RoPE part of 0: bf16_mla_nope, fp8_mla_nope, nvfp4_mla_nope$"),
        ("deepseek_v32", "fp8", "layout: got 'fp8'; allowed"),
    ],
)
def test_layout_that_does_not_fit_is_refused_and_changes_nothing(function, name, layout, match):
    model = restore(shared_model(name))
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=match):
        function(model, layout)
    assert [type(module) for module in model.modules()] == classes


def test_other_models_are_refused():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="got LlamaForCausalLM; allowed: GlmMoeDsaModel, DeepseekV32Model, "):
        convert(model, "bf16_mla")
    for function in (lambda: new_cache(model, 1, 8), lambda: cache_bytes_per_token(model)):
        with pytest.raises(ValueError, match="got LlamaForCausalLM, not converted"):
            function()


@pytest.mark.parametrize(
    ("dcp", "page_size"), [(Dcp(2, 48), 64), (Dcp(0, 4), 64), (Dcp(2, 0), 64), (Dcp(), 0), (Dcp(2, 4), 6)]
)
def test_impossible_geometry_is_refused(dcp, page_size):
    with pytest.raises(ValueError, match=r"rank, world|page_size, interleave"):
        convert(shared_model("glm_moe_dsa"), "bf16_mla", dcp, page_size)


@pytest.mark.parametrize("name", ["glm_moe_dsa", "glm5_next"])
@pytest.mark.parametrize(
    ("mask", "row"), [([[1, 1, 1, 0]], 0), ([[1, 1, 1, 1], [0, 1, 0, 1]], 1)], ids=["right_padding", "hole"]
)
def test_padding_that_is_not_on_the_left_is_refused(name, mask, row):
    model = convert(shared_model(name), layouts_for(shared_model(name))[0])
    cache = new_cache(model, len(mask), 10)
    with pytest.raises(
        ValueError, match=f"attention_mask: got a 0 after a 1 in row {row}; allowed: padding on the left"
    ):
        forward(model, prompt(len(mask), 4), cache, attention_mask=torch.tensor(mask))
    with pytest.raises(ValueError, match="padding on the left"):
        generate(model, prompt(len(mask), 4), cache, 2, attention_mask=torch.tensor(mask))
    assert cache.get_seq_length() == 0


def test_a_cache_of_another_kind_is_refused():
    model = convert(shared_model("glm_moe_dsa"), "bf16_mla")
    stale = new_cache(model, 1, 10)
    convert(model, "fp8_ds_mla")
    with pytest.raises(ValueError, match=r"cache: got CacheSettings\(layout='bf16_mla'.*converted with .*fp8_ds_mla"):
        forward(model, prompt(1, 4), stale)
    with pytest.raises(ValueError, match="cache: got DynamicCache; allowed: new_cache"):
        forward(model, prompt(1, 4), DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="cache: got DynamicCache; allowed: new_cache"):
        generate(model, prompt(1, 4), None, 2)
    with pytest.raises(ValueError, match=r"cache: got None; allowed: new_cache.* or use_cache=False"):
        model(prompt(1, 4))


def test_gradients_are_refused():
    model = convert(tiny_models.build("glm_moe_dsa").requires_grad_(True), "bf16_mla")
    with pytest.raises(ValueError, match=r"gradients.*torch.no_grad"):
        model(prompt(1, 4), use_cache=False)
    with torch.no_grad():
        model(prompt(1, 4), use_cache=False)


def test_unknown_tiny_model_is_refused():
    with pytest.raises(ValueError, match="name: got 'llama'; allowed: glm_moe_dsa, deepseek_v32, glm5_next"):
        tiny_models.build("llama")


def test_build_is_reproducible_and_leaves_the_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = tiny_models.build("glm5_next", seed=5)
    assert torch.equal(torch.rand(3), expected)
    second = tiny_models.build("glm5_next", seed=5)
    other = tiny_models.build("glm5_next", seed=6)
    pairs = list(zip(first.state_dict().values(), second.state_dict().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert not first.training and not any(parameter.requires_grad for parameter in first.parameters())


def test_the_package_itself_does_not_import_transformers():
    code = "import sys, torch_sparse_mla; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
