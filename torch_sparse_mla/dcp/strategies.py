"""The ways to attend to records that lie on several ranks. Each plans once for a Full layer, then serves its layers.

A strategy has `select` (before a Full layer), `full` and `shared` (one layer), `check` (of a layer's cache, before
anything is sent), `moves` (what it must close), and `fence`. Its buffers are made once, for the largest call.
"""

import collections
import itertools
from typing import Protocol

import torch

from ..contract import reject
from ..decode.api import merge_partial_attention
from ..exchange.api import ce_exchange_start, ce_exchange_wait
from ..exchange.channel import REUSE_DISTANCE, Channel
from ..exchange.group import LoopbackRank
from ..records.api import write_ckv_records
from ..selection.api import current_token_slots, plan_selection, selected_slots
from ..selection.plan import SelectionPlan
from .contract import OP
from .gather import Gather, Partials
from .peers import PeerCaches
from .rank import Rank, Result
from .steps import Steps

Into = tuple[torch.Tensor | None, torch.Tensor | None]
BULK_FLAG = "TORCH_SPARSE_MLA_BULK_PREFETCH"


class Strategy(Protocol):
    """What `DcpSparseDecode` asks of a strategy.

    Attributes:
        ahead: Shared layers of the last Full layer whose records were fetched with it.
    """

    ahead: int

    @property
    def channels(self) -> list[Channel]: ...

    def check(self, cache: torch.Tensor, layer: int | None) -> None:
        """Refuse a cache of a layer (None: the Full layer) that this strategy cannot use."""

    def select(
        self, topk: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, cache: torch.Tensor
    ) -> None: ...

    def full(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        shared_caches: list[torch.Tensor],
        sink: torch.Tensor | None,
        into: Into,
    ) -> Steps[Result]: ...

    def shared(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        current: tuple[torch.Tensor | None, torch.Tensor | None],
        sink: torch.Tensor | None,
        into: Into,
    ) -> Steps[Result]: ...

    def fence(self) -> Steps[None]: ...

    def explain(self) -> dict[str, object]: ...

    def close(self) -> None: ...


class _Slots:
    """Slots of a Full layer's lists, with a copy for each rank's heads where rows of all heads are attended to.

    Packed, a row's slots come first, and attention does not walk over those of other ranks.
    """

    ahead = 0

    def __init__(self, static: Rank, copies: int, packed: bool, device: torch.device) -> None:
        self.static, self.copies = static, copies
        rows = copies * static.sizes.rows
        self.buffer = torch.empty(rows, static.sizes.topk, dtype=torch.int32, device=device)
        self.all_counts = torch.empty(rows, dtype=torch.int32, device=device) if packed else None
        self.slots, self.counts = self.buffer, self.all_counts
        self.workspace = static.workspace(rows, static.sizes.heads, device)

    def check(self, cache: torch.Tensor, layer: int | None) -> None:
        """Every cache will do."""

    def _select(
        self, topk: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, slots_per_rank: int
    ) -> None:
        static = self.static
        self.slots = self.buffer[: self.copies * len(topk)]
        self.counts = None if self.all_counts is None else self.all_counts[: len(self.slots)]
        selected_slots(
            topk,
            block_table,
            lengths,
            **static.geometry,
            world=static.world,
            slots_per_rank=slots_per_rank,
            slots=self.slots,
            counts=self.counts,
        )

    def full(self, q, cache, shared_caches, sink, into) -> Steps[Result]:
        return (yield from self.shared(q, cache, 0, (None, None), sink, into))

    def fence(self) -> Steps[None]:
        """Nobody reads another rank's cache."""
        yield from ()

    def explain(self) -> dict[str, object]:
        return {}


class OwnerMerge(_Slots):
    """Queries of all heads to every rank; each attends over the records that it owns; partial results go back."""

    def __init__(self, name: str, static: Rank, device: torch.device) -> None:
        super().__init__(static, static.world, True, device)
        self.queries = self.partials = None
        if static.world > 1:
            head_rows = static.sizes.rows * static.sizes.heads
            self.queries = Gather(f"{name}.queries", static, head_rows, static.sizes.query_bytes, device)
            try:
                self.partials = Partials(f"{name}.partials", static, device)
            except BaseException:
                self.queries.close()
                raise

    @property
    def channels(self) -> list[Channel]:
        moves = [] if self.queries is None else [self.queries, self.partials]
        return [move.channel for move in moves if move.channel is not None]

    def select(self, topk, block_table, lengths, cache) -> None:
        self._select(topk, block_table, lengths, 0)

    def shared(self, q, cache, layer, current, sink, into) -> Steps[Result]:
        static = self.static
        rows, heads, dim = q.shape
        if static.world == 1:
            return static.attend(q, cache, self.slots, sink, into, self.workspace, self.counts)
        all_q = yield from self.queries.run(q.contiguous().view(rows * heads, dim))
        buffers = self.partials.buffers(rows)
        static.attend(all_q.view(-1, heads, dim), cache, self.slots, None, buffers, self.workspace, self.counts)
        partial_out, partial_lse = yield from self.partials.run(rows)
        return merge_partial_attention(partial_out, partial_lse, sink=sink, out=into[0], lse=into[1])

    def close(self) -> None:
        for move in (self.queries, self.partials):
            if move is not None:
                move.close()


