"""`current_token_slots`: each row's own token, in the workspace that its request's plan describes."""

import hypothesis
import pytest
import torch
from hypothesis import strategies

import torch_sparse_mla
from torch_sparse_mla import SelectionPlan, current_token_slots

from ..decode.rejections import expect_rejection
from .cases import PlanCase, call, cases, make_case, random_case


def slots_of(case: PlanCase, lengths: list[int], device: str = "cpu") -> list[int]:
    plan = call("op-cuda" if device == "cuda" else "reference", case).to(device)
    found = current_token_slots(
        case.topk.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        case.selection,
        plan,
        rows_per_request=case.rows_per_request,
    )
    assert (found.dtype, found.shape) == (torch.int32, (len(case.topk),))
    return found.tolist()


def model(case: PlanCase, lengths: list[int]) -> list[int]:
    remap = case.expected()["remap"]
    found = []
    for row, length in enumerate(lengths):
        first = row // case.rows_per_request * case.rows_per_request
        places = {
            remap[other][column]
            for other in range(first, first + case.rows_per_request)
            for column, position in enumerate(case.topk[other].tolist())
            if position == length - 1
        }
        assert len(places) <= 1
        found.append(places.pop() if places else -1)
    return found


@hypothesis.given(case=cases(), data=strategies.data())
def test_matches_model(case, data):
    positions = sorted({-1, *case.topk.flatten().tolist()} - {2**31 - 1, -(2**31)})
    lengths = [data.draw(strategies.sampled_from(positions)) + 1 for _ in case.topk]
    assert slots_of(case, lengths) == model(case, lengths)


def test_every_request_by_itself(device):
    """A position is looked for in its own request, for every request and not for the last one alone."""
    case = make_case([[6, 7], [8, 9], [9, 8], [3, 4]], [[0, 1, 2], [3, 4, 5]], world=2)
    # Request 0: even 6, 8, odd 7, 9. Request 1: even 8, 4, odd 9, 3.
    assert slots_of(case, [9, 10, 9, 10], device) == [1, 3, 4, 6]
    assert slots_of(case, [4, 5, 4, 5], device) == [-1, -1, 7, 5]


def test_token_that_only_a_later_row_selected(device):
    case = make_case([[0, 1], [5, 4]], [[0, 1]])
    assert slots_of(case, [5, 6], device) == [3, 2]


def test_padded_rows_and_tokens_without_a_record(device):
    case = make_case([[-1, 2], [-1, -1], [900, 1]], [[0], [1], [2]])
    assert slots_of(case, [0, -4, 901], device) == [-1, -1, -1]


def test_the_lowest_length_is_no_token_at_the_highest_position(device):
    topk = torch.tensor([[2**31 - 1, 0]], dtype=torch.int32, device=device)
    remap = torch.tensor([[5, 6]], dtype=torch.int32, device=device)
    for length, dtype, expected in ((-(2**31), torch.int32, -1), (2**31, torch.int64, 5), (2**31 - 1, torch.int32, -1)):
        slots = torch.full((1,), 77, dtype=torch.int32, device=device)
        lengths = torch.tensor([length], dtype=dtype, device=device)
        torch.ops.torch_sparse_mla.current_token_slots(topk, lengths, remap, slots, 1)
        assert slots.tolist() == [expected]


def test_written_there_the_token_is_what_decode_reads():
    case = random_case(1, requests=2, rows_per_request=2, topk=8, world=2, context=16, absent=0.0)
    plan = call("reference", case)
    lengths = [16, 12, 9, 16]
    slots = current_token_slots(case.topk, torch.tensor(lengths), case.selection, plan)
    assert slots.tolist() == model(case, lengths) and (slots >= 0).sum() >= 2
    generator = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(4, 512, generator=generator), torch.randn(4, 64, generator=generator)
    workspace = torch.zeros(1, case.selection.capacity, torch_sparse_mla.LAYOUTS["bf16_mla"].record_bytes).byte()
    torch_sparse_mla.write_ckv_records(latent, rope, slots, workspace, "bf16_mla")
    out = torch.empty(4, 576)
    torch.ops.torch_sparse_mla.read_ckv_records(workspace, slots, out, "bf16_mla")
    written = slots >= 0
    assert torch.equal(out[written], torch.cat([latent, rope], 1)[written].bfloat16().float())
    assert not workspace[0, [record for record in range(32) if record not in slots.tolist()]].any()


def op_arguments(case: PlanCase) -> dict[str, object]:
    plan = call("reference", case)
    return {
        "topk": case.topk,
        "lengths": torch.tensor([16, 12, 9, 16]),
        "remap": case.selection.remap(plan)[: len(case.topk)],
        "slots": torch.full((4,), 77, dtype=torch.int32),
        "rows_per_request": 2,
    }


