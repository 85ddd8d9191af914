"""The shards of a Transformers cache as ranks of a DCP group in this process: `DcpSparseDecode`, driven in turns."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..dcp import DcpSparseDecode, run_loopback
from ..exchange.channel import DEFAULT_TIMEOUT_S
from ..exchange.group import LoopbackGroup

if TYPE_CHECKING:
    from .paged_cache import SparseMlaLayer, TokenPages

# Query tokens of a sequence in a decode step; a forward of more is a prompt.
MAX_STEP_QUERIES = 4
# Top-k lists grow with a short context: they are padded to a multiple of this.
TOPK_STEP = 64
_names = itertools.count()


class LoopbackRanks:
    """The ranks of one cache. Made, and made anew, when a step has sizes that those at hand do not fit."""

    timeout_s = DEFAULT_TIMEOUT_S

    def __init__(self) -> None:
        self.key: tuple | None = None
        self.ranks: list[DcpSparseDecode] = []

    def attend(
        self,
        q: torch.Tensor,
        layer: "SparseMlaLayer",
        selected: torch.Tensor,
        visible: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        """Attention [batch * queries, heads, 512] of a layer whose tokens of this step are written.

        Args:
            q: [batch * queries, heads, width] absorbed queries.
            selected: [batch, queries, K] tokens that each query selected.
            visible: the attention mask, as for `TokenPages.slots_of_selected`.
        """
        world = layer.pages.settings.dcp.world
        numbers = self._numbers(world)
        columns = -(-selected.shape[-1] // TOPK_STEP) * TOPK_STEP
        own_q = [heads.contiguous() for heads in q.chunk(world, 1)]
        # Only at a Full layer: the sizes of its Shared layers are its own.
        if layer.place is None:
            self._fit(q, layer.pages, columns, scaling)
            arguments = self._selection(layer, selected, visible, columns)
            calls = [
                rank.full_steps(
                    own_q[number],
                    layer.records[shard],
                    *arguments,
                    shared_caches=[follower.records[shard] for follower in layer.followers],
                )
                for shard, (number, rank) in enumerate(zip(numbers, self.ranks, strict=True))
            ]
        else:
            latent, rope = layer.current
            calls = [
                rank.shared_steps(own_q[number], layer.records[shard], layer.place, latent=latent, rope=rope)
                for shard, (number, rank) in enumerate(zip(numbers, self.ranks, strict=True))
            ]
        return torch.cat(self._all([out for out, _ in run_loopback(calls)]), 1)

    def explain(self) -> dict | None:
        """What the first rank's `explain` says; None before the first decode step."""
        return self.ranks[0].explain() if self.ranks else None

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.ranks, self.key = [], None

    def __deepcopy__(self, memo: dict) -> "LoopbackRanks":
        """Channels are not copied: a copied cache makes its own."""
        return type(self)()

    def __del__(self) -> None:
        self.close()

    def _numbers(self, world: int) -> Sequence[int]:
        """The ranks that are here."""
        return range(world)

    def _groups(self, world: int, device: torch.device) -> list[Any]:
        """The group as each of them sees it."""
        group = LoopbackGroup(world, device)
        return [group.rank(rank) for rank in range(world)]

    def _all(self, outs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of all ranks, from those of the ranks that are here."""
        return outs

    def _fit(self, q: torch.Tensor, pages: "TokenPages", columns: int, scaling: float) -> None:
        settings, batch = pages.settings, pages.batch
        queries = len(q) // batch
        key = (queries, q.shape[1:], q.dtype, columns, scaling)
        if self.key == key:
            return
        self.close()
        world, name = settings.dcp.world, f"transformers{next(_names)}"
        self.ranks = [
            DcpSparseDecode(
                group,
                layout=settings.layout,
                page_size=settings.page_size,
                interleave=settings.dcp.interleave,
                requests=batch,
                rows_per_request=queries,
                heads=q.shape[1] // world,
                topk=columns,
                softmax_scale=scaling,
                dtype=q.dtype,
                strategy=settings.dcp.strategy,
                shared_layers=pages.shared_layers,
                name=name,
                peers=pages.peers,
                timeout_s=self.timeout_s,
                device=q.device,
            )
            for group in self._groups(world, q.device)
        ]
        # Counters made in inference mode could not be changed outside of it later.
        with torch.inference_mode(False), torch.no_grad():
            run_loopback([rank.warmup_steps() for rank in self.ranks])
        self.key = key

    def _selection(
        self, layer: "SparseMlaLayer", selected: torch.Tensor, visible: torch.Tensor | None, columns: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """top-k lists, block table and lengths, as `DcpSparseDecode.full` takes them."""
        batch, queries, count = selected.shape
        tokens = layer.pages.visible_tokens(selected, visible).flatten(0, 1)
        topk = torch.nn.functional.pad(tokens, (0, columns - count), value=-1).int()
        # A sequence's tokens end at the layer's length; padding on the left counts as tokens that nobody selects.
        ends = torch.arange(layer.length - queries, layer.length, device=topk.device, dtype=torch.int32) + 1
        return topk, layer.pages.block_table.int(), ends.repeat(batch)