class PeerRead(_Slots):
    """Each rank attends with its own heads and reads selected records where they lie, in the caches of all ranks.

    Every layer begins with a hop that moves nothing: once it is over, each rank's tokens of this step are written and
    visible, and each rank has finished, in the order of its stream, what it read in earlier calls.
    """

    def __init__(self, name: str, static: Rank, device: torch.device, peers: PeerCaches) -> None:
        super().__init__(static, 1, False, device)
        self.peers = peers
        self.arrivals = None
        self.calls = 0
        self.pages = 0
        if static.world > 1:
            self.arrivals = Gather(f"{name}.arrivals", static, 1, 16, device)
            self.nothing = torch.zeros(1, 16, dtype=torch.uint8, device=device)

    @property
    def channels(self) -> list[Channel]:
        return [] if self.arrivals is None else [self.arrivals.channel]

    def check(self, cache: torch.Tensor, layer: int | None) -> None:
        if layer is not None and cache.shape[0] != self.pages:
            reject(OP, "cache", f"{cache.shape[0]} pages", f"{self.pages}, as the Full layer's, for peer_read")
        alone = self.static.world == 1 or isinstance(self.peers.group, LoopbackRank)
        if not alone and self.peers.of(cache) is None:
            reject(OP, "cache", "memory that peers cannot read", "a cache from empty_cache(pages), for peer_read")

    def select(self, topk, block_table, lengths, cache) -> None:
        self.pages = cache.shape[0]
        # The table may name pages beyond the cache; those of an empty one are not there.
        self._select(topk, block_table, lengths, max(self.pages, 1) * self.static.page_size)

    def shared(self, q, cache, layer, current, sink, into) -> Steps[Result]:
        caches = [cache]
        if self.arrivals is not None:
            board = self._show(cache)
            yield from self.arrivals.run(self.nothing)
            caches = self.peers.of(cache) or self._shown(board)
        return self.static.attend(q, list(caches), self.slots, sink, into, self.workspace)

    def fence(self) -> Steps[None]:
        if self.arrivals is not None:
            self.calls += 1
            yield from self.arrivals.run(self.nothing)

    def close(self) -> None:
        if self.arrivals is not None:
            self.arrivals.close()

    def _show(self, cache: torch.Tensor) -> list[tuple[int, torch.Tensor | None]]:
        """Loopback ranks: tell the others which cache this call brings. Two lists, by parity of the call: a rank that
        is one call ahead has not started another before this one has read."""
        self.calls += 1
        if not isinstance(self.peers.group, LoopbackRank):
            return []
        board = self.peers.group.board(self.arrivals.channel.configuration.name)
        lists = board.shared.setdefault("shown", [[(0, None)] * self.static.world for _ in range(2)])
        lists[self.calls % 2][self.static.rank] = (self.calls, cache)
        return lists[self.calls % 2]

    def _shown(self, board: list[tuple[int, torch.Tensor | None]]) -> list[torch.Tensor]:
        missing = [rank for rank, (call, _) in enumerate(board) if call != self.calls]
        if missing:
            # Ranks that are captured one after another have not all called yet.
            allowed = "calls of all ranks in turns, or caches from empty_cache(pages), whose addresses are known"
            reject(OP, "cache", f"none from rank(s) {missing} in this call", allowed)
        return [cache for _, cache in board]


