"""Steps that lie ready on the device, and graphs of exchanges, for tests that replay many times."""

import dataclasses

import torch

from torch_sparse_mla import Channel

from .cases import POISON, RankCase, Step


@dataclasses.dataclass
class Ready:
    """A step as one rank needs it: what to copy into its static buffers, and what must come out."""

    caches: list[torch.Tensor]
    plan: torch.Tensor
    expected: dict[int, list[torch.Tensor]]


def ready(rank: RankCase, step: Step) -> Ready:
    """Loads the step, and keeps copies."""
    rank.load(step)
    expected = {layers: rank.expected(step, layers) for layers in range(1, rank.shape.layers + 1)}
    return Ready([cache.clone() for cache in rank.caches], rank.plan.clone(), expected)


def put(rank: RankCase, step: Ready) -> None:
    """Device-side copies only, in stream order."""
    for cache, values in zip(rank.caches, step.caches, strict=True):
        cache.copy_(values)
    rank.plan.copy_(step.plan)
    for workspace in rank.workspaces:
        workspace.fill_(POISON)


def wrong_bytes(rank: RankCase, step: Ready, layers: int) -> torch.Tensor:
    """How many bytes differ, on the device."""
    pairs = zip(rank.workspaces, step.expected[layers], strict=True)
    return sum((workspace != expected).sum() for workspace, expected in pairs)


def capture(function, *arguments) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*arguments)
    return graph


def warm_up(rank: RankCase, channel: Channel, functions) -> None:
    """Every kernel once, on a side stream. Every rank must do it at the same time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions:
            function(rank, channel)
    torch.cuda.current_stream().wait_stream(stream)
