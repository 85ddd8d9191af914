"""`c4_remap` against the token-by-token model, and what it refuses."""

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies

import torch_sparse_mla
from torch_sparse_mla.gather import reference

from ..decode.rejections import expect_rejection
from .cases import (
    CHUNKS,
    POISON,
    Chunk,
    chunks,
    device_of,
    every_chunk,
    every_implementation,
    make_chunk,
    poisoned_plan,
    random_topk,
)

OP = "c4_remap"
op = torch.ops.torch_sparse_mla.c4_remap.default


def make_plan(chunk: Chunk, device: str = "cpu") -> torch.Tensor:
    plan = poisoned_plan(chunk, device)
    torch.ops.torch_sparse_mla.c4_plan_gather(*chunk.plan_args(0, plan, device))
    return plan


def remapped(implementation: str, chunk: Chunk, topk: torch.Tensor) -> tuple[list, list]:
    device = device_of(implementation)
    slots = torch.full(topk.shape, POISON, dtype=torch.int32, device=device)
    counts = torch.full(topk.shape[:1], POISON, dtype=torch.int32, device=device)
    function = reference.c4_remap if implementation == "reference" else op
    function(topk.to(device), make_plan(chunk, device), slots, counts, *chunk.remap_args())
    return slots.tolist(), counts.tolist()


@every_implementation
def test_one_list(implementation):
    """Two ranks in runs of 2: rank 0 holds 0, 1, 4, 5 and rank 1 the rest; a slice has 4 records."""
    chunk = make_chunk([7], [1], world=2, interleave=2, page_size=4)
    topk = torch.tensor([[6, -1, 0, 7, 3, 5, -2]], dtype=torch.int32)
    assert remapped(implementation, chunk, topk) == ([[6, 0, 5, 3, -1, -1, -1]], [4])


@every_implementation
@every_chunk
@pytest.mark.parametrize("columns", [1, 9, 40])
def test_matches_model(implementation, chunk, columns):
    topk = random_topk(chunk, columns, seed=columns)
    assert remapped(implementation, chunk, topk) == chunk.remap(topk.tolist())


@every_implementation
@hypothesis.given(chunk=chunks(), columns=strategies.integers(1, 20), causal=strategies.booleans())
@hypothesis.settings(max_examples=80)
def test_matches_model_for_any_chunk(implementation, chunk, columns, causal):
    topk = random_topk(chunk, columns, causal=causal)
    assert remapped(implementation, chunk, topk) == chunk.remap(topk.tolist())


@every_implementation
@pytest.mark.parametrize("columns", [192, 256, 640, 1_152, 2_051])
def test_lists_of_every_width(implementation, columns):
    """Widths that are no multiple of a block; lists longer than the context and shorter ones."""
    chunk = make_chunk([1_500, 2_600], [3, 5], world=4, interleave=4, page_size=64, rows=9)
    topk = random_topk(chunk, columns, seed=columns)
    assert remapped(implementation, chunk, topk) == chunk.remap(topk.tolist())


@every_implementation
def test_lengths_are_global(implementation):
    """A cap taken from a rank's own length would cut these lists: each rank holds a quarter."""
    chunk = make_chunk([5, 12], [2, 3])
    topk = torch.arange(12, dtype=torch.int32).repeat(5, 1)
    topk = torch.where(topk < torch.tensor([4, 5, 10, 11, 12])[:, None], topk, -1)
    _, counts = remapped(implementation, chunk, topk)
    assert counts == [4, 5, 10, 11, 12]


@every_implementation
def test_counts_never_exceed_what_a_row_may_see(implementation):
    chunk = make_chunk([12], [3])
    topk = torch.arange(12, dtype=torch.int32).repeat(3, 1)
    slots, counts = remapped(implementation, chunk, topk)
    assert counts == [10, 11, 12]
    assert all(slot >= 0 for slot in slots[0])


@every_implementation
def test_a_refused_plan_gives_empty_lists(implementation):
    chunk = make_chunk([33, 32], [1, 1], world=2, interleave=4, page_size=8, capacity=32)
    slots, counts = remapped(implementation, chunk, random_topk(make_chunk([33, 32], [1, 1]), 9))
    assert slots == [[-1] * 9] * 2 and counts == [0, 0]


