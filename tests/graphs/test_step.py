"""`torch_sparse_mla.compile` where there is no GPU: results, refusals, dispatch, statistics."""

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla import CUDAGraphMode, GraphSupport, sparse_ckv_decode
from torch_sparse_mla.graphs.arguments import Addresses, Signature

from .cases import DECODE_ROWS, PADDING, STEP, decode, decode_arguments, four_layers


@pytest.fixture(autouse=True)
def forget_compiled_functions():
    torch._dynamo.reset()


def compiled(mode=None, **options):
    return torch_sparse_mla.compile(decode, mode, **{"rows": DECODE_ROWS, "backend": "eager", **options})


def assert_equal(given, expected) -> None:
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["inductor", "eager", "none"])
@pytest.mark.parametrize("mode", [None, "NONE"])
def test_runs_compiled_without_a_gpu(mode, backend):
    arguments = decode_arguments()
    expected = [result.clone() for result in decode(*arguments)]
    step = compiled(mode, backend=backend).capture(*arguments)
    for tensor in arguments[4:6]:
        tensor.fill_(torch.nan)
    assert_equal(step(*arguments), expected)
    for rows in (5, 3):
        assert_equal(step(*arguments, num_rows=rows), [result[:rows] for result in expected])
    reasons = {} if mode else {"CUDA graphs need buffers on a GPU, and these are on cpu": step.statistics.calls["none"]}
    assert step.statistics.fallbacks == reasons
    assert step.statistics.captures == {} and step.statistics.replays == {}


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_capture_refuses_a_mode_that_needs_a_gpu(mode):
    arguments = decode_arguments()
    step = compiled(mode)
    allowed = "NONE, which runs compiled: CUDA graphs need buffers on a GPU"
    with pytest.raises(ValueError, match=f"mode: got {mode} with buffers on cpu; allowed: {allowed}"):
        step.capture(*arguments)
    # Not captured, it runs, and says so.
    step(*arguments)
    assert step.statistics.fallbacks == {"capture() has not been called": 1}


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_models_of_other_scales_share_their_code(backend):
    """Dynamo makes an input of a number that another trace of the same code had otherwise."""

    def model(scale):
        def run(q, cache, slots):
            return sparse_ckv_decode(q, cache, slots, softmax_scale=scale, layout="fp8_ds_mla")[0]

        return run

    generator = torch.Generator().manual_seed(0)
    records = torch.randn(64, 576, generator=generator).bfloat16()
    cache = torch_sparse_mla.quantise_records(records[:, :512], records[:, 512:], "fp8_ds_mla")[None]
    q, slots = torch.randn(2, 3, 576, generator=generator).bfloat16(), torch.arange(32, dtype=torch.int32).view(2, 16)
    for scale in (0.05, 0.01, 0.07):
        step = torch_sparse_mla.compile(model(scale), "NONE", backend=backend)
        torch.testing.assert_close(step(q, cache, slots), model(scale)(q, cache, slots), rtol=0, atol=0)


def test_one_trace_serves_every_number_of_rows_but_one():
    """Rows are marked dynamic; 0 and 1 are special to Dynamo."""
    with four_layers() as step:
        expected = step.run(*step.inputs)
        made = torch_sparse_mla.compile(step.run, "NONE", backend="eager", **STEP)
        for rows in (4, 3, 2, 4):
            torch.testing.assert_close(made(*step.inputs, num_rows=rows), expected[:rows], rtol=0, atol=0)
        assert made.statistics.traces == 1
        # A product of one row sums in another order.
        torch.testing.assert_close(made(*step.inputs, num_rows=1), expected[:1], rtol=1e-4, atol=1e-4)
        assert made.statistics.traces == 2


def test_many_steps_of_one_function():
    """Dynamo gives up on a code object that it has compiled eight times."""

    class Layer:
        def __init__(self, number: int) -> None:
            self.number = number

        def run(self, x):
            return x + self.number

    def double(x):
        return x * 2

    x = torch.arange(3.0)
    for number in range(12):
        layer = torch_sparse_mla.compile(Layer(number).run, "NONE", backend="eager")
        assert torch.equal(layer(x), x + number)
        assert torch.equal(torch_sparse_mla.compile(double, "NONE", backend="eager")(x), x * 2)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
@pytest.mark.parametrize("v2", [True, False])
def test_four_layers_compiled_by_inductor(mode, v2):
    with four_layers() as step:
        expected = step.run(*step.inputs)
        made = torch_sparse_mla.compile(step.run, mode, **STEP)
        with torch._inductor.config.patch({"enable_auto_functionalized_v2": v2, "fx_graph_cache": False}):
            for rows in (4, 2):
                torch.testing.assert_close(made(*step.inputs, num_rows=rows), expected[:rows], rtol=1e-4, atol=1e-4)
        assert made.statistics.traces == 1
        assert made.statistics.captured_pieces == (1 if mode == "NONE" else 9)


