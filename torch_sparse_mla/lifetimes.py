"""Which live CUDA graphs hold what they captured: an exchange channel, a memory pool.

A graph that is replayed after what it captured is gone reads and writes memory of somebody else. So a thing that graphs
capture knows its users, and refuses to be closed before them.
"""

import threading
import weakref


class Users:
    """The live graphs that captured a thing, by name."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet = weakref.WeakSet()

    def add(self, graph: object) -> None:
        self._graphs.add(graph)

    def discard(self, graph: object) -> None:
        self._graphs.discard(graph)

    def names(self) -> list[str]:
        return sorted(str(graph) for graph in self._graphs)

    def refuse_if_any(self, what: str) -> None:
        """Raise RuntimeError, naming the graphs, while there are any."""
        names = self.names()
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise RuntimeError(
                f"torch_sparse_mla: {what} is still used by {len(names)} captured CUDA graph(s): {shown}; release "
                "these first (CompiledStep.release() or CapturedGraph.release()), then close it"
            )


_capturing = threading.local()


def begin_capture(graph: object) -> None:
    """From here to `end_capture`, what this thread uses is captured by `graph`."""
    _capturing.graph = graph


def end_capture() -> None:
    _capturing.graph = None


def note_use(users: Users) -> None:
    """Called by whatever a graph must not outlive, whenever it is used."""
    graph = getattr(_capturing, "graph", None)
    if graph is not None:
        users.add(graph)
        graph.uses.append(users)
