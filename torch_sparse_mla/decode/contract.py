"""What `sparse_ckv_decode` and `merge_partial_attention` accept, how much workspace they need, how rows are split."""

import math

import torch

from ..contract import (
    ALIGNMENT_BYTES,
    FLOAT_DTYPES,
    check_cache,
    check_contiguous,
    check_dtype,
    check_last_dim_contiguous,
    check_layout,
    check_no_overlap,
    check_same_device,
    check_shape,
    checked_mode,
    is_fake,
    refuse_checks_under_capture,
    reject,
    reject_first_row,
)
from ..records.layouts import LATENT_DIM, RecordLayout

MAX_HEADS = 128
MAX_TOPK = 16_384
MAX_CACHES = 8
INT32_MAX = 2**31 - 1

HEADS_PER_TILE = 16
TOKENS_PER_TILE = 64
INVARIANT_TOKENS_PER_SPLIT = 256
# At most this many programs, two for each multiprocessor of an H200. A constant, not the device's own count: sizes stay
# pure functions of the arguments, and results do not change from one GPU to another of its kind.
MAX_PROGRAMS = 264
# With a fixed split size, rows are launched in groups of at most this many programs: the partial results of one group
# fit in 34 MB whatever the number of rows.
INVARIANT_PROGRAMS_PER_LAUNCH = 1024
# The wide form of the Hopper kernels: a program for 64 heads and tiles of 48 tokens, one program a multiprocessor.
FEWEST_WIDE_HEADS = 33
WIDE_HEADS_PER_TILE = 64
WIDE_TOKENS_PER_TILE = 48
MAX_WIDE_PROGRAMS = 132
# Partial results of one head of one part: fp16 latents, four units, an lse.
WIDE_PART_BYTES = LATENT_DIM * 2 + 5 * 4


