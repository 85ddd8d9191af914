"""Names of modes, and what operators declare."""

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import SPLITTING_OPS, CUDAGraphMode, GraphSupport, graph_support
from torch_sparse_mla._ops import OPS
from torch_sparse_mla.graphs.modes import least_support, operators_of

DECODE = "torch_sparse_mla::sparse_ckv_decode"


@pytest.mark.parametrize(
    ("name", "uniform", "mixed"),
    [
        ("NONE", "none", "none"),
        ("PIECEWISE", "piecewise", "piecewise"),
        ("FULL", "full", "full"),
        ("FULL_DECODE_ONLY", "full", "none"),
        ("FULL_AND_PIECEWISE", "full", "piecewise"),
    ],
)
def test_modes_say_how_batches_run(name, uniform, mixed):
    mode = CUDAGraphMode.parse(name.lower())
    assert mode is CUDAGraphMode[name] is CUDAGraphMode.parse(mode)
    assert (mode.runtime(True), mode.runtime(False)) == (uniform, mixed)
    assert mode.has_full == ("full" in (uniform, mixed))
    assert mode.has_pieces == ("piecewise" in (uniform, mixed))


@pytest.mark.parametrize("given", ["full_graph", "", None, 2, True])
def test_refuses_other_modes(given):
    allowed = "NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE"
    with pytest.raises(ValueError, match=f"mode: got {given!r}; allowed: {allowed}"):
        CUDAGraphMode.parse(given)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_operator_declares_its_support(op):
    assert graph_support(op.qualified_name) is op.graph_support
    assert isinstance(op.graph_support, GraphSupport)
    # What may not be captured has to be split at.
    assert op.graph_support != GraphSupport.NEVER or op.qualified_name in SPLITTING_OPS


def test_support_of_other_operators_is_theirs_to_declare():
    assert graph_support("aten::mm") == GraphSupport.ALWAYS
    assert graph_support("aten::mm", {"aten::mm": GraphSupport.NEVER}) == GraphSupport.NEVER
    for given in ("torch_sparse_mla::decode", "sparse_ckv_decode", "decode", ""):
        allowed = "allowed: a qualified name; 'torch_sparse_mla::' and one of write_ckv_records"
        with pytest.raises(ValueError, match=f"op: got '{given}'; {allowed}"):
            graph_support(given)


def test_the_least_support_counts():
    supports = {"a::b": GraphSupport.UNIFORM_BATCH, "a::c": GraphSupport.UNIFORM_SINGLE_TOKEN}
    assert least_support([DECODE, "a::b", "a::c"], supports) == (GraphSupport.UNIFORM_SINGLE_TOKEN, "a::c")
    assert least_support([DECODE], supports) == (GraphSupport.ALWAYS, None)
    assert least_support([], supports) == (GraphSupport.ALWAYS, None)


def test_operators_of_a_graph_and_its_submodules():
    def inner(x):
        return torch.ops.aten.relu(x)

    def outer(x):
        return torch.ops.aten.neg.default(inner(x))

    graph = torch.fx.symbolic_trace(outer)
    assert operators_of(graph) == ["aten::relu", "aten::neg"]


def test_public_names_are_exported():
    for name in ("compile", "CUDAGraphMode", "GraphSupport", "graph_support", "CompiledStep", "GraphPool"):
        assert name in torch_sparse_mla.__all__
