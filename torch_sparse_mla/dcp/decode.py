"""`DcpSparseDecode`: the attention of one rank's heads over records that are spread over a DCP group."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .. import sharding
from ..contract import reject, strict_flag
from ..decode.contract import compute_dtype
from ..exchange.channel import DEFAULT_TIMEOUT_S, Channel
from ..exchange.group import LoopbackRank, ProcessRank, as_group
from ..records.layouts import LATENT_DIM
from .contract import (
    OP,
    check_caches,
    check_current,
    check_query,
    check_results,
    check_selection,
    check_static,
    check_strategy,
)
from .costs import LinkCosts, Prediction, Sizes, predict
from .measure import Inputs, agreed_costs
from .peers import PeerCaches, why_no_peers
from .rank import Rank, Result
from .steps import Steps, finish
from .strategies import BULK_FLAG, Strategy, open_strategy


class DcpSparseDecode:
    """Sparse attention of a decode step under decode context parallelism, for one rank.

    A model's layers come in groups: a Full layer, which selects, then Shared layers, which reuse its selection.

        step = DcpSparseDecode(group, layout="fp8_ds_mla", ..., strategy="auto")
        step.warmup()
        write_ckv_records(...)                                              the rank's part of this step's tokens
        out, lse = step.full(q, cache, topk, block_table, lengths, shared_caches=[s1, s2, s3])
        out, lse = step.shared(q, s1, 0, latent=latent, rope=rope)          and so on, in order

    Each method has a form that ends in `_steps`, for loopback ranks that share a thread: `run_loopback`.

    Strategies, which agree but for rounding:
        owner_merge: queries travel; each rank attends with all heads over its own records; partial results are merged.
            With transport "auto" and a NCCL group they travel by its collectives where warm-up finds that faster: then
            a rank that does not come is NCCL's to report.
        exchange: selected records travel, a layer at a time; each rank attends with its own heads.
        exchange_bulk: the same, with the Shared layers' records in one exchange that begins in the Full layer.
            `TORCH_SPARSE_MLA_BULK_PREFETCH=0` turns that off (1: on); what goes by itself is counted in `explain`.
        peer_read: each rank attends with its own heads and reads records where they lie, in the caches of all ranks.
            Loopback ranks, or processes on GPUs that map one another's memory, with caches from `empty_cache`.
        auto: at warm-up, whichever of these the cost model finds cheapest; the same on every rank. Of processes,
            peer_read only where caches were made with `empty_cache` before.

    With peer_read, a record that a call reads may be overwritten by its owner, or its page be given to others, once the
    owner's next call (of any layer), or `fence`, is over in the order of its stream: the hop at the beginning of each
    says that every rank has finished its earlier calls. Records that are only added need nothing. With the other
    strategies a rank's caches are read by itself alone.

    Args:
        group: a `torch.distributed` process group, or `LoopbackGroup(...).rank(r)`.
        layout: a key of `torch_sparse_mla.LAYOUTS`.
        page_size, interleave: the DCP geometry, with rank and world of the group.
        requests, rows_per_request: the most of each in a call.
        heads: local heads, as many on every rank.
        topk: entries in a row's top-k list.
        softmax_scale: as for `sparse_ckv_decode`.
        dtype: of queries and results.
        strategy: see above.
        shared_layers: Shared layers that follow a Full layer; with exchange_bulk, the most that one exchange fetches.
        costs: figures for the cost model; None: `warmup` measures them.
        union_growth: as in `LinkCosts`, which has an assumption instead; see the function of that name.
        peers: the caches of all ranks, where they were made before this object (see PeerCaches); None: its own.
        name: of the channels; unique among the open ones, equal on every rank.
        transport, timeout_s, device: as for `Channel.create`.
    Raises: ValueError for an argument that does not fit. Ranks: all, with the same arguments.
    Capture: after `warmup`, and after an eager call of the same shapes where they are not the largest.
    """

    def __init__(
        self,
        group: Any,
        *,
        layout: str,
        page_size: int,
        interleave: int,
        requests: int,
        rows_per_request: int,
        heads: int,
        topk: int,
        softmax_scale: float,
        dtype: torch.dtype = torch.bfloat16,
        strategy: str = "auto",
        shared_layers: int = 3,
        costs: LinkCosts | None = None,
        union_growth: float | None = None,
        peers: PeerCaches | None = None,
        name: str = "dcp",
        transport: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: str | torch.device | None = None,
    ) -> None:
        ranks = as_group(group)
        self.device = ranks.device(device)
        self.why_no_peers = why_no_peers(ranks, self.device, transport)
        check_strategy(strategy, self.why_no_peers)
        for argument, value, kind in (("costs", costs, LinkCosts), ("peers", peers, PeerCaches)):
            if value is not None and not isinstance(value, kind):
                reject(OP, argument, repr(value), f"None or {kind.__name__}")
        counts = {"requests": requests, "rows_per_request": rows_per_request, "heads": heads, "topk": topk}
        record_layout = check_static(layout, dtype, {**counts, "shared_layers": shared_layers}, softmax_scale)
        sharding.check_geometry(page_size, ranks.rank, ranks.world, interleave)
        sizes = Sizes(
            world=ranks.world,
            **counts,
            record_bytes=record_layout.record_bytes,
            query_bytes=record_layout.query_dim * dtype.itemsize,
            partial_bytes=LATENT_DIM * dtype.itemsize + compute_dtype(dtype).itemsize,
            shared_layers=shared_layers,
        )
        options = {"transport": transport, "timeout_s": timeout_s, "device": device}
        sends_messages = _sends_messages(ranks, self.device, transport)
        self.rank = Rank(
            group,
            ranks.rank,
            ranks.world,
            record_layout,
            page_size,
            interleave,
            dtype,
            softmax_scale,
            sizes,
            options,
            sends_messages,
        )
        self.name, self.asked = name, strategy
        self.costs, self.union_growth = costs, union_growth
        self.chosen: str | None = None
        self.strategy: Strategy | None = None
        self.peers, self._owns_peers = peers, peers is None
        if peers is None and self.why_no_peers is None:
            self.peers = PeerCaches(group, device, transport, f"{name}.peers")
        # Strategies that auto does not choose, and why.
        self.not_considered: dict[str, str] = {}
        self._rows = 0
        self._closed = False

    def empty_cache(self, pages: int) -> torch.Tensor:
        """A layer's cache [pages, page_size, record_bytes] uint8 of zeros, where every rank can read it.

        For peer_read between processes, where it must come from here; any strategy may use it. It lives until `close`.
        Raises: ValueError where ranks cannot read one another's memory; RuntimeError where it cannot be mapped.
        Ranks: all, in the same order, with as many pages; before any capture.
        """
        self._check_open()
        if self.peers is None:
            reject(OP, "empty_cache", "ranks that cannot read one another's memory", f"others ({self.why_no_peers})")
        return self.peers.empty(pages, self.rank.page_size, self.rank.layout.record_bytes)

    def warmup(self) -> str:
        """Measure, choose, make the channels, and run one step of zeros. Before any capture.

        Returns: the strategy, the same on every rank. Ranks: all. A second call does nothing.
        """
        return finish(self.warmup_steps())

    def warmup_steps(self) -> Steps[str]:
        """`warmup` in steps."""
        self._check_open()
        if self.strategy is not None:
            return self.chosen
        ranks = as_group(self.rank.group)
        # Read here, so that a value that is refused on one rank fails on all.
        bulk_flag = ranks.agree(f"{self.name}.costs", BULK_FLAG, lambda: strict_flag(BULK_FLAG, "1"))
        peers = self._peers_to_measure(ranks)
        given = self.costs
        messages = _can_send_messages(ranks, self.device, self.rank)
        self.costs = yield from agreed_costs(
            self.name, self.rank, self.device, given, self.union_growth, peers, bulk_flag, messages
        )
        if not messages:
            # Costs that were given may be of another machine.
            self.costs = dataclasses.replace(self.costs, moves_nccl_us=None)
        if not bulk_flag:
            self.not_considered["exchange_bulk"] = f"{BULK_FLAG}=0"
        if peers is not None and self.costs.attend_peers_us is None:
            self.not_considered["peer_read"] = "the costs that were given have no attend_peers_us"
        self.chosen = self._best().strategy if self.asked == "auto" else self.asked
        static = dataclasses.replace(self.rank, sends_messages=self.rank.sends_messages or self._over() == "nccl")
        # Its buffers are written by calls in inference mode and outside.
        with torch.inference_mode(False):
            self.strategy = open_strategy(self.chosen, self.name, static, self.device, self.peers, bulk_flag)
        yield
        # For peer_read between processes, memory that peers can read, kept with the other caches until `close`.
        probe = None
        if self.chosen == "peer_read" and not isinstance(ranks, LoopbackRank):
            probe = self.empty_cache(Inputs.pages(self.rank))
        inputs = Inputs.make(self.rank, self.device, probe)
        others = [inputs.cache] * self.rank.sizes.shared_layers
        yield from self.full_steps(
            inputs.q, inputs.cache, inputs.topk, inputs.block_table, inputs.lengths, shared_caches=others
        )
        for layer, cache in enumerate(others):
            yield from self.shared_steps(inputs.q, cache, layer, latent=inputs.latent, rope=inputs.rope)
        # Ranks leave together: the next exchange finds no rank still at work here.
        return ranks.agree(f"{self.name}.warm-up", "choice of strategy", lambda: self.chosen)

    def full(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        topk: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        *,
        shared_caches: Sequence[torch.Tensor] = (),
        sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Result:
        """A Full layer, whose tokens of this step are written: select, and attend.

        Args:
            q: [rows, heads, 576 or 512] in `dtype`, row stride free: the local heads' absorbed queries; rows of each
                request together.
            cache: [pages, page_size, record_bytes] uint8, this rank's part of the layer's records.
            topk: [rows, K] int32 global positions within the request, the same on every rank; -1 anywhere is absent.
            block_table: [requests, blocks] int32 page numbers, the same on every rank.
            lengths: [rows] int32 global lengths: a row's own token is at `length - 1`, and a top-k entry beyond that is
                absent; <= 0 is a padded row.
            shared_caches: this rank's caches of the Shared layers that follow, in order, without this step's tokens.
                Only exchange_bulk reads them ahead: the first ones, up to `shared_layers`, that are like `cache`.
            sink: as for `sparse_ckv_decode`, for the local heads.
            out, lse: as in what is returned, overwritten; None: allocated.
        Returns: (out [rows, heads, 512], lse [rows, heads]) of the local heads.
        Raises: ValueError for an argument that does not fit, before anything is sent. ExchangeError as `ce_exchange`.
        Ranks: all, with the same shapes and number of shared caches.
        """
        results = {"out": out, "lse": lse}
        steps = self.full_steps(q, cache, topk, block_table, lengths, shared_caches=shared_caches, sink=sink, **results)
        return finish(steps)

    def full_steps(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        topk: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        *,
        shared_caches: Sequence[torch.Tensor] = (),
        sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Steps[Result]:
        """`full` in steps. Arguments are checked at once."""
        strategy, sizes = self._open(), self.rank.sizes
        check_selection(topk, block_table, lengths, sizes.requests, sizes.rows_per_request, sizes.topk)
        lists = {"topk": topk, "block_table": block_table, "lengths": lengths}
        self._check_layer(q, [cache, *shared_caches], len(topk), sink, out, lse, lists)
        if topk.device != q.device:
            reject(OP, "topk", f"device {topk.device}", f"device {q.device}, where 'q' is")
        strategy.check(cache, None)
        return self._full(q, cache, (topk, block_table, lengths), list(shared_caches), sink, (out, lse))

    def shared(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        *,
        latent: torch.Tensor | None = None,
        rope: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Result:
        """A Shared layer, whose tokens of this step are written: attend to what the last Full layer selected.

        Args:
            q, cache, sink, out, lse: as for `full`.
            layer: 0 for the first Shared layer after the Full layer, and so on: its place in `shared_caches`.
            latent: [rows, 512] latents of the rows' own tokens in this layer, the same on every rank, of any float type
                that `write_ckv_records` takes. Needed where the layer's records were fetched ahead (exchange_bulk).
            rope: [rows, 64], with `latent`; None for the nope layouts.
        Returns, raises, ranks: as for `full`.
        """
        return finish(self.shared_steps(q, cache, layer, latent=latent, rope=rope, sink=sink, out=out, lse=lse))

    def shared_steps(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        *,
        latent: torch.Tensor | None = None,
        rope: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Steps[Result]:
        """`shared` in steps. Arguments are checked at once."""
        strategy = self._open()
        if not self._rows:
            reject(OP, "layer", layer, "a Shared layer after a Full layer: call full first")
        if not isinstance(layer, int) or layer < 0:
            reject(OP, "layer", repr(layer), "an integer, 0 or more")
        self._check_layer(q, [cache], self._rows, sink, out, lse, {"latent": latent, "rope": rope})
        strategy.check(cache, layer)
        if layer < strategy.ahead:
            check_current(q, latent, rope, self.rank.layout)
        return strategy.shared(q, cache, layer, (latent, rope), sink, (out, lse))

    def fence(self) -> None:
        """Wait, in the order of the stream, until every rank has finished its earlier calls: see the class.

        One hop with peer_read, nothing with the other strategies. Capture: safe. Ranks: all.
        """
        finish(self.fence_steps())

    def fence_steps(self) -> Steps[None]:
        """`fence` in steps."""
        return self._open().fence()

    def explain(self) -> dict[str, Any]:
        """The strategy and why, the table of predictions, the costs behind it, and the channels. After `warmup`."""
        strategy, table, best = self._warmed_up(), self._predictions(), self._best()
        why = "asked for"
        if self.asked == "auto":
            why = "the least microseconds per layer of " + ", ".join(
                f"{row.strategy}{' over NCCL' * (row.over == 'nccl')} {row.us_per_layer:.1f}"
                for row in table
                if row.strategy not in self.not_considered
            )
        elif best.strategy != self.chosen:
            why = f"asked for; auto would choose {best.strategy}"
        return {
            "strategy": self.chosen,
            "asked": self.asked,
            "why": why,
            "over": self._over(),
            "table": [row._asdict() for row in table],
            "not_considered": dict(self.not_considered),
            "costs": dataclasses.asdict(self.costs),
            "channels": [channel.explain() for channel in strategy.channels],
            **strategy.explain(),
        }

    @property
    def channels(self) -> list[Channel]:
        """The open channels, for `Channel.check`."""
        return self.strategy.channels if self.strategy is not None else []

    def close(self) -> None:
        """Close the channels, before the process group is destroyed. Later calls raise; a second close does nothing."""
        self._closed = True
        if self.strategy is not None:
            self.strategy.close()
        if self._owns_peers and self.peers is not None:
            self.peers.close()

    def _full(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        selection: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        shared_caches: list[torch.Tensor],
        sink: torch.Tensor | None,
        into: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> Steps[Result]:
        self.strategy.select(*selection, cache)
        self._rows = len(q)
        return (yield from self.strategy.full(q, cache, shared_caches, sink, into))

    def _peers_to_measure(self, ranks: object) -> PeerCaches | None:
        """Where to measure attention over peers' caches; None where peer_read is not to be considered."""
        if self.why_no_peers is not None:
            self.not_considered["peer_read"] = self.why_no_peers
        elif isinstance(ranks, LoopbackRank) or self.asked == "peer_read" or self.peers.allocations:
            return self.peers
        else:
            self.not_considered["peer_read"] = "no cache was made with empty_cache before warmup"
        return None

    def _check_open(self) -> None:
        if self._closed:
            reject(OP, "self", f"'{self.name}', which is closed", "one that is open: make another")

    def _open(self) -> Strategy:
        self._check_open()
        return self._warmed_up()

    def _warmed_up(self) -> Strategy:
        if self.strategy is None:
            raise RuntimeError(f"torch_sparse_mla::{OP}: call warmup() on every rank first")
        return self.strategy

    def _check_layer(
        self,
        q: torch.Tensor,
        caches: list[torch.Tensor],
        rows: int,
        sink: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        others: dict[str, torch.Tensor | None],
    ) -> None:
        check_query(q, rows, self.rank.sizes.heads, self.rank.layout, self.rank.dtype, sink)
        check_caches(q, caches, self.rank.layout, self.rank.page_size)
        named = {f"shared_caches[{index - 1}]" if index else "cache": cache for index, cache in enumerate(caches)}
        check_results(q, out, lse, {**named, "sink": sink, **others})

    def _predictions(self) -> list[Prediction]:
        return predict(self.rank.sizes, self.costs)

    def _over(self) -> str:
        """What moves what the chosen strategy moves: "channel" or "nccl", where both can the cheaper."""
        if self.rank.sends_messages and self.chosen == "owner_merge":
            return "nccl"
        ways = [row for row in self._predictions() if row.strategy == self.chosen]
        # None of peer_read that is asked for with costs that lack it.
        return min(ways, key=lambda prediction: prediction.us_per_layer).over if ways else "channel"

    def _best(self) -> Prediction:
        considered = [row for row in self._predictions() if row.strategy not in self.not_considered]
        return min(considered, key=lambda prediction: prediction.us_per_layer)


def _can_send_messages(ranks: object, device: torch.device, static: Rank) -> bool:
    """Whether what owner_merge moves may go by the group's NCCL. Only where no transport was asked for."""
    is_nccl = isinstance(ranks, ProcessRank) and device.type == "cuda" and "nccl" in ranks.backend
    return is_nccl and not static.sends_messages and static.channel_options["transport"] == "auto"


def _sends_messages(ranks: object, device: torch.device, transport: str) -> bool:
    """Whether ranks are processes on GPUs that map nothing: then moves are collectives of their group."""
    if not isinstance(ranks, ProcessRank) or device.type != "cuda":
        return False
    chosen = ranks.transports(device.type)[0] if transport == "auto" else transport
    if chosen == "collective" and "nccl" not in ranks.backend:
        reject(OP, "transport", f"'collective' on {device} with {ranks.described}", "a group with NCCL, or direct")
    return chosen == "collective"
