"""Lists and geometries for `selected_slots`, and its rules in plain Python."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from hypothesis import strategies

from . import plan_model
from .cases import POISON


@dataclass(frozen=True)
class SlotCase:
    """The arguments of one `selected_slots` call, in the operator's order."""

    topk: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor | None
    page_size: int
    interleave: int
    rank: int
    world: int
    slots_per_rank: int

    def args(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def to(self, device: str) -> "SlotCase":
        names = ["topk", "block_table", "lengths", "slots", *([] if self.counts is None else ["counts"])]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def expected(self) -> list[list[int]]:
        rows_per_request = len(self.topk) // max(len(self.block_table), 1)
        rows = []
        for row, (tokens, length) in enumerate(zip(self.topk.tolist(), self.lengths.tolist(), strict=True)):
            pages = self.block_table[row // rows_per_request].tolist()
            rows.append([self._slot(token if token < length else -1, pages) for token in tokens])
        if self.counts is not None:
            rows = [sorted(row, key=lambda slot: slot < 0) for row in rows]
        return rows * (len(self.slots) // max(len(self.topk), 1))

    def _slot(self, token: int, pages: list[int]) -> int:
        found = plan_model.resolve(token, pages, self.page_size, self.interleave, self.world)
        if found is None:
            return -1
        owner, slot = found
        if self.slots_per_rank:
            return owner * self.slots_per_rank + slot if slot < self.slots_per_rank else -1
        return slot if owner == self.rank else -1


def make_slot_case(
    *,
    requests: int = 2,
    rows_per_request: int = 2,
    topk: int = 20,
    world: int = 3,
    interleave: int = 2,
    page_size: int = 4,
    copies: int = 1,
    slots_per_rank: int = 0,
    rank: int = 0,
    packed: bool = False,
    seed: int = 0,
) -> SlotCase:
    generator = torch.Generator().manual_seed(seed)
    blocks, rows = 4, requests * rows_per_request
    context = blocks * page_size * world + 3
    tokens = torch.randint(-1, context, (rows, topk), generator=generator).int()
    pages = torch.randint(-1, 2 * requests * blocks + 1, (requests, blocks), generator=generator).int()
    lengths = torch.randint(-1, context + 3, (rows,), generator=generator).int()
    slots = torch.full((copies * rows, topk), POISON, dtype=torch.int32)
    counts = torch.full((copies * rows,), POISON, dtype=torch.int32) if packed else None
    return SlotCase(tokens, pages, lengths, slots, counts, page_size, interleave, rank, world, slots_per_rank)


@strategies.composite
def slot_cases(draw) -> SlotCase:
    world, interleave = draw(strategies.integers(1, 8)), draw(strategies.sampled_from([1, 2, 4, 8, 5]))
    return make_slot_case(
        requests=draw(strategies.integers(1, 3)),
        rows_per_request=draw(strategies.integers(1, 4)),
        topk=draw(strategies.integers(1, 40)),
        world=world,
        interleave=interleave,
        page_size=interleave * draw(strategies.sampled_from([1, 3, 16])),
        copies=draw(strategies.integers(1, 3)),
        slots_per_rank=draw(strategies.sampled_from([0, 0, 7, 64, 1000])),
        rank=draw(strategies.integers(0, world - 1)),
        packed=draw(strategies.booleans()),
        seed=draw(strategies.integers(0, 10_000)),
    )


def check_slots(function: Callable[..., None], case: SlotCase) -> None:
    function(*case.args())
    expected = case.expected()
    assert case.slots.tolist() == expected
    if case.counts is not None:
        assert case.counts.tolist() == [sum(slot >= 0 for slot in row) for row in expected]
