"""Prefill gather (C4): every rank's visible records come together, so that a chunk's rows attend with local heads.

takes: global lengths, block table, paged caches, top-k lists. gives: a gathered buffer, and slots in it for every row.
Reading order: plan (sizes, the plan buffer) -> geometry, residency, workspace (memory) -> policy (whether to gather at
all, and in which form) -> contract -> reference -> triton_kernels -> api.
"""

from .geometry import PageGeometry
from .plan import GatherPlan, causal_lengths, gather_capacity

__all__ = ["GatherPlan", "PageGeometry", "causal_lengths", "gather_capacity"]
