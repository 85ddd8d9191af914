"""Greedy decoding of one model by Transformers and by the operators, measured and compared. Used by `demo`.

    prompt[:-1] -> context -> prompt[-1] -> token 0 -> token 1 -> ...      each arrow one decode step, each step timed

A short context is computed by each side for itself. A long one, which costs Transformers far more than all that
follows, is computed once by Transformers; the operators' cache gets its latents, written as records of each layout.

The operators' tokens are judged by an oracle: Transformers on latents that are rounded as the layout rounds them. It
scores prompt and generated tokens in one forward, and would have generated the same tokens as long as its highest logit
names, at each position, the token that was generated. Where the two part, the oracle's own lead of first over second
(`gap`) says whether the difference in arithmetic explains it.
"""

import copy
import inspect
import statistics
import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ..integrations import transformers as integration
from ..integrations.paged_cache import SparseMlaLayer
from ..integrations.static_step import StaticStep
from ..records.layouts import LATENT_DIM, LAYOUTS

# Transformers' indexer holds queries x heads x context scores in float32 at once: 0.3 GB at 512 x 32 x 4096.
PREFILL_CHUNK = 512
LONGEST_OWN_CONTEXT = 1024
# A token may differ where the oracle's gap is at most this many times the largest logit difference of that position.
GAP_FACTOR = 10
# Rounding differences of 1e-6 now and then tip a latent over to its neighbouring code, which moves a logit a little. A
# lost record moves one by more than 1.
MAX_LOGIT_DIFF = {"bf16": 1e-2, "e4m3": 0.1, "e2m1": 0.2}
MAX_LOGIT_DIFF_LOW_PRECISION = 0.5


