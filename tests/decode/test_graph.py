"""The decode operators in CUDA graphs: what replay reads anew, what capture must not freeze, and no allocation.

Outputs are poisoned with NaN before every replay, so that a result left over from before cannot pass.
"""

import dataclasses

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla.decode import triton_kernels

from .cases import DecodeCase, assert_accurate, assert_same_bits, call, decode, make_case, random_records
from .test_merge_partial_attention import make_partials, merge, merge_oracle

pytestmark = pytest.mark.gpu

SHAPE = {"rows": 5, "heads": 16, "topk": 2051, "sink": [0.2] * 16}
FULL_LENGTHS = [2051, 700, 1, 0, 2050]


class Captured:
    """A graph of one call on static buffers."""

    def __init__(self, case: DecodeCase) -> None:
        self.case = case.to("cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        call("op-cuda", "sparse_ckv_decode", self.case.args())

    def set(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            getattr(self.case, name).copy_(value)

    def poison(self) -> None:
        self.case.out.fill_(torch.nan)
        self.case.lse.fill_(torch.nan)
        self.case.workspace.fill_(0xFF)

    def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.poison()
        self.graph.replay()
        return self.case.out.cpu(), self.case.lse.cpu()

    def eager(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.poison()
        self.run()
        return self.case.out.cpu(), self.case.lse.cpu()


every_batch_mode = pytest.mark.parametrize("batch_invariant", [False, True])


@every_batch_mode
def test_replay_equals_eager(batch_invariant):
    case = make_case(**SHAPE, lengths=FULL_LENGTHS, batch_invariant=batch_invariant)
    captured = Captured(case)
    expected = captured.eager()
    assert_accurate(case, *expected, 3e-3)
    for _ in range(3):
        assert_same_bits(captured.replay(), expected)


@every_batch_mode
def test_captures_short_lengths_and_replays_long_ones(batch_invariant):
    """No split count or grid may come from a length that was live at capture."""
    case = make_case(**SHAPE, lengths=FULL_LENGTHS, batch_invariant=batch_invariant)
    captured = Captured(dataclasses.replace(case, lengths=torch.ones(5, dtype=torch.int32)))
    captured.set(lengths=case.lengths)
    replayed = captured.replay()
    assert_accurate(case, *replayed, 3e-3)
    assert_same_bits(replayed, captured.eager())


def test_captures_padded_rows_and_replays_live_ones():
    case = make_case(**SHAPE, lengths=FULL_LENGTHS)
    captured = Captured(dataclasses.replace(case, lengths=torch.zeros(5, dtype=torch.int32)))
    out, lse = captured.replay()
    assert torch.equal(out, torch.zeros_like(out)) and torch.isneginf(lse).all()
    captured.set(lengths=case.lengths)
    assert_accurate(case, *captured.replay(), 3e-3)
    captured.set(lengths=torch.tensor([7, 0, 0, -1, 0]))
    out, lse = captured.replay()
    assert torch.isneginf(lse[1:]).all() and torch.equal(out[1:], torch.zeros_like(out[1:]))
    assert torch.isfinite(out[0]).all()


def test_replay_reads_indices_queries_sink_and_records_anew():
    captured = Captured(make_case(**SHAPE, lengths=FULL_LENGTHS))
    for seed in (1, 2, 3):
        other = make_case(
            **{**SHAPE, "sink": [0.1 * seed] * 16}, lengths=FULL_LENGTHS[seed:] + FULL_LENGTHS[:seed], seed=seed
        )
        captured.set(**{name: getattr(other, name) for name in ("q", "cache", "indices", "lengths", "sink")})
        replayed = captured.replay()
        assert_accurate(other, *replayed, 3e-3)
        assert_same_bits(replayed, captured.eager())


def test_replay_sees_one_rewritten_record():
    case = make_case(**SHAPE, lengths=FULL_LENGTHS)
    captured = Captured(case)
    before = captured.replay()
    slot = int(case.indices[2, 0])
    record = random_records(1, case.layout, torch.Generator().manual_seed(9))[0]
    for cache in (case.cache, captured.case.cache):
        cache[slot // 64, slot % 64] = record.to(cache.device)
    out, lse = captured.replay()
    assert_accurate(case, out, lse, 3e-3)
    assert not torch.equal(out[2], before[0][2])


def test_two_graphs_with_workspaces_of_their_own_interleave():
    first, second = (Captured(make_case(**SHAPE, lengths=FULL_LENGTHS, seed=seed)) for seed in (1, 2))
    expected = [captured.eager() for captured in (first, second)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(5):
        for captured, stream in zip((first, second), streams, strict=True):
            captured.poison()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                captured.graph.replay()
        for captured, stream, bits in zip((first, second), streams, expected, strict=True):
            torch.cuda.current_stream().wait_stream(stream)
            assert_same_bits((captured.case.out.cpu(), captured.case.lse.cpu()), bits)


def test_two_sizes_share_a_workspace_one_after_the_other():
    """As a dispatcher replays padded sizes: large, small, large, with an eager call between."""
    large = make_case(**SHAPE, lengths=FULL_LENGTHS, batch_invariant=True)
    small = large.with_rows([1, 0])
    shared = torch.full((large.workspace.numel(),), 0xFF, dtype=torch.uint8, device="cuda")
    graphs = [Captured(case) for case in (large, small)]
    for captured in graphs:
        captured.case = dataclasses.replace(captured.case, workspace=shared)
        captured.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured.graph):
            captured.run()
    expected = [decode("op-cuda", case) for case in (large, small)]
    for turn in (0, 1, 0, 0, 1):
        assert_same_bits(graphs[turn].replay(), expected[turn])
        assert_same_bits(graphs[1 - turn].eager(), expected[1 - turn])


@every_batch_mode
@pytest.mark.parametrize("topk", [64, 2051])
def test_allocates_nothing_when_buffers_are_given(topk, batch_invariant):
    case = make_case(rows=3, heads=16, topk=topk, lengths=[topk, 5, 0], batch_invariant=batch_invariant).to("cuda")
    call("op-cuda", "sparse_ckv_decode", case.args())
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call("op-cuda", "sparse_ckv_decode", case.args())
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_does_not_synchronise():
    case = make_case(**SHAPE, lengths=FULL_LENGTHS).to("cuda")
    call("op-cuda", "sparse_ckv_decode", case.args())
    torch.cuda.set_sync_debug_mode("error")
    try:
        call("op-cuda", "sparse_ckv_decode", case.args())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_merge_replays_with_other_partials():
    partial_out, partial_lse = (tensor.cuda() for tensor in make_partials(7))
    out = torch.empty(partial_out.shape[1:], device="cuda")
    lse = torch.empty(partial_lse.shape[1:], device="cuda")
    args = (partial_out, partial_lse, None, out, lse)
    call("op-cuda", "merge_partial_attention", args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call("op-cuda", "merge_partial_attention", args)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call("op-cuda", "merge_partial_attention", args)
    for seed in (1, 2, 3):
        other_out, other_lse = make_partials(7, seed=seed)
        other_lse[seed, 1] = -torch.inf
        other_lse[:, 2] = -torch.inf
        partial_out.copy_(other_out)
        partial_lse.copy_(other_lse)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_same_bits((out.cpu(), lse.cpu()), merge("op-cuda", other_out, other_lse))
        expected_out, _ = merge_oracle(other_out, other_lse)
        torch.testing.assert_close(out.cpu().double(), torch.from_numpy(expected_out), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16_mla_nope", "nvfp4_mla_nope"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_batch_mode
def test_nothing_is_compiled_after_warmup(layout, dtype, batch_invariant):
    """Any number of rows, list lengths, page sizes and caches; float32 queries run on Triton's kernel on every GPU."""
    torch_sparse_mla.warmup_sparse_ckv_decode(5, layout, q_dtype=dtype, batch_invariant=batch_invariant)
    before = num_compiled()
    for rows, topk, page_size in ((1, 1, 1), (2, 130, 64), (15, 2051, 16), (16, 640, 64), (300, 96, 3)):
        settings = {"rows": rows, "heads": 5, "topk": topk, "page_size": page_size, "lengths": [topk] * rows}
        decode("op-cuda", make_case(layout=layout, dtype=dtype, batch_invariant=batch_invariant, **settings))
    assert num_compiled() == before


def num_compiled() -> int:
    kernels = (triton_kernels._sparse_ckv_decode_kernel, triton_kernels._merge_partial_attention_kernel)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