@every_implementation
def test_positions_near_the_limit_of_int32(implementation):
    """A plan whose request is as long as can be: no product overflows."""
    chunk = make_chunk([8], [1], world=4, interleave=4, page_size=8)
    device = device_of(implementation)
    plan = make_plan(chunk, device)
    chunk.sizes.lengths(plan).fill_(2**31 - 1)
    chunk.sizes.owner_offsets(plan).copy_(torch.arange(5)[None] * 2**20)
    topk = torch.tensor([[2**31 - 2, 2**31 - 1, 2**30, 4 * 2**20]], dtype=torch.int32, device=device)
    slots, counts = torch.empty_like(topk), torch.empty(1, dtype=torch.int32, device=device)
    op(topk, plan, slots, counts, *chunk.remap_args())
    local = [(token // 16 * 4 + token % 4) + token // 4 % 4 * 2**20 for token in (2**31 - 2, 2**30, 4 * 2**20)]
    assert slots.tolist() == [[*local, -1]] and counts.tolist() == [3]


@every_implementation
def test_lists_that_are_part_of_wider_ones(implementation):
    chunk = CHUNKS["two-requests-cached"]
    topk = random_topk(chunk, 11)
    device = device_of(implementation)
    wider = torch.full((len(topk), 20), 3, dtype=torch.int32, device=device)
    wider[:, :11] = topk.to(device)
    slots = torch.full((len(topk) + 1, 11), POISON, dtype=torch.int32, device=device)
    counts = torch.full((len(topk) + 1,), POISON, dtype=torch.int32, device=device)
    op(wider[:, :11], make_plan(chunk, device), slots[:-1], counts[:-1], *chunk.remap_args())
    assert (slots[:-1].tolist(), counts[:-1].tolist()) == chunk.remap(topk.tolist())
    assert (slots[-1] == POISON).all() and counts[-1] == POISON


@every_implementation
def test_a_row_does_not_depend_on_the_others(implementation):
    chunk = CHUNKS["two-requests-cached"]
    topk = random_topk(chunk, 11)
    slots, counts = remapped(implementation, chunk, topk)
    device, plan = device_of(implementation), None
    plan = make_plan(chunk, device)
    for rows in range(len(topk) + 1):
        part, count = torch.empty(rows, 11, dtype=torch.int32, device=device), torch.empty(rows, dtype=torch.int32)
        count = count.to(device)
        op(topk[:rows].to(device), plan, part, count, *chunk.remap_args())
        assert (part.tolist(), count.tolist()) == (slots[:rows], counts[:rows])


def test_public_function_allocates(device):
    chunk = CHUNKS["two-requests-cached"]
    topk = random_topk(chunk, 11)
    plan = make_plan(chunk, device)
    slots, counts = torch_sparse_mla.c4_remap(topk.to(device), plan, chunk.sizes)
    assert (slots.tolist(), counts.tolist()) == chunk.remap(topk.tolist())
    given = torch.full_like(slots, POISON), torch.full_like(counts, POISON)
    returned = torch_sparse_mla.c4_remap(topk.to(device), plan, chunk.sizes, slots=given[0], counts=given[1])
    assert returned[0] is given[0] and returned[1] is given[1] and torch.equal(given[0], slots)


@dataclasses.dataclass
class Call:
    topk: torch.Tensor
    plan: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor
    sizes: tuple


@every_implementation
@pytest.mark.parametrize(
    "change, argument, allowed",
    [
        ({"topk": lambda t: t.long()}, "topk", "dtype int32"),
        ({"topk": lambda t: t[0]}, "topk", "shape [rows, K]"),
        ({"topk": lambda t: t.repeat_interleave(2, 1)[:, ::2]}, "topk", "a last stride of 1"),
        ({"topk": lambda t: t.repeat(2, 1)}, "topk", "at most the reserved 8"),
        ({"slots": lambda t: t[:, :-1].contiguous()}, "slots", "shape [rows, K of topk] = [8, 11]"),
        ({"slots": lambda t: t.t().contiguous().t()}, "slots", "a contiguous tensor"),
        ({"counts": lambda t: t[:-1]}, "counts", "shape [rows] = [8]"),
        ({"counts": lambda t: t.long()}, "counts", "dtype int32"),
        ({"plan": lambda t: t[:12]}, "plan", "for 2 requests, 8 rows and 4 ranks"),
        ({"plan": lambda t: t.view(1, -1)}, "plan", "a GatherPlan buffer"),
        ({"sizes": lambda s: (0, *s[1:])}, "requests", "1 or more"),
        ({"sizes": lambda s: (*s[:2], 0, 4)}, "interleave", "1 or more"),
        ({"sizes": lambda s: (*s[:3], 0)}, "world", "1 or more"),
        ({"sizes": lambda s: (2, -1, *s[2:])}, "rows", "0 or more"),
    ],
)
def test_rejects(implementation, change, argument, allowed):
    chunk = CHUNKS["two-requests-cached"]
    device = device_of(implementation)
    slots = torch.full((8, 11), POISON, dtype=torch.int32, device=device)
    counts = torch.full((8,), POISON, dtype=torch.int32, device=device)
    call = Call(random_topk(chunk, 11).to(device), make_plan(chunk, device), slots, counts, chunk.remap_args())
    for name, function in change.items():
        setattr(call, name, function(getattr(call, name)))
    with expect_rejection(OP, argument, allowed):
        op(call.topk, call.plan, call.slots, call.counts, *call.sizes)
    assert (slots == POISON).all() and (counts == POISON).all()


def test_public_function_refuses_a_plan_of_other_sizes():
    chunk = CHUNKS["two-requests-cached"]
    other = dataclasses.replace(chunk.sizes, requests=chunk.sizes.requests + 4)
    with expect_rejection(OP, "plan", f"words of {other}"):
        torch_sparse_mla.c4_remap(random_topk(chunk, 11), make_plan(chunk), other)


def test_rejects_outputs_that_overlap():
    chunk = CHUNKS["two-requests-cached"]
    topk, plan = random_topk(chunk, 11), make_plan(chunk)
    counts = torch.empty(8, dtype=torch.int32)
    with expect_rejection(OP, "slots", "memory of its own"):
        op(topk, plan, topk, counts, *chunk.remap_args())
    with expect_rejection(OP, "counts", "memory of its own"):
        op(topk, plan, torch.empty_like(topk), plan[:8], *chunk.remap_args())


@every_implementation
@pytest.mark.parametrize("row, value", [(0, 4), (3, 11), (2, -2), (6, 0)])
def test_checked_mode_names_the_first_bad_position(implementation, row, value, monkeypatch):
    """Row 0 may see 4 tokens, row 3 eleven of 12; row 6 is padded and may see none."""
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    chunk = CHUNKS["two-requests-cached"]
    topk = random_topk(chunk, 11)
    assert remapped(implementation, chunk, topk) == chunk.remap(topk.tolist())
    topk[row, 5] = value
    with expect_rejection(OP, "topk", "a position below the row's causal length") as error:
        remapped(implementation, chunk, topk)
    assert f"got {value} in row {row}, column 5;" in str(error.value)


@pytest.mark.parametrize("name", ["two-requests-cached", "ranks-that-own-nothing", "one-rank"])
def test_opcheck(name):
    chunk = CHUNKS[name]
    topk = random_topk(chunk, 11)
    slots, counts = torch.empty_like(topk), torch.empty(len(topk), dtype=torch.int32)
    torch.library.opcheck(op, (topk, make_plan(chunk), slots, counts, *chunk.remap_args()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_results_equal_eager(backend):
    chunk = CHUNKS["two-requests-cached"]
    compiled = torch.compile(
        lambda topk, plan: torch_sparse_mla.c4_remap(topk, plan, chunk.sizes), fullgraph=True, backend=backend
    )
    topk = random_topk(chunk, 11)
    slots, counts = compiled(topk, make_plan(chunk))
    assert (slots.tolist(), counts.tolist()) == chunk.remap(topk.tolist())


def test_one_compiled_graph_serves_every_number_of_rows():
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    chunk = CHUNKS["two-requests-cached"]
    compiled = torch.compile(
        lambda topk, plan: torch_sparse_mla.c4_remap(topk, plan, chunk.sizes), fullgraph=True, backend=graphs
    )
    topk, plan = random_topk(chunk, 11), make_plan(chunk)
    for rows in (3, 5, 8):
        part = topk[:rows].clone()
        torch._dynamo.mark_dynamic(part, 0)
        slots, counts = compiled(part, plan)
        assert (slots.tolist(), counts.tolist()) == chunk.remap(part.tolist())
    assert graphs.frame_count == 1
