"""Steps that lie ready on the device, and graphs of exchanges, for tests that replay many times."""

import dataclasses

import torch

from torch_sparse_mla import Channel, ce_exchange_layers, ce_exchange_start, ce_exchange_wait

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
    put_data(rank, step)
    rank.poison()


def put_data(rank: RankCase, step: Ready) -> None:
    for cache, values in zip(rank.caches, step.caches, strict=True):
        cache.copy_(values)
    rank.plan.copy_(step.plan)


def wrong_bytes(rank: RankCase, step: Ready, layers: int) -> torch.Tensor:
    """How many bytes differ, on the device."""
    pairs = zip(rank.workspaces, step.expected[layers], strict=True)
    return sum((workspace != expected).sum() for workspace, expected in pairs)


class Reader:
    """A rank whose workspaces are the channel's. It reads a set while it may, counts wrong bytes and poisons it, all on
    the device, so that a graph can do it."""

    def __init__(self, rank: RankCase, channel: Channel) -> None:
        self.rank, self.channel = rank, channel
        self.views = [dataclasses.replace(rank, workspaces=list(layers)) for layers in channel.workspaces]
        for view in self.views:
            view.poison()
        self.want = [torch.empty_like(workspace) for workspace in rank.workspaces]
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.plan.device)

    def put(self, step: Ready) -> None:
        put_data(self.rank, step)
        for want, values in zip(self.want, step.expected[len(self.want)], strict=True):
            want.copy_(values)

    def exchange(self, number: int, layers: int) -> None:
        ce_exchange_layers(*self.views[number].arguments(self.channel, layers))
        self.read(number, layers)

    def exchange_with_prefetch(self, first: int, second: int) -> None:
        """As a Full layer and the Shared layers behind it: the first set is read once the second is on its way."""
        ce_exchange_layers(*self.views[first].arguments(self.channel, 1))
        ahead = self.views[second].arguments(self.channel)
        ce_exchange_start(*ahead)
        self.read(first, 1)
        ce_exchange_wait(*ahead)
        self.read(second, len(self.want))

    def read(self, number: int, layers: int) -> None:
        for workspace, want in zip(self.views[number].workspaces[:layers], self.want, strict=False):
            self.wrong += (workspace != want).sum()
            workspace.fill_(POISON)

    def program(self) -> list:
        """Of odd and even numbers of exchanges, with and without a set that is used again soon."""
        return [
            lambda: [self.exchange(number, layers) for number, layers in ((0, 1), (1, 3), (2, 2))],
            lambda: self.exchange_with_prefetch(0, 1),
            lambda: self.exchange(2, 3),
        ]


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
