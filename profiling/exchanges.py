"""Contenders of `bench_ce_exchange`: our transports, and the collectives that would bring the same records."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_sparse_mla import Channel, LoopbackGroup, ce_exchange_start, ce_exchange_wait
from torch_sparse_mla.exchange.channel import REUSE_DISTANCE
from torch_sparse_mla.exchange.group import as_group

from .ranks import LoopbackRanks, ProcessRanks
from .sharded import Selections
from .timing import Contender, poison

Ranks = LoopbackRanks | ProcessRanks
TIMEOUT_S = 20.0
LOW_CONTENTION = "low-contention-all-gather"


def transports(ranks: Ranks) -> list[str]:
    """Each that these ranks have. On a GPU "loopback" is another name of direct."""
    possible = as_group(ranks.group(ranks.own[0])).transports(ranks.device.type)
    return [name for name in possible if not (name == "loopback" and ranks.device.type == "cuda")]


def baselines(ranks: Ranks) -> dict[str, str | None]:
    """Name -> why it cannot run here, or None."""
    backend = ranks.backend or "nccl"
    between = None if ranks.backend else "takes ranks that are processes"
    low = between
    if low is None and ranks.backend != "nccl":
        low = "takes GPUs that have peer access, one for each process"
    return {f"{backend}-all-gather": between, f"{backend}-all-to-all": between, LOW_CONTENTION: low}


class Exchanger:
    """The own ranks of one shape over one transport."""

    def __init__(
        self, selections: Selections, caches: dict[int, list[torch.Tensor]], ranks: Ranks, transport: str
    ) -> None:
        self.selections, self.caches, self.ranks, self.transport = selections, caches, ranks, transport
        shape, selection = selections.shape, selections.selection
        self.plans = {rank: selections.plans(rank) for rank in ranks.own}
        size = (shape.layers, selection.capacity, shape.record_bytes)
        self.workspaces = {rank: list(torch.empty(size, dtype=torch.uint8, device=ranks.device)) for rank in ranks.own}
        self.channels = {
            rank: Channel.create(
                f"bench-{transport}",
                ranks.group(rank),
                selection.capacity,
                shape.record_bytes,
                layers=shape.layers,
                requests=selection.requests,
                expected_records=min(shape.plan.union, selection.capacity),
                transport=transport,
                timeout_s=TIMEOUT_S,
                device=ranks.device,
                workspace_sets=REUSE_DISTANCE if transport == "direct" else 0,
            )
            for rank in ranks.own
        }
        self.turn = 0

    def contenders(self) -> list[Contender]:
        details = {"union": self.selections.union}
        made = [Contender(self.transport, self.exchange, self.poison, self.error, 0.0, details)]
        if self.selections.shape.layers > 1:
            name = f"{self.transport}-per-layer"
            made.append(Contender(name, self.exchange_singly, self.poison, self.error, 0.0, details))
        if self.transport == "direct":
            given = (self.exchange_placed, self.poison_sets, self.error_of_set, 0.0, details)
            made.append(Contender(f"{self.transport}-placed", *given))
        return made

    def exchange(self, index_set: int) -> None:
        self.start(index_set)
        self.wait(index_set)

    def exchange_singly(self, index_set: int) -> None:
        for layer in range(self.selections.shape.layers):
            self.start(index_set, slice(layer, layer + 1))
            self.wait(index_set, slice(layer, layer + 1))

    def exchange_placed(self, index_set: int) -> None:
        """Into the channels' own workspaces, a set after another, which peers write."""
        self.turn = (self.turn + 1) % REUSE_DISTANCE
        for half in (ce_exchange_start, ce_exchange_wait):
            for rank, channel in self.channels.items():
                plan, workspaces = self.plans[rank][index_set], channel.workspaces[self.turn]
                half(self.caches[rank], plan, workspaces, channel.state, channel)

    def start(self, index_set: int, layers: slice = slice(None)) -> None:
        self._each(ce_exchange_start, index_set, layers)

    def wait(self, index_set: int, layers: slice = slice(None)) -> None:
        self._each(ce_exchange_wait, index_set, layers)

    def _each(self, half: Callable, index_set: int, layers: slice) -> None:
        for rank, channel in self.channels.items():
            plan = self.plans[rank][index_set]
            half(self.caches[rank][layers], plan, self.workspaces[rank][layers], channel.state, channel)

    def poison(self) -> None:
        for workspaces in self.workspaces.values():
            for workspace in workspaces:
                poison(workspace)

    def poison_sets(self) -> None:
        """Nobody goes on, and writes a peer's, before all have poisoned theirs."""
        for channel in self.channels.values():
            for workspaces in channel.workspaces:
                for workspace in workspaces:
                    poison(workspace)
        torch.cuda.synchronize(self.ranks.device)
        self.ranks.agree(None)

    def error(self) -> float:
        """1 if any byte of any own workspace is wrong, for the last index set."""
        return self._wrong(self.workspaces)

    def error_of_set(self) -> float:
        return self._wrong({rank: channel.workspaces[self.turn] for rank, channel in self.channels.items()})

    def _wrong(self, own: dict[int, list[torch.Tensor]]) -> float:
        wrong = 0
        for places, records in self.selections.arrivals:
            for workspaces in own.values():
                for workspace, expected in zip(workspaces, records, strict=True):
                    wrong += int((workspace[places] != expected).sum())
        for channel in self.channels.values():
            channel.check()
        return float(wrong > 0)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


