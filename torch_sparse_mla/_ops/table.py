"""One table of operators: name, schema, implementations. Everything else about registration follows from it."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from ..decode import contract as decode_contract
from ..decode import reference as decode_reference
from ..exchange import contract as exchange_contract
from ..exchange import reference as exchange_reference
from ..gather import contract as gather_contract
from ..gather import reference as gather_reference
from ..indexer import contract as indexer_contract
from ..indexer import reference as indexer_reference
from ..records import contract as records_contract
from ..records import reference as records_reference
from ..selection import contract as selection_contract
from ..selection import reference as selection_reference

NAMESPACE = "torch_sparse_mla"

_GATHER_SCHEMA = "(Tensor cache, Tensor plan, Tensor(a!) gathered, Tensor(b!) state, str channel) -> ()"
_EXCHANGE_SCHEMA = "(Tensor[] caches, Tensor plan, Tensor(a!)[] workspaces, Tensor(b!) state, str channel) -> ()"


class GraphSupport(enum.IntEnum):
    """In which CUDA graphs an operator may be captured; each level allows what those below it do.

    NEVER: none; FULL refuses it, PIECEWISE runs it between graphs. UNIFORM_SINGLE_TOKEN: decode batches of one token a
    request. UNIFORM_BATCH: batches of equally many tokens a request. ALWAYS: any.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True)
