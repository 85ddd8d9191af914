"""Public functions of the decode family."""

import torch

from .. import _ops  # noqa: F401  (registers the operators)
from ..contract import refuse_gradients
from ..records.layouts import LATENT_DIM, LAYOUTS
from .contract import compute_dtype, sparse_ckv_decode_workspace_bytes


def sparse_ckv_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    layout: str,
    lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row over the records that the row selected (MQA over the latent, absorbed form).

    For row i and head h, over the counted slots s of the row:
    `out[i, h] = sum_s softmax_s(softmax_scale * q[i, h] . key[s]) * latent[s]`, where key is latent then RoPE part.

    Args:
        q: [rows, heads, 576] ([rows, heads, 512] for the nope layouts) bfloat16, float16 or float32; row stride free;
            heads 1..128. A row is a query token: several rows of one request are simply rows.
        cache: [pages, page_size, record_bytes] uint8; page stride free (a multiple of 16 bytes).
        indices: [rows, K] int32 slots, row stride free, K 1..16384; -1 anywhere is absent; a repeated one counts twice.
        softmax_scale: factor of the scores, usually the head's own (unabsorbed) dimension ** -0.5.
        layout: a key of `torch_sparse_mla.LAYOUTS`.
        lengths: [rows] int32: only `indices[i, :lengths[i]]` counts; <= 0 is an empty row, > K means K. None: K.
        sink: [heads] float32 logit that takes part in the softmax with no value; scales `out`, leaves `lse`.
        out: [rows, heads, 512], contiguous; overwritten; 0 for an empty row. Allocated in q's dtype when None.
        lse: [rows, heads] float32; natural log of the sum of exponentials of scaled scores; -inf for an empty row.
        workspace: uint8, `sparse_ckv_decode_workspace_bytes(rows, heads, K, batch_invariant)` bytes or more.
        batch_invariant: give a row the same bits whatever the number of rows in the call. Slower; rows are launched in
            groups, so that partial results stay below 34 MB.
    Returns: (out, lse).
    Raises: ValueError for an argument that does not fit. An index beyond the cache counts as absent (checked mode,
        `TORCH_SPARSE_MLA_CHECK=1`, raises and names the row).
    Capture: safe when out, lse and workspace are given and the kernels are there (`warmup_sparse_ckv_decode`);
        lengths, indices and records may change between replays.
    """
    refuse_gradients("sparse_ckv_decode", q=q, out=out, lse=lse)
    out, lse, workspace = _outputs(q, indices, out, lse, workspace, batch_invariant)
    torch.ops.torch_sparse_mla.sparse_ckv_decode(
        q, cache, indices, lengths, sink, out, lse, workspace, softmax_scale, layout, batch_invariant
    )
    return out, lse


def sparse_ckv_decode_peers(
    q: torch.Tensor,
    caches: list[torch.Tensor],
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    layout: str,
    lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_ckv_decode` over several caches, as if they were one: their pages count through, cache by cache.

    The caches of other GPUs may be among them, where their memory is mapped: records are read where they lie.

    Args:
        q: as for `sparse_ckv_decode`.
        caches: 1 to 8 caches [pages, page_size, record_bytes] uint8 of one shape and one set of strides. Nothing may
            write a record that the call reads; what a peer wrote must be visible to this device before the call begins.
        indices: [rows, K] int32: `owner * pages * page_size + slot` names a slot of `caches[owner]`; -1 is absent.
        softmax_scale, layout, lengths, sink, out, lse, workspace, batch_invariant: as for `sparse_ckv_decode`.
    Returns: (out, lse), what `sparse_ckv_decode` gives for `torch.cat(caches)`: to the bit where the same kernel takes
        that call, to rounding where a native one does (`explain`).
    Raises: ValueError for an argument that does not fit, as `sparse_ckv_decode`.
    Capture: as `sparse_ckv_decode`, after an eager call; a graph keeps the caches' addresses.
    """
    refuse_gradients("sparse_ckv_decode_peers", q=q, out=out, lse=lse)
    out, lse, workspace = _outputs(q, indices, out, lse, workspace, batch_invariant)
    torch.ops.torch_sparse_mla.sparse_ckv_decode_peers(
        q, caches, indices, lengths, sink, out, lse, workspace, softmax_scale, layout, batch_invariant
    )
    return out, lse


