"""The protocol of `transports/ce.py` as a state machine, on the schedules of `protocol_model.py`.

A rank has a stream and, beside it, a stream of copies. The pack kernel writes the message, and stores into peers'
overflow slabs; copies take the message apart into pieces that land in any order, the header like any other; a flag
that tells lands after them. Copies, flags and waits are what a graph freezes: they happen whether the kernels before
them did their work or refused. A watchdog may give up what a rank waits for.
"""

import dataclasses
from collections import deque
from collections.abc import Generator

from .protocol_model import BLOCKS, MODULUS, Call, Host, Machine, ProtocolBroken, Segment, Steps, Store

ABSENT, ARRIVED, FORCED = range(3)
HEADER = "header"


@dataclasses.dataclass(frozen=True)
class CopyRules:
    """What the protocol keeps; False drops the rule."""

    flag_after_copy: bool = True
    overflow_fenced_before_flag: bool = True
    wait_for_flags: bool = True
    wait_for_leave: bool = True
    take_back_flags: bool = True
    take_back_before_leave: bool = True
    leave_by_last_block: bool = True
    message_to_every_peer: bool = True
    counters_on_device: bool = True
    check_header: bool = True
    distrust_what_was_given_up: bool = True
    watchdog: bool = True


@dataclasses.dataclass(frozen=True)
class CopyCall(Call):
    """A rank in `foreign` gives the state of another channel: its kernels do nothing, the host refuses what follows.

    Records of odd layers do not fit into the message.
    """

    foreign: frozenset[int] = frozenset()


class CopyRank:
    def __init__(self, world: int, counter: int) -> None:
        self.started = self.waited = self.host_epoch = counter
        # No sets of workspaces here: nobody writes a peer's.
        self.host_used: list[int] = []
        self.pack_blocks = self.unpack_blocks = 0
        self.message = {HEADER: counter}
        self.inbox = [{HEADER: counter} for _ in range(world)]
        self.overflow = {}
        self.came, self.leave = [ABSENT] * world, [ARRIVED] * world
        self.is_waiting = False
        self.error: tuple[str, int] | None = None
        self.copies: deque[Steps] = deque()


