"""Sparse CKV decode in plain PyTorch, one row at a time: the definition of the result, and the CPU implementation."""

import torch

from ..records.codec import dequantise_records
from ..records.layouts import RecordLayout
from . import contract


def sparse_ckv_decode(
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
) -> None:
    record_layout = contract.check_sparse_ckv_decode(
        q, cache, indices, lengths, sink, out, lse, workspace, softmax_scale, layout, batch_invariant
    )
    _decode(q, [cache], indices, lengths, sink, out, lse, softmax_scale, record_layout)


def sparse_ckv_decode_peers(
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
) -> None:
    record_layout = contract.check_sparse_ckv_decode_peers(
        q, caches, indices, lengths, sink, out, lse, workspace, softmax_scale, layout, batch_invariant
    )
    _decode(q, caches, indices, lengths, sink, out, lse, softmax_scale, record_layout)


# A caller's autocast must not round the products.
@torch.autocast("cpu", enabled=False)
def _decode(
    q: torch.Tensor,
    caches: list[torch.Tensor],
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    record_layout: RecordLayout,
) -> None:
    compute = contract.compute_dtype(q.dtype)
    live = [indices.shape[1]] * len(q) if lengths is None else lengths.clamp(0, indices.shape[1]).tolist()
    for row, length in enumerate(live):
        slots = indices[row, :length].long()
        records = _select(caches, slots)
        latent, rope = dequantise_records(records, record_layout, compute)
        keys = latent if rope is None else torch.cat([latent, rope], -1)
        # A copy, since the sums of a matrix product can depend on where its operands lie in memory.
        scores = (q[row].to(compute, copy=True) @ keys.T) * softmax_scale
        lse[row] = torch.logsumexp(scores, -1)
        row_out = torch.softmax(scores, -1) @ latent
        out[row] = (row_out * sink_factor(lse[row], sink).unsqueeze(-1)).to(out.dtype)


def _select(caches: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """Records of the slots that there are, in their order; slots count through the caches."""
    pages, page_size, record_bytes = caches[0].shape
    slots = slots[(slots >= 0) & (slots < len(caches) * pages * page_size)]
    if len(caches) == 1:
        return caches[0][slots // page_size, slots % page_size]
    records = torch.empty(len(slots), record_bytes, dtype=torch.uint8)
    owners = slots // max(pages * page_size, 1)
    for owner, cache in enumerate(caches):
        own = owners == owner
        local = slots[own] - owner * pages * page_size
        records[own] = cache[local // page_size, local % page_size]
    return records


def merge_partial_attention(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    contract.check_merge_partial_attention(partial_out, partial_lse, sink, out, lse)
    lse.copy_(torch.logsumexp(partial_lse, 0))
    empty = partial_lse == -torch.inf
    weights = torch.where(empty, 0.0, torch.exp(partial_lse - lse)).unsqueeze(-1)
    # An empty partial weighs nothing, whatever its output buffer holds: 0 x NaN would be NaN.
    terms = torch.where(empty.unsqueeze(-1), 0.0, weights * partial_out.to(lse.dtype))
    out.copy_(terms.sum(0) * sink_factor(lse, sink).unsqueeze(-1))


def sink_factor(lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """exp(lse) / (exp(lse) + exp(sink)), the share of the softmax that a sink logit leaves; 0 for an empty row."""
    if sink is None:
        return torch.ones_like(lse)
    return torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink.to(lse.dtype)))
