"""The memory of prefill gathers: one slot for each (micro-batch, lane), all of it reserved before memory is profiled.

geometry = PageGeometry(); geometry.freeze(page_size)
workspace = Workspace(geometry, group, layout="fp8_mla_nope", interleave=4, max_tokens=..., max_requests=..., ...)
workspace.reserve(0, "target"); workspace.reserve(0, "draft")      every rank, in the same order
workspace.lock()                                                    from here on growth is an error
slot = workspace.slot(0, "target")                                  plan, gathered buffer and channel of a chunk

With resident sizes, each lane also has a resident buffer for every layer, which its micro-batches share.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..contract import check_layout
from ..errors import reject
from ..exchange.channel import DEFAULT_TIMEOUT_S, Channel
from ..exchange.group import as_group
from .api import c4_place_records, c4_plan_gather, c4_remap
from .geometry import PageGeometry
from .plan import CHANNEL_SLABS, GatherPlan, gather_capacity
from .residency import Residency

_OP = "Workspace"
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class LaneBytes:
    """Bytes of one slot on one rank.

    Attributes:
        gathered: the gathered buffer.
        plan: the plan buffer.
        channel: slabs of the channel where it writes peer memory (CUDA); on the CPU a channel keeps none.
    """

    gathered: int
    plan: int
    channel: int

    @property
    def total(self) -> int:
        return self.gathered + self.plan + self.channel


def lane_bytes(sizes: GatherPlan, record_bytes: int, device_type: str = "cuda") -> LaneBytes:
    """Bytes of one slot of a `Workspace`: what it allocates, and the peers' slabs that its channel maps."""
    gathered = sizes.gathered_records * record_bytes
    slab = -(-gathered // _VECTOR_BYTES) * _VECTOR_BYTES
    slabs = CHANNEL_SLABS * slab if device_type == "cuda" and sizes.world > 1 else 0
    return LaneBytes(gathered, 4 * sizes.words, slabs)


def resident_bytes(sizes: GatherPlan, record_bytes: int, layers: int) -> int:
    """Bytes of the resident buffers of one lane on one rank; 0 for sizes of the full gather.

    Args:
        sizes: with `resident`.
        record_bytes: of the layout.
        layers: sparse layers, of which each has a buffer.
    """
    return layers * sizes.world * sizes.resident * record_bytes


def staged_lane_bytes(capacity: int, record_bytes: int, world: int, gathered_buffers: int) -> int:
    """Bytes of a lane of the published form, which packs into a staging copy: for comparison in the planner.

    Args:
        capacity: records of a rank's slice.
        record_bytes: of the layout.
        world: ranks.
        gathered_buffers: 1, and one more for each layer that is gathered ahead.
    """
    return capacity * record_bytes * (1 + gathered_buffers * world)


@dataclass(frozen=True)
class ResidentLane:
    """What stays resident of a lane's requests; its micro-batches share it.

    Attributes:
        sizes: those of `GatherSlot`, with `resident`.
        buffers: of each layer, uint8 [world * sizes.resident, record_bytes], for `c4_place_records`.
        residency: which request's records lie where.
    """

    sizes: GatherPlan
    buffers: tuple[torch.Tensor, ...]
    residency: Residency


@dataclass(frozen=True)
class GatherSlot:
    """What one gather at a time uses. Owns its memory: a chunk that still holds a slot keeps it alive.

    Attributes:
        sizes: the reserved sizes.
        plan: int32 [sizes.words], for `c4_plan_gather`.
        gathered: uint8 [sizes.gathered_records, record_bytes], for `c4_prefill_gather`.
        channel: the channel, of this slot alone: two lanes that share one on two streams would hang.
        resident: of the slot's lane; None without resident sizes.
        resident_plan: int32 [resident.sizes.words], for `c4_plan_gather` in the incremental form; else None.
    """

    sizes: GatherPlan
    plan: torch.Tensor
    gathered: torch.Tensor
    channel: Channel
    resident: ResidentLane | None = None
    resident_plan: torch.Tensor | None = None


class Workspace:
    """Slots for prefill gathers, reserved at start-up. Ranks: all make it alike, and reserve the same slots in order.

    Args:
        geometry: frozen; binding a cache of another page size raises.
        group: a `torch.distributed` process group, or `LoopbackGroup(...).rank(r)`.
        layout: a key of `torch_sparse_mla.LAYOUTS`.
        interleave: DCP geometry.
        max_tokens: most tokens of all requests of a chunk together, cached and new.
        max_requests: most requests of a chunk.
        max_rows: most query rows of a chunk.
        resident_tokens, resident_requests, resident_layers: most tokens and requests that are resident at the same
            time, and sparse layers; all 0: no resident buffers.
        name: of the channels; unique among the open ones, equal on every rank.
        transport, timeout_s, device: as for `Channel.create`.
    Raises: RuntimeError where the geometry is provisional, ValueError for an argument that does not fit.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        group: Any,
        *,
        layout: str,
        interleave: int,
        max_tokens: int,
        max_requests: int,
        max_rows: int,
        resident_tokens: int = 0,
        resident_requests: int = 0,
        resident_layers: int = 0,
        name: str = "c4_prefill_gather",
        transport: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: str | torch.device | None = None,
    ) -> None:
        ranks = as_group(group)
        self.geometry, self.group, self.name = geometry, group, name
        self.rank, self.world = ranks.rank, ranks.world
        self.layout = check_layout(_OP, layout)
        capacity = gather_capacity(max_tokens, max_requests, ranks.world, interleave, geometry.page_size)
        self.sizes = GatherPlan(max_requests, max_rows, capacity, ranks.world, interleave, geometry.page_size)
        self.resident_sizes = self._resident_sizes(resident_tokens, resident_requests, resident_layers)
        self.resident_layers = resident_layers
        self.device = ranks.device(device)
        self._lanes: dict[str, ResidentLane] = {}
        self._options = {"transport": transport, "timeout_s": timeout_s, "device": device}
        self._slots: dict[tuple[int, str], GatherSlot] = {}
        self._locked = self._closed = False

    @property
    def locked(self) -> bool:
        return self._locked

    @property
    def bytes(self) -> int:
        """Bytes on this rank of all slots that are reserved, the channels' included."""
        record_bytes, sizes = self.layout.record_bytes, self.resident_sizes
        plans = 4 * sizes.words if sizes else 0
        lanes = resident_bytes(sizes, record_bytes, self.resident_layers) if sizes else 0
        slot = lane_bytes(self.sizes, record_bytes, self.device.type).total
        return len(self._slots) * (slot + plans) + len(self._lanes) * lanes

    def reserve(self, micro_batch: int = 0, lane: str = "target") -> None:
        """Allocate a slot and open its channel; with the first slot of a lane, its resident buffers. Before `lock`.

        Ranks: all, with the same arguments in the same order.

        Args:
            micro_batch: 0 or more; chunks that can be under way at the same time need one each.
            lane: what runs beside another within a micro-batch, such as "target" and "draft".
        Raises: RuntimeError after `lock`; ValueError for a slot that is reserved already.
        """
        self._check_open()
        if not isinstance(micro_batch, int) or micro_batch < 0:
            reject(_OP, "micro_batch", repr(micro_batch), "an integer, 0 or more")
        if not isinstance(lane, str) or not lane:
            reject(_OP, "lane", repr(lane), "a string that is not empty")
        key = (micro_batch, lane)
        if self._locked:
            raise RuntimeError(
                f"torch_sparse_mla::{_OP}: reserve{key} after lock(); memory is profiled by now: reserve every slot at "
                f"start-up, before lock(). Reserved: {self._reserved()}"
            )
        if key in self._slots:
            reject(_OP, "lane", key, f"a slot that is not reserved yet; reserved: {self._reserved()}")
        record_bytes, records = self.layout.record_bytes, self.sizes.gathered_records
        channel = Channel.create(
            f"{self.name}.{micro_batch}.{lane}", self.group, records, record_bytes, 1, **self._options
        )
        gathered = torch.empty(records, record_bytes, dtype=torch.uint8, device=self.device)
        resident, plan = self._resident(lane), None
        if resident is not None:
            plan = resident.sizes.empty(self.device)
        self._slots[key] = GatherSlot(self.sizes, self.sizes.empty(self.device), gathered, channel, resident, plan)

    def lock(self) -> None:
        """No slot can be reserved from here on, and the kernels of a chunk are compiled. A second call does nothing.

        Raises: RuntimeError with no slot at all.
        """
        self._check_open()
        if self._locked:
            return
        if not self._slots:
            raise RuntimeError(f"torch_sparse_mla::{_OP}: lock() with no slot; call reserve(micro_batch, lane) first")
        self._warm_up()
        self._locked = True

    def slot(self, micro_batch: int = 0, lane: str = "target") -> GatherSlot:
        """The slot of a micro-batch and lane. Never allocates.

        Raises: RuntimeError before `lock`, and for a slot that was not reserved.
        """
        self._check_open()
        if not self._locked:
            raise RuntimeError(f"torch_sparse_mla::{_OP}: slot() before lock(); reserve every slot, then lock()")
        found = self._slots.get((micro_batch, lane))
        if found is None:
            raise RuntimeError(
                f"torch_sparse_mla::{_OP}: no slot for (micro_batch, lane) = {(micro_batch, lane)}; reserve it at "
                f"start-up, before lock(). Reserved: {self._reserved()}"
            )
        return found

    def check_cache(self, cache: torch.Tensor) -> None:
        """Raise ValueError for a cache of another page size or record width: when caches are bound, not later."""
        self.geometry.check_cache(cache)
        if cache.shape[2] != self.layout.record_bytes:
            allowed = f"records of {self.layout.record_bytes} bytes, those of {self.layout.name}"
            reject(_OP, "cache", f"records of {cache.shape[2]} bytes", allowed)

    def close(self) -> None:
        """Close the channels and let go of the memory. A second close does nothing. Ranks: all."""
        for slot in self._slots.values():
            slot.channel.close()
        self._slots, self._lanes, self._closed = {}, {}, True

    def _resident_sizes(self, tokens: int, requests: int, layers: int) -> GatherPlan | None:
        given = {"resident_tokens": tokens, "resident_requests": requests, "resident_layers": layers}
        if not any(given.values()):
            return None
        for name, value in given.items():
            if not isinstance(value, int) or value < 1:
                reject(_OP, name, repr(value), "all of resident_tokens, resident_requests, resident_layers, or none")
        geometry = (self.sizes.world, self.sizes.interleave, self.sizes.page_size)
        return replace(self.sizes, resident=gather_capacity(tokens, requests, *geometry))

    def _resident(self, lane: str) -> ResidentLane | None:
        sizes = self.resident_sizes
        if sizes is not None and lane not in self._lanes:
            shape = (sizes.world * sizes.resident, self.layout.record_bytes)
            buffers = (torch.empty(shape, dtype=torch.uint8, device=self.device) for _ in range(self.resident_layers))
            self._lanes[lane] = ResidentLane(sizes, tuple(buffers), Residency(sizes))
        return self._lanes.get(lane)

    def _warm_up(self) -> None:
        """Compile now what would else be compiled at the first long prompt: a chunk of one token."""
        slot = next(iter(self._slots.values()))
        plan = slot.plan
        table = torch.zeros(1, 1, dtype=torch.int32, device=self.device)
        c4_plan_gather([1], [1], table, self.sizes, rank=self.rank, plan=plan)
        c4_remap(table, plan, self.sizes)
        if slot.resident is None:
            return
        sizes, plan = slot.resident.sizes, slot.resident_plan
        held = {"resident_starts": [0], "resident_lengths": [0]}
        c4_plan_gather([1], [1], table, sizes, rank=self.rank, plan=plan, **held)
        c4_remap(table, plan, sizes)
        # What it puts in place belongs to no request.
        c4_place_records(slot.gathered, plan, slot.resident.buffers[0], sizes)

    def _reserved(self) -> str:
        return ", ".join(str(key) for key in self._slots) or "none"

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"torch_sparse_mla::{_OP}: '{self.name}' is closed; make a new one")
