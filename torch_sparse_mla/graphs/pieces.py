"""A piece of a split graph at work: compiled, captured for each size, replayed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .capture import CapturedGraph
from .splitting import Piece, replace_pieces, split_graph

if TYPE_CHECKING:
    from .step import CompiledStep


class PieceRunner(torch.nn.Module):
    """Stands in a split graph where a piece was. What it does is up to the step: see `CompiledStep.phase`."""

    def __init__(self, step: "CompiledStep", piece: Piece, compiled: Callable) -> None:
        super().__init__()
        self.step, self.name, self.compiled = step, piece.name, compiled
        self.names = [node.name for node in piece.graph.graph.nodes if node.op == "placeholder"]
        self.graphs: dict[int, CapturedGraph] = {}

    def forward(self, *arguments: Any) -> Any:
        phase, rows = self.step.phase, self.step.phase_rows
        if phase == "replay":
            graph = self.graphs.get(rows)
            if graph is not None:
                if self.step.debug:
                    self._check(graph, arguments)
                return graph.replay()
            self.step.statistics.fallbacks[f"{self.name} has no graph of {rows} rows: another trace serves them"] += 1
        elif phase == "capture":
            return self.capture(rows, arguments)
        return self.compiled(*arguments)

    def capture(self, rows: int, arguments: tuple) -> Any:
        """Capture the piece for a number of rows, and run it: what follows may read what it computes."""
        name = f"{self.step.name}, {self.name}, {rows} rows"
        graph = CapturedGraph.capture(name, self.compiled, arguments, self.step.pool, self.step.stream)
        self.graphs[rows] = graph
        self.step.graphs.append(graph)
        self.step.statistics.captures["piecewise"] += 1
        return graph.replay()

    def _check(self, graph: CapturedGraph, arguments: tuple) -> None:
        for name, given, captured in zip(self.names, arguments, graph.arguments, strict=True):
            same = given == captured if not isinstance(given, torch.Tensor) else given.data_ptr() == captured.data_ptr()
            if not same:
                raise ValueError(
                    f"torch_sparse_mla.compile: {name} of {self.name}: got another tensor or value than the graph of "
                    f"{self.step.phase_rows} rows captured; allowed: the same static buffers in every call"
                )


def piecewise_backend(step: "CompiledStep") -> Callable:
    """A backend of `torch.compile` that splits what it gets, and puts runners in the place of pieces."""

    def compile_graph(graph: torch.fx.GraphModule, _inputs: list) -> Callable:
        splitting_ops = step.splitting_ops if step.mode.has_pieces else ()
        split, pieces = split_graph(graph, splitting_ops)
        runners = list(replace_pieces(split, pieces, lambda piece: PieceRunner(step, piece, _compile(step, piece))))
        step.note_trace(graph, pieces, len(runners))
        return split.forward

    return compile_graph


def _compile(step: "CompiledStep", piece: Piece) -> Callable:
    """Compile a piece for the shapes of the trace, symbolic ones included; called while Dynamo compiles the step."""
    if step.backend != "inductor":
        return piece.graph
    inputs = [node.meta["example_value"] for node in piece.graph.graph.nodes if node.op == "placeholder"]
    return torch._inductor.standalone_compile(piece.graph, inputs, dynamic_shapes="from_tracing_context")
