"""`SplitSelector`: selection with the query rows split by rank, over the gather's and the indexer's operators.

selector.plan(lengths, new_lengths, block_table)            once for each chunk
selector.send_keys(pools)                                   each layer: index pages are packed and sent
(other work)
selector.select(q, weights, row_requests, positions)        waits for them, selects for the own rows, sends pool numbers
topk, counts = selector.receive()                           waits for those of all rows
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..contract import check_dtype, reject
from ..exchange.channel import DEFAULT_TIMEOUT_S, Channel
from ..exchange.group import as_group
from ..gather.api import c4_plan_gather, c4_prefill_gather_start, c4_prefill_gather_wait, copied_to
from ..gather.plan import checked_lengths
from .api import c4_merge_pools, c4_select, warmup_c4_indexer
from .contract import c4_select_workspace_bytes, check_pools
from .pools import HEAD_DIM, POOLS_PER_INDEX_PAGE, TOKENS_PER_INDEX_PAGE, pools_of_lists, ranked_candidates
from .row_split import RowSplit

_OP = "SplitSelector"
PLAN, SEND, SELECT, RECEIVE = "plan", "send_keys", "select", "receive"


class SplitSelector:
    """Memory and channels of a split selection. Ranks: all make it alike, and make the same calls in the same order.

    Args:
        group: a `torch.distributed` process group, or `LoopbackGroup(...).rank(r)`.
        split: the reserved sizes, of as many ranks as the group has.
        heads: index heads.
        name: of the channels; unique among the open ones, equal on every rank.
        transport, timeout_s, device: as for `Channel.create`.
    Raises: as `Channel.create`; ValueError for sizes that do not fit.
    Memory: `RowSplit.reserved_bytes`, all of it allocated here: make it before memory is profiled.
    Capture: not; lengths are host numbers, and what is sent passes through temporaries. `GatherPolicy.choose_select`
        says when to take the candidate merge instead.
    """

    def __init__(
        self,
        group: Any,
        split: RowSplit,
        *,
        heads: int,
        name: str = "c4_select_rows",
        transport: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: str | torch.device | None = None,
    ) -> None:
        ranks = as_group(group)
        if split.world != ranks.world:
            reject(_OP, "split", f"sizes of {split.world} ranks", f"those of the group's {ranks.world} ranks")
        self.split, self.rank = split, ranks.rank
        self.device = ranks.device(device)
        self._geometry = {"page_size": TOKENS_PER_INDEX_PAGE, "interleave": split.interleave, "world": split.world}
        options = {"transport": transport, "timeout_s": timeout_s, "device": device}
        self._channels: list[Channel] = []
        self._next, self._closed = (PLAN,), False
        # The records of the gather that was started and not waited for.
        self._under_way: torch.Tensor | None = None
        try:
            self._reserve(group, name, options)
            # What else would be compiled at the first chunk.
            warmup_c4_indexer(self._pools(), heads=heads, num_pools=split.num_pools, **self._geometry)
            self.plan([1], [1], self._row_table[:, :1])
        except BaseException:
            self.close()
            raise
        self._next = (PLAN,)

    def plan(self, lengths: Sequence[int], new_lengths: Sequence[int], block_table: torch.Tensor) -> None:
        """Where the index pages of a chunk go: once for each chunk, for all of its layers.

        Args:
            lengths: global length of each request on the host, cached and new tokens together.
            new_lengths: query rows of each request; rows are packed, request by request.
            block_table: [requests, blocks] int32 page numbers of the pools, the same on every rank.
        Raises: ValueError for an argument that does not fit, before anything is written; RuntimeError between
            `send_keys` and `receive`.
        """
        self._enter(PLAN)
        # Padded rows may be counted with any request, so that a request may have more rows than tokens.
        lengths, _ = checked_lengths(_OP, lengths, [0] * len(new_lengths))
        if any(not isinstance(new, int) or new < 0 for new in new_lengths):
            reject(_OP, "new_lengths", list(new_lengths), "integers, 0 or more")
        split, rows = self.split, sum(new_lengths)
        if rows > split.rows:
            reject(_OP, "new_lengths", f"{rows} rows", f"at most the reserved {split.rows}")
        pages = [split.pages(length) for length in lengths]
        sent = split.sent_lengths(lengths)
        c4_plan_gather(sent, [0] * len(sent), block_table, split.keys, rank=self.rank, plan=self._plans[0])
        share = [split.world * split.share(rows)]
        c4_plan_gather(share, [0], self._row_table, split.numbers, rank=self.rank, plan=self._plans[1])
        padded = split.keys.host_padded(sent)
        # Every rank sends as many pages of a request, so these begin at the same place in each slice.
        begins = list(itertools.accumulate(pages, initial=0))[:-1]
        blocks = max(pages, default=0)
        tables = [
            source * padded + begin + block if block < count else -1
            for source in range(split.world)
            for begin, count in zip(begins, pages, strict=True)
            for block in range(blocks)
        ]
        self._tables = copied_to(tables, self.device).view(split.world, len(pages), blocks)
        self._rows = rows
        self._next = (SEND, PLAN)

    def send_keys(self, pools: torch.Tensor) -> None:
        """Pack this rank's index pages of a layer and send them; the chunk's own pools must be written already.

        Args:
            pools: what `c4_write_index_keys` wrote; page stride free.
        """
        self._enter(SEND)
        check_pools(_OP, pools, self.split.page_size)
        check_dtype(_OP, "pools", pools, (self.split.dtype,))
        pages = pools.view(torch.uint8).flatten(1).unflatten(1, (-1, self.split.page_bytes))
        c4_prefill_gather_start(pages, *self._gather(0, self._pages))
        self._under_way, self._next = pages, (SELECT,)

    def select(
        self, q: torch.Tensor, weights: torch.Tensor, row_requests: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Wait for the index pages, select for this rank's share of the rows, and send what it selected.

        Args:
            q, weights, row_requests, positions: as for `c4_select`, of all rows. Row i is of the share of rank
                `i % world`; of the others positions alone are read, which say how long each row's tail is.
        """
        self._enter(SELECT)
        given = {"q": q, "weights": weights, "row_requests": row_requests, "positions": positions}
        for name, tensor in given.items():
            if len(tensor) != self._rows:
                reject(_OP, name, f"{len(tensor)} rows", f"{self._rows}, the rows of the plan")
        split = self.split
        self._await(0, self._pages)
        own = [tensor[self.rank :: split.world].contiguous() for tensor in given.values()]
        count = len(own[0])
        shape = (split.world * split.lists, count, split.num_pools)
        candidates = self._candidates[: math.prod(shape)].view(shape)
        for source in range(split.world):
            c4_select(
                *own[:2],
                self._pools(),
                self._tables[source],
                *own[2:],
                num_pools=split.num_pools,
                rank=source,
                lists=split.lists,
                candidates=candidates[source * split.lists :][: split.lists],
                workspace=self._workspace,
                **self._geometry,
            )
        # What lies behind them in the share belongs to no row.
        self._own.view(torch.int32)[:count] = pools_of_lists(*c4_merge_pools(candidates, own[3]))
        self._under_way = self._own.unsqueeze(1)
        c4_prefill_gather_start(self._under_way, *self._gather(1, self._numbers))
        self._positions, self._next = positions, (RECEIVE,)

    def receive(
        self, topk: torch.Tensor | None = None, counts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the pool numbers of all rows, and make top-k lists of tokens of them.

        Args:
            topk, counts: as for `c4_merge_pools`, of all rows.
        Returns: (topk, counts): what `c4_merge_pools` makes of the candidates of all ranks, bit for bit.
        """
        self._enter(RECEIVE)
        self._await(1, self._numbers)
        split, share = self.split, self.split.share(self._rows)
        numbers = self._numbers.view(torch.int32)[: split.world * share].view(split.world, share, split.num_pools)
        numbers = numbers.transpose(0, 1).flatten(0, 1)[: self._rows]
        merged = c4_merge_pools(ranked_candidates(numbers).unsqueeze(0), self._positions, topk=topk, counts=counts)
        self._next = (SEND, PLAN)
        return merged

    def close(self) -> None:
        """Close the channels. A second close does nothing. Ranks: all."""
        for channel in self._channels:
            channel.close()
        self._closed = True

    def _reserve(self, group: Any, name: str, options: dict[str, Any]) -> None:
        split, keys, numbers = self.split, self.split.keys, self.split.numbers
        share, width = numbers.capacity, 4 * split.num_pools
        for part, sizes, record_bytes in (("keys", keys, split.page_bytes), ("numbers", numbers, width)):
            channel = Channel.create(f"{name}.{part}", group, sizes.gathered_records, record_bytes, 1, **options)
            self._channels.append(channel)
        self._plans = [keys.empty(self.device), numbers.empty(self.device)]
        self._pages = self._bytes(keys.gathered_records, split.page_bytes)
        self._own, self._numbers = (self._bytes(records, width) for records in (share, numbers.gathered_records))
        size = split.world * split.lists * share * split.num_pools
        self._candidates = torch.empty(size, dtype=torch.int64, device=self.device)
        self._workspace = self._bytes(c4_select_workspace_bytes(share, split.num_pools, split.lists))
        self._row_table = torch.arange(share, dtype=torch.int32, device=self.device).view(1, -1)

    def _pools(self) -> torch.Tensor:
        """What was gathered as pools, in pages of one index page."""
        if self.split.dtype == torch.uint8:
            return self._pages
        return self._pages.view(self.split.dtype).view(-1, POOLS_PER_INDEX_PAGE, HEAD_DIM)

    def _gather(self, which: int, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Channel]:
        channel = self._channels[which]
        return self._plans[which], gathered, channel.state, channel

    def _await(self, which: int, gathered: torch.Tensor) -> None:
        """Once: a call that refused an argument afterwards may be made again."""
        if self._under_way is not None:
            c4_prefill_gather_wait(self._under_way, *self._gather(which, gathered))
            self._under_way = None

    def _bytes(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def _enter(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"torch_sparse_mla::{_OP}: closed; make a new one")
        if call not in self._next:
            expected = " or ".join(f"{name}()" for name in self._next)
            raise RuntimeError(f"torch_sparse_mla::{_OP}: {call}() out of order; call {expected} first, on every rank")