def test_padded_rows_change_no_other_row():
    """What a graph of padded rows does, without the graph: rows beyond the live ones hold the padding values."""
    with four_layers() as step:
        expected = step.run(*step.inputs)
        step.close()
    with four_layers() as step:
        signature = Signature(step.run, STEP["rows"], PADDING)
        signature.pad(step.inputs, 3)
        padded = step.run(*step.inputs)
        torch.testing.assert_close(padded[:3], expected[:3], rtol=0, atol=0)
        assert bool(torch.isfinite(padded).all())


def test_keywords_and_defaults():
    def scaled(x, factor=2.0):
        return x * factor

    step = torch_sparse_mla.compile(scaled, "NONE", rows=("x",), backend="eager")
    x = torch.arange(4.0)
    for call in (lambda: step(x), lambda: step(x=x), lambda: step(x, factor=2.0), lambda: step(x, 2.0)):
        assert_equal([call()], [x * 2])
    for args, kwargs in (((x, 1.0, 2), {}), ((x,), {"x": x}), ((), {}), ((x,), {"scale": 1})):
        with pytest.raises(TypeError, match=r"allowed: \(x, factor\), each once"):
            step(*args, **kwargs)


def test_fixed_shapes_need_no_rows():
    def step(x, pair):
        return {"sum": x + pair[0] + pair[1]}

    made = torch_sparse_mla.compile(step, backend="eager")
    x = torch.ones(3)
    assert_equal(made.capture(x, [x, x])(x, [x, x]).values(), [torch.full((3,), 3.0)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "whole"}, "mode: got 'whole'; allowed: NONE, PIECEWISE"),
        ({"backend": "tvm"}, "backend: got 'tvm'; allowed: inductor, eager, none"),
        ({"backend": "none", "mode": "PIECEWISE"}, "backend: got 'none' with pieces; allowed: inductor or eager"),
        ({"rows": ("queries",)}, "rows: got 'queries'; allowed: parameters of fn: q, cache, indices"),
        ({"rows": "q"}, "rows: got 'q'; allowed: a sequence of names"),
        ({"splitting_ops": None}, "splitting_ops: got None; allowed: a sequence of names"),
        ({"capture_sizes": 5}, "capture_sizes: got 5; allowed: at least one integer"),
        ({"padding": {"lengths": None}}, "padding: got None for lengths; allowed: numbers"),
        ({"padding": [("lengths", 0)]}, "padding: got .*; allowed: a dictionary"),
        ({"supports": {"aten::mm": "never"}}, "supports: got 'never' for aten::mm; allowed: members of GraphSupport"),
        ({"pool": 3}, "pool: got 3; allowed: None or a GraphPool"),
        ({"padding": {"cache": 0}}, "padding: got 'cache'; allowed: arguments that have rows: q, indices, lengths"),
        ({"padding": {"x": 0}}, "padding: got 'x'; allowed: parameters of fn"),
        ({"capture_sizes": (0,)}, r"capture_sizes: got \[0\]; allowed: at least one integer"),
        ({"capture_sizes": (2,), "rows": ()}, r"capture_sizes: got \[2\]; allowed: None where no parameter has rows"),
        ({"splitting_ops": ("a::b",)}, "splitting_ops: got 'a::b'; allowed: registered operators"),
        ({"rows_per_request": 0}, "rows_per_request: got 0; allowed: an integer, 1 or more"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_compile_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        compiled(**options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda *tensors: tensors, r"fn: got the parameter \*tensors; allowed: plain parameters"),
        (lambda x, *, scale: x, "fn: got the parameter scale; allowed: plain parameters"),
        (lambda x, num_rows: x, "fn: got a parameter 'num_rows'; allowed: other names"),
    ],
)
def test_compile_refuses_functions(function, message):
    with pytest.raises(ValueError, match=message):
        torch_sparse_mla.compile(function)


def test_a_module_is_called_by_the_parameters_of_its_forward():
    step = torch_sparse_mla.compile(torch.nn.ReLU(), "NONE", (n for n in (2, 4)), rows=("input",), backend="eager")
    assert_equal([step(torch.arange(-2.0, 2.0), num_rows=3)], [torch.zeros(3)])
    assert step._sizes_for((torch.zeros(4),)) == (2, 4)


def test_rows_need_a_tensor():
    with pytest.raises(ValueError, match="q: got NoneType; allowed: a tensor whose first dimension is rows"):
        compiled("NONE")(None, *decode_arguments()[1:])


@pytest.mark.parametrize(
    ("num_rows", "message"),
    [
        (9, r"q: got shape \[8, 4, 576\]; allowed: a tensor of at least 9 rows"),
        (-1, "num_rows: got -1; allowed: an integer, 0 or more"),
        (2.0, "num_rows: got 2.0; allowed: an integer"),
    ],
)
def test_refuses_numbers_of_rows(num_rows, message):
    with pytest.raises(ValueError, match=message):
        compiled("NONE")(*decode_arguments(), num_rows=num_rows)
    with pytest.raises(ValueError, match="num_rows: got 1; allowed: None where no parameter has rows"):
        compiled("NONE", rows=())(*decode_arguments(), num_rows=1)


