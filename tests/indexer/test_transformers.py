"""The selector in its exact form against the indexer of Transformers' `glm5_next`, row by row.

Both get the same projections; Transformers' `topk` breaks ties as it likes, and sums in another order, so that sets may
differ where a score is within a margin of the last one selected. In order, scores must not fall by more than that.
"""

import pytest
import torch
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from torch_sparse_mla import c4_merge_pools, c4_select, c4_write_index_keys, exact_index_queries, quantise_index_queries
from torch_sparse_mla.integrations.tiny_models import build

from .cases import empty_pools

TOPK = 64
PAGE_SIZE = 256
# Standard deviations of a row's scores; the page asks for 1e-5 in float32.
MARGIN = 1e-5


class IndexerCache:
    """What the indexer asks of a cache: its packed states, and the shape of the keys."""

    def __init__(self) -> None:
        self.layers, self.states = [self], None

    @property
    def keys(self) -> torch.Tensor:
        return self.states

    def get_seq_length(self) -> int:
        return self.states.shape[1]

    def update_indexer(self, states: torch.Tensor, layer: int) -> torch.Tensor:
        self.states = states if self.states is None else torch.cat([self.states, states], 1)
        return self.states


@pytest.fixture(scope="module")
def indexer() -> Glm5NextTextIndexer:
    model = build("glm5_next")
    found = next(module for module in model.modules() if isinstance(module, Glm5NextTextIndexer))
    found.layer_idx = 0
    return found


@torch.no_grad()
def projections(indexer: Glm5NextTextIndexer, hidden: torch.Tensor, residual: torch.Tensor) -> tuple:
    """Queries, keys, gates and weights of [tokens, ...], as the model projects them."""
    q = indexer.wq_b(residual).view(-1, indexer.n_heads, 128)
    keys = indexer.k_norm(indexer.wk(hidden))
    gates = torch.nn.functional.linear(hidden, indexer.index_kpool_compress_gate)
    return q, keys, gates, indexer.weights_proj(hidden)


def scores_of(indexer: Glm5NextTextIndexer, q: torch.Tensor, weights: torch.Tensor, keys, gates) -> torch.Tensor:
    """float64 [rows, pools]"""
    whole = len(keys) // 4
    keys, gates = (states[: 4 * whole].double().unflatten(0, (whole, 4)) for states in (keys, gates))
    pooled = ((gates + indexer.index_kpool_compress_ape.double()).softmax(1) * keys).sum(1)
    products = torch.relu(q.double() @ pooled.T * 128**-0.5)
    return (weights.double().unsqueeze(1) @ products).squeeze(1) * indexer.n_heads**-0.5


