"""What stream operations ask of the driver. Without a GPU: a driver that writes down what it is asked."""

import sys
from types import SimpleNamespace

import pytest
import torch

from torch_sparse_mla.exchange.transports.stream_operations import Await, StreamOperations, Write


class Driver(SimpleNamespace):
    """Kinds and flags have values of their own, so that none passes for another."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS=122)
    CUstreamBatchMemOpType = SimpleNamespace(
        CU_STREAM_MEM_OP_WAIT_VALUE_32="wait", CU_STREAM_MEM_OP_WRITE_VALUE_32="write"
    )
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=31)
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=41)

    def CUstreamBatchMemOpParams(self):
        return SimpleNamespace(waitValue=SimpleNamespace(), writeValue=SimpleNamespace())

    def cuDeviceGetAttribute(self, attribute, device):
        return 0, self.supported

    def cuStreamBatchMemOp(self, stream, count, parameters, flags):
        self.asked.append((stream, count, parameters, flags))
        return (self.answer,)

    def cuMemcpyAsync(self, destination, source, size, stream):
        self.asked.append((destination, source, size, stream))
        return (self.answer,)

    def cuGetErrorString(self, code):
        return 0, b"invalid argument"


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(asked=[], answer=0, supported=1)
    modules = {"cuda": SimpleNamespace(), "cuda.bindings": SimpleNamespace(), "cuda.bindings.driver": driver}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: SimpleNamespace(priority=priority))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    return driver


DEVICE = torch.device("cuda", 0)


def test_a_batch_keeps_order_addresses_and_values(driver):
    operations = StreamOperations(DEVICE)
    operations.run(operations.prepare([Write(64, 2), Await(128, 1), Write(64, 0)]))
    operations.copy(1, 2, 3)
    (stream, count, (first, second, third), flags), copy = driver.asked
    assert (stream, count, flags) == (77, 3, 0)
    assert (first.operation, vars(first.writeValue)) == (
        "write",
        {"operation": "write", "address": 64, "value": 2, "flags": 41},
    )
    assert (second.operation, vars(second.waitValue)) == (
        "wait",
        {"operation": "wait", "address": 128, "value": 1, "flags": 31},
    )
    assert third.writeValue.value == 0
    assert copy == (1, 2, 3, 77)


def test_an_empty_batch_is_nothing(driver):
    StreamOperations(DEVICE).run([])
    assert driver.asked == []


def test_what_ends_a_wait_shares_no_priority_with_what_may_stand_before_it(driver):
    operations = StreamOperations(DEVICE)
    assert operations.releases.priority < operations.copies.priority < 0


def test_a_failing_call_is_named(driver):
    operations = StreamOperations(DEVICE)
    driver.answer = 1
    with pytest.raises(RuntimeError, match="cuMemcpyAsync failed: invalid argument"):
        operations.copy(1, 2, 3)


def test_a_device_without_them_and_a_missing_package_are_named(driver, monkeypatch):
    driver.supported = 0
    with pytest.raises(RuntimeError, match="cuda:0 has no stream memory operations"):
        StreamOperations(DEVICE)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(RuntimeError, match="stream memory operations take the package cuda-bindings"):
        StreamOperations(DEVICE)