def test_opcheck():
    case = random_case(1, requests=2, rows_per_request=2, topk=8, world=2, context=16)
    arguments = tuple(op_arguments(case).values())
    torch.library.opcheck(torch.ops.torch_sparse_mla.current_token_slots, arguments)


@pytest.mark.parametrize(
    "argument, wrong, allowed",
    [
        ("topk", lambda given: given["topk"].long(), "dtype int32"),
        ("topk", lambda given: given["topk"].repeat(1, 2)[:, ::2], "a contiguous tensor"),
        ("remap", lambda given: given["remap"][:, :7], r"shape \[that of 'topk'\] = \[4, 8\]"),
        ("lengths", lambda given: given["lengths"][:3], r"shape \[rows\] = \[4\]"),
        ("slots", lambda given: given["slots"].long(), "dtype int32"),
        ("slots", lambda given: given["remap"].view(-1)[:4], "memory of its own"),
        ("rows_per_request", lambda given: 3, "1 or more, of which the 4 rows are a multiple"),
        ("rows_per_request", lambda given: 0, "1 or more"),
    ],
)
def test_the_operator_rejects(argument, wrong, allowed):
    given = op_arguments(random_case(1, requests=2, rows_per_request=2, topk=8, world=2, context=16))
    before = given["slots"].clone()
    with pytest.raises(ValueError, match=f"current_token_slots: argument '{argument}': got .*; allowed: .*{allowed}"):
        torch.ops.torch_sparse_mla.current_token_slots(*(given | {argument: wrong(given)}).values())
    assert torch.equal(given["slots"], before)


def test_no_rows():
    empty = torch.empty(0, 8, dtype=torch.int32)
    torch.ops.torch_sparse_mla.current_token_slots(empty, empty[:, 0], empty, empty[:, 0].clone(), 4)


@pytest.mark.gpu
def test_replays_with_other_lengths_and_lists():
    case = random_case(1, requests=3, rows_per_request=4, topk=300, world=4, context=900).to("cuda")
    lengths = torch.zeros(12, dtype=torch.int32, device="cuda")

    def run():
        torch.ops.torch_sparse_mla.plan_selection(*case.args())
        return current_token_slots(case.topk, lengths, case.selection, case.plan)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = run()
    for seed in range(10):
        other = random_case(seed, requests=3, rows_per_request=4, topk=300, world=4, context=900)
        live = [other.topk[row, seed].item() + 1 for row in range(12)]
        for tensor, value in ((case.topk, other.topk), (case.block_table, other.block_table)):
            tensor.copy_(value)
        lengths.copy_(torch.tensor(live))
        slots.fill_(77)
        graph.replay()
        assert slots.tolist() == model(other, live)


def test_compiles_whole():
    case = random_case(2, requests=2, rows_per_request=2, topk=8, world=2, context=16)
    plan = call("reference", case)
    lengths = torch.tensor([16, 12, 9, 0])
    compiled = torch.compile(current_token_slots, fullgraph=True, backend="aot_eager")
    assert compiled(case.topk, lengths, case.selection, plan).tolist() == model(case, lengths.tolist())


@pytest.mark.parametrize(
    "change, argument, allowed",
    [
        ({"topk": lambda t: t.long()}, "topk", "dtype int32"),
        ({"topk": lambda t: t[:, :7]}, "topk", "shape [a multiple of rows_per_request = 2, 8]"),
        ({"topk": lambda t: t[:3]}, "topk", "shape [a multiple of rows_per_request = 2, 8]"),
        ({"topk": lambda t: torch.cat([t, t])}, "topk", "up to 2 requests of 2 rows"),
        ({"lengths": lambda t: t.float()}, "lengths", "dtype int32 or int64"),
        ({"lengths": lambda t: t[:2]}, "lengths", "shape [rows] = [4]"),
        ({"rows_per_request": lambda _: 3}, "rows_per_request", "1 to the reserved 2"),
        ({"topk": lambda t: t.repeat(1, 2)[:, ::2]}, "topk", "a contiguous tensor"),
        ({"plan": lambda t: t.float()}, "plan", "dtype int32"),
        ({"plan": lambda t: t[:-1]}, "plan", "a plan buffer of"),
    ],
)
def test_rejects(change, argument, allowed):
    case = random_case(3, requests=2, rows_per_request=2, topk=8, world=2, context=16)
    arguments = {"topk": case.topk, "lengths": torch.tensor([1, 2, 3, 4]), "rows_per_request": 2, "plan": case.plan}
    for name, edit in change.items():
        arguments[name] = edit(arguments[name])
    with expect_rejection("current_token_slots", argument, allowed):
        current_token_slots(**arguments, selection=SelectionPlan(2, 2, 8, 2))
