"""`plan_selection` on the GPU: real sizes, repeatability, and CUDA graphs replayed with other lists.

Plan buffers are poisoned before every call and replay: scratch needs no initial state, and nothing old may pass.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from .cases import POISON, PlanCase, assert_same_plan, call, random_case

pytestmark = pytest.mark.gpu

op = torch.ops.torch_sparse_mla.plan_selection.default

SHAPES = [
    {"requests": 1, "rows_per_request": 4, "topk": 2048, "world": 4, "context": 6000},
    {"requests": 4, "rows_per_request": 4, "topk": 2048, "world": 1, "context": 3000, "reserved_requests": 5},
    {"requests": 3, "rows_per_request": 3, "topk": 2051, "world": 3, "context": 9000, "reserved_rows_per_request": 4},
    {"requests": 2, "rows_per_request": 4, "topk": 2051, "world": 8, "context": 4000, "interleave": 4},
    {"requests": 40, "rows_per_request": 1, "topk": 512, "world": 2, "context": 800},
    {"requests": 2, "rows_per_request": 16, "topk": 4096, "world": 4, "context": 30000},
]


def run(case: PlanCase) -> torch.Tensor:
    op(*case.args())
    return case.plan.cpu()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(str(value) for value in shape.values()))
def test_matches_reference(shape):
    for rank in {0, shape["world"] - 1}:
        case = random_case(1, **shape, rank=rank)
        assert_same_plan(case, call("op-cuda", case), call("reference", case))


def test_repeats_bit_for_bit():
    case = random_case(2, **SHAPES[0]).to("cuda")
    expected = run(case)
    for _ in range(50):
        case.plan.fill_(POISON)
        assert_same_plan(case, run(case), expected)


def test_one_record_named_by_every_entry():
    """All bids go to one cell."""
    case = random_case(3, **SHAPES[0])
    case.topk.fill_(4321)
    assert_same_plan(case, call("op-cuda", case), call("reference", case))


def captured(case: PlanCase) -> torch.cuda.CUDAGraph:
    op(*case.args())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*case.args())
    return graph


def test_replays_with_other_lists_and_block_tables():
    shape = SHAPES[0]
    case = random_case(10, **shape, rank=3).to("cuda")
    # Captured with nothing selected: no launch may depend on how much there was.
    case.topk.fill_(-1)
    graph = captured(case)
    for seed in range(50):
        other = random_case(seed, **shape, rank=3, absent=seed / 50)
        case.topk.copy_(other.topk)
        case.block_table.copy_(other.block_table)
        case.plan.fill_(POISON)
        graph.replay()
        assert_same_plan(other, case.plan.cpu(), call("reference", other))


def test_two_sizes_share_a_buffer_one_after_the_other():
    sizes = {"topk": 300, "world": 4, "context": 900, "reserved_requests": 4, "reserved_rows_per_request": 4}
    large = random_case(1, requests=4, rows_per_request=4, **sizes)
    small = random_case(2, requests=1, rows_per_request=3, **sizes)
    expected = [call("reference", case) for case in (large, small)]
    buffer = large.plan.to("cuda")
    on_gpu = [PlanCase(*case.to("cuda").args()[:2], buffer, *case.args()[3:]) for case in (large, small)]
    graphs = [captured(case) for case in on_gpu]
    for turn in (0, 1, 0, 1, 1, 0):
        graphs[turn].replay()
        assert_same_plan((large, small)[turn], buffer.cpu(), expected[turn])
        assert_same_plan((large, small)[1 - turn], run(on_gpu[1 - turn]), expected[1 - turn])


def test_two_buffers_on_two_streams():
    plans = [random_case(seed, **SHAPES[0]) for seed in (1, 2)]
    expected = [call("reference", case) for case in plans]
    on_gpu = [case.to("cuda") for case in plans]
    graphs = [captured(case) for case in on_gpu]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for case in on_gpu:
            case.plan.fill_(POISON)
        for graph, stream in zip(graphs, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for case, on_device, plan in zip(plans, on_gpu, expected, strict=True):
            assert_same_plan(case, on_device.plan.cpu(), plan)


def test_two_kernels_no_copy_no_allocation_no_synchronisation():
    case = random_case(4, **SHAPES[0]).to("cuda")
    op(*case.args())
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(*case.args())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        op(*case.args())
        torch.cuda.synchronize()
    on_device = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert on_device == ["_first_entries_kernel", "_union_kernel"]
