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
import torch.distributed as dist
from torch import nn

try:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache, DynamicCache
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention
except ImportError as error:
    raise ImportError(
        f"torch_sparse_mla.integrations.transformers needs Transformers 5.17 or newer ({error}); "
        "run 'pip install \"transformers>=5.17\"'"
    ) from error

from .. import sharding
from ..dcp.contract import STRATEGIES
from ..dcp.peers import why_no_peers
from ..decode.api import merge_partial_attention, sparse_ckv_decode
from ..exchange.group import LoopbackGroup, as_group
from ..records import LATENT_DIM, LAYOUTS, ROPE_DIM, dequantise_records, quantise_records
from .forward_checks import BACKBONES, IMPLEMENTATION, WHERE, Conversion, install, refuse_gradients, remove
from .loopback_ranks import MAX_STEP_QUERIES
from .paged_cache import CacheSettings, Dcp, NewStates, SparseMlaLayer, TokenPages
from .process_ranks import of_all_ranks

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

# Query rows x heads in one call of the attention operator: 38 MB of absorbed float32 queries.
HEAD_ROWS_PER_CALL = 16_384


def convert(model: PreTrainedModel, layout: str, dcp: Dcp | None = None, page_size: int = 64) -> PreTrainedModel:
    """Make a model's sparse-MLA layers run on this package's operators, in place.

    Args:
        model: a GlmMoeDsa, DeepseekV32 or Glm5Next model, of any head; quantised or adapted projections are fine.
        layout: record layout of the cache, one of `layouts_for(model)`.
        dcp: shards of the cache, all in this process or one in each of several; None: one.
        page_size: records in a page; a multiple of `dcp.interleave`.
    Returns: `model`. Converting a converted model gives it the new settings; caches made before are then refused.
    Raises: ValueError for another kind of model, weights that are not loaded, a layout that does not fit, or a geometry
        that cannot be; the model is then as it was.
    """
    dcp = Dcp() if dcp is None else dcp
    if not isinstance(dcp, Dcp):
        raise ValueError(f"{WHERE}.convert: dcp: got {dcp!r}; allowed: Dcp(world, interleave), or None")
    for name, value in (("dcp.world", dcp.world), ("dcp.interleave", dcp.interleave), ("page_size", page_size)):
        _check_int("convert", name, value)
    settings = CacheSettings(layout, dcp, page_size)
    sharding.check_geometry(page_size, 0, dcp.world, dcp.interleave)
    _check_model("convert", model, layout)
    _check_strategy(model, settings.dcp)
    _check_loaded("convert", model)
    # All that can be refused is behind us once these are made.
    absorbed = {x: None if _is_plain(x.kv_b_proj) else _absorb(x) for x in _modules(model, _ATTENTIONS)}
    restore(model)
    for backbone in _modules(model, BACKBONES):
        layers = tuple(attention.layer_idx for attention in _modules(backbone, tuple(_SPARSE)))
        install(backbone, Conversion(settings, layers, backbone.config._attn_implementation))
        backbone.set_attn_implementation(IMPLEMENTATION)
    for attention in _modules(model, tuple(_SPARSE)):
        attention.__class__ = _SPARSE[type(attention)]
        attention.cache_settings = settings
        attention.absorbed = absorbed[attention]
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `convert` and `fake_quantise`: Transformers' own classes and attention implementation. Returns `model`."""
    for backbone in _modules(model, BACKBONES):
        if hasattr(backbone, "sparse_mla"):
            backbone.set_attn_implementation(backbone.sparse_mla.attention_before)
            remove(backbone)
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
    Raises: ValueError for a model that is not converted or not loaded. A forward that would pass `max_len` raises and
        writes nothing. One that fails on its way leaves a cache that later forwards refuse, until `cache.reset()`.
    """
    attentions = _converted("new_cache", model)
    _check_loaded("new_cache", model)
    for name, value in (("batch", batch), ("max_len", max_len)):
        _check_int("new_cache", name, value)
    backbone = next(_modules(model, BACKBONES))
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
        refuse_gradients()
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

    Views of the weight of a plain `nn.Linear`, hence never stale. Any other projection (quantised, adapted, with hooks)
    is applied to the identity, and again whenever one of its tensors or settings was changed; with hooks, and in a
    compiled graph, every time.
    """
    projection = module.kv_b_proj
    weight = projection.weight if _is_plain(projection) else _applied_to_identity(module)
    halves = weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    return halves[:, : module.qk_nope_head_dim], halves[:, module.qk_nope_head_dim :]


def _has_hooks(projection: nn.Module) -> bool:
    # Offloading libraries replace `forward` of the instance instead.
    return bool(projection._forward_hooks or projection._forward_pre_hooks or "forward" in projection.__dict__)


def _is_plain(projection: nn.Module) -> bool:
    return type(projection) is nn.Linear and projection.bias is None and not _has_hooks(projection)