class Exchange:
    """The selected records to every rank, a layer at a time; each rank attends with its own heads.

    In bulk, the Shared layers' records follow those of the Full layer in one exchange, before the Shared layers have
    written this step's tokens: each patches its rows' tokens into what arrived. What cannot be fetched so is exchanged
    by itself, and counted with the reason.

    Attributes:
        ahead: Shared layers of the last Full layer that were fetched with it.
        alone: how many Shared layers were exchanged by themselves, by reason. Calls of Python: replays are not seen.
    """

    def __init__(self, name: str, static: Rank, device: torch.device, bulk: bool, flag: bool = True) -> None:
        self.static, self.bulk, self.flag = static, bulk, flag
        sizes = static.sizes
        self.selection = SelectionPlan(sizes.requests, sizes.rows_per_request, sizes.topk, static.world)
        self.room = sizes.shared_layers if bulk and flag else 0
        self.channel = Channel.create(
            f"{name}.records",
            static.group,
            self.selection.capacity,
            sizes.record_bytes,
            layers=max(self.room, 1),
            requests=sizes.requests,
            workspace_sets=REUSE_DISTANCE,
            **static.channel_options,
        )
        # One set after another; the one in use, and the one that Shared layers are fetched ahead into.
        self.sets = itertools.cycle(self.channel.workspaces)
        self.workspaces = self.fetched = self.channel.workspaces[0]
        self.plan = self.selection.empty(device)
        self.visible = torch.empty(sizes.rows, sizes.topk, dtype=torch.int32, device=device)
        self.absent = torch.full((), -1, dtype=torch.int32, device=device)
        self.scratch = static.workspace(sizes.rows, sizes.heads, device)
        self.ahead = 0
        self.alone: collections.Counter[str] = collections.Counter()
        self.given: list[torch.Tensor] = []
        self.under_way: tuple | None = None
        # The lists and the block table of the last Full layer, and the pages that the plan of them counts on.
        self.selected: tuple[torch.Tensor, torch.Tensor] | None = None
        self.pages: int | None = None

    @property
    def channels(self) -> list[Channel]:
        return [self.channel]

    def check(self, cache: torch.Tensor, layer: int | None) -> None:
        """Every cache will do."""

    def select(self, topk, block_table, lengths, cache) -> None:
        # The plan of an exchange under way must stay as it is.
        self._arrive()
        self.ahead = 0
        visible = self.visible[: len(topk)]
        torch.where(topk < lengths.unsqueeze(1), topk, self.absent, out=visible)
        self.selected, self.pages = (visible, block_table), None
        self._plan(cache)
        self.remap = self.selection.remap(self.plan)[: len(topk)]
        if self.room:
            rows_per_request = len(topk) // len(block_table)
            self.current = current_token_slots(
                visible, lengths, self.selection, self.plan, rows_per_request=rows_per_request
            )

    def full(self, q, cache, shared_caches, sink, into) -> Steps[Result]:
        yield from self._exchange(cache)
        self.given = [cache, *shared_caches]
        alike = (self._reason(layer) is None for layer in range(len(shared_caches)))
        # Only from the first on: a later one would have to wait for two arrivals.
        self.ahead = len(list(itertools.takewhile(bool, alike)))
        if self.ahead:
            self.fetched = next(self.sets)
            call = self._call(list(shared_caches[: self.ahead]), self.fetched[: self.ahead])
            ce_exchange_start(*call)
            self.under_way = call
        result = self._attend(q, self.workspaces[0], sink, into)
        if self.ahead:
            # Whatever a rank does next waits for these records of every rank.
            yield
        return result

    def shared(self, q, cache, layer, current, sink, into) -> Steps[Result]:
        self._arrive()
        self._plan(cache)
        if layer >= self.ahead:
            if self.bulk:
                self.alone[self._reason(layer) or "a layer before it was not fetched ahead"] += 1
            yield from self._exchange(cache)
            return self._attend(q, self.workspaces[0], sink, into)
        fetched = self.fetched[layer]
        write_ckv_records(*current, self.current, fetched.unsqueeze(0), self.static.layout.name)
        return self._attend(q, fetched, sink, into)

    def fence(self) -> Steps[None]:
        """Nobody reads another rank's cache."""
        yield from ()

    def explain(self) -> dict[str, object]:
        if not self.bulk:
            return {}
        flag = f"{BULK_FLAG}={int(self.flag)}"
        return {"bulk": {"flag": flag, "fetches_ahead": self.room, "exchanged_alone": dict(self.alone)}}

    def close(self) -> None:
        self.channel.close()

    def _reason(self, layer: int) -> str | None:
        """Why a Shared layer is not fetched ahead; None where it is. From static sizes alone."""
        if not self.flag:
            return f"{BULK_FLAG}=0"
        if layer >= self.room:
            return f"capacity: the channel has room for {self.room} layers (shared_layers)"
        if layer + 1 >= len(self.given):
            return "group not full: its cache was not among shared_caches"
        first, cache = self.given[0], self.given[1 + layer]
        if cache.shape != first.shape or cache.stride() != first.stride():
            return "geometry: its cache has other pages or strides than the Full layer's"
        return None

    def _plan(self, cache: torch.Tensor) -> None:
        """A page that a cache lacks is absent here as it is to attention over the cache itself. So the lists are
        planned again for a layer whose cache has more or fewer pages, and again for the next."""
        pages = cache.shape[0]
        if pages != self.pages:
            plan_selection(*self.selected, self.selection, **self.static.geometry, plan=self.plan, pages=pages)
            self.pages = pages

    def _exchange(self, cache: torch.Tensor) -> Steps[None]:
        self.workspaces = next(self.sets)
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

    def _attend(self, q: torch.Tensor, workspace: torch.Tensor, sink: torch.Tensor | None, into: Into) -> Result:
        return self.static.attend(q, workspace.unsqueeze(0), self.remap, sink, into, self.scratch)


def open_strategy(
    strategy: str, name: str, static: Rank, device: torch.device, peers: PeerCaches | None, bulk_flag: bool
) -> Strategy:
    """Collective: makes the strategy's channels and buffers."""
    name = f"{name}.{strategy}"
    if strategy == "owner_merge":
        return OwnerMerge(name, static, device)
    if strategy == "peer_read":
        return PeerRead(name, static, device, peers)
    return Exchange(name, static, device, strategy == "exchange_bulk", bulk_flag)
