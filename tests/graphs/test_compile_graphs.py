"""Pinned graphs of a four-layer decode, Full, S1, S2, S3 with a bulk exchange, before and after splitting.

Which of the package's calls there are, in which order and in which piece; that Inductor clones no buffer, with
auto-functionalisation v1 and v2; and that it is the caller's own memory that is written.
"""

import re
from collections import Counter

import expecttest
import torch

import torch_sparse_mla
from torch_sparse_mla import SPLITTING_OPS
from torch_sparse_mla.graphs import split_graph

from ..decode.compiled_graphs import _post_grad_log, compiled_calls
from .cases import STEP, four_layers
from .test_splitting import calls_in_order, traced

NAMESPACE = "torch_sparse_mla::"


def own_calls(calls: list[str]) -> list[str]:
    return [call.removeprefix(NAMESPACE) for call in calls if call.startswith(NAMESPACE)]


def pieces_of(graph: torch.fx.GraphModule) -> str:
    """One line for each piece: a splitting operator, or what of the package a graph captures."""
    _, pieces = split_graph(graph, SPLITTING_OPS)
    lines = []
    for number, piece in enumerate(pieces):
        kind = "split" if piece.split else "graph" if piece.launches else "views"
        lines.append(f"{number:2} {kind}: {', '.join(own_calls(piece.calls()))}".rstrip())
    return "\n".join(lines)


class FourLayerDecode(expecttest.TestCase):
    def test_before_splitting(self):
        with four_layers(world=1) as step:
            calls = own_calls(calls_in_order(traced(step.run, *step.inputs)))
        self.assertExpectedInline(
            "\n".join(calls),
            """\
write_ckv_records
plan_selection
ce_exchange_start
ce_exchange_wait
ce_exchange_start
current_token_slots
sparse_ckv_decode
write_ckv_records
ce_exchange_wait
write_ckv_records
sparse_ckv_decode
write_ckv_records
write_ckv_records
sparse_ckv_decode
write_ckv_records
write_ckv_records
sparse_ckv_decode""",
        )

    def test_after_splitting(self):
        with four_layers(world=1) as step:
            self.assertExpectedInline(
                pieces_of(traced(step.run, *step.inputs)),
                """\
 0 graph: write_ckv_records, plan_selection, ce_exchange_start, ce_exchange_wait, ce_exchange_start, current_token_slots
 1 split: sparse_ckv_decode
 2 graph: write_ckv_records, ce_exchange_wait, write_ckv_records
 3 split: sparse_ckv_decode
 4 graph: write_ckv_records, write_ckv_records
 5 split: sparse_ckv_decode
 6 graph: write_ckv_records, write_ckv_records
 7 split: sparse_ckv_decode
 8 graph:""",
            )

    def test_after_splitting_with_two_ranks(self):
        with four_layers(world=2) as step:
            self.assertExpectedInline(
                pieces_of(traced(step.run, *step.inputs)).replace(", ", "\n          "),
                """\
 0 graph: write_ckv_records
          write_ckv_records
          plan_selection
          plan_selection
          ce_exchange_start
          ce_exchange_start
          ce_exchange_wait
          ce_exchange_wait
          ce_exchange_start
          ce_exchange_start
          current_token_slots
          current_token_slots
 1 split: sparse_ckv_decode
 2 graph:
 3 split: sparse_ckv_decode
 4 graph: write_ckv_records
          write_ckv_records
          ce_exchange_wait
          ce_exchange_wait
          write_ckv_records
          write_ckv_records
 5 split: sparse_ckv_decode
 6 graph:
 7 split: sparse_ckv_decode
 8 graph: write_ckv_records
          write_ckv_records
          write_ckv_records
          write_ckv_records
 9 split: sparse_ckv_decode
10 graph:
11 split: sparse_ckv_decode
12 graph: write_ckv_records
          write_ckv_records
          write_ckv_records
          write_ckv_records
13 split: sparse_ckv_decode
14 graph:
15 split: sparse_ckv_decode
16 graph:""",
            )

    def test_a_dynamic_batch_has_the_same_pieces(self):
        with four_layers(world=1) as step:
            fixed = pieces_of(traced(step.run, *step.inputs))
            for tensor in step.inputs:
                torch._dynamo.mark_dynamic(tensor, 0)
            graph = traced(step.run, *step.inputs)
            sizes = [node for node in graph.graph.nodes if isinstance(node.meta.get("example_value"), torch.SymInt)]
            assert sizes
            assert pieces_of(graph) == fixed

    def test_no_clone_before_or_after_splitting(self):
        """Inductor's final graph of the whole step. Every buffer that is written is the caller's or a fresh output."""
        for v2 in (True, False):
            with four_layers(world=1) as step:
                lines = compiled_calls(step.run, step.inputs, v2).splitlines()
                own = [line for line in lines if line.startswith("torch_sparse_mla")]
                counts = Counter(line.split("(")[0].removeprefix("torch_sparse_mla.") for line in own)
                clones = sum("clone" in line or "copy_" in line for line in lines)
                self.assertExpectedInline(
                    "\n".join([f"{clones} clones", *(f"{count} {name}" for name, count in sorted(counts.items()))]),
                    """\
0 clones
2 ce_exchange_start
2 ce_exchange_wait
1 current_token_slots
1 plan_selection
4 sparse_ckv_decode
7 write_ckv_records""",
                )
                # The exchange is given nothing but the caller's buffers.
                assert all(set(re.findall(r"input|empty|computed", line)) == {"input"} for line in own if "_ex" in line)

    def test_no_clone_in_any_piece(self):
        """The same for what `compile` captures between the splits."""
        for v2 in (True, False):
            with four_layers(world=1) as step:
                compiled = torch_sparse_mla.compile(step.run, "PIECEWISE", **STEP)
                torch._dynamo.reset()
                config = {"enable_auto_functionalized_v2": v2, "fx_graph_cache": False}
                with torch._inductor.config.patch(config), _post_grad_log() as log:
                    compiled(*step.inputs)
                assert len(log) == compiled.statistics.captured_pieces == 5
                copies = re.findall(r"aten\.(clone|copy_)\.default\((\w+)(?:, (\w+))?", "\n".join(log))
                assert copies and [copy for copy in copies if copy[1] != copy[2]] == []
