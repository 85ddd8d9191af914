"""The shards of a Transformers cache in processes of `torch.distributed`'s default group, one in each.

Every process runs the whole model; records, and attention over them, are divided. What a process computes of attention
reaches the others through the group's own collectives, so that all go on with the same values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..dcp.peers import PeerCaches, why_no_peers
from ..exchange.group import as_group
from .loopback_ranks import LoopbackRanks

# Every process runs a whole model between two steps, and not at one speed.
TIMEOUT_S = 60.0


class ProcessRanks(LoopbackRanks):
    """This process's rank."""

    timeout_s = TIMEOUT_S

    def _numbers(self, world: int) -> Sequence[int]:
        return [dist.get_rank()]

    def _groups(self, world: int, device: torch.device) -> list[Any]:
        return [dist.group.WORLD]

    def _all(self, outs: list[torch.Tensor]) -> list[torch.Tensor]:
        return of_all_ranks(outs[0])


def of_all_ranks(own: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of every process, in order of rank."""
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return parts


def peer_caches(device: torch.device, name: str) -> PeerCaches | None:
    """Where processes on GPUs allocate caches that the others can read; None where they cannot."""
    if why_no_peers(as_group(dist.group.WORLD), device, "auto") is not None:
        return None
    return PeerCaches(dist.group.WORLD, device, name=name)
