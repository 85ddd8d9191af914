"""Peers and the gather baseline: reported when missing, called as they expect, checked like everyone else."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from profiling import inputs, peers
from profiling.peers import FlashMLA, flashmla_arguments
from profiling.shapes import DecodeShape
from profiling.timing import Timing, time_contenders
from torch_sparse_mla import sparse_ckv_decode

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]

GATHER_UNDER_THE_INTERPRETER = """
import torch
from profiling import gather_baseline as gather
for record_bytes, topk in ((656, 37), (304, 16)):
    cache = torch.randint(256, (4, 8, record_bytes), dtype=torch.uint8)
    indices = torch.randint(32, (3, topk), dtype=torch.int32)
    sums = torch.full((3, gather.num_blocks(topk)), -1, dtype=torch.int32)
    gather.gather_records(cache, indices, sums)
    assert torch.equal(sums, gather.expected_sums(cache, indices)), record_bytes
    assert len(sums.unique()) > 1
print("gathered")
"""


def small_inputs(monkeypatch, shape: DecodeShape) -> inputs.DecodeInputs:
    monkeypatch.setitem(inputs.POOL_BYTES, "cpu", 2 << 20)
    monkeypatch.setitem(inputs.BLOCK_RECORDS, "cpu", 251)
    pool = inputs.RecordPool(CPU)
    return inputs.decode_inputs(shape, pool, pool.fill(shape.layout))


def fake_flash_mla(head_offset: int = 0) -> types.ModuleType:
    """A module with FlashMLA's signature that computes by our operator, with its limits on shapes."""
    module = types.ModuleType("flash_mla")
    module.get_mla_metadata = lambda: (object(), None)

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        metadata,
        *,
        softmax_scale,
        is_fp8_kvcache,
        indices,
        use_legacy,
        kv_format,
    ):
        requests, rows, heads, dim = q.shape
        assert heads in (64, 128) and indices.shape[-1] % 64 == 0 and indices.dtype == torch.int32
        assert k_cache.shape[1:] == (64, 1, {"V32": 656, "V32_NO_ROPE": 528}[kv_format])
        assert q.is_contiguous() and indices.is_contiguous() and head_dim_v == 512 and is_fp8_kvcache and use_legacy
        out, lse = sparse_ckv_decode(
            q.view(-1, heads, dim),
            k_cache.squeeze(2),
            indices.view(requests * rows, -1),
            softmax_scale=softmax_scale,
            layout={"V32": "fp8_ds_mla", "V32_NO_ROPE": "fp8_mla_nope"}[kv_format],
        )
        return out.roll(head_offset, 1).view(requests, rows, heads, 512), lse

    module.flash_mla_with_kvcache = flash_mla_with_kvcache
    return module


def flashmla_with(monkeypatch, module: types.ModuleType) -> FlashMLA:
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    return FlashMLA(torch.device("cuda"))


def test_missing_flashmla_is_a_reason(monkeypatch):
    def fail(name: str):
        raise OSError("undefined symbol: aoti_torch_x")

    monkeypatch.setattr(peers.importlib, "import_module", fail)
    reason = FlashMLA(torch.device("cuda")).unavailable()
    assert "undefined symbol" in reason and "pip install" in reason


def test_flashmla_on_the_cpu_is_a_reason():
    assert FlashMLA(CPU).unavailable() == "runs on CUDA only"


def test_flashmla_serves_fp8_layouts_only():
    peer = FlashMLA(CPU)
    assert peer.unsupported(DecodeShape(1, 16, 2048, "fp8_ds_mla")) is None
    assert "nvfp4_ds_mla" in peer.unsupported(DecodeShape(1, 16, 2048, "nvfp4_ds_mla"))


@pytest.mark.parametrize(
    ("heads", "topk", "served_heads", "served_topk"), [(8, 64, 64, 64), (64, 37, 64, 64), (96, 65, 128, 128)]
)
def test_flashmla_arguments_are_padded(monkeypatch, heads, topk, served_heads, served_topk):
    prepared = small_inputs(monkeypatch, DecodeShape(8, heads, topk, "fp8_ds_mla", rows_per_request=4))
    q, lists = flashmla_arguments(prepared)
    assert q.shape == (2, 4, served_heads, 576)
    assert lists.shape == (len(prepared.index_sets), 2, 4, served_topk)
    assert torch.equal(q.flatten(0, 1)[:, :heads], prepared.q)
    assert (q.norm(dim=-1) > 0).all()
    assert torch.equal(lists.flatten(1, 2)[..., :topk], prepared.index_sets)
    assert (lists[..., topk:] == -1).all()


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "fp8_mla_nope"])
def test_flashmla_contender_is_checked(monkeypatch, layout):
    shape = DecodeShape(4, 8, 40, layout, rows_per_request=4)
    prepared = small_inputs(monkeypatch, shape)
    right = flashmla_with(monkeypatch, fake_flash_mla()).prepare(prepared)
    outcome = time_contenders([right], len(prepared.index_sets), CPU)["flashmla"]
    assert isinstance(outcome, Timing) and right.details == {"padded_heads": 64}
    wrong = flashmla_with(monkeypatch, fake_flash_mla(head_offset=1)).prepare(prepared)
    assert "wrong result" in time_contenders([wrong], len(prepared.index_sets), CPU)["flashmla"]


def test_gather_reads_every_byte():
    run = subprocess.run(
        [sys.executable, "-c", GATHER_UNDER_THE_INTERPRETER],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout == "gathered\n", run.stderr
