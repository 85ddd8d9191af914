"""Captured steps on a GPU: replays against eager calls, with everything poisoned or changed in between."""

import gc

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import GraphPool, GraphSupport
from torch_sparse_mla.graphs import Batch, CapturedGraph

from ..decode.cases import move
from .cases import DECODE_ROWS, STEP, decode, decode_arguments, four_layers

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8)
GRAPH_MODES = ("FULL", "PIECEWISE")
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
op = "torch_sparse_mla::sparse_ckv_decode"


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    torch._dynamo.reset()


def compiled(mode, arguments, **options):
    options = {"rows": DECODE_ROWS, "backend": "eager", "padding": {"lengths": 0}, **options}
    step = torch_sparse_mla.compile(decode, mode, SIZES, **options)
    return step.capture(*arguments)


def poison(arguments) -> None:
    for tensor in arguments[4:6]:
        tensor.fill_(torch.nan)
    arguments[6].fill_(0xFF)


def eager(arguments, rows: int) -> list[torch.Tensor]:
    cut = [a[:rows] if name in DECODE_ROWS else a for name, a in zip(NAMES, arguments, strict=True)]
    poison(arguments)
    return [result.clone() for result in decode(*cut)]


NAMES = ("q", "cache", "indices", "lengths", "out", "lse", "workspace")


def assert_near(given, expected, message: str = "") -> None:
    """Another number of rows splits lists elsewhere, which rounds differently."""
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, msg=lambda text: f"{message} {text}")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_captures_short_lists_and_replays_long_ones(mode, backend):
    arguments = decode_arguments(device="cuda")
    live = arguments[3].clone()
    arguments[3].fill_(1)
    step = compiled(mode, arguments, backend=backend)
    assert bool((arguments[3] == 1).all()), "capture gives padded arguments back as they were"
    arguments[3].copy_(live)
    for turn, rows in enumerate((8, 3, 1, 7, 8, 2)):
        other = decode_arguments(device="cuda", seed=turn)
        for index in (0, 1, 2):
            arguments[index].copy_(other[index])
        expected = eager(arguments, rows)
        arguments[3][rows:] = 9
        poison(arguments)
        results = step(*arguments, num_rows=rows)
        assert_near(results, expected, f"{rows} rows")
        assert all(result.shape[0] == rows for result in results)
        assert bool((arguments[3][rows : step.dispatch(Batch(rows)).rows] == 0).all())
        arguments[3].copy_(live)
    assert step.statistics.padded_rows == 8 + 4 + 1 + 8 + 8 + 2
    assert step.statistics.live_rows == 8 + 3 + 1 + 7 + 8 + 2
    assert step.statistics.fallbacks == {}
    per_size = 1 if mode == "FULL" else 2
    assert step.statistics.captures == {mode.lower(): per_size * len(SIZES)}
    assert step.statistics.graph_bytes > 0
    step.release()


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_sizes_interleave_with_eager_calls_between(mode):
    """A graph of another size, and the operator by itself, between two replays of one graph."""
    arguments = decode_arguments(device="cuda")
    step = compiled(mode, arguments)
    expected = {rows: eager(arguments, rows) for rows in SIZES}
    for rows in (8, 1, 8, 4, 2, 4, 4, 8, 1):
        poison(arguments)
        assert_near(step(*arguments, num_rows=rows), expected[rows])
        eager(arguments, 8)
    step.release()


@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize("world", [1, 2])
def test_four_layers_replay_like_eager(mode, world):
    with four_layers(**BF16, world=world) as step:
        made = torch_sparse_mla.compile(step.run, mode, (1, 2, 4), backend="eager", **STEP)
        made.capture(*step.inputs)
        for turn in range(7):
            rows = (4, 1, 3, 2, 4, 4, 1)[turn]
            hidden, topk, lengths, _ = step.inputs
            topk.copy_(torch.stack([torch.randperm(256, device="cuda")[:64] for _ in range(4)]))
            lengths.copy_(torch.randint(100, 257, (4,), device="cuda"))
            hidden.normal_()
            expected = step.run(*(tensor[:rows] for tensor in step.inputs)).clone()
            for workspaces in step.workspaces:
                for workspace in workspaces:
                    workspace.fill_(0xFF)
            results = made(*step.inputs, num_rows=rows)
            assert bool(torch.isfinite(results).all())
            torch.testing.assert_close(results, expected, rtol=3e-2, atol=3e-2)
            for channel in step.channels:
                channel.check()
        assert made.statistics.fallbacks == {}
        made.release()


