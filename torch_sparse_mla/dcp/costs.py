"""What each strategy should cost: a model of few terms, the same on every rank."""

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class LinkCosts:
    """Figures of a link and a device, in microseconds. `warmup` measures those that are not given.

    Attributes:
        hop_us: an exchange that moves next to nothing.
        us_per_byte: a byte that a rank receives, beyond that.
        attend_local_us: attention of the local heads over whole top-k lists.
        attend_owner_us: attention of all heads over one rank's share of the lists, and the merge.
        plan_us: `plan_selection`.
        slots_us: looking up a rank's own slots.
        cover_us: time of the Full layer, after its exchange, under which the Shared layers' records travel; 0: none.
        union_growth: each further row of a request adds this share of a top-k list to the union.
    """

    hop_us: float
    us_per_byte: float
    attend_local_us: float
    attend_owner_us: float
    plan_us: float = 0.0
    slots_us: float = 0.0
    cover_us: float = 0.0
    union_growth: float = 0.15

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            # Written so that NaN fails.
            if not 0 <= getattr(self, field.name) < float("inf"):
                raise ValueError(
                    f"torch_sparse_mla::LinkCosts: argument '{field.name}': got {getattr(self, field.name)}; allowed: "
                    "finite, 0 or more"
                )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes that decide what is moved: those of `DcpSparseDecode`."""

    world: int
    requests: int
    rows_per_request: int
    heads: int
    topk: int
    record_bytes: int
    query_bytes: int
    partial_bytes: int
    shared_layers: int

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request


class Prediction(NamedTuple):
    """Means over a Full layer and the Shared layers that follow it; bytes are those that a rank receives."""

    strategy: str
    hops_per_layer: float
    bytes_per_layer: float
    us_per_layer: float


def predict(sizes: Sizes, costs: LinkCosts, copies_of_partials: int) -> list[Prediction]:
    """What each strategy should take, in order of preference where two take equally long."""
    peers, layers = sizes.world - 1, 1 + sizes.shared_layers
    hop = costs.hop_us if peers else 0.0
    head_rows = sizes.rows * sizes.heads
    merged = peers * head_rows * (sizes.query_bytes + copies_of_partials * sizes.partial_bytes)
    union = min(1 + costs.union_growth * (sizes.rows_per_request - 1), sizes.rows_per_request) * sizes.topk
    moved = sizes.requests * union * sizes.record_bytes * peers / sizes.world
    travel = hop + moved * costs.us_per_byte
    plan = costs.plan_us / layers
    ahead = hop + sizes.shared_layers * moved * costs.us_per_byte if sizes.shared_layers else 0.0
    bulk = (travel + max(ahead - costs.cover_us, 0.0)) / layers
    hops = 1 if peers else 0
    bulk_hops = hops * (2 if sizes.shared_layers else 1) / layers
    owner = 2 * hop + merged * costs.us_per_byte + costs.attend_owner_us + costs.slots_us / layers
    return [
        Prediction("owner_merge", 2 * hops, merged, owner),
        Prediction("exchange", hops, moved, travel + costs.attend_local_us + plan),
        Prediction("exchange_bulk", bulk_hops, moved, bulk + costs.attend_local_us + plan),
    ]
