"""Captured CUDA graphs that know what they need, and the pool that their memory comes from."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch

from .. import lifetimes, trace
from .nodes import node_counts

_numbers = itertools.count()


class GraphPool:
    """Memory that captured graphs share. Graphs of one pool must not run at the same time.

    What one of them computed and did not return may lie where another puts its results, so results are valid until the
    next replay of any graph of the pool.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self.users = lifetimes.Users()
        self.closed = False

    def close(self) -> None:
        """End the pool. Raises RuntimeError while a graph that was captured in it is alive."""
        self.users.refuse_if_any("the graph pool")
        self.closed = True

    def check_open(self) -> None:
        if self.closed:
            raise RuntimeError("torch_sparse_mla: this graph pool is closed; make another GraphPool()")


class CapturedGraph:
    """A function's launches, captured once and replayed at the same addresses.

        graph = CapturedGraph.capture("layers, 8 rows", function, arguments, pool, stream)
        results = graph.replay()

    It keeps alive what it was given: arguments, results, the pool and the exchange channels that it uses.
    """

    def __init__(self, name: str, arguments: Any, pool: GraphPool) -> None:
        self.name = f"{name} #{next(_numbers)}"
        self.arguments, self.pool = arguments, pool
        # Kept beside what is launched, so that its nodes can be counted.
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph(keep_graph=True)
        self.results: Any = None
        # The users of channels and pool, of which this graph is one.
        self.uses: list[lifetimes.Users] = []
        self.stream: torch.cuda.Stream | None = None

    @staticmethod
    def capture(
        name: str,
        function: Callable[..., Any],
        arguments: tuple,
        pool: GraphPool,
        stream: torch.cuda.Stream,
    ) -> "CapturedGraph":
        """Capture `function(*arguments)` on a side stream. It must have run before, on that stream: nothing may be
        compiled, loaded or autotuned during a capture.

        Raises: RuntimeError where something in it cannot be captured (host synchronisation, an unjoined side stream).
        """
        pool.check_open()
        captured = CapturedGraph(name, arguments, pool)
        # Collected now, not in the middle: a tensor of another graph that is freed during a capture would break it.
        collecting = gc.isenabled()
        gc.disable()
        lifetimes.begin_capture(captured)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                captured.graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                try:
                    captured.results = function(*arguments)
                except BaseException as error:
                    captured._abandon()
                    raise RuntimeError(
                        f"torch_sparse_mla: {name} could not be captured in a CUDA graph: {type(error).__name__}: "
                        f"{error}"
                    ) from error
                captured.graph.capture_end()
                captured.graph.instantiate()
        except BaseException:
            captured.release()
            raise
        finally:
            lifetimes.end_capture()
            if collecting:
                gc.enable()
            torch.cuda.current_stream().wait_stream(stream)
        pool.users.add(captured)
        captured.uses.append(pool.users)
        return captured

    def replay(self) -> Any:
        """Launch on the current stream. Returns the captured results: the same tensors each time."""
        if self.graph is None:
            raise RuntimeError(f"torch_sparse_mla: CUDA graph {self.name} was released and cannot be replayed")
        trace.begin("graph/replay", 0)
        try:
            self.graph.replay()
        finally:
            trace.end()
        return self.results

    def node_counts(self) -> dict[str, int]:
        """Nodes by type: "kernel", "memcpy", "host" and so on."""
        return node_counts(self.graph.raw_cuda_graph())

    def release(self) -> None:
        """Give back the graph, its results and its hold on channels and pool, once the device is done with them. A
        second release does nothing."""
        if self.graph is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.graph, self.results, self.arguments = None, None, None
        for users in self.uses:
            users.discard(self)
        self.uses = []

    def _abandon(self) -> None:
        """End a capture that failed, so that the stream can be used again."""
        # The capture was invalidated; ending it reports that once more.
        with contextlib.suppress(RuntimeError):
            self.graph.capture_end()

    def __str__(self) -> str:
        return self.name
