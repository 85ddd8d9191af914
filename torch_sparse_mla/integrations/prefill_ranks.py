"""The ranks of a sharded prefill: each one's share of records, pooled index keys and heads.

A chunk's sparse layer, on each rank, as data flows:
    latents -> write_ckv_records -> own pages -> c4_prefill_gather_start ........ _wait -> every rank's records
    index keys -> c4_write_index_keys -> own pools -> c4_select -> candidates of all ranks -> c4_merge_pools -> top-k
    top-k -> c4_remap -> slots of the gathered records -> sparse_ckv_decode with the rank's heads -> heads of all ranks
Where the policy says no (decode steps, too much context for so few rows, no room), queries and partial results travel
instead of records: ordinary DCP, `DcpSparseDecode` with owner_merge.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import sharding
from ..dcp import DcpSparseDecode, run_loopback
from ..decode.api import sparse_ckv_decode
from ..exchange.channel import DEFAULT_TIMEOUT_S
from ..exchange.group import LoopbackGroup
from ..gather.api import c4_plan_gather, c4_prefill_gather_start, c4_prefill_gather_wait, c4_remap
from ..gather.geometry import PageGeometry
from ..gather.plan import causal_lengths
from ..gather.policy import GatherChoice, GatherCosts, GatherPolicy
from ..gather.workspace import GatherSlot, Workspace
from ..indexer.api import c4_merge_pools, c4_select, c4_write_index_keys
from ..indexer.codec import exact_index_queries, quantise_index_queries
from ..indexer.pools import HEAD_DIM, POOL_TOKENS, index_bytes
from ..records.api import write_ckv_records
from ..records.layouts import LAYOUTS
from .prefill_pages import Request
from .process_ranks import TIMEOUT_S, of_all_ranks

# Draft tokens that a step may bring and later take back: a ring keeps as many beside the tokens of an open pool.
MAX_DRAFTS = 5
RING_SLOTS = 8
CANDIDATE_BYTES = 8
# Rows that ordinary DCP has room for at least: decode steps of all sizes up to this share one object and its warm-up.
LEAST_ROWS = 16
_names = itertools.count()


@dataclass(frozen=True)
class PrefillSettings:
    """What a `PrefillClient` fixes: see there."""

    layout: str
    world: int
    processes: bool
    interleave: int
    page_size: int
    max_requests: int
    max_len: int
    max_rows: int
    max_tokens: int
    index_form: str
    costs: GatherCosts | None
    heads: int
    num_pools: int
    dtype: torch.dtype
    softmax_scale: float
    device: torch.device

    @property
    def blocks(self) -> int:
        """Pages of a request of `max_len` tokens, as many on each rank."""
        return -(-self.max_len // (self.page_size * self.world))

    @property
    def pages(self) -> int:
        return self.max_requests * self.blocks


@dataclass(frozen=True, eq=False)
class Step:
    """One forward: the rows of all its requests, packed request by request.

    Attributes:
        lengths, new_lengths: global lengths and rows of each request.
        choice: what the sparse layers do.
        table: [requests, blocks]; starts, ring_rows: [requests]; row_starts: [requests + 1]; row_requests, positions:
            [rows]: int32, as the operators take them.
        slots: int64 [rows] for each rank that is here: where the rows' own records go.
    """

    lengths: list[int]
    new_lengths: list[int]
    choice: GatherChoice
    table: torch.Tensor
    row_starts: torch.Tensor
    starts: torch.Tensor
    ring_rows: torch.Tensor
    row_requests: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]

    @property
    def rows(self) -> int:
        return sum(self.new_lengths)


class PrefillRanks:
    """The ranks of a DCP group that are in this process: all of a loopback group, or this process's own."""

    def __init__(self, settings: PrefillSettings) -> None:
        self.settings = settings
        world, device = settings.world, settings.device
        self.timeout_s = TIMEOUT_S if settings.processes else DEFAULT_TIMEOUT_S
        if settings.processes:
            self.numbers, self.groups = [dist.get_rank()], [dist.group.WORLD]
        else:
            group = LoopbackGroup(world, device)
            self.numbers = list(range(world))
            self.groups = [group.rank(rank) for rank in self.numbers]
        self.name = f"prefill{next(_names)}"
        geometry = PageGeometry()
        geometry.freeze(settings.page_size)
        with torch.inference_mode(False):
            self.workspaces = [self._workspace(geometry, group) for group in self.groups]
        sizes = self.workspaces[0].sizes
        layout, heads, costs = settings.layout, settings.heads, settings.costs
        self.policy = GatherPolicy(geometry, sizes, layout=layout, heads=heads, costs=costs)
        self.layers: list[ShardedLayer] = []
        self.step: Step | None = None
        # The last top-k lists with their slots: Shared layers bring the same object.
        self._translated: tuple[torch.Tensor | None, list] = (None, [])
        self._ordinary: dict[int, list[DcpSparseDecode]] = {}

    def layer(self, selects: bool) -> "ShardedLayer":
        """A new sparse layer; `selects`: whether it has an indexer of its own."""
        layer = ShardedLayer(self, selects)
        for workspace, records in zip(self.workspaces, layer.records, strict=True):
            workspace.check_cache(records)
        self.layers.append(layer)
        return layer

    def begin(self, requests: Sequence[Request], new_lengths: list[int], num_decode_tokens: int) -> Step:
        """Plan a forward of requests whose pages are there already."""
        settings = self.settings
        lengths = [request.length + new for request, new in zip(requests, new_lengths, strict=True)]
        choice = self.policy.choose(lengths, new_lengths, num_decode_tokens=num_decode_tokens)
        pages = [request.pages + [-1] * (settings.blocks - len(request.pages)) for request in requests]
        rows = [number for number, new in enumerate(new_lengths) for _ in range(new)]
        table, of_row = self._int32(pages), self._int32(rows)
        positions = self._int32(causal_lengths(lengths, new_lengths)) - 1
        self.step = Step(
            lengths,
            new_lengths,
            choice,
            table,
            row_starts=self._int32(list(itertools.accumulate(new_lengths, initial=0))),
            starts=self._int32([request.length for request in requests]),
            ring_rows=self._int32([request.row for request in requests]),
            row_requests=of_row,
            positions=positions,
            slots=[self._slots(positions, table[of_row.long()], rank) for rank in self.numbers],
        )
        for rank, slot in zip(self.numbers, self.gather_slots, strict=True):
            if choice.gathers:
                c4_plan_gather(lengths, new_lengths, table, slot.sizes, rank=rank, plan=slot.plan)
        return self.step

    def end(self) -> None:
        """Let go of what belongs to the forward."""
        self.step, self._translated = None, (None, [])

    @property
    def gather_slots(self) -> list[GatherSlot]:
        return [workspace.slot() for workspace in self.workspaces]

    def own_heads(self) -> list[slice]:
        share = self.settings.heads // self.settings.world
        return [slice(rank * share, (rank + 1) * share) for rank in self.numbers]

    def of_all(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of all ranks, from those of the ranks that are here."""
        return of_all_ranks(own[0]) if self.settings.processes else own

    def geometry(self, rank: int) -> dict[str, int]:
        settings = self.settings
        return {
            "page_size": settings.page_size,
            "interleave": settings.interleave,
            "rank": rank,
            "world": settings.world,
        }

    def remapped(self, topk: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(slots, counts) of the lists on each rank."""
        if self._translated[0] is not topk:
            self._translated = (topk, [c4_remap(topk, slot.plan, slot.sizes) for slot in self.gather_slots])
        return self._translated[1]

    def ordinary(self, rows: int, columns: int) -> list[DcpSparseDecode]:
        """Ordinary DCP for so many rows. Made when first needed, with room for the next power of two.

        Every row is a request of its own there: chunks bring requests of different lengths.
        """
        room = max(1 << (rows - 1).bit_length(), LEAST_ROWS)
        if room not in self._ordinary:
            settings, name = self.settings, f"{self.name}.ordinary{room}"
            ranks = [
                DcpSparseDecode(
                    group,
                    layout=settings.layout,
                    page_size=settings.page_size,
                    interleave=settings.interleave,
                    requests=room,
                    rows_per_request=1,
                    heads=settings.heads // settings.world,
                    topk=columns,
                    softmax_scale=settings.softmax_scale,
                    dtype=settings.dtype,
                    strategy="owner_merge",
                    shared_layers=0,
                    name=name,
                    timeout_s=self.timeout_s,
                    device=settings.device,
                )
                for group in self.groups
            ]
            # Counters made in inference mode could not be changed outside of it later.
            with torch.inference_mode(False), torch.no_grad():
                run_loopback([rank.warmup_steps() for rank in ranks])
            self._ordinary[room] = ranks
        return self._ordinary[room]

    def close(self) -> None:
        for ranks in self._ordinary.values():
            for rank in ranks:
                rank.close()
        for workspace in self.workspaces:
            workspace.close()
        self._ordinary, self.layers = {}, []

    def _workspace(self, geometry: PageGeometry, group: object) -> Workspace:
        settings = self.settings
        workspace = Workspace(
            geometry,
            group,
            layout=settings.layout,
            interleave=settings.interleave,
            max_tokens=settings.max_tokens,
            max_requests=settings.max_requests,
            max_rows=settings.max_rows,
            name=self.name,
            timeout_s=self.timeout_s,
            device=settings.device,
        )
        workspace.reserve()
        workspace.lock()
        return workspace

    def _slots(self, positions: torch.Tensor, table: torch.Tensor, rank: int) -> torch.Tensor:
        settings = self.settings
        geometry = (settings.page_size, rank, settings.world, settings.interleave)
        return sharding.local_slots(positions[:, None], table, *geometry)[:, 0]

    def _int32(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.settings.device)


class ShardedLayer:
    """One sparse-MLA layer on the ranks that are here.

    Attributes:
        records: [pages, page_size, record_bytes] of each rank.
        pools, rings: pooled index keys and open pools of each rank; empty in a Shared layer.
    """

    def __init__(self, ranks: PrefillRanks, selects: bool) -> None:
        self.ranks = ranks
        settings = ranks.settings
        exact = settings.index_form == "exact"
        pages, page_size = settings.pages, settings.page_size
        keys = (page_size // POOL_TOKENS, HEAD_DIM) if exact else (index_bytes(page_size),)
        width = LAYOUTS[settings.layout].record_bytes
        self.records = self._memory(torch.uint8, pages, page_size, width)
        self.pools = self._memory(settings.dtype if exact else torch.uint8, pages, *keys) if selects else []
        rings = (settings.max_requests, RING_SLOTS, 2, HEAD_DIM)
        self.rings = self._memory(settings.dtype, *rings) if selects else []

    @property
    def shape(self) -> tuple[int, int, int]:
        """What Transformers asks of key states: their length comes third."""
        return (1, 1, max(self.ranks.step.lengths))

    def write(self, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Write the rows' records, and send them on their way: they travel while the indexer runs."""
        ranks, step = self.ranks, self.ranks.step
        rows = latent.reshape(-1, latent.shape[-1])
        for records, slots in zip(self.records, step.slots, strict=True):
            write_ckv_records(rows, None, slots, records, ranks.settings.layout)
        if step.choice.gathers:
            for records, slot in zip(self.records, ranks.gather_slots, strict=True):
                c4_prefill_gather_start(records, slot.plan, slot.gathered, slot.channel.state, slot.channel)

    def select(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, gates: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Top-k lists [rows, 4 * pools + 3] int32 of positions: the best pools of all ranks, and the tail.

        Args:
            q, weights: [rows, index heads, 128] and [rows, index heads], as the model projects them.
            keys, gates: [rows, 128]; bias: [4, 128]: of the rows' own tokens.
        """
        ranks, step = self.ranks, self.ranks.step
        settings = ranks.settings
        prepare = exact_index_queries if settings.index_form == "exact" else quantise_index_queries
        queries = prepare(q, weights)
        new = (keys.contiguous(), gates.contiguous(), bias.float().contiguous())
        place = (step.row_starts, step.starts, step.ring_rows, step.table)
        own = []
        for rank, pools, ring in zip(ranks.numbers, self.pools, self.rings, strict=True):
            geometry = ranks.geometry(rank)
            c4_write_index_keys(*new, *place, ring, pools, drafts=MAX_DRAFTS, **geometry)
            rows = (step.table, step.row_requests, step.positions)
            own.append(c4_select(*queries, pools, *rows, num_pools=settings.num_pools, **geometry))
        return c4_merge_pools(torch.cat(ranks.of_all(own)), step.positions)[0]

    def attend(self, q: list[torch.Tensor], topk: torch.Tensor) -> list[torch.Tensor]:
        """Attention [rows, own heads, 512] of each rank that is here, by gathered records or by ordinary DCP.

        Args:
            q: [rows, own heads, 512] absorbed queries of each rank.
        """
        if not self.ranks.step.choice.gathers:
            return self._by_ordinary_dcp(q, topk)
        ranks, settings = self.ranks, self.ranks.settings
        for records, slot in zip(self.records, ranks.gather_slots, strict=True):
            c4_prefill_gather_wait(records, slot.plan, slot.gathered, slot.channel.state, slot.channel)
        return [
            sparse_ckv_decode(
                own_q,
                slot.gathered.unsqueeze(0),
                slots,
                lengths=counts,
                softmax_scale=settings.softmax_scale,
                layout=settings.layout,
            )[0]
            for own_q, slot, (slots, counts) in zip(q, ranks.gather_slots, ranks.remapped(topk), strict=True)
        ]

    def _by_ordinary_dcp(self, q: list[torch.Tensor], topk: torch.Tensor) -> list[torch.Tensor]:
        ranks, step = self.ranks, self.ranks.step
        selection = (topk, step.table[step.row_requests.long()], step.positions + 1)
        dcp = ranks.ordinary(step.rows, topk.shape[1])
        calls = [
            rank.full_steps(own_q, records, *selection)
            for rank, own_q, records in zip(dcp, q, self.records, strict=True)
        ]
        return [out for out, _ in run_loopback(calls)]

    def _memory(self, dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
        """Zeros for each rank that can be written in and out of inference mode."""
        with torch.inference_mode(False):
            return [torch.zeros(shape, dtype=dtype, device=self.ranks.settings.device) for _ in self.ranks.numbers]
