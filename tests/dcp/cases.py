"""A group of one Full and some Shared layers over several decode steps: sharded ranks, and the unsharded answer."""

import dataclasses
import itertools

import torch

from torch_sparse_mla import LAYOUTS, LoopbackGroup, sharding, sparse_ckv_decode, write_ckv_records
from torch_sparse_mla.dcp import DcpSparseDecode, LinkCosts, run_loopback

POISON = 0xFF
SCALE = 0.06
_names = itertools.count()
COSTS = LinkCosts(hop_us=5.0, us_per_byte=1e-5, attend_local_us=10.0, attend_owner_us=12.0, attend_peers_us=11.0)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Two requests of two MTP rows; top-k lists share tokens between rows."""

    world: int = 3
    layout: str = "fp8_ds_mla"
    requests: int = 2
    rows_per_request: int = 2
    heads: int = 4
    topk: int = 12
    shared_layers: int = 2
    tokens: int = 40
    page_size: int = 8
    interleave: int = 2

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.page_size)


class Model:
    """Latents of every token and layer; caches of every rank, and unsharded ones, written one step at a time."""

    def __init__(self, shape: Shape, generator: torch.Generator, device: str = "cpu") -> None:
        self.shape, self.generator, self.device = shape, generator, device
        layers, dim = 1 + shape.shared_layers, LAYOUTS[shape.layout].query_dim
        self.states = torch.randn(layers, shape.requests, shape.tokens, dim, generator=generator)
        pages = shape.requests * shape.blocks
        order = torch.randperm(pages, generator=generator)
        self.block_table = order.view(shape.requests, -1).int()
        size = (layers, pages, shape.page_size, LAYOUTS[shape.layout].record_bytes)
        self.caches = [torch.full(size, POISON, dtype=torch.uint8, device=device) for _ in range(shape.world)]
        self.whole = torch.full(size, POISON, dtype=torch.uint8, device=device)

    def write(self, layer: int, tokens: torch.Tensor) -> None:
        """Store tokens [requests, n] (negative: none) of one layer, unsharded and on their owners."""
        shape = self.shape
        latent, rope = self.current(layer, tokens)
        targets = [(self.whole, 0, 1), *((cache, rank, shape.world) for rank, cache in enumerate(self.caches))]
        for cache, rank, world in targets:
            slots = sharding.local_slots(tokens, self.block_table, shape.page_size, rank, world, shape.interleave)
            write_ckv_records(latent, rope, slots.flatten().to(self.device), cache[layer], shape.layout)

    def current(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        requests = torch.arange(self.shape.requests).unsqueeze(1)
        states = self.states[layer, requests, tokens.clamp(min=0)].flatten(0, 1).to(self.device)
        return states[:, :512], states[:, 512:] if states.shape[1] > 512 else None

    def queries(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, all heads, width]"""
        shape = self.shape
        size = (shape.rows, shape.world * shape.heads, LAYOUTS[shape.layout].query_dim)
        return torch.randn(size, generator=self.generator).to(self.device, dtype)

    def unsharded(self, layer: int, q: torch.Tensor, topk: torch.Tensor, lengths: torch.Tensor, sink=None):
        shape = self.shape
        topk = torch.where(topk < lengths.unsqueeze(1), topk, -1)
        tokens = topk.view(shape.requests, -1)
        slots = sharding.local_slots(tokens, self.block_table, shape.page_size, 0, 1, shape.interleave)
        indices = slots.view_as(topk).int().to(self.device)
        return sparse_ckv_decode(q, self.whole[layer], indices, softmax_scale=SCALE, layout=shape.layout, sink=sink)


def make_ranks(
    shape: Shape, strategy: str, *, costs: LinkCosts | None = COSTS, device: str = "cpu", **options: object
) -> list[DcpSparseDecode]:
    group, name = LoopbackGroup(shape.world, device), f"dcp{next(_names)}"
    ranks = [make_rank(shape, strategy, group.rank(rank), name, costs, **options) for rank in range(shape.world)]
    run_loopback([rank.warmup_steps() for rank in ranks])
    return ranks


