"""The flag protocol of `transports/direct.py` as a state machine: ranks, blocks, delayed stores, device counters.

Every rank has two slabs and an arrival flag for each source, in memory that peers write. A call is two kernels of
`BLOCKS` blocks in stream order, push and wait; blocks interleave freely, and a store to a peer lands whenever the
scheduler pleases, except that a release store waits for the stores before it. `Rules` has one field for each rule of
the protocol, so that a test can drop one and see the machine break.

There is no release flag, because two slabs make the arrival flag one: a rank that pushes epoch e + 2 has waited for
epoch e + 1 of every peer, and a peer sends e + 1 only after it has read e out of the slab that e + 2 will use. This
needs a wait between any two pushes, for every peer, even for one that had nothing to send.

A call may fill one of `SETS` sets of workspaces that peers write at once. What it brought there is read behind the
wait, and once more as late as the caller may, just before the second start after its own. Peers write a set only if the
exchange that used it last is `REUSE_DISTANCE` behind; else they use a slab, and wait copies.
"""

import dataclasses
import random
from collections.abc import Callable, Generator

BLOCKS = 2
BLOCKS_OF_ALL = tuple(range(BLOCKS))
SLABS = 2
SETS = 3
REUSE_DISTANCE = 3
MODULUS = 1 << 32


class ProtocolBroken(AssertionError):
    """Wrong bytes reached a workspace, or nobody can go on although everybody came."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the protocol keeps; False drops the rule."""

    fence_before_flag: bool = True
    acquire_before_read: bool = True
    counters_on_device: bool = True
    slab_by_device_counter: bool = True
    release_before_reuse: bool = True
    wait_for_every_peer: bool = True
    wait_before_next_start: bool = True
    flags_by_parity: bool = True
    reset_by_last_block: bool = True
    reject_before_counting: bool = True
    reuse_distance: bool = True
    used_on_device: bool = True
    used_by_slab_too: bool = True
    read_before_second_start: bool = True
    placed_by_start: bool = True


@dataclasses.dataclass(frozen=True)
class Call:
    """One exchange, the same on every rank. `layers` 1 is a single call; a rank in `empty` owns no record of it.

    `split` puts other work between start and wait; a rank in `rejected` first makes the call with a bad argument.
    `place`: the set that it fills; None: workspaces that no peer writes.
    """

    layers: int = 1
    empty: frozenset[int] = frozenset()
    split: bool = False
    rejected: frozenset[int] = frozenset()
    place: int | None = None


@dataclasses.dataclass(frozen=True)
class Segment:
    """Calls in a row, made `repeats` times: eagerly, or on ranks in `captured` as replays of one graph."""

    calls: tuple[Call, ...]
    repeats: int = 1
    captured: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Host:
    """What the host knows when it issues or captures a call, and a graph therefore freezes."""

    epoch: int
    used: tuple[int, ...]


@dataclasses.dataclass
class Store:
    source: int
    destination: int
    release: bool
    land: Callable[[], None]
    fenced: bool = True


class Rank:
    def __init__(self, world: int, counter: int) -> None:
        self.started = self.waited = counter
        self.push_blocks = self.wait_blocks = 0
        self.arrived = [[counter] * world for _ in range(SLABS)]
        self.slabs = [{} for _ in range(SLABS)]
        self.host_epoch = counter
        # What lies in the sets; the exchange that used each last; the last one that was placed.
        self.sets = [{} for _ in range(SETS)]
        self.used = [counter] * SETS
        self.placed = counter
        self.host_used = [counter] * SETS


Steps = Generator[Callable[[], bool] | None, None, None]


