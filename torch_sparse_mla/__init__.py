"""PyTorch operators for sparse multi-head latent attention (MLA). Importing registers `torch.ops.torch_sparse_mla`."""

from ._ops import SPLITTING_OPS, explain
from .dcp import DcpSparseDecode, LinkCosts, run_loopback
from .decode.api import (
    merge_partial_attention,
    sparse_ckv_decode,
    sparse_ckv_decode_workspace_bytes,
    warmup_sparse_ckv_decode,
)
from .exchange.api import ce_exchange, ce_exchange_layers, ce_exchange_start, ce_exchange_wait
from .exchange.channel import Channel, ExchangeError
from .exchange.group import LoopbackGroup
from .graphs import CompiledStep, CUDAGraphMode, GraphPool, GraphSupport, compile, graph_support
from .records import LAYOUTS, RecordLayout, dequantise_records, quantise_records
from .records.api import read_ckv_records, write_ckv_records
from .selection import SelectionPlan, selection_plan_words
from .selection.api import current_token_slots, plan_selection

__version__ = "0.1.0"

__all__ = [
    "LAYOUTS",
    "SPLITTING_OPS",
    "CUDAGraphMode",
    "Channel",
    "CompiledStep",
    "DcpSparseDecode",
    "ExchangeError",
    "GraphPool",
    "GraphSupport",
    "LinkCosts",
    "LoopbackGroup",
    "RecordLayout",
    "SelectionPlan",
    "ce_exchange",
    "ce_exchange_layers",
    "ce_exchange_start",
    "ce_exchange_wait",
    "compile",
    "current_token_slots",
    "dequantise_records",
    "explain",
    "graph_support",
    "merge_partial_attention",
    "plan_selection",
    "quantise_records",
    "read_ckv_records",
    "run_loopback",
    "selection_plan_words",
    "sparse_ckv_decode",
    "sparse_ckv_decode_workspace_bytes",
    "warmup_sparse_ckv_decode",
    "write_ckv_records",
]
