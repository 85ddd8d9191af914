"""NVTX ranges, and which phase of which operator a kernel is. The only place that touches NVTX.

    trace.begin("ce_exchange/pack", records)
    try: ...
    finally: trace.end()

Off by default: `begin` and `end` are then empty functions. `TORCH_SPARSE_MLA_NVTX=1`, or `enable()`, turns ranges on,
in one domain, named "op/phase" with rows or bytes as payload. Ranges stand inside operator bodies only: in code that is
traced they would break `fullgraph`. A graph replay emits none; the range "graph/replay" stands around it, and
`phase_of_kernel` says to which phase each of its kernels belongs, for kernels keep their names.
"""

import functools
import re
from types import ModuleType

from .contract import strict_flag

DOMAIN = "torch_sparse_mla"
FLAG = "TORCH_SPARSE_MLA_NVTX"
# Attribute objects are kept by name and payload; payloads are static sizes, so there are few.
_KEPT_ATTRIBUTES = 4096

# Name of a kernel as profilers show it (a pattern for the whole name) -> op/phase.
KERNEL_PHASES = {
    r"_sparse_ckv_decode_kernel": "sparse_ckv_decode/attend",
    r"_merge_partial_attention_kernel": "merge_partial_attention/merge",
    r"_write_kernel": "write_ckv_records/write",
    r"_read_kernel": "read_ckv_records/read",
    r"_first_entries_kernel|_first_entries_blocks_kernel": "plan_selection/first_entries",
    r"_union_kernel|_union_blocks_kernel": "plan_selection/union",
    r"_selected_slots_kernel": "selected_slots/look_up",
    r"_current_token_slots_kernel": "current_token_slots/look_up",
    r"_push_kernel|_pack_kernel": "ce_exchange/pack",
    r"_wait_kernel|_unpack_kernel": "ce_exchange/arrival",
    r"_release_kernel": "ce_exchange/release",
    r"_gather_starts_kernel": "c4_plan_gather/starts",
    r"_gather_slots_kernel": "c4_plan_gather/slots",
    r"_gather_rows_kernel": "c4_plan_gather/rows",
    r"_remap_kernel": "c4_remap/remap",
    r"_place_records_kernel": "c4_place_records/place",
    r"_write_index_keys_kernel": "c4_write_index_keys/write",
    r"_select_pools_kernel": "c4_select/select",
    r"_order_pools_kernel": "c4_select/order",
    r"_merge_pools_kernel": "c4_merge_pools/merge",
    # Kernels in C++ go by their whole signature.
    r".*torch_sparse_mla::sm90::attend_(wide_)?kernel.*": "sparse_ckv_decode/attend",
    r".*torch_sparse_mla::sm90::merge_kernel.*": "sparse_ckv_decode/merge",
    # From one GPU to another only exchanges copy; within one, PyTorch does too.
    r"Memcpy PtoP.*": "ce_exchange/copy",
    r"Memcpy .*": "device/copy",
    r"Memset .*": "device/fill",
}


def begin(name: str, payload: int) -> None:
    """Open a range `op/phase`; payload: rows or bytes. Does nothing unless ranges are on."""


def end() -> None:
    """Close the last range of this thread."""


_off = begin, end


def is_enabled() -> bool:
    return begin is not _off[0]


def enable() -> None:
    """Turn ranges on. Raises ImportError where the package `nvtx` is missing."""
    global begin, end
    domain, attributes = _open_domain()

    def begin(name: str, payload: int) -> None:
        domain.push_range(attributes(name, payload))

    end = domain.pop_range


def disable() -> None:
    """Turn ranges off. Close every open one first."""
    global begin, end
    begin, end = _off


@functools.cache
def phase_of_kernel(name: str) -> str | None:
    """The phase "op/phase" of a kernel by its name; None for a kernel of somebody else."""
    for pattern, phase in KERNEL_PHASES.items():
        if re.fullmatch(pattern, name):
            return phase
    return None


def _open_domain():
    nvtx = _import_nvtx()
    domain = nvtx.get_domain(DOMAIN)

    @functools.lru_cache(maxsize=_KEPT_ATTRIBUTES)
    def attributes(name: str, payload: int):
        return domain.get_event_attributes(message=name, payload=payload)

    return domain, attributes


def _import_nvtx() -> ModuleType:
    try:
        import nvtx
    except ImportError as error:
        raise ImportError(
            f"torch_sparse_mla.trace: NVTX ranges ({FLAG}=1) need the package nvtx, which does not import ({error}); "
            f"run 'pip install nvtx', or set {FLAG}=0"
        ) from error
    return nvtx


if strict_flag(FLAG):
    enable()
