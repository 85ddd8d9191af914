"""Pinned graphs: which calls survive compilation, in which order, and that no mutated buffer is cloned.

Auto-functionalisation v2 is PyTorch's default; some engines turn it off, so both forms are pinned.
"""

import expecttest
import torch

import torch_sparse_mla

from .cases import make_case
from .compiled_graphs import compiled_calls, functionalised_calls

ops = torch.ops.torch_sparse_mla
LAYOUT = "fp8_ds_mla"
CASE = {"rows": 2, "topk": 200, "lengths": [200, 7], "sink": [0.1, 0.2, 0.3], "layout": LAYOUT}


def write_and_decode(
    latent, rope, slots, other_slots, q, cache, indices, lengths, sink, out, lse, other_out, workspace
):
    """Write, decode, write again, decode again: one cache, one workspace, `lse` twice, all owned by the caller."""
    ops.write_ckv_records(latent, rope, slots, cache, LAYOUT)
    ops.sparse_ckv_decode(q, cache, indices, lengths, sink, out, lse, workspace, 0.04, LAYOUT)
    ops.write_ckv_records(latent, rope, other_slots, cache, LAYOUT)
    ops.sparse_ckv_decode(q, cache, indices, lengths, sink, other_out, lse, workspace, 0.04, LAYOUT)


def write_and_decode_inputs() -> tuple:
    case = make_case(**CASE)
    slots = case.indices[:, 0].contiguous(), case.indices[:, 1].contiguous()
    tokens = torch.randn(2, 512), torch.randn(2, 64)
    return (*tokens, *slots, *case.args()[:7], torch.zeros_like(case.out), case.workspace)


def decode_and_merge(q, cache, indices, lengths, sink):
    """Everything is allocated within; one of the two results of the first call is returned as it is."""
    out, lse = torch_sparse_mla.sparse_ckv_decode(q, cache, indices, lengths=lengths, softmax_scale=0.04, layout=LAYOUT)
    merged, _ = torch_sparse_mla.merge_partial_attention(out.unsqueeze(0), lse.unsqueeze(0), sink=sink)
    return merged, lse


def decode_and_read_nothing(q, cache, indices, out, lse, workspace):
    ops.sparse_ckv_decode(q, cache, indices, None, None, out, lse, workspace, 0.04, LAYOUT)
    return q


def decode_into_slices(q, cache, indices, out, lse, workspace):
    ops.sparse_ckv_decode(q, cache, indices, None, None, out[:2], lse[:2], workspace, 0.04, LAYOUT)


class CompiledGraphs(expecttest.TestCase):
    def test_the_callers_buffers_are_written_in_place_and_in_order(self):
        for v2 in (True, False):
            self.assertExpectedInline(
                compiled_calls(write_and_decode, write_and_decode_inputs(), v2),
                """\
torch_sparse_mla.write_ckv_records(input, input, input, input)
torch_sparse_mla.sparse_ckv_decode(input, input, input, input, input, input, input, input)
torch_sparse_mla.write_ckv_records(input, input, input, input)
torch_sparse_mla.sparse_ckv_decode(input, input, input, input, input, input, input, input)""",
            )

    def test_fresh_outputs_are_written_in_place(self):
        for v2 in (True, False):
            self.assertExpectedInline(
                compiled_calls(decode_and_merge, make_case(**CASE).args()[:5], v2),
                """\
aten.empty
aten.empty
aten.empty
torch_sparse_mla.sparse_ckv_decode(input, input, input, input, empty, empty, empty)
aten.empty
aten.empty
torch_sparse_mla.merge_partial_attention(computed, computed, input, empty, empty)""",
            )

    def test_a_call_whose_results_nobody_reads_in_the_graph_survives(self):
        case = make_case(**{**CASE, "lengths": None})
        inputs = (case.q, case.cache, case.indices, case.out, case.lse, case.workspace)
        for v2 in (True, False):
            self.assertExpectedInline(
                compiled_calls(decode_and_read_nothing, inputs, v2),
                """torch_sparse_mla.sparse_ckv_decode(input, input, input, input, input, input)""",
            )
            assert not torch.isnan(case.out).any()
            case.out.fill_(torch.nan)

    def test_slices_of_the_callers_buffers_are_cloned_without_v2(self):
        """Why whole buffers are passed; also proof that a clone would be seen in the other tests."""
        case = make_case(**CASE)
        out, lse = torch.cat([case.out, case.out]), torch.cat([case.lse, case.lse])
        inputs = (case.q, case.cache, case.indices, out, lse, case.workspace)
        self.assertExpectedInline(
            compiled_calls(decode_into_slices, inputs, v2=True),
            """torch_sparse_mla.sparse_ckv_decode(input, input, input, computed, computed, input)""",
        )
        self.assertExpectedInline(
            compiled_calls(decode_into_slices, inputs, v2=False),
            """\
aten.clone(computed)
aten.clone(computed)
torch_sparse_mla.sparse_ckv_decode(input, input, input, computed, computed, input)
aten.copy_(computed, computed)
aten.copy_(computed, computed)""",
        )

    def test_functionalised_graph_with_v2(self):
        self.assertExpectedInline(
            functionalised_calls(write_and_decode, write_and_decode_inputs(), v2=True),
            """\
auto_functionalized_v2: torch_sparse_mla.write_ckv_records.default
auto_functionalized_v2: torch_sparse_mla.sparse_ckv_decode.default
auto_functionalized_v2: torch_sparse_mla.write_ckv_records.default
auto_functionalized_v2: torch_sparse_mla.sparse_ckv_decode.default""",
        )

    def test_functionalised_graph_without_v2(self):
        self.assertExpectedInline(
            functionalised_calls(write_and_decode, write_and_decode_inputs(), v2=False),
            """\
auto_functionalized: torch_sparse_mla.write_ckv_records.default
auto_functionalized: torch_sparse_mla.sparse_ckv_decode.default
auto_functionalized: torch_sparse_mla.write_ckv_records.default
auto_functionalized: torch_sparse_mla.sparse_ckv_decode.default""",
        )
