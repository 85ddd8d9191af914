"""A forward that fails or cannot be served leaves nothing silently wrong; nor does a projection that changes."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from torch_sparse_mla.integrations import tiny_models
from torch_sparse_mla.integrations.paged_cache import SparseMlaLayer
from torch_sparse_mla.integrations.transformers import Dcp, convert, layouts_for, new_cache, restore

from .models import CACHE, attentions, forward, generate, prompt, shared_model

MODELS = ["deepseek_v32", "glm5_next"]


def converted(name: str, fresh: bool = False, **kwargs: object):
    model = tiny_models.build(name) if fresh else shared_model(name)
    return convert(model, layouts_for(model)[0], **kwargs)


def lengths(cache) -> list[int]:
    return [layer.length for layer in cache.layers if isinstance(layer, SparseMlaLayer)]


def interrupt(*call):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_with_unequal_layers_is_refused_until_reset(name):
    model = converted(name)
    cache = new_cache(model, 1, 80)
    expected = forward(model, prompt(1, 70), cache)
    handle = list(attentions(model).values())[2].o_proj.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(1, 1), cache)
    handle.remove()
    assert lengths(cache) == [71, 71, 71, 70]
    last, first = list(attentions(model))[3], next(iter(attentions(model)))
    for _ in range(2):
        match = rf"got 70 tokens in layer {last} and 71 in layer {first}.*cache.reset\(\).*or a new cache"
        with pytest.raises(ValueError, match=match):
            forward(model, prompt(1, 1), cache)
    cache.reset()
    assert torch.equal(forward(model, prompt(1, 70), cache), expected)


def test_a_forward_that_fails_between_linear_layers_is_noticed():
    """No sparse layer has changed, but a recurrent state has: equal lengths say nothing."""
    model = converted("glm5_next")
    cache = new_cache(model, 1, 80)
    forward(model, prompt(1, 70), cache)
    first = next(iter(attentions(model).values()))
    handle = first.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(1, 1), cache)
    handle.remove()
    assert lengths(cache) == [70] * 4
    with pytest.raises(ValueError, match=r"last forward did not finish.*cache.reset\(\)"):
        forward(model, prompt(1, 1), cache)


def test_a_cache_of_fewer_layers_is_refused():
    model = converted("deepseek_v32")
    cache = new_cache(model, 1, 8)
    cache.layers.pop()
    with pytest.raises(ValueError, match=r"of layers \[0, 1, 2\]; allowed: new_cache.* for layers \[0, 1, 2, 3\]"):
        forward(model, prompt(1, 4), cache)
    assert lengths(cache) == [0] * 3


def test_pools_start_as_zeros():
    assert all(not bool(layer.records[0].any()) for layer in new_cache(converted("deepseek_v32"), 1, 8).layers)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_refused_before_anything_is_written(name):
    model = converted(name, fresh=True)
    cache = new_cache(model, 1, 20)
    embeds = model.get_input_embeddings()(prompt(1, 4)).clone().requires_grad_(True)
    with pytest.raises(ValueError, match=r"gradients.*torch.no_grad"):
        model(inputs_embeds=embeds, **{CACHE: cache})
    # The last layer's experts: no query of any layer would record a gradient.
    list(model.get_decoder().parameters())[-1].requires_grad_(True)
    with pytest.raises(ValueError, match=r"gradients.*torch.no_grad"):
        forward(model, prompt(1, 4), cache)
    assert lengths(cache) == [0] * 4
    with torch.no_grad():
        forward(model, prompt(1, 4), cache)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_after_convert_is_refused_by_name(implementation):
    model = converted("deepseek_v32")
    cache = new_cache(model, 1, 20)
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=f"attn_implementation: got '{implementation}', set after convert"):
        forward(model, prompt(1, 4), cache)
    assert lengths(cache) == [0] * 4
    assert restore(model).config._attn_implementation == "sdpa"


class OtherLinear(nn.Linear):
    """Not a plain `nn.Linear`, with a setting that no tensor shows."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def with_other_linears():
    model = tiny_models.build("deepseek_v32")
    for module in attentions(model).values():
        module.kv_b_proj.__class__ = OtherLinear
    return convert(model, "bf16_mla")