@dataclass
class Context:
    """All but the last token of a prompt, as Transformers alone takes it, and how it goes on from there."""

    prompt: torch.Tensor
    cache: Cache
    tokens: list[int]
    ms_per_token: float

    @property
    def length(self) -> int:
        return self.prompt.shape[1]

    @property
    def is_shared(self) -> bool:
        """Whether the operators take over this cache. (Transformers before 5.24 keeps no latents in it.)"""
        has_latents = all(layer.keys.shape[1] == 1 and layer.keys.shape[-1] == LATENT_DIM for layer in self.attention)
        return self.length > LONGEST_OWN_CONTEXT and has_latents

    @property
    def attention(self) -> list[CacheLayerMixin]:
        """The cache's attention layers; linear attention keeps no keys."""
        return [layer for layer in self.cache.layers if getattr(layer, "keys", None) is not None]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache, without index keys: latent and RoPE part, or keys and values."""
        states = [state for layer in self.attention for state in (layer.keys, layer.values)]
        return sum(state[0, :, 0].numel() * state.element_size() for state in states)


def forward(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache | None, keep: int) -> tuple[torch.Tensor, Cache]:
    """Logits [keep, vocabulary] of the last tokens, and the cache."""
    # Transformers before 5.24 says past_key_values; later versions take it with a warning.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output = model(input_ids=tokens, use_cache=True, logits_to_keep=keep, **{name: cache})
    return output.logits[0], output[name]


def prefill(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache | None = None) -> Cache | None:
    """Run tokens through the model, a bounded number at a time, for the sake of the cache."""
    for chunk in tokens.split(PREFILL_CHUNK, dim=1):
        _, cache = forward(model, chunk, cache, keep=1)
    return cache


def decode(
    model: PreTrainedModel, cache: Cache, first: torch.Tensor, count: int, mode: str = "eager"
) -> tuple[list[int], torch.Tensor, float]:
    """Generate `count` tokens greedily after token `first` [1, 1]. Returns tokens, logits, median ms of a step."""
    if mode != "eager":
        return _decode_static(model, cache, first, count, mode)
    token, tokens, logits, times = first, [], [], []
    for _ in range(count):
        started = _now(first.device)
        step_logits, cache = forward(model, token, cache, keep=1)
        token = step_logits.argmax(-1, keepdim=True)
        times.append(_now(first.device) - started)
        tokens.append(int(token))
        logits.append(step_logits)
    # The first step pays for lazy initialisation.
    return tokens, torch.cat(logits), 1e3 * statistics.median(times[1:] or times)


def _decode_static(
    model: PreTrainedModel, cache: Cache, first: torch.Tensor, count: int, mode: str
) -> tuple[list[int], torch.Tensor, float]:
    """The same with a step of fixed shapes, compiled or in CUDA graphs."""
    static = StaticStep(model, cache)
    static.token.copy_(first)
    tokens, logits, times = [], [], []
    with static.ready(mode) as step:
        for _ in range(count):
            started = _now(first.device)
            step_logits = step(static.token, static.position)
            static.token.copy_(step_logits.argmax(-1, keepdim=True))
            static.position.add_(1)
            times.append(_now(first.device) - started)
            tokens.append(int(static.token))
            logits.append(step_logits.clone())
    return tokens, torch.cat(logits), 1e3 * statistics.median(times[1:] or times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def transformers_context(model: PreTrainedModel, prompt: torch.Tensor, count: int) -> Context:
    """Transformers alone: the context of a prompt [1, tokens], then `count` tokens from there."""
    cache = prefill(model, prompt[:, :-1])
    tokens, _, ms = decode(model, copy.deepcopy(cache), prompt[:, -1:], count)
    return Context(prompt, cache, tokens, ms)


@dataclass
class Run:
    """One generation through the operators.

    Attributes:
        tokens, logits, oracle_logits: what was generated, and what the oracle says of it [count, vocabulary].
        result: all that the demo reports.
    """

    tokens: list[int]
    logits: torch.Tensor
    oracle_logits: torch.Tensor
    result: dict


def measure(
    model: PreTrainedModel,
    layout: str,
    context: Context,
    count: int,
    dcp: integration.Dcp | None = None,
    unsharded: Run | None = None,
    mode: str = "eager",
) -> Run:
    """Generate `count` tokens through the operators, and have the oracle judge them.

    Args:
        dcp: shards and strategy; None: one shard.
        unsharded: the eager run with one shard, which has to give the same tokens by the same gates.
        mode: "eager", or how a step of fixed shapes runs: "compile", "piecewise", "full".
    """
    prompt = context.prompt
    integration.convert(model, layout, dcp)
    try:
        cache = integration.new_cache(model, batch=1, max_len=context.length + count)
        if context.is_shared:
            _take_over(cache, context.cache)
        else:
            prefill(model, prompt[:, :-1], cache)
        tokens, logits, ms = decode(model, cache, prompt[:, -1:], count, mode)
        record_bytes = integration.cache_bytes_per_token(cache)
        strategy = _strategy(cache, dcp)
        if unsharded is not None and unsharded.tokens == tokens:
            oracle_logits = unsharded.oracle_logits
        else:
            oracle_logits = _score(model, layout, context, tokens)
    finally:
        integration.restore(model)
    exact = model.dtype == torch.float32
    verdict = judge(layout, tokens, logits.float(), oracle_logits.float(), exact)
    if unsharded is not None:
        verdict["faults"] += _faults_against_unsharded(layout, tokens, logits, unsharded, exact)
    result = {
        "world": 1 if dcp is None else dcp.world,
        **strategy,
        "context": context.length,
        "tokens": tokens,
        "plain_tokens": context.tokens,
        **verdict,
        "plain_first_divergence": first_difference(tokens, context.tokens),
        "ms_per_token": ms,
        "reference_ms_per_token": context.ms_per_token,
        "speedup": context.ms_per_token / ms,
        "record_bytes_per_token": record_bytes,
        "reference_bytes_per_token": context.bytes_per_token,
    }
    return Run(tokens, logits, oracle_logits, result)


def _strategy(cache: Cache, dcp: integration.Dcp | None) -> dict[str, str]:
    """The strategy that was asked for, and the one that ran."""
    if dcp is None:
        return {"strategy": "local", "chosen": "local"}
    ranks = next(layer.pages.ranks for layer in cache.layers if isinstance(layer, SparseMlaLayer))
    return {"strategy": dcp.strategy, "chosen": ranks.explain()["strategy"]}


def _score(model: PreTrainedModel, layout: str, context: Context, tokens: list[int]) -> torch.Tensor:
    """The oracle's logits [count, vocabulary] at the positions of generated tokens."""
    prompt = context.prompt
    integration.fake_quantise(model, layout)
    generated = torch.tensor([tokens[:-1]], dtype=prompt.dtype, device=prompt.device)
    continued = torch.cat([prompt[:, -1:], generated], 1)
    oracle_cache = copy.deepcopy(context.cache) if context.is_shared else prefill(model, prompt[:, :-1])
    return forward(model, continued, oracle_cache, keep=len(tokens))[0]


