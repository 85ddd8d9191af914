"""The plan buffer: which named views it holds, and where. Pure integer functions of the reserved sizes."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Programs that share the search for first occurrences in one request: each has some of the cells to itself.
PARTITIONS = 16
# Views and tables start at a multiple of this many words (16 bytes).
_ALIGNMENT_WORDS = 4
# Cells of the table that every position starts in. Positions this far apart, times the entries, are the first to meet
# in one cell: for a request of 4 rows x 2048, tokens that are 65,536 apart.
_CELLS_PER_ENTRY = 8
_LEAST_SPARE_CELLS = 8
_INT32_MAX = 2**31 - 1


class Section(NamedTuple):
    """A view of the plan buffer: its first word and its shape."""

    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SelectionPlan:
    """The reserved sizes of a plan buffer, and from them everything static about it.

    A plan buffer is int32 `[words]`, owned by the caller, and made by `empty`. A call of `plan_selection` may bring
    fewer requests, and fewer rows per request, than are reserved. Every word of the four views is written by every
    call. What lies behind them is the kernels' scratch: it needs no initial state, and means nothing between calls.

    Union: the distinct positions that a request's rows selected, in segments by owner, first come first within each.
    Workspace record index of a position: `request * capacity_per_request + place in the request's union`.

    Attributes:
        requests: reserved requests.
        rows_per_request: reserved rows (query tokens) of each.
        topk: entries in a row's top-k list.
        world: ranks that share the cache.
    """

    requests: int
    rows_per_request: int
    topk: int
    world: int

    def __post_init__(self) -> None:
        for name, least in (("requests", 0), ("rows_per_request", 1), ("topk", 1), ("world", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"torch_sparse_mla.SelectionPlan: {name}: got {value!r}; allowed: an integer, {least} or more"
                )
        if self.words > _INT32_MAX:
            raise ValueError(
                f"torch_sparse_mla.SelectionPlan: {self}: needs {self.words} words; allowed: {_INT32_MAX} words or "
                "fewer (reserve fewer requests, rows per request or top-k entries)"
            )

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request

    @property
    def capacity_per_request(self) -> int:
        """Records that a request's union can have, and the distance between two requests in the workspace."""
        return self.rows_per_request * self.topk

    @property
    def capacity(self) -> int:
        """Records in the workspace of one layer."""
        return self.requests * self.capacity_per_request

    @property
    def cells(self) -> int:
        """Cells of a request's first table, which all of its programs share."""
        return max(_CELLS_PER_ENTRY * self._entries, PARTITIONS)

    @property
    def spare_cells(self) -> int:
        """Cells of each of the two tables that a program has for positions that met another in their cell."""
        return max(self._entries // PARTITIONS, _LEAST_SPARE_CELLS)

    @property
    def table_words(self) -> int:
        """Words of all tables of a request, one for each cell. Never fewer than its entries."""
        return self.cells + 2 * PARTITIONS * self.spare_cells

    @property
    def _entries(self) -> int:
        """A request's entries, up to a power of two."""
        return 2 ** (self.capacity_per_request - 1).bit_length()

    @property
    def sections(self) -> dict[str, Section]:
        """Name -> place, in the order of the buffer: the four views, then the scratch."""
        shapes = {
            "remap": (self.rows, self.topk),
            "owner_offsets": (self.requests, self.world + 1),
            "owned_slots": (self.capacity,),
            "counts": (self.requests,),
            "first_entries": (self.requests, self.capacity_per_request),
            "tables": (self.requests, self.table_words),
        }
        sections, offset = {}, 0
        for name, shape in shapes.items():
            sections[name] = Section(offset, shape)
            offset += -(-math.prod(shape) // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS
        return sections

    @property
    def words(self) -> int:
        """int32 words of a plan buffer: 13 to 23 for each reserved top-k entry, most of them for the tables.

        One request of 4 rows x 2048 takes 426 kB.
        """
        last = self.sections["tables"]
        return last.offset + math.prod(last.shape)

    def empty(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """A new plan buffer. Its views hold nothing until the first `plan_selection`."""
        return torch.empty(self.words, dtype=torch.int32, device=device)

    def remap(self, plan: torch.Tensor) -> torch.Tensor:
        """[rows, topk]: the workspace record index of each top-k entry; -1 where it is absent or cannot be resolved.

        The rows are those of the call's top-k, packed: with fewer rows than reserved take the first `len(topk)`.
        Rows beyond the call's hold -1.
        """
        return self._view(plan, "remap")

    def owner_offsets(self, plan: torch.Tensor) -> torch.Tensor:
        """[requests, world + 1]: where each owner's segment begins inside the request's union; last, its size."""
        return self._view(plan, "owner_offsets")

    def owned_slots(self, plan: torch.Tensor) -> torch.Tensor:
        """[capacity]: this rank's cache slots in union order, each request's from `request * capacity_per_request` on.

        A request has `owner_offsets[request, rank + 1] - owner_offsets[request, rank]` of them; after these, -1.
        """
        return self._view(plan, "owned_slots")

    def counts(self, plan: torch.Tensor) -> torch.Tensor:
        """[requests]: the size of each union."""
        return self._view(plan, "counts")

    def _view(self, plan: torch.Tensor, name: str) -> torch.Tensor:
        offset, shape = self.sections[name]
        return plan[offset : offset + math.prod(shape)].view(shape)


def selection_plan_words(requests: int, rows_per_request: int, topk: int, world: int) -> int:
    """int32 words of the plan buffer for reserved sizes: `SelectionPlan(...).words`."""
    return SelectionPlan(requests, rows_per_request, topk, world).words
