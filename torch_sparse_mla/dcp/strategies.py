"""The ways to attend to records that lie on several ranks. Each plans once for a Full layer, then serves its layers."""

import torch

from .. import sharding
from ..decode.api import merge_partial_attention
from ..decode.contract import compute_dtype
from ..exchange.api import ce_exchange_start, ce_exchange_wait
from ..exchange.channel import Channel
from ..records.api import write_ckv_records
from ..records.layouts import LATENT_DIM
from ..selection.api import current_token_slots, plan_selection
from ..selection.plan import SelectionPlan
from .gather import Gather, Scatter
from .rank import LSE_BYTES, Rank
from .steps import Steps

Result = tuple[torch.Tensor, torch.Tensor]


class OwnerMerge:
    """Queries of all heads to every rank; each attends over the records that it owns; partial results go back."""

    def __init__(self, name: str, static: Rank) -> None:
        self.static = static
        head_rows = static.sizes.rows * static.sizes.heads
        self.queries = self.partials = None
        if static.world > 1:
            self.queries = Gather(f"{name}.queries", static, head_rows, static.sizes.query_bytes)
            transport = self.queries.channel.transport_name
            try:
                self.partials = Scatter(f"{name}.partials", static, head_rows, static.sizes.partial_bytes, transport)
            except BaseException:
                self.queries.close()
                raise

    @property
    def channels(self) -> list[Channel]:
        gathers = [] if self.queries is None else [self.queries, self.partials.gather]
        return [gather.channel for gather in gathers if gather is not None]

    def select(self, topk: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor) -> None:
        static = self.static
        requests = len(block_table)
        slots = sharding.local_slots(
            topk.view(requests, -1), block_table, static.page_size, static.rank, static.world, static.interleave
        )
        # Every rank's heads are rows of their own, in the order in which queries arrive and partial results leave.
        self.slots = slots.view_as(topk).int().repeat(static.world, 1)

    def full(
        self, q: torch.Tensor, cache: torch.Tensor, shared_caches: list[torch.Tensor], sink: torch.Tensor | None
    ) -> Steps[Result]:
        return (yield from self.shared(q, cache, 0, None, None, sink))

    def shared(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        latent: torch.Tensor | None,
        rope: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> Steps[Result]:
        static = self.static
        rows, heads, dim = q.shape
        if static.world == 1:
            return static.attend(q, cache, self.slots, sink)
        all_q = yield from self.queries.run(q.contiguous().view(rows * heads, dim))
        partial_out, partial_lse = static.attend(all_q.view(-1, heads, dim), cache, self.slots, None)
        sent = _pack(partial_out, partial_lse)
        arrived = yield from self.partials.run(sent)
        return merge_partial_attention(*_unpack(arrived, (static.world, rows, heads), q.dtype), sink=sink)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def _pack(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Rows of bytes: partial output, then its log-sum-exp."""
    count, width = lse.numel(), LATENT_DIM * out.element_size()
    packed = torch.empty(count, width + LSE_BYTES, dtype=torch.uint8, device=out.device)
    packed[:, :width] = out.view(count, LATENT_DIM).view(torch.uint8)
    packed[:, width : width + lse.element_size()] = lse.view(count, 1).view(torch.uint8)
    return packed


def _unpack(packed: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Result:
    width, lse_dtype = LATENT_DIM * dtype.itemsize, compute_dtype(dtype)
    out = packed[..., :width].contiguous().view(dtype).view(*shape, LATENT_DIM)
    lse = packed[..., width : width + lse_dtype.itemsize].contiguous().view(lse_dtype).view(shape)
    return out, lse


class Exchange:
    """The selected records to every rank, a layer at a time; each rank attends with its own heads.

    With `ahead` the Shared layers' records follow those of the Full layer in one exchange, before the Shared layers
    have written this step's tokens: each patches its rows' tokens into what arrived.
    """

    def __init__(self, name: str, static: Rank, ahead: bool) -> None:
        self.static = static
        sizes = static.sizes
        self.selection = SelectionPlan(sizes.requests, sizes.rows_per_request, sizes.topk, static.world)
        self.ahead = sizes.shared_layers if ahead else 0
        self.channel = Channel.create(
            f"{name}.records",
            static.group,
            self.selection.capacity,
            sizes.record_bytes,
            layers=max(self.ahead, 1),
            requests=sizes.requests,
            **static.channel_options,
        )
        device = self.channel.device
        self.plan = self.selection.empty(device)
        self.workspaces = [
            torch.empty(self.selection.capacity, sizes.record_bytes, dtype=torch.uint8, device=device)
            for _ in range(1 + self.ahead)
        ]
        self.fetched = 0
        self.under_way: tuple | None = None

    @property
    def channels(self) -> list[Channel]:
        return [self.channel]

    def select(self, topk: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor) -> None:
        static = self.static
        # The plan of an exchange under way must stay as it is.
        self._arrive()
        self.fetched = 0
        plan_selection(
            topk,
            block_table,
            self.selection,
            page_size=static.page_size,
            interleave=static.interleave,
            rank=static.rank,
            plan=self.plan,
        )
        self.remap = self.selection.remap(self.plan)[: len(topk)]
        if self.ahead:
            rows_per_request = len(topk) // len(block_table)
            self.current = current_token_slots(
                topk, lengths, self.selection, self.plan, rows_per_request=rows_per_request
            )

    def full(
        self, q: torch.Tensor, cache: torch.Tensor, shared_caches: list[torch.Tensor], sink: torch.Tensor | None
    ) -> Steps[Result]:
        yield from self._exchange(cache)
        self.fetched = min(len(shared_caches), self.ahead)
        if self.fetched:
            call = self._call(list(shared_caches[: self.fetched]), self.workspaces[1 : 1 + self.fetched])
            ce_exchange_start(*call)
            self.under_way = call
        result = self._attend(q, 0, sink)
        if self.fetched:
            # Whatever a rank does next waits for these records of every rank.
            yield
        return result

    def shared(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        latent: torch.Tensor | None,
        rope: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> Steps[Result]:
        self._arrive()
        if layer >= self.fetched:
            yield from self._exchange(cache)
            return self._attend(q, 0, sink)
        write_ckv_records(latent, rope, self.current, self._as_cache(1 + layer), self.static.layout.name)
        return self._attend(q, 1 + layer, sink)

    def close(self) -> None:
        self.channel.close()

    def _exchange(self, cache: torch.Tensor) -> Steps[None]:
        call = self._call([cache], self.workspaces[:1])
        ce_exchange_start(*call)
        yield
        ce_exchange_wait(*call)

    def _arrive(self) -> None:
        """Wait, once, for what was fetched ahead."""
        if self.under_way is not None:
            call, self.under_way = self.under_way, None
            ce_exchange_wait(*call)

    def _call(self, caches: list[torch.Tensor], workspaces: list[torch.Tensor]) -> tuple:
        return caches, self.plan, workspaces, self.channel.state, self.channel

    def _as_cache(self, place: int) -> torch.Tensor:
        return self.workspaces[place].unsqueeze(0)

    def _attend(self, q: torch.Tensor, place: int, sink: torch.Tensor | None) -> Result:
        return self.static.attend(q, self._as_cache(place), self.remap, sink)


def open_strategy(strategy: str, name: str, static: Rank) -> OwnerMerge | Exchange:
    """Collective: makes the strategy's channels."""
    if strategy == "owner_merge":
        return OwnerMerge(f"{name}.{strategy}", static)
    return Exchange(f"{name}.{strategy}", static, ahead=strategy == "exchange_bulk")
