"""What is fixed for the life of a `DcpSparseDecode`, as its strategies see it."""

import dataclasses
from typing import Any

import torch

from ..decode.api import sparse_ckv_decode
from ..records.layouts import RecordLayout
from .costs import Sizes

# Room for the log-sum-exp of a partial result, in whichever type: records then start at multiples of 16 bytes.
LSE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Rank:
    """
    Attributes:
        group: what `Channel.create` takes.
        rank, world, page_size, interleave: the DCP geometry.
        dtype: of queries and results.
        channel_options: transport, timeout and device of every channel.
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

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_ckv_decode(
            q, cache, indices, softmax_scale=self.softmax_scale, layout=self.layout.name, sink=sink
        )
