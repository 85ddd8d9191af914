"""What is fixed for the life of a `DcpSparseDecode`, as its strategies see it."""

import dataclasses
from typing import Any

import torch

from ..decode.api import sparse_ckv_decode, sparse_ckv_decode_peers
from ..decode.contract import sparse_ckv_decode_workspace_bytes
from ..records.layouts import RecordLayout
from .costs import Sizes

# (out [rows, heads, 512], lse [rows, heads]).
Result = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Rank:
    """
    Attributes:
        group: what `Channel.create` takes.
        rank, world, page_size, interleave: the DCP geometry.
        dtype: of queries and results.
        channel_options: transport, timeout and device of every channel.
        sends_messages: whether ranks are processes whose GPUs map no memory of one another: NCCL.
    """

    group: Any
    rank: int
    world: int
    layout: RecordLayout
    page_size: int
    interleave: int
    dtype: torch.dtype
    softmax_scale: float
    sizes: Sizes
    channel_options: dict[str, Any]
    sends_messages: bool = False

    @property
    def geometry(self) -> dict[str, int]:
        return {"page_size": self.page_size, "interleave": self.interleave, "rank": self.rank}

    def workspace(self, rows: int, heads: int, device: torch.device) -> torch.Tensor:
        """Scratch for attention of so many rows or fewer."""
        topk = self.sizes.topk
        size = max(sparse_ckv_decode_workspace_bytes(count, heads, topk) for count in range(1, rows + 1))
        return torch.empty(size, dtype=torch.uint8, device=device)

    def attend(
        self,
        q: torch.Tensor,
        caches: torch.Tensor | list[torch.Tensor],
        indices: torch.Tensor,
        sink: torch.Tensor | None = None,
        into: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        workspace: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> Result:
        """Attention over one cache, or over those of all ranks."""
        decode = sparse_ckv_decode_peers if isinstance(caches, list) else sparse_ckv_decode
        return decode(
            q,
            caches,
            indices,
            softmax_scale=self.softmax_scale,
            layout=self.layout.name,
            lengths=lengths,
            sink=sink,
            out=into[0],
            lse=into[1],
            workspace=workspace,
        )
