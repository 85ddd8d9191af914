"""`Workspace`: sizes, reservation, lock; every misuse raises and says what to do."""

import gc
import itertools

import pytest
import torch

from torch_sparse_mla import (
    GatherPlan,
    LoopbackGroup,
    PageGeometry,
    Workspace,
    gather_capacity,
    lane_bytes,
    resident_bytes,
)
from torch_sparse_mla.gather.workspace import staged_lane_bytes

SIZES = {"layout": "fp8_mla_nope", "interleave": 4, "max_tokens": 60, "max_requests": 2, "max_rows": 16}
RESIDENT = {"resident_tokens": 100, "resident_requests": 3, "resident_layers": 2}
_names = itertools.count()


def frozen(page_size: int = 8) -> PageGeometry:
    geometry = PageGeometry()
    geometry.freeze(page_size)
    return geometry


def make_workspace(rank: int = 0, group: LoopbackGroup | None = None, name: str | None = None, **changes) -> Workspace:
    group = group or LoopbackGroup(1)
    name = f"workspace{next(_names)}" if name is None else name
    return Workspace(frozen(), group.rank(rank), name=name, **(SIZES | changes))


def test_a_lane_sized_by_the_provisional_page_is_short_by_the_published_bytes():
    """Depth 1: one staging copy and two gathered buffers of four ranks, 528 bytes a record."""
    provisional, final = (gather_capacity(524_288, 32, 4, 4, page_size) for page_size in (64, 2_304))
    short = staged_lane_bytes(final, 528, 4, 2) - staged_lane_bytes(provisional, 528, 4, 2)
    assert short == 128 * 528 * (1 + 2 * 4) == 608_256


def test_lane_bytes_are_what_is_allocated():
    workspace = make_workspace()
    workspace.reserve()
    workspace.lock()
    slot = workspace.slot()
    assert slot.gathered.shape == (workspace.sizes.gathered_records, 528)
    assert workspace.bytes == slot.gathered.nbytes + slot.plan.nbytes
    workspace.close()


def test_lane_bytes_count_the_slabs_of_a_gpu_channel():
    sizes = GatherPlan(2, 8, 64, 4, 4, 64)
    lane = lane_bytes(sizes, 37)
    assert (lane.gathered, lane.channel) == (256 * 37, 2 * 256 * 37)
    assert lane.total == lane.gathered + lane.plan + lane.channel
    assert lane_bytes(sizes, 37, "cpu").channel == 0
    assert lane_bytes(GatherPlan(2, 8, 64, 1, 4, 64), 37).channel == 0


@pytest.mark.gpu
def test_bytes_are_those_of_the_device():
    # What earlier tests left in cycles is not to be freed between the two readings.
    gc.collect()
    torch.cuda.synchronize()
    group, name = LoopbackGroup(2, "cuda"), f"workspace{next(_names)}"
    before = torch.cuda.memory_allocated()
    workspaces = [
        make_workspace(rank, group, name, max_tokens=100_000, max_rows=1024, device="cuda") for rank in range(2)
    ]
    for workspace in workspaces:
        workspace.reserve()
    allocated = torch.cuda.memory_allocated() - before
    predicted = sum(workspace.bytes for workspace in workspaces)
    # The allocator rounds a large block up to 2 MiB: slabs together, and of each rank a gathered buffer and a plan.
    assert predicted <= allocated < predicted + 5 * 2**21
    for workspace in workspaces:
        workspace.close()


def test_slots_are_one_for_each_micro_batch_and_lane():
    workspace = make_workspace()
    keys = [(0, "target"), (1, "target"), (0, "draft")]
    for key in keys:
        workspace.reserve(*key)
    workspace.lock()
    slots = [workspace.slot(*key) for key in keys]
    assert len({slot.gathered.data_ptr() for slot in slots}) == len({slot.channel.name for slot in slots}) == 3
    assert all(workspace.slot(*key) is slot for key, slot in zip(keys, slots, strict=True))
    assert workspace.bytes == 3 * lane_bytes(workspace.sizes, 528, "cpu").total
    workspace.close()


def test_nothing_is_sized_by_a_provisional_page():
    with pytest.raises(RuntimeError, match="is provisional; call freeze"):
        Workspace(PageGeometry(8), LoopbackGroup(1).rank(0), **SIZES)


