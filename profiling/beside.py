"""A real computation with an exchange beside it: what the exchange costs the computation, and what stays exposed.

The records travel from a side stream while the main stream computes; then both join, and the main stream waits for what
arrived. Events in the graph time the computation alone.
"""

import statistics

import torch

from torch_sparse_mla import sparse_ckv_decode, sparse_ckv_decode_workspace_bytes
from torch_sparse_mla.records import LATENT_DIM, LAYOUTS, ROPE_DIM, quantise_records

from .exchanges import Exchanger
from .inputs import BLOCK_RECORDS, relative_error
from .shapes import MAIN_HEADS, MAIN_LAYOUT, ExchangeShape
from .timing import Contender

# One projection of a large model's layer: its weights alone are several times the last-level cache.
GEMM_SIZES = {"cuda": (7168, 18_432), "cpu": (256, 512)}
POOL_PAGES = {"cuda": 4096, "cpu": 16}
TOLERANCE = 1e-2


class Computation:
    """A product of `rows` activations with a weight matrix, or the attention of the Full layer, on fresh data."""

    def __init__(self, shape: ExchangeShape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(7)
        dtype = torch.bfloat16

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=device, generator=generator).to(dtype)

        if shape.beside == "gemm":
            inner, outer = GEMM_SIZES[device.type]
            self.inputs = (normal(shape.rows, inner), normal(inner, outer) * inner**-0.5)
            self.out = torch.empty(shape.rows, outer, dtype=dtype, device=device)
        else:
            layout, pages = LAYOUTS[MAIN_LAYOUT], POOL_PAGES[device.type]
            count = BLOCK_RECORDS[device.type]
            block = quantise_records(normal(count, LATENT_DIM), normal(count, ROPE_DIM), layout.name)
            cache = block.repeat(-(-pages * 64 // len(block)), 1)[: pages * 64].view(pages, 64, -1)
            indices = torch.randint(pages * 64, (shape.rows, shape.topk), device=device, generator=generator)
            q = normal(shape.rows, MAIN_HEADS, layout.query_dim)
            self.inputs = (q, cache, indices.int())
            self.out = torch.empty(shape.rows, MAIN_HEADS, LATENT_DIM, dtype=dtype, device=device)
            self.lse = torch.empty(shape.rows, MAIN_HEADS, dtype=torch.float32, device=device)
            size = sparse_ckv_decode_workspace_bytes(shape.rows, MAIN_HEADS, shape.topk)
            self.workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self.beside = shape.beside

    def run(self) -> None:
        if self.beside == "gemm":
            torch.mm(*self.inputs, out=self.out)
            return
        q, cache, indices = self.inputs
        scale = q.shape[-1] ** -0.5
        sparse_ckv_decode(
            q,
            cache,
            indices,
            softmax_scale=scale,
            layout=MAIN_LAYOUT,
            out=self.out,
            lse=self.lse,
            workspace=self.workspace,
        )


def contenders(
    shape: ExchangeShape, exchangers: list[Exchanger], num_sets: int, device: torch.device
) -> list[Contender]:
    """The computation alone, then beside each transport. Details: `compute_us`, the computation by itself."""
    computation = Computation(shape, device)
    computation.run()
    expected = computation.out.clone()
    return [
        _contender(f"{shape.beside} alone", computation, expected, None, num_sets),
        *(
            _contender(f"{shape.beside} beside {exchanger.transport}", computation, expected, exchanger, num_sets)
            for exchanger in exchangers
        ),
    ]


def _contender(
    name: str, computation: Computation, expected: torch.Tensor, exchanger: Exchanger | None, num_sets: int
) -> Contender:
    on_gpu = expected.is_cuda
    side = torch.cuda.Stream() if on_gpu else None
    events: dict[int, list[torch.cuda.Event]] = {}
    details: dict[str, float] = {}

    def call(index_set: int) -> None:
        main = torch.cuda.current_stream() if on_gpu else None
        timed = on_gpu and torch.cuda.is_current_stream_capturing()
        if exchanger is not None:
            if on_gpu:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    exchanger.start(index_set)
            else:
                exchanger.start(index_set)
        if timed:
            events[index_set] = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
            events[index_set][0].record()
        computation.run()
        if timed:
            events[index_set][1].record()
        if exchanger is not None:
            if on_gpu:
                main.wait_stream(side)
            exchanger.wait(index_set)

    def clear() -> None:
        computation.out.fill_(torch.nan)
        if exchanger is not None:
            exchanger.poison()

    def error() -> float:
        """After the last replay: also when the events were last recorded."""
        if events:
            times = [begin.elapsed_time(end) * 1e3 for begin, end in events.values()]
            details["compute_us"] = round(statistics.median(times), 3)
        # Not to the bit: a product may be split in another way under capture.
        difference = relative_error(computation.out, expected)
        return max(difference, exchanger.error() if exchanger is not None else 0.0)

    return Contender(name, call, clear, error, TOLERANCE, details)
