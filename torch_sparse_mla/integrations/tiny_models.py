"""Sparse-MLA models of Transformers with few layers and random weights, but the true MLA geometry.

Records, indexers and selections have the widths of the real models (512 latents, 64 RoPE or none, 128-wide index keys),
so everything that the operators see is real except the number of layers and the weights.
"""

import torch
from torch import nn
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

MODELS = ("glm_moe_dsa", "deepseek_v32", "glm5_next")
# Those whose decode step has a form of fixed shapes: linear attention keeps states of its own.
STATIC = ("glm_moe_dsa", "deepseek_v32")

TOPK = 64
HEADS = 16

_COMMON = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "index_topk": TOPK,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "max_position_embeddings": 65_536,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(
    name: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """A tiny model with random weights, in evaluation mode and without gradients.

    Args:
        name: one of `MODELS`.
        seed: of the weights; the global random state is left as it was.
        attn_implementation: "sdpa" or "eager".
    Raises: ValueError for an unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"torch_sparse_mla.integrations.tiny_models: name: got {name!r}; allowed: {', '.join(MODELS)}")
    config, model_class = {"glm_moe_dsa": _glm_moe_dsa, "deepseek_v32": _deepseek_v32, "glm5_next": _glm5_next}[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(config, attn_implementation=attn_implementation, dtype=dtype)
    if dtype == torch.float64:
        # The grouped matrix product that Transformers takes by default has no float64 form.
        model.set_experts_implementation("eager")
    _initialise(model, torch.Generator().manual_seed(seed))
    return model.to(device).eval().requires_grad_(False)


def _glm_moe_dsa() -> tuple[GlmMoeDsaConfig, type[PreTrainedModel]]:
    config = GlmMoeDsaConfig(
        **_COMMON,
        num_hidden_layers=4,
        qk_rope_head_dim=64,
        qk_nope_head_dim=192,
        v_head_dim=256,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        indexer_types=["full", "shared", "shared", "shared"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return config, GlmMoeDsaForCausalLM


def _deepseek_v32() -> tuple[DeepseekV32Config, type[PreTrainedModel]]:
    config = DeepseekV32Config(
        **_COMMON,
        num_hidden_layers=4,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return config, DeepseekV32ForCausalLM


def _glm5_next() -> tuple[Glm5NextConfig, type[PreTrainedModel]]:
    # The name in Transformers 5.17; later versions replace it by "indexed_attention" as they read it.
    layer_types = ["linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention"]
    text_config = {
        **_COMMON,
        "num_hidden_layers": 6,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
        "index_kpool": 4,
        "layer_types": layer_types * 2,
        "indexer_types": ["full", "full", "shared"] * 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse", "sparse"],
        "linear_head_dim": 64,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
    }
    # There is no text-only class: this vision tower is the smallest that builds, and text input never runs it.
    vision_config = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": _COMMON["hidden_size"],
        "projection_intermediate_size": 32,
    }
    return Glm5NextConfig(text_config=text_config, vision_config=vision_config), Glm5NextForConditionalGeneration


@torch.no_grad()
def _initialise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Weights of unit gain, so that every record matters.

    With the usual 0.02, attention is flat and one lost record does not move the logits: tests of the attention would
    pass whatever it did. Much larger weights make the model chaotic. What is not named here keeps the model's own
    initialisation (gates, decay rates, hyper-connections).
    """

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        values = torch.randn(parameter.shape, generator=generator) * std + mean
        parameter.copy_(values.to(parameter))

    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear):
            normal(module.weight, module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            normal(module.weight, 1.0)
        elif kind.endswith("Experts"):
            normal(module.gate_up_proj, module.gate_up_proj.shape[-1] ** -0.5)
            normal(module.down_proj, module.down_proj.shape[-1] ** -0.5)
        elif kind.endswith("TopkRouter"):
            normal(module.weight, module.weight.shape[-1] ** -0.5)
        elif "Norm" in kind and getattr(module, "weight", None) is not None:
            normal(module.weight, 0.1, mean=1.0)
        if hasattr(module, "index_kpool_compress_gate"):
            normal(module.index_kpool_compress_gate, module.index_kpool_compress_gate.shape[-1] ** -0.5)
            normal(module.index_kpool_compress_ape, 1.0)
