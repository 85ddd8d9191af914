"""What every Triton launcher shares: checks and compiled kernels that are kept, the device a launch goes to, and the
list of kernel configurations that ship.

Most of an eager call's host time would go into checks that come out as before, and into Triton's search for a kernel
that it has found before. Both depend on nothing but the static properties of the arguments: shapes, strides, types,
device, the address modulo 16, and every value that is no tensor. So a call is looked up by these (`PreparedOp`); what
is found holds the result of the checks and the kernels that were compiled for it (`PreparedCall`). What may differ from
one such call to the next is addresses: whether outputs overlap is asked anew.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import trace
from .contract import check_no_overlap, checked_mode, is_fake

try:
    from triton import JITFunction, knobs
    from triton.runtime import driver
except ImportError:
    # Only the launchers below need it, and modules that launch do not import without it.
    JITFunction = None

ALIGNMENT = 16
# Calls kept of an operator. A model in use has a few for each captured size; prompts of any length add one each.
MAX_PREPARED = 4096

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


class PreparedCall:
    """What calls of equal static properties share.

    Attributes:
        checked: what the operator's check returned.
    """

    def __init__(self, checked: Any, outputs: Sequence[int], tensors: Sequence[int]) -> None:
        self.checked = checked
        self._outputs, self._tensors = outputs, tensors
        # Of the last call that passed the check for overlap.
        self.passed: list[int] | None = None
        # What the operator worked out from the static properties, for itself.
        self.kept: Any = None
        # By the kernel's identity: its own hash is that of its source. Kernels live as long as their module.
        self._kernels: dict[tuple[int, int], _Compiled] = {}

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, site: int = 0, **constants: Any) -> None:
        """`kernel[grid](*arguments, **constants)`, on the current device and stream.

        Args:
            kernel: a jitted function whose first parameters are `arguments`; the others are constexpr.
            grid: whose first number is the payload of the NVTX range.
            site: tells launches of one kernel in one call apart, whose arguments differ in type or alignment.
        """
        phase = trace.phase_of_kernel(kernel.__name__) or kernel.__name__
        trace.begin(phase, grid[0])
        try:
            compiled = self._kernels.get((id(kernel), site))
            if compiled is None or kernel.pre_run_hooks:
                self._launch_first(kernel, grid, arguments, site, constants)
            else:
                compiled.launch(grid, arguments)
        finally:
            trace.end()

    def _launch_first(self, kernel: Any, grid: tuple, arguments: tuple, site: int, constants: dict[str, Any]) -> None:
        """Triton's own way, which compiles where it has to, and returns the kernel that it launched."""
        compiled = kernel[grid](*arguments, **constants)
        # The interpreter returns none.
        if JITFunction is not None and isinstance(kernel, JITFunction) and compiled is not None:
            rest = tuple([constants[name] for name in kernel.arg_names[len(arguments) :]])
            self._kernels[id(kernel), site] = _Compiled(compiled, rest)

    def named(self, names: Sequence[str], arguments: tuple) -> tuple[dict, dict]:
        """Tensors that are written, and those that are read."""
        outputs = {names[index]: arguments[index] for index in self._outputs}
        inputs = {names[index]: arguments[index] for index in self._tensors if index not in self._outputs}
        return outputs, inputs


class PreparedOp:
    """The checks of an operator's CUDA implementation, kept by the static properties of a call.

        _write = PreparedOp(contract.check_write_ckv_records, outputs=("cache",))
        call = _write(latent, rope, slots, cache, layout)
        call.launch(_write_kernel, (tokens,), latent, ...)

    Args:
        check: the whole check. It must be a pure function of static properties, but for `check_no_overlap` of the
            outputs with each other and with all other tensors, and for checked mode.
        outputs: names of the parameters that are written.
    """

    def __init__(self, check: Callable[..., Any], outputs: Sequence[str]) -> None:
        self.check, self.op = check, check.__name__.removeprefix("check_")
        self.names = list(inspect.signature(check).parameters)
        self.outputs = [self.names.index(name) for name in outputs]
        self._calls: dict[tuple, PreparedCall] = {}
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> PreparedCall:
        """Check a call. Arguments in order, all of them. Raises as the check does."""
        if checked_mode():
            # Looks at data, which no property tells.
            self.check(*arguments)
        key, addresses = _static_properties(arguments)
        call = self._calls.get(key)
        if call is None:
            return self._prepare(key, arguments)
        if addresses != call.passed:
            check_no_overlap(self.op, *call.named(self.names, arguments))
            call.passed = addresses
        return call

    def _prepare(self, key: tuple, arguments: tuple) -> PreparedCall:
        checked = self.check(*arguments)
        tensors = [index for index, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
        call = PreparedCall(checked, [index for index in self.outputs if index in tensors], tensors)
        if not any(is_fake(arguments[index]) for index in tensors):
            with self._lock:
                if len(self._calls) >= MAX_PREPARED:
                    self._calls.clear()
                self._calls[key] = call
        return call


def _static_properties(arguments: tuple) -> tuple[tuple, list[int]]:
    """All that decides what a call launches, apart from addresses; and the addresses."""
    properties: list[Any] = []
    addresses: list[int] = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
            addresses.append(address)
            properties += (value.shape, value.stride(), value.dtype, value.get_device(), address % ALIGNMENT)
        else:
            properties.append(value)
    return tuple(properties), addresses


class _Compiled:
    """A compiled kernel, and the constants that follow its arguments."""

    def __init__(self, kernel: Any, rest: tuple) -> None:
        self._kernel, self._rest = kernel, rest
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata

    def launch(self, grid: tuple[int, ...], arguments: tuple) -> None:
        """Launch as `JITFunction.run` does once it has found the kernel.

        Pointers go as integers: for tensors the driver would be asked about each.
        """
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        enter, leave, metadata = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, None
        if enter is not None:
            metadata = self._kernel.launch_metadata(grid, stream, *values, *self._rest)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        self._run(x, y, z, stream, self._function, self._metadata, metadata, enter, leave, *values, *self._rest)


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
