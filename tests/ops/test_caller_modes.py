"""What a caller's process sets for PyTorch as a whole changes no bit: default dtype and device, autocast and others."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_sparse_mla as tsm

from ..dcp.cases import Model, Shape, close, make_ranks, select, step_lengths


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "bfloat16-default": lambda: default_dtype(torch.bfloat16),
    "float64-default": lambda: default_dtype(torch.float64),
    # No memory: whatever is made without a device, and used, fails.
    "meta-default": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "deterministic": deterministic,
}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def index(inputs: dict) -> list[torch.Tensor]:
    """Pooled keys, lists of the best pools, and the warm-up, in the serving form."""
    tsm.indexer.codec._kept_hadamard_matrix.cache_clear()
    ring = torch.zeros(1, 8, 2, 128, dtype=torch.bfloat16, device="cpu")
    pools = torch.zeros(1, 8448, dtype=torch.uint8, device="cpu")
    table = ints(0).view(1, 1)
    keys, gates = inputs["keys"], inputs["gates"]
    tsm.c4_write_index_keys(
        keys, gates, inputs["bias"], ints(0, len(keys)), ints(0), ints(0), table, ring, pools, page_size=256
    )
    q, weights = tsm.quantise_index_queries(inputs["index_q"], inputs["index_weights"])
    candidates = tsm.c4_select(q, weights, pools, table, ints(0), ints(len(keys) - 1), num_pools=4, page_size=256)
    tsm.warmup_c4_indexer(pools, heads=16, num_pools=4, page_size=256)
    return [ring, pools, q, weights, candidates, *tsm.c4_merge_pools(candidates, ints(len(keys) - 1))]


def attend(inputs: dict) -> list[torch.Tensor]:
    """Attention by the reference, and the warm-up with its own tensors."""
    tsm.warmup_sparse_ckv_decode(2, "fp8_ds_mla", device="cpu", with_sink=True)
    q, cache, indices = inputs["q"], inputs["cache"], inputs["indices"]
    return [*tsm.sparse_ckv_decode_peers(q, [cache], indices, softmax_scale=0.06, layout="fp8_ds_mla")]


def gather(inputs: dict) -> list[torch.Tensor]:
    sizes = tsm.GatherPlan(requests=2, rows=8, capacity=32, world=2, interleave=2, page_size=8)
    plan = tsm.c4_plan_gather([20, 9], [5, 3], ints(0, 1, 2, 3).view(2, 2), sizes, rank=1)
    return [view(plan) for view in (sizes.owner_offsets, sizes.starts, sizes.causal_lengths, sizes.owned_slots)]


def decode_step(inputs: dict, strategy: str) -> list[torch.Tensor]:
    """A Full layer on two ranks, channels and plans included."""
    ranks = make_ranks(inputs["model"].shape, strategy)
    results = full_layer(inputs, ranks)
    close(ranks)
    return results


def full_layer(inputs: dict, ranks: list[tsm.DcpSparseDecode]) -> list[torch.Tensor]:
    model, topk, lengths = inputs["model"], inputs["topk"], inputs["lengths"]
    parts = inputs["model_q"].chunk(model.shape.world, 1)
    calls = [
        rank.full_steps(part.contiguous(), caches[0], topk, model.block_table, lengths)
        for rank, part, caches in zip(ranks, parts, model.caches, strict=True)
    ]
    return [tensor for result in tsm.run_loopback(calls) for tensor in result]


RUNS = {
    "index": index,
    "attend": attend,
    "gather": gather,
    "owner_merge": lambda inputs: decode_step(inputs, "owner_merge"),
    "exchange": lambda inputs: decode_step(inputs, "exchange"),
}


def make_inputs(generator: torch.Generator) -> dict:
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    model = Model(Shape(world=2), generator)
    shape = model.shape
    tokens = torch.arange(shape.tokens).expand(shape.requests, -1)
    for layer in range(1 + shape.shared_layers):
        model.write(layer, tokens)
    lengths = step_lengths(shape, 0)
    return {
        "keys": randn(40, 128).bfloat16(),
        "gates": randn(40, 128).bfloat16(),
        "bias": randn(4, 128),
        "index_q": randn(1, 16, 128).bfloat16(),
        "index_weights": randn(1, 16),
        "q": randn(2, 2, 576).bfloat16(),
        "cache": model.whole[0],
        "indices": torch.randint(0, shape.tokens, (2, 16), dtype=torch.int32, generator=generator),
        "model": model,
        "model_q": model.queries(),
        "topk": select(shape, lengths, generator),
        "lengths": lengths,
    }


def test_operators_record_nothing_for_autograd():
    """Else a buffer that is written in every step would hold on to all steps before."""
    parts = torch.randn(2, 4, 3, 512, requires_grad=True)
    lse = torch.randn(2, 4, 3, requires_grad=True)
    expected = tsm.merge_partial_attention(parts.detach(), lse.detach())
    for required in (False, True):
        results = [torch.zeros(4, 3, 512, requires_grad=required), torch.zeros(4, 3, requires_grad=required)]
        for _ in range(2):
            torch.ops.torch_sparse_mla.merge_partial_attention(parts, lse, None, *results)
        assert all(result.is_leaf and result.requires_grad == required for result in results)
        assert all(torch.equal(result.detach(), value) for result, value in zip(results, expected, strict=True))


@pytest.mark.parametrize("made, used", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_channels_outlive_the_mode_that_they_were_made_in(made, used, generator):
    inputs = make_inputs(generator)
    expected = decode_step(inputs, "exchange_bulk")
    model = inputs["model"]
    with made():
        ranks = make_ranks(model.shape, "exchange_bulk")
    with used():
        assert all(map(torch.equal, full_layer(inputs, ranks), expected))
    close(ranks)


def test_queries_that_are_traced_first_leave_nothing_behind():
    """The transform's matrix is kept for later calls: neither a fake one nor a real one among fakes."""
    q, weights = torch.randn(2, 16, 128), torch.randn(2, 16)
    expected = tsm.quantise_index_queries(q, weights)
    tsm.indexer.codec._kept_hadamard_matrix.cache_clear()
    with FakeTensorMode() as mode:
        tsm.quantise_index_queries(mode.from_tensor(q), mode.from_tensor(weights))
    for run in (tsm.quantise_index_queries, make_fx(tsm.quantise_index_queries, tracing_mode="symbolic")(q, weights)):
        assert all(map(torch.equal, run(q, weights), expected))
    assert tsm.quantise_index_queries(q.to("meta"), weights.to("meta"))[0].shape == q.shape


# Steps take longest, and differ by the tensors that they make.
CASES = [(mode, run) for mode in MODES for run in RUNS if "default" in mode or run not in ("owner_merge", "exchange")]


@pytest.mark.parametrize("mode, run", CASES)
def test_a_callers_mode_changes_no_bit(mode, run, generator):
    inputs = make_inputs(generator)
    expected = RUNS[run](inputs)
    with MODES[mode]():
        got = RUNS[run](inputs)
    for place, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert (a.dtype, a.device) == (b.dtype, b.device), f"result {place}"
        assert torch.equal(a, b), f"result {place}"
