"""`c4_place_records` against the token-by-token model, and what it refuses."""

import dataclasses

import hypothesis
import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla.gather import reference

from ..decode.rejections import expect_rejection
from .cases import POISON_BYTE, device_of, every_implementation, layer_records, poisoned_plan
from .resident_cases import STEPS, ResidentStep, every_step, steps

OP = "c4_place_records"
op = torch.ops.torch_sparse_mla.c4_place_records.default


def make_args(step: ResidentStep, records: list[torch.Tensor], record_bytes: int, device: str = "cpu") -> tuple:
    plan = poisoned_plan(step, device)
    torch.ops.torch_sparse_mla.c4_plan_gather(*step.plan_args(0, plan, device))
    size = (step.sizes.world * step.sizes.resident, record_bytes)
    resident = torch.full(size, POISON_BYTE, dtype=torch.uint8, device=device)
    gathered = step.transit(records, record_bytes).to(device)
    return gathered, plan, resident, *step.remap_args()[:4]


def expected(step: ResidentStep, records: list[torch.Tensor], record_bytes: int) -> torch.Tensor:
    size = (step.sizes.world * step.sizes.resident, record_bytes)
    resident = torch.full(size, POISON_BYTE, dtype=torch.uint8)
    if step.padded():
        for (request, token), place in step.places().items():
            if token >= step.known[request]:
                resident[place] = records[request][token]
    return resident


def placed(implementation: str, step: ResidentStep, record_bytes: int, seed: int) -> None:
    records = layer_records(step, record_bytes, seed)
    arguments = make_args(step, records, record_bytes, device_of(implementation))
    before = arguments[0].clone()
    function = reference.c4_place_records if implementation == "reference" else op
    function(*arguments)
    assert torch.equal(arguments[2].cpu(), expected(step, records, record_bytes))
    assert torch.equal(arguments[0], before)


@every_implementation
@every_step
@pytest.mark.parametrize("record_bytes", [1, 37, 528])
def test_matches_model(implementation, step, record_bytes):
    placed(implementation, step, record_bytes, seed=1)


@every_implementation
@hypothesis.given(step=steps())
@hypothesis.settings(max_examples=25)
def test_any_step_matches_model(implementation, step):
    placed(implementation, step, 16, seed=2)


@every_implementation
def test_places_beyond_the_buffer_are_not_written(implementation):
    """Device data that the host did not check: the memory around the buffer stays as it is."""
    step, device = STEPS["two-requests"], device_of(implementation)
    records = layer_records(step, 16, 3)
    for start in (-1, step.sizes.resident - 1, 2**31 - 1, -(2**31)):
        bad = dataclasses.replace(step, starts=[start, 0])
        gathered, plan, resident, *sizes = make_args(bad, records, 16, device)
        storage = torch.full((3 * len(resident), 16), POISON_BYTE, dtype=torch.uint8, device=device)
        op(gathered, plan, storage[len(resident) : 2 * len(resident)], *sizes)
        assert (storage[: len(resident)] == POISON_BYTE).all() and (storage[2 * len(resident) :] == POISON_BYTE).all()


