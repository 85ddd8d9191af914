"""Checks and kernels that are kept: what makes two calls equal, and that nothing that differs is taken for equal."""

import pytest
import torch

from torch_sparse_mla import trace
from torch_sparse_mla.contract import check_no_overlap, check_shape
from torch_sparse_mla.decode import triton_kernels as decode_kernels
from torch_sparse_mla.triton_launch import MAX_PREPARED, PreparedOp

from .decode.cases import assert_same_bits, call, decode, make_case

CHECKS = []


def check_add(x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor, scale: float) -> str:
    CHECKS.append(tuple(x.shape))
    check_shape("add", "out", out, tuple(x.shape), "rows")
    check_no_overlap("add", {"out": out}, {"x": x, "y": y})
    return f"{x.dtype} x {scale}"


@pytest.fixture
def prepared() -> PreparedOp:
    CHECKS.clear()
    return PreparedOp(check_add, outputs=("out",))


def aligned(count: int = 8, offset: int = 0) -> torch.Tensor:
    """Memory that begins `offset` floats after a multiple of 64 bytes."""
    memory = torch.zeros(count + 32)
    skip = (-memory.data_ptr() // 4) % 16 + offset
    return memory[skip : skip + count]


def test_equal_calls_are_checked_once(prepared):
    x, y, out = aligned(), aligned(), aligned()
    first = prepared(x, y, out, 2.0)
    assert first.checked == "torch.float32 x 2.0"
    assert prepared(x, y, out, 2.0) is first
    # Other memory of the same alignment is the same call; so are other values.
    x.fill_(1.0)
    assert prepared(aligned(), aligned(), aligned(), 2.0) is first
    assert CHECKS == [(8,)]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y, out, scale: (x, y, out, 3.0),
        lambda x, y, out, scale: (x, None, out, scale),
        lambda x, y, out, scale: (x[:4], y, out[:4], scale),
        lambda x, y, out, scale: (x.double(), y, out, scale),
        lambda x, y, out, scale: (x, aligned(offset=1), out, scale),
        lambda x, y, out, scale: (torch.zeros(16)[::2], y, out, scale),
        lambda x, y, out, scale: (x.to("meta"), None, out.to("meta"), scale),
    ],
    ids=["value", "absent", "shape", "type", "alignment", "stride", "device"],
)
def test_every_static_property_tells_calls_apart(prepared, change):
    arguments = (aligned(), aligned(), aligned(), 2.0)
    first = prepared(*arguments)
    other = prepared(*change(*arguments))
    assert other is not first and len(CHECKS) == 2
    assert prepared(*arguments) is first


def test_overlap_is_asked_whenever_an_address_is_new(prepared):
    memory = aligned(16)
    prepared(memory[:8], None, memory[8:], 2.0)
    with pytest.raises(ValueError, match="argument 'out': got memory that overlaps 'x'"):
        prepared(memory[:8], None, memory[4:12], 2.0)
    # A refused call leaves nothing behind that would let it pass the next time.
    for _ in range(2):
        with pytest.raises(ValueError, match="argument 'out': got memory that overlaps 'x'"):
            prepared(memory[:8], None, memory[4:12], 2.0)
    prepared(memory[:8], None, memory[8:], 2.0)


def test_a_refused_call_is_not_kept(prepared):
    for _ in range(2):
        with pytest.raises(ValueError, match="argument 'out'"):
            prepared(aligned(), None, aligned(4), 2.0)
    assert len(CHECKS) == 2


def test_checked_mode_checks_every_call(prepared, monkeypatch):
    arguments = (aligned(), None, aligned(), 2.0)
    prepared(*arguments)
    monkeypatch.setenv("TORCH_SPARSE_MLA_CHECK", "1")
    prepared(*arguments)
    prepared(*arguments)
    assert len(CHECKS) == 3


def test_no_more_are_kept_than_the_limit(prepared):
    x, out = aligned(), aligned()
    for number in range(MAX_PREPARED + 10):
        prepared(x, None, out, float(number))
    assert len(prepared._calls) <= MAX_PREPARED


class FakeKernel:
    """A kernel as the interpreter has it: it returns nothing when it is launched."""

    __name__ = "_write_kernel"
    pre_run_hooks = ()

    def __init__(self) -> None:
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launches.append((grid, arguments, constants))


def test_a_kernel_that_returns_nothing_is_launched_by_triton_each_time(prepared, monkeypatch):
    ranges = []
    monkeypatch.setattr(trace, "begin", lambda *event: ranges.append(event))
    kernel, made = FakeKernel(), prepared(aligned(), None, aligned(), 2.0)
    for _ in range(2):
        made.launch(kernel, (3, 2), 1, 2, BLOCK=16)
    assert kernel.launches == [((3, 2), (1, 2), {"BLOCK": 16})] * 2
    assert ranges == [("write_ckv_records/write", 3)] * 2


@pytest.mark.gpu
class TestOnTheGpu:
    """A prepared launch against Triton's own, on inputs whose specialisation differs."""

    CASES = ({}, {"batch_invariant": True}, {"topk": 2051, "lengths": [2051, 5, 0]}, {"sink": [0.1] * 5})

    @pytest.mark.parametrize("changes", CASES, ids=lambda changes: "-".join(changes) or "plain")
    @pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16_mla_nope"])
    def test_prepared_launches_give_the_same_bits(self, changes, layout):
        cases = [make_case(**{"rows": 3, "heads": 5, "topk": 300, "layout": layout, **changes}, seed=n) for n in (1, 2)]
        decode_kernels._checked_decode._calls.clear()
        first = [decode("triton-cuda", case) for case in cases[:1]] + [fresh(cases[1])]
        again = [decode("triton-cuda", case) for case in cases]
        for a, b in zip(first, again, strict=True):
            assert_same_bits(a, b)

    def test_a_misaligned_list_is_another_call(self):
        case = make_case(rows=2, heads=4, topk=64).to("cuda")
        call("triton-cuda", "sparse_ckv_decode", case.args())
        expected = case.out.clone()
        moved = torch.empty(2, 65, dtype=torch.int32, device="cuda")[:, 1:]
        moved.copy_(case.indices)
        case.out.fill_(torch.nan)
        arguments = list(case.args())
        arguments[2] = moved
        call("triton-cuda", "sparse_ckv_decode", tuple(arguments))
        assert torch.equal(case.out, expected)

    def test_launches_on_the_stream_that_is_current(self):
        case = make_case(rows=2, heads=4, topk=64).to("cuda")
        call("triton-cuda", "sparse_ckv_decode", case.args())
        expected = case.out.clone()
        stream = torch.cuda.Stream()
        case.out.fill_(torch.nan)
        torch.cuda.synchronize()
        gate = torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            gate.record()
            call("triton-cuda", "sparse_ckv_decode", case.args())
        # The other stream still sleeps, so nothing can have been written.
        assert not gate.query() and bool(torch.isnan(case.out).all())
        stream.synchronize()
        assert torch.equal(case.out, expected)


def fresh(case):
    decode_kernels._checked_decode._calls.clear()
    return decode("triton-cuda", case)
