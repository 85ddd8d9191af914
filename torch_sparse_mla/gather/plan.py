"""The plan of a prefill gather: where each rank's records lie in the gathered buffer. Pure integer functions.

The gathered buffer is `[world, padded, record_bytes]`: each rank's visible records, request behind request. Every rank
derives the same numbers from the same global lengths, which the host has already: nothing is read back.

In the incremental form only the records that are not resident yet travel. The gathered buffer holds them one slice
behind the other, without padding, and `c4_place_records` brings each to its place in a resident buffer
`[world, resident, record_bytes]`, where a request's records begin at the same place in every slice and never move.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import reject
from ..selection.plan import Section
from ..sharding import check_geometry, local_length

_OP = "GatherPlan"
_INT32_MAX = 2**31 - 1
_ALIGNMENT_WORDS = 4
# What a channel that writes peer memory keeps on each rank: gathered buffers, by parity of the epoch.
CHANNEL_SLABS = 2


@dataclass(frozen=True)
class GatherPlan:
    """The reserved sizes of a plan buffer and the DCP geometry; from them everything static about the gather.

    A plan buffer is int32 `[words]`, owned by the caller, made by `empty`, filled by `c4_plan_gather`. A call may bring
    fewer requests and rows than are reserved. Every word of every view is written by every call.

    Attributes:
        requests: reserved requests of a chunk.
        rows: reserved query rows of a chunk.
        capacity: records that a rank's slice of the gathered buffer can have; see `gather_capacity`.
        world, interleave: the DCP geometry.
        page_size: records in a page of the cache.
        resident: records of a rank's slice of a resident buffer; 0: the full gather, without such buffers.
    """

    requests: int
    rows: int
    capacity: int
    world: int
    interleave: int
    page_size: int
    resident: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("rows", 1), ("capacity", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                reject(_OP, name, repr(value), f"an integer, {least} or more")
        check_geometry(self.page_size, 0, self.world, self.interleave)
        if self.capacity % self.padding_unit:
            allowed = f"a multiple of page_size // gcd(page_size, world) = {self.padding_unit}"
            reject(_OP, "capacity", self.capacity, allowed)
        if not isinstance(self.resident, int) or not 0 <= self.resident * self.world <= _INT32_MAX:
            allowed = f"an integer from 0 to {_INT32_MAX // self.world}: world * resident is an int32"
            reject(_OP, "resident", repr(self.resident), allowed)
        if self.world * self.capacity > _INT32_MAX or self.words > _INT32_MAX:
            reject(_OP, "capacity", self.capacity, f"world * capacity and the plan's words up to {_INT32_MAX}")

    @property
    def padding_unit(self) -> int:
        """A slice is padded to a multiple of this, so that all slices together are whole pages, and no further."""
        return self.page_size // math.gcd(self.page_size, self.world)

    @property
    def gathered_records(self) -> int:
        """Records of the gathered buffer, and `capacity_records` of a channel that fills it."""
        return self.world * self.capacity

    @property
    def sections(self) -> dict[str, Section]:
        """Name -> place, in the order of the buffer. The slots come last: a channel knows only how many there are."""
        shapes = {
            "owner_offsets": (1, self.world + 1),
            "starts": (self.world, self.requests),
            "lengths": (self.requests,),
            **({"resident_starts": (self.requests,), "resident_lengths": (self.requests,)} if self.resident else {}),
            "row_requests": (self.rows,),
            "causal_lengths": (self.rows,),
            "owned_slots": (self.capacity,),
        }
        sections, offset = {}, 0
        for name, shape in shapes.items():
            sections[name] = Section(offset, shape)
            offset += -(-math.prod(shape) // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS
        return sections

    @property
    def words(self) -> int:
        """int32 words of a plan buffer."""
        last = self.sections["owned_slots"]
        return last.offset + math.prod(last.shape)

    def empty(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """A new plan buffer. Its views hold nothing until the first `c4_plan_gather`."""
        return torch.empty(self.words, dtype=torch.int32, device=device)

    def owner_offsets(self, plan: torch.Tensor) -> torch.Tensor:
        """[1, world + 1]: where each rank's slice begins: `rank * padded`, or where the slice before it ends in the
        incremental form. All 0: the plan was refused, or there is nothing to bring."""
        return self._view(plan, "owner_offsets")

    def starts(self, plan: torch.Tensor) -> torch.Tensor:
        """[world, requests]: where a request's records begin in a rank's slice."""
        return self._view(plan, "starts")

    def lengths(self, plan: torch.Tensor) -> torch.Tensor:
        """[requests]: global lengths; 0 beyond the call's requests."""
        return self._view(plan, "lengths")

    def resident_starts(self, plan: torch.Tensor) -> torch.Tensor:
        """[requests]: where a request's records begin in each slice of a resident buffer. Incremental form only."""
        return self._view(plan, "resident_starts")

    def resident_lengths(self, plan: torch.Tensor) -> torch.Tensor:
        """[requests]: tokens of which the records are resident before the call. Incremental form only."""
        return self._view(plan, "resident_lengths")

    def row_requests(self, plan: torch.Tensor) -> torch.Tensor:
        """[rows]: the request of each query row; -1 for a padded row."""
        return self._view(plan, "row_requests")

    def causal_lengths(self, plan: torch.Tensor) -> torch.Tensor:
        """[rows]: how many of its request's tokens a row may see, its own included; 0 for a padded row."""
        return self._view(plan, "causal_lengths")

    def owned_slots(self, plan: torch.Tensor) -> torch.Tensor:
        """[capacity]: this rank's cache slots in the order of its slice; -1 for a row that arrives as zeros."""
        return self._view(plan, "owned_slots")

    def host_starts(self, lengths: Sequence[int]) -> list[list[int]]:
        """`starts[rank][request]`: an exclusive prefix sum over the requests of each rank's local lengths."""
        return [list(itertools.accumulate(row[:-1], initial=0)) if row else [] for row in self._local(lengths)]

    def host_totals(self, lengths: Sequence[int]) -> list[int]:
        """Records of each rank's slice, without padding."""
        return [sum(row) for row in self._local(lengths)]

    def host_padded(self, lengths: Sequence[int]) -> int:
        """Records of a slice: the largest total, rounded up to the padding unit. May exceed the capacity."""
        return round_up(max(self.host_totals(lengths)), self.padding_unit)

    def host_sent(self, lengths: Sequence[int], resident_lengths: Sequence[int]) -> list[int]:
        """Records of each rank's slice in the incremental form: those of tokens from the resident length on."""
        totals, kept = self.host_totals(lengths), self.host_totals(resident_lengths)
        return [total - known for total, known in zip(totals, kept, strict=True)]

    def _local(self, lengths: Sequence[int]) -> list[list[int]]:
        return [
            [local_length(rank, length, self.world, self.interleave) for length in lengths]
            for rank in range(self.world)
        ]

    def _view(self, plan: torch.Tensor, name: str) -> torch.Tensor:
        offset, shape = self.sections[name]
        return plan[offset : offset + math.prod(shape)].view(shape)


