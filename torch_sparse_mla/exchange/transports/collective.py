"""Ranks that are processes of a `torch.distributed` group, on the CPU: messages of exact size from rank to rank.

Each rank sends each peer a header and a payload in every exchange, whatever it owns: nobody ever skips a message.
Waits are for one peer at a time, so that an error can say who is missing.
"""

import datetime
from typing import Any

import torch
import torch.distributed as dist

from ..channel import ERRORS, OTHER_CALL, OTHER_PLAN, STARTED, TIMED_OUT, WAITED
from ..contract import ExchangeCall
from . import counters
from .packing import owned_places, owned_records, place

HEADER_WORDS = 3


class CollectiveTransport:
    """Between `start` and `wait` it keeps the messages that are under way."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.group = channel.group.group
        self.timeout = datetime.timedelta(seconds=channel.configuration.timeout_s)
        self.tag = (channel.tag & 0x3FFFFFFF) << 1
        self.headers: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self.sends: dict[int, list[tuple[dist.Work, torch.Tensor]]] = {}

    def start(self, call: ExchangeCall) -> None:
        epoch = counters.next_epoch(call)
        places = owned_places(call, self.channel.rank)
        records = owned_records(call, places)
        place(call, places, records)
        header = torch.tensor([epoch, call.layers, len(places)])
        payload = _as_message(records)
        for peer in self._peers():
            given = torch.zeros(HEADER_WORDS, dtype=torch.int64)
            self.headers[peer] = (self._meet(peer, epoch, self._receive, given, 0), given)
            self.sends[peer] = [
                (self._meet(peer, epoch, self._send, header, 0), header),
                (self._meet(peer, epoch, self._send, payload, 1), payload),
            ]
        counters.count(call, STARTED, epoch)

    def wait(self, call: ExchangeCall) -> None:
        epoch = counters.open_epoch(call)
        places = {peer: owned_places(call, peer) for peer in self._peers()}
        for peer, (work, header) in self.headers.items():
            self._complete(peer, epoch, work)
            if header[:2].tolist() != [epoch, call.layers]:
                raise self.channel.error(ERRORS[OTHER_CALL].format(peer=peer), epoch)
            if int(header[2]) != len(places[peer]):
                raise self.channel.error(ERRORS[OTHER_PLAN].format(peer=peer), epoch)
        record_bytes = self.channel.configuration.record_bytes
        arriving = {}
        for peer in self._peers():
            records = torch.empty(call.layers, len(places[peer]), record_bytes, dtype=torch.uint8)
            message = _as_message(records)
            arriving[peer] = (self._meet(peer, epoch, self._receive, message, 1), records)
        for peer, (work, records) in arriving.items():
            self._complete(peer, epoch, work)
            place(call, places[peer], records)
        for peer, sends in self.sends.items():
            for work, _ in sends:
                self._complete(peer, epoch, work)
        self.headers, self.sends = {}, {}
        counters.count(call, WAITED, epoch)

    def refuse_if_alone(self, call: ExchangeCall) -> None:
        """Ranks are processes: none of them waits for itself."""

    def close(self) -> None:
        self.headers, self.sends = {}, {}

    def _peers(self) -> list[int]:
        return [(self.channel.rank + step) % self.channel.world for step in range(1, self.channel.world)]

    def _send(self, message: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return dist.isend(message, group=self.group, tag=self.tag + tag, group_dst=peer)

    def _receive(self, message: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return dist.irecv(message, group=self.group, tag=self.tag + tag, group_src=peer)

    def _meet(self, peer: int, epoch: int, action: Any, message: torch.Tensor, tag: int) -> dist.Work:
        try:
            return action(message, peer, tag)
        except RuntimeError as error:
            raise self.channel.error(f"rank {peer} left: {_first_line(error)}", epoch) from error

    def _complete(self, peer: int, epoch: int, work: dist.Work) -> None:
        try:
            if work.wait(self.timeout):
                return
            why = "the wait was aborted"
        except RuntimeError as error:
            why = _first_line(error)
        missing = ERRORS[TIMED_OUT].format(peer=peer, timeout=self.channel.configuration.timeout_s)
        raise self.channel.error(f"{missing} ({why})", epoch)


def _as_message(records: torch.Tensor) -> torch.Tensor:
    """The bytes of the records, in place; one byte of padding where there are none, since nobody skips a message."""
    return records.view(-1) if records.numel() else torch.zeros(1, dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