@every_implementation
def test_a_plan_that_is_none_writes_within_the_buffer(implementation):
    step, device = STEPS["interleave-of-five"], device_of(implementation)
    records = layer_records(step, 16, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gathered, plan, resident, *sizes = make_args(step, records, 16, device)
        words = torch.randint(-(2**31), 2**31, plan.shape, generator=generator)
        small = torch.randint(-20, 80, plan.shape, generator=generator)
        plan.copy_(torch.where(torch.rand(plan.shape, generator=generator) < 0.2, words, small))
        storage = torch.full((3 * len(resident), 16), POISON_BYTE, dtype=torch.uint8, device=device)
        op(gathered, plan, storage[len(resident) : 2 * len(resident)], *sizes)
        assert (storage[: len(resident)] == POISON_BYTE).all() and (storage[2 * len(resident) :] == POISON_BYTE).all()


@every_implementation
def test_places_beyond_two_gibibytes(implementation):
    """The second slice of a buffer of 2.6 GB, of which only what is written is touched."""
    step, device = STEPS["two-requests"], device_of(implementation)
    far = 1_250_000 - step.sizes.resident
    sizes = dataclasses.replace(step.sizes, resident=1_250_000)
    step = dataclasses.replace(step, sizes=sizes, starts=[start + far for start in step.starts])
    records = layer_records(step, 528, 10)
    plan = poisoned_plan(step, device)
    torch.ops.torch_sparse_mla.c4_plan_gather(*step.plan_args(0, plan, device))
    resident = torch.empty(4 * 1_250_000, 528, dtype=torch.uint8, device=device)
    op(step.transit(records, 528).to(device), plan, resident, *step.remap_args()[:4])
    new = {key: place for key, place in step.places().items() if key[1] >= step.known[key[0]]}
    assert max(new.values()) * 528 > 2**31
    for (request, token), place in new.items():
        assert torch.equal(resident[place].cpu(), records[request][token])


def test_public_function(device):
    step = STEPS["second-chunk"]
    records = layer_records(step, 48, 5)
    gathered, plan, resident, *_ = make_args(step, records, 48, device)
    torch_sparse_mla.c4_place_records(gathered, plan, resident, step.sizes)
    assert torch.equal(resident.cpu(), expected(step, records, 48))
    with expect_rejection(OP, "sizes", "sizes with resident above 0"):
        torch_sparse_mla.c4_place_records(gathered, plan, resident, dataclasses.replace(step.sizes, resident=0))
    with expect_rejection(OP, "resident", "shape [world * resident"):
        torch_sparse_mla.c4_place_records(gathered, plan, resident[:-4], step.sizes)


@every_implementation
@pytest.mark.parametrize(
    "at, change, argument, allowed",
    [
        (0, lambda t: t.int(), "gathered", "dtype uint8"),
        (0, lambda t: t[:-1], "gathered", "a multiple of world = 4"),
        (0, lambda t: t.t().contiguous().t(), "gathered", "a contiguous tensor"),
        (1, lambda t: t.long(), "plan", "dtype int32"),
        (1, lambda t: t.view(1, -1), "plan", "a GatherPlan buffer"),
        (1, lambda t: t[:-1], "plan", "the plan of gathered"),
        (2, lambda t: t[:, :-1].contiguous(), "resident", "records of 16 bytes"),
        (2, lambda t: t[:-2], "resident", "a multiple of world = 4"),
        (2, lambda t: t.unsqueeze(0), "resident", "record_bytes]"),
        (3, lambda _: 0, "requests", "1 or more"),
        (3, lambda _: 3, "plan", "the plan of gathered"),
        (4, lambda _: -1, "rows", "0 or more"),
        (5, lambda _: 0, "interleave", "1 or more"),
        (6, lambda _: 0, "world", "1 or more"),
    ],
)
def test_rejects(implementation, at, change, argument, allowed):
    step = STEPS["two-requests"]
    arguments = list(make_args(step, layer_records(step, 16, 6), 16, device_of(implementation)))
    resident = arguments[2]
    arguments[at] = change(arguments[at])
    with expect_rejection(OP, argument, allowed):
        op(*arguments)
    assert (resident == POISON_BYTE).all()


def test_rejects_a_full_plan_and_outputs_that_overlap():
    step = STEPS["two-requests"]
    gathered, plan, resident, *sizes = make_args(step, layer_records(step, 16, 7), 16)
    full = dataclasses.replace(step.sizes, resident=0).empty()
    with expect_rejection(OP, "plan", "with its resident views"):
        op(gathered, full, resident, *sizes)
    with expect_rejection(OP, "resident", "memory of its own"):
        op(gathered, plan, gathered, *sizes)


def test_opcheck():
    step = STEPS["two-requests"]
    torch.library.opcheck(op, make_args(step, layer_records(step, 37, 8), 37))


def test_compiled_results_equal_eager():
    step = STEPS["a-prefix-hit-beside"]
    records = layer_records(step, 32, 9)
    gathered, plan, resident, *_ = make_args(step, records, 32)

    def function(gathered, plan, resident):
        torch_sparse_mla.c4_place_records(gathered, plan, resident, step.sizes)
        return resident.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    right = expected(step, records, 32)
    assert compiled(gathered, plan, resident) == right.sum()
    assert torch.equal(resident, right)
