"""The ladder of captures, dispatch, padding and replays of `compile`, with simulated graphs: no GPU is needed."""

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import GraphPool, GraphSupport
from torch_sparse_mla.graphs import Batch

from .cases import DECODE_ROWS, STEP, decode, decode_arguments, four_layers
from .simulated import simulate

OP = "torch_sparse_mla::sparse_ckv_decode"
SIZES = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    torch._dynamo.reset()
    return simulate(monkeypatch)


def compiled(mode, arguments, **options):
    options = {"rows": DECODE_ROWS, "backend": "eager", "padding": {"lengths": 0}, **options}
    return torch_sparse_mla.compile(decode, mode, SIZES, **options).capture(*arguments)


def expected_of(arguments, rows: int) -> list[torch.Tensor]:
    cut = [a[:rows] if name in DECODE_ROWS else a for name, a in zip(NAMES, arguments, strict=True)]
    return [result.clone() for result in decode(*cut)]


NAMES = ("q", "cache", "indices", "lengths", "out", "lse", "workspace")


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_captures_from_the_largest_size_and_pads(mode, graphs):
    arguments = decode_arguments()
    live = arguments[3].clone()
    step = compiled(mode, arguments)
    assert torch.equal(arguments[3], live), "capture gives padded arguments back as they were"
    rows_captured = [int(graph.name.split(", ")[-1].removesuffix(" rows")) for graph in graphs]
    assert rows_captured == sorted(rows_captured, reverse=True) and set(rows_captured) == set(SIZES)
    assert step.statistics.captures == {mode.lower(): len(graphs)}
    for rows in (8, 3, 1, 7, 2, 8):
        expected = expected_of(arguments, rows)
        arguments[3][rows:] = 9
        for tensor in arguments[4:6]:
            tensor.fill_(torch.nan)
        results = step(*arguments, num_rows=rows)
        for given, want in zip(results, expected, strict=True):
            torch.testing.assert_close(given, want, rtol=0, atol=0)
        padded = step.dispatch(Batch(rows)).rows
        assert bool((arguments[3][rows:padded] == 0).all()) and bool((arguments[3][padded:] == 9).all())
        arguments[3].copy_(live)
    assert (step.statistics.live_rows, step.statistics.padded_rows) == (29, 31)
    assert step.statistics.as_dict()["padding_waste"] == pytest.approx(2 / 31)
    assert step.statistics.fallbacks == {}
    step.release()
    assert all(graph.released for graph in graphs)


def test_replays_of_pieces_go_around_dynamo(graphs):
    arguments = decode_arguments()
    step = compiled("PIECEWISE", arguments)
    expected = expected_of(arguments, 4)

    def refuse(*_):
        raise AssertionError("a replay of pieces went through Dynamo")

    step._compiled = refuse
    before = [graph.replays for graph in graphs]
    for given, want in zip(step(*arguments, num_rows=4), expected, strict=True):
        torch.testing.assert_close(given, want, rtol=0, atol=0)
    replayed = [graph.name for graph, count in zip(graphs, before, strict=True) if graph.replays > count]
    assert replayed == ["decode, submod_0, 4 rows", "decode, submod_2, 4 rows"]
    step.release()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_four_layers(mode, world, graphs):
    with four_layers(world=world) as step:
        made = torch_sparse_mla.compile(step.run, mode, (2, 4), backend="eager", **STEP).capture(*step.inputs)
        for rows in (4, 3, 2):
            step.inputs[0].normal_()
            expected = step.run(*(tensor[:rows] for tensor in step.inputs))
            given = made(*step.inputs, num_rows=rows)
            torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(RuntimeError, match=r"channel 'decode_step\d+:0' is still used by .* captured CUDA graph"):
            step.close()
        made.release()


def test_a_mixed_batch_takes_the_pieces():
    arguments = decode_arguments()
    step = compiled("FULL_AND_PIECEWISE", arguments)
    expected = expected_of(arguments, 8)
    for uniform in (True, False):
        for given, want in zip(step(*arguments, uniform=uniform), expected, strict=True):
            torch.testing.assert_close(given, want, rtol=0, atol=0)
    assert step.statistics.calls == {"full": 1, "piecewise": 1}
    for given, want in zip(step.run("full", 4, *arguments, live_rows=3), expected, strict=True):
        torch.testing.assert_close(given, want[:3], rtol=0, atol=0)
    step.release()


def test_more_rows_than_captured_run_without_a_graph():
    arguments = decode_arguments()
    step = torch_sparse_mla.compile(decode, "FULL", (2, 4), rows=DECODE_ROWS, backend="eager").capture(*arguments)
    expected = expected_of(arguments, 5)
    for given, want in zip(step(*arguments, num_rows=5), expected, strict=True):
        torch.testing.assert_close(given, want, rtol=0, atol=0)
    assert step.statistics.fallbacks == {"more rows than the largest capture size 4": 1}
    step.release()


def test_another_buffer_is_refused_by_name():
    arguments = decode_arguments()
    step = compiled("FULL", arguments)
    for index in (0, 2, 3, 4, 5):
        other = list(arguments)
        other[index] = arguments[index].clone()
        with pytest.raises(ValueError, match=f"{NAMES[index]}: got a tensor at address .*; allowed: the captured one"):
            step(*other)
    step.release()


