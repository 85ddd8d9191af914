"""Steps for the graph tests: a small decode, and the four-layer step in small."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_sparse_mla.commands.decode_step import PADDING, ROWS, DecodeStep, StepSizes

from ..decode.cases import make_case

ops = torch.ops.torch_sparse_mla
LAYOUT = "fp8_ds_mla"
SMALL = StepSizes(rows=4, heads=2, topk=64, context=256, hidden=64, world=2)

DECODE_ROWS = ("q", "indices", "lengths", "out", "lse")


def decode(q, cache, indices, lengths, out, lse, workspace):
    """Something before, a splitting operator, something after."""
    scaled = q * 2
    ops.sparse_ckv_decode(scaled, cache, indices, lengths, None, out, lse, workspace, 0.02, LAYOUT)
    return out.float() + 1, lse * 2


def decode_arguments(rows: int = 8, device: str = "cpu", seed: int = 0) -> tuple:
    lengths = [200, 7, 0, 1, 64, 199, 130, 3][:rows]
    case = make_case(rows=rows, heads=4, topk=200, lengths=lengths, seed=seed).to(device)
    return case.q, case.cache, case.indices, case.lengths, case.out, case.lse, case.workspace


@contextmanager
def four_layers(device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: object) -> Iterator[DecodeStep]:
    fields = {**{name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}, "dtype": dtype, **sizes}
    step = DecodeStep(StepSizes(**fields), device)
    try:
        yield step
    finally:
        step.close()


STEP = {"rows": ROWS, "padding": PADDING}
