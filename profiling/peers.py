"""Other people's kernels, where they are installed. A peer that is missing is named in the results, never an error.

FlashMLA comes from the package `sgl-flash-mla`, which keeps Hopper and these record formats in its "legacy" half. It
serves 64 or 128 heads and a top-k that is a multiple of 64, so a rank with fewer heads runs 64, and a list is padded
with -1: that is what such a caller pays. Its scheduler metadata depends on static sizes here and is made once, outside
the timing.
"""

import importlib

import torch

from torch_sparse_mla.records import LATENT_DIM

from .inputs import DecodeInputs, relative_error
from .shapes import DecodeShape
from .timing import Contender, poison

FLASHMLA_HEADS = (64, 128)
FLASHMLA_TOPK_MULTIPLE = 64
FLASHMLA_FORMATS = {"fp8_ds_mla": "V32", "fp8_mla_nope": "V32_NO_ROPE"}
# It rounds code x scale to bf16, which alone costs 2.2e-3; ours may not.
PEER_TOLERANCE = 1e-2


class FlashMLA:
    """`flash_mla_with_kvcache` over 656-byte (or 528-byte, without RoPE) records."""

    name = "flashmla"

    def __init__(self, device: torch.device):
        self._module, self._missing = None, None
        if device.type != "cuda":
            self._missing = "runs on CUDA only"
            return
        try:
            self._module = importlib.import_module("flash_mla")
        except Exception as error:
            # A wheel for another torch or driver fails in ways of its own: OSError, RuntimeError, ImportError.
            self._missing = f"'flash_mla' does not import ({error}); run 'pip install --no-deps sgl-flash-mla==1.0.0'"

    def unavailable(self) -> str | None:
        """Why it cannot run on this device at all; None where it can."""
        return self._missing

    def unsupported(self, shape: DecodeShape) -> str | None:
        """Why it cannot run a shape; None where it can."""
        if shape.layout not in FLASHMLA_FORMATS:
            return f"no format for layout {shape.layout}"
        return None

    def prepare(self, inputs: DecodeInputs) -> Contender:
        q, index_sets = flashmla_arguments(inputs)
        records = inputs.cache.unsqueeze(2)
        last = {}

        def call(index_set: int) -> None:
            if "metadata" not in last:
                last["metadata"], _ = self._module.get_mla_metadata()
            last["out"], _ = self._module.flash_mla_with_kvcache(
                q,
                records,
                None,
                None,
                LATENT_DIM,
                last["metadata"],
                softmax_scale=inputs.softmax_scale,
                is_fp8_kvcache=True,
                indices=index_sets[index_set],
                use_legacy=True,
                kv_format=FLASHMLA_FORMATS[inputs.shape.layout],
            )

        def error() -> float:
            out = last["out"].flatten(0, 1)[inputs.oracle_rows, : inputs.shape.heads]
            return relative_error(out, inputs.oracle)

        return Contender(
            self.name, call, lambda: poison(last["out"]), error, PEER_TOLERANCE, {"padded_heads": q.shape[2]}
        )


def flashmla_arguments(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[requests, rows_per_request, 64 or 128, dim]` and lists `[sets, requests, rows_per_request, topk]`."""
    shape = inputs.shape
    requests = shape.rows // shape.rows_per_request
    heads = min(served for served in FLASHMLA_HEADS if served >= shape.heads)
    topk = -(-shape.topk // FLASHMLA_TOPK_MULTIPLE) * FLASHMLA_TOPK_MULTIPLE
    # Spare heads repeat real ones: zeros can run faster than data.
    q = inputs.q.repeat(1, -(-heads // shape.heads), 1)[:, :heads]
    q = q.reshape(requests, shape.rows_per_request, heads, shape.query_dim).contiguous()
    lists = torch.nn.functional.pad(inputs.index_sets, (0, topk - shape.topk), value=-1)
    return q, lists.view(len(lists), requests, shape.rows_per_request, topk)


PEERS = (FlashMLA,)
