"""Ranks that are processes of an NCCL group, on GPUs: the push kernel packs, one all-gather of static size carries.

What a rank sends is its slab, records at their place in the union, in full: live counts never decide what is launched.
"""

from typing import Any

import torch
import torch.distributed as dist

from ..contract import ExchangeCall
from . import launching


class DeviceCollectiveTransport:
    """`start` and `wait` of one exchange belong in one CUDA graph, or both outside: the all-gather runs on a stream of
    its own in between."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.size = launching.slab_bytes(channel)
        self.sent = torch.zeros(self.size, dtype=torch.uint8, device=channel.device)
        self.received = torch.zeros(channel.world * self.size, dtype=torch.uint8, device=channel.device)
        self.host_error = launching.host_words(channel.device)
        addresses = [self.received.data_ptr(), self.sent.data_ptr(), self.host_error.data_ptr()]
        self.peers = launching.address_table(addresses, channel)
        self.work: Any = None

    def start(self, call: ExchangeCall) -> None:
        launching.raise_host_error(self.channel, self.host_error)
        launching.push(call, self.peers, 1, flags=False)
        self.work = self.gather(call.layers * launching.layer_bytes(self.channel))

    def wait(self, call: ExchangeCall) -> None:
        launching.raise_host_error(self.channel, self.host_error)
        if self.work is not None:
            self.work.wait()
            self.work = None
        launching.wait(call, self.peers, call.layers * launching.layer_bytes(self.channel), flags=False)

    def gather(self, size: int) -> Any:
        received, sent = self.received[: self.channel.world * size], self.sent[:size]
        return dist.all_gather_into_tensor(received, sent, group=self.channel.group.group, async_op=True)

    def refuse_if_alone(self, call: ExchangeCall) -> None:
        """Ranks are processes: none of them waits for itself."""

    def close(self) -> None:
        launching.synchronise(self.channel.device)
        self.work = None
