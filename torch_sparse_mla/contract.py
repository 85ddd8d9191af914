"""Argument checks that every operator shares. A failed check names op, argument, what was given, what is allowed."""

import os

import torch
from torch.autograd import forward_ad

from .errors import reject as reject
from .records.layouts import LAYOUTS, RecordLayout

ALIGNMENT_BYTES = 16
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(op: str, argument: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        reject(op, argument, f"dtype {str(tensor.dtype).removeprefix('torch.')}", f"dtype {names}")


def check_shape(op: str, argument: str, tensor: torch.Tensor, shape: tuple, names: str) -> None:
    if tuple(tensor.shape) != tuple(shape):
        reject(op, argument, f"shape {list(tensor.shape)}", f"shape [{names}] = {list(shape)}")


def check_contiguous(op: str, argument: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        reject(op, argument, f"strides {list(tensor.stride())}", "a contiguous tensor (pass the whole buffer)")


def check_last_dim_contiguous(op: str, argument: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        reject(op, argument, f"strides {list(tensor.stride())}", "a last stride of 1")


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(given.items()))
    for name, device in given.items():
        if device != first:
            reject(op, name, f"device {device}", f"device {first}, where '{first_name}' is")


def check_layout(op: str, layout: str) -> RecordLayout:
    if layout not in LAYOUTS:
        reject(op, "layout", repr(layout), "one of " + ", ".join(LAYOUTS))
    return LAYOUTS[layout]


def check_cache(op: str, cache: torch.Tensor, layout: RecordLayout, argument: str = "cache") -> None:
    """A paged cache `uint8 [pages, page_size, record_bytes]`: records packed within a page, page stride free."""
    check_dtype(op, argument, cache, (torch.uint8,))
    if cache.dim() != 3 or cache.shape[2] != layout.record_bytes or cache.shape[1] < 1:
        reject(
            op,
            argument,
            f"shape {list(cache.shape)}",
            f"shape [pages, page_size >= 1, {layout.record_bytes}] for layout {layout.name}",
        )
    pages, page_size, record_bytes = cache.shape
    if cache.stride(2) != 1 or (page_size > 1 and cache.stride(1) != record_bytes):
        reject(op, argument, f"strides {list(cache.stride())}", f"strides [any, {record_bytes}, 1]")
    page_stride = cache.stride(0)
    if pages > 1 and (page_stride < page_size * record_bytes or page_stride % ALIGNMENT_BYTES):
        reject(
            op,
            argument,
            f"a page stride of {page_stride} bytes",
            f"a multiple of {ALIGNMENT_BYTES} from {page_size * record_bytes} up",
        )
    if not is_fake(cache) and cache.data_ptr() % ALIGNMENT_BYTES:
        reject(op, argument, "a misaligned first byte", f"storage aligned to {ALIGNMENT_BYTES} bytes")


def refuse_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    """The operators have no gradient; the public functions say so rather than drop one in silence."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                reject(op, name, "a tensor that requires a gradient", "torch.no_grad(), or a detached tensor")
    # Forward mode, where it is under way.
    if forward_ad._current_level >= 0:
        for name, tensor in tensors.items():
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                reject(op, name, "a tensor that carries a tangent", "a tensor outside of forward-mode differentiation")


def is_fake(tensor: torch.Tensor) -> bool:
    """True for meta and fake tensors, which have no memory to look at."""
    return tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor)


def check_no_overlap(op: str, outputs: dict[str, torch.Tensor | None], inputs: dict[str, torch.Tensor | None]) -> None:
    """Refuse an output whose memory range meets that of an input or another output, and any tensor without memory."""
    written = [(name, _memory_range(tensor)) for name, tensor in outputs.items() if tensor is not None]
    read = [(name, _memory_range(tensor)) for name, tensor in inputs.items() if tensor is not None]
    for name, (begin, end) in read + written:
        if begin == 0 and end > 0:
            reject(op, name, "a tensor whose memory was freed", "a tensor with memory")
    for position, (name, (begin, end)) in enumerate(written):
        for other, (other_begin, other_end) in read + written[:position]:
            if begin < other_end and other_begin < end:
                reject(op, name, f"memory that overlaps '{other}'", "memory of its own")


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    if is_fake(tensor) or tensor.numel() == 0:
        return (0, 0)
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def checked_mode() -> bool:
    """Whether `TORCH_SPARSE_MLA_CHECK=1` asks for checks of device data, which synchronise."""
    return strict_flag("TORCH_SPARSE_MLA_CHECK")


def strict_flag(name: str, default: str = "0") -> bool:
    return strict_choice(name, ("0", "1"), default) == "1"


def strict_choice(name: str, choices: tuple[str, ...], default: str) -> str:
    """The value of an environment variable that has a few."""
    value = os.environ.get(name, default)
    if value not in choices:
        allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ValueError(f"torch_sparse_mla: environment variable {name}: got {value!r}; allowed: {allowed}")
    return value


def refuse_checks_under_capture(op: str) -> None:
    """Checked mode reads device data back, which a CUDA graph capture cannot do."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"torch_sparse_mla::{op}: TORCH_SPARSE_MLA_CHECK=1 synchronises and cannot run while a CUDA graph is being "
            "captured; check in eager mode first, then capture with TORCH_SPARSE_MLA_CHECK=0"
        )


def reject_first_row(op: str, argument: str, bad: torch.Tensor, values: torch.Tensor, allowed: str) -> None:
    """Raise for the first row of `bad` that holds a True, naming the value there. Reads the device."""
    if not bool(bad.any()):
        return
    position = tuple(int(i) for i in bad.nonzero()[0])
    column = f", column {position[1]}" if len(position) > 1 else ""
    reject(op, argument, f"{values[position].item()} in row {position[0]}{column}", allowed)
