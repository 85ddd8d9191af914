"""FX splitting: the same calls in the same order, with the same results."""

import pytest
import torch

from torch_sparse_mla import SPLITTING_OPS
from torch_sparse_mla.graphs import split_graph
from torch_sparse_mla.graphs.modes import operator_name
from torch_sparse_mla.graphs.splitting import describe

from .cases import decode, decode_arguments, four_layers


def traced(function, *arguments) -> torch.fx.GraphModule:
    """The graph that Dynamo gives to a backend."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    (graph,) = graphs
    return graph


def calls_in_order(graph: torch.fx.GraphModule) -> list[str]:
    """Names of all calls, submodules opened where they are called."""
    calls = []
    for node in graph.graph.nodes:
        if node.op == "call_module":
            calls += calls_in_order(graph.get_submodule(node.target))
        elif node.op in ("call_function", "call_method"):
            calls.append(operator_name(node) or str(getattr(node.target, "__name__", node.target)))
    return calls


def without_getitem(calls: list[str]) -> list[str]:
    """A piece with several results is a tuple, whose elements the outer graph takes."""
    return [call for call in calls if call != "getitem"]


def test_splits_at_operators_and_nowhere_else():
    graph = traced(decode, *decode_arguments())
    _, pieces = split_graph(graph, SPLITTING_OPS)
    assert [piece.split for piece in pieces] == [None, "torch_sparse_mla::sparse_ckv_decode", None]
    assert pieces[0].calls() == ["mul"]
    assert pieces[1].calls() == ["torch_sparse_mla::sparse_ckv_decode"]


@pytest.mark.parametrize("world", [1, 2])
def test_four_layers_keep_their_calls_and_results(world):
    with four_layers(world=world) as step:
        expected = step.run(*step.inputs)
        graph = traced(step.run, *step.inputs)
        split, pieces = split_graph(graph, SPLITTING_OPS)
        assert without_getitem(calls_in_order(split)) == without_getitem(calls_in_order(graph))
        assert sum(piece.split is not None for piece in pieces) == 4 * world
        placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        assert [node.name for node in split.graph.nodes if node.op == "placeholder"] == placeholders
        again = torch.compile(step.run, backend=lambda g, inputs: split_graph(g, SPLITTING_OPS)[0].forward)
        torch._dynamo.reset()
        torch.testing.assert_close(again(*step.inputs), expected, rtol=0, atol=0)


def test_no_splitting_operator_makes_one_piece():
    _, pieces = split_graph(traced(decode, *decode_arguments()), ())
    assert [piece.split for piece in pieces] == [None]


def test_neighbouring_splits_stay_apart():
    def twice(x):
        a = torch.ops.aten.neg(x)
        return torch.ops.aten.neg(a)

    _, pieces = split_graph(traced(twice, torch.ones(3)), ("aten::neg",))
    assert [piece.split for piece in pieces] == ["aten::neg", "aten::neg"]


def test_a_tuple_is_taken_apart_where_it_is_made():
    """An element of a splitting operator's result is no piece of its own."""

    def step(x):
        values, indices = torch.ops.aten.sort(x + 1)
        return values * 2, indices

    graph = traced(step, torch.arange(4.0))
    split, pieces = split_graph(graph, ("aten::sort",))
    assert [piece.split for piece in pieces] == [None, "aten::sort", None]
    assert "getitem" in pieces[1].calls()
    torch.testing.assert_close(split(torch.arange(4.0)), step(torch.arange(4.0)))


def test_views_and_sizes_launch_nothing():
    def step(x, y):
        a = torch.ops.aten.neg(x)
        b = a[1:].view(-1).unsqueeze(0).transpose(0, 1)
        c = torch.ops.aten.neg(b)
        return c[y]

    _, pieces = split_graph(traced(step, torch.ones(3, 2), torch.tensor([0])), ("aten::neg",))
    assert [(piece.split, piece.launches) for piece in pieces[1::2]] == [(None, False), (None, True)]
    assert describe(pieces).splitlines()[1].startswith(" 2  views: getitem, view, unsqueeze, transpose")


@pytest.mark.parametrize("name", ["sparse_ckv_decode", "torch_sparse_mla::decode", "", "torch_sparse_mla::"])
def test_refuses_what_is_no_operator(name):
    with pytest.raises(ValueError, match=f"splitting_ops: got '{name}'; allowed: registered operators such as"):
        split_graph(torch.fx.symbolic_trace(lambda x: x + 1), (name,))
