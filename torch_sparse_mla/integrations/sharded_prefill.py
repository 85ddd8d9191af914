"""Chunked prefill of a `glm5_next` model over the ranks of a DCP group.

    with PrefillClient(model, layout="fp8_mla_nope", world=4, max_requests=2, max_len=4096, max_rows=512) as client:
        first, second = client.admit(), client.admit()
        logits = client.forward({first: tokens, second: others})       # a chunk of each; again for the next chunks
        logits = client.forward({first: [token], second: [token]}, decode=True)

Sequences of different lengths share a forward: their rows are packed, which nothing but attention notices. Transformers
keeps projections, norms, experts, hyper-connections and linear attention, request by request; records, pooled index
keys, selection and attention over W ranks are this package's (see prefill_ranks). While a client is open, modules have
subclasses of their classes, of which the indexer's alone restates something: how its projections are called. Inference
only; needs Transformers 5.24.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextAttention,
    Glm5NextTextIndexer,
    Glm5NextTextLinearAttention,
    Glm5NextTextModel,
)

from .. import sharding
from ..errors import reject
from ..gather.policy import GatherCosts
from ..indexer.contract import EXACT_DTYPES
from ..indexer.pools import POOL_TOKENS, TOKENS_PER_INDEX_PAGE
from .prefill_pages import OP, Mark, PagePool, Prefix, Request
from .prefill_ranks import CANDIDATE_BYTES, MAX_DRAFTS, PrefillRanks, PrefillSettings, ShardedLayer
from .transformers import absorbed_weights, layouts_for, restore

if "cache" not in inspect.signature(Glm5NextTextModel.forward).parameters:
    raise ImportError(
        "torch_sparse_mla.integrations.sharded_prefill needs Transformers 5.24 or newer; "
        "run 'pip install \"transformers>=5.24\"'"
    )

IMPLEMENTATION = "torch_sparse_mla_prefill"
INDEX_FORMS = ("exact", "serving")
Tokens = Sequence[int] | torch.Tensor


class PrefillClient:
    """A `glm5_next` model whose cache is sharded by token over ranks, serving several requests at a time.

    Args:
        model: a Glm5Next model of any head; its own attention is back after `close`.
        layout: of records; one of `layouts_for(model)`.
        world: ranks, a divisor of the heads; 1: unsharded.
        processes: each rank in a process of its own, those of the default group of `torch.distributed`, which all make
            the same calls. Else all ranks are in this process and take turns.
        interleave, page_size: the DCP geometry; whole pools of 4 tokens, and pages of 256 for the pooled keys.
        max_requests: requests served at the same time. There is memory for so many; prefixes that are kept take of it.
        max_len: tokens of a request.
        max_rows: rows of a chunk that may gather.
        max_tokens: tokens of all requests of a chunk together that may gather; None: all that fit.
        index_form: pooled keys "exact", as Transformers has them, or "serving": Hadamard, e4m3.
        costs: of the link, by which chunks gather or do not; None: the number of bytes decides.
    Raises: ValueError for an argument that does not fit; the model is then as it was.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layout: str,
        world: int = 1,
        processes: bool = False,
        interleave: int = POOL_TOKENS,
        page_size: int = TOKENS_PER_INDEX_PAGE,
        max_requests: int = 1,
        max_len: int = 1024,
        max_rows: int = 512,
        max_tokens: int | None = None,
        index_form: str = "exact",
        costs: GatherCosts | None = None,
    ) -> None:
        backbone = _backbone(model)
        sizes = {"world": world, "max_requests": max_requests, "max_len": max_len, "max_rows": max_rows}
        _check(model, layout, processes, interleave, page_size, index_form, sizes)
        config = backbone.config
        weight = model.get_output_embeddings().weight
        settings = PrefillSettings(
            layout=layout,
            world=world,
            processes=processes,
            interleave=interleave,
            page_size=page_size,
            max_requests=max_requests,
            max_len=max_len,
            max_rows=max_rows,
            max_tokens=max_requests * max_len if max_tokens is None else max_tokens,
            index_form=index_form,
            costs=costs,
            heads=config.num_attention_heads,
            num_pools=config.index_topk // POOL_TOKENS,
            dtype=weight.dtype,
            softmax_scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
            device=weight.device,
        )
        self.model, self.backbone, self.settings = model, backbone, settings
        self.pages = PagePool(settings.pages)
        self.ranks = PrefillRanks(settings)
        self.cache = PackedCache(
            {
                module.layer_idx: self.ranks.layer(module.indexer is not None)
                for module in backbone.modules()
                if isinstance(module, Glm5NextTextAttention)
            }
        )
        self._rows = list(reversed(range(max_requests)))
        self._whole, self._closed = True, False
        # What each forward was, in order: rows, lengths, path and reason, bytes.
        self.reports: list[dict] = []
        restore(model)
        self._attention_before = config._attn_implementation
        self._swap()

    def admit(self, prefix: Prefix | None = None) -> Request:
        """A new request, empty or after a prefix that is kept: of that nothing is computed again."""
        if not self._rows:
            reject(OP, "admit", f"request {self.settings.max_requests + 1}", "max_requests; release one first")
        if prefix is None:
            return Request(self.pages, self._rows.pop(), DynamicCache(config=self.backbone.config))
        self._check_served(prefix, Prefix)
        self.pages.hold(prefix.pages)
        states = copy.deepcopy(prefix.states)
        return Request(self.pages, self._rows.pop(), states, list(prefix.pages), prefix.length)

    def release(self, served: Request | Prefix) -> None:
        """Give back a request, or a prefix. Pages that nobody holds any more are free."""
        self._check_served(served, Request, Prefix)
        served.served = False
        self.pages.drop(served.pages)
        if isinstance(served, Request):
            self._rows.append(served.row)

    def keep_prefix(self, request: Request) -> Prefix:
        """Keep all of a request's tokens so far for requests that begin alike. They end with a page of every rank.

        Raises: ValueError elsewhere: a page that is not full would be written by two requests.
        """
        self._check_served(request)
        unit = self.settings.page_size * self.settings.world
        if not request.length or request.length % unit:
            reject(OP, "keep_prefix", f"{request.length} tokens", f"a multiple of page_size x world = {unit}")
        pages = request.pages[: request.length // unit]
        prefix = Prefix(self.pages, request.length, copy.deepcopy(request.states), pages)
        self.pages.hold(prefix.pages)
        return prefix

    def mark(self, request: Request) -> Mark:
        """Where a request is now: before draft tokens, to `roll_back` when they are rejected."""
        self._check_served(request)
        return Mark.of(request)

    def roll_back(self, request: Request, mark: Mark) -> None:
        """Forget the tokens after a mark, at most 5 (`MAX_DRAFTS`): a pool's ring keeps no more.

        Roll-backs one after another count together, and end marks of the tokens that are forgotten.
        """
        self._check_served(request)
        furthest = max(request.furthest, request.length)
        drafts = furthest - mark.length
        if mark.request is not request:
            reject(OP, "mark", "a mark of another request", "what mark gave for this one")
        if mark not in request.marks:
            reject(OP, "mark", "a mark of tokens that were rolled back", "one of tokens that the request has")
        if drafts > MAX_DRAFTS:
            reject(OP, "mark", f"a mark {drafts} tokens back", f"0 to {MAX_DRAFTS}")
        open_block = mark.length // (self.settings.page_size * self.settings.world)
        if any(self.pages.is_shared(page) for page in request.pages[open_block:]):
            reject(OP, "mark", "a mark within a prefix that others hold", "one behind it")
        request.length, request.states, request.furthest = mark.length, copy.deepcopy(mark.states), furthest
        for later in list(request.marks):
            if later.length > mark.length:
                request.marks.discard(later)

    @torch.no_grad()
    def forward(self, batch: Mapping[Request, Tokens], decode: bool = False) -> dict[Request, torch.Tensor]:
        """Run the next tokens of several requests. Ranks: all, with the same batch.

        Args:
            batch: the next tokens of each request, 1 or more.
            decode: the tokens belong to decode steps (drafts among them), which never gather.
        Returns: logits [tokens, vocabulary] of each request.
        Raises: ValueError for a batch that does not fit, before anything is written. A forward that fails later leaves
            a client that refuses the next.
        """
        device = self.settings.device
        tokens = [torch.as_tensor(values, device=device).flatten() for values in batch.values()]
        new_lengths = [len(part) for part in tokens]
        self._check_batch(batch, new_lengths)
        self._check_tokens(tokens)
        self._grow(batch, new_lengths)
        self._whole = False
        step = self.ranks.begin(list(batch), new_lengths, sum(new_lengths) if decode else 0)
        self.cache.states, self.cache.new_lengths = [request.states for request in batch], new_lengths
        hidden = self.backbone(
            input_ids=torch.cat(tokens)[None],
            position_ids=step.positions.long()[None],
            cache=self.cache,
            use_cache=True,
        ).last_hidden_state[0]
        logits = self.model.get_output_embeddings()(hidden)
        for request, new in zip(batch, new_lengths, strict=True):
            request.length += new
        self.reports.append(self._report())
        self.ranks.end()
        self._whole = True
        return dict(zip(batch, logits.split(new_lengths), strict=True))

    def explain(self) -> dict[str, object]:
        """What the policy chose last and how often for which reason, as `GatherPolicy.explain`; and the channel."""
        return {**self.ranks.policy.explain(), "channel": self.ranks.gather_slots[0].channel.explain()}

    def close(self) -> None:
        """Transformers' own classes again, and all memory given back. A second close does nothing. Ranks: all."""
        if self._closed:
            return
        self._closed = True
        for module in self.backbone.modules():
            if type(module) in _ORIGINAL:
                module.__class__ = _ORIGINAL[type(module)]
                module.__dict__.pop("absorbed", None)
        self.backbone.set_attn_implementation(self._attention_before)
        self.ranks.close()

    def __enter__(self) -> "PrefillClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _swap(self) -> None:
        for module in self.backbone.modules():
            if type(module) in _PACKED:
                module.__class__ = _PACKED[type(module)]
                if isinstance(module, Glm5NextTextAttention):
                    module.absorbed = None
        self.backbone.set_attn_implementation(IMPLEMENTATION)

    def _check_batch(self, batch: Mapping[Request, Tokens], new_lengths: list[int]) -> None:
        if self._closed or not self._whole:
            why = "closed" if self._closed else "one whose last forward did not finish"
            reject(OP, "forward", f"a client that is {why}", "an open one; make a new PrefillClient")
        if not batch:
            reject(OP, "batch", "no request", "1 or more")
        for request, new in zip(batch, new_lengths, strict=True):
            self._check_served(request)
            if not 1 <= new <= self.settings.max_len - request.length:
                allowed = f"1 to {self.settings.max_len - request.length}, up to max_len"
                reject(OP, "batch", f"{new} tokens after {request.length}", allowed)

    def _check_tokens(self, tokens: list[torch.Tensor]) -> None:
        """Their kind, and on the CPU their values: on a GPU that would wait for the device."""
        vocabulary = self.backbone.config.vocab_size
        for part in tokens:
            if part.dtype not in (torch.int32, torch.int64):
                reject(OP, "batch", f"tokens of dtype {part.dtype}", "int32 or int64")
            if not part.is_cuda and not 0 <= int(part.min()) <= int(part.max()) < vocabulary:
                reject(OP, "batch", f"tokens {int(part.min())} to {int(part.max())}", f"0 to {vocabulary - 1}")

    def _check_served(self, held: Request | Prefix, *kinds: type) -> None:
        kinds = kinds or (Request,)
        if not isinstance(held, kinds):
            reject(OP, "request", type(held).__name__, f"a {' or a '.join(kind.__name__ for kind in kinds)}")
        if held.pool is not self.pages:
            reject(OP, "request", "one of another client", "what this client's admit or keep_prefix gave")
        if not held.served:
            reject(OP, "request", "one that was released", "a request or prefix that is still held")

    def _grow(self, batch: Mapping[Request, Tokens], new_lengths: list[int]) -> None:
        """Take the pages that the new tokens need, of all requests or of none."""
        settings = self.settings
        needed = []
        for request, new in zip(batch, new_lengths, strict=True):
            held = sharding.local_length(0, request.length + new, settings.world, settings.interleave)
            needed.append(max(-(-held // settings.page_size) - len(request.pages), 0))
        taken = iter(self.pages.take(sum(needed)))
        for request, count in zip(batch, needed, strict=True):
            request.pages += [next(taken) for _ in range(count)]

    def _report(self) -> dict:
        """What the forward was and what a rank received for it, in all sparse layers; bytes of ordinary DCP in bf16."""
        step, settings, layers = self.ranks.step, self.settings, self.ranks.layers
        selecting = sum(bool(layer.pools) for layer in layers)
        candidates = (settings.world - 1) * step.rows * settings.num_pools * CANDIDATE_BYTES
        return {
            "rows": step.rows,
            "lengths": step.lengths,
            "path": step.choice.path,
            "reason": step.choice.reason,
            "gather_bytes": len(layers) * step.choice.gather_bytes,
            "ordinary_bytes": len(layers) * step.choice.ordinary_bytes,
            "candidate_bytes": selecting * candidates,
        }


class PackedCache:
    """What the model's modules are given as their cache: sharded layers, and a cache of states for each request.

    Attributes:
        layers: by layer number.
        states, new_lengths: of the requests whose rows are packed in this forward.
    """

    def __init__(self, layers: dict[int, ShardedLayer]) -> None:
        self.layers = layers
        self.states: list[Cache] = []
        self.new_lengths: list[int] = []

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[ShardedLayer, ShardedLayer]:
        layer = self.layers[layer_idx]
        layer.write(latent, rope)
        return layer, layer


class PackedAttention(Glm5NextTextAttention):
    """Latents stay compressed: what would be key and value states is the layer that holds them."""

    def expand_kv(self, latent: ShardedLayer, rope: ShardedLayer) -> tuple[ShardedLayer, ShardedLayer]:
        return latent, latent

    def build_attention_mask_from_topk(
        self, topk_indices: torch.Tensor, query_states: torch.Tensor, kv_length: int
    ) -> torch.Tensor:
        return topk_indices


class PackedIndexer(Glm5NextTextIndexer):
    """Transformers' projections; pooling, scores and selection by the ranks."""

    def forward(
        self, hidden_states: torch.Tensor, q_resid: torch.Tensor, attention_mask: torch.Tensor, cache: PackedCache
    ) -> torch.Tensor:
        hidden, residual = hidden_states[0], q_resid[0]
        q = self.wq_b(residual).unflatten(-1, (self.n_heads, self.head_dim))
        keys = self.k_norm(self.wk(hidden))
        gates = nn.functional.linear(hidden, self.index_kpool_compress_gate)
        weights = self.weights_proj(hidden.to(self.weights_proj.weight.dtype))
        return cache.layers[self.layer_idx].select(q, weights, keys, gates, self.index_kpool_compress_ape)


class PackedLinearAttention(Glm5NextTextLinearAttention):
    """A recurrence knows no rows of other requests: each request's rows by themselves, with its own states."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: PackedCache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        parts = hidden_states.split(cache.new_lengths, 1)
        run = super().forward
        return torch.cat([run(part, cache=states) for part, states in zip(parts, cache.states, strict=True)], 1)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: ShardedLayer,
    value: ShardedLayer,
    attention_mask: torch.Tensor,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention function of a client's model, as Transformers calls it.

    Args:
        query: [1, heads, rows, nope].
        key: the layer, whose records are written; `value` is the same object.
        attention_mask: [rows, K] the top-k lists themselves.
    Returns: [1, rows, heads, v], and None for the weights.
    """
    rows = query[0].transpose(0, 1)
    key_weight, value_weight = absorbed_weights(module)
    own_heads = key.ranks.own_heads()
    q = [torch.einsum("rhn,hnc->rhc", rows[:, heads], key_weight[heads]).contiguous() for heads in own_heads]
    latents = key.attend(q, attention_mask)
    values = [
        torch.einsum("rhc,hvc->rhv", latent, value_weight[heads])
        for latent, heads in zip(latents, own_heads, strict=True)
    ]
    return torch.cat(key.ranks.of_all(values), 1)[None], None


_PACKED = {
    Glm5NextTextAttention: PackedAttention,
    Glm5NextTextIndexer: PackedIndexer,
    Glm5NextTextLinearAttention: PackedLinearAttention,
}
_ORIGINAL = {packed: original for original, packed in _PACKED.items()}

ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)


def _backbone(model: PreTrainedModel) -> Glm5NextTextModel:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    backbone = next((module for module in modules if type(module) is Glm5NextTextModel), None)
    if backbone is None:
        reject(OP, "model", type(model).__name__, "a Glm5Next model with its head")
    if any(type(module) in _ORIGINAL for module in backbone.modules()):
        reject(OP, "model", "a model with an open PrefillClient", "a model without; close that client first")
    return backbone


def _check(
    model: PreTrainedModel,
    layout: str,
    processes: bool,
    interleave: int,
    page_size: int,
    index_form: str,
    sizes: dict[str, int],
) -> None:
    config = _backbone(model).config
    fitting = layouts_for(model)
    dtype = model.get_output_embeddings().weight.dtype
    if dtype not in EXACT_DTYPES:
        reject(OP, "model", f"weights in {dtype}", "float32 or bfloat16")
    if layout not in fitting:
        reject(OP, "layout", repr(layout), ", ".join(fitting) or "none for this model")
    if config.index_kpool != POOL_TOKENS or config.index_topk % POOL_TOKENS:
        reject(OP, "model", f"pools of {config.index_kpool} tokens", f"pools of {POOL_TOKENS}")
    if index_form not in INDEX_FORMS:
        reject(OP, "index_form", repr(index_form), ", ".join(INDEX_FORMS))
    for name, value in (*sizes.items(), ("interleave", interleave), ("page_size", page_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            reject(OP, name, repr(value), "an integer, 1 or more")
    heads, world = config.num_attention_heads, sizes["world"]
    if heads % world:
        reject(OP, "world", world, f"a divisor of the model's {heads} heads")
    if interleave % POOL_TOKENS:
        reject(OP, "interleave", interleave, f"a multiple of {POOL_TOKENS}, or a pool is split between ranks")
    if page_size % TOKENS_PER_INDEX_PAGE or page_size % interleave:
        reject(OP, "page_size", page_size, f"a multiple of {TOKENS_PER_INDEX_PAGE} and of the interleave {interleave}")
    if processes and (not dist.is_initialized() or dist.get_world_size() != world):
        there = dist.get_world_size() if dist.is_initialized() else "a default group that is not initialised"
        reject(OP, "world", f"{world} with processes=True", f"the processes of the default group: {there}")
