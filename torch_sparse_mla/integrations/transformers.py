"""Sparse-MLA models of Hugging Face Transformers on the operators of this package.

    model = convert(model, layout="fp8_ds_mla")
    cache = new_cache(model, batch=1, max_len=4096)
    model.generate(input_ids, cache=cache, max_new_tokens=64)      # Transformers 5.17: past_key_values=cache

One attention layer, as data flows:
    latent, RoPE part -> write_ckv_records -> pages
    top-k of the indexer -> slots -> sparse_ckv_decode of absorbed queries, per shard -> merge_partial_attention

Transformers keeps projections, norms, RoPE, the indexer and its top-k handed from Full to Shared layers, experts,
linear attention and generation. Nothing of a model's `forward` is copied: `convert` changes the class of the attention
modules (subclasses that keep latents compressed) and names an attention function. Parameters and their names stay.

A query row costs its K selected records, whatever the context: prompts and decode steps take the same path, a bounded
number of rows at a time. Transformers' indexer does grow: it scores queries x heads x context in float32, so give it a
prompt of tens of thousands of tokens in pieces (`generate(prefill_chunk_size=...)`, or several calls with one cache).
Inference only. Sequences are padded on the left or not at all.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn

try:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache, DynamicCache
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32Model
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention, Glm5NextTextModel
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaModel
except ImportError as error:
    raise ImportError(
        f"torch_sparse_mla.integrations.transformers needs Transformers 5.17 or newer ({error}); "
        "run 'pip install \"transformers>=5.17\"'"
    ) from error

from .. import sharding
from ..dcp.contract import STRATEGIES
from ..decode.api import merge_partial_attention, sparse_ckv_decode
from ..records import LATENT_DIM, LAYOUTS, ROPE_DIM, dequantise_records, quantise_records
from .loopback_ranks import MAX_STEP_QUERIES
from .paged_cache import CacheSettings, Dcp, NewStates, SparseMlaLayer, TokenPages

__all__ = [
    "Dcp",
    "cache_bytes_per_token",
    "convert",
    "fake_quantise",
    "layouts_for",
    "new_cache",
    "reference_bytes_per_token",
    "restore",
]

IMPLEMENTATION = "torch_sparse_mla"
# Query rows x heads in one call of the attention operator: 38 MB of absorbed float32 queries.
HEAD_ROWS_PER_CALL = 16_384


def convert(model: PreTrainedModel, layout: str, dcp: Dcp | None = None, page_size: int = 64) -> PreTrainedModel:
    """Make a model's sparse-MLA layers run on this package's operators, in place.

    Args:
        model: a GlmMoeDsa, DeepseekV32 or Glm5Next model, of any head; quantised or adapted projections are fine.
        layout: record layout of the cache, one of `layouts_for(model)`.
        dcp: shards of the cache, all in this process; None: one.
        page_size: records in a page; a multiple of `dcp.interleave`.
    Returns: `model`. Converting a converted model gives it the new settings; caches made before are then refused.
    Raises: ValueError for another kind of model, a layout that does not fit it, or a geometry that cannot be.
    """
    settings = CacheSettings(layout, dcp or Dcp(), page_size)
    sharding.check_geometry(page_size, 0, settings.dcp.world, settings.dcp.interleave)
    _check_model("convert", model, layout)
    _check_strategy(model, settings.dcp)
    restore(model)
    for backbone in _modules(model, _BACKBONES):
        backbone._attention_before_convert = backbone.config._attn_implementation
        backbone.set_attn_implementation(IMPLEMENTATION)
        backbone.register_forward_pre_hook(_check_forward, with_kwargs=True)
    for attention in _modules(model, tuple(_SPARSE)):
        attention.__class__ = _SPARSE[type(attention)]
        attention.cache_settings = settings
        attention.absorbed = None
        absorbed_weights(attention)
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `convert` and `fake_quantise`: Transformers' own classes and attention implementation. Returns `model`."""
    for backbone in _modules(model, _BACKBONES):
        if hasattr(backbone, "_attention_before_convert"):
            backbone.set_attn_implementation(backbone._attention_before_convert)
            del backbone._attention_before_convert
        # Found by what they call: a handle would not survive a deep copy of the model.
        for key in [key for key, hook in backbone._forward_pre_hooks.items() if hook is _check_forward]:
            del backbone._forward_pre_hooks[key]
            backbone._forward_pre_hooks_with_kwargs.pop(key, None)
    for attention in _modules(model, tuple(_ORIGINAL)):
        attention.__class__ = _ORIGINAL[type(attention)]
        for name in ("cache_settings", "absorbed"):
            attention.__dict__.pop(name, None)
    return model