def make_rank(
    shape: Shape, strategy: str, group: object, name: str, costs: LinkCosts | None = COSTS, **options: object
) -> DcpSparseDecode:
    given = {
        "layout": shape.layout,
        "page_size": shape.page_size,
        "interleave": shape.interleave,
        "requests": shape.requests,
        "rows_per_request": shape.rows_per_request,
        "heads": shape.heads,
        "topk": shape.topk,
        "softmax_scale": SCALE,
        "dtype": torch.float32,
        "shared_layers": shape.shared_layers,
    }
    return DcpSparseDecode(group, strategy=strategy, costs=costs, name=name, **(given | options))


def select(shape: Shape, lengths: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Top-k lists [rows, K] with -1 and future positions among them; every second row selects its own token."""
    topk = torch.stack([torch.randperm(shape.tokens, generator=generator)[: shape.topk] for _ in lengths])
    topk[torch.rand(topk.shape, generator=generator) < 0.2] = -1
    for row in range(0, len(lengths), 2):
        topk[row][topk[row] == lengths[row] - 1] = -1
        topk[row, 3] = lengths[row] - 1 if lengths[row] > 0 else -1
    return topk.int()


def step_lengths(shape: Shape, step: int) -> torch.Tensor:
    """Lengths of the rows of a step; in step 2 the last request's last row is padding."""
    ends = torch.arange(shape.rows_per_request) + 1
    starts = torch.arange(shape.requests) * 3 + shape.tokens // 2 + step * shape.rows_per_request
    lengths = (starts.unsqueeze(1) + ends).flatten().int()
    if step == 2:
        lengths[-1] = 0
    return lengths


def run_step(model: Model, step: int, run_layer, *, topk: torch.Tensor | None = None) -> list:
    """One step through all layers. `run_layer(layer, q, topk, lengths, current)` gives a result.

    Returns: for each layer, its result and the unsharded one.
    """
    shape = model.shape
    lengths = step_lengths(shape, step)
    if topk is None:
        topk = select(shape, lengths, model.generator)
    new = lengths.view(shape.requests, -1) - 1
    results = []
    for layer in range(1 + shape.shared_layers):
        model.write(layer, new)
        q = model.queries()
        given = run_layer(layer, q, topk, lengths, model.current(layer, new))
        results.append((given, model.unsharded(layer, q, topk, lengths)))
    return results


def fill_context(model: Model) -> None:
    """Every token before the first step, in every layer."""
    shape = model.shape
    first = step_lengths(shape, 0).view(shape.requests, -1)[:, :1] - 1
    tokens = torch.arange(shape.tokens).expand(shape.requests, -1)
    for layer in range(1 + shape.shared_layers):
        model.write(layer, torch.where(tokens < first, tokens, -1))


def layer_steps(
    model: Model, ranks: list[DcpSparseDecode], layer: int, q, topk, lengths, current, fetched: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on every loopback rank; the heads of all ranks side by side."""
    results = run_loopback([rank_steps(model, rank, layer, q, topk, lengths, current, fetched) for rank in ranks])
    return tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))


def rank_steps(model: Model, rank: DcpSparseDecode, layer, q, topk, lengths, current, fetched: int | None = None):
    number = rank.rank.rank
    heads = model.shape.heads
    own_q = q[:, number * heads : (number + 1) * heads].contiguous()
    caches = model.caches[number]
    if layer == 0:
        on_device = [tensor.to(model.device) for tensor in (topk, model.block_table, lengths)]
        return rank.full_steps(own_q, caches[0], *on_device, shared_caches=list(caches[1:][:fetched]))
    return rank.shared_steps(own_q, caches[layer], layer - 1, latent=current[0], rope=current[1])


def close(ranks: list[DcpSparseDecode]) -> None:
    for rank in ranks:
        rank.close()
