"""Chunks of the incremental gather, and a plain-Python model of its plans, transit buffers and resident buffers.

Like `cases`, the model walks over tokens one by one; nothing in it is a formula of the package.
"""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import strategies

from torch_sparse_mla import GatherPlan

from .cases import POISON_BYTE, VIEWS, Chunk, make_chunk

RESIDENT_VIEWS = (*VIEWS, "resident_starts", "resident_lengths")


@dataclasses.dataclass(frozen=True)
class ResidentStep(Chunk):
    """A chunk some of whose records are resident.

    Attributes:
        starts: where each request's records begin in every slice of a resident buffer.
        known: tokens of each request of which the records are resident.
    """

    starts: list[int] = dataclasses.field(default_factory=list)
    known: list[int] = dataclasses.field(default_factory=list)

    def sent(self, rank: int) -> list[list[int]]:
        """Tokens of each request that a rank sends, in order."""
        return [
            [token for token in tokens if token >= known]
            for tokens, known in zip(self.owned(rank), self.known, strict=True)
        ]

    def totals(self) -> list[int]:
        """Records of each slice; 0 for all where one would exceed the capacity."""
        totals = [sum(map(len, self.sent(rank))) for rank in range(self.sizes.world)]
        return totals if max(totals) <= self.sizes.capacity else [0] * len(totals)

    def plan(self, rank: int) -> dict[str, list]:
        missing = self.sizes.requests - len(self.lengths)
        starts = []
        for owner in range(self.sizes.world):
            ends = list(itertools.accumulate(map(len, self.sent(owner)), initial=0))
            starts.append((ends[:-1] + [ends[-1]] * missing)[: self.sizes.requests])
        page_size = self.sizes.page_size
        slots = [
            int(self.block_table[request, local // page_size]) * page_size + local % page_size
            for request, tokens in enumerate(self.owned(rank))
            for local, token in enumerate(tokens)
            if token >= self.known[request]
        ]
        slots = slots if sum(self.totals()) else []
        return super().plan(rank) | {
            "owner_offsets": [list(itertools.accumulate(self.totals(), initial=0))],
            "starts": starts,
            "resident_starts": self.starts + [0] * missing,
            "resident_lengths": self.known + [0] * missing,
            "owned_slots": slots + [-1] * (self.sizes.capacity - len(slots)),
        }

    def places(self) -> dict[tuple[int, int], int]:
        """(request, token) -> slot of a resident buffer."""
        return {
            (request, token): rank * self.sizes.resident + self.starts[request] + local
            for rank in range(self.sizes.world)
            for request, tokens in enumerate(self.owned(rank))
            for local, token in enumerate(tokens)
        }

    def padded(self) -> int:
        return sum(self.totals())

    def transit(self, records: list[torch.Tensor], record_bytes: int) -> torch.Tensor:
        """What the gather brings: the records that are sent, slice by slice; poison behind them."""
        gathered = torch.full((self.sizes.gathered_records, record_bytes), POISON_BYTE, dtype=torch.uint8)
        if self.padded():
            every = (
                (request, token)
                for rank in range(self.sizes.world)
                for request, tokens in enumerate(self.sent(rank))
                for token in tokens
            )
            for place, (request, token) in enumerate(every):
                gathered[place] = records[request][token]
        return gathered

    def plan_args(self, rank: int, plan: torch.Tensor, device: str = "cpu") -> tuple:
        held = (torch.tensor(values, dtype=torch.int32, device=device) for values in (self.starts, self.known))
        return *super().plan_args(rank, plan, device), *held, self.sizes.resident

    def remap_args(self) -> tuple:
        return *super().remap_args(), self.sizes.resident


def make_step(
    lengths: list[int], new_lengths: list[int], known: list[int], gaps: list[int] | None = None, **options: int
) -> ResidentStep:
    """Places in the order of the last request first, `gaps[i]` records free before request i; poison's worth behind."""
    chunk = make_chunk(lengths, new_lengths, **options)
    gaps = gaps or [0] * len(lengths)
    # The first rank holds the most.
    records = list(map(len, chunk.owned(0)))
    starts, end = [0] * len(lengths), 0
    for request in reversed(range(len(lengths))):
        starts[request] = end + gaps[request]
        end = starts[request] + records[request]
    sizes = dataclasses.replace(chunk.sizes, resident=end + 3)
    return ResidentStep(chunk.lengths, chunk.new_lengths, chunk.block_table, sizes, starts, known)


STEPS = {
    "nothing-resident": make_step([37], [37], [0]),
    "second-chunk": make_step([37], [16], [21]),
    "two-requests": make_step([5, 30], [2, 3], [3, 27], [1, 4], rows=8),
    "a-prefix-hit-beside": make_step([64, 40], [4, 8], [60, 0], page_size=16, requests=4),
    "a-chunk-was-missed": make_step([50], [5], [20], [2]),
    "nothing-new": make_step([20, 9], [0, 1], [20, 8]),
    "ranks-that-send-nothing": make_step([22, 0, 2], [1, 0, 0], [21, 0, 2]),
    "one-rank": make_step([9, 20], [9, 1], [0, 19], world=1, interleave=1),
    "interleave-of-five": make_step(
        [31, 64, 7], [31, 4, 7], [0, 58, 0], [0, 2, 1], world=3, interleave=5, page_size=15
    ),
    "more-than-fits": make_step([40, 40], [40, 8], [0, 20], world=2, capacity=16),
    "no-requests": make_step([], [], [], requests=2, rows=4),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


@strategies.composite
def steps(draw: strategies.DrawFn) -> ResidentStep:
    def number(least: int, most: int) -> int:
        return draw(strategies.integers(least, most))

    interleave, requests = number(1, 5), number(0, 4)
    lengths = [number(0, 40) for _ in range(requests)]
    new_lengths = [number(0, length) for length in lengths]
    known = [number(0, length - new) for length, new in zip(lengths, new_lengths, strict=True)]
    return make_step(
        lengths,
        new_lengths,
        known,
        [number(0, 3) for _ in range(requests)],
        world=number(1, 8),
        interleave=interleave,
        page_size=interleave * number(1, 4),
        requests=requests + number(0 if requests else 1, 2),
        rows=sum(new_lengths) + number(0 if sum(new_lengths) else 1, 5),
        seed=number(0, 9),
    )


def resident_views(sizes: GatherPlan, plan: torch.Tensor) -> dict[str, list]:
    return {name: getattr(sizes, name)(plan).tolist() for name in RESIDENT_VIEWS}