def fake_quantise(model: PreTrainedModel, layout: str) -> PreTrainedModel:
    """The oracle for a converted model: Transformers' own attention, on states rounded as the records round them.

    In place; returns `model`. Raises: ValueError as `convert` does.
    """
    _check_model("fake_quantise", model, layout)
    restore(model)
    for attention in _modules(model, tuple(_FAKE_QUANTISED)):
        attention.__class__ = _FAKE_QUANTISED[type(attention)]
        attention.cache_settings = CacheSettings(layout)
    return model


def new_cache(model: PreTrainedModel, batch: int, max_len: int) -> Cache:
    """An empty cache for a converted model: a paged pool of records per sparse-MLA layer, on the layer's device.

    Args:
        model: a converted model.
        batch: sequences; for beam search, batch x num_beams.
        max_len: tokens that a sequence can hold, padding included. All memory is taken here, that of index keys (in
            the model's dtype) at the first forward.
    Returns: a Transformers `Cache`. Besides the sparse-MLA layers it has what Transformers gives the other layers.
    Raises: ValueError for a model that is not converted. A forward that would pass `max_len` raises and writes nothing.
    """
    attentions = _converted("new_cache", model)
    backbone = next(_modules(model, _BACKBONES))
    layers = DynamicCache(config=backbone.config).layers
    pages: dict[torch.device, TokenPages] = {}
    for attention in attentions:
        device = attention.o_proj.weight.device
        if device not in pages:
            pages[device] = TokenPages(attention.cache_settings, batch, max_len, device)
        layers[attention.layer_idx] = layer = SparseMlaLayer(pages[device])
        if attention.indexer is not None:
            full = layer
        elif full.pages is layer.pages:
            layer.place = len(full.followers)
            full.followers.append(layer)
            layer.pages.shared_layers = max(layer.pages.shared_layers, len(full.followers))
    return Cache(layers=layers)


def layouts_for(model: PreTrainedModel) -> tuple[str, ...]:
    """The record layouts that a model's sparse-MLA layers can use; empty for any other model."""
    widths = {(attention.kv_lora_rank, attention.qk_rope_head_dim) for attention in _modules(model, _ATTENTIONS)}
    return tuple(layout.name for layout in LAYOUTS.values() if widths == {(LATENT_DIM, ROPE_DIM if layout.rope else 0)})


def cache_bytes_per_token(model_or_cache: PreTrainedModel | Cache) -> int:
    """Bytes of CKV records that one token takes, over all sparse-MLA layers of a converted model or of its cache."""
    if isinstance(model_or_cache, Cache):
        holders = [layer.pages.settings for layer in model_or_cache.layers if isinstance(layer, SparseMlaLayer)]
    else:
        holders = [attention.cache_settings for attention in _converted("cache_bytes_per_token", model_or_cache)]
    return sum(LAYOUTS[settings.layout].record_bytes for settings in holders)