def test_growth_after_lock_is_an_error():
    workspace = make_workspace()
    workspace.reserve()
    workspace.lock()
    workspace.lock()
    assert workspace.locked
    before = workspace.bytes
    with pytest.raises(RuntimeError, match=r"reserve\(1, 'target'\) after lock\(\).*reserve every slot at start-up"):
        workspace.reserve(1)
    with pytest.raises(RuntimeError, match=r"no slot for .* \(1, 'target'\); reserve it at start-up.*\(0, 'target'\)"):
        workspace.slot(1)
    assert workspace.bytes == before
    workspace.close()


def test_misuse_raises_and_says_what_to_do():
    workspace = make_workspace()
    with pytest.raises(RuntimeError, match=r"lock\(\) with no slot; call reserve"):
        workspace.lock()
    workspace.reserve()
    with pytest.raises(RuntimeError, match=r"slot\(\) before lock\(\); reserve every slot, then lock"):
        workspace.slot()
    with pytest.raises(ValueError, match="allowed: a slot that is not reserved yet"):
        workspace.reserve()
    for arguments, named in (((-1, "target"), "micro_batch"), (("0", "target"), "micro_batch"), ((0, ""), "lane")):
        with pytest.raises(ValueError, match=f"argument '{named}'"):
            workspace.reserve(*arguments)
    workspace.close()
    workspace.close()
    for call in (workspace.reserve, workspace.lock, workspace.slot):
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            call()


@pytest.mark.parametrize("shape, allowed", [((2, 16, 528), r"shape \[pages, 8,"), ((2, 8, 656), "528 bytes")])
def test_a_cache_that_does_not_fit_is_refused_when_it_is_bound(shape, allowed):
    workspace = make_workspace()
    with pytest.raises(ValueError, match=allowed):
        workspace.check_cache(torch.zeros(shape, dtype=torch.uint8))
    workspace.check_cache(torch.zeros(2, 8, 528, dtype=torch.uint8))


@pytest.mark.parametrize("change", [{"layout": "fp8"}, {"max_tokens": 0}, {"max_rows": 0}, {"interleave": 3}], ids=str)
def test_refuses_sizes_that_cannot_be(change):
    with pytest.raises(ValueError):
        make_workspace(**change)


def test_a_chunk_keeps_its_slot_alive():
    """The slot owns its memory: closing the workspace frees no buffer that something still holds."""
    workspace = make_workspace()
    workspace.reserve()
    workspace.lock()
    slot = workspace.slot()
    slot.gathered.fill_(7)
    workspace.close()
    assert (slot.gathered == 7).all()


def test_ranks_that_reserve_other_slots_are_told():
    group, name = LoopbackGroup(2), f"workspace{next(_names)}"
    first, second = make_workspace(0, group, name), make_workspace(1, group, name, max_tokens=600)
    first.reserve()
    with pytest.raises((ValueError, RuntimeError), match="allowed: equal arguments"):
        second.reserve()
    first.close()


def test_a_lane_has_resident_buffers_that_its_micro_batches_share():
    workspace = make_workspace(**RESIDENT)
    for key in ((0, "target"), (1, "target"), (0, "draft")):
        workspace.reserve(*key)
    workspace.lock()
    first, second, draft = (workspace.slot(*key) for key in ((0, "target"), (1, "target"), (0, "draft")))
    assert first.resident is second.resident and first.resident is not draft.resident
    assert first.resident_plan.data_ptr() != second.resident_plan.data_ptr()
    sizes = first.resident.sizes
    # One rank: 100 tokens, three runs of 4 beside them, in pages of 8.
    assert sizes.resident == 112 and sizes.capacity == workspace.sizes.capacity and not workspace.sizes.resident
    buffers = first.resident.buffers
    assert [tuple(buffer.shape) for buffer in buffers] == [(112, 528)] * 2
    assert resident_bytes(sizes, 528, 2) == sum(buffer.nbytes for buffer in buffers)
    slots = 3 * (first.gathered.nbytes + first.plan.nbytes + first.resident_plan.nbytes)
    assert workspace.bytes == slots + 2 * sum(buffer.nbytes for buffer in buffers)
    assert first.resident.residency.admit("request", 100) and not second.resident.residency.admit("another", 100)
    workspace.close()


def test_without_resident_sizes_there_are_no_resident_buffers():
    workspace = make_workspace()
    workspace.reserve()
    workspace.lock()
    assert workspace.slot().resident is None and workspace.slot().resident_plan is None
    workspace.close()


@pytest.mark.parametrize("name", RESIDENT)
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_refuses_resident_sizes_that_do_not_come_together(name, value):
    with pytest.raises(ValueError, match=f"argument '{name}'.*or none"):
        make_workspace(**RESIDENT | {name: value})
