"""What every Triton launcher shares: the device a launch goes to, and the list of kernel configurations that ship."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_CURRENT_DEVICE = contextlib.nullcontext()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Context in which a launch goes to the tensor's GPU. Triton launches on the current device, wherever the data is.

    Switching costs microseconds, so it is done only where the devices differ. CPU tensors (the interpreter) pass.
    """
    index = tensor.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return _CURRENT_DEVICE
    return torch.cuda.device(index)


@functools.cache
def capability_of(device: torch.device) -> int:
    """Compute capability as a number such as 90; 80, the oldest supported, for the interpreter's CPU tensors."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class AotConfiguration(NamedTuple):
    """One kernel as it ships, for the gate that compiles everything without a GPU (`tests/test_triton_aot.py`).

    Each `triton_kernels.py` has `aot_configurations(capability)`, which yields what it launches on such a GPU, for
    every kernel, that is for every `@triton.jit` function whose name ends in `_kernel`.

    Attributes:
        name: unique within the module; names the configuration in a failure.
        kernel: the jitted function.
        signature: argument name -> Triton type of every argument that is not a constexpr, such as "*bf16:16", "i64",
            "i32:16"; ":16" says that the launch specialises on a multiple of 16.
        constexprs: argument name -> value of the others (None for an absent tensor).
        options: num_warps, num_stages and the like, as at the launch.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int]


AotConfigurations = Iterator[AotConfiguration]