def test_fullgraph_is_demanded():
    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    step = torch_sparse_mla.compile(breaks, "NONE", backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(torch.ones(2))


@pytest.mark.parametrize("mode", CUDAGraphMode.__members__)
def test_dispatch_before_capture_says_why(mode):
    step = compiled(mode)
    reason = step.dispatch(torch_sparse_mla.graphs.Batch(3, uniform=False)).reason
    expected = None if mode in ("NONE", "FULL_DECODE_ONLY") else "capture() has not been called"
    assert reason == expected


def test_run_refuses_what_was_not_captured():
    step, arguments = compiled(), decode_arguments()
    with pytest.raises(ValueError, match="rows: got 8 in mode full; allowed: what was captured: nothing"):
        step.run("full", 8, *arguments)
    with pytest.raises(ValueError, match="mode: got 'FULL'; allowed: full, piecewise or none"):
        step.run("FULL", 8, *arguments)
    assert step.run("none", 8, *arguments)[0].shape[0] == 8


def test_explain_names_pieces_and_support():
    op = "torch_sparse_mla::sparse_ckv_decode"
    step = compiled("PIECEWISE", supports={op: GraphSupport.UNIFORM_BATCH})
    step(*decode_arguments())
    explained = step.explain()
    assert explained["mode"] == "PIECEWISE" and explained["operators"] == [op]
    assert explained["support"] == f"UNIFORM_BATCH, because of {op}"
    assert explained["pieces"].splitlines()[1] == f" 1  split at {op}"
    assert explained["statistics"]["pieces"] == 3


def test_padding_waste_is_the_share_of_rows_nobody_asked_for():
    statistics = torch_sparse_mla.graphs.Statistics()
    assert statistics.padding_waste == 0.0
    statistics.live_rows, statistics.padded_rows = 6, 8
    assert statistics.padding_waste == statistics.as_dict()["padding_waste"] == 0.25


class TestAddresses:
    """What a replay compares. The check itself needs no GPU."""

    def addresses(self) -> tuple[Addresses, tuple]:
        def step(x, caches, scale):
            return x

        arguments = (torch.zeros(8, 4), [torch.zeros(3), torch.zeros(3)], 0.5)
        return Addresses(Signature(step, ("x",), {}), arguments), arguments

    @pytest.mark.parametrize("always", [True, False])
    def test_accepts_the_captured_buffers_and_their_first_rows(self, always):
        addresses, (x, caches, scale) = self.addresses()
        for given in ((x, caches, scale), (x[:3], caches, scale), (x[:1], list(caches), 0.5)):
            addresses.check(given, 1, always)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, c, s: (x.clone(), c, s), "x: got a tensor at address 0x.*; allowed: the captured one at 0x"),
            (lambda x, c, s: (x[1:], c, s), "x: got a tensor at address"),
            (
                lambda x, c, s: (x[:, :2], c, s),
                r"x: got torch.float32 \[8, 2\] with strides \[4, 1\]; allowed: .*\[8, 4\]",
            ),
            (lambda x, c, s: (x.view(torch.int32), c, s), r"x: got torch.int32 \[8, 4\]"),
            (lambda x, c, s: (x[:3], c, s), r"x: got torch.float32 \[3, 4\]"),
            (lambda x, c, s: (x, [c[0], c[0]], s), r"caches\[1\]: got a tensor at address"),
            (lambda x, c, s: (x, c[:1], s), "caches: got .*; allowed: .*, which the graph has captured"),
            (lambda x, c, s: (x, c, 0.25), "scale: got 0.25; allowed: 0.5, which the graph has captured"),
            (lambda x, c, s: (x, c, None), "scale: got None; allowed: 0.5"),
            (lambda x, c, s: (None, c, s), "x: got None"),
        ],
    )
    def test_names_the_argument_that_is_another(self, change, message):
        addresses, arguments = self.addresses()
        with pytest.raises(ValueError, match=message):
            addresses.check(change(*arguments), 4, False)

    def test_sees_another_tensor_in_the_same_list(self):
        addresses, (x, caches, scale) = self.addresses()
        caches[1] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"caches\[1\]: got a tensor at address"):
            addresses.check((x, caches, scale), 8, False)

    def test_debug_sees_memory_exchanged_behind_the_same_object(self):
        addresses, (x, caches, scale) = self.addresses()
        x.set_(torch.zeros(8, 4))
        addresses.check((x, caches, scale), 8, False)
        with pytest.raises(ValueError, match="x: got a tensor at address"):
            addresses.check((x, caches, scale), 8, True)

    def test_refuses_buffers_that_are_too_small(self):
        addresses, arguments = self.addresses()
        addresses.signature.check_room(arguments, 8)
        with pytest.raises(ValueError, match=r"x: got shape \[8, 4\]; allowed: a tensor of at least 9 rows"):
            addresses.signature.check_room(arguments, 9)