def num_splits(rows: int, num_heads: int, topk: int, batch_invariant: bool, target_programs: int = MAX_PROGRAMS) -> int:
    """Parts in which each row's list is attended to, a function of static sizes alone.

    Where a part begins and ends is worked out on the device from the row's live length.
    """
    if batch_invariant:
        return _ceil_div(topk, INVARIANT_TOKENS_PER_SPLIT)
    tiles = _ceil_div(topk, TOKENS_PER_TILE)
    programs = max(rows * _ceil_div(num_heads, HEADS_PER_TILE), 1)
    return min(max(target_programs // programs, 1), tiles)


def max_wide_splits(rows: int, num_heads: int, topk: int) -> int:
    """Parts that the wide form makes of a row at most."""
    if num_heads < FEWEST_WIDE_HEADS:
        return 1
    programs = max(rows * _ceil_div(num_heads, WIDE_HEADS_PER_TILE), 1)
    return max(min(MAX_WIDE_PROGRAMS // programs, _ceil_div(topk, WIDE_TOKENS_PER_TILE)), 1)


def rows_per_launch(rows: int, num_heads: int, topk: int, batch_invariant: bool) -> int:
    """Rows whose partial results are in the workspace at one time."""
    if not batch_invariant:
        return rows
    programs_per_row = num_splits(rows, num_heads, topk, True) * _ceil_div(num_heads, HEADS_PER_TILE)
    return min(rows, max(INVARIANT_PROGRAMS_PER_LAUNCH // max(programs_per_row, 1), 1))


def sparse_ckv_decode_workspace_bytes(rows: int, num_heads: int, topk: int, batch_invariant: bool = False) -> int:
    """Bytes of workspace that `sparse_ckv_decode` needs, on any device. A pure function of static sizes.

    Contents are undefined before and after a call. One workspace may serve calls that run one after another; calls
    that can run at the same time (two streams, two captured graphs replayed together) need one each.
    """
    size = 0
    splits = num_splits(rows, num_heads, topk, batch_invariant)
    if splits > 1:
        size = rows_per_launch(rows, num_heads, topk, batch_invariant) * splits * num_heads * (LATENT_DIM + 1) * 4
    wide_splits = 1 if batch_invariant else max_wide_splits(rows, num_heads, topk)
    if wide_splits > 1:
        size = max(size, rows * wide_splits * num_heads * WIDE_PART_BYTES)
    return size


def check_sparse_ckv_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    softmax_scale: float,
    layout: str,
    batch_invariant: bool = False,
) -> RecordLayout:
    tensors = (q, indices, lengths, sink, out, lse, workspace)
    return _check_decode("sparse_ckv_decode", [cache], tensors, layout, batch_invariant)


def check_sparse_ckv_decode_peers(
    q: torch.Tensor,
    caches: list[torch.Tensor],
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    softmax_scale: float,
    layout: str,
    batch_invariant: bool = False,
) -> RecordLayout:
    op = "sparse_ckv_decode_peers"
    if not 1 <= len(caches) <= MAX_CACHES:
        reject(op, "caches", f"{len(caches)} caches", f"1 to {MAX_CACHES}")
    tensors = (q, indices, lengths, sink, out, lse, workspace)
    record_layout = _check_decode(op, caches, tensors, layout, batch_invariant)
    for cache in caches:
        if cache.shape != caches[0].shape or cache.stride() != caches[0].stride():
            given = f"shape {list(cache.shape)}, strides {list(cache.stride())}"
            reject(op, "caches", given, f"those of the first: {list(caches[0].shape)}, {list(caches[0].stride())}")
    slots = len(caches) * caches[0].shape[0] * caches[0].shape[1]
    if not isinstance(slots, torch.SymInt) and slots - 1 > INT32_MAX:
        reject(op, "caches", f"{slots} slots in all", f"at most {INT32_MAX + 1}, which int32 indices can name")
    return record_layout


def _check_decode(
    op: str, caches: list[torch.Tensor], tensors: tuple, layout: str, batch_invariant: bool
) -> RecordLayout:
    q, indices, lengths, sink, out, lse, workspace = tensors
    record_layout = check_layout(op, layout)
    given = {"cache": caches[0]} if op == "sparse_ckv_decode" else {f"caches[{i}]": x for i, x in enumerate(caches)}
    check_same_device(
        op, q=q, **given, indices=indices, lengths=lengths, sink=sink, out=out, lse=lse, workspace=workspace
    )
    for name, cache in given.items():
        check_cache(op, cache, record_layout, name)
    _check_query(op, q, record_layout)
    rows, num_heads = q.shape[0], q.shape[1]
    check_dtype(op, "indices", indices, (torch.int32,))
    if indices.dim() != 2 or indices.shape[0] != rows or not 1 <= indices.shape[1] <= MAX_TOPK:
        reject(op, "indices", f"shape {list(indices.shape)}", f"shape [rows, 1..{MAX_TOPK}] with rows = {rows}")
    check_last_dim_contiguous(op, "indices", indices)
    if lengths is not None:
        check_dtype(op, "lengths", lengths, (torch.int32,))
        check_shape(op, "lengths", lengths, (rows,), "rows")
        check_contiguous(op, "lengths", lengths)
    _check_outputs(op, q.dtype, sink, out, lse, rows, num_heads)
    check_dtype(op, "workspace", workspace, (torch.uint8,))
    check_contiguous(op, "workspace", workspace)
    sizes = (rows, num_heads, indices.shape[1])
    # Symbolic sizes would turn the split of the lists into guards of the compiled graph.
    if any(isinstance(size, torch.SymInt) for size in (*sizes, workspace.numel())):
        return record_layout
    needed = sparse_ckv_decode_workspace_bytes(*sizes, batch_invariant)
    if workspace.numel() < needed:
        reject(op, "workspace", f"{workspace.numel()} bytes", f"at least sparse_ckv_decode_workspace_bytes = {needed}")
    if is_fake(q):
        return record_layout
    if needed and workspace.data_ptr() % ALIGNMENT_BYTES:
        reject(op, "workspace", "a misaligned first byte", f"storage aligned to {ALIGNMENT_BYTES} bytes")
    check_no_overlap(
        op,
        {"out": out, "lse": lse, "workspace": workspace},
        {"q": q, **given, "indices": indices, "lengths": lengths, "sink": sink},
    )
    if checked_mode():
        _check_device_data(op, len(caches) * caches[0].shape[0] * caches[0].shape[1], indices, lengths)
    return record_layout


def check_merge_partial_attention(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    op = "merge_partial_attention"
    check_same_device(op, partial_out=partial_out, partial_lse=partial_lse, sink=sink, out=out, lse=lse)
    check_dtype(op, "partial_out", partial_out, _with_float64_on_cpu(partial_out, FLOAT_DTYPES))
    if partial_out.dim() != 4 or partial_out.shape[0] < 1 or partial_out.shape[3] != LATENT_DIM:
        allowed = f"shape [partials >= 1, rows, heads, {LATENT_DIM}]"
        reject(op, "partial_out", f"shape {list(partial_out.shape)}", allowed)
    partials, rows, num_heads, _ = partial_out.shape
    _check_parts(op, "partial_out", partial_out)
    check_dtype(op, "partial_lse", partial_lse, (compute_dtype(partial_out.dtype),))
    check_shape(op, "partial_lse", partial_lse, (partials, rows, num_heads), "partials, rows, heads")
    _check_parts(op, "partial_lse", partial_lse)
    _check_outputs(op, partial_out.dtype, sink, out, lse, rows, num_heads)
    check_no_overlap(
        op, {"out": out, "lse": lse}, {"partial_out": partial_out, "partial_lse": partial_lse, "sink": sink}
    )


def _check_parts(op: str, argument: str, partial: torch.Tensor) -> None:
    """Each part contiguous. Parts may lie apart, by a distance that keeps them aligned."""
    # By sizes and strides alone: a fake CUDA tensor cannot be indexed on a machine without CUDA.
    size, stride = math.prod(partial.shape[1:]), partial.stride(0)
    aligned = argument == "partial_lse" or stride * partial.element_size() % ALIGNMENT_BYTES == 0
    apart = len(partial) == 1 or (stride >= size and aligned)
    if not apart or not _is_packed(partial.shape[1:], partial.stride()[1:]):
        reject(
            op,
            argument,
            f"strides {list(partial.stride())}",
            f"contiguous parts, {size} elements or more apart"
            + (f" and a multiple of {ALIGNMENT_BYTES} bytes" if argument == "partial_out" else ""),
        )


def _is_packed(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether numbers of this shape lie one after another."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return math.prod(shape) == 0
        expected *= size
    return True


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, except for float64 inputs, which the CPU takes so that tests can compare without rounding."""
    return torch.promote_types(dtype, torch.float32)


def _check_query(op: str, q: torch.Tensor, layout: RecordLayout) -> None:
    check_dtype(op, "q", q, _with_float64_on_cpu(q, FLOAT_DTYPES))
    if q.dim() != 3 or q.shape[2] != layout.query_dim or not 1 <= q.shape[1] <= MAX_HEADS:
        allowed = f"shape [rows, 1..{MAX_HEADS} heads, {layout.query_dim}] for layout {layout.name}"
        reject(op, "q", f"shape {list(q.shape)}", allowed)
    if q.stride(2) != 1 or (q.shape[1] > 1 and q.stride(1) != q.shape[2]):
        reject(op, "q", f"strides {list(q.stride())}", f"strides [any, {q.shape[2]}, 1]")


def _check_outputs(
    op: str,
    input_dtype: torch.dtype,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: int,
    num_heads: int,
) -> None:
    if sink is not None:
        check_dtype(op, "sink", sink, (torch.float32,))
        check_shape(op, "sink", sink, (num_heads,), "heads")
        check_contiguous(op, "sink", sink)
    allowed = (torch.float64,) if input_dtype == torch.float64 else FLOAT_DTYPES
    check_dtype(op, "out", out, allowed)
    check_shape(op, "out", out, (rows, num_heads, LATENT_DIM), "rows, heads, 512")
    check_contiguous(op, "out", out)
    check_dtype(op, "lse", lse, (compute_dtype(input_dtype),))
    check_shape(op, "lse", lse, (rows, num_heads), "rows, heads")
    check_contiguous(op, "lse", lse)


def _check_device_data(op: str, num_slots: int, indices: torch.Tensor, lengths: torch.Tensor | None) -> None:
    if indices.is_cuda:
        refuse_checks_under_capture(op)
    topk = indices.shape[1]
    counted = torch.ones_like(indices, dtype=torch.bool)
    if lengths is not None:
        reject_first_row(op, "lengths", lengths > topk, lengths, f"at most K = {topk}")
        counted = torch.arange(topk, device=indices.device) < lengths.unsqueeze(1)
    bad = counted & ((indices < -1) | (indices >= num_slots))
    reject_first_row(op, "indices", bad, indices, f"-1 or a slot in 0..{num_slots - 1}")


def _with_float64_on_cpu(tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    return dtypes if tensor.device.type == "cuda" else (*dtypes, torch.float64)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