def test_compiled_model_follows_a_projection_that_changes():
    model = with_other_linears()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(forward, backend=counter, fullgraph=True)

    caches = [new_cache(model, 1, 80) for _ in range(4)]
    for cache in caches:
        forward(model, prompt(1, 70), cache)
    before = compiled(model, prompt(1, 1), caches[0])
    torch.testing.assert_close(before, forward(model, prompt(1, 1), caches[1]), rtol=0, atol=1e-5)
    for module in attentions(model).values():
        module.kv_b_proj.weight.mul_(0.3)
    # Compiled first: an eager call would refresh what it keeps.
    actual = compiled(model, prompt(1, 1), caches[2])
    torch.testing.assert_close(actual, forward(model, prompt(1, 1), caches[3]), rtol=0, atol=1e-5)
    assert float((actual - before).abs().max()) > 1e-2
    assert counter.frame_count == 1


def double_scale(projection: nn.Module) -> None:
    projection.scale = 2.0


def double_output(projection: nn.Module) -> None:
    projection.register_forward_hook(lambda module, args, output: output * 2)


def double_input(projection: nn.Module) -> None:
    projection.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def double_forward(projection: nn.Module) -> None:
    own = projection.forward
    projection.forward = lambda x: own(x) * 2


@pytest.mark.parametrize(
    ("build", "double"),
    [
        (with_other_linears, double_scale),
        *((lambda: converted("deepseek_v32", fresh=True), x) for x in (double_output, double_input, double_forward)),
    ],
    ids=["setting", "hook", "pre_hook", "replaced_forward"],
)
def test_a_projection_that_doubles_counts(build, double):
    model = build()
    plain = forward(model, prompt(1, 70), new_cache(model, 1, 70))
    for module in attentions(model).values():
        double(module.kv_b_proj)
    doubled = forward(model, prompt(1, 70), new_cache(model, 1, 70))
    twin = converted("deepseek_v32", fresh=True)
    for module in attentions(twin).values():
        module.kv_b_proj.weight.mul_(2)
    torch.testing.assert_close(doubled, forward(twin, prompt(1, 70), new_cache(twin, 1, 70)), rtol=0, atol=1e-4)
    assert float((doubled - plain).abs().max()) > 1e-2


def test_weights_on_meta_are_refused_by_name():
    model = tiny_models.build("deepseek_v32").to("meta")
    match = r"{}: model: got q_a_proj.weight of attention layer 0 on the meta device"
    with pytest.raises(ValueError, match=match.format("convert")):
        convert(model, "bf16_mla")
    model = converted("deepseek_v32", fresh=True).to("meta")
    with pytest.raises(ValueError, match=match.format("new_cache")):
        new_cache(model, 1, 8)


@pytest.mark.parametrize("where", ["prompt", "new_cache"])
def test_inference_mode_and_no_grad_share_a_cache(where):
    model = converted("glm_moe_dsa")
    with torch.inference_mode(where == "new_cache"):
        cache = new_cache(model, 1, 80)
    with torch.inference_mode():
        forward(model, prompt(1, 70), cache)
    with torch.no_grad():
        actual = forward(model, prompt(1, 1), cache)
    other = new_cache(model, 1, 80)
    forward(model, prompt(1, 70), other)
    assert torch.equal(actual, forward(model, prompt(1, 1), other))


