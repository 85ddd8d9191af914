"""Ranks that are processes of a `torch.distributed` group, tensors on the CPU: messages of exact size between ranks.

Each rank sends each peer a header and a payload in every exchange, whatever it owns: nobody ever skips a message.
Waits are for one peer at a time, so that an error can say who is missing. Receives are posted by `start`, into room for
the largest message, so that a wait needs a peer's start, not its wait: two channels may be waited for in any order.

Messages go through a gloo group of the channel's own: a message that times out or is given up breaks its connections,
which must not be those of the user's group, nor those of a later channel of the same name.
"""

import datetime
import uuid
from typing import Any

import torch
import torch.distributed as dist

from ..channel import ERRORS, OTHER_CALL, OTHER_PLAN, STARTED, TIMED_OUT, WAITED, ExchangeError
from ..contract import ExchangeCall
from . import counters
from .packing import layers_and_set, outgoing, owned_places, place, plan_digest

HEADER_WORDS = 4
CONNECT_S = 30.0


def connect(channel: Any) -> "CollectiveTransport":
    group, name = channel.group, channel.configuration.name
    generation = group.word_of_first("generation", lambda: uuid.uuid4().hex)
    transport = group.agree(name, "transport collective", lambda: CollectiveTransport(channel))
    transport.group = group.agree(name, "private group", lambda: _private_group(channel, generation))
    return transport


def _private_group(channel: Any, generation: str) -> dist.ProcessGroupGloo:
    """Not `dist.new_group`: that takes every process of the job, or a name that depends on what each made before."""
    store = dist.distributed_c10d._get_process_group_store(channel.group.group)
    store = dist.PrefixStore(f"torch_sparse_mla/{generation}", store)
    return dist.ProcessGroupGloo(store, channel.rank, channel.world, datetime.timedelta(seconds=CONNECT_S))


class CollectiveTransport:
    """Between `start` and `wait` it keeps the messages that are under way. After an error it moves nothing more."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.group: dist.ProcessGroupGloo | None = None
        self.timeout = datetime.timedelta(seconds=channel.configuration.timeout_s)
        self.headers: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self.payloads: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self.sends: dict[int, list[tuple[dist.Work, torch.Tensor]]] = {}
        self.failure: ExchangeError | None = None

    def start(self, call: ExchangeCall) -> None:
        self._raise_failure()
        epoch, said = counters.next_epoch(call), layers_and_set(call)
        places = owned_places(call, self.channel.rank)
        records = outgoing(call, places)
        place(call, places, records[self.channel.rank])
        header = torch.tensor([epoch, *said, plan_digest(call)])
        sizes = self.channel.configuration
        most = sizes.layers * sizes.capacity_records * sizes.record_bytes
        for peer in self._peers():
            payload = _as_message(records[peer])
            given = torch.zeros(HEADER_WORDS, dtype=torch.int64)
            self.headers[peer] = (self._meet(peer, epoch, self._receive, given, 0), given)
            # Memory that no message reaches is never touched.
            room = torch.empty(most, dtype=torch.uint8)
            self.payloads[peer] = (self._meet(peer, epoch, self._receive, room, 1), room)
            self.sends[peer] = [
                (self._meet(peer, epoch, self._send, header, 0), header),
                (self._meet(peer, epoch, self._send, payload, 1), payload),
            ]
        counters.count(call, STARTED, epoch)

    def wait(self, call: ExchangeCall) -> None:
        self._raise_failure()
        epoch, said = counters.open_epoch(call), layers_and_set(call)
        places = {peer: owned_places(call, peer) for peer in self._peers()}
        for peer, (work, header) in self.headers.items():
            self._complete(peer, epoch, work)
            if header[:3].tolist() != [epoch, *said]:
                raise self._failed(ERRORS[OTHER_CALL].format(peer=peer), epoch)
            if int(header[3]) != plan_digest(call):
                raise self._failed(ERRORS[OTHER_PLAN].format(peer=peer), epoch)
        record_bytes = self.channel.configuration.record_bytes
        for peer, (work, room) in self.payloads.items():
            self._complete(peer, epoch, work)
            records = room[: call.layers * len(places[peer]) * record_bytes]
            place(call, places[peer], records.view(call.layers, -1, record_bytes))
        for peer, sends in self.sends.items():
            for work, _ in sends:
                self._complete(peer, epoch, work)
        self.headers, self.payloads, self.sends = {}, {}, {}
        counters.count(call, WAITED, epoch)

    def refuse_if_alone(self, call: ExchangeCall) -> None:
        """Ranks are processes: none of them waits for itself."""

    def close(self) -> None:
        """Messages under way are given up with the group; their memory lives until the group is gone."""
        if self.group is not None:
            self.group.abort()
        self.group = None
        self.headers, self.payloads, self.sends = {}, {}, {}

    def _peers(self) -> list[int]:
        return [(self.channel.rank + step) % self.channel.world for step in range(1, self.channel.world)]

    def _send(self, message: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return self.group.send([message], peer, tag)

    def _receive(self, message: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return self.group.recv([message], peer, tag)

    def _meet(self, peer: int, epoch: int, action: Any, message: torch.Tensor, tag: int) -> dist.Work:
        try:
            return action(message, peer, tag)
        except RuntimeError as error:
            raise self._failed(f"rank {peer} left: {_first_line(error)}", epoch) from error

    def _failed(self, what: str, epoch: int) -> ExchangeError:
        self.failure = self.channel.error(what, epoch)
        return self.failure

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise ExchangeError(*self.failure.args)

    def _complete(self, peer: int, epoch: int, work: dist.Work) -> None:
        try:
            if work.wait(self.timeout):
                return
            why = "the wait was aborted"
        except RuntimeError as error:
            why = _first_line(error)
        missing = ERRORS[TIMED_OUT].format(peer=peer, timeout=self.channel.configuration.timeout_s)
        raise self._failed(f"{missing} ({why})", epoch)


def _as_message(records: torch.Tensor) -> torch.Tensor:
    """The bytes of the records, in place; one byte of padding where there are none, since nobody skips a message."""
    return records.view(-1) if records.numel() else torch.zeros(1, dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