def causal_lengths(lengths: Sequence[int], new_lengths: Sequence[int]) -> list[int]:
    """How many tokens each query row may see: row i of a request of length S, of which n are new, sees S - n + i + 1.

    Args:
        lengths: global length of each request, cached and new tokens together.
        new_lengths: query rows of each request.
    Raises: ValueError for lengths that cannot be.
    """
    lengths, new_lengths = checked_lengths("causal_lengths", lengths, new_lengths)
    pairs = zip(lengths, new_lengths, strict=True)
    return [length - new + row + 1 for length, new in pairs for row in range(new)]


def checked_lengths(op: str, lengths: Sequence[int], new_lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The global and the new lengths of requests, as integers. Raises ValueError for what cannot be."""
    checked = [
        checked_integers(op, name, values) for name, values in (("lengths", lengths), ("new_lengths", new_lengths))
    ]
    if len(new_lengths) != len(lengths):
        reject(op, "new_lengths", f"{len(new_lengths)} requests", f"{len(lengths)} requests, as many as 'lengths'")
    for request, (length, new) in enumerate(zip(*checked, strict=True)):
        if length < 0:
            reject(op, "lengths", f"{length} in request {request}", "0 or more")
        if not 0 <= new <= length:
            allowed = f"from 0 to the request's length {length} (cached and new tokens together)"
            reject(op, "new_lengths", f"{new} in request {request}", allowed)
    return checked[0], checked[1]


def checked_integers(op: str, name: str, values: Sequence[int]) -> list[int]:
    """Host numbers as integers. Raises ValueError for others: a copy to a device would round them."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        reject(op, name, repr(values), "integers")


def gather_capacity(max_tokens: int, max_requests: int, world: int, interleave: int, page_size: int) -> int:
    """Records that a rank's slice needs for any chunk: its share of the tokens, one run more for each request.

    Args:
        max_tokens: most tokens of all requests of a chunk together, cached and new.
        max_requests: most requests of a chunk.
        world, interleave: the DCP geometry.
        page_size: the final one; the result is a multiple of it.
    Raises: ValueError for a size below 1, or a page size that is no multiple of the interleave.
    """
    for name, value in (("max_tokens", max_tokens), ("max_requests", max_requests)):
        if not isinstance(value, int) or value < 1:
            reject("gather_capacity", name, repr(value), "an integer, 1 or more")
    check_geometry(page_size, 0, world, interleave)
    return round_up(-(-max_tokens // world) + max_requests * interleave, page_size)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
