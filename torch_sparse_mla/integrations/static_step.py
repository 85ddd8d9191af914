"""A decode step of a converted model with fixed shapes, which compilers and CUDA graphs take as it is.

    eager   the cache's length is a Python integer: shapes grow with every token
    static  the position is a tensor; masks, index keys and slots span the whole cache, and what lies beyond is masked

One step for one token of each sequence: `StaticStep(model, cache).generate(first, count, mode)`.
"""

import contextlib
import inspect
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..graphs import CompiledStep, compile
from .paged_cache import SparseMlaLayer

WHERE = "torch_sparse_mla.integrations.static_step"
# Modes of the demo -> of `compile`.
MODES = {"compile": "NONE", "piecewise": "PIECEWISE", "full": "FULL"}


class StaticStep:
    """The step of one cache, from where it stands. Meanwhile nobody else may use the cache.

    A token beyond the cache's `max_len` is not written and selects what is there: count the steps.

    Raises: ValueError for a cache with layers of another kind (linear attention), whose shards are ranks, or that is
        full.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, *, backend: str = "inductor") -> None:
        self.model, self.cache, self.backend = model, cache, backend
        others = [type(layer).__name__ for layer in cache.layers if not isinstance(layer, SparseMlaLayer)]
        if others:
            raise ValueError(
                f"{WHERE}: cache: got layers of {others[0]}, which keep states of their own; allowed: a model whose "
                "layers are all sparse MLA (glm_moe_dsa, deepseek_v32)"
            )
        self.layers: list[SparseMlaLayer] = list(cache.layers)
        self.pages = self.layers[0].pages
        if self.pages.ranks is not None or any(layer.pages is not self.pages for layer in self.layers):
            raise ValueError(f"{WHERE}: cache: got shards that are ranks, or several devices; allowed: one of each")
        length, most = self.layers[0].length, self.pages.max_len
        if length >= most:
            raise ValueError(f"{WHERE}: cache: got {length} tokens; allowed: fewer than max_len = {most}")
        device = self.pages.block_table.device
        self.token = torch.zeros(self.pages.batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self._name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def run(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocabulary] of a token [batch, 1] at a position [1], which is written into the cache."""
        visible = torch.arange(self.pages.max_len, device=token.device) <= position
        mask = visible.view(1, 1, 1, -1).expand(self.pages.batch, 1, 1, -1)
        output = self.model(
            input_ids=token,
            attention_mask=mask,
            position_ids=position.view(1, 1).expand(self.pages.batch, 1),
            use_cache=True,
            logits_to_keep=1,
            **{self._name: self.cache},
        )
        return output.logits[:, -1]

    @contextlib.contextmanager
    def ready(self, mode: str) -> Iterator[CompiledStep]:
        """The step, compiled and captured in a mode: call it with `token` and `position`, and advance these."""
        length = self.layers[0].length
        experts = _experts_that_can_be_captured(self.model, self.token.device)
        self.position.fill_(length)
        self.pages.position = self.position
        step = compile(self.run, MODES[mode], backend=self.backend)
        try:
            with experts:
                # Warm-up writes the record of the first position, which the first step then writes again.
                yield step.capture(self.token, self.position)
        finally:
            step.release()
            self.pages.position = None
            written = int(self.position)
            for layer in self.layers:
                layer._set_length(written)


@contextlib.contextmanager
def _experts_that_can_be_captured(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """On a GPU: experts as batched products of gathered weights. Other forms ask the device what each expert got."""
    before = model.config._experts_implementation if device.type == "cuda" else None
    if before is None:
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)
