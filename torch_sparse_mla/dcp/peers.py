"""Caches that every rank of a group can read: peers' memory, mapped.

Loopback ranks share a device, so each can read what the others hold; they need not use `empty` (a call tells the others
which cache it brings). Processes on GPUs take their caches from PyTorch symmetric memory, which `empty` allocates.
"""

import importlib
from typing import Any, NamedTuple

import torch

from ..contract import reject
from ..decode.contract import MAX_CACHES
from ..exchange.group import Group, LoopbackRank, as_group

_OP = "PeerCaches"


class Allocation(NamedTuple):
    """One cache of every rank, as this rank sees it, in the order of ranks; and what keeps the mappings alive."""

    caches: list[torch.Tensor]
    owner: object


class PeerCaches:
    """The caches of a group's ranks.

    Args:
        group: what `Channel.create` takes.
        device: where caches are; None: as `Channel.create`.
        transport: as for `Channel.create`.
        name: unique among those of a group, equal on every rank.
    Raises: ValueError where ranks cannot read one another's memory.
    """

    def __init__(
        self, group: Any, device: str | torch.device | None = None, transport: str = "auto", name: str = "peers"
    ) -> None:
        self.group = as_group(group)
        self.device = self.group.device(device)
        self.name = name
        why = why_no_peers(self.group, self.device, transport)
        if why is not None:
            reject(_OP, "group", self.group.described, f"ranks that can read one another's memory ({why})")
        self.allocations: list[Allocation] = []
        self._found: dict[tuple, list[torch.Tensor]] = {}

    def empty(self, pages: int, page_size: int, record_bytes: int) -> torch.Tensor:
        """A cache [pages, page_size, record_bytes] uint8 of zeros that peers can read. Collective, before any capture.

        It lives as long as this object, until `close`. A slice of its pages can be given to `DcpSparseDecode` too, the
        same on every rank.
        """
        if not isinstance(pages, int) or pages < 0:
            reject(_OP, "pages", repr(pages), "an integer, 0 or more")
        shape = (pages, page_size, record_bytes)
        if isinstance(self.group, LoopbackRank):
            own = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            allocation = Allocation(self._share(own), None)
        else:
            allocation = self._map(shape)
        self.allocations.append(allocation)
        return allocation.caches[self.group.rank]

    def probe(self, pages: int, page_size: int, record_bytes: int) -> Allocation:
        """Caches of all ranks to measure with. Collective. To be kept until no rank reads them."""
        shape = (pages, page_size, record_bytes)
        if isinstance(self.group, LoopbackRank):
            zeros = [torch.zeros(shape, dtype=torch.uint8, device=self.device) for _ in range(self.group.world)]
            return Allocation(zeros, None)
        return self._map(shape)

    def of(self, cache: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's part of a cache that `empty` made, or of a slice of it; None for any other tensor."""
        key = (cache.data_ptr(), cache.shape, cache.stride())
        if key not in self._found:
            found = self._find(cache)
            if found is None:
                return None
            self._found[key] = found
        return self._found[key]

    def __deepcopy__(self, memo: dict) -> "PeerCaches":
        """Mapped memory is not copied; copies of caches are not in it."""
        return self

    def close(self) -> None:
        """Let go of the memory; graphs that read it must be gone. Collective in effect: peers lose it as well."""
        self.allocations, self._found = [], {}
        if isinstance(self.group, LoopbackRank):
            self.group.leave(self.name, f"rank {self.group.rank} closed its caches")

    def _find(self, cache: torch.Tensor) -> list[torch.Tensor] | None:
        rank = self.group.rank
        for caches, _ in self.allocations:
            own = caches[rank]
            offset = cache.data_ptr() - own.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
            if offset >= 0 and offset + last < own.numel():
                if any(peer is None for peer in caches):
                    missing = [number for number, peer in enumerate(caches) if peer is None]
                    reject(_OP, "cache", f"one that rank(s) {missing} did not make", "empty on every rank")
                return [peer.view(-1)[offset:].as_strided(cache.shape, cache.stride()) for peer in caches]
        return None

    def _share(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Loopback ranks: a list that the ranks fill in, one after another."""
        self.group.agree(self.name, "a cache", lambda: self.name, equal=True)
        shared = self.group.board(self.name).shared.setdefault("allocations", [])
        number = len(self.allocations)
        if number == len(shared):
            shared.append([None] * self.group.world)
        for rank, other in enumerate(shared[number]):
            if other is not None and other.shape != own.shape:
                reject(_OP, "pages", f"shape {list(own.shape)}", f"{list(other.shape)}, as on rank {rank}")
        shared[number][self.group.rank] = own
        return shared[number]

    def _map(self, shape: tuple[int, int, int]) -> Allocation:
        group, name = self.group, self.name
        group.agree(name, "shape of a cache", lambda: shape, equal=True)
        symmetric = group.agree(
            name, "import symmetric memory", lambda: importlib.import_module("torch.distributed._symmetric_memory")
        )
        try:
            own = group.agree(
                name, "allocate a cache", lambda: symmetric.empty(shape, dtype=torch.uint8, device=self.device)
            )
            handle = group.agree(name, "map caches", lambda: symmetric.rendezvous(own, group.group.group_name))
        except Exception as error:
            raise RuntimeError(
                f"torch_sparse_mla::{_OP}: rank {group.rank} on {self.device} has no memory that all of "
                f"{group.described} can read, which takes PyTorch symmetric memory: GPUs of one host with peer "
                f"access: {error}"
            ) from error

        def clear() -> None:
            own.zero_()
            torch.cuda.synchronize(self.device)

        group.agree(name, "clear a cache", clear)
        peers = [
            own if rank == group.rank else handle.get_buffer(rank, shape, torch.uint8) for rank in range(group.world)
        ]
        return Allocation(peers, handle)


def why_no_peers(group: Group, device: torch.device, transport: str) -> str | None:
    """Why ranks cannot read one another's caches; None where they can."""
    if group.world > MAX_CACHES:
        return f"attention reads the caches of at most {MAX_CACHES} ranks"
    if isinstance(group, LoopbackRank):
        return None
    if device.type == "cpu":
        return f"{group.described} on the CPU: a process maps no memory of another"
    chosen = group.transports(device.type)[0] if transport == "auto" else transport
    return "transport collective sends messages and maps no memory" if chosen == "collective" else None
