"""`DcpSparseDecode`: the attention of one rank's heads over records that are spread over a DCP group."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .. import sharding
from ..contract import reject
from ..exchange.channel import DEFAULT_TIMEOUT_S, Channel
from ..exchange.group import as_group
from ..records.layouts import LATENT_DIM
from .contract import (
    OP,
    check_caches,
    check_current,
    check_query,
    check_selection,
    check_static,
    check_strategy,
)
from .costs import LinkCosts, Prediction, Sizes, predict
from .gather import copies_of_partials
from .measure import Inputs, agreed_costs
from .rank import LSE_BYTES, Rank
from .steps import Steps, finish
from .strategies import Exchange, OwnerMerge, open_strategy

Result = tuple[torch.Tensor, torch.Tensor]


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
        exchange: selected records travel, a layer at a time; each rank attends with its own heads.
        exchange_bulk: the same, with the Shared layers' records in one exchange that begins in the Full layer.
        auto: at warm-up, whichever of these the cost model finds cheapest; the same on every rank.

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
        name: str = "dcp",
        transport: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: str | torch.device | None = None,
    ) -> None:
        check_strategy(strategy)
        counts = {"requests": requests, "rows_per_request": rows_per_request, "heads": heads, "topk": topk}
        record_layout = check_static(layout, dtype, {**counts, "shared_layers": shared_layers}, softmax_scale)
        ranks = as_group(group)
        sharding.check_geometry(page_size, ranks.rank, ranks.world, interleave)
        sizes = Sizes(
            world=ranks.world,
            **counts,
            record_bytes=record_layout.record_bytes,
            query_bytes=record_layout.query_dim * dtype.itemsize,
            partial_bytes=LATENT_DIM * dtype.itemsize + LSE_BYTES,
            shared_layers=shared_layers,
        )
        options = {"transport": transport, "timeout_s": timeout_s, "device": device}
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
        )
        self.device = ranks.device(device)
        self.name, self.asked = name, strategy
        self.costs = costs
        self.chosen: str | None = None
        self.strategy: OwnerMerge | Exchange | None = None
        self._rows, self._copies = 0, 1

    def warmup(self) -> str:
        """Measure, choose, make the channels, and run one step of zeros. Before any capture.

        Returns: the strategy, the same on every rank. Ranks: all. A second call does nothing.
        """
        return finish(self.warmup_steps())

    def warmup_steps(self) -> Steps[str]:
        """`warmup` in steps."""
        if self.strategy is not None:
            return self.chosen
        self.costs, transport = yield from agreed_costs(self.name, self.rank, self.device, self.costs)
        self._copies = copies_of_partials(transport, self.rank.world)
        best = min(self._predictions(), key=lambda prediction: prediction.us_per_layer)
        self.chosen = best.strategy if self.asked == "auto" else self.asked
        self.strategy = open_strategy(self.chosen, self.name, self.rank)
        yield
        inputs = Inputs.make(self.rank, self.device)
        others = [inputs.cache] * self.rank.sizes.shared_layers
        yield from self.full_steps(
            inputs.q, inputs.cache, inputs.topk, inputs.block_table, inputs.lengths, shared_caches=others
        )
        for layer, cache in enumerate(others):
            yield from self.shared_steps(inputs.q, cache, layer, latent=inputs.latent, rope=inputs.rope)
        # Ranks leave together: the next exchange finds no rank still at work here.
        return as_group(self.rank.group).agree(f"{self.name}.warm-up", "choice of strategy", lambda: self.chosen)

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
    ) -> Result:
        """A Full layer, whose tokens of this step are written: select, and attend.

        Args:
            q: [rows, heads, 576 or 512] in `dtype`: the local heads' absorbed queries; rows of each request together.
            cache: [pages, page_size, record_bytes] uint8, this rank's part of the layer's records.
            topk: [rows, K] int32 global positions within the request, the same on every rank; -1 anywhere is absent.
            block_table: [requests, blocks] int32 page numbers, the same on every rank.
            lengths: [rows] int32 global lengths: a row's own token is at `length - 1`, and a top-k entry beyond that is
                absent; <= 0 is a padded row.
            shared_caches: this rank's caches of the Shared layers that follow, in order, without this step's tokens.
                Only exchange_bulk reads them, and no more than `shared_layers`.
            sink: as for `sparse_ckv_decode`, for the local heads.
        Returns: (out [rows, heads, 512], lse [rows, heads]) of the local heads.
        Raises: ValueError for an argument that does not fit, before anything is sent. ExchangeError as `ce_exchange`.
        Ranks: all, with the same shapes and number of shared caches.
        """
        return finish(self.full_steps(q, cache, topk, block_table, lengths, shared_caches=shared_caches, sink=sink))

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
    ) -> Steps[Result]:
        """`full` in steps. Arguments are checked at once."""
        strategy, sizes = self._open(), self.rank.sizes
        check_selection(topk, block_table, lengths, sizes.requests, sizes.rows_per_request, sizes.topk)
        self._check_layer(q, [cache, *shared_caches], len(topk), sink)
        if topk.device != q.device:
            reject(OP, "topk", f"device {topk.device}", f"device {q.device}, where 'q' is")
        return self._full(strategy, q, cache, topk, block_table, lengths, list(shared_caches), sink)

    def shared(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        *,
        latent: torch.Tensor | None = None,
        rope: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
    ) -> Result:
        """A Shared layer, whose tokens of this step are written: attend to what the last Full layer selected.

        Args:
            q, cache, sink: as for `full`.
            layer: 0 for the first Shared layer after the Full layer, and so on: its place in `shared_caches`.
            latent: [rows, 512] latents of the rows' own tokens in this layer, the same on every rank, of any float type
                that `write_ckv_records` takes. Needed where the layer's records were fetched ahead (exchange_bulk).
            rope: [rows, 64], with `latent`; None for the nope layouts.
        Returns, raises, ranks: as for `full`.
        """
        return finish(self.shared_steps(q, cache, layer, latent=latent, rope=rope, sink=sink))

    def shared_steps(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        *,
        latent: torch.Tensor | None = None,
        rope: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
    ) -> Steps[Result]:
        """`shared` in steps. Arguments are checked at once."""
        strategy = self._open()
        if not self._rows:
            reject(OP, "layer", layer, "a Shared layer after a Full layer: call full first")
        if not isinstance(layer, int) or layer < 0:
            reject(OP, "layer", repr(layer), "an integer, 0 or more")
        self._check_layer(q, [cache], self._rows, sink)
        if isinstance(strategy, Exchange) and layer < strategy.fetched:
            check_current(latent, rope, self._rows, self.rank.layout)
        return strategy.shared(q, cache, layer, latent, rope, sink)

    def explain(self) -> dict[str, Any]:
        """The strategy and why, the table of predictions, the costs behind it, and the channels. After `warmup`."""
        strategy = self._open()
        table = self._predictions()
        best = min(table, key=lambda prediction: prediction.us_per_layer)
        why = "asked for"
        if self.asked == "auto":
            why = "the least microseconds per layer of " + ", ".join(
                f"{row.strategy} {row.us_per_layer:.1f}" for row in table
            )
        elif best.strategy != self.chosen:
            why = f"asked for; auto would choose {best.strategy}"
        return {
            "strategy": self.chosen,
            "asked": self.asked,
            "why": why,
            "table": [row._asdict() for row in table],
            "costs": dataclasses.asdict(self.costs),
            "channels": [channel.explain() for channel in strategy.channels],
        }

    @property
    def channels(self) -> list[Channel]:
        """The open channels, for `Channel.check`."""
        return self.strategy.channels if self.strategy is not None else []

    def close(self) -> None:
        """Close the channels, before the process group is destroyed. A second close does nothing."""
        if self.strategy is not None:
            self.strategy.close()

    def _full(
        self,
        strategy: OwnerMerge | Exchange,
        q: torch.Tensor,
        cache: torch.Tensor,
        topk: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        shared_caches: list[torch.Tensor],
        sink: torch.Tensor | None,
    ) -> Steps[Result]:
        strategy.select(torch.where(topk < lengths.unsqueeze(1), topk, -1), block_table, lengths)
        self._rows = len(topk)
        return (yield from strategy.full(q, cache, shared_caches, sink))

    def _open(self) -> OwnerMerge | Exchange:
        if self.strategy is None:
            raise RuntimeError(f"torch_sparse_mla::{OP}: call warmup() on every rank first")
        return self.strategy

    def _check_layer(self, q: torch.Tensor, caches: list[torch.Tensor], rows: int, sink: torch.Tensor | None) -> None:
        check_query(q, rows, self.rank.sizes.heads, self.rank.layout, self.rank.dtype, sink)
        check_caches(q, caches, self.rank.layout, self.rank.page_size)

    def _predictions(self) -> list[Prediction]:
        return predict(self.rank.sizes, self.costs, self._copies)
