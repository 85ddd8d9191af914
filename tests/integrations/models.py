"""What the Transformers tests share: models built once, prompts, recorded layer calls, a step of decoding."""

import functools
import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaForCausalLM

from torch_sparse_mla.integrations import tiny_models
from torch_sparse_mla.integrations.transformers import _ATTENTIONS

ROPE_LAYOUTS = ("bf16_mla", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla_fp8rope")
NOPE_LAYOUTS = ("bf16_mla_nope", "fp8_mla_nope", "nvfp4_mla_nope")
MODEL_LAYOUTS = [
    *(("glm_moe_dsa", layout) for layout in ROPE_LAYOUTS if layout != "nvfp4_ds_mla"),
    *(("deepseek_v32", layout) for layout in ROPE_LAYOUTS if layout != "nvfp4_ds_mla_fp8rope"),
    *(("glm5_next", layout) for layout in NOPE_LAYOUTS),
]
BF16_LAYOUTS = [(name, layout) for name, layout in MODEL_LAYOUTS if layout.startswith("bf16")]

# Transformers 5.17 says past_key_values.
CACHE = "cache" if "cache" in inspect.signature(GlmMoeDsaForCausalLM.forward).parameters else "past_key_values"
LAYER_CACHE = "cache" if "cache" in inspect.signature(GlmMoeDsaAttention.forward).parameters else "past_key_values"


@functools.cache
def shared_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """One instance per process: a test turns it into oracle or client (either undoes the other) and leaves it so."""
    return tiny_models.build(name, dtype=dtype)


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1024, (batch, length), generator=torch.Generator().manual_seed(seed))


def attentions(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    return {module.layer_idx: module for module in model.modules() if isinstance(module, _ATTENTIONS)}


def forward(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache, **kwargs: object) -> torch.Tensor:
    """Logits of all `tokens`."""
    return model(tokens, use_cache=True, **{CACHE: cache}, **kwargs).logits


def generate(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache | None, steps: int, **kwargs: object):
    own_cache = {} if cache is None else {CACHE: cache}
    kwargs = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True} | kwargs
    return model.generate(tokens, max_new_tokens=steps, **own_cache, **kwargs)


@dataclass(frozen=True)
class LayerCall:
    """One call of an attention module: its arguments without the cache, and its output."""

    layer_idx: int
    kwargs: dict[str, object]
    output: torch.Tensor


def record_layer_calls(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, steps: int) -> list[LayerCall]:
    """Run a prompt and greedy steps with Transformers' own cache; what each attention module got and gave."""
    calls: list[LayerCall] = []

    def record(module: torch.nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        assert not args
        kept = {key: value for key, value in kwargs.items() if key != LAYER_CACHE}
        calls.append(LayerCall(module.layer_idx, kept, output[0]))

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in attentions(model).values()]
    cache = DynamicCache(config=model.config.get_text_config())
    for _ in range(steps + 1):
        logits = forward(model, tokens, cache, attention_mask=mask, position_ids=left_padded_positions(tokens, mask))
        tokens = logits[:, -1:].argmax(-1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    for handle in handles:
        handle.remove()
    return calls


def left_padded_positions(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