def test_debug_compares_what_pieces_get():
    held = {"scale": torch.ones(4)}

    def scaled(x, out):
        out.copy_(x * held["scale"] + 1)

    x, out = torch.arange(4.0), torch.zeros(4)
    step = torch_sparse_mla.compile(scaled, "PIECEWISE", backend="eager", debug=True).capture(x, out)
    step(x, out)
    assert torch.equal(out, x + 1)
    held["scale"].set_(torch.full((4,), 3.0))
    with pytest.raises(ValueError, match=r"scale.* of submod_0: got another tensor or value than the graph of 1 rows"):
        step(x, out)
    step.release()


def test_an_operator_that_returns_tensors_is_no_place_to_split():
    def negated(x):
        return torch.ops.aten.neg(x + 1) * 2

    step = torch_sparse_mla.compile(negated, "PIECEWISE", splitting_ops=("aten::neg",), backend="eager")
    with pytest.raises(ValueError, match=r"splitting_ops: got \['aten::neg'\]; allowed: operators that write into arg"):
        step.capture(torch.ones(4))
    assert step.graphs == []


def test_operators_that_may_not_be_captured():
    arguments = decode_arguments()
    never = {"supports": {OP: GraphSupport.NEVER}}
    with pytest.raises(ValueError, match=f"mode: got FULL; allowed: NONE or PIECEWISE, because {OP} may not be"):
        compiled("FULL", arguments, **never)
    with pytest.raises(ValueError, match=f"splitting_ops: got .*; allowed: also {OP}, which may not be captured"):
        compiled("PIECEWISE", arguments, splitting_ops=("aten::mul_",), **never)
    step = compiled("FULL_AND_PIECEWISE", arguments, **never)
    step(*arguments)
    assert step.statistics.calls == {"piecewise": 1}
    assert step.statistics.fallbacks == {f"{OP} may not be captured": 1}
    step.release()


def test_uniform_batches_only():
    arguments = decode_arguments()
    step = compiled("FULL", arguments, supports={OP: GraphSupport.UNIFORM_BATCH})
    step(*arguments)
    step(*arguments, uniform=False)
    assert step.statistics.calls == {"full": 1, "none": 1}
    assert step.statistics.fallbacks == {f"{OP} may be captured for uniform batches only": 1}
    step.release()


def test_results_must_have_rows():
    step = torch_sparse_mla.compile(lambda x: x.sum(), "FULL", (2, 4), rows=("x",), backend="eager")
    with pytest.raises(ValueError, match=r"fn: got a result of shape \[\] for 4 rows; allowed: results with a row"):
        step.capture(torch.ones(4))


def test_buffers_must_hold_the_largest_size():
    with pytest.raises(ValueError, match=r"q: got shape \[4, 4, 576\]; allowed: a tensor of at least 8 rows"):
        compiled("FULL", decode_arguments(rows=4))


def test_a_pool_is_lent_and_outlives_its_graphs():
    arguments = [decode_arguments(seed=seed) for seed in (1, 2)]
    first = compiled("FULL", arguments[0])
    second = compiled("FULL", arguments[1], pool=first.pool)
    pool = first.pool
    with pytest.raises(
        RuntimeError, match=r"the graph pool is still used by 8 captured CUDA graph\(s\): decode, 1 rows"
    ):
        pool.close()
    first.release()
    second(*arguments[1])
    with pytest.raises(RuntimeError, match="the graph pool is still used by 4"):
        pool.close()
    second.release()
    pool.close()
    with pytest.raises(RuntimeError, match="this graph pool is closed"):
        compiled("FULL", arguments[0], pool=pool)
    assert GraphPool().users.names() == []


def test_releases_and_captures_again():
    arguments = decode_arguments()
    step = compiled("PIECEWISE", arguments)
    with pytest.raises(RuntimeError, match=r"this step has graphs; call release\(\) before another capture"):
        step.capture(*arguments)
    step.release()
    expected = expected_of(arguments, 8)
    step(*arguments)
    assert step.statistics.fallbacks == {"release() has been called": 1}
    other = decode_arguments(seed=3)
    step.capture(*other)
    expected = expected_of(other, 8)
    for given, want in zip(step(*other), expected, strict=True):
        torch.testing.assert_close(given, want, rtol=0, atol=0)
    step.release()


def test_a_failure_while_capturing_releases_what_there_is(graphs, monkeypatch):
    arguments = decode_arguments()
    made = torch_sparse_mla.graphs.step.CapturedGraph.capture

    def fails_at_the_third(name, *rest):
        if len(graphs) == 2:
            raise RuntimeError(f"{name} could not be captured")
        return made(name, *rest)

    monkeypatch.setattr(torch_sparse_mla.graphs.step.CapturedGraph, "capture", staticmethod(fails_at_the_third))
    live = arguments[3].clone()
    step = torch_sparse_mla.compile(decode, "FULL", SIZES, rows=DECODE_ROWS, padding={"lengths": 0}, backend="eager")
    with pytest.raises(RuntimeError, match="decode, 2 rows could not be captured"):
        step.capture(*arguments)
    assert len(graphs) == 2 and all(graph.released for graph in graphs)
    assert step.graphs == [] and step.pool is None and torch.equal(arguments[3], live)
