"""CUDA graphs over the operators: modes, splitting, capture, dispatch, and `compile`, which puts them together.

Each part works by itself, for an engine that has some of them: `graph_support` and `SPLITTING_OPS` say what may be
captured, `split_graph` splits what Dynamo traced, `CapturedGraph` and `GraphPool` capture and know what must outlive
them, `Dispatcher` chooses, and `CompiledStep.run` runs a chosen mode and size.
"""

from .api import compile
from .capture import CapturedGraph, GraphPool
from .dispatcher import Batch, Choice, Dispatcher
from .modes import CUDAGraphMode, GraphSupport, graph_support
from .nodes import node_counts
from .splitting import Piece, describe, split_graph
from .statistics import Statistics
from .step import CompiledStep

__all__ = [
    "Batch",
    "CUDAGraphMode",
    "CapturedGraph",
    "Choice",
    "CompiledStep",
    "Dispatcher",
    "GraphPool",
    "GraphSupport",
    "Piece",
    "Statistics",
    "compile",
    "describe",
    "graph_support",
    "node_counts",
    "split_graph",
]