def test_convert_that_refuses_leaves_the_model_as_it_was():
    model = converted("deepseek_v32", fresh=True, dcp=Dcp(world=2))
    expected = forward(model, prompt(1, 8), new_cache(model, 1, 8))
    cache = new_cache(model, 1, 8)
    bad = list(attentions(model).values())[-1]
    bad.kv_b_proj.bias = nn.Parameter(torch.ones(bad.kv_b_proj.out_features), requires_grad=False)
    with pytest.raises(ValueError, match="kv_b_proj: got a projection with a bias"):
        convert(model, "fp8_ds_mla")
    bad.kv_b_proj.bias = None
    assert torch.equal(forward(model, prompt(1, 8), cache), expected)

    model = tiny_models.build("deepseek_v32")
    classes = [type(module) for module in model.modules()]
    bad = list(attentions(model).values())[-1]
    bad.kv_b_proj.bias = nn.Parameter(torch.ones(bad.kv_b_proj.out_features), requires_grad=False)
    with pytest.raises(ValueError, match="kv_b_proj: got a projection with a bias"):
        convert(model, "bf16_mla")
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == "sdpa"
    assert not model.model._forward_pre_hooks and not hasattr(attentions(model)[0], "cache_settings")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"dcp": 2}, r"convert: dcp: got 2; allowed: Dcp\(world, interleave\), or None"),
        ({"dcp": 0}, "convert: dcp: got 0"),
        ({"dcp": Dcp(world=2.0)}, "convert: dcp.world: got 2.0; allowed: an int"),
        ({"page_size": 64.0}, "convert: page_size: got 64.0; allowed: an int"),
        ({"page_size": True}, "convert: page_size: got True; allowed: an int"),
    ],
)
def test_convert_rejects_types(kwargs, match):
    with pytest.raises(ValueError, match=match):
        convert(shared_model("deepseek_v32"), "bf16_mla", **kwargs)


@pytest.mark.parametrize(("batch", "max_len", "match"), [(1.0, 8, "batch: got 1.0"), (1, "8", "max_len: got '8'")])
def test_new_cache_rejects_types(batch, max_len, match):
    with pytest.raises(ValueError, match=rf"new_cache: {match}; allowed: an int, 1 up"):
        new_cache(converted("deepseek_v32"), batch, max_len)


def test_no_model_is_refused_by_name():
    with pytest.raises(ValueError, match="convert: model: got None; allowed: GlmMoeDsaModel"):
        convert(None, "bf16_mla")
    with pytest.raises(ValueError, match="new_cache: model: got None, not converted"):
        new_cache(None, 1, 8)


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_is_named_before_the_padding(name):
    model = converted(name)
    with pytest.raises(ValueError, match="cache: got StaticCache; allowed: new_cache"):
        generate(model, prompt(1, 4), None, 2, cache_implementation="static")
    mask = torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(ValueError, match="cache: got None"):
        model(prompt(1, 4), attention_mask=mask)


def test_positional_masks_and_caches_are_checked():
    model = converted("deepseek_v32")
    backbone, mask = model.model, torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(ValueError, match="attention_mask: got a 0 after a 1"):
        backbone(prompt(1, 4), mask, use_cache=False)
    small = new_cache(model, 1, 3)
    with pytest.raises(ValueError, match="max_len = 3"):
        backbone(prompt(1, 4), None, None, small)
    cache = new_cache(model, 1, 8)
    backbone(prompt(1, 4), None, None, cache)
    assert lengths(cache) == [4] * 4


@pytest.mark.parametrize("dcp", [Dcp(), Dcp(world=3)])
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
        (lambda cache: (cache.batch_select_indices(torch.tensor([1])), cache.batch_repeat_interleave(3)), [1, 1, 1]),
    ],
    ids=["repeat", "select", "select_by_mask", "both"],
)
def test_sequences_are_repeated_and_selected(dcp, change, rows):
    model = converted("deepseek_v32", dcp=dcp, page_size=16)
    tokens = prompt(3, 70)
    changed, built = new_cache(model, 3, 80), new_cache(model, len(rows), 80)
    forward(model, tokens, changed)
    change(changed)
    forward(model, tokens[rows], built)
    assert changed.batch_size == len(rows)
    assert len({id(layer.pages) for layer in changed.layers}) == 1
    for seed in (1, 2):
        step = prompt(len(rows), 1, seed)
        torch.testing.assert_close(forward(model, step, changed), forward(model, step, built), rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", ["offload", "prefetch"])
def test_offloading_is_refused_by_name(function):
    layer = new_cache(converted("deepseek_v32"), 1, 8).layers[0]
    with pytest.raises(ValueError, match=f"{function}: got a sparse-MLA layer"):
        getattr(layer, function)()


def test_no_mask_outlives_its_forward():
    model = converted("deepseek_v32")
    cache = new_cache(model, 1, 80)
    forward(model, prompt(1, 70), cache)
    assert cache.layers[0].pages._selected == (None, None, None)
