"""Public function of the graphs family."""

from collections.abc import Callable, Collection, Mapping, Sequence

from .._ops.table import SPLITTING_OPS
from .arguments import Signature, reject
from .capture import GraphPool
from .dispatcher import check_sizes
from .modes import CUDAGraphMode, GraphSupport
from .splitting import check_splitting_ops
from .step import CompiledStep

BACKENDS = ("inductor", "eager", "none")


def compile(
    fn: Callable,
    mode: CUDAGraphMode | str | None = None,
    capture_sizes: Sequence[int] | None = None,
    splitting_ops: Sequence[str] = SPLITTING_OPS,
    *,
    rows: Sequence[str] = (),
    padding: Mapping[str, float] | None = None,
    backend: str = "inductor",
    rows_per_request: int = 1,
    supports: Mapping[str, GraphSupport] | None = None,
    pool: GraphPool | None = None,
    debug: bool = False,
) -> CompiledStep:
    """A step of a model, compiled and run by CUDA graphs. Plain PyTorch; no engine.

        step = torch_sparse_mla.compile(decode, "FULL_AND_PIECEWISE", (1, 2, 4, 8), rows=("q", "indices", "lengths"),
                                        padding={"lengths": 0})
        step.capture(q, cache, indices, lengths)            static buffers, of 8 rows or more
        out = step(q, cache, indices, lengths, num_rows=5)  replays the graph of 8 rows; `out` has 5

    Args:
        fn: a function or module of tensors, lists of them, and constants. What it computes it returns, or writes into
            arguments.
        mode: NONE (compiled, no graphs), PIECEWISE (graphs between splitting operators), FULL (one graph),
            FULL_DECODE_ONLY (FULL for uniform decode batches, NONE for others), FULL_AND_PIECEWISE (FULL for uniform
            decode batches, PIECEWISE for others). None: FULL_AND_PIECEWISE on a GPU, NONE elsewhere. A mode that needs
            graphs is refused by `capture` where there is no GPU; with None the step then runs compiled, and counts it.
        capture_sizes: numbers of rows to capture. None: powers of two up to 64 and the rows of the buffers.
        splitting_ops: qualified names of the operators that run eager between PIECEWISE graphs.
        rows: names of the parameters whose first dimension is query rows. Without any, all shapes are fixed.
        padding: of some of these, the value of padded rows: 0 for lengths, -1 for slots. Padded rows of the others hold
            whatever the buffers do.
        backend: what compiles: "inductor"; "eager", which traces and splits alone; "none", which does not even trace
            (FULL captures any Python function, PIECEWISE is refused).
        rows_per_request: rows of each request of a uniform batch.
        supports: what operators of other packages allow, by qualified name.
        pool: memory to share with other steps that never run at the same time; None: a pool of its own.
        debug: compare the address of every argument, of each piece too, at every replay.
    Returns: a `CompiledStep`.
    Raises: ValueError for an argument that does not fit.
    """
    parsed = CUDAGraphMode.FULL_AND_PIECEWISE if mode is None else CUDAGraphMode.parse(mode)
    if backend not in BACKENDS:
        reject("backend", repr(backend), ", ".join(BACKENDS))
    if backend == "none" and parsed.has_pieces:
        if mode is not None:
            reject("backend", "'none' with pieces", "inductor or eager: PIECEWISE splits a traced graph")
        parsed = CUDAGraphMode.FULL
    if not isinstance(rows_per_request, int) or rows_per_request < 1:
        reject("rows_per_request", repr(rows_per_request), "an integer, 1 or more")
    if capture_sizes is not None:
        capture_sizes = check_sizes(capture_sizes)
        if not rows:
            reject("capture_sizes", list(capture_sizes), "None where no parameter has rows: name those that have")
    for argument, names in (("splitting_ops", splitting_ops), ("rows", rows)):
        if isinstance(names, str) or not isinstance(names, Collection):
            reject(argument, repr(names), "a sequence of names")
    check_splitting_ops(splitting_ops)
    for name, support in (supports or {}).items():
        if not isinstance(support, GraphSupport):
            reject("supports", f"{support!r} for {name}", "members of GraphSupport")
    if pool is not None and not isinstance(pool, GraphPool):
        reject("pool", repr(pool), "None or a GraphPool")
    return CompiledStep(
        fn,
        parsed,
        mode is not None,
        capture_sizes,
        splitting_ops,
        Signature(fn, rows, padding or {}),
        backend,
        rows_per_request,
        supports,
        pool,
        debug,
    )
