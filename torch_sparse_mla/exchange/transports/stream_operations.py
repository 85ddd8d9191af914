"""What a stream does without a kernel: copies by a copy engine, values written to memory and waited for.

All of it can be captured: addresses, sizes and values are constants of a graph. Memory of peers is written like own
memory. Calls go to the driver, through the package `cuda-bindings`.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

# The priority of a stream separates its hardware queue from those of streams of another priority: what waits in one
# cannot hold up what would end the wait. Lower numbers go first.
COPY_PRIORITY, RELEASE_PRIORITY = -1, -2


class Write(NamedTuple):
    """Store an int32, after everything that the stream did before, for the whole system."""

    address: int
    value: int


class Await(NamedTuple):
    """Wait until an int32 is at least `value`, as a signed difference."""

    address: int
    value: int


class StreamOperations:
    """Everything is for the current stream of a device.

    Raises: RuntimeError where `cuda.bindings` is missing, or a device cannot wait for values in memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            self.driver = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise RuntimeError(f"stream memory operations take the package cuda-bindings: {error}") from error
        supported = self.driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        if not self._call("cuDeviceGetAttribute", supported, device.index):
            raise RuntimeError(f"{device} has no stream memory operations")
        self.copies = torch.cuda.Stream(device, priority=COPY_PRIORITY)
        self.releases = torch.cuda.Stream(device, priority=RELEASE_PRIORITY)

    def prepare(self, steps: list[Write | Await]) -> list[Any]:
        """A batch that `run` takes any number of times: one node of a graph."""
        kinds = self.driver.CUstreamBatchMemOpType
        prepared = []
        for step in steps:
            parameters = self.driver.CUstreamBatchMemOpParams()
            if isinstance(step, Await):
                part, kind = parameters.waitValue, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
                flags = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            else:
                part, kind = parameters.writeValue, kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
                flags = self.driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
            parameters.operation = part.operation = kind
            part.address, part.value, part.flags = step.address, step.value, int(flags)
            prepared.append(parameters)
        return prepared

    def run(self, prepared: list[Any]) -> None:
        if prepared:
            self._call("cuStreamBatchMemOp", self._stream(), len(prepared), prepared, 0)

    def copy(self, destination: int, source: int, size: int) -> None:
        self._call("cuMemcpyAsync", destination, source, size, self._stream())

    def capture_id(self) -> int:
        """Which capture the stream takes part in; 0 for none."""
        if not torch.cuda.is_current_stream_capturing():
            return 0
        return int(self._call("cuStreamGetCaptureInfo", self._stream())[1])

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """What is inside runs on a stream of its own, after what is before, beside what comes after."""
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            yield

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.copies)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is inside waits for nothing that any stream does."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.releases):
            yield

    def relax_thread(self) -> None:
        """Let the calling thread use the device although another thread captures a graph."""
        relaxed = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call("cuThreadExchangeStreamCaptureMode", relaxed)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def _call(self, name: str, *arguments: Any) -> Any:
        """Returns what the driver gives: nothing, a value, or a tuple of values."""
        code, *given = getattr(self.driver, name)(*arguments)
        if code != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"torch_sparse_mla: {name} failed: {self._call('cuGetErrorString', code).decode()}")
        return given[0] if len(given) == 1 else tuple(given)