def reference_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of latent and RoPE part in the model's dtype, over the same layers: what Transformers' own cache takes.

    (Transformers 5.17 takes many times more: it caches the expanded keys and values of every head.)
    """
    return sum(
        (attention.kv_lora_rank + attention.qk_rope_head_dim) * attention.kv_a_layernorm.weight.element_size()
        for attention in _modules(model, _ATTENTIONS)
    )


def sparse_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: SparseMlaLayer | NewStates,
    value: SparseMlaLayer | NewStates,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention function of converted models, as Transformers calls it.

    Args:
        query: [batch, heads, queries, nope + rope].
        key: the layer's cache, already written, or states without a cache; `value` is the same object.
        attention_mask: [batch, 1, queries, tokens]; for glm5_next (`indices` None) the selected tokens themselves.
        indices: [batch, queries, K] selected tokens, which may lie in a query's future: the mask decides.
    Returns: [batch, queries, heads, v] attention output, and None for the weights.
    """
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError(
            "torch_sparse_mla.integrations.transformers: gradients: got a forward that records them; allowed: "
            "inference (torch.no_grad(), or model.requires_grad_(False))"
        )
    layer = key if isinstance(key, SparseMlaLayer) else _uncached(module, key)
    selected, visible = (attention_mask, None) if indices is None else (indices, attention_mask)
    if layer is key and layer.pages.ranks is not None and query.shape[2] <= MAX_STEP_QUERIES:
        return _decode_step(module, query, layer, selected, visible, scaling), None
    slots = layer.pages.slots_of_selected(selected, visible)
    batch, heads, queries, _ = query.shape
    rows = query.transpose(1, 2).flatten(0, 1)
    value_weight = absorbed_weights(module)[1]
    step = max(HEAD_ROWS_PER_CALL // heads, 1)
    outputs = []
    for start in range(0, batch * queries, step):
        latent = _attend(
            _absorbed(module, rows[start : start + step]),
            layer,
            [shard[start : start + step] for shard in slots],
            scaling,
        )
        outputs.append(torch.einsum("rhc,hvc->rhv", latent, value_weight))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.unflatten(0, (batch, queries)), None


def _decode_step(
    module: nn.Module,
    query: torch.Tensor,
    layer: SparseMlaLayer,
    selected: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attention [batch, queries, heads, v] by the loopback ranks, a share of the heads on each."""
    batch, _, queries, _ = query.shape
    absorbed = _absorbed(module, query.transpose(1, 2).flatten(0, 1))
    latent = layer.pages.ranks.attend(absorbed, layer, selected, visible, scaling)
    return torch.einsum("rhc,hvc->rhv", latent, absorbed_weights(module)[1]).unflatten(0, (batch, queries))


def _absorbed(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Queries [rows, heads, nope + rope] as they meet records: [rows, heads, 512 + rope]."""
    nope, rope = rows.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([torch.einsum("rhn,hnc->rhc", nope, absorbed_weights(module)[0]), rope], -1)


def absorbed_weights(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK [heads, nope, 512] and W_UV [heads, v, 512]: the two halves of `kv_b_proj`, head by head.

    Views of the weight of a plain `nn.Linear`, hence never stale. Any other projection (quantised, adapted) is applied
    to the identity, and again whenever one of its tensors was changed or replaced.
    """
    projection = module.kv_b_proj
    if type(projection) is nn.Linear and projection.bias is None:
        weight = projection.weight
    else:
        weight = _applied_to_identity(module)
    halves = weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    return halves[:, : module.qk_nope_head_dim], halves[:, module.qk_nope_head_dim :]


def _applied_to_identity(module: nn.Module) -> torch.Tensor:
    # The compiler would trace the comparison below into a graph break; `convert` and any eager call have filled it.
    if torch.compiler.is_compiling() and module.absorbed is not None:
        return module.absorbed[1]
    tensors = list(chain(module.kv_b_proj.parameters(), module.kv_b_proj.buffers()))
    state = [(tensor, 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors]
    known = module.absorbed[0] if module.absorbed is not None else []
    same = len(known) == len(state) and all(
        old[0] is new[0] and old[1:] == new[1:] for old, new in zip(known, state, strict=True)
    )
    if module.absorbed is None or not same:
        norm = module.kv_a_layernorm.weight
        with torch.no_grad():
            identity = torch.eye(LATENT_DIM, dtype=norm.dtype, device=norm.device)
            if bool(module.kv_b_proj(torch.zeros_like(identity[:1])).any()):
                raise ValueError(
                    "torch_sparse_mla.integrations.transformers: kv_b_proj: got a projection with a bias; allowed: a "
                    "linear map without one, which attention over latents can absorb"
                )
            module.absorbed = (state, module.kv_b_proj(identity).T.contiguous())
    return module.absorbed[1]


def _attend(q: torch.Tensor, layer: SparseMlaLayer, slots: list[torch.Tensor], scaling: float) -> torch.Tensor:
    """Attention [rows, heads, 512] over the records of all shards, each by itself and then merged."""
    layout = layer.pages.settings.layout
    partials = [
        sparse_ckv_decode(q, records, own_slots, softmax_scale=scaling, layout=layout)
        for records, own_slots in zip(layer.records, slots, strict=True)
    ]
    if len(partials) == 1:
        return partials[0][0]
    partial_out, partial_lse = (torch.stack(parts) for parts in zip(*partials, strict=True))
    return merge_partial_attention(partial_out, partial_lse)[0]


def _uncached(module: nn.Module, states: NewStates) -> SparseMlaLayer:
    """A pool for one forward without a cache: the same records, hence the same result."""
    batch, _, count, _ = states.shape
    layer = SparseMlaLayer(TokenPages(module.cache_settings, batch, count, states.latent.device))
    layer.update(states, states)
    return layer


class _SparseAttention:
    """Latents stay compressed: what would be key and value states is the cache layer that holds them."""

    def expand_kv(self, latent: torch.Tensor | SparseMlaLayer, rope: torch.Tensor | SparseMlaLayer) -> tuple:
        states = latent if isinstance(latent, SparseMlaLayer) else NewStates(latent, rope)
        return states, states


class SparseGlmMoeDsaAttention(_SparseAttention, GlmMoeDsaAttention):
    pass


class SparseDeepseekV32Attention(_SparseAttention, DeepseekV32Attention):
    pass


class SparseGlm5NextTextAttention(_SparseAttention, Glm5NextTextAttention):
    def build_attention_mask_from_topk(
        self, topk_indices: torch.Tensor, query_states: torch.Tensor, kv_length: int
    ) -> torch.Tensor:
        """The selection itself: its indexer leaves out the future and padding already, as -1."""
        return topk_indices


class _FakeQuantisedAttention:
    """Transformers' attention on what the record codec leaves of latents and RoPE parts."""

    def expand_kv(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.cache_settings.layout
        records = quantise_records(latent, rope if rope.shape[-1] else None, layout)
        exact = torch.promote_types(latent.dtype, torch.float32)
        rounded_latent, rounded_rope = dequantise_records(records, layout, exact)
        rounded_rope = rope if rounded_rope is None else rounded_rope.to(rope.dtype)
        return super().expand_kv(rounded_latent.to(latent.dtype), rounded_rope)


class FakeQuantisedGlmMoeDsaAttention(_FakeQuantisedAttention, GlmMoeDsaAttention):
    pass


class FakeQuantisedDeepseekV32Attention(_FakeQuantisedAttention, DeepseekV32Attention):
    pass


class FakeQuantisedGlm5NextTextAttention(_FakeQuantisedAttention, Glm5NextTextAttention):
    pass


_BACKBONES = (GlmMoeDsaModel, DeepseekV32Model, Glm5NextTextModel)
_SPARSE = {
    GlmMoeDsaAttention: SparseGlmMoeDsaAttention,
    DeepseekV32Attention: SparseDeepseekV32Attention,
    Glm5NextTextAttention: SparseGlm5NextTextAttention,
}
_FAKE_QUANTISED = {
    GlmMoeDsaAttention: FakeQuantisedGlmMoeDsaAttention,
    DeepseekV32Attention: FakeQuantisedDeepseekV32Attention,
    Glm5NextTextAttention: FakeQuantisedGlm5NextTextAttention,
}
_ORIGINAL = {swapped: original for table in (_SPARSE, _FAKE_QUANTISED) for original, swapped in table.items()}
_ATTENTIONS = (*_SPARSE, *_ORIGINAL)

ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sparse_attention)
# Without a mask function of this name, Transformers would build no mask at all.
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)


def _modules(model: nn.Module, kinds: tuple[type, ...]) -> Iterator[nn.Module]:
    return (module for module in model.modules() if type(module) in kinds)


def _check_model(function: str, model: PreTrainedModel, layout: str) -> None:
    where = f"torch_sparse_mla.integrations.transformers.{function}"
    attentions = list(_modules(model, _ATTENTIONS))
    if not attentions or not any(_modules(model, _BACKBONES)):
        names = ", ".join(backbone.__name__ for backbone in _BACKBONES)
        raise ValueError(f"{where}: model: got {type(model).__name__}; allowed: {names}, or a model that holds one")
    fitting = layouts_for(model)
    if layout not in fitting:
        rope = attentions[0].qk_rope_head_dim
        raise ValueError(
            f"{where}: layout: got {layout!r}; allowed for latents of {attentions[0].kv_lora_rank} and a RoPE part of "
            f"{rope}: {', '.join(fitting) or 'none'}"
        )


def _check_strategy(model: PreTrainedModel, dcp: Dcp) -> None:
    where = "torch_sparse_mla.integrations.transformers.convert: dcp"
    if dcp.strategy != "in_place" and dcp.strategy not in STRATEGIES:
        allowed = ", ".join(("in_place", *STRATEGIES))
        raise ValueError(f"{where}: strategy: got {dcp.strategy!r}; allowed: {allowed}")
    heads = {attention.num_heads for attention in _modules(model, _ATTENTIONS)}
    if dcp.strategy != "in_place" and any(count % dcp.world for count in heads):
        raise ValueError(
            f"{where}: world: got {dcp.world}; allowed with strategy {dcp.strategy}: a divisor of the model's "
            f"{max(heads)} heads, of which each rank takes a share"
        )


def _converted(function: str, model: PreTrainedModel) -> list[nn.Module]:
    attentions = list(_modules(model, tuple(_SPARSE.values())))
    if not attentions:
        raise ValueError(
            f"torch_sparse_mla.integrations.transformers.{function}: model: got {type(model).__name__}, not converted; "
            "allowed: a model that convert(model, layout=...) has returned"
        )
    return attentions


def _check_forward(backbone: nn.Module, args: tuple, kwargs: dict) -> None:
    """Refuse, before any layer changes its state, a forward that the layers could not run as asked."""
    where = "torch_sparse_mla.integrations.transformers"
    inputs = [x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None]
    if not inputs:
        return
    batch, count = inputs[0].shape[:2]
    _check_padding(kwargs.get("attention_mask"), count)
    # Transformers 5.17 says past_key_values.
    cache = kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")
    if cache is None:
        use_cache = kwargs.get("use_cache")
        if backbone.config.use_cache if use_cache is None else use_cache:
            raise ValueError(f"{where}: cache: got None; allowed: new_cache(model, batch, max_len), or use_cache=False")
        return
    attention = next(_modules(backbone, tuple(_SPARSE.values())))
    layer = cache.layers[attention.layer_idx] if attention.layer_idx < len(cache.layers) else None
    if not isinstance(layer, SparseMlaLayer) or layer.pages.settings != attention.cache_settings:
        held = layer.pages.settings if isinstance(layer, SparseMlaLayer) else type(cache).__name__
        raise ValueError(
            f"{where}: cache: got {held}; allowed: new_cache(model, batch, max_len) of this model, which was converted "
            f"with {attention.cache_settings}"
        )
    layer.pages.check_room(layer.length, batch, count)


def _check_padding(mask: torch.Tensor | dict | None, queries: int) -> None:
    """Refuse right padding and holes, which the models get wrong themselves; unless it would stall a GPU's decode."""
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    for mask in masks:
        if mask is None or torch.compiler.is_compiling() or (mask.device.type != "cpu" and queries == 1):
            continue
        attended = mask[:, 0, -1] if mask.dim() == 4 else mask
        attended = attended if attended.dtype == torch.bool else (attended > 0 if mask.dim() == 2 else attended >= 0)
        bad = (attended[:, :-1] & ~attended[:, 1:]).any(-1)
        if bool(bad.any()):
            raise ValueError(
                f"torch_sparse_mla.integrations.transformers: attention_mask: got a 0 after a 1 in row "
                f"{int(bad.nonzero()[0])}; allowed: padding on the left (tokenizer.padding_side = 'left')"
            )
