"""The indexer's operators on the GPU in CUDA graphs: replays with other keys, positions and pages; real sizes."""

import dataclasses

import pytest
import torch

from .cases import POISON, decoded, every_form, expand, select_case, write_case

pytestmark = pytest.mark.gpu

write = torch.ops.torch_sparse_mla.c4_write_index_keys.default
select = torch.ops.torch_sparse_mla.c4_select.default
merge = torch.ops.torch_sparse_mla.c4_merge_pools.default


def captured(function) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@every_form
def test_select_and_merge_replay_with_other_inputs(form):
    """Captured where nothing is seen: no launch may depend on how much there is."""
    rows = ((0, 1_639), (0, 1_200), (1, 307), (2, 12))
    sizes = {"num_pools": 40, "lists": 2, "world": 2, "rank": 1, "page_size": 256}
    cases = [select_case(form, (410, 77, 3), rows, **sizes, seed=seed) for seed in range(4)]
    cases[2] = dataclasses.replace(cases[2], positions=[3, 1_000, -1, 12], row_requests=[0, 0, -1, 2])
    arguments = cases[0].args("cuda")
    topk = torch.empty(4, 163, dtype=torch.int32, device="cuda")
    counts = torch.empty(4, dtype=torch.int32, device="cuda")
    arguments[5].fill_(-1)

    def call() -> None:
        select(*arguments)
        merge(arguments[6], arguments[5], topk, counts)

    graph = captured(call)
    for turn in (0, 1, 2, 3, 2, 0):
        case = cases[turn]
        for target, source in zip(arguments[:6], case.args()[:6], strict=True):
            target.copy_(source)
        for output in (*arguments[6:8], topk, counts):
            output.view(torch.uint8).fill_(POISON)
        graph.replay()
        assert decoded(arguments[6].cpu()) == case.expected()
        for row, position in enumerate(case.positions):
            merged = expand([some[row] for some in case.expected()], position, 40)
            assert (topk[row].tolist(), counts[row].item()) == merged


@every_form
def test_write_replays_with_other_tokens(form):
    """A decode step of one token for each request, replayed for every position."""
    case = write_case(form, (90, 90), device="cuda")
    arguments = case.args([(0, 1), (0, 1)])
    graph = captured(lambda: write(*arguments))
    case.ring.view(torch.uint8).fill_(POISON)
    for position in range(90):
        for target, source in zip(arguments[:5], case.args([(position, position + 1)] * 2)[:5], strict=True):
            target.copy_(source)
        graph.replay()
    case.assert_pools([90, 90])


@pytest.mark.parametrize("rows, context", [(1, 131_072), (100, 32_768)])
def test_real_sizes(rows, context):
    """512 of all pools in the serving form, rows that share programs; a sample of rows against the model's scores."""
    count = context // 4
    case = select_case(
        "serving",
        (count,),
        tuple((0, context - 1 - 3 * row) for row in range(rows)),
        heads=32,
        num_pools=512,
        page_size=2_304,
        lists=3,
    )
    arguments = case.args("cuda")
    select(*arguments)
    found = decoded(arguments[6].cpu())
    for row in {0, rows // 2, rows - 1}:
        products = (case.values[row].double() @ case.keys[0].double().T).clamp(min=0)
        scores = (case.weights[row].double() @ products) * torch.tensor(case.scales[0], dtype=torch.float64)
        seen = (case.positions[row] + 1) // 4
        ranked = sorted(zip((-scores[:seen]).tolist(), range(seen), strict=True))[:512]
        best = sorted((pair for some in found for pair in some[row]), key=lambda pair: (-pair[0], pair[1]))[:512]
        assert [pool for _, pool in best] == [pool for _, pool in ranked]


def test_no_allocation_and_no_synchronisation():
    case = select_case("serving", (410, 77), ((0, 1_639), (1, 307)), num_pools=40)
    arguments = case.args("cuda")
    topk = torch.empty(2, 163, dtype=torch.int32, device="cuda")
    counts = torch.empty(2, dtype=torch.int32, device="cuda")
    given = write_case("serving", device="cuda").args([(0, 37), (0, 6), (0, 90)])

    def call() -> None:
        write(*given)
        select(*arguments)
        merge(arguments[6], arguments[5], topk, counts)

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
