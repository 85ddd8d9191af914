"""PyTorch operators for sparse multi-head latent attention (MLA). Importing registers `torch.ops.torch_sparse_mla`."""

from ._ops import SPLITTING_OPS, explain
from .decode.api import (
    merge_partial_attention,
    sparse_ckv_decode,
    sparse_ckv_decode_workspace_bytes,
    warmup_sparse_ckv_decode,
)
from .records import LAYOUTS, RecordLayout, dequantise_records, quantise_records
from .records.api import read_ckv_records, write_ckv_records

__version__ = "0.1.0"

__all__ = [
    "LAYOUTS",
    "SPLITTING_OPS",
    "RecordLayout",
    "dequantise_records",
    "explain",
    "merge_partial_attention",
    "quantise_records",
    "read_ckv_records",
    "sparse_ckv_decode",
    "sparse_ckv_decode_workspace_bytes",
    "warmup_sparse_ckv_decode",
    "write_ckv_records",
]
