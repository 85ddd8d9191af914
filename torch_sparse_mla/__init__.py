"""PyTorch operators for sparse multi-head latent attention (MLA). Importing registers `torch.ops.torch_sparse_mla`."""

from ._ops import SPLITTING_OPS, explain
from .dcp import DcpSparseDecode, LinkCosts, PeerCaches, run_loopback, union_growth
from .decode.api import (
    merge_partial_attention,
    sparse_ckv_decode,
    sparse_ckv_decode_peers,
    sparse_ckv_decode_workspace_bytes,
    warmup_sparse_ckv_decode,
)
from .exchange.api import ce_exchange, ce_exchange_layers, ce_exchange_start, ce_exchange_wait
from .exchange.channel import Channel, ExchangeError
from .exchange.group import LoopbackGroup
from .gather import GatherPlan, PageGeometry, causal_lengths, gather_capacity
from .gather.api import (
    c4_place_records,
    c4_plan_gather,
    c4_prefill_gather,
    c4_prefill_gather_start,
    c4_prefill_gather_wait,
    c4_remap,
)
from .gather.policy import GatherChoice, GatherCosts, GatherPolicy, SelectChoice
from .gather.residency import Residency, ResidentChunk
from .gather.workspace import GatherSlot, LaneBytes, ResidentLane, Workspace, lane_bytes, resident_bytes
from .graphs import CompiledStep, CUDAGraphMode, GraphPool, GraphSupport, compile, graph_support
from .indexer import exact_index_queries, quantise_index_queries
from .indexer.api import c4_merge_pools, c4_select, c4_write_index_keys, warmup_c4_indexer
from .indexer.contract import c4_select_workspace_bytes
from .indexer.row_split import RowSplit
from .indexer.split_selector import SplitSelector
from .records import LAYOUTS, RecordLayout, dequantise_records, quantise_records
from .records.api import read_ckv_records, write_ckv_records
from .selection import SelectionPlan, selection_plan_words
from .selection.api import current_token_slots, plan_selection, selected_slots

__version__ = "0.1.0"

__all__ = [
    "LAYOUTS",
    "SPLITTING_OPS",
    "CUDAGraphMode",
    "Channel",
    "CompiledStep",
    "DcpSparseDecode",
    "ExchangeError",
    "GatherChoice",
    "GatherCosts",
    "GatherPlan",
    "GatherPolicy",
    "GatherSlot",
    "GraphPool",
    "GraphSupport",
    "LaneBytes",
    "LinkCosts",
    "LoopbackGroup",
    "PageGeometry",
    "PeerCaches",
    "RecordLayout",
    "Residency",
    "ResidentChunk",
    "ResidentLane",
    "RowSplit",
    "SelectChoice",
    "SelectionPlan",
    "SplitSelector",
    "Workspace",
    "c4_merge_pools",
    "c4_place_records",
    "c4_plan_gather",
    "c4_prefill_gather",
    "c4_prefill_gather_start",
    "c4_prefill_gather_wait",
    "c4_remap",
    "c4_select",
    "c4_select_workspace_bytes",
    "c4_write_index_keys",
    "causal_lengths",
    "ce_exchange",
    "ce_exchange_layers",
    "ce_exchange_start",
    "ce_exchange_wait",
    "compile",
    "current_token_slots",
    "dequantise_records",
    "exact_index_queries",
    "explain",
    "gather_capacity",
    "graph_support",
    "lane_bytes",
    "merge_partial_attention",
    "plan_selection",
    "quantise_index_queries",
    "quantise_records",
    "read_ckv_records",
    "resident_bytes",
    "run_loopback",
    "selected_slots",
    "selection_plan_words",
    "sparse_ckv_decode",
    "sparse_ckv_decode_peers",
    "sparse_ckv_decode_workspace_bytes",
    "union_growth",
    "warmup_c4_indexer",
    "warmup_sparse_ckv_decode",
    "write_ckv_records",
]
