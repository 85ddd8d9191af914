"""Registers the operator table with PyTorch: schemas, fakes, CPU and CUDA implementations, the native library."""

from pathlib import Path

import torch

from ..contract import strict_choice
from .table import NAMESPACE, OPS, Op

_NATIVE_PATTERN = "_native*.so"
# "narrow" and "wide": as 1, and that form of kernels that choose between two. The library looks at each call.
_NATIVE_FLAG, _NATIVE_CHOICES = "TORCH_SPARSE_MLA_NATIVE", ("0", "1", "narrow", "wide")
# Operators whose CUDA kernel is native call their Triton kernel by this name where the native one does not take a call.
_PORTABLE_NAMESPACE = f"{NAMESPACE}_portable"


def _define_namespace() -> torch.library.Library:
    try:
        return torch.library.Library(NAMESPACE, "DEF")
    except RuntimeError as error:
        raise ImportError(
            f"torch_sparse_mla: the operator namespace '{NAMESPACE}' is registered already in this process, by an "
            "earlier import or by a second copy of the package (this one is in "
            f"{Path(__file__).parents[1]}). Keep one copy on sys.path, and do not delete 'torch_sparse_mla' from "
            "sys.modules to import it again: start a new process"
        ) from error


def _load_native(wanted: bool) -> tuple[str | None, str | None]:
    """Load the C++ library if it is there. Returns its path, or else the reason why it is not used."""
    if not wanted:
        return None, "TORCH_SPARSE_MLA_NATIVE=0"
    built = sorted(Path(__file__).parents[1].glob(_NATIVE_PATTERN))
    if not built:
        return None, "not built; run 'pip install --no-build-isolation .' where a C++ compiler is installed"
    try:
        torch.ops.load_library(str(built[0]))
    except OSError as error:
        return None, f"{built[0].name} does not load: {error}"
    return str(built[0]), None


def _register_op(op: Op) -> None:
    library.define(op.name + op.schema, tags=(torch.Tag.pt2_compliant_tag,))

    def fake(*args: object, **kwargs: object) -> None:
        op.check(*args, **kwargs)

    torch.library.register_fake(op.qualified_name, fake, lib=library)


def _register_kernels(op: Op) -> None:
    if not _has_kernel(op, "CPU"):
        # Like a native kernel it records nothing for autograd, and writes what was made in inference mode or outside.
        library.impl(op.name, torch.inference_mode()(op.reference), "CPU")
    # Whether there is a GPU is not asked here: the question starts the driver, which a later fork would not survive.
    if not torch.backends.cuda.is_built():
        return
    if op.name in native_cuda_ops:
        _portable.define(op.name + op.schema)
        _portable.impl(op.name, _triton_or_error(op), "CUDA")
    else:
        library.impl(op.name, _triton_or_error(op), "CUDA")


def _triton_or_error(op: Op):
    try:
        return op.load_triton()
    except ImportError as error:
        message = (
            f"torch_sparse_mla::{op.name}: no CUDA kernel, because Triton does not import ({error}); "
            "run 'pip install triton'"
        )

    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError(message)

    return missing


def _has_kernel(op: Op, dispatch_key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified_name, dispatch_key)


def explain(op: str, device: str | torch.device = "cpu") -> dict[str, str]:
    """Which kernel a call of `op` on `device` runs, and why.

    Args:
        op: an operator's name, e.g. "sparse_ckv_decode".
        device: a device or device type.
    Returns: a dict with keys "op", "device", "kernel" ("reference", "native C++", "triton" or "none") and "why".
    Raises: ValueError for an unknown operator or device type.
    """
    if op not in OPS:
        raise ValueError(f"torch_sparse_mla.explain: op: got {op!r}; allowed: one of {', '.join(OPS)}")
    try:
        device_type = torch.device(device).type
    except (RuntimeError, TypeError):
        device_type = device
    if device_type == "cpu":
        kernel, why = _explain_cpu(OPS[op])
    elif device_type == "cuda":
        kernel, why = _explain_cuda(OPS[op], torch.device(device))
    else:
        raise ValueError(f"torch_sparse_mla.explain: device: got {device_type!r}; allowed: cpu or cuda")
    return {"op": op, "device": device_type, "kernel": kernel, "why": why}


def _explain_cpu(op: Op) -> tuple[str, str]:
    if op.name not in _python_cpu_ops:
        return "native C++", f"{Path(native_library).name} is loaded"
    if native_library is None:
        return "reference", f"the native library is not in use: {native_error}"
    return "reference", "the native library has no CPU form of this operator"


def _explain_cuda(op: Op, device: torch.device) -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "none", "PyTorch sees no CUDA device"
    native_why = ""
    if op.native_cuda:
        capability = torch.cuda.get_device_capability(device)
        if op.name in native_cuda_ops and capability == (9, 0):
            why = f"the sm_90a kernels take {op.native_cuda}; anything else goes to the Triton kernel"
            if op.native_cuda_forms:
                choice = _native_choice()
                chosen = "whichever a model of clocks finds faster" if choice == "1" else f"{_NATIVE_FLAG}={choice}"
                why += f"; {op.native_cuda_forms}: {chosen}"
            return "native C++", why
        native_why = f"; {_why_not_native_cuda(capability)}"
    try:
        op.load_triton()
    except ImportError as error:
        return "none", f"Triton does not import: {error}; run 'pip install triton'"
    return "triton", f"the portable CUDA kernel, for sm_80 and newer{native_why}"


def _native_choice() -> str:
    return strict_choice(_NATIVE_FLAG, _NATIVE_CHOICES, default="1")


def _why_not_native_cuda(capability: tuple[int, int]) -> str:
    if native_library is None:
        return f"the native library is not in use: {native_error}"
    if not native_cuda_ops:
        return "the native library was built without nvcc"
    return f"the native kernels are for sm_90a, this GPU is sm_{capability[0]}{capability[1]}"


# Before the namespace is taken: a bad value must not leave the process unable to import again.
_native_wanted = _native_choice() != "0"
# Alive as long as the process: PyTorch drops the operators when the Library object dies.
library = _define_namespace()
for _op in OPS.values():
    _register_op(_op)
native_library, native_error = _load_native(_native_wanted)
native_cuda_ops = {name for name, op in OPS.items() if _has_kernel(op, "CUDA")}
_portable = torch.library.Library(_PORTABLE_NAMESPACE, "DEF")
_python_cpu_ops = {name for name, op in OPS.items() if not _has_kernel(op, "CPU")}
for _op in OPS.values():
    _register_kernels(_op)
