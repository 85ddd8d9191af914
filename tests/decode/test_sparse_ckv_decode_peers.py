"""`sparse_ckv_decode_peers`: attention over several caches as if they were one."""

import dataclasses

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import LAYOUTS

from .cases import (
    DecodeCase,
    assert_accurate,
    assert_same_bits,
    call,
    decode,
    device_of,
    every_implementation,
    make_case,
    tolerance_of,
)
from .peer_cases import PeerCase, split_cache
from .rejections import assert_untouched, expect_rejection, snapshot

OP = "sparse_ckv_decode_peers"
BF16, FP32 = torch.bfloat16, torch.float32


def decode_peers(implementation: str, case: PeerCase) -> tuple[torch.Tensor, torch.Tensor]:
    moved = case.to(device_of(implementation))
    call(implementation, OP, moved.args())
    return moved.out.cpu(), moved.lse.cpu()


def check(implementation: str, case: DecodeCase, owners: int) -> None:
    """Accurate, and bit for bit what one cache gives by the same kind of kernel."""
    out, lse = decode_peers(implementation, split_cache(case, owners))
    assert_accurate(case, out, lse, tolerance_of(implementation, case.q.dtype, case.out.dtype))
    # The operator itself: on Hopper GPUs and on CPUs it may run native kernels for one cache, which round otherwise.
    one = "triton-cuda" if device_of(implementation) == "cuda" else "reference"
    assert_same_bits((out, lse), decode(one, case))


@every_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_one_cache_for_every_layout(implementation, layout):
    check(implementation, make_case(rows=3, heads=5, topk=130, page_size=16, layout=layout), 3)


