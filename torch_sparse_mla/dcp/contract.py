"""What `DcpSparseDecode` accepts. Checked before anything is sent: a rank that fails later leaves its peers waiting."""

import torch

from ..contract import (
    FLOAT_DTYPES,
    check_cache,
    check_contiguous,
    check_dtype,
    check_last_dim_contiguous,
    check_layout,
    check_no_overlap,
    check_same_device,
    check_shape,
    refuse_gradients,
    reject,
)
from ..decode.contract import MAX_HEADS, MAX_TOPK, compute_dtype
from ..records.layouts import LATENT_DIM, ROPE_DIM, RecordLayout

OP = "DcpSparseDecode"
STRATEGIES = ("auto", "owner_merge", "exchange", "exchange_bulk", "peer_read")


def check_strategy(strategy: str, why_no_peers: str | None) -> None:
    """Args: why_no_peers: why ranks cannot read one another's caches; None where they can."""
    if strategy not in STRATEGIES:
        reject(OP, "strategy", repr(strategy), ", ".join(STRATEGIES))
    if strategy == "peer_read" and why_no_peers is not None:
        reject(OP, "strategy", "'peer_read'", f"{', '.join(STRATEGIES[:-1])} ({why_no_peers})")


def check_static(layout: str, dtype: torch.dtype, sizes: dict[str, int], softmax_scale: float) -> RecordLayout:
    if dtype not in (*FLOAT_DTYPES, torch.float64):
        reject(OP, "dtype", dtype, "bfloat16, float16, float32, and on the CPU float64")
    limits = {"heads": (1, MAX_HEADS), "topk": (1, MAX_TOPK), "shared_layers": (0, 1023)}
    for name, value in sizes.items():
        least, most = limits.get(name, (1, 2**31 - 1))
        if not isinstance(value, int) or not least <= value <= most:
            reject(OP, name, repr(value), f"an integer from {least} to {most}")
    if not isinstance(softmax_scale, int | float) or not 0 < softmax_scale < float("inf"):
        reject(OP, "softmax_scale", repr(softmax_scale), "above 0")
    return check_layout(OP, layout)


def check_query(
    q: torch.Tensor, rows: int, heads: int, layout: RecordLayout, dtype: torch.dtype, sink: torch.Tensor | None
) -> None:
    check_dtype(OP, "q", q, (dtype,))
    check_shape(OP, "q", q, (rows, heads, layout.query_dim), "rows, local heads, query width of the layout")
    if q.stride(2) != 1 or (heads > 1 and q.stride(1) != q.shape[2]):
        reject(OP, "q", f"strides {list(q.stride())}", f"strides [any, {q.shape[2]}, 1]")
    refuse_gradients(OP, q=q)
    if sink is not None:
        check_same_device(OP, q=q, sink=sink)
        check_dtype(OP, "sink", sink, (torch.float32,))
        check_shape(OP, "sink", sink, (heads,), "local heads")
        check_contiguous(OP, "sink", sink)


def check_selection(
    topk: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    requests: int,
    rows_per_request: int,
    columns: int,
) -> None:
    check_same_device(OP, topk=topk, block_table=block_table, lengths=lengths)
    for name, tensor in (("topk", topk), ("block_table", block_table), ("lengths", lengths)):
        check_dtype(OP, name, tensor, (torch.int32,))
    if block_table.dim() != 2 or not 1 <= block_table.shape[0] <= requests:
        reject(OP, "block_table", f"shape {list(block_table.shape)}", f"shape [1 to {requests} requests, blocks]")
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        reject(OP, "block_table", f"strides {list(block_table.stride())}", "strides [any, 1]")
    count = block_table.shape[0]
    allowed = f"shape [{count} requests x 1 to {rows_per_request} rows, {columns}]"
    if topk.dim() != 2 or topk.shape[1] != columns:
        reject(OP, "topk", f"shape {list(topk.shape)}", allowed)
    if topk.shape[0] % count or not 1 <= topk.shape[0] // count <= rows_per_request:
        reject(OP, "topk", f"shape {list(topk.shape)}", allowed)
    check_contiguous(OP, "topk", topk)
    check_shape(OP, "lengths", lengths, (topk.shape[0],), "rows")
    check_contiguous(OP, "lengths", lengths)


def check_caches(q: torch.Tensor, caches: list[torch.Tensor], layout: RecordLayout, page_size: int) -> None:
    for index, cache in enumerate(caches):
        name = f"shared_caches[{index - 1}]" if index else "cache"
        check_same_device(OP, q=q, **{name: cache})
        check_cache(OP, cache, layout, name)
        if cache.shape[1] != page_size:
            reject(OP, name, f"{cache.shape[1]} records in a page", f"page_size = {page_size}")


def check_results(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, inputs: dict[str, torch.Tensor | None]
) -> None:
    """Args: inputs: what else is given, and must not be overwritten."""
    rows, heads, _ = q.shape
    if out is not None:
        check_same_device(OP, q=q, out=out)
        check_dtype(OP, "out", out, (q.dtype,))
        check_shape(OP, "out", out, (rows, heads, LATENT_DIM), "rows, local heads, 512")
        check_contiguous(OP, "out", out)
    if lse is not None:
        check_same_device(OP, q=q, lse=lse)
        check_dtype(OP, "lse", lse, (compute_dtype(q.dtype),))
        check_shape(OP, "lse", lse, (rows, heads), "rows, local heads")
        check_contiguous(OP, "lse", lse)
    check_no_overlap(OP, {"out": out, "lse": lse}, {"q": q, **inputs})


def check_current(
    q: torch.Tensor, latent: torch.Tensor | None, rope: torch.Tensor | None, layout: RecordLayout
) -> None:
    rows = len(q)
    if latent is None:
        reject(OP, "latent", None, "latents of the rows' own tokens, which the records fetched ahead lack")
    check_shape(OP, "latent", latent, (rows, LATENT_DIM), "rows, 512")
    if (rope is None) != (layout.rope is None):
        given = "None" if rope is None else f"shape {list(rope.shape)}"
        reject(OP, "rope", given, f"{'[rows, 64]' if layout.rope else 'None'} for layout {layout.name}")
    if rope is not None:
        check_shape(OP, "rope", rope, (rows, ROPE_DIM), "rows, 64")
    for name, values in (("latent", latent), ("rope", rope)):
        if values is not None:
            check_same_device(OP, q=q, **{name: values})
            check_dtype(OP, name, values, FLOAT_DTYPES)
            check_last_dim_contiguous(OP, name, values)