def _faults_against_unsharded(
    layout: str, tokens: list[int], logits: torch.Tensor, unsharded: Run, exact: bool
) -> list[str]:
    """What fails the gates with the unsharded run as the oracle. Beyond a token that differs, nothing is comparable."""
    first = first_difference(tokens, unsharded.tokens)
    count = len(tokens) if first is None else first + 1
    verdict = judge(layout, tokens[:count], logits[:count].float(), unsharded.logits[:count].float(), exact)
    return [
        f"against the eager run with one shard: {fault.replace('Transformers', 'that')}" for fault in verdict["faults"]
    ]


def _take_over(cache: Cache, source: Cache) -> None:
    """Fill an empty cache with the context that Transformers' own cache holds."""
    for index, layer in enumerate(cache.layers):
        taken = source.layers[index]
        if not isinstance(layer, SparseMlaLayer):
            cache.layers[index] = copy.deepcopy(taken)
            continue
        layer.update(taken.keys, taken.values)
        if taken.indexer_keys is not None:
            layer.update_indexer(taken.indexer_keys)


def judge(
    layout: str, tokens: list[int], logits: torch.Tensor, oracle: torch.Tensor, exact: bool, excused: int = 0
) -> dict:
    """Compare generated tokens and logits [rows, vocabulary] with the oracle's.

    Args:
        tokens: what the last rows generated; rows before those, or all if there are none, are a prompt's.
        exact: the model computes in float32. Then no token may differ with bf16 records.
        excused: rows whose logits may differ by any finite amount.
    Returns: "tokens_equal", "first_divergence" (None if equal), "gap_at_divergence", "max_logit_diff",
        "logit_limit", "rows_beyond" (the limit), "smallest_gap", "oracle_tokens", and "faults": what fails the gate, in
        words.
    """
    rows_difference = (logits - oracle).abs().amax(-1)
    stored = LAYOUTS[layout].latent
    limit = MAX_LOGIT_DIFF[stored] if exact else MAX_LOGIT_DIFF_LOW_PRECISION
    worst = float(rows_difference.max())
    # Written so that NaN fails.
    beyond = int((~(rows_difference <= limit)).sum())
    faults = []
    if beyond > excused or not worst < float("inf"):
        but = f" in all but {excused} of {len(logits)} rows, and it is {beyond}" if excused else ""
        faults.append(f"logits differ by up to {worst:.1e}; allowed {limit:.0e}{but}")
    oracle, difference = oracle[len(oracle) - len(tokens) :], rows_difference[len(logits) - len(tokens) :]
    oracle_tokens = oracle.argmax(-1).tolist()
    best, second = oracle.topk(2, dim=-1).values.unbind(-1)
    gap = best - second
    for position, (token, expected) in enumerate(zip(tokens, oracle_tokens, strict=True)):
        if token == expected:
            continue
        explained = bool(gap[position] <= GAP_FACTOR * difference[position])
        if not explained or (exact and stored == "bf16"):
            faults.append(
                f"token {position} is {token}, Transformers says {expected} with a lead of {float(gap[position]):.1e} "
                f"against a logit difference of {float(difference[position]):.1e}"
            )
            break
    first = first_difference(tokens, oracle_tokens)
    return {
        "tokens_equal": first is None,
        "first_divergence": first,
        "gap_at_divergence": None if first is None else float(gap[first]),
        "max_logit_diff": worst,
        "logit_limit": limit,
        "rows_beyond": beyond,
        "smallest_gap": float(gap.min()) if tokens else None,
        "oracle_tokens": oracle_tokens,
        "faults": faults,
    }


def first_difference(tokens: list[int], others: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