def _outputs(
    q: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is given, and new buffers for what is not."""
    # A wrong number of dimensions is for the operator to refuse, by name.
    rows, num_heads = (*q.shape, 0, 0)[:2]
    topk = indices.shape[-1] if indices.dim() else 1
    if out is None:
        out = torch.empty(rows, num_heads, LATENT_DIM, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(rows, num_heads, dtype=compute_dtype(q.dtype), device=q.device)
    if workspace is None:
        size = sparse_ckv_decode_workspace_bytes(rows, num_heads, topk, batch_invariant)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    return out, lse, workspace


def warmup_sparse_ckv_decode(
    num_heads: int,
    layout: str,
    *,
    device: str | torch.device = "cuda",
    q_dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    with_lengths: bool = True,
    with_sink: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Compile and load every kernel that `sparse_ckv_decode` may launch for these types, whatever the number of rows.

    Call it once per device before the first capture, so that nothing is compiled while a graph is being captured or at
    the first long prompt. Runs the operator on a few small inputs; does nothing worth its time on the CPU.

    Args:
        num_heads, layout: as in the calls to come.
        device: where they run.
        q_dtype, out_dtype: of their tensors; `out` has q's type when None.
        with_lengths, with_sink: whether they pass `lengths` and `sink`.
        batch_invariant: as in the calls to come.
    Raises: ValueError as `sparse_ckv_decode` does.
    """
    dim = LAYOUTS[layout].query_dim if layout in LAYOUTS else 0
    width = LAYOUTS[layout].record_bytes if layout in LAYOUTS else 0
    cache = torch.zeros(1, 1, width, dtype=torch.uint8, device=device)
    # Few rows and many, in one part and in several.
    for rows, topk in ((1, 1), (1, 1024), (16, 1), (16, 1024)):
        q = torch.zeros(rows, num_heads, dim, dtype=q_dtype, device=device)
        sparse_ckv_decode(
            q,
            cache,
            torch.zeros(rows, topk, dtype=torch.int32, device=device),
            softmax_scale=1.0,
            layout=layout,
            lengths=torch.ones(rows, dtype=torch.int32, device=device) if with_lengths else None,
            sink=torch.zeros(num_heads, dtype=torch.float32, device=device) if with_sink else None,
            out=torch.empty(rows, num_heads, LATENT_DIM, dtype=out_dtype or q_dtype, device=device),
            batch_invariant=batch_invariant,
        )


def merge_partial_attention(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint parts of a list into attention over the whole list, exactly.

    Args:
        partial_out: [P, rows, heads, 512] bfloat16, float16 or float32; each part normalised by itself, and contiguous;
            parts may lie apart (a multiple of 16 bytes).
        partial_lse: [P, rows, heads] float32, natural log, parts as above; -inf: the part is empty and weighs nothing.
        sink: as for `sparse_ckv_decode`; give it here or there, not in both.
        out: [rows, heads, 512], contiguous; overwritten; 0 where every part is empty. In partial_out's dtype when None.
        lse: [rows, heads] float32; overwritten; -inf where every part is empty.
    Returns: (out, lse).
    Raises: ValueError for an argument that does not fit.
    Capture: safe when out and lse are given.
    """
    refuse_gradients("merge_partial_attention", partial_out=partial_out, partial_lse=partial_lse, out=out, lse=lse)
    if out is None:
        out = torch.empty(partial_out.shape[1:], dtype=partial_out.dtype, device=partial_out.device)
    if lse is None:
        lse = torch.empty(partial_out.shape[1:3], dtype=compute_dtype(partial_out.dtype), device=partial_out.device)
    torch.ops.torch_sparse_mla.merge_partial_attention(partial_out, partial_lse, sink, out, lse)
    return out, lse