def select(indexer, form: str, world: int, interleave: int, parts: list[tuple[int, int]], projected: tuple) -> list:
    """(topk, counts) of each part, over `world` ranks."""
    q, keys, gates, weights = projected
    bias = indexer.index_kpool_compress_ape.detach().float()
    blocks = -(-len(keys) // (PAGE_SIZE * world))
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).int().view(1, -1)
    pages = [empty_pools(form, blocks, PAGE_SIZE) for _ in range(world)]
    dtype = torch.bfloat16 if form == "serving" else torch.float32
    rings = [torch.full((1, 4, 2, 128), float("nan"), dtype=dtype) for _ in range(world)]
    queries, factors = (quantise_index_queries if form == "serving" else exact_index_queries)(q, weights)
    results = []
    for begin, end in parts:
        positions = torch.arange(begin, end, dtype=torch.int32)
        vectors = [torch.tensor(values, dtype=torch.int32) for values in ([0, end - begin], [begin], [0])]
        candidates = []
        for rank in range(world):
            geometry = {"page_size": PAGE_SIZE, "interleave": interleave, "rank": rank, "world": world}
            new = (keys[begin:end].to(dtype), gates[begin:end].to(dtype), bias)
            c4_write_index_keys(*new, *vectors, table, rings[rank], pages[rank], **geometry)
            rows = (queries[begin:end].contiguous(), factors[begin:end].contiguous())
            of_row = torch.zeros_like(positions)
            candidates.append(c4_select(*rows, pages[rank], table, of_row, positions, num_pools=TOPK // 4, **geometry))
        results.append(c4_merge_pools(torch.cat(candidates), positions))
    return results


PARTS = {
    "one-chunk": [(0, 301)],
    "chunks": [(0, 130), (130, 255), (255, 301)],
    "prefill-and-decode": [(0, 290), *((token, token + 1) for token in range(290, 301))],
}


@pytest.mark.parametrize("world, interleave", [(1, 4), (2, 4), (4, 8)])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_every_row_selects_what_transformers_selects(indexer, parts, world, interleave):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(301, indexer.hidden_size, generator=generator)
    residual = torch.randn(301, indexer.q_lora_rank, generator=generator)
    projected = projections(indexer, hidden, residual)
    scores = scores_of(indexer, projected[0], projected[3], projected[1], projected[2])
    cache = IndexerCache()
    ours = select(indexer, "fp32", world, interleave, parts, projected)
    for (begin, end), (topk, counts) in zip(parts, ours, strict=True):
        states = (hidden[None, begin:end], residual[None, begin:end], torch.ones(1, end - begin, dtype=torch.bool))
        theirs = indexer(*states, cache)[0]
        for row, position in enumerate(range(begin, end)):
            assert_row(topk[row], int(counts[row]), theirs[row], scores[position], position)


def assert_row(ours: torch.Tensor, count: int, theirs: torch.Tensor, scores: torch.Tensor, position: int) -> None:
    visible, tail = (position + 1) // 4, (position + 1) % 4
    selected = min(visible, TOPK // 4)
    assert count == 4 * selected + tail and (ours[count:] == -1).all() and (ours[:count] >= 0).all()
    assert ours[4 * selected : count].tolist() == list(range(position + 1 - tail, position + 1))
    pools = ours[: 4 * selected].view(-1, 4)
    assert torch.equal(pools, pools[:, :1] // 4 * 4 + torch.arange(4))
    pools = (pools[:, 0] // 4).tolist()
    others = theirs[theirs >= 0].tolist()
    assert len(set(others)) == len(others) == count
    margin = MARGIN * float(scores[:visible].std()) if visible > 1 else 0.0
    if visible:
        assert (scores[pools].diff() <= margin).all(), "in the order of scores"
        least = scores[:visible].topk(selected).values[-1]
        for token in set(ours[:count].tolist()) ^ set(others):
            assert abs(scores[token // 4] - least) <= margin, f"position {position}, token {token}"


def test_a_dropped_pool_would_be_noticed(indexer):
    """The comparison has teeth: scores differ by far more than the margin."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(301, indexer.hidden_size, generator=generator)
    q, keys, gates, weights = projections(indexer, hidden, torch.randn(301, indexer.q_lora_rank, generator=generator))
    scores = scores_of(indexer, q, weights, keys, gates)[300].sort(descending=True).values
    assert (scores[15] - scores[16]) > 100 * MARGIN * scores.std()


def test_the_serving_form_overlaps_with_the_exact_one(indexer):
    """Quantisation to e4m3 changes few pools: those near the last one selected, by at most a quarter of a deviation."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(301, indexer.hidden_size, generator=generator)
    projected = projections(indexer, hidden, torch.randn(301, indexer.q_lora_rank, generator=generator))
    scores = scores_of(indexer, projected[0], projected[3], projected[1], projected[2])
    ((topk, counts),) = select(indexer, "serving", 2, 4, [(0, 301)], projected)
    shared = 0
    for position in range(200, 301):
        visible = (position + 1) // 4
        row = scores[position, :visible]
        best = row.topk(TOPK // 4)
        ours = set((topk[position, :TOPK:4] // 4).tolist())
        shared += len(ours & set(best.indices.tolist()))
        for pool in ours ^ set(best.indices.tolist()):
            assert abs(row[pool] - best.values[-1]) <= 0.25 * row.std()
        assert int(counts[position]) == TOPK + (position + 1) % 4
    assert shared / (101 * TOPK // 4) > 0.9
