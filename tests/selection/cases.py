"""Lists, block tables and plans for the selection tests; plan buffers start poisoned."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import strategies

from torch_sparse_mla import SelectionPlan
from torch_sparse_mla.selection import reference

from . import plan_model

POISON = 0x5A5A5A5A
VIEWS = ("remap", "owner_offsets", "owned_slots", "counts")

IMPLEMENTATIONS = ("reference", "op-cpu", pytest.param("op-cuda", marks=pytest.mark.gpu))
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@dataclass(frozen=True)
class PlanCase:
    """The arguments of one `plan_selection` call, in the operator's order."""

    topk: torch.Tensor
    block_table: torch.Tensor
    plan: torch.Tensor
    rows_per_request: int
    page_size: int
    interleave: int
    rank: int
    world: int
    reserved_requests: int
    reserved_rows_per_request: int
    pages: int | None = None

    def args(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def selection(self) -> SelectionPlan:
        return SelectionPlan(
            self.reserved_requests or len(self.block_table),
            self.reserved_rows_per_request or self.rows_per_request,
            self.topk.shape[1],
            self.world,
        )

    def to(self, device: str) -> "PlanCase":
        names = ("topk", "block_table", "plan")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def poisoned(self) -> "PlanCase":
        """The same call with a plan buffer of its own."""
        return replace(self, plan=torch.full_like(self.plan, POISON))

    def expected(self) -> dict[str, list]:
        selection, table = self.selection, self.block_table
        if self.pages is not None:
            table = torch.where(table < self.pages, table, -1)
        return plan_model.plan(
            self.topk.tolist(),
            table.tolist(),
            *self.args()[3:8],
            selection.requests,
            selection.rows_per_request,
            selection.topk,
        )


def make_case(
    topk: list[list[int]] | torch.Tensor,
    block_table: list[list[int]] | torch.Tensor,
    *,
    page_size: int = 4,
    interleave: int = 1,
    rank: int = 0,
    world: int = 1,
    reserved_requests: int = 0,
    reserved_rows_per_request: int = 0,
    pages: int | None = None,
) -> PlanCase:
    topk, block_table = (torch.as_tensor(values, dtype=torch.int32) for values in (topk, block_table))
    rows_per_request = len(topk) // len(block_table) if len(block_table) else 1
    geometry = (rows_per_request, page_size, interleave, rank, world, reserved_requests, reserved_rows_per_request)
    case = PlanCase(topk, block_table, torch.empty(0, dtype=torch.int32), *geometry, pages)
    return replace(case, plan=torch.full((case.selection.words,), POISON, dtype=torch.int32))


def random_case(
    seed: int,
    *,
    requests: int,
    rows_per_request: int,
    topk: int,
    world: int,
    context: int,
    interleave: int = 1,
    page_size: int = 64,
    rank: int = 0,
    absent: float = 0.1,
    **reserved: int,
) -> PlanCase:
    """Rows that choose from a context: distinct within a row where there is enough of it, shared between rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = requests * rows_per_request
    if topk <= context:
        lists = torch.rand(rows, context, generator=generator).argsort(1)[:, :topk]
    else:
        lists = torch.randint(context, (rows, topk), generator=generator)
    lists = torch.where(torch.rand(rows, topk, generator=generator) < absent, -1, lists)
    blocks = -(-context // (page_size * world))
    pages = torch.randperm(requests * blocks + 3, generator=generator)[: requests * blocks].view(requests, blocks)
    geometry = {"page_size": page_size, "interleave": interleave, "rank": rank, "world": world}
    return make_case(lists, pages, **geometry, **reserved)


@strategies.composite
def cases(draw: strategies.DrawFn) -> PlanCase:
    """Any geometry, small: empty calls, holes in block tables, positions beyond them, all-absent requests."""

    def number(least: int, most: int) -> int:
        return draw(strategies.integers(least, most))

    world, interleave = number(1, 8), draw(strategies.sampled_from((1, 2, 3, 4, 8)))
    page_size = interleave * number(1, 3)
    requests, rows, topk, blocks = number(0, 3), number(1, 4), number(1, 9), number(0, 3)
    beyond = blocks * page_size * world
    position = strategies.one_of(
        strategies.just(-1),
        strategies.integers(0, min(max(beyond - 1, 0), 12)),
        strategies.integers(0, beyond + 2),
        strategies.sampled_from((-(2**31), -2, 2**31 - 1)),
    )
    row = strategies.lists(position, min_size=topk, max_size=topk)
    request = strategies.one_of(
        strategies.lists(row, min_size=rows, max_size=rows), strategies.just([[-1] * topk] * rows)
    )
    page = strategies.one_of(strategies.integers(0, 50), strategies.sampled_from((-1, 2**31 - 1)))
    lists = [row for _ in range(requests) for row in draw(request)]
    table = [[draw(page) for _ in range(blocks)] for _ in range(requests)]
    return make_case(
        torch.tensor(lists, dtype=torch.int32).view(requests * rows, topk),
        torch.tensor(table, dtype=torch.int32).view(requests, blocks),
        page_size=page_size,
        interleave=interleave,
        rank=number(0, world - 1),
        world=world,
        reserved_requests=requests + number(0, 2),
        reserved_rows_per_request=draw(strategies.sampled_from((0, rows, 4))) or rows,
        pages=draw(strategies.one_of(strategies.none(), strategies.integers(0, 50))),
    )


def call(implementation: str, case: PlanCase) -> torch.Tensor:
    """Run on a poisoned plan buffer; returns the buffer, on the CPU."""
    case = case.to("cuda" if implementation == "op-cuda" else "cpu").poisoned()
    function = (
        reference.plan_selection if implementation == "reference" else torch.ops.torch_sparse_mla.plan_selection.default
    )
    function(*case.args())
    return case.plan.cpu()


def views(case: PlanCase, plan: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: getattr(case.selection, name)(plan) for name in VIEWS}


def assert_plan(case: PlanCase, plan: torch.Tensor) -> None:
    """Every view equals the model's."""
    expected = case.expected()
    for name, view in views(case, plan).items():
        assert view.tolist() == expected[name], name


def assert_same_plan(case: PlanCase, plan: torch.Tensor, expected: torch.Tensor) -> None:
    for (name, view), other in zip(views(case, plan).items(), views(case, expected).values(), strict=True):
        assert torch.equal(view, other), f"{name}: first difference at {(view != other).nonzero()[:1].tolist()}"
