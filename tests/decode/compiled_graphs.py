"""Reads the graphs that `torch.compile` makes, in a form that does not change from one PyTorch version to the next."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

# A view moves no data; how many there are differs between versions.
VIEWS = {"as_strided", "slice", "view", "reshape", "select", "unsqueeze", "alias", "expand", "permute"}


def recording_backend(graphs: list[torch.fx.GraphModule]) -> Callable:
    """A backend that runs functionalised graphs as they are, and keeps them."""

    def compile_graph(graph_module: torch.fx.GraphModule, _inputs: list) -> Callable:
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=compile_graph)


def functionalised_calls(function: Callable, inputs: tuple, v2: bool) -> str:
    """One line for each operator of the graph that a backend is given; `higher-order: operator` where it mutates."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    with torch._inductor.config.patch({"enable_auto_functionalized_v2": v2}):
        torch.compile(function, fullgraph=True, backend=recording_backend(graphs))(*inputs)
    lines = []
    for node in graphs[0].graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            lines.append(f"{node.target}: {node.args[0]}")
        elif isinstance(node.target, torch._ops.OpOverload):
            lines.append(str(node.target))
    return "\n".join(lines)


def compiled_calls(function: Callable, inputs: tuple, v2: bool) -> str:
    """One line for each call of Inductor's final graph, views apart: the operator, and where its tensors come from.

    `input` is a buffer that the caller passed, `empty` one that the function allocated, `computed` anything else, such
    as a clone that stands in for a mutated argument.
    """
    torch._dynamo.reset()
    config = {"enable_auto_functionalized_v2": v2, "fx_graph_cache": False}
    with torch._inductor.config.patch(config), _post_grad_log() as log:
        torch.compile(function, fullgraph=True, backend="inductor")(*inputs)
    calls = re.findall(r"= torch\.ops\.([\w.]+)\((.*?)\)(?:;|$)", "\n".join(log), re.MULTILINE)
    return "\n".join(filter(None, (_call_line(name, arguments) for name, arguments in calls)))


def _call_line(name: str, arguments: str) -> str | None:
    namespace, op = name.split(".")[:2]
    tensors = [text for text in re.split(r"[\[\], ]+", arguments) if re.fullmatch(r"[a-z]\w*", text)]
    if op in VIEWS:
        return None
    # The graph ends with a copy of each mutated input; in place it is from a buffer to itself, and comes to nothing.
    if op == "copy_" and tensors[0] == tensors[1]:
        return None
    if op == "empty":
        return f"{namespace}.{op}"
    return f"{namespace}.{op}({', '.join(_origin(text) for text in tensors)})"


def _origin(name: str) -> str:
    if re.fullmatch(r"arg\d+_\d+", name):
        return "input"
    return "empty" if re.fullmatch(r"empty(_\d+)?", name) else "computed"


@contextlib.contextmanager
def _post_grad_log() -> Iterator[list[str]]:
    """What TORCH_LOGS=post_grad_graphs prints: the graph after Inductor put mutations back in place."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("torch._inductor.compile_fx.__post_grad_graphs")
    torch._logging.set_logs(post_grad_graphs=True)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        torch._logging.set_logs()
