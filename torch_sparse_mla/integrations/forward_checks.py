"""What a converted model checks around each forward: hooks of its backbone, the module that runs the decoder layers.

before: whatever the layers could not run as asked is refused while nothing is written yet.
after: the cache is marked whole again. A forward that raised or was interrupted leaves it marked: some layers, and the
states of linear attention, have then seen tokens that others have not.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Model
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaModel

from .paged_cache import CacheSettings, SparseMlaLayer

WHERE = "torch_sparse_mla.integrations.transformers"
# The name of the attention function.
IMPLEMENTATION = "torch_sparse_mla"
BACKBONES = (GlmMoeDsaModel, DeepseekV32Model, Glm5NextTextModel)

# Read once, because the compiler traces the hooks.
_ARGUMENTS = {backbone: tuple(inspect.signature(backbone.forward).parameters)[1:] for backbone in BACKBONES}


@dataclass(frozen=True)
class Conversion:
    """What `convert` did to a backbone, and what `restore` needs to undo it."""

    settings: CacheSettings
    layers: tuple[int, ...]
    attention_before: str


def install(backbone: nn.Module, conversion: Conversion) -> None:
    backbone.sparse_mla = conversion
    backbone.register_forward_pre_hook(begin_forward, with_kwargs=True)
    backbone.register_forward_hook(end_forward, with_kwargs=True)


def remove(backbone: nn.Module) -> None:
    del backbone.sparse_mla
    # Found by what they call: a handle would not survive a deep copy of the model.
    for hooks, with_kwargs in (
        (backbone._forward_pre_hooks, backbone._forward_pre_hooks_with_kwargs),
        (backbone._forward_hooks, backbone._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if hook in (begin_forward, end_forward)]:
            del hooks[key]
            with_kwargs.pop(key, None)


def begin_forward(backbone: nn.Module, args: tuple, kwargs: dict) -> None:
    arguments = _by_name(backbone, args, kwargs)
    embeds = arguments.get("inputs_embeds")
    inputs = arguments.get("input_ids") if embeds is None else embeds
    if inputs is None:
        return
    batch, count = inputs.shape[:2]
    _check_attention(backbone)
    _check_gradients(backbone, embeds)
    cache = _cache_of(arguments)
    if cache is None:
        use_cache = arguments.get("use_cache")
        if backbone.config.use_cache if use_cache is None else use_cache:
            raise ValueError(f"{WHERE}: cache: got None; allowed: new_cache(model, batch, max_len), or use_cache=False")
        check_padding(arguments.get("attention_mask"), count)
        return
    layers = _check_cache(backbone.sparse_mla, cache)
    layers[0].pages.check_room(layers[0].length, batch, count)
    check_padding(arguments.get("attention_mask"), count)
    layers[0].in_forward = True


def end_forward(backbone: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
    cache = _cache_of(_by_name(backbone, args, kwargs))
    if cache is None:
        return
    layers = [layer for layer in cache.layers if isinstance(layer, SparseMlaLayer)]
    layers[0].in_forward = False
    for layer in layers:
        layer.pages.forget_selection()


def _by_name(backbone: nn.Module, args: tuple, kwargs: dict) -> dict[str, object]:
    return dict(zip(_ARGUMENTS[type(backbone)], args, strict=False)) | kwargs


def _cache_of(arguments: dict[str, object]) -> Cache | None:
    # Transformers 5.17 says past_key_values.
    cache = arguments.get("cache")
    return arguments.get("past_key_values") if cache is None else cache


def _check_attention(backbone: nn.Module) -> None:
    current = backbone.config._attn_implementation
    if current != IMPLEMENTATION:
        raise ValueError(
            f"{WHERE}: attn_implementation: got {current!r}, set after convert; allowed: {IMPLEMENTATION!r} (or "
            "restore(model), which gives Transformers' own attention back)"
        )


def _check_gradients(backbone: nn.Module, embeds: torch.Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    if (embeds is not None and embeds.requires_grad) or any(x.requires_grad for x in backbone.parameters()):
        refuse_gradients()


def refuse_gradients() -> None:
    raise ValueError(
        f"{WHERE}: gradients: got a forward that records them; allowed: inference (torch.no_grad(), or "
        "model.requires_grad_(False) and inputs_embeds without requires_grad)"
    )


def _check_cache(conversion: Conversion, cache: Cache) -> Sequence[SparseMlaLayer]:
    """The sparse-MLA layers of a cache that belongs to the model and that every forward has left whole."""
    held = {i: layer for i, layer in enumerate(getattr(cache, "layers", ())) if isinstance(layer, SparseMlaLayer)}
    layers = list(held.values())
    if not layers or tuple(held) != conversion.layers or layers[0].pages.settings != conversion.settings:
        got = f"{layers[0].pages.settings} of layers {list(held)}" if layers else type(cache).__name__
        raise ValueError(
            f"{WHERE}: cache: got {got}; allowed: new_cache(model, batch, max_len) of this model, which was converted "
            f"with {conversion.settings} for layers {list(conversion.layers)}"
        )
    remedy = "allowed: a cache whose layers agree (cache.reset() and all tokens again, or a new cache)"
    first = conversion.layers[0]
    for i, layer in held.items():
        if layer.length != layers[0].length:
            raise ValueError(
                f"{WHERE}: cache: got {layer.length} tokens in layer {i} and {layers[0].length} in layer {first}, as a "
                f"forward that fails leaves them; {remedy}"
            )
    if layers[0].in_forward:
        raise ValueError(f"{WHERE}: cache: got one whose last forward did not finish; {remedy}")
    return layers


def check_padding(mask: torch.Tensor | dict | None, queries: int) -> None:
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
                f"{WHERE}: attention_mask: got a 0 after a 1 in row {int(bad.nonzero()[0])}; allowed: padding on the "
                "left (tokenizer.padding_side = 'left')"
            )
