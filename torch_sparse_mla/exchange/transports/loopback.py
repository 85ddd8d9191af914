"""Ranks of one process on the CPU: a rank's outgoing records lie on a board that its peers read."""

import threading
from typing import Any

from ..channel import ERRORS, OTHER_CALL, OTHER_PLAN, STARTED, TIMED_OUT, WAITED, ExchangeError
from ..contract import ExchangeCall
from . import counters
from .packing import layers_and_set, outgoing, owned_places, place, plan_digest

SLABS = 2


def connect(channel: Any) -> "LoopbackTransport":
    return channel.group.agree(channel.configuration.name, "transport loopback", lambda: LoopbackTransport(channel))


class LoopbackTransport:
    """Each rank has two slabs on the board, by parity of the epoch, as peers' memory has on a GPU."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.board = channel.group.board(channel.configuration.name)
        self.slabs = self.board.shared.setdefault("slabs", [[None] * SLABS for _ in range(channel.world)])

    def start(self, call: ExchangeCall) -> None:
        epoch, said = counters.next_epoch(call), layers_and_set(call)
        places = owned_places(call, self.channel.rank)
        records = outgoing(call, places)
        with self.board.changed:
            self._raise_failure(epoch)
            place(call, places, records[self.channel.rank])
            self.slabs[self.channel.rank][epoch % SLABS] = (epoch, said, plan_digest(call), records)
            self.board.threads[self.channel.rank] = threading.current_thread()
            self.board.changed.notify_all()
        counters.count(call, STARTED, epoch)

    def wait(self, call: ExchangeCall) -> None:
        epoch, said = counters.open_epoch(call), layers_and_set(call)
        with self.board.changed:
            for peer in self._peers():
                self._await(peer, epoch)
        for peer in self._peers():
            _, its_call, digest, sent = self.slabs[peer][epoch % SLABS]
            records = sent[self.channel.rank]
            places = owned_places(call, peer)
            if its_call != said:
                raise self.channel.error(ERRORS[OTHER_CALL].format(peer=peer), epoch)
            if digest != plan_digest(call):
                raise self.channel.error(ERRORS[OTHER_PLAN].format(peer=peer), epoch)
            place(call, places, records)
        counters.count(call, WAITED, epoch)

    def refuse_if_alone(self, call: ExchangeCall) -> None:
        """A combined call waits, and peers that start on the calling thread cannot come meanwhile. Where a peer starts
        is known from its last start; before its first one this waits, and the timeout ends it."""
        epoch = counters.next_epoch(call)
        with self.board.changed:
            for peer in self._peers():
                if not self._came(peer, epoch):
                    self._refuse_own_thread(peer, epoch, call.op)

    def close(self) -> None:
        """Nothing of this rank's own: the board goes when the last rank leaves."""

    def _peers(self) -> list[int]:
        return [(self.channel.rank + step) % self.channel.world for step in range(1, self.channel.world)]

    def _came(self, peer: int, epoch: int) -> bool:
        sent = self.slabs[peer][epoch % SLABS]
        return sent is not None and sent[0] == epoch

    def _await(self, peer: int, epoch: int) -> None:
        if not self._came(peer, epoch):
            self._refuse_own_thread(peer, epoch, "ce_exchange_wait")
        timeout = self.channel.configuration.timeout_s
        self.board.changed.wait_for(lambda: self._came(peer, epoch) or self.board.failure, timeout)
        if not self._came(peer, epoch):
            self._raise_failure(epoch)
            raise self.channel.error(ERRORS[TIMED_OUT].format(peer=peer, timeout=timeout), epoch)

    def _refuse_own_thread(self, peer: int, epoch: int, op: str) -> None:
        if self.board.threads.get(peer) is threading.current_thread():
            raise ExchangeError(
                f"torch_sparse_mla::{op}: channel '{self.channel.name}': rank {self.channel.rank}, epoch {epoch}: "
                f"rank {peer} was last seen on the calling thread and did not start, so it would not come while this "
                "call waits; call ce_exchange_start for every rank, then ce_exchange_wait for every rank, or run each "
                "rank on a thread of its own"
            )

    def _raise_failure(self, epoch: int) -> None:
        if self.board.failure:
            raise self.channel.error(self.board.failure, epoch)
