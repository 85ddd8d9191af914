"""A decode step of four layers over a sharded cache: Full, S1, S2, S3, the last three by one bulk exchange.

    project -> write records -> plan -> exchange Full -> start S1..S3 -> attend Full -> project
    for S1..S3:  project -> write records -> (wait once) -> patch own tokens -> attend -> project

Attention is real, the rest of a layer is its three projections. `world` loopback ranks run in this process, in turns,
on one device: the exchange stores into their memory, and nothing crosses a link. Top-k lists are given, as an indexer
would. Used by `profile`, `bench modes` and the tests.
"""

import dataclasses
import itertools

import torch

from .. import sharding
from ..decode.contract import sparse_ckv_decode_workspace_bytes
from ..exchange.channel import Channel
from ..exchange.group import LoopbackGroup
from ..records.layouts import LATENT_DIM, LAYOUTS
from ..selection.api import current_token_slots
from ..selection.plan import SelectionPlan

ops = torch.ops.torch_sparse_mla
LAYERS = 4
ROWS = ("hidden", "topk", "lengths", "block_table")
PADDING = {"lengths": 0, "topk": -1}
_names = itertools.count()


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """What a step is made of. `rows` is the most: one row a request.

    Attributes:
        heads: of each rank. hidden: width of the residual stream. context: tokens of each request.
    """

    rows: int = 8
    heads: int = 16
    topk: int = 2048
    layout: str = "fp8_ds_mla"
    world: int = 2
    context: int = 8192
    hidden: int = 2048
    page_size: int = 64
    interleave: int = 4
    dtype: torch.dtype = torch.bfloat16

    @property
    def blocks(self) -> int:
        return -(-self.context // (self.page_size * self.world))


class DecodeStep:
    """Buffers and weights of a step, and the step itself: `step.run(*step.inputs)`."""

    def __init__(self, sizes: StepSizes, device: str | torch.device, seed: int = 0) -> None:
        self.sizes, self.device = sizes, torch.device(device)
        self.layout = LAYOUTS[sizes.layout]
        self.scale = 192**-0.5
        generator = torch.Generator(self.device).manual_seed(seed)
        self.selection = SelectionPlan(sizes.rows, 1, sizes.topk, sizes.world)
        self._make_weights(generator)
        self._make_memory(generator)
        self.inputs = self._make_inputs(generator)

    def run(
        self, hidden: torch.Tensor, topk: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor
    ) -> torch.Tensor:
        """One step.

        Args:
            hidden: [rows, hidden]. topk: [rows, K] int32 positions. lengths: [rows] int32, this step's token included.
            block_table: [rows, blocks] int32.
        Returns: [rows, hidden].
        """
        positions = (lengths - 1).unsqueeze(1)
        ranks = range(self.sizes.world)
        slots = [self._slots(positions, block_table, rank) for rank in ranks]
        caches = [self.caches[rank] for rank in ranks]
        for layer in range(LAYERS):
            latent, rope = self._records(hidden, layer)
            for rank in ranks:
                ops.write_ckv_records(latent, rope, slots[rank], caches[rank][layer], self.sizes.layout)
            if layer == 0:
                currents = self._fetch(topk, lengths, block_table)
            elif layer == 1:
                for rank in ranks:
                    ops.ce_exchange_wait(*self._call(rank, slice(1, LAYERS)))
            if layer > 0:
                for rank in ranks:
                    ops.write_ckv_records(latent, rope, currents[rank], self.workspaces[rank][layer], self.sizes.layout)
            parts = [self._attend(hidden, layer, rank, len(topk)) for rank in ranks]
            hidden = hidden + sum(parts[1:], parts[0])
        return hidden

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def bytes_by_phase(self, rows: int) -> dict[str, int]:
        """Fewest bytes through memory of each phase of a step: what its inputs and outputs are."""
        sizes, record = self.sizes, self.layout.record_bytes
        calls = LAYERS * sizes.world
        lists, selected = rows * sizes.topk * 4, rows * sizes.topk * record
        written = rows * (record + self.layout.query_dim * sizes.dtype.itemsize)
        results = rows * sizes.heads * (self.layout.query_dim + LATENT_DIM) * sizes.dtype.itemsize
        weights = sum(weight.numel() * weight.element_size() for weight in self.weights)
        return {
            "projections": weights,
            "write_ckv_records/write": (calls + (LAYERS - 1) * sizes.world) * written,
            "plan_selection/first_entries": sizes.world * lists,
            "plan_selection/union": sizes.world * 2 * lists,
            # Each rank reads what it owns and writes it to every rank; what arrived is copied once more.
            "ce_exchange/pack": LAYERS * selected * (1 + sizes.world),
            "ce_exchange/arrival": LAYERS * 2 * selected * (sizes.world - 1),
            "sparse_ckv_decode/attend": calls * (selected + lists + results),
        }

    def _make_weights(self, generator: torch.Generator) -> None:
        sizes, width = self.sizes, self.layout.query_dim

        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator, device=self.device) * rows**-0.5
            return values.to(sizes.dtype)

        ranks = range(sizes.world)
        self.to_record = [weight(sizes.hidden, width) for _ in range(LAYERS)]
        self.to_query = [[weight(sizes.hidden, sizes.heads * width) for _ in ranks] for _ in range(LAYERS)]
        self.to_hidden = [[weight(sizes.heads * LATENT_DIM, sizes.hidden) for _ in ranks] for _ in range(LAYERS)]

    @property
    def weights(self) -> list[torch.Tensor]:
        shared = itertools.chain.from_iterable(self.to_query + self.to_hidden)
        return [*self.to_record, *shared]

    def _make_memory(self, generator: torch.Generator) -> None:
        sizes, record_bytes = self.sizes, self.layout.record_bytes
        pages = sizes.rows * sizes.blocks
        ranks = range(sizes.world)

        def pool(*shape: int) -> list[torch.Tensor]:
            return [torch.zeros(*shape, record_bytes, dtype=torch.uint8, device=self.device) for _ in range(LAYERS)]

        self.caches = [pool(pages, sizes.page_size) for _ in ranks]
        self.workspaces = [pool(1, self.selection.capacity) for _ in ranks]
        self.plans = [self.selection.empty(self.device) for _ in ranks]
        most = max(
            sparse_ckv_decode_workspace_bytes(rows, sizes.heads, sizes.topk) for rows in range(1, sizes.rows + 1)
        )
        self.attend_workspace = torch.empty(most, dtype=torch.uint8, device=self.device)
        group, name = LoopbackGroup(sizes.world, self.device), f"decode_step{next(_names)}"
        self.channels = [
            Channel.create(
                name, group.rank(rank), self.selection.capacity, record_bytes, layers=LAYERS - 1, requests=sizes.rows
            )
            for rank in ranks
        ]
        self.states = [channel.state for channel in self.channels]
        self._fill(generator)

    def _fill(self, generator: torch.Generator) -> None:
        """Records of random tokens everywhere."""
        every = torch.arange(self.caches[0][0].shape[0] * self.sizes.page_size, device=self.device)
        for cache in itertools.chain.from_iterable(self.caches):
            tokens = torch.randn(len(every), LATENT_DIM + 64, generator=generator, device=self.device)
            rope = tokens[:, LATENT_DIM:] if self.layout.rope else None
            ops.write_ckv_records(tokens[:, :LATENT_DIM], rope, every, cache, self.sizes.layout)

    def _make_inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        sizes, options = self.sizes, {"generator": generator, "device": self.device}
        hidden = torch.randn(sizes.rows, sizes.hidden, **options).to(sizes.dtype)
        pages = torch.randperm(sizes.rows * sizes.blocks, **options).view(sizes.rows, sizes.blocks).int()
        lengths = torch.full((sizes.rows,), sizes.context, dtype=torch.int32, device=self.device)
        topk = torch.stack([torch.randperm(sizes.context, **options)[: sizes.topk] for _ in range(sizes.rows)]).int()
        # A row's own token is the newest, and indexers nearly always choose it.
        topk[:, 0] = torch.where((topk == sizes.context - 1).any(1), topk[:, 0], sizes.context - 1)
        return hidden, topk, lengths, pages

    def _slots(self, positions: torch.Tensor, block_table: torch.Tensor, rank: int) -> torch.Tensor:
        sizes = self.sizes
        slots = sharding.local_slots(positions, block_table, sizes.page_size, rank, sizes.world, sizes.interleave)
        # A padded row has length 0, so position -1.
        return torch.where(positions >= 0, slots, -1).view(-1)

    def _records(self, hidden: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = hidden @ self.to_record[layer]
        return tokens[:, :LATENT_DIM], tokens[:, LATENT_DIM:] if self.layout.rope else None

    def _fetch(self, topk: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor) -> list[torch.Tensor]:
        """Plan, bring the Full layer's records, and start on those of the Shared layers.

        Returns: for each rank where the rows' own tokens belong in what is fetched ahead of their writing.
        """
        sizes = self.sizes
        geometry = (1, sizes.page_size, sizes.interleave)
        for rank, plan in enumerate(self.plans):
            ops.plan_selection(topk, block_table, plan, *geometry, rank, sizes.world, sizes.rows, 1)
        for half in (ops.ce_exchange_start, ops.ce_exchange_wait):
            for rank in range(sizes.world):
                half(*self._call(rank, slice(0, 1)))
        for rank in range(sizes.world):
            ops.ce_exchange_start(*self._call(rank, slice(1, LAYERS)))
        return [current_token_slots(topk, lengths, self.selection, plan, rows_per_request=1) for plan in self.plans]

    def _call(self, rank: int, layers: slice) -> tuple:
        caches, workspaces = self.caches[rank][layers], self.workspaces[rank][layers]
        return caches, self.plans[rank], workspaces, self.states[rank], self.channels[rank].name

    def _attend(self, hidden: torch.Tensor, layer: int, rank: int, rows: int) -> torch.Tensor:
        sizes = self.sizes
        q = (hidden @ self.to_query[layer][rank]).view(rows, sizes.heads, self.layout.query_dim)
        out = torch.empty(rows, sizes.heads, LATENT_DIM, dtype=sizes.dtype, device=hidden.device)
        lse = torch.empty(rows, sizes.heads, dtype=torch.float32, device=hidden.device)
        records = self.workspaces[rank][layer]
        remap = self.selection.remap(self.plans[rank])[:rows]
        ops.sparse_ckv_decode(q, records, remap, None, None, out, lse, self.attend_workspace, self.scale, sizes.layout)
        return out.view(rows, -1) @ self.to_hidden[layer][rank]
