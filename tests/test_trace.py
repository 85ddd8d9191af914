"""NVTX ranges: off by default and cheap then; on, one domain, op/phase names, payloads, balanced even under errors."""

import timeit
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
import triton

import torch_sparse_mla
from torch_sparse_mla import Channel, LoopbackGroup, SelectionPlan, trace

from .ops.test_registration import run_python
from .test_triton_aot import MODULES


class FakeDomain:
    """What the package uses of `nvtx`, kept as a list."""

    def __init__(self) -> None:
        self.names, self.events, self.open = [], [], 0

    def get_domain(self, name: str) -> "FakeDomain":
        self.names.append(name)
        return self

    def get_event_attributes(self, message: str, payload: int) -> tuple[str, int]:
        return message, payload

    def push_range(self, attributes: tuple[str, int]) -> None:
        self.events.append(attributes)
        self.open += 1

    def pop_range(self) -> None:
        self.open -= 1


@pytest.fixture
def domain(monkeypatch) -> Iterator[FakeDomain]:
    fake = FakeDomain()
    monkeypatch.setattr(trace, "_import_nvtx", lambda: fake)
    trace.enable()
    yield fake
    trace.disable()


def test_is_off_by_default():
    assert not trace.is_enabled()
    assert trace.begin("op/phase", 1) is None and trace.end() is None


def test_costs_two_empty_calls_when_off():
    """60 ns on a fast machine. Against empty functions measured beside it, since others use this one."""

    def empty(name: str, payload: int) -> None:
        pass

    def nothing() -> None:
        pass

    def off() -> None:
        trace.begin("op/phase", 1)
        trace.end()

    def bare() -> None:
        empty("op/phase", 1)
        nothing()

    rounds = [(timeit.timeit(off, number=5_000), timeit.timeit(bare, number=5_000)) for _ in range(40)]
    assert min(a for a, _ in rounds) < 3 * min(b for _, b in rounds)


def test_ranges_of_an_exchange(domain):
    channel = Channel.create("traced", LoopbackGroup(1, "cpu").rank(0), 4, 16)
    plan = SelectionPlan(1, 1, 4, 1)
    buffer = torch_sparse_mla.plan_selection(
        torch.arange(4, dtype=torch.int32).view(1, 4),
        torch.zeros(1, 1, dtype=torch.int32),
        plan,
        page_size=4,
        interleave=1,
        rank=0,
    )
    cache, workspace = torch.ones(1, 4, 16, dtype=torch.uint8), torch.zeros(4, 16, dtype=torch.uint8)
    arguments = (cache, buffer, workspace, channel.state, channel)
    torch_sparse_mla.ce_exchange(*arguments)
    assert domain.names == ["torch_sparse_mla"] and domain.open == 0
    assert domain.events == [("ce_exchange/pack", 64), ("ce_exchange/arrival", 64)]
    channel.close()


def test_a_failing_call_closes_its_range(domain):
    channel = Channel.create("failing", LoopbackGroup(1, "cpu").rank(0), 4, 16)
    plan = SelectionPlan(1, 1, 4, 1).empty()
    caches, workspaces = [torch.ones(1, 4, 16, dtype=torch.uint8)], [torch.zeros(4, 16, dtype=torch.uint8)]
    with pytest.raises(torch_sparse_mla.ExchangeError, match="start first"):
        torch_sparse_mla.ce_exchange_wait(caches, plan, workspaces, channel.state, channel)
    assert domain.events == [("ce_exchange/arrival", 64)] and domain.open == 0
    channel.close()


def test_ranges_do_not_break_a_full_graph(domain):
    channel = Channel.create("compiled", LoopbackGroup(1, "cpu").rank(0), 4, 16)
    plan = torch.zeros(channel.plan_words, dtype=torch.int32)
    caches, workspaces = [torch.ones(1, 4, 16, dtype=torch.uint8)], [torch.zeros(4, 16, dtype=torch.uint8)]

    def step(caches, plan, workspaces, state):
        torch.ops.torch_sparse_mla.ce_exchange_layers(caches, plan, workspaces, state, "compiled:0")
        return state + 1

    torch._dynamo.reset()
    torch.compile(step, fullgraph=True, backend="aot_eager")(caches, plan, workspaces, channel.state)
    assert [name for name, _ in domain.events] == ["ce_exchange/pack", "ce_exchange/arrival"]
    channel.close()


def test_missing_nvtx_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nvtx", None)
    with pytest.raises(
        ImportError, match=r"need the package nvtx.*run 'pip install nvtx', or set TORCH_SPARSE_MLA_NVTX=0"
    ):
        trace.enable()
    assert not trace.is_enabled()


def test_flag_is_strict():
    result = run_python("import torch_sparse_mla", TORCH_SPARSE_MLA_NVTX="yes")
    assert result.returncode != 0
    assert "environment variable TORCH_SPARSE_MLA_NVTX: got 'yes'; allowed: 0 or 1" in result.stderr


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_has_a_phase(module):
    kernels = [
        name
        for name, value in vars(import_module(module)).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel") and value.__module__ == module
    ]
    assert kernels
    for name in kernels:
        phase = trace.phase_of_kernel(name)
        assert phase is not None and phase.count("/") == 1, name
        assert phase.split("/")[0] in torch_sparse_mla._ops.OPS, phase


def test_kernels_of_others_have_none():
    for name in ("nvjet_hsh_64x8", "triton_poi_fused_add_0", "_write_kernel_of_somebody", "void at::native::copy"):
        assert trace.phase_of_kernel(name) is None
    assert trace.phase_of_kernel("Memcpy DtoD (Device -> Device)") == "device/copy"