class Collectives:
    """Collectives that bring the records of the last index set to every rank.

    To their advantage: sizes are those of this very selection, known beforehand; records are packed already; and where
    they belong in a workspace is left undone.
    """

    def __init__(self, selections: Selections, ranks: ProcessRanks) -> None:
        self.selections, self.ranks = selections, ranks
        # One row a record, all its layers: what each rank owns, and how much of the largest part it fills.
        self.expected = [records.transpose(0, 1).flatten(1) for _, records in selections.arrivals]
        own = self.expected[ranks.rank]
        self.own = own.new_zeros(max(len(records) for records in self.expected), own.shape[1])
        self.own[: len(own)] = own
        self.gathered = self.own.new_empty(ranks.world, *self.own.shape)
        self.symmetric = self.pulled = None

    def contenders(self) -> list[Contender]:
        backend = self.ranks.backend
        copies = self.own.expand(self.ranks.world, *self.own.shape).contiguous()

        def all_gather(index_set: int) -> None:
            dist.all_gather_into_tensor(self.gathered.flatten(0, 1), self.own)

        def all_to_all(index_set: int) -> None:
            dist.all_to_all_single(self.gathered, copies)

        def low_contention(index_set: int) -> None:
            name = dist.group.WORLD.group_name
            gathered = torch.ops.symm_mem._low_contention_all_gather(self._symmetric_own(), name)
            # Its result lies elsewhere after every call.
            self.pulled = torch.ops._c10d_functional.wait_tensor(gathered).view(self.gathered.shape)

        def contender(name: str, call: Callable[[int], None], arrived: Callable[[], torch.Tensor]) -> Contender:
            details = {"union": self.selections.union}
            return Contender(name, call, lambda: poison(arrived()), lambda: self.error(arrived()), 0.0, details)

        found = [
            contender(f"{backend}-all-gather", all_gather, lambda: self.gathered),
            contender(f"{backend}-all-to-all", all_to_all, lambda: self.gathered),
        ]
        if backend == "nccl":
            found.append(contender(LOW_CONTENTION, low_contention, lambda: self.pulled))
        return found

    def error(self, arrived: torch.Tensor) -> float:
        pairs = zip(arrived, self.expected, strict=True)
        return float(not all(torch.equal(part[: len(records)], records) for part, records in pairs))

    def _symmetric_own(self) -> torch.Tensor:
        if self.symmetric is None:
            import torch.distributed._symmetric_memory as symmetric

            self.symmetric = symmetric.empty(self.own.shape, dtype=torch.uint8, device=self.own.device)
            symmetric.rendezvous(self.symmetric, dist.group.WORLD.group_name)
            self.symmetric.copy_(self.own)
        return self.symmetric


class Packer:
    """One rank that owns all it selects: its records from the cache into the workspace, and nothing else."""

    def __init__(self, records: int, record_bytes: int, sets: int, device: torch.device) -> None:
        self.device = device
        # Every record of the pool once in a rotation, in an order of its own.
        pages = -(-records * sets // 64)
        self.cache = torch.randint(256, (pages, 64, record_bytes), device=device, dtype=torch.uint8)
        group = LoopbackGroup(1, device)
        self.channel = Channel.create("pack", group.rank(0), records, record_bytes, layers=1, device=device)
        slots = torch.randperm(pages * 64, device=device, dtype=torch.int32)[: records * sets].view(sets, records)
        self.slots = slots
        self.plans = [self._plan(own) for own in slots]
        self.nothing = self._plan(slots[0, :0])
        self.workspace = torch.empty(records, record_bytes, dtype=torch.uint8, device=device)

    def contenders(self) -> list[Contender]:
        source = self.cache.flatten(0, 1)
        records = len(self.workspace)

        def copy(index_set: int) -> None:
            self.workspace.copy_(source[index_set * records : (index_set + 1) * records])

        def copied() -> float:
            first = (len(self.slots) - 1) * records
            return float(not torch.equal(self.workspace, source[first : first + records]))

        def clear() -> None:
            poison(self.workspace)

        return [
            Contender("pack", lambda index_set: self._exchange(self.plans[index_set]), clear, self.error, 0.0),
            Contender("pack-nothing", lambda _: self._exchange(self.nothing), clear, lambda: 0.0, 0.0),
            Contender("copy", copy, clear, copied, 0.0),
        ]

    def error(self) -> float:
        expected = self.cache.flatten(0, 1)[self.slots[-1].long()]
        return float(not torch.equal(self.workspace, expected))

    def close(self) -> None:
        self.channel.close()

    def _exchange(self, plan: torch.Tensor) -> None:
        """The push of one rank alone, and a wait for nobody, which the counters ask for."""
        call = ([self.cache], plan, [self.workspace], self.channel.state, self.channel)
        ce_exchange_start(*call)
        ce_exchange_wait(*call)

    def _plan(self, slots: torch.Tensor) -> torch.Tensor:
        plan = torch.zeros(self.channel.plan_words, dtype=torch.int32, device=self.device)
        sections = self.channel.plan_sections
        for name, values in (("owner_offsets", (0, len(slots))), ("counts", (len(slots),))):
            offset = sections[name].offset
            plan[offset : offset + len(values)] = torch.tensor(values, dtype=torch.int32)
        offset = sections["owned_slots"].offset
        plan[offset : offset + len(slots)] = slots
        return plan