class Machine:
    """Runs the program of every rank under one random schedule.

    Args:
        world: ranks.
        program: what every rank calls.
        counter: value that all counters and flags start at.
        seed: chooses the schedule.
        rules: the rules that are kept.
        withheld: a rank that never comes, or None.
    """

    def __init__(
        self,
        world: int,
        program: tuple[Segment, ...],
        counter: int = 0,
        seed: int = 0,
        rules: Rules = Rules(),
        withheld: int | None = None,
    ) -> None:
        self.world, self.rules = world, rules
        self.ranks = [Rank(world, counter % MODULUS) for _ in range(world)]
        self.network: list[Store] = []
        self.random = random.Random(seed)
        self.streams = [None if rank == withheld else self.stream(rank, program) for rank in range(world)]
        self.blocks: list[list[tuple[Steps, Callable[[], bool] | None]]] = [[] for _ in range(world)]
        self.exchanges = self.placed = 0
        # A slow rank and a slow link make the skew that a uniform schedule hardly ever shows.
        self.slow = self.random.randrange(-1, world)
        self.slow_network = self.random.random() < 0.5

    def run(self) -> None:
        """Raises ProtocolBroken. Returns when all ranks finished, or, with a rank withheld, when nobody can go on."""
        while True:
            for queue in range(len(self.blocks)):
                self.refill(queue)
            moves = self.moves()
            if not moves:
                break
            self.random.choices([move for move, _ in moves], [weight for _, weight in moves])[0]()
        if any(self.blocks) and None not in self.streams:
            raise ProtocolBroken("every rank came, and nobody can go on")

    def moves(self) -> list[tuple[Callable[[], None], float]]:
        moves = []
        for rank, blocks in enumerate(self.blocks):
            weight = 0.05 if rank == self.slow else 1.0
            for block, (steps, blocked) in enumerate(blocks):
                if blocked is None or blocked():
                    moves.append((lambda rank=rank, block=block, steps=steps: self.step(rank, block, steps), weight))
        for position, store in enumerate(self.network):
            if not (store.release and self.stores_before(position)):
                moves.append((lambda store=store: self.deliver(store), 0.1 if self.slow_network else 1.0))
        return moves

    def stores_before(self, position: int) -> bool:
        link = (self.network[position].source, self.network[position].destination)
        return any(store.fenced and (store.source, store.destination) == link for store in self.network[:position])

    def refill(self, rank: int) -> None:
        while not self.blocks[rank] and self.streams[rank] is not None:
            kernel = next(self.streams[rank], None)
            if kernel is None:
                return
            self.blocks[rank] = [(steps, None) for steps in kernel]

    def step(self, rank: int, block: int, steps: Steps) -> None:
        try:
            self.blocks[rank][block] = (steps, next(steps))
        except StopIteration:
            self.blocks[rank] = [other for other in self.blocks[rank] if other[0] is not steps]

    def deliver(self, store: Store) -> None:
        self.network.remove(store)
        store.land()

    def stream(self, rank: int, program: tuple[Segment, ...]) -> Generator[list[Steps], None, None]:
        """Kernels of one rank in stream order."""
        state = self.ranks[rank]
        number, waits, unread = 0, [], []
        for segment in program:
            frozen = [self.issue(rank, call) for call in segment.calls] if rank in segment.captured else None
            for _ in range(segment.repeats):
                for position, call in enumerate(segment.calls):
                    if rank in call.rejected and not self.rules.reject_before_counting:
                        state.started = (state.started + 1) % MODULUS
                    host = frozen[position] if frozen else self.issue(rank, call)
                    number += 1
                    last_chance = [(filled, other) for filled, other in unread if number - filled == 2]
                    if self.rules.read_before_second_start:
                        yield from ([self.read(rank, other, filled)] for filled, other in last_chance)
                    yield [self.push(rank, call, number, host, block) for block in range(BLOCKS)]
                    # The caller gives up what it has not read of a set that it fills again.
                    unread = [(filled, other) for filled, other in unread if other.place != call.place]
                    if not self.rules.read_before_second_start:
                        late = [(filled, other) for filled, other in last_chance if other.place != call.place]
                        yield from ([self.read(rank, other, filled)] for filled, other in late)
                    unread = [(filled, other) for filled, other in unread if number - filled < 2]
                    waits.append([self.wait(rank, call, number, host, block) for block in range(BLOCKS)])
                    if call.split and not self.rules.wait_before_next_start and len(waits) < SLABS:
                        continue
                    if call.split:
                        yield [self.compute()]
                    while waits:
                        yield waits.pop(0)
                    if call.place is not None:
                        yield [self.read(rank, call, number)]
                        unread.append((number, call))
        while waits:
            yield waits.pop(0)
        yield from ([self.read(rank, call, filled)] for filled, call in unread)

    def issue(self, rank: int, call: Call) -> Host:
        state = self.ranks[rank]
        state.host_epoch = (state.host_epoch + 1) % MODULUS
        host = Host(state.host_epoch, tuple(state.host_used))
        if call.place is not None:
            state.host_used[call.place] = host.epoch
        return host

    def compute(self) -> Steps:
        for _ in range(3):
            yield

    def epochs(self, counter: int, host: Host) -> tuple[int, int]:
        """Epoch and slab of a kernel."""
        epoch = (counter + 1) % MODULUS if self.rules.counters_on_device else host.epoch
        slab = (epoch if self.rules.slab_by_device_counter else host.epoch) % SLABS
        return epoch, slab if self.rules.release_before_reuse else 0

    def is_placed(self, rank: int, call: Call, epoch: int, host: Host) -> bool:
        """Whether peers write the call's set, as far as a push can tell."""
        if call.place is None:
            return False
        on_device = self.rules.used_on_device
        used = self.ranks[rank].used[call.place] if on_device else host.used[call.place]
        distance = ((epoch if on_device else host.epoch) - used) % MODULUS
        return (REUSE_DISTANCE if self.rules.reuse_distance else 2) <= distance < MODULUS // 2

    def flags(self, rank: int, epoch: int) -> list[int]:
        """Those of the peers of a rank that tell of an exchange."""
        return self.ranks[rank].arrived[epoch % SLABS if self.rules.flags_by_parity else 0]

    def push(self, rank: int, call: Call, number: int, host: Host, block: int) -> Steps:
        state = self.ranks[rank]
        if not self.rules.reset_by_last_block and block == 0:
            state.push_blocks = 0
        yield
        epoch, slab = self.epochs(state.started, host)
        placed = self.is_placed(rank, call, epoch, host)
        yield
        for peer in self.peers(rank):
            memory = self.ranks[peer].sets[call.place] if placed else self.ranks[peer].slabs[slab]
            for layer in range(0 if rank in call.empty else call.layers):
                land = lambda memory=memory, key=(rank, block, layer): memory.update({key: number})  # noqa: E731
                self.network.append(Store(rank, peer, False, land))
                yield
        state.push_blocks += 1
        last = state.push_blocks == BLOCKS
        yield
        if last:
            if self.rules.reset_by_last_block:
                state.push_blocks = 0
            for peer in self.peers(rank):
                flags = self.flags(peer, epoch)
                land = lambda flags=flags: flags.__setitem__(rank, epoch)  # noqa: E731
                self.network.append(Store(rank, peer, self.rules.fence_before_flag, land))
            state.placed = epoch if placed else (epoch - 1) % MODULUS
            if call.place is not None and (placed or self.rules.used_by_slab_too):
                state.used[call.place] = epoch
            state.started = epoch

    def wait(self, rank: int, call: Call, number: int, host: Host, block: int) -> Steps:
        state = self.ranks[rank]
        yield
        # By the counter of starts: the first block may have counted the wait before another one looks.
        asked = state.started if self.rules.placed_by_start else (state.waited + 1) % MODULUS
        placed = call.place is not None and state.placed == asked
        if placed and block > 0:
            return
        epoch, slab = self.epochs(state.waited, host)
        yield
        memory = state.sets[call.place] if placed else state.slabs[slab]
        for peer in self.peers(rank):
            sent = self.sent(call, peer, BLOCKS_OF_ALL if placed else (block,))
            early = [memory.get(key) for key in sent]
            if sent or self.rules.wait_for_every_peer:
                # Equal: a peer sends the next one of this parity only after this wait.
                yield lambda peer=peer: self.flags(rank, epoch)[peer] == epoch
            for key, before in zip(sent, early, strict=True):
                found = memory.get(key) if self.rules.acquire_before_read else before
                self.check(rank, key[0], found, number)
                if call.place is not None:
                    state.sets[call.place][key] = found
                yield
        state.wait_blocks += 1
        last = placed or state.wait_blocks == BLOCKS
        yield
        if last:
            state.wait_blocks = 0
            state.waited = epoch
            self.exchanges += 1
            self.placed += placed

    def read(self, rank: int, call: Call, number: int) -> Steps:
        """What the caller does with a set: it must hold what the exchange of that number brought."""
        yield
        for peer in self.peers(rank):
            for key in self.sent(call, peer, BLOCKS_OF_ALL):
                self.check(rank, peer, self.ranks[rank].sets[call.place].get(key), number)
                yield

    def sent(self, call: Call, peer: int, blocks: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Keys of what blocks of a peer sent."""
        layers = 0 if peer in call.empty else call.layers
        return [(peer, block, layer) for block in blocks for layer in range(layers)]

    def check(self, rank: int, peer: int, found: int | None, number: int) -> None:
        if found != number:
            raise ProtocolBroken(f"rank {rank} read exchange {found} of rank {peer}, not {number}")

    def peers(self, rank: int) -> list[int]:
        """Rank-rotated order."""
        return [(rank + step) % self.world for step in range(1, self.world)]
