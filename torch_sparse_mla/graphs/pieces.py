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
        # What each graph captured: addresses of tensors, and values.
        self.known: dict[int, list[Any]] = {}

    def forward(self, *arguments: Any) -> Any:
        phase, rows = self.step.phase, self.step.phase_rows
        if phase == "replay":
            graph = self.graphs.get(rows)
            if graph is not None:
                if self.step.debug:
                    self._check(self.known[rows], arguments)
                return graph.replay()
            self.step.statistics.fallbacks[f"{self.name} has no graph of {rows} rows: another trace serves them"] += 1
        elif phase == "capture":
            return self.capture(rows, arguments)
        return self.compiled(*arguments)

    def capture(self, rows: int, arguments: tuple) -> Any:
        """Capture the piece for a number of rows, and run it: what follows may read what it computes."""
        name = f"{self.step.name}, {self.name}, {rows} rows"
        graph = CapturedGraph.capture(name, self.compiled, arguments, self.step.pool, self.step.stream)
        self.graphs[rows], self.known[rows] = graph, [_address_or_value(value) for value in arguments]
        self.step.graphs.append(graph)
        self.step.statistics.captures["piecewise"] += 1
        return graph.replay()

    def _check(self, known: list[Any], arguments: tuple) -> None:
        for name, given, captured in zip(self.names, arguments, known, strict=True):
            if _address_or_value(given) != captured:
                raise ValueError(
                    f"torch_sparse_mla.compile: {name} of {self.name}: got another tensor or value than the graph of "
                    f"{self.step.phase_rows} rows captured; allowed: the same static buffers in every call"
                )


def _address_or_value(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class SplitStep:
    """What Dynamo calls: the split graph.

    Dynamo tests its guards at every call, which takes longer than a replay. After a capture all inputs are known, for
    they are static, so later replays begin here, where the results are the very tensors of the capture.
    """

    def __init__(self, step: "CompiledStep", split: torch.fx.GraphModule) -> None:
        self.step, self.split = step, split

    def __call__(self, *inputs: Any) -> Any:
        results = self.split(*inputs)
        if self.step.phase == "capture":
            self.step.note_direct(lambda: self.split(*inputs), results)
        return results


def piecewise_backend(step: "CompiledStep") -> Callable:
    """A backend of `torch.compile` that splits what it gets, and puts runners in the place of pieces."""

    def compile_graph(graph: torch.fx.GraphModule, _inputs: list) -> Callable:
        splitting_ops = step.splitting_ops if step.mode.has_pieces else ()
        split, pieces = split_graph(graph, splitting_ops)
        runners = list(replace_pieces(split, pieces, lambda piece: PieceRunner(step, piece, _compile(step, piece))))
        step.note_trace(graph, pieces, len(runners))
        return SplitStep(step, split)

    return compile_graph


def _compile(step: "CompiledStep", piece: Piece) -> Callable:
    """Compile a piece for the shapes of the trace, symbolic ones included; called while Dynamo compiles the step."""
    if step.backend != "inductor":
        return piece.graph
    inputs = [node.meta["example_value"] for node in piece.graph.graph.nodes if node.op == "placeholder"]
    return torch._inductor.standalone_compile(piece.graph, inputs, dynamic_shapes="from_tracing_context")