def _applied_to_identity(module: nn.Module) -> torch.Tensor:
    # A graph outlives the comparison below, so it computes the weight itself.
    if torch.compiler.is_compiling():
        return _image_of_identity(module)
    if module.absorbed is None or _has_hooks(module.kv_b_proj) or not _same(module.absorbed[0], _state(module)):
        module.absorbed = _absorb(module)
    return module.absorbed[1]


def _absorb(module: nn.Module) -> tuple[list[tuple], torch.Tensor]:
    """The weight of a linear projection of any kind, and the state it was made from. Raises: ValueError for a bias."""
    state = _state(module)
    norm = module.kv_a_layernorm.weight
    with torch.no_grad():
        if bool(module.kv_b_proj(torch.zeros(1, LATENT_DIM, dtype=norm.dtype, device=norm.device)).any()):
            raise ValueError(
                f"{WHERE}: kv_b_proj: got a projection with a bias; allowed: a linear map without one, which attention "
                "over latents can absorb"
            )
    return state, _image_of_identity(module)


def _image_of_identity(module: nn.Module) -> torch.Tensor:
    norm = module.kv_a_layernorm.weight
    with torch.no_grad():
        return module.kv_b_proj(torch.eye(LATENT_DIM, dtype=norm.dtype, device=norm.device)).T.contiguous()


def _state(module: nn.Module) -> list[tuple]:
    """What tells one state of a projection from another: its tensors, and plain settings such as an adapter's scale."""
    projection = module.kv_b_proj
    tensors = chain(projection.parameters(), projection.buffers())
    state = [(tensor, 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors]
    for part in projection.modules():
        values = ((name, value) for name, value in vars(part).items() if name not in _MODULE_ATTRIBUTES)
        state.append((part, repr([(name, value) for name, value in values if isinstance(value, _SETTING_TYPES)])))
    return state


def _same(old: list[tuple], new: list[tuple]) -> bool:
    return len(old) == len(new) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(old, new, strict=True))


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_SETTING_TYPES = (bool, int, float, str, list, tuple, dict)


def _attend(q: torch.Tensor, layer: SparseMlaLayer, slots: list[torch.Tensor], scaling: float) -> torch.Tensor:
    """Attention [rows, heads, 512] over the records of all shards, each by itself and then merged."""
    layout = layer.pages.settings.layout
    partials = [
        sparse_ckv_decode(q, records, own_slots, softmax_scale=scaling, layout=layout)
        for records, own_slots in zip(layer.records, slots, strict=True)
    ]
    if layer.pages.settings.dcp.processes:
        partials = list(zip(*(of_all_ranks(part) for part in partials[0]), strict=True))
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
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return (module for module in modules if type(module) in kinds)


def _check_model(function: str, model: PreTrainedModel, layout: str) -> None:
    where = f"{WHERE}.{function}"
    attentions = list(_modules(model, _ATTENTIONS))
    if not attentions or not any(_modules(model, BACKBONES)):
        names = ", ".join(backbone.__name__ for backbone in BACKBONES)
        raise ValueError(f"{where}: model: got {_kind(model)}; allowed: {names}, or a model that holds one")
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
    if dcp.processes:
        processes = dist.get_world_size() if dist.is_initialized() else None
        if processes != dcp.world:
            raise ValueError(
                f"{where}: world: got {dcp.world} with processes=True; allowed: the processes of the default group, "
                + ("which is not initialised" if processes is None else str(processes))
            )
    why = why_not(dcp, next(model.parameters()).device)
    if why is not None:
        raise ValueError(f"{where}: strategy: got {dcp.strategy!r}; allowed: another one here ({why})")
    heads = {attention.num_heads for attention in _modules(model, _ATTENTIONS)}
    if dcp.strategy != "in_place" and any(count % dcp.world for count in heads):
        raise ValueError(
            f"{where}: world: got {dcp.world}; allowed with strategy {dcp.strategy}: a divisor of the model's "
            f"{max(heads)} heads, of which each rank takes a share"
        )


def why_not(dcp: Dcp, device: torch.device) -> str | None:
    """Why the machine cannot run a strategy; None where it can."""
    if dcp.strategy != "peer_read":
        return None
    ranks = dist.group.WORLD if dcp.processes else LoopbackGroup(dcp.world, device).rank(0)
    return why_no_peers(as_group(ranks), device, "auto")


def _check_loaded(function: str, model: PreTrainedModel) -> None:
    for attention in _modules(model, _ATTENTIONS):
        for name, parameter in attention.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    f"{WHERE}.{function}: model: got {name} of attention layer {attention.layer_idx} on the meta "
                    "device; allowed: a model whose attention weights are loaded, on the device that runs them"
                )


def _check_int(function: str, name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{WHERE}.{function}: {name}: got {value!r}; allowed: an int, 1 up")


def _converted(function: str, model: PreTrainedModel) -> list[nn.Module]:
    attentions = list(_modules(model, tuple(_SPARSE.values())))
    if not attentions:
        raise ValueError(
            f"{WHERE}.{function}: model: got {_kind(model)}, not converted; allowed: a model that "
            "convert(model, layout=...) has returned"
        )
    return attentions


def _kind(model: object) -> str:
    return "None" if model is None else type(model).__name__
