"""A step that runs compiled, in pieces of CUDA graphs, or as one.

    capture   for each size, largest first:   run twice on a side stream -> capture on it, into the shared pool
    call      dispatcher: full, then piecewise, then none
              full        compare addresses -> fill padded rows -> replay
              piecewise   the same, then the split graph: replay, splitting operator, replay, ...
              none        run what was compiled, with the rows of the call

Inputs are never copied: the caller's buffers are static, and a graph reads and writes them where they are.
"""

import gc
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .arguments import Addresses, Signature, reject
from .capture import CapturedGraph, GraphPool
from .dispatcher import DEFAULT_CAPTURE_SIZES, Batch, Choice, Dispatcher, check_sizes
from .modes import CUDAGraphMode, GraphSupport, least_support, operators_of
from .pieces import piecewise_backend
from .splitting import Piece, describe
from .statistics import Statistics

WARM_UP_RUNS = 2
NO_CUDA = "CUDA graphs need buffers on a GPU"
NOT_CAPTURED = "capture() has not been called"


class CompiledStep:
    """What `torch_sparse_mla.compile` returns. Call it like the function. Not for several threads at once.

    Its graphs live until `release()`: Dynamo keeps what it compiled, and with it the step, when nobody else does.

    Attributes:
        mode, splitting_ops, backend, debug: as given.
        pool: memory of its graphs. stream: where they are captured.
        statistics: what it did; `statistics.as_dict()` for logs.
        pieces: of the last trace, in order.
        phase: what pieces are to do: "run", "capture" or "replay"; and for how many rows.
    """

    def __init__(
        self,
        function: Callable,
        mode: CUDAGraphMode,
        asked: bool,
        sizes: Sequence[int] | None,
        splitting_ops: Sequence[str],
        signature: Signature,
        backend: str,
        rows_per_request: int,
        supports: Mapping[str, GraphSupport] | None,
        pool: GraphPool | None,
        debug: bool,
    ) -> None:
        self.function, self.mode, self.asked = function, mode, asked
        self.splitting_ops, self.signature, self.backend = tuple(splitting_ops), signature, backend
        self.rows_per_request, self.supports, self.debug = rows_per_request, supports, debug
        self.name = getattr(function, "__name__", type(function).__name__)
        self.pool, self._owns_pool = pool, pool is None
        self.stream: torch.cuda.Stream | None = None
        self.statistics = Statistics()
        self.pieces: list[Piece] = []
        self.graphs: list[CapturedGraph] = []
        self.phase, self.phase_rows = "run", 0
        self._sizes = sizes
        self._operators: list[str] = []
        self._dispatcher: Dispatcher | None = None
        self._not_captured = NOT_CAPTURED
        self._full: dict[int, CapturedGraph] = {}
        self._sized: dict[int, tuple] = {}
        # Rows -> the split graph on its captured inputs, and what a call returns.
        self._direct: dict[int, tuple[Callable, Any]] = {}
        self._noted: tuple[Callable, Any] | None = None
        self._addresses: Addresses | None = None
        self._compiled = function
        if backend != "none":
            self._compiled = torch.compile(_own_code(function), backend=piecewise_backend(self), fullgraph=True)

    def capture(self, *args: Any, **kwargs: Any) -> "CompiledStep":
        """Warm up and capture every graph of the mode, on the caller's static buffers. Before the first call.

        Runs the function several times for each size, on the first rows of the buffers; arguments with a padding value
        hold it in every row meanwhile, and get back what they held, so that a dummy step writes nothing it should not.

        Args: those of the function, as large as the largest capture size.
        Returns: the step.
        Raises: ValueError for buffers that are too small, and, where a mode was asked for, for one that needs CUDA
            graphs on a device without; RuntimeError for what cannot be captured, and for a step that has graphs.
        Ranks: all, with the same arguments: exchanges in the function wait for their peers.
        """
        arguments = self.signature.bind(args, kwargs)
        if self.graphs:
            raise RuntimeError("torch_sparse_mla.compile: this step has graphs; call release() before another capture")
        if self.mode is CUDAGraphMode.NONE:
            return self
        device = _device_of(arguments)
        if device.type != "cuda":
            if self.asked:
                reject("mode", f"{self.mode.name} with buffers on {device}", f"NONE, which runs compiled: {NO_CUDA}")
            self._not_captured = f"{NO_CUDA}, and these are on {device}"
            return self
        sizes = self._sizes_for(arguments)
        self.signature.check_room(arguments, sizes[-1])
        with torch.cuda.device(device):
            self._capture_all(arguments, sizes)
        return self

    def __call__(self, *args: Any, num_rows: int | None = None, uniform: bool = True, **kwargs: Any) -> Any:
        """Run the function, by a graph where there is one.

        Args:
            args, kwargs: the function's, in the buffers that were captured: whole, or their first rows.
            num_rows: rows of this call; None: those of the first argument that has rows.
            uniform: whether every request of the batch has equally many rows.
        Returns: what the function returns, of `num_rows` rows; after a replay valid until the next one of the pool.
        Raises: ValueError, naming the argument, where a graph would read other memory than the call brings.
        """
        arguments = self.signature.bind(args, kwargs)
        if num_rows is None:
            rows = self.signature.num_rows(arguments)
        else:
            rows = self.signature.checked_rows(arguments, num_rows)
        choice = self.dispatch(Batch(rows, uniform))
        return self._run(choice, arguments, rows)

    def dispatch(self, batch: Batch) -> Choice:
        """How a batch would run, and why not otherwise. Runs nothing."""
        if self._dispatcher is None:
            wanted = self.mode.runtime(batch.uniform)
            return Choice("none", batch.rows, None if wanted == "none" else self._not_captured)
        return self._dispatcher.choose(batch)

    def run(self, mode: str, rows: int, *args: Any, live_rows: int | None = None) -> Any:
        """Run in a given mode ("full", "piecewise" or "none") at a captured size: for engines that dispatch themselves.

        Args:
            rows: padded rows. live_rows: those whose results are wanted; None: all.
        Raises: ValueError where there is no such graph.
        """
        if mode not in ("full", "piecewise", "none"):
            reject("mode", repr(mode), "full, piecewise or none")
        if mode != "none" and (self._dispatcher is None or rows not in self._dispatcher.captured[mode]):
            captured = sorted(self._dispatcher.captured[mode]) if self._dispatcher else "nothing"
            reject("rows", f"{rows} in mode {mode}", f"what was captured: {captured}")
        arguments = self.signature.bind(args, {})
        return self._run(Choice(mode, rows), arguments, rows if live_rows is None else live_rows)

    def release(self) -> None:
        """Give back all graphs, and the pool where it is this step's own. Waits for the device. Then calls run without
        graphs, `capture` makes new ones, and channels can be closed."""
        for graph in self.graphs:
            graph.release()
        self.graphs, self._full, self._sized, self._direct, self._addresses = [], {}, {}, {}, None
        self._noted = None
        self._dispatcher, self._not_captured = None, "release() has been called"
        if self._owns_pool and self.pool is not None:
            # Another step that was given this pool keeps it open.
            if not self.pool.users.names():
                self.pool.close()
            self.pool = None

    def explain(self) -> dict[str, Any]:
        """Mode, sizes, operators, pieces and statistics, in plain values."""
        level, op = least_support(self._operators, self.supports)
        return {
            "mode": self.mode.name,
            "backend": self.backend,
            "sizes": list(self._dispatcher.sizes) if self._dispatcher else [],
            "operators": self._operators,
            "support": level.name if op is None else f"{level.name}, because of {op}",
            "pieces": describe(self.pieces),
            "statistics": self.statistics.as_dict(),
        }

    def note_trace(self, graph: torch.fx.GraphModule, pieces: list[Piece], captured: int) -> None:
        """Called by the backend for each graph that it was given."""
        self.pieces, self._operators = pieces, operators_of(graph)
        self.statistics.traces += 1
        self.statistics.pieces, self.statistics.captured_pieces = len(pieces), captured

    def note_direct(self, split: Callable[[], Any], results: Any) -> None:
        """Called by the split graph while its pieces are captured."""
        self._noted = split, results

    def _run(self, choice: Choice, arguments: tuple, rows: int) -> Any:
        statistics = self.statistics
        statistics.calls[choice.mode] += 1
        if choice.reason is not None:
            statistics.fallbacks[choice.reason] += 1
        if choice.mode == "none":
            return self._call("run", self._view(arguments, choice.rows), choice.rows)
        self._addresses.check(arguments, rows, self.debug)
        statistics.replays[choice.mode, choice.rows] += 1
        statistics.live_rows += rows
        statistics.padded_rows += choice.rows
        sized = self._sized[choice.rows]
        if rows < choice.rows:
            self.signature.pad(sized, rows)
        full = choice.mode == "full"
        results = self._full[choice.rows].replay() if full else self._replay_pieces(sized, choice.rows)
        return results if rows == choice.rows or not self.signature.rows else _cut(results, rows)

    def _replay_pieces(self, sized: tuple, rows: int) -> Any:
        direct = self._direct.get(rows)
        if direct is None:
            return self._call("replay", sized, rows)
        self.phase, self.phase_rows = "replay", rows
        try:
            with torch.no_grad():
                direct[0]()
        finally:
            self.phase = "run"
        return direct[1]

    def _capture_pieces(self, sized: tuple, rows: int) -> None:
        """Capture every piece, and see whether replays may go around Dynamo: where they give the same tensors again."""
        self._noted = None
        results = self._call("capture", sized, rows)
        if self._noted is None:
            return
        split, captured = self._noted
        self.phase, self.phase_rows = "replay", rows
        try:
            with torch.no_grad():
                again = split()
        finally:
            self.phase = "run"
        if _same_tensors(again, captured):
            self._direct[rows] = split, results

    def _call(self, phase: str, arguments: tuple, rows: int) -> Any:
        self.phase, self.phase_rows = phase, rows
        try:
            if phase == "replay" or self.backend == "none":
                return self._call_compiled(arguments)
            # Dynamo may trace here. A number unlike the last one in a trace of the same code, such as another model's
            # softmax scale, would become an input that no operator takes.
            with torch._dynamo.config.patch(specialize_float=True):
                return self._call_compiled(arguments)
        finally:
            self.phase = "run"

    def _call_compiled(self, arguments: tuple) -> Any:
        if not torch.is_grad_enabled():
            return self._compiled(*arguments)
        with torch.no_grad():
            return self._compiled(*arguments)

    def _sizes_for(self, arguments: tuple) -> tuple[int, ...]:
        if not self.signature.rows:
            return (1,)
        if self._sizes is not None:
            return check_sizes(self._sizes)
        most = self.signature.num_rows(arguments)
        return check_sizes([size for size in DEFAULT_CAPTURE_SIZES if size < most] + [most])

    def _capture_all(self, arguments: tuple, sizes: tuple[int, ...]) -> None:
        self.pool = self.pool or GraphPool()
        self.pool.check_open()
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        held = {index: arguments[index].clone() for index in self.signature.padding}
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        try:
            for index, value in self.signature.padding.items():
                arguments[index].fill_(value)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), torch._dynamo.config.patch(recompile_limit=8 + 2 * len(sizes)):
                self._capture_ladder(arguments, sizes)
        except BaseException:
            self.release()
            raise
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)
            for index, value in held.items():
                arguments[index].copy_(value)
        torch.cuda.synchronize()
        self.statistics.graph_bytes = torch.cuda.memory_reserved() - before
        self._addresses = Addresses(self.signature, arguments)

    def _capture_ladder(self, arguments: tuple, sizes: tuple[int, ...]) -> None:
        # Traced at the largest size first, so that Dynamo sees a number of rows that is neither 0 nor 1.
        self._warm_up(self._view(arguments, sizes[-1]), sizes[-1])
        support = least_support(self._operators, self.supports)
        self._check_support(support)
        dispatcher = Dispatcher(self.mode, sizes, self.rows_per_request, support)
        for mode, rows in dispatcher.to_capture():
            sized = self._sized.get(rows) or self._view(arguments, rows)
            self._sized[rows] = sized
            self._warm_up(sized, rows)
            if mode == "full":
                name = f"{self.name}, {rows} rows"
                graph = CapturedGraph.capture(
                    name, lambda *sized, n=rows: self._call("run", sized, n), sized, self.pool, self.stream
                )
                self._full[rows] = graph
                self.graphs.append(graph)
                self.statistics.captures["full"] += 1
            else:
                self._capture_pieces(sized, rows)
            dispatcher.captured[mode].add(rows)
        self._dispatcher = dispatcher

    def _view(self, arguments: tuple, rows: int) -> tuple:
        """The first rows of the buffers, marked so that Dynamo compiles once for every number of rows."""
        sized = list(arguments)
        for index in self.signature.rows:
            # A view even of all rows: the mark is not for the caller's own tensor.
            sized[index] = sized[index][:rows]
            if rows > 1:
                torch._dynamo.maybe_mark_dynamic(sized[index], 0)
        return tuple(sized)

    def _warm_up(self, sized: tuple, rows: int) -> None:
        """Compile, load and autotune everything, on the stream that captures."""
        for _ in range(WARM_UP_RUNS):
            results = self._call("run", sized, rows)
        for leaf in tree_leaves(results) if self.signature.rows else ():
            if isinstance(leaf, torch.Tensor) and leaf.shape[:1] != (rows,):
                reject("fn", f"a result of shape {list(leaf.shape)} for {rows} rows", "results with a row for each row")

    def _check_support(self, support: tuple[GraphSupport, str | None]) -> None:
        level, op = support
        outside = [name for name in self._operators if self._never(name) and name not in self.splitting_ops]
        if self.mode.has_pieces and outside:
            reject("splitting_ops", list(self.splitting_ops), f"also {outside[0]}, which may not be captured")
        returning = [piece.split for piece in self.pieces if piece.split and _returns(piece.split)]
        if self.mode.has_pieces and returning:
            allowed = f"operators that write into arguments ({returning[0]} returns new tensors, which no graph finds)"
            reject("splitting_ops", list(self.splitting_ops), allowed)
        if level == GraphSupport.NEVER and not self.mode.has_pieces:
            reject("mode", self.mode.name, f"NONE or PIECEWISE, because {op} may not be captured")

    def _never(self, name: str) -> bool:
        return least_support([name], self.supports)[0] == GraphSupport.NEVER


def _own_code(function: Callable) -> Callable:
    """The function with a code object of its own. Dynamo counts compilations by code object, and gives up at the ninth;
    steps of one function (the layers of a model, say) would share that limit."""
    if isinstance(function, types.MethodType):
        return types.MethodType(_own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def _returns(op: str) -> bool:
    namespace, _, name = op.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return any(getattr(packet, overload)._schema.returns for overload in packet.overloads())


def _same_tensors(given: Any, captured: Any) -> bool:
    """Whether two results are the same objects: those of graphs, and of the caller."""
    pairs = zip(tree_leaves(given), tree_leaves(captured), strict=True)
    return all(a is b or (isinstance(a, torch.Tensor) and _is_view_of_same(a, b)) for a, b in pairs)


def _is_view_of_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
    return same and a.is_cuda


def _device_of(arguments: tuple) -> torch.device:
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _cut(results: Any, rows: int) -> Any:
    return tree_map(lambda leaf: leaf[:rows] if isinstance(leaf, torch.Tensor) else leaf, results)