class Op:
    """One operator.

    Attributes:
        name: name within the namespace; also that of its reference, its Triton entry, its tests and its benchmark.
        schema: arguments and result, as `torch.library` reads them.
        reference: plain PyTorch; the registered CPU implementation unless the native library brings one.
        check: the argument checks; the fake (meta) kernel is this and nothing else, since every op returns `()`.
        triton: "module:function" of the CUDA implementation, relative to the package, imported at registration.
        splitting: whether PIECEWISE graphs split at this operator by default.
        native_cuda: what the native library's CUDA kernels take, where it has any; the rest goes to `triton`.
        native_cuda_forms: what of that has two forms of kernels, narrow and wide, to choose from.
        graph_support: in which CUDA graphs a call may be captured.
    """

    name: str
    schema: str
    reference: Callable[..., None]
    check: Callable[..., object]
    triton: str
    splitting: bool = False
    native_cuda: str = ""
    native_cuda_forms: str = ""
    graph_support: GraphSupport = GraphSupport.ALWAYS

    @property
    def qualified_name(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    def load_triton(self) -> Callable[..., None]:
        """Import the CUDA implementation. Raises ImportError where Triton is missing."""
        module, function = self.triton.split(":")
        return getattr(import_module(f"torch_sparse_mla.{module}"), function)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            name="write_ckv_records",
            schema="(Tensor latent, Tensor? rope, Tensor slots, Tensor(a!) cache, str layout) -> ()",
            reference=records_reference.write_ckv_records,
            check=records_contract.check_write_ckv_records,
            triton="records.triton_kernels:write_ckv_records",
        ),
        Op(
            name="read_ckv_records",
            schema="(Tensor cache, Tensor slots, Tensor(a!) out, str layout) -> ()",
            reference=records_reference.read_ckv_records,
            check=records_contract.check_read_ckv_records,
            triton="records.triton_kernels:read_ckv_records",
        ),
        Op(
            name="sparse_ckv_decode",
            schema=(
                "(Tensor q, Tensor cache, Tensor indices, Tensor? lengths, Tensor? sink, Tensor(a!) out, "
                "Tensor(b!) lse, Tensor(c!) workspace, float softmax_scale, str layout, "
                "bool batch_invariant=False) -> ()"
            ),
            reference=decode_reference.sparse_ckv_decode,
            check=decode_contract.check_sparse_ckv_decode,
            triton="decode.triton_kernels:sparse_ckv_decode",
            splitting=True,
            native_cuda=(
                "bfloat16 queries with every layout and float16 queries with quantised layouts, under a positive "
                "softmax scale, where 'out' is aligned to 16 bytes"
            ),
            native_cuda_forms="33 heads and more in blocks of 16 heads (narrow) or of 64 (wide)",
        ),
        Op(
            name="sparse_ckv_decode_peers",
            schema=(
                "(Tensor q, Tensor[] caches, Tensor indices, Tensor? lengths, Tensor? sink, Tensor(a!) out, "
                "Tensor(b!) lse, Tensor(c!) workspace, float softmax_scale, str layout, "
                "bool batch_invariant=False) -> ()"
            ),
            reference=decode_reference.sparse_ckv_decode_peers,
            check=decode_contract.check_sparse_ckv_decode_peers,
            triton="decode.triton_kernels:sparse_ckv_decode_peers",
            splitting=True,
        ),
        Op(
            name="merge_partial_attention",
            schema="(Tensor partial_out, Tensor partial_lse, Tensor? sink, Tensor(a!) out, Tensor(b!) lse) -> ()",
            reference=decode_reference.merge_partial_attention,
            check=decode_contract.check_merge_partial_attention,
            triton="decode.triton_kernels:merge_partial_attention",
        ),
        Op(
            name="plan_selection",
            schema=(
                "(Tensor topk, Tensor block_table, Tensor(a!) plan, int rows_per_request, int page_size, "
                "int interleave, int rank, int world, int reserved_requests=0, int reserved_rows_per_request=0, "
                "int? pages=None) -> ()"
            ),
            reference=selection_reference.plan_selection,
            check=selection_contract.check_plan_selection,
            triton="selection.triton_kernels:plan_selection",
        ),
        Op(
            name="selected_slots",
            schema=(
                "(Tensor topk, Tensor block_table, Tensor lengths, Tensor(a!) slots, Tensor(b!)? counts, "
                "int page_size, int interleave, int rank, int world, int slots_per_rank=0) -> ()"
            ),
            reference=selection_reference.selected_slots,
            check=selection_contract.check_selected_slots,
            triton="selection.triton_kernels_slots:selected_slots",
        ),
        Op(
            name="current_token_slots",
            schema="(Tensor topk, Tensor lengths, Tensor remap, Tensor(a!) slots, int rows_per_request) -> ()",
            reference=selection_reference.current_token_slots,
            check=selection_contract.check_current_token_slots,
            triton="selection.triton_kernels_slots:current_token_slots",
        ),
        Op(
            name="ce_exchange",
            schema="(Tensor cache, Tensor plan, Tensor(a!) workspace, Tensor(b!) state, str channel) -> ()",
            reference=exchange_reference.ce_exchange,
            check=exchange_contract.check_ce_exchange,
            triton="exchange.triton_kernels:ce_exchange",
        ),
        Op(
            name="ce_exchange_layers",
            schema=_EXCHANGE_SCHEMA,
            reference=exchange_reference.ce_exchange_layers,
            check=exchange_contract.check_ce_exchange_layers,
            triton="exchange.triton_kernels:ce_exchange_layers",
        ),
        Op(
            name="ce_exchange_start",
            schema=_EXCHANGE_SCHEMA,
            reference=exchange_reference.ce_exchange_start,
            check=exchange_contract.check_ce_exchange_start,
            triton="exchange.triton_kernels:ce_exchange_start",
        ),
        Op(
            name="ce_exchange_wait",
            schema=_EXCHANGE_SCHEMA,
            reference=exchange_reference.ce_exchange_wait,
            check=exchange_contract.check_ce_exchange_wait,
            triton="exchange.triton_kernels:ce_exchange_wait",
        ),
        Op(
            name="c4_write_index_keys",
            schema=(
                "(Tensor keys, Tensor gates, Tensor bias, Tensor row_starts, Tensor starts, Tensor ring_rows, "
                "Tensor block_table, Tensor(a!) ring, Tensor(b!) pools, int page_size, int interleave, int rank, "
                "int world, int drafts=0) -> ()"
            ),
            reference=indexer_reference.c4_write_index_keys,
            check=indexer_contract.check_c4_write_index_keys,
            triton="indexer.triton_kernels:c4_write_index_keys",
        ),
        Op(
            name="c4_select",
            schema=(
                "(Tensor q, Tensor weights, Tensor pools, Tensor block_table, Tensor row_requests, Tensor positions, "
                "Tensor(a!) candidates, Tensor(b!) workspace, int page_size, int interleave, int rank, int world) "
                "-> ()"
            ),
            reference=indexer_reference.c4_select,
            check=indexer_contract.check_c4_select,
            triton="indexer.triton_kernels_select:c4_select",
        ),
        Op(
            name="c4_merge_pools",
            schema="(Tensor candidates, Tensor positions, Tensor(a!) topk, Tensor(b!) counts) -> ()",
            reference=indexer_reference.c4_merge_pools,
            check=indexer_contract.check_c4_merge_pools,
            triton="indexer.triton_kernels:c4_merge_pools",
        ),
        Op(
            name="c4_plan_gather",
            schema=(
                "(Tensor lengths, Tensor row_starts, Tensor block_table, Tensor(a!) plan, int requests, int rows, "
                "int capacity, int page_size, int interleave, int rank, int world, Tensor? resident_starts=None, "
                "Tensor? resident_lengths=None, int resident=0) -> ()"
            ),
            reference=gather_reference.c4_plan_gather,
            check=gather_contract.check_c4_plan_gather,
            triton="gather.triton_kernels:c4_plan_gather",
        ),
        Op(
            name="c4_prefill_gather",
            schema=_GATHER_SCHEMA,
            reference=gather_reference.c4_prefill_gather,
            check=gather_contract.check_c4_prefill_gather,
            triton="gather.triton_kernels:c4_prefill_gather",
        ),
        Op(
            name="c4_prefill_gather_start",
            schema=_GATHER_SCHEMA,
            reference=gather_reference.c4_prefill_gather_start,
            check=gather_contract.check_c4_prefill_gather_start,
            triton="gather.triton_kernels:c4_prefill_gather_start",
        ),
        Op(
            name="c4_prefill_gather_wait",
            schema=_GATHER_SCHEMA,
            reference=gather_reference.c4_prefill_gather_wait,
            check=gather_contract.check_c4_prefill_gather_wait,
            triton="gather.triton_kernels:c4_prefill_gather_wait",
        ),
        Op(
            name="c4_place_records",
            schema=(
                "(Tensor gathered, Tensor plan, Tensor(a!) resident, int requests, int rows, int interleave, "
                "int world) -> ()"
            ),
            reference=gather_reference.c4_place_records,
            check=gather_contract.check_c4_place_records,
            triton="gather.triton_kernels_place:c4_place_records",
        ),
        Op(
            name="c4_remap",
            schema=(
                "(Tensor topk, Tensor plan, Tensor(a!) slots, Tensor(b!) counts, int requests=1, int rows=0, "
                "int interleave=1, int world=1, int resident=0) -> ()"
            ),
            reference=gather_reference.c4_remap,
            check=gather_contract.check_c4_remap,
            triton="gather.triton_kernels:c4_remap",
        ),
    )
}

SPLITTING_OPS: tuple[str, ...] = tuple(op.qualified_name for op in OPS.values() if op.splitting)