@every_implementation
@pytest.mark.parametrize("owners", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_matches_one_cache(implementation, owners, dtype):
    case = make_case(rows=4, heads=3, topk=96, page_size=8, dtype=dtype, lengths=[96, 0, 7, 64], sink=[0.1, 9.0, -3.0])
    check(implementation, case, owners)


@every_implementation
def test_many_rows_and_fixed_splits(implementation):
    check(implementation, make_case(rows=40, heads=16, topk=64, page_size=4), 4)
    check(implementation, make_case(rows=2, heads=16, topk=600, batch_invariant=True), 4)


@every_implementation
def test_entries_beyond_the_last_cache_are_absent(implementation):
    case = make_case(rows=2, heads=2, topk=64, page_size=16)
    slots = 3 * split_cache(case, 3).caches[0].shape[0] * 16

    def edit(indices):
        indices[0, :3] = torch.tensor([slots, 2**31 - 1, -(2**31)])
        indices[1] = -1

    case = make_case(rows=2, heads=2, topk=64, page_size=16, edit_indices=edit)
    # What the whole cache lacks is poison in the last of the three: nobody names it.
    edited = split_cache(case, 3)
    out, lse = decode_peers(implementation, edited)
    assert_accurate(case, out, lse, tolerance_of(implementation, BF16, BF16))
    assert not out[1].any() and torch.isneginf(lse[1]).all()


@every_implementation
def test_no_pages_and_no_rows(implementation):
    case = split_cache(make_case(rows=2, heads=2, topk=4), 2)
    empty = dataclasses.replace(case, caches=[cache[:0] for cache in case.caches])
    out, lse = decode_peers(implementation, empty)
    assert not out.any() and torch.isneginf(lse).all()
    decode_peers(implementation, split_cache(make_case(rows=0, heads=2, topk=4), 2))


@pytest.mark.parametrize("owners", [2, 8])
def test_opcheck(owners):
    case = split_cache(make_case(topk=200, page_size=8, lengths=[200, 7], sink=[0.1, 0.2, 0.3]), owners)
    zeros = {name: torch.zeros_like(getattr(case, name)) for name in ("out", "lse", "workspace")}
    overload = torch.ops.torch_sparse_mla.sparse_ckv_decode_peers.default
    torch.library.opcheck(overload, dataclasses.replace(case, **zeros).args())


def test_compiles_into_one_graph():
    case = split_cache(make_case(topk=64, page_size=8, dtype=FP32), 3)

    def attend(q, caches, indices):
        return torch_sparse_mla.sparse_ckv_decode_peers(
            q, caches, indices, softmax_scale=case.softmax_scale, layout=case.layout
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(case.q, case.caches, case.indices), attend(case.q, case.caches, case.indices))


@pytest.mark.gpu
def test_replays_follow_records_and_indices():
    case = split_cache(make_case(rows=4, heads=16, topk=200, page_size=16), 4).to("cuda")
    torch.ops.torch_sparse_mla.sparse_ckv_decode_peers(*case.args())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.torch_sparse_mla.sparse_ckv_decode_peers(*case.args())
    for seed in (1, 2, 3):
        other = split_cache(make_case(rows=4, heads=16, topk=200, page_size=16, seed=seed), 4)
        case.indices.copy_(other.indices)
        for cache, values in zip(case.caches, other.caches, strict=True):
            cache.copy_(values)
        case.out.fill_(torch.nan)
        graph.replay()
        moved = dataclasses.replace(other.to("cuda"), q=case.q)
        torch.ops.torch_sparse_mla.sparse_ckv_decode_peers(*moved.args())
        assert_same_bits((case.out, case.lse), (moved.out, moved.lse))


@pytest.mark.gpu
def test_caches_far_apart_and_beyond_two_gigabytes():
    """Distances in both directions, and a page that lies beyond 2 ** 31 bytes of its cache."""
    record, page_size = LAYOUTS["fp8_ds_mla"].record_bytes, 64
    pages = 2**31 // (record * page_size) + 2
    case = make_case(rows=1, heads=16, topk=64, page_size=page_size)
    caches = [torch.zeros(pages, page_size, record, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for order in (caches, caches[::-1]):
        for cache in caches:
            cache[-3:].zero_()
        order[1][-3:] = case.cache.cuda()
        indices = (case.indices + (2 * pages - 3) * page_size).cuda()
        out, lse = torch_sparse_mla.sparse_ckv_decode_peers(
            case.q.cuda(), order, indices, softmax_scale=case.softmax_scale, layout=case.layout
        )
        assert_accurate(case, out.cpu(), lse.cpu(), 3e-3)


WRONG = {
    "none": ("caches", lambda case: {"caches": []}, "1 to 8"),
    "nine": ("caches", lambda case: {"caches": case.caches[:1] * 9}, "1 to 8"),
    "shape": ("caches", lambda case: {"caches": [case.caches[0], case.caches[1][:1]]}, "those of the first"),
    "stride": ("caches", lambda case: {"caches": [case.caches[0], case.caches[1].clone()]}, "those of the first"),
    "dtype": (r"caches\[1\]", lambda case: {"caches": [case.caches[0], case.caches[1].char()]}, "dtype uint8"),
    "width": (r"caches\[0\]", lambda case: {"caches": [x[..., :640] for x in case.caches]}, "656] for layout"),
    "over-out": ("out", lambda case: {"out": over(case)}, "memory of its own"),
    "indices": ("indices", lambda case: {"indices": case.indices.long()}, "dtype int32"),
    "q": ("q", lambda case: {"q": case.q[..., :512]}, "576] for layout"),
}


def over(case: PeerCase) -> torch.Tensor:
    """`out` on top of the second cache."""
    return case.caches[1].view(-1)[: case.out.numel() * 2].view(BF16).view(case.out.shape)


@every_implementation
@pytest.mark.parametrize("wrong", WRONG)
def test_rejects(implementation, wrong):
    argument, change, allowed = WRONG[wrong]
    case = split_cache(make_case(topk=64, page_size=8), 2)
    case = (
        dataclasses.replace(case, caches=[cache.contiguous() for cache in case.caches]) if wrong == "over-out" else case
    )
    if wrong == "stride":
        case = dataclasses.replace(case, caches=[case.caches[0], case.caches[1].contiguous()])
    case = case.to(device_of(implementation))
    case = dataclasses.replace(case, **change(case))
    before = snapshot(case)
    with expect_rejection(OP, argument, allowed):
        call(implementation, OP, case.args())
    assert_untouched(case, before)


def test_rejects_more_slots_than_indices_can_name():
    case = split_cache(make_case(topk=64, page_size=64), 2)
    pages = 2**30 // 64 + 1
    caches = [torch.empty(pages, 64, 656, dtype=torch.uint8, device="meta") for _ in range(2)]
    moved = dataclasses.replace(case.to("meta"), caches=caches)
    with expect_rejection(OP, "caches", "which int32 indices can name"):
        torch.ops.torch_sparse_mla.sparse_ckv_decode_peers(*moved.args())


@every_implementation
def test_checked_mode_counts_the_slots_of_all_caches(implementation, monkeypatch):
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    case = split_cache(make_case(topk=64, page_size=16), 3).to(device_of(implementation))
    call(implementation, OP, case.args())
    slots = 3 * case.caches[0].shape[0] * 16
    case.indices[1, 5] = slots
    with expect_rejection(OP, "indices", f"-1 or a slot in 0..{slots - 1}"):
        call(implementation, OP, case.args())
