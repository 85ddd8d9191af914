"""What each strategy should cost: a model of few terms, the same on every rank."""

import dataclasses
from typing import NamedTuple

import torch

# Of a request whose rows are not known: about 3,000 distinct tokens in four lists of 2,048. An assumption.
ASSUMED_UNION_GROWTH = 0.15


@dataclasses.dataclass(frozen=True)
class LinkCosts:
    """Figures of a link and a device, in microseconds. `warmup` measures those that are not given.

    Attributes:
        hop_us: an exchange that moves next to nothing.
        us_per_byte: a byte that a rank receives, beyond that.
        attend_local_us: attention of the local heads over whole top-k lists.
        attend_owner_us: attention of all heads over one rank's share of the lists, and the merge.
        attend_peers_us: attention of the local heads that reads every rank's cache itself; None: not possible.
        plan_us: `plan_selection`.
        slots_us: `selected_slots`.
        cover_us: how much of the travel of records that are fetched ahead is hidden by what the Full layer does
            meanwhile. Measured with its attention alone, which is all that is known here of a model: give the time of
            the whole layer where a transport works beside it. 0: none.
        union_growth: each further row of a request adds this share of a top-k list to the union. Not measured, since it
            depends on the model and its text: see `union_growth`.
    """

    hop_us: float
    us_per_byte: float
    attend_local_us: float
    attend_owner_us: float
    plan_us: float = 0.0
    slots_us: float = 0.0
    cover_us: float = 0.0
    union_growth: float = ASSUMED_UNION_GROWTH
    attend_peers_us: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "attend_peers_us":
                continue
            # Written so that NaN fails.
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(
                    f"torch_sparse_mla::LinkCosts: argument '{field.name}': got {value!r}; allowed: finite, 0 or more"
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


def predict(sizes: Sizes, costs: LinkCosts) -> list[Prediction]:
    """What each strategy should take, in order of preference where two take equally long."""
    peers, layers = sizes.world - 1, 1 + sizes.shared_layers
    hop = costs.hop_us if peers else 0.0
    merged = peers * sizes.rows * sizes.heads * (sizes.query_bytes + sizes.partial_bytes)
    union = min(1 + costs.union_growth * (sizes.rows_per_request - 1), sizes.rows_per_request) * sizes.topk
    moved = sizes.requests * union * sizes.record_bytes * peers / sizes.world
    travel = hop + moved * costs.us_per_byte
    plan, slots = costs.plan_us / layers, costs.slots_us / layers
    ahead = hop + sizes.shared_layers * moved * costs.us_per_byte if sizes.shared_layers else 0.0
    bulk = (travel + max(ahead - costs.cover_us, 0.0)) / layers
    hops = 1 if peers else 0
    bulk_hops = hops * (2 if sizes.shared_layers else 1) / layers
    owner = 2 * hop + merged * costs.us_per_byte + costs.attend_owner_us + slots
    table = [
        Prediction("owner_merge", 2 * hops, merged, owner),
        Prediction("exchange", hops, moved, travel + costs.attend_local_us + plan),
        Prediction("exchange_bulk", bulk_hops, moved, bulk + costs.attend_local_us + plan),
    ]
    if costs.attend_peers_us is not None:
        # Every selected record of every row is read, shared or not: the measured attention has that in it.
        read = sizes.rows * sizes.topk * sizes.record_bytes * peers / sizes.world
        table.append(Prediction("peer_read", hops, read, hop + costs.attend_peers_us + slots))
    return table


def union_growth(topk: torch.Tensor, rows_per_request: int) -> float:
    """The figure of that name in `LinkCosts`, from top-k lists of a real step. Reads the device.

    Args:
        topk: [requests * rows_per_request, K] positions; negative: absent.
        rows_per_request: 2 or more.
    Returns: distinct tokens that each further row brought, as a share of a row's own, averaged over requests.
    Raises: ValueError where there is no further row.
    """
    if rows_per_request < 2 or len(topk) == 0 or len(topk) % rows_per_request:
        raise ValueError(
            f"torch_sparse_mla::union_growth: argument 'topk': got {len(topk)} rows of {rows_per_request} a request; "
            "allowed: one request or more, of 2 rows or more"
        )
    growths = []
    for lists in topk.view(-1, rows_per_request, topk.shape[1]).cpu():
        united = len(lists[lists >= 0].unique())
        own = sum(len(row[row >= 0].unique()) for row in lists) / rows_per_request
        growths.append((united / own - 1) / (rows_per_request - 1) if own else 0.0)
    return sum(growths) / len(growths)
