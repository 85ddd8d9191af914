"""The decode operators under `torch.compile`: opcheck, fakes, results, dynamic rows, and the graphs that remain."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_sparse_mla
from torch_sparse_mla import LAYOUTS

from .cases import DecodeCase, assert_same_bits, make_case
from .compiled_graphs import recording_backend

ops = torch.ops.torch_sparse_mla


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    torch._dynamo.reset()


def merge_args(partials: int = 3, rows: int = 2) -> tuple:
    heads = 4
    return (
        torch.randn(partials, rows, heads, 512),
        torch.randn(partials, rows, heads),
        torch.randn(heads),
        torch.zeros(rows, heads, 512),
        torch.zeros(rows, heads),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"topk": 200, "lengths": [200, 7], "sink": [0.1, 0.2, 0.3]},
        {"topk": 40, "layout": "nvfp4_mla_nope", "dtype": torch.float16},
        {"topk": 300, "batch_invariant": True, "layout": "bf16_mla"},
        {"rows": 0, "topk": 40},
    ],
    ids=["all-arguments", "one-split", "batch-invariant", "no-rows"],
)
def test_sparse_ckv_decode_opcheck(options):
    torch.library.opcheck(ops.sparse_ckv_decode.default, finite_outputs(make_case(**options)).args())


def finite_outputs(case: DecodeCase) -> DecodeCase:
    """opcheck compares what a call leaves behind, and NaN equals nothing: start from zeros."""
    zeros = {name: torch.zeros_like(getattr(case, name)) for name in ("out", "lse", "workspace")}
    return dataclasses.replace(case, **zeros)


@pytest.mark.parametrize("sink", [True, False])
def test_merge_partial_attention_opcheck(sink):
    args = merge_args()
    torch.library.opcheck(ops.merge_partial_attention.default, args if sink else (*args[:2], None, *args[3:]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_accept_fake_cuda_tensors(layout):
    """What a compiler needs on a machine without a GPU. Every layout, since each has its own query width."""
    case = make_case(layout=layout, topk=200, lengths=[200, 7], sink=[0.1, 0.2, 0.3])
    with FakeTensorMode():
        fakes = {
            name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            for name, tensor in case.tensors().items()
        }
        assert ops.sparse_ckv_decode(*dataclasses.replace(case, **fakes).args()) is None
        out, lse = decode_publicly(*dataclasses.replace(case, **fakes).args()[:5], case.softmax_scale, layout)
        assert (out.shape, out.dtype, out.device.type) == (case.out.shape, case.out.dtype, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == (case.lse.shape, case.lse.dtype, "cuda")
        merged, _ = torch_sparse_mla.merge_partial_attention(out.unsqueeze(0), lse.unsqueeze(0))
        assert (merged.shape, merged.stride()) == (out.shape, out.stride())


def decode_publicly(q, cache, indices, lengths, sink, softmax_scale, layout, batch_invariant=False):
    return torch_sparse_mla.sparse_ckv_decode(
        q,
        cache,
        indices,
        lengths=lengths,
        sink=sink,
        softmax_scale=softmax_scale,
        layout=layout,
        batch_invariant=batch_invariant,
    )


def decode_two_parts(q, cache, indices, lengths, sink, softmax_scale, layout, batch_invariant=False):
    """Two halves of the list, then their merge, all with outputs that the function allocates."""
    half = indices.shape[1] // 2
    parts = [
        decode_publicly(q, cache, part, None, None, softmax_scale, layout, batch_invariant)
        for part in (indices[:, :half], indices[:, half:])
    ]
    out, lse = (torch.stack(values) for values in zip(*parts, strict=True))
    return torch_sparse_mla.merge_partial_attention(out, lse, sink=sink)


@pytest.mark.parametrize("backend, function", [("aot_eager", decode_two_parts), ("inductor", decode_publicly)])
def test_compiled_results_equal_eager(backend, function):
    case = make_case(topk=200, lengths=[200, 7], sink=[0.1, 0.2, 0.3])
    inputs = (*case.args()[:5], case.softmax_scale, case.layout)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert_same_bits(compiled(*inputs), function(*inputs))


def decode_into(q, cache, indices, lengths, sink, out, lse, workspace):
    ops.sparse_ckv_decode(q, cache, indices, lengths, sink, out, lse, workspace, 0.04, "fp8_ds_mla")
    return out, lse


def compiled_for_rows(function: Callable, arguments_of: Callable[[DecodeCase], tuple]) -> int:
    """Compile once with the number of rows dynamic, call at several, compare with eager; the number of graphs."""
    few = make_case(rows=3, topk=200, lengths=[200, 7, 0], sink=[0.1, 0.2, 0.3], softmax_scale=0.04)
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(function, fullgraph=True, backend=recording_backend(graphs))
    for rows in (3, 17, 150):
        case = few.with_rows([row % 3 for row in range(rows)])
        for tensor in (case.q, case.indices, case.lengths, case.out, case.lse):
            torch._dynamo.mark_dynamic(tensor, 0)
        # A copy of what the compiled call gives: eager writes the same buffers.
        given = tuple(tensor.clone() for tensor in compiled(*arguments_of(case)))
        assert_same_bits(given, function(*arguments_of(case)))
    return len(graphs)


def test_one_graph_serves_every_number_of_rows():
    workspace = torch.zeros(2**20, dtype=torch.uint8)
    assert compiled_for_rows(decode_into, lambda case: (*case.args()[:7], workspace)) == 1


def test_two_graphs_serve_every_number_of_rows_where_the_workspace_is_allocated_within():
    """One for the rows whose lists are split, one for those that need no workspace."""
    assert compiled_for_rows(decode_publicly, lambda case: (*case.args()[:5], case.softmax_scale, case.layout)) == 2


def test_compiled_code_rejects_at_trace_time():
    case = make_case()
    inputs = (*case.args()[:5], case.softmax_scale, "fp9_mla")
    with pytest.raises(Exception, match=r"torch_sparse_mla::sparse_ckv_decode: argument 'layout': got 'fp9_mla'"):
        torch.compile(decode_publicly, fullgraph=True, backend="aot_eager")(*inputs)


def test_fakes_refuse_a_workspace_that_is_too_small():
    case = make_case(topk=200)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in case.tensors().items()}
        fakes["workspace"] = torch.empty(len(case.workspace) - 1, dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"argument 'workspace': got .* bytes; allowed: at least"):
            ops.sparse_ckv_decode(*dataclasses.replace(case, **fakes).args())