class CopyMachine(Machine):
    """
    Args:
        impatient: the watchdog may give up any wait at any time, and not only where nobody can go on.
    """

    def __init__(
        self,
        world: int,
        program: tuple[Segment, ...],
        counter: int = 0,
        seed: int = 0,
        rules: CopyRules = CopyRules(),
        withheld: int | None = None,
        impatient: bool = False,
    ) -> None:
        super().__init__(world, program, counter, seed, rules, withheld)
        self.ranks = [CopyRank(world, counter % MODULUS) for _ in range(world)]
        self.blocks += [[] for _ in range(world)]
        self.impatient = impatient
        foreign = any(call.foreign for segment in program for call in segment.calls)
        self.may_fail = impatient or foreign or withheld is not None

    def run(self) -> None:
        """Raises ProtocolBroken: wrong bytes, a rank that hangs, or an error although every rank came and was heard."""
        super().run()
        if any(self.blocks) or any(rank.copies for rank in self.ranks):
            raise ProtocolBroken("a rank hangs")
        if not self.may_fail and any(rank.error for rank in self.ranks):
            raise ProtocolBroken(f"errors {[rank.error for rank in self.ranks]} although every rank came")

    def refill(self, queue: int) -> None:
        if queue < self.world:
            super().refill(queue)
        elif not self.blocks[queue] and self.ranks[queue - self.world].copies:
            self.blocks[queue] = [(self.ranks[queue - self.world].copies.popleft(), None)]

    def moves(self) -> list:
        moves = super().moves()
        if self.rules.watchdog and (self.impatient or not moves):
            for rank in self.ranks:
                if rank.is_waiting and ABSENT in rank.came + rank.leave:
                    moves.append((lambda rank=rank: self.release(rank), 0.1))
        return moves

    def release(self, rank: CopyRank) -> None:
        """Also in vain, where what was waited for comes at that moment: a later wait needs the watchdog again."""
        for flags in (rank.came, rank.leave):
            flags[:] = [FORCED if flag == ABSENT else flag for flag in flags]

    def stream(self, rank: int, program: tuple[Segment, ...]) -> Generator[list[Steps], None, None]:
        number = 0
        for segment in program:
            frozen = [self.issue(rank, call) for call in segment.calls] if rank in segment.captured else None
            for _ in range(segment.repeats):
                for position, call in enumerate(segment.calls):
                    host = frozen[position] if frozen else self.issue(rank, call)
                    number += 1
                    if self.rules.wait_for_leave:
                        yield [self.await_flags(rank, self.ranks[rank].leave)]
                    yield [self.pack(rank, call, number, host, block) for block in range(BLOCKS)]
                    self.ranks[rank].copies.append(self.copy(rank, call))
                    if call.split:
                        yield [self.compute()]
                    if self.rules.wait_for_flags:
                        yield [self.await_flags(rank, self.ranks[rank].came)]
                    yield [self.unpack(rank, call, number, host, block) for block in range(BLOCKS)]
                    if rank in call.foreign:
                        return

    def await_flags(self, rank: int, flags: list[int]) -> Steps:
        state = self.ranks[rank]
        state.is_waiting = True
        for peer in self.peers(rank):
            yield lambda peer=peer: flags[peer] != ABSENT
        state.is_waiting = False

    def pack(self, rank: int, call: CopyCall, number: int, host: Host, block: int) -> Steps:
        state = self.ranks[rank]
        yield
        given_up = [peer for peer in self.peers(rank) if state.leave[peer] == FORCED]
        if given_up and not state.error and rank not in call.foreign:
            state.error = ("timed out", given_up[0])
        if self.refuses(rank, call):
            return
        epoch = self.epoch(state.started, host)
        for layer in range(0 if rank in call.empty else call.layers):
            if layer % 2 == 0:
                state.message[block, layer] = number
            else:
                for peer in self.peers(rank):
                    overflow, key = self.ranks[peer].overflow, (rank, block, layer)
                    land = lambda overflow=overflow, key=key: overflow.update({key: number})  # noqa: E731
                    self.network.append(Store(rank, peer, False, land, self.rules.overflow_fenced_before_flag))
            yield
        state.pack_blocks += 1
        last = state.pack_blocks == BLOCKS
        yield
        if last:
            state.pack_blocks = 0
            state.message[HEADER] = epoch
            if self.rules.take_back_flags:
                state.leave[:] = [ABSENT] * self.world
            state.started = epoch

    def copy(self, rank: int, call: CopyCall) -> Steps:
        yield
        if rank in call.empty and not self.rules.message_to_every_peer:
            return
        for peer in self.peers(rank):
            for key, value in list(self.ranks[rank].message.items()):
                inbox = self.ranks[peer].inbox[rank]
                land = lambda inbox=inbox, key=key, value=value: inbox.update({key: value})  # noqa: E731
                self.network.append(Store(rank, peer, False, land))
                yield
        for peer in self.peers(rank):
            came = self.ranks[peer].came
            land = lambda came=came: came.__setitem__(rank, ARRIVED)  # noqa: E731
            self.network.append(Store(rank, peer, self.rules.flag_after_copy, land))
            yield

    def unpack(self, rank: int, call: CopyCall, number: int, host: Host, block: int) -> Steps:
        state = self.ranks[rank]
        yield
        epoch = self.epoch(state.waited, host)
        if not state.error and rank not in call.foreign:
            state.error = self.failure(rank, epoch)
        if self.refuses(rank, call):
            return
        for peer in self.peers(rank):
            for layer in range(0 if peer in call.empty else call.layers):
                found = state.overflow.get((peer, block, layer)) if layer % 2 else state.inbox[peer].get((block, layer))
                if found != number:
                    raise ProtocolBroken(f"rank {rank} read exchange {found} of rank {peer}, not {number}")
                yield
        state.unpack_blocks += 1
        last = state.unpack_blocks == BLOCKS
        first = state.unpack_blocks == 1
        yield
        if last:
            state.unpack_blocks = 0
            state.waited = epoch
            self.exchanges += 1
        if last if self.rules.leave_by_last_block else first:
            steps = [self.take_back, self.give_leave]
            for step in steps if self.rules.take_back_before_leave else steps[::-1]:
                step(rank)
                yield

    def take_back(self, rank: int) -> None:
        if self.rules.take_back_flags:
            self.ranks[rank].came[:] = [ABSENT] * self.world

    def give_leave(self, rank: int) -> None:
        for peer in self.peers(rank):
            leave = self.ranks[peer].leave
            land = lambda leave=leave: leave.__setitem__(rank, ARRIVED)  # noqa: E731
            self.network.append(Store(rank, peer, True, land))

    def failure(self, rank: int, epoch: int) -> tuple[str, int] | None:
        state = self.ranks[rank]
        stale = [peer for peer in self.peers(rank) if state.inbox[peer][HEADER] != epoch]
        forced = [peer for peer in self.peers(rank) if state.came[peer] == FORCED]
        if forced and self.rules.distrust_what_was_given_up:
            return "timed out", ([peer for peer in forced if peer in stale] or forced)[0]
        return ("another epoch", stale[0]) if stale and self.rules.check_header else None

    def refuses(self, rank: int, call: CopyCall) -> bool:
        state = self.ranks[rank]
        if state.error:
            state.came[:] = state.leave[:] = [FORCED] * self.world
        return state.error is not None or rank in call.foreign

    def epoch(self, counter: int, host: Host) -> int:
        return (counter + 1) % MODULUS if self.rules.counters_on_device else host.epoch
