"""FX splitting: a graph becomes pieces that can be captured, and splitting operators that run eager between them.

    before   a b SPLIT c SPLIT SPLIT d           one graph
    after    [a b] SPLIT [c] SPLIT SPLIT [d]     the same calls in the same order; neighbouring splits stay apart

Whatever a splitting operator writes is a tensor that a piece allocated or the caller brought, since operators return
nothing: its address is the same in every replay.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx.passes.split_module import split_module

from .modes import operator_name

# What moves no data and launches nothing: a piece of nothing else is not worth a graph.
_VIEWS = {
    "chunk",
    "detach",
    "expand",
    "narrow",
    "permute",
    "select",
    "split",
    "squeeze",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
    "view_as",
}


@dataclass(frozen=True)
class Piece:
    """One submodule of a split graph.

    Attributes:
        name: of the submodule.
        graph: its calls.
        split: the splitting operator that it is; None for a piece that can be captured.
        launches: whether it does any work; a piece of views and sizes does not.
    """

    name: str
    graph: torch.fx.GraphModule
    split: str | None
    launches: bool

    def calls(self) -> list[str]:
        return [text for text in map(_call_text, self.graph.graph.nodes) if text is not None]


def split_graph(graph: torch.fx.GraphModule, splitting_ops: Sequence[str]) -> tuple[torch.fx.GraphModule, list[Piece]]:
    """Split a graph at operators, in place of `torch.compile`'s backends or an engine's own.

    Args:
        graph: as Dynamo gives it to a backend.
        splitting_ops: qualified names such as "torch_sparse_mla::sparse_ckv_decode"; each call becomes a piece by
            itself.
    Returns: a graph that calls the pieces, with the arguments and results of `graph`; and the pieces, in order. Replace
        a piece by `setattr(split, piece.name, callable)`.
    Raises: ValueError for the name of no operator.
    """
    check_splitting_ops(splitting_ops)
    partition, partitions, splits = 0, {}, {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        name = operator_name(node)
        if name in splitting_ops:
            partition += 1
            splits[partition] = name
            partitions[node] = partition
            partition += 1
        else:
            partitions[node] = _home_of(node, partitions, partition)
    split = split_module(graph, graph, partitions.__getitem__, keep_original_order=True)
    pieces = [_piece(name, module, splits) for name, module in split.named_children() if name.startswith("submod_")]
    return split, sorted(pieces, key=lambda piece: _number(piece.name))


def check_splitting_ops(splitting_ops: Sequence[str]) -> None:
    for name in splitting_ops:
        namespace, _, op = str(name).partition("::")
        if not op or not hasattr(getattr(torch.ops, namespace), op):
            raise ValueError(
                f"torch_sparse_mla.compile: splitting_ops: got {name!r}; allowed: registered operators such as "
                "'torch_sparse_mla::sparse_ckv_decode'"
            )


def describe(pieces: Sequence[Piece]) -> str:
    """One line for each piece: whether it is captured, and its calls."""
    lines = []
    for piece in pieces:
        kind = f"split at {piece.split}" if piece.split else "graph" if piece.launches else "views"
        calls = "" if piece.split else ": " + ", ".join(piece.calls())
        lines.append(f"{piece.name.removeprefix('submod_'):>2}  {kind}{calls}")
    return "\n".join(lines)


def _home_of(node: torch.fx.Node, partitions: dict[torch.fx.Node, int], current: int) -> int:
    """The partition of a node: the current one, but an element of a tuple is taken where the tuple is made."""
    if node.op == "call_function" and node.target is operator.getitem and node.args[0] in partitions:
        source = node.args[0]
        if isinstance(source.meta.get("example_value"), list | tuple):
            return partitions[source]
    return current


def _piece(name: str, module: torch.fx.GraphModule, splits: dict[int, str]) -> Piece:
    launches = any(_launches(node) for node in module.graph.nodes)
    # The pass makes modules whose code is generated late, which Dynamo cannot trace.
    return Piece(name, torch.fx.GraphModule(module, module.graph), splits.get(_number(name)), launches)


def _number(name: str) -> int:
    return int(name.removeprefix("submod_"))


def _launches(node: torch.fx.Node) -> bool:
    """Whether a call does work on a device: not where it gives a size, or takes an element or a view of what is there.

    What may copy does work, or a graph would read at the address of an old copy: `reshape`, indexing by a tensor or a
    list.
    """
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    if node.op == "call_module":
        return True
    if node.target is operator.getitem:
        return any(isinstance(value, list) or _is_tensor(value) for value in _index(node))
    if getattr(node.target, "__name__", node.target) in _VIEWS:
        return False
    values = node.meta.get("example_value")
    return values is None or _is_tensor(node) or isinstance(values, list | tuple)


def _index(node: torch.fx.Node) -> tuple:
    index = node.args[1]
    return index if isinstance(index, tuple) else (index,)


def _is_tensor(node: object) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def _call_text(node: torch.fx.Node) -> str | None:
    if node.op not in ("call_function", "call_method", "call_module"):
        return None
    name = operator_name(node)
    return name or str(getattr(node.target, "__name__", node.target))


def replace_pieces(
    split: torch.fx.GraphModule, pieces: Sequence[Piece], make: Callable[[Piece], Callable]
) -> Iterator[tuple[Piece, Callable]]:
    """Put `make(piece)` in the place of every piece that is captured. Yields what was made."""
    for piece in pieces:
        if piece.split is None and piece.launches:
            made = make(piece)
            delattr(split, piece.name)
            setattr(split, piece.name, made)
            yield piece, made
