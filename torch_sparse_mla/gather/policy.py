"""Whether a batch's prefill gathers records or takes the ordinary DCP path: host integers only, the same on every rank.

The gather moves the context, ordinary DCP moves query heads and partial results of every row. So a long context under
few rows is dear to gather, whatever fits into the workspace; the published form has no such gate.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..contract import check_layout
from ..errors import reject
from ..records.layouts import LATENT_DIM
from .geometry import PageGeometry
from .plan import GatherPlan, checked_lengths

GATHER, ORDINARY = "gather", "ordinary"
REASONS = {
    "eligible": "the gather is possible and costs less",
    "provisional_geometry": "the page size is not frozen; call PageGeometry.freeze before serving",
    "capturing": "a CUDA graph is being captured; the gather runs in eager mode",
    "decode_tokens": "the batch has decode tokens, MTP verification among them",
    "no_rows": "the batch has no query rows",
    "requests": "more requests than reserved; raise max_requests",
    "rows": "more query rows than reserved; raise max_rows",
    "capacity": "the padded slice exceeds the workspace; raise max_tokens",
    "cost": "ordinary DCP costs less: too much context for so few rows",
}
_BFLOAT16_BYTES = 2
_LSE_BYTES = 4


@dataclass(frozen=True)
class GatherCosts:
    """Measured figures of the link, in microseconds. All that counts by default is the number of bytes received.

    Attributes:
        us_per_byte: a byte that a rank receives.
        hop_us: an exchange that moves next to nothing.
        copy_us_per_byte: a byte that a rank copies in its own memory, as it packs and as records arrive.
    """

    us_per_byte: float = 1.0
    hop_us: float = 0.0
    copy_us_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # Written so that NaN fails.
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                reject("GatherCosts", field.name, repr(value), "finite, 0 or more")


class GatherChoice(NamedTuple):
    """What a batch's sparse layers do.

    Attributes:
        path: "gather" or "ordinary".
        reason: a key of `REASONS`.
        padded: records of a rank's slice; 0 where it was not computed.
        gather_bytes, ordinary_bytes: bytes that a rank receives in each layer.
        gather_us, ordinary_us: predicted times of a layer's communication.
    """

    path: str
    reason: str
    padded: int = 0
    gather_bytes: int = 0
    ordinary_bytes: int = 0
    gather_us: float = 0.0
    ordinary_us: float = 0.0

    @property
    def gathers(self) -> bool:
        return self.path == GATHER


class GatherPolicy:
    """Chooses for each batch, and counts what it chose. Every rank must be given the same numbers.

    Args:
        geometry: of the caches.
        sizes: the reserved sizes, `Workspace.sizes`; None while the geometry is provisional: set the attribute then.
        layout: a key of `torch_sparse_mla.LAYOUTS`.
        heads: query heads of all ranks together.
        costs: measured figures; None: the number of bytes decides.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        sizes: GatherPlan | None,
        *,
        layout: str,
        heads: int,
        costs: GatherCosts | None = None,
    ) -> None:
        self.layout = check_layout("GatherPolicy", layout)
        if not isinstance(heads, int) or heads < 1 or (sizes is not None and heads % sizes.world):
            reject("GatherPolicy", "heads", repr(heads), "the heads of all ranks: a positive multiple of the world")
        if sizes is None and geometry.frozen:
            reject("GatherPolicy", "sizes", None, "Workspace.sizes, since the geometry is frozen")
        self.geometry, self.sizes, self.heads = geometry, sizes, heads
        self.costs = costs or GatherCosts()
        self.counts: collections.Counter[str] = collections.Counter()
        self.last: GatherChoice | None = None

    def choose(
        self,
        lengths: Sequence[int],
        new_lengths: Sequence[int],
        *,
        num_decode_tokens: int,
        capturing: bool = False,
    ) -> GatherChoice:
        """The path of one batch.

        Args:
            lengths: global length of each request, cached and new tokens together.
            new_lengths: query rows of each request.
            num_decode_tokens: of the whole batch, MTP verification included; the gather is for pure prefill.
            capturing: whether a CUDA graph is being captured.
        Raises: ValueError for numbers that cannot be. The choice is counted under its reason.
        """
        lengths, new_lengths = checked_lengths("GatherPolicy", lengths, new_lengths)
        if not isinstance(num_decode_tokens, int) or num_decode_tokens < 0:
            reject("GatherPolicy", "num_decode_tokens", repr(num_decode_tokens), "an integer, 0 or more")
        self.last = self._choose(lengths, sum(new_lengths), num_decode_tokens, capturing)
        self.counts[self.last.reason] += 1
        return self.last

    def explain(self) -> dict[str, object]:
        """The last choice with its reason, how often each reason came up, and the costs behind it."""
        last = self.last
        return {
            "path": last.path if last else None,
            "why": REASONS[last.reason] if last else "no batch yet",
            "last": last._asdict() if last else None,
            "counts": {reason: self.counts[reason] for reason in REASONS},
            "costs": {field.name: getattr(self.costs, field.name) for field in fields(self.costs)},
            "geometry": repr(self.geometry),
        }

    def _choose(self, lengths: Sequence[int], rows: int, num_decode_tokens: int, capturing: bool) -> GatherChoice:
        sizes = self.sizes
        checks = {
            "provisional_geometry": sizes is None or not self.geometry.frozen,
            "capturing": capturing,
            "decode_tokens": num_decode_tokens != 0,
            "no_rows": rows == 0,
        }
        for reason, applies in checks.items():
            if applies:
                return GatherChoice(ORDINARY, reason)
        padded = sizes.host_padded(lengths)
        costs = self._costs(padded, rows)
        limits = {
            "requests": len(lengths) > sizes.requests,
            "rows": rows > sizes.rows,
            "capacity": padded > sizes.capacity,
            "cost": costs[2] > costs[3],
        }
        reason = next((reason for reason, applies in limits.items() if applies), "eligible")
        return GatherChoice(GATHER if reason == "eligible" else ORDINARY, reason, padded, *costs)

    def _costs(self, padded: int, rows: int) -> tuple[int, int, float, float]:
        world, costs = self.sizes.world, self.costs
        gathered = gather_bytes(padded, self.layout.record_bytes, world)
        ordinary = ordinary_bytes(rows, self.heads, self.layout.query_dim, world)
        # Own records are packed; those of peers are copied once more as they arrive.
        copied = world * padded * self.layout.record_bytes
        hop = costs.hop_us if world > 1 else 0.0
        gather_us = hop + gathered * costs.us_per_byte + copied * costs.copy_us_per_byte
        return gathered, ordinary, gather_us, 2 * hop + ordinary * costs.us_per_byte


def gather_bytes(padded: int, record_bytes: int, world: int) -> int:
    """Bytes that a rank receives when slices of `padded` records are gathered."""
    return (world - 1) * padded * record_bytes


def ordinary_bytes(rows: int, heads: int, query_dim: int, world: int) -> int:
    """Bytes that a rank receives in ordinary DCP: the peers' query heads in bf16, then partial outputs and LSEs."""
    per_head = _BFLOAT16_BYTES * (query_dim + LATENT_DIM) + _LSE_BYTES
    return rows * (world - 1) * (heads // world) * per_head