def test_a_mixed_batch_takes_the_pieces():
    with four_layers(**BF16) as step:
        made = torch_sparse_mla.compile(step.run, None, (4,), backend="eager", **STEP).capture(*step.inputs)
        expected = step.run(*step.inputs).clone()
        torch.testing.assert_close(made(*step.inputs), expected, rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(made(*step.inputs, uniform=False), expected, rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(made.run("piecewise", 4, *step.inputs), expected, rtol=3e-2, atol=3e-2)
        assert made.statistics.calls == {"full": 1, "piecewise": 2}
        made.release()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_nodes_of_a_full_graph(backend):
    """Kernels on the device: no host node, no allocation, no wait for anything outside, no copy."""
    with four_layers(**BF16, world=1) as step:
        made = torch_sparse_mla.compile(step.run, "FULL", (4,), backend=backend, **STEP).capture(*step.inputs)
        (graph,) = made.graphs
        counts = graph.node_counts()
        made.release()
    # Inductor adds the residual in the matrix product, and PyTorch's addmm copies it first: once for each layer.
    assert counts.pop("memcpy", 0) == (0 if backend == "eager" else 4), counts
    assert set(counts) == {"kernel"}
    # Of the package: 7 writes, 2 for the plan, 2 starts, 2 waits, 4 times attend. The lists are too short to be merged.
    assert counts["kernel"] >= 7 + 2 + 4 + 4


def test_two_models_share_a_pool():
    arguments = [decode_arguments(device="cuda", seed=seed) for seed in (1, 2)]
    pool = GraphPool()
    steps = [compiled("FULL", given, pool=pool) for given in arguments]
    expected = [eager(given, 8) for given in arguments]
    for turn in (0, 1, 1, 0, 0, 1):
        poison(arguments[turn])
        assert_near(steps[turn](*arguments[turn]), expected[turn])
    with pytest.raises(
        RuntimeError, match=r"the graph pool is still used by 8 captured CUDA graph\(s\): decode, 1 rows"
    ):
        pool.close()
    steps[0].release()
    poison(arguments[1])
    assert_near(steps[1](*arguments[1]), expected[1])
    with pytest.raises(RuntimeError, match="the graph pool is still used by 4"):
        pool.close()
    steps[1].release()
    pool.close()
    with pytest.raises(RuntimeError, match="this graph pool is closed"):
        compiled("FULL", arguments[0], pool=pool)


def test_a_step_may_lend_its_pool():
    arguments = [decode_arguments(device="cuda", seed=seed) for seed in (1, 2)]
    first = compiled("FULL", arguments[0])
    second = compiled("FULL", arguments[1], pool=first.pool)
    expected = eager(arguments[1], 8)
    first.release()
    poison(arguments[1])
    assert_near(second(*arguments[1]), expected)
    second.release()


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_a_channel_outlives_its_graphs(mode):
    with four_layers(**BF16) as step:
        made = torch_sparse_mla.compile(step.run, mode, (4,), backend="eager", **STEP).capture(*step.inputs)
        with pytest.raises(RuntimeError, match=r"channel 'decode_step\d+:0' is still used by .*run.*; release"):
            step.close()
        made(*step.inputs)
        graphs = list(made.graphs)
        made.release()
        for graph in graphs:
            with pytest.raises(RuntimeError, match="was released and cannot be replayed"):
                graph.replay()
        # Calls go on without graphs, and say so.
        made(*step.inputs)
        assert made.statistics.fallbacks == {"release() has been called": 1}


def test_graphs_that_are_dropped_hold_nothing():
    with four_layers(**BF16) as step:
        made = torch_sparse_mla.compile(step.run, "FULL", (4,), backend="eager", **STEP).capture(*step.inputs)
        del made
        torch._dynamo.reset()
        gc.collect()


def test_another_buffer_is_refused_by_name():
    arguments = decode_arguments(device="cuda")
    step = compiled("FULL", arguments)
    for index, name in enumerate(NAMES):
        other = list(arguments)
        other[index] = move(arguments[index], "cuda")
        with pytest.raises(ValueError, match=f"{name}: got a tensor at address .*; allowed: the captured one"):
            step(*other)
    other = list(arguments)
    other[0] = arguments[0][1:]
    with pytest.raises(ValueError, match="q: got a tensor at address"):
        step(*other, num_rows=7)
    step(arguments[0][:5], *arguments[1:])
    step.release()


def test_debug_compares_what_pieces_get():
    held = {"scale": torch.ones(4, device="cuda")}

    def scaled(x, out):
        out.copy_(-(x * held["scale"] + 1))

    x, out = torch.arange(4.0, device="cuda"), torch.zeros(4, device="cuda")
    steps = [
        torch_sparse_mla.compile(scaled, mode, backend="eager", debug=debug, **options).capture(x, out)
        for mode, debug, options in (("PIECEWISE", True, {}), ("PIECEWISE", False, {}), ("FULL", False, {}))
    ]
    for step in steps:
        step(x, out)
        assert torch.equal(out, -(x + 1))
    held["scale"].set_(torch.full((4,), 3.0, device="cuda"))
    with pytest.raises(ValueError, match=r"scale.* of submod_0: got another tensor or value than the graph of 1 rows"):
        steps[0](x, out)
    for step in steps:
        step.release()


def test_an_operator_that_returns_tensors_is_no_place_to_split():
    def negated(x):
        return torch.ops.aten.neg(x + 1) * 2

    step = torch_sparse_mla.compile(negated, "PIECEWISE", splitting_ops=("aten::neg",), backend="eager")
    with pytest.raises(ValueError, match=r"splitting_ops: got \['aten::neg'\]; allowed: operators that write into arg"):
        step.capture(torch.ones(4, device="cuda"))
    assert step.graphs == []


def test_replays_of_pieces_go_around_dynamo():
    arguments = decode_arguments(device="cuda")
    step = compiled("PIECEWISE", arguments)
    expected = eager(arguments, 8)

    def refuse(*_):
        raise AssertionError("a replay of pieces went through Dynamo")

    step._compiled = refuse
    for rows in (8, 5, 8):
        poison(arguments)
        assert_near(step(*arguments, num_rows=rows), [result[:rows] for result in expected])
        arguments[3].copy_(decode_arguments()[3])
    step.release()


def test_what_cannot_be_captured_is_named_and_leaves_the_stream_usable():
    def reads_back(x):
        if torch.cuda.is_current_stream_capturing():
            x.sum().item()
        return x + 1

    def side_stream(x):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = x + 1
        return y

    x = torch.ones(4, device="cuda")
    for function in (reads_back, side_stream):
        step = torch_sparse_mla.compile(function, "FULL", backend="none")
        with pytest.raises(RuntimeError):
            step.capture(x)
        torch.cuda.synchronize()
        assert step.graphs == []
        again = torch_sparse_mla.compile(lambda x: x + 1, "FULL", backend="none").capture(x)
        assert torch.equal(again(x), x + 1)
        again.release()


def test_results_must_have_rows():
    step = torch_sparse_mla.compile(lambda x: x.sum(), "FULL", (2, 4), rows=("x",), backend="eager")
    with pytest.raises(ValueError, match=r"fn: got a result of shape \[\] for 4 rows; allowed: results with a row"):
        step.capture(torch.ones(4, device="cuda"))


def test_capture_writes_no_record():
    """Dummy steps of a capture hold the padding value: no token lands in a page."""
    with four_layers(**BF16) as step:
        before = [cache.clone() for caches in step.caches for cache in caches]
        held = [tensor.clone() for tensor in step.inputs]
        made = torch_sparse_mla.compile(step.run, None, (2, 4), backend="eager", **STEP).capture(*step.inputs)
        after = [cache for caches in step.caches for cache in caches]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(held, step.inputs, strict=True))
        made(*step.inputs)
        assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        made.release()


def test_operators_that_may_not_be_captured():
    arguments = decode_arguments(device="cuda")
    never = {"supports": {op: GraphSupport.NEVER}}
    with pytest.raises(ValueError, match=f"mode: got FULL; allowed: NONE or PIECEWISE, because {op} may not be"):
        compiled("FULL", arguments, **never)
    with pytest.raises(ValueError, match=f"splitting_ops: got .*; allowed: also {op}, which may not be captured"):
        compiled("PIECEWISE", arguments, splitting_ops=("aten::neg",), **never)
    step = compiled("FULL_AND_PIECEWISE", arguments, **never)
    assert_near(step(*arguments), eager(arguments, 8))
    assert step.statistics.calls == {"piecewise": 1}
    assert step.statistics.fallbacks == {f"{op} may not be captured": 1}
    step.release()


def test_replays_on_the_callers_stream():
    arguments = decode_arguments(device="cuda")
    step = compiled("FULL", arguments)
    expected = eager(arguments, 8)
    poison(arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = step(*arguments)
    stream.synchronize()
    assert_near(results, expected)
    step.release()


def test_a_graph_by_itself():
    """For an engine that captures and dispatches by itself."""
    arguments = decode_arguments(device="cuda")
    expected = eager(arguments, 8)
    pool, stream = GraphPool(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode(*arguments)
    graph = CapturedGraph.capture("decode, 8 rows", decode, arguments, pool, stream)
    poison(arguments)
    assert_near(graph.replay(), expected)
    assert set(graph.node_counts()) == {"kernel"}
    graph.release()
    graph.release()
    pool.close()
