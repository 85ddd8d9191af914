"""What engines call the ways to use CUDA graphs, and what an operator allows."""

import enum
from collections.abc import Iterable, Mapping

import torch

from .._ops.table import NAMESPACE, OPS, GraphSupport

__all__ = ["CUDAGraphMode", "GraphSupport", "graph_support", "least_support"]


class CUDAGraphMode(enum.Enum):
    """How steps run. A value is (uniform decode batches, all others), of "none", "piecewise" and "full"."""

    NONE = ("none", "none")
    PIECEWISE = ("piecewise", "piecewise")
    FULL = ("full", "full")
    FULL_DECODE_ONLY = ("full", "none")
    FULL_AND_PIECEWISE = ("full", "piecewise")

    @classmethod
    def parse(cls, value: "CUDAGraphMode | str") -> "CUDAGraphMode":
        """A mode by its name, in any case. Raises ValueError for anything else."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(f"torch_sparse_mla.compile: mode: got {value!r}; allowed: {', '.join(cls.__members__)}")

    def runtime(self, uniform: bool) -> str:
        """ "full", "piecewise" or "none" for a batch."""
        return self.value[0 if uniform else 1]

    @property
    def has_full(self) -> bool:
        return "full" in self.value

    @property
    def has_pieces(self) -> bool:
        return "piecewise" in self.value


def graph_support(op: str, others: Mapping[str, GraphSupport] | None = None) -> GraphSupport:
    """What an operator allows in CUDA graphs, for engines with a dispatcher of their own.

    Args:
        op: qualified name, "torch_sparse_mla::sparse_ckv_decode".
        others: declarations for operators of other packages; those without one count as ALWAYS.
    Raises: ValueError for a name without a namespace, or in this package's that is no operator.
    """
    if others and op in others:
        return others[op]
    namespace, _, name = op.partition("::")
    if name and namespace != NAMESPACE:
        return GraphSupport.ALWAYS
    if name not in OPS:
        allowed = f"a qualified name; '{NAMESPACE}::' and one of {', '.join(OPS)}"
        raise ValueError(f"torch_sparse_mla.graph_support: op: got {op!r}; allowed: {allowed}")
    return OPS[name].graph_support


def least_support(
    ops: Iterable[str], others: Mapping[str, GraphSupport] | None = None
) -> tuple[GraphSupport, str | None]:
    """The least that any of the operators allows, and which one it is (None where all allow everything)."""
    least, name = GraphSupport.ALWAYS, None
    for op in ops:
        support = graph_support(op, others)
        if support < least:
            least, name = support, op
    return least, name


def operators_of(graph_module: torch.fx.GraphModule) -> list[str]:
    """Qualified names of the operators that a graph and its submodules call, each once, in order."""
    found: dict[str, None] = {}
    for module in graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            name = operator_name(node)
            if name is not None:
                found[name] = None
    return list(found)


def operator_name(node: torch.fx.Node) -> str | None:
    """The qualified name of the operator that a node calls, functionalised calls included; else None."""
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and node.args:
        target = node.args[0]
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    return None
