"""CUDA graphs without a GPU: a graph that runs its function again and puts the results where they were.

What it keeps of the real thing is what steps rely on: the arguments and results of a replay are the tensors of the
capture, and nothing but captured functions runs in one.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from torch_sparse_mla import lifetimes
from torch_sparse_mla.graphs import capture, pieces, step


class SimulatedGraph:
    """In the place of `CapturedGraph`. Unlike the real one, a capture computes."""

    def __init__(self, name: str, function: Callable, arguments: tuple, pool: capture.GraphPool) -> None:
        self.name, self.function, self.arguments, self.pool = name, function, arguments, pool
        self.uses: list[lifetimes.Users] = []
        self.replays, self.released = 0, False
        lifetimes.begin_capture(self)
        try:
            self.results = function(*arguments)
        finally:
            lifetimes.end_capture()

    @classmethod
    def capture(cls, name: str, function: Callable, arguments: tuple, pool: capture.GraphPool, stream: Any):
        pool.check_open()
        graph = cls(name, function, arguments, pool)
        pool.users.add(graph)
        graph.uses.append(pool.users)
        _made.append(graph)
        return graph

    def replay(self) -> Any:
        assert not self.released
        self.replays += 1
        for kept, value in zip(_tensors(self.results), _tensors(self.function(*self.arguments)), strict=True):
            if kept.data_ptr() != value.data_ptr():
                kept.copy_(value)
        return self.results

    def release(self) -> None:
        self.released = True
        for users in self.uses:
            users.discard(self)
        self.uses = []

    def __str__(self) -> str:
        return self.name


class SimulatedPiece(SimulatedGraph):
    """A piece is replayed as soon as it is captured: that is when the real one computes, and this one has."""

    def replay(self) -> Any:
        if self.replays == 0:
            self.replays = 1
            return self.results
        return super().replay()


_made: list[SimulatedGraph] = []


def _tensors(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


class _Stream:
    def wait_stream(self, other: "_Stream") -> None:
        pass


def simulate(patch: pytest.MonkeyPatch) -> list[SimulatedGraph]:
    """Make steps on the CPU capture. Returns the graphs that they make, in order."""
    _made.clear()
    patch.setattr(step, "CapturedGraph", SimulatedGraph)
    patch.setattr(pieces, "CapturedGraph", SimulatedPiece)
    patch.setattr(step, "_device_of", lambda arguments: torch.device("cuda"))
    for name, value in {
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda *device: None,
        "memory_reserved": lambda *device: 0,
    }.items():
        patch.setattr(torch.cuda, name, value)
    return _made
